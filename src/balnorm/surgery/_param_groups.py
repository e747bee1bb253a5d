"""Parameters for an optimiser."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrize import ParametrizationList

from balnorm._core.torch_private import is_weight_norm

__all__ = ["param_groups"]


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters for an optimiser, with weight decay on weights only.

    Gains (weight normalisation's too), biases, the parameters of normalisation layers, and all others with fewer than
    two dimensions get none.

    Example:
        >>> import torch
        >>> from balnorm import BalNormConv2d
        >>> model = nn.Sequential(BalNormConv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.1, momentum=0.9)
        >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
        [(0.0001, 2), (0.0, 3)]
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay!r}")
    decayed, others = dict[Tensor, None](), dict[Tensor, None]()
    for module in model.modules():
        is_norm = isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                is_weight = not is_norm and parameter.dim() >= 2 and not _is_gain(name, module)
                (decayed if is_weight else others)[parameter] = None
    groups = [{"params": list(decayed), "weight_decay": weight_decay}, {"params": list(others), "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _is_gain(name: str, module: nn.Module) -> bool:
    """Whether this is the g of weight normalisation, in either of torch's forms: it has as many dimensions as its v."""
    if isinstance(module, ParametrizationList):
        return name == "original0" and is_weight_norm(module[0])
    return name.endswith("_g") and hasattr(module, f"{name.removesuffix('_g')}_v")
