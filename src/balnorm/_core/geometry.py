"""How the kernel of a layer meets its input: shapes only, no values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from balnorm._core.options import MassKind
from balnorm._core.torch_private import torch_transforms_the_program

__all__ = ["Geometry", "by_output", "channels_of", "from_by_output", "geometry_of", "over_space", "per_axis"]


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
    pads_beforehand: bool
    """Whether padding is a separate step, because torch's convolution does not support it."""
    is_pointwise: bool
    """Whether every weight multiplies every input of its channel: a 1x1 kernel, no stride and no padding."""
    padding_before: tuple[int, ...]
    """The padding as torch's convolutions take it, one number for both sides of an axis."""

    def pad(self, x: Tensor) -> Tensor:
        """Pad the spatial axes of ``x`` (N, C, *in)."""
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, [amount for axis in reversed(self.padding) for amount in axis], mode=mode)

    def pad_adjoint(self, gradient: Tensor, size: Sequence[int]) -> Tensor:
        """The adjoint of :meth:`pad`, for an input with spatial axes of this size."""
        with torch.enable_grad():  # padding is linear: any values will do
            x = gradient.new_zeros((*gradient.shape[:2], *size)).requires_grad_()
            return torch.autograd.grad(self.pad(x), x, gradient)[0]

    def padded(self) -> Geometry:
        """The geometry that is left once the input has been padded."""
        g = self
        return geometry_of(g.kernel, g.stride, 0, g.dilation, g.groups, "zeros", g.transposed, g.output_padding)

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

    def kind_of(self, mass: MassKind) -> MassKind:
        """Under a pointwise kernel the two masses are the same, and ``channel`` is the cheaper one."""
        return "channel" if self.is_pointwise else mass

    def statistics_shape(self, inputs: int, kind: MassKind) -> tuple[int, ...]:
        """The shape of the statistics of an input with this many channels."""
        return (1, inputs, *(self.kernel if kind == "position" else (1,) * len(self.kernel)))

    def divisor(self, size: Sequence[int], kind: MassKind) -> int:
        """How much each sample adds to the divisor of the sums: its output elements; for ``channel``, times the stride.

        With stride s a tap meets one input in s along each axis; in a transposed convolution it meets every input. So
        summed over the batch, this is the paper's r.
        """
        sizes = self.output_size(size)
        if not torch_transforms_the_program() and any(n < 0 for n in sizes):
            raise RuntimeError(f"a kernel of size {self.kernel} does not fit an input of size {tuple(size)}")
        return math.prod(sizes) * (1 if kind == "position" else self._steps)

    def exceeds(self, size: Sequence[int]) -> bool:
        """Whether the kernel is larger than the image that it is laid over, along any axis.

        Its outer taps then meet little but zeros, and the few taps that meet anything would carry the whole output.
        Networks do not train that way, so :meth:`gather` shares the image evenly among the taps. The image is the input
        (here of size ``size``), and for a transposed convolution the output; padding that repeats the image adds no
        zeros.
        """
        image = self.output_size(size) if self.transposed else size
        sides = zip(image, self.kernel, self.dilation, strict=True)
        return self.padding_mode == "zeros" and any(n <= d * (k - 1) for n, k, d in sides)

    def gather(self, field: Tensor, *, exact: bool = False) -> Tensor:
        """For each tap of the kernel, the sum of the inputs that it multiplies: (1, C, *in) to (1, C, *kernel).

        If the kernel :meth:`exceeds` the image, each tap gets the same part of the whole channel, unless ``exact``.
        """
        if not exact and self.exceeds(field.shape[2:]):
            return (over_space(field) / self._steps).expand(*field.shape[:2], *self.kernel)
        if self.pads_beforehand:
            return self.padded().gather(self.pad(field), exact=True)
        dtype = field.dtype
        fused = field.is_cuda and torch_transforms_the_program()  # as sums, it is one launch
        if not torch_transforms_the_program() and max(field.shape[2:]) > 4096 and field.device.type != "mps":
            field = field.double()  # in a long sum, float32 loses more than rounding error
        for meetings in self._meetings(field.shape[2:], field):
            field = field.movedim(2, -1)  # contracts the first spatial axis, appends one of the kernel
            field = (field.unsqueeze(-2) * meetings).sum(-1) if fused else field @ meetings.mT
        return field.to(dtype)

    def scatter(self, taps: Tensor, size: Sequence[int]) -> Tensor:
        """The adjoint of :meth:`gather`: (1, C, *kernel) to (1, C, *in), or to (1, C, 1, ..., 1) if it is constant."""
        if self.exceeds(size):
            return over_space(taps) / self._steps
        if self.pads_beforehand:
            widths = [n + sum(p) for n, p in zip(size, self.padding, strict=True)]
            return self.pad_adjoint(self.padded()._scatter(taps, widths), size)
        return self._scatter(taps, size)

    def _scatter(self, taps: Tensor, size: Sequence[int]) -> Tensor:
        for meetings in reversed(self._meetings(size, taps)):
            taps = (taps @ meetings).movedim(-1, 2)
        return taps

    @property
    def _steps(self) -> int:
        return 1 if self.transposed else math.prod(self.stride)

    def _meetings(self, size: Sequence[int], like: Tensor) -> list[Tensor]:
        """For each spatial axis, a matrix that is 1 where a tap (row) multiplies an input (column)."""
        sides = zip(size, self.output_size(size), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [self._meeting(n, out, k, s, p[0], d, like) for n, out, k, s, p, d in sides]

    def _meeting(self, n: int, out: int, k: int, s: int, p: int, d: int, like: Tensor) -> Tensor:
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
        if self.transposed:
            return _CONV_TRANSPOSE[axes](
                x, weight, bias, self.stride, self.padding_before, self.output_padding, self.groups, self.dilation
            )
        return _CONV[axes](x, weight, bias, self.stride, self.padding_before, self.dilation, self.groups)

    def convolve_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, needs: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of input, weight and bias; ``None`` if not needed, even if torch returns something."""
        if self.pads_beforehand:
            dx, dweight, dbias = self.padded().convolve_backward(dy, self.pad(x), weight, needs)
            return None if dx is None else self.pad_adjoint(dx, x.shape[2:]), dweight, dbias
        if not self.kernel:
            needs_x, needs_weight, needs_bias = needs
            return (
                dy @ weight if needs_x else None,
                dy.t() @ x if needs_weight else None,
                dy.sum(0) if needs_bias else None,
            )
        dx, dweight, dbias = _convolution_backward(
            dy,
            x,
            weight,
            [dy.shape[1]],
            self.stride,
            self.padding_before,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            needs,
        )
        return dx if needs[0] else None, dweight if needs[1] else None, dbias if needs[2] else None


_convolution_backward = torch.ops.aten.convolution_backward.default
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
    """The geometry that these arguments of a torch layer describe; ``geometry_of(())`` is that of a linear layer."""
    axes = len(kernel)
    if any(k < 1 for k in kernel):
        raise ValueError(f"every axis of a kernel needs at least one tap, got {tuple(kernel)}")
    dilations = per_axis(dilation, axes)
    strides = per_axis(stride, axes)
    if groups < 1 or any(n < 1 for n in (*strides, *dilations)):
        raise ValueError(f"stride, dilation and groups must be at least 1, got {stride!r}, {dilation!r} and {groups!r}")
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
        if any(before < 0 for before, _ in sides):
            raise ValueError(f"padding must not be negative, got {padding!r}")
    extra = per_axis(output_padding, axes)
    if any(not 0 <= e < max(s, d, 1) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise ValueError(f"output_padding must be smaller than stride or dilation, got {output_padding!r}")
    return Geometry(
        kernel,
        strides,
        sides,
        dilations,
        groups,
        padding_mode,
        transposed,
        extra,
        pads_beforehand=padding_mode != "zeros" or any(before != after for before, after in sides),
        is_pointwise=all(n == 1 for n in (*kernel, *strides)) and all(p == (0, 0) for p in sides),
        padding_before=tuple(before for before, _ in sides),
    )


def per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * axes
    values = tuple(value)
    if len(values) != axes:
        raise ValueError(f"expected an int or {axes} of them, got {value!r}")
    return values


def over_space(x: Tensor) -> Tensor:
    """``x`` (N, C, *in) summed over its spatial axes, to (N, C, 1, ..., 1)."""
    return x.sum(tuple(range(2, x.dim())), keepdim=True) if x.dim() > 2 else x


def channels_of(weight: Tensor, groups: int, transposed: bool) -> tuple[int, int]:
    """How many output and input channels a layer with this weight has."""
    first, second = weight.shape[0], weight.shape[1] * groups
    return (second, first) if transposed else (first, second)


def by_output(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """View ``weight`` as (groups, D / groups, C / groups, *kernel)."""
    grouped = weight.view(groups, weight.shape[0] // groups, *weight.shape[1:])
    return grouped.transpose(1, 2) if transposed else grouped


def from_by_output(weight: Tensor, transposed: bool) -> Tensor:
    """The inverse of :func:`by_output`."""
    return (weight.transpose(1, 2) if transposed else weight).flatten(0, 1)
