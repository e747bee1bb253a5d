"""Every normalisation that the paper names, and some that came later, as factories of layers.

A method that normalises activations makes a plain convolution and a norm; one that normalises weights makes its own
convolution and an identity. A network calls both in its natural order, conv-norm-relu or norm-relu-conv, so it is
written once for all of them.

>>> norm = NORMS["groupnorm"]
>>> norm.conv(3, 64, 3, padding=1)
Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
>>> norm.norm(64).num_groups
32
>>> get_norm("balnorm", mass="position").conv(3, 64, 3).mass
'position'
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from balnorm._core.method import leading_samples
from balnorm._core.torch_private import recomputing
from balnorm.channels import ChannelCentre
from balnorm.layers import BalNormConv2d

__all__ = [
    "NORMS",
    "BatchRenorm2d",
    "DynamicTanh2d",
    "FilterResponseNorm2d",
    "LeadingBatchNorm2d",
    "Normalization",
    "ThresholdedLinear",
    "get_norm",
    "set_progress",
]


def set_progress(model: nn.Module, progress: float) -> None:
    """Tell the layers that depend on it (batch renormalisation) what fraction of training is done, 0 to 1."""
    if not 0.0 <= progress <= 1.0:
        raise ValueError(f"progress must be between 0 and 1, got {progress!r}")
    for module in model.modules():
        if isinstance(module, BatchRenorm2d):
            module.progress.fill_(progress)


# --------------------------------------------------------------------------------------------------------------------
# Convolutions
# --------------------------------------------------------------------------------------------------------------------


def conv(*args: Any, bias: bool, **kwargs: Any) -> nn.Conv2d:
    layer = nn.Conv2d(*args, **{**kwargs, "bias": bias})
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def weight_normalized(*args: Any, bias: bool, **kwargs: Any) -> nn.Module:
    layer = conv(*args, bias=bias, **kwargs)
    weight_norm(layer, dim=0)
    return layer


class _Standardize(nn.Module):
    """Weights of mean 0 and variance 1 in each output channel."""

    def forward(self, weight: Tensor) -> Tensor:
        several = weight[0].numel() > 1
        std, mean = torch.std_mean(weight, dim=(1, 2, 3), correction=int(several), keepdim=True)
        return (weight - mean) / (std + 1e-5)


def weight_standardised(*args: Any, **kwargs: Any) -> nn.Module:
    layer = conv(*args, bias=False, **kwargs)
    parametrize.register_parametrization(layer, "weight", _Standardize())
    return layer


class _ScaledStandardize(nn.Module):
    """gain gamma (w - mean) / (std sqrt(fan_in)) in each output channel, with a learned gain that starts at 1.

    gamma is the inverse deviation of a rectified unit Gaussian: outputs have variance 1 after such inputs.
    """

    gamma = math.sqrt(2.0 / (1.0 - 1.0 / math.pi))

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, weight: Tensor) -> Tensor:
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        length = (variance * weight[0].numel()).clamp(min=1e-4).sqrt()  # the epsilon of its authors' code
        return (weight - mean) / length * (self.gamma * self.gain.view(-1, 1, 1, 1))


def scaled_weight_standardised(*args: Any, **kwargs: Any) -> nn.Module:
    made = conv(*args, bias=True, **kwargs)
    parametrize.register_parametrization(made, "weight", _ScaledStandardize(made.out_channels))
    return made


# --------------------------------------------------------------------------------------------------------------------
# Norms
# --------------------------------------------------------------------------------------------------------------------


def relu(_: int, inplace: bool = False) -> nn.Module:
    return nn.ReLU(inplace)


def identity(_: int) -> nn.Module:
    return nn.Identity()


def batch_norm(channels: int, stats_fraction: float = 1.0) -> nn.Module:
    return nn.BatchNorm2d(channels) if stats_fraction == 1.0 else LeadingBatchNorm2d(channels, stats_fraction)


def group_norm(channels: int) -> nn.Module:
    """32 groups, or the largest divisor of 32 that gives whole groups of at least two channels.

    Two is the least that the paper has, 64 channels in 32 groups; groups of one would be instance normalisation.
    """
    groups = math.gcd(32, channels)
    return nn.GroupNorm(groups // 2 if groups == channels > 1 else groups, channels)


def layer_norm(channels: int) -> nn.Module:
    """Over channels and space together, as the paper of group normalisation defines it for convolutions."""
    return nn.GroupNorm(1, channels)


def instance_norm(channels: int) -> nn.Module:
    return nn.InstanceNorm2d(channels, affine=True)


def local_response_norm(_: int) -> nn.Module:
    """AlexNet's: k = 2, n = 5, alpha = 1e-4, beta = 0.75. torch divides alpha by n, AlexNet does not."""
    return nn.LocalResponseNorm(size=5, alpha=5 * 1e-4, beta=0.75, k=2.0)


class LeadingBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm with the statistics of a leading fraction of the batch (at least one image), for all of it.

    The rest is torch's: parameters, running statistics and eval mode. It is the counterpart of BalNorm's
    ``stats_fraction``: noisier statistics, which regularise.

    Example:
        >>> x = torch.randn(8, 3, 4, 4)
        >>> norm, whole = LeadingBatchNorm2d(3, stats_fraction=0.25), nn.BatchNorm2d(3)
        >>> torch.allclose(norm(x)[:2], whole(x[:2]), atol=1e-6)
        True
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float | None

    def __init__(
        self, num_features: int, stats_fraction: float, eps: float = 1e-5, momentum: float | None = 0.1
    ) -> None:
        super().__init__(num_features, eps, momentum)
        self.stats_fraction = stats_fraction

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not input.numel():
            return super().forward(input)
        some = input[: leading_samples(input.shape[0], self.stats_fraction)].to(
            torch.promote_types(input.dtype, torch.float32)
        )
        variance, mean = torch.var_mean(some, (0, 2, 3), correction=0)
        if not recomputing():
            with torch.no_grad():
                count = some[:, 0].numel()
                self.num_batches_tracked.add_(1)
                rate = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
                self.running_var.lerp_((variance * (count / max(1, count - 1))).to(self.running_var), rate)
        scale, mean, bias = (
            each.view(1, -1, 1, 1) for each in (self.weight * (variance + self.eps).rsqrt(), mean, self.bias)
        )
        return ((input - mean) * scale + bias).to(input.dtype)  # in the precision of the statistics

    def extra_repr(self) -> str:
        return f"{self.num_features}, stats_fraction={self.stats_fraction}"


class BatchRenorm2d(nn.Module):
    r"""Batch renormalisation: normalise by the batch, then correct towards the running statistics, within limits.

    .. math::
        y = \gamma \left(\frac{x - \mu_B}{\sigma_B}\, r + d\right) + \beta, \qquad
        r = \mathrm{clip}\left(\frac{\sigma_B}{\sigma}, \frac{1}{r_{max}}, r_{max}\right), \qquad
        d = \mathrm{clip}\left(\frac{\mu_B - \mu}{\sigma}, -d_{max}, d_{max}\right)

    r and d are constants for the gradient. Their limits open as training proceeds, see :meth:`limits`; the training
    loop reports its progress with :func:`set_progress`. The running mean and standard deviation move by
    ``max(momentum, 1 / num_batches_tracked)`` at each batch, in float32 for any input. Eval mode normalises
    with them. With activation checkpointing, the repeated forward pass takes r and d from the statistics at that time.

    S. Ioffe, `Batch Renormalization <https://arxiv.org/abs/1702.03275>`_.
    """

    running_mean: Tensor
    running_std: Tensor
    num_batches_tracked: Tensor
    progress: Tensor

    def __init__(self, num_features: int, eps: float = 1e-3, momentum: float = 0.01) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features, dtype=torch.float32))
        self.register_buffer("running_std", torch.ones(num_features, dtype=torch.float32))
        self.register_buffer("progress", torch.zeros((), dtype=torch.float32))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long))

    def limits(self) -> tuple[Tensor, Tensor]:
        """r_max and d_max at this point in training.

        The paper trains for 130,000 steps until BatchNorm is at its best; it keeps r_max = 1 and d_max = 0, which
        is BatchNorm, for the first 5,000, and opens them to r_max = 3 at step 40,000 and d_max = 5 at step 25,000.
        """
        step = self.progress * 130_000
        r_max = 1.0 + 2.0 * ((step - 5_000) / 35_000).clamp(0.0, 1.0)
        d_max = 5.0 * ((step - 5_000) / 20_000).clamp(0.0, 1.0)
        return r_max, d_max

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        if not self.training or not input.numel():
            scale = self.weight / self.running_std.to(dtype)
            shift = self.bias - self.running_mean.to(dtype) * scale
            return (input * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)).to(input.dtype)
        with torch.no_grad():
            variance, mean = torch.var_mean(input.to(dtype), (0, 2, 3), correction=0)
            std = (variance + self.eps).sqrt()
            r_max, d_max = self.limits()
            r = (std / self.running_std).clamp(1.0 / r_max, r_max)
            d = ((mean - self.running_mean) / self.running_std).clamp(-d_max, d_max)
            self._track((self.running_mean, mean), (self.running_std, std))
        # (x - mu_B) / sigma_B is torch's own batch norm, with all of its gradient; r and d join its scale and shift.
        scale, shift = (values.to(self.weight.dtype) for values in (self.weight * r, self.weight * d + self.bias))
        return F.batch_norm(input, None, None, scale, shift, training=True, eps=self.eps)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = getattr(self, name)
            if new.is_floating_point() and torch.finfo(new.dtype).bits < 32:
                setattr(self, name, old.to(new.device))
        return self

    def _track(self, *updates: tuple[Tensor, Tensor]) -> None:
        """Add the statistics of a batch to the running ones, without waiting for the device."""
        if recomputing():
            return
        finite = torch.stack([values.isfinite().all() for _, values in updates]).all()
        self.num_batches_tracked.add_(finite)
        rate = self.num_batches_tracked.clamp(min=1).to(torch.float32).reciprocal().clamp(min=self.momentum)
        for running, values in updates:
            moved = torch.lerp(running, values.to(running.dtype), rate.to(running.dtype))
            running.copy_(torch.where(finite, moved, running))

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class FilterResponseNorm2d(nn.Module):
    r"""Divide each channel of each image by its root mean square over space; no mean is subtracted.

    .. math:: y = \gamma \frac{x}{\sqrt{\nu^2 + \epsilon}} + \beta, \qquad \nu^2 = \mathrm{mean}_{hw}\, x^2

    Its activation is the :class:`ThresholdedLinear`. Singh and Krishnan 2020, `Filter Response Normalization Layer
    <https://arxiv.org/abs/1911.09737>`_, without the epsilon that they learn for images of a single pixel.

    Example:
        >>> y = FilterResponseNorm2d(3)(torch.randn(2, 3, 8, 8) * 5)
        >>> torch.allclose(y.square().mean((2, 3)), torch.ones(2, 3))
        True
    """

    def __init__(self, num_features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, input: Tensor) -> Tensor:
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        scale = (x.square().mean((2, 3), keepdim=True) + self.eps).rsqrt() * self.weight.view(1, -1, 1, 1)
        return (x * scale + self.bias.view(1, -1, 1, 1)).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


class ThresholdedLinear(nn.Module):
    """max(x, tau) with a threshold learned for each channel, from 0: the activation of filter response normalisation.

    Example:
        >>> ThresholdedLinear(1)(torch.tensor([-1.0, 2.0]).view(2, 1, 1, 1)).flatten().tolist()
        [0.0, 2.0]
    """

    def __init__(self, num_features: int, inplace: bool = False) -> None:  # noqa: ARG002  # tau's gradient needs x
        super().__init__()
        self.num_features = num_features
        self.threshold = nn.Parameter(torch.zeros(num_features))

    def forward(self, input: Tensor) -> Tensor:
        return torch.maximum(input, self.threshold.view(1, -1, 1, 1).to(input.dtype))

    def extra_repr(self) -> str:
        return f"{self.num_features}"


class DynamicTanh2d(nn.Module):
    """gamma tanh(alpha x) + beta: no statistics at all. alpha is one learned number, from 0.5.

    Zhu, Chen, He, LeCun and Liu 2025, `Transformers without Normalization <https://arxiv.org/abs/2503.10622>`_.

    Example:
        >>> DynamicTanh2d(1)(torch.full((1, 1, 1, 1), 1e3)).item()
        1.0
    """

    def __init__(self, num_features: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.num_features = num_features
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, input: Tensor) -> Tensor:
        y = torch.tanh(self.alpha * input) * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)
        return y.to(input.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}"


# --------------------------------------------------------------------------------------------------------------------
# By name
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normalization:
    """A way to normalise a convolutional network.

    Attributes:
        conv: makes a convolution, with the arguments of :class:`torch.nn.Conv2d` up to ``groups``. Its weights start
            normal with variance 2 / fan_out (He et al.), and it has a bias unless the norm beside it would cancel that.
        norm: makes the layer beside the convolution, for a number of channels.
        source: the publication.
        options: the names of the options that :func:`get_norm` takes for it.
        activation: makes the layer after the norm, for a number of channels: a ReLU, unless the method has its own.
            With ``inplace=True`` it may overwrite its input.
        follows_progress: whether its layers need to know, from :func:`set_progress`, how far training is.
    """

    conv: Callable[..., nn.Module]
    norm: Callable[[int], nn.Module]
    source: str
    options: tuple[str, ...] = ()
    activation: Callable[..., nn.Module] = relu
    follows_progress: bool = False


def get_norm(norm: str | Normalization, **options: Any) -> Normalization:
    """A normalisation by name, or the one given, with options of its layers.

    The options of ``balnorm`` are keyword arguments of :class:`balnorm.BalNormConv2d`, and ``centre_stream``, which
    puts a :class:`balnorm.ChannelCentre` in BatchNorm's place: for pre-activation networks. ``batchnorm`` has
    ``stats_fraction``.
    """
    if isinstance(norm, str) and norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    found = NORMS[norm] if isinstance(norm, str) else norm
    for name in options:
        if name not in found.options:
            raise ValueError(f"{norm} has no option {name!r}; it has {', '.join(found.options) or 'none'}")
    if not options:
        return found
    if options.pop("centre_stream", False):
        # A channel's mean is subtracted from every sum that its bias would be part of.
        return replace(found, conv=functools.partial(found.conv, bias=False, **options), norm=ChannelCentre)
    if found.norm is identity:  # it normalises weights
        return replace(found, conv=functools.partial(found.conv, **options))
    return replace(found, norm=functools.partial(found.norm, **options))


_unbiased, _biased = functools.partial(conv, bias=False), functools.partial(conv, bias=True)

NORMS: dict[str, Normalization] = {
    "balnorm": Normalization(
        BalNormConv2d,
        identity,
        "Defazio and Bottou 2018, Controlling Covariate Shift using Balanced Normalization of Weights",
        options=("one_pass", "mass", "stats_fraction", "output_scale", "shift", "centred", "equalise", "centre_stream"),
    ),
    "batchnorm": Normalization(
        _unbiased,
        batch_norm,
        "Ioffe and Szegedy 2015, Batch Normalization: Accelerating Deep Network ...",
        options=("stats_fraction",),
    ),
    "groupnorm": Normalization(_unbiased, group_norm, "Wu and He 2018, Group Normalization"),
    "layernorm": Normalization(_unbiased, layer_norm, "Ba, Kiros and Hinton 2016, Layer Normalization"),
    "instancenorm": Normalization(
        _unbiased,
        instance_norm,
        "Ulyanov, Vedaldi and Lempitsky 2016, Instance Normalization",
    ),
    "batchrenorm": Normalization(
        _unbiased,
        BatchRenorm2d,
        "Ioffe 2017, Batch Renormalization",
        follows_progress=True,
    ),
    "weightnorm": Normalization(
        functools.partial(weight_normalized, bias=True),
        identity,
        "Salimans and Kingma 2016, Weight Normalization",
    ),
    "weightnorm-meanonly": Normalization(
        functools.partial(weight_normalized, bias=False),
        ChannelCentre,
        "Salimans and Kingma 2016, Weight Normalization, section 3 and the CIFAR-10 experiments",
    ),
    "lrn": Normalization(
        _biased,
        local_response_norm,
        "Krizhevsky, Sutskever and Hinton 2012, ImageNet Classification ...",
    ),
    "weightstandardization": Normalization(
        weight_standardised,
        group_norm,
        "Qiao, Wang, Liu, Shen and Yuille 2019, Micro-Batch Training with ...",
    ),
    "weightstandardization-scaled": Normalization(
        scaled_weight_standardised,
        identity,
        "Brock, De and Smith 2021, Characterizing signal propagation to close the performance gap in ...",
    ),
    "frn": Normalization(
        _unbiased,
        FilterResponseNorm2d,
        "Singh and Krishnan 2020, Filter Response Normalization Layer",
        activation=ThresholdedLinear,
    ),
    "dynamictanh": Normalization(
        _biased,
        DynamicTanh2d,
        "Zhu, Chen, He, LeCun and Liu 2025, Transformers without Normalization",
    ),
    "none": Normalization(_biased, identity, "no normalisation; weights as of He et al. 2015"),
}
"""Every normalisation by its name."""
