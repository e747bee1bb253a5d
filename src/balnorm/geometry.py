"""How the kernel of a layer meets its input: shapes only, no values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Geometry", "geometry_of", "per_axis"]


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

    @property
    def is_pointwise(self) -> bool:
        """Whether every weight multiplies every input of its channel: a 1x1 kernel, no stride and no padding."""
        return all(k == s == 1 for k, s in zip(self.kernel, self.stride, strict=True)) and all(
            p == (0, 0) for p in self.padding
        )

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
        for meetings in self._meetings(field.shape[2:], field):
            field = field.movedim(2, -1) @ meetings.mT  # the first spatial axis goes, an axis of the kernel comes last
        return field

    def spread(self, kernel: Tensor, size: Sequence[int]) -> Tensor:
        """The adjoint of :meth:`gather`, (1, C, *kernel) to (1, C, *in), of a geometry that does not pad beforehand."""
        for meetings in reversed(self._meetings(size, kernel)):
            kernel = (kernel @ meetings).movedim(-1, 2)
        return kernel

    def _meetings(self, size: Sequence[int], like: Tensor) -> list[Tensor]:
        """For each spatial axis, a matrix that is 1 where a tap (row) multiplies an input (column)."""
        sides = zip(size, self.output_size(size), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        axes = [(n, out, k, s, p[0], d) for n, out, k, s, p, d in sides]
        if all(axis == axes[0] for axis in axes):  # a square image under a square kernel
            return [self._meeting(axes[0], like)] * len(axes)
        return [self._meeting(axis, like) for axis in axes]

    def _meeting(self, axis: tuple[int, int, int, int, int, int], like: Tensor) -> Tensor:
        n, out, k, s, p, d = axis
        if s == d == 1 and not self.transposed:  # the usual case, in fewer steps: 0 <= input - tap + p < out
            return torch.ones(k, n, dtype=like.dtype, device=like.device).triu_(-p).tril_(out - 1 - p)
        inputs = torch.arange(n, device=like.device)
        taps = torch.arange(0, k * d, d, device=like.device).unsqueeze(1)
        if self.transposed:
            outputs = inputs * s + taps - p
            return ((outputs >= 0) & (outputs < out)).to(like.dtype)
        outputs = inputs - taps + p  # times the stride
        return ((outputs >= 0) & (outputs < out * s) & (outputs % s == 0)).to(like.dtype)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.kernel:
            return F.linear(x, weight, bias)
        if self.pads_beforehand:
            return self.padded().convolve(self.pad(x), weight, bias)
        axes = len(self.kernel) - 1
        padding = tuple(before for before, _ in self.padding)
        if self.transposed:
            return _CONV_TRANSPOSE[axes](
                x, weight, bias, self.stride, padding, self.output_padding, self.groups, self.dilation
            )
        return _CONV[axes](x, weight, bias, self.stride, padding, self.dilation, self.groups)


_CONV: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


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
    strides = per_axis(stride, axes)
    if padding == "same":
        if any(s != 1 for s in strides):
            raise ValueError(f"padding='same' is for stride 1, got stride {stride!r}")
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
        strides,
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
