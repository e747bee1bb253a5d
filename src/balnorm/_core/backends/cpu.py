"""The closed form in C (``kernels.c``): one call for each direction and few passes over memory, for CPU tensors.

Installing balnorm compiles the file if there is a C compiler. It is loaded with ctypes and knows nothing of torch
except the addresses of its thread pool and of the functions that read a tensor. Without it, or with
``BALNORM_BACKEND=torch`` in the environment, torch operations do the work. Both give the same results up to rounding.

Whatever depends on shapes, strides and types alone is computed once for each :class:`Setup` and kept there as a
:class:`_Plan`. C trusts it, and nothing else: it gets tensors, not addresses, and reads the memory of a tensor only
after it has compared type, device, shape, strides and size of the storage with what the plan expects, at every call.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from balnorm._core.backends import torch as torch_backend
from balnorm._core.backends.torch import ORDINARY, Forward, Running, Setup, track
from balnorm._core.matrix import WeightMatrix
from balnorm._core.method import Statistics, saturate
from balnorm._core.torch_private import is_watched, mark_changed, tensor_functions, thread_pool, type_number

__all__ = ["LIBRARY", "adds_up", "backward", "effective", "forward", "scale_of", "status", "takes", "track"]

LIBRARY = Path(__file__).with_name("kernels.so")
"""Where the build puts the compiled file."""
INTERFACE = 7
"""The number that balnorm_interface() in kernels.c returns; an older compiled file returns another one."""

# The structs of kernels.c: 64-bit integers, and a double where it says "d".
_EXPECTED = struct.Struct("=14q")
_ROWS = struct.Struct("=8q")
_SAMPLES = struct.Struct("=26qd")
_AVERAGES = struct.Struct("=2qd")
_MOST_AXES = 5
_COMPILED = {
    (torch.float32, torch.float32): "float",
    (torch.float32, torch.bfloat16): "bfloat16",
    (torch.float64, torch.float64): "double",
}
"""The types REAL and SAMPLE that kernels.c is compiled for, and the suffix of its functions."""
_Found = TypeVar("_Found")
_MOST_PLANS = 20
_MOST_ELEMENTS = 2**48
"""More than any memory holds, and so few that no product of sizes overflows in C."""


def takes(*tensors: Tensor | None) -> bool:
    """Whether C can read these tensors: they are on the CPU, and not of a subclass that only looks like a tensor.

    A dispatch mode must see every operation, so torch operations take over while one is active.
    """
    if _library is None or is_watched():
        return False
    for tensor in tensors:  # noqa: SIM110  # all() takes twice as long
        if tensor is not None and not (tensor.is_cpu and type(tensor) in ORDINARY):
            return False
    return True


def status() -> str:
    """Which backend this CPU uses, and why."""
    return _status


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
    values = matrix.values
    if values.numel() == 0:
        torch_backend.check_memory(bias, gain, scale, *(running or ()))
        return torch_backend.forward(x, matrix, bias, gain, scale, given, running, setup)
    key: Any = "forward"
    if running is not None:
        mean, mass, batches = running
        key = (mean.stride(), mean.dtype, mass.stride(), mass.dtype, None if batches is None else batches.dtype)
    plan = setup.prepared.get(key) or _forward_plan(x, matrix, running, setup, key)
    new = values.new_empty
    saved, both, shifted = new(plan.saved), new(plan.statistics), new(setup.outputs, dtype=plan.low)
    effective = torch.empty_like(values, dtype=plan.low)
    samples: Tensor | None = x
    centre, averages = None, running if plan.tracks and running is not None else (None, None, None)
    if not plan.takes_samples:
        found = torch_backend.batch_statistics(x, setup) if given is None else given
        flat = torch.cat([found.mean.flatten(), found.mass.flatten()])
        both[: flat.numel()].copy_(flat)
        samples, centre = None, found.centre
    _run(plan, values, gain, saved, bias, scale, effective, shifted, both, samples, *averages)
    undo = statistics = None
    if running is not None and plan.tracks:
        mark_changed(*running)  # torch has not seen the change, and they may be saved for backward
        undo = functools.partial(_undo, running, both)
    elif running is not None:
        torch_backend.check_memory(*running)
        statistics = Statistics(*both.view(2, *running.mean.shape))
    kept = (saved,) if centre is None else (saved, centre)
    return Forward(saturate(effective, x.dtype), saturate(shifted, x.dtype), None, statistics, kept, undo)


def effective(
    matrix: WeightMatrix,
    gain: Tensor | None,
    scale: Tensor | None,
    saved: Sequence[Tensor],
    setup: Setup,
    dtype: torch.dtype,
) -> Tensor:
    values = matrix.values
    if values.numel() == 0:
        return torch_backend.effective(matrix, gain, scale, saved, setup, dtype)
    plan = setup.prepared.get(dtype) or _effective_plan(matrix, setup, dtype)
    result = torch.empty_like(values, dtype=plan.low)
    _run(plan, values, gain, saved[0], result)
    return saturate(result, dtype)


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
    dy: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`torch_backend.backward`. With a ``dy`` that :func:`adds_up` accepts, it fills ``t`` first."""
    values = matrix.values
    if values.numel() == 0:
        return torch_backend.backward(gradient, t, dx, x, matrix, gain, scale, saved, setup)
    if not setup.takes_statistics:
        dx = None
    key: Any = None if dx is None else (dx.stride(), dx.dtype, x.dtype, len(saved))
    if dy is not None:
        key = (key, dy.dtype)  # whose strides are those of channels_last
    plan = setup.prepared.get(key) or _backward_plan(dx, x, dy, matrix, saved, setup, key)
    gradient = matrix.like(gradient)
    dgain, dstatistics = values.new_empty(setup.outputs), None
    samples, to = (x, dx) if plan.takes_samples else (None, None)
    if not plan.takes_samples:
        dstatistics = None if dx is None else values.new_empty(plan.statistics)
    _run(plan, values, gain, saved[0], gradient, t, dgain, dstatistics, samples, to, dy)
    if dx is not None and dstatistics is not None:
        shape = setup.geometry.statistics_shape(values.shape[1] * matrix.groups, setup.kind)
        centre = saved[1] if len(saved) > 1 else _centre(saved[0], shape) if setup.options.centred else None
        dmean, dmass = dstatistics.view(2, *shape)
        torch_backend.add_statistics_gradient(dx, x, Statistics(dmean, dmass, centre), setup)
    return gradient, dgain


def adds_up(dy: Tensor, matrix: WeightMatrix, setup: Setup) -> bool:
    """Whether C sums ``dy`` over all but its channels, for which torch's convolutions take longer in channels_last."""
    if type(dy) not in ORDINARY or dy.layout is not torch.strided or not dy.is_cpu:
        return False
    if dy.is_neg() or dy._is_zerotensor():
        return False
    key = ("adds_up", dy.stride(), dy.dtype)
    found = setup.prepared.get(key)
    if found is None:
        readable = (matrix.values.dtype, dy.dtype) in _COMPILED and 0 < dy.numel() <= _MOST_ELEMENTS
        found = readable and matrix.values.numel() > 0 and _same(dy.shape, dy.stride(), _strides(dy.shape, True))
        _keep(setup, key, found)
    return found


def scale_of(weight: Tensor, scale: Tensor | None, saved: Sequence[Tensor], setup: Setup) -> Tensor | None:
    """The scale. C keeps its copy in the vector that it saves, not in a tensor."""
    return scale if weight.numel() == 0 else saved[0][: setup.outputs]


def _undo(running: Running, both: Tensor) -> None:
    """Take a batch out of moving averages again."""
    mean, mass, batches = running
    size = mean.numel()
    old_mean, old_mass, moved = both[2 * size : 3 * size], both[3 * size : -1], both[-1]
    if moved and batches is not None:
        with torch.no_grad():
            mean.copy_(old_mean.view_as(mean))
            mass.copy_(old_mass.view_as(mass))
            batches.sub_(1)


def _centre(saved: Tensor, shape: Sequence[int]) -> Tensor:
    """The centre in the saved vector, which ends with centre and sign of each input, and whether signs matter."""
    _, inputs, *kernel = shape
    return saved[-1 - 2 * inputs : -1 - inputs].view(1, inputs, *(1,) * len(kernel))


# --------------------------------------------------------------------------------------------------------------------
# Arguments of C
# --------------------------------------------------------------------------------------------------------------------


class _Expected(NamedTuple):
    """The properties that C requires of a tensor before it touches its memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    optional: bool = False
    copy: bool = False
    """Whether a copy can replace it, because C only reads it."""

    def pack(self) -> bytes:
        axes = len(self.shape)
        rest = (0,) * (_MOST_AXES - axes)
        number, item = _TYPES[self.dtype], self.dtype.itemsize
        return _EXPECTED.pack(self.optional, number, item, axes, *self.shape, *rest, *self.strides, *rest)


class _Plan(NamedTuple):
    """The arguments of C besides tensors, and the facts that Python needs about them."""

    function: Any
    name: str
    packed: bytes
    pack: Callable[..., bytes]
    """Makes the array of tensors."""
    expected: tuple[_Expected, ...]
    low: torch.dtype
    """The type of the effective weight."""
    saved: int
    statistics: int
    """How many elements these vectors have."""
    takes_samples: bool
    """Whether C, and not torch operations, takes the statistics of the samples or adds their gradient."""
    tracks: bool


def _run(plan: _Plan, *tensors: Tensor | None) -> None:
    """Let C work on tensors, which the caller keeps alive. Any that are not as expected are copied, or refused."""
    code = _call(plan, tensors)
    if code > 0:
        fitting = [
            tensor if tensor is None else _fitting(tensor, expected)
            for tensor, expected in zip(tensors, plan.expected, strict=True)
        ]
        code = _call(plan, fitting)
        if code > 0:
            tensor, expected = tensors[code - 1], plan.expected[code - 1]
            assert tensor is not None
            how = f"strides {tensor.stride()}" if tensor.layout == torch.strided else str(tensor.layout)
            raise RuntimeError(
                f"a balanced layer expected a {expected.dtype} tensor of shape {expected.shape} with strides "
                f"{expected.strides} in the CPU's memory, and found {tensor.dtype} of shape {tuple(tensor.shape)} with "
                f"{how} on {tensor.device}: was a saved tensor replaced, or has it lost its memory?"
            )
    if code:
        raise MemoryError(f"no memory left for the {plan.name} pass of a balanced layer")


def _call(plan: _Plan, tensors: Sequence[Tensor | None]) -> int:
    handles = plan.pack(*[0 if tensor is None else tensor._cdata for tensor in tensors])
    return plan.function(handles, plan.packed)  # type: ignore[no-any-return]


def _fitting(tensor: Tensor, expected: _Expected) -> Tensor:
    """The tensor, or a copy if only its type or memory order differs."""
    if not expected.copy or tensor.shape != expected.shape or tensor.layout != torch.strided:
        return tensor
    if not tensor.is_cpu or type(tensor) not in ORDINARY:
        return tensor
    if tensor.dtype == expected.dtype and _same(expected.shape, tensor.stride(), expected.strides):
        return tensor
    end = tensor.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.untyped_storage().nbytes() < end * tensor.element_size():
        return tensor
    return torch.empty_strided(expected.shape, expected.strides, dtype=expected.dtype, device="cpu").copy_(tensor)


def _same(shape: Sequence[int], strides: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether these strides reach the same elements: that of an axis with one element does not matter."""
    return all(n <= 1 or a == b for n, a, b in zip(shape, strides, expected, strict=True))


def _strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """The strides of a dense tensor."""
    order = [1, *range(len(shape) - 1, 1, -1), 0] if channels_last else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


class _Weight:
    """The parts of every plan that follow from the weight."""

    def __init__(self, matrix: WeightMatrix, sample: torch.dtype, setup: Setup) -> None:
        values, groups, last = matrix.values, matrix.groups, matrix.channels_last
        outputs, inputs, *kernel = values.shape
        if values.numel() > _MOST_ELEMENTS:
            raise RuntimeError(f"a weight of shape {tuple(values.shape)} is too large")
        pair = (values.dtype, sample)
        # If C does not know the type of the samples, torch operations convert its inputs and outputs.
        self.types = pair if pair in _COMPILED else (values.dtype, values.dtype)
        self.real, self.low = self.types
        position, one_pass = setup.kind == "position", setup.options.one_pass
        self.rows = _ROWS.pack(outputs, groups, inputs, math.prod(kernel), last, position, one_pass, setup.shift)
        self.shape, self.strides, self.outputs = tuple(values.shape), _strides(values.shape, last), outputs
        assert _library is not None
        self.saved = _library.balnorm_saved_size(self.rows)
        self.averages = setup.geometry.statistics_shape(groups * inputs, setup.kind)
        self.statistics = 2 * math.prod(self.averages)

    def weight(self, dtype: torch.dtype) -> _Expected:
        return _Expected(dtype, self.shape, self.strides)

    def vector(self, size: int, **flags: bool) -> _Expected:
        return _Expected(self.real, (size,), (1,), **flags)

    def first(self) -> tuple[_Expected, ...]:
        """Weight, gain and the saved vector."""
        gain = self.vector(self.outputs, optional=True, copy=True)
        return self.weight(self.real), gain, self.vector(self.saved, copy=True)

    def plan(
        self,
        name: str,
        expected: tuple[_Expected, ...],
        *parts: bytes,
        statistics: int = 0,
        takes_samples: bool = False,
        tracks: bool = False,
    ) -> _Plan:
        function = _functions[name, self.types]
        packed = b"".join([*(each.pack() for each in expected), self.rows, *parts])
        pack = struct.Struct(f"={len(expected)}q").pack
        return _Plan(function, name, packed, pack, expected, self.low, self.saved, statistics, takes_samples, tracks)


def _forward_plan(x: Tensor, matrix: WeightMatrix, running: Running | None, setup: Setup, key: object) -> _Plan:
    weight = _Weight(matrix, x.dtype, setup)
    found = _samples(x, weight, setup) if setup.takes_statistics else None
    samples, layout = found or (weight.vector(0, optional=True), bytes(_SAMPLES.size))
    averages, moving = (_averages(running, weight, setup) if running is not None else None) or (
        (weight.vector(0, optional=True),) * 3,
        bytes(_AVERAGES.size),
    )
    tracks = moving != bytes(_AVERAGES.size)
    statistics = weight.statistics * 2 + 1 if tracks else weight.statistics
    outputs = weight.outputs
    vector = weight.vector(outputs, optional=True, copy=True)
    expected = (
        *weight.first(),
        vector,
        vector,
        weight.weight(weight.low),
        _Expected(weight.low, (outputs,), (1,)),
        weight.vector(statistics),
        samples,
        *averages,
    )
    sizes: dict[str, Any] = {"statistics": statistics, "takes_samples": found is not None, "tracks": tracks}
    return _keep(setup, key, weight.plan("forward", expected, layout, moving, **sizes))


def _effective_plan(matrix: WeightMatrix, setup: Setup, dtype: torch.dtype) -> _Plan:
    weight = _Weight(matrix, dtype, setup)
    return _keep(setup, dtype, weight.plan("effective", (*weight.first(), weight.weight(weight.low))))


def _backward_plan(
    dx: Tensor | None,
    x: Tensor,
    dy: Tensor | None,
    matrix: WeightMatrix,
    saved: Sequence[Tensor],
    setup: Setup,
    key: object,
) -> _Plan:
    sample = dx if dx is not None else dy
    weight = _Weight(matrix, matrix.values.dtype if sample is None else sample.dtype, setup)
    found = None
    if dx is not None and dx.dtype == x.dtype and len(saved) == 1:  # otherwise torch operations took the statistics
        found = _samples(dx, weight, setup)
    samples, layout = found or (weight.vector(0, optional=True), bytes(_SAMPLES.size))
    t, outputs = weight.vector(weight.outputs, copy=dy is None), weight.vector(0, optional=True)
    outputs_layout = bytes(_SAMPLES.size)
    if dy is not None:
        space = math.prod(dy.shape[2:])
        outputs = _Expected(weight.low, tuple(dy.shape), _strides(dy.shape, True))
        outputs_layout = _SAMPLES.pack(dy.shape[0], dy.shape[1], True, False, False, space, *[1] * 20, 1.0)
    dgain, dstatistics = weight.vector(weight.outputs), weight.vector(weight.statistics, optional=True)
    # A hook may have returned x in another layout. C adds to dx.
    expected = (*weight.first(), weight.weight(weight.real), t, dgain, dstatistics)
    expected += (samples._replace(copy=True), samples, outputs)
    sizes: dict[str, Any] = {"statistics": weight.statistics, "takes_samples": found is not None}
    return _keep(setup, key, weight.plan("backward", expected, layout, outputs_layout, **sizes))


def _keep(setup: Setup, key: object, found: _Found) -> _Found:
    if len(setup.prepared) >= _MOST_PLANS:  # a limit for averages with ever-changing strides
        setup.prepared.clear()
    setup.prepared[key] = found
    return found


def _samples(x: Tensor, weight: _Weight, setup: Setup) -> tuple[_Expected, bytes] | None:
    """The layout of samples, or ``None`` if torch operations have to take their statistics.

    They have to if there are no values, if several processes share statistics, if C cannot read the memory layout of
    ``x``, if padding is a separate step, if the kernel exceeds the image, and for centred statistics by position.
    """
    geometry, count, centred, position = setup.geometry, setup.samples, setup.options.centred, setup.kind == "position"
    if count == 0 or not 0 < x.numel() <= _MOST_ELEMENTS or x.dtype != weight.low or setup.among is not None:
        return None
    _, channels, *size = x.shape
    if position and (centred or geometry.pads_beforehand or geometry.exceeds(size)):
        return None
    last = _same(x.shape, x.stride(), _strides(x.shape, True))
    strides = _strides(x.shape, last)
    if not _same(x.shape, x.stride(), strides):
        return None
    outputs, axes = geometry.output_size(size), [1, 1, 1, 1, 0, 1, 0] * (3 - len(size))
    for axis, n in enumerate(size):
        stride, padding, dilation = geometry.stride[axis], geometry.padding[axis][0], geometry.dilation[axis]
        axes += [n, outputs[axis], geometry.kernel[axis], stride, padding, dilation, geometry.transposed]
    divisor = float(count * geometry.divisor(size, setup.kind))
    packed = _SAMPLES.pack(count, channels, last, position, centred, *axes, divisor)
    return _Expected(x.dtype, tuple(x.shape), strides, optional=True), packed


def _averages(running: Running, weight: _Weight, setup: Setup) -> tuple[tuple[_Expected, ...], bytes] | None:
    """The layout of moving averages, or ``None`` if torch operations have to move them."""
    (mean, mass, batches), shape = running, weight.averages
    channels, taps, momentum = shape[1], math.prod(shape[2:]), setup.options.momentum
    if batches is None or batches.dtype != torch.int64 or not (mean.dtype == mass.dtype == weight.real):
        return None
    for last in (False, True):
        strides = _strides(shape, last)
        if all(_same(shape, buffer.stride(), strides) for buffer in (mean, mass)):
            by_input, by_tap = (1, channels) if last else (taps, 1)
            average = _Expected(weight.real, shape, strides, optional=True)
            counter = _Expected(torch.int64, tuple(batches.shape), (1,) * batches.dim(), optional=True)
            packed = _AVERAGES.pack(by_input, by_tap, -1.0 if momentum is None else momentum)
            return (average, average, counter), packed
    return None  # a part of a larger tensor


def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("BALNORM_BACKEND") == "torch":
        return None, "torch: BALNORM_BACKEND=torch is set"
    if not LIBRARY.exists():
        return None, "torch: the native kernels were not compiled when balnorm was installed"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"torch: the native kernels could not be loaded ({error})"
    if not hasattr(library, "balnorm_interface") or library.balnorm_interface() != INTERFACE:
        return None, "torch: the native kernels are those of another version of balnorm: install it again"
    functions = tensor_functions()
    if functions is None:
        return None, f"torch: torch {torch.__version__} does not let C read tensors"
    library.balnorm_use_torch(struct.pack(f"={len(functions)}q", *functions))
    library.balnorm_saved_size.argtypes, library.balnorm_saved_size.restype = [ctypes.c_char_p], ctypes.c_int64
    pool = thread_pool()
    if pool is None:
        return library, f"native, on one thread: torch {torch.__version__} does not expose its thread pool"
    library.balnorm_use_threads(ctypes.c_void_p(pool))
    return library, "native, on torch's threads"


def _bind(library: ctypes.CDLL | None) -> dict[tuple[str, tuple[torch.dtype, torch.dtype]], Any]:
    """The functions of the library by name and types."""
    functions = {}
    for name in ("forward", "effective", "backward") if library is not None else ():
        for types, suffix in _COMPILED.items():
            function = getattr(library, f"balnorm_{name}_{suffix}")
            function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_char_p], ctypes.c_int
            functions[name, types] = function
    return functions


_library, _status = _load()
_functions = _bind(_library)
_TYPES = (
    {}
    if _library is None
    else {dtype: type_number(dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}
)
"""Torch's numbers for these types."""
