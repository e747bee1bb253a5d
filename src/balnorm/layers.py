"""The layers. They hold state and make one call each; the maths is in :mod:`balnorm._core`."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.module import register_module_module_registration_hook

from balnorm import _checks
from balnorm._checks import BalNormWarning, is_readable, warn
from balnorm._core import function, method
from balnorm._core.geometry import Geometry, channels_of, geometry_of
from balnorm._core.method import Statistics
from balnorm._core.options import MASSES, ConstructorKeywords, LayerKeywords, LayerOptions, Options
from balnorm._core.torch_private import output_padding_for
from balnorm.init import balanced_normal_, unit_variance_scale

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self, Unpack

__all__ = [
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
]


class BalNormLayer(nn.Module):
    """The base of all balanced layers: options, gain and running statistics.

    Use it to find them, as in ``isinstance(module, BalNormLayer)``; it is not a layer itself.

    Attributes:
        weight: the raw weight w, an ordinary leaf parameter. The layer computes with :meth:`effective_weight`.
        bias: (D,), or ``None``.
        gain: (D,), a parameter that starts at 1; with ``affine=False``, a buffer that stays at 1.
        output_scale: (D,), a constant factor besides the gain.
        running_mean, running_mass: moving averages of the input's statistics, or ``None`` with
            ``track_running_stats=False``.
        num_batches_tracked: the number of batches in them.
        form: the options that change what the layer computes, as numbers. They are part of the state dict; loading
            it into a layer with other options warns.
        stats_frozen: if ``True``, the layer uses the running statistics and does not update them, in training mode too.
            Unlike ``eval()``, this survives ``train()``.
        options: the layer's options, a :class:`~balnorm._core.options.LayerOptions`. Each can be read, and most can be
            set, as an attribute of the layer, as in ``layer.momentum = 0.01``.
    """

    plain: ClassVar[type[nn.Module]]
    """The class of torch layer that this one replaces and that :meth:`fuse` returns."""

    _arguments: ClassVar[tuple[str, ...]]
    """The constructor arguments, and attributes, that the plain layer has too."""

    _version = 3  # of the state dict; version 2 (balnorm 0.2) had no running_mean, and one output_scale for all outputs

    groups: int
    transposed: bool
    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    output_scale: Tensor
    running_mean: Tensor | None
    running_mass: Tensor | None
    num_batches_tracked: Tensor | None
    form: Tensor
    options: LayerOptions
    _geometry: Geometry
    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]  # of torch's modules it returns Any

    def _set_up(self, keywords: dict[str, Any]) -> None:
        """Add what torch's own layer lacks: options, state and initial values."""
        self.options = LayerOptions.of(f"{type(self).__name__}()", keywords)
        self._geometry = layer_geometry(self)
        self.stats_frozen = False
        self._has_looked = False
        self._warned: set[str] = set()
        like: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        outputs, inputs = channels_of(self.weight, self.groups, self.transposed)
        gain = torch.empty(outputs, **like)
        if self.options.affine:
            self.gain = nn.Parameter(gain)
        else:
            self.register_buffer("gain", gain)
        self.register_buffer("output_scale", torch.empty(outputs, **like))
        running_mean = running_mass = counter = None
        if self.options.track_running_stats:
            shape = self._geometry.statistics_shape(inputs, self._geometry.kind_of(self.options.mass))
            running_mean, running_mass = torch.empty(shape, **like), torch.empty(shape, **like)
            counter = torch.empty((), device=self.weight.device, dtype=torch.long)
        self.register_buffer("running_mean", running_mean)
        self.register_buffer("running_mass", running_mass)
        self.register_buffer("num_batches_tracked", counter)
        self.register_buffer("form", torch.empty(len(_FORM), **like))
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            _checks.refuse_quantised(self, value)
        super().__setattr__(name, value)
        if name == "qconfig" and (value is not None or isinstance(self, nn.Linear)):
            # torch.ao.quantization sets it on every layer; quantize_dynamic, which is for linear layers, sets None
            warn(self, _checks.QUANTISED)
        if "form" in vars(self).get("_buffers", ()):
            # as in layer.momentum = 0.01, or conv.padding_mode = "circular", long after construction
            if name in self._arguments:
                self._geometry = layer_geometry(self)
            elif name == "options":
                self._write_form()

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
        self._write_form()
        self.reset_running_stats()

    def _write_form(self) -> None:
        for place, code in enumerate(_form(self)):
            self.form[place].fill_(code)  # a copy from the CPU would wait for the device

    def reset_running_stats(self) -> None:
        """Forget the statistics: until the next batch in training mode, means are 0 and masses 1."""
        if self.running_mean is not None and self.running_mass is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            self.running_mass.fill_(1)
            self.num_batches_tracked.zero_()
        self._has_looked = False

    def effective_weight(self, input: Tensor | None = None, output_size: Sequence[int] | None = None) -> Tensor:
        """The weight w'' that the layer uses: balanced, and multiplied by the gain and the output scale.

        Args:
            input: take the statistics of this batch, as in training mode; ``None`` takes the running ones, as in eval
                mode. With ``sync_stats=True`` they are those of all processes' batches if the layer is in training
                mode.
            output_size: of a transposed convolution, if you give ``forward`` one.
        """
        return self._effective(input, output_size)[0]

    def effective_bias(self, input: Tensor | None = None, output_size: Sequence[int] | None = None) -> Tensor:
        """The bias that goes with :meth:`effective_weight`: ``bias`` less sum w'' mu, (D,)."""
        return self._effective(input, output_size)[1]

    def _effective(self, input: Tensor | None, output_size: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        if type(self.weight) not in (Tensor, nn.Parameter) and hasattr(self.weight, "full_tensor"):
            raise RuntimeError(
                "the parameters of this layer are sharded: gather them first, with unshard() on the FSDP module, or "
                "load the full state dict (torch.distributed.checkpoint.state_dict) into an unsharded model"
            )
        if input is not None:
            geometry = layer_geometry(self, input, output_size)
            found = function.input_statistics(input, geometry, self.options, alone=not self.training)
        elif self.running_mean is not None and self.running_mass is not None:
            # clones: backward may need them after the buffers have changed
            found = Statistics(self.running_mean.clone(), self.running_mass.clone())
        else:
            raise RuntimeError(
                "effective_weight() needs running statistics, and this layer has track_running_stats=False: "
                "its weight depends on each batch, so give it one, as in effective_weight(input)"
            )
        weight, offset = method.balance(
            self.weight,
            found.mass,
            self.gain * self.output_scale,
            self.options.one_pass,
            self.groups,
            shift=self.shifts,
            transposed=self.transposed,
            mean=found.mean,
            equalise=self.options.equalise,
        )
        return weight, (-offset if self.bias is None else self.bias - offset).to(self.weight.dtype)

    @property
    def shifts(self) -> bool:
        """Whether the weighted mean is subtracted from the kernels of this layer."""
        _, inputs = channels_of(self.weight, self.groups, self.transposed)
        return self.options.shifts(inputs // self.groups)

    def _forward(self, input: Tensor, geometry: Geometry) -> Tensor:
        training = self.training and not self.stats_frozen
        if not torch.compiler.is_compiling():
            if type(input) is not Tensor and isinstance(input, Proxy):
                raise TypeError(
                    f"torch.fx cannot trace through a {type(self).__name__}: {_checks.FOLD}, or make it a leaf"
                )
            if not training and not self._has_looked:
                _checks.look_for_statistics(self, input)
        parameters: dict[str, Any] = self._parameters  # the attributes take several times as long
        buffers = self._buffers
        try:
            weight, bias, gain = parameters["weight"], parameters["bias"], parameters["gain"]
        except KeyError:  # a parametrisation, a replica, or a gain that is a buffer
            weight, bias, gain = self.weight, self.bias, self.gain
        return function.balanced_conv(
            input,
            weight,
            bias,
            gain,
            buffers["output_scale"],
            geometry,
            self.options,
            training,
            buffers["running_mean"],
            buffers["running_mass"],
            buffers["num_batches_tracked"],
        )

    def fuse(self) -> nn.Module:
        """Return the plain torch layer that computes what this one computes in eval mode. It always has a bias."""
        _checks.warn_of_missing_statistics(self)
        # On the meta device torch's constructor spends neither time nor random numbers on values that are replaced.
        plain = self.plain(**self._shared_arguments(self), bias=True, device="meta")
        weight, bias = self._effective(None, None)
        plain.weight = _parameter(weight, self.weight.requires_grad)
        plain.bias = _parameter(bias, self.weight.requires_grad if self.bias is None else self.bias.requires_grad)
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
        names = ("gain", "output_scale", "running_mean", "running_mass", "form")
        gain, scale, mean, mass, form = (prefix + name for name in names)
        found = state_dict.get(form)
        if (scale in state_dict and state_dict[scale].dim() == 0) or (mass in state_dict and mean not in state_dict):
            found = self._migrate(state_dict, scale, mean, mass)
        if found is None:
            # Parameters alone, as in some files and averages of weights, say nothing of options.
            if scale in state_dict or mass in state_dict:
                state_dict[form] = self.form
        elif found.shape == self.form.shape and is_readable(found):
            _checks.compare_forms(self, prefix.rstrip("."), [round(float(code)) for code in found], _form(self), _FORM)
            state_dict[form] = self.form
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if form in missing_keys:
            missing_keys.remove(form)
        self._has_looked = False
        # Only a warning: an error would forbid strict=False, which we cannot see here.
        is_first = [key for key in missing_keys if key.endswith("gain")] == [gain]
        if is_first and prefix + "weight" in state_dict:
            warn(self, _checks.OF_PLAIN_LAYERS, prefix.rstrip("."))

    def _migrate(self, state_dict: dict[str, Any], scale: str, mean: str, mass: str) -> Tensor:
        """Turn the state of a layer of balnorm 0.2 into today's, with the same outputs in eval mode. Returns its form.

        That layer shifted every kernel, and its mean was the mass, so sum w'' mu is 0. Its other options are unknown.
        """
        if mass in state_dict and self.running_mass is not None:
            state_dict[mean] = state_dict[mass].clone()
        if scale in state_dict and state_dict[scale].dim() == 0:
            state_dict[scale] = state_dict[scale].expand(self.output_scale.shape).clone()
        if not self.shifts and self.options.shift == "auto":
            self.options = dataclasses.replace(self.options, shift=True)
        own = dict(zip(_FORM, _form(self), strict=True))
        return torch.tensor([*{**own, "shift": 1, "centred": 0, "equalise": 0}.values()])

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
        return unit_variance_scale(fan_in=self.weight[0].numel(), centred=self.options.centred)


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
        **options: Unpack[LayerKeywords],
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
        self._set_up({**options})

    @classmethod
    def from_conv(cls, conv: nn.Module, **options: Unpack[ConstructorKeywords]) -> Self:
        """Make a balanced layer with the geometry, weight and bias of ``conv`` and the constructor's ``options``.

        It has a bias even if ``conv`` has none (as is usual before a BatchNorm), unless you give ``bias=False``.
        """
        return cls._from_plain(conv, {**options})

    def forward(self, input: Tensor) -> Tensor:
        return self._forward(input, self._geometry)


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
        **options: Unpack[LayerKeywords],
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
        self._set_up({**options})

    @classmethod
    def from_conv(cls, conv: nn.Module, **options: Unpack[ConstructorKeywords]) -> Self:
        """Make a balanced layer with the geometry, weight and bias of ``conv``. See :meth:`BalNormConv2d.from_conv`."""
        return cls._from_plain(conv, {**options})

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        geometry = self._geometry if output_size is None else layer_geometry(self, input, output_size)
        return self._forward(input, geometry)

    def _unit_variance_scale(self) -> float:
        phases = math.prod(self.stride)
        fan_in = self.weight[:, 0].numel() / self.groups / phases  # each output meets one phase's part of the kernel
        return unit_variance_scale(fan_in, phases, centred=self.options.centred)


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
        p = \frac{a}{\sum a}, \qquad w'_d = w_d - \sum p\,w_d, \qquad c_d = \sum p\,w'_d\,I, \qquad
        w''_d = \frac{\mathrm{gain}_d\,\mathrm{output\_scale}_d\,w'_d}{c_d \sum a}, \qquad
        y = x * w''_d + \mathrm{bias}_d - \sum w''_d\,\mu

    Here :math:`\mu` and a are mean and mass of the input: how much of x, and of \|x\|, a weight meets per output
    element. After a ReLU they are the same, and the last sum is 0: the layer of the paper. The gradient includes that
    of the statistics. No activation is normalised, so the layer keeps no normalised copy for the backward pass.

    In training mode the statistics are those of the batch, and ``running_mean`` and ``running_mass`` become
    ``(1 - r) * running + r * batch`` with ``r = max(momentum, 1 / num_batches_tracked)``. In eval mode the running ones
    are used; the output then depends on neither the rest of the batch nor the image size, and :meth:`fuse` returns a
    plain convolution that computes the same.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            in :class:`torch.nn.Conv2d`.
        mass: ``"channel"`` sums each input channel as a whole, as in the paper. ``"position"`` counts for each tap of
            the kernel exactly the inputs that it meets, so it is exact under zero padding, stride and dilation too.
            If a zero-padded image (of a transposed convolution: the output) is smaller than the kernel, it spreads
            them evenly, as ``"channel"`` does.
        one_pass: I is the sign of the weight before the shift (``True``, as in the paper's experiments) or after it
            (``False``: exactly balanced).
        stats_fraction: take the statistics from this leading part of the batch; less than 1 adds noise, which
            regularises.
        shift: subtract the weighted mean of the kernel, as the paper does. It takes one degree of freedom from every
            output kernel, so ``"auto"`` leaves it out if a kernel has a single input channel (depthwise layers);
            then :math:`w' = w` and :math:`c = \frac12 \sum p\,|w|`.
        centred: take the mass of \|x - mean\|: for inputs that do not come from a ReLU. It reads the input twice.
        equalise: give every input channel the same say: multiply its weights by
            :math:`q = \mathrm{mean}(a) / \max(a, 0.1\,\mathrm{mean}(a))` and balance for the mass :math:`a q`. On
            trial; it runs in differentiable operations only, which are slower and keep more for backward.
        output_scale: a constant factor besides the gain: ``"unit_variance"`` for outputs of variance 1, given rectified
            Gaussian inputs (``centred``: almost any), or a number; 1.0 is the literal reading of the paper.
        affine: whether the gain is learned. Otherwise it stays at 1. (The bias has its own argument.)
        momentum: the weight of the newest batch in the running statistics; ``None`` is the simple average of all
            batches.
        track_running_stats: whether to keep running statistics. Without them, eval mode uses the batch too.
        sync_stats: sum the statistics over all processes, if :mod:`torch.distributed` is initialised.
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
        **options: Unpack[LayerKeywords],
    ) -> None:
        if options.get("mass", "channel") != "channel":
            raise ValueError(f"BalNormLinear has one kind of mass, 'channel', got {options['mass']!r}")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up({**options})

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Unpack[ConstructorKeywords]) -> Self:
        """Make a balanced layer with the weight and bias of ``linear``. See :meth:`BalNormConv2d.from_conv`."""
        return cls._from_plain(linear, {**options})

    def forward(self, input: Tensor) -> Tensor:
        return self._forward(input, self._geometry)


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


def layer_statistics(
    layer: nn.Module,
    input: Tensor,
    output_size: Sequence[int] | None = None,
    *,
    options: Options | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mean and mass of an input, as a layer meets it, balanced (with its own options, unless given) or plain.

    ``exact`` counts by position even if the kernel is larger than the image.
    """
    if options is None:
        options = layer.options if isinstance(layer, BalNormLayer) else Options()
    geometry = layer_geometry(layer, input, output_size)
    mean, mass, _ = function.input_statistics(input, geometry, options, exact=exact, alone=True)
    return mean, mass


def _parameter(values: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter with its own storage, in the memory format of ``values``."""
    return nn.Parameter(values.detach().clone(), requires_grad=requires_grad)


_FORM = {
    "mass": MASSES,
    "one_pass": (False, True),
    "shift": (False, True),
    "centred": (False, True),
    "equalise": (False, True),
}
"""The options that change what a layer computes, and their values in the order of their codes."""


def _form(layer: BalNormLayer) -> list[int]:
    """The codes of these options. A pointwise layer computes the same with either mass."""
    options = layer.options
    values = {
        "mass": layer._geometry.kind_of(options.mass),
        "one_pass": options.one_pass or not layer.shifts,
        "shift": layer.shifts,
        "centred": options.centred,
        "equalise": options.equalise,
    }
    return [allowed.index(values[name]) for name, allowed in _FORM.items()]


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
            changes["process_group"] = None  # which means nothing without it
        layer.options = dataclasses.replace(layer.options, **changes)

    return property(read, write)


def _signature(layer: type[BalNormLayer]) -> inspect.Signature:
    """The constructor's signature with every option spelt out, for ``help()`` and editors."""
    parameters = list(inspect.signature(layer.__init__).parameters.values())[1:-1]  # without self and **options
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in _FIELDS
    ]
    return inspect.Signature([*parameters[:-2], *options, *parameters[-2:]])


def _watch_replacements(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Called whenever a module gets a child: some tools replace every ``nn.Linear`` by a layer of theirs."""
    layer = parent._modules.get(name)
    if isinstance(layer, BalNormLayer):
        _checks.refuse_successor(layer, module)


register_module_module_registration_hook(_watch_replacements)
for _field in _FIELDS:
    if _field.name != "output_scale":  # the attribute is the buffer, which a conversion sets
        setattr(BalNormLayer, _field.name, _option(_field.name))
for _layer in BALANCED.values():
    _layer.__signature__ = _signature(_layer)  # type: ignore[attr-defined]
