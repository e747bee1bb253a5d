"""What a study has measured: read from run folders, also while they are being written, and from packed studies."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from balnorm.norms import NORMS
from balnorm.study.grid import FAILURE, Setting, State, settings_of, state_after
from balnorm.study.packed import METRICS, STUDY, Packed, Records, command_line, read_packed
from balnorm.training.config import Recipe
from balnorm.training.files import parse_json
from balnorm.training.run import Run, RunError, check_records

__all__ = ["Result", "Results", "read_results"]

_OURS = {"config.json", "environment.json", "metrics.jsonl", "tensorboard", "report", FAILURE}
_OURS |= {"checkpoint.pt", "checkpoint.pt.previous", "checkpoint.pt.damaged"}


@dataclass(frozen=True)
class Result:
    """A run, as far as it got."""

    source: Path
    """The file that holds its metrics."""
    recipe: Recipe
    state: State
    lines: Records
    """All that was written: for a run that diverged also when it did."""
    setting: Setting

    @functools.cached_property
    def records(self) -> Records:
        """The numbers of each epoch; those of a run that diverged end before it did."""
        return tuple(line for line in self.lines if not line.get("diverged"))


@dataclass(frozen=True)
class Results:
    """The runs of a study, where they came from, and a sentence for each thing that is wrong with its files."""

    runs: tuple[Result, ...]
    problems: tuple[str, ...]
    commands: tuple[str, ...] = ()
    environments: tuple[dict[str, Any], ...] = ()
    """Each machine with its versions, how often runs were started there, and when."""

    @functools.cached_property
    def settings(self) -> list[Setting]:
        """What varies by size or name, and within that the norms in the order of their list."""
        return sorted(dict.fromkeys(run.setting for run in self.runs), key=_place)

    def of(self, setting: Setting) -> list[Result]:
        return [run for run in self.runs if run.setting == setting]

    def count(self, state: State) -> int:
        return sum(run.state == state for run in self.runs)

    def packed(self) -> Packed:
        """The runs that have ended, setting by setting and seed by seed, to be written as a packed study."""
        runs: dict[Recipe, Records] = {}
        for setting in self.settings:
            for run in sorted(self.of(setting), key=lambda run: run.recipe.seed):
                if run.state in ("finished", "diverged"):
                    runs[run.recipe] = run.lines
        return Packed(runs, self.commands, self.environments)


def read_results(folders: Iterable[str | Path]) -> Results:
    """Every run below the folders. Leaves out what cannot be read, and says so."""
    reader = _Reader()
    for folder in dict.fromkeys(map(Path, folders)):
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder: give that of a study, or of a run")
        reader.read(folder)
    settings = settings_of([run.recipe for run in reader.runs.values()])
    runs = [replace(run, setting=each) for run, each in zip(reader.runs.values(), settings, strict=True)]
    commands = dict.fromkeys([*reader.packed_commands, *(text for _, text in sorted(reader.commands))])
    return Results(tuple(runs), tuple(reader.problems), tuple(commands), _machines(reader.starts))


class _Reader:
    """Collects the runs below folders: each once, whichever way leads there."""

    def __init__(self) -> None:
        self.runs: dict[Recipe, Result] = {}
        self.problems: list[str] = []
        self.packed_commands: list[str] = []
        self.commands: list[tuple[str, str]] = []
        """When each was given, and what."""
        self.starts: list[dict[str, Any]] = []
        self.seen: set[Path] = set()

    def read(self, folder: Path) -> None:
        for path, files in self._walk(folder):
            if STUDY in files:
                with self._told():
                    self._add_packed(path, read_packed(path))
            if {"config.json", "metrics.jsonl"} & files:
                with self._told():
                    self._add_run(Run(path))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RunError as error:
            self.problems.append(f"{_one_line(error)}: left out")

    def _walk(self, folder: Path) -> Iterator[tuple[Path, set[str]]]:
        """Every folder, once, and also those that are linked to."""
        for path, folders, files in os.walk(folder, followlinks=True):
            place = Path(path).resolve()
            if place in self.seen:
                folders.clear()
                continue
            self.seen.add(place)
            folders.sort()
            yield Path(path), {*files, *folders}

    def _add_packed(self, folder: Path, packed: Packed) -> None:
        self.packed_commands += packed.commands
        self.starts += packed.environments
        for recipe, lines in packed.runs.items():
            self._add(Result(folder / METRICS, recipe, state_after(lines, recipe.epochs), lines, Setting(recipe.norm)))

    def _add_run(self, run: Run) -> None:
        if not run.config.exists():
            raise RunError(f"{run.folder} has metrics and no config.json")
        recipe, problems = run.recipe(), self.problems
        state, lines = _read_metrics(run, recipe, problems)
        if not self._add(Result(run.metrics, recipe, state, lines, Setting(recipe.norm))):
            return
        if state == "failed" and (run.folder / FAILURE).exists():
            problems.append(f"{run.folder} failed: {_last_line(run.folder / FAILURE)}")
        elif not run.metrics.is_file():
            problems.append(f"{run.folder} has no metrics yet: counted as {state}")
        if run.metrics.is_file() and not (run.metrics.read_bytes() or b"\n").endswith(b"\n"):
            problems.append(f"{run.metrics} ends in the middle of a line, which is left out: counted as {state}")
        if foreign := sorted(path.name for path in run.folder.iterdir() if not _is_ours(path)):
            problems.append(f"{run.folder} holds something that is not of a run ({', '.join(foreign)}): ignored")
        for start in self._starts(run):
            words, when = start.get("command"), str(start.get("started", ""))
            if isinstance(words, list) and words:
                self.commands.append((when, command_line([str(word) for word in words])))
            machine = {name: value for name, value in start.items() if name not in ("started", "command", "resumed")}
            self.starts.append({**machine, "starts": 1, "first_start": when, "last_start": when})

    def _add(self, run: Result) -> bool:
        """Take a run, unless it is here already. A run folder beside the packed study that it went into is no news."""
        twin = self.runs.setdefault(run.recipe, run)
        if twin is not run and (METRICS not in (twin.source.name, run.source.name) or twin.lines != run.lines):
            self.problems.append(f"{_place_of(run)} is the same run as {_place_of(twin)}: left out")
        return twin is run

    def _starts(self, run: Run) -> list[dict[str, Any]]:
        try:
            starts = parse_json(run.environment.read_text())
        except (OSError, ValueError):
            starts = None
        if starts is None and not run.metrics.exists():  # it never began
            return []
        if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
            self.problems.append(f"{run.environment} is missing or damaged: where the run ran is not known")
            return []
        return starts


def _read_metrics(run: Run, recipe: Recipe, problems: list[str]) -> tuple[State, Records]:
    try:
        lines = run.records()
        check_records(run.metrics, lines, recipe.epochs)
    except (RunError, OSError) as error:
        problems.append(f"{_one_line(error)}: counted as failed")
        return "failed", ()
    if (run.folder / FAILURE).exists():  # also where all epochs are done: their last state may not be saved
        return "failed", tuple(lines)
    return state_after(lines, recipe.epochs), tuple(lines)


_WHEN = ("first_start", "last_start")


def _machines(starts: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Each machine with its versions once, those with most starts first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for start in starts:
        groups.setdefault(repr(sorted(_machine(start).items())), []).append(start)
    found = []
    for group in groups.values():
        count = sum(start["starts"] for start in group)
        when = sorted(str(start[name]) for start in group for name in _WHEN if start.get(name))
        dates = dict(zip(_WHEN, (when[0], when[-1]), strict=True)) if when else {}
        found.append({"starts": count, **dates, **_machine(group[0])})
    return tuple(sorted(found, key=lambda machine: -machine["starts"]))


def _machine(start: dict[str, Any]) -> dict[str, str | float]:
    left_out = {"starts", *_WHEN}
    return {name: v for name, v in start.items() if name not in left_out and isinstance(v, str | int | float)}


def _is_ours(path: Path) -> bool:
    return path.name in _OURS or path.name.endswith(".tmp")


def _place_of(run: Result) -> Path:
    return run.source if run.source.name == METRICS else run.source.parent


def _place(setting: Setting) -> tuple[Any, ...]:
    place = list(NORMS).index(setting.norm)
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
