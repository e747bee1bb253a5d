"""Run a study: train every run that has not ended, and show progress."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from balnorm.bench.errors import Stopped
from balnorm.bench.study.display import Display, clock
from balnorm.bench.study.executors import Executor, LocalExecutor, Resources, StudyError
from balnorm.bench.study.results import Result
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.experiment import Config, Experiment, load_function
from balnorm.bench.training.processor import check_precision
from balnorm.bench.training.run import Run
from balnorm.text_table import text_table

__all__ = ["cores", "dry_run", "run_study"]

_LOOK = 0.5  # seconds between looks at the runs' folders


def run_study(runs: Sequence[Result], executor: Executor, show: bool = True) -> list[Result]:
    """Train the runs that have not ended, and return them with their new states. A failed run does not stop the others.

    Args:
        runs: all runs of the study, as :func:`balnorm.bench.study.grid.plan` returns them.
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
    ended: list[Result] = []
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


def _checked(run: Result) -> Result:
    """The run as its folder is, which is what a report reads."""
    now = run.now()
    if run.state == "finished" and not now.ended:
        reason = now.reason or f"{now.source} lacks epochs"
        run = replace(run, state="failed", reason=f"{reason}: move {now.folder} away to start again")
    if run.state == "failed" and not Run(run.folder).error.exists():
        Run(run.folder).keep_failure(run.recipe, f"{run.reason}\n")
    return now if run.state == "finished" else replace(now, state=run.state, reason=run.reason)


def dry_run(runs: Sequence[Result], jobs: int, resources: Resources) -> str:
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
        return f"{table}{len(waiting)} of {len(runs)} runs to do{at_once}"
    threads = f"{resources.threads} thread{'s' if resources.threads > 1 else ''}"
    return (
        f"{table}{len(waiting)} of {len(runs)} runs to do{at_once}: about {clock(total / jobs)} on this machine, "
        f"estimated from a few steps with {threads}"
    )


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_machine(recipes: Sequence[Config], resources: Resources) -> None:
    """In a process of its own: raise an error if the device, the processor, the data or a function is unsuitable."""
    from balnorm.bench.training.images import make_loaders
    from balnorm.bench.training.processes import processes

    with processes(resources.device) as team:
        for recipe in recipes:
            if isinstance(recipe, Experiment):
                load_function(resources.file, recipe.function)
                continue
            check_precision(recipe.precision, team.device.type)
            make_loaders(recipe, team, resources.root)


def _measured(recipe: Recipe, resources: Resources) -> float:
    """In a process of its own: measure the seconds per epoch."""
    import torch

    from balnorm.bench.profiling import epoch_seconds

    torch.set_num_threads(resources.threads)
    check_precision(recipe.precision, resources.device)
    return epoch_seconds(recipe, resources.root, resources.device)
