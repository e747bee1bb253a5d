"""Match the layers of a converted network to those of the trained one, channel by channel, without labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from balnorm.core import conv
from balnorm.layers import BalNormLayer, layer_geometry, layer_plan
from balnorm.surgery._decisions import Balanced, Decision, Place
from balnorm.surgery._model import in_double_precision, input_of_batch, undisturbed
from balnorm.surgery._scale import balanced_output, before_each_layer
from balnorm.surgery._shifts import Shifts

__all__ = ["match", "measure", "one_batch"]

_AT_ONCE = 64  # samples whose inputs are laid out as a matrix at a time
_POSITIONS = 64  # of every sample that are looked at
_LARGEST = 8192  # weights of an output channel: the covariance has as many rows
_RIDGE = 0.1  # how strongly weights are held to what they were, relative to the variance of the inputs


class Target(NamedTuple):
    """What a layer is to give: what it gave, with the norm that followed it, and what is moved into it."""

    mean: Tensor
    """Of each output channel."""
    std: Tensor
    """Of each output channel; negative where the norm flipped its sign."""
    scale: Tensor
    """What the norm multiplied each output channel with, or ones."""
    factor: Tensor | None
    """What its input channels were larger by, because of a norm that is gone; ``None`` for ones."""
    samples: Tensor
    """Outputs at some positions of every sample, (N, positions, D), in double precision."""


def one_batch(calibrate: Any, model: nn.Module) -> Tensor:
    """The input of a batch, or of all batches of a loader together."""
    items = calibrate if isinstance(calibrate, (tuple, list)) else [calibrate]
    first = items[0] if items else calibrate
    if len(items) > 1 and all(
        isinstance(it, Tensor) and it.dim() > 1 and it.shape[1:] == first.shape[1:] for it in items
    ):
        raise ValueError(
            "calibrate is several tensors alike: join them with torch.cat if they are batches, or give one"
        )
    if isinstance(first, Tensor):
        return input_of_batch(first, model)
    if not isinstance(calibrate, Iterable):
        raise TypeError(f"calibrate must be a batch or a loader of batches, got a {type(calibrate).__name__}")
    batches = [input_of_batch(batch, model) for batch in calibrate]
    if not batches:
        raise ValueError("calibrate has no batch: is the loader empty or used up?")
    return torch.cat(batches)


def measure(
    model: nn.Module, decisions: Mapping[nn.Module, Decision], shifts: Shifts, x: Tensor
) -> dict[nn.Module, Target]:
    """The outputs in eval mode of every layer that will be balanced, behind the norm that follows it, by channel."""
    targets: dict[nn.Module, Target] = {}

    def behind(layer: nn.Module, norm: _BatchNorm | None) -> Any:
        # The norm is applied to the layer's output here: between the two may be a pool, which changes the positions
        # and, being an average, not the result; and one norm may follow several layers.
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            output = _channels_second(layer, output)
            mean, std = _statistics(output)
            scale, shift = _scale_and_shift(norm, mean, std)
            shift = shift + shifts.added.get(layer, 0.0)
            factor, samples = shifts.factors.get(layer), in_double_precision(_outputs(output)) * scale + shift
            targets.setdefault(layer, Target(mean * scale + shift, std * scale, scale, factor, samples))

        return layer.register_forward_hook(hook)

    with undisturbed(model), torch.no_grad(), ExitStack() as hooks:
        for layer, decision in decisions.items():
            if isinstance(decision, Balanced):
                follows = decision.place is Place.FOLLOWS and isinstance(decision.norm, _BatchNorm)
                hooks.enter_context(behind(layer, decision.norm if follows else None))  # type: ignore[arg-type]
        model.eval()
        model(x)
    return targets


def _scale_and_shift(norm: _BatchNorm | None, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """What a norm does in eval mode to channels of this mean and standard deviation."""
    if norm is None:
        return torch.ones_like(mean), torch.zeros_like(mean)
    if norm.running_mean is not None and norm.running_var is not None:
        centre = in_double_precision(norm.running_mean)
        width = (in_double_precision(norm.running_var) + norm.eps).sqrt()
    else:
        centre, width = mean, (std.square() + norm.eps).sqrt()
    scale = 1.0 / width if norm.weight is None else in_double_precision(norm.weight) / width
    return scale, -centre * scale if norm.bias is None else in_double_precision(norm.bias) - centre * scale


def match(model: nn.Module, targets: Mapping[BalNormLayer, Target], x: Tensor) -> dict[BalNormLayer, str]:
    """Let each balanced layer, in the order of the data flow, give what its target gave, as nearly as it can.

    Every channel gets the mean and the standard deviation of its target, by gain and bias; where the layer's inputs can
    be laid out as a matrix, it gets the balanced weight of least squared error instead. Either way the layer's input is
    that of the converted network, so that a layer makes up for what those before it have changed. Balanced layers
    without a target, which the model had before, stay as they are.

    Returns:
        What was matched, for every layer that the batch reached.
    """
    found: dict[BalNormLayer, dict[str, Tensor]] = {}
    matched: dict[BalNormLayer, str] = {}
    users = Counter(layer.weight for layer in model.modules() if isinstance(layer, BalNormLayer))

    def action(layer: BalNormLayer, input: Tensor, output_size: Any) -> None:
        values = {}
        mass = conv.input_mass(input, layer_plan(layer, input, output_size))
        if layer.running_mass is not None:
            values["running_mass"] = mass
        target = targets[layer]
        mean, std = _statistics(_channels_second(layer, balanced_output(layer, input, output_size)))
        alive = std > 0
        gain = torch.where(alive, target.std / torch.where(alive, std, 1.0), in_double_precision(layer.gain))
        values["gain"] = gain
        matched[layer] = "deviation"
        if layer.bias is not None:
            values["bias"] = target.mean - gain * mean
            matched[layer] = "mean and deviation"
            if _has_matrix(layer, input) and users[layer.weight] == 1:
                _fit(layer, input, in_double_precision(mass), target, values)
                matched[layer] = "outputs"
        found[layer] = values
        _put(layer, values)

    with undisturbed(model), before_each_layer(model, targets, action):
        model(x)
    for layer, values in found.items():
        _put(layer, values)
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(1)
    return matched


def _fit(layer: BalNormLayer, input: Tensor, mass: Tensor, target: Target, values: dict[str, Tensor]) -> None:
    """The weight v and bias of least squared error among the balanced ones, sum of m v = 0, into ``values``.

    Balancing by a shift of all weights, as a layer does, disturbs the output by the sum of all of a window's inputs,
    which varies a lot. Among the v that are balanced, the one nearest in output lies along H^-1 m, where H is the
    covariance of the inputs.
    """
    groups, outputs = layer.groups, layer.weight.shape[0]
    weight = in_double_precision(layer.weight).reshape(groups, outputs // groups, -1)
    count, size = 0, weight.shape[2]
    sums, y_sums = weight.new_zeros(groups, size), weight.new_zeros(groups, outputs // groups)
    squares, products = weight.new_zeros(groups, size, size), weight.new_zeros(groups, size, outputs // groups)
    for some, samples in zip(torch.split(input, _AT_ONCE), torch.split(target.samples, _AT_ONCE), strict=True):
        x = in_double_precision(_inputs(layer, some))
        y = samples.flatten(0, 1).view(-1, groups, outputs // groups).movedim(0, 1)
        x = x.view(-1, groups, size).movedim(0, 1)  # (groups, rows, size)
        count += x.shape[1]
        sums, y_sums = sums + x.sum(1), y_sums + y.sum(1)
        squares, products = squares + x.mT @ x, products + x.mT @ y
    mean, y_mean = sums / count, y_sums / count
    covariance = squares / count - mean[:, :, None] * mean[:, None]
    ridge = _RIDGE * covariance.diagonal(dim1=1, dim2=2).mean(1).clamp(min=torch.finfo(torch.float64).tiny)
    covariance.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    prior = weight * target.scale.view(groups, -1, 1)
    if target.factor is not None:
        by_input = prior.view(groups, outputs // groups, target.factor.numel() // groups, -1)
        prior = (by_input * target.factor.view(groups, 1, -1, 1)).flatten(2)
    wanted = products / count - mean[:, :, None] * y_mean[:, None] + ridge[:, None, None] * prior.mT
    m = mass.expand(1, -1, *layer.weight.shape[2:]).reshape(groups, size, 1)
    solved, failed = torch.linalg.solve_ex(covariance, torch.cat([wanted, m], 2))
    fitted, along = solved[:, :, :-1].mT, solved[:, :, -1:]
    fitted = fitted - (fitted @ m) / (m.mT @ along) * along.mT
    positive = (fitted.clamp(min=0) * m.mT).sum(2).flatten()
    bias = (y_mean - (fitted * mean[:, None]).sum(2)).flatten()
    # The length of the raw weight is free. It stays, so that learning rates mean what they meant.
    raw = fitted * (weight.norm(dim=2, keepdim=True) / fitted.norm(dim=2, keepdim=True))
    solvable = (failed == 0).repeat_interleave(outputs // groups)
    good = positive.isfinite() & (positive > 0) & raw.isfinite().all(2).flatten() & solvable
    values["weight"] = torch.where(good.view(groups, -1, 1), raw, weight).view_as(layer.weight)
    values["gain"] = torch.where(good, positive / in_double_precision(layer.output_scale), values["gain"])
    values["bias"] = torch.where(good, bias, values["bias"])


def _has_matrix(layer: BalNormLayer, input: Tensor) -> bool:
    """Whether a layer's inputs can be laid out as a matrix, a row for each output position, that is not too large."""
    axes = layer.weight.dim() - 2
    return not layer.transposed and axes <= 2 and input.dim() == axes + 2 and layer.weight[0].numel() <= _LARGEST


def _inputs(layer: BalNormLayer, input: Tensor) -> Tensor:
    """The inputs that the weight meets, for some positions of every sample: (N * positions, C * taps)."""
    geometry = layer_geometry(layer)
    if not geometry.kernel:
        return input
    x = geometry.pad(input)
    kernel, dilation, stride = geometry.kernel, geometry.dilation, geometry.stride
    if len(kernel) == 1:
        x, kernel, dilation, stride = x[..., None], (*kernel, 1), (*dilation, 1), (*stride, 1)
    windows = F.unfold(x, kernel, dilation, stride=stride)
    return windows[:, :, _positions(windows.shape[2], windows.device)].mT.flatten(0, 1)


def _channels_second(layer: nn.Module, output: Tensor) -> Tensor:
    """The output with its channels on the second axis: those of a linear layer are on the last."""
    return output.flatten(0, -2) if isinstance(layer, nn.Linear) else output


def _outputs(output: Tensor) -> Tensor:
    """The outputs at the same positions: (N, positions, D)."""
    if output.dim() == 2:
        return output.detach()[:, None]
    output = output.detach().flatten(2)
    return output[:, :, _positions(output.shape[2], output.device)].mT


def _positions(number: int, device: torch.device) -> Tensor:
    """Some of this many positions, always the same."""
    generator = torch.Generator().manual_seed(number)
    return torch.randperm(number, generator=generator, device="cpu")[:_POSITIONS].to(device)


def _put(layer: BalNormLayer, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            getattr(layer, name).copy_(value)


def _statistics(output: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel (the second axis), in double precision."""
    channels = in_double_precision(output.detach()).movedim(1, 0).flatten(1)
    return channels.mean(1), channels.std(1, correction=0)
