"""ResNets for ImageNet. Names and shapes are torchvision's: with BatchNorm, its weights load into them."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from balnorm.bench.models._stages import BLOCKS, make_stages
from balnorm.bench.norms import Normalization

__all__ = ["ResNet"]


class ResNet(nn.Module):
    """A 7x7 stem with pooling and four stages of conv-norm-activation blocks with 64, 128, 256 and 512 channels.

    He, Zhang, Ren and Sun 2015, `Deep Residual Learning for Image Recognition <https://arxiv.org/abs/1512.03385>`_,
    with the stride of a bottleneck in its 3x3 convolution, as is usual today. Depth 50 has 25.6 million parameters.

    Args:
        norm: the normalisation.
        num_classes: the number of outputs.
        depth: 18, 34, 50, 101 or 152.
        width: channels of the first stage.
        in_channels: 3 for colour images, 1 for grey ones.
    """

    mix_points: ClassVar = ("input", "layer1", "layer2")
    """Where manifold mixup may mix: the input, or the output of the module with that name."""

    def __init__(
        self, norm: Normalization, num_classes: int = 1000, *, depth: int = 50, width: int = 64, in_channels: int = 3
    ) -> None:
        super().__init__()
        block = BasicBlock if depth < 50 else Bottleneck
        self.conv1, self.bn1 = norm.conv(in_channels, width, 7, stride=2, padding=3), norm.norm(width)
        self.act1 = norm.activation(width, inplace=True)
        (self.layer1, self.layer2, self.layer3, self.layer4), inputs = make_stages(norm, block, BLOCKS[depth], width)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.act1(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class BasicBlock(nn.Module):
    """conv-norm-activation and conv-norm, added to the shortcut."""

    expansion: ClassVar = 1

    def __init__(self, norm: Normalization, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = norm.conv(inputs, planes, 3, stride=stride, padding=1), norm.norm(planes)
        self.conv2, self.bn2 = norm.conv(planes, planes, 3, padding=1), norm.norm(planes)
        self.act1, self.act2 = norm.activation(planes, inplace=True), norm.activation(planes, inplace=True)
        self.downsample = self.shortcut(norm, inputs, planes * self.expansion, stride)

    @staticmethod
    def shortcut(norm: Normalization, inputs: int, outputs: int, stride: int) -> nn.Module | None:
        return _projection(norm, inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.act1(self.bn1(self.conv1(x)))
        return self.act2(self.bn2(self.conv2(y)) + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 to four times the channels, added to the shortcut."""

    expansion: ClassVar = 4

    def __init__(self, norm: Normalization, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = norm.conv(inputs, planes, 1), norm.norm(planes)
        self.conv2, self.bn2 = norm.conv(planes, planes, 3, stride=stride, padding=1), norm.norm(planes)
        self.conv3, self.bn3 = norm.conv(planes, planes * self.expansion, 1), norm.norm(planes * self.expansion)
        self.act1, self.act2 = norm.activation(planes, inplace=True), norm.activation(planes, inplace=True)
        self.act3 = norm.activation(planes * self.expansion, inplace=True)
        self.downsample = _projection(norm, inputs, planes * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.act2(self.bn2(self.conv2(y)))
        return self.act3(self.bn3(self.conv3(y)) + shortcut)


def _projection(norm: Normalization, inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(norm.conv(inputs, outputs, 1, stride=stride), norm.norm(outputs))
