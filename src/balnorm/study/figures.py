"""The contents of a study's figures. The page draws them in the browser, ``plots.py`` draws them to files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from balnorm.study.results import Results, Setting
from balnorm.study.statistics import Spread, final_spread, values_by_epoch

__all__ = ["Curve", "Figure", "Panel", "figures"]

Range = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """A line with its band. Infinite values, which come from diverged runs, are ``None``."""

    norm: str
    x: tuple[float, ...]
    median: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    n: tuple[int, ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    curves: tuple[Curve, ...]
    x_range: Range | None = None
    y_range: Range | None = None
    x_log: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels side by side with the same quantity on the y axis."""

    key: str
    title: str
    y_label: str
    percent: bool
    panels: tuple[Panel, ...]


_METRICS = {  # the figure's key, its quantity, and whether that is a share
    "test_accuracy": ("accuracy", "test accuracy", True),
    "test_loss": ("loss", "test loss", False),
    "train_loss": ("training-loss", "training loss", False),
}


def figures(results: Results) -> list[Figure]:
    """Accuracy and losses by epoch, and final accuracy against each number that varies.

    A study that varies only the norm gets panels for all, the early and the last epochs; a study that varies something
    else gets a panel for each value.
    """
    drawn = []
    for metric, (key, quantity, percent) in _METRICS.items():
        curves: dict[str, list[Curve]] = {}
        for setting, runs in results.by_setting.items():
            own = curves.setdefault(setting.variation, [])
            if found := values_by_epoch(runs, metric):
                own.append(_curve(setting.norm, found))
        limits = _limits([curve for own in curves.values() for curve in own], calm=True)  # of all, to compare panels
        panels = [
            Panel(variation or "all epochs", "epoch", tuple(own), y_range=limits) for variation, own in curves.items()
        ]
        if len(panels) == 1:
            panels += _zooms(panels[0].curves, percent)
        if any(panel.curves for panel in panels):
            drawn.append(Figure(key, f"{quantity.capitalize()} by epoch", quantity, percent, tuple(panels)))
    return [*_sweeps(results), *drawn]


def _curve(norm: str, spreads: Mapping[int, Spread] | Mapping[float, Spread]) -> Curve:
    def finite(name: str) -> tuple[float | None, ...]:
        values = [getattr(each, name) for each in spreads.values()]
        return tuple(value if math.isfinite(value) else None for value in values)

    x, n = tuple(map(float, spreads)), tuple(each.n for each in spreads.values())
    return Curve(norm, x, finite("median"), finite("low"), finite("high"), n)


def _zooms(curves: tuple[Curve, ...], percent: bool) -> list[Panel]:
    """Panels of the first and the last quarter of the epochs, at least four epochs each; none for short runs."""
    last = max((curve.x[-1] for curve in curves), default=0.0)
    if last < 8:
        return []
    early = max(4.0, round(last / 4))
    late = last - early + 1
    ends = [end for curve in curves if curve.x[-1] >= late and (end := curve.median[-1]) is not None]

    def near(end: float) -> bool:
        """Whether a curve ends near the best one. The y range leaves out the others, so that the best stay apart."""
        return end > max(ends) - 0.08 if percent else end < 2 * min(ends)

    close = [curve for curve in curves if ends and (end := curve.median[-1]) is not None and near(end)]
    return [
        Panel("early epochs", "epoch", curves, (1.0, early), _limits(curves, 1.0, early, calm=True)),
        Panel("last epochs", "epoch", curves, (late, last), _limits(close, late, last)),
    ]


def _limits(
    curves: Sequence[Curve], first: float = -math.inf, last: float = math.inf, calm: bool = False
) -> Range | None:
    """The range of the values between two epochs, with a margin.

    ``calm`` caps a loss at 1.3 times the median of the curves' first values, so that neither a spike nor a setting
    that diverges flattens the rest.
    """
    values = [
        value
        for curve in curves
        for x, *spread in zip(curve.x, curve.low, curve.median, curve.high, strict=True)
        for value in spread
        if first <= x <= last and value is not None
    ]
    if not values:
        return None
    lowest, highest = min(values), max(values)
    begins = sorted(curve.median[0] for curve in curves if curve.median[0] is not None)
    if calm and begins and highest > 1:  # accuracies never are
        highest = min(highest, 1.3 * begins[len(begins) // 2])
    margin = 0.05 * (highest - lowest) or 0.01
    return lowest - margin, highest + margin


def _sweeps(results: Results) -> list[Figure]:
    """Final accuracy against each field with three or more numbers, with a panel for each combination of the others."""
    drawn = []
    for name, _ in next(iter(results.by_setting)).varied:
        numbers: set[float] = set()
        points: dict[Any, dict[str, dict[float, Spread]]] = {}  # by the other fields, then by norm
        for setting, runs in results.by_setting.items():  # which are sorted by all fields, so by this one too
            x, others = dict(setting.varied)[name], tuple(pair for pair in setting.varied if pair[0] != name)
            if isinstance(x, int | float) and not isinstance(x, bool):
                numbers.add(x)
                own = points.setdefault(others, {}).setdefault(setting.norm, {})
                if found := final_spread(runs):
                    own[x] = found
        if len(numbers) < 3:
            continue
        log = min(numbers) > 0 and max(numbers) / min(numbers) >= 10
        label, curves = name.replace("_", " "), {}
        for others, by_norm in points.items():
            if lines := tuple(_curve(norm, spreads) for norm, spreads in by_norm.items() if spreads):
                curves[Setting("", others).variation or "final epoch"] = lines
        if curves:
            limits = _limits([curve for lines in curves.values() for curve in lines])
            panels = tuple(Panel(title, label, lines, None, limits, log) for title, lines in curves.items())
            key, title = f"by-{name.replace('_', '-')}", f"Final test accuracy by {label}"
            drawn.append(Figure(key, title, "test accuracy", True, panels))
    return drawn
