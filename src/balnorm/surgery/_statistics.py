"""The running statistics of a model's balanced layers: re-estimate them, freeze them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from balnorm._checks import ALL_FROZEN, BalNormWarning
from balnorm.channels import ChannelCentre
from balnorm.layers import BalNormLayer, layer_statistics
from balnorm.surgery._model import ModelT, input_of_batch, uncompiled, undisturbed, widest

__all__ = ["StatisticsSum", "freeze_stats", "unfreeze_stats", "update_stats"]

_Tracking = BalNormLayer | ChannelCentre
"""Layers with running statistics."""


def update_stats(
    loader: Iterable[Any], model: nn.Module, *, forward: Callable[[nn.Module, Any], object] | None = None
) -> None:
    """Re-estimate the running statistics of balanced layers and ChannelCentres, exactly, over the batches of a loader.

    Use it when the weights are not those of the training steps: averaged (EMA, SWA, schedule-free) or edited.
    Afterwards the running statistics are those of all samples together, whatever the sizes of the batches (a centred
    mass: the mean of those of the batches); if :mod:`torch.distributed` is initialised, those of all processes. The
    model runs in eval mode, but its balanced layers use each batch's own statistics, as in training. Layers with frozen
    statistics keep them. If an error occurs, no statistics change.

    It does not update BatchNorm layers in the same model: call :func:`torch.optim.swa_utils.update_bn` for them first.

    Args:
        loader: an iterable of batches: tensors, or tuples or lists whose first item is the model's input.
        model: any module, with or without ``AveragedModel`` around it.
        forward: runs the model on a batch of another kind, as in ``lambda model, batch: model(batch["image"])``; it
            must also move the batch to the model's device. Its result is not used.

    Example:
        >>> from balnorm import BalNormConv2d
        >>> model = nn.Sequential(BalNormConv2d(1, 4, 1), nn.ReLU())
        >>> update_stats([torch.full((2, 1, 5, 5), 1.0), torch.full((6, 1, 5, 5), 5.0)], model)
        >>> model[0].running_mass.item()
        4.0
    """
    model = uncompiled(model)
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, _Tracking) and layer.running_mean is not None and not layer.stats_frozen
    ]
    if not layers and any(isinstance(layer, _Tracking) and layer.stats_frozen for layer in model.modules()):
        warnings.warn(ALL_FROZEN, BalNormWarning, stacklevel=2)
    sums = {layer: StatisticsSum(layer) for layer in layers}
    with undisturbed(model), torch.no_grad(), ExitStack() as hooks:
        model.eval()
        for layer in layers:
            # Make the running statistics those of the latest batch: all of it, in this process alone.
            if isinstance(layer, BalNormLayer):
                layer.options = dataclasses.replace(
                    layer.options, momentum=1.0, stats_fraction=1.0, sync_stats=False, process_group=None
                )
            else:
                layer.momentum, layer.sync_stats = 1.0, False
            layer.train()
            hooks.enter_context(layer.register_forward_pre_hook(sums[layer].forget))
            hooks.enter_context(layer.register_forward_hook(sums[layer].add_tracked, prepend=True))
        for batch in loader:
            if forward is None:
                model(input_of_batch(batch, model, otherwise=": for others, give forward=..."))
            else:
                forward(model, batch)
        results = [(layer, *sums[layer].result(of_all_processes=True)) for layer in layers]
    if layers and all(int(batches) == 0 for _, _, batches in results):
        raise ValueError(
            "no batch reached a balanced layer, so the statistics are unchanged: is the loader empty or used up?"
        )
    for layer, statistics, batches in results:
        if batches:
            for buffer, values in zip(_buffers(layer), (*statistics, batches), strict=True):
                buffer.copy_(values)


def _buffers(layer: _Tracking) -> tuple[Tensor, ...]:
    """The running statistics, and the number of batches in them."""
    names = ("running_mean", "running_mass", "num_batches_tracked")
    return tuple(buffer for name in names if (buffer := layer._buffers.get(name)) is not None)


class StatisticsSum:
    """The statistics of many batches together: each batch's, weighted by the number of outputs it averages over."""

    def __init__(self, layer: _Tracking) -> None:
        *statistics, _ = _buffers(layer)
        device = statistics[0].device
        dtype = widest(device)
        self.layer, self.channels = layer, len(layer.gain if isinstance(layer, BalNormLayer) else layer.bias)
        self.sums = torch.zeros((len(statistics), *statistics[0].shape), dtype=dtype, device=device)
        self.outputs = torch.zeros((), dtype=dtype, device=device)
        self.batches = torch.zeros((), dtype=torch.long, device=device)

    def forget(self, layer: _Tracking, _: Any) -> None:
        layer.reset_running_stats()

    def add_tracked(self, layer: _Tracking, _: Any, output: Tensor) -> None:
        """Add what the layer has just tracked; it does not count a batch that is empty or not finite."""
        *statistics, batches = _buffers(layer)
        self._add(torch.stack(statistics), batches, output)

    def add_input(self, output: Tensor, input: Tensor, output_size: Sequence[int] | None = None) -> None:
        """Add what the layer would track of an input of the plain layer that it replaces."""
        assert isinstance(self.layer, BalNormLayer)
        options = dataclasses.replace(self.layer.options, stats_fraction=1.0)
        statistics = torch.stack(layer_statistics(self.layer, input, output_size, options=options))
        finite = statistics.isfinite().all()
        self._add(torch.where(finite, statistics, 0.0), finite.long(), output)

    def _add(self, statistics: Tensor, batches: Tensor, output: Tensor) -> None:
        outputs = batches * (output.numel() // self.channels)
        self.sums += statistics.to(self.sums.dtype) * outputs
        self.outputs += outputs
        self.batches += batches

    def result(self, *, of_all_processes: bool = False) -> tuple[Tensor, Tensor]:
        """Mean and mass, and the number of batches that they come from."""
        if of_all_processes and dist.is_available() and dist.is_initialized():
            for tensor in (self.sums, self.outputs, self.batches):
                dist.all_reduce(tensor, group=self.layer.process_group)
        return self.sums / self.outputs, self.batches


def freeze_stats(model: ModelT) -> ModelT:
    """Make every balanced layer and ChannelCentre use its running statistics and not update them, in training too.

    Use it for fine-tuning on few samples. Unlike ``eval()``, it survives ``train()``.

    Example:
        >>> from balnorm import BalNormConv2d
        >>> model = freeze_stats(nn.Sequential(BalNormConv2d(1, 4, 3))).train()
        >>> model[0].stats_frozen
        True
    """
    return _set_frozen(model, True)


def unfreeze_stats(model: ModelT) -> ModelT:
    """Undo :func:`freeze_stats`."""
    return _set_frozen(model, False)


def _set_frozen(model: ModelT, frozen: bool) -> ModelT:
    for module in model.modules():
        if isinstance(module, _Tracking):
            module.stats_frozen = frozen
    return model
