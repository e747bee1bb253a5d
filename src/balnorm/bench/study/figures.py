"""The contents of a study's figures. The page draws them in the browser, ``plots.py`` draws them to files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from balnorm.bench.norms import NORMS, Style
from balnorm.bench.study.metrics import is_share, lower_is_better
from balnorm.bench.study.results import Results, Setting
from balnorm.bench.study.statistics import Spread, final_spread, values_by_epoch

__all__ = ["Curve", "Figure", "Panel", "figures", "styles_of"]

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
    styles: dict[str, Style]
    """How to draw each norm."""


def styles_of(norms: Sequence[str]) -> dict[str, Style]:
    """The style of each norm. Those with names of the user's own take colours that the others leave free."""
    known = {norm: NORMS[norm].style for norm in norms if norm in NORMS}
    every = {style: None for norm in NORMS.values() for style in (norm.style, Style(norm.style.colour))}
    used = {style.colour for style in known.values()}
    free = sorted(
        (style for style in every if style not in known.values()),
        key=lambda style: (style.colour in used, style.dash != "solid"),
    )
    return known | dict(zip((norm for norm in norms if norm not in known), itertools.cycle(free), strict=False))


def figures(results: Results) -> list[Figure]:
    """The metrics by epoch, and the final value of the leading one against each number that varies.

    A study that varies only the norm gets panels for all, the early and the last epochs; a study that varies something
    else gets a panel for each value.
    """
    drawn, styles = [], styles_of(results.norms)
    for metric, (key, quantity) in results.metrics.items():
        curves: dict[str, list[Curve]] = {}
        for setting, runs in results.by_setting.items():
            own = curves.setdefault(setting.variation, [])
            if found := values_by_epoch(runs, metric):
                own.append(_curve(setting.norm, found))
        everything = [curve for own in curves.values() for curve in own]
        limits = _limits(everything, lower_is_better(metric))  # of all, to compare panels
        panels = [
            Panel(variation or "all epochs", "epoch", tuple(own), y_range=limits) for variation, own in curves.items()
        ]
        if len(panels) == 1:
            panels += _zooms(panels[0].curves, metric)
        if any(panel.curves for panel in panels):
            title = f"{quantity.capitalize()} by epoch"
            drawn.append(Figure(key, title, quantity, is_share(metric), tuple(panels), styles))
    return [*_sweeps(results), *drawn]


def _curve(norm: str, spreads: Mapping[int, Spread] | Mapping[float, Spread]) -> Curve:
    def finite(name: str) -> tuple[float | None, ...]:
        values = [getattr(each, name) for each in spreads.values()]
        return tuple(value if math.isfinite(value) else None for value in values)

    x, n = tuple(map(float, spreads)), tuple(each.n for each in spreads.values())
    return Curve(norm, x, finite("median"), finite("low"), finite("high"), n)


def _zooms(curves: tuple[Curve, ...], metric: str) -> list[Panel]:
    """Panels of the first and the last quarter of the epochs, at least four epochs each; none for short runs."""
    last = max((curve.x[-1] for curve in curves), default=0.0)
    if last < 8:
        return []
    early = max(4.0, round(last / 4))
    late = last - early + 1
    ends = [end for curve in curves if curve.x[-1] >= late and (end := curve.median[-1]) is not None]

    def near(end: float) -> bool:
        """Whether a curve ends near the best one. The y range leaves out the others, so that the best stay apart."""
        if lower_is_better(metric):
            return end < min(ends) + abs(min(ends))
        return end > max(ends) - (0.08 if is_share(metric) else 0.1 * abs(max(ends)))

    close = [curve for curve in curves if ends and (end := curve.median[-1]) is not None and near(end)]
    return [
        Panel("early epochs", "epoch", curves, (1.0, early), _limits(curves, lower_is_better(metric), 1.0, early)),
        Panel("last epochs", "epoch", curves, (late, last), _limits(close, False, late, last)),
    ]


def _limits(
    curves: Sequence[Curve], calm: bool = False, first: float = -math.inf, last: float = math.inf
) -> Range | None:
    """The range of the values between two epochs, with a margin.

    ``calm`` caps those of a loss at 1.3 times the median of the curves' first values, so that neither a spike nor a
    setting that diverges flattens the rest.
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
    if calm and begins and highest > 1 and begins[len(begins) // 2] > 0:
        highest = min(highest, 1.3 * begins[len(begins) // 2])
    margin = 0.05 * (highest - lowest) or 0.01
    return lowest - margin, highest + margin


def _sweeps(results: Results) -> list[Figure]:
    """The final leading metric against each field with three or more numbers, with a panel for each of the others."""
    drawn, metric, styles = [], results.metric, styles_of(results.norms)
    for name, _ in next(iter(results.by_setting)).varied:
        numbers: set[float] = set()
        points: dict[Any, dict[str, dict[float, Spread]]] = {}  # by the other fields, then by norm
        for setting, runs in results.by_setting.items():  # which are sorted by all fields, so by this one too
            x, others = dict(setting.varied)[name], tuple(pair for pair in setting.varied if pair[0] != name)
            if isinstance(x, int | float) and not isinstance(x, bool):
                numbers.add(x)
                own = points.setdefault(others, {}).setdefault(setting.norm, {})
                if found := final_spread(runs, metric):
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
            key, quantity = f"by-{name.replace('_', '-')}", results.metrics[metric][1]
            drawn.append(Figure(key, f"Final {quantity} by {label}", quantity, is_share(metric), panels, styles))
    return drawn
