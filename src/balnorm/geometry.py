"""How the kernel of a layer meets its input: shapes only, no values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CONV", "CONV_TRANSPOSE", "Geometry", "geometry_of", "per_axis"]


class Geometry(NamedTuple):
    """The shape of a convolution: everything but the tensors. A linear layer is a convolution over no axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    transposed: bool
    output_padding: tuple[int, ...]

    @property
    def pads_beforehand(self) -> bool:
        """Whether the padding is a step of its own, because the convolution cannot do it."""
        return self.padding_mode != "zeros" or any(before != after for before, after in self.padding)

    def pad(self, x: Tensor) -> Tensor:
        """Pad the spatial axes of ``x`` (N, C, *in), the last axis first as torch wants it."""
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, [amount for axis in reversed(self.padding) for amount in axis], mode=mode)

    def padded(self) -> Geometry:
        """The geometry that is left when the input has been padded already."""
        return self._replace(padding=((0, 0),) * len(self.kernel), padding_mode="zeros")

    def output_size(self, size: Sequence[int]) -> tuple[int, ...]:
        if self.transposed:
            return tuple(
                (n - 1) * s - sum(p) + d * (k - 1) + extra + 1
                for n, k, s, p, d, extra in zip(
                    size, self.kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=True
                )
            )
        return tuple(
            (n + sum(p) - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        )

    def channel_count(self, size: Sequence[int]) -> int:
        """The paper's r for one sample of an input of this size: what makes a channel's sum its mass."""
        outputs = math.prod(self.output_size(size))
        return outputs if self.transposed else outputs * math.prod(self.stride)

    def gather(self, field: Tensor) -> Tensor:
        """For each tap of the kernel, the sum of the inputs that it multiplies: (1, C, *in) to (1, C, *kernel)."""
        if self.pads_beforehand:
            return self.padded().gather(self.pad(field))
        # One axis at a time: the first spatial axis goes, an axis of the kernel comes last.
        for taps in self._taps(field.shape[2:]):
            field = torch.stack([field[:, :, tap].sum(2) for tap in taps], dim=-1)
        return field

    def spread(self, kernel: Tensor, size: Sequence[int]) -> Tensor:
        """The adjoint of :meth:`gather`, (1, C, *kernel) to (1, C, *in), of a geometry that does not pad beforehand."""
        for taps, n in zip(reversed(self._taps(size)), reversed(size), strict=True):
            field = kernel.new_zeros(*kernel.shape[:2], n, *kernel.shape[2:-1])
            for tap, values in zip(taps, kernel.unbind(-1), strict=True):
                field[:, :, tap] += values.unsqueeze(2)
            kernel = field
        return kernel

    def _taps(self, size: Sequence[int]) -> list[list[slice]]:
        """For each axis, the inputs that each tap of the kernel multiplies."""
        axes = zip(size, self.output_size(size), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [[self._tap(n, out, s, j * d - p[0]) for j in range(k)] for n, out, k, s, p, d in axes]

    def _tap(self, size: int, out: int, stride: int, offset: int) -> slice:
        # The input and output positions that meet at this tap: fine = coarse * stride + offset, with the input the fine
        # one in a convolution and the coarse one in a transposed convolution.
        fine, coarse = (out, size) if self.transposed else (size, out)
        first = max(0, -(offset // stride))
        last = min(coarse - 1, (fine - 1 - offset) // stride)
        if last < first:
            return slice(0, 0)
        if self.transposed:
            return slice(first, last + 1)
        return slice(first * stride + offset, last * stride + offset + 1, stride)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.kernel:
            return F.linear(x, weight, bias)
        if self.pads_beforehand:
            return self.padded().convolve(self.pad(x), weight, bias)
        axes = len(self.kernel) - 1
        padding = tuple(before for before, _ in self.padding)
        if self.transposed:
            return CONV_TRANSPOSE[axes](
                x, weight, bias, self.stride, padding, self.output_padding, self.groups, self.dilation
            )
        return CONV[axes](x, weight, bias, self.stride, padding, self.dilation, self.groups)


CONV: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
CONV_TRANSPOSE: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def geometry_of(
    kernel: tuple[int, ...],
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
) -> Geometry:
    axes = len(kernel)
    dilations = per_axis(dilation, axes)
    if padding == "same":
        missing = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        sides = tuple((n // 2, n - n // 2) for n in missing)
    elif padding == "valid":
        sides = ((0, 0),) * axes
    elif isinstance(padding, str):
        raise ValueError(f"padding must be 'same', 'valid', an int or an int for each axis, got {padding!r}")
    else:
        sides = tuple((p, p) for p in per_axis(padding, axes))
    return Geometry(
        kernel,
        per_axis(stride, axes),
        sides,
        dilations,
        groups,
        padding_mode,
        transposed,
        per_axis(output_padding, axes),
    )


def per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * axes
    values = tuple(value)
    if len(values) != axes:
        raise ValueError(f"expected an int or {axes} of them, got {value!r}")
    return values
