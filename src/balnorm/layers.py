"""The layers: state and one functional call each. The maths is in :mod:`balnorm.functional`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, cast

import torch
from torch import Tensor, nn

import balnorm.functional as BF
from balnorm.functional import MassKind
from balnorm.init import balanced_normal_, unit_variance_gain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self, Unpack

__all__ = [
    "BALANCED",
    "BalNormConv1d",
    "BalNormConv2d",
    "BalNormConv3d",
    "BalNormConvTranspose1d",
    "BalNormConvTranspose2d",
    "BalNormConvTranspose3d",
    "BalNormLayer",
    "BalNormLinear",
    "GainInit",
    "LayerOptions",
    "layer_mass",
]

GainInit = float | Literal["unit_variance"]


class LayerOptions(TypedDict, total=False):
    """The keyword options of every balanced layer. :class:`BalNormConv2d` explains them and shows the defaults."""

    mass: MassKind
    one_pass: bool
    stats_fraction: float
    signed_input: bool
    gain_init: GainInit
    affine: bool
    momentum: float | None
    track_running_stats: bool
    sync_stats: bool
    process_group: ProcessGroup | None


class BalNormLayer(nn.Module):
    """What all balanced layers share: the options, the gain and the running mass.

    Use it to find them, as in ``isinstance(module, BalNormLayer)``; it is not a layer by itself.

    Attributes:
        weight: the raw weight w, an ordinary leaf parameter. The layer computes with :meth:`effective_weight`.
        bias: (D,), or ``None``.
        gain: (D,), a parameter; with ``affine=False`` a buffer that keeps its initial value.
        running_mass: moving average of the input's mass, or ``None`` with ``track_running_stats=False``.
        num_batches_tracked: how many batches went into it.
        stats_frozen: set it to ``True`` to use ``running_mass`` and leave it alone in training mode too. Unlike
            ``eval()`` it survives ``train()``.
    """

    plain: ClassVar[type[nn.Module]]
    """The torch layer that this one replaces, and that :meth:`fuse` returns."""

    _arguments: ClassVar[tuple[str, ...]]
    """The constructor arguments, and attributes, that the plain layer has too."""

    groups: int
    transposed: bool
    weight: Tensor
    bias: Tensor | None
    gain: Tensor
    running_mass: Tensor | None
    num_batches_tracked: Tensor | None

    def _set_up(
        self,
        *,
        mass: MassKind = "channel",
        one_pass: bool = True,
        stats_fraction: float = 1.0,
        signed_input: bool = False,
        gain_init: GainInit = "unit_variance",
        affine: bool = True,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        sync_stats: bool = False,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Check the options and make the state that torch's own layer does not have. The defaults stand here only."""
        switches = {
            "one_pass": one_pass,
            "signed_input": signed_input,
            "affine": affine,
            "track_running_stats": track_running_stats,
            "sync_stats": sync_stats,
        }
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        BF.check_statistics(mass, stats_fraction)
        if momentum is not None and not (_is_number(momentum) and 0.0 <= momentum <= 1.0):
            raise ValueError(f"momentum must be None (the plain average) or between 0 and 1, got {momentum!r}")
        if gain_init != "unit_variance" and not (_is_number(gain_init) and math.isfinite(gain_init)):
            raise ValueError(f"gain_init must be 'unit_variance' or a finite number, got {gain_init!r}")
        if process_group is not None and not sync_stats:
            raise ValueError("process_group needs sync_stats=True: without it nothing is sent between processes")
        self.mass: MassKind = mass
        self.one_pass = one_pass
        self.stats_fraction = stats_fraction
        self.signed_input = signed_input
        self.gain_init = gain_init
        self.affine = affine
        self.momentum = momentum
        self.track_running_stats = track_running_stats
        self.sync_stats = sync_stats
        self.process_group = process_group
        self.stats_frozen = False

        device, dtype, kernel = self.weight.device, self.weight.dtype, self.weight.shape[2:]
        outputs, inputs = self.weight.shape[0], self.weight.shape[1] * self.groups
        if self.transposed:
            outputs, inputs = self.weight.shape[1] * self.groups, self.weight.shape[0]
        gain = torch.empty(outputs, device=device, dtype=dtype)
        if affine:
            self.gain = nn.Parameter(gain)
        else:
            self.register_buffer("gain", gain)
        taps = kernel if mass == "position" else (1,) * len(kernel)
        running_mass = torch.empty(1, inputs, *taps, device=device, dtype=dtype)
        counter = torch.empty((), device=device, dtype=torch.long)
        self.register_buffer("running_mass", running_mass if track_running_stats else None)
        self.register_buffer("num_batches_tracked", counter if track_running_stats else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a balanced weight, set the gain to ``gain_init`` and the bias to zero, forget the statistics."""
        if not hasattr(self, "stats_frozen"):
            return  # called by the constructor of torch's layer, before there is anything of ours to reset
        balanced_normal_(self.weight, self.groups, self.transposed)
        self._reset_all_but_the_weight()

    def _reset_all_but_the_weight(self) -> None:
        gain = self.gain_init
        nn.init.constant_(self.gain, self._unit_variance_gain() if isinstance(gain, str) else gain)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.reset_running_stats()

    def reset_running_stats(self) -> None:
        """Forget the statistics: ``running_mass`` is ones until the next batch in training mode."""
        if self.running_mass is not None and self.num_batches_tracked is not None:
            self.running_mass.fill_(1)
            self.num_batches_tracked.zero_()

    def effective_weight(self, input: Tensor | None = None, output_size: Sequence[int] | None = None) -> Tensor:
        """The weight w'' that the layer uses: balanced for a mass, times the gain.

        Args:
            input: take the mass of this batch, as in training mode; ``None`` takes ``running_mass``, as in eval mode.
            output_size: of a transposed convolution, where ``forward`` is given one.
        """
        if input is not None:
            options = {name: getattr(self, name) for name in _MASS_OPTIONS}
            mass = layer_mass(self, input, output_size, mass=self.mass, **options)
        elif self.running_mass is not None:
            mass = self.running_mass.clone()  # backward may need it after the buffer has changed
        else:
            raise RuntimeError(
                "effective_weight() needs a running mass, and this layer has track_running_stats=False: "
                "its weight depends on each batch, so give it one, as in effective_weight(input)"
            )
        return BF.balance(self.weight, mass, self.gain, self.one_pass, self.groups, transposed=self.transposed)

    def fuse(self) -> nn.Module:
        """A plain torch layer with the output that this one has in eval mode."""
        # On the meta device torch's constructor spends neither time nor random numbers on values that go anyway.
        plain = self.plain(**self._shared_arguments(self), bias=self.bias is not None, device="meta")
        plain.weight = _parameter(self.effective_weight(), self.weight.requires_grad)
        if self.bias is not None:
            plain.bias = _parameter(self.bias, self.bias.requires_grad)
        return plain.train(self.training)

    @classmethod
    def _from_plain(cls, plain: nn.Module, options: dict[str, Any]) -> Self:
        if type(plain) is not cls.plain:
            raise TypeError(f"{cls.__name__} can be made from a {cls.plain.__name__}, got a {type(plain).__name__}")
        weight, bias = cast(Tensor, plain.weight), cast("Tensor | None", plain.bias)
        options = {"dtype": weight.dtype, **options}
        device = options.pop("device", weight.device)
        layer = cls(**cls._shared_arguments(plain), **options, device="meta")  # as in fuse()
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

    def extra_repr(self) -> str:
        options = inspect.signature(self._set_up).parameters.values()
        values = [(option.name, getattr(self, option.name), option.default) for option in options]
        changed = [f"{name}={value!r}" for name, value, default in values if value != default]
        if self.stats_frozen:
            changed.append("stats_frozen=True")
        return ", ".join([super().extra_repr(), *changed])

    def _unit_variance_gain(self) -> float:
        return unit_variance_gain(fan_in=self.weight[0].numel())

    def _statistics(self) -> BF.Statistics:
        return {
            "one_pass": self.one_pass,
            "stats_fraction": self.stats_fraction,
            "signed_input": self.signed_input,
            "sync_stats": self.sync_stats,
            "process_group": self.process_group,
            "training": self.training and not self.stats_frozen,
            "running_mass": self.running_mass,
            "num_batches_tracked": self.num_batches_tracked,
            "momentum": self.momentum,
        }


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
        **options: Unpack[LayerOptions],
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
        self._set_up(**options)

    @classmethod
    def from_conv(cls, conv: nn.Module, **options: Any) -> Self:
        """A balanced layer with the geometry, weight and bias of ``conv``; ``options`` are those of the constructor.

        It has a bias also where ``conv`` has none (as is usual before a BatchNorm), unless ``bias=False`` is given.
        """
        return cls._from_plain(conv, options)

    def forward(self, input: Tensor) -> Tensor:
        return BF.bal_conv(
            input,
            self.weight,
            self.bias,
            self.gain,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            padding_mode=self.padding_mode,
            mass=self.mass,
            **self._statistics(),
        )


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
        **options: Unpack[LayerOptions],
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
        self._set_up(**options)

    @classmethod
    def from_conv(cls, conv: nn.Module, **options: Any) -> Self:
        """A balanced layer with the geometry, weight and bias of ``conv``. See :meth:`BalNormConv2d.from_conv`."""
        return cls._from_plain(conv, options)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        output_padding = self._output_padding(  # type: ignore[operator]  # from torch's layer, the other base
            input, output_size, self.stride, self.padding, self.kernel_size, len(self.kernel_size), self.dilation
        )
        return BF.bal_conv_transpose(
            input,
            self.weight,
            self.bias,
            self.gain,
            self.stride,
            cast("tuple[int, ...]", self.padding),
            output_padding,
            self.groups,
            self.dilation,
            mass=self.mass,
            **self._statistics(),
        )

    def _unit_variance_gain(self) -> float:
        phases = math.prod(self.stride)
        fan_in = self.weight[:, 0].numel() / self.groups / phases  # each output meets one phase's part of the kernel
        return unit_variance_gain(fan_in, phases)


class BalNormConv1d(_BalNormConv, nn.Conv1d):
    """Balanced 1d convolution, for :class:`torch.nn.Conv1d` and the BatchNorm after it. See :class:`BalNormConv2d`.

    Example:
        >>> layer = BalNormConv1d(16, 32, 5, padding=2)
        >>> tuple(layer(torch.rand(8, 16, 100)).shape)
        (8, 32, 100)
    """

    plain = nn.Conv1d


class BalNormConv2d(_BalNormConv, nn.Conv2d):
    r"""Balanced 2d convolution, in the place of :class:`torch.nn.Conv2d` and the BatchNorm after it.

    Its weight is shifted and scaled at every step, from the per-channel sums of the layer's *input*, so that positive
    and negative weights contribute equally, and in a fixed amount, to the output:

    .. math::
        b_d = -\frac{\sum m\,w_d}{\sum m}, \qquad s_d = \frac{1}{\sum m\,(w_d + b_d)\,I}, \qquad
        y = x * \mathrm{gain}_d\,s_d\,(w_d + b_d) + \mathrm{bias}_d

    Here m is the mass of the input: how much of it a weight meets per output element. All of it is differentiated
    through. No activation is normalised, so none is kept for that.

    In training mode m is that of the batch, and ``running_mass`` follows it: ``(1 - a) * running_mass + a * m`` with
    ``a = max(momentum, 1 / num_batches_tracked)``. In eval mode m is ``running_mass``; the output then depends on
    neither the rest of the batch nor the image size, and :meth:`fuse` gives a plain convolution that computes the same.

    The layer expects inputs that are not negative, as after a ReLU; plain pixels should be in [0, 1], not
    mean-subtracted. Elsewhere use ``signed_input=True``.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: as
            in :class:`torch.nn.Conv2d`.
        mass: ``"channel"`` sums each input channel as a whole, as in the paper. ``"position"`` counts for each tap of
            the kernel exactly the inputs that it meets, and so stays exact under zero padding, stride and dilation.
        one_pass: I is the sign of the weight before the shift (``True``, as in the paper's experiments) or after it
            (``False``: exactly balanced).
        stats_fraction: take m from this leading part of the batch; less than 1 adds the noise that regularises.
        signed_input: take m from ``|x|``.
        gain_init: initial gain: ``"unit_variance"`` for outputs of variance 1 behind rectified Gaussian inputs, or a
            number; 1.0 is the literal reading of the paper.
        affine: whether the gain is learned. If not, it stays at its initial value. (The bias has its own argument.)
        momentum: weight of the newest batch in ``running_mass``; ``None`` is the plain average of all batches.
        track_running_stats: whether there is a ``running_mass``. If not, eval mode uses the batch too.
        sync_stats: sum the statistics over all processes, where :mod:`torch.distributed` is initialised.
        process_group: the processes to do so with; ``None`` is all of them.

    Shape:
        - input: (N, C, H, W) or (C, H, W); N = 0 is allowed, and is not tracked.
        - output: as of :class:`torch.nn.Conv2d`.

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
    """Balanced 3d convolution, for :class:`torch.nn.Conv3d` and the BatchNorm after it. See :class:`BalNormConv2d`.

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
    """Balanced transposed 2d convolution, for :class:`torch.nn.ConvTranspose2d` and the BatchNorm after it.

    Geometry as in torch's layer, options and behaviour as in :class:`BalNormConv2d`. Each weight of a transposed
    convolution meets every input once whatever the stride, so its ``channel`` mass is the channel's sum over the number
    of output elements.

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
    """Balanced linear layer, for :class:`torch.nn.Linear` and the BatchNorm after it.

    It is a balanced 1x1 convolution: the mass is the mean of each input feature over all leading dimensions. Options
    and behaviour as in :class:`BalNormConv2d`; there is one kind of mass.

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
        **options: Unpack[LayerOptions],
    ) -> None:
        if options.get("mass", "channel") != "channel":
            raise ValueError(f"BalNormLinear has one kind of mass, 'channel', got {options['mass']!r}")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up(**options)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """A balanced layer with the weight and bias of ``linear``. See :meth:`BalNormConv2d.from_conv`."""
        return cls._from_plain(linear, options)

    def forward(self, input: Tensor) -> Tensor:
        return BF.bal_linear(input, self.weight, self.bias, self.gain, **self._statistics())


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

_MASS_OPTIONS = ("stats_fraction", "signed_input", "sync_stats", "process_group")


def layer_mass(
    layer: nn.Module,
    input: Tensor,
    output_size: Sequence[int] | None = None,
    mass: MassKind = "position",
    **options: Any,
) -> Tensor:
    """The mass of ``input`` for a convolution or linear layer, balanced or plain; options of ``BF.input_mass``."""
    if isinstance(layer, nn.Linear):
        return BF.input_mass(input, (), **options)
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode", "transposed", "output_padding")
    geometry: dict[str, Any] = {name: getattr(layer, name) for name in names}
    kernel = geometry["kernel_size"]
    if input.dim() == len(kernel) + 1:
        input = input.unsqueeze(0)
    if geometry["transposed"] and output_size is not None:
        geometry["output_padding"] = layer._output_padding(  # type: ignore[operator]
            input,
            list(output_size[-len(kernel) :]),
            *(geometry[name] for name in ("stride", "padding")),
            kernel,
            len(kernel),
            geometry["dilation"],
        )
    return BF.input_mass(input, mass=mass, **geometry, **options)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parameter(values: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter of its own storage, in the memory format of ``values``."""
    return nn.Parameter(values.detach().clone(), requires_grad=requires_grad)
