"""A network in training: one step, and evaluation. It knows nothing of epochs, folders and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from balnorm.bench.data import Blend, ImageSpec, Mixup, soft_cross_entropy
from balnorm.bench.data.augment import generator
from balnorm.bench.models import create_model
from balnorm.bench.norms import get_norm, set_progress
from balnorm.bench.training.checkpoint import load_weights
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.images import make_loaders
from balnorm.bench.training.processes import Processes
from balnorm.bench.training.schedules import Rates, rates
from balnorm.channels import ChannelCentre
from balnorm.layers import BalNormLayer
from balnorm.surgery import param_groups, update_stats

__all__ = ["Learner", "autocast", "make_model", "make_network", "make_optimizer", "set_rates", "sums_of"]

_RENEWAL = 20  # batches that give averaged weights their statistics
_MIXUP = 3  # the key of mixup's random numbers, distinct from those of order and augmentation


class Learner:
    """A recipe's data, network and optimiser."""

    def __init__(self, recipe: Recipe, team: Processes, root: Path) -> None:
        self.recipe, self.team, self.norm = recipe, team, get_norm(recipe.norm)
        self.train_loader, self.test_loader, self.images = make_loaders(recipe, team, root)
        torch.manual_seed(recipe.seed)
        self.model = make_model(recipe, team, self.images)
        points: Any = self.model.mix_points if recipe.mixup == "manifold" else ("input",)
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

    def follow_schedule(self, epoch: float) -> None:
        """Set the rates, and the norm's progress, for the given epoch, which may be a fraction."""
        for group in self.optimizer.param_groups:
            set_rates(group, rates(self.recipe, epoch))
        if self.norm.follows_progress:
            set_progress(self.model, epoch / self.recipe.epochs)

    def step(self, images: Tensor, labels: Tensor, epoch: int = 0, step: int = 0) -> tuple[Tensor, Tensor]:
        """Forward pass, backward pass and optimiser step. Returns scores and loss."""
        blend = None
        mixing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.mixup is not None:
            source = generator(self.recipe.seed, epoch, _MIXUP, step, self.team.rank)
            blend = self.mixup.draw(len(labels), source, self.team.device)
            mixing = self.mixup.active(blend)
        with mixing, autocast(self.recipe.precision, self.team.device):
            scores = self.forward(images)
        loss = self.loss(scores.float(), labels, blend)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.recipe.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        return scores.detach(), loss.detach()

    def loss(self, scores: Tensor, labels: Tensor, blend: Blend | None) -> Tensor:
        if blend is None and self.recipe.loss == "cross_entropy":
            return F.cross_entropy(scores, labels, label_smoothing=self.recipe.label_smoothing)
        classes = len(self.images.classes)
        targets = F.one_hot(labels, classes).float() if blend is None else blend.targets(labels, classes)
        return soft_cross_entropy(scores, targets, self.recipe.loss)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on the test set. Each image counts once, however many processes there are."""
        model = self.model
        if self.averaged is not None:
            # A moving average of the statistics does not fit averaged weights. Neither function knows batch
            # renormalisation, which keeps such an average.
            model = self.averaged
            batches = [images for images, _ in itertools.islice(self.train_loader.epoch(), _RENEWAL)]
            update_bn(batches, model)
            update_stats(batches, model)
        self.team.share_buffers(model)
        model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.team.device)
        for images, labels in self.test_loader.epoch():
            scores = model(images).float()
            loss = F.cross_entropy(scores, labels, reduction="sum")
            sums += sums_of(loss, scores, labels)
        loss_sum, right_sum, count = self.team.sum(sums).tolist()
        return {"test_loss": loss_sum / count, "test_accuracy": right_sum / count}

    def state(self) -> dict[str, Any]:
        """Everything that training changes."""
        rng = [torch.get_rng_state()]
        if self.team.device.type == "cuda":
            rng.append(torch.cuda.get_rng_state(self.team.device))
        return {
            "model": self.model.state_dict(),
            "averaged": None if self.averaged is None else self.averaged.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": rng,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned. Raises some error if it does not fit this recipe."""
        load_weights(self.model, state["model"])
        if self.averaged is not None:
            load_weights(self.averaged, state["averaged"])
        _load_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"][0])
        if self.team.device.type == "cuda" and len(state["rng"]) > 1:
            torch.cuda.set_rng_state(state["rng"][1], self.team.device)


def make_model(recipe: Recipe, team: Processes, images: ImageSpec) -> nn.Module:
    """The network on its device, in channels_last, with synchronised statistics if the recipe asks for them."""
    model = make_network(recipe, images.channels, len(images.classes))
    if recipe.sync_stats and recipe.norm == "batchnorm":
        if team.device.type == "cpu":
            raise ValueError("sync_stats for batchnorm is torch's SyncBatchNorm, which needs GPUs")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, BalNormLayer | ChannelCentre):
            module.sync_stats = recipe.sync_stats
    return model.to(team.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def make_network(recipe: Recipe, channels: int, classes: int) -> nn.Module:
    """The network of a recipe, for images with these channels and classes."""
    norm = get_norm(recipe.norm, **recipe.norm_options)
    return create_model(recipe.model, norm, classes, in_channels=channels, **recipe.model_options())


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser, with weight decay on the weights only."""
    groups = param_groups(model, recipe.weight_decay)
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr)
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)


def set_rates(group: dict[str, Any], rate: Rates) -> None:
    """Set the learning rate and momentum of an optimiser's parameter group."""
    group["lr"] = rate.lr
    if "betas" in group:
        group["betas"] = (rate.momentum, group["betas"][1])
    else:
        group["momentum"] = rate.momentum


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context that applies a precision, by its name."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, precision))


def sums_of(loss: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """The sums that an epoch accumulates: loss, correct answers, images."""
    right = (scores.argmax(1) == labels).sum().double()
    return torch.stack([loss.double(), right, torch.full_like(right, len(labels))])


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load an optimiser's state with the checks that its own method lacks."""
    ours, theirs = (
        [{name: group[name] for name in group if name not in ("params", "lr", "momentum", "betas")} for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    )
    if ours != theirs:
        raise ValueError("the optimiser's options differ")
    optimizer.load_state_dict(state)
    for parameter, kept in optimizer.state.items():
        if any(isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape for value in kept.values()):
            raise ValueError("the optimiser belongs to another network")
