"""Warnings about how balanced layers are used. Each layer gives each of them once; some come once for a model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from balnorm._core.torch_private import is_watched, torch_transforms_the_program

if TYPE_CHECKING:
    from balnorm.layers import BalNormLayer

__all__ = [
    "ALL_FROZEN",
    "FOLD",
    "HAS_HOOKS",
    "NO_STATISTICS",
    "OF_PLAIN_LAYERS",
    "QUANTISED",
    "BalNormWarning",
    "compare_forms",
    "has_no_statistics",
    "is_readable",
    "look_for_statistics",
    "refuse_quantised",
    "refuse_successor",
    "warn",
    "warn_of_missing_statistics",
]

ALL_FROZEN = (
    "update_stats changed nothing: all balanced layers have frozen statistics, as those of a converted trained network "
    "do. Call balnorm.unfreeze_stats(model) first if you want new ones"
)
FOLD = "fold the model first, with balnorm.fold(model)"
HAS_HOOKS = "{} has hooks, which the folded layer does not get: its output may differ"
NO_STATISTICS = (
    "{} no statistics yet: the output in eval mode is not what it will be trained for. That is harmless if training "
    "follows, e.g. after Lightning's sanity check. Otherwise train first, or estimate the statistics with "
    "balnorm.update_stats(loader, model)"
)
QUANTISED = (
    "{} is about to be quantised, and torch's quantisation does not know balanced layers: it leaves this one in "
    "floating point, or the model fails when it runs. To quantise it, " + FOLD
)
OF_PLAIN_LAYERS = (
    "{} was given the weight of a layer that is not balanced, as from a network with BatchNorm, whose scales and "
    "statistics have no place here. Load the state dict into the original network and convert that: "
    "balnorm.convert(model, example_input=images)"
)

_CALL = nn.Module._call_impl.__code__


class BalNormWarning(UserWarning):
    """A balanced layer may not do what you expect. The message says why and what helps.

    Each layer warns once; if there are no statistics, each model does. ``warnings.simplefilter("ignore",
    BalNormWarning)`` silences all of them.
    """


def warn(layer: BalNormLayer, message: str, name: str | None = None) -> None:
    """Warn about a layer, unless it has had this warning before."""
    if message not in layer._warned:
        layer._warned.add(message)
        warnings.warn(message.format(name or repr(layer)), BalNormWarning, stacklevel=3)


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: it is no subclass, is not on the meta device and still has its memory."""
    ordinary = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    return ordinary and bool(tensor.untyped_storage().nbytes() or not tensor.numel())


def has_no_statistics(layer: BalNormLayer) -> bool:
    """Whether no batch has reached the running statistics. Reads values, so it waits for the device.

    The counter is not enough: averaging of weights (EMA) leaves it at 0 and averages the statistics.
    """
    counter, mass = layer.num_batches_tracked, layer.running_mass
    if counter is None or mass is None or not is_readable(counter) or not is_readable(mass):
        return False
    return bool(counter.sum() == 0 and (mass == 1).all())


def look_for_statistics(layer: BalNormLayer, input: Tensor) -> None:
    """Warn if there are no statistics. Looks only at the first evaluation, because it waits for the device."""
    if getattr(layer, "_is_replica", False):  # nn.DataParallel makes them for every step: each would look again
        return
    if torch_transforms_the_program() or is_watched() or not is_readable(input) or not is_readable(layer.weight):
        return
    if input.is_cuda and torch.cuda.is_current_stream_capturing():  # a CUDA graph cannot wait
        return
    layer._has_looked = True
    if NO_STATISTICS not in layer._warned and has_no_statistics(layer):
        warn_of_missing_statistics(_called_from_outside(layer), layer)


def warn_of_missing_statistics(model: nn.Module, layer: BalNormLayer | None = None) -> None:
    """Warn once for all layers of a model without statistics (``layer`` is one), unless they have warned before."""
    layers: dict[str, BalNormLayer] = {
        name: cast("BalNormLayer", module)
        for name, module in model.named_modules()
        if hasattr(module, "_warned")  # as only balanced layers have
    }
    empty = {name: each for name, each in layers.items() if each is layer or has_no_statistics(each)}
    if all(NO_STATISTICS in each._warned for each in empty.values()):
        return
    for each in empty.values():
        each._warned.add(NO_STATISTICS)
    if list(layers) == [""]:
        subject = f"{model!r} has"
    else:
        which = f"all {len(layers)}" if len(empty) == len(layers) else f"{len(empty)} of {len(layers)}"
        first = f"({next(iter(empty))}{', ...' if len(empty) > 1 else ''})"
        subject = f"{which} balanced layers of this {type(model).__name__} {first} have"
    warnings.warn(NO_STATISTICS.format(subject), BalNormWarning, stacklevel=3)


def _called_from_outside(layer: BalNormLayer) -> nn.Module:
    """The module whose call led to that of a layer, from Python's stack: a layer does not know its model."""
    outermost: nn.Module = layer
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _CALL and isinstance(caller := frame.f_locals.get("self"), nn.Module):
            outermost = caller
        frame = frame.f_back
    return outermost


def refuse_quantised(layer: BalNormLayer, weight: object) -> None:
    if _is_of_torchao(weight):
        raise TypeError(f"a quantised weight cannot be balanced: {FOLD} ({type(layer).__name__})")


def refuse_successor(layer: BalNormLayer, module: object) -> None:
    """Refuse a module that is about to replace a layer, if it would compute with the raw weight."""
    if _is_of_torchao(module):
        raise TypeError(
            f"a {type(module).__name__} of torchao cannot replace a {type(layer).__name__}, because it would use the "
            f"weight without balancing it: {FOLD}, or leave this layer out with a filter function"
        )


def _is_of_torchao(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torchao"


def compare_forms(
    layer: BalNormLayer, name: str, loaded: Sequence[int], own: Sequence[int], allowed: Mapping[str, Sequence[object]]
) -> None:
    """Warn if a state dict comes from a layer that computes something else."""
    forms = zip(allowed.items(), loaded, own, strict=True)
    differences = {option: (values, there, here) for (option, values), there, here in forms if there != here}
    if "shift" in differences:
        differences.pop("one_pass", None)  # which means nothing without the shift
    for option, (values, there, here) in differences.items():
        was = repr(values[there]) if 0 <= there < len(values) else f"unknown ({there})"
        message = f"{{}} has {option}={values[here]!r}, and the loaded state was trained with {option}={was}"
        warn(layer, f"{message}: its outputs will differ. Make the layer with {option}={was}", name or None)
