"""The closed form in C (``kernels.c``): few calls and few passes over memory, for CPU tensors.

Installing balnorm compiles the file if there is a C compiler. It is loaded with ctypes and knows nothing of torch
except the address of its thread pool. Without it, or with ``BALNORM_BACKEND=torch`` in the environment, torch
operations do the work. Both give the same results up to rounding.

C trusts what it is given, so memory safety is decided here, in one function: every address that C gets comes from
:func:`_address`, which knows the shape, type and strides that C expects.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from balnorm._core.backends import torch as torch_backend
from balnorm._core.backends.torch import Call, Forward, Running
from balnorm._core.matrix import WeightMatrix
from balnorm._core.method import Statistics, saturate, shifted
from balnorm._core.torch_private import is_watched, thread_pool

__all__ = ["LIBRARY", "backward", "effective", "forward", "status", "takes", "track"]

LIBRARY = Path(__file__).with_name("kernels.so")
"""Where the build puts the compiled file."""
INTERFACE = 4
"""What balnorm_interface() in kernels.c returns, if the compiled file is not an older one."""

# The structs of kernels.c: 64-bit integers, and a double where it says "d". What depends on shapes alone is packed
# once, addresses at every call.
_ROWS = struct.Struct("=4q")
_ROWS_SHAPE = struct.Struct("=8q")
_FORWARD = struct.Struct("=3q")
_EFFECTIVE = struct.Struct("=q")
_BACKWARD = struct.Struct("=4q")
_SAMPLES = struct.Struct("=2q")
_SAMPLES_SHAPE = struct.Struct("=26qd")
_TRACK = struct.Struct("=9qd")
_NOWHERE = bytes(_SAMPLES.size + _SAMPLES_SHAPE.size)
_PLAIN = (Tensor, nn.Parameter)
_COMPILED = {
    (torch.float32, torch.float32): "float",
    (torch.float32, torch.bfloat16): "bfloat16",
    (torch.float64, torch.float64): "double",
}
"""The types REAL and SAMPLE that kernels.c is compiled for, and the suffix of its functions."""
_MOST_ELEMENTS = 2**48
"""More than any memory holds, and so few that no product of sizes overflows in C."""


def takes(*tensors: Tensor | None) -> bool:
    """Whether C can read these tensors: they are on the CPU, and not of a subclass that only looks like a tensor.

    A dispatch mode has to see every operation, so under one torch's operations do the work.
    """
    if _library is None or is_watched():
        return False
    return all(tensor is None or (tensor.is_cpu and type(tensor) in _PLAIN) for tensor in tensors)


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
    call: Call,
) -> Forward:
    values = matrix.values
    real = values.dtype
    if values.numel() == 0:
        return torch_backend.forward(x, matrix, bias, gain, scale, given, running, call)
    shape, types = _shape(matrix, call), _types(real, x.dtype)
    saved, both = values.new_empty(shape.saved), values.new_empty(2, *shape.statistics)
    effective, offset = torch.empty_like(values, dtype=types[1]), values.new_empty(shape.outputs)
    samples, centre = _NOWHERE, None
    layout = None if given is not None else _layout(x, types, call)
    if layout is not None:
        samples = _SAMPLES.pack(_address(x, x.shape, types[1], layout.strides), 0) + layout.packed
    else:
        found = torch_backend.batch_statistics(x, call) if given is None else given
        torch.stack([found.mean.to(real), found.mass.to(real)], out=both)
        centre = found.centre
    keep, rows = _rows(matrix, shape, gain, scale, saved)
    addresses = _FORWARD.pack(
        _address(effective, values.shape, types[1], values.stride()),
        _address(offset, (shape.outputs,), real),
        _address(both, (2, *shape.statistics), real),
    )
    _call("forward", types, rows + addresses + samples)
    del keep
    mean, mass = both.unbind()
    kept = (saved,) if centre is None else (saved, centre)
    found = Statistics(mean, mass, centre)
    copy = torch_backend.copy_of(scale)
    return Forward(saturate(effective, x.dtype), shifted(bias, offset, x.dtype), copy, found, kept)


def effective(
    matrix: WeightMatrix,
    gain: Tensor | None,
    scale: Tensor | None,
    saved: Sequence[Tensor],
    call: Call,
    dtype: torch.dtype,
) -> Tensor:
    values = matrix.values
    if values.numel() == 0:
        return torch_backend.effective(matrix, gain, scale, saved, call, dtype)
    types, shape = _types(values.dtype, dtype), _shape(matrix, call)
    result = torch.empty_like(values, dtype=types[1])
    keep, rows = _rows(matrix, shape, gain, scale, saved[0])
    _call("effective", types, rows + _EFFECTIVE.pack(_address(result, values.shape, types[1], values.stride())))
    del keep
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
    call: Call,
) -> tuple[Tensor, Tensor]:
    values = matrix.values
    if values.numel() == 0:
        return torch_backend.backward(gradient, t, dx, x, matrix, gain, scale, saved, call)
    gradient = matrix.like(gradient)
    real, shape = values.dtype, _shape(matrix, call)
    types = _types(real, real if dx is None else dx.dtype)
    dgain, t = values.new_empty(shape.outputs), _dense(t, (shape.outputs,), real)
    if not call.takes_statistics:
        dx = None
    samples, dstatistics, layout = _NOWHERE, None, None
    if dx is not None and dx.dtype == x.dtype and len(saved) == 1:  # elsewhere torch operations took the statistics
        layout = _layout(dx, types, call)
    if dx is not None and layout is not None:
        x = _dense(x, dx.shape, types[1], layout.strides)  # a hook may have returned it in another layout
        pointers = (_address(tensor, dx.shape, types[1], layout.strides) for tensor in (x, dx))
        samples = _SAMPLES.pack(*pointers) + layout.packed  # C adds to dx; nothing else needs the gradient
    elif dx is not None:
        dstatistics = values.new_empty(2, *shape.statistics)
    keep, rows = _rows(matrix, shape, gain, scale, saved[0])
    addresses = _BACKWARD.pack(
        _address(gradient, values.shape, real, values.stride()),
        _address(t, (shape.outputs,), real),
        _address(dgain, (shape.outputs,), real),
        0 if dstatistics is None else _address(dstatistics, (2, *shape.statistics), real),
    )
    _call("backward", types, rows + addresses + samples)
    del keep
    if dx is not None and dstatistics is not None:
        centre = saved[1] if len(saved) > 1 else shape.centre(saved[0]) if call.options.centred else None
        torch_backend.add_statistics_gradient(dx, x, Statistics(dstatistics[0], dstatistics[1], centre), call)
    return gradient, dgain


def track(running: Running, statistics: Statistics, momentum: float | None) -> None:
    mean, mass, batches = running
    real, shape = mass.dtype, mass.shape
    channels, taps = shape[1], math.prod(shape[2:])
    orders = {last: _strides(shape, last) for last in (False, True)}
    last = next((last for last, strides in orders.items() if _same(shape, mass.stride(), strides)), None)
    if (
        last is None  # a part of a larger tensor
        or not _same(shape, mean.stride(), orders[last])
        or mean.dtype != real
        or batches is None
        or batches.dtype != torch.int64
        or not takes(mean, mass, batches)
        or (real, real) not in _COMPILED
        or mass.numel() == 0
    ):
        torch_backend.track(running, statistics, momentum)
        return
    found = [_dense(statistic, shape, real) for statistic in statistics[:2]]
    packed = _TRACK.pack(
        *(_address(statistic, shape, real) for statistic in found),
        *(_address(buffer, shape, real, orders[last]) for buffer in (mean, mass)),
        _address(batches, batches.shape, torch.int64),
        channels,
        taps,
        1 if last else taps,
        channels if last else 1,
        -1.0 if momentum is None else momentum,
    )
    for buffer in (mean, mass, batches):
        if not buffer.is_inference():  # they change behind torch's back: whoever saved them for backward has to know
            torch.autograd.graph.increment_version(buffer)
    _call("track", (real, real), packed)


# --------------------------------------------------------------------------------------------------------------------
# What C is given
# --------------------------------------------------------------------------------------------------------------------


def _address(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> int:
    """Where C finds a tensor of this shape, type and strides (``None``: contiguous). Anything else is refused.

    The tensor must outlive the call.
    """
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape) or not tensor.is_cpu or type(tensor) not in _PLAIN:
        raise RuntimeError(
            f"a balanced layer expected a {dtype} tensor of shape {tuple(shape)} in the CPU's memory, and found "
            f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}: was a saved tensor replaced?"
        )
    if not (tensor.is_contiguous() if strides is None else _same(shape, tensor.stride(), strides)):
        raise RuntimeError(f"a balanced layer cannot read a tensor with strides {tensor.stride()}: was it replaced?")
    end = tensor.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.untyped_storage().nbytes() < end * tensor.element_size():
        raise RuntimeError(f"a tensor of shape {tuple(shape)} has lost its memory: its storage was resized")
    return tensor.data_ptr()


def _dense(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """The tensor as :func:`_address` wants it: itself, or a copy. Another shape is refused there."""
    if tensor.dtype == dtype and (
        tensor.is_contiguous() if strides is None else _same(tensor.shape, tensor.stride(), strides)
    ):
        return tensor
    if strides is None or tuple(tensor.shape) != tuple(shape):
        return tensor.to(dtype).contiguous()
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype).copy_(tensor)


def _same(shape: Sequence[int], strides: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether these strides reach the same elements: that of an axis with one element does not matter."""
    return all(n <= 1 or a == b for n, a, b in zip(shape, strides, expected, strict=True))


class _Shape(NamedTuple):
    """What depends on the shape of a weight alone."""

    packed: bytes
    outputs: int
    statistics: tuple[int, ...]
    saved: int
    """How long the vector is that is saved for backward."""

    def centre(self, saved: Tensor) -> Tensor:
        """The centre in this vector. It ends in centre and signs of each input, and whether signs matter."""
        inputs = self.statistics[1]
        start = self.saved - 1 - 2 * inputs
        return saved[start : start + inputs].view(1, inputs, *(1,) * (len(self.statistics) - 2))


class _Layout(NamedTuple):
    """How samples lie in memory: the shape part of ``samples_t``."""

    packed: bytes
    strides: tuple[int, ...]


def _rows(
    matrix: WeightMatrix, shape: _Shape, gain: Tensor | None, scale: Tensor | None, saved: Tensor
) -> tuple[tuple[Tensor | None, ...], bytes]:
    """The struct ``rows_t``, and the tensors that it points to, which must outlive the call."""
    values = matrix.values
    vectors = [None if vector is None else _dense(vector, (shape.outputs,), values.dtype) for vector in (gain, scale)]
    saved = _dense(saved, (shape.saved,), values.dtype)
    addresses = _ROWS.pack(
        _address(values, values.shape, values.dtype, _strides(values.shape, matrix.channels_last)),
        *(0 if vector is None else _address(vector, (shape.outputs,), values.dtype) for vector in vectors),
        _address(saved, (shape.saved,), values.dtype),
    )
    return (*vectors, saved), addresses + shape.packed


_shapes: dict[Any, _Shape] = {}
_layouts: dict[Any, _Layout | None] = {}
_MOST_KEYS = 1000  # images of ever new sizes


def _shape(matrix: WeightMatrix, call: Call) -> _Shape:
    values = matrix.values
    key = (values.shape, matrix.groups, matrix.channels_last, call.kind, call.options.one_pass, call.shift)
    found = _shapes.get(key)
    if found is None:
        outputs, inputs, *kernel = values.shape
        groups, taps, position = matrix.groups, math.prod(kernel), call.kind == "position"
        if values.numel() > _MOST_ELEMENTS:
            raise RuntimeError(f"a weight of shape {tuple(values.shape)} is too large")
        statistics = call.geometry.statistics_shape(groups * inputs, call.kind)
        last = matrix.channels_last
        packed = _ROWS_SHAPE.pack(outputs, groups, inputs, taps, last, position, call.options.one_pass, call.shift)
        assert _library is not None
        size = _library.balnorm_saved_size(bytes(_ROWS.size) + packed)
        if len(_shapes) >= _MOST_KEYS:
            _shapes.clear()
        found = _shapes[key] = _Shape(packed, outputs, statistics, size)
    return found


def _strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """The strides of a dense tensor."""
    order = [1, *range(len(shape) - 1, 1, -1), 0] if channels_last else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


def _types(real: torch.dtype, sample: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The types to call C with: those given, or, where it does not know that of the samples, ``real`` for both.

    In that case torch operations convert what goes in and what comes out.
    """
    return (real, sample) if (real, sample) in _COMPILED else (real, real)


def _layout(x: Tensor, types: tuple[torch.dtype, torch.dtype], call: Call) -> _Layout | None:
    """The layout of samples, or ``None`` if torch operations have to take their statistics.

    That is so without values, over several processes, where C cannot read ``x`` as it lies in memory, where the padding
    is a step of its own, where the kernel exceeds the image, and for centred statistics by position.
    """
    position = call.kind == "position"
    if call.samples == 0 or x.numel() == 0 or x.dtype != types[1] or call.among is not None:
        return None
    if position and (call.options.centred or call.geometry.pads_beforehand):
        return None
    key = (x.shape, x.stride(), call.samples, call.kind, call.options.centred, call.geometry)
    try:
        return _layouts[key]
    except KeyError:
        if len(_layouts) >= _MOST_KEYS:
            _layouts.clear()
        found = _layouts[key] = _dense_layout(x, call)
        return found


def _dense_layout(x: Tensor, call: Call) -> _Layout | None:
    shape, geometry, samples = x.shape, call.geometry, call.samples
    _, channels, *size = shape
    strides = next((s for last in (True, False) if _same(shape, x.stride(), s := _strides(shape, last))), None)
    position = call.kind == "position"
    if strides is None or x.numel() > _MOST_ELEMENTS or (position and geometry.exceeds(size)):
        return None
    last = strides == _strides(shape, True)
    outputs, axes = geometry.output_size(size), [1, 1, 1, 1, 0, 1, 0] * (3 - len(size))
    for axis, n in enumerate(size):
        stride, padding, dilation = geometry.stride[axis], geometry.padding[axis][0], geometry.dilation[axis]
        axes += [n, outputs[axis], geometry.kernel[axis], stride, padding, dilation, geometry.transposed]
    count = float(samples * geometry.divisor(size, call.kind))
    packed = _SAMPLES_SHAPE.pack(samples, channels, last, position, call.options.centred, *axes, count)
    return _Layout(packed, strides)


def _call(name: str, types: tuple[torch.dtype, torch.dtype], arguments: bytes) -> None:
    if _functions[name, types](arguments):
        raise MemoryError(f"no memory left for the {name} pass of a balanced layer")


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
    library.balnorm_saved_size.argtypes, library.balnorm_saved_size.restype = [ctypes.c_char_p], ctypes.c_int64
    pool = thread_pool()
    if pool is None:
        return library, f"native, on one thread: torch {torch.__version__} does not expose its thread pool"
    library.balnorm_use_threads(ctypes.c_void_p(pool))
    return library, "native, on torch's threads"


def _bind(library: ctypes.CDLL | None) -> dict[tuple[str, tuple[torch.dtype, torch.dtype]], Any]:
    """The functions of the library by name and types."""
    functions = {}
    for name in ("forward", "effective", "backward", "track") if library is not None else ():
        for types, suffix in _COMPILED.items():
            function = getattr(library, f"balnorm_{name}_{suffix}")
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
            functions[name, types] = function
    return functions


_library, _status = _load()
_functions = _bind(_library)
