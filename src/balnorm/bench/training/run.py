"""A run is a folder with its recipe, its environment and its results by epoch. Nothing else holds state."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from balnorm.bench.errors import Failure
from balnorm.bench.locking import lock
from balnorm.bench.training.experiment import Config, read_config
from balnorm.bench.training.files import create_atomically, parse_json, regular, remove_leftovers, write_atomically

__all__ = [
    "RESERVED", "Record", "Run", "RunBusyError", "RunError", "State", "check_records", "check_same", "state_after",
]  # fmt: skip

State = Literal["new", "unfinished", "finished", "diverged", "failed", "busy"]
"""How far a run is. It has ended if it is finished or diverged; if it is busy, another process is training it."""

Record = dict[str, Any]
"""What a run measured in one epoch."""

RESERVED = {"epoch", "seconds", "peak_memory", "diverged", "last"}
"""What a record contains besides metrics."""

_NUMBERS = ("epoch", "lr", "momentum", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds")


class RunError(Failure):
    """A run's folder or a packed study is unusable. The message is one sentence that says what to do."""


class RunBusyError(RunError):
    """Another process is training in the folder."""


class Run:
    """The folder of one run.

    ``config.json`` is the recipe or experiment; ``environment.json`` the machine and versions, of every start;
    ``metrics.jsonl`` a line for each epoch; ``checkpoint.pt`` (and the one before it) the state to go on from, in
    ``files/`` what an experiment keeps; ``tensorboard/`` its curves; ``error.txt`` says why it failed, until it is
    resumed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = self.folder / "config.json"
        self.metrics = self.folder / "metrics.jsonl"
        self.checkpoint = self.folder / "checkpoint.pt"
        self.environment = self.folder / "environment.json"
        self.tensorboard = self.folder / "tensorboard"
        self.files = self.folder / "files"
        self.error = self.folder / "error.txt"

    def check(self, recipe: Config) -> None:
        """Raise a RunError unless the folder is new, is empty, or holds a run of the same recipe."""
        if self.config.exists():
            check_same(recipe, self.recipe(), self.folder)
        elif self.folder.exists() and any(path.suffix != ".tmp" for path in self.folder.iterdir()):
            raise RunError(f"{self.folder} is not empty and holds no run: choose another folder")

    def create(self, recipe: Config) -> None:
        """Create the folder if it does not exist."""
        if not self.config.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            create_atomically(self.config, _pretty(recipe.fields))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against training by other processes, if the system supports it.

        Then remove the temporary files that killed processes left. (Before they have the lock, processes write only
        ``config.json``, which exists now, and ``error.txt``, which :meth:`keep_failure` may fail to write.)
        """
        with self.config.open("r+") as file:  # NFS locks only what is open for writing
            try:
                locked = lock(file, wait=False)
            except BlockingIOError:
                raise RunBusyError(f"{self.folder} is being trained by another process") from None
            if locked:  # otherwise another process may be writing them
                remove_leftovers(self.checkpoint, self.metrics, self.environment, self.config, self.error)
            yield

    def recipe(self) -> Config:
        try:
            return read_config(parse_json(regular(self.config).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{self.config} cannot be read ({error})") from error

    def note_environment(self, **more: Any) -> None:
        """Add this start to the list of starts."""
        from balnorm.bench.training.machine import environment  # which imports torch

        starts = None
        with suppress(FileNotFoundError, ValueError):
            starts = parse_json(regular(self.environment).read_text())
        starts = starts if isinstance(starts, list) else []
        write_atomically(self.environment, _pretty([*starts, {**environment(), **more}]))

    def keep_failure(self, recipe: Config, text: str) -> None:
        """Record why the run failed, creating the folder if it failed before that."""
        with suppress(OSError, RunError):  # a folder that is not ours stays as it is
            self.check(recipe)
            self.create(recipe)
            write_atomically(self.error, text.encode(errors="replace"))

    def progress(self, epochs: int | None) -> tuple[State, list[Record]]:
        """How far the run is, and its records. Raises a RunError if they cannot be those of so many epochs."""
        if not self.config.exists():
            return "new", []
        records = self.records()
        check_records(self.metrics, records, epochs)
        # Failed also where all epochs are done: their last state may not be saved.
        return "failed" if self.error.exists() else state_after(records, epochs), records

    def records(self) -> list[Record]:
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
        kept = [record for record in self.records() if record["epoch"] <= epochs]
        self._write(kept)

    def finish(self) -> None:
        """Mark the last record as such, for a run whose number of epochs was not known."""
        *before, last = self.records()
        self._write([*before, {**last, "last": True}])

    def _write(self, records: Sequence[Record]) -> None:
        write_atomically(self.metrics, "".join(map(_line, records)).encode())

    def add_record(self, record: Record) -> None:
        with self.metrics.open("a") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())


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
                raise RunError(f"{where} goes on after {what}")
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


def _pretty(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
