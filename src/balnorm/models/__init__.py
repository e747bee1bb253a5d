"""The paper's networks, each written once for any normalisation.

>>> model = create_model("wide_resnet", norm="balnorm", depth=8, width=16)
>>> sum(parameter.numel() for parameter in model.parameters())
78042
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from balnorm.models.preact_resnet import BLOCKS, PreActResNet
from balnorm.models.resnet import ResNet
from balnorm.models.wide_resnet import WideResNet
from balnorm.norms import Normalization, get_norm

__all__ = ["MODELS", "PreActResNet", "ResNet", "WideResNet", "create_model"]

MODELS: dict[str, Callable[..., nn.Module]] = {
    "wide_resnet": WideResNet,
    **{f"preact_resnet{depth}": functools.partial(PreActResNet, depth=depth) for depth in BLOCKS},
    **{f"resnet{depth}": functools.partial(ResNet, depth=depth) for depth in BLOCKS},
}
"""Every network by its name."""


def create_model(name: str, norm: str | Normalization = "balnorm", num_classes: int = 10, **options: Any) -> nn.Module:
    """A network by name.

    Args:
        name: ``wide_resnet`` (options ``depth=20``, ``width=96``), ``preact_resnet18`` to ``preact_resnet152`` for
            small images, ``resnet18`` to ``resnet152`` for large ones.
        norm: a name from :data:`balnorm.norms.NORMS`, or a :class:`~balnorm.norms.Normalization`.
        num_classes: outputs.
        **options: the network's own, e.g. ``width`` and ``in_channels``.
    """
    if name not in MODELS:
        raise ValueError(f"the model must be one of {', '.join(MODELS)}, got {name!r}")
    build = MODELS[name]
    fixed = build.keywords if isinstance(build, functools.partial) else {}
    taken = {"norm", "num_classes", *fixed}
    allowed = [option for option in inspect.signature(build).parameters if option not in taken]
    for option in options:
        if option not in allowed:
            raise ValueError(f"{name} has no option {option!r}; it has {', '.join(allowed)}")
    return build(get_norm(norm), num_classes, **options)
