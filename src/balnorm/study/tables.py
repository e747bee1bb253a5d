"""The tables of a study, as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from balnorm.study.results import Result, Results
from balnorm.study.statistics import Difference, Differences, Spread, epochs_to_reach, final, spread
from balnorm.text_table import text_table

__all__ = ["Cell", "Table", "as_csv", "as_latex", "as_markdown", "as_text", "study_tables"]

Raw = float | str | None


@dataclass(frozen=True)
class Cell:
    """The text shown, and the numbers behind it."""

    text: str
    raw: tuple[Raw, ...]

    @property
    def sort(self) -> Raw:
        """The value to sort a column by; ``None`` comes last."""
        return self.raw[0]


@dataclass(frozen=True)
class Table:
    key: str
    title: str
    columns: tuple[tuple[str, tuple[str, ...]], ...]
    """Each column's heading, and the names of its numbers in the CSV file."""
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    @property
    def header(self) -> list[str]:
        return [heading for heading, _ in self.columns]

    @property
    def texts(self) -> list[list[str]]:
        return [[cell.text for cell in row] for row in self.rows]


def study_tables(results: Results, levels: Sequence[float], differences: Differences) -> list[Table]:
    """Final results, differences to the baseline, and cost."""
    tables = [_final_table(results), _difference_table(differences), _cost_table(results, levels)]
    return [table for table in tables if table.rows]


def as_text(table: Table) -> str:
    return text_table(table.header, table.texts)


def as_markdown(table: Table) -> str:
    """A heading, the table, and its note."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(map(_plain, cells)) + " |"

    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(table.columns))) + "|"
    lines = [f"### {table.title}", "", line(table.header), rule, *map(line, table.texts)]
    return "\n".join([*lines, *(["", table.note] if table.note else [])]) + "\n"


def as_latex(table: Table) -> str:
    """A tabular that uses the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_escaped, cells)) + r" \\"

    head = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", r"\toprule"]
    body = [line(table.header), r"\midrule", *map(line, table.texts), r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*head, *body]) + "\n"


def as_csv(table: Table) -> str:
    """The numbers without rounding, accuracies as fractions; empty where there is no value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([name for _, names in table.columns for name in names])
    for row in table.rows:
        writer.writerow(["" if value is None else value for cell in row for value in cell.raw])
    return text.getvalue()


# --------------------------------------------------------------------------------------------------------------------
# The tables
# --------------------------------------------------------------------------------------------------------------------


def _final_table(results: Results) -> Table:
    rows = []
    for setting in results.settings:
        runs = results.of(setting)
        accuracy = spread(list(final(runs, "test_accuracy").values()))
        cells = [Cell(str(setting), (str(setting),)), _count(accuracy.n if accuracy else 0, zero="0")]
        cells += [_percents(accuracy, diverged=any(run.state == "diverged" for run in runs))]
        cells += [_spread(spread(list(final(runs, name).values())), ".3f") for name in ("test_loss", "train_loss")]
        cells += [_count(sum(run.state == s for run in runs)) for s in ("diverged", "failed")]
        cells += [_count(sum(run.state in ("unfinished", "new") for run in runs))]
        rows.append(tuple(cells))
    columns = (
        ("setting", ("setting",)),
        ("n", ("n",)),
        ("test accuracy, %", _three("test_accuracy")),
        ("test loss", _three("test_loss")),
        ("training loss", _three("train_loss")),
        ("diverged", ("diverged",)),
        ("failed", ("failed",)),
        ("unfinished", ("unfinished",)),
    )
    note = (
        "After the last epoch: median (quartiles) over n runs. Runs that diverged are among the n, as worse than any "
        "other; failed and unfinished ones are not."
    )
    return Table("results", "Results after the last epoch", columns, tuple(rows), note)


def _difference_table(differences: Differences) -> Table:
    baseline = differences.baseline
    rows = [
        (Cell(str(setting), (str(setting),)), *_difference_cells(found))
        for setting, found in differences.by_setting.items()
    ]
    columns = (
        ("setting", ("setting",)),
        ("seeds", ("seeds",)),
        ("difference, points", ("difference",)),
        ("95% interval", ("difference_low", "difference_high")),
        ("probability of improvement", ("probability_of_improvement",)),
    )
    note = (
        f"Test accuracy after the last epoch minus that of {baseline} with the same seed and all else alike: the "
        "median in percentage points, with a bootstrap interval over seeds; and how often a run beats one of the "
        "baseline, over all pairs."
    )
    return Table("differences", f"Difference to {baseline}, seed by seed", columns, tuple(rows), note)


def _cost_table(results: Results, levels: Sequence[float]) -> Table:
    rows = []
    for setting in results.settings:
        runs = results.of(setting)
        cells = [Cell(str(setting), (str(setting),))]
        cells += [_epochs(spread(epochs_to_reach(runs, level))) for level in levels]
        cells += [_spread(spread([r["seconds"] for run in runs for r in run.records]), ".2f")]
        memory = [max(r["peak_memory"] for r in run.records) / 2**20 for run in runs if _has_memory(run)]
        cells += [_spread(spread(memory), ".0f")]
        rows.append(tuple(cells))
    columns = (
        ("setting", ("setting",)),
        *((f"epochs to {100 * level:g}%", _three(f"epochs_to_{level:g}")) for level in levels),
        ("seconds an epoch", _three("seconds_per_epoch")),
        ("peak memory, MiB", _three("peak_memory_mib")),
    )
    note = (
        "Median (quartiles). The epochs are those until the test accuracy was first reached. Times are those of the "
        "runs, with whatever else the machine did; peak memory is that of the whole process, or of the GPU."
    )
    return Table("cost", "Speed and memory", columns, tuple(rows), note)


def _has_memory(run: Result) -> bool:
    return bool(run.records) and all(isinstance(record.get("peak_memory"), int) for record in run.records)


# --------------------------------------------------------------------------------------------------------------------
# Cells
# --------------------------------------------------------------------------------------------------------------------


def _three(name: str) -> tuple[str, ...]:
    return name, f"{name}_low", f"{name}_high"


def _count(number: int, zero: str = "") -> Cell:
    return Cell(str(number or zero), (number,))


def _percents(found: Spread | None, diverged: bool) -> Cell:
    if found is not None and diverged and found.median == 0.0:
        return Cell("diverged", (0.0, found.low, found.high))
    scaled = None if found is None else Spread(100 * found.median, 100 * found.low, 100 * found.high, found.n)
    return Cell(_spread(scaled, ".2f").text, (None,) * 3 if found is None else (found.median, found.low, found.high))


def _epochs(found: Spread | None) -> Cell:
    if found is not None and math.isinf(found.median):
        return Cell("not reached", (math.inf, found.low, found.high))
    return _spread(found, ".3g")


def _spread(found: Spread | None, form: str) -> Cell:
    if found is None:
        return Cell("", (None, None, None))
    if math.isinf(found.median):
        return Cell("diverged", (math.inf, found.low, found.high))
    low, high = ("∞" if math.isinf(value) else format(value, form) for value in (found.low, found.high))
    return Cell(f"{found.median:{form}} ({low}–{high})", (found.median, found.low, found.high))  # noqa: RUF001


def _difference_cells(found: Difference) -> list[Cell]:
    return [
        _count(found.n),
        Cell(f"{100 * found.median:+.2f}", (found.median,)),
        _interval(found),
        Cell(f"{found.improvement:.2f}", (found.improvement,)),
    ]


def _interval(found: Difference) -> Cell:
    if math.isinf(found.low):
        return Cell("too few seeds", (None, None))
    return Cell(f"{100 * found.low:+.2f} to {100 * found.high:+.2f}", (found.low, found.high))


_MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\n": " "} | {c: "\\" + c for c in "\\`*[]|"}


def _plain(text: str) -> str:
    """Escape text so that Markdown shows it literally."""
    return "".join(_MARKDOWN.get(character, character) for character in text)


_LATEX = {"\\": r"\textbackslash{}", "–": "--", "∞": r"$\infty$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}  # noqa: RUF001
_LATEX |= {character: "\\" + character for character in "&%$#_{}"}


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
