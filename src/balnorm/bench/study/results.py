"""The results of a study, read from run folders (also while they are being written) and from packed studies."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from balnorm.bench.errors import one_line, shortened
from balnorm.bench.files import parse_json, regular
from balnorm.bench.norms import NORMS
from balnorm.bench.study.metrics import metric_names
from balnorm.bench.study.packed import STUDY, Packed, command_line, read_packed, varied_fields
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.experiment import Config
from balnorm.bench.training.run import RESERVED, Run, RunError, Setting, State

__all__ = ["Results", "read_results", "settings_of"]

_OURS = {
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "tensorboard",
    "report",
    "error.txt",
    "files",
    "lock",
    "progress",
}
_OURS |= {"checkpoint.pt", "checkpoint.pt.previous", "checkpoint.pt.damaged"}


class Start(NamedTuple):
    """Where, when and how a run was started."""

    folder: Path | None
    """The run's; ``None`` for all starts of a packed study on one machine."""
    details: dict[str, Any]

    @property
    def command(self) -> str:
        """The command that was typed, without the machine's paths."""
        words = self.details.get("command")
        return command_line([str(word) for word in words]) if isinstance(words, list) and words else ""


@dataclass(frozen=True)
class Results:
    """The runs of a study, their origin, and a sentence for each problem with its files."""

    runs: tuple[Run, ...]
    problems: tuple[str, ...]
    packed_commands: tuple[str, ...] = ()
    starts: tuple[Start, ...] = ()
    wanted: str | None = None
    """The metric that leads, unless it is the study's own."""

    @functools.cached_property
    def metrics(self) -> dict[str, tuple[str, str]]:
        """The metrics to report, the leading one first: each with the name of its figure and its name in words."""
        names = dict.fromkeys(name for run in self.runs for name in (*run.records, {})[0] if name not in RESERVED)
        first = self.wanted or next((run.metric for run in self.runs if run.metric), "")
        found = metric_names(names, first, recipes=all(isinstance(run.recipe, Recipe) for run in self.runs))
        if self.wanted not in (None, *found):
            raise ValueError(f"metric must be one of {', '.join(found) or 'those measured'}, got {self.wanted!r}")
        return found

    @property
    def metric(self) -> str:
        """The metric that leads; empty before anything was measured."""
        return next(iter(self.metrics), "")

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(setting.method for setting in self.by_setting))

    @property
    def commands(self) -> tuple[str, ...]:
        """Each command once, those of packed studies first, then in the order in which they were typed."""
        typed = sorted((str(start.details.get("started", "")), start.command) for start in self.starts if start.command)
        return tuple(dict.fromkeys([*self.packed_commands, *(command for _, command in typed)]))

    @property
    def environments(self) -> tuple[dict[str, Any], ...]:
        """Each machine with its versions, and how often and when runs were started there."""
        return _machines(start.details for start in self.starts)

    @functools.cached_property
    def by_setting(self) -> dict[Setting, list[Run]]:
        """The runs of each setting, sorted by what varies, then by norm in the order of their list."""
        found: dict[Setting, list[Run]] = {}
        for run in sorted(self.runs, key=lambda run: run.setting.place):
            found.setdefault(run.setting, []).append(run)
        return found

    def count(self, state: State) -> int:
        return sum(run.state == state for run in self.runs)

    def packed(self) -> Packed:
        """The runs that have ended, by setting and seed, with their origin, as a packed study."""
        runs = sorted((run for run in self.runs if run.ended), key=lambda run: (run.setting.place, run.recipe.seed))
        folders = {None, *(run.folder for run in runs)}
        origin = replace(self, starts=tuple(start for start in self.starts if start.folder in folders))
        return Packed({run.recipe: run.lines for run in runs}, origin.commands, origin.environments)


def settings_of(recipes: Sequence[Config]) -> list[Setting]:
    """The setting of each recipe.

    A field that follows from others, such as a learning rate chosen for each batch size, is left out. Options of the
    norm are part of the method. A learning rate that was chosen for each method does not set them apart either.
    """

    def combinations(names: Sequence[str]) -> int:
        return len({repr([recipe.fields.get(name) for name in names]) for recipe in recipes})

    varying, method = varied_fields(recipes), ["norm"]
    if all(isinstance(recipe, Recipe) for recipe in recipes):
        method += NORMS["balnorm"].options
        varying = [name for name in varying if name not in method]
    for name in reversed(list(varying)):
        others = [other for other in varying if other != name]
        given = others + method * (name == "lr")
        if combinations(given) == combinations([*given, name]):
            varying = others
    return [
        Setting(recipe.norm, tuple((name, recipe.fields.get(name)) for name in varying), recipe.variant)
        for recipe in recipes
    ]


def read_results(folders: Iterable[str | Path], metric: str | None = None) -> Results:
    """Read every run below the folders. Skips files that it cannot read, and lists them. ``metric`` leads, if given."""
    reader = _Reader()
    for folder in dict.fromkeys(map(Path, folders)):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: give the folder of a study or a run")
        reader.read(folder)
    runs = tuple(reader.runs.values())
    for run, setting in zip(runs, settings_of(list(reader.runs)), strict=True):
        run.setting = setting
    return Results(runs, tuple(reader.problems), tuple(reader.packed_commands), tuple(reader.starts), metric)


class _Reader:
    """Collects the runs below folders, each once, whatever links lead there."""

    def __init__(self) -> None:
        self.runs: dict[Config, Run] = {}
        self.problems: list[str] = []
        self.packed_commands: list[str] = []
        self.starts: list[Start] = []
        self.seen: set[Path] = set()

    def read(self, folder: Path) -> None:
        def tell(error: OSError) -> None:
            self.problems.append(f"{error.filename} cannot be read ({error.strerror}): left out")

        for name, folders, files in os.walk(folder, onerror=tell, followlinks=True):
            path, there = Path(name), {*files, *folders}
            if path.resolve() in self.seen:
                folders.clear()
                continue
            self.seen.add(path.resolve())
            folders.sort()
            for ours, add in (({STUDY}, self._add_packed), ({"config.json", "metrics.jsonl"}, self._add_run)):
                if ours & there:
                    try:
                        add(path)
                    except RunError as error:
                        self.problems.append(f"{one_line(error)}: left out")

    def _add_packed(self, folder: Path) -> None:
        packed = read_packed(folder)
        self.packed_commands += packed.commands
        self.starts += [Start(None, machine) for machine in packed.environments]
        for recipe, lines in packed.runs.items():
            self._add(Run(folder, recipe, lines))

    def _add_run(self, folder: Path) -> None:
        run, tell = Run(folder), self.problems.append
        if not run.config.exists():
            raise RunError(f"{folder} has metrics and no config.json")
        if run.look().reason:
            tell(f"{run.reason}: counted as failed")
        if not self._add(run):
            return
        if run.state == "failed" and run.error.exists():
            tell(f"{folder} failed: {_last_line(run.error)}")
        elif not run.metrics.is_file():
            tell(f"{folder} has no metrics yet: counted as {run.state}")
        if not run.reason and run.metrics.is_file() and not (run.metrics.read_bytes() or b"\n").endswith(b"\n"):
            tell(f"{run.metrics} ends in the middle of a line, which is left out: counted as {run.state}")
        names = (path.name for path in folder.iterdir() if path.suffix != ".tmp")
        if foreign := sorted(name for name in names if name not in _OURS):
            tell(f"{folder} contains files that do not belong to a run ({', '.join(foreign)}): ignored")
        self.starts += [Start(folder, {**details, "starts": 1}) for details in self._starts(run)]

    def _add(self, run: Run) -> bool:
        """Add a run unless it is already here. A run folder and its copy in a packed study are the same run."""
        twin = self.runs.setdefault(run.recipe, run)
        if twin is run:
            return True
        better = run.ended and not twin.ended
        if better:
            self.runs[run.recipe] = run
            self.starts = [start for start in self.starts if start.folder != twin.folder]
        if run.packed == twin.packed or twin.lines != run.lines:
            kept, other = (run, twin) if better else (twin, run)
            here, there = (each.metrics if each.packed else each.folder for each in (other, kept))
            self.problems.append(f"{here} is the same run as {there}: left out")
        return better

    def _starts(self, run: Run) -> list[dict[str, Any]]:
        try:
            starts = parse_json(regular(run.environment).read_text())
        except (OSError, ValueError):
            starts = None
        if isinstance(starts, list) and all(isinstance(start, dict) for start in starts):
            return starts
        if starts is not None or run.metrics.exists():  # otherwise it never started
            self.problems.append(f"{run.environment} is missing or damaged: where it ran is unknown")
        return []


_WHEN = ("first_start", "last_start", "started")
_OF_A_START = {*_WHEN, "starts", "command", "resumed"}


def _machines(starts: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Each machine with its versions, once; those with the most starts first."""
    groups: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for start in starts:
        machine = {n: v for n, v in start.items() if n not in _OF_A_START and isinstance(v, str | int | float)}
        groups.setdefault(repr(sorted(machine.items())), (machine, []))[1].append(start)
    found = []
    for machine, group in groups.values():
        when = sorted(str(start[name]) for start in group for name in _WHEN if start.get(name))
        dates = {"first_start": when[0], "last_start": when[-1]} if when else {}
        found.append({"starts": sum(start["starts"] for start in group), **dates, **machine})
    return tuple(sorted(found, key=lambda machine: -machine["starts"]))


def _last_line(path: Path) -> str:
    try:
        text = regular(path).read_text(errors="replace")
        return shortened((text.strip().splitlines() or ["for no reason given"])[-1])
    except OSError as error:
        return str(error)
