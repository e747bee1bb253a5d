"""Set the output scales of balanced layers from a batch of data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from balnorm._checks import warn
from balnorm._core import function
from balnorm.layers import BalNormLayer, layer_geometry
from balnorm.surgery._model import in_double_precision, input_of_batch, uncompiled, undisturbed

__all__ = ["balanced_output", "before_each_layer", "scale_to_data"]


def scale_to_data(model: nn.Module, batch: Any) -> dict[str, float]:
    """Measure the ``output_scale`` of every balanced layer on a batch, so that its outputs have variance 1.

    The default, ``output_scale="unit_variance"``, assumes inputs like rectified Gaussians. Where means are large
    compared with deviations, as behind a sigmoid or softplus, outputs are far too small and the network does not train.
    This function sets each layer's scale in the order of the data flow, in one forward pass. It does not change gains,
    biases, weights or statistics. Call it once, before training, and before you average weights or wrap the model in
    DDP; the state dict contains the scales. If torch.distributed is initialised, all processes get the same scales,
    from all their batches together.

    With ``centred=True`` it is hardly ever needed: the default scale then fits almost any input. Where most taps of a
    kernel meet padding (3x3 kernels on single pixels), it made training less stable.

    Args:
        model: any module with balanced layers.
        batch: a few hundred samples, as in training: a tensor, or a tuple or list that starts with one.

    Returns:
        The scale of each layer by its name. A layer that the batch does not reach keeps its scale and is left out.

    Example:
        >>> from balnorm import BalNormConv2d
        >>> model = nn.Sequential(BalNormConv2d(3, 16, 3), nn.Sigmoid(), BalNormConv2d(16, 16, 3))
        >>> x = torch.rand(8, 3, 10, 10)
        >>> sorted(scale_to_data(model, x))
        ['0', '2']
        >>> round(model(x).var().item(), 1)
        1.0
    """
    model = uncompiled(model)
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, BalNormLayer)}
    scales: dict[BalNormLayer, Tensor] = {}

    def measure(layer: BalNormLayer, x: Tensor, output_size: Any) -> None:
        z = in_double_precision(balanced_output(layer, x, output_size))
        sums = torch.stack([z.sum(), z.square().sum(), z.new_tensor(z.numel())])
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        mean, square = (sums[:2] / sums[2]).unbind()
        std = (square - mean.square()).clamp(min=0).sqrt()
        if std.isfinite() and std > 0:
            layer.output_scale.div_(std.to(layer.output_scale))
            scales[layer] = layer.output_scale.clone()
        else:
            warn(layer, "{} gives the same output for every input of this batch: its scale stays", names[layer])

    with undisturbed(model), before_each_layer(model, names, measure):
        model(input_of_batch(batch, model))
    for layer, scale in scales.items():
        layer.output_scale.copy_(scale)
    return {names[layer]: scale.mean().item() for layer, scale in scales.items()}


@contextmanager
def before_each_layer(
    model: nn.Module, layers: Iterable[BalNormLayer], action: Callable[[BalNormLayer, Tensor, Any], None]
) -> Iterator[None]:
    """Call ``action(layer, input, output_size)`` before the first call of each of the layers, without gradients.

    They compute as in training, with the mass of the batch unless their statistics are frozen; the rest of the model
    computes as in eval mode.
    """
    seen = set[nn.Module]()

    def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(layer, BalNormLayer)
        if layer not in seen:
            seen.add(layer)
            x = args[0] if args else kwargs["input"]
            action(layer, x, args[1] if len(args) > 1 else kwargs.get("output_size"))

    model.eval()
    with torch.no_grad(), ExitStack() as hooks:
        for layer in layers:
            layer.train()
            hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def balanced_output(layer: BalNormLayer, x: Tensor, output_size: Any = None) -> Tensor:
    """The output of a layer for a batch with its output scale, but with gains of 1 and no bias."""
    geometry, ones, frozen = layer_geometry(layer, x, output_size), torch.ones_like(layer.gain), layer.stats_frozen
    running = (layer.running_mean, layer.running_mass, None) if frozen else (None, None, None)
    scale = layer.output_scale
    return function.balanced_conv(x, layer.weight, None, ones, scale, geometry, layer.options, not frozen, *running)
