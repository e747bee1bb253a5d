"""The closed form's work on weight rows in C (``kernels.c``): few calls and few passes over memory, for CPU tensors.

Installing balnorm compiles the file if there is a C compiler. It is loaded with ctypes and knows nothing of torch
except the address of its thread pool. Without it, or with ``BALNORM_NATIVE=0`` in the environment, torch operations do
the work. Both give the same results up to rounding.
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

from balnorm.core.balance import saturate
from balnorm.core.mass import add_mass_gradient, batch_mass, update_running_mass
from balnorm.core.matrix import WeightMatrix
from balnorm.core.plan import Call, Gradients, Plan, Running
from balnorm.core.torch_private import is_watched, thread_pool

__all__ = ["LIBRARY", "backward", "effective", "forward", "status", "takes"]

LIBRARY = Path(__file__).with_name("kernels.so")
"""Where the build puts the compiled file."""
INTERFACE = 3
"""What balnorm_interface() in kernels.c returns, if the compiled file is not an older one."""

# The structs of kernels.c: 64-bit integers, and a double where it says "d". What depends on shapes alone is packed
# once, addresses at every call.
_ROWS = struct.Struct("=9q")
_ROWS_SHAPE = struct.Struct("=7q")
_MASS = struct.Struct("=5qd")
_GRADIENTS = struct.Struct("=3q")
_SAMPLES = struct.Struct("=2q")
_SAMPLES_SHAPE = struct.Struct("=25qd")
_NOWHERE = bytes(_SAMPLES.size + _SAMPLES_SHAPE.size)
_PLAIN = (Tensor, nn.Parameter)
_COMPILED = {
    (torch.float32, torch.float32): "float",
    (torch.float32, torch.bfloat16): "bfloat16",
    (torch.float64, torch.float64): "double",
}
"""The types REAL and SAMPLE that kernels.c is compiled for, and the suffix of its functions."""


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
    x: Tensor, matrix: WeightMatrix, gain: Tensor | None, given_mass: Tensor | None, call: Call
) -> tuple[Tensor, tuple[Tensor, ...]]:
    values, plan, running = matrix.values, call.plan, call.running
    dtype, shape = values.dtype, _shape(matrix, plan)
    gain, output_scale = _as(gain, dtype), _as(call.output_scale, dtype)
    types = _types(dtype, x.dtype)
    saved, result = values.new_empty(shape.size), torch.empty_like(values, dtype=types[1])
    mass = saved[shape.size - shape.masses :]  # backward needs no mass, but this spares an allocation
    samples = _NOWHERE
    if given_mass is not None:
        mass = given_mass.to(dtype).contiguous()
    elif (layout := _layout(x, types, call)) is not None:
        samples = _SAMPLES.pack(x.data_ptr(), mass.data_ptr()) + layout  # C takes the mass first
    else:
        mass.copy_(batch_mass(x, call.samples, plan.geometry, plan.kind).flatten())
    average = _UNTRACKED if running is None else _average(running, dtype, plan.options.momentum)
    rows = shape.pack(values, gain, output_scale, saved, result.data_ptr())
    _call("forward", types, rows + _MASS.pack(mass.data_ptr(), *average) + samples)
    if running is not None and average is _UNTRACKED:
        update_running_mass(running.mass, running.batches, mass.view(running.mass.shape), plan.options.momentum)
    return saturate(result, x.dtype), (saved,)


def effective(
    matrix: WeightMatrix, gain: Tensor | None, call: Call, saved: Sequence[Tensor], dtype: torch.dtype
) -> Tensor:
    values = matrix.values
    types = _types(values.dtype, dtype)
    gain, output_scale = _as(gain, values.dtype), _as(call.output_scale, values.dtype)
    result = torch.empty_like(values, dtype=types[1])
    rows = _shape(matrix, call.plan).pack(values, gain, output_scale, saved[0], result.data_ptr())
    _call("effective", types, rows)
    return saturate(result, dtype)


def backward(
    g: Tensor, dx: Tensor | None, matrix: WeightMatrix, gain: Tensor | None, call: Call, saved: Sequence[Tensor]
) -> Gradients:
    values, dtype, shape = matrix.values, g.dtype, _shape(matrix, call.plan)
    gain, output_scale = _as(gain, dtype), _as(call.output_scale, dtype)
    dgain, dmass, samples = g.new_empty(values.shape[0]), None, _NOWHERE
    types = _types(dtype, dtype if dx is None else dx.dtype)
    if dx is not None and (layout := _layout(dx, types, call)) is not None:
        samples = _SAMPLES.pack(dx.data_ptr(), 0) + layout  # C adds the mass's gradient to dx; nothing else needs it
    else:
        dmass = g.new_empty(shape.mass)
    rows = shape.pack(values, gain, output_scale, saved[0], 0)
    gradients = _GRADIENTS.pack(g.data_ptr(), dgain.data_ptr(), 0 if dmass is None else dmass.data_ptr())
    _call("backward", types, rows + gradients + samples)
    if dx is not None and dmass is not None:
        add_mass_gradient(dx, dmass, call.samples, call.plan.geometry, call.plan.kind)
    return g, dgain, dmass


class _Shape(NamedTuple):
    """The shapes of a weight and of its vectors, which share the one tensor that is saved for backward."""

    packed: bytes
    mass: tuple[int, ...]
    masses: int
    size: int
    starts: tuple[int, ...]

    def pack(
        self, values: Tensor, gain: Tensor | None, output_scale: Tensor | None, saved: Tensor, result: int
    ) -> bytes:
        """The struct ``rows_t``. The tensors must outlive the call that uses it."""
        base = saved.data_ptr()
        share, total, mean, positive, contribution = self.starts
        addresses = _ROWS.pack(
            values.data_ptr(),
            0 if gain is None else gain.data_ptr(),
            0 if output_scale is None else output_scale.data_ptr(),
            result,
            base + share,
            base + total,
            base + mean,
            base + positive,
            base + contribution,
        )
        return addresses + self.packed


def _shape(matrix: WeightMatrix, plan: Plan) -> _Shape:
    values = matrix.values
    key = (values.shape, matrix.channels_last, values.dtype)
    found: _Shape | None = plan.shapes.get(key)
    if found is None:
        outputs, inputs, *kernel = values.shape
        groups, taps, position = matrix.groups, math.prod(kernel), plan.kind == "position"
        mass = plan.mass_shape(groups * inputs)
        share, masses, item = groups * inputs * taps, math.prod(mass), values.element_size()
        starts = (0, share, share + groups, share + groups + outputs, share + groups + 2 * outputs)
        one_pass = plan.options.one_pass
        packed = _ROWS_SHAPE.pack(outputs, groups, inputs, taps, matrix.channels_last, position, one_pass)
        size = share + groups + 3 * outputs + masses
        found = plan.shapes[key] = _Shape(packed, mass, masses, size, tuple(item * start for start in starts))
    return found


def _types(real: torch.dtype, sample: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The types to call C with: those given, or, where it does not know that of the samples, ``real`` for both.

    In that case torch operations convert what goes in and what comes out.
    """
    return (real, sample) if (real, sample) in _COMPILED else (real, real)


def _layout(x: Tensor, types: tuple[torch.dtype, torch.dtype], call: Call) -> bytes | None:
    """The shape part of ``samples_t``; ``None`` where torch operations have to do its part.

    That is so without values, where C cannot read ``x`` as it lies in memory, and where the kernel exceeds the image.
    """
    if call.samples == 0 or x.numel() == 0 or x.dtype != types[1]:
        return None
    plan, key = call.plan, (x.shape, x.stride(), call.samples)
    found: bytes | None = plan.shapes.get(key)  # once: other threads may clear it
    if found is None:
        if len(plan.shapes) > 100:
            plan.shapes.clear()  # images of ever new sizes
        found = plan.shapes[key] = _dense_layout(x.shape, x.stride(), call.samples, plan) or b""
    return found or None


def _dense_layout(shape: torch.Size, strides: tuple[int, ...], samples: int, plan: Plan) -> bytes | None:
    _, channels, *size = shape
    space = math.prod(size)
    inner = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
    if _same(shape, strides, (channels * space, 1, *(channels * stride for stride in inner))):
        last = True
    elif _same(shape, strides, (channels * space, space, *inner)):
        last = False
    else:
        return None
    geometry, position = plan.geometry, plan.kind == "position"
    if position and geometry.exceeds(size):
        return None
    outputs, axes = geometry.output_size(size), [1, 1, 1, 1, 0, 1, 0] * (3 - len(size))
    for axis, n in enumerate(size):
        stride, padding, dilation = geometry.stride[axis], geometry.padding[axis][0], geometry.dilation[axis]
        axes += [n, outputs[axis], geometry.kernel[axis], stride, padding, dilation, geometry.transposed]
    divisor = float(samples * geometry.divisor(size, plan.kind))
    return _SAMPLES_SHAPE.pack(samples, channels, last, position, *axes, divisor)


def _same(shape: torch.Size, strides: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether these strides reach the same elements: that of an axis with one element does not matter."""
    return all(n <= 1 or a == b for n, a, b in zip(shape, strides, expected, strict=True))


_UNTRACKED = (0, 0, 0, 0, 0.0)


def _average(running: Running, dtype: torch.dtype, momentum: float | None) -> tuple[int, int, int, int, float]:
    """The part of ``forward_t`` about the moving average, or ``_UNTRACKED`` where C cannot update it."""
    mass, batches = running
    if batches is None or batches.dtype != torch.int64 or mass.dtype != dtype or not (mass.is_cpu and batches.is_cpu):
        return _UNTRACKED
    by_input = mass.stride(1)
    if not (mass.is_contiguous() or (by_input == 1 and mass.movedim(1, -1).is_contiguous())):
        return _UNTRACKED  # a part of a larger tensor
    if not mass.is_inference():  # it changes behind torch's back: whoever saved it for backward has to know
        torch.autograd.graph.increment_version(mass)
    by_tap = mass.shape[1] if by_input == 1 else 1
    return mass.data_ptr(), batches.data_ptr(), by_input, by_tap, -1.0 if momentum is None else momentum


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A vector in this precision, dense in memory."""
    if tensor is None or (tensor.dtype == dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()


def _call(name: str, types: tuple[torch.dtype, torch.dtype], arguments: bytes) -> None:
    if _functions[name, types](arguments):
        raise MemoryError(f"no memory left for the {name} pass of a balanced layer")


def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("BALNORM_NATIVE") == "0":
        return None, "torch: BALNORM_NATIVE=0 is set"
    if not LIBRARY.exists():
        return None, "torch: the native kernels were not compiled when balnorm was installed"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return None, f"torch: the native kernels could not be loaded ({error})"
    if not hasattr(library, "balnorm_interface") or library.balnorm_interface() != INTERFACE:
        return None, "torch: the native kernels are those of another version of balnorm: install it again"
    pool = thread_pool()
    if pool is None:
        return library, f"native, on one thread: torch {torch.__version__} does not lend its own"
    library.balnorm_use_threads(ctypes.c_void_p(pool))
    return library, "native, on torch's threads"


_library, _status = _load()
_functions: dict[tuple[str, tuple[torch.dtype, torch.dtype]], Any] = {}
if _library is not None:
    for _name in ("forward", "effective", "backward"):
        for _pair, _suffix in _COMPILED.items():
            _function = getattr(_library, f"balnorm_{_name}_{_suffix}")
            _function.argtypes, _function.restype = [ctypes.c_char_p], ctypes.c_int
            _functions[_name, _pair] = _function
