"""Trained networks: the balanced layers compute what the layers and their norms computed in eval mode.

A layer with weight w, and a norm after it that multiplies by k = weight / deviation, are together the balanced layer
without the shift that has the same w, gain = the norm's weight and output_scale = M c / deviation, for any statistics
mu and a of its input: its effective weight, gain output_scale w / (c M), is then k w. Images supply statistics that the
layer can be trained with, and show that both networks give the same outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from balnorm._core.method import contribution
from balnorm.channels import ChannelAffine
from balnorm.layers import BalNormLayer
from balnorm.surgery._decisions import Affine, Balanced, Decision, Place, Removed
from balnorm.surgery._model import in_double_precision, tensors_in, undisturbed
from balnorm.surgery._statistics import StatisticsSum

__all__ = ["FactorAndShift", "Original", "Proof", "is_exact"]

_COMPARED = 256  # keep the outputs of this many samples for the comparison
_SMALLEST_MASS = 1e-3  # of the mean: at a mass of 0, a channel that is dead on these images would stay dead
_BOUND, _BOUNDS = 1e-3, {torch.bfloat16: 0.2, torch.float16: 0.03}


def is_exact(decision: Decision) -> bool:
    """Whether the replacement of a module must compute the same as the module."""
    return isinstance(decision, Affine) or (isinstance(decision, Balanced) and decision.exact)


class Proof(NamedTuple):
    """How far the outputs of the converted network are from the original's."""

    samples: int
    difference: float
    """The largest, relative to the largest output."""
    agreement: float | None
    """The share of samples with the same prediction, if the outputs look like logits."""

    def __str__(self) -> str:
        text = f"outputs of {self.samples} samples differ by at most {self.difference:.1e} of the largest"
        return text if self.agreement is None else f"{text}, {self.agreement:.1%} of the predictions are equal"


class FactorAndShift(NamedTuple):
    """A norm in eval mode, y = weight / deviation x + shift, in double precision."""

    weight: Tensor
    deviation: Tensor
    shift: Tensor

    @classmethod
    def of(cls, norm: nn.Module | None, like: Tensor) -> FactorAndShift:
        """Those of a norm; without one, 1 and 0."""
        ones = in_double_precision(torch.ones_like(like))
        if norm is None:
            return cls(ones, ones, 0 * ones)
        assert isinstance(norm, _NormBase)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        deviation = (in_double_precision(norm.running_var) + norm.eps).sqrt()
        weight = ones if norm.weight is None else in_double_precision(norm.weight.detach())
        bias = 0 * ones if norm.bias is None else in_double_precision(norm.bias.detach())
        return cls(weight, deviation, bias - in_double_precision(norm.running_mean) * weight / deviation)

    def apply(self, x: Tensor, channels: int = 1) -> Tensor:
        shape = [-1 if axis == channels % x.dim() else 1 for axis in range(x.dim())]
        return in_double_precision(x) * (self.weight / self.deviation).view(shape) + self.shift.view(shape)


class Original:
    """A trained network before its conversion: its statistics and outputs for some images, and its layers.

    Sets the modules ``new`` that will replace those of ``model`` to compute what those computed. Runs the model in eval
    mode, and does not change it.
    """

    def __init__(
        self,
        model: nn.Module,
        decisions: Mapping[nn.Module, Decision],
        new: Mapping[nn.Module, nn.Module],
        batches: Iterable[tuple[Any, ...]],
    ) -> None:
        self.new = {module: new[module] for module, decision in decisions.items() if is_exact(decision)}
        self.factors = dict[nn.Module, FactorAndShift]()
        """By the module that is replaced."""
        self.outputs = list[tuple[tuple[Any, ...], list[Tensor]]]()
        """Arguments of the network, and its outputs."""
        self.samples = 0
        self.is_whole = not any(
            (isinstance(decision, Balanced) and not decision.exact)
            or (isinstance(decision, Removed) and decision.place is Place.FEEDS)
            for decision in decisions.values()
        )
        """Whether no part of the network will be trained from scratch."""
        self.bound = max((_BOUNDS.get(parameter.dtype, _BOUND) for parameter in model.parameters()), default=_BOUND)

        sums = self._watch(model, batches)
        for old, layer in self.new.items():
            decision = decisions[old]
            if isinstance(layer, ChannelAffine):
                self.factors[old] = factors = FactorAndShift.of(old, layer.factor)
                _set_affine(layer, old, factors)
            elif isinstance(layer, BalNormLayer) and isinstance(decision, Balanced):
                norm = decision.norm if decision.place is Place.FOLLOWS else None
                self.factors[old] = factors = FactorAndShift.of(norm, layer.gain)
                _set_statistics(layer, *sums[old].result())
                _set_layer(layer, old.bias, factors, learns=_learns(old, norm))  # type: ignore[arg-type]

    def _watch(self, model: nn.Module, batches: Iterable[tuple[Any, ...]]) -> dict[nn.Module, StatisticsSum]:
        sums = {old: StatisticsSum(layer) for old, layer in self.new.items() if isinstance(layer, BalNormLayer)}

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            made = self.new[module]
            if isinstance(made, ChannelAffine):
                made.axes = output.dim() - 2
            else:
                sums[module].add_input(output, *args, **kwargs)

        with undisturbed(model), ExitStack() as hooks:
            for module in self.new:
                hooks.enter_context(module.register_forward_hook(look, with_kwargs=True, prepend=True))
            for arguments in batches:
                outputs = _outputs(model, arguments)
                if self.samples < _COMPARED:
                    self.outputs.append((arguments, outputs))
                    self.samples += _samples(arguments)
        return sums

    def compare(self, model: nn.Module) -> Proof | None:
        """Run the converted model on the same images, if its outputs must be the same."""
        if not self.is_whole:
            return None
        difference, largest, same = 0.0, 0.0, list[Tensor]()
        with undisturbed(model):
            for arguments, before in self.outputs:
                after = _outputs(model, arguments)
                if [output.shape for output in before] != [output.shape for output in after]:
                    return Proof(self.samples, math.inf, None)
                for expected, output in zip(before, after, strict=True):
                    difference = max(difference, _largest_difference(expected, output))
                    largest = max(largest, _largest(expected))
                if len(before) == 1 and before[0].dim() == 2 and before[0].shape[1] > 1:
                    same.append(before[0].argmax(1) == after[0].argmax(1))
        agreement = torch.cat(same).float().mean().item() if same else None
        return Proof(self.samples, difference / largest if largest else difference, agreement)

    def first_that_differs(self, model: nn.Module) -> nn.Module | None:
        """The first module (as it was before) whose replacement gives another output for the same input."""
        found, replaced = list[nn.Module](), {made: old for old, made in self.new.items()}

        def check(made: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            old = replaced[made]
            if isinstance(made, ChannelAffine):
                before = self.factors[old].apply(*args)
            else:
                before = self.factors[old].apply(old(*args, **kwargs), -1 if isinstance(old, nn.Linear) else 1)
            if _largest_difference(before, output) > self.bound * _largest(before):
                found.append(old)

        with undisturbed(model), ExitStack() as hooks:
            for made in replaced:
                hooks.enter_context(made.register_forward_hook(check, with_kwargs=True, prepend=True))
            for arguments, _ in self.outputs:
                _outputs(model, arguments)
        return found[0] if found else None


@torch.no_grad()
def _set_layer(layer: BalNormLayer, bias: Tensor | None, factors: FactorAndShift, *, learns: bool) -> None:
    """Make a layer with statistics compute what its weight, this bias and the norm with these factors computed."""
    assert layer.running_mass is not None
    total, c, _ = contribution(
        in_double_precision(layer.weight),
        in_double_precision(layer.running_mass),
        shift=False,
        one_pass=layer.options.one_pass,
        groups=layer.groups,
        transposed=layer.transposed,
    )
    weight, deviation, shift = factors
    # A kernel of zeros gives zeros at any scale: keep one with which it can learn.
    layer.output_scale.copy_(torch.where(c > 0, total * c / deviation, in_double_precision(layer.output_scale)))
    layer.gain.copy_(weight)
    folded = shift if bias is None else shift + weight / deviation * in_double_precision(bias)
    layer.bias = None  # so that the effective bias is right for the mean of the input
    folded = folded - in_double_precision(layer.effective_bias())
    layer.bias = nn.Parameter(folded.to(layer.weight.dtype).to(layer.weight.device), requires_grad=learns)


def _learns(layer: nn.Module, norm: nn.Module | None) -> bool:
    """Whether the shift of a layer and its norm was learned. A layer without a norm always gets one that is."""
    if norm is not None:
        return norm.bias is not None and norm.bias.requires_grad  # type: ignore[return-value]
    return layer.bias is None or layer.bias.requires_grad  # type: ignore[return-value]


def _set_statistics(layer: BalNormLayer, statistics: Tensor, batches: Tensor) -> None:
    mean, mass = statistics
    assert layer.running_mean is not None
    assert layer.running_mass is not None
    assert layer.num_batches_tracked is not None
    if batches and mass.any():  # otherwise there was no sample, or only zeros
        layer.running_mean.copy_(mean)
        layer.running_mass.copy_(mass.clamp(min=_SMALLEST_MASS * mass.mean()))
    # The first batch of fine-tuning should count as one of many.
    momentum = layer.options.momentum
    enough = 1 if momentum is None else math.ceil(1 / max(momentum, 1e-9))
    layer.num_batches_tracked.fill_(max(int(batches), enough))


@torch.no_grad()
def _set_affine(layer: ChannelAffine, norm: nn.Module, factors: FactorAndShift) -> None:
    layer.factor.copy_(factors.weight / factors.deviation)
    layer.bias.copy_(factors.shift)
    layer.bias.requires_grad_(_learns(norm, norm))


def _outputs(model: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    """All outputs in eval mode. The model may write into its arguments, so it gets copies."""
    arguments = tree_map_only(Tensor, torch.clone, arguments)
    with torch.no_grad():
        return [output for output in tensors_in(model.eval()(*arguments)) if output.is_floating_point()]


def _samples(arguments: tuple[Any, ...]) -> int:
    first = arguments[0]
    return len(first) if isinstance(first, list) or (isinstance(first, Tensor) and first.dim()) else 1


def _largest(tensor: Tensor) -> float:
    values = in_double_precision(tensor)
    return float(values[values.isfinite()].abs().max()) if values.isfinite().any() else 0.0


def _largest_difference(expected: Tensor, output: Tensor) -> float:
    if not torch.equal(expected.isfinite(), output.isfinite()):
        return math.inf
    return _largest(in_double_precision(output) - in_double_precision(expected))
