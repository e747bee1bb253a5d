"""From a recipe to a finished run: one loop, that can be killed anywhere and goes on where it was."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from balnorm.data import Blend, ImageSpec, Mixup, soft_cross_entropy
from balnorm.data.augment import generator
from balnorm.errors import Stopped
from balnorm.layers import BalNormLayer
from balnorm.models import create_model
from balnorm.norms import get_norm, set_progress
from balnorm.surgery import param_groups, scale_to_data, update_stats
from balnorm.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint, set_aside
from balnorm.training.config import Recipe
from balnorm.training.images import make_loaders
from balnorm.training.processes import Processes, processes
from balnorm.training.progress import Progress
from balnorm.training.run import Run, RunError
from balnorm.training.schedules import Rates, rates

__all__ = ["measure", "train"]

_LOOK_UP = 10  # steps after which to see whether the loss is finite, somebody wants to stop, or it is time to save
_RENEWAL = 20  # batches that give averaged weights their statistics
_MIXUP = 3  # the key of mixup's random numbers, beside those of order and augmentation


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

    If the folder holds a run of the same recipe, it goes on where that was, to the same result, bit for bit, as if it
    had never stopped.

    Args:
        recipe: the experiment.
        out: the run's folder.
        root: where the data is.
        device: such as ``"cuda:1"``; ``None`` takes a GPU if there is one.
        checkpoint_steps, checkpoint_minutes: save the state this often inside an epoch too; ``None`` for not.
        show: whether to print progress.
    """
    recipe.check()
    if checkpoint_steps is not None and checkpoint_steps < 1:
        raise ValueError(f"checkpoint_steps must be at least 1, got {checkpoint_steps}")
    if checkpoint_minutes is not None and not 0 <= checkpoint_minutes < math.inf:
        raise ValueError(f"checkpoint_minutes must be 0 or more, and finite, got {checkpoint_minutes}")
    run = Run(out)
    run.check(recipe)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    title = f"{recipe.name} {recipe.norm} seed {recipe.seed}"
    with processes(device) as team, Progress(title, recipe.epochs, show and team.first) as progress:
        trainer = Trainer(recipe, run, team, progress, Path(root), checkpoint_steps, checkpoint_minutes)
        if team.first:
            run.create(recipe)
        team.wait()
        with run.alone() if team.first else contextlib.nullcontext():
            trainer.fit()
        return run.records()


def measure(recipe: Recipe, root: str | Path = "data", device: str | None = None, steps: int = 5) -> float:
    """The seconds that an epoch of a recipe takes, from a few steps of training and evaluation. Writes nothing."""
    recipe.check()
    with processes(device) as team, Progress("", recipe.epochs, show=False) as progress:
        trainer = Trainer(recipe, Run("unused"), team, progress, Path(root), None, None)
        training = _seconds_a_batch((lambda batch: trainer.step(*batch)), trainer.train_loader.epoch(0), steps, team)
        trainer.model.eval()
        with torch.no_grad():
            testing = _seconds_a_batch((lambda batch: trainer.model(batch[0])), trainer.test_loader.epoch(), 2, team)
    return training * len(trainer.train_loader) + testing * len(trainer.test_loader)


def _seconds_a_batch(work: Callable[[Any], object], batches: Iterator[Any], count: int, team: Processes) -> float:
    """The mean over some batches, fetched and worked on; the first, which is slower, counts only if it is alone."""
    times = []
    started = time.perf_counter()
    for batch in itertools.islice(batches, count + 1):
        work(batch)
        if team.device.type == "cuda":
            torch.cuda.synchronize(team.device)
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    times = times[1:] or times
    return sum(times) / max(1, len(times))


@dataclass
class Position:
    """How far a run is, and what it has summed up of the epoch that it is in. All of it is in a checkpoint."""

    epoch: int
    sums: Tensor
    """Loss, right answers and images of this epoch so far."""
    step: int = 0
    seconds: float = 0.0
    diverged: bool = False

    def check(self, epochs: int, steps: int) -> None:
        """Raise a ValueError where it is not one of a run of so many epochs with so many steps each."""
        whole = type(self.epoch) is int and 0 <= self.epoch <= epochs and type(self.step) is int
        if not whole or not 0 <= self.step <= steps or type(self.diverged) is not bool:
            raise ValueError(f"there is no epoch {self.epoch!r}, step {self.step!r}")
        if not isinstance(self.seconds, float) or not 0 <= self.seconds < math.inf:
            raise ValueError(f"an epoch cannot take {self.seconds!r} seconds")
        if self.sums.shape != (3,) or self.sums.dtype != torch.float64:
            raise ValueError("its sums are not those of an epoch")


class Trainer:
    """The state of a run and its loop."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        team: Processes,
        progress: Progress,
        root: Path,
        checkpoint_steps: int | None,
        checkpoint_minutes: float | None,
    ) -> None:
        self.recipe, self.run, self.team, self.progress = recipe, run, team, progress
        self.norm = get_norm(recipe.norm)
        self.checkpoint_steps, self.checkpoint_minutes = checkpoint_steps, checkpoint_minutes
        self.train_loader, self.test_loader, self.images = make_loaders(recipe, team, root)
        torch.manual_seed(recipe.seed)
        self.model = make_model(recipe, team, self.images)
        points = getattr(self.model, "mix_points", ("input",)) if recipe.mixup == "manifold" else ("input",)
        self.mixup = None if recipe.mixup == "none" else Mixup(self.model, recipe.alpha, points)
        self.averaged = None
        if recipe.ema is not None:
            average = get_ema_multi_avg_fn(recipe.ema)  # type: ignore[no-untyped-call]
            self.averaged = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
        self.forward: nn.Module = self.model
        if recipe.compile:
            self.forward = torch.compile(self.forward)  # type: ignore[assignment]
        if team.world > 1:
            on_gpu = [team.device] if team.device.type == "cuda" else None
            self.forward = nn.parallel.DistributedDataParallel(self.forward, device_ids=on_gpu)
        self.optimizer = make_optimizer(recipe, self.model)
        self.scaler = torch.amp.GradScaler(team.device.type, enabled=recipe.precision == "float16")
        self.at = self.start_of(0)
        self.interrupted = False

    def start_of(self, epoch: int, diverged: bool = False) -> Position:
        return Position(epoch, torch.zeros(3, dtype=torch.float64, device=self.team.device), diverged=diverged)

    @property
    def finished(self) -> bool:
        return self.at.diverged or self.at.epoch == self.recipe.epochs

    # ----------------------------------------------------------------------------------------------------------------
    # The loop
    # ----------------------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        resumed = self.resume()
        if self.recipe.scale_to_data and not resumed:  # afterwards the checkpoints carry the scales
            images, _ = next(self.train_loader.epoch(0))
            scale_to_data(self.model, images)
        if self.finished:
            self.progress.say(f"{self.run.folder} {'has diverged' if self.at.diverged else 'is finished'}")
            return
        forget_peak_memory(self.team.device)
        with self.tensorboard() as curves, self.noticing_interrupts():
            while not self.finished:
                started = time.perf_counter()
                alive = self.train_epoch(started)
                record: dict[str, Any] = {"epoch": self.at.epoch + 1}
                if alive:
                    record |= self.summary() | self.evaluate()
                    alive = math.isfinite(record["test_loss"])
                if not alive:
                    record = {"epoch": self.at.epoch + 1, "diverged": True}
                record |= {"seconds": round(self.at.seconds + time.perf_counter() - started, 3)}
                record |= {"peak_memory": peak_memory(self.team.device)}
                self.at = self.start_of(self.at.epoch + 1, diverged=not alive)
                if self.team.first:
                    self.run.add_record(record)
                    for name in ("lr", "train_loss", "train_accuracy", "test_loss", "test_accuracy"):
                        if name in record:
                            curves.add_scalar(name, record[name], record["epoch"])
                self.save()
                self.progress.epoch(record)

    def train_epoch(self, started: float) -> bool:
        """From where the epoch is to its end. Returns whether the loss is finite."""
        recipe, steps = self.recipe, len(self.train_loader)
        self.forward.train()
        saved, first = time.monotonic(), self.at.step
        for images, labels in self.train_loader.epoch(self.at.epoch, self.at.step):
            done = self.at.epoch + self.at.step / steps
            rate = rates(recipe, done)
            for group in self.optimizer.param_groups:
                set_rates(group, rate)
            if self.norm.follows_progress:
                set_progress(self.model, done / recipe.epochs)
            scores, loss = self.step(images, labels)
            self.at.sums += sums_of(loss * len(labels), scores, labels)
            self.at.step += 1
            if self.at.step % _LOOK_UP == 0 or self.at.step == steps:  # the rest need not wait for the device
                minutes = (time.monotonic() - saved) / 60
                late = self.checkpoint_minutes is not None and minutes > self.checkpoint_minutes
                diverged = not bool(self.at.sums.isfinite().all())
                diverged, interrupted, late = self.team.any(diverged, self.interrupted, late)
                if diverged:
                    return False
                if interrupted:
                    self.save(time.perf_counter() - started)
                    raise Stopped(f"stopped, and saved in {self.run.folder}: the same command goes on from there")
                if late:
                    self.save(time.perf_counter() - started)
                    saved = time.monotonic()
                images_seen = (self.at.step - first) * recipe.batch_size * self.team.world
                speed = images_seen / (time.perf_counter() - started)
                loss_sum, right, count = self.at.sums.tolist()
                self.progress.step(self.at.epoch, self.at.step, steps, loss_sum / count, right / count, speed)
            if self.checkpoint_steps is not None and self.at.step % self.checkpoint_steps == 0:
                self.save(time.perf_counter() - started)
        return True

    def step(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Forward, backward, and a step of the optimiser."""
        recipe = self.recipe
        blend = self.draw_blend(len(labels))
        mixing = contextlib.nullcontext() if self.mixup is None or blend is None else self.mixup.active(blend)
        with mixing, autocast(recipe, self.team.device):
            scores = self.forward(images)
        loss = self.loss(scores.float(), labels, blend)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if recipe.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        return scores.detach(), loss.detach()

    def loss(self, scores: Tensor, labels: Tensor, blend: Blend | None) -> Tensor:
        if blend is not None:
            return soft_cross_entropy(scores, blend.targets(labels, len(self.images.classes)), self.recipe.loss)
        if self.recipe.loss == "bce":
            return soft_cross_entropy(scores, F.one_hot(labels, len(self.images.classes)).float(), "bce")
        return F.cross_entropy(scores, labels, label_smoothing=self.recipe.label_smoothing)

    def draw_blend(self, size: int) -> Blend | None:
        if self.mixup is None:
            return None
        key = (self.recipe.seed, self.at.epoch, _MIXUP, self.at.step, self.team.rank)
        return self.mixup.draw(size, generator(*key), self.team.device)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the test set, each image counted once, whatever the number of processes."""
        model = self.model
        if self.averaged is not None:
            model = self.averaged
            renew_statistics(model, [images for images, _ in itertools.islice(self.train_loader.epoch(), _RENEWAL)])
        self.team.share_buffers(model)
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.team.device)
        for images, labels in self.test_loader.epoch():
            scores = model(images).float()
            loss = F.cross_entropy(scores, labels, reduction="sum")
            sums += sums_of(loss, scores, labels)
        loss_sum, right_sum, count = self.team.sum(sums).tolist()
        return {"test_loss": loss_sum / count, "test_accuracy": right_sum / count}

    def summary(self) -> dict[str, float]:
        """What the epoch's training gave."""
        loss, right, count = self.team.sum(self.at.sums).tolist()
        rate = rates(self.recipe, self.at.epoch)
        return {"lr": rate.lr, "momentum": rate.momentum, "train_loss": loss / count, "train_accuracy": right / count}

    # ----------------------------------------------------------------------------------------------------------------
    # Saving and going on
    # ----------------------------------------------------------------------------------------------------------------

    def save(self, seconds: float = 0.0) -> None:
        """Write the checkpoint. Sums over this epoch are of all processes, for the first one to carry on."""
        sums = self.team.sum(self.at.sums).cpu()
        rng = [torch.get_rng_state()]
        if self.team.device.type == "cuda":
            rng.append(torch.cuda.get_rng_state(self.team.device))
        if not self.team.first:
            return
        save_checkpoint(
            self.run.checkpoint,
            {
                "recipe": {**asdict(self.recipe), "drops": list(self.recipe.drops)},
                "images": asdict(self.images),
                "world": self.team.world,
                "position": {**vars(self.at), "seconds": self.at.seconds + seconds, "sums": sums},
                "model": self.model.state_dict(),
                "averaged": None if self.averaged is None else self.averaged.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "rng": rng,
            },
        )

    def resume(self) -> bool:
        """Take up the state of the folder's checkpoint. Returns whether it has one."""
        try:
            found = load_checkpoint(self.run.checkpoint, self.take_up)
        except CheckpointError as error:
            raise CheckpointError(f"{error}: move {self.run.folder} away to start again") from error
        records = len(self.run.records())
        if found is None and records > 1:
            raise RunError(
                f"{self.run.folder} has results and no checkpoint to go on from: move it away to start again"
            )
        if records < self.at.epoch:
            raise RunError(f"{self.run.metrics} lacks epochs that are done: move {self.run.folder} away to start again")
        self.team.wait()  # until all have read what the first may change
        if self.team.first:
            self.run.note_environment(world=self.team.world, device=str(self.team.device), resumed=found is not None)
            self.run.keep_records(self.at.epoch)
        if found is None:
            return False
        if found.problem is not None:
            self.progress.say(found.problem)
            if self.team.first:
                set_aside(self.run.checkpoint)
        if not self.finished:
            self.progress.say(f"going on with {self.run.folder} at epoch {self.at.epoch + 1}, step {self.at.step}")
        return True

    def take_up(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. Raises an error of any kind where it is not one of this run."""
        if state.keys() != {"recipe", "images", "world", "position", "model", "averaged", "optimizer", "scaler", "rng"}:
            raise ValueError("it has other parts")
        if Recipe.from_dict(state["recipe"]) != self.recipe:  # fields that came later have their defaults
            raise ValueError("the recipe is another")
        if state["images"] is not None and (changed := _changes(self.images, state["images"])):
            raise RunError(f"the images are not those that {self.run.folder} was started with: {changed}")
        if state["world"] != self.team.world:
            raise RunError(
                f"{self.run.folder} was started with {state['world']} processes and goes on with as many, not with "
                f"{self.team.world}"
            )
        at = Position(**state["position"])
        at.check(self.recipe.epochs, len(self.train_loader))
        self.model.load_state_dict(state["model"])
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        _load_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"][0])
        if self.team.device.type == "cuda" and len(state["rng"]) > 1:
            torch.cuda.set_rng_state(state["rng"][1], self.team.device)
        share = 1.0 if self.team.first else 0.0  # the first process carries on with the sums of all
        at.sums = at.sums.to(self.team.device) * share
        self.at = at

    @contextlib.contextmanager
    def noticing_interrupts(self) -> Iterator[None]:
        """Ctrl-C is answered after some steps; a second one at once."""

        def notice(*_: object) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, before)

        try:
            before = signal.signal(signal.SIGINT, notice)
        except ValueError:  # not the main thread: somebody else's to handle
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def tensorboard(self) -> Iterator[Any]:
        if not self.team.first:
            yield None
            return
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self.run.tensorboard), purge_step=self.at.epoch + 1)
        try:
            yield writer
        finally:
            writer.close()


def _changes(images: ImageSpec, saved: dict[str, Any]) -> str:
    """What is not as it was, in words."""
    if list(images.classes) != list(saved["classes"]):
        before, now = (
            ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
            for classes in (saved["classes"], images.classes)
        )
        return f"the classes were {before}, and are {now}"
    if list(images.count) != list(saved["count"]):
        before, now = (
            f"{train} to train with and {test} to test with" for train, test in (saved["count"], images.count)
        )
        return f"there were {before}, and are {now}"
    return "" if asdict(images) == saved else "their size or their pixels differ"


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As its own method does, which believes whatever it is given."""
    ours, theirs = (
        [{name: group[name] for name in group if name not in ("params", "lr", "momentum", "betas")} for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if ours != theirs:
        raise ValueError("the optimiser has other options")
    optimizer.load_state_dict(state)
    for parameter, kept in optimizer.state.items():
        if any(isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape for value in kept.values()):
            raise ValueError("the optimiser is of another network")


# --------------------------------------------------------------------------------------------------------------------
# What a recipe needs
# --------------------------------------------------------------------------------------------------------------------


def make_model(recipe: Recipe, team: Processes, images: ImageSpec) -> nn.Module:
    """The network, on its device, in channels_last."""
    options = {"in_channels": images.channels, **recipe.model_options()}
    model = create_model(recipe.model, recipe.norm, len(images.classes), **options)
    if recipe.sync_stats:
        if get_norm(recipe.norm).sync == "torch":
            if team.device.type == "cpu":
                raise ValueError("sync_stats for batchnorm is torch's SyncBatchNorm, which needs GPUs")
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        for module in model.modules():
            if isinstance(module, BalNormLayer):
                module.sync_stats = True
    return model.to(team.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser, with weight decay on weights only."""
    groups = param_groups(model, recipe.weight_decay)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr)
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)


def renew_statistics(model: nn.Module, batches: list[Tensor]) -> None:
    """Estimate the statistics of averaged weights anew: an average of the statistics on the way does not fit them.

    Those of balanced layers and BatchNorms: batch renormalisation and mean-only BatchNorm keep the average.
    """
    update_bn(batches, model)
    update_stats(batches, model)


def set_rates(group: dict[str, Any], rate: Rates) -> None:
    """Give an optimiser's group of parameters the learning rate and the momentum of a step."""
    group["lr"] = rate.lr
    if "betas" in group:
        group["betas"] = (rate.momentum, group["betas"][1])
    else:
        group["momentum"] = rate.momentum


def autocast(recipe: Recipe, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The precision of a recipe, as a context."""
    if recipe.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, {"bfloat16": torch.bfloat16, "float16": torch.float16}[recipe.precision])


def sums_of(loss: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """What an epoch adds up: loss, right answers, images."""
    right = (scores.argmax(1) == labels).sum().double()
    return torch.stack([loss.double(), right, torch.full_like(right, len(labels))])


def forget_peak_memory(device: torch.device) -> None:
    """Count the peak from here, where the system can: reading the data may take more than training."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that this process has used so far: on its GPU, or else in main memory, where that is known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):  # Linux
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    try:
        import resource
    except ImportError:  # on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
