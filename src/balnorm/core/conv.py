"""The balanced layer as a function of tensors: which form computes it, in which precision, for which mass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from balnorm.core.balance import balance, saturate, without_autocast
from balnorm.core.closed_form import Plan, Running, closed_form_conv
from balnorm.core.geometry import Geometry
from balnorm.core.mass import Processes, batch_mass, leading_samples, update_running_mass
from balnorm.core.options import MassKind, Options
from balnorm.core.torch_private import recomputing, torch_transforms_the_program

__all__ = ["balanced_conv", "input_mass"]


def balanced_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    output_scale: Tensor | None,
    geometry: Geometry,
    options: Options,
    training: bool,
    running_mass: Tensor | None,
    num_batches_tracked: Tensor | None,
) -> Tensor:
    """``conv(input, w'') + bias``, with w'' balanced for the batch's mass in training and for ``running_mass`` else.

    Args:
        input: (N, C, *in) or (C, *in); (*, C) for a linear layer, which is a convolution over no axis.
        weight, bias: of the plain layer.
        gain: (D,) or ``None`` for ones.
        output_scale: a constant factor of the gain, with one element; ``None`` for 1.
        geometry: of the plain layer.
        options: how to balance.
        training: use the mass of this batch, and take it into ``running_mass``. Without a ``running_mass``, the batch
            is used in any case.
        running_mass, num_batches_tracked: the buffers, changed in place.
    """
    _check_shape(input, weight, geometry)
    x, samples = _batched(input, geometry, options.stats_fraction)
    device = x.device.type
    compute_dtype = weight.dtype
    castable = x.is_floating_point() and x.dtype != torch.float64
    if castable and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # As in torch's own layers the convolution runs in the lower precision; mass and balance do not.
        compute_dtype = torch.get_autocast_dtype(device)
        x = x.to(compute_dtype)
    if x.dtype != compute_dtype:
        raise RuntimeError(f"the input is {x.dtype} and the weight {weight.dtype}: convert one, or use torch.autocast")

    # Without gradients and statistics there is nothing to save; the output is then exactly that of the folded layer.
    plain = torch_transforms_the_program() or not (training or torch.is_grad_enabled())
    kind = mass_kind(geometry, options)
    running = None
    if training and running_mass is not None and not recomputing():
        running = Running(running_mass, num_batches_tracked, options.momentum)
    with without_autocast(device):
        mass: Tensor | None = None
        if not training and running_mass is not None:
            # A copy: backward may need it after another forward, or DDP's broadcast, has changed the buffer.
            mass = running_mass.clone()
        elif plain or options.signed_input or options.sync_stats or geometry.pads_beforehand:
            among = processes(options) if training else None  # one process may evaluate alone
            mass = batch_mass(x, samples, geometry, kind, signed=options.signed_input, among=among)
        if geometry.pads_beforehand:
            x, geometry = geometry.pad(x), geometry.padded()
        if not plain:
            plan = Plan(geometry, kind, options.one_pass, samples)
            y = closed_form_conv(x, weight, bias, gain, output_scale, mass, plan, running)
        else:
            assert mass is not None
            if running is not None:
                update_running_mass(running.mass, running.batches, mass, running.momentum)
            full_gain = gain if gain is None or output_scale is None else gain * output_scale
            effective = balance(
                weight, mass, full_gain, options.one_pass, geometry.groups, transposed=geometry.transposed
            )
            low_bias = None if bias is None else saturate(bias, compute_dtype)
            y = geometry.convolve(x, saturate(effective, compute_dtype), low_bias)
    if not geometry.kernel:
        return y.view(*input.shape[:-1], y.shape[1])
    return y if y.dim() == input.dim() else y.squeeze(0)


def input_mass(input: Tensor, geometry: Geometry, options: Options) -> Tensor:
    """The mass of a batch of any shape that :func:`balanced_conv` takes."""
    x, samples = _batched(input, geometry, options.stats_fraction)
    kind, among = mass_kind(geometry, options), processes(options)
    with without_autocast(x.device.type):
        return batch_mass(x, samples, geometry, kind, signed=options.signed_input, among=among)


def mass_kind(geometry: Geometry, options: Options) -> MassKind:
    """Under a pointwise kernel the two masses are the same, and ``channel`` is the cheaper one."""
    return "channel" if geometry.is_pointwise else options.mass


def processes(options: Options) -> Processes:
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


def _check_shape(input: Tensor, weight: Tensor, geometry: Geometry) -> None:
    axes = len(geometry.kernel)
    if axes == 0:
        channels, expected = weight.shape[1], f"(*, {weight.shape[1]})"
        fits = input.dim() >= 1 and input.shape[-1] == channels
    else:
        channels = weight.shape[0] if geometry.transposed else weight.shape[1] * geometry.groups
        expected = f"(N, {channels}, *in) or ({channels}, *in) with {axes} spatial axes"
        fits = axes < input.dim() <= axes + 2 and input.shape[-axes - 1] == channels
    if not fits:
        raise ValueError(f"expected an input of shape {expected}, got {tuple(input.shape)}")
