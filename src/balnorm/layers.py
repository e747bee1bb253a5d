"""The layers. They hold state and make one call each; the maths is in :mod:`balnorm.core`."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from balnorm.core import conv
from balnorm.core.balance import balance
from balnorm.core.geometry import Geometry, channels_of, geometry_of
from balnorm.core.options import LayerOptions, Options
from balnorm.core.plan import Plan
from balnorm.core.torch_private import is_watched, output_padding_for, torch_transforms_the_program
from balnorm.init import balanced_normal_, unit_variance_scale

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "BALANCED",
    "HAS_HOOKS",
    "BalNormConv1d",
    "BalNormConv2d",
    "BalNormConv3d",
    "BalNormConvTranspose1d",
    "BalNormConvTranspose2d",
    "BalNormConvTranspose3d",
    "BalNormLayer",
    "BalNormLinear",
    "BalNormWarning",
    "LayerOptions",
    "exact_mass",
    "is_readable",
    "layer_geometry",
    "layer_plan",
    "warn",
]


class BalNormWarning(UserWarning):
    """A balanced layer may not do what you expect. The message says why and what helps.

    Each layer warns once. ``warnings.simplefilter("ignore", BalNormWarning)`` silences all of them.
    """


class BalNormLayer(nn.Module):
    """The base of all balanced layers: options, gain and running mass.

    Use it to find them, as in ``isinstance(module, BalNormLayer)``; it is not a layer itself.

    Attributes:
        weight: the raw weight w, an ordinary leaf parameter. The layer computes with :meth:`effective_weight`.
        bias: (D,), or ``None``.
        gain: (D,), a parameter that starts at 1; with ``affine=False``, a buffer that stays at 1.
        output_scale: a constant factor besides the gain, a buffer with one element.
        running_mass: moving average of the input's mass, or ``None`` with ``track_running_stats=False``.
        num_batches_tracked: the number of batches in ``running_mass``.
        stats_frozen: if ``True``, the layer uses ``running_mass`` and does not update it, in training mode too. Unlike
            ``eval()``, this survives ``train()``.
        options: the layer's options, a :class:`~balnorm.core.options.LayerOptions`. Each can be read, and most can be
            set, as an attribute of the layer, as in ``layer.momentum = 0.01``.
    """

    plain: ClassVar[type[nn.Module]]
    """The class of torch layer that this one replaces and that :meth:`fuse` returns."""

    _arguments: ClassVar[tuple[str, ...]]
    """The constructor arguments, and attributes, that the plain layer has too."""

    _version = 2  # of the state dict; version 1 (balnorm 0.1) had no output_scale, and the gain contained it

    groups: int
    transposed: bool
    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    output_scale: Tensor
    running_mass: Tensor | None
    num_batches_tracked: Tensor | None
    options: LayerOptions
    _plan: Plan
    _unchecked: bool = True
    """Whether ``state_dict()`` has to check the statistics: once after ``train()``, or when they were replaced."""

    def _set_up(self, keywords: dict[str, Any]) -> None:
        """Add what torch's own layer lacks: options, state and initial values."""
        self.options = LayerOptions.of(f"{type(self).__name__}()", keywords)
        self._plan = Plan(layer_geometry(self), self.options)
        self.stats_frozen = False
        self._early_batches = _EARLY_BATCHES
        self._warned: set[str] = set()
        like: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        outputs, inputs = channels_of(self.weight, self.groups, self.transposed)
        gain = torch.empty(outputs, **like)
        if self.options.affine:
            self.gain = nn.Parameter(gain)
        else:
            self.register_buffer("gain", gain)
        self.register_buffer("output_scale", torch.empty((), **like))
        running_mass = counter = None
        if self.options.track_running_stats:
            running_mass = torch.empty(self._plan.mass_shape(inputs), **like)
            counter = torch.empty((), device=self.weight.device, dtype=torch.long)
        self.register_buffer("running_mass", running_mass)
        self.register_buffer("num_batches_tracked", counter)
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and type(value).__module__.partition(".")[0] == "torchao":
            raise TypeError(f"a quantised weight cannot be balanced: {_FOLD} ({type(self).__name__})")
        super().__setattr__(name, value)
        if name == "qconfig" and (value is not None or isinstance(self, nn.Linear)):
            # torch.ao.quantization sets it on every layer; quantize_dynamic, which is for linear layers, sets None
            warn(self, _QUANTISED)
        if "_plan" in vars(self) and (name == "options" or name in self._arguments):
            # as in layer.momentum = 0.01, or conv.padding_mode = "circular", long after construction
            self._plan = Plan(layer_geometry(self), self.options)

    def reset_parameters(self) -> None:
        """Draw a balanced weight, set the gain to 1 and the bias to 0, and forget the statistics."""
        if "options" not in vars(self):
            return  # called by the constructor of torch's layer, before there is anything of ours to reset
        balanced_normal_(self.weight, self.groups, self.transposed)
        self._reset_all_but_the_weight()

    def _reset_all_but_the_weight(self) -> None:
        nn.init.constant_(self.output_scale, self._initial_scale())
        nn.init.ones_(self.gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Forget the statistics: ``running_mass`` is ones until the next batch in training mode."""
        self._forget_mass()
        self._early_batches, self._unchecked = _EARLY_BATCHES, True

    def _forget_mass(self) -> None:
        if self.running_mass is not None and self.num_batches_tracked is not None:
            self.running_mass.fill_(1)
            self.num_batches_tracked.zero_()

    def effective_weight(self, input: Tensor | None = None, output_size: Sequence[int] | None = None) -> Tensor:
        """The weight w'' that the layer uses: balanced, and multiplied by the gain and the output scale.

        Args:
            input: take the mass of this batch, as in training mode; ``None`` takes ``running_mass``, as in eval mode.
                With ``sync_stats=True`` it is that of all processes' batches if the layer is in training mode.
            output_size: of a transposed convolution, if you give ``forward`` one.
        """
        if type(self.weight) not in (Tensor, nn.Parameter) and hasattr(self.weight, "full_tensor"):
            raise RuntimeError(
                "the parameters of this layer are sharded: gather them first, with unshard() on the FSDP module, or "
                "load the full state dict (torch.distributed.checkpoint.state_dict) into an unsharded model"
            )
        if input is not None:
            mass = conv.input_mass(input, layer_plan(self, input, output_size), alone=not self.training)
        elif self.running_mass is not None:
            mass = self.running_mass.clone()  # backward may need it after the buffer has changed
        else:
            raise RuntimeError(
                "effective_weight() needs a running mass, and this layer has track_running_stats=False: "
                "its weight depends on each batch, so give it one, as in effective_weight(input)"
            )
        gain = self.gain * self.output_scale
        return balance(self.weight, mass, gain, self.options.one_pass, self.groups, transposed=self.transposed)

    def _forward(self, input: Tensor, plan: Plan) -> Tensor:
        if not torch.compiler.is_compiling():
            if isinstance(input, Proxy):
                raise TypeError(f"torch.fx cannot trace through a {type(self).__name__}: {_FOLD}, or make it a leaf")
            # Nested, not joined with "and": torch.compile would guard on the counter, and recompile as it counts down.
            # Replicas of nn.DataParallel are new at every step: their counters would never reach 0.
            if self._early_batches and not getattr(self, "_is_replica", False):
                self._look_at(input)
        buffers = self._buffers  # at a fraction of what the attributes cost
        return conv.balanced_conv(
            input,
            self.weight,
            self.bias,
            self.gain,
            buffers["output_scale"],
            plan,
            self.training and not self.stats_frozen,
            buffers["running_mass"],
            buffers["num_batches_tracked"],
        )

    def train(self, mode: bool = True) -> Self:
        if mode:
            self._unchecked = True
        elif self.training:
            self.check_statistics()
        return super().train(mode)

    def check_statistics(self, name: str | None = None) -> None:
        """Warn once if the running mass shows that the input cancels. ``eval()``, ``fold`` and the first save call it.

        It reads values, so it waits for the device.
        """
        mass = self.running_mass
        if self.options.signed_input or mass is None or not is_readable(mass):
            return
        self._unchecked = False
        if mass.sum() < _CANCELLING * mass.abs().sum():
            warn(self, _CANCELS, name)

    def _look_at(self, input: Tensor) -> None:
        """Look at the values of a few early batches, where a mistake shows and waiting for the device costs little."""
        if torch_transforms_the_program() or is_watched() or not is_readable(input) or not is_readable(self.weight):
            return
        if input.is_cuda and torch.cuda.is_current_stream_capturing():  # a CUDA graph cannot wait
            return
        self._early_batches -= 1
        if self.training and not self.stats_frozen:
            if not self.options.signed_input and input.numel():
                values = input.detach()
                if values.sum() < _CANCELLING * values.abs().sum():
                    warn(self, _CANCELS)
        elif self.num_batches_tracked is not None and self.num_batches_tracked == 0:
            warn(self, _NO_STATISTICS)

    def _save_to_state_dict(self, *args: Any) -> None:
        if self._unchecked:  # not each time: averages of weights ask for the state dict at every step
            self.check_statistics()
        super()._save_to_state_dict(*args)

    def fuse(self) -> nn.Module:
        """Return the plain torch layer that computes what this one computes in eval mode."""
        if self.num_batches_tracked is not None and is_readable(self.num_batches_tracked):
            if self.num_batches_tracked == 0:
                warn(self, _NO_STATISTICS)
            self.check_statistics()
        # On the meta device torch's constructor spends neither time nor random numbers on values that go anyway.
        plain = self.plain(**self._shared_arguments(self), bias=self.bias is not None, device="meta")
        plain.weight = _parameter(self.effective_weight(), self.weight.requires_grad)
        if self.bias is not None:
            plain.bias = _parameter(self.bias, self.bias.requires_grad)
        return plain.train(self.training)

    @classmethod
    def _from_plain(cls, plain: nn.Module, keywords: dict[str, Any]) -> Self:
        if type(plain) is not cls.plain:
            raise TypeError(f"{cls.__name__} can be made from a {cls.plain.__name__}, got a {type(plain).__name__}")
        weight, bias = cast(Tensor, plain.weight), cast("Tensor | None", plain.bias)
        keywords = {"dtype": weight.dtype, **keywords}
        device = keywords.pop("device", weight.device)
        layer = cls(**cls._shared_arguments(plain), **keywords, device="meta")  # as in fuse()
        if bias is not None and layer.bias is None:
            raise ValueError("bias=False would drop the bias of the given layer")
        layer.to_empty(device=device)
        layer._reset_all_but_the_weight()
        layer.weight = _parameter(weight.to(layer.weight), weight.requires_grad)
        if bias is not None:
            layer.bias = _parameter(bias.to(layer.weight), bias.requires_grad)
        return layer.train(plain.training)

    @classmethod
    def _shared_arguments(cls, layer: nn.Module) -> dict[str, Any]:
        return {name: getattr(layer, name) for name in cls._arguments}

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        gain, scale = prefix + "gain", prefix + "output_scale"
        # Parameters alone, as in some files and averages of weights, do not tell their version: they stay as they are.
        of_version_1 = metadata.get("version") == 1 or prefix + "running_mass" in state_dict
        if of_version_1 and gain in state_dict and scale not in state_dict:
            factor = self.output_scale
            if factor.is_meta:
                factor = torch.full_like(factor, self._initial_scale(), device=state_dict[gain].device)
            state_dict[gain] = state_dict[gain] / factor.to(state_dict[gain])
            state_dict[scale] = factor.clone()
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs)
        self._unchecked = True
        # Only a warning: an error would forbid strict=False, which we cannot see here.
        is_first = [key for key in missing_keys if key.endswith("gain")] == [gain]
        if is_first and prefix + "weight" in state_dict:
            warn(self, _OF_PLAIN_LAYERS, prefix.rstrip("."))

    def extra_repr(self) -> str:
        values = [(field.name, getattr(self.options, field.name), field.default) for field in _FIELDS]
        changed = [f"{name}={value!r}" for name, value, default in values if value != default]
        if self.stats_frozen:
            changed.append("stats_frozen=True")
        return ", ".join([super().extra_repr(), *changed])

    def _initial_scale(self) -> float:
        scale = self.options.output_scale
        return self._unit_variance_scale() if isinstance(scale, str) else scale

    def _unit_variance_scale(self) -> float:
        return unit_variance_scale(fan_in=self.weight[0].numel())


class _BalNormConv(BalNormLayer):
    """A balanced convolution over any number of axes; the other base of each subclass is torch's layer."""

    _arguments = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    )
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        self._set_up(options)

    @classmethod
    def from_conv(cls, conv: nn.Module, **options: Any) -> Self:
        """Make a balanced layer with the geometry, weight and bias of ``conv`` and the constructor's ``options``.

        It has a bias even if ``conv`` has none (as is usual before a BatchNorm), unless you give ``bias=False``.
        """
        return cls._from_plain(conv, options)

    def forward(self, input: Tensor) -> Tensor:
        return self._forward(input, self._plan)


class _BalNormConvTranspose(BalNormLayer):
    """A balanced transposed convolution over any number of axes; the other base of each subclass is torch's layer."""

    _arguments = (*_BalNormConv._arguments, "output_padding")
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        output_padding: int | tuple[int, ...] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, ...] = 1,
        padding_mode: str = "zeros",
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        self._set_up(options)

    @classmethod
    def from_conv(cls, conv: nn.Module, **options: Any) -> Self:
        """Make a balanced layer with the geometry, weight and bias of ``conv``. See :meth:`BalNormConv2d.from_conv`."""
        return cls._from_plain(conv, options)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return self._forward(input, layer_plan(self, input, output_size))

    def _unit_variance_scale(self) -> float:
        phases = math.prod(self.stride)
        fan_in = self.weight[:, 0].numel() / self.groups / phases  # each output meets one phase's part of the kernel
        return unit_variance_scale(fan_in, phases)


class BalNormConv1d(_BalNormConv, nn.Conv1d):
    """Balanced 1d convolution. It replaces :class:`torch.nn.Conv1d` and its BatchNorm. See :class:`BalNormConv2d`.

    Example:
        >>> layer = BalNormConv1d(16, 32, 5, padding=2)
        >>> tuple(layer(torch.rand(8, 16, 100)).shape)
        (8, 32, 100)
    """

    plain = nn.Conv1d


class BalNormConv2d(_BalNormConv, nn.Conv2d):
    r"""Balanced 2d convolution. It replaces :class:`torch.nn.Conv2d` and the BatchNorm after it.

    At every step the layer shifts and scales its weight, using the per-channel sums of its *input*, so that positive
    and negative weights contribute the same fixed amount to the output:

    .. math::
        b_d = -\frac{\sum m\,w_d}{\sum m}, \qquad s_d = \frac{1}{\sum m\,(w_d + b_d)\,I}, \qquad
        y = x * \mathrm{gain}_d\,\mathrm{output\_scale}\,s_d\,(w_d + b_d) + \mathrm{bias}_d

    Here m is the mass of the input: how much of it a weight meets per output element. The gradient includes that of
    the mass. No activation is normalised, so the layer keeps no normalised copy for the backward pass.

    In training mode m is the mass of the batch, and ``running_mass`` becomes ``(1 - a) * running_mass + a * m`` with
    ``a = max(momentum, 1 / num_batches_tracked)``. In eval mode m is ``running_mass``; the output then depends on
    neither the rest of the batch nor the image size, and :meth:`fuse` returns a plain convolution that computes the
    same.

    The layer expects inputs that are not negative, as after a ReLU. Give it pixels in [0, 1], not mean-subtracted
    ones; for other inputs, use ``signed_input=True``.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            in :class:`torch.nn.Conv2d`.
        mass: ``"channel"`` sums each input channel as a whole, as in the paper. ``"position"`` counts for each tap of
            the kernel exactly the inputs that it meets, so it is exact under zero padding, stride and dilation too.
            Where a zero-padded image (of a transposed convolution: the output) is smaller than the kernel, it spreads
            them evenly, as ``"channel"`` does.
        one_pass: I is the sign of the weight before the shift (``True``, as in the paper's experiments) or after it
            (``False``: exactly balanced).
        stats_fraction: take m from this leading part of the batch; less than 1 adds noise, which regularises.
        signed_input: take m from ``|x|``.
        output_scale: a constant factor besides the gain: ``"unit_variance"`` for outputs of variance 1 behind rectified
            Gaussian inputs, or a number; 1.0 is the literal reading of the paper.
        affine: whether the gain is learned. If not, it stays at 1. (The bias has its own argument.)
        momentum: the weight of the newest batch in ``running_mass``; ``None`` is the plain average of all batches.
        track_running_stats: whether there is a ``running_mass``. If not, eval mode uses the batch too.
        sync_stats: sum the statistics over all processes, where :mod:`torch.distributed` is initialised.
        process_group: the processes to sum over; ``None`` is all of them.

    Shape:
        - input: (N, C, H, W) or (C, H, W); N = 0 is allowed, and is not tracked.
        - output: as for :class:`torch.nn.Conv2d`.

    Example:
        >>> layer = BalNormConv2d(16, 33, 3, stride=2, padding=1)
        >>> x = torch.rand(20, 16, 50, 100)
        >>> tuple(layer(x).shape)
        (20, 33, 25, 50)
        >>> plain = layer.eval().fuse()
        >>> plain
        Conv2d(16, 33, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1))
        >>> torch.allclose(plain(x), layer(x), atol=1e-5)
        True

    A. Defazio and L. Bottou, `Controlling Covariate Shift using Balanced Normalization of Weights
    <https://arxiv.org/abs/1812.04549>`_.
    """

    plain = nn.Conv2d


class BalNormConv3d(_BalNormConv, nn.Conv3d):
    """Balanced 3d convolution. It replaces :class:`torch.nn.Conv3d` and its BatchNorm. See :class:`BalNormConv2d`.

    Example:
        >>> layer = BalNormConv3d(4, 8, 3, padding=1, mass="position")
        >>> layer
        BalNormConv3d(4, 8, kernel_size=(3, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1), mass='position')
        >>> tuple(layer(torch.rand(2, 4, 6, 6, 6)).shape)
        (2, 8, 6, 6, 6)
    """

    plain = nn.Conv3d


class BalNormConvTranspose1d(_BalNormConvTranspose, nn.ConvTranspose1d):
    """Balanced transposed 1d convolution. See :class:`BalNormConvTranspose2d`.

    Example:
        >>> tuple(BalNormConvTranspose1d(16, 8, 4, stride=2, padding=1)(torch.rand(2, 16, 50)).shape)
        (2, 8, 100)
    """

    plain = nn.ConvTranspose1d


class BalNormConvTranspose2d(_BalNormConvTranspose, nn.ConvTranspose2d):
    """Balanced transposed 2d convolution. It replaces :class:`torch.nn.ConvTranspose2d` and the BatchNorm after it.

    The geometry is that of torch's layer; options and behaviour are those of :class:`BalNormConv2d`. Each weight of a
    transposed convolution meets every input once, whatever the stride, so its ``channel`` mass is the channel's sum
    divided by the number of output elements.

    Example:
        >>> layer = BalNormConvTranspose2d(16, 8, 3, stride=2, padding=1)
        >>> tuple(layer(torch.rand(2, 16, 12, 12), output_size=(24, 24)).shape)
        (2, 8, 24, 24)
    """

    plain = nn.ConvTranspose2d


class BalNormConvTranspose3d(_BalNormConvTranspose, nn.ConvTranspose3d):
    """Balanced transposed 3d convolution. See :class:`BalNormConvTranspose2d`.

    Example:
        >>> tuple(BalNormConvTranspose3d(4, 2, 2, stride=2)(torch.rand(2, 4, 3, 3, 3)).shape)
        (2, 2, 6, 6, 6)
    """

    plain = nn.ConvTranspose3d


class BalNormLinear(BalNormLayer, nn.Linear):  # type: ignore[misc]  # torch does not declare Linear.bias
    """Balanced linear layer. It replaces :class:`torch.nn.Linear` and the BatchNorm after it.

    It is a balanced 1x1 convolution: the mass is the mean of each input feature over all leading dimensions. Options
    and behaviour are those of :class:`BalNormConv2d`, but there is only one kind of mass.

    Shape:
        - input: any leading dimensions, then ``in_features``. The first of them is the batch.

    Example:
        >>> layer = BalNormLinear(16, 4, one_pass=False, momentum=None)
        >>> layer
        BalNormLinear(in_features=16, out_features=4, bias=True, one_pass=False, momentum=None)
        >>> tuple(layer(torch.rand(8, 5, 16)).shape)
        (8, 5, 4)
    """

    plain = nn.Linear
    _arguments = ("in_features", "out_features")
    groups = 1
    transposed = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if options.get("mass", "channel") != "channel":
            raise ValueError(f"BalNormLinear has one kind of mass, 'channel', got {options['mass']!r}")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up(options)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """Make a balanced layer with the weight and bias of ``linear``. See :meth:`BalNormConv2d.from_conv`."""
        return cls._from_plain(linear, options)

    def forward(self, input: Tensor) -> Tensor:
        return self._forward(input, self._plan)


BALANCED: dict[type[nn.Module], type[BalNormLayer]] = {
    layer.plain: layer
    for layer in (
        BalNormConv1d,
        BalNormConv2d,
        BalNormConv3d,
        BalNormConvTranspose1d,
        BalNormConvTranspose2d,
        BalNormConvTranspose3d,
        BalNormLinear,
    )
}
"""The balanced layer for each of torch's layers."""


def layer_geometry(layer: nn.Module, input: Tensor | None = None, output_size: Sequence[int] | None = None) -> Geometry:
    """The geometry of a convolution or linear layer, balanced or plain; a transposed one may have an output size."""
    if isinstance(layer, nn.Linear):
        return geometry_of(())
    names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "transposed", "output_padding")
    geometry = geometry_of(*(getattr(layer, name) for name in names))
    if output_size is None or not geometry.transposed:
        return geometry
    return geometry._replace(output_padding=output_padding_for(layer, input, output_size))


def layer_plan(layer: BalNormLayer, input: Tensor, output_size: Sequence[int] | None = None) -> Plan:
    """The plan of a balanced layer for this input and output size."""
    if output_size is None:
        return layer._plan
    return Plan(layer_geometry(layer, input, output_size), layer.options)


def exact_mass(layer: nn.Module, input: Tensor, output_size: Sequence[int] | None, signed: bool) -> Tensor:
    """What every weight of a layer, balanced or plain, meets of ``input`` (or of ``|input|``) per output element."""
    options = Options(mass="position", signed_input=signed)
    return conv.input_mass(input, Plan(layer_geometry(layer, input, output_size), options), exact=True)


def _parameter(values: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter with its own storage, in the memory format of ``values``."""
    return nn.Parameter(values.detach().clone(), requires_grad=requires_grad)


_EARLY_BATCHES = 3
_CANCELLING = 0.2
"""Inputs cancel if their sum is less than this part of the sum of their magnitudes. Behind SiLU it is about half."""
_CANCELS = (
    "{} gets negative inputs about as often as positive ones: its mass cancels, and its outputs can be of any size. "
    "Feed it values that are not negative (pixels in [0, 1], not mean-subtracted ones), or give it signed_input=True"
)
_NO_STATISTICS = (
    "{} has no statistics yet: its running mass is all ones, and its output is not what it was trained for. Train it, "
    "or estimate them with balnorm.update_stats(loader, model)"
)
HAS_HOOKS = "{} has hooks, which the folded layer does not get: its output may differ"
_FOLD = "fold the model first, with balnorm.fold(model)"
_QUANTISED = (
    "{} is about to be quantised, and torch's quantisation does not know balanced layers: it leaves this one in "
    "floating point, or the model fails when it runs. To quantise it, " + _FOLD
)
_OF_PLAIN_LAYERS = (
    "{} was given the weight of a layer that is not balanced, as from a network with BatchNorm, whose scales and "
    "statistics have no place here. Load the state dict into the original network and convert that: "
    "balnorm.convert(model, calibrate=batch)"
)


def warn(layer: BalNormLayer, message: str, name: str | None = None) -> None:
    """Warn about a layer, unless it has had this warning before."""
    if message not in layer._warned:
        layer._warned.add(message)
        warnings.warn(message.format(name or repr(layer)), BalNormWarning, stacklevel=3)


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has values to look at: it is not on the meta device, and not a subclass without values."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


_FIELDS = dataclasses.fields(LayerOptions)
_FIXED = ("mass", "affine", "track_running_stats")


def _option(name: str) -> property:
    """An option as an attribute of the layer."""

    def read(layer: BalNormLayer) -> Any:
        return getattr(layer.options, name)

    def write(layer: BalNormLayer, value: Any) -> None:
        if name in _FIXED:
            raise AttributeError(f"{name} is fixed when the layer is made: the shape of its state depends on it")
        changes = {name: value}
        if name == "sync_stats" and not value:
            changes["process_group"] = None  # which has no meaning without
        layer.options = dataclasses.replace(layer.options, **changes)

    return property(read, write)


def _signature(layer: type[BalNormLayer]) -> inspect.Signature:
    """The constructor's signature with every option spelt out, for ``help()`` and editors."""
    parameters = list(inspect.signature(layer.__init__).parameters.values())[1:-1]  # but for self and **options
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in _FIELDS
    ]
    return inspect.Signature([*parameters[:-2], *options, *parameters[-2:]])


for _field in _FIELDS:
    if _field.name != "output_scale":  # the attribute is the buffer, which scale_to_data() may have changed since
        setattr(BalNormLayer, _field.name, _option(_field.name))
for _layer in BALANCED.values():
    _layer.__signature__ = _signature(_layer)  # type: ignore[attr-defined]
