"""A weight as a matrix with a row for each output kernel, over which the method sums."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from balnorm._core.geometry import Geometry, by_output, from_by_output
from balnorm._core.method import like_weight
from balnorm._core.options import MassKind

__all__ = ["WeightMatrix", "same_order"]


class WeightMatrix(NamedTuple):
    """A weight as output kernels (D, C / groups, *kernel), dense in memory and in at least float32.

    Its rows are these kernels in the order of memory, a matrix (D, n), or (groups, D / groups, n) where there is more
    than one group. So a weight in channels_last format is not copied. Statistics become rows in the same order.
    """

    values: Tensor
    groups: int
    transposed: bool
    channels_last: bool

    @classmethod
    def of(cls, weight: Tensor, geometry: Geometry, channels_last: bool | None = None) -> WeightMatrix:
        """The matrix of a weight, in the order of its memory if that is dense, or in the order asked for."""
        values = weight
        if geometry.transposed:
            values = by_output(weight, geometry.groups, True).flatten(0, 1)
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        axes = values.dim() - 2
        if channels_last is None:
            if values.is_contiguous():
                return cls(values, geometry.groups, geometry.transposed, False)
            channels_last = axes in _CHANNELS_LAST and values.is_contiguous(memory_format=_CHANNELS_LAST[axes])
        values = values.contiguous(memory_format=_CHANNELS_LAST[axes] if channels_last else torch.contiguous_format)
        return cls(values, geometry.groups, geometry.transposed, channels_last)

    def like(self, gradient: Tensor, convert: bool = True) -> Tensor:
        """A gradient of the weight, as kernels in the same order and (``convert``) precision."""
        if self.transposed:
            gradient = by_output(gradient, self.groups, True).flatten(0, 1)
        dtype = self.values.dtype if convert else gradient.dtype
        if gradient.dtype == dtype and same_order(gradient, self.values):
            return gradient
        return torch.empty_like(self.values, dtype=dtype).copy_(gradient)

    def rows(self, kernels: Tensor) -> Tensor:
        outputs = kernels.shape[0]
        terms = kernels.numel() // outputs
        if self.groups == 1:
            return kernels.as_strided((outputs, terms), (terms, 1))
        rows = outputs // self.groups
        return kernels.as_strided((self.groups, rows, terms), (rows * terms, terms, 1))

    def kernels(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`rows`."""
        return rows.as_strided(self.values.shape, self.values.stride())

    def weight(self, kernels: Tensor, like: Tensor) -> Tensor:
        """Kernels as a weight again, in the memory format of ``like``."""
        if not self.transposed:
            return kernels
        shape = kernels.shape
        grouped = kernels.view(self.groups, shape[0] // self.groups, *shape[1:])
        return like_weight(from_by_output(grouped, True), like)

    def row(self, mass: Tensor) -> Tensor:
        """Statistics (1, C, ...), as a row for each group, in the order of the weight's rows."""
        inputs, taps = self._inputs_and_taps()
        groups = () if self.groups == 1 else (self.groups,)
        by_tap = mass.reshape(*groups, inputs, math.prod(mass.shape[2:])).expand(*groups, inputs, taps)
        return (by_tap.mT if self.channels_last else by_tap).reshape(*groups, 1, inputs * taps)

    def statistic(self, row: Tensor, kind: MassKind) -> Tensor:
        """The adjoint of :meth:`row`: (1, C, ...), sums over the taps that share a statistic."""
        inputs, taps = self._inputs_and_taps()
        shape = (*row.shape[:-2], taps, inputs) if self.channels_last else (*row.shape[:-2], inputs, taps)
        by_tap = row.view(shape).mT if self.channels_last else row.view(shape)
        kernel = self.values.shape[2:]
        if kind == "position":
            return by_tap.reshape(1, self.groups * inputs, *kernel)
        return by_tap.sum(-1).view(1, self.groups * inputs, *(1,) * len(kernel))

    def _inputs_and_taps(self) -> tuple[int, int]:
        return self.values.shape[1], math.prod(self.values.shape[2:])


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one shape have the same layout; the stride of an axis with one element does not matter."""
    return a.stride() == b.stride() or all(
        n <= 1 or i == j for n, i, j in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


_CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
