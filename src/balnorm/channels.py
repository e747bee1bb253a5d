"""Layers that treat each channel separately."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from balnorm._core.torch_private import recomputing, sum_over_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

__all__ = ["ChannelAffine", "ChannelCentre"]


class ChannelAffine(nn.Module):
    r"""Multiplies each channel by a constant and adds a learned shift: y = factor x + bias.

    :func:`~balnorm.convert` replaces a trained BatchNorm by it if no convolution precedes the norm, for example after
    a sum. It computes what that norm computed in eval mode, in both modes, and keeps nothing of its input for the
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


class ChannelCentre(nn.Module):
    r"""Subtracts each channel's mean and adds a learned shift: y = x - mean(x) + bias.

    It is the additive half of BatchNorm (mean-only batch normalisation, `Salimans and Kingma 2016
    <https://arxiv.org/abs/1602.07868>`_), and keeps nothing of its input for the backward pass. Use it beside balanced
    layers, before a ReLU whose input no norm centres, as in pre-activation networks.

    In training, the mean is that of the batch and all positions. In eval mode it is the running one, which moves by
    ``max(momentum, 1 / num_batches_tracked)`` at each batch; a batch that is empty or not finite does not move it.
    :func:`~balnorm.fold` merges the layer into a convolution before or after it, or makes it a depthwise one.

    Args:
        channels: the number of channels, which are the second dimension of the input.
        axes: how many dimensions follow the channels: 2 for images. ``fold`` needs to know; ``forward`` takes any.
        momentum: weight of the newest batch in the running mean; ``None`` is the simple average of all batches.
        sync_stats: in training, take the mean over all processes, if :mod:`torch.distributed` is initialised.
        process_group: the processes to sum over; ``None`` is all of them.
        device, dtype: of the state.

    Attributes:
        bias: (channels,), a parameter that starts at 0.
        running_mean: (channels,), a buffer that starts at 0.
        num_batches_tracked: the number of batches in it.
        stats_frozen: if ``True``, the layer uses the running mean and does not update it, in training mode too.

    Example:
        >>> layer = ChannelCentre(16)
        >>> bool(layer(torch.rand(8, 16, 32, 32)).mean((0, 2, 3)).abs().max() < 1e-6)
        True
    """

    bias: nn.Parameter
    running_mean: Tensor
    num_batches_tracked: Tensor
    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]

    def __init__(
        self,
        channels: int,
        axes: int = 2,
        momentum: float | None = 0.1,
        *,
        sync_stats: bool = False,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if momentum is not None and not 0.0 <= momentum <= 1.0:
            raise ValueError(f"momentum must be None (the simple average) or between 0 and 1, got {momentum!r}")
        if process_group is not None and not sync_stats:
            raise ValueError("process_group needs sync_stats=True: without it nothing is sent between processes")
        self.channels, self.axes, self.momentum = channels, axes, momentum
        self.sync_stats, self.process_group = sync_stats, process_group
        self.stats_frozen = False
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros(channels, device=device, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.zeros((), device=device, dtype=torch.long))

    def reset_running_stats(self) -> None:
        """Forget the running mean: until the next batch in training mode, it is 0."""
        self.running_mean.zero_()
        self.num_batches_tracked.zero_()

    def forward(self, input: Tensor) -> Tensor:
        # As in BatchNorm, an input of lower precision (of autocast) gives an output of that precision, rounded once.
        dtype, shape = torch.promote_types(input.dtype, self.bias.dtype), (-1, *[1] * (input.dim() - 2))
        mean = self._batch_mean(input) if self.training and not self.stats_frozen else self.running_mean
        return (input.to(dtype) + (self.bias - mean).to(dtype).view(shape)).to(input.dtype)

    def fuse(self) -> ChannelAffine:
        """Return the constant layer that computes what this one computes in eval mode."""
        layer = ChannelAffine(self.channels, self.axes, device=self.bias.device, dtype=self.bias.dtype)
        shift = (self.bias - self.running_mean).detach()
        layer.bias = nn.Parameter(shift, requires_grad=self.bias.requires_grad)
        return layer.train(self.training)

    def _batch_mean(self, input: Tensor) -> Tensor:
        """The mean of this batch, which is also added to the running one."""
        over = (0, *range(2, input.dim()))
        # Built on the device: copying a number from the host would wait for the device.
        total = input.sum(over, dtype=torch.promote_types(input.dtype, torch.float32))
        elements = total.new_full((1,), input[:, 0].numel())
        if self.sync_stats and torch.distributed.is_available() and torch.distributed.is_initialized():
            both = sum_over_processes(torch.cat([total, elements]), self.process_group)
            total, elements = both[:-1], both[-1:]
        mean = total / elements.clamp(min=1)
        if not recomputing():
            self._track(mean.detach(), elements.detach())
        return mean

    @torch.no_grad()
    def _track(self, mean: Tensor, elements: Tensor) -> None:
        usable = mean.to(self.running_mean.dtype).isfinite().all() & (elements[0] > 0)
        self.num_batches_tracked.add_(usable)
        # at most 1: if the very first batch is not usable, the count is 0 and its reciprocal infinite
        rate = self.num_batches_tracked.to(mean.dtype).reciprocal().clamp(self.momentum or 0.0, 1.0)
        moved = torch.lerp(self.running_mean.to(mean.dtype), mean, rate).to(self.running_mean.dtype)
        self.running_mean.copy_(torch.where(usable, moved, self.running_mean))

    def extra_repr(self) -> str:
        frozen = ", stats_frozen=True" if self.stats_frozen else ""
        return f"{self.channels}, axes={self.axes}, momentum={self.momentum}{frozen}"
