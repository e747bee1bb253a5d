"""The closed form as Triton kernels: sums of samples, balance of rows, moving averages, and the gradients.

The symbols are those of ``method.py``. A weight is a matrix with a row for each output kernel; a row holds taps x
inputs (LAST, the order of channels_last) or inputs x taps. Statistics are always inputs x taps, with one tap if all
taps share them: ``masses`` numbers in all.

No kernel uses atomics, and no grid depends on the device: work is divided by its size alone, so the results are the
same, bit for bit, in every run. Everything is computed in ACC, float32 or (for float64 weights) float64. Offsets into
weights and samples are 64-bit.

The forward pass leaves one vector for the backward pass, ``saved``:

    mean, mass, sum of negative inputs (masses each) | total M, 1 / M, 1 / divisor (groups each; 0 without mass)
    | mean of w, positive, 1 / c (outputs each) | copy of the scale (outputs) | old running mean and mass (masses each),
    whether they moved (1)

CENTRED statistics take two passes over the samples: one for the centre of each channel, and one for the mean, for the
mass, which is that of the deviations x - centre, and for the sum of their signs, which is saved in the place of the sum
of negative inputs.
"""

import triton
import triton.language as tl

from balnorm._core import method

__all__ = [
    "add_to_samples",
    "backward_rows",
    "balance_rows",
    "finish_statistics",
    "scale_rows",
    "statistics_gradient",
    "sum_samples",
    "track_statistics",
]

FLOOR: tl.constexpr = tl.constexpr(method.FLOOR)


# --------------------------------------------------------------------------------------------------------------------
# Small functions
# --------------------------------------------------------------------------------------------------------------------


@triton.jit
def _divide(a, b):
    """IEEE division: Triton's own for float32 is approximate, by more than the rule for zero can spare."""
    if a.dtype == tl.float64:
        result = a / b
    else:
        result = tl.div_rn(a, b)
    return result


@triton.jit
def _counts(value, magnitude, terms, ACC: tl.constexpr):
    """The rule of ``method.py`` for what is more than rounding error."""
    if tl.float64 == ACC:
        eps = tl.full([], 2.220446049250313e-16, ACC)
        tiny = tl.full([], 2.2250738585072014e-308, ACC)
        most = tl.full([], 1.7976931348623157e308, ACC)
    else:
        eps = tl.full([], 1.1920928955078125e-07, ACC)
        tiny = tl.full([], 1.1754943508222875e-38, ACC)
        most = tl.full([], 3.4028234663852886e38, ACC)
    limit = tl.abs(magnitude) * (4 * eps * tl.sqrt(tl.zeros([], ACC) + terms))
    limit = tl.where(limit < tiny, tiny, limit)  # a NaN stays one, and then nothing counts
    size = tl.abs(value)
    return (size > limit) & (size <= most)


@triton.jit
def _inverse(value, present, ACC: tl.constexpr):
    """1 / value, at most so large that products with it stay finite; 0 where it is not present."""
    if tl.float64 == ACC:
        largest = tl.full([], 3.99168061906944e292, ACC)  # the largest number times epsilon
    else:
        largest = tl.full([], 4.0564817e31, ACC)
    inverse = _divide(tl.full([], 1.0, ACC), tl.where(present, value, 1.0))
    inverse = tl.where(inverse > largest, largest, tl.where(inverse < -largest, -largest, inverse))
    return tl.where(present, inverse, 0.0)


@triton.jit
def _index(j, inputs, taps, LAST: tl.constexpr, POSITION: tl.constexpr):
    """Where among the statistics of a group (inputs x taps, or inputs) the one of column ``j`` is."""
    if LAST:
        index = j % inputs
        if POSITION:
            index = index * taps + j // inputs
    elif POSITION:
        index = j
    else:
        index = j // taps
    return index


@triton.jit
def _row_of(of_group, j, n, inputs, taps, LAST: tl.constexpr, POSITION: tl.constexpr, ACC: tl.constexpr):
    """The statistics that columns ``j`` meet."""
    return _to(tl.load(of_group + _index(j, inputs, taps, LAST, POSITION), mask=j < n, other=0.0), ACC)


@triton.jit
def _share(a, total, present, mask):
    """p; 0 where there is no mass, and outside of the row."""
    return tl.where(present, tl.where(mask, _divide(a, total), 0.0), 0.0)


@triton.jit
def _met(mu, a, present, SHIFT: tl.constexpr):
    """mu, with the shift mu - a; 0 where there is no mass."""
    if SHIFT:
        mu = mu - a
    return tl.where(present, mu, 0.0)


@triton.jit
def _factor(gain, scale, row, mask, HAS_GAIN: tl.constexpr, HAS_SCALE: tl.constexpr, ACC: tl.constexpr):
    """gain times scale."""
    factor = (row * 0).to(ACC) + 1.0
    if HAS_GAIN:
        factor = _to(tl.load(gain + row, mask=mask, other=0.0), ACC)
    if HAS_SCALE:
        factor = factor * _to(tl.load(scale + row, mask=mask, other=0.0), ACC)
    return factor


@triton.jit
def _to(value, TYPE: tl.constexpr):
    """Convert, between float64 and the 16-bit types by way of float32, as torch does."""
    if value.dtype.primitive_bitwidth * TYPE.primitive_bitwidth == 1024:
        value = value.to(tl.float32)
    return value.to(TYPE)


@triton.jit
def _write(pointer, value, mask):
    """Store in the type of ``pointer``; what float16 cannot hold becomes its largest number."""
    if pointer.dtype.element_ty == tl.float16:
        value = tl.where(value > 65504.0, 65504.0, tl.where(value < -65504.0, -65504.0, value))
    tl.store(pointer, _to(value, pointer.dtype.element_ty), mask=mask)


@triton.jit
def _along(i, t, out, stride, padding, dilation, TRANSPOSED: tl.constexpr):
    """Whether tap ``t`` meets input ``i`` along one axis."""
    if TRANSPOSED:
        o = i * stride + t * dilation - padding
        met = (o >= 0) & (o < out)
    else:
        o = i - t * dilation + padding
        met = (o >= 0) & (o < out * stride) & (o % stride == 0)
    return met


@triton.jit
def _meets(p, t, n1, n2, o0, o1, o2, k1, k2, s0, s1, s2, p0, p1, p2, d0, d1, d2, TRANSPOSED: tl.constexpr):
    """Whether tap ``t`` meets pixel ``p``, both counted over three axes."""
    return (
        _along(p // (n1 * n2), t // (k1 * k2), o0, s0, p0, d0, TRANSPOSED)
        & _along((p // n2) % n1, (t // k2) % k1, o1, s1, p1, d1, TRANSPOSED)
        & _along(p % n2, t % k2, o2, s2, p2, d2, TRANSPOSED)
    )


# --------------------------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------------------------

_GEOMETRY = ["n1", "n2", "o0", "o1", "o2", "k1", "k2", "s0", "s1", "s2", "p0", "p1", "p2", "d0", "d1", "d2"]
_SPLIT = ["samples", "per_sample", "per_pixel", "pixel_chunks", "count", "taps", "centres"]


@triton.jit
def _store_statistics(
    out, j, mask, total, below, size, field, count, CENTRED: tl.constexpr, FINAL: tl.constexpr, ACC: tl.constexpr
):
    """Sums as they are; or mean, mass and ``below``, the sum of negative inputs or (CENTRED) of signs.

    Without negative inputs, mean and mass are the same.
    """
    if FINAL:
        if not CENTRED:
            size = total - 2 * below
        divisor = tl.zeros([], ACC) + count
        tl.store(out + j, _divide(total, divisor), mask=mask)
        tl.store(out + field + j, _divide(size, divisor), mask=mask)
        tl.store(out + 2 * field + j, below, mask=mask)
    else:
        tl.store(out + j, total, mask=mask)
        tl.store(out + field + j, below, mask=mask)
        if CENTRED:
            tl.store(out + 2 * field + j, size, mask=mask)


@triton.jit(do_not_specialize=_GEOMETRY + _SPLIT)
def sum_samples(
    x, centre, out, samples, pixels, channels, sn, sp, sc, per_sample, per_pixel, pixel_chunks, limit, count, taps,
    centres, n1, n2, o0, o1, o2, k1, k2, s0, s1, s2, p0, p1, p2, d0, d1, d2,
    BY_TAP: tl.constexpr, TAPS: tl.constexpr, FLAT: tl.constexpr, CENTRED: tl.constexpr, FINAL: tl.constexpr,
    TRANSPOSED: tl.constexpr, ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out (2, chunks, channels, taps): sums of a chunk of samples and pixels, and of its negative ones.

    CENTRED: out (3, ...), sums of it, of the signs of its deviations from ``centre`` (centres), and of their sizes.
    They are sums of all of it or (BY_TAP) for each tap. FLAT: a "sample" is a run of BLOCK_P pixels, ``limit`` of them
    in all. FINAL: there is one chunk, and ``out`` gets the statistics.
    """
    wide = tl.full([], 0, tl.int64)
    chunk = tl.program_id(1)
    sample_chunk = chunk // pixel_chunks
    pixel_chunk = chunk - sample_chunk * pixel_chunks
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = sample_chunk * per_sample
    last = tl.minimum(first + per_sample, samples)
    begin = pixel_chunk * per_pixel * BLOCK_P  # in blocks, so that the compiler knows what it is a multiple of
    end = tl.minimum(begin + per_pixel * BLOCK_P, pixels)
    none, nothing = tl.zeros([BLOCK_P, BLOCK_C], ACC), tl.zeros([TAPS, BLOCK_C], ACC)
    acc, low, size = none, none, none
    sums, below, sizes = nothing, nothing, nothing
    if CENTRED:
        middle = tl.load(centre + c % centres, mask=c < channels, other=0.0)[None, :]
    tap = tl.arange(0, TAPS)
    for start in range(begin, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        inside = (p < pixels)[:, None] & (c < channels)[None, :]
        address = x + (wide + p)[:, None] * sp + (wide + c)[None, :] * sc
        for n in range(first, last, UNROLL):
            for i in tl.static_range(UNROLL):
                mask = inside & (p * 0 + n + i < last)[:, None]
                if FLAT:
                    mask = mask & ((wide + n + i) * BLOCK_P + p < limit)[:, None]
                value = _to(tl.load(address + (wide + n + i) * sn, mask=mask, other=0.0), ACC)
                acc += value
                if CENTRED:
                    low += tl.where(mask, tl.where(value < middle, -1.0, 1.0), 0.0)
                    size += tl.where(mask, tl.abs(value - middle), 0.0)
                else:
                    low += tl.where(value < 0, value, 0.0)
        if BY_TAP:  # a kernel of one tap with a stride does not meet everything either
            for t in range(taps):
                met = _meets(p, t, n1, n2, o0, o1, o2, k1, k2, s0, s1, s2, p0, p1, p2, d0, d1, d2, TRANSPOSED)
                here = (tap == t)[:, None]
                sums += tl.where(here, tl.sum(tl.where(met[:, None], acc, 0.0), axis=0)[None, :], 0.0)
                below += tl.where(here, tl.sum(tl.where(met[:, None], low, 0.0), axis=0)[None, :], 0.0)
                if CENTRED:
                    sizes += tl.where(here, tl.sum(tl.where(met[:, None], size, 0.0), axis=0)[None, :], 0.0)
            acc, low, size = none, none, none
    if not BY_TAP:
        sums += tl.sum(acc, axis=0)[None, :]
        below += tl.sum(low, axis=0)[None, :]
        if CENTRED:
            sizes += tl.sum(size, axis=0)[None, :]
    j = (wide + chunk) * channels * taps + c[None, :] * taps + tap[:, None]
    mask = (c < channels)[None, :] & (tap < taps)[:, None]
    field = (wide + tl.num_programs(1)) * channels * taps
    _store_statistics(out, j, mask, sums, below, sizes, field, count, CENTRED, FINAL, ACC)


@triton.jit(do_not_specialize=["blocks", "count", "repeat"])
def finish_statistics(
    partial, out, blocks, columns, count, repeat,
    CENTRED: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics (columns, repeat) from partial (2, blocks, columns), or (3, ...) if CENTRED."""
    wide = tl.full([], 0, tl.int64)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    none = tl.zeros([BLOCK_R, BLOCK], ACC)
    acc, low, size = none, none, none
    for start in range(0, blocks, BLOCK_R):
        b = start + tl.arange(0, BLOCK_R)
        mask = (b < blocks)[:, None] & (j < columns)[None, :]
        at = partial + (wide + b)[:, None] * columns + j[None, :]
        acc += tl.load(at, mask=mask, other=0.0)
        low += tl.load(at + (wide + blocks) * columns, mask=mask, other=0.0)
        if CENTRED:
            size += tl.load(at + (wide + blocks) * 2 * columns, mask=mask, other=0.0)
    total, below, sizes = tl.sum(acc, axis=0), tl.sum(low, axis=0), tl.sum(size, axis=0)
    for t in range(repeat):
        at, field = (wide + j) * repeat + t, (wide + columns) * repeat
        _store_statistics(out, at, j < columns, total, below, sizes, field, count, CENTRED, True, ACC)


# --------------------------------------------------------------------------------------------------------------------
# Balance
# --------------------------------------------------------------------------------------------------------------------


@triton.jit
def _track(
    mean, mass, running_mean, running_mass, batches, before, masses, stored, by_input, by_tap, momentum, momentum_rest,
    COUNTED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The moving averages, as ``method.update_running``; the old ones go to ``before``."""
    KEPT = running_mass.dtype.element_ty
    acc = tl.zeros([BLOCK], ACC)
    for start in range(0, masses, BLOCK):
        j = start + tl.arange(0, BLOCK)
        acc += _to(_to(tl.load(mass + j, mask=j < masses, other=0.0), KEPT), ACC)
    total = tl.sum(acc, axis=0)
    finite = (total - total) == 0
    rate = tl.zeros([], ACC) + momentum
    rate += momentum_rest
    if COUNTED:
        count = tl.load(batches) + finite.to(tl.int64)
        tl.store(batches, count)
        of_count = _divide(tl.full([], 1.0, ACC), tl.where(count == 0, 1, count).to(ACC))
        rate = _to(_to(tl.minimum(tl.maximum(of_count, rate), 1.0), KEPT), ACC)
    for start in range(0, masses, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < masses
        where = (j // stored) * by_input + (j % stored) * by_tap
        _mix(running_mean + where, mean + j, before + j, inside, rate, finite, KEPT, ACC)
        _mix(running_mass + where, mass + j, before + masses + j, inside, rate, finite, KEPT, ACC)
    tl.store(before + 2 * masses, finite.to(ACC))


@triton.jit(do_not_specialize=["masses", "stored", "by_input", "by_tap", "momentum", "momentum_rest"])
def track_statistics(
    mean, mass, running_mean, running_mass, batches, before, masses, stored, by_input, by_tap, momentum, momentum_rest,
    ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The moving averages alone, with a counter."""
    _track(
        mean, mass, running_mean, running_mass, batches, before, masses, stored, by_input, by_tap, momentum,
        momentum_rest, True, ACC, BLOCK,
    )  # fmt: skip


@triton.jit
def _mix(running, batch, before, mask, rate, finite, KEPT: tl.constexpr, ACC: tl.constexpr):
    new = _to(_to(tl.load(batch, mask=mask, other=0.0), KEPT), ACC)
    old = _to(tl.load(running, mask=mask, other=0.0), ACC)
    tl.store(before, old, mask=mask)
    # as torch.lerp: from the nearer end, so that a rate of 1 copies
    mixed = tl.where(rate < 0.5, old + rate * (new - old), new - (new - old) * (1 - rate))
    tl.store(running, _to(tl.where(finite, mixed, old), KEPT), mask=mask)


@triton.jit
def _floor(mean, mass, groups, held, taps, n, POSITION: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest divisor of w'': a part of the mean M of all groups."""
    BLOCK_H: tl.constexpr = 16
    BLOCK_G: tl.constexpr = BLOCK // BLOCK_H
    acc = tl.zeros([BLOCK_G], ACC)
    for start in range(0, groups, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        total, magnitude = tl.zeros([BLOCK_G], ACC), tl.zeros([BLOCK_G], ACC)
        for first in range(0, held, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            mask = (g < groups)[:, None] & (h < held)[None, :]
            at = g[:, None] * held + h[None, :]
            a = _to(tl.load(mass + at, mask=mask, other=0.0), ACC)
            mu = _to(tl.load(mean + at, mask=mask, other=0.0), ACC)
            total += tl.sum(a, axis=1)
            magnitude += tl.sum(_larger(a, mu), axis=1)
        if not POSITION:
            total = total * taps
            magnitude = magnitude * taps
        acc += tl.where(_counts(total, magnitude, n, ACC), total, 0.0)
    return tl.full([], FLOOR, ACC) * _divide(tl.sum(acc, axis=0), tl.zeros([], ACC) + groups)


@triton.jit
def _larger(a, b):
    """max(abs(a), abs(b)), or NaN if there is one."""
    a, b = tl.abs(a), tl.abs(b)
    return tl.where(a >= b, a, tl.where(b > a, b, a + b))


@triton.jit(
    do_not_specialize=["outputs", "rows", "groups", "masses", "taps", "by_input", "by_tap", "momentum", "momentum_rest"]
)
def balance_rows(
    w, given_mean, given_mass, saved, gain, scale, bias, out, out_bias, running_mean, running_mass, batches,
    outputs, rows, groups, inputs, taps, masses, by_input, by_tap, momentum, momentum_rest,
    LAST: tl.constexpr, POSITION: tl.constexpr, ONE_PASS: tl.constexpr, SHIFT: tl.constexpr, GROUPED: tl.constexpr,
    HAS_GAIN: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, GIVEN: tl.constexpr, TRACK: tl.constexpr,
    COUNTED: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One output kernel per program: its sums, effective weight and bias. One more program moves the averages."""
    d = tl.program_id(0)
    if POSITION:
        stored = taps
    else:
        stored = 1
    if GIVEN:
        mean, mass = given_mean, given_mass
    else:
        mean, mass = saved, saved + masses
    of_groups = saved + 3 * masses
    vectors = of_groups + 3 * groups
    if d == outputs:
        if TRACK:
            _track(
                mean, mass, running_mean, running_mass, batches, vectors + 4 * outputs, masses, stored, by_input,
                by_tap, momentum, momentum_rest, COUNTED, ACC, BLOCK,
            )  # fmt: skip
    else:
        group = d // rows
        n = inputs * taps
        held = inputs * stored
        mean_of, mass_of = mean + group * held, mass + group * held

        acc, size = tl.zeros([BLOCK], ACC), tl.zeros([BLOCK], ACC)
        for start in range(0, held, BLOCK):
            j = start + tl.arange(0, BLOCK)
            a = _to(tl.load(mass_of + j, mask=j < held, other=0.0), ACC)
            mu = _to(tl.load(mean_of + j, mask=j < held, other=0.0), ACC)
            acc += a
            size += _larger(a, mu)
            if GIVEN:
                mask = (j < held) & (j * 0 + d == group * rows)
                tl.store(saved + group * held + j, mu, mask=mask)
                tl.store(saved + masses + group * held + j, a, mask=mask)
                tl.store(saved + 2 * masses + group * held + j, a * 0 - 1, mask=mask)  # there may be negative inputs
        total, magnitude = tl.sum(acc, axis=0), tl.sum(size, axis=0)
        if not POSITION:
            total = total * taps
            magnitude = magnitude * taps
        present = _counts(total, magnitude, n, ACC)
        total = tl.where(present, total, 0.0)
        inverse_total = _inverse(total, present, ACC)
        inverse_divisor = inverse_total
        if GROUPED:
            floor = _floor(mean, mass, groups, held, taps, n, POSITION, ACC, BLOCK)
            inverse_divisor = _inverse(tl.where(floor > total, floor, total), present, ACC)
        unit = tl.where(present, total, 1.0)

        row = w + (tl.full([], 0, tl.int64) + d) * n
        acc, some, part = tl.zeros([BLOCK], ACC), tl.zeros([BLOCK], ACC), tl.zeros([BLOCK], ACC)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            p = _share(_row_of(mass_of, j, n, inputs, taps, LAST, POSITION, ACC), unit, present, j < n)
            value = tl.load(row + j, mask=j < n, other=0.0)
            if not SHIFT:
                part += tl.abs(value) * p
            else:
                acc += value * p
                if ONE_PASS:
                    some += tl.where(value > 0, p, 0.0)
                    part += tl.where(value > 0, value, 0.0) * p
        shift = tl.sum(acc, axis=0)
        if SHIFT and not ONE_PASS:
            for start in range(0, n, BLOCK):
                j = start + tl.arange(0, BLOCK)
                p = _share(_row_of(mass_of, j, n, inputs, taps, LAST, POSITION, ACC), unit, present, j < n)
                value = tl.load(row + j, mask=j < n, other=0.0)
                some += tl.where(value > shift, p, 0.0)
                part += tl.abs(value - shift) * p  # sum p w' = 0, so its positive part is half of sum p |w'|
        positive = tl.sum(some, axis=0)
        contribution = tl.sum(part, axis=0)
        if SHIFT and ONE_PASS:
            contribution = contribution - shift * positive
        else:
            contribution = contribution * 0.5
        alive = _counts(contribution, shift, n, ACC)
        inverse = tl.where(alive, _divide(tl.full([], 1.0, ACC), tl.where(alive, contribution, 1.0)), 0.0)

        if d == group * rows:
            tl.store(of_groups + group, total)
            tl.store(of_groups + groups + group, inverse_total)
            tl.store(of_groups + 2 * groups + group, inverse_divisor)
        tl.store(vectors + d, shift)
        tl.store(vectors + outputs + d, positive)
        tl.store(vectors + 2 * outputs + d, inverse)
        if HAS_SCALE:
            tl.store(vectors + 3 * outputs + d, _to(tl.load(scale + d), ACC))

        factor = inverse_divisor * _factor(gain, scale, d, d >= 0, HAS_GAIN, HAS_SCALE, ACC)
        into = out + (tl.full([], 0, tl.int64) + d) * n
        acc = tl.zeros([BLOCK], ACC)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            a = _row_of(mass_of, j, n, inputs, taps, LAST, POSITION, ACC)
            mu = _row_of(mean_of, j, n, inputs, taps, LAST, POSITION, ACC)
            value = tl.load(row + j, mask=j < n, other=0.0)
            effective = (value - shift) * inverse * factor
            acc += tl.where(j < n, effective * _met(mu, a, present, SHIFT), 0.0)
            _write(into + j, effective, j < n)
        shifted = -tl.sum(acc, axis=0)
        if HAS_BIAS:
            shifted += _to(tl.load(bias + d), ACC)
        _write(out_bias + d, shifted, d >= 0)


@triton.jit(do_not_specialize=["outputs", "rows", "groups", "masses"])
def scale_rows(
    w, saved, gain, scale, out, outputs, rows, groups, n, masses,
    HAS_GAIN: tl.constexpr, HAS_SCALE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The effective weight once more, from what ``balance_rows`` saved."""
    d = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_groups = saved + 3 * masses
    inverse_divisor = tl.load(of_groups + 2 * groups + d // rows)
    vectors = of_groups + 3 * groups + d
    shift, inverse = tl.load(vectors), tl.load(vectors + 2 * outputs)
    factor = inverse_divisor * _factor(gain, scale, d, d >= 0, HAS_GAIN, HAS_SCALE, ACC)
    at = (tl.full([], 0, tl.int64) + d) * n + j
    value = tl.load(w + at, mask=j < n, other=0.0)
    _write(out + at, (value - shift) * inverse * factor, j < n)


# --------------------------------------------------------------------------------------------------------------------
# Gradients
# --------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["outputs", "rows", "blocks", "groups", "taps", "masses"])
def backward_rows(
    g, t, w, saved, gain, scale, dw, dgain, partial, outputs, rows, blocks, groups, inputs, taps, masses,
    LAST: tl.constexpr, POSITION: tl.constexpr, ONE_PASS: tl.constexpr, SHIFT: tl.constexpr, HAS_GAIN: tl.constexpr,
    HAS_SCALE: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS output kernels per program: dw, dgain, and what the gradient of the statistics is summed from.

    That is partial (2, groups, blocks, n), sums over rows of v t g and of q v, and (groups, blocks), sums of s g.
    """
    pid = tl.program_id(0)
    group = pid // blocks
    r = (pid - group * blocks) * ROWS + tl.arange(0, ROWS)
    inside = r < rows
    d = group * rows + r
    n = inputs * taps
    if POSITION:
        held = n
    else:
        held = inputs
    mean_of, mass_of = saved + group * held, saved + masses + group * held
    of_groups = saved + 3 * masses + group
    total, inverse_divisor = tl.load(of_groups), tl.load(of_groups + 2 * groups)
    present = total != 0
    unit = tl.where(present, total, 1.0)
    vectors = saved + 3 * masses + 3 * groups + d
    shift = tl.load(vectors, mask=inside, other=0.0)[:, None]
    positive = tl.load(vectors + outputs, mask=inside, other=0.0)
    inverse = tl.load(vectors + 2 * outputs, mask=inside, other=0.0)[:, None]
    gains = _factor(gain, scale, d, inside, HAS_GAIN, HAS_SCALE, ACC)
    through_offset = _to(tl.load(t + d, mask=inside, other=0.0), ACC)
    start_of = ((tl.full([], 0, tl.int64) + d) * n)[:, None]

    acc, acc_v = tl.zeros([ROWS, BLOCK], ACC), tl.zeros([ROWS, BLOCK], ACC)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (j < n)[None, :]
        a = _row_of(mass_of, j, n, inputs, taps, LAST, POSITION, ACC)
        met = _met(_row_of(mean_of, j, n, inputs, taps, LAST, POSITION, ACC), a, present, SHIFT)
        value = tl.load(w + start_of + j[None, :], mask=mask, other=0.0)
        gradient = _to(tl.load(g + start_of + j[None, :], mask=mask, other=0.0), ACC)
        gradient = tl.where(mask, gradient - through_offset[:, None] * met[None, :], 0.0)
        acc += gradient
        acc_v += gradient * ((value - shift) * inverse)
    s = tl.sum(acc_v, axis=1) * inverse_divisor
    if HAS_SCALE:
        tl.store(dgain + d, s * _to(tl.load(scale + d, mask=inside, other=0.0), ACC), mask=inside)
    else:
        tl.store(dgain + d, s, mask=inside)
    u = s * gains
    db = tl.sum(acc, axis=1) * inverse_divisor * gains - u * positive
    factor = (inverse_divisor * gains)[:, None]
    wide = tl.full([], 0, tl.int64)
    field = (wide + groups) * blocks * n
    tl.store(partial + 2 * field + pid, tl.sum(tl.where(inside, u, 0.0), axis=0))

    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (j < n)[None, :]
        a = _row_of(mass_of, j, n, inputs, taps, LAST, POSITION, ACC)
        met = _met(_row_of(mean_of, j, n, inputs, taps, LAST, POSITION, ACC), a, present, SHIFT)
        p = _share(a, unit, present, j < n)
        value = tl.load(w + start_of + j[None, :], mask=mask, other=0.0)
        gradient = _to(tl.load(g + start_of + j[None, :], mask=mask, other=0.0), ACC)
        gradient = gradient - through_offset[:, None] * met[None, :]
        if not SHIFT:
            half = 0.5 * u[:, None]
            q = tl.where(value > 0, half, tl.where(value < 0, -half, 0.0))
        elif ONE_PASS:
            q = tl.where(value > 0, u[:, None], 0.0) + db[:, None]
        else:
            q = tl.where(value > shift, u[:, None], 0.0) + db[:, None]
        v = (value - shift) * inverse
        tl.store(dw + start_of + j[None, :], (gradient * factor - q * p[None, :]) * inverse, mask=mask)
        of_mean = tl.where(mask, v * (through_offset * gains)[:, None], 0.0)
        of_mass = tl.where(mask, q * v, 0.0)
        into = partial + (wide + pid) * n + j
        tl.store(into, tl.sum(of_mean, axis=0), mask=j < n)
        tl.store(into + field, tl.sum(of_mass, axis=0), mask=j < n)


@triton.jit
def _through_floor(partial, of_groups, blocks, groups, n, ACC: tl.constexpr):
    """What every mass gets back from the groups whose divisor is the floor."""
    BLOCK_G: tl.constexpr = 128
    wide = tl.full([], 0, tl.int64)
    acc = tl.zeros([BLOCK_G], ACC)
    for start in range(0, groups, BLOCK_G):
        g = start + tl.arange(0, BLOCK_G)
        inverse_total = tl.load(of_groups + groups + g, mask=g < groups, other=0.0)
        inverse_divisor = tl.load(of_groups + 2 * groups + g, mask=g < groups, other=0.0)
        floored = inverse_divisor < inverse_total
        for b in range(blocks):
            at = 2 * (wide + groups) * blocks * n + g * blocks + b
            acc += tl.load(partial + at, mask=floored, other=0.0) * inverse_divisor
    return _divide(tl.full([], FLOOR, ACC) * tl.sum(acc, axis=0), tl.zeros([], ACC) + groups)


@triton.jit
def _gradient_at(
    partial, of_groups, through_floor, c, t, channels, blocks, groups, inputs, taps,
    LAST: tl.constexpr, SHIFT: tl.constexpr, GROUPED: tl.constexpr, LONE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradients of mean and mass of channels ``c`` at tap ``t``."""
    wide = tl.full([], 0, tl.int64)
    group = c // inputs
    of_group = c - group * inputs
    n = inputs * taps
    if LAST:
        j = t * inputs + of_group
    else:
        j = of_group * taps + t
    field = (wide + groups) * blocks * n
    acc, acc_v, acc_u = tl.zeros([BLOCK_C], ACC), tl.zeros([BLOCK_C], ACC), tl.zeros([BLOCK_C], ACC)
    for start in range(0, blocks, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        mask = (b < blocks)[:, None] & (c < channels)[None, :]
        block = (wide + group * blocks)[None, :] + b[:, None]
        at = partial + block * n + j[None, :]
        acc += tl.sum(tl.load(at, mask=mask, other=0.0), axis=0)
        acc_v += tl.sum(tl.load(at + field, mask=mask, other=0.0), axis=0)
        if GROUPED:
            acc_u += tl.sum(tl.load(partial + 2 * field + block, mask=mask, other=0.0), axis=0)
    inverse_total = tl.load(of_groups + groups + group, mask=c < channels, other=0.0)
    inverse_divisor = tl.load(of_groups + 2 * groups + group, mask=c < channels, other=0.0)
    dmean = -(acc * inverse_divisor)
    dmass = -(acc_v * inverse_total)
    if GROUPED:
        floored = inverse_divisor < inverse_total
        if LONE:
            dmass = tl.where(floored, 0.0, dmass)
        else:
            dmass = dmass + tl.where(floored, acc_u, 0.0) * inverse_total
        dmass = tl.where(inverse_total == 0, 0.0, dmass - through_floor)
    if SHIFT:
        dmass = dmass - dmean
    return dmean, dmass


@triton.jit(do_not_specialize=["channels", "blocks", "groups", "inputs", "taps", "masses"])
def statistics_gradient(
    partial, saved, out, channels, blocks, groups, inputs, taps, masses,
    LAST: tl.constexpr, POSITION: tl.constexpr, SHIFT: tl.constexpr, GROUPED: tl.constexpr, LONE: tl.constexpr,
    ACC: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradients of mean and mass, (2, masses), where torch hands them on to the samples."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    of_groups = saved + 3 * masses
    through_floor = tl.zeros([], ACC)
    if GROUPED:
        through_floor = _through_floor(partial, of_groups, blocks, groups, inputs * taps, ACC)
    mean, mass = tl.zeros([BLOCK_C], ACC), tl.zeros([BLOCK_C], ACC)
    for t in range(taps):
        dmean, dmass = _gradient_at(
            partial, of_groups, through_floor, c, t, channels, blocks, groups, inputs, taps, LAST, SHIFT, GROUPED,
            LONE, ACC, BLOCK_B, BLOCK_C,
        )  # fmt: skip
        if POSITION:
            tl.store(out + c * taps + t, dmean, mask=c < channels)
            tl.store(out + masses + c * taps + t, dmass, mask=c < channels)
        else:
            mean += dmean
            mass += dmass
    if not POSITION:
        tl.store(out + c, mean, mask=c < channels)
        tl.store(out + masses + c, mass, mask=c < channels)


@triton.jit(do_not_specialize=_GEOMETRY + _SPLIT + ["blocks", "groups", "inputs", "masses", "stored"])
def add_to_samples(
    dx, x, centre, partial, saved, samples, pixels, channels, sn, sp, sc, per_sample, per_pixel, pixel_chunks, limit,
    count, taps, n1, n2, o0, o1, o2, k1, k2, s0, s1, s2, p0, p1, p2, d0, d1, d2, blocks, groups, inputs, masses, stored,
    BY_TAP: tl.constexpr, FLAT: tl.constexpr, CENTRED: tl.constexpr, TRANSPOSED: tl.constexpr, LAST: tl.constexpr,
    SHIFT: tl.constexpr, GROUPED: tl.constexpr, LONE: tl.constexpr, ACC: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dx += what comes back through the statistics: a constant for each channel or (BY_TAP) an image, for all samples.

    Where x < 0 that is another one. A program whose channels have no negative inputs does not read x. CENTRED: where
    x < centre. The centre moves with every sample: what comes back through it is the mean of what comes back through
    the mass, which follows from the sums of signs.
    """
    wide = tl.full([], 0, tl.int64)
    chunk = tl.program_id(1)
    sample_chunk = chunk // pixel_chunks
    pixel_chunk = chunk - sample_chunk * pixel_chunks
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = sample_chunk * per_sample
    last = tl.minimum(first + per_sample, samples)
    begin = pixel_chunk * per_pixel * BLOCK_P  # in blocks, so that the compiler knows what it is a multiple of
    end = tl.minimum(begin + per_pixel * BLOCK_P, pixels)
    divisor = tl.zeros([], ACC) + count
    of_groups = saved + 3 * masses
    through_floor = tl.zeros([], ACC)
    if GROUPED:
        through_floor = _through_floor(partial, of_groups, blocks, groups, inputs * taps, ACC)
    mean, mass, through = tl.zeros([BLOCK_C], ACC), tl.zeros([BLOCK_C], ACC), tl.zeros([BLOCK_C], ACC)
    if CENTRED or not BY_TAP:
        for t in range(taps):
            dmean, dmass = _gradient_at(
                partial, of_groups, through_floor, c, t, channels, blocks, groups, inputs, taps, LAST, SHIFT, GROUPED,
                LONE, ACC, BLOCK_B, BLOCK_C,
            )  # fmt: skip
            mean += dmean
            mass += dmass
            if CENTRED:
                signs = tl.load(saved + 2 * masses + c * stored + t % stored, mask=c < channels, other=0.0)
                through += dmass * signs
    none = tl.zeros([BLOCK_P, BLOCK_C], ACC)
    middle, reads = none, none == 0
    if CENTRED:
        middle = none + tl.load(centre + c, mask=c < channels, other=0.0)[None, :]
        through = _divide(_divide(through, divisor), tl.zeros([], ACC) + limit)
    else:
        found = tl.zeros([BLOCK_C], tl.int32)
        for t in range(stored):
            below = tl.load(saved + 2 * masses + c * stored + t, mask=c < channels, other=0.0)
            found += (below != 0).to(tl.int32)
        reads = none + tl.sum(found, axis=0) > 0
    means = none + (_divide(mean, divisor) - through)[None, :]
    masses_of = none + _divide(mass, divisor)[None, :]
    for start in range(begin, end, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        if BY_TAP:
            means, masses_of = none - through[None, :], none
            for t in range(taps):
                dmean, dmass = _gradient_at(
                    partial, of_groups, through_floor, c, t, channels, blocks, groups, inputs, taps, LAST, SHIFT,
                    GROUPED, LONE, ACC, BLOCK_B, BLOCK_C,
                )  # fmt: skip
                met = _meets(p, t, n1, n2, o0, o1, o2, k1, k2, s0, s1, s2, p0, p1, p2, d0, d1, d2, TRANSPOSED)
                means += tl.where(met[:, None], _divide(dmean, divisor)[None, :], 0.0)
                masses_of += tl.where(met[:, None], _divide(dmass, divisor)[None, :], 0.0)
        plus, minus = means + masses_of, means - masses_of
        inside = (p < pixels)[:, None] & (c < channels)[None, :]
        offset = (wide + p)[:, None] * sp + (wide + c)[None, :] * sc
        for n in range(first, last, UNROLL):
            for i in tl.static_range(UNROLL):
                mask = inside & (p * 0 + n + i < last)[:, None]
                if FLAT:
                    mask = mask & ((wide + n + i) * BLOCK_P + p < limit)[:, None]
                at = offset + (wide + n + i) * sn
                looked = _to(tl.load(x + at, mask=mask & reads, other=0.0), ACC)
                value = _to(tl.load(dx + at, mask=mask, other=0.0), ACC) + tl.where(looked < middle, minus, plus)
                tl.store(dx + at, _to(value, dx.dtype.element_ty), mask=mask)
