"""The contents of a study's figures. The page draws them in the browser, ``plots.py`` draws them to files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from balnorm.study.results import Results, Setting
from balnorm.study.statistics import Spread, final, spread, values_by_epoch

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


_METRICS = {
    "test_accuracy": ("accuracy", "Test accuracy by epoch", "test accuracy", True),
    "test_loss": ("loss", "Test loss by epoch", "test loss", False),
    "train_loss": ("training-loss", "Training loss by epoch", "training loss", False),
}


def figures(results: Results) -> list[Figure]:
    """Accuracy and losses by epoch, and final accuracy against each number that varies.

    A study that varies only the norm gets panels for all, the early and the last epochs; a study that varies something
    else gets a panel for each value.
    """
    drawn = []
    variations = list(dict.fromkeys(setting.variation for setting in results.settings))
    for metric, (key, title, y_label, percent) in _METRICS.items():
        if len(variations) > 1:
            panels = [_whole(v, _curves(results, metric, v)) for v in variations]
            panels = _alike(panels)
        else:
            curves = _curves(results, metric, variations[0] if variations else "")
            panels = [_whole("all epochs", curves), *_zooms(curves, percent)]
        if any(panel.curves for panel in panels):
            drawn.append(Figure(key, title, y_label, percent, tuple(panels)))
    return [*_sweeps(results), *drawn]


def _curves(results: Results, metric: str, variation: str) -> tuple[Curve, ...]:
    curves = []
    for setting in results.settings:
        if setting.variation != variation:
            continue
        band = values_by_epoch(results.of(setting), metric)
        if not band.epochs:
            continue
        curves.append(_curve(setting.norm, band.epochs, band.spreads))
    return tuple(curves)


def _curve(norm: str, x: Sequence[float], spreads: Sequence[Spread]) -> Curve:
    return Curve(
        norm,
        tuple(map(float, x)),
        median=tuple(_finite(each.median) for each in spreads),
        low=tuple(_finite(each.low) for each in spreads),
        high=tuple(_finite(each.high) for each in spreads),
        n=tuple(each.n for each in spreads),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _whole(title: str, curves: tuple[Curve, ...]) -> Panel:
    return Panel(title, "epoch", curves, y_range=_limits(curves, -math.inf, math.inf, calm=True))


def _zooms(curves: tuple[Curve, ...], percent: bool) -> list[Panel]:
    """Panels of the first and the last quarter of the epochs, at least two epochs each; none for short runs."""
    last = max((curve.x[-1] for curve in curves), default=0.0)
    if last < 6:
        return []
    early, late = max(2.0, round(last / 4)), last - max(2.0, round(last / 4)) + 1
    ends = [curve.median[-1] for curve in curves if curve.median[-1] is not None and curve.x[-1] >= late]

    def near(curve: Curve) -> bool:
        """Whether a curve ends near the best one. The y range leaves out the others, so that the best stay apart."""
        end = curve.median[-1]
        return end is not None and bool(ends) and (end > max(ends) - 0.08 if percent else end < 2 * min(ends))

    close = tuple(curve for curve in curves if near(curve))
    return [
        Panel("early epochs", "epoch", curves, (1.0, early), _limits(curves, 1.0, early, calm=True)),
        Panel("last epochs", "epoch", curves, (late, last), _limits(close, late, last)),
    ]


def _limits(curves: Sequence[Curve], first: float, last: float, calm: bool = False) -> Range | None:
    """The range of the values between two epochs, with a margin.

    ``calm`` caps a loss at 1.3 times the median of the curves' first values, so that a spike does not flatten the rest.
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
    begins = [curve.median[0] for curve in curves if curve.median[0] is not None]
    if calm and begins and highest > 1:  # accuracies never are
        highest = min(highest, 1.3 * sorted(begins)[len(begins) // 2])
    margin = 0.05 * (highest - lowest) or 0.01
    return lowest - margin, highest + margin


def _alike(panels: list[Panel]) -> list[Panel]:
    """Give all panels the same y axis, so that they can be compared."""
    ranges = [panel.y_range for panel in panels if panel.y_range is not None]
    shared = (min(low for low, _ in ranges), max(high for _, high in ranges)) if ranges else None
    return [Panel(p.title, p.x_label, p.curves, p.x_range, shared, p.x_log) for p in panels]


# --------------------------------------------------------------------------------------------------------------------
# Final accuracy against a number that varies
# --------------------------------------------------------------------------------------------------------------------


def _sweeps(results: Results) -> list[Figure]:
    """A figure for each field with three or more numbers, with a panel for each combination of the other fields."""
    drawn = []
    names = [name for name, _ in results.settings[0].varied] if results.settings else []
    for name in names:
        values = sorted({dict(s.varied)[name] for s in results.settings if _is_number(dict(s.varied)[name])})
        if len(values) < 3:
            continue
        log = values[0] > 0 and values[-1] / values[0] >= 10
        panels = []
        for others in dict.fromkeys(_without(setting, name) for setting in results.settings):
            chosen = [s for s in results.settings if _without(s, name) == others and _is_number(dict(s.varied)[name])]
            curves = _sweep_curves(results, chosen, name)
            if curves:
                title = Setting("", others).variation or "final epoch"
                panels.append(Panel(title, name.replace("_", " "), curves, None, _limits(curves, 0, math.inf), log))
        if panels:
            title = f"Final test accuracy by {name.replace('_', ' ')}"
            drawn.append(Figure(f"by-{name.replace('_', '-')}", title, "test accuracy", True, tuple(_alike(panels))))
    return drawn


def _sweep_curves(results: Results, chosen: list[Setting], name: str) -> tuple[Curve, ...]:
    def place(setting: Setting) -> float:
        return float(dict(setting.varied)[name])

    curves = []
    for norm in dict.fromkeys(setting.norm for setting in chosen):
        points = []
        for setting in sorted((s for s in chosen if s.norm == norm), key=place):
            found = spread(list(final(results.of(setting), "test_accuracy").values()))
            if found is not None:
                points.append((place(setting), found))
        if points:
            curves.append(_curve(norm, [x for x, _ in points], [found for _, found in points]))
    return tuple(curves)


def _without(setting: Setting, name: str) -> tuple[tuple[str, object], ...]:
    return tuple((other, value) for other, value in setting.varied if other != name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
