"""Every normalisation that the paper names, and some that came later, as factories of layers.

A method that normalises activations makes a plain convolution and a norm; one that normalises weights makes its own
convolution and an identity. A network calls both in its natural order, conv-norm-relu or norm-relu-conv, so it is
written once for all of them.

>>> sorted(NORMS)[:4]
['balnorm', 'balnorm-gain1', 'balnorm-gain1-position', 'balnorm-gain1-position-two-pass']
>>> norm = NORMS["groupnorm"]
>>> norm.conv(3, 64, 3, padding=1)
Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
>>> norm.norm(64).num_groups
32
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

    from balnorm.bench.norms._layers import (
        BatchRenorm2d,
        DynamicTanh2d,
        FilterResponseNorm2d,
        MeanOnlyBatchNorm2d,
        QuarterBatchNorm2d,
        ThresholdedLinear,
        set_progress,
    )

__all__ = [
    "NORMS",
    "BatchRenorm2d",
    "DynamicTanh2d",
    "FilterResponseNorm2d",
    "MeanOnlyBatchNorm2d",
    "Normalization",
    "QuarterBatchNorm2d",
    "Style",
    "ThresholdedLinear",
    "get_norm",
    "set_progress",
]


def _make(name: str, /, *args: Any, **options: Any) -> Any:
    return getattr(importlib.import_module("balnorm.bench.norms._layers"), name)(*args, **options)


def _layer(name: str, **options: Any) -> Callable[..., nn.Module]:
    """A factory of ``_layers``. It imports torch when it is called: names and styles are there without."""
    return functools.partial(_make, name, **options)


_relu = _layer("relu")


@dataclass(frozen=True)
class Style:
    """How every figure draws a normalisation."""

    colour: str
    dash: Literal["solid", "dashed", "dotted"] = "solid"


@dataclass(frozen=True)
class Normalization:
    """A way to normalise a convolutional network.

    Attributes:
        conv: makes a convolution, with the arguments of :class:`torch.nn.Conv2d` up to ``groups``. Its weights start
            normal with variance 2 / fan_out (He et al.), and it has a bias unless the norm beside it takes that away.
        norm: makes the layer beside the convolution, for a number of channels.
        source: the publication.
        style: how figures draw it.
        pixels: the customary input of the network: ``"standardized"`` pixels, of mean 0 and variance 1 in each
            channel, or ``"unit"`` ones, in [0, 1].
        sync: what can share statistics between processes: the layers themselves (``"layers"``), torch's conversion to
            SyncBatchNorm, on GPUs (``"torch"``), or nothing.
        activation: makes the layer behind the norm, for a number of channels: a ReLU, unless the method has its own.
            With ``inplace=True`` it may overwrite its input.
        follows_progress: whether its layers need to know, from :func:`set_progress`, how far training is.
    """

    conv: Callable[..., nn.Module]
    norm: Callable[[int], nn.Module]
    source: str
    style: Style = Style("#AA4499")  # it is frozen
    pixels: Literal["standardized", "unit"] = "standardized"
    sync: Literal["layers", "torch"] | None = None
    activation: Callable[..., nn.Module] = _relu
    follows_progress: bool = False


def get_norm(norm: str | Normalization) -> Normalization:
    """A normalisation by name, or the one given."""
    if isinstance(norm, Normalization):
        return norm
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    return NORMS[norm]


_BALNORM = "Defazio and Bottou 2018, Controlling Covariate Shift using Balanced Normalization of Weights"
_plain, _biased, _identity = _layer("conv", bias=False), _layer("conv", bias=True), _layer("identity")

# The palette of Okabe and Ito, which colour-blind readers can tell apart, with a few of Paul Tol's muted colours. What
# belongs together has one colour and differs in its dashes, so that nothing depends on telling more colours apart.
_BLUE, _SKY, _PINK, _WINE, _RED, _GREEN, _ORANGE, _GREY, _FOREST = (
    *("#0072B2", "#56B4E9", "#CC79A7", "#A0305F", "#D55E00", "#009E73", "#E69F00", "#7A7A7A", "#117733"),
)


def _balnorm(style: Style, **options: Any) -> Normalization:
    return Normalization(_layer("BalNormConv2d", **options), _identity, _BALNORM, style, pixels="unit", sync="layers")


NORMS: dict[str, Normalization] = {
    "balnorm": _balnorm(Style(_BLUE)),
    "balnorm-two-pass": _balnorm(Style(_BLUE, "dashed"), one_pass=False),
    "balnorm-position": _balnorm(Style(_SKY), mass="position"),
    "balnorm-quarter": _balnorm(Style(_BLUE, "dotted"), stats_fraction=0.25),
    "balnorm-gain1": _balnorm(Style(_PINK), output_scale=1.0),
    "balnorm-position-two-pass": _balnorm(Style(_SKY, "dashed"), mass="position", one_pass=False),
    "balnorm-gain1-two-pass": _balnorm(Style(_PINK, "dashed"), output_scale=1.0, one_pass=False),
    "balnorm-gain1-position": _balnorm(Style(_WINE), output_scale=1.0, mass="position"),
    "balnorm-gain1-position-two-pass": _balnorm(
        Style(_WINE, "dashed"), output_scale=1.0, mass="position", one_pass=False
    ),
    "batchnorm": Normalization(
        _plain,
        _layer("BatchNorm2d"),
        "Ioffe and Szegedy 2015, Batch Normalization: Accelerating Deep Network ...",
        Style(_RED),
        sync="torch",
    ),
    "batchnorm-quarter": Normalization(
        _plain,
        _layer("QuarterBatchNorm2d"),
        "Defazio and Bottou 2018 for BalNorm; here for comparison",
        Style(_RED, "dotted"),
    ),
    "groupnorm": Normalization(_plain, _layer("group_norm"), "Wu and He 2018, Group Normalization", Style(_GREEN)),
    "layernorm": Normalization(
        _plain, _layer("layer_norm"), "Ba, Kiros and Hinton 2016, Layer Normalization", Style(_GREEN, "dashed")
    ),
    "instancenorm": Normalization(
        _plain,
        _layer("instance_norm"),
        "Ulyanov, Vedaldi and Lempitsky 2016, Instance Normalization",
        Style(_GREEN, "dotted"),
    ),
    "batchrenorm": Normalization(
        _plain,
        _layer("BatchRenorm2d"),
        "Ioffe 2017, Batch Renormalization",
        Style(_RED, "dashed"),
        follows_progress=True,
    ),
    "weightnorm": Normalization(
        _layer("weight_normalized", bias=True),
        _identity,
        "Salimans and Kingma 2016, Weight Normalization",
        Style(_ORANGE),
    ),
    "weightnorm-meanonly": Normalization(
        _layer("weight_normalized", bias=False),
        _layer("MeanOnlyBatchNorm2d"),
        "Salimans and Kingma 2016, Weight Normalization, section 3 and the CIFAR-10 experiments",
        Style(_ORANGE, "dashed"),
    ),
    "lrn": Normalization(
        _biased,
        _layer("local_response_norm"),
        "Krizhevsky, Sutskever and Hinton 2012, ImageNet Classification ...",
        Style(_GREY, "dashed"),
    ),
    "weightstandardization": Normalization(
        _layer("weight_standardized"),
        _layer("group_norm"),
        "Qiao, Wang, Liu, Shen and Yuille 2019, Micro-Batch Training with ...",
        Style(_ORANGE, "dotted"),
    ),
    "weightstandardization-scaled": Normalization(
        _layer("scaled_weight_standardized"),
        _identity,
        "Brock, De and Smith 2021, Characterizing signal propagation to close the performance gap in ...",
        Style(_FOREST),
    ),
    "frn": Normalization(
        _plain,
        _layer("FilterResponseNorm2d"),
        "Singh and Krishnan 2020, Filter Response Normalization Layer",
        Style(_FOREST, "dashed"),
        activation=_layer("ThresholdedLinear"),
    ),
    "dynamictanh": Normalization(
        _biased,
        _layer("DynamicTanh2d"),
        "Zhu, Chen, He, LeCun and Liu 2025, Transformers without Normalization",
        Style(_FOREST, "dotted"),
    ),
    "none": Normalization(_biased, _identity, "no normalisation; weights as of He et al. 2015", Style(_GREY)),
}
"""Every normalisation by its name."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'balnorm.bench.norms' has no attribute {name!r}")
    return getattr(importlib.import_module("balnorm.bench.norms._layers"), name)
