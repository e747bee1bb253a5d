"""The balanced layer as a function of tensors: which form computes it, in which precision, for which mass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from balnorm.core.balance import autocast_device, balance, full_gain, saturate, without_autocast
from balnorm.core.closed_form import closed_form_conv
from balnorm.core.geometry import Geometry, channels_of
from balnorm.core.mass import Processes, batch_mass, leading_samples, update_running_mass
from balnorm.core.options import Options
from balnorm.core.plan import Call, Plan, Running
from balnorm.core.torch_private import recomputing, torch_transforms_the_program

__all__ = ["balanced_conv", "input_mass"]


def balanced_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    output_scale: Tensor | None,
    plan: Plan,
    training: bool,
    running_mass: Tensor | None,
    num_batches_tracked: Tensor | None,
) -> Tensor:
    """``conv(input, w'') + bias``, with w'' balanced for the batch's mass in training and for ``running_mass`` else.

    Args:
        input: (N, C, *in) or (C, *in); (*, C) for a linear layer, which is a convolution over no axis.
        weight, bias: of the plain layer.
        gain: (D,) or ``None`` for ones.
        output_scale: a constant factor of the gain, with one element; ``None`` for 1, and without a gain.
        plan: geometry and options.
        training: use the mass of this batch, and take it into ``running_mass``. Without a ``running_mass``, the batch
            is used in any case.
        running_mass, num_batches_tracked: the buffers, changed in place.
    """
    geometry, options = plan.geometry, plan.options
    _check_shapes(input, weight, gain, running_mass, plan)
    x, samples = _batched(input, geometry, options.stats_fraction)
    compute_dtype, autocast = weight.dtype, autocast_device(x)
    if autocast is not None and x.is_floating_point() and x.dtype != torch.float64:
        # As in torch's own layers the convolution runs in the lower precision; mass and balance do not.
        compute_dtype = torch.get_autocast_dtype(autocast)
        x = x.to(compute_dtype)
    if x.dtype != compute_dtype:
        raise RuntimeError(f"the input is {x.dtype} and the weight {weight.dtype}: convert one, or use torch.autocast")

    # Without gradients and statistics there is nothing to save; the output is then exactly that of the folded layer.
    plain = torch_transforms_the_program() or not (training or torch.is_grad_enabled())
    running = None
    if training and running_mass is not None and not recomputing():
        running = Running(running_mass, num_batches_tracked)
    with without_autocast(autocast):
        mass = None
        if not training and running_mass is not None:
            # A copy: backward may need it after another forward, or DDP's broadcast, has changed the buffer.
            mass = running_mass.clone()
        elif plain or not plan.own_mass:
            among = _processes(options) if training else None  # one process may evaluate alone
            mass = batch_mass(x, samples, geometry, plan.kind, signed=options.signed_input, among=among)
        if plan.padded is not None:
            x, plan = geometry.pad(x), plan.padded
        if not plain:
            y = closed_form_conv(x, weight, bias, gain, mass, Call(plan, samples, output_scale, running))
        else:
            assert mass is not None
            if running is not None:
                update_running_mass(running.mass, running.batches, mass, options.momentum)
            gains, groups, transposed = full_gain(gain, output_scale), geometry.groups, geometry.transposed
            effective = balance(weight, mass, gains, options.one_pass, groups, transposed=transposed)
            low_bias = None if bias is None else saturate(bias, compute_dtype)
            y = plan.geometry.convolve(x, saturate(effective, compute_dtype), low_bias)
    if not geometry.kernel:
        return y.view(*input.shape[:-1], y.shape[1])
    return y if y.dim() == input.dim() else y.squeeze(0)


def input_mass(input: Tensor, plan: Plan, *, exact: bool = False, alone: bool = False) -> Tensor:
    """The mass of a batch of any shape that :func:`balanced_conv` takes.

    ``exact`` is that of :func:`batch_mass`; ``alone`` sums over no other process, whatever the options say.
    """
    options = plan.options
    x, samples = _batched(input, plan.geometry, options.stats_fraction)
    with without_autocast(autocast_device(x)):
        signed, among = options.signed_input, None if alone else _processes(options)
        return batch_mass(x, samples, plan.geometry, plan.kind, signed=signed, among=among, exact=exact)


def _processes(options: Options) -> Processes:
    """The group to sum statistics over, if they are to be summed and torch.distributed is in use."""
    together = options.sync_stats and torch.distributed.is_available() and torch.distributed.is_initialized()
    return (options.process_group,) if together else None


def _batched(input: Tensor, geometry: Geometry, fraction: float) -> tuple[Tensor, int]:
    """``input`` as a batch (N, C, *in), and how many of its leading samples the mass is to count."""
    axes = len(geometry.kernel)
    if axes == 0:
        if input.dim() == 1:
            return input.unsqueeze(0), 1
        return input.flatten(0, -2), leading_samples(input.shape[0], fraction) * math.prod(input.shape[1:-1])
    x = input.unsqueeze(0) if input.dim() == axes + 1 else input
    return x, leading_samples(x.shape[0], fraction)


def _check_shapes(input: Tensor, weight: Tensor, gain: Tensor | None, running_mass: Tensor | None, plan: Plan) -> None:
    """Whatever passes, C reads and writes inside of these tensors only."""
    geometry, axes = plan.geometry, len(plan.geometry.kernel)
    if weight.dim() != axes + 2:
        raise ValueError(f"expected a weight with {axes + 2} dimensions, got {tuple(weight.shape)}")
    if weight.shape[0] % geometry.groups:
        raise ValueError(f"a weight of shape {tuple(weight.shape)} does not divide into {geometry.groups} groups")
    outputs, inputs = channels_of(weight, geometry.groups, geometry.transposed)
    if axes:
        fits = axes < input.dim() <= axes + 2 and input.shape[-axes - 1] == inputs
    else:
        fits = input.dim() >= 1 and input.shape[-1] == inputs
    if not fits:
        expected = f"(N, {inputs}, *in) or ({inputs}, *in) with {axes} spatial axes" if axes else f"(*, {inputs})"
        raise ValueError(f"expected an input of shape {expected}, got {tuple(input.shape)}")
    if gain is not None and gain.shape != (outputs,):
        raise ValueError(f"expected a gain of shape ({outputs},), got {tuple(gain.shape)}")
    if running_mass is not None and running_mass.shape != plan.mass_shape(inputs):
        expected = str(plan.mass_shape(inputs))
        raise ValueError(f"expected a running mass of shape {expected}, got {tuple(running_mass.shape)}")
