"""Figures as files: SVG, PNG and PDF. The same study gives the same bytes."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from balnorm.bench.console import printable
from balnorm.bench.study.figures import Figure, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["FORMATS", "figure_files", "picture"]

FORMATS = ("svg", "png", "pdf")

_LOOK: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "balnorm",  # otherwise the names inside differ every time
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is no formula
}
_DARK = {  # for whoever prefers dark pages; the methods keep their colours
    "fill: #ffffff": "12161b",
    "fill: #666666": "9aa4af",
    "stroke: #000000": "9aa4af",
    "stroke: #404040": "b7c0c9",
    "stroke: #4c4c4c": "b7c0c9",
    "stroke: #e6e6e6": "2b333c",
}
_WIDTH, _HEIGHT, _COLUMNS = 3.4, 2.7, 3
_DASHES = {"solid": "-", "dashed": (0, (4, 1.6)), "dotted": (0, (1, 1.4))}


def figure_files(figure: Figure, formats: Sequence[str] = FORMATS) -> dict[str, bytes]:
    """Draw a figure. Returns the contents of its files by name."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    columns = min(_COLUMNS, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    files = {}
    with mpl.rc_context(_LOOK), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters that the font lacks
        width = _WIDTH * max(columns, 1.6) + 0.3
        canvas = Canvas(figsize=(width, _HEIGHT * rows + 0.7), layout="constrained")
        places = canvas.subplots(rows, columns, squeeze=False).ravel()
        for panel, place in zip(figure.panels, places, strict=False):
            _draw(panel, place, figure)
        for place in places[len(figure.panels) :]:
            place.remove()
        lines = {str(line.get_label()): line for place in canvas.axes for line in place.lines}
        widest = 0.7 + 0.075 * max(map(len, lines), default=0)  # inches of an entry in the legend, about
        most = max(1, min(4, int(width / widest)))
        beside = math.ceil(len(lines) / math.ceil(len(lines) / most)) if lines else 1  # rows of about the same length
        canvas.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=beside, handlelength=3)
        canvas.suptitle(printable(figure.title), fontsize=10.5, fontweight="bold")
        for kind in formats:
            files[f"{figure.key}.{kind}"] = picture(canvas, kind)
    return files


def picture(canvas: Canvas, kind: str) -> bytes:
    """The contents of a file with a drawing of matplotlib's. An SVG also has colours for dark pages."""
    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    canvas.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    if kind != "svg":
        return buffer.getvalue()
    rules = ["svg { fill: #e6edf3 }"]  # the text, which has no colour of its own
    for light, dark in _DARK.items():
        rules.append(f'[style*="{light}"] {{ {light.split(":")[0]}: #{dark} !important }}')
    sheet = f"\n   @media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    return buffer.getvalue().replace(b"</style>", sheet.encode(), 1)


def _draw(panel: Panel, axes: Axes, figure: Figure) -> None:
    if panel.x_log:
        axes.set_xscale("log")
        axes.set_xticks(sorted({x for curve in panel.curves for x in curve.x}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    for curve in panel.curves:
        look = figure.styles[curve.norm]
        median, low, high = (np.array(values, float) for values in (curve.median, curve.low, curve.high))  # None: nan
        marker = "o" if figure.key.startswith("by-") or len(curve.x) == 1 else ""
        axes.plot(
            curve.x, median, color=look.colour, linestyle=_DASHES[look.dash], linewidth=1.5, label=curve.norm,
            marker=marker, markersize=4,
        )  # fmt: skip
        axes.fill_between(curve.x, low, high, color=look.colour, alpha=0.15, linewidth=0)
    if panel.curves and all(value is None for curve in panel.curves for value in curve.median):
        axes.update_datalim([(x, 0) for curve in panel.curves for x in curve.x])  # the axis of the other panels
        axes.text(0.5, 0.5, "diverged", transform=axes.transAxes, ha="center", va="center", color="0.5")
    if panel.x_range is not None:
        axes.set_xlim(*panel.x_range)
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    if not panel.x_log:
        axes.locator_params(axis="x", integer=True)
    if figure.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.6g}%")
    axes.set_title(printable(panel.title), fontsize=9)
    axes.set_xlabel(printable(panel.x_label))
    if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
        axes.set_ylabel(figure.y_label)
