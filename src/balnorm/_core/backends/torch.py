"""The closed form in torch operations: for every device, and for the calls that other backends pass on.

These functions are the contract: another backend has functions of the same names, and may pass any call on to these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from balnorm._core import method
from balnorm._core.geometry import Geometry
from balnorm._core.matrix import WeightMatrix
from balnorm._core.method import Peers, Rows, Statistics
from balnorm._core.options import MassKind, Options

__all__ = [
    "ORDINARY",
    "Forward",
    "Running",
    "Setup",
    "backward",
    "check_memory",
    "copy_of",
    "effective",
    "forward",
    "track",
]

ORDINARY = (Tensor, nn.Parameter)
"""The types of tensors that a kernel may read: torch's own. A subclass may have no memory."""


class Running(NamedTuple):
    """The moving averages of the statistics and the number of batches in them, updated in place."""

    mean: Tensor
    mass: Tensor
    batches: Tensor | None


@dataclass(eq=False, slots=True)
class Setup:
    """Everything about a call of a layer but its tensors. Calls with tensors of the same shapes and types share it."""

    geometry: Geometry
    options: Options
    kind: MassKind
    shift: bool
    samples: int
    """How many leading samples of the batch the statistics are taken from."""
    among: Peers
    takes_statistics: bool
    """Whether the weight is balanced for the statistics of this batch, through which a gradient then flows to it."""
    outputs: int
    dtype: torch.dtype
    """The precision of the convolution."""
    prepared: dict[Any, Any] = field(default_factory=dict)
    """What a backend has prepared for these calls, under keys of its choice."""


class Forward(NamedTuple):
    """What :func:`forward` returns."""

    effective: Tensor
    """w'' as kernels, in the precision of the convolution."""
    bias: Tensor
    """The bias less sum w'' mu, (D,), in the same precision."""
    scale: Tensor | None
    """A copy of the scale, unless it is in ``saved``: the buffer may have changed before backward, as by DDP."""
    statistics: Any
    """The statistics, in the form that :func:`track` takes."""
    saved: tuple[Tensor, ...]
    """Tensors for :func:`effective` and :func:`backward`."""
    undo: Callable[[], None] | None = None
    """Takes the batch out of the moving averages if the convolution fails; ``None`` if it is not in them yet."""


def forward(
    x: Tensor,
    matrix: WeightMatrix,
    bias: Tensor | None,
    gain: Tensor | None,
    scale: Tensor | None,
    given: Statistics | None,
    running: Running | None,  # noqa: ARG001
    setup: Setup,
) -> Forward:
    """The effective weight and bias for the statistics of ``x``, or for given ones.

    ``running`` are the averages to update. A backend may update them here and return how to undo that; otherwise
    :func:`track` is called once the output is computed.
    """
    found = batch_statistics(x, setup) if given is None else given
    w = matrix.rows(matrix.values)
    mu, a = (matrix.row(statistic.to(w.dtype)) for statistic in found[:2])
    rows = method.measure(w, mu, a, setup.options.one_pass, setup.shift)
    w2, offset = method.effective_rows(w, _column(gain, scale, rows.mean), rows)
    effective = method.saturate(matrix.kernels(w2), x.dtype)
    saved = (*rows, *(() if found.centre is None else (found.centre,)))
    return Forward(effective, method.effective_bias(bias, offset.flatten(), x.dtype), copy_of(scale), found, saved)


def effective(
    matrix: WeightMatrix,
    gain: Tensor | None,
    scale: Tensor | None,
    saved: Sequence[Tensor],
    setup: Setup,  # noqa: ARG001
    dtype: torch.dtype,
) -> Tensor:
    """Recompute the effective weight, as kernels of this ``dtype``."""
    rows = Rows(*saved[:7])
    v = rows.v(matrix.rows(matrix.values))
    v.mul_(rows.inverse_divisor * _column(gain, scale, rows.mean))
    return method.saturate(matrix.kernels(v), dtype)


def backward(
    gradient: Tensor,
    t: Tensor,
    dx: Tensor | None,
    x: Tensor,
    matrix: WeightMatrix,
    gain: Tensor | None,
    scale: Tensor | None,
    saved: Sequence[Tensor],
    setup: Setup,
) -> tuple[Tensor, Tensor]:
    """The gradients of the weight, as kernels, and of the gain, from dL/dw'', which it may overwrite, and t.

    dL/dw'' has the shape of the weight, and the precision and memory format that the convolution gave it. The
    gradient through the statistics is added to ``dx``.
    """
    gradient = matrix.like(gradient)
    rows, w = Rows(*saved[:7]), matrix.rows(matrix.values)
    g = _column(gain, scale, rows.mean)
    t = t.to(w.dtype).view_as(rows.mean)
    lone = matrix.values.shape[1] == 1 and setup.kind == "channel"
    found = method.gradient_rows(matrix.rows(gradient), t, w, g, rows, setup.options.one_pass, setup.shift, lone)
    if dx is not None and setup.takes_statistics:
        dmean, dmass = (matrix.statistic(row, setup.kind) for row in (found.dmean, found.dmass))
        add_statistics_gradient(dx, x, Statistics(dmean, dmass, saved[7] if len(saved) > 7 else None), setup)
    s = found.s.flatten()
    return matrix.kernels(found.dw), s if scale is None else s * scale.to(s.dtype)


def copy_of(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.clone()


def track(running: Running, statistics: Statistics, momentum: float | None) -> None:
    """Add the statistics of a batch to their moving averages."""
    method.update_running(*running, *statistics[:2], momentum)


def batch_statistics(x: Tensor, setup: Setup) -> Statistics:
    """The statistics of ``x``, over all processes if they are shared."""
    return method.batch_statistics(
        x, setup.samples, setup.geometry, setup.kind, centred=setup.options.centred, among=setup.among
    )


def add_statistics_gradient(dx: Tensor, x: Tensor, gradient: Statistics, setup: Setup) -> None:
    """Add the adjoint of :func:`batch_statistics` to ``dx``."""
    method.add_statistics_gradient(dx, x, gradient, setup.samples, setup.geometry, setup.kind, setup.among)


def _column(gain: Tensor | None, scale: Tensor | None, like: Tensor) -> Tensor | float:
    """gain times scale, as a column; either may be ``None`` for 1."""
    if gain is None and scale is None:
        return 1.0
    product = gain if scale is None else scale if gain is None else gain.to(like.dtype) * scale.to(like.dtype)
    assert product is not None
    return product.to(like.dtype).view_as(like)


def check_memory(*tensors: Tensor | None) -> None:
    """Refuse tensors that have lost their memory, which torch's own operations do not notice."""
    for tensor in tensors:
        if tensor is None or type(tensor) not in ORDINARY:
            continue
        if not tensor.untyped_storage().nbytes() and tensor.numel():
            raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} has lost its memory: its storage was resized")
