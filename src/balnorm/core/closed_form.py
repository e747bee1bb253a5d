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

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from balnorm.core.balance import balance, counts, inverse_total, saturate, without_autocast
from balnorm.core.geometry import Geometry, by_output, from_by_output
from balnorm.core.mass import add_mass_gradient, batch_mass, update_running_mass
from balnorm.core.options import MassKind
from balnorm.core.torch_private import is_batched_gradient

__all__ = ["Plan", "Running", "closed_form_conv"]


class Plan(NamedTuple):
    """What a balanced convolution does, apart from its tensors."""

    geometry: Geometry
    kind: MassKind
    one_pass: bool
    samples: int
    """How many leading samples of the batch the mass is taken from."""


class Running(NamedTuple):
    """The moving average that a batch enters, in place."""

    mass: Tensor
    batches: Tensor | None
    momentum: float | None


def closed_form_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    output_scale: Tensor | None,
    given_mass: Tensor | None,
    plan: Plan,
    running: Running | None,
) -> Tensor:
    """A balanced convolution of ``x`` (N, C, *in), by a geometry that does not pad beforehand.

    With ``given_mass=None`` it is balanced for the mass of ``x``, which is differentiated through in here. A given mass
    gets a gradient of its own where it needs one. The mass enters ``running``, if there is one.
    """
    return _ClosedForm.apply(x, weight, bias, gain, output_scale, given_mass, plan, running)  # type: ignore[no-any-return, no-untyped-call]


class _ClosedForm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gain: Tensor | None,
        output_scale: Tensor | None,
        given_mass: Tensor | None,
        plan: Plan,
        running: Running | None,
    ) -> Tensor:
        geometry, mass = plan.geometry, given_mass
        if mass is None:
            mass = batch_mass(x, plan.samples, geometry, plan.kind)
        if running is not None:
            update_running_mass(running.mass, running.batches, mass, running.momentum)
        kernels = _Kernels.of(weight, geometry)
        row = _balance_rows(kernels, mass, plan.one_pass)
        effective = _effective(kernels, row.relative(kernels), row, _full_gain(gain, output_scale))
        y = geometry.convolve(x, saturate(effective, x.dtype), None if bias is None else saturate(bias, x.dtype))
        if y._is_view():
            # As conv1d returns it: the same memory as a tensor of its own, which may be changed in place.
            y = y.new_empty(0).set_(y)  # type: ignore[call-overload]
        ctx.plan, ctx.bias_dtype, ctx.mass_is_given = plan, None if bias is None else bias.dtype, given_mass is not None
        ctx.save_for_backward(x, weight, gain, output_scale, given_mass, *row)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(dy.device.type):
            if torch.is_grad_enabled() or is_batched_gradient(dy):
                # create_graph=True: somebody is going to differentiate this gradient; or is_grads_batched=True, which
                # the closed form's work in place does not allow.
                return *_plain_backward(ctx, dy), None, None
            return *_closed_form_backward(ctx, dy), None, None


class _Rows(NamedTuple):
    """What the backward pass needs of the balance, apart from the weight. A column has a value for each row."""

    share: Tensor
    """Row of p; 0 where there is no mass."""
    inverse_total: Tensor
    """1 / M; 0 where there is no mass."""
    mean: Tensor
    """Column of the mean weights."""
    positive: Tensor
    """Column of sum p I."""
    inverse_contribution: Tensor
    """Column of 1 / c; 0 where there is nothing to balance."""

    def relative(self, kernels: _Kernels) -> Tensor:
        """The matrix v, in memory of its own."""
        w = kernels.rows(kernels.values)
        return torch.sub(w, self.mean).mul_(self.inverse_contribution)


def _balance_rows(kernels: _Kernels, mass: Tensor, one_pass: bool) -> _Rows:
    w = kernels.rows(kernels.values)
    terms = w.shape[-1]
    m = kernels.row(mass.to(w.dtype))
    total = m.sum(-1, keepdim=True)
    present = counts(total, torch.linalg.vector_norm(m, 1, -1, keepdim=True), terms)
    share = torch.where(present, m / total, 0.0)
    column = share.mT

    mean = w @ column
    scratch = torch.empty_like(w)
    if one_pass:
        positive = torch.gt(w, 0, out=scratch) @ column
        contribution = torch.addcmul(torch.clamp_min(w, 0, out=scratch) @ column, mean, positive, value=-1.0)
    else:
        positive = torch.gt(w, mean, out=scratch) @ column
        # sum p w' = 0, so its positive part is half of sum p |w'|
        contribution = (torch.sub(w, mean, out=scratch).abs_() @ column).mul_(0.5)
    inverse_contribution = torch.where(counts(contribution, mean, terms), contribution.reciprocal(), 0.0)
    return _Rows(share, inverse_total(total, present), mean, positive, inverse_contribution)


def _closed_form_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, gain, output_scale, given_mass, *saved = ctx.saved_tensors
    plan, row = ctx.plan, _Rows(*saved)
    needs_x, needs_weight, needs_bias, needs_gain, _, needs_mass, *_ = ctx.needs_input_grad
    through_mass = needs_mass or (needs_x and not ctx.mass_is_given)
    needs_g = needs_weight or needs_gain or through_mass

    kernels, full_gain = _Kernels.of(weight, plan.geometry), _full_gain(gain, output_scale)
    v = row.relative(kernels)
    effective = saturate(_effective(kernels, v, row, full_gain), x.dtype)
    dx, g, dbias = plan.geometry.convolve_backward(dy, x, effective, [needs_x, needs_g, needs_bias])
    dweight = dgain = dmass = None
    if g is not None:
        g = kernels.rows(kernels.like(g))
        g_sum = g.sum(-1, keepdim=True).mul_(row.inverse_total)
        scratch = torch.mul(g, v)
        g_v = scratch.sum(-1, keepdim=True).mul_(row.inverse_total)
        gain_column = 1.0 if full_gain is None else full_gain.to(g_v.dtype).view_as(g_v)
        dgain_full = g_v.flatten()
        if needs_gain:
            dgain = dgain_full if output_scale is None else dgain_full * output_scale
        u = g_v * gain_column
        db = (g_sum * gain_column).addcmul_(u, row.positive, value=-1.0)
        w = kernels.rows(kernels.values)
        q = torch.gt(w, 0 if plan.one_pass else row.mean, out=scratch).mul_(u).add_(db)
        if needs_weight:
            factor = row.inverse_total * gain_column
            dweight = g.mul_(factor).addcmul_(q, row.share, value=-1.0).mul_(row.inverse_contribution)
            dweight = kernels.weight(dweight)
        if through_mass:
            columns = q.mul_(v).sum(-2, keepdim=True).mul_(-row.inverse_total)
            dmass = kernels.mass(columns, plan.kind)
    if dx is not None and dmass is not None and not ctx.mass_is_given:
        add_mass_gradient(dx, dmass, plan.samples, plan.geometry, plan.kind)
    return (
        dx,
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None else dbias.to(ctx.bias_dtype),
        None if dgain is None else dgain.to(gain.dtype),
        None,
        dmass.to(given_mass.dtype).view_as(given_mass) if dmass is not None and needs_mass else None,
    )


def _plain_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradient, by differentiating the plain form: so it can be differentiated itself."""
    plan: Plan = ctx.plan
    geometry = plan.geometry
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of the inputs: a given mass may itself come from x, and that way is not ours to follow.
        views: list[Any] = [None if t is None else t.view_as(t) for t in ctx.saved_tensors[:5]]
        x, weight, gain, output_scale, given_mass = views
        mass = given_mass if ctx.mass_is_given else batch_mass(x, plan.samples, geometry, plan.kind)
        full_gain = _full_gain(gain, output_scale)
        effective = balance(weight, mass, full_gain, plan.one_pass, geometry.groups, transposed=geometry.transposed)
        y = geometry.convolve(x, saturate(effective, x.dtype), None)

    needs_x, needs_weight, needs_bias, needs_gain, _, needs_mass, *_ = ctx.needs_input_grad
    inputs = ((x, needs_x), (weight, needs_weight), (gain, needs_gain), (given_mass, needs_mass))
    wanted = [tensor for tensor, needed in inputs if needed]
    gradients = iter(torch.autograd.grad(y, wanted, dy, create_graph=create_graph) if wanted else ())
    dx, dweight, dgain, dmass = (next(gradients) if needed else None for _, needed in inputs)
    dbias = dy.sum([axis for axis in range(dy.dim()) if axis != 1]).to(ctx.bias_dtype) if needs_bias else None
    return dx, dweight, dbias, dgain, None, dmass


def _full_gain(gain: Tensor | None, output_scale: Tensor | None) -> Tensor | None:
    return gain if output_scale is None or gain is None else gain * output_scale


def _effective(kernels: _Kernels, v: Tensor, row: _Rows, full_gain: Tensor | None) -> Tensor:
    """w'' = full gain x v / M, as a weight."""
    factor = row.inverse_total
    if full_gain is not None:
        factor = factor * full_gain.to(v.dtype).view_as(row.mean)
    return kernels.weight(v * factor)


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
        by_tap = mass.reshape(*groups, inputs, -1).expand(*groups, inputs, taps)
        return (by_tap.mT if self.channels_last else by_tap).reshape(*groups, 1, inputs * taps)

    def mass(self, row: Tensor, kind: MassKind) -> Tensor:
        """The adjoint of :meth:`row`: (1, C, ...), sums over the taps that share a mass."""
        inputs, taps = self._inputs_and_taps()
        shape = (*row.shape[:-2], taps, inputs) if self.channels_last else (*row.shape[:-2], inputs, taps)
        by_tap = row.view(shape).mT if self.channels_last else row.view(shape)
        kernel = self.values.shape[2:]
        if kind == "position":
            return by_tap.reshape(1, self.groups * inputs, *kernel)
        return by_tap.sum(-1).view(1, self.groups * inputs, *(1,) * len(kernel))

    def _inputs_and_taps(self) -> tuple[int, int]:
        return self.values.shape[1], math.prod(self.values.shape[2:])


_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
