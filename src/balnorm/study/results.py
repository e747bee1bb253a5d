"""The results of a study, read from run folders (also while they are being written) and from packed studies."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from balnorm.errors import one_line
from balnorm.norms import NORMS
from balnorm.study.packed import METRICS, STUDY, Packed, Records, command_line, read_packed, varied_fields
from balnorm.training.config import Recipe
from balnorm.training.files import parse_json
from balnorm.training.run import Run, RunError, State, state_after

__all__ = ["Result", "Results", "Setting", "read_results", "settings_of"]

_OURS = {"config.json", "environment.json", "metrics.jsonl", "tensorboard", "report", "error.txt"}
_OURS |= {"checkpoint.pt", "checkpoint.pt.previous", "checkpoint.pt.damaged"}


@dataclass(frozen=True)
class Setting:
    """What runs that differ only in their seeds have in common: the norm, and the fields that vary in a study."""

    norm: str
    varied: tuple[tuple[str, Any], ...] = ()

    @property
    def variation(self) -> str:
        """The varied fields, such as ``lr=0.1 width=8``."""
        return " ".join(f"{name}={text_of(value)}" for name, value in self.varied)

    def __str__(self) -> str:
        return f"{self.norm} {self.variation}".strip()


@dataclass(frozen=True)
class Result:
    """A run of a study, and how far it is."""

    folder: Path
    """Its own folder, or that of the packed study that contains it."""
    recipe: Recipe
    setting: Setting
    state: State = "new"
    lines: Records = ()
    """All lines of its metrics; the last line of a diverged run says when it diverged."""
    packed: bool = False
    reason: str = ""
    """Why it failed or stopped."""

    @property
    def source(self) -> Path:
        """The file that holds its metrics."""
        return self.folder / (METRICS if self.packed else "metrics.jsonl")

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "diverged")

    @property
    def seconds(self) -> list[float]:
        return [line["seconds"] for line in self.lines]

    @functools.cached_property
    def records(self) -> Records:
        """The metrics of each epoch; those of a diverged run end before it diverged."""
        return tuple(line for line in self.lines if not line.get("diverged"))

    def now(self) -> Result:
        """The run as its folder is now. If its metrics cannot be read, it counts as failed."""
        if self.packed:
            return self
        try:
            state, lines = Run(self.folder).progress(self.recipe.epochs)
        except (RunError, OSError) as error:
            return replace(self, state="failed", lines=(), reason=one_line(error))
        return replace(self, state=state, lines=tuple(lines), reason="")


@dataclass(frozen=True)
class Results:
    """The runs of a study, their origin, and a sentence for each problem with its files."""

    runs: tuple[Result, ...]
    problems: tuple[str, ...]
    commands: tuple[str, ...] = ()
    environments: tuple[dict[str, Any], ...] = ()
    """Each machine with its versions, and how often and when runs were started there."""

    @functools.cached_property
    def settings(self) -> list[Setting]:
        """Sorted by what varies, then by norm in the order of their list."""
        return sorted(dict.fromkeys(run.setting for run in self.runs), key=_place)

    @functools.cached_property
    def _by_setting(self) -> dict[Setting, list[Result]]:
        return {setting: [run for run in self.runs if run.setting == setting] for setting in self.settings}

    def of(self, setting: Setting) -> list[Result]:
        return self._by_setting.get(setting, [])

    def count(self, state: State) -> int:
        return sum(run.state == state for run in self.runs)

    def packed(self) -> Packed:
        """The runs that have ended, by setting and seed, as a packed study."""
        runs: dict[Recipe, Records] = {}
        for setting in self.settings:
            for run in sorted(self.of(setting), key=lambda run: run.recipe.seed):
                if run.ended:
                    runs[run.recipe] = run.lines
        return Packed(runs, self.commands, self.environments)


def settings_of(recipes: Sequence[Recipe]) -> list[Setting]:
    """The setting of each recipe.

    A field that follows from others, such as a learning rate chosen for each batch size, is left out.
    """

    def combinations(names: Sequence[str]) -> int:
        return len({repr([getattr(recipe, name) for name in names]) for recipe in recipes})

    varying = varied_fields(recipes)
    for name in reversed(list(varying)):
        others = [other for other in varying if other != name]
        if combinations(others) == combinations(varying):
            varying = others
    return [Setting(recipe.norm, tuple((name, getattr(recipe, name)) for name in varying)) for recipe in recipes]


def text_of(value: Any) -> str:
    """A field's value as it appears in names."""
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def read_results(folders: Iterable[str | Path]) -> Results:
    """Read every run below the folders. Skips what cannot be read, and says so."""
    reader = _Reader()
    for folder in dict.fromkeys(map(Path, folders)):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: give the folder of a study or a run")
        reader.read(folder)
    settings = settings_of([run.recipe for run in reader.runs.values()])
    runs = [replace(run, setting=each) for run, each in zip(reader.runs.values(), settings, strict=True)]
    commands = dict.fromkeys([*reader.packed_commands, *(text for _, text in sorted(reader.commands))])
    return Results(tuple(runs), tuple(reader.problems), tuple(commands), _machines(reader.starts))


class _Reader:
    """Collects the runs below folders, each once, whatever links lead there."""

    def __init__(self) -> None:
        self.runs: dict[Recipe, Result] = {}
        self.problems: list[str] = []
        self.packed_commands: list[str] = []
        self.commands: list[tuple[str, str]] = []
        """When each was typed, and the command."""
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
            self.problems.append(f"{one_line(error)}: left out")

    def _walk(self, folder: Path) -> Iterator[tuple[Path, set[str]]]:
        """Every folder, including linked ones, once."""
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
            self._add(Result(folder, recipe, Setting(""), state_after(lines, recipe.epochs), lines, packed=True))

    def _add_run(self, run: Run) -> None:
        if not run.config.exists():
            raise RunError(f"{run.folder} has metrics and no config.json")
        found, problems = Result(run.folder, run.recipe(), Setting("")).now(), self.problems
        if found.reason:
            problems.append(f"{found.reason}: counted as failed")
        if not self._add(found):
            return
        if found.state == "failed" and run.error.exists():
            problems.append(f"{run.folder} failed: {_last_line(run.error)}")
        elif not run.metrics.is_file():
            problems.append(f"{run.folder} has no metrics yet: counted as {found.state}")
        if run.metrics.is_file() and not (run.metrics.read_bytes() or b"\n").endswith(b"\n"):
            problems.append(f"{run.metrics} ends in the middle of a line, which is left out: counted as {found.state}")
        if foreign := sorted(path.name for path in run.folder.iterdir() if not _is_ours(path)):
            problems.append(f"{run.folder} contains files that do not belong to a run ({', '.join(foreign)}): ignored")
        for start in self._starts(run):
            words, when = start.get("command"), str(start.get("started", ""))
            if isinstance(words, list) and words:
                self.commands.append((when, command_line([str(word) for word in words])))
            machine = {name: value for name, value in start.items() if name not in ("started", "command", "resumed")}
            self.starts.append({**machine, "starts": 1, "first_start": when, "last_start": when})

    def _add(self, run: Result) -> bool:
        """Add a run unless it is already here. A run folder and its copy in a packed study are the same run."""
        twin = self.runs.setdefault(run.recipe, run)
        if twin is not run and (run.packed == twin.packed or twin.lines != run.lines):
            self.problems.append(f"{_place_of(run)} is the same run as {_place_of(twin)}: left out")
        return twin is run

    def _starts(self, run: Run) -> list[dict[str, Any]]:
        try:
            starts = parse_json(run.environment.read_text())
        except (OSError, ValueError):
            starts = None
        if starts is None and not run.metrics.exists():  # it never started
            return []
        if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
            self.problems.append(f"{run.environment} is missing or damaged: where it ran is unknown")
            return []
        return starts


_WHEN = ("first_start", "last_start")


def _machines(starts: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Each machine with its versions, once; those with the most starts first."""
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
    return run.source if run.packed else run.folder


def _place(setting: Setting) -> tuple[Any, ...]:
    place = list(NORMS).index(setting.norm)
    # Numbers by size, then other values by name.
    values = [(0, value, "") if isinstance(value, int | float) else (1, 0, str(value)) for _, value in setting.varied]
    return (*values, place)


def _last_line(path: Path) -> str:
    try:
        return (path.read_text(errors="replace").strip().splitlines() or ["for no reason given"])[-1]
    except OSError as error:
        return str(error)
