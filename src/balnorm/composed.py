"""Mass and balance as compositions of differentiable torch operations: the plain statement of the method.

What runs in eager training is the closed form in :mod:`balnorm.fused`; this form serves wherever torch transforms the
program itself (compilation, export, ``torch.func``), for second derivatives, and as a check of the closed form.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from balnorm.geometry import Geometry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "MASSES",
    "MassKind",
    "balance",
    "batch_mass",
    "by_output",
    "from_by_output",
    "full_precision",
    "leading",
    "mass_of_sums",
    "rounding_error",
    "saturate",
]

MassKind = Literal["channel", "position"]
MASSES: tuple[MassKind, ...] = ("channel", "position")


def balance(
    weight: Tensor,
    mass: Tensor,
    gain: Tensor | None = None,
    one_pass: bool = True,
    groups: int = 1,
    *,
    transposed: bool = False,
) -> Tensor:
    r"""The effective weight w'': w shifted and scaled so that positive and negative weights contribute equally.

    With sums over all but the output channel d, and m broadcast over w:

    .. math::
        b_d = -\frac{\sum m\,w_d}{\sum m}, \qquad w'_d = w_d + b_d, \qquad
        s_d = \frac{1}{\sum m\,w'_d\,I}, \qquad w''_d = \mathrm{gain}_d\,s_d\,w'_d

    where :math:`I = [w_d > 0]` in one pass and :math:`[w'_d > 0]` in two. There is no epsilon. Where :math:`\sum m` or
    the denominator of s vanishes to rounding error (dead inputs, equal weights, in one pass weights of one sign), w''
    is zero, and so are its gradients.

    Args:
        weight: (D, C / groups, \*kernel); (C, D / groups, \*kernel) if ``transposed``; (D, C) for a linear layer.
        mass: (1, C, 1, ..., 1) or (1, C, \*kernel); (1, C) for a linear layer.
        gain: (D,), or ``None`` for ones.
        one_pass: which of the two definitions of I.
        groups: groups of the convolution.
        transposed: whether ``weight`` belongs to a transposed convolution.

    Returns:
        w'', in the shape, dtype and memory format of ``weight``.

    Example:
        >>> m = torch.tensor([[1.0, 3.0]])
        >>> w = balance(torch.tensor([[1.0, -1.0], [2.0, 1.0]]), m, one_pass=False)
        >>> w  # in each row the positive weight contributes +1 and the negative one -1
        tensor([[ 1.0000, -0.3333],
                [ 1.0000, -0.3333]])
        >>> (m * w).sum(1)
        tensor([0., 0.])
    """
    dtype = torch.promote_types(torch.promote_types(weight.dtype, mass.dtype), torch.float32)
    w = by_output(weight, groups, transposed).to(dtype)
    m = mass.to(dtype).view(groups, 1, mass.shape[1] // groups, *mass.shape[2:])
    m = m.expand(-1, -1, *w.shape[2:])
    per_output = tuple(range(2, w.dim()))

    # w'' is homogeneous of degree -1 in m and of degree 0 in w. So m is measured in units of its own size, and the
    # denominator in units of its own, both as constants: nothing overflows for inputs or weights of any magnitude.
    size = m.detach().abs().sum(per_output, keepdim=True)
    alive = _present(m.detach().sum(per_output, keepdim=True), size, w[0, 0].numel())
    size = torch.where(alive, size, 1.0)
    m = torch.where(alive, m, 0.0) / size
    total = m.sum(per_output, keepdim=True)
    share = m / torch.where(alive, total, 1.0)

    b = -(share * w).sum(per_output, keepdim=True)
    shifted = w + b
    positive = w > 0 if one_pass else shifted > 0
    denominator = (share * torch.where(positive, shifted, 0.0)).sum(per_output, keepdim=True)
    alive = alive & (denominator.abs() > rounding_error(w[0, 0].numel(), dtype) * b.abs())
    unit = torch.where(alive, denominator.detach().abs(), 1.0)
    scale = torch.where(alive, 1.0, 0.0) / torch.where(alive, denominator / unit * total, 1.0)
    if gain is not None:
        scale = scale * gain.to(dtype).view(scale.shape[:2] + (1,) * len(per_output))
    balanced = (shifted / unit) * (scale / size)
    return saturate(from_by_output(balanced, transposed), weight.dtype)


def batch_mass(
    x: Tensor,
    geometry: Geometry,
    mass: MassKind,
    stats_fraction: float = 1.0,
    signed_input: bool = False,
    sync_stats: bool = False,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """The mass of a batch (N, C, *in); for a linear layer of a batch (N, *, C)."""
    x = leading(x, stats_fraction)
    if not geometry.kernel:
        x = x.flatten(0, -2)
    if signed_input:
        x = x.abs()
    sums = x.sum(0, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    together = sync_stats and torch.distributed.is_available() and torch.distributed.is_initialized()
    return mass_of_sums(sums, x.shape[0], geometry, mass, process_group, together)


def mass_of_sums(
    sums: Tensor,
    samples: int,
    geometry: Geometry,
    mass: MassKind,
    process_group: ProcessGroup | None = None,
    together: bool = False,
) -> Tensor:
    """The mass, from the sum (1, C, *in) of so many samples: it takes no second pass over the batch."""
    size = sums.shape[2:]
    if mass == "position":
        count = samples * math.prod(geometry.output_size(size))
        sums = geometry.gather(sums)
    else:
        count = samples * geometry.channel_count(size)
        if geometry.kernel:
            sums = sums.sum(tuple(range(2, sums.dim())), keepdim=True)
    return _mean_over_processes(sums, count, process_group) if together else sums / count


def leading(x: Tensor, fraction: float) -> Tensor:
    """The leading fraction of a batch, to the nearest number of samples (halves up) and at least one."""
    return x if fraction == 1.0 else x[: max(1, int(x.shape[0] * fraction + 0.5))]


def full_precision(device: str) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast, if it is on, lowers no precision."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _mean_over_processes(sums: Tensor, count: int, group: ProcessGroup | None) -> Tensor:
    """``sums / count``, with both summed over the processes of ``group`` in one differentiable collective."""
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.distributed_c10d import _get_default_group

    flat = torch.cat([sums.flatten(), sums.new_full((1,), count)])
    flat = cast(Tensor, all_reduce(flat, "sum", group if group is not None else _get_default_group()))
    return flat[:-1].view_as(sums) / flat[-1]


def by_output(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """View ``weight`` as (groups, D / groups, C / groups, *kernel)."""
    grouped = weight.view(groups, weight.shape[0] // groups, *weight.shape[1:])
    return grouped.transpose(1, 2) if transposed else grouped


def from_by_output(weight: Tensor, transposed: bool) -> Tensor:
    """The inverse of :func:`by_output`."""
    return (weight.transpose(1, 2) if transposed else weight).flatten(0, 1)


def _present(total: Tensor, size: Tensor, terms: int) -> Tensor:
    """Whether masses of this total and this sum of magnitudes can be balanced: false also for infinity and NaN."""
    limits = torch.finfo(total.dtype)
    return total.abs() > (size * rounding_error(terms, total.dtype)).clamp(min=limits.tiny / limits.eps)


def rounding_error(terms: int, dtype: torch.dtype) -> float:
    """A generous bound on the relative error of a sum of so many terms: what is smaller counts as zero."""
    return float(4 * torch.finfo(dtype).eps * math.sqrt(terms))


def saturate(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``; what float16 cannot hold becomes its largest number, not infinity."""
    if weight.dtype == dtype:
        return weight
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        weight = weight.clamp(-largest, largest)
    return weight.to(dtype)
