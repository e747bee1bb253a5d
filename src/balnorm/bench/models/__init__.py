"""The paper's networks, each written once for any normalisation.

>>> model = create_model("wide_resnet", norm="balnorm", depth=8, width=16)
>>> sum(parameter.numel() for parameter in model.parameters())
78042
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from balnorm.bench.models._stages import BLOCKS
from balnorm.bench.models.cifar_resnet import CifarResNet
from balnorm.bench.models.preact_resnet import PreActResNet
from balnorm.bench.models.resnet import ResNet
from balnorm.bench.models.wide_resnet import WideResNet
from balnorm.bench.norms import Normalization, get_norm

__all__ = ["BLOCKS", "MODELS", "CifarResNet", "PreActResNet", "ResNet", "WideResNet", "create_model"]

MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, int]]] = {
    "wide_resnet": (WideResNet, {}),
    "cifar_resnet": (CifarResNet, {}),
    **{f"preact_resnet{depth}": (PreActResNet, {"depth": depth}) for depth in BLOCKS},
    **{f"resnet{depth}": (ResNet, {"depth": depth}) for depth in BLOCKS},
}
"""Every network by name: its class, and the arguments that the name fixes."""


def create_model(name: str, norm: str | Normalization = "balnorm", num_classes: int = 10, **options: Any) -> nn.Module:
    """Create a network by name.

    Args:
        name: ``wide_resnet`` (options ``depth=20``, ``width=96``), ``cifar_resnet`` (``depth=20``, ``width=16``) and
            ``preact_resnet18`` to ``preact_resnet152`` for small images, ``resnet18`` to ``resnet152`` for large ones.
        norm: a name from :data:`balnorm.bench.norms.NORMS`, or a :class:`~balnorm.bench.norms.Normalization`.
        num_classes: the number of outputs.
        **options: the network's own options, e.g. ``width`` and ``in_channels``.
    """
    if name not in MODELS:
        raise ValueError(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    build, fixed = MODELS[name]
    allowed = [each for each in inspect.signature(build).parameters if each not in {"norm", "num_classes", *fixed}]
    for option in options:
        if option not in allowed:
            raise ValueError(f"{name} has no option {option!r}; it has {', '.join(allowed)}")
    return build(get_norm(norm), num_classes, **fixed, **options)
