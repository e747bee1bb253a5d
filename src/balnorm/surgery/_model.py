"""Helpers for whole models: run one without side effects, and replace modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = [
    "ModelT",
    "device_of",
    "in_double_precision",
    "input_of_batch",
    "refuse_wrapped",
    "replace_modules",
    "tensors_in",
    "uncompiled",
    "undisturbed",
    "widest",
]

ModelT = TypeVar("ModelT", bound=nn.Module)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Undo everything that a forward pass inside does to the model (mode, buffers, attributes) and the random state.

    With torch 2.6 or newer, nothing inside runs compiled: code compiled earlier does not notice new hooks.
    """
    modules = list(model.modules())
    attributes = [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in modules
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {buffer.device for buffer in [*model.parameters(), *model.buffers()] if buffer.is_cuda}
    # Without torch's compiler, which takes long to import, nothing has been compiled.
    can_ask = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    eager = torch.compiler.set_stance("force_eager") if can_ask else nullcontext()
    with eager, torch.random.fork_rng(sorted(devices, key=str)):
        try:
            yield
        finally:
            for module in modules:
                if hasattr(module, "reshard") and hasattr(module, "unshard"):
                    # FSDP2, which would take its parameters for gathered when they are put back below.
                    module.reshard()  # type: ignore[operator]
            for module, before in zip(modules, attributes, strict=True):
                for name, value in before.items():
                    if isinstance(value, dict) and isinstance(vars(module).get(name), dict):
                        now = vars(module)[name]  # the same dictionary, for those who hold it
                        now.clear()
                        now.update(value)
                    else:
                        vars(module)[name] = value
                for name in vars(module).keys() - before.keys():
                    del vars(module)[name]
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``'s wrapper: code that is already compiled does not see new hooks."""
    return getattr(model, "_orig_mod", model)


def input_of_batch(batch: Any, model: nn.Module, otherwise: str = "") -> Tensor:
    """The model's input in a loader's batch: a tensor, or the first item of a tuple or list."""
    x = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(x, Tensor):
        expected = "a batch must be a tensor, or a tuple or list that starts with one"
        raise TypeError(f"{expected}, got a {type(x).__name__}{otherwise}")
    return x.to(device_of(model, x))


def device_of(model: nn.Module, tensor: Tensor) -> torch.device:
    """Where the model is, or the tensor if the model has no tensors."""
    return next((own.device for own in [*model.parameters(), *model.buffers()]), tensor.device)


def widest(device: torch.device) -> torch.dtype:
    """The most precise type that sums on this device can have: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def in_double_precision(tensor: Tensor) -> Tensor:
    """The tensor in float64; on the CPU, if it is on one of Apple's GPUs, which have none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def replace_modules(model: ModelT, new: dict[nn.Module, nn.Module]) -> ModelT:
    """Replace old modules by new ones, under every name that they have, in plain lists and tuples too."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new:
                setattr(parent, name, new[child])
        for name, value in list(vars(parent).items()):
            if not name.startswith("_"):
                vars(parent)[name] = _with_new(value, new)
    return new.get(model, model)  # type: ignore[return-value]


def _with_new(value: Any, new: dict[nn.Module, nn.Module]) -> Any:
    """``value`` with old modules replaced by new ones; lists and dictionaries remain the same objects."""
    if isinstance(value, nn.Module):
        return new.get(value, value)
    if isinstance(value, list):
        value[:] = [_with_new(item, new) for item in value]
    elif isinstance(value, dict):
        value.update({key: _with_new(item, new) for key, item in value.items()})
    elif type(value) is tuple:
        return tuple(_with_new(item, new) for item in value)
    return value


def tensors_in(value: Any, depth: int = 4) -> list[Tensor]:
    """All tensors in nested tuples, lists, dictionaries and plain objects."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif depth and hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            found += tensors_in(list(vars(leaf).values()), depth - 1)
    return found


def refuse_wrapped(model: nn.Module, operation: str) -> None:
    if not isinstance(model, nn.Module):
        what = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        message = f"{operation} takes a model, which is a torch.nn.Module, got {what}"
        raise TypeError(getattr(type(model), "_message", message))
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for name, module in model.named_modules():
        where = f"the model's {name}" if name else "the model"
        if isinstance(module, parallel):
            raise ValueError(
                f"{where} is wrapped in {type(module).__name__}, which has registered its parameters: "
                f"{operation} the model inside (its .module), and wrap it afterwards"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is a TorchScript module, which cannot be changed: {operation} it before scripting"
            )
        if hasattr(module, "_orig_mod"):
            raise ValueError(f"{where} is compiled: {operation} the model first, and compile it afterwards")
