"""The layer kinds that most tests run over: a name, how to build one, and the shape of its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from balnorm import (
    BalNormConv1d,
    BalNormConv2d,
    BalNormConv3d,
    BalNormConvTranspose1d,
    BalNormConvTranspose2d,
    BalNormConvTranspose3d,
    BalNormLayer,
    BalNormLinear,
)


class Case(NamedTuple):
    layer: Callable[..., BalNormLayer]
    arguments: dict[str, Any]
    input_shape: tuple[int, ...]

    def build(self, **options: Any) -> BalNormLayer:
        if self.layer is BalNormLinear:
            options.pop("mass", None)
        return self.layer(**self.arguments, **options)

    def input(self, **options: Any) -> torch.Tensor:
        return torch.rand(self.input_shape, **options)


CASES = {
    "linear": Case(BalNormLinear, {"in_features": 5, "out_features": 4}, (6, 5)),
    "conv1d": Case(
        BalNormConv1d, {"in_channels": 3, "out_channels": 4, "kernel_size": 3, "stride": 2, "padding": 1}, (3, 3, 7)
    ),
    "conv2d": Case(BalNormConv2d, {"in_channels": 3, "out_channels": 4, "kernel_size": 3, "padding": 1}, (2, 3, 5, 4)),
    "conv2d-grouped": Case(
        BalNormConv2d,
        {"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2), "stride": (2, 1), "padding": 1, "groups": 2},
        (2, 4, 5, 4),
    ),
    "depthwise": Case(
        BalNormConv2d, {"in_channels": 3, "out_channels": 6, "kernel_size": 3, "padding": 1, "groups": 3}, (2, 3, 5, 4)
    ),
    "conv2d-dilated-circular": Case(
        BalNormConv2d,
        {
            "in_channels": 2,
            "out_channels": 3,
            "kernel_size": 3,
            "padding": 2,
            "dilation": 2,
            "padding_mode": "circular",
        },
        (2, 2, 6, 5),
    ),
    "conv3d": Case(
        BalNormConv3d, {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "padding": 1}, (2, 2, 3, 3, 2)
    ),
    "transposed1d": Case(
        BalNormConvTranspose1d, {"in_channels": 3, "out_channels": 2, "kernel_size": 3, "padding": 1}, (3, 3, 6)
    ),
    "transposed2d": Case(
        BalNormConvTranspose2d,
        {
            "in_channels": 4,
            "out_channels": 6,
            "kernel_size": 3,
            "stride": 2,
            "padding": 1,
            "output_padding": 1,
            "groups": 2,
        },
        (2, 4, 3, 4),
    ),
    "transposed3d": Case(
        BalNormConvTranspose3d, {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "stride": 2}, (2, 2, 2, 2, 2)
    ),
}
MASS_AND_PASS = [(mass, one_pass) for mass in ("channel", "position") for one_pass in (True, False)]


def small_network(**options: Any) -> nn.Module:
    """A network with every kind of layer: convolution, transposed convolution and linear."""
    return nn.Sequential(
        BalNormConv2d(3, 8, 3, stride=2, padding=1, **options),
        nn.ReLU(),
        BalNormConvTranspose2d(8, 4, 2, stride=2, **options),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        BalNormLinear(4, 5, **{name: value for name, value in options.items() if name != "mass"}),
    )


def digits_network(**options: Any) -> nn.Module:
    """A network for 8x8 grey images of digits."""
    return nn.Sequential(
        BalNormConv2d(1, 16, 3, padding=1, **options),
        nn.ReLU(),
        BalNormConv2d(16, 32, 3, padding=1, **options),
        nn.ReLU(),
        BalNormConv2d(32, 32, 3, padding=1, **options),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class Steps(nn.Module):
    """A model whose forward is given as a function of the module and its input."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.run = forward
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.run(self, x)
