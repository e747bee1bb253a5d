"""The closed form's work on weight rows in torch operations: for GPUs, and for CPUs without the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from balnorm.core.balance import counts, full_gain, inverse_total, saturate
from balnorm.core.mass import add_mass_gradient, batch_mass, update_running_mass
from balnorm.core.matrix import WeightMatrix
from balnorm.core.plan import Call, Gradients

__all__ = ["backward", "effective", "forward"]


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

    def v(self, w: Tensor) -> Tensor:
        """The matrix v, in memory of its own."""
        return torch.sub(w, self.mean).mul_(self.inverse_contribution)


def forward(
    x: Tensor, matrix: WeightMatrix, gain: Tensor | None, given_mass: Tensor | None, call: Call
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The effective weight as kernels of ``x.dtype``, and the tensors to save for the two functions below."""
    plan, samples, _, running = call
    mass = batch_mass(x, samples, plan.geometry, plan.kind) if given_mass is None else given_mass
    if running is not None:
        update_running_mass(running.mass, running.batches, mass, plan.options.momentum)
    w = matrix.rows(matrix.values)
    rows = _balance(w, matrix.row(mass.to(w.dtype)), plan.options.one_pass)
    return effective(matrix, gain, call, rows, x.dtype), rows


def effective(
    matrix: WeightMatrix, gain: Tensor | None, call: Call, saved: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    """Recompute the effective weight, as kernels of this ``dtype``."""
    rows = _Rows(*saved)
    v = rows.v(matrix.rows(matrix.values))
    v.mul_(rows.inverse_total * _gain_column(gain, call.output_scale, rows.mean))
    return saturate(matrix.kernels(v), dtype)


def backward(
    g: Tensor, dx: Tensor | None, matrix: WeightMatrix, gain: Tensor | None, call: Call, saved: Sequence[Tensor]
) -> Gradients:
    """The gradients of weight, gain and mass, from G as kernels, which it overwrites. ``dx`` gets the mass's share."""
    plan, output_scale = call.plan, call.output_scale
    rows, w, g = _Rows(*saved), matrix.rows(matrix.values), matrix.rows(g)
    gains = _gain_column(gain, output_scale, rows.mean)
    v = rows.v(w)
    scratch = torch.mul(g, v)
    dgain = scratch.sum(-1, keepdim=True).mul_(rows.inverse_total)
    u = dgain * gains
    db = g.sum(-1, keepdim=True).mul_(rows.inverse_total).mul_(gains).addcmul_(u, rows.positive, value=-1.0)
    q = torch.gt(w, 0 if plan.options.one_pass else rows.mean, out=scratch).mul_(u).add_(db)
    g.mul_(rows.inverse_total * gains).addcmul_(q, rows.share, value=-1.0).mul_(rows.inverse_contribution)
    dmass = matrix.mass(q.mul_(v).sum(-2, keepdim=True).mul_(-rows.inverse_total), plan.kind)
    if dx is not None:
        add_mass_gradient(dx, dmass, call.samples, plan.geometry, plan.kind)
    return matrix.kernels(g), (dgain if output_scale is None else dgain * output_scale).flatten(), dmass


def _balance(w: Tensor, m: Tensor, one_pass: bool) -> _Rows:
    terms = w.shape[-1]
    total = m.sum(-1, keepdim=True)
    present = counts(total, torch.linalg.vector_norm(m, 1, -1, keepdim=True), terms)
    share = torch.where(present, m / total, 0.0)
    # Sums are not matrix products: TF32 would round the shares, by more than the rule for zero allows.
    scratch = torch.mul(w, share)
    mean = scratch.sum(-1, keepdim=True)

    def weighted_sum(values: Tensor) -> Tensor:
        return values.mul_(share).sum(-1, keepdim=True)

    if one_pass:
        positive = weighted_sum(torch.gt(w, 0, out=scratch))
        contribution = weighted_sum(torch.clamp_min(w, 0, out=scratch)).addcmul_(mean, positive, value=-1.0)
    else:
        positive = weighted_sum(torch.gt(w, mean, out=scratch))
        # sum p w' = 0, so its positive part is half of sum p |w'|
        contribution = weighted_sum(torch.sub(w, mean, out=scratch).abs_()).mul_(0.5)
    inverse_contribution = torch.where(counts(contribution, mean, terms), contribution.reciprocal(), 0.0)
    return _Rows(share, inverse_total(total, present), mean, positive, inverse_contribution)


def _gain_column(gain: Tensor | None, output_scale: Tensor | None, like: Tensor) -> Tensor | float:
    gains = full_gain(gain, output_scale)
    return 1.0 if gains is None else gains.to(like.dtype).view_as(like)
