"""Mixup and manifold mixup: a batch is blended with a shuffled copy of itself, at the input or inside the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Blend", "Loss", "Mixup", "soft_cross_entropy"]

Loss = Literal["cross_entropy", "bce"]


@dataclass(frozen=True)
class Blend:
    """How one batch is mixed.

    Attributes:
        share: lambda, the weight of the batch itself; a tensor (), so that a compiled model need not be compiled again.
        partner: (N,), the sample that each one is mixed with.
        point: where to mix: ``"input"``, or the name of a module whose output is mixed.
    """

    share: Tensor
    partner: Tensor
    point: str

    def mix(self, x: Tensor) -> Tensor:
        """lambda x + (1 - lambda) x[partner]."""
        return torch.lerp(x[self.partner], x, self.share.to(x.dtype))

    def targets(self, labels: Tensor, num_classes: int) -> Tensor:
        """The labels as probabilities (N, classes), mixed in the same way."""
        return self.mix(F.one_hot(labels, num_classes).to(torch.float32))


class Mixup:
    """Mixes batches at points of a model: lambda ~ Beta(alpha, alpha), one permutation and one point for each batch.

    Mixup (Zhang et al. 2017) mixes at ``points=("input",)``; manifold mixup (Verma et al. 2018) at the input and after
    the first and second stage, with equal chance: ``points=model.mix_points``.

    Args:
        model: the network. Forward hooks stay on the modules that ``points`` name, until :meth:`remove`; outside
            of :meth:`active` they do nothing. Wrap and compile afterwards.
        alpha: of the Beta distribution; the paper's experiments have 6.
        points: where to mix.

    Example:
        >>> from balnorm.bench.models import create_model
        >>> model = create_model("wide_resnet", depth=8, width=8)
        >>> mixup = Mixup(model, alpha=6.0, points=model.mix_points)
        >>> images, labels = torch.rand(16, 3, 8, 8), torch.arange(16) % 10
        >>> blend = mixup.draw(16, torch.Generator().manual_seed(0))
        >>> with mixup.active(blend):
        ...     scores = model(images)
        >>> loss = soft_cross_entropy(scores, blend.targets(labels, 10))
    """

    def __init__(self, model: nn.Module, alpha: float, points: Sequence[str] = ("input",)) -> None:
        if not alpha > 0:
            raise ValueError(f"alpha must be above 0, got {alpha!r}")
        if not points:
            raise ValueError("points must name at least one place, such as 'input'")
        modules = dict(model.named_modules())
        for point in points:
            if point != "input" and point not in modules:
                allowed = ", ".join(getattr(model, "mix_points", ("input",)))
                raise ValueError(f"the model has no module {point!r} to mix after; its own points are {allowed}")
        self.alpha, self.points = alpha, tuple(points)
        self._blend: Blend | None = None
        self._handles: list[Any] = []
        for point in self.points:
            if point == "input":
                self._handles.append(model.register_forward_pre_hook(_MixInput(self), with_kwargs=True))
            else:
                self._handles.append(modules[point].register_forward_hook(_MixOutput(self, point)))

    def __deepcopy__(self, _: dict[int, Any]) -> Mixup:
        return self  # a copy of the model is mixed along with it

    def draw(self, batch_size: int, source: torch.Generator, device: torch.device | str = "cpu") -> Blend:
        """Draw how to mix a batch. All randomness comes from ``source`` on the CPU, so every device gets the same."""
        share = _beta(self.alpha, source)
        partner = torch.randperm(batch_size, generator=source)
        point = self.points[int(torch.randint(len(self.points), (), generator=source))]
        share = share.to(device, torch.float32, non_blocking=True)
        return Blend(share, partner.to(device, non_blocking=True), point)

    @contextmanager
    def active(self, blend: Blend) -> Iterator[None]:
        """Mix in every forward pass inside. With activation checkpointing, call ``backward()`` inside too."""
        if blend.point not in self.points:
            raise ValueError(f"this Mixup mixes at {', '.join(self.points)}, got {blend.point!r}")
        self._blend = blend
        try:
            yield
        finally:
            self._blend = None

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def at(self, point: str) -> Blend | None:
        """How to mix at a point, if at all."""
        return self._blend if self._blend is not None and self._blend.point == point else None


@dataclass
class _MixInput:
    """A hook that mixes the first argument of a model."""

    mixup: Mixup

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        blend = self.mixup.at("input")
        if blend is None:
            return None
        if args:
            return (blend.mix(args[0]), *args[1:]), kwargs
        name, value = next(iter(kwargs.items()))
        return args, {**kwargs, name: blend.mix(value)}


@dataclass
class _MixOutput:
    """A hook that mixes the output of a module."""

    mixup: Mixup
    point: str

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor | None:
        blend = self.mixup.at(self.point)
        return None if blend is None else blend.mix(output)


def soft_cross_entropy(scores: Tensor, targets: Tensor, loss: Loss = "cross_entropy") -> Tensor:
    """The loss of scores (N, classes) against probabilities (N, classes), averaged over the batch.

    ``"bce"`` is the loss of the manifold mixup code of 2018: binary cross-entropy of every class's softmax
    probability, averaged over the classes too. Its gradients are about 1 / classes of cross-entropy's, so learning
    rates differ.
    """
    if loss == "cross_entropy":
        return F.cross_entropy(scores, targets)
    if loss != "bce":
        raise ValueError(f"the loss must be 'cross_entropy' or 'bce', got {loss!r}")
    # log(1 - p) from log p: a probability that rounds to 1 would make it infinite.
    log_p = scores.float().log_softmax(1)
    log_not_p = torch.log(-torch.expm1(log_p.clamp(max=-1e-7)))
    return -(targets * log_p + (1 - targets) * log_not_p).mean()


def _beta(alpha: float, source: torch.Generator) -> Tensor:
    """A number from Beta(alpha, alpha); torch's own distributions take no generator."""
    gammas = torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64), generator=source)
    return gammas[0] / gammas.sum()
