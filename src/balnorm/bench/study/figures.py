"""The contents of a study's figures. The page draws them in the browser, ``plots.py`` draws them to files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from balnorm.bench.study.metrics import is_share, lower_is_better
from balnorm.bench.study.results import Results
from balnorm.bench.study.statistics import Spread, final_spread, seconds_by_epoch, values_by_epoch

__all__ = ["STYLES", "Curve", "Figure", "Panel", "Style", "figures", "styles_of"]

Range = tuple[float, float]


@dataclass(frozen=True)
class Style:
    """How to draw a method."""

    colour: str
    dash: Literal["solid", "dashed", "dotted"] = "solid"


# The palette of Okabe and Ito, which colour-blind readers can tell apart, with a few of Paul Tol's muted colours.
# Related methods share a colour and differ in their dashes, so that nobody has to tell more colours apart.
_BLUE, _SKY, _PINK, _WINE, _RED, _GREEN, _ORANGE, _GREY, _FOREST = (
    *("#0072B2", "#56B4E9", "#CC79A7", "#A0305F", "#D55E00", "#009E73", "#E69F00", "#7A7A7A", "#117733"),
)
STYLES = {
    "balnorm": Style(_BLUE),
    "balnorm one_pass=False": Style(_BLUE, "dashed"),
    "balnorm mass=position": Style(_SKY),
    "balnorm stats_fraction=0.25": Style(_BLUE, "dotted"),
    "balnorm output_scale=1.0": Style(_PINK),
    "balnorm one_pass=False mass=position": Style(_SKY, "dashed"),
    "balnorm one_pass=False output_scale=1.0": Style(_PINK, "dashed"),
    "balnorm mass=position output_scale=1.0": Style(_WINE),
    "balnorm one_pass=False mass=position output_scale=1.0": Style(_WINE, "dashed"),
    "batchnorm": Style(_RED),
    "batchnorm stats_fraction=0.25": Style(_RED, "dotted"),
    "groupnorm": Style(_GREEN),
    "layernorm": Style(_GREEN, "dashed"),
    "instancenorm": Style(_GREEN, "dotted"),
    "batchrenorm": Style(_RED, "dashed"),
    "weightnorm": Style(_ORANGE),
    "weightnorm-meanonly": Style(_ORANGE, "dashed"),
    "lrn": Style(_GREY, "dashed"),
    "weightstandardization": Style(_ORANGE, "dotted"),
    "weightstandardization-scaled": Style(_FOREST),
    "frn": Style(_FOREST, "dashed"),
    "dynamictanh": Style(_FOREST, "dotted"),
    "none": Style(_GREY),
}
"""How every figure draws a method. Other methods take the colours that are left."""


@dataclass(frozen=True)
class Curve:
    """A line with its band. Infinite values, which come from diverged runs, are ``None``."""

    norm: str
    """The method: the norm and its options."""
    x: tuple[float, ...]
    median: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    n: tuple[int, ...]
    settings: tuple[str, ...] = ()
    """The setting of all points, or of each. The page finds the single runs by it."""
    seconds: tuple[float, ...] = ()
    """How long it takes to the end of each epoch, where x is the epoch."""


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
    """How to draw each method."""
    metric: str = ""
    """The name of the quantity in the records."""
    loss: bool = False
    """Whether less is better."""


def styles_of(methods: Sequence[str]) -> dict[str, Style]:
    """The style of each method. Methods without one take colours that are left."""
    known = {method: STYLES[method] for method in methods if method in STYLES}
    every = {each: None for style in STYLES.values() for each in (style, Style(style.colour))}
    used = {style.colour for style in known.values()}
    free = sorted(
        (style for style in every if style not in known.values()),
        key=lambda style: (style.colour in used, style.dash != "solid"),
    )
    return known | dict(zip((each for each in methods if each not in known), itertools.cycle(free), strict=False))


def figures(results: Results) -> list[Figure]:
    """The metrics by epoch, and the final value of the leading one against each number that varies.

    A study that varies only the norm and its options gets panels for all, the early and the last epochs; a study that
    varies something else gets a panel for each value.
    """
    drawn, styles = [], styles_of(results.methods)
    for metric, (key, quantity) in results.metrics.items():
        curves: dict[str, list[Curve]] = {}
        for setting, runs in results.by_setting.items():
            own = curves.setdefault(setting.variation, [])
            if found := values_by_epoch(runs, metric):
                own.append(_curve(setting.method, found, [str(setting)], seconds_by_epoch(runs)))
        everything = [curve for own in curves.values() for curve in own]
        limits = _limits(everything, lower_is_better(metric))  # of all, to compare panels
        panels = [
            Panel(variation or "all epochs", "epoch", tuple(own), y_range=limits) for variation, own in curves.items()
        ]
        if len(panels) == 1:
            panels += _zooms(panels[0].curves, metric)
        if any(panel.curves for panel in panels):
            title = f"{quantity.capitalize()} by epoch"
            less = lower_is_better(metric)
            drawn.append(Figure(key, title, quantity, is_share(metric), tuple(panels), styles, metric, less))
    return [*_sweeps(results), *drawn]


def _curve(
    norm: str,
    spreads: Mapping[int, Spread] | Mapping[float, Spread],
    settings: Iterable[str],
    seconds: Iterable[float] = (),
) -> Curve:
    def finite(name: str) -> tuple[float | None, ...]:
        values = [getattr(each, name) for each in spreads.values()]
        return tuple(value if math.isfinite(value) else None for value in values)

    x, n = tuple(map(float, spreads)), tuple(each.n for each in spreads.values())
    times = tuple(round(each, 3) for each in seconds)
    return Curve(norm, x, finite("median"), finite("low"), finite("high"), n, tuple(settings), times)


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
    drawn, metric = [], results.metric
    settings = {setting: runs[0].recipe for setting, runs in results.by_setting.items()}
    for name in dict.fromkeys(name for setting in settings for name, _ in (*setting.varied, *setting.options)):
        numbers: set[float] = set()
        points: dict[str, dict[str, dict[float, tuple[Spread, str]]]] = {}  # by the other fields, then by method
        for setting, recipe in settings.items():
            x, others = recipe.fields.get(name), setting.without(name)
            if isinstance(x, int | float) and not isinstance(x, bool) and name not in recipe.idle():
                numbers.add(x)
                own = points.setdefault(others.variation, {}).setdefault(others.method, {})
                if found := final_spread(results.by_setting[setting], metric):
                    own[x] = found, str(setting)
        if len(numbers) < 3:
            continue
        log = min(numbers) > 0 and max(numbers) / min(numbers) >= 10
        label, curves = name.replace("_", " "), {}
        for variation, by_method in points.items():
            lines = {method: sorted(found.items()) for method, found in by_method.items() if found}
            if lines:
                curves[variation or "final epoch"] = tuple(
                    _curve(method, {x: found for x, (found, _) in line}, [setting for _, (_, setting) in line])
                    for method, line in lines.items()
                )
        if curves:
            limits = _limits([curve for lines in curves.values() for curve in lines])
            panels = tuple(Panel(title, label, lines, None, limits, log) for title, lines in curves.items())
            key, quantity = f"by-{name.replace('_', '-')}", results.metrics[metric][1]
            methods = (curve.norm for panel in curves.values() for curve in panel)
            styles = styles_of(list(dict.fromkeys([*results.methods, *methods])))
            title, less = f"Final {quantity} by {label}", lower_is_better(metric)
            drawn.append(Figure(key, title, quantity, is_share(metric), panels, styles, metric, less))
    return drawn
