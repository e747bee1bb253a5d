"""The data flow of a model: which call feeds which. Found by tracing, or by watching a run on an example input.

A model's modules say what it is made of, not what follows what. This module finds that out in two ways that give the
same answer: symbolically with :mod:`torch.fx`, which needs no input but cannot follow every Python program, and by
recording every operation of one forward pass, which follows any program but needs an input to run on.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from balnorm.layers import BalNormLayer

__all__ = ["Call", "Flow", "data_flow"]


@dataclass(eq=False)
class Call:
    """One step of a forward pass: a module or a function that is called, or an input that arrives.

    ``name`` is spelt the same for a module, a function, a method and an operator: ``"relu"``, ``"maxpool"``, ``"add"``;
    an input of the model is ``"input"``, its output ``"output"`` and a parameter or buffer ``"attribute"``.
    """

    name: str
    order: int
    module: nn.Module | None = None
    inputs: list[Call] = field(default_factory=list)
    users: list[Call] = field(default_factory=list)
    nonnegative: bool = False
    """Whether no value of the output can be negative."""
    in_place: bool = False
    """Whether it may write into its input."""


class Flow:
    """All calls of one forward pass, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.by_module: dict[nn.Module, list[Call]] = defaultdict(list)
        self.used_directly: set[nn.Module] = set()
        """Leaf modules whose parameters or buffers are used outside their own call."""

    def add(
        self,
        name: str,
        inputs: Iterable[Call] = (),
        *,
        module: nn.Module | None = None,
        arguments: Iterable[Any] = (),
        nonnegative: bool = False,
        in_place: bool = False,
    ) -> Call:
        call = Call(_canonical(name), len(self.calls), module, list(dict.fromkeys(inputs)), in_place=in_place)
        call.nonnegative = nonnegative or _is_nonnegative(call, list(arguments))
        for source in call.inputs:
            source.users.append(call)
        self.calls.append(call)
        if module is not None:
            self.by_module[module].append(call)
        return call


def data_flow(model: nn.Module, example_input: Tensor | tuple[Any, ...] | None = None) -> Flow:
    """The data flow of ``model``: traced if it can be, else recorded while it runs on ``example_input``.

    Inputs count as not negative unless ``example_input`` shows that they are.
    """
    arguments = (example_input,) if isinstance(example_input, Tensor) else tuple(example_input or ())
    try:
        return traced(model, arguments)
    except Exception as error:  # symbolic tracing runs the model's own code, which can raise anything
        if example_input is None:
            raise ValueError(
                f"this {type(model).__name__} cannot be traced symbolically ({_first_line(error)}): "
                "give example_input=..., a small batch that it can be run on"
            ) from error
    return recorded(model, arguments)


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of this module is one step: torch's own layers, and what is built on a convolution or a norm."""
    of_torch = type(module).__module__.startswith("torch.nn.") and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )
    return of_torch or isinstance(module, _ConvNd | _NormBase | nn.Linear | BalNormLayer)


# --------------------------------------------------------------------------------------------------------------------
# Symbolically
# --------------------------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return is_leaf(module)


def traced(model: nn.Module, arguments: tuple[Any, ...] = ()) -> Flow:
    flow, calls = Flow(), dict[fx.Node, Call]()
    values = iter(arguments)
    for node in _Tracer().trace(model).nodes:
        if _is_metadata(node, calls):
            continue
        inputs = [calls[source] for source in node.all_input_nodes if source in calls]
        if node.op == "placeholder":
            calls[node] = flow.add("input", nonnegative=not _has_negative(next(values, None)))
        elif node.op == "call_module":
            module = model.get_submodule(str(node.target))
            calls[node] = flow.add(
                type(module).__name__, inputs, module=module, in_place=getattr(module, "inplace", False)
            )
        elif node.op == "get_attr":
            owner = model.get_submodule(str(node.target).rpartition(".")[0])
            if is_leaf(owner):
                flow.used_directly.add(owner)
            calls[node] = flow.add("attribute")
        elif node.op == "output":
            flow.add("output", inputs)
        else:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "function")
            in_place = bool(node.kwargs.get("inplace")) or (name.endswith("_") and not name.endswith("__"))
            in_place |= name in ("iadd", "isub", "imul", "itruediv", "setitem") or any(v is True for v in node.args)
            calls[node] = flow.add(name, inputs, arguments=[*node.args, *node.kwargs.values()], in_place=in_place)
        if node in calls and calls[node].in_place and node.all_input_nodes:
            calls[node.all_input_nodes[0]] = calls[node]  # who uses the input from now on uses what was written there
    return flow


def _is_metadata(node: fx.Node, calls: dict[fx.Node, Call]) -> bool:
    """Whether the result is a shape, a size or the like, or was computed from such, and holds no values."""
    if node.op == "call_method" and node.target in ("size", "dim", "numel"):
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad")
    sources = node.all_input_nodes
    return (
        node.op in ("call_function", "call_method") and bool(sources) and not any(source in calls for source in sources)
    )


# --------------------------------------------------------------------------------------------------------------------
# By watching a run
# --------------------------------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Notes every operation on tensors, and counts a leaf module as one.

    A value is known by the memory that it occupies: views of the same elements are the same value, and an operation
    in place gives the memory, in whatever view, a new origin.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = flow
        self.keep: list[Tensor] = []  # so that no memory is used twice
        self.origin: dict[tuple[Any, ...], Call] = {}
        self.last_write: dict[int, Call] = {}
        self.owner: dict[int, nn.Module] = {}
        self.inside_leaf = 0

    def made(self, value: Any, call: Call, *, in_place: bool = False) -> None:
        for tensor in _tensors(value):
            self.keep.append(tensor)
            self.origin[_memory(tensor)] = call
            if in_place:
                self.last_write[_memory(tensor)[0]] = call

    def sources(self, value: Any) -> list[Call]:
        return [self.source(tensor) for tensor in _tensors(value)]

    def source(self, tensor: Tensor) -> Call:
        memory = _memory(tensor)
        known = [call for call in (self.origin.get(memory), self.last_write.get(memory[0])) if call is not None]
        if known:
            return max(known, key=lambda call: call.order)
        if memory[0] in self.owner:
            self.flow.used_directly.add(self.owner[memory[0]])
        attribute = self.flow.add("attribute")
        self.made(tensor, attribute)
        return attribute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside_leaf:
            return func(*args, **kwargs)
        inputs = self.sources((args, kwargs))
        result = func(*args, **kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        name = func._schema.name.split("::")[-1]
        call = self.flow.add(name, inputs, arguments=[*args, *kwargs.values()], in_place=bool(written))
        self.made(result, call)
        self.made(written, call, in_place=True)
        return result


def recorded(model: nn.Module, arguments: tuple[Any, ...]) -> Flow:
    """Run ``model`` once in eval mode, so that nothing in it changes, and note what happens."""
    flow = Flow()
    recorder = _Recorder(flow)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        if not recorder.inside_leaf:
            pending.append(recorder.sources((args, kwargs)))
        recorder.inside_leaf += 1

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
        recorder.inside_leaf -= 1
        if not recorder.inside_leaf:
            in_place = bool(getattr(module, "inplace", False))
            call = flow.add(type(module).__name__, pending.pop(), module=module, in_place=in_place)
            recorder.made(output, call, in_place=in_place)

    pending: list[list[Call]] = []
    handles: list[Any] = []
    for value in tree_leaves(arguments):
        if isinstance(value, Tensor):
            recorder.made(value, flow.add("input", nonnegative=not _has_negative(value)))
    try:
        for module in model.modules():
            if is_leaf(module):
                for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                    recorder.owner[_memory(tensor)[0]] = module
                # The last hook before the module's own code and the first one after it: others may change the values.
                handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True, prepend=True))
        with evaluating(model), torch.no_grad(), recorder:
            output = model(*arguments)
        flow.add("output", recorder.sources(output))
    finally:
        for handle in handles:
            handle.remove()
    return flow


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``model`` in eval mode, and afterwards every module in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _has_negative(value: Any) -> bool:
    return any(bool((tensor < 0).any()) for tensor in _tensors(value) if tensor.is_floating_point())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --------------------------------------------------------------------------------------------------------------------
# What the steps are called, and which of them can give negative values
# --------------------------------------------------------------------------------------------------------------------

_SYNONYMS = {
    "iadd": "add",
    "imul": "mul",
    "nativedropout": "dropout",
    "featuredropout": "dropout",
    "constantpad": "pad",
    "zeropad": "pad",
    "concat": "cat",
}
_NONNEGATIVE = {"relu", "relu6", "sigmoid", "hardsigmoid", "softplus", "softmax", "exp", "abs", "square"}
_BOUNDED_BELOW = {"hardtanh", "clamp", "clampmin"}
_ARITHMETIC = {"add", "mul", "div"}
_KEEPS_SIGN = {
    *_ARITHMETIC,
    *("cat", "stack", "maximum", "mean", "sum", "amax"),
    *("maxpool", "avgpool", "adaptiveavgpool", "adaptivemaxpool", "upsamplenearest", "upsamplebilinear"),
    *("dropout", "pad", "identity", "clone", "contiguous", "detach", "to", "tocopy", "alias"),
    *("view", "unsafeview", "reshape", "flatten", "permute", "transpose", "expand", "squeeze", "unsqueeze"),
    *("getitem", "slice", "select", "split", "splitwithsizes", "chunk", "unbind", "channelshuffle", "pixelshuffle"),
}


def _canonical(name: str) -> str:
    """``MaxPool2d``, ``max_pool2d`` and ``max_pool2d_with_indices`` are all ``maxpool``."""
    name = name.lower().replace("_", "").removesuffix("withindices")
    name = re.sub(r"(\dd|nd)$", "", name)
    return _SYNONYMS.get(name, name)


def _is_nonnegative(call: Call, arguments: list[Any]) -> bool:
    if call.name in _NONNEGATIVE or _canonical(type(getattr(call.module, "act", None)).__name__) in _NONNEGATIVE:
        return True  # the latter is timm's norm with an activation inside
    numbers = [value for value in arguments if isinstance(value, int | float)]
    if call.name in _BOUNDED_BELOW:
        bounds = [call.module.min_val] if isinstance(call.module, nn.Hardtanh) else numbers
        return bool(bounds) and bounds[0] >= 0
    if call.name in _ARITHMETIC and any(number < 0 for number in numbers):
        return False
    return call.name in _KEEPS_SIGN and bool(call.inputs) and all(source.nonnegative for source in call.inputs)
