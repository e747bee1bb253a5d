"""The mass of an input, how much of it a weight meets per output element; its adjoint; its moving average."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from balnorm.core.geometry import Geometry, over_space
from balnorm.core.options import MassKind
from balnorm.core.torch_private import sum_over_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Processes: TypeAlias = "tuple[ProcessGroup | None] | None"

__all__ = ["Processes", "add_mass_gradient", "batch_mass", "leading_samples", "update_running_mass"]


def batch_mass(
    x: Tensor,
    samples: int,
    geometry: Geometry,
    kind: MassKind,
    *,
    signed: bool = False,
    among: Processes = None,
    exact: bool = False,
) -> Tensor:
    """The mass of the leading ``samples`` of a batch ``x`` (N, C, *in).

    It is differentiable, and takes one pass over the batch: everything after the sum over samples works on one image.

    Args:
        x: the batch, before any padding.
        samples: how many of its leading samples to count.
        geometry: of the convolution.
        kind: ``"channel"`` or ``"position"``.
        signed: take the mass of ``|x|``.
        among: the processes to sum over, a tuple of one group; ``None`` is this process alone.
        exact: count by position even where the kernel :meth:`~Geometry.exceeds` the image. Weights are never balanced
            for that.

    Returns:
        (1, C, 1, ..., 1) for ``channel``, (1, C, *kernel) for ``position``, in float32 or wider. NaN without samples.
    """
    counted = x if samples == x.shape[0] else x[:samples]
    sums = _sum_over_samples(counted.abs() if signed else counted)
    sums = geometry.gather(sums, exact=exact) if kind == "position" else over_space(sums)
    count = samples * geometry.divisor(x.shape[2:], kind)
    return sums / count if among is None else _mean_over_processes(sums, count, *among)


def add_mass_gradient(dx: Tensor, dmass: Tensor, samples: int, geometry: Geometry, kind: MassKind) -> None:
    """Add the adjoint of :func:`batch_mass` to the gradient of its ``x``, in place. (Of one process, not signed.)

    It is the same for every sample that was counted: a constant for each channel, or one image.
    """
    size = dx.shape[2:]
    if samples == 0:
        return
    field = dmass / (samples * geometry.divisor(size, kind))
    if kind == "position":
        field = geometry.scatter(field, size)
    if dx.dim() == 4 and dx.stride(1) == 1:
        field = field.contiguous(memory_format=torch.channels_last)
    dx[:samples].add_(field)


def update_running_mass(
    running_mass: Tensor, num_batches_tracked: Tensor | None, mass: Tensor, momentum: float | None
) -> None:
    r"""Add the mass of a batch to its moving average, in place and without waiting for the device.

    ``running_mass`` becomes ``(1 - a) * running_mass + a * mass`` with ``a = max(momentum, 1 / n)``, n counting this
    batch: the first batch is copied and the next ones are averaged, until the plain average becomes a moving one.
    ``momentum=None`` is the plain average. Without a counter, a is the momentum. A mass that is not finite, or would
    not be in the dtype of ``running_mass``, changes nothing.
    """
    if momentum is None and num_batches_tracked is None:
        raise ValueError("momentum=None needs num_batches_tracked: a plain average has to count its batches")
    with torch.no_grad():
        if mass.dtype != running_mass.dtype:
            mass = mass.to(running_mass.dtype)
        total = mass.sum(dtype=torch.promote_types(mass.dtype, torch.float32))
        finite = (total - total) == 0  # as isfinite, in fewer operations
        mass = torch.where(finite, mass, running_mass)
        if num_batches_tracked is None:
            running_mass.lerp_(mass, float(momentum))  # type: ignore[arg-type]
            return
        num_batches_tracked.add_(finite)
        # at most 1: if the very first mass is not finite, the count is 0 and its reciprocal infinite
        rate = num_batches_tracked.to(total.dtype).reciprocal().clamp_(momentum, 1.0)
        running_mass.lerp_(mass, rate.to(mass.dtype))


def leading_samples(samples: int, fraction: float) -> int:
    """How many samples a leading fraction of a batch has: to the nearest number (halves up), and at least one."""
    return samples if fraction == 1.0 else min(samples, max(1, int(samples * fraction + 0.5)))


def _mean_over_processes(sums: Tensor, count: int, group: ProcessGroup | None) -> Tensor:
    """``sums / count``, with both summed over the processes of ``group`` in one differentiable collective."""
    flat = sum_over_processes(torch.cat([sums.flatten(), sums.new_full((1,), count)]), group)
    return flat[:-1].view_as(sums) / flat[-1]


def _sum_over_samples(x: Tensor) -> Tensor:
    """``x`` (N, C, *in) summed to (1, C, *in), in at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dim() == 4 and not torch.is_grad_enabled():
        n, c, h, w = x.shape
        if c > 1 and x.stride() == (c * h * w, 1, c * w, c):
            # In channels_last format the sum over a flat view takes an eighth of the time.
            sums = x.as_strided((n, c * h * w), (c * h * w, 1)).sum(0, dtype=dtype)
            return sums.as_strided((1, c, h, w), (c * h * w, 1, c * w, c))
    return x.sum(0, keepdim=True, dtype=dtype)
