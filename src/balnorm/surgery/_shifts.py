"""Move what the norms of a pre-activation network added into the layers before them.

Such a norm and the activation behind it turn a sum h into relu(a (h - mean) / std + b), which is a / std times
relu(h + t) with t = b std / a - mean. So the norm can go without loss if the layers that add to h add t as well: the
factor belongs to the weights behind it. The next norm of the same sum wants another t; the layer that was added in
between makes the difference, and the last one makes up for what is left, so that nobody else sees any of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from balnorm.surgery._attribution import is_norm_act
from balnorm.surgery._decisions import Balanced, Decision, Place, Removed
from balnorm.surgery._flow import Call, Flow, canonical
from balnorm.surgery._model import in_double_precision

__all__ = ["Shifts", "move_shifts"]

# What a constant for each channel passes unchanged, and what a positive factor does.
_KEEPS_SHIFTS = {"identity", "dropout", "contiguous", "clone"}
_KEEPS_FACTORS = {*_KEEPS_SHIFTS, "relu", "leakyrelu", "prelu", "maxpool", "avgpool", "pad"}
_FURTHEST = 3.0  # standard deviations: an input shifted by more is on, or off, for nearly all samples


class Shifts(NamedTuple):
    """By layer; one that is not here has none."""

    added: dict[nn.Module, Tensor]
    """What its outputs have to be more than they were, (D,)."""
    factors: dict[nn.Module, Tensor]
    """What its inputs were larger by, (C,)."""


def move_shifts(
    decisions: Mapping[nn.Module, Decision], flow: Flow, without_bias: Collection[nn.Module] = ()
) -> Shifts:
    """Where the shifts and factors of the norms go that are removed for what they feed, as far as possible.

    Layers ``without_bias`` cannot add anything.
    """
    norms = {
        norm: decision.layers
        for norm, decision in decisions.items()
        if isinstance(decision, Removed) and decision.place is Place.FEEDS and _commutes(norm, decision.layers, flow)
    }
    unmoved = set(without_bias)
    while norms:
        added = _added(norms, decisions, flow, unmoved)
        if not isinstance(added, set):
            factors = {layer: _factor_and_shift(norm)[0] for norm, layers in norms.items() for layer in layers}
            return Shifts(added, factors)
        unmoved |= added
    return Shifts({}, {})


def _added(
    norms: Collection[nn.Module], decisions: Mapping[nn.Module, Decision], flow: Flow, unmoved: Collection[nn.Module]
) -> dict[nn.Module, Tensor] | set[nn.Module]:
    """What each layer has to add; or layers that must add nothing, since it would reach something other than a norm."""
    added, settled = dict[nn.Module, Tensor](), set[nn.Module](unmoved)
    for call in flow.calls:
        if _passes_shifts_on(call):
            continue
        for source in call.inputs:
            layers = _layers_of(source, decisions, flow)
            there = [count * added[layer] for layer, count in layers.items() if layer in added]
            free = [layer for layer, count in layers.items() if layer not in settled and count == 1]
            settled.update(layers)
            if call.module in norms:
                wanted = _factor_and_shift(call.module)[1]
            elif there:
                wanted = torch.zeros_like(there[0])
            else:
                continue
            fitting = [layer for layer in free if getattr(layer, "out_channels", None) == len(wanted)]
            if fitting:
                added[fitting[-1]] = wanted - sum(there)
            elif call.module not in norms:
                return set(layers)
    return added


def _layers_of(call: Call, decisions: Mapping[nn.Module, Decision], flow: Flow) -> Counter[nn.Module]:
    """The balanced layers whose outputs add up to this one, and how often each does; in the order of the flow."""
    found, steps = Counter[nn.Module](), [call]
    while steps:
        step = steps.pop()
        decision = decisions.get(step.module) if step.module is not None else None
        if _passes_shifts_on(step):
            steps += step.inputs
        elif isinstance(decision, Removed) and decision.place is Place.FOLLOWS and len(decision.layers) == 1:
            found[decision.layers[0]] += len(flow.by_module[decision.layers[0]])
        elif step.module is not None and isinstance(decision, Balanced) and decision.place is not Place.FOLLOWS:
            found[step.module] += len(flow.by_module[step.module])
    return Counter({layer: found[layer] for layer in sorted(found, key=lambda it: flow.by_module[it][0].order)})


def _passes_shifts_on(call: Call) -> bool:
    # A sum with a single input adds a number to it, or it to itself.
    return call.name in _KEEPS_SHIFTS or (call.name == "add" and len(call.inputs) > 1)


def _commutes(norm: nn.Module, layers: tuple[nn.Module, ...], flow: Flow) -> bool:
    """Whether a factor of the norm's output can be moved into the weights of the layers that it feeds."""
    if not isinstance(norm, _BatchNorm) or norm.running_mean is None or len(flow.by_module[norm]) > 1:
        return False
    if not all(isinstance(layer, (nn.Conv1d, nn.Conv2d)) and len(flow.by_module[layer]) == 1 for layer in layers):
        return False
    inside = [canonical(type(getattr(norm, name)).__name__) for name in ("drop", "act")] if is_norm_act(norm) else []
    steps = [user for call in flow.by_module[norm] for user in call.users]
    for step in steps:  # and those that are found on the way
        if step.module not in layers:
            inside.append(step.name)
            steps += step.users
    return _KEEPS_FACTORS.issuperset(inside)


def _factor_and_shift(norm: nn.Module | None) -> tuple[Tensor, Tensor]:
    """The a / std and t of a norm in eval mode. A factor that is not positive cannot be moved, and counts as 0."""
    assert isinstance(norm, _BatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, std = in_double_precision(norm.running_mean), (in_double_precision(norm.running_var) + norm.eps).sqrt()
    a = torch.ones_like(mean) if norm.weight is None else in_double_precision(norm.weight.detach())
    b = torch.zeros_like(mean) if norm.bias is None else in_double_precision(norm.bias.detach())
    shift = (b / a.clamp(min=torch.finfo(a.dtype).tiny)).nan_to_num().clamp(-_FURTHEST, _FURTHEST)
    return a.clamp(min=0.0) / std, shift * std - mean
