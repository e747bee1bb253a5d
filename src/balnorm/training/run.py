"""A run is a folder: its recipe, where it ran, what came out epoch by epoch. Nothing else holds state."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from balnorm.errors import Failure
from balnorm.training.config import Recipe, differences
from balnorm.training.files import parse_json, write_atomically

__all__ = ["Run", "RunBusyError", "RunError", "check_records", "check_same", "environment", "has_ended", "read_metrics"]

_NUMBERS = ("epoch", "lr", "momentum", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds")


class RunError(Failure):
    """A run's folder, or a packed study, cannot be used. The message is one sentence and says what to do."""


class RunBusyError(RunError):
    """Another process is training in the folder."""


class Run:
    """The folder of one run.

    ``config.json`` is the recipe; ``environment.json`` the machine and versions, of every start; ``metrics.jsonl`` a
    line for each epoch; ``checkpoint.pt`` (and the one before it) the state to go on from; ``tensorboard/`` its curves.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = self.folder / "config.json"
        self.metrics = self.folder / "metrics.jsonl"
        self.checkpoint = self.folder / "checkpoint.pt"
        self.environment = self.folder / "environment.json"
        self.tensorboard = self.folder / "tensorboard"

    def check(self, recipe: Recipe) -> None:
        """Raise a RunError unless the folder is new, empty, or holds a run of the same recipe."""
        if self.config.exists():
            check_same(recipe, self.recipe(), self.folder)
        elif self.folder.exists() and any(path.suffix != ".tmp" for path in self.folder.iterdir()):
            raise RunError(f"{self.folder} is not empty and holds no run: choose another folder")

    def create(self, recipe: Recipe) -> None:
        """Make the folder, if it is not there."""
        if not self.config.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(self.config, asdict(recipe))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from training in this folder meanwhile, where the system can lock files."""
        try:
            import fcntl
        except ImportError:
            yield
            return
        with self.config.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunBusyError(f"{self.folder} is being trained by another process") from None
            yield

    def recipe(self) -> Recipe:
        try:
            return Recipe.from_dict(parse_json(self.config.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"{self.config} cannot be read ({error})") from error

    def note_environment(self, **more: Any) -> None:
        """Add this start to the list of starts."""
        starts = []
        if self.environment.exists():
            try:
                starts = parse_json(self.environment.read_text())
            except ValueError:
                starts = []
        starts = starts if isinstance(starts, list) else []
        self._write(self.environment, [*starts, {**environment(), **more}])

    def records(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``; a last line that broke off is left out."""
        return read_metrics(self.metrics)

    def keep_records(self, epochs: int) -> None:
        """Forget what came after so many epochs: a resumed run does them again."""
        kept = [record for record in self.records() if record["epoch"] <= epochs]
        write_atomically(self.metrics, "".join(_line(record) for record in kept).encode())

    def add_record(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _write(path: Path, value: Any) -> None:
        write_atomically(path, (json.dumps(value, indent=2) + "\n").encode())


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records in a ``metrics.jsonl``, without a last line that was not finished."""
    if not path.exists():
        return []
    records = []
    lines = path.read_text(errors="replace").split("\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            if number == len(lines) - 1:
                break
            raise RunError(f"{path}, line {number + 1} is not JSON") from error
        if not isinstance(record, dict) or not isinstance(record.get("epoch"), int):
            raise RunError(f"{path}, line {number + 1} is not a record of an epoch")
        records.append(record)
    return records


def check_same(ours: Recipe, theirs: Recipe, place: Path) -> None:
    """Raise a RunError that names the differences between a recipe and the one that is there already."""
    if changed := differences(ours, theirs):
        raise RunError(
            f"{place} was started with another recipe ({'; '.join(changed)}): give the same one to resume it, or "
            "another folder"
        )


def has_ended(records: Sequence[dict[str, Any]], epochs: int) -> bool:
    """Whether a run with these records has done all of its epochs, or has diverged."""
    return bool(records) and bool(records[-1].get("diverged") or records[-1]["epoch"] >= epochs)


def check_records(path: Path, records: Sequence[dict[str, Any]], epochs: int, first_line: int = 1) -> None:
    """Raise a RunError, with the line, where the records are not what a run of so many epochs can have measured."""
    for number, record in enumerate(records, 1):
        where = f"{path}, line {first_line + number - 1}"
        if record.get("epoch") != number:
            raise RunError(f"{where} is epoch {record.get('epoch')} in place of {number}")
        if number > epochs:
            raise RunError(f"{where} is epoch {number} of a run of {epochs}")
        if number > 1 and records[number - 2].get("diverged"):
            raise RunError(f"{where} goes on after the run diverged")
        for name in ("epoch", "seconds") if record.get("diverged") else _NUMBERS:
            value: Any = record.get(name)
            if not _is_finite(value):
                raise RunError(f"{where} has no finite number for {name}")
            if value < 0 or (name.endswith("accuracy") and value > 1):
                raise RunError(f"{where} has {value} for {name}, which cannot be")
        memory = record.get("peak_memory")
        if memory is not None and (type(memory) is not int or memory < 0):
            raise RunError(f"{where} has {memory!r} for peak_memory, which cannot be")


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def environment() -> dict[str, Any]:
    """The machine and the versions, as far as they can change a result."""
    import torch

    from balnorm.functional import backend

    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:  # no git here
        git = ""
    cuda = torch.cuda.is_available()
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "balnorm": version("balnorm"),
        "commit": git or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "backend": backend(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
