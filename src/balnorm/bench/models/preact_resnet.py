"""Pre-activation ResNets for 32x32 images, as in the manifold mixup code on which the paper built."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from balnorm.bench.models._stages import BLOCKS, make_stages
from balnorm.bench.norms import Normalization

__all__ = ["PreActResNet"]


class PreActResNet(nn.Module):
    """A 3x3 stem, four stages of pre-activation blocks with 64, 128, 256 and 512 channels, and no norm after the last.

    He, Zhang, Ren and Sun 2016, `Identity Mappings in Deep Residual Networks <https://arxiv.org/abs/1603.05027>`_.
    Depth 152 has 58.1 million parameters.

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
        self, norm: Normalization, num_classes: int = 10, *, depth: int = 18, width: int = 64, in_channels: int = 3
    ) -> None:
        super().__init__()
        block = Block if depth < 50 else Bottleneck
        self.conv1 = norm.conv(in_channels, width, 3, padding=1)
        (self.layer1, self.layer2, self.layer3, self.layer4), inputs = make_stages(norm, block, BLOCKS[depth], width)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class Block(nn.Module):
    """norm-activation-conv, twice. The projection starts from the activated input, the identity from the raw one."""

    expansion: ClassVar = 1

    def __init__(self, norm: Normalization, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = norm.norm(inputs), norm.conv(inputs, planes, 3, stride=stride, padding=1)
        self.bn2, self.conv2 = norm.norm(planes), norm.conv(planes, planes, 3, padding=1)
        self.act1, self.act2 = norm.activation(inputs), norm.activation(planes)
        self.shortcut = _projection(norm, inputs, planes * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(self.act2(self.bn2(self.conv1(y)))) + shortcut


class Bottleneck(nn.Module):
    """norm-activation-conv, three times: 1x1, 3x3 and 1x1 to four times the channels."""

    expansion: ClassVar = 4

    def __init__(self, norm: Normalization, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = norm.norm(inputs), norm.conv(inputs, planes, 1)
        self.bn2, self.conv2 = norm.norm(planes), norm.conv(planes, planes, 3, stride=stride, padding=1)
        self.bn3, self.conv3 = norm.norm(planes), norm.conv(planes, planes * self.expansion, 1)
        self.act1, self.act2, self.act3 = norm.activation(inputs), norm.activation(planes), norm.activation(planes)
        self.shortcut = _projection(norm, inputs, planes * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.act2(self.bn2(self.conv1(y)))
        y = self.act3(self.bn3(self.conv2(y)))
        return self.conv3(y) + shortcut


def _projection(norm: Normalization, inputs: int, outputs: int, stride: int) -> nn.Module | None:
    return None if stride == 1 and inputs == outputs else norm.conv(inputs, outputs, 1, stride=stride)
