"""The stages of ResNets, for any kind of block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from balnorm.bench.norms import Normalization

__all__ = ["BLOCKS", "make_stages", "three_stages"]

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks in each stage of a ResNet, by depth. From depth 50 on they are bottlenecks."""


def make_stages(norm: Normalization, block: Any, counts: Sequence[int], width: int) -> tuple[list[nn.Sequential], int]:
    """The stages, of ``width`` channels and twice as many in each that follows, and the channels of their output.

    ``counts`` are the blocks of each. ``block(norm, inputs, planes, stride)`` makes a block whose output has
    ``block.expansion`` times as many channels.
    """
    inputs, stages = width, []
    for number, count in enumerate(counts):
        blocks, planes = [], width * 2**number
        for index in range(count):
            blocks.append(block(norm, inputs, planes, 2 if number and index == 0 else 1))
            inputs = planes * block.expansion
        stages.append(nn.Sequential(*blocks))
    return stages, inputs


def three_stages(depth: int) -> tuple[int, int, int]:
    """The blocks of two convolutions in each of three stages: n for a depth of 6 n + 2."""
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"the depth of such a ResNet is 6 n + 2: 8, 14, 20, 26, ..., got {depth}")
    return blocks, blocks, blocks
