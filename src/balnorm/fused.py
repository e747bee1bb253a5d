"""Mass, balance and convolution as one autograd function with a closed-form backward pass.

It computes what :mod:`balnorm.composed` composes. For the backward pass it keeps what a plain convolution keeps, the
input and the raw weight, and a few vectors; the effective weight and the masks are computed again. The weight is seen
as a matrix with a row for each output kernel, so that the method's sums are matrix-vector products. Two things are
dear and spent with care: passes over that matrix, where weights are many and data are few; and calls, where layers are
small.

With G = dL/dw'', the share p = m / sum m of each mass, the spread d = sum p w' I, s = 1 / (d sum m), and sums over
a row:

    dgain = s sum G w'         u = gain dgain / d         db = gain s sum G - u sum p I
    dw = gain s G - p (db + u I)                          dm = -(sum over rows of w' (db + u I)) / sum m

This is the gradient in ``docs/method.md``, in quantities that neither grow nor shrink with the input.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from balnorm.composed import (
    MassKind,
    balance,
    batch_mass,
    by_output,
    from_by_output,
    full_precision,
    leading,
    mass_of_sums,
    rounding_error,
    saturate,
)
from balnorm.geometry import Geometry

__all__ = ["Plan", "fused_conv"]


class Plan(NamedTuple):
    """What a balanced convolution does, apart from its tensors."""

    geometry: Geometry
    mass: MassKind
    one_pass: bool
    stats_fraction: float


def fused_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, gain: Tensor | None, mass: Tensor | None, plan: Plan
) -> tuple[Tensor, Tensor]:
    """Output of a balanced convolution, and the mass that it was balanced for.

    With ``mass=None`` that is the mass of ``x``, and is differentiated through in here; the geometry must not pad
    beforehand then. A given mass gets a gradient of its own where it needs one.
    """
    y, batch_mass = _FusedConv.apply(x, weight, bias, gain, mass, plan)  # type: ignore[no-untyped-call]
    return y, batch_mass if mass is None else mass


class _FusedConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gain: Tensor | None,
        given_mass: Tensor | None,
        plan: Plan,
    ) -> tuple[Tensor, Tensor | None]:
        geometry, mass = plan.geometry, given_mass
        if mass is None:
            counted = leading(x, plan.stats_fraction)
            counted = counted if geometry.kernel else counted.flatten(0, -2)
            mass = mass_of_sums(_sum_over_batch(counted), counted.shape[0], geometry, plan.mass)
            ctx.mark_non_differentiable(mass)
        effective, vectors = _balance(_Kernels.of(weight, geometry), mass, gain, plan.one_pass)
        y = geometry.convolve(x, saturate(effective, x.dtype), None if bias is None else saturate(bias, x.dtype))
        if y._is_view():
            # As conv1d and linear return them: the same memory as a tensor of its own, which may be changed in place.
            y = y.new_empty(0).set_(y)  # type: ignore[call-overload]
        ctx.plan, ctx.bias_dtype, ctx.mass_is_given = plan, None if bias is None else bias.dtype, given_mass is not None
        ctx.save_for_backward(x, weight, gain, given_mass, *vectors)
        return y, None if given_mass is not None else mass

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        with full_precision(dy.device.type):
            if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(dy):
                # create_graph=True: somebody is going to differentiate this gradient; or is_grads_batched=True, which
                # the closed form's work in place does not allow.
                return _composed_backward(ctx, dy)
            return _closed_form_backward(ctx, dy)


class _Vectors(NamedTuple):
    """What the backward pass needs of the balance, apart from the weight."""

    share: Tensor
    """Row of p; 0 where there is no mass."""
    total: Tensor
    """sum m"""
    mean: Tensor
    """Column of -b, the mean weight."""
    positive: Tensor
    """Column of sum p I."""
    inverse_spread: Tensor
    """Column of 1 / d; 0 where there is no spread."""
    scale: Tensor
    """Column of s."""


def _balance(kernels: _Kernels, mass: Tensor, gain: Tensor | None, one_pass: bool) -> tuple[Tensor, _Vectors]:
    """The effective weight, and the vectors that lead to it."""
    w = kernels.rows(kernels.values)
    terms, limits = w.shape[-1], torch.finfo(w.dtype)
    tolerance = rounding_error(terms, w.dtype)
    m = kernels.row(mass if mass.dtype == w.dtype else mass.to(w.dtype))
    total = m.sum(-1, keepdim=True)
    p = m / total
    # No mass, masses that cancel, an infinite one, an empty batch: all of them give a large sum of magnitudes or NaN.
    p = torch.where(torch.linalg.vector_norm(p, 1, -1, keepdim=True) < 1 / tolerance, p, 0.0)
    p_column = p.mT

    mean = w @ p_column
    scratch = torch.empty_like(w)
    if one_pass:
        positive = torch.gt(w, 0, out=scratch) @ p_column
        spread = torch.addcmul(torch.clamp_min(w, 0, out=scratch) @ p_column, mean, positive, value=-1.0)
    else:
        positive = torch.gt(w, mean, out=scratch) @ p_column
        # sum p w' = 0, so its positive part is half of sum p |w'|
        spread = (torch.sub(w, mean, out=scratch).abs_() @ p_column).mul_(0.5)
    alive = (mean / spread).abs_() < 1 / tolerance  # false for 0 / 0
    inverse_spread = torch.where(alive, spread.reciprocal(), 0.0)
    # A tiny weight on a tiny input may have to be scaled by more than a number can hold.
    largest = limits.max * limits.eps
    scale = (inverse_spread / total).nan_to_num_(0.0, largest, -largest)
    vectors = _Vectors(p, total, mean, positive, inverse_spread, scale)
    sigma = scale if gain is None else scale * gain.view_as(scale)
    return kernels.weight(_scaled(w, mean, sigma, out=scratch)), vectors


def _scaled(w: Tensor, mean: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """scale * (w - mean) for each row. (As one addcmul it takes longer.)"""
    return torch.mul(w, scale, out=out).sub_(scale * mean)


def _closed_form_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gain, given_mass, *vectors = ctx.saved_tensors
    share, total, mean, positive, inverse_spread, scale = vectors
    plan: Plan = ctx.plan
    needs_x, needs_weight, needs_bias, needs_gain, needs_mass, _ = ctx.needs_input_grad
    through_mass = needs_mass or (needs_x and not ctx.mass_is_given)
    needs_g = needs_weight or needs_gain or through_mass

    kernels = _Kernels.of(weight, plan.geometry)
    w = kernels.rows(kernels.values)
    sigma = scale if gain is None else scale * gain.view_as(scale)
    scratch = _scaled(w, mean, sigma, out=torch.empty_like(w))
    effective = saturate(kernels.weight(scratch), x.dtype)
    dx, g, dbias = _convolution_backward(dy, x, effective, plan.geometry, [needs_x, needs_g, needs_bias])
    dweight = dgain = dmass = None
    if needs_g:
        g = kernels.rows(kernels.like(g))
        g_sum = g.sum(-1, keepdim=True)
        t = torch.mul(g, w, out=scratch).sum(-1, keepdim=True).addcmul_(g_sum, mean, value=-1.0)
        dgain = (t * scale).view_as(gain) if needs_gain else None
        u = t.mul_(sigma).mul_(inverse_spread)
        db = g_sum.mul_(sigma).addcmul_(u, positive, value=-1.0)
        q = torch.gt(w, 0 if plan.one_pass else mean, out=scratch).mul_(u).add_(db)
        if needs_weight:
            dweight = kernels.weight(g.mul_(sigma).addcmul_(q, share, value=-1.0))
        if through_mass:
            columns = (mean.mT @ q).sub_(q.mul_(w).sum(-2, keepdim=True))
            dmass = kernels.mass(columns.div_(total).nan_to_num_(), plan.mass)  # 0 / 0 without mass
    if dx is not None and dmass is not None and not ctx.mass_is_given:
        _add_mass_gradient(dx, dmass, plan)
    return (
        dx,
        _to(dweight, weight),
        None if dbias is None else dbias.to(ctx.bias_dtype),
        _to(dgain, gain),
        _to(dmass.view_as(given_mass), given_mass) if dmass is not None and needs_mass else None,
        None,
    )


def _composed_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradient, by differentiating the composed form: so it can be differentiated itself."""
    plan: Plan = ctx.plan
    geometry = plan.geometry
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of the inputs: a given mass may itself come from x, and that way is not ours to follow.
        views: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors[:4]]
        x, weight, gain, mass = views
        balanced_for = mass if ctx.mass_is_given else batch_mass(x, geometry, plan.mass, plan.stats_fraction)
        effective = balance(weight, balanced_for, gain, plan.one_pass, geometry.groups, transposed=geometry.transposed)
        y = geometry.convolve(x, saturate(effective, x.dtype), None)

    needs_x, needs_weight, needs_bias, needs_gain, needs_mass, _ = ctx.needs_input_grad
    inputs = (
        ("x", x, needs_x),
        ("weight", weight, needs_weight),
        ("gain", gain, needs_gain),
        ("mass", mass, needs_mass),
    )
    wanted = {name: tensor for name, tensor, needed in inputs if needed}
    gradients = torch.autograd.grad(y, list(wanted.values()), dy, create_graph=create_graph) if wanted else ()
    named = dict(zip(wanted, gradients, strict=True))
    dbias = _bias_gradient(dy, geometry).to(ctx.bias_dtype) if needs_bias else None
    return named.get("x"), named.get("weight"), dbias, named.get("gain"), named.get("mass"), None


class _Kernels(NamedTuple):
    """A weight as output kernels (D, C / groups, *kernel), dense in memory and in at least float32.

    Its rows are these kernels in the order of memory, a matrix (D, n), or (groups, D / groups, n) where there is more
    than one group. So nothing is moved for a weight in channels_last format. Masses become rows in the same order.
    """

    values: Tensor
    groups: int
    transposed: bool
    channels_last: bool

    @classmethod
    def of(cls, weight: Tensor, geometry: Geometry) -> _Kernels:
        values = weight
        if geometry.transposed:
            values = by_output(weight, geometry.groups, True).flatten(0, 1)
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        channels_last = False
        if not values.is_contiguous():
            axes = values.dim() - 2
            channels_last = axes in _CHANNELS_LAST and values.is_contiguous(memory_format=_CHANNELS_LAST[axes])
            values = values if channels_last else values.contiguous()
        return cls(values, geometry.groups, geometry.transposed, channels_last)

    def like(self, gradient: Tensor) -> Tensor:
        """A gradient of the weight, as kernels in the same order and precision."""
        if self.transposed:
            gradient = by_output(gradient, self.groups, True).flatten(0, 1)
        if gradient.stride() == self.values.stride() and gradient.dtype == self.values.dtype:
            return gradient
        return torch.empty_like(self.values).copy_(gradient)

    def rows(self, kernels: Tensor) -> Tensor:
        outputs = kernels.shape[0]
        terms = kernels.numel() // outputs
        if self.groups == 1:
            return kernels.as_strided((outputs, terms), (terms, 1))
        rows = outputs // self.groups
        return kernels.as_strided((self.groups, rows, terms), (rows * terms, terms, 1))

    def weight(self, rows: Tensor) -> Tensor:
        """Rows as a weight again."""
        kernels = rows.as_strided(self.values.shape, self.values.stride())
        if not self.transposed:
            return kernels
        shape = kernels.shape
        return from_by_output(kernels.view(self.groups, shape[0] // self.groups, *shape[1:]), True)

    def row(self, mass: Tensor) -> Tensor:
        """A mass (1, C, ...), as a row for each group that goes with the rows of the weight."""
        inputs, taps = self._inputs_and_taps()
        groups = () if self.groups == 1 else (self.groups,)
        if mass.numel() == self.groups * inputs * taps:  # each tap its own
            row = mass.view(*groups, inputs, taps)
            return (row.mT if self.channels_last else row).reshape(*groups, 1, -1)
        if self.channels_last:
            return torch.cat([mass.view(*groups, 1, inputs)] * taps, -1)  # as repeat(), in a quarter of the time
        return mass.view(*groups, inputs, 1).expand(*groups, inputs, taps).reshape(*groups, 1, -1)

    def mass(self, row: Tensor, kind: MassKind) -> Tensor:
        """The adjoint of :meth:`row`, without its shape: sums over the taps that share a mass."""
        inputs, taps = self._inputs_and_taps()
        if self.channels_last:
            by_tap = row.view(*row.shape[:-2], taps, inputs)
            return by_tap.mT.reshape(row.shape) if kind == "position" else by_tap.sum(-2)
        return row if kind == "position" else row.view(*row.shape[:-2], inputs, taps).sum(-1)

    def _inputs_and_taps(self) -> tuple[int, int]:
        return self.values.shape[1], math.prod(self.values.shape[2:])


_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def _sum_over_batch(x: Tensor) -> Tensor:
    """``x`` (N, C, *in) summed to (1, C, *in), in at least float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dim() == 4 and x.stride(1) == 1 and x.is_contiguous(memory_format=torch.channels_last):
        # In this format the sum over a flat view takes an eighth of the time.
        n, c, h, w = x.shape
        return (
            x.as_strided((n, c * h * w), (c * h * w, 1))
            .sum(0, dtype=dtype)
            .as_strided((1, c, h, w), (c * h * w, 1, w * c, c))
        )
    return x.sum(0, keepdim=True, dtype=dtype)


def _bias_gradient(dy: Tensor, geometry: Geometry) -> Tensor:
    return dy.sum([0, *range(2, dy.dim())] if geometry.kernel else list(range(dy.dim() - 1)))


def _convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs: list[bool]
) -> tuple[Tensor | None, Any, Tensor | None]:
    """The gradients of input, weight and bias of a plain convolution or linear map, where they are needed."""
    if not geometry.kernel:
        needs_x, needs_weight, needs_bias = needs
        dweight = dy.flatten(0, -2).t() @ x.flatten(0, -2) if needs_weight else None
        return dy @ weight if needs_x else None, dweight, _bias_gradient(dy, geometry) if needs_bias else None
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        dy,
        x,
        weight,
        [dy.shape[1]],
        geometry.stride,
        [before for before, _ in geometry.padding],
        geometry.dilation,
        geometry.transposed,
        geometry.output_padding,
        geometry.groups,
        needs,
    )


def _add_mass_gradient(dx: Tensor, dmass: Tensor, plan: Plan) -> None:
    """Add to the gradient of the input what comes by way of its mass: the same for every sample that was counted."""
    geometry = plan.geometry
    counted = leading(dx, plan.stats_fraction)
    samples, size = counted.shape[0], counted.shape[2:]
    if samples == 0:
        return
    if not geometry.kernel:
        counted.add_(dmass.view(-1) / math.prod(counted.shape[:-1]))
    elif plan.mass == "channel":
        counted.add_(dmass.view(-1, *(1,) * len(size)) / (samples * geometry.channel_count(size)))
    else:
        per_input = dmass.view(1, -1, *geometry.kernel) / (samples * math.prod(geometry.output_size(size)))
        field = geometry.spread(per_input, size)
        if counted.dim() == 4 and counted.stride(1) == 1:
            field = field.contiguous(memory_format=torch.channels_last)
        counted.add_(field)


def _to(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    return gradient if gradient is None or gradient.dtype == like.dtype else gradient.to(like.dtype)
