"""The data flow of a model: which call feeds which. Found by tracing, or by watching a run on an example input.

A model's modules say what it is made of, not in which order it calls them. There are two ways to find out, with the
same result: symbolically with :mod:`torch.fx`, which needs no input but cannot follow every Python program, and by
recording every operation of one forward pass, which follows any program but needs an input to run on.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import TorchDispatchMode

from balnorm._core.torch_private import storage_key
from balnorm.activations import LeanActivation, lean_activation
from balnorm.channels import ChannelAffine, ChannelCentre
from balnorm.layers import BalNormLayer
from balnorm.surgery._model import tensors_in, undisturbed

__all__ = ["Call", "Flow", "canonical", "data_flow", "recorded", "traced"]


@dataclass(eq=False)
class Call:
    """One step of a forward pass: a call of a module or a function, or an input of the model.

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
    dimensions: int | None = None
    """How many dimensions the output has, if that was observed."""


class Flow:
    """All calls of one forward pass, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.by_module: dict[nn.Module, list[Call]] = {}
        self.used_directly: set[nn.Module] = set()
        """Leaf modules whose parameters or buffers are used outside their own call."""

    def add(
        self,
        name: str,
        inputs: Iterable[Call] = (),
        *,
        module: nn.Module | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        nonnegative: bool = False,
        in_place: bool = False,
    ) -> Call:
        call = Call(canonical(name), len(self.calls), module, list(dict.fromkeys(inputs)), in_place=in_place)
        if call.name == "avgpool" and _averages_padding(module, args, kwargs or {}):
            call.name = "paddedavgpool"
        elif call.name == "upsample" and "area" in (getattr(module, "mode", None), (kwargs or {}).get("mode")):
            call.name = "adaptiveavgpool"  # which it is
        call.nonnegative = nonnegative or _is_nonnegative(call, name, args, kwargs or {})
        for source in call.inputs:
            source.users.append(call)
        self.calls.append(call)
        if module is not None:
            self.by_module.setdefault(module, []).append(call)
        return call


def data_flow(model: nn.Module, arguments: tuple[Any, ...] = ()) -> Flow:
    """The data flow of ``model``: traced if possible, otherwise recorded while it runs on the given arguments.

    Inputs count as possibly negative unless the arguments show that they are not. The model is left as it was.
    """
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"{name} does not know its shape yet: run a batch through the model first")
    with undisturbed(model):
        if arguments and _has_linear_norm(model):  # only a run shows how many dimensions their input has
            return recorded(model, arguments)
        try:
            return traced(model, arguments)
        except Exception as error:  # symbolic tracing runs the model's own code, which can raise anything
            if not arguments:
                raise ValueError(
                    f"this {type(model).__name__} cannot be traced symbolically ({_first_line(error)}): "
                    "give example_input=..., a small batch that it can be run on"
                ) from error
        return recorded(model, arguments)


def is_leaf(module: nn.Module) -> bool:
    """Whether a call of this module is one step: torch's own layers, what is built on them, and known activations."""
    of_torch = type(module).__module__.startswith("torch.nn.") and not isinstance(
        module, nn.Sequential | nn.ModuleList | nn.ModuleDict
    )
    ours = BalNormLayer | ChannelAffine | ChannelCentre | LeanActivation
    known = (
        isinstance(module, _ConvNd | _NormBase | nn.GroupNorm | nn.Linear | ours) or lean_activation(module) is not None
    )
    return of_torch or known


# --------------------------------------------------------------------------------------------------------------------
# Symbolically
# --------------------------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return is_leaf(module)


def traced(model: nn.Module, arguments: tuple[Any, ...] = ()) -> Flow:
    """The flow of symbols through the model's code, with optional arguments at their defaults unless given."""
    flow, calls = Flow(), dict[fx.Node, Call]()
    values = iter(arguments)
    owners = defaultdict(list)
    for module in model.modules():
        if is_leaf(module):
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                owners[id(tensor)].append(module)
    for node in _Tracer().trace(model, _defaults(model, len(arguments))).nodes:
        if _is_metadata(node, calls):
            continue
        inputs = [calls[source] for source in node.all_input_nodes if source in calls]
        if node.op == "placeholder":
            # Without an example, anything is possible. For pixels in [0, 1] this changes nothing: their |x| is x.
            value = next(values, None)
            calls[node] = flow.add("input", nonnegative=value is not None and not _has_negative(value))
        elif node.op == "call_module":
            module = model.get_submodule(str(node.target))
            in_place = bool(getattr(module, "inplace", False))
            calls[node] = flow.add(type(module).__name__, inputs, module=module, in_place=in_place)
        elif node.op == "get_attr":
            if not all(_is_metadata(user, {node: Call("", 0)}) for user in node.users):
                parent, _, name = str(node.target).rpartition(".")
                flow.used_directly.update(owners[id(getattr(model.get_submodule(parent), name))])
            calls[node] = flow.add("attribute")
        elif node.op == "output":
            flow.add("output", inputs)
        else:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "function")
            in_place = _asks_for_in_place(node, name)
            calls[node] = flow.add(name, inputs, args=node.args, kwargs=node.kwargs, in_place=in_place)
        if node in calls and calls[node].in_place and node.all_input_nodes:
            calls[node.all_input_nodes[0]] = calls[node]  # later uses of the input see what was written there
    return flow


def _defaults(model: nn.Module, given: int) -> dict[str, Any]:
    """The optional arguments of a model that are not given: a symbol in place of None would take other branches."""
    parameters = inspect.signature(model.forward).parameters.values()
    return {
        parameter.name: parameter.default
        for position, parameter in enumerate(parameters)
        if position >= given and parameter.default is not parameter.empty
    }


def _is_metadata(node: fx.Node, calls: dict[fx.Node, Call]) -> bool:
    """Whether the result is a shape, a size or the like, or is computed from these alone, and so holds no values."""
    if node.op == "call_method" and node.target in ("size", "dim", "numel"):
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad")
    if node.op != "call_function" or any(source in calls for source in node.all_input_nodes):
        return False
    return getattr(node.target, "__module__", "") in ("_operator", "operator", "builtins", "math")


def _asks_for_in_place(node: fx.Node, name: str) -> bool:
    if name.endswith("_") and not name.endswith("__"):
        return True
    if name in ("iadd", "isub", "imul", "itruediv", "setitem"):
        return True
    if callable(node.target):
        try:
            bound = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)
            return bool(bound.arguments.get("inplace", node.kwargs.get("inplace")))
        except (TypeError, ValueError):  # written in C, without a signature
            pass
    return bool(node.kwargs.get("inplace"))


# --------------------------------------------------------------------------------------------------------------------
# By watching a run
# --------------------------------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Records every operation on tensors; a leaf module counts as one operation.

    A value is known by the memory that it occupies: views of the same elements are the same value, and an operation
    in place gives the memory, in whatever view, a new origin.
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = flow
        self.keep: list[Tensor] = []  # so that no memory is reused
        self.origin: dict[tuple[Any, ...], Call] = {}
        self.last_write: dict[int, Call] = {}
        self.owner: dict[int, nn.Module] = {}
        self.inside_leaf = 0

    def made(self, value: Any, call: Call, *, in_place: bool = False) -> None:
        for tensor in tensors_in(value):
            self.keep.append(tensor)
            self.origin[_memory(tensor)] = call
            call.dimensions = tensor.dim()
            if in_place:
                self.last_write[_memory(tensor)[0]] = call

    def sources(self, value: Any) -> list[Call]:
        return [self.source(tensor) for tensor in tensors_in(value)]

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
        call = self.flow.add(name, inputs, args=args, kwargs=kwargs, in_place=bool(written))
        self.made(result, call)
        self.made(written, call, in_place=True)
        return result


def recorded(model: nn.Module, arguments: tuple[Any, ...]) -> Flow:
    """Run ``model`` once in eval mode and record what happens. Use it inside ``undisturbed``."""
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
    for value in tensors_in(arguments):
        recorder.made(value, flow.add("input", nonnegative=not _has_negative(value)))
    with ExitStack() as hooks:
        for module in model.modules():
            if is_leaf(module):
                for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                    recorder.owner[_memory(tensor)[0]] = module
                # The last hook before the module's own code and the first one after it: others may change the values.
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                after = module.register_forward_hook(leave, with_kwargs=True, prepend=True, always_call=True)
                hooks.enter_context(after)
        with torch.no_grad(), recorder:
            output = model.eval()(*arguments)
        flow.add("output", recorder.sources(output))
    return flow


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def _has_negative(value: Any) -> bool:
    return any(bool((tensor < 0).any()) for tensor in tensors_in(value) if tensor.is_floating_point())


def _has_linear_norm(model: nn.Module) -> bool:
    kinds = {type(module) for module in model.modules()}
    return nn.Linear in kinds and bool(kinds & {nn.BatchNorm1d, nn.SyncBatchNorm, nn.GroupNorm})


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --------------------------------------------------------------------------------------------------------------------
# Names of steps, and which of them can give negative values
# --------------------------------------------------------------------------------------------------------------------

_SYNONYMS = {
    "iadd": "add",
    "imul": "mul",
    "gelutanh": "gelu",
    "nativedropout": "dropout",
    "featuredropout": "dropout",
    "constantpad": "pad",
    "zeropad": "pad",
    "concat": "cat",
    "unsafeview": "view",
    "reshape": "view",
    "reshapeas": "view",
    "viewas": "view",
    "flatten": "view",
    "unflatten": "view",
}
_NONNEGATIVE = {"relu", "relu6", "sigmoid", "hardsigmoid", "softplus", "softmax", "exp", "abs", "square"}
_BOUNDED_BELOW = {"hardtanh": "min_val", "clamp": "min", "clampmin": "min"}
_WITH_NUMBERS = {"add", "mul", "div", "pad"}
_KEEPS_SIGN = {
    *_WITH_NUMBERS,
    *("cat", "stack", "maximum", "mean", "sum", "amax"),
    *("maxpool", "avgpool", "paddedavgpool", "adaptiveavgpool", "adaptivemaxpool", "upsample"),
    *("dropout", "identity", "clone", "contiguous", "detach", "to", "tocopy", "alias"),
    *("view", "permute", "transpose", "expand", "squeeze", "unsqueeze"),
    *("getitem", "slice", "select", "split", "splitwithsizes", "chunk", "unbind", "channelshuffle", "pixelshuffle"),
}


def canonical(name: str) -> str:
    """``MaxPool2d``, ``max_pool2d`` and ``max_pool2d_with_indices`` are all ``maxpool``."""
    name = name.lower().replace("_", "").removesuffix("withindices")
    if name.startswith(("upsampl", "interpolate")):  # a function, a module, or an operator for each mode
        return "upsample"
    name = re.sub(r"(\dd|nd)$", "", name)
    return _SYNONYMS.get(name, name)


def _averages_padding(module: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an average pool gives more than a mean of inputs, so that it changes a constant input."""

    def argument(position: int, name: str, default: Any) -> Any:
        value = args[position] if len(args) > position else kwargs.get(name, default)
        return getattr(module, name, value)

    padding = argument(3, "padding", 0)
    pads = any(padding) if isinstance(padding, tuple | list) else padding != 0
    return bool(pads and argument(5, "count_include_pad", True)) or argument(6, "divisor_override", None) is not None


def _is_nonnegative(call: Call, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if call.name in _NONNEGATIVE or canonical(type(getattr(call.module, "act", None)).__name__) in _NONNEGATIVE:
        return True  # the latter is timm's norm with an activation inside
    if call.name in _BOUNDED_BELOW:
        bound = args[1] if len(args) > 1 else kwargs.get(_BOUNDED_BELOW[call.name])
        bound = call.module.min_val if isinstance(call.module, nn.Hardtanh) else bound
        return isinstance(bound, int | float) and bound >= 0
    if call.name in _WITH_NUMBERS:
        numbers = [*args, *kwargs.values(), getattr(call.module, "value", 0)]
        if any(isinstance(number, int | float) and number < 0 for number in numbers):
            return False
    words = [name, getattr(call.module, "mode", None), *args, *kwargs.values()]
    if any(isinstance(word, str) and "bicubic" in word for word in words):  # it overshoots
        return False
    return call.name in _KEEPS_SIGN and bool(call.inputs) and all(source.nonnegative for source in call.inputs)
