"""Fold balanced layers into plain ones."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from balnorm._checks import HAS_HOOKS, warn, warn_of_missing_statistics
from balnorm.activations import LeanActivation
from balnorm.channels import ChannelAffine, ChannelCentre
from balnorm.layers import BALANCED, BalNormLayer
from balnorm.surgery._convert import with_activation
from balnorm.surgery._decisions import Removed, explain, foldable_norms, is_batch_norm, is_norm_act
from balnorm.surgery._exact import FactorAndShift
from balnorm.surgery._flow import Flow, traced
from balnorm.surgery._model import (
    ModelT,
    in_double_precision,
    refuse_wrapped,
    replace_modules,
    tensors_in,
    undisturbed,
)

__all__ = ["fold"]

logger = logging.getLogger(__name__)


def fold(model: ModelT, *, inplace: bool = False) -> ModelT:
    """Replace every balanced layer by the plain torch layer with the same output in eval mode.

    A BatchNorm that is left in the model becomes part of the convolution that it follows, if nothing else reads the
    convolution's output. A :class:`~balnorm.ChannelAffine` becomes part of the convolution or linear layer that it
    feeds, if that one alone reads it and does not pad; otherwise it becomes a depthwise 1x1 convolution. A
    :class:`~balnorm.ChannelCentre` may also become part of the layer that feeds it, if nothing else reads that layer's
    output. Activations of :mod:`balnorm.activations` become torch's own.

    You can use and unpickle the result without balnorm, and it costs what an unnormalised network costs. Its
    weights are balanced for the running statistics (see :func:`update_stats`). It is for inference: trained
    further, it would be a network without normalisation. At level INFO, the log names what is folded, and says why
    a BatchNorm stays. Hooks of the layers are lost, with a warning.

    Args:
        model: any module; one with neither balanced layers nor BatchNorms is returned unchanged.
        inplace: change ``model`` itself, not a copy.

    Example:
        >>> from balnorm import BalNormConv2d
        >>> model = nn.Sequential(BalNormConv2d(3, 8, 3), nn.ReLU()).eval()
        >>> fold(model)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
        )
    """
    refuse_wrapped(model, "fold")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BalNormLayer)}
    for name, layer in layers.items():
        if layer.running_mass is None:
            raise ValueError(
                f"{name or 'the layer'} has track_running_stats=False: its weight depends on each batch, "
                "and cannot be folded"
            )
        hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
        # The hooks of torch's own pruning and weight normalisation have already changed the weight.
        if not all(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
            warn(layer, HAS_HOOKS, name)
    warn_of_missing_statistics(model)  # once, and not for every layer
    if layers:
        logger.info("folding %d layers: %s", len(layers), ", ".join(layers))
    plain: dict[nn.Module, nn.Module] = {layer: layer.fuse() for layer in layers.values()}
    plain |= {module: module.fuse() for module in model.modules() if isinstance(module, LeanActivation)}
    constant = {
        module: module.fuse() if isinstance(module, ChannelCentre) else module
        for module in model.modules()
        if isinstance(module, ChannelAffine | ChannelCentre)
    }
    norms = any(is_batch_norm(module) for module in model.modules())
    flow = _flow_of(model) if constant or norms else Flow()
    for module, affine in constant.items():
        following, preceding = (_neighbour(flow, module, after=after) for after in (True, False))
        if following is not None and _takes_any_factor(following, affine.axes):
            plain[following] = _with_factor(plain.get(following, following), affine)
            plain[module] = nn.Identity().train(module.training)
        elif preceding is not None and isinstance(module, ChannelCentre) and _is_convolution(preceding, affine.axes):
            before = plain.get(preceding, preceding)
            plain[preceding] = _scaled_and_shifted(before, affine.factor, affine.bias)
            plain[module] = nn.Identity().train(module.training)
        else:
            plain[module] = _depthwise(affine)
    if norms:
        _fold_norms(model, flow, plain)
    if inplace:
        return replace_modules(model, plain)
    # The copy gets the plain layers right away: balanced ones need not be copied first.
    memo: dict[int, Any] = {id(layer): folded for layer, folded in plain.items()}
    # Nor can outputs of the last step be copied, which a model may keep: deepcopy refuses tensors with a history.
    for owner in model.modules():
        kept = [value for name, value in vars(owner).items() if not name.startswith("_")]
        memo |= {id(tensor): tensor.detach().clone() for tensor in tensors_in(kept) if not tensor.is_leaf}
    return copy.deepcopy(model, memo)


def _fold_norms(model: nn.Module, flow: Flow, plain: dict[nn.Module, nn.Module]) -> None:
    """Add to ``plain`` the layers that have taken in the BatchNorms that follow them, and what is left of the norms."""
    names = {module: name for name, module in model.named_modules()}
    folded = list[str]()
    for norm, decision in foldable_norms(model, flow).items():
        if isinstance(decision, Removed):
            factors = FactorAndShift.of(norm, norm.running_mean)  # type: ignore[arg-type]  # which it has
            for layer in decision.layers:
                before = plain.get(layer, layer)
                plain[layer] = _scaled_and_shifted(before, factors.weight / factors.deviation, factors.shift)
            rest = with_activation(norm, nn.Identity()) if is_norm_act(norm) else nn.Identity().train(norm.training)
            plain[norm] = copy.deepcopy(rest, {id(module): made for module, made in plain.items()})
            folded.append(names[norm])
        else:
            why = explain(decision, names) if flow.calls else "the model cannot be traced symbolically"
            logger.info("not folding %s: %s", names[norm], why)
    if folded:
        logger.info("folding %d BatchNorms: %s", len(folded), ", ".join(folded))


def _flow_of(model: nn.Module) -> Flow:
    """The data flow; empty if the model cannot be traced."""
    try:
        with undisturbed(model):
            return traced(model)
    except Exception:  # symbolic tracing runs the model's own code, which can raise anything
        return Flow()


def _neighbour(flow: Flow, module: nn.Module, *, after: bool) -> nn.Module | None:
    """The module that takes each output of ``module``, or gives each of its inputs, if the two see nothing else."""
    calls = flow.by_module.get(module, [])
    modules = {other.module for call in calls for other in (call.users if after else call.inputs)}
    other = modules.pop() if len(modules) == 1 else None
    if other is None or other in flow.used_directly:
        return None
    met = [call.inputs if after else call.users for call in flow.by_module[other]]
    first, second = (module, other) if after else (other, module)
    watched = first._forward_hooks or second._forward_pre_hooks
    return other if met == [[call] for call in calls] and not watched else None


def _is_convolution(layer: nn.Module, axes: int) -> bool:
    """Whether this is a convolution or a linear layer whose output channels are those of a module with ``axes``."""
    known = isinstance(layer, BalNormLayer) or type(layer) in BALANCED
    return known and (axes == 0 or not isinstance(layer, nn.Linear))  # otherwise its features are not the channels


def _takes_any_factor(layer: nn.Module, axes: int) -> bool:
    """Whether a factor and a shift of the input can become part of the weight and the bias."""
    if not _is_convolution(layer, axes) or isinstance(layer, nn.Linear):
        return _is_convolution(layer, axes)
    padding = layer.padding
    pads = padding != "valid" if isinstance(padding, str) else any(padding)  # type: ignore[arg-type]
    return not layer.transposed and not (pads and layer.padding_mode == "zeros")


@torch.no_grad()
def _with_factor(layer: nn.Module, affine: ChannelAffine) -> nn.Module:
    """A plain layer that computes what ``layer`` computes after ``affine``."""
    assert isinstance(layer, _ConvNd | nn.Linear)
    weight, groups = in_double_precision(layer.weight), getattr(layer, "groups", 1)
    factor, shift = (in_double_precision(values) for values in (affine.factor, affine.bias))
    by_output = (groups, weight.shape[0] // groups, weight.shape[1], -1)
    weight, by_input = weight.reshape(by_output), (groups, 1, by_output[2], 1)
    bias = (weight * shift.view(by_input)).sum((2, 3)).flatten()
    if layer.bias is not None:
        bias = bias + in_double_precision(layer.bias)
    merged = copy.deepcopy(layer)
    merged.weight.copy_((weight * factor.view(by_input)).view_as(layer.weight))
    merged.bias = nn.Parameter(bias.to(layer.weight), layer.weight.requires_grad)
    return merged


@torch.no_grad()
def _scaled_and_shifted(layer: nn.Module, factor: Tensor, shift: Tensor) -> nn.Module:
    """A plain layer that computes what ``layer`` does, times a factor for each output channel and plus a shift."""
    assert isinstance(layer, _ConvNd | nn.Linear)
    factor, shift, weight = (in_double_precision(values) for values in (factor, shift, layer.weight))
    if layer.bias is not None:
        shift = shift + factor * in_double_precision(layer.bias)
    groups, inputs = 1, 1
    if isinstance(layer, _ConvNd) and layer.transposed:  # the second dimension has the outputs of one group
        groups, inputs = layer.groups, layer.in_channels // layer.groups
    by_output = weight.reshape(groups, inputs, len(factor) // groups, -1)
    merged = copy.deepcopy(layer)
    merged.weight.copy_((by_output * factor.view(groups, 1, -1, 1)).view_as(layer.weight))
    merged.bias = nn.Parameter(shift.to(layer.weight), layer.weight.requires_grad)
    return merged


def _depthwise(affine: ChannelAffine) -> nn.Module:
    """A factor and a shift for each channel as torch's own layers."""
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[max(1, affine.axes)]
    channels, learns = affine.channels, affine.bias.requires_grad
    layer = kind(channels, channels, 1, groups=channels, device="meta")
    layer.weight = nn.Parameter(affine.factor.detach().clone().view(layer.weight.shape), requires_grad=learns)
    layer.bias = nn.Parameter(affine.bias.detach().clone(), requires_grad=learns)
    plain = layer if affine.axes else nn.Sequential(nn.Unflatten(1, (channels, 1)), layer, nn.Flatten())
    return plain.train(affine.training)
