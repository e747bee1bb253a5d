"""Batches of images. Their order and augmentation are pure functions of seed and epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from balnorm.bench.data.augment import ChannelStatistics, Pixels, crop_and_flip, draw_moves, generator, to_float
from balnorm.bench.data.sources import Images

__all__ = ["MemoryLoader", "Shares"]

_ORDER, _MOVES = 1, 2  # so that the two draws of an epoch have nothing in common


@dataclass(frozen=True)
class Shares:
    """The images that a process gets, batch by batch.

    In training every epoch has its own order, and a last batch that is not full in all processes is left out; the
    batches of the processes are adjacent. Otherwise all images come in order, and each process gets every ``world``-th.
    """

    images: int
    batch_size: int
    training: bool
    seed: int
    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be from 0 to {self.world - 1}, got {self.rank}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        most = self.images // self.world
        if self.training and self.batch_size > most:
            raise ValueError(f"batch_size must be from 1 to {most} for {self.images} images, got {self.batch_size}")

    def __len__(self) -> int:
        """Batches in an epoch."""
        if self.training:
            return self.images // (self.batch_size * self.world)
        return math.ceil(len(range(self.rank, self.images, self.world)) / self.batch_size)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """The indices of each batch, starting at number ``start``."""
        if self.training:
            order = torch.randperm(self.images, generator=generator(self.seed, epoch, _ORDER))
            for step in range(start, len(self)):
                first = (step * self.world + self.rank) * self.batch_size
                yield order[first : first + self.batch_size]
        else:
            mine = torch.arange(self.images)[self.rank :: self.world]
            yield from (
                mine[i : i + self.batch_size] for i in range(start * self.batch_size, len(mine), self.batch_size)
            )


class MemoryLoader:
    """Batches of a data set in memory, augmented a batch at a time, without worker processes.

    In training every epoch has its own order and every image its own crop and flip, whichever process gets it (see
    :class:`Shares`); otherwise the images are unchanged.

    Args:
        data: the images.
        batch_size: of this process.
        training: whether to shuffle and augment.
        seed: of order and augmentation.
        padding: largest shift in pixels; 0 for none.
        flip: whether to mirror half of the images.
        pixels: ``"unit"`` or ``"standardised"``.
        statistics: mean and standard deviation of each channel, for standardised pixels.
        rank, world: which process this is, and of how many.
        device: where the images are kept and the batches made.

    Example:
        >>> from balnorm.bench.data import load
        >>> loader = MemoryLoader(load("digits", ".", "train"), 128, training=True, seed=3, padding=1)
        >>> len(loader)
        11
        >>> images, labels = next(loader.epoch(0))
        >>> images.shape, images.dtype
        (torch.Size([128, 1, 8, 8]), torch.float32)
    """

    def __init__(
        self,
        data: Images,
        batch_size: int,
        *,
        training: bool,
        seed: int = 0,
        padding: int = 0,
        flip: bool = False,
        pixels: Pixels = "unit",
        statistics: ChannelStatistics | None = None,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shares = Shares(len(data), batch_size, training, seed, rank, world)
        self.images = torch.from_numpy(data.images).to(device, memory_format=torch.channels_last)
        self.labels = torch.from_numpy(data.labels).to(device)
        self.padding, self.flip = padding, flip
        self.pixels: Pixels = pixels
        self.statistics = statistics
        self._floats(self.images[:1])  # bad options fail now

    def __len__(self) -> int:
        return len(self.shares)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, starting at number ``start``, so that a resumed run need not repeat earlier ones."""
        if epoch < 0 or start < 0:
            raise ValueError(f"epoch and start must not be negative, got {epoch} and {start}")
        device, moves = self.images.device, None
        if self.shares.training and (self.padding or self.flip):
            source = generator(self.shares.seed, epoch, _MOVES)
            moves = draw_moves(len(self.labels), self.padding, self.flip, source)
        for batch in self.shares.batches(epoch, start):
            index = batch.to(device, non_blocking=True)  # the steps before need not be finished
            images = self.images[index]
            if moves is not None:
                images = crop_and_flip(images, moves.of(batch), self.padding)
            yield self._floats(images), self.labels[index]

    def _floats(self, images: Tensor) -> Tensor:
        return to_float(images, self.pixels, self.statistics)
