"""Fold balanced layers into plain ones."""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch import nn

from balnorm._checks import HAS_HOOKS, warn
from balnorm.layers import BalNormLayer
from balnorm.surgery._model import ModelT, refuse_wrapped, replace_modules, tensors_in

__all__ = ["fold"]

logger = logging.getLogger(__name__)


def fold(model: ModelT, *, inplace: bool = False) -> ModelT:
    """Replace every balanced layer by the plain torch layer with the same output in eval mode.

    You can use and unpickle the result without balnorm, and it costs what an unnormalised network costs. Its weights
    are balanced for ``running_mass`` (see :func:`update_stats`). It is for inference: trained further, it would be a
    network without normalisation. The names of the folded layers are logged at level INFO. Hooks of the
    layers are lost, with a warning.

    Args:
        model: any module with balanced layers; a module without any is returned unchanged.
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
        # Those of torch's own pruning and weight normalisation have done their work on the weight.
        if not all(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
            warn(layer, HAS_HOOKS, name)
    logger.info("folding %d layers: %s", len(layers), ", ".join(layers))
    plain: dict[nn.Module, nn.Module] = {layer: layer.fuse() for layer in layers.values()}
    if inplace:
        return replace_modules(model, plain)
    # The copy gets the plain layers right away: balanced ones need not be copied first.
    memo: dict[int, Any] = {id(layer): folded for layer, folded in plain.items()}
    # Nor outputs of its last step that a model keeps as attributes: deepcopy refuses tensors that have a history.
    for module in model.modules():
        kept = [value for name, value in vars(module).items() if not name.startswith("_")]
        memo |= {id(tensor): tensor.detach().clone() for tensor in tensors_in(kept) if not tensor.is_leaf}
    return copy.deepcopy(model, memo)
