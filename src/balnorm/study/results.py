"""What run folders hold, read again: also while they are being written, and whatever else is in them."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from balnorm.study.grid import FAILURE, Setting, State, settings_of, state_of
from balnorm.training.config import NormName, Recipe
from balnorm.training.run import Run, RunError

__all__ = ["Result", "Results", "read_results"]

_NUMBERS = ("epoch", "lr", "momentum", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds")
_OURS = {"config.json", "environment.json", "metrics.jsonl", "tensorboard", "report", FAILURE}
_OURS |= {"checkpoint.pt", "checkpoint.pt.previous", "checkpoint.pt.damaged"}


@dataclass(frozen=True)
class Result:
    """A run, as far as it got."""

    folder: Path
    recipe: Recipe
    setting: Setting
    state: State
    records: tuple[dict[str, Any], ...]
    """One for each epoch; that of a run that diverged ends before it did."""
    starts: tuple[dict[str, Any], ...] = ()
    """The machine and versions of each start."""


@dataclass(frozen=True)
class Results:
    """The runs of a study, and one sentence for each thing that is wrong with its folders."""

    runs: tuple[Result, ...]
    problems: tuple[str, ...]

    @functools.cached_property
    def settings(self) -> list[Setting]:
        """What varies by size or name, and within that the norms in the order of their list."""
        return sorted(dict.fromkeys(run.setting for run in self.runs), key=_place)

    def of(self, setting: Setting) -> list[Result]:
        return [run for run in self.runs if run.setting == setting]

    def count(self, state: State) -> int:
        return sum(run.state == state for run in self.runs)


def read_results(folders: Iterable[str | Path]) -> Results:
    """Every run below the folders. What cannot be read is left out and told."""
    problems: list[str] = []
    found: list[tuple[Run, Recipe]] = []
    known: dict[Recipe, Path] = {}
    seen: set[Path] = set()
    for folder in dict.fromkeys(map(Path, folders)):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: give that of a study, or of a run")
        for run in _runs_below(folder, seen):
            try:
                if not run.config.exists():
                    raise RunError(f"{run.folder} has metrics and no config.json")
                recipe = run.recipe()
            except RunError as error:
                problems.append(f"{_one_line(error)}: left out")
                continue
            if (twin := known.setdefault(recipe, run.folder)) != run.folder:
                problems.append(f"{run.folder} is the same run as {twin}: left out")
            else:
                found.append((run, recipe))
    settings = settings_of([recipe for _, recipe in found])
    runs = [_result(*each, setting, problems) for each, setting in zip(found, settings, strict=True)]
    return Results(tuple(runs), tuple(problems))


def _runs_below(folder: Path, seen: set[Path]) -> Iterator[Run]:
    """Every folder that holds a recipe or metrics, once, and also those that are linked to."""
    for path, folders, files in os.walk(folder, followlinks=True):
        place = Path(path).resolve()
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        folders.sort()
        if {"config.json", "metrics.jsonl"} & {*files, *folders}:
            yield Run(path)


def _result(run: Run, recipe: Recipe, setting: Setting, problems: list[str]) -> Result:
    state, records = state_of(run), []
    try:
        records = run.records()
        _check_numbers(run.metrics, records)
    except (RunError, OSError) as error:
        problems.append(f"{_one_line(error)}: counted as failed")
        state, records = "failed", []
    if state == "failed" and (run.folder / FAILURE).exists():
        problems.append(f"{run.folder} failed: {_last_line(run.folder / FAILURE)}")
    elif not run.metrics.is_file():
        problems.append(f"{run.folder} has no metrics yet: counted as {state}")
    if run.metrics.is_file() and not (run.metrics.read_bytes() or b"\n").endswith(b"\n"):
        problems.append(f"{run.metrics} ends in the middle of a line, which is left out: counted as {state}")
    if foreign := sorted(path.name for path in run.folder.iterdir() if not _is_ours(path)):
        problems.append(f"{run.folder} holds something that is not of a run ({', '.join(foreign)}): ignored")
    records = [record for record in records if not record.get("diverged")]
    return Result(run.folder, recipe, setting, state, tuple(records), _starts(run, problems))


def _check_numbers(path: Path, records: Sequence[dict[str, Any]]) -> None:
    for number, record in enumerate(records, 1):
        if record["epoch"] != number:
            raise RunError(f"{path}, line {number} is epoch {record['epoch']}")
        wanted = ("epoch", "seconds") if record.get("diverged") else _NUMBERS
        for name in wanted:
            if not _is_finite(record.get(name)):
                raise RunError(f"{path}, line {number} has no finite number for {name}")


def _starts(run: Run, problems: list[str]) -> tuple[dict[str, Any], ...]:
    try:
        starts = json.loads(run.environment.read_text())
    except (OSError, ValueError):
        starts = None
    if starts is None and not run.metrics.exists():  # it never began
        return ()
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        problems.append(f"{run.environment} is missing or damaged: where the run ran is not known")
        return ()
    return tuple(starts)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _is_ours(path: Path) -> bool:
    return path.name in _OURS or path.name.endswith(".tmp")


def _place(setting: Setting) -> tuple[Any, ...]:
    place = get_args(NormName).index(setting.norm)
    # Numbers by size and before other values, which go by their names.
    values = [(0, value, "") if isinstance(value, int | float) else (1, 0, str(value)) for _, value in setting.varied]
    return (*values, place)


def _last_line(path: Path) -> str:
    try:
        return (path.read_text(errors="replace").strip().splitlines() or ["for no reason given"])[-1]
    except OSError as error:
        return str(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
