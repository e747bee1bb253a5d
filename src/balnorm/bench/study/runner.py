"""Plan the runs of a study, train every one that has not ended, and show progress."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from balnorm.bench.errors import Stopped, many
from balnorm.bench.profiling import epoch_seconds
from balnorm.bench.study.display import Display, clock
from balnorm.bench.study.executors import Executor, LocalExecutor, Resources, StudyError
from balnorm.bench.study.packed import STUDY, Packed, read_packed, varied_fields
from balnorm.bench.study.results import settings_of
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.experiment import Config, Experiment
from balnorm.bench.training.images import make_loaders
from balnorm.bench.training.machine import check_precision
from balnorm.bench.training.processes import processes
from balnorm.bench.training.run import Run, RunError, check_same, text_of
from balnorm.bench.user_code import load_function
from balnorm.text_table import text_table

__all__ = ["combinations", "cores", "dry_run", "plan", "run_name", "run_study"]

_LOOK = 0.5  # seconds between looks at the runs' folders
_MOST = 10_000  # runs of a study: each is a folder, which the display looks at and the report reads


def plan(
    recipe: Config,
    out: str | Path,
    norms: Sequence[str],
    seeds: int,
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> list[Run]:
    """Every norm with every seed and every combination of the varied fields, each with its current state.

    Seeds count up from the recipe's. All runs of one seed come before the next seed, so that a study that is
    stopped early has compared something. Combinations that differ only in fields without effect are one run. A run that
    ``out`` already holds under another name, since other fields varied when it was made, keeps that name. Raises a
    RunError if ``out`` holds other runs under the same names.
    """
    vary, out = vary or {}, Path(out)
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if not norms:
        raise ValueError("norms must name at least one normalisation")
    if (count := seeds * len(norms) * math.prod(map(len, vary.values()))) > _MOST:
        raise ValueError(f"a study of {count:,} runs is too large: {_MOST:,} is the most")
    for values, what in ((norms, "norms"), *((vary[name], name) for name in vary)):
        if len(set(values)) < len(values):
            raise ValueError(f"{what} has a value twice: {', '.join(map(str, values))}")
    named = {}
    for seed in range(recipe.seed, recipe.seed + seeds):
        for norm, changed in combinations(norms, vary):
            each = recipe.replaced(norm=norm, seed=seed, **changed)
            each.check()
            named[run_name(each, changed)] = each
    packed = read_packed(out) if (out / STUDY).exists() else Packed({}, (), ())
    varied = varied_fields(packed.runs)
    known = {run_name(each, {name: each.fields.get(name) for name in varied}): each for each in packed.runs}
    folders, runs = _folders_by_recipe(out / "runs"), list[Run]()
    for (name, each), setting in zip(named.items(), settings_of(list(named.values())), strict=True):
        if each in packed.runs:
            lines = packed.runs[each]
            run = Run(out, each, lines)
        elif there := [Run(folder, each).look() for folder in folders.get(each, [])]:
            own = out / "runs" / name
            run = min(there, key=lambda run: (not run.ended, run.folder != own, run.folder))
        else:
            check_same(each, known.get(name, each), out)
            run = Run(out / "runs" / name, each)
            run.check()
            run.look()
        run.setting = setting
        runs.append(run)
    return runs


def combinations(norms: Sequence[str], vary: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every norm with every combination of the varied fields."""
    for norm, *values in itertools.product(norms, *vary.values()):
        yield norm, dict(zip(vary, values, strict=True))


def _folders_by_recipe(parent: Path) -> dict[Config, list[Path]]:
    found: dict[Config, list[Path]] = {}
    for folder in parent.glob("*/"):
        with contextlib.suppress(RunError, OSError):  # reported if it is in the way
            found.setdefault(Run(folder).recipe, []).append(folder)
    return found


def run_name(recipe: Config, changed: Mapping[str, Any]) -> str:
    """The name of a run's folder, such as ``batchnorm-lr=0.3-seed2``, without fields that have no effect."""
    idle, fields = recipe.idle(), recipe.fields
    varied = (f"{name}={text_of(fields.get(name))}" for name in changed if name not in idle)
    return quote("-".join([recipe.norm, *varied, f"seed{recipe.seed}"]), safe="=+, ")  # a norm may have any name


def run_study(runs: Sequence[Run], executor: Executor, show: bool = True) -> list[Run]:
    """Train the runs that have not ended, and return them with their new states. A failed run does not stop the others.

    Args:
        runs: all runs of the study, as :func:`plan` returns them.
        executor: where to train them.
        show: whether to show progress.
    """
    folders = Counter(run.folder for run in runs if not run.packed)
    if twice := [folder for folder, count in folders.items() if count > 1]:
        raise StudyError(f"two runs have the folder {twice[0]}")
    waiting = [run for run in runs if not run.ended]
    if waiting:
        fields = ("data", "image_size", "precision", "batch_size", "padding", "train_limit", "test_limit", "experiment")
        kinds = {tuple(run.recipe.fields.get(name) for name in fields): run.recipe for run in waiting}
        executor.call(_check_machine, list(kinds.values()), executor.resources)
        waiting[0].folder.parent.mkdir(parents=True, exist_ok=True)
    ended: list[Run] = []
    with Display(runs, executor.at_once, show) as display:
        try:
            while waiting or executor.running:
                while waiting and executor.running < executor.slots:
                    executor.submit(waiting[0])
                    display.started(waiting.pop(0))
                for run in map(_checked, executor.ended(_LOOK)):
                    ended.append(run)
                    display.ended(run)
                display.look()
        except KeyboardInterrupt:
            display.say("stopping: saving the runs in progress (press Ctrl-C again to stop without saving)")
            executor.stop()
            while executor.running:
                executor.ended(_LOOK)
            raise Stopped("stopped and saved: repeat the command to resume") from None
    return ended


def _checked(run: Run) -> Run:
    """The run in the state of its folder, which a report reads, unless its process ended otherwise."""
    state, reason = run.state, run.reason
    run.look()
    if state == "finished" and run.ended:
        return run
    if state == "finished":
        state, reason = (
            "failed",
            f"{run.reason or f'{run.metrics} lacks epochs'}: move {run.folder} away to start again",
        )
    run.state, run.reason = state, reason
    if state == "failed" and not run.error.exists():
        run.keep_failure(f"{reason}\n")
    return run


def dry_run(runs: Sequence[Run], jobs: int, resources: Resources) -> str:
    """A table of what would run, with an estimate of the time on this machine from a few steps of each setting."""
    executor = LocalExecutor(1, resources)
    waiting = [run for run in runs if not run.ended]
    rows, total = [], 0.0
    for setting in dict.fromkeys(run.setting for run in waiting):
        chosen = [run for run in waiting if run.setting == setting]
        if isinstance(chosen[0].recipe, Experiment):  # whose epochs cannot be cut short
            rows.append([str(setting), str(len(chosen))])
            continue
        epochs = sum(run.epochs - len(run.lines) for run in chosen)
        seconds = executor.call(_measured, chosen[0].recipe, resources)
        rows.append([str(setting), str(len(chosen)), str(epochs), clock(seconds), clock(epochs * seconds)])
        total += epochs * seconds
    jobs = max(1, min(jobs, len(waiting)))
    header = ["setting", "runs to do", "epochs", "an epoch", "all"]
    table = text_table(header[: len(rows[0])], rows) + "\n\n" if rows else ""
    at_once = f", {jobs} at a time" if jobs > 1 else ""
    if rows and not total:
        return f"{table}{len(waiting)} of {many(len(runs), 'run')} to do{at_once}"
    threads = many(resources.threads, "thread")
    left = f"{len(waiting)} of {many(len(runs), 'run')} to do{at_once}: about {clock(total / jobs)} on this machine, "
    return f"{table}{left}estimated from a few steps with {threads}"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_machine(recipes: Sequence[Config], resources: Resources) -> None:
    """In a separate process: raise an error if the device, the processor, the data or a function is unsuitable.

    Otherwise every run would fail for that reason. Only loading the data finds every fault in it; the separate process
    frees the memory, and runs on a machine of the cluster if there is one.
    """
    with processes(resources.device) as team:
        for recipe in recipes:
            if isinstance(recipe, Experiment):
                load_function(resources.file, recipe.function)
                continue
            check_precision(recipe.precision, team.device.type)
            make_loaders(recipe, team, resources.root)


def _measured(recipe: Recipe, resources: Resources) -> float:
    """In a separate process: measure the seconds per epoch."""
    torch.set_num_threads(resources.threads)
    check_precision(recipe.precision, resources.device)
    return epoch_seconds(recipe, resources.root, resources.device)
