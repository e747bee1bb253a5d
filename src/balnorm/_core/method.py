r"""The method in torch operations: the statistics of the input, the balance of the weight, and the gradient of both.

With sums over all but the output channel, an input x, a weight w, and I = [w' > 0] in two passes, [w > 0] in one:

    mean mu and mass a: what a tap meets per output element, of x and of |x| (``centred``: of |x - mean|)
    M = sum a           p = a / M           w' = w - sum p w with the shift, w' = w without
    c = sum p w' I      (without the shift 1/2 sum p |w|)           v = w' / c
    w'' = gain scale v / M                  y = conv(x, w'') + bias - sum w'' mu

For x >= 0 and with the shift this is the paper's layer. The divisor M of w'' (not of p) is at least a thousandth of the
mean M over the layer's groups, so that a nearly dead input of a depthwise layer does not explode; a layer with one
group never meets that floor.

The gradient, with t = sum dy over all but the output channel, G = dL/dw'' - t mu, K = G / M, g = gain scale, and
s = sum K v:

    dgain = scale s           dmu = -sum_d t w''
    with the shift:   db = g sum K - g s sum p I    q = db + g s I    dw = (g K - p q) / c    da = -(1 / M) sum_d v q
    without:          dw = g (K - s p sgn(w) / 2) / c                 da = -(1 / M) sum_d g s |v| / 2

Then dx is that of the convolution plus the adjoint of the statistics: (dmu + da sgn x) / r, with sgn 0 = 1.

:func:`statistics` and :func:`balance` are differentiable as they stand. They are used when torch transforms the program
(compilation, export, ``torch.func``), for second derivatives, and for folding. Eager training computes the formulas
above, on a matrix with a row for each output kernel: :func:`measure`, :func:`effective_rows` and
:func:`gradient_rows`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from balnorm._core.geometry import Geometry, by_output, from_by_output, over_space
from balnorm._core.options import MassKind
from balnorm._core.torch_private import sum_over_processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Peers: TypeAlias = "tuple[ProcessGroup | None] | None"
"""The processes that share statistics: ``(group,)``, or ``None`` for this one alone. A group of ``None`` is all."""

__all__ = [
    "Peers",
    "Rows",
    "Statistics",
    "add_statistics_gradient",
    "balance",
    "batch_statistics",
    "contribution",
    "counts",
    "effective_bias",
    "effective_rows",
    "equaliser",
    "gradient_rows",
    "leading_samples",
    "like_weight",
    "measure",
    "saturate",
    "statistics",
    "update_running",
]

FLOOR = 1e-3
"""The smallest divisor of w'', as a fraction of the mean over the layer's groups."""
FAINT = 0.1
"""The smallest mass that :func:`equaliser` evens out, as a fraction of the mean over the input channels."""


# --------------------------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------------------------


class Statistics(NamedTuple):
    """Mean and mass that a tap meets per output element: (1, C, 1, ..., 1) by channel, (1, C, *kernel) by position."""

    mean: Tensor
    mass: Tensor
    centre: Tensor | None = None
    """The mean of each channel, (1, C, 1, ..., 1), if the mass is that of ``|x - centre|``."""


def statistics(
    x: Tensor,
    samples: int,
    geometry: Geometry,
    kind: MassKind,
    *,
    centred: bool = False,
    among: Peers = None,
    exact: bool = False,
) -> Statistics:
    """The statistics of the leading ``samples`` of a batch ``x`` (N, C, *in), differentiably.

    ``exact`` counts by position even if the kernel :meth:`~Geometry.exceeds` the image; no weight is balanced for such
    statistics. Without samples the statistics are NaN.
    """
    counted = x if samples == x.shape[0] else x[:samples]
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = counted.sum(0, keepdim=True, dtype=dtype)
    if not centred:
        # The derivative of |x| at 0 is +1, as for the inputs that the paper assumes: half of a ReLU's outputs are 0.
        absolute = sums + 2 * torch.where(counted < 0, -counted, 0.0).sum(0, keepdim=True, dtype=dtype)
        return _per_output(sums, absolute, None, samples, geometry, kind, among, exact)
    centre = _centre(sums, samples, among)
    deviation = counted.to(dtype) - centre
    absolute = torch.where(deviation < 0, -deviation, deviation).sum(0, keepdim=True)
    return _per_output(sums, absolute, centre, samples, geometry, kind, among, exact)


def batch_statistics(
    x: Tensor, samples: int, geometry: Geometry, kind: MassKind, *, centred: bool = False, among: Peers = None
) -> Statistics:
    """As :func:`statistics`, in fewer passes over memory and not differentiable."""
    counted = x if samples == x.shape[0] else x[:samples]
    dtype = torch.promote_types(x.dtype, torch.float32)
    as_image = None
    if counted.dim() == 4:
        n, c, h, w = counted.shape
        if c > 1 and counted.stride() == (c * h * w, 1, c * w, c):
            # In channels_last format sums over a flat view take an eighth of the time.
            as_image = ((1, c, h, w), (c * h * w, 1, c * w, c))
            counted = counted.as_strided((n, c * h * w), (c * h * w, 1))

    def image(sums: Tensor) -> Tensor:
        return sums if as_image is None else sums.as_strided(*as_image)

    sums = image(counted.sum(0, keepdim=True, dtype=dtype))
    centre = None
    if centred:
        centre = _centre(sums, samples, among)
        counted = (x[:samples].to(dtype) - centre).abs_()
        absolute = counted.sum(0, keepdim=True)
    else:
        # Not torch.norm: without negative inputs, mean and mass must agree to the last bit.
        absolute = sums - 2 * image(counted.clamp(max=0).sum(0, keepdim=True, dtype=dtype))
    return _per_output(sums, absolute, centre, samples, geometry, kind, among, False)


def _per_output(
    sums: Tensor,
    absolute: Tensor,
    centre: Tensor | None,
    samples: int,
    geometry: Geometry,
    kind: MassKind,
    among: Peers,
    exact: bool,
) -> Statistics:
    """Turn sums over samples, (1, C, *in), into what a tap meets per output element."""
    size = sums.shape[2:]
    fields = (sums, absolute)
    mean, mass = (geometry.gather(f, exact=exact) if kind == "position" else over_space(f) for f in fields)
    count = samples * geometry.divisor(size, kind)
    if among is None:
        return Statistics(mean / count, mass / count, centre)
    both = _mean_over_processes(torch.stack([mean, mass]), count, among)
    return Statistics(both[0], both[1], centre)


def _centre(sums: Tensor, samples: int, among: Peers) -> Tensor:
    """The mean of each channel over samples and space."""
    total, elements = over_space(sums), samples * math.prod(sums.shape[2:])
    return total / elements if among is None else _mean_over_processes(total, elements, among)


def _mean_over_processes(sums: Tensor, count: int, among: tuple[ProcessGroup | None]) -> Tensor:
    """``sums / count``, with both summed over processes in one differentiable collective."""
    flat = sum_over_processes(torch.cat([sums.flatten(), sums.new_full((1,), count)]), among[0])
    return flat[:-1].view_as(sums) / flat[-1]


def add_statistics_gradient(
    dx: Tensor,
    x: Tensor,
    gradient: Statistics,
    samples: int,
    geometry: Geometry,
    kind: MassKind,
    among: Peers = None,
) -> None:
    """Add the adjoint of :func:`statistics` to the gradient of its ``x``, in place.

    ``gradient`` holds the gradients of mean and mass, and the centre itself. With several processes, each
    uses the sum of all their gradients, because its samples are part of everyone's statistics.
    """
    dmean, dmass, centre = gradient
    size = x.shape[2:]
    count = samples * geometry.divisor(size, kind)
    if among is not None:
        both = torch.stack([dmean, dmass])
        flat = sum_over_processes(torch.cat([both.flatten(), both.new_full((1,), count)]), among[0])
        dmean, dmass = (flat[:-1].view_as(both) / flat[-1]).unbind()
    else:
        dmean, dmass = dmean / max(1, count), dmass / max(1, count)
    if kind == "position":
        dmean, dmass = geometry.scatter(dmean, size), geometry.scatter(dmass, size)
    if dx.dim() == 4 and dx.stride(1) == 1:
        dmean, dmass = (f.contiguous(memory_format=torch.channels_last) for f in (dmean, dmass))
    counted = x[:samples]
    if centre is None:
        dx[:samples] += torch.where(counted < 0, dmean - dmass, dmean + dmass)
        return
    through_mass = torch.where(counted.to(centre.dtype) - centre < 0, -dmass, dmass)
    # Every sample moves the centre, so the gradient through the centre is the mean, the same for all.
    mean = _centre(through_mass.sum(0, keepdim=True), samples, among)
    dx[:samples] += through_mass + (dmean - mean)


def update_running(
    running_mean: Tensor,
    running_mass: Tensor,
    num_batches_tracked: Tensor | None,
    mean: Tensor,
    mass: Tensor,
    momentum: float | None,
) -> None:
    r"""Add the statistics of a batch to their moving averages, in place and without waiting for the device.

    ``running`` becomes ``(1 - a) * running + a * batch`` with ``a = max(momentum, 1 / n)``, n counting this batch: the
    first batch is copied and the next ones are averaged, until the simple average becomes a moving one.
    ``momentum=None`` is the simple average. Without a counter, a is the momentum. Statistics that are not finite, or
    would not be in the dtype of ``running_mass``, change nothing.
    """
    if momentum is None and num_batches_tracked is None:
        raise ValueError("momentum=None needs num_batches_tracked: a simple average has to count its batches")
    with torch.no_grad():
        mean, mass = mean.to(running_mean.dtype), mass.to(running_mass.dtype)
        total = mass.sum(dtype=torch.promote_types(mass.dtype, torch.float32))
        finite = (total - total) == 0  # as isfinite, in fewer operations; the mean is never larger than the mass
        mean, mass = torch.where(finite, mean, running_mean), torch.where(finite, mass, running_mass)
        if num_batches_tracked is None:
            running_mean.lerp_(mean, float(momentum))  # type: ignore[arg-type]
            running_mass.lerp_(mass, float(momentum))  # type: ignore[arg-type]
            return
        num_batches_tracked.add_(finite)
        # at most 1: if the very first batch is not finite, the count is 0 and its reciprocal infinite
        rate = num_batches_tracked.to(total.dtype).reciprocal().clamp_(momentum or 0.0, 1.0)
        running_mean.lerp_(mean, rate.to(mean.dtype))
        running_mass.lerp_(mass, rate.to(mass.dtype))


def leading_samples(samples: int, fraction: float) -> int:
    """How many samples a leading fraction of a batch has: to the nearest number (halves up), and at least one."""
    return samples if fraction == 1.0 else min(samples, max(1, int(samples * fraction + 0.5)))


# --------------------------------------------------------------------------------------------------------------------
# The rule for zero
# --------------------------------------------------------------------------------------------------------------------


def counts(value: Tensor, magnitude: Tensor, terms: int) -> Tensor:
    """Whether a sum of this many terms, whose magnitudes are about ``magnitude``, is more than rounding error.

    This is the one rule for what can be balanced: the total mass against the sum of its magnitudes, and the
    contribution of the positive weights against the mean that was subtracted. A total mass is measured against the
    input's mean too, or a constant input would have a centred mass of rounding errors. The rule is false for infinities
    and NaN, and for numbers so small that their inverse does not exist.
    """
    limits = torch.finfo(value.dtype)
    rounding_error = 4 * limits.eps * math.sqrt(terms)
    return (value.abs() > (magnitude.abs() * rounding_error).clamp(min=limits.tiny)) & (value.abs() <= limits.max)


def _inverse(value: Tensor, present: Tensor) -> Tensor:
    """1 / ``value`` where it is present and 0 elsewhere, at most so large that products with it stay finite."""
    limits = torch.finfo(value.dtype)
    largest = limits.max * limits.eps
    return torch.where(present, value.reciprocal().clamp(-largest, largest), 0.0)


def saturate(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``; values that float16 cannot hold become its largest number, not infinity."""
    if tensor.dtype == dtype:
        return tensor
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        tensor = tensor.clamp(-largest, largest)
    return tensor.to(dtype)


def effective_bias(bias: Tensor | None, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias that the convolution adds: less sum w'' mu, the offset that the mean of the input would cause."""
    return saturate(-offset if bias is None else bias.to(offset.dtype) - offset, dtype)


# --------------------------------------------------------------------------------------------------------------------
# Balance, in differentiable operations
# --------------------------------------------------------------------------------------------------------------------


class _Balance(NamedTuple):
    """A weight (groups, D / groups, C / groups, *kernel) in balance; sums keep their axes."""

    direction: Tensor
    """v, in its own unit."""
    factor: Tensor
    """Turns it into w'' (without the gain); 0 where there is nothing to balance."""
    present: Tensor
    """Whether the group has a mass."""
    divisor: Tensor
    contribution: Tensor
    mean: Tensor


def _balance(
    weight: Tensor, mass: Tensor, mean: Tensor | None, one_pass: bool, shift: bool, groups: int, transposed: bool
) -> _Balance:
    dtype = torch.promote_types(torch.promote_types(weight.dtype, mass.dtype), torch.float32)
    w = by_output(weight, groups, transposed).to(dtype)
    m = _by_group(mass.to(dtype), w)
    row = tuple(range(2, w.dim()))  # all axes of an output kernel
    terms = math.prod(w.shape[2:])

    # w'' does not change with the size of w, and is inverse to the size of m. So each is divided by a
    # constant of its size: nothing overflows, here or in the gradient, however large inputs and weights are.
    total = m.detach().sum(row, keepdim=True)
    size = m.detach().abs()
    if mean is not None:
        size = torch.maximum(size, _by_group(mean.detach().to(dtype), w).abs())
    present = counts(total, size.sum(row, keepdim=True), terms)
    unit_of_mass = torch.where(present, total, 1.0)
    m = torch.where(present, m, 0.0) / unit_of_mass
    total = torch.where(present, m.sum(row, keepdim=True), 1.0)
    share = m / total
    divisor = total
    if groups > 1:
        floor = FLOOR * torch.where(present, total * unit_of_mass, 0.0).mean(0, keepdim=True) / unit_of_mass
        divisor = torch.where(floor > total, floor, total)

    weighted_mean = (share * w).sum(row, keepdim=True)
    shifted = w - weighted_mean if shift else w
    if shift:
        positive = w > 0 if one_pass else shifted > 0
        c = (share * torch.where(positive, shifted, 0.0)).sum(row, keepdim=True)
        alive = present & counts(c.detach(), weighted_mean.detach(), terms)
    else:
        c = (share * w.abs()).sum(row, keepdim=True) / 2
        alive = present & counts(c.detach(), torch.zeros_like(c), terms)
    unit_of_weight = torch.where(alive, c.detach(), 1.0)
    factor = torch.where(alive, 1.0, 0.0) / torch.where(alive, c / unit_of_weight * divisor, 1.0)
    factor = factor * _inverse(unit_of_mass, present)
    return _Balance(shifted / unit_of_weight, factor, present, divisor * unit_of_mass, c, weighted_mean)


def balance(
    weight: Tensor,
    mass: Tensor,
    gain: Tensor | None = None,
    one_pass: bool = True,
    groups: int = 1,
    *,
    shift: bool = True,
    transposed: bool = False,
    mean: Tensor | None = None,
    equalise: bool = False,
) -> tuple[Tensor, Tensor]:
    """The effective weight w'', in the shape, dtype and memory format of ``weight``, and the offset sum w'' mu, (D,).

    There is no epsilon. Where M or c vanishes to rounding error (dead inputs, equal weights, in one pass weights of one
    sign), w'' and the offset are zero, and so are their gradients. Without a ``mean`` the offset is zero.

    ``equalise`` balances for inputs times the :func:`equaliser` q of their mass, and multiplies the result by q: as if
    all input channels had about the same mass.
    """
    if equalise:
        q = equaliser(mass)
        mass, mean = mass * q, None if mean is None else mean * q
    balanced = _balance(weight, mass, mean, one_pass, shift, groups, transposed)
    effective = balanced.direction * balanced.factor
    outputs = effective.shape[:2]
    if gain is not None:
        effective = effective * gain.to(effective.dtype).view(*outputs, *(1,) * (effective.dim() - 2))
    if mean is None:
        offset = effective.new_zeros(outputs.numel())
    else:
        # With the shift, sum w'' a = 0. So the mass can be subtracted, which makes the paper's case exact. A mean that
        # is not finite must not turn the zero beside it into a NaN.
        level = mean.to(effective.dtype) - mass.to(effective.dtype) if shift else mean.to(effective.dtype)
        met = torch.where(balanced.present, _by_group(level, effective), 0.0)
        offset = (effective * met).flatten(2).sum(2).flatten()
    if equalise:
        effective = effective * _by_group(q.to(effective.dtype), effective)
    result = saturate(from_by_output(effective, transposed), weight.dtype)
    return (like_weight(result, weight) if transposed else result), offset


def equaliser(mass: Tensor) -> Tensor:
    """q = mean(a) / max(a, 0.1 mean(a)), with the mean over the input channels; 1 where there is no mass."""
    mean = mass.mean(1, keepdim=True)
    present = (mean > 0) & (mean <= torch.finfo(mean.dtype).max)
    mean, mass = torch.where(present, mean, 1.0), torch.where(present, mass, 1.0)  # so that gradients are finite too
    return mean / torch.maximum(mass, FAINT * mean)


def contribution(
    weight: Tensor, mass: Tensor, *, shift: bool, one_pass: bool, groups: int, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The divisor M of w'', the contribution c and the weighted mean sum p w of every output channel, each (D,)."""
    balanced = _balance(weight, mass, None, one_pass, shift, groups, transposed)
    outputs = balanced.direction.shape[:2]
    values = (balanced.divisor, balanced.contribution, balanced.mean)
    divisor, c, mean = (v.flatten(1).expand(outputs).flatten() for v in values)
    return divisor, c, mean


def like_weight(kernels: Tensor, weight: Tensor) -> Tensor:
    """``kernels`` in the memory format of ``weight``, from which torch chooses the format of a convolution's output."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(weight.dim())
    if last is None or weight.is_contiguous() or not weight.is_contiguous(memory_format=last):
        return kernels
    return kernels.contiguous(memory_format=last)


def _by_group(values: Tensor, w: Tensor) -> Tensor:
    """Statistics (1, C, ...), expanded to a weight (groups, D / groups, C / groups, *kernel)."""
    groups, _, inputs, *kernel = w.shape
    return values.view(groups, 1, inputs, *values.shape[2:]).expand(-1, -1, -1, *kernel)


# --------------------------------------------------------------------------------------------------------------------
# Balance and its gradient in closed form, on a matrix of output kernels: (D, n), or (groups, D / groups, n)
# --------------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The parts of the balance that the backward pass needs, besides the weight. A column has a value for each row."""

    share: Tensor
    """Row of p; 0 where there is no mass."""
    met: Tensor
    """Row of mu; with the shift, of mu - a (because sum w'' a = 0); 0 where there is no mass."""
    inverse_total: Tensor
    """1 / M; 0 where there is no mass."""
    inverse_divisor: Tensor
    """The same with the floored divisor of w''."""
    mean: Tensor
    """Column of the means that are subtracted; 0 without the shift."""
    positive: Tensor
    """Column of sum p I."""
    inverse_contribution: Tensor
    """Column of 1 / c; 0 where there is nothing to balance."""

    def v(self, w: Tensor) -> Tensor:
        """The matrix v, newly allocated."""
        return torch.sub(w, self.mean).mul_(self.inverse_contribution)


def measure(w: Tensor, mu: Tensor, a: Tensor, one_pass: bool, shift: bool) -> Rows:
    """Measure a matrix of weights ``w`` against rows of the statistics."""
    terms = w.shape[-1]
    total = a.sum(-1, keepdim=True)
    present = counts(total, torch.maximum(a.abs(), mu.abs()).sum(-1, keepdim=True), terms)
    share = torch.where(present, a / total, 0.0)
    met = torch.where(present, mu - a if shift else mu, 0.0)
    inverse_total = inverse_divisor = _inverse(total, present)
    if w.dim() == 3:
        total = torch.where(present, total, 0.0)
        divisor = torch.maximum(total, FLOOR * total.mean(0, keepdim=True))
        inverse_divisor = _inverse(divisor, present)
    # Sums are not matrix products: TF32 would round the shares, by more than the rule for zero allows.
    scratch = torch.mul(w, share)
    mean = scratch.sum(-1, keepdim=True)

    def weighted_sum(values: Tensor) -> Tensor:
        return values.mul_(share).sum(-1, keepdim=True)

    if not shift:
        mean = torch.zeros_like(mean)
        positive = mean  # not used without the shift
        c = weighted_sum(torch.abs(w, out=scratch)).mul_(0.5)
    elif one_pass:
        positive = weighted_sum(torch.gt(w, 0, out=scratch))
        c = weighted_sum(torch.clamp_min(w, 0, out=scratch)).addcmul_(mean, positive, value=-1.0)
    else:
        positive = weighted_sum(torch.gt(w, mean, out=scratch))
        # sum p w' = 0, so its positive part is half of sum p |w'|
        c = weighted_sum(torch.sub(w, mean, out=scratch).abs_()).mul_(0.5)
    inverse_contribution = torch.where(counts(c, mean, terms), c.reciprocal(), 0.0)
    return Rows(share, met, inverse_total, inverse_divisor, mean, positive, inverse_contribution)


def effective_rows(w: Tensor, g: Tensor | float, rows: Rows) -> tuple[Tensor, Tensor]:
    """The matrix w'' and the column sum w'' mu, with ``g`` the column of gain times scale."""
    effective = rows.v(w).mul_(rows.inverse_divisor * g)
    return effective, torch.mul(effective, rows.met).sum(-1, keepdim=True)


class RowGradients(NamedTuple):
    dw: Tensor
    s: Tensor
    """Column of s: the gradient of gain times scale."""
    dmean: Tensor
    """Row of the gradient of mu."""
    dmass: Tensor
    """Row of the gradient of a."""


def gradient_rows(
    gradient: Tensor, t: Tensor, w: Tensor, g: Tensor | float, rows: Rows, one_pass: bool, shift: bool, lone: bool
) -> RowGradients:
    """The gradients of weight and statistics, from dL/dw'' (which it overwrites) and the column t.

    ``lone`` says that all taps of a group share one mass: p then does not depend on it.
    """
    v = rows.v(w)
    dmean = torch.mul(v, t * g).sum(-2, keepdim=True).mul_(rows.inverse_divisor).neg_()
    gradient.addcmul_(t, rows.met, value=-1.0)
    scratch = torch.mul(gradient, v)
    s = scratch.sum(-1, keepdim=True).mul_(rows.inverse_divisor)
    u = s * g
    if shift:
        db = gradient.sum(-1, keepdim=True).mul_(rows.inverse_divisor).mul_(g).addcmul_(u, rows.positive, value=-1.0)
        q = torch.gt(w, 0 if one_pass else rows.mean, out=scratch).mul_(u).add_(db)
    else:
        q = torch.sign(w, out=scratch).mul_(u * 0.5)
    gradient.mul_(rows.inverse_divisor * g).addcmul_(q, rows.share, value=-1.0).mul_(rows.inverse_contribution)
    dmass = q.mul_(v).sum(-2, keepdim=True).mul_(-rows.inverse_total)
    if w.dim() == 3:
        # A floored divisor depends on the masses of all groups, not on M.
        floored = rows.inverse_divisor < rows.inverse_total
        total = torch.where(floored, u.sum(-2, keepdim=True), 0.0)
        dmass = torch.where(floored, 0.0, dmass) if lone else dmass + total * rows.inverse_total
        through_floor = FLOOR / w.shape[0] * (total * rows.inverse_divisor).sum(0, keepdim=True)
        dmass = torch.where(rows.inverse_total == 0, 0.0, dmass - through_floor)
    return RowGradients(gradient, s, dmean, dmass - dmean if shift else dmass)
