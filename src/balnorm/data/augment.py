"""Augmentation of whole batches at once: a crop and a mirror image are one gather of pixels, on any device."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ChannelStatistics", "Moves", "Pixels", "crop_and_flip", "draw_moves", "generator", "to_float"]

Pixels = Literal["unit", "standardized"]
"""What a network is fed: pixels in [0, 1], or with mean 0 and variance 1 in each channel."""


ChannelStatistics = tuple[Any, Any]
"""Mean and standard deviation of pixels in [0, 1], each as numbers for the channels."""


class Moves(NamedTuple):
    """How each image of a data set is to be moved in one epoch: (N,) each."""

    down: Tensor
    right: Tensor
    flip: Tensor

    def of(self, index: Tensor) -> Moves:
        return Moves(*(values[index] for values in self))

    def to(self, device: torch.device) -> Moves:
        return Moves(*(values.to(device) for values in self))


def generator(*key: int) -> torch.Generator:
    """A source of random numbers that depends on the key and on nothing else."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def draw_moves(images: int, padding: int, flip: bool, source: torch.Generator) -> Moves:
    """For every image a shift of up to ``padding`` pixels either way and, if ``flip``, a mirror image or not."""
    down, right = torch.randint(0, 2 * padding + 1, (2, images), generator=source)
    flipped = torch.rand(images, generator=source) < 0.5 if flip else torch.zeros(images, dtype=torch.bool)
    return Moves(down, right, flipped)


def crop_and_flip(images: Tensor, moves: Moves, padding: int) -> Tensor:
    """Pad with black, cut out at each image's own place, mirror where asked.

    Args:
        images: (N, C, H, W), of any dtype.
        moves: for each image, with shifts from 0 to twice the ``padding``; ``padding`` itself moves nothing.
        padding: in pixels, on every side.

    Returns:
        (N, C, H, W) in channels_last.

    Example:
        >>> image = torch.arange(4).view(1, 1, 2, 2)
        >>> crop_and_flip(image, Moves(torch.tensor([1]), torch.tensor([1]), torch.tensor([True])), padding=1)
        tensor([[[[1, 0],
                  [3, 2]]]])
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (padding,) * 4)
    rows = moves.down.unsqueeze(1) + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(len(images), -1)
    columns = torch.where(moves.flip.unsqueeze(1), width - 1 - columns, columns) + moves.right.unsqueeze(1)
    sample = torch.arange(len(images), device=images.device)
    # Index arrays around a slice put the slice last: (N, H, W, C) in memory.
    return padded[sample[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def to_float(images: Tensor, pixels: Pixels, statistics: ChannelStatistics | None = None) -> Tensor:
    """uint8 pixels as float32, in channels_last: in [0, 1], or standardised with mean and standard deviation."""
    x = images.to(torch.float32, memory_format=torch.channels_last)
    if pixels == "unit":
        return x.div_(255)
    if pixels != "standardized":
        raise ValueError(f"pixels must be 'unit' or 'standardized', got {pixels!r}")
    if statistics is None:
        raise ValueError("standardized pixels need the data set's mean and standard deviation: statistics=(mean, std)")
    mean, std = (torch.as_tensor(values).to(x).view(1, -1, 1, 1) for values in statistics)
    return x.sub_(255 * mean).div_(255 * std)
