"""The ResNet of He et al. for 32x32 images, with its norms before the addition."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from balnorm.bench.models._stages import make_stages, three_stages
from balnorm.bench.models.resnet import BasicBlock
from balnorm.bench.norms import Normalization

__all__ = ["CifarResNet"]


class CifarResNet(nn.Module):
    """A 3x3 stem and three stages of conv-norm-activation blocks with 1, 2 and 4 times ``width`` channels.

    He, Zhang, Ren and Sun 2015, `Deep Residual Learning for Image Recognition <https://arxiv.org/abs/1512.03385>`_,
    section 4.2. Shortcuts have no parameters: between stages they take every other pixel and add channels of zeros
    (option A). Depth 20 has 269,722 parameters, as there.

    Args:
        norm: the normalisation.
        num_classes: the number of outputs.
        depth: 6 n + 2 with n blocks a stage; counts the stem, two convolutions a block, and the classifier.
        width: channels of the first stage, and of the stem before it.
        in_channels: 3 for colour images, 1 for grey ones.
    """

    mix_points: ClassVar = ("input", "layer1", "layer2")
    """Where manifold mixup may mix: the input, or the output of the module with that name."""

    def __init__(
        self, norm: Normalization, num_classes: int = 10, *, depth: int = 20, width: int = 16, in_channels: int = 3
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = norm.conv(in_channels, width, 3, padding=1), norm.norm(width)
        self.act1 = norm.activation(width, inplace=True)
        (self.layer1, self.layer2, self.layer3), outputs = make_stages(norm, Block, three_stages(depth), width)
        self.fc = nn.Linear(outputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.act1(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


class Widen(nn.Module):
    """Every ``stride``-th pixel, with channels of zeros around the others."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.before, self.stride = (outputs - inputs) // 2, stride
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class Block(BasicBlock):
    """conv-norm-activation and conv-norm, added to a shortcut without parameters."""

    @staticmethod
    def shortcut(norm: Normalization, inputs: int, outputs: int, stride: int) -> nn.Module | None:  # noqa: ARG004
        return None if stride == 1 and inputs == outputs else Widen(inputs, outputs, stride)
