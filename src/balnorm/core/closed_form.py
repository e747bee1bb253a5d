"""Mass, balance and convolution as one autograd function with a closed-form backward pass.

It computes what :mod:`balnorm.core.balance` composes. For the backward pass it keeps what a plain convolution keeps,
the input and the raw weight, and a few vectors; the effective weight and the masks are computed again.

The weight is seen as a matrix with a row for each output kernel. With the total mass M = sum m, the shares p = m / M,
and sums over a row:

    mean = sum p w      c = sum p (w - mean) I      v = (w - mean) / c      w'' = gain output_scale v / M

With G = dL/dw'' and its part K = G output_scale / M:

    dgain = sum K v     db = gain (sum K) - gain dgain (sum p I)     q = db + gain dgain I
    dw = (gain K - p q) / c                                          dm = -(sum over rows of v q) / M

This is the gradient in ``docs/method.md``, in quantities that neither grow nor shrink with input and weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from balnorm.core import native, torch_backend
from balnorm.core.balance import autocast_device, balance, full_gain, saturate, without_autocast
from balnorm.core.mass import batch_mass
from balnorm.core.matrix import WeightMatrix
from balnorm.core.plan import Call
from balnorm.core.torch_private import apply_function, is_batched_gradient, is_view

__all__ = ["closed_form_conv"]


def closed_form_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, given_mass: Tensor | None, call: Call
) -> Tensor:
    """A balanced convolution of ``x`` (N, C, *in), by a geometry that does not pad beforehand.

    With ``given_mass=None`` the weight is balanced for the mass of ``x``, and the gradient of ``x`` includes the part
    that comes through its mass. A given mass gets a gradient of its own if it needs one. If the call has a moving
    average, the mass is added to it.
    """
    return apply_function(_ClosedForm, x, weight, bias, gain, given_mass, call)


class _ClosedForm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gain: Tensor | None,
        given_mass: Tensor | None,
        call: Call,
    ) -> Tensor:
        geometry = call.plan.geometry
        matrix = WeightMatrix.of(weight, geometry)
        backend = native if native.takes(x, weight, gain, given_mass, call.output_scale) else torch_backend
        kernels, saved = backend.forward(x, matrix, gain, given_mass, call)
        low_bias = None if bias is None else saturate(bias, x.dtype)
        y = geometry.convolve(x, matrix.weight(kernels), low_bias)
        if is_view(y):
            # As conv1d returns it: the same memory as a tensor of its own, which may be changed in place.
            y = y.new_empty(0).set_(y)  # type: ignore[call-overload]
        ctx.call, ctx.backend, ctx.bias_dtype = call, backend, None if bias is None else bias.dtype
        ctx.channels_last = matrix.channels_last
        ctx.save_for_backward(x, weight, gain, given_mass, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(autocast_device(dy)):
            if torch.is_grad_enabled() or is_batched_gradient(dy):
                # create_graph=True: this gradient will itself be differentiated. Or is_grads_batched=True, which rules
                # out the closed form's in-place work.
                return _plain_backward(ctx, dy)
            return _closed_form_backward(ctx, dy)


def _closed_form_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gain, given_mass, *saved = ctx.saved_tensors
    call, backend = ctx.call, ctx.backend
    geometry = call.plan.geometry
    # A hook on saved tensors may return the weight in another memory format, as torch's save_on_cpu can. What the
    # forward pass saved beside it has the order that the weight had then.
    matrix = WeightMatrix.of(weight, geometry, ctx.channels_last)
    needs_x, needs_weight, needs_bias, needs_gain, needs_mass, _ = ctx.needs_input_grad
    needs_g = needs_weight or needs_gain or needs_mass or (needs_x and given_mass is None)

    effective = matrix.weight(backend.effective(matrix, gain, call, saved, x.dtype))
    dx, g, dbias = geometry.convolve_backward(dy, x, effective, [needs_x, needs_g, needs_bias])
    dweight = dgain = dmass = None
    if g is not None:
        on_to = dx if given_mass is None else None
        kernels, dgain, dmass = backend.backward(matrix.like(g), on_to, matrix, gain, call, saved)
        dweight = matrix.weight(kernels)
    return (
        dx,
        _as(dweight, weight) if needs_weight else None,
        dbias if dbias is None or dbias.dtype == ctx.bias_dtype else dbias.to(ctx.bias_dtype),
        _as(dgain, gain) if needs_gain else None,
        _as(dmass, given_mass) if needs_mass else None,
        None,
    )


def _as(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype == like.dtype else gradient.to(like.dtype)


def _plain_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradient, by differentiating the plain form: so it can be differentiated itself."""
    plan, samples, output_scale, _ = ctx.call
    geometry, one_pass = plan.geometry, plan.options.one_pass
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because a given mass may itself be computed from x, and that path belongs to autograd. Not view_as: it
        # changes the strides of a single sample in channels_last, with which torch's grouped convolutions go wrong.
        views: list[Any] = [None if t is None else t[...] for t in ctx.saved_tensors[:4]]
        x, weight, gain, given_mass = views
        mass = batch_mass(x, samples, geometry, plan.kind) if given_mass is None else given_mass
        gains = full_gain(gain, output_scale)
        effective = balance(weight, mass, gains, one_pass, geometry.groups, transposed=geometry.transposed)
        y = geometry.convolve(x, saturate(effective, x.dtype), None)

    needs_x, needs_weight, needs_bias, needs_gain, needs_mass, _ = ctx.needs_input_grad
    inputs = ((x, needs_x), (weight, needs_weight), (gain, needs_gain), (given_mass, needs_mass))
    wanted = [tensor for tensor, needed in inputs if needed]
    gradients = iter(torch.autograd.grad(y, wanted, dy, create_graph=create_graph) if wanted else ())
    dx, dweight, dgain, dmass = (next(gradients) if needed else None for _, needed in inputs)
    dbias = dy.sum([axis for axis in range(dy.dim()) if axis != 1]).to(ctx.bias_dtype) if needs_bias else None
    return dx, dweight, dbias, dgain, dmass, None
