"""The closed form in Triton (``triton_kernels.py``): few launches and few passes over memory, for CUDA and ROCm.

A layer costs at most three launches forward (sums of the samples; statistics; balance and moving averages; centred
ones, two more) and three backward (effective weight; gradients of the rows; addition to dx), beside its convolution.
Triton is imported for the
first tensor on a GPU. Without it, or with ``BALNORM_BACKEND=torch`` in the environment, torch operations do the work;
also after an error of the compiler or of a launch, and on a device whose results differ from those of torch: before the
first layer on a device, a small one is compared.

Block sizes and grids depend on shapes alone, so every run on one machine gives the same bits. Another version of
Triton, another kind of GPU, and tensors that do not begin at a multiple of 16 bytes may order sums differently.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from balnorm._core.backends import torch as torch_backend
from balnorm._core.backends.torch import ORDINARY, Forward, Running, Setup
from balnorm._core.geometry import geometry_of
from balnorm._core.matrix import WeightMatrix, same_order
from balnorm._core.method import Statistics
from balnorm._core.options import Options
from balnorm._core.torch_private import constant_when_compiled, is_compiled_for_training, is_watched

__all__ = [
    "backward",
    "compiled_balance",
    "compiled_track",
    "effective",
    "forward",
    "has_operators",
    "status",
    "takes",
    "track",
]

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
"""The last one is the counter's."""
_PROGRAMS = 512  # enough to keep the memory of a large GPU busy, and few enough to add up again
_TILE = 2048  # numbers that a program works on at once
_UNROLL = 4
_BLOCKS = 32  # of rows in backward: as many as programs that add to dx sum at once


class LaunchError(Exception):
    """Triton could not compile or launch a kernel."""


def takes(*tensors: Tensor | None) -> bool:
    """Whether the kernels can read these tensors: as :func:`fits` asks, on a GPU where the kernels work.

    A dispatch mode has to see every operation, so under one torch's operations do the work.
    """
    first = tensors[0]
    if first is None or not first.is_cuda or is_watched() or not fits(*tensors):
        return False
    state = _states.get(first.get_device())
    if state is None:
        state = _start(first.get_device())
    return state.works


def fits(*tensors: Tensor | None) -> bool:
    """Whether these tensors are torch's own, of known types, not empty, and on one device."""
    device = None
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in ORDINARY or tensor.dtype not in _TYPES or tensor.numel() == 0:
            return False
        if device is None:
            device = tensor.get_device()
        elif tensor.get_device() != device:
            return False
    return True


def status(device: int | None) -> str:
    """Which backend this GPU (``None``: the current one) uses, and why."""
    if not torch.cuda.is_available():
        return "torch: it finds no GPU"
    index = torch.cuda.current_device() if device is None else device
    return (_states.get(index) or _start(index)).text


def forward(
    x: Tensor,
    matrix: WeightMatrix,
    bias: Tensor | None,
    gain: Tensor | None,
    scale: Tensor | None,
    given: Statistics | None,
    running: Running | None,
    setup: Setup,
) -> Forward:
    values, found = matrix.values, given
    gain, scale, bias = (_vector(vector, values.shape[0]) for vector in (gain, scale, bias))
    order = None if running is None else _order_of(running, values, setup.options.momentum)
    averages = None if order is None else running
    key = (
        "forward", x.shape, x.stride(), values.shape, values.dtype, matrix.channels_last, gain is None, scale is None,
        bias is None, given is None, order, averages is None or averages.batches is None,
    )  # fmt: skip
    plan: _ForwardPlan | None = setup.prepared.get(key)
    if plan is None:
        plan = _plan_forward(x, matrix, bias, gain, scale, given, averages, order, setup)
        setup.prepared[key] = plan
    if found is None and plan.sums is None:
        found = torch_backend.batch_statistics(x, setup)
    rows, centre = plan.rows, None if found is None else found.centre
    saved, out = values.new_empty(rows.size), torch.empty_like(values, dtype=x.dtype)
    out_bias, mean, mass = x.new_empty(rows.outputs), saved, saved
    if found is not None:
        mean, mass = (_expect(each.to(values.dtype), rows.statistics, values) for each in found[:2])
    try:
        with _device(values):
            if plan.sums is not None:
                read = x.contiguous() if plan.copies else x
                if plan.centre is not None:
                    of_channels = saved.new_empty(3, 1, x.shape[1], *(1,) * (x.dim() - 2))
                    centre = plan.centre(read, None, of_channels)[0]
                plan.sums(read, centre, saved)
            moved = (saved, saved, None) if averages is None else averages
            plan.balance(values, mean, mass, saved, gain, scale, bias, out, out_bias, *moved)
    except LaunchError as error:
        _give_up(values.get_device(), error)
        return torch_backend.forward(x, matrix, bias, gain, scale, found, running, setup)
    undo, statistics = None, found
    if averages is not None:
        for buffer in averages:  # they change behind torch's back: whoever saved them for backward has to know
            if buffer is not None and not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)
        undo = _undo(averages, saved, rows)
    elif statistics is None:
        statistics = rows.statistics_in(saved)
    kept = (saved,) if centre is None else (saved, centre)
    copy = None if scale is None else saved[rows.scale : rows.scale + rows.outputs]
    return Forward(out, out_bias, copy, statistics, kept, undo)


def effective(
    matrix: WeightMatrix,
    gain: Tensor | None,
    scale: Tensor | None,
    saved: Sequence[Tensor],
    setup: Setup,
    dtype: torch.dtype,
) -> Tensor:
    if _is_of_torch(saved):
        return torch_backend.effective(matrix, gain, scale, saved, setup, dtype)
    values = matrix.values
    gain, scale = (_vector(vector, values.shape[0]) for vector in (gain, scale))
    key = ("effective", values.shape, values.dtype, gain is None, scale is None)
    plan: _EffectivePlan | None = setup.prepared.get(key)
    if plan is None:
        plan = setup.prepared[key] = _plan_effective(matrix, gain, scale, setup)
    out = torch.empty_like(values, dtype=dtype)
    try:
        with _device(values):
            plan.scale(values, _expect(saved[0], (plan.rows.size,), values), gain, scale, out)
    except LaunchError as error:
        _give_up(values.get_device(), error)
        saved = _as_of_torch(matrix, saved, plan.rows, setup)
        return torch_backend.effective(matrix, gain, scale, saved, setup, dtype)
    return out


def backward(
    gradient: Tensor,
    t: Tensor,
    dx: Tensor | None,
    x: Tensor,
    matrix: WeightMatrix,
    gain: Tensor | None,
    scale: Tensor | None,
    saved: Sequence[Tensor],
    setup: Setup,
) -> tuple[Tensor, Tensor]:
    if _is_of_torch(saved):
        return torch_backend.backward(gradient, t, dx, x, matrix, gain, scale, saved, setup)
    values, to = matrix.values, dx if setup.takes_statistics else None
    gain, scale = (_vector(vector, values.shape[0]) for vector in (gain, scale))
    of_samples = None if to is None else (to.shape, to.stride())
    key = ("backward", of_samples, values.shape, values.dtype, matrix.channels_last, gain is None, scale is None)
    plan: _BackwardPlan | None = setup.prepared.get(key)
    if plan is None:
        plan = setup.prepared[key] = _plan_backward(to, matrix, gain, scale, setup)
    rows = plan.rows
    vector, g, t = _expect(saved[0], (rows.size,), values), matrix.like(gradient, convert=False), t.contiguous()
    if t.shape != (rows.outputs,) or (to is not None and to.shape != x.shape):
        raise RuntimeError(f"a balanced layer found an input of shape {tuple(x.shape)}: was a saved tensor replaced?")
    dw, dgain = torch.empty_like(values), values.new_empty(rows.outputs)
    partial = values.new_empty(rows.partial)
    gradients = None if plan.statistics is None else values.new_empty(2, *rows.statistics)
    try:
        with _device(values):
            plan.rows_of(g, t, values, vector, gain, scale, dw, dgain, partial)
            if to is not None and plan.add is not None:
                if x.dtype != to.dtype or not same_order(x, to):
                    x = torch.empty_like(to).copy_(x)
                centre = None
                if len(saved) > 1:
                    centre = _expect(saved[1], (1, x.shape[1], *(1,) * (x.dim() - 2)), values)
                plan.add(to, x, centre, partial, vector)
            elif plan.statistics is not None:
                plan.statistics(partial, vector, gradients)
    except LaunchError as error:  # nothing was changed yet that torch needs
        _give_up(values.get_device(), error)
        saved = _as_of_torch(matrix, saved, rows, setup)
        return torch_backend.backward(gradient, t, dx, x, matrix, gain, scale, saved, setup)
    if to is not None and gradients is not None:
        found = Statistics(gradients[0], gradients[1], saved[1] if len(saved) > 1 else None)
        torch_backend.add_statistics_gradient(to, x, found, setup)
    return dw, dgain


track = torch_backend.track


# --------------------------------------------------------------------------------------------------------------------
# Compiled programs
# --------------------------------------------------------------------------------------------------------------------


def has_operators(*tensors: Tensor | None) -> bool:
    """Whether ``torch.compile`` is at work, and the operators of ``triton_operators.py`` can take these tensors."""
    first = tensors[0]
    if first is None or not first.is_cuda or not is_compiled_for_training() or not fits(*tensors):
        return False
    return bool(_registered(first.get_device()))


@constant_when_compiled
def _registered(device: int) -> bool:
    if not hasattr(torch.library, "triton_op") or is_watched():
        return False
    state = _states.get(device) or _start(device)
    if state.works:
        importlib.import_module("balnorm._core.backends.triton_operators")
    return state.works


def compiled_balance(
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    scale: Tensor | None,
    found: Statistics,
    setup: Setup,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The effective weight and bias, differentiably, where :func:`has_operators`."""
    matrix = WeightMatrix.of(weight, setup.geometry)
    mean, mass = (each.to(matrix.values.dtype).contiguous() for each in found[:2])
    kernels, effective_bias, _ = torch.ops.balnorm.balance(
        matrix.values,
        mean,
        mass,
        gain,
        scale,
        bias,
        matrix.groups,
        setup.kind == "position",
        matrix.channels_last,
        setup.options.one_pass,
        setup.shift,
        dtype,
    )
    return matrix.weight(kernels, weight), effective_bias


def compiled_track(running: Running, found: Statistics, momentum: float | None) -> None:
    """Move the averages in one launch, where :func:`has_operators`."""
    order = None if running.batches is None else _order_of(running, found.mass, momentum)
    if order is None:
        torch_backend.track(running, found, momentum)
        return
    statistics = (each.detach().contiguous() for each in found[:2])
    torch.ops.balnorm.track(*statistics, *running, *order, momentum or 0.0)


# --------------------------------------------------------------------------------------------------------------------
# Shapes
# --------------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """A weight's shape, and how its rows are divided among programs."""

    outputs: int
    rows: int
    groups: int
    inputs: int
    taps: int
    n: int
    position: bool
    stored: int
    """Taps with statistics of their own."""
    statistics: tuple[int, ...]
    masses: int
    scale: int
    """Where the copy of the scale begins in the vector that is saved."""
    size: int
    """The length of this vector."""
    block: int
    warps: int
    at_once: int
    blocks: int
    columns: int
    warps_at_once: int
    acc: Any

    @property
    def partial(self) -> int:
        """How many partial sums ``backward_rows`` leaves for the gradient of the statistics."""
        return self.groups * self.blocks * (2 * self.n + 1)

    def statistics_in(self, saved: Tensor) -> Statistics:
        mean, mass = (saved[i * self.masses : (i + 1) * self.masses].view(self.statistics) for i in (0, 1))
        return Statistics(mean, mass)


def divide_rows(kernels: Tensor, groups: int, position: bool) -> Rows:
    language = importlib.import_module("triton.language")
    outputs, inputs, *kernel = kernels.shape
    taps = math.prod(kernel)
    n, rows = inputs * taps, outputs // groups
    statistics = (1, groups * inputs, *(kernel if position else (1,) * len(kernel)))
    masses = math.prod(statistics)
    # Few sizes, because each of them is compiled.
    at_once = 1 if rows == 1 else 4 if rows <= 128 else 16 if rows <= 512 else 64
    columns = 64 if n <= 64 else max(64, min(512, 2048 // at_once))
    return Rows(
        outputs=outputs,
        rows=rows,
        groups=groups,
        inputs=inputs,
        taps=taps,
        n=n,
        position=position,
        stored=taps if position else 1,
        statistics=statistics,
        masses=masses,
        scale=3 * masses + 3 * groups + 3 * outputs,
        size=3 * masses + 3 * groups + 4 * outputs + 2 * masses + 1,
        block=64 if n <= 64 else 1024,
        warps=1 if n <= 64 else 4,
        at_once=at_once,
        blocks=-(-rows // at_once),
        columns=columns,
        warps_at_once=min(8, max(1, at_once * columns // 256)),
        acc=language.float64 if kernels.dtype == torch.float64 else language.float32,
    )


def _rows_of(matrix: WeightMatrix, setup: Setup) -> Rows:
    return divide_rows(matrix.values, matrix.groups, setup.kind == "position")


class _Samples(NamedTuple):
    """A batch's shape, how it is divided among programs, and how the kernel meets it."""

    grid: tuple[int, int]
    sizes: tuple[int, ...]
    divisor: int
    centres: int
    geometry: tuple[int, ...]
    flat: bool
    by_tap: bool
    transposed: bool
    repeat: int
    folded: int
    block_p: int
    block_c: int


def _of_torch(setup: Setup) -> bool:
    """Whether torch operations take the statistics: over several processes, or if the padding is a step of its own."""
    return setup.among is not None or (setup.kind == "position" and setup.geometry.pads_beforehand)


def _is_even(x: Tensor) -> bool:
    """Whether one stride leads from each pixel to the next."""
    axes = [(n, s) for n, s in zip(x.shape[2:], x.stride()[2:], strict=True) if n > 1]
    return all(outer == inner * n for (_, outer), (n, inner) in pairwise(axes))


def _divide_samples(
    x: Tensor, strides: tuple[int, ...], setup: Setup, fold: bool = False, of_centre: bool = False
) -> _Samples:
    """How to sum samples with these strides: for the statistics of :class:`Setup`, or for the centre of a channel."""
    (_, channels, *size), samples, geometry = x.shape, setup.samples, setup.geometry
    pixels, sn, sc = math.prod(size), strides[0], strides[1]
    sp = next((s for n, s in zip(size[::-1], strides[:1:-1], strict=True) if n > 1), sn)
    position = setup.kind == "position" and not of_centre
    by_tap = position and not geometry.exceeds(size)
    repeat, steps = 1, 1
    if position and not by_tap:  # every tap gets the same part of the whole channel
        repeat, steps = math.prod(geometry.kernel), 1 if geometry.transposed else math.prod(geometry.stride)
    count = samples * (pixels if of_centre else geometry.divisor(size, setup.kind) * steps)

    centres, limit, folded = channels, samples * pixels, 1
    flat = not by_tap and (samples == 1 or sn == pixels * sp)
    if fold and flat and channels < 16 and channels == sp and (channels == 1 or sc == 1):
        # Few channels, as of RGB images: many pixels count as one with many channels, and sums are folded afterwards.
        folded = math.gcd(limit, 64)
        channels, sp, sc, limit = channels * folded, sp * folded, 1, limit // folded
    if sc == 1 or channels == 1:
        block_c = min(_power(channels), 64)
        block_p = _TILE // block_c
        if by_tap:
            block_p = min(block_p, max(16, _power(pixels)))
    else:
        block_p = max(16, min(_power(pixels), 1024))
        block_c = min(_power(channels), max(1, _TILE // block_p))
    if flat:  # the batch is one long list of pixels
        samples, pixels, sn = -(-limit // block_p), block_p, block_p * sp
    wanted = max(1, _PROGRAMS // -(-channels // block_c))
    pixel_blocks = -(-pixels // block_p)
    per_pixel = -(-pixel_blocks // (2 * wanted)) if by_tap else pixel_blocks
    pixel_chunks = -(-pixel_blocks // per_pixel)
    sample_chunks = max(1, min(-(-wanted // pixel_chunks), -(-samples // _UNROLL)))
    per_sample = -(-samples // sample_chunks)
    sample_chunks = -(-samples // per_sample)
    if not by_tap and not flat and sample_chunks < wanted:  # few but large images
        per_pixel = -(-pixel_blocks // -(-wanted // sample_chunks))
        pixel_chunks = -(-pixel_blocks // per_pixel)
    missing = 3 - len(size)
    n = (1,) * missing + tuple(size)
    o = (1,) * missing + tuple(geometry.output_size(size))
    k = (1,) * missing + geometry.kernel
    s = (1,) * missing + geometry.stride
    p = (0,) * missing + geometry.padding_before
    d = (1,) * missing + geometry.dilation
    return _Samples(
        grid=(-(-channels // block_c), sample_chunks * pixel_chunks),
        sizes=(samples, pixels, channels, sn, sp, sc, per_sample, per_pixel, pixel_chunks, limit),
        divisor=count,
        centres=centres,
        geometry=(*n[1:], *o, *k[1:], *s, *p, *d),
        flat=flat,
        by_tap=by_tap,
        transposed=geometry.transposed,
        repeat=repeat,
        folded=folded,
        block_p=block_p,
        block_c=block_c,
    )


def _power(n: int) -> int:
    """The next power of 2."""
    return 1 << (n - 1).bit_length()


# --------------------------------------------------------------------------------------------------------------------
# What is prepared once for each shape
# --------------------------------------------------------------------------------------------------------------------


class Launch:
    """A launch with all its arguments but the tensors.

    Triton finds out anew at every call which of the compiled kernels fits the arguments, which takes most of a launch's
    time on the host. Only the types and alignments of the tensors can differ here.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: Sequence[float], warps: int, **constants: Any):
        names = [name for name in kernel.arg_names if name in constants]
        self.kernel, self.grid, self.options = kernel, (*grid, 1, 1)[:3], {"num_warps": warps}
        self.arguments = (*numbers, *(constants[name] for name in names))
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        try:
            if not _direct:
                run(self.kernel, self.grid, (*tensors, *self.arguments), self.options)
                return
            key = tuple([None if t is None else (t.dtype, t.data_ptr() & 15, t.get_device()) for t in tensors])
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = run(self.kernel, self.grid, (*tensors, *self.arguments), self.options)
                self._compiled[key] = compiled
            else:
                compiled[self.grid](*tensors, *self.arguments)
        except Exception as error:
            raise LaunchError(f"{type(error).__name__}: {error}") from error


def run(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compile a kernel, unless that is done, and launch it."""
    return kernel[grid](*arguments, **options)


class _Sums(NamedTuple):
    """The launches that take statistics. If there are two, the second one adds up the ``partial`` sums of the first."""

    launches: tuple[Launch, ...]
    partial: int

    def __call__(self, x: Tensor, centre: Tensor | None, out: Tensor) -> Tensor:
        if len(self.launches) == 1:
            self.launches[0](x, centre, out)
        else:
            partial = out.new_empty(self.partial)
            self.launches[0](x, centre, partial)
            self.launches[1](partial, out)
        return out


class _ForwardPlan(NamedTuple):
    rows: Rows
    copies: bool
    """Whether the samples have to be copied, into an order that a kernel can read."""
    centre: _Sums | None
    sums: _Sums | None
    """``None`` if the statistics are given, or torch operations take them."""
    balance: Launch


class _EffectivePlan(NamedTuple):
    rows: Rows
    scale: Launch


class _BackwardPlan(NamedTuple):
    rows: Rows
    rows_of: Launch
    add: Launch | None
    """Adds to dx what comes back through the statistics."""
    statistics: Launch | None
    """Computes the gradient of the statistics, where torch operations add to dx."""


def _plan_forward(
    x: Tensor,
    matrix: WeightMatrix,
    bias: Tensor | None,
    gain: Tensor | None,
    scale: Tensor | None,
    given: Statistics | None,
    averages: Running | None,
    order: tuple[int, int] | None,
    setup: Setup,
) -> _ForwardPlan:
    rows = _rows_of(matrix, setup)
    copies, centre, sums = not _is_even(x), None, None
    if given is None and not _of_torch(setup):
        strides = torch.empty(x.shape, device="meta").stride() if copies else x.stride()
        sums = _plan_sums(_divide_samples(x, strides, setup, fold=True), rows, setup.options.centred)
        if setup.options.centred:
            centre = _plan_sums(_divide_samples(x, strides, setup, fold=True, of_centre=True), rows)
    balance = launch_balance(
        rows, matrix.channels_last, setup.options.one_pass, setup.shift, gain is not None, scale is not None,
        bias is not None, given=sums is None, averages=averages, order=order, momentum=setup.options.momentum,
    )  # fmt: skip
    return _ForwardPlan(rows, copies, centre, sums, balance)


def launch_balance(
    rows: Rows,
    channels_last: bool,
    one_pass: bool,
    shift: bool,
    has_gain: bool,
    has_scale: bool,
    has_bias: bool,
    given: bool,
    averages: Running | None = None,
    order: tuple[int, int] | None = None,
    momentum: float | None = None,
) -> Launch:
    return Launch(
        _kernels().balance_rows,
        (rows.outputs + (averages is not None),),
        (
            rows.outputs, rows.rows, rows.groups, rows.inputs, rows.taps, rows.masses, *(order or (0, 0)),
            *_in_two(momentum),
        ),
        rows.warps, LAST=channels_last, POSITION=rows.position, ONE_PASS=one_pass, SHIFT=shift, GROUPED=rows.groups > 1,
        HAS_GAIN=has_gain, HAS_SCALE=has_scale, HAS_BIAS=has_bias, GIVEN=given, TRACK=averages is not None,
        COUNTED=averages is not None and averages.batches is not None, ACC=rows.acc, BLOCK=rows.block,
    )  # fmt: skip


def launch_track(mass: Tensor, order: tuple[int, int], momentum: float) -> Launch:
    """Move averages that have a counter, outside of ``balance_rows``."""
    language = importlib.import_module("triton.language")
    return Launch(
        _kernels().track_statistics,
        (1,),
        (mass.numel(), math.prod(mass.shape[2:]), *order, *_in_two(momentum)),
        4, ACC=language.float64 if mass.dtype == torch.float64 else language.float32, BLOCK=1024,
    )  # fmt: skip


def _in_two(momentum: float | None) -> tuple[float, float]:
    """The momentum, and what of it float32 cannot hold: Triton takes numbers in that precision."""
    momentum = 0.0 if momentum is None else float(momentum)
    high: float = struct.unpack("f", struct.pack("f", momentum))[0]
    return high, momentum - high


def _plan_sums(samples: _Samples, rows: Rows, centred: bool = False) -> _Sums:
    kernels, chunks, channels = _kernels(), samples.grid[1], samples.sizes[2]
    taps = rows.taps if samples.by_tap else 1
    final = chunks * samples.folded * samples.repeat == 1
    sums = Launch(
        kernels.sum_samples,
        samples.grid,
        (*samples.sizes, samples.divisor, taps, samples.centres, *samples.geometry),
        4, BY_TAP=samples.by_tap, TAPS=_power(taps), FLAT=samples.flat, CENTRED=centred, FINAL=final,
        TRANSPOSED=samples.transposed, ACC=rows.acc, BLOCK_P=samples.block_p, BLOCK_C=samples.block_c, UNROLL=_UNROLL,
    )  # fmt: skip
    if final:
        return _Sums((sums,), 0)
    columns = channels * taps // samples.folded
    finish = Launch(
        kernels.finish_statistics,
        (-(-columns // 32),),
        (chunks * samples.folded, columns, samples.divisor, samples.repeat),
        4, CENTRED=centred, ACC=rows.acc, BLOCK_R=64, BLOCK=32,
    )  # fmt: skip
    return _Sums((sums, finish), (3 if centred else 2) * chunks * channels * taps)


def _plan_effective(matrix: WeightMatrix, gain: Tensor | None, scale: Tensor | None, setup: Setup) -> _EffectivePlan:
    rows = _rows_of(matrix, setup)
    launch = Launch(
        _kernels().scale_rows,
        (rows.outputs, -(-rows.n // rows.block)),
        (rows.outputs, rows.rows, rows.groups, rows.n, rows.masses),
        rows.warps, HAS_GAIN=gain is not None, HAS_SCALE=scale is not None, ACC=rows.acc, BLOCK=rows.block,
    )  # fmt: skip
    return _EffectivePlan(rows, launch)


def _plan_backward(
    dx: Tensor | None, matrix: WeightMatrix, gain: Tensor | None, scale: Tensor | None, setup: Setup
) -> _BackwardPlan:
    kernels, rows = _kernels(), _rows_of(matrix, setup)
    of_rows = launch_rows(
        rows, matrix.channels_last, setup.options.one_pass, setup.shift, gain is not None, scale is not None
    )
    if dx is None:
        return _BackwardPlan(rows, of_rows, None, None)
    if _of_torch(setup) or not _is_even(dx):
        return _BackwardPlan(rows, of_rows, None, launch_statistics(rows, matrix.channels_last, setup.shift))
    samples = _divide_samples(dx, dx.stride(), setup)
    launch = Launch(
        kernels.add_to_samples,
        samples.grid,
        (
            *samples.sizes, samples.divisor, rows.taps, *samples.geometry, rows.blocks, rows.groups, rows.inputs,
            rows.masses, rows.stored,
        ),
        4, BY_TAP=samples.by_tap, FLAT=samples.flat, CENTRED=setup.options.centred, TRANSPOSED=samples.transposed,
        BLOCK_P=samples.block_p, BLOCK_C=samples.block_c, UNROLL=_UNROLL,
        **_of_statistics(rows, matrix.channels_last, setup.shift),
    )  # fmt: skip
    return _BackwardPlan(rows, of_rows, launch, None)


def launch_rows(
    rows: Rows, channels_last: bool, one_pass: bool, shift: bool, has_gain: bool, has_scale: bool
) -> Launch:
    return Launch(
        _kernels().backward_rows,
        (rows.groups * rows.blocks,),
        (rows.outputs, rows.rows, rows.blocks, rows.groups, rows.inputs, rows.taps, rows.masses),
        rows.warps_at_once, LAST=channels_last, POSITION=rows.position, ONE_PASS=one_pass, SHIFT=shift,
        HAS_GAIN=has_gain, HAS_SCALE=has_scale, ACC=rows.acc, ROWS=rows.at_once, BLOCK=rows.columns,
    )  # fmt: skip


def launch_statistics(rows: Rows, channels_last: bool, shift: bool) -> Launch:
    channels = rows.groups * rows.inputs
    return Launch(
        _kernels().statistics_gradient,
        (-(-channels // 32),),
        (channels, rows.blocks, rows.groups, rows.inputs, rows.taps, rows.masses),
        4, POSITION=rows.position, BLOCK_C=32, **_of_statistics(rows, channels_last, shift),
    )  # fmt: skip


def _of_statistics(rows: Rows, channels_last: bool, shift: bool) -> dict[str, Any]:
    """How the gradient of the statistics is summed from that of the rows."""
    return {
        "LAST": channels_last,
        "SHIFT": shift,
        "GROUPED": rows.groups > 1,
        "LONE": rows.inputs == 1 and not rows.position,
        "ACC": rows.acc,
        "BLOCK_B": _BLOCKS,
    }


# --------------------------------------------------------------------------------------------------------------------
# Tensors
# --------------------------------------------------------------------------------------------------------------------


def _vector(vector: Tensor | None, length: int) -> Tensor | None:
    """A vector as the kernels read it. Any other length is refused: they would read beyond its end."""
    if vector is None:
        return None
    if vector.shape != (length,):
        raise RuntimeError(
            f"a balanced layer expected {length} numbers, and found {tuple(vector.shape)}: were they replaced?"
        )
    return vector.contiguous()


def _expect(tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor that a hook may have returned, if it is what was saved."""
    if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        raise RuntimeError(
            f"a balanced layer expected a {like.dtype} tensor of shape {shape} on {like.device}, and found "
            f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}: was a saved tensor replaced?"
        )
    return tensor.contiguous()


def _order_of(running: Running, values: Tensor, momentum: float | None) -> tuple[int, int] | None:
    """The strides of channels and taps in the moving averages, or ``None`` if torch has to move (or refuse) them."""
    mean, mass, batches = running
    if not fits(values, mean, mass) or mean.dtype != mass.dtype or mass.dtype.itemsize > values.dtype.itemsize:
        return None
    if batches is None:
        if momentum is None:
            return None
    elif batches.dtype != torch.int64 or batches.get_device() != values.get_device():
        return None
    if mean.is_contiguous() and mass.is_contiguous():
        return math.prod(mass.shape[2:]), 1
    if all(buffer.movedim(1, -1).is_contiguous() for buffer in (mean, mass)):
        return 1, mass.shape[1]
    return None  # a part of a larger tensor


def _undo(averages: Running, saved: Tensor, rows: Rows) -> Callable[[], None]:
    """Put the moving averages back to what they were before ``balance_rows``."""

    def undo() -> None:
        start = rows.size - 2 * rows.masses - 1
        for i, buffer in enumerate((averages.mean, averages.mass)):
            buffer.copy_(saved[start + i * rows.masses :][: rows.masses].view(rows.statistics))
        if averages.batches is not None:
            averages.batches.sub_(saved[-1].to(torch.int64))

    return undo


def _is_of_torch(saved: Sequence[Tensor]) -> bool:
    """Whether the torch backend saved this: the forward pass fell back to it."""
    return len(saved) > 2


def _as_of_torch(matrix: WeightMatrix, saved: Sequence[Tensor], rows: Rows, setup: Setup) -> Sequence[Tensor]:
    """What the torch backend would have saved."""
    found = rows.statistics_in(saved[0])
    given = found._replace(centre=saved[1] if len(saved) > 1 else None)
    return torch_backend.forward(found.mean, matrix, None, None, None, given, None, setup).saved


def _device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be that of the tensors."""
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


# --------------------------------------------------------------------------------------------------------------------
# Devices
# --------------------------------------------------------------------------------------------------------------------


_modules: list[ModuleType] = []


def _kernels() -> ModuleType:
    if not _modules:
        _modules.append(importlib.import_module("balnorm._core.backends.triton_kernels"))
    return _modules[0]


class _State(NamedTuple):
    """What is known of a device."""

    works: bool
    text: str


_states: dict[int, _State] = {}
_direct = False
"""Whether a compiled kernel is called directly. How is the same from Triton 3.4 to 3.9, the versions looked at."""
_starting = threading.RLock()


def _start(device: int) -> _State:
    """Find out whether the kernels work on a device that has not been used yet."""
    if torch.cuda.is_current_stream_capturing():
        return _State(False, "torch: the first layer on this device ran while a CUDA graph was captured")
    with _starting:
        if device not in _states:
            _states[device] = _State(False, "torch: the kernels are being tried")  # by this thread
            _states[device] = _try(device)
        return _states[device]


def _try(device: int) -> _State:
    if os.environ.get("BALNORM_BACKEND") == "torch":
        return _State(False, "torch: BALNORM_BACKEND=torch is set")
    global _direct  # noqa: PLW0603
    try:
        version: str = importlib.import_module("triton").__version__
        _kernels()
    except Exception as error:  # whatever a broken installation raises
        return _State(False, f"torch: Triton could not be imported ({type(error).__name__}: {error})")
    # On ROCm what is compiled depends on the size of tensors, too.
    _direct = torch.version.hip is None and version.split(".")[:2] in [["3", str(minor)] for minor in range(4, 10)]
    try:
        where = torch.device("cuda", device)
        difference = max(deviation(where), deviation(where))  # the second time calls what the first has compiled
    except LaunchError as error:
        return _refuse(f"Triton {version} could not run the kernels ({error})")
    name = torch.cuda.get_device_name(device)
    if not difference < _TOLERANCE:
        return _refuse(f"the kernels of Triton {version} give other results than torch on {name} ({difference:.1e})")
    return _State(True, f"triton {version}, as exact as torch in a trial on {name}")


def _refuse(reason: str) -> _State:
    reason = " ".join(reason.split())[:500]
    warnings.warn(f"balanced layers on this device use torch operations: {reason}", RuntimeWarning, stacklevel=2)
    return _State(False, f"torch: {reason}")


def _give_up(device: int, error: LaunchError) -> None:
    """From now on leave this device to torch operations."""
    state = _states.get(device)
    if state is None or state.works:
        _states[device] = _refuse(f"Triton could not run a kernel ({error})")


_TOLERANCE = 1e-4
"""The largest difference from float64 in a trial, relative to the largest value: a hundred times that of float32."""


@torch.no_grad()
def deviation(device: torch.device) -> float:
    """How far a small layer in float32 is from one in float64, forward and backward, on the CPU by torch operations."""
    geometry = geometry_of((3, 3), stride=2, padding=1, groups=2)

    def numbers(*shape: int) -> Tensor:
        return torch.arange(1.0, 1.0 + math.prod(shape), dtype=torch.float64).sin_().view(shape)

    inputs = [numbers(4, 4, 5, 6) + 0.5, numbers(6, 2, 3, 3), *(numbers(6) + 2 for _ in range(3))]
    averages = [numbers(1, 4, 3, 3), numbers(1, 4, 3, 3) + 2]
    gradients = [numbers(6, 2, 3, 3).flip(0), numbers(6).flip(0), numbers(4, 4, 5, 6).flip(0)]

    def layer(backend: Any, where: torch.device, dtype: torch.dtype, centred: bool) -> list[Tensor]:
        options = Options(mass="position", centred=centred)
        setup = Setup(geometry, options, "position", True, 3, None, True, 6, torch.float32)
        x, w, gain, scale, bias = (tensor.to(where, dtype) for tensor in inputs)
        g, t, dx = (tensor.to(where, dtype, copy=True) for tensor in gradients)
        mean, mass = (tensor.to(where, dtype, copy=True) for tensor in averages)
        batches = torch.full((), 3, device=where)
        running, matrix = Running(mean, mass, batches), WeightMatrix.of(w, geometry)
        found = backend.forward(x, matrix, bias, gain, scale, None, running, setup)
        if found.undo is None:
            backend.track(running, found.statistics, setup.options.momentum)
        again = backend.effective(matrix, gain, found.scale, found.saved, setup, dtype)
        dw, dgain = backend.backward(g, t, dx, x, matrix, gain, found.scale, found.saved, setup)
        results = (found.effective, found.bias, again, dw, dgain, dx, mean, mass, batches)
        return [result.to("cpu", torch.float64) for result in results]

    this, differences = importlib.import_module(__name__), []
    for centred in (False, True):
        exact = layer(torch_backend, torch.device("cpu"), torch.float64, centred)
        found = layer(this, device, torch.float32, centred)
        differences += [float((a - b).abs().max() / a.abs().max()) for a, b in zip(exact, found, strict=True)]
    return max(math.inf if math.isnan(difference) else difference for difference in differences)
