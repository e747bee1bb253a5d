"""Run a study: every run that is not finished, with something to look at meanwhile."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from balnorm.errors import Stopped
from balnorm.study.display import Display, clock
from balnorm.study.executors import Executor, LocalExecutor, Outcome, StudyError, Task, keep_failure
from balnorm.study.grid import FAILURE, Member, settings_of, state_of
from balnorm.text_table import text_table
from balnorm.training.config import Recipe
from balnorm.training.run import Run

__all__ = ["Estimate", "cores", "dry_run", "estimate", "run_study"]

_LOOK = 0.5  # seconds between looks at the runs' folders


def run_study(
    members: Sequence[Member],
    executor: Executor,
    *,
    root: str | Path = "data",
    threads: int = 1,
    device: str | None = None,
    show: bool = True,
) -> list[Outcome]:
    """Run what is not finished, and return how each of those ended. One that fails does not stop the others.

    Args:
        members: the runs.
        executor: where they are run.
        root: where the data is.
        threads: cores for each run.
        device: for each run; ``None`` takes a GPU if there is one.
        show: whether to show progress.
    """
    _check(members)
    waiting = [member for member in members if member.state not in ("finished", "diverged")]
    if waiting:
        if isinstance(executor, LocalExecutor):
            fields = ("data", "image_size", "precision", "batch_size", "padding", "train_limit", "test_limit")
            kinds = {tuple(getattr(m.recipe, name) for name in fields): m.recipe for m in waiting}
            executor.call(_check_machine, list(kinds.values()), root, device)
        waiting[0].folder.parent.mkdir(parents=True, exist_ok=True)
    place, command = Path(root).absolute(), tuple(sys.argv)
    tasks = [Task(replace(m, folder=m.folder.absolute()), place, threads, device, command) for m in waiting]
    outcomes: list[Outcome] = []
    running = 0
    with Display(members, executor.at_once, show) as display:
        try:
            while tasks or running:
                while tasks and running < executor.slots:
                    task = tasks.pop(0)
                    executor.submit(task)
                    display.started(task.member)
                    running += 1
                for outcome in map(_checked, executor.outcomes(_LOOK)):
                    running -= 1
                    outcomes.append(outcome)
                    display.ended(outcome)
                display.look()
        except KeyboardInterrupt:
            display.say("stopping: the runs under way are being saved (Ctrl-C again does not wait for them)")
            executor.stop()
            while running:
                running -= len(executor.outcomes(_LOOK))
            raise Stopped("stopped, and saved: the same command goes on from there") from None
    return outcomes


def _checked(outcome: Outcome) -> Outcome:
    """The outcome as the run's folder has it, which is what a report will say."""
    run = Run(outcome.member.folder)
    if outcome.end == "done" and state_of(run) not in ("finished", "diverged"):
        outcome = replace(
            outcome, end="failed", reason=f"{run.metrics} lacks epochs: move {run.folder} away to start again"
        )
    if outcome.end == "failed" and not (run.folder / FAILURE).exists():
        keep_failure(outcome.member, f"{outcome.reason}\n")
    return outcome


@dataclass(frozen=True)
class Estimate:
    """How long a setting's runs would take."""

    setting: str
    runs: int
    epochs: int
    """Of all of them, that are still to do."""
    seconds: float
    """Of one epoch."""


def dry_run(members: Sequence[Member], jobs: int, *, root: str | Path, threads: int, device: str | None) -> str:
    """What would be run, and about how long it would take on this machine, as a table."""
    found = estimate(members, LocalExecutor(1), root=root, threads=threads, device=device)
    todo = sum(each.runs for each in found)
    rows = [
        [each.setting, str(each.runs), str(each.epochs), clock(each.seconds), clock(each.epochs * each.seconds)]
        for each in found
    ]
    jobs = max(1, min(jobs, todo))
    total = sum(each.epochs * each.seconds for each in found) / jobs
    table = text_table(["setting", "runs to do", "epochs", "an epoch", "all"], rows) + "\n\n" if rows else ""
    here = f", {jobs} at a time" if jobs > 1 else ""
    return (
        f"{table}{todo} of {len(members)} runs to do{here}: about {clock(total)} on this machine, estimated from a few "
        f"steps with {threads} thread{'s' if threads > 1 else ''}"
    )


def estimate(
    members: Sequence[Member], executor: LocalExecutor, *, root: str | Path, threads: int, device: str | None
) -> list[Estimate]:
    """For each setting, what is to do and how long an epoch takes, from a few steps of one of its runs."""
    _check(members)
    estimates: dict[str, Estimate] = {}
    names = map(str, settings_of([member.recipe for member in members]))
    for name, member in zip(names, members, strict=True):
        run = Run(member.folder)
        if (state := member.state) in ("finished", "diverged"):
            continue
        left = member.recipe.epochs - (len(run.records()) if state == "unfinished" else 0)
        if name not in estimates:
            seconds = executor.call(_measured, member.recipe, root, threads, device)
            estimates[name] = Estimate(name, 0, 0, seconds)
        known = estimates[name]
        estimates[name] = replace(known, runs=known.runs + 1, epochs=known.epochs + left)
    return list(estimates.values())


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(members: Sequence[Member]) -> None:
    """Raise an error where a folder holds something else than its run, before anything is started."""
    twice = [str(folder) for folder, count in Counter(member.folder for member in members).items() if count > 1]
    if twice:
        raise StudyError(f"two runs have the folder {twice[0]}")
    for member in members:
        if not member.packed:
            Run(member.folder).check(member.recipe)


def _check_machine(recipes: Sequence[Recipe], root: str | Path, device: str | None) -> None:
    """In a process of its own: raise what is wrong with the device, the processor or the data, if anything is."""
    from balnorm.training.images import make_loaders
    from balnorm.training.processes import processes
    from balnorm.training.processor import check_precision

    with processes(device) as team:
        for recipe in recipes:
            check_precision(recipe.precision, team.device.type)
            make_loaders(recipe, team, Path(root))


def _measured(recipe: Recipe, root: str | Path, threads: int, device: str | None) -> float:
    """In a process of its own: the seconds of an epoch."""
    import torch

    from balnorm.training.processor import check_precision
    from balnorm.training.trainer import measure

    torch.set_num_threads(threads)
    check_precision(recipe.precision, device)
    return measure(recipe, root, device)
