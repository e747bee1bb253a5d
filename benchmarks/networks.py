"""The networks that are measured, each written once for any normalisation.

A method is a pair of factories: ``conv(in, out, kernel, stride, padding, groups)`` and ``norm(channels)``. Methods that
normalise activations give a plain convolution and a norm; methods that normalise weights give their own convolution
and an identity. A network calls both in its natural order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from balnorm import BalNormConv2d
from benchmarks.zoo import import_timm


class Method(NamedTuple):
    conv: Callable[..., nn.Module]
    norm: Callable[[int], nn.Module]


def identity(_: int) -> nn.Module:
    return nn.Identity()


def plain(*args: Any, **kwargs: Any) -> nn.Module:
    return nn.Conv2d(*args, **kwargs, bias=False)


def standardized(*args: Any, **kwargs: Any) -> nn.Module:
    import_timm()
    from timm.layers import StdConv2d

    return StdConv2d(*args, **kwargs, bias=False)


def balanced(**options: Any) -> Callable[..., nn.Module]:
    return lambda *args, **kwargs: BalNormConv2d(*args, **kwargs, **options)


def groupnorm(channels: int) -> nn.Module:
    groups = 32
    while channels % groups:
        groups //= 2
    return nn.GroupNorm(groups, channels)


METHODS = {
    "none": Method(nn.Conv2d, identity),
    "batchnorm": Method(plain, nn.BatchNorm2d),
    "groupnorm": Method(plain, groupnorm),
    "weight standardisation + groupnorm": Method(standardized, groupnorm),
    "balnorm channel": Method(balanced(), identity),
    "balnorm position": Method(balanced(mass="position"), identity),
}


class PreActBlock(nn.Module):
    """norm-relu-conv twice; the projection shortcut, where there is one, starts from the activated input."""

    def __init__(self, method: Method, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = method.norm(inputs)
        self.conv1 = method.conv(inputs, outputs, 3, stride=stride, padding=1)
        self.norm2 = method.norm(outputs)
        self.conv2 = method.conv(outputs, outputs, 3, padding=1)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = method.conv(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        return self.conv2(F.relu(self.norm2(self.conv1(activated)))) + shortcut


class PreActResNet(nn.Module):
    """Pre-activation networks for 32x32 images: wide ResNets and ResNet-18."""

    def __init__(self, method: Method, stem: int, widths: list[int], blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = method.conv(3, stem, 3, padding=1)
        layers, inputs = [], stem
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(PreActBlock(method, inputs, width, 2 if stage > 0 and block == 0 else 1))
                inputs = width
        self.blocks = nn.Sequential(*layers)
        self.norm = method.norm(inputs)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """conv-norm-relu, 1x1, 3x3 and 1x1 with four times the channels."""

    def __init__(self, method: Method, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = method.conv(inputs, width, 1), method.norm(width)
        self.conv2, self.norm2 = method.conv(width, width, 3, stride=stride, padding=1), method.norm(width)
        self.conv3, self.norm3 = method.conv(width, outputs, 1), method.norm(outputs)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(method.conv(inputs, outputs, 1, stride=stride), method.norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + shortcut, inplace=True)


class ResNet50(nn.Module):
    def __init__(self, method: Method, classes: int = 1000) -> None:
        super().__init__()
        self.stem, self.norm = method.conv(3, 64, 7, stride=2, padding=3), method.norm(64)
        layers, inputs = [], 64
        for stage, (width, blocks) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True)):
            for block in range(blocks):
                layers.append(Bottleneck(method, inputs, width, 2 if stage > 0 and block == 0 else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x)), inplace=True), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class Network(NamedTuple):
    build: Callable[[Method], nn.Module]
    batch: int
    size: int


def wide_resnet(method: Method, width: int) -> nn.Module:
    return PreActResNet(method, width, [width, 2 * width, 4 * width], blocks=3)


NETWORKS = {
    "WRN-20 width 16, batch 128": Network(lambda method: wide_resnet(method, 16), 128, 32),
    "WRN-20 width 96, batch 16": Network(lambda method: wide_resnet(method, 96), 16, 32),
    "PreActResNet-18, batch 32": Network(lambda method: PreActResNet(method, 64, [64, 128, 256, 512], 2), 32, 32),
    "ResNet-50, 224x224, batch 4": Network(ResNet50, 4, 224),
}
