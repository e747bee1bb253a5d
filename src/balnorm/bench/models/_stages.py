"""The stages of ResNets, whatever their blocks are."""

from __future__ import annotations

from typing import Any

from torch import nn

from balnorm.bench.models import BLOCKS
from balnorm.bench.norms import Normalization

__all__ = ["make_stages"]


def make_stages(norm: Normalization, block: Any, depth: int, width: int) -> tuple[list[nn.Sequential], int]:
    """The four stages, of ``width`` channels and twice as many in each that follows, and the channels of their output.

    ``block(norm, inputs, planes, stride)`` makes a block whose output has ``block.expansion`` times as many channels.
    """
    inputs, stages = width, []
    for number, count in enumerate(BLOCKS[depth]):
        blocks, planes = [], width * 2**number
        for index in range(count):
            blocks.append(block(norm, inputs, planes, 2 if number and index == 0 else 1))
            inputs = planes * block.expansion
        stages.append(nn.Sequential(*blocks))
    return stages, inputs
