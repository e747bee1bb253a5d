"""The private functions of torch that balanced layers call, each with the reason why there is no public way."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "COLLECTIVES_HAVE_GRADIENTS",
    "apply_function",
    "constant_when_compiled",
    "current_backward",
    "is_batched_gradient",
    "is_compiled_for_training",
    "is_view",
    "is_watched",
    "is_weight_norm",
    "mark_changed",
    "output_padding_for",
    "recomputing",
    "storage_key",
    "sum_over_processes",
    "tensor_functions",
    "thread_pool",
    "torch_transforms_the_program",
    "type_number",
]


def torch_transforms_the_program() -> bool:
    """Whether torch must see single operations: to compile, export or trace them, or for ``torch.func``.

    Only compilation has a public test. Tracing, functorch and forward-mode derivatives have none that returns a bool
    without touching a tensor.
    """
    return (
        torch.compiler.is_compiling()
        or _is_tracing()
        or (is_watched() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None)  # make_fx
        or _functorch_is_active()
        or forward_ad._current_level >= 0
    )


# Looking these up takes longer than asking them.
_is_tracing = torch._C._is_tracing
_functorch_is_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_graph_task = torch._C._current_graph_task_id
_is_batched = torch._C._functorch.is_batchedtensor
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def is_watched() -> bool:
    """Whether a ``TorchDispatchMode`` is active, which must see every operation: fake tensors, or a counter.

    There is no public way to ask.
    """
    return _dispatch_modes() > 0


def is_compiled_for_training() -> bool:
    """Whether ``torch.compile`` is at work, and no export or transform, which want operations of torch alone.

    Transforms have no public test (as above), and ``is_exporting`` is missing in older versions.
    """
    return (
        torch.compiler.is_dynamo_compiling()
        and not getattr(torch.compiler, "is_exporting", lambda: True)()
        and not torch._C._are_functorch_transforms_active()
    )


def constant_when_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """As ``torch.compiler.assume_constant_result``, which imports the whole compiler to set this one attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def apply_function(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """``function.apply(*arguments)``, if no functorch transform is active.

    The public method looks for transforms first, with a Python call for each argument: a tenth of the time that a small
    balanced layer adds to its convolution.
    """
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc, no-any-return]


def mark_changed(*tensors: Tensor | None) -> None:
    """Tell autograd that C has changed these tensors.

    The public function looks at each of them first, and those of inference mode have no version to count.
    """
    changed = [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
    if _MARKS_MANY:
        torch._C._increment_version(changed)
    else:
        for tensor in changed:
            torch.autograd.graph.increment_version(tensor)


def _marks_many() -> bool:
    """Whether torch's function takes a list; up to 2.4 it takes a tensor."""
    try:
        torch._C._increment_version([])
    except TypeError:
        return False
    return True


_MARKS_MANY = _marks_many()


def recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass, as activation checkpointing repeats it."""
    return not torch.compiler.is_compiling() and current_backward() != -1


def current_backward() -> int:
    """The number of the backward pass that runs on this thread, or -1. There is no public way to ask."""
    return _graph_task()


def is_batched_gradient(gradient: Tensor) -> bool:
    """Whether this is many gradients at once (``is_grads_batched=True``), which forbids work in place.

    Its tensors come from the older of torch's two implementations of vmap; those of ``torch.func.vmap`` over
    ``torch.autograd.grad`` come from the newer one. Neither has a public test.
    """
    return _is_legacy_batched(gradient) or _is_batched(gradient)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes this tensor for a view of another one. There is no public way to ask."""
    return tensor._is_view()


def output_padding_for(layer: nn.Module, input: Tensor | None, output_size: Sequence[int]) -> tuple[int, ...]:
    """The output padding with which a transposed convolution gives this output size. torch has no public rule."""
    axes = len(layer.kernel_size)  # type: ignore[arg-type]
    geometry = (layer.stride, layer.padding, layer.kernel_size, axes, layer.dilation)
    return tuple(layer._output_padding(input, list(output_size[-axes:]), *geometry))  # type: ignore[operator]


def is_weight_norm(parametrization: nn.Module) -> bool:
    """Whether ``torch.nn.utils.parametrizations.weight_norm`` made this. Its class is private."""
    from torch.nn.utils.parametrizations import _WeightNorm

    return isinstance(parametrization, _WeightNorm)


def sum_over_processes(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """``values`` summed over the processes of ``group`` (``None``: all of them), differentiably.

    The collectives of ``torch.distributed.nn`` are deprecated and cannot be compiled; their successors are private.
    """
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.distributed_c10d import _get_default_group

    group = group if group is not None else _get_default_group()
    if COLLECTIVES_HAVE_GRADIENTS:
        return cast(Tensor, all_reduce(values, "sum", group))
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"torch {torch.__version__} cannot compile sync_stats=True, because its collectives have no gradient: use "
            "torch 2.13 or newer, or do not compile this layer"
        )
    return cast(Tensor, _Sum.apply(values, group))  # type: ignore[no-untyped-call]


# In torch 2.7 they have none, and it does not say so: the gradients are wrong.
COLLECTIVES_HAVE_GRADIENTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class _Sum(torch.autograd.Function):
    """A sum over processes, whose gradient is the sum of the processes' gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Sum.apply(gradient, ctx.group)), None  # type: ignore[no-untyped-call]


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage. ``data_ptr()`` is 0 for every empty tensor and every tensor on ``meta``."""
    return cast(int, tensor.untyped_storage()._cdata)


def thread_pool() -> int | None:
    """The address of torch's own ``parallel_for``, a C function of its stable interface; ``None`` if it has none.

    A second pool of threads would compete with torch's for the same cores, and torch exposes its pool only in C.
    """
    try:
        return _address_of(_c_library().torch_parallel_for)
    except (OSError, AttributeError):
        return None


def tensor_functions() -> list[int] | None:
    """The addresses of torch's C functions that read a tensor, in the order of ``torch_t`` in kernels.c.

    They are part of its stable interface, which compiled models use. Questions about a tensor's memory that take
    microseconds in Python take nanoseconds there. ``None`` if they are missing.
    """
    questions = ("dim", "sizes", "strides", "dtype", "device_type", "storage_offset", "storage_size", "data_ptr")
    try:
        library = _c_library()
        functions = [_address_of(getattr(library, f"aoti_torch_get_{question}")) for question in questions]
        return [*functions, library.aoti_torch_device_type_cpu()]
    except (OSError, AttributeError):
        return None


def type_number(dtype: torch.dtype) -> int:
    """The number by which that interface knows a dtype."""
    return cast(int, getattr(_c_library(), f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")())


def _c_library() -> ctypes.CDLL:
    names = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / names.get(sys.platform, "libtorch_cpu.so")))


def _address_of(function: Any) -> int:
    return cast(int, ctypes.cast(function, ctypes.c_void_p).value)
