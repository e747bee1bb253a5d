"""The paper's wide ResNet for 32x32 images: 20 layers, 96 channels after the first one, 9.7 million parameters."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from balnorm.bench.models._stages import make_stages, three_stages
from balnorm.bench.norms import Normalization

__all__ = ["WideResNet"]


class WideResNet(nn.Module):
    """Pre-activation residual network of three stages with 1, 2 and 4 times ``width`` channels.

    Zagoruyko and Komodakis 2016, `Wide Residual Networks <https://arxiv.org/abs/1605.07146>`_.

    Args:
        norm: the normalisation.
        num_classes: the number of outputs.
        depth: 6 n + 2 with n blocks a stage; counts the stem, two convolutions a block, and the classifier.
        width: channels of the first stage, and of the stem before it.
        in_channels: 3 for colour images, 1 for grey ones.
    """

    mix_points: ClassVar = ("input", "stage1", "stage2")
    """Where manifold mixup may mix: the input, or the output of the module with that name."""

    def __init__(
        self, norm: Normalization, num_classes: int = 10, *, depth: int = 20, width: int = 96, in_channels: int = 3
    ) -> None:
        super().__init__()
        self.stem = norm.conv(in_channels, width, 3, padding=1)
        (self.stage1, self.stage2, self.stage3), outputs = make_stages(norm, Block, three_stages(depth), width)
        self.norm, self.activation = norm.norm(outputs), norm.activation(outputs)
        self.head = nn.Linear(outputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
        return self.head(self.activation(self.norm(x)).mean((2, 3)))


class Block(nn.Module):
    """norm-activation-conv, twice; if the shape changes, a 1x1 convolution of the activated input is added."""

    expansion: ClassVar = 1

    def __init__(self, norm: Normalization, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.activation1 = norm.norm(inputs), norm.activation(inputs)
        self.conv1 = norm.conv(inputs, outputs, 3, stride=stride, padding=1)
        self.norm2, self.activation2 = norm.norm(outputs), norm.activation(outputs)
        self.conv2 = norm.conv(outputs, outputs, 3, padding=1)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else norm.conv(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(self.activation2(self.norm2(self.conv1(y)))) + shortcut
