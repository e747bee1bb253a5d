"""The balanced layer as a function of tensors: in which precision, for which statistics, in which form.

There are two forms. The differentiable form, :func:`differentiable_conv`, is made of operations that torch can
differentiate. The closed form, :class:`_BalancedConv`, computes the same as one autograd function. For the backward
pass it keeps what a plain convolution keeps, the input and the raw weight, and a few vectors. It computes the effective
weight and the masks again.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from balnorm._core import backends, method
from balnorm._core.backends import Running, Setup
from balnorm._core.backends.torch import ORDINARY, check_memory
from balnorm._core.geometry import Geometry, channels_of
from balnorm._core.lean import saved_input, to_save
from balnorm._core.matrix import WeightMatrix
from balnorm._core.method import Peers, Statistics, effective_bias, leading_samples, saturate
from balnorm._core.options import Options
from balnorm._core.torch_private import (
    apply_function,
    is_batched_gradient,
    is_view,
    recomputing,
    torch_transforms_the_program,
)

__all__ = ["balanced_conv", "input_statistics"]


def balanced_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    output_scale: Tensor | None,
    geometry: Geometry,
    options: Options,
    training: bool,
    running_mean: Tensor | None,
    running_mass: Tensor | None,
    num_batches_tracked: Tensor | None,
) -> Tensor:
    """``conv(input, w'') + bias - sum w'' mu``, balanced for the batch in training, else for the running statistics.

    Args:
        input: (N, C, *in) or (C, *in); (*, C) for a linear layer, which is a convolution over no axis.
        weight, bias: of the plain layer.
        gain: (D,) or ``None`` for ones.
        output_scale: a constant factor of the gain, with D elements or one; ``None`` for 1.
        geometry, options: how the kernel meets the input; how the weight is balanced.
        training: use the statistics of this batch, and add them to the running ones. Without running statistics,
            evaluation uses the batch too.
        running_mean, running_mass, num_batches_tracked: the buffers, changed in place once the output is computed.
    """
    transformed = torch_transforms_the_program()
    autocast = autocast_device(input)
    lowered = None if autocast is None else torch.get_autocast_dtype(autocast)
    tensors = (weight, bias, gain, output_scale, running_mean, running_mass, num_batches_tracked)
    setup = _setup_of(input, *tensors, geometry, options, training, lowered, transformed)
    x = input if input.dim() == weight.dim() else _batched(input, geometry)
    if x.dtype != setup.dtype:
        x = x.to(setup.dtype)
    if not transformed and x.is_neg():
        x = x.resolve_neg()  # a view such as z.conj().imag, whose memory holds the negated values

    running = given = None
    if running_mass is not None:
        running_mean = torch.zeros_like(running_mass) if running_mean is None else running_mean
        running = Running(running_mean, running_mass, num_batches_tracked)
    # Without gradients and statistics there is nothing to save; the output is then exactly that of the folded layer.
    differentiable = transformed or options.equalise or not (training or torch.is_grad_enabled())
    backend = backends.torch if differentiable else backends.choose(x, *tensors)
    if training and backend is backends.cpu:
        check_memory(weight)  # it may be copied before C checks the memory of its arguments
    elif not transformed:
        check_memory(*tensors)
    if running is not None and not training:
        # Copies: backward may need them after another forward, or DDP's broadcast, has changed the buffers.
        given = Statistics(running.mean.clone(), running.mass.clone())
        running = None
    scale = output_scale
    if scale is not None and scale.shape != (setup.outputs,):
        scale = scale.expand(setup.outputs)
    if running is not None and recomputing():
        running = None
    operators = transformed and not options.equalise and backends.triton.has_operators(x, *tensors)
    with without_autocast(autocast):
        if differentiable:
            # The scale is copied for the same reason; backends and operators copy it themselves.
            scale = scale if scale is None or operators else scale.detach().clone()
            y, found = differentiable_conv(x, weight, bias, gain, scale, given, setup, operators)
            if running is not None:  # last, so that a refused call has not moved the averages
                track = backends.triton.compiled_track if operators else backend.track
                track(running, found, options.momentum)
        else:
            y = apply_function(_BalancedConv, x, weight, bias, gain, scale, given, running, setup, backend)
    if not geometry.kernel:
        return y if input.dim() == 2 else y.view(*input.shape[:-1], y.shape[1])
    return y if y.dim() == input.dim() else y.squeeze(0)


def differentiable_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    scale: Tensor | None,
    given: Statistics | None,
    setup: Setup,
    operators: bool = False,
) -> tuple[Tensor, Statistics]:
    """A balanced convolution of ``x`` (N, C, *in) in differentiable operations, and the statistics that it used.

    ``operators`` says that the balance of the weight is to be one operation, of Triton's kernels.
    """
    geometry, options = setup.geometry, setup.options
    found = given
    if found is None:
        found = method.statistics(x, setup.samples, geometry, setup.kind, centred=options.centred, among=setup.among)
    if operators:
        effective, offset = backends.triton.compiled_balance(weight, bias, gain, scale, found, setup, x.dtype)
        return geometry.convolve(x, effective, offset), found
    gains = gain if scale is None else scale if gain is None else gain * scale
    effective, offset = method.balance(
        weight,
        found.mass,
        gains,
        options.one_pass,
        geometry.groups,
        shift=setup.shift,
        transposed=geometry.transposed,
        mean=found.mean,
        equalise=options.equalise,
    )
    return geometry.convolve(x, saturate(effective, x.dtype), effective_bias(bias, offset, x.dtype)), found


def input_statistics(
    input: Tensor, geometry: Geometry, options: Options, *, exact: bool = False, alone: bool = False
) -> Statistics:
    """The statistics of a batch of any shape that :func:`balanced_conv` takes.

    ``exact`` is that of :func:`method.statistics`; ``alone`` leaves out other processes, whatever the options say.
    """
    x, samples = _batched(input, geometry), _leading_samples(input, geometry, options.stats_fraction)
    among = None if alone else _peers(options)
    with without_autocast(autocast_device(x)):
        kind = geometry.kind_of(options.mass)
        return method.statistics(x, samples, geometry, kind, centred=options.centred, among=among, exact=exact)


def _peers(options: Options) -> Peers:
    """The processes to sum statistics over, if the options ask for it and torch.distributed is initialised."""
    together = options.sync_stats and torch.distributed.is_available() and torch.distributed.is_initialized()
    return (options.process_group,) if together else None


class _BalancedConv(torch.autograd.Function):
    """:func:`differentiable_conv` with its gradient in closed form, computed by ``backend``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gain: Tensor | None,
        scale: Tensor | None,
        given: Statistics | None,
        running: Running | None,
        setup: Setup,
        backend: Any,
    ) -> Tensor:
        geometry = setup.geometry
        matrix = WeightMatrix.of(weight, geometry)
        found = backend.forward(x, matrix, bias, gain, scale, given, running, setup)
        try:
            y = geometry.convolve(x, matrix.weight(found.effective, weight), found.bias)
        except BaseException:
            if found.undo is not None:
                found.undo()
            raise
        if is_view(y):
            # conv1d returns a view; rewrap it as a base tensor so that it can be modified in place.
            y = y.new_empty(0).set_(y)  # type: ignore[call-overload]
        ctx.setup, ctx.backend, ctx.bias_dtype = setup, backend, None if bias is None else bias.dtype
        ctx.channels_last = matrix.channels_last
        mean, mass = given[:2] if given is not None else (None, None)
        ctx.save_for_backward(to_save(ctx, x), weight, gain, found.scale, mean, mass, *found.saved)
        # Last, so that a refused call has not moved the averages.
        if running is not None and found.undo is None:
            backend.track(running, found.statistics, setup.options.momentum)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # With create_graph=True this gradient will itself be differentiated; is_grads_batched=True rules out work in
        # place.
        differentiable = torch.is_grad_enabled() or is_batched_gradient(dy)
        autocast = autocast_device(dy)
        if autocast is None and not differentiable:
            return _closed_form_backward(ctx, dy)
        with without_autocast(autocast):
            return _differentiable_backward(ctx, dy) if differentiable else _closed_form_backward(ctx, dy)


def _closed_form_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gain, scale, _, _, *saved = ctx.saved_tensors
    x = saved_input(ctx, x)
    setup, backend = ctx.setup, ctx.backend
    geometry = setup.geometry
    # A hook on saved tensors may return the weight in another memory format, as torch's save_on_cpu can. The
    # other tensors that the forward pass saved have the order that the weight had then.
    matrix = WeightMatrix.of(weight, geometry, ctx.channels_last)
    needs_x, needs_weight, needs_bias, needs_gain = ctx.needs_input_grad[:4]
    needs_g = needs_weight or needs_gain or (needs_x and setup.takes_statistics)

    effective = matrix.weight(backend.effective(matrix, gain, scale, saved, setup, x.dtype), weight)
    adds_up = needs_g and backend is backends.cpu and backends.cpu.adds_up(dy, matrix, setup)
    needs_t = (needs_bias or needs_g) and not adds_up
    dx, g, t = geometry.convolve_backward(dy, x, effective, [needs_x, needs_g, needs_t])
    dweight = dgain = None
    if g is not None:
        if adds_up:
            t = matrix.values.new_empty(setup.outputs)
            kernels, dgain = backends.cpu.backward(g, t, dx, x, matrix, gain, scale, saved, setup, dy)
        else:
            kernels, dgain = backend.backward(g, t, dx, x, matrix, gain, scale, saved, setup)
        dweight = matrix.weight(kernels, weight)
    return (
        dx,
        _as(dweight, weight.dtype) if needs_weight else None,
        _as(t, ctx.bias_dtype) if needs_bias else None,
        _as(dgain, gain.dtype) if needs_gain else None,
        None,
        None,
        None,
        None,
        None,
    )


def _differentiable_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradient, which can itself be differentiated: that of the differentiable form."""
    create_graph = torch.is_grad_enabled()
    x, weight, gain, scale, mean, mass, *saved = ctx.saved_tensors
    if ctx.backend is backends.cpu:
        scale = backends.cpu.scale_of(weight, scale, saved, ctx.setup)
    given = None if mass is None else Statistics(mean, mass)
    needs_x, needs_weight, needs_bias, needs_gain = ctx.needs_input_grad[:4]
    with torch.enable_grad():
        x = saved_input(ctx, x)
        # Not view_as: it changes the strides of a single sample in channels_last, for which torch's grouped
        # convolutions give wrong results.
        views: list[Any] = [None if tensor is None else tensor[...] for tensor in (x, weight, gain)]
        x, weight, gain = views
        y, _ = differentiable_conv(x, weight, None, gain, scale, given, ctx.setup)
    inputs = ((x, needs_x), (weight, needs_weight), (gain, needs_gain))
    wanted = [tensor for tensor, needed in inputs if needed]
    gradients = iter(torch.autograd.grad(y, wanted, dy, create_graph=create_graph) if wanted else ())
    dx, dweight, dgain = (next(gradients) if needed else None for _, needed in inputs)
    dbias = dy.sum([axis for axis in range(dy.dim()) if axis != 1]).to(ctx.bias_dtype) if needs_bias else None
    return dx, dweight, dbias, dgain, *(None,) * 5


def _as(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)


def _batched(input: Tensor, geometry: Geometry) -> Tensor:
    """``input`` as a batch (N, C, *in)."""
    axes = len(geometry.kernel)
    if axes == 0:
        return input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)
    return input.unsqueeze(0) if input.dim() == axes + 1 else input


def _leading_samples(input: Tensor, geometry: Geometry, fraction: float) -> int:
    """How many leading samples the statistics count, in the batch that :func:`_batched` makes of ``input``."""
    axes = len(geometry.kernel)
    if input.dim() == axes + 1:
        return 1
    inner = math.prod(input.shape[1:-1]) if axes == 0 else 1
    return leading_samples(input.shape[0], fraction) * inner


_setups: dict[Any, Setup] = {}
_MOST_SETUPS = 1000  # a limit for images of ever-changing sizes


def _setup_of(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    output_scale: Tensor | None,
    running_mean: Tensor | None,
    running_mass: Tensor | None,
    num_batches_tracked: Tensor | None,
    geometry: Geometry,
    options: Options,
    training: bool,
    lowered: torch.dtype | None,
    transformed: bool,
) -> Setup:
    """Everything about a call but its tensors, from shapes, strides and types: derived once for all that agree."""
    key = None
    if not transformed and not options.sync_stats and type(input) in ORDINARY:
        key = (
            geometry,
            options,
            training,
            lowered,
            input.shape,
            input.stride(),
            input.dtype,
            weight.shape,
            weight.stride(),
            weight.dtype,
            None if bias is None else bias.shape,
            None if gain is None else gain.shape,
            None if output_scale is None else output_scale.shape,
            None if running_mean is None else running_mean.shape,
            None if running_mass is None else running_mass.shape,
            None if num_batches_tracked is None else num_batches_tracked.shape,
        )
        found = _setups.get(key)
        if found is not None:
            return found
    outputs, inputs = _check_shapes(input, weight, bias, gain, output_scale, geometry)
    kind = geometry.kind_of(options.mass)
    if running_mass is not None:
        expected = geometry.statistics_shape(inputs, kind)
        for name, buffer in (("mass", running_mass), ("mean", running_mean)):
            if buffer is not None and buffer.shape != expected:
                raise ValueError(f"expected a running {name} of shape {expected}, got {tuple(buffer.shape)}")
        if num_batches_tracked is not None and num_batches_tracked.numel() != 1:
            raise ValueError(f"num_batches_tracked must be one number, got shape {tuple(num_batches_tracked.shape)}")
    dtype = weight.dtype
    if lowered is not None and input.is_floating_point() and input.dtype != torch.float64:
        dtype = lowered  # for the convolution, as in torch's own layers; statistics and balance keep their precision
    elif input.dtype != dtype:
        raise RuntimeError(f"the input is {input.dtype} and the weight {dtype}: convert one, or use torch.autocast")
    found = Setup(
        geometry,
        options,
        kind,
        options.shifts(inputs // geometry.groups),
        _leading_samples(input, geometry, options.stats_fraction),
        _peers(options) if training else None,  # one process may evaluate alone
        training or running_mass is None,
        outputs,
        dtype,
    )
    if key is not None:
        if len(_setups) >= _MOST_SETUPS:
            _setups.clear()
        _setups[key] = found
    return found


def _check_shapes(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    output_scale: Tensor | None,
    geometry: Geometry,
) -> tuple[int, int]:
    """Refuse tensors that do not fit together; return the numbers of output and input channels."""
    axes = len(geometry.kernel)
    if not weight.is_floating_point():
        raise TypeError(f"a weight must have floating-point numbers to be balanced, got {weight.dtype}")
    if weight.dim() != axes + 2:
        raise ValueError(f"expected a weight with {axes + 2} dimensions, got {tuple(weight.shape)}")
    if tuple(weight.shape[2:]) != geometry.kernel:
        raise ValueError(
            f"the weight has a kernel of size {tuple(weight.shape[2:])}, and the layer was made for {geometry.kernel}: "
            "make a new layer for this weight"
        )
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
    for name, vector in (("bias", bias), ("gain", gain)):
        if vector is not None and vector.shape != (outputs,):
            raise ValueError(f"expected a {name} of shape ({outputs},), got {tuple(vector.shape)}")
    if output_scale is not None and output_scale.shape not in ((), (1,), (outputs,)):
        raise ValueError(f"expected an output scale of shape ({outputs},), got {tuple(output_scale.shape)}")
    return outputs, inputs


def autocast_device(tensor: Tensor) -> str | None:
    """The device type of this tensor if autocast is on for it, else ``None``."""
    device = "cpu" if tensor.is_cpu else tensor.device.type  # the first costs a tenth of the second
    # These two have autocast, and torch 2.4 cannot compile the other question.
    known = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if known and torch.is_autocast_enabled(device):
        return device
    return None


def without_autocast(device: str | None) -> contextlib.AbstractContextManager[object]:
    """A context that turns autocast off for this device; ``None`` changes nothing."""
    return _NOTHING if device is None else torch.autocast(device, enabled=False)


_NOTHING = contextlib.nullcontext()
