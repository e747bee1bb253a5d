"""Match the layers of a converted network to those of the trained one, channel by channel, without labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from balnorm.core import conv
from balnorm.layers import BalNormLayer, layer_plan
from balnorm.surgery._decisions import Balanced, Decision, Place
from balnorm.surgery._model import input_of_batch, undisturbed
from balnorm.surgery._scale import balanced_output, before_each_layer

__all__ = ["match", "measure", "one_batch"]


class Target(NamedTuple):
    """The mean and standard deviation that an output channel had (negative where the norm flipped its sign)."""

    mean: Tensor
    std: Tensor


def one_batch(calibrate: Any, model: nn.Module) -> Tensor:
    """The input of a batch, or of all batches of a loader together."""
    first = calibrate[0] if isinstance(calibrate, (tuple, list)) and calibrate else calibrate
    if isinstance(first, Tensor):
        return input_of_batch(first, model)
    if not isinstance(calibrate, Iterable):
        raise TypeError(f"calibrate must be a batch or a loader of batches, got a {type(calibrate).__name__}")
    batches = [input_of_batch(batch, model) for batch in calibrate]
    if not batches:
        raise ValueError("calibrate has no batch: is the loader empty or used up?")
    return torch.cat(batches)


def measure(model: nn.Module, decisions: Mapping[nn.Module, Decision], x: Tensor) -> dict[nn.Module, Target]:
    """The outputs in eval mode of every layer that will be balanced, behind the norm that follows it, by channel."""
    targets: dict[nn.Module, Target] = {}

    def behind_norm(layer: nn.Module, norm: _BatchNorm) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            mean, std = _statistics(args[0])
            if norm.running_mean is not None and norm.running_var is not None:
                centre, width = norm.running_mean.double(), (norm.running_var.double() + norm.eps).sqrt()
            else:
                centre, width = mean, (std.square() + norm.eps).sqrt()
            scale = 1.0 if norm.weight is None else norm.weight.double()
            shift = 0.0 if norm.bias is None else norm.bias.double()
            targets[layer] = Target((mean - centre) / width * scale + shift, std / width * scale)

        return norm.register_forward_pre_hook(hook)

    def behind_layer(layer: nn.Module) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            targets[layer] = Target(*_statistics(output))

        return layer.register_forward_hook(hook)

    handles = []
    for layer, decision in decisions.items():
        if isinstance(decision, Balanced):
            follows = decision.place is Place.FOLLOWS and isinstance(decision.norm, _BatchNorm)
            handles.append(behind_norm(layer, decision.norm) if follows else behind_layer(layer))  # type: ignore[arg-type]
    try:
        with undisturbed(model), torch.no_grad():
            model.eval()
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return targets


def match(model: nn.Module, targets: Mapping[BalNormLayer, Target], x: Tensor) -> None:
    """Set the gain, bias and running mass of each balanced layer to meet its target, in the order of the data flow."""
    found: dict[BalNormLayer, dict[str, Tensor]] = {}

    def action(layer: BalNormLayer, input: Tensor, output_size: Any) -> None:
        values = {}
        if layer.running_mass is not None:
            values["running_mass"] = conv.input_mass(input, layer_plan(layer, input, output_size))
        if layer in targets:
            mean, std = _statistics(balanced_output(layer, input, output_size))
            alive = std > 0
            gain = torch.where(alive, targets[layer].std / torch.where(alive, std, 1.0), layer.gain.double())
            values["gain"] = gain
            if layer.bias is not None:
                values["bias"] = targets[layer].mean - gain * mean
        found[layer] = values
        _put(layer, values)

    with undisturbed(model), before_each_layer(model, action):
        model(x)
    for layer, values in found.items():
        _put(layer, values)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(1)


def _put(layer: BalNormLayer, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name).copy_(value)


def _statistics(output: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel (the second axis), in double precision."""
    channels = output.detach().double().movedim(1, 0).flatten(1)
    return channels.mean(1), channels.std(1, correction=0)
