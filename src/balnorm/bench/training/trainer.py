"""From a recipe to a finished run: one loop, which can be killed at any point and resumes there."""

from __future__ import annotations

import collections
import contextlib
import math
import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from balnorm.bench.errors import Stopped
from balnorm.bench.training.checkpoint import (
    CheckpointError,
    check_contents,
    load_checkpoint,
    save_checkpoint,
    set_aside,
)
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.keep import keep
from balnorm.bench.training.learner import Learner, sums_of
from balnorm.bench.training.machine import forget_peak_memory
from balnorm.bench.training.processes import Processes, processes
from balnorm.bench.training.progress import Progress
from balnorm.bench.training.run import Run, RunError
from balnorm.bench.training.schedules import rates

__all__ = ["train"]

_LOOK_UP = 10  # every so many steps, check whether the loss is finite, Ctrl-C was pressed, or it is time to save


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    root: str | Path = "data",
    device: str | None = None,
    checkpoint_steps: int | None = None,
    checkpoint_minutes: float | None = 10.0,
    show: bool = True,
) -> list[dict[str, Any]]:
    """Train as ``recipe`` says, in the folder ``out``, and return the record of every epoch.

    If the folder holds an unfinished run of the same recipe, resume it. The result is the same, bit for bit, as that of
    a run that was never stopped.

    Args:
        recipe: the experiment.
        out: the run's folder.
        root: the folder that holds the data.
        device: for example ``"cuda:1"``; ``None`` uses a GPU if there is one.
        checkpoint_steps, checkpoint_minutes: how often to save within an epoch; ``None`` for never.
        show: whether to print progress.
    """
    recipe.check()
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise ValueError(f"checkpoint_steps must be at least 1, got {checkpoint_steps}")
    if checkpoint_minutes is not None and not 0 <= checkpoint_minutes < math.inf:
        raise ValueError(f"checkpoint_minutes must be 0 or more, and finite, got {checkpoint_minutes}")
    run = Run(out, recipe)
    run.check()
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    title = f"{recipe.name} {recipe.norm} seed {recipe.seed}"
    with (
        processes(device) as team,
        Progress(
            title, recipe.epochs, show and team.first, None if show or not team.first else run.progress
        ) as progress,
    ):
        trainer = Trainer(recipe, run, team, progress, Path(root), checkpoint_steps, checkpoint_minutes)
        if team.first:
            keep(run, trainer.epochs(), team.device, progress.epoch)
        else:
            collections.deque(trainer.epochs(), maxlen=0)
        return run.read()


@dataclass
class Position:
    """How far a run is, with the sums of the current epoch. Checkpoints contain all of it."""

    epoch: int
    sums: Tensor
    """Loss, correct answers and images of this epoch so far."""
    step: int = 0
    seconds: float = 0.0
    diverged: bool = False

    def check(self, epochs: int, steps: int) -> None:
        """Raise a ValueError if a run of so many epochs with so many steps each cannot be there."""
        whole = type(self.epoch) is int and 0 <= self.epoch <= epochs and type(self.step) is int
        if not whole or not 0 <= self.step <= steps or type(self.diverged) is not bool:
            raise ValueError(f"there is no epoch {self.epoch!r}, step {self.step!r}")
        if not isinstance(self.seconds, float) or not 0 <= self.seconds < math.inf:
            raise ValueError(f"an epoch cannot take {self.seconds!r} seconds")
        if self.sums.shape != (3,) or self.sums.dtype != torch.float64:
            raise ValueError("its sums are not those of an epoch")


@dataclass
class Trainer:
    """The state of a run and its loop."""

    recipe: Recipe
    run: Run
    team: Processes
    progress: Progress
    root: Path
    checkpoint_steps: int | None
    checkpoint_minutes: float | None
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.learner = Learner(self.recipe, self.team, self.root)
        self.at = self.start_of(0)

    def start_of(self, epoch: int, diverged: bool = False) -> Position:
        return Position(epoch, torch.zeros(3, dtype=torch.float64, device=self.team.device), diverged=diverged)

    @property
    def finished(self) -> bool:
        return self.at.diverged or self.at.epoch == self.recipe.epochs

    def epochs(self) -> Generator[dict[str, Any], None, None]:
        """Train to the end. Yields a record after each epoch, and saves once that is written."""
        self.resume()
        if self.finished:
            self.progress.say(f"{self.run.folder} {'has diverged' if self.at.diverged else 'is finished'}")
            return
        forget_peak_memory(self.team.device)
        with self.noticing_interrupts():
            while not self.finished:
                started = time.perf_counter()
                metrics = self.train_epoch(started)
                if metrics:
                    metrics |= self.learner.evaluate()
                diverged = not math.isfinite(metrics.get("test_loss", math.nan))
                record: dict[str, Any] = {"epoch": self.at.epoch + 1, **({"diverged": True} if diverged else metrics)}
                record["seconds"] = round(self.at.seconds + time.perf_counter() - started, 3)
                self.at = self.start_of(self.at.epoch + 1, diverged)
                yield record
                self.save()

    def train_epoch(self, started: float) -> dict[str, float]:
        """Train to the end of the current epoch. Returns its metrics, or none if the loss is not finite."""
        at, loader = self.at, self.learner.train_loader
        steps, first, saved = len(loader), at.step, started
        minutes = math.inf if self.checkpoint_minutes is None else self.checkpoint_minutes
        self.learner.forward.train()
        self.progress.step(at.epoch, at.step, steps)
        for images, labels in loader.epoch(at.epoch, at.step):
            self.learner.follow_schedule(at.epoch + at.step / steps)
            scores, loss = self.learner.step(images, labels, at.epoch, at.step)
            at.sums += sums_of(loss * len(labels), scores, labels)
            at.step += 1
            self.progress.step(at.epoch, at.step, steps)
            due, interrupted = at.step % (self.checkpoint_steps or math.inf) == 0, False
            if at.step % _LOOK_UP == 0 or at.step == steps:  # otherwise do not wait for the device
                diverged, now = not bool(at.sums.isfinite().all()), time.perf_counter()
                diverged, interrupted, late = self.team.any(diverged, self.interrupted, now - saved > 60 * minutes)
                if diverged:
                    return {}
                due = due or interrupted or late
                speed = (at.step - first) * self.recipe.batch_size * self.team.world / (now - started)
                total, right, count = at.sums.tolist()
                self.progress.measured(total / count, right / count, speed)
            if due:
                saved = time.perf_counter()
                self.save(saved - started)
            if interrupted:
                raise Stopped(f"stopped and saved in {self.run.folder}: repeat the command to resume")
        total, right, count = self.team.sum(at.sums).tolist()
        metrics = {"train_loss": total / count, "train_accuracy": right / count}
        return rates(self.recipe, at.epoch)._asdict() | metrics

    def save(self, seconds: float = 0.0) -> None:
        """Write the checkpoint. It holds the sums of all processes, which the first one then continues."""
        sums = self.team.sum(self.at.sums).cpu()
        if self.team.first:
            state = {
                "recipe": {**asdict(self.recipe), "drops": list(self.recipe.drops)},
                "images": asdict(self.learner.images),
                "world": self.team.world,
                "position": {**vars(self.at), "seconds": self.at.seconds + seconds, "sums": sums},
            }
            save_checkpoint(self.run.checkpoint, state | self.learner.state())

    def resume(self) -> None:
        """Load the folder's checkpoint, if there is one."""
        folder = self.run.folder
        try:
            found = load_checkpoint(self.run.checkpoint, self.take_up)
        except CheckpointError as error:
            raise CheckpointError(f"{error}: move {folder} away to start again") from error
        records = len(self.run.read())
        if found is None and records > 1:
            raise RunError(f"{folder} has results but no checkpoint to resume from: move it away to start again")
        if records < self.at.epoch:
            raise RunError(f"{self.run.metrics} lacks finished epochs: move {folder} away to start again")
        self.team.wait()  # until all have read what the first may overwrite
        if self.team.first:
            if not self.finished:
                device = str(self.team.device)
                self.run.note_environment(world=self.team.world, device=device, resumed=found is not None)
            self.run.keep_records(self.at.epoch)
            self.run.error.unlink(missing_ok=True)
        if found is None:
            return
        if found.problem is not None:
            self.progress.say(found.problem)
            if self.team.first:
                set_aside(self.run.checkpoint)
        if not self.finished:
            self.progress.say(f"resuming {folder} at epoch {self.at.epoch + 1}, step {self.at.step}")

    def take_up(self, state: dict[str, Any]) -> None:
        """Load a saved state. Raises some error if it does not belong to this run."""
        check_contents(state)
        if Recipe.from_dict(state["recipe"]) != self.recipe:  # fields that came later have their defaults
            raise ValueError("its recipe differs")
        folder, world = self.run.folder, state["world"]
        if changed := self.learner.images.changes(state["images"]):
            raise RunError(f"the images are not those that {folder} was started with: {changed}")
        if world != self.team.world:
            raise RunError(f"{folder} was started with {world} processes and cannot resume with {self.team.world}")
        at = Position(**state["position"])
        at.check(self.recipe.epochs, len(self.learner.train_loader))
        self.learner.load(state)
        at.sums = at.sums.to(self.team.device) * self.team.first  # which continues the sums of all
        self.at = at

    @contextlib.contextmanager
    def noticing_interrupts(self) -> Iterator[None]:
        """Respond to Ctrl-C after a few steps, and to a second one at once."""
        before = signal.getsignal(signal.SIGINT)

        def notice(*_: object) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, before)

        with contextlib.ExitStack() as afterwards:
            with contextlib.suppress(ValueError):  # not the main thread, which alone may set handlers
                signal.signal(signal.SIGINT, notice)
                afterwards.callback(signal.signal, signal.SIGINT, before)
            yield
