"""The kernels of ``triton_kernels.py`` as operators of ``torch.library``, for programs that ``torch.compile`` compiles.

Inductor sees the kernels themselves: it allocates their memory and launches them from its own code. The balance of the
weight is one operator each way, and the moving averages are a third. The statistics of the input stay plain torch,
because Inductor fuses them, and the adding of their gradient, with the operations around the layer.

Importing this module registers the operators, which needs Triton. The backward operator has no gradient of its own:
compiled programs have no second derivatives in torch. All others use the differentiable form of ``method.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from balnorm._core.backends import triton as backend
from balnorm._core.matrix import WeightMatrix

__all__ = ["balance", "track"]


def _launch(launch: backend.Launch, *tensors: Tensor | None) -> None:
    wrap_triton(launch.kernel)[launch.grid](*tensors, *launch.arguments, **launch.options)


@triton_op("balnorm::balance", mutates_args={})
def balance(
    kernels: Tensor,
    mean: Tensor,
    mass: Tensor,
    gain: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    groups: int,
    position: bool,
    channels_last: bool,
    one_pass: bool,
    shift: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """w'' as kernels and the bias less sum w'' mu, both in ``dtype``, and what the gradient needs of them.

    ``kernels`` are those of a :class:`WeightMatrix`; the vectors have an element for each of them.
    """
    rows = backend.divide_rows(kernels, groups, position)
    saved = kernels.new_empty(rows.scale + (0 if scale is None else rows.outputs))  # the averages are not moved here
    effective, effective_bias = torch.empty_like(kernels, dtype=dtype), kernels.new_empty(rows.outputs, dtype=dtype)
    launch = backend.launch_balance(
        rows, channels_last, one_pass, shift, gain is not None, scale is not None, bias is not None, given=True
    )
    unused = mean, mass, None
    _launch(launch, kernels, mean, mass, saved, gain, scale, bias, effective, effective_bias, *unused)
    return effective, effective_bias, saved


@triton_op("balnorm::balance_backward", mutates_args={})
def balance_backward(
    gradient: Tensor,
    t: Tensor,
    kernels: Tensor,
    saved: Tensor,
    gain: Tensor | None,
    has_scale: bool,
    groups: int,
    position: bool,
    channels_last: bool,
    one_pass: bool,
    shift: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of kernels, gain and (2, number of statistics) statistics, from those of w'' and its bias."""
    rows = backend.divide_rows(kernels, groups, position)
    scale = saved[rows.scale : rows.scale + rows.outputs] if has_scale else None
    dkernels, dgain = torch.empty_like(kernels), kernels.new_empty(rows.outputs)
    partial, dstatistics = kernels.new_empty(rows.partial), kernels.new_empty(2, rows.masses)
    of_rows = backend.launch_rows(rows, channels_last, one_pass, shift, gain is not None, has_scale)
    _launch(of_rows, gradient, t, kernels, saved, gain, scale, dkernels, dgain, partial)
    _launch(backend.launch_statistics(rows, channels_last, shift), partial, saved, dstatistics)
    return dkernels, dgain, dstatistics


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    kernels, mean, _, gain, scale, bias, *ctx.how, _ = inputs
    ctx.save_for_backward(kernels, gain, output[2])
    ctx.has_scale, ctx.statistics, ctx.bias_dtype = scale is not None, mean.shape, None if bias is None else bias.dtype


def _differentiate(ctx: Any, gradient: Tensor, t: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    kernels, gain, saved = ctx.saved_tensors
    groups, _, channels_last, *_ = ctx.how
    gradient = WeightMatrix(kernels, groups, False, channels_last).like(gradient, convert=False)
    dkernels, dgain, dstatistics = balance_backward(
        gradient, t.contiguous(), kernels, saved, gain, ctx.has_scale, *ctx.how
    )
    dmean, dmass = (part.view(ctx.statistics) for part in dstatistics)
    return (
        dkernels,
        dmean,
        dmass,
        None if gain is None else dgain.to(gain.dtype),
        None,
        None if ctx.bias_dtype is None else t.to(ctx.bias_dtype),
        *(None,) * 6,
    )


balance.register_autograd(_differentiate, setup_context=_keep)


@triton_op("balnorm::track", mutates_args={"running_mean", "running_mass", "batches"})
def track(
    mean: Tensor,
    mass: Tensor,
    running_mean: Tensor,
    running_mass: Tensor,
    batches: Tensor,
    by_input: int,
    by_tap: int,
    momentum: float,
) -> None:
    """Add the statistics of a batch to their moving averages, with these strides of channels and taps."""
    before = mean.new_empty(2 * mass.numel() + 1)
    launch = backend.launch_track(mass, (by_input, by_tap), momentum)
    _launch(launch, mean, mass, running_mean, running_mass, batches, before)
