"""A run is a folder with its recipe, its environment and its results by epoch. Nothing else holds state."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import Timeout

from balnorm.bench.errors import Failure, one_line
from balnorm.bench.files import (
    create_atomically,
    locked,
    parse_json,
    regular,
    remove_leftovers,
    write_atomically,
)
from balnorm.bench.norms import NORMS
from balnorm.bench.training.experiment import Config, read_config
from balnorm.bench.training.machine import environment

__all__ = [
    "RESERVED", "Record", "Records", "Run", "RunBusyError", "RunError", "Setting", "State", "check_records",
    "check_same", "leading", "state_after", "text_of",
]  # fmt: skip

State = Literal["new", "unfinished", "finished", "diverged", "failed", "busy"]
"""How far a run is. It has ended if it is finished or diverged; if it is busy, another process is training it."""

Record = dict[str, Any]
"""The measurements of one epoch."""

Records = tuple[Record, ...]
"""A run's measurements by epoch."""

RESERVED = {"epoch", "seconds", "peak_memory", "diverged", "last"}
"""The keys of a record besides the metrics."""

_NUMBERS = ("epoch", "lr", "momentum", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds")


class RunError(Failure):
    """A run's folder or a packed study is unusable. The message is one sentence that says what to do."""


class RunBusyError(RunError):
    """Another process is training in the folder."""


@dataclass(frozen=True)
class Setting:
    """The common part of runs that differ only in their seeds: the method, and the fields that vary in a study."""

    norm: str
    varied: tuple[tuple[str, Any], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    """The norm's options that are not at their defaults."""

    @property
    def method(self) -> str:
        """The norm and its options, such as ``balnorm mass=position``: a line in a figure."""
        return f"{self.norm} {_pairs(self.options)}".strip()

    @property
    def variation(self) -> str:
        """The varied fields, such as ``lr=0.1 width=8``: a panel of a figure."""
        return _pairs(self.varied)

    @property
    def place(self) -> tuple[Any, ...]:
        """The sort key: numbers by size, then other values by name, then norms in the order of their list.

        Unknown norms follow by name. Methods with fewer options come first.
        """
        norm, names = [*NORMS, self.norm].index(self.norm), NORMS["balnorm"].options
        options = (len(self.options), [names.index(name) for name, _ in self.options], _sortable(self.options))
        return (*_sortable(self.varied), norm, self.norm, *options)

    def without(self, name: str) -> Setting:
        """The setting without a field or an option."""
        varied, options = (tuple(p for p in pairs if p[0] != name) for pairs in (self.varied, self.options))
        return Setting(self.norm, varied, options)

    def __str__(self) -> str:
        return f"{self.method} {self.variation}".strip()


class Run:
    """A run: what defines it, the folder that holds it, and how far it is.

    In the folder, ``config.json`` is the recipe or experiment; ``environment.json`` the machine and versions, of every
    start; ``metrics.jsonl`` a line for each epoch; ``checkpoint.pt`` (and the one before it) the state to resume
    from, ``files/`` the files of an experiment; ``tensorboard/`` its curves; ``error.txt`` says why it failed, until it
    is resumed; ``lock`` is locked while it is trained, and ``progress`` says how far it is in an epoch.

    Args:
        folder: its own, or that of the packed study that contains it.
        recipe: what defines it; by default, what ``config.json`` says.
        lines: the measurements of a run of a packed study.
    """

    def __init__(self, folder: str | Path, recipe: Config | None = None, lines: Records | None = None) -> None:
        self.folder = Path(folder)
        self.config = self.folder / "config.json"
        self.metrics = self.folder / ("metrics.jsonl" if lines is None else "metrics.csv")
        self.checkpoint = self.folder / "checkpoint.pt"
        self.environment = self.folder / "environment.json"
        self.tensorboard = self.folder / "tensorboard"
        self.files = self.folder / "files"
        self.error = self.folder / "error.txt"
        self.progress = self.folder / "progress"
        self.setting = Setting("")
        if recipe is not None:
            self.recipe = recipe
        self.packed = lines is not None
        self.lines: Records = lines or ()
        """All lines of its metrics, as of the last look; the last line of a diverged run says when it diverged."""
        self.state: State = state_after(self.lines, self.recipe.epochs) if self.packed else "new"
        self.reason = ""
        """Why it failed or stopped."""

    @functools.cached_property
    def recipe(self) -> Config:
        try:
            return read_config(parse_json(regular(self.config).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{self.config} cannot be read ({error})") from error

    # ---- How far it is -----------------------------------------------------------------------------------------------

    def look(self) -> Run:
        """Read how far the run is. If its metrics cannot be read, or do not fit its recipe, it counts as failed."""
        if self.packed:
            return self
        if not self.config.exists():
            self.state, self.lines, self.reason = "new", (), ""
            return self
        epochs = self.recipe.epochs
        try:
            self.lines, self.reason = tuple(self.read()), ""
            check_records(self.metrics, self.lines, epochs)
            # Failed even if all epochs are done: their last state may not be saved.
            self.state = "failed" if self.error.exists() else state_after(self.lines, epochs)
        except (RunError, OSError) as error:
            self.state, self.lines, self.reason = "failed", (), one_line(error)
        return self

    @property
    def part(self) -> float:
        """How much of the current epoch is done, as far as that is known."""
        with suppress(OSError, ValueError):
            epoch, part = regular(self.progress).read_text().split()
            return float(part) if int(epoch) == len(self.lines) else 0.0
        return 0.0

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "diverged")

    @property
    def records(self) -> Records:
        """The metrics of each epoch; those of a diverged run end before it diverged."""
        return self.lines[:-1] if self.lines and self.lines[-1].get("diverged") else self.lines

    @property
    def seconds(self) -> list[float]:
        return [line["seconds"] for line in self.lines]

    @property
    def metric(self) -> str:
        """The metric that leads, if it is known yet."""
        return leading([name for name in (*self.records, {})[0] if name not in RESERVED], self.recipe.metric)

    @property
    def epochs(self) -> int:
        """How many epochs it has, or has had so far if that is unknown."""
        return self.recipe.epochs or len(self.lines)

    # ---- Its folder --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise a RunError unless the folder is new, is empty, or holds a run of the same recipe."""
        if self.config.exists():
            check_same(self.recipe, Run(self.folder).recipe, self.folder)
        elif self.folder.exists() and any(path.suffix != ".tmp" for path in self.folder.iterdir()):
            raise RunError(f"{self.folder} is not empty and holds no run: choose another folder")

    def create(self) -> None:
        """Create the folder if it does not exist."""
        if not self.config.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            create_atomically(self.config, _pretty(self.recipe.fields))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against training by other processes, if the system supports it.

        Then remove the temporary files that killed processes left. (Before they have the lock, processes write only
        ``config.json``, which exists now, and ``error.txt``, which :meth:`keep_failure` may fail to write.)
        """
        with ExitStack() as held:
            try:
                certain = held.enter_context(locked(self.folder / "lock", wait=False))
            except Timeout:
                raise RunBusyError(f"{self.folder} is being trained by another process") from None
            if certain:  # otherwise another process may be writing them
                remove_leftovers(self.checkpoint, self.metrics, self.environment, self.config, self.error)
            yield

    def note_environment(self, **more: Any) -> None:
        """Add this start to the list of starts."""
        starts = None
        with suppress(FileNotFoundError, ValueError):
            starts = parse_json(regular(self.environment).read_text())
        starts = starts if isinstance(starts, list) else []
        write_atomically(self.environment, _pretty([*starts, {**environment(), **more}]))

    def keep_failure(self, text: str) -> None:
        """Record why the run failed, creating the folder if it failed before that."""
        with suppress(OSError, RunError):  # a folder that is not ours stays as it is
            self.check()
            self.create()
            write_atomically(self.error, text.encode(errors="replace"))

    def read(self) -> list[Record]:
        """The records in ``metrics.jsonl``, without an incomplete last line."""
        lines = regular(self.metrics).read_text(errors="replace").split("\n") if self.metrics.exists() else []
        records = []
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                record = parse_json(line)
            except ValueError as error:
                if number == len(lines):
                    break
                raise RunError(f"{self.metrics}, line {number} is not JSON") from error
            if not isinstance(record, dict) or not isinstance(record.get("epoch"), int):
                raise RunError(f"{self.metrics}, line {number} is not a record of an epoch")
            records.append(record)
        return records

    def keep_records(self, epochs: int) -> None:
        """Drop the records after so many epochs, which a resumed run repeats."""
        kept = [record for record in self.read() if record["epoch"] <= epochs]
        self._write(kept)

    def finish(self) -> None:
        """Mark the last record as such, for a run whose number of epochs was not known."""
        *before, last = self.read()
        self._write([*before, {**last, "last": True}])

    def _write(self, records: Sequence[Record]) -> None:
        write_atomically(self.metrics, "".join(map(_line, records)).encode())

    def add_record(self, record: Record) -> None:
        with self.metrics.open("a") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())


def leading(names: Iterable[str], wanted: str | None = None) -> str:
    """The metric that leads: the one that is wanted, or the first that is not a loss."""
    found = list(names)
    return wanted or next((name for name in found if "loss" not in name.lower()), next(iter(found), ""))


def check_same(ours: Config, theirs: Config, place: Path) -> None:
    """Raise a RunError that lists the differences between a recipe and the one already there, if any."""
    now, before = ours.fields, theirs.fields
    if changed := [f"{n}: {now.get(n)!r}, was {before.get(n)!r}" for n in now | before if now.get(n) != before.get(n)]:
        raise RunError(
            f"{place} was started with a different recipe ({'; '.join(changed)}): use the same recipe to resume it, or "
            "another folder"
        )


def state_after(records: Sequence[Record], epochs: int | None) -> State:
    """The state of a run of so many epochs, or of an experiment, with these records."""
    if not records:
        return "unfinished"
    if records[-1].get("diverged"):
        return "diverged"
    return (
        "finished" if (records[-1].get("last") if epochs is None else records[-1]["epoch"] >= epochs) else "unfinished"
    )


def check_records(path: Path, records: Sequence[Record], epochs: int | None, first_line: int = 1) -> None:
    """Raise a RunError that names the line if a run of so many epochs cannot have produced these records."""
    for number, record in enumerate(records, 1):
        where = f"{path}, line {first_line + number - 1}"
        if record.get("epoch") != number:
            raise RunError(f"{where} is epoch {record.get('epoch')} instead of {number}")
        if epochs is not None and number > epochs:
            raise RunError(f"{where} is epoch {number} of a run of {epochs}")
        for end, what in (("diverged", "the run diverged"), ("last", "the last record")):
            if number > 1 and records[number - 2].get(end):
                raise RunError(f"{where} comes after {what}")
        metrics = _NUMBERS if epochs is not None else tuple(record.keys() - RESERVED)
        for name in ("epoch", "seconds", *(() if record.get("diverged") else metrics)):
            value: Any = record.get(name)
            if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:  # a whole number may be larger
                raise RunError(f"{where} has no finite number for {name}")
            signed = epochs is None and name != "seconds" and not name.endswith("accuracy")
            if (value < 0 and not signed) or (name.endswith("accuracy") and value > 1):
                raise RunError(f"{where} has {value} for {name}, which is impossible")
        memory = record.get("peak_memory")
        if memory is not None and (type(memory) is not int or memory < 0):
            raise RunError(f"{where} has {memory!r} for peak_memory, which is impossible")


def _pairs(values: tuple[tuple[str, Any], ...]) -> str:
    return " ".join(f"{name}={text_of(value)}" for name, value in values)


def text_of(value: Any) -> str:
    """A field's value as it appears in names."""
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _sortable(values: tuple[tuple[str, Any], ...]) -> list[tuple[int, float, str]]:
    return [(0, v, "") if isinstance(v, int | float) else (1, 0, str(v)) for _, v in values]


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
