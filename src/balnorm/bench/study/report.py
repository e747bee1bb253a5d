"""From run folders to a report: figures, tables, and a page with all of them that works offline."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from balnorm.bench.errors import many, one_line
from balnorm.bench.files import regular, write_atomically
from balnorm.bench.norms import NORMS
from balnorm.bench.study.figures import Figure, figures, styles_of
from balnorm.bench.study.metrics import change, is_share, lower_is_better, shown, worst
from balnorm.bench.study.plots import FORMATS, figure_files
from balnorm.bench.study.results import Results, read_results
from balnorm.bench.study.statistics import Differences, Spread, differences_to, final_spread, levels
from balnorm.bench.study.tables import Table, as_csv, as_latex, as_markdown, as_text, study_tables
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.run import Setting

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
    baseline: str | None = None,
    metric: str | None = None,
    reach: Sequence[float] = (),
    formats: Sequence[str] = FORMATS,
) -> Report:
    """Write a report on all runs below ``folders`` to the folder ``out``.

    Args:
        folders: folders of studies or runs, which may still be running.
        out: receives ``index.html``, the figures, and each table as CSV, Markdown and LaTeX.
        title: the page's title; by default, the names of the recipes.
        baseline: the normalisation that the others are compared with: by default batchnorm, or the first norm of an
            experiment without it.
        metric: the metric that leads; by default, the study's own.
        reach: values of that metric: report the epochs it took to reach them; by default, some near the best.
        formats: file formats of the figures.
    """
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise ValueError(f"formats must be of {', '.join(FORMATS)}, got {', '.join(unknown)}")
    results = read_results(folders, metric)
    if not results.runs:
        because = f" ({results.problems[0]})" if results.problems else ""
        raise ValueError(f"there is no run in {', '.join(map(str, folders))}{because}")
    if baseline not in (None, *NORMS, *results.methods):
        raise ValueError(
            f"baseline must be one of {', '.join(dict.fromkeys([*results.methods, *NORMS]))}, got {baseline!r}"
        )
    if any(not 0 < level < 1 for level in reach) and is_share(results.metric):
        raise ValueError(f"reach takes accuracies between 0 and 1, such as 0.9, got {', '.join(map(str, reach))}")
    if baseline is None:
        own = "batchnorm" not in results.methods and not all(isinstance(run.recipe, Recipe) for run in results.runs)
        baseline = results.methods[0] if own else "batchnorm"
    out, problems = Path(out), list(results.problems)
    compared = differences_to(results, baseline)
    tables = study_tables(results, sorted(reach) or levels(results), compared)
    drawn: list[tuple[Figure, dict[str, bytes]]] = []  # with its files
    for figure in figures(results):
        files: dict[str, bytes] = {}
        try:
            files = figure_files(figure, formats)
        except Exception as error:  # matplotlib can raise anything, and the page draws the figure too
            problems.append(f"{figure.key} could not be drawn ({one_line(error)[:200]})")
        drawn.append((figure, files))
    summary = summarise(results, compared)
    styles = styles_of(results.methods) | {method: it for figure, _ in drawn for method, it in figure.styles.items()}
    page = _render(
        title=title or "balnorm: " + ", ".join(sorted({run.recipe.name for run in results.runs})),
        summary=summary,
        figures=drawn,
        charts=[asdict(figure) for figure, _ in drawn],
        single_runs=_single_runs(results),
        seeds=max(map(len, results.by_setting.values())),
        tables=tables,
        styles=[{"norm": method, **asdict(style)} for method, style in styles.items()],
        metrics=[(name, label) for name, (_, label) in results.metrics.items()][:2],
        shown=shown,
        many=many,
        runs=[(run, _link(run.metrics, out)) for run in results.runs],
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
_OURS = {f"{key}.{kind}" for key in ("results", "differences", "cost") for kind in _TABLES}
_FIGURE = re.compile(rf'href="([\w-]+\.(?:{"|".join(FORMATS)}))"')


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    """Write every file that can be written, and remove files of an earlier report that this one lacks."""
    out.mkdir(parents=True, exist_ok=True)
    stale: set[str] = set()
    with contextlib.suppress(OSError):
        before = regular(out / _PAGE).read_bytes()
        if _MARK in before[:2000]:
            stale = {*_OURS, *_FIGURE.findall(before.decode(errors="replace"))} - contents.keys()
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


def summarise(results: Results, differences: Differences) -> list[str]:
    """The outcome in sentences."""
    metric = results.metric
    spreads = {setting: found for setting, runs in results.by_setting.items() if (found := final_spread(runs, metric))}
    ranked = sorted(spreads.items(), key=lambda pair: pair[1].median, reverse=not lower_is_better(metric))
    sentences = _ranking(results, ranked)
    everything = "balnorm" not in results.methods
    compared, baseline = _compared(differences, everything), differences.baseline
    if not compared and not everything and baseline != "balnorm" and len({*results.methods, baseline, "balnorm"}) > 2:
        compared = [
            f"No finished runs of balnorm and {baseline} agree in everything else, so none are compared seed by seed."
        ]
    sentences += [*compared, _counted(results)]
    if len(results.runs) > 1 and ranked and min(found.n for _, found in ranked) < 5:
        sentences.append("With fewer than five seeds, quartiles and differences say little.")
    return sentences


def _ranking(results: Results, ranked: list[tuple[Setting, Spread]]) -> list[str]:
    """The best settings, and the six after them."""
    if not ranked:
        return []
    (first, best), metric = ranked[0], results.metric
    diverged = {setting: any(run.state == "diverged" for run in results.by_setting[setting]) for setting, _ in ranked}
    if best.median == worst(metric) and all(diverged.values()):
        return ["Every setting diverged in half of its runs or more."] if len(results.runs) > 1 else []
    leaders = [str(setting) for setting, found in ranked if found.median == best.median]
    quartiles = f"quartiles {shown(metric, best.low)} to {shown(metric, best.high)}, "
    alike, spread = (", alike", "") if len(leaders) > 1 else ("", quartiles)
    epochs, seeds = many(max(run.epochs for run in results.by_setting[first]), "epoch"), many(best.n, "seed")
    name, middle = results.metrics[metric][1], shown(metric, best.median)
    if len(ranked) == 1:
        median = "median " if best.n > 1 else ""
        return [
            f"{first} reached a {median}{name} of {middle} after {epochs} ({quartiles if best.n > 1 else ''}{seeds})."
        ]
    sentence = (
        f"{' and '.join(leaders)} came out {'lowest' if lower_is_better(metric) else 'highest'}{alike}: a median "
        f"{name} of {middle} after {epochs} ({spread}{seeds})."
    )
    rest = ranked[len(leaders) :]
    others = [
        f"{each} " + ("diverged" if found.median == worst(metric) and diverged[each] else shown(metric, found.median))
        for each, found in rest
    ]
    more = f" and {len(others) - 6} more" if len(others) > 6 else ""
    return [sentence, f"Then {', '.join(others[:6])}{more}."] if others else [sentence]


def _compared(differences: Differences, everything: bool) -> list[str]:
    """BalNorm against the baseline, if the study has both: a sentence per pair, or one for all if there are many.

    All settings against the baseline if BalNorm is the baseline, or in no run.
    """
    baseline, metric, sentences = differences.baseline, differences.metric, []
    everything = everything or baseline == "balnorm"
    pairs = {setting: it for setting, it in differences.by_setting.items() if everything or setting.method == "balnorm"}
    if len(pairs) > 2:
        ahead, behind = sum(found.low > 0 for found in pairs.values()), sum(found.high < 0 for found in pairs.values())
        if lower_is_better(metric):
            ahead, behind = behind, ahead
        subject = "another setting" if everything else "balnorm"
        return [
            f"Seed by seed, {subject} is ahead of {baseline} in {ahead} of {len(pairs)} such pairs of settings and "
            f"behind in {behind}, counting only 95% intervals that exclude 0."
        ]
    for setting, found in pairs.items():
        points = " points" * is_share(metric)
        text = f"Seed by seed, {setting} is {change(metric, found.median)}{points} from {baseline} (median of "
        text += many(found.n, "seed")
        if found.interval:
            verdict = "which does not exclude 0" if found.low <= 0 <= found.high else "which excludes 0"
            text += f", 95% interval {change(metric, found.low)} to {change(metric, found.high)}, {verdict}"
        sentences.append(f"{text}).")
    return sentences


def _counted(results: Results) -> str:
    total, finished = len(results.runs), results.count("finished")
    if finished == total:
        return f"All {total} runs finished." if total > 1 else "The run finished."
    if total == 1:
        state = results.runs[0].state
        return f"The run {state}." if state in ("diverged", "failed") else "The run has not finished yet."
    rest = {
        "diverged": results.count("diverged"),
        "failed": results.count("failed"),
        "not finished yet": results.count("unfinished") + results.count("new"),
    }
    told = ", ".join(f"{count} {what}" for what, count in rest.items() if count)
    return f"Of {total} runs, {finished} finished, {told}."


# --------------------------------------------------------------------------------------------------------------------
# The rest of the page
# --------------------------------------------------------------------------------------------------------------------


def _link(path: Path, out: Path) -> str:
    with contextlib.suppress(ValueError):  # on another drive, on Windows
        path = Path(os.path.relpath(path, out))
    return quote(os.fsencode(path.as_posix()))


def _single_runs(results: Results) -> dict[str, list[dict[str, Any]]]:
    """The curves of the runs of each setting."""
    return {
        str(setting): [
            {
                "finished": run.state == "finished",
                "seconds": [round(each, 3) for each in itertools.accumulate(run.seconds)],
                "values": {
                    metric: [float(f"{record[metric]:.6g}") for record in run.records if metric in record]
                    for metric in results.metrics
                },
            }
            for run in runs
        ]
        for setting, runs in results.by_setting.items()
    }


def _hyperparameters(results: Results) -> list[tuple[str, str]]:
    """Every field of the recipes with its value or values."""
    rows = []
    for name in dict.fromkeys(name for run in results.runs for name in run.recipe.fields):
        values = list(dict.fromkeys(repr(run.recipe.fields.get(name)).strip("'") for run in results.runs))
        rows.append((name, ", ".join(values[:12]) + (f" and {len(values) - 12} more" if len(values) > 12 else "")))
    return rows


def _render(**values: Any) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("balnorm.bench.study", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: "" if value is None else value,
    )
    return environment.get_template("report.html").render(**values)
