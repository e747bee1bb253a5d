"""The tables of a study, as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from balnorm.bench.study.metrics import change, is_share, number, worst
from balnorm.bench.study.results import Results
from balnorm.bench.study.statistics import Difference, Differences, Spread, epochs_to_reach, final_spread, spread
from balnorm.bench.training.run import Run
from balnorm.text_table import text_table

__all__ = ["Cell", "Table", "as_csv", "as_latex", "as_markdown", "as_text", "study_tables"]


@dataclass(frozen=True)
class Cell:
    """The text shown, and the values behind it by their names in the CSV file. The first sorts its column."""

    text: str
    raw: dict[str, float | str | None]


@dataclass(frozen=True)
class Table:
    key: str
    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def texts(self) -> list[list[str]]:
        return [[cell.text for cell in row] for row in self.rows]


_DECIDE_THE_COST = ("processor", "gpu", "threads", "backend", "torch", "balnorm", "file")


def study_tables(results: Results, levels: Sequence[float], differences: Differences) -> list[Table]:
    """Final results, differences to the baseline if there are any, and cost."""
    machines = {tuple(machine.get(name) for name in _DECIDE_THE_COST) for machine in results.environments}
    metric, (_, quantity) = results.metric, results.metrics.get(results.metric, ("", ""))
    mixed = " They come from several machines or versions: compare them with care." if len(machines) > 1 else ""
    tables = {
        "results": (
            "Results after the last epoch",
            "After the last epoch: median (quartiles) over n runs. Runs that diverged count, as worse than any other; "
            "failed and unfinished ones do not.",
            {setting: _final_row(runs, results) for setting, runs in results.by_setting.items()},
        ),
        "differences": (
            f"Difference to {differences.baseline}, seed by seed",
            f"{quantity.capitalize()} after the last epoch minus that of {differences.baseline} with the same seed and "
            f"all else alike: the median{' in percentage points' * is_share(metric)}, with a bootstrap interval over "
            "seeds; and how often a run beats one of the baseline, over all pairs.",
            {setting: _difference_row(found, metric) for setting, found in differences.by_setting.items()},
        ),
        "cost": (
            "Speed and memory",
            f"Median (quartiles). The epochs are those until the {quantity} was first reached. Times are those of "
            "the runs, with whatever else the machine did; peak memory is that of the whole process, or of the GPU."
            + mixed,
            {setting: _cost_row(runs, levels, metric) for setting, runs in results.by_setting.items()},
        ),
    }
    made = []
    for key, (title, note, by_setting) in tables.items():
        rows = [{"setting": Cell(str(s), {"setting": str(s)}), **row} for s, row in by_setting.items()]
        if rows:
            made.append(Table(key, title, note, tuple(rows[0]), tuple(tuple(row.values()) for row in rows)))
    return made


def as_text(table: Table) -> str:
    return text_table(table.header, table.texts)


def as_markdown(table: Table) -> str:
    """A heading, the table, and its note."""
    lines = [f"| {' | '.join(cell.translate(_MARKDOWN) for cell in row)} |" for row in (table.header, *table.texts)]
    lines.insert(1, "|---|" + "---:|" * (len(table.header) - 1))
    return "\n".join([f"### {table.title}", "", *lines, "", table.note, ""])


def as_latex(table: Table) -> str:
    """A tabular that uses the package booktabs."""
    lines = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in (table.header, *table.texts)]
    head = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", r"\toprule"]
    return "\n".join([*head, lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


def as_csv(table: Table) -> str:
    """The numbers without rounding, accuracies as fractions; empty if there is no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([name for cell in table.rows[0] for name in cell.raw])
    writer.writerows([value for cell in row for value in cell.raw.values()] for row in table.rows)
    return text.getvalue()


_MARKDOWN = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": " "} | {character: "\\" + character for character in "\\`*[]|"}
)
_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"–": "--", "∞": r"$\infty$"}  # noqa: RUF001
    | {character: "\\" + character for character in "&%$#_{}"}
)


# --------------------------------------------------------------------------------------------------------------------
# Rows: the cells by their headings
# --------------------------------------------------------------------------------------------------------------------


def _final_row(runs: Sequence[Run], results: Results) -> dict[str, Cell]:
    states = [run.state for run in runs]

    def cell(name: str) -> Cell:
        # A median of 0 is that of diverged runs, if there are any.
        bad = worst(name) if "diverged" in states else math.nan
        return _spread(name, final_spread(runs, name), ".2f" if is_share(name) else None, bad)

    return {
        "n": Cell(str(n := states.count("finished") + states.count("diverged")), {"n": n}),
        **{label + ", %" * is_share(name): cell(name) for name, (_, label) in results.metrics.items()},
        "diverged": _count("diverged", states.count("diverged")),
        "failed": _count("failed", states.count("failed")),
        "unfinished": _count("unfinished", states.count("unfinished") + states.count("new")),
    }


def _difference_row(found: Difference, metric: str) -> dict[str, Cell]:
    interval = Cell("too few seeds", {"difference_low": None, "difference_high": None})
    if found.interval:
        text = f"{change(metric, found.low)} to {change(metric, found.high)}"
        interval = Cell(text, {"difference_low": found.low, "difference_high": found.high})
    return {
        "seeds": _count("seeds", found.n),
        "difference" + ", points" * is_share(metric): Cell(change(metric, found.median), {"difference": found.median}),
        "95% interval": interval,
        "probability of improvement": Cell(
            f"{found.improvement:.2f}", {"probability_of_improvement": found.improvement}
        ),
    }


def _cost_row(runs: Sequence[Run], levels: Sequence[float], metric: str) -> dict[str, Cell]:
    def epochs_to(level: float) -> Cell:
        reached = spread(epochs_to_reach(runs, level, metric))
        return _spread(f"epochs_to_{level:g}", reached, ".3g", math.inf, "not reached")

    seconds = [record["seconds"] for run in runs for record in run.records]
    memory: list[list[Any]] = [[record.get("peak_memory") for record in run.records] for run in runs]
    peaks = [max(of_run) / 2**20 for of_run in memory if of_run and None not in of_run]
    return {
        **{
            f"epochs to {f'{100 * level:g}%' if is_share(metric) else f'{level:g}'}": epochs_to(level)
            for level in levels
        },
        "seconds an epoch": _spread("seconds_per_epoch", spread(seconds), ".2f"),
        "peak memory, MiB": _spread("peak_memory_mib", spread(peaks), ".0f"),
    }


def _count(name: str, number: int) -> Cell:
    return Cell(str(number or ""), {name: number})


def _spread(name: str, found: Spread | None, form: str | None, bad: float = math.nan, called: str = "diverged") -> Cell:
    """Median and quartiles, shares in percent; one value alone; a median that is ``bad`` is written as a word."""
    names = (name, f"{name}_low", f"{name}_high")
    if found is None:
        return Cell("", dict.fromkeys(names))
    values = (found.median, found.low, found.high)
    scale = 100 if is_share(name) else 1
    median, low, high = (number(value, form) if math.isinf(value) else number(scale * value, form) for value in values)
    text = f"{median} ({low}–{high})" if found.n > 1 else median  # noqa: RUF001
    text = called if found.median == bad else text
    return Cell(text, dict(zip(names, values, strict=True)))
