"""Layers that treat every channel by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ChannelAffine"]


class ChannelAffine(nn.Module):
    r"""Multiplies each channel by a constant and adds a learned shift: y = factor x + bias.

    :func:`~balnorm.convert` replaces a trained BatchNorm that no convolution precedes by it, such as one of a
    sum. It computes what that norm computed in eval mode, in both modes, and keeps nothing of its input for the
    backward pass. :func:`~balnorm.fold` merges it into the next convolution, or makes it a depthwise one.

    Args:
        channels: the number of channels, which are the second dimension of the input.
        axes: how many dimensions follow the channels: 2 for images. ``fold`` needs to know; ``forward`` takes any.
        device, dtype: of the state.

    Attributes:
        factor: (channels,), a buffer that starts at 1. It may be negative or 0.
        bias: (channels,), a parameter that starts at 0.

    Example:
        >>> layer = ChannelAffine(16)
        >>> tuple(layer(torch.rand(8, 16, 32, 32)).shape)
        (8, 16, 32, 32)
    """

    factor: Tensor
    bias: nn.Parameter
    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]

    def __init__(
        self,
        channels: int,
        axes: int = 2,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.axes = channels, axes
        self.register_buffer("factor", torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        # As in BatchNorm, an input of lower precision (of autocast) gives an output of that precision, rounded once.
        dtype, shape = torch.promote_types(input.dtype, self.factor.dtype), (-1, *[1] * (input.dim() - 2))
        factor, bias = (values.to(dtype).view(shape) for values in (self.factor, self.bias))
        return torch.addcmul(bias, input.to(dtype), factor).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, axes={self.axes}"
