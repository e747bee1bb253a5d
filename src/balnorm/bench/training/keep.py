"""A run of anything that yields a record after each epoch: the trainer, or a user's function."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import torch

from balnorm.bench.training.experiment import MACHINE, Experiment
from balnorm.bench.training.machine import forget_peak_memory, peak_memory
from balnorm.bench.training.run import RESERVED, Record, Run, RunError
from balnorm.bench.user_code import load_function

__all__ = ["keep", "perform"]

Yielded = Generator[Record, None, None]


def keep(run: Run, records: Yielded, device: torch.device, tell: Callable[[Record], object] = lambda _: None) -> None:
    """Write each record to the run's folder when it is yielded, with the seconds and the memory it took.

    The first record shows at which epoch the function continues: records of an earlier start from that epoch on are
    replaced. The record is on the disk before the function continues after its ``yield``.
    """
    run.create()
    with run.alone(), contextlib.closing(records), contextlib.ExitStack() as opened:
        curves: Any = None
        started = time.perf_counter()
        for record in records:
            record.setdefault("seconds", round(time.perf_counter() - started, 3))
            record["peak_memory"] = peak_memory(device)
            if curves is None:
                from torch.utils.tensorboard import SummaryWriter

                curves = opened.enter_context(SummaryWriter(str(run.tensorboard), purge_step=record["epoch"]))
                run.keep_records(record["epoch"] - 1)
            run.add_record(record)
            for name in (name for name in record if name not in RESERVED):
                curves.add_scalar(name, record[name], record["epoch"])
            tell(record)
            started = time.perf_counter()


def perform(experiment: Experiment, out: Path, *, file: Path, root: Path, device: str | None = None) -> None:
    """Call a user's function, in the file ``file``, and keep the records that it yields in the folder ``out``."""
    run = Run(out, experiment)
    run.check()
    function = load_function(file, experiment.function)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    kinds = get_type_hints(function)
    machine = {
        name: str(value) if kinds.get(name) is str else value
        for name, value in zip(MACHINE, (root, device), strict=True)
        if name in inspect.signature(function).parameters
    }
    keep(run, _records(experiment, run, place, function, file, machine), place)


def _records(
    experiment: Experiment, run: Run, device: torch.device, function: Callable[..., Any], file: Path, machine: Any
) -> Yielded:
    """The records of the user's function, checked and numbered. One that is not finite ends the run: it diverged."""
    there = run.read()
    version = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    run.note_environment(file=version, device=str(device), resumed=bool(there))
    run.error.unlink(missing_ok=True)
    run.files.mkdir(exist_ok=True)
    forget_peak_memory(device)
    name, first, epoch = function.__name__, there[0] if there else {}, 0
    yielded = function(
        norm=experiment.norm, seed=experiment.seed, folder=run.files, **dict(experiment.options), **machine
    )
    if not isinstance(yielded, Iterable) or isinstance(yielded, Mapping | str):
        raise RunError(f"{name} must yield a record after each epoch, but it returned {yielded!r}")
    for given in yielded:
        if not isinstance(given, Mapping):
            raise RunError(f"{name} must yield dictionaries, got {given!r}")
        before, epoch = epoch, given.get("epoch", epoch + 1)
        if type(epoch) is not int or not (epoch == before + 1 or (before == 0 < epoch <= len(there) + 1)):
            raise RunError(f"{name} yielded epoch {epoch!r}, expected {(before or len(there)) + 1}")
        metrics = {each: _number(name, each, value) for each, value in given.items() if each != "epoch"}
        first = metrics if epoch == 1 else first
        if wrong := sorted(metrics.keys() ^ (first.keys() - RESERVED)):
            raise RunError(f"{name} must yield the same metrics after each epoch: {wrong[0]} is not in all records")
        if not metrics or experiment.metric not in (None, *metrics):
            raise RunError(f"{name} yields no {experiment.metric or 'metric'}, only {', '.join(metrics) or 'nothing'}")
        bad = next((each for each, value in metrics.items() if not math.isfinite(value)), None)
        yield {"epoch": epoch, **({"diverged": bad} if bad else metrics)}
        if bad:
            return
    if not there and not epoch:
        raise RunError(f"{name} ended without yielding a record")
    run.finish()


def _number(function: str, name: Any, value: Any) -> float:
    if not isinstance(name, str) or name in RESERVED:
        raise RunError(f"{function} cannot call a metric {name!r}: choose another name")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RunError(f"{function} yielded {value!r} for {name}, which is not a number") from None
    if name.endswith("accuracy") and not (math.isnan(number) or 0 <= number <= 1):
        raise RunError(f"{function} yielded {number:g} for {name}: an accuracy is a share, from 0 to 1")
    return number
