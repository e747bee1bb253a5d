"""Mass, balance and convolution as one autograd function with a closed-form backward pass.

It computes what :mod:`balnorm.composed` composes. For the backward pass it keeps what a plain convolution keeps, the
input and the raw weight, and a few vectors; the effective weight and the masks are computed again. The weight is seen
as a matrix with a row for each output kernel, so that the method's sums are matrix-vector products. Passes over that
matrix are what the method costs where weights are many and data are few, so each one here is deliberate.

With G = dL/dw'', the share p = m / sum m of each mass, the spread d = sum p w' I, sigma = gain / (d sum m), and sums
over a row:

    t  = sigma sum G w'        dgain = t / gain        u = t / d        db = sigma sum G - u sum p I
    dw = sigma G - p (db + u I)                        dm = -(sum over rows of w' (db + u I)) / sum m

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
    present,
    rounding_error,
    saturate,
)
from balnorm.geometry import CONV, CONV_TRANSPOSE, Geometry

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
        view = _RowView.of(weight, geometry)
        vectors, effective = _balance(view, weight, mass, gain, plan.one_pass)
        y = geometry.convolve(x, saturate(effective, x.dtype), None if bias is None else bias.to(x.dtype))
        ctx.plan, ctx.bias_dtype, ctx.mass_is_given = plan, None if bias is None else bias.dtype, given_mass is not None
        ctx.save_for_backward(x, weight, gain, given_mass, *vectors)
        return y, None if given_mass is not None else mass

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        with full_precision(dy.device.type):
            if torch.is_grad_enabled():  # create_graph=True: somebody is going to differentiate this gradient
                return _composed_backward(ctx, dy)
            return _closed_form_backward(ctx, dy)


class _Vectors(NamedTuple):
    """What the backward pass needs of the balance, apart from the weight."""

    share: Tensor
    """p, in the shape of the mass; 0 where there is no mass."""
    inverse_mass: Tensor
    """1 / sum m (groups, 1); 0 where there is no mass."""
    shift: Tensor
    """b (groups, D / groups)"""
    inverse_spread: Tensor
    """1 / d (groups, D / groups); 0 where there is no spread."""
    scale: Tensor
    """s = 1 / (d sum m) (groups, D / groups): without the gain."""


def _balance(
    view: _RowView, weight: Tensor, mass: Tensor, gain: Tensor | None, one_pass: bool
) -> tuple[_Vectors, Tensor]:
    """The effective weight, and the vectors that lead from the weight to it."""
    w = view.rows(weight)
    terms = w.shape[-1]
    m = mass.to(w.dtype).view(w.shape[0], -1)
    repeats = terms // m.shape[1]  # over the taps that share a mass
    total = m.sum(1, keepdim=True).mul_(repeats)
    alive = present(total, m.abs().sum(1, keepdim=True).mul_(repeats), terms)
    inverse_mass = torch.where(alive, total.reciprocal(), 0.0)
    share = torch.where(alive, m * inverse_mass, 0.0).view_as(mass)
    p = view.row(share)

    b = _row_sums(w, p).neg_()
    if one_pass:
        scratch = torch.empty_like(w)
        count = _row_sums(torch.gt(w, 0, out=scratch), p)
        spread = _row_sums(torch.clamp_min(w, 0, out=scratch), p).addcmul_(b, count)
    else:
        # sum p w' = 0, so its positive part is half of sum p |w'|
        scratch = (w + b.unsqueeze(-1)).abs_()
        spread = _row_sums(scratch, p).mul_(0.5)
    alive = spread.abs() > b.abs().mul_(rounding_error(terms, w.dtype))
    inverse_spread = torch.where(alive, spread.reciprocal(), 0.0)
    vectors = _Vectors(share, inverse_mass, b, inverse_spread, _limit(inverse_spread * inverse_mass))
    return vectors, view.weight(_scaled(w, b, _sigma(vectors, gain), out=scratch))


def _scaled(w: Tensor, b: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """scale * (w + b) for each row. (As one addcmul it takes longer.)"""
    return torch.mul(w, scale.unsqueeze(-1), out=out).add_((scale * b).unsqueeze(-1))


def _sigma(vectors: _Vectors, gain: Tensor | None) -> Tensor:
    scale = vectors.scale
    return scale if gain is None else _limit(scale * gain.to(scale.dtype).view_as(scale))


def _limit(scale: Tensor) -> Tensor:
    """A tiny weight on a tiny input may have to be scaled by more than a number can hold."""
    largest = torch.finfo(scale.dtype).max
    return scale.clamp_(-largest, largest)


def _closed_form_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gain, given_mass, *saved = ctx.saved_tensors
    vectors, plan = _Vectors(*saved), ctx.plan
    geometry: Geometry = plan.geometry
    needs_x, needs_weight, needs_bias, needs_gain, needs_mass, _ = ctx.needs_input_grad
    through_mass = needs_mass or (needs_x and not ctx.mass_is_given)

    dx = dweight = dbias = dgain = dmass = None
    view = _RowView.of(weight, geometry)
    w = view.rows(weight)
    b, sigma = vectors.shift, _sigma(vectors, gain)
    if needs_weight or needs_gain or through_mass:
        dw_effective, dbias = _weight_gradient(dy, x, weight, geometry, needs_bias)
        g = view.rows(dw_effective)
        p = view.row(vectors.share)
        effective = _scaled(w, b, vectors.scale, out=torch.empty_like(w))
        scratch = torch.empty_like(w)
        t = torch.mul(g, effective, out=scratch).sum(-1)
        if gain is not None:
            dgain = t.view_as(gain).to(gain.dtype) if needs_gain else None
            t = t * gain.to(t.dtype).view_as(t)
        u = t * vectors.inverse_spread

        mask = scratch
        if plan.one_pass:
            torch.gt(w, 0, out=mask)
        else:
            torch.gt(w, -b.unsqueeze(-1), out=mask)
        db = sigma * g.sum(-1) - u * _row_sums(mask, p)
        q = mask.mul_(u.unsqueeze(-1)).add_(db.unsqueeze(-1))
        if through_mass:
            dm = _column_sums(q, b).add_((w * q).sum(1)).mul_(-vectors.inverse_mass)
            dmass = view.mass(dm, vectors.share)
        if needs_weight:
            g.mul_(sigma.unsqueeze(-1)).addcmul_(q, p.unsqueeze(1), value=-1.0)
            dweight = view.weight(g).to(weight.dtype)
    elif needs_bias:
        dbias = _bias_gradient(dy, geometry)
    if needs_x:
        effective = saturate(view.weight(_scaled(w, b, sigma, out=torch.empty_like(w))), x.dtype)
        if ctx.mass_is_given:
            dx = _input_gradient(dy, effective, x, geometry, None)
        else:
            dx = _input_gradient_through_mass(dy, effective, x, plan, dmass)
    if dbias is not None:
        dbias = dbias.to(ctx.bias_dtype)
    dmass = dmass.to(given_mass.dtype) if dmass is not None and needs_mass else None
    return dx, dweight, dbias, dgain, dmass, None


def _composed_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradient, by differentiating the composed form: so it can be differentiated itself."""
    plan: Plan = ctx.plan
    geometry = plan.geometry
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
    gradients = torch.autograd.grad(y, list(wanted.values()), dy, create_graph=True) if wanted else ()
    named = dict(zip(wanted, gradients, strict=True))
    dbias = _bias_gradient(dy, geometry).to(ctx.bias_dtype) if needs_bias else None
    return named.get("x"), named.get("weight"), dbias, named.get("gain"), named.get("mass"), None


class _RowView(NamedTuple):
    """How a weight becomes a matrix (groups, D / groups, n) with a row for each output kernel, and a mass a row of it.

    A weight in channels_last format is read in its own order, so that no element moves.
    """

    geometry: Geometry
    channels_last: bool
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor, geometry: Geometry) -> _RowView:
        last = weight.dim() > 2 and not geometry.transposed and weight.stride(1) == 1 and not weight.is_contiguous()
        shape = tuple(by_output(weight, geometry.groups, geometry.transposed).shape)
        return cls(geometry, last, (*shape[:2], *shape[3:], shape[2]) if last else shape)

    def rows(self, weight: Tensor) -> Tensor:
        kernels = by_output(weight, self.geometry.groups, self.geometry.transposed)
        if self.channels_last:
            kernels = kernels.movedim(2, -1)
        return kernels.flatten(2).to(torch.promote_types(weight.dtype, torch.float32))

    def weight(self, rows: Tensor) -> Tensor:
        kernels = rows.view(self.shape)
        if self.channels_last:
            kernels = kernels.movedim(-1, 2)
        return from_by_output(kernels, self.geometry.transposed)

    def row(self, mass: Tensor) -> Tensor:
        groups, axes = self.geometry.groups, len(self.geometry.kernel)
        m = mass.view(groups, mass.shape[1] // groups, *mass.shape[2:]).expand(-1, -1, *self.geometry.kernel)
        if self.channels_last:
            m = m.movedim(1, -1)
        return m.reshape(groups, -1) if axes else m

    def mass(self, row: Tensor, like: Tensor) -> Tensor:
        m = row.view(-1, *self.shape[2:])
        if self.channels_last:
            m = m.movedim(-1, 1)
        return m.sum_to_size(m.shape[0], m.shape[1], *like.shape[2:]).reshape(like.shape)


def _row_sums(matrix: Tensor, row: Tensor) -> Tensor:
    """For each row of each group of ``matrix`` (groups, D / groups, n), its product with ``row`` (groups, n)."""
    if matrix.shape[0] == 1:
        return torch.mv(matrix[0], row[0]).unsqueeze(0)
    return (matrix * row.unsqueeze(1)).sum(-1)


def _column_sums(matrix: Tensor, column: Tensor) -> Tensor:
    """For each column of each group of ``matrix`` (groups, D / groups, n), its product with ``column``."""
    if matrix.shape[0] == 1:
        return torch.mv(matrix[0].t(), column[0]).unsqueeze(0)
    return (matrix * column.unsqueeze(-1)).sum(1)


def _sum_over_batch(x: Tensor) -> Tensor:
    """``x`` (N, C, *in) summed to (1, C, *in), in at least float32. Summing a flat view is the fastest on CPU."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dim() > 2 and x.stride(1) == 1 and not x.is_contiguous():
        last = x.movedim(1, -1)
        return last.flatten(1).sum(0, dtype=dtype).view(1, *last.shape[1:]).movedim(-1, 1)
    return x.flatten(1).sum(0, dtype=dtype).view(1, *x.shape[1:])


def _bias_gradient(dy: Tensor, geometry: Geometry) -> Tensor:
    return dy.flatten(0, -2).sum(0) if not geometry.kernel else dy.sum([0, *range(2, dy.dim())])


def _weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, needs_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the effective weight and of the bias."""
    if not geometry.kernel:
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        return dy.t() @ x, _bias_gradient(dy, geometry) if needs_bias else None
    _, dweight, dbias = torch.ops.aten.convolution_backward(
        dy,
        x,
        weight
        if weight.dtype == x.dtype
        else torch.empty_like(weight, dtype=x.dtype),  # of interest for its shape only
        [dy.shape[1]] if needs_bias else None,
        geometry.stride,
        [before for before, _ in geometry.padding],
        geometry.dilation,
        geometry.transposed,
        geometry.output_padding,
        geometry.groups,
        [False, True, needs_bias],
    )
    return dweight, dbias


def _input_gradient(dy: Tensor, effective: Tensor, x: Tensor, geometry: Geometry, constant: Tensor | None) -> Tensor:
    """The gradient of a convolution's input, plus a constant for each channel: as the adjoint's bias it is free."""
    if not geometry.kernel:
        dx = dy @ effective
        return dx if constant is None else dx.add_(constant)
    axes, size = len(geometry.kernel), x.shape[2:]
    padding = [before for before, _ in geometry.padding]
    if geometry.transposed:
        dx = CONV[axes - 1](dy, effective, constant, geometry.stride, padding, geometry.dilation, geometry.groups)
        for axis, n in enumerate(size, start=2):  # output_padding beyond the stride leaves positions without an input
            dx = dx.narrow(axis, 0, n)
        return dx
    smallest = [
        (n - 1) * s - 2 * p + d * (k - 1) + 1
        for n, s, p, d, k in zip(
            dy.shape[2:], geometry.stride, padding, geometry.dilation, geometry.kernel, strict=True
        )
    ]
    missing = [n - least for n, least in zip(size, smallest, strict=True)]
    return CONV_TRANSPOSE[axes - 1](
        dy, effective, constant, geometry.stride, padding, missing, geometry.groups, geometry.dilation
    )


def _input_gradient_through_mass(dy: Tensor, effective: Tensor, x: Tensor, plan: Plan, dmass: Tensor | None) -> Tensor:
    """The gradient of the input of a convolution whose weight was balanced for that input."""
    geometry = plan.geometry
    assert dmass is not None
    counted = leading(x, plan.stats_fraction)
    if counted.shape[0] == 0:
        return _input_gradient(dy, effective, x, geometry, None)
    if plan.mass == "channel":
        elements = counted[..., 0] if not geometry.kernel else counted[:, 0]
        count = elements.numel() if not geometry.kernel else counted.shape[0] * geometry.channel_count(x.shape[2:])
        constant = (dmass / count).flatten().to(x.dtype)
        if counted.shape[0] == x.shape[0]:
            return _input_gradient(dy, effective, x, geometry, constant)
        field = constant if not geometry.kernel else constant.view(-1, *(1,) * len(geometry.kernel))
    else:
        per_element = dmass / (counted.shape[0] * math.prod(geometry.output_size(x.shape[2:])))
        field = geometry.spread(per_element, x.shape[2:]).to(x.dtype)
    dx = _input_gradient(dy, effective, x, geometry, None)
    leading(dx, plan.stats_fraction).add_(field)
    return dx
