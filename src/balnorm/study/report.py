"""From run folders to a report: figures, tables, and a page with all of them that works offline."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from balnorm.errors import one_line
from balnorm.norms import NORMS
from balnorm.study.figures import Figure, figures
from balnorm.study.plots import FORMATS, figure_files
from balnorm.study.results import Results, Setting, read_results
from balnorm.study.statistics import Differences, Spread, differences_to, final_spread, levels
from balnorm.study.tables import Table, as_csv, as_latex, as_markdown, as_text, study_tables
from balnorm.training.config import Recipe
from balnorm.training.files import regular, write_atomically

__all__ = ["Report", "write_report"]


@dataclass(frozen=True)
class Report:
    """A report's contents and location."""

    page: Path
    summary: tuple[str, ...]
    """Sentences."""
    tables: tuple[Table, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{table.title}\n{as_text(table)}" for table in self.tables]
        return "\n\n".join([*parts, " ".join(self.summary)])


def write_report(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    title: str | None = None,
    baseline: str = "batchnorm",
    reach: Sequence[float] = (),
    formats: Sequence[str] = FORMATS,
) -> Report:
    """Write a report on all runs below ``folders`` to the folder ``out``.

    Args:
        folders: folders of studies or runs, which may still be running.
        out: receives ``index.html``, the figures, and each table as CSV, Markdown and LaTeX.
        title: the page's title; by default, the names of the recipes.
        baseline: the normalisation that the others are compared with.
        reach: test accuracies between 0 and 1: report the epochs it took to reach them; by default, some near the best.
        formats: file formats of the figures.
    """
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise ValueError(f"formats must be of {', '.join(FORMATS)}, got {', '.join(unknown)}")
    if baseline not in NORMS:
        raise ValueError(f"baseline must be one of {', '.join(NORMS)}, got {baseline!r}")
    if any(not 0 < level < 1 for level in reach):
        raise ValueError(f"reach takes accuracies between 0 and 1, such as 0.9, got {', '.join(map(str, reach))}")
    results = read_results(folders)
    if not results.runs:
        because = f" ({results.problems[0]})" if results.problems else ""
        raise ValueError(f"there is no run in {', '.join(map(str, folders))}{because}")
    out, problems = Path(out), list(results.problems)
    compared = differences_to(results, baseline)
    tables = study_tables(results, sorted(reach) or levels(results), compared)
    drawn: list[tuple[Figure, dict[str, bytes]]] = []  # with its files
    for figure in figures(results):
        files: dict[str, bytes] = {}
        try:
            files = figure_files(figure, formats)
        except Exception as error:  # whatever matplotlib raises, the page draws the figure too
            problems.append(f"{figure.key} could not be drawn ({one_line(error)[:200]})")
        drawn.append((figure, files))
    summary = summarize(results, compared)
    page = _render(
        title=title or "balnorm: " + ", ".join(sorted({run.recipe.name for run in results.runs})),
        summary=summary,
        figures=drawn,
        charts=[asdict(figure) for figure, _ in drawn],
        tables=tables,
        styles=[{"norm": n, **asdict(NORMS[n].style)} for n in dict.fromkeys(s.norm for s in results.by_setting)],
        runs=[(run, _link(run.source, out)) for run in results.runs],
        hyperparameters=_hyperparameters(results),
        environments=results.environments,
        commands=results.commands,
        problems=problems,
    )
    texts = {f"{table.key}.{kind}": write(table) for table in tables for kind, write in _TABLES.items()}
    texts[_PAGE] = page
    contents = {name: data for _, files in drawn for name, data in files.items()}
    contents |= {name: text.encode(errors="backslashreplace") for name, text in texts.items()}  # names may not be UTF-8
    _write(out, contents)
    return Report(out / _PAGE, tuple(summary), tuple(tables), tuple(problems))


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------

_PAGE, _MARK = "index.html", b'<meta name="generator" content="balnorm report">'
_TABLES = {"csv": as_csv, "md": as_markdown, "tex": as_latex}
_FIGURES = ["accuracy", "loss", "training-loss", *(f"by-{field.name.replace('_', '-')}" for field in fields(Recipe))]
_OURS = {f"{key}.{kind}" for key in _FIGURES for kind in FORMATS}
_OURS |= {f"{key}.{kind}" for key in ("results", "differences", "cost") for kind in _TABLES}


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    """Write every file that can be written, and remove files of an earlier report that this one lacks."""
    out.mkdir(parents=True, exist_ok=True)
    stale: set[str] = set()
    with contextlib.suppress(OSError):
        stale = _OURS - contents.keys() if _MARK in regular(out / _PAGE).read_bytes()[:2000] else set()
    errors = []
    for name in [*contents, *stale]:
        path = out / name
        try:
            if name in stale:
                path.unlink(missing_ok=True)
            else:
                write_atomically(path, contents[name])
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


# --------------------------------------------------------------------------------------------------------------------
# In words
# --------------------------------------------------------------------------------------------------------------------


def summarize(results: Results, differences: Differences) -> list[str]:
    """The outcome in sentences."""
    spreads = {setting: found for setting, runs in results.by_setting.items() if (found := final_spread(runs))}
    ranked = sorted(spreads.items(), key=lambda pair: -pair[1].median)
    sentences = _ranking(results, ranked)
    compared, baseline = _compared(differences), differences.baseline
    if (
        not compared
        and baseline != "balnorm"
        and len({setting.norm for setting in results.by_setting} | {baseline, "balnorm"}) > 2
    ):
        compared = [
            f"No finished runs of balnorm and {baseline} agree in everything else, so none are compared seed by seed."
        ]
    sentences += [*compared, _counted(results)]
    if ranked and min(found.n for _, found in ranked) < 5:
        sentences.append("With fewer than five seeds, quartiles and differences say little.")
    return sentences


def _ranking(results: Results, ranked: list[tuple[Setting, Spread]]) -> list[str]:
    """The settings with the highest accuracy, and the six after them."""
    if not ranked:
        return []
    first, best = ranked[0]
    diverged = {setting: any(run.state == "diverged" for run in results.by_setting[setting]) for setting, _ in ranked}
    if best.median == 0.0 and all(diverged.values()):
        return ["Every setting diverged in half of its runs or more."]
    leaders = [str(setting) for setting, found in ranked if found.median == best.median]
    alike, spread = (", alike", "") if len(leaders) > 1 else ("", f"quartiles {best.low:.2%} to {best.high:.2%}, ")
    epochs = _many(results.by_setting[first][0].recipe.epochs, "epoch")
    sentence = (
        f"{' and '.join(leaders)} came out highest{alike}: a median test accuracy of {best.median:.2%} after {epochs} "
        f"({spread}{_many(best.n, 'seed')})."
    )
    rest = ranked[len(leaders) :]
    others = [
        f"{setting} " + ("diverged" if found.median == 0.0 and diverged[setting] else f"{found.median:.2%}")
        for setting, found in rest
    ]
    more = f" and {len(others) - 6} more" if len(others) > 6 else ""
    return [sentence, f"Then {', '.join(others[:6])}{more}."] if others else [sentence]


def _compared(differences: Differences) -> list[str]:
    """BalNorm against the baseline, if the study has both: a sentence per pair, or one for all if there are many.

    Where BalNorm is the baseline, all others against it.
    """
    baseline, sentences = differences.baseline, []
    pairs = {setting: it for setting, it in differences.by_setting.items() if "balnorm" in (setting.norm, baseline)}
    if len(pairs) > 2:
        ahead, behind = sum(found.low > 0 for found in pairs.values()), sum(found.high < 0 for found in pairs.values())
        subject = "another setting" if baseline == "balnorm" else "balnorm"
        return [
            f"Seed by seed, {subject} is ahead of {baseline} in {ahead} of {len(pairs)} such pairs of settings and "
            f"behind in {behind}, counting only 95% intervals that exclude 0."
        ]
    for setting, found in pairs.items():
        text = f"Seed by seed, {setting} is {100 * found.median:+.2f} points from {baseline} (median of "
        text += _many(found.n, "seed")
        if math.isfinite(found.low):
            verdict = "which does not exclude 0" if found.low <= 0 <= found.high else "which excludes 0"
            text += f", 95% interval {100 * found.low:+.2f} to {100 * found.high:+.2f}, {verdict}"
        sentences.append(f"{text}).")
    return sentences


def _counted(results: Results) -> str:
    total, finished = len(results.runs), results.count("finished")
    if finished == total:
        return f"All {total} runs finished." if total > 1 else "The run finished."
    rest = {
        "diverged": results.count("diverged"),
        "failed": results.count("failed"),
        "not finished yet": results.count("unfinished") + results.count("new"),
    }
    told = ", ".join(f"{count} {what}" for what, count in rest.items() if count)
    return f"Of {_many(total, 'run')}, {finished} finished, {told}."


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# --------------------------------------------------------------------------------------------------------------------
# The rest of the page
# --------------------------------------------------------------------------------------------------------------------


def _link(path: Path, out: Path) -> str:
    with contextlib.suppress(ValueError):  # on another drive, on Windows
        path = Path(os.path.relpath(path, out))
    return quote(os.fsencode(path.as_posix()))


def _hyperparameters(results: Results) -> list[tuple[str, str]]:
    """Every field of the recipes with its value or values."""
    rows = []
    for field in fields(Recipe):
        values = list(dict.fromkeys(repr(getattr(run.recipe, field.name)).strip("'") for run in results.runs))
        shown = ", ".join(values[:12]) + (f" and {len(values) - 12} more" if len(values) > 12 else "")
        rows.append((field.name, shown))
    return rows


def _render(**values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("balnorm.study", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: "" if value is None else value,
    )
    return environment.get_template("report.html").render(**values)
