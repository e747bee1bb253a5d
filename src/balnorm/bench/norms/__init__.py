"""Every normalisation that the paper names, and some that came later, as factories of layers.

A method that normalises activations makes a plain convolution and a norm; one that normalises weights makes its own
convolution and an identity. A network calls both in its natural order, conv-norm-relu or norm-relu-conv, so it is
written once for all of them.

>>> norm = NORMS["groupnorm"]
>>> norm.conv(3, 64, 3, padding=1)
Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
>>> norm.norm(64).num_groups
32
>>> get_norm("balnorm", mass="position").conv(3, 64, 3).mass
'position'
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from balnorm.bench.norms._layers import (
        BatchRenorm2d,
        DynamicTanh2d,
        FilterResponseNorm2d,
        LeadingBatchNorm2d,
        ThresholdedLinear,
        set_progress,
    )

__all__ = [
    "NORMS",
    "BatchRenorm2d",
    "DynamicTanh2d",
    "FilterResponseNorm2d",
    "LeadingBatchNorm2d",
    "Normalization",
    "ThresholdedLinear",
    "get_norm",
    "set_progress",
]


def _make(name: str, /, *args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module("balnorm.bench.norms._layers"), name)(*args, **options)


def _layer(name: str, **options: Any) -> Callable[..., nn.Module]:
    """A factory of ``_layers``. It imports torch when it is called: the names are there without."""
    return functools.partial(_make, name, **options)


_relu = _layer("relu")


@dataclass(frozen=True)
class Normalization:
    """A way to normalise a convolutional network.

    Attributes:
        conv: makes a convolution, with the arguments of :class:`torch.nn.Conv2d` up to ``groups``. Its weights start
            normal with variance 2 / fan_out (He et al.), and it has a bias unless the norm beside it takes that away.
        norm: makes the layer beside the convolution, for a number of channels.
        source: the publication.
        options: what :func:`get_norm` can change about it, by name.
        activation: makes the layer after the norm, for a number of channels: a ReLU, unless the method has its own.
            With ``inplace=True`` it may overwrite its input.
        follows_progress: whether its layers need to know, from :func:`set_progress`, how far training is.
    """

    conv: Callable[..., nn.Module]
    norm: Callable[[int], nn.Module]
    source: str
    options: tuple[str, ...] = ()
    activation: Callable[..., nn.Module] = _relu
    follows_progress: bool = False


def get_norm(norm: str | Normalization, **options: Any) -> Normalization:
    """A normalisation by name, or the one given, with options of its layers.

    The options of ``balnorm`` are keyword arguments of :class:`balnorm.BalNormConv2d`, and ``centre_stream``, which
    puts a :class:`balnorm.ChannelCentre` where BatchNorm stood: for pre-activation networks. ``batchnorm`` has
    ``stats_fraction``.
    """
    if isinstance(norm, str) and norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    found = NORMS[norm] if isinstance(norm, str) else norm
    for name in options:
        if name not in found.options:
            raise ValueError(f"{norm} has no option {name!r}; it has {', '.join(found.options) or 'none'}")
    if not options:
        return found
    if options.pop("centre_stream", False):
        # A channel's mean is subtracted from every sum that its bias would be part of.
        return replace(found, conv=functools.partial(found.conv, bias=False, **options), norm=_layer("ChannelCentre"))
    if found.norm is _identity:  # it normalises weights
        return replace(found, conv=functools.partial(found.conv, **options))
    return replace(found, norm=functools.partial(found.norm, **options))


_plain, _biased, _identity = _layer("conv", bias=False), _layer("conv", bias=True), _layer("identity")

NORMS: dict[str, Normalization] = {
    "balnorm": Normalization(
        _layer("BalNormConv2d"),
        _identity,
        "Defazio and Bottou 2018, Controlling Covariate Shift using Balanced Normalization of Weights",
        options=("one_pass", "mass", "stats_fraction", "output_scale", "shift", "centred", "equalise", "centre_stream"),
    ),
    "batchnorm": Normalization(
        _plain,
        _layer("batch_norm"),
        "Ioffe and Szegedy 2015, Batch Normalization: Accelerating Deep Network ...",
        options=("stats_fraction",),
    ),
    "groupnorm": Normalization(_plain, _layer("group_norm"), "Wu and He 2018, Group Normalization"),
    "layernorm": Normalization(_plain, _layer("layer_norm"), "Ba, Kiros and Hinton 2016, Layer Normalization"),
    "instancenorm": Normalization(
        _plain,
        _layer("instance_norm"),
        "Ulyanov, Vedaldi and Lempitsky 2016, Instance Normalization",
    ),
    "batchrenorm": Normalization(
        _plain,
        _layer("BatchRenorm2d"),
        "Ioffe 2017, Batch Renormalization",
        follows_progress=True,
    ),
    "weightnorm": Normalization(
        _layer("weight_normalized", bias=True),
        _identity,
        "Salimans and Kingma 2016, Weight Normalization",
    ),
    "weightnorm-meanonly": Normalization(
        _layer("weight_normalized", bias=False),
        _layer("ChannelCentre"),
        "Salimans and Kingma 2016, Weight Normalization, section 3 and the CIFAR-10 experiments",
    ),
    "lrn": Normalization(
        _biased,
        _layer("local_response_norm"),
        "Krizhevsky, Sutskever and Hinton 2012, ImageNet Classification ...",
    ),
    "weightstandardization": Normalization(
        _layer("weight_standardized"),
        _layer("group_norm"),
        "Qiao, Wang, Liu, Shen and Yuille 2019, Micro-Batch Training with ...",
    ),
    "weightstandardization-scaled": Normalization(
        _layer("scaled_weight_standardized"),
        _identity,
        "Brock, De and Smith 2021, Characterizing signal propagation to close the performance gap in ...",
    ),
    "frn": Normalization(
        _plain,
        _layer("FilterResponseNorm2d"),
        "Singh and Krishnan 2020, Filter Response Normalization Layer",
        activation=_layer("ThresholdedLinear"),
    ),
    "dynamictanh": Normalization(
        _biased,
        _layer("DynamicTanh2d"),
        "Zhu, Chen, He, LeCun and Liu 2025, Transformers without Normalization",
    ),
    "none": Normalization(_biased, _identity, "no normalisation; weights as of He et al. 2015"),
}
"""Every normalisation by its name."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'balnorm.bench.norms' has no attribute {name!r}")
    return getattr(importlib.import_module("balnorm.bench.norms._layers"), name)
