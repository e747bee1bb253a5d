"""Augmentation of whole batches at once, on any device."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ChannelStatistics", "Moves", "Pixels", "crop_and_flip", "draw_moves", "generator", "to_float"]

Pixels = Literal["unit", "standardised"]
"""The network's input: pixels in [0, 1], or with mean 0 and variance 1 in each channel."""


ChannelStatistics = tuple[Any, Any]
"""Mean and standard deviation of pixels in [0, 1], for each channel."""


class Moves(NamedTuple):
    """How to move each image of a data set in one epoch; each field has shape (N,)."""

    down: Tensor
    right: Tensor
    flip: Tensor

    def of(self, index: Tensor) -> Moves:
        return Moves(*(values[index] for values in self))


def generator(*key: int) -> torch.Generator:
    """A random generator that depends only on the key."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def draw_moves(images: int, padding: int, flip: bool, source: torch.Generator) -> Moves:
    """Draw a shift of up to ``padding`` pixels for every image and, if ``flip``, whether to mirror it."""
    down, right = torch.randint(0, 2 * padding + 1, (2, images), generator=source)
    flipped = torch.rand(images, generator=source) < 0.5 if flip else torch.zeros(images, dtype=torch.bool)
    return Moves(down, right, flipped)


def crop_and_flip(images: Tensor, moves: Moves, padding: int) -> Tensor:
    """Pad with black, crop each image at its own position, and mirror some.

    Args:
        images: (N, C, H, W), of any dtype, fastest in channels_last.
        moves: for each image, on the CPU; shifts are from 0 to twice the ``padding``, which itself moves nothing.
        padding: in pixels, on every side.

    Returns:
        (N, C, H, W) in channels_last.

    Example:
        >>> image = torch.arange(4).view(1, 1, 2, 2)
        >>> crop_and_flip(image, Moves(torch.tensor([1]), torch.tensor([1]), torch.tensor([True])), padding=1)
        tensor([[[[1, 0],
                  [3, 2]]]])
    """
    count, channels, height, width = images.shape
    # In memory an image is rows of pixels of channels. A crop is then a window of the padded image, and its rows are
    # pieces of memory: copying them is far faster than picking pixels.
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, *(padding,) * 4)).contiguous()
    image, row, pixel, _ = padded.stride()
    places = 2 * padding + 1
    windows = padded.as_strided(
        (count, places, places, height, width * channels), (image, row, pixel, row, 1), padded.storage_offset()
    )
    device = images.device
    down, right = (shift.to(device, non_blocking=True) for shift in (moves.down, moves.right))
    cropped = windows[torch.arange(count, device=device), down, right].view(count, height, width, channels)
    mirrored = moves.flip.nonzero().squeeze(1).to(device, non_blocking=True)
    cropped[mirrored] = cropped[mirrored].flip(2)
    return cropped.permute(0, 3, 1, 2)


def to_float(images: Tensor, pixels: Pixels, statistics: ChannelStatistics | None = None) -> Tensor:
    """Convert uint8 pixels to float32 in channels_last: in [0, 1], or standardised with mean and standard deviation."""
    x = images.to(torch.float32, memory_format=torch.channels_last)
    if pixels == "unit":
        return x.div_(255)
    if pixels != "standardised":
        raise ValueError(f"pixels must be 'unit' or 'standardised', got {pixels!r}")
    if statistics is None:
        raise ValueError("standardised pixels need the data set's mean and standard deviation: statistics=(mean, std)")
    mean, std = (torch.as_tensor(values, dtype=torch.float64) for values in statistics)
    std = torch.where(std > 0, std, 1.0)  # a channel that never changes
    # A row of pixels at a time: long enough for vector instructions, which three channels are not.
    rows = x.permute(0, 2, 3, 1).flatten(2)
    scale, shift = (values.repeat(x.shape[3]).to(x, non_blocking=True) for values in (1 / (255 * std), -mean / std))
    rows.mul_(scale).add_(shift)
    return x
