"""The maths of balanced normalisation on tensors: mass, balance and the balanced layers. No modules, no state.

The symbols are those of ``docs/method.md``: input x, weight w, mass m, shift b, scale s, gain, effective weight w''.
Everything here is a function of its arguments; only :func:`update_running_mass` writes, and only into the two buffers
that it is given (as :func:`torch.nn.functional.batch_norm` does).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Concatenate, Literal, NamedTuple, ParamSpec, TypeAlias, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Unpack

__all__ = [
    "MASSES",
    "MassKind",
    "Statistics",
    "bal_conv",
    "bal_conv1d",
    "bal_conv2d",
    "bal_conv3d",
    "bal_conv_transpose",
    "bal_conv_transpose1d",
    "bal_conv_transpose2d",
    "bal_conv_transpose3d",
    "bal_linear",
    "balance",
    "by_output",
    "input_mass",
    "update_running_mass",
]

P = ParamSpec("P")
BalancedConv: TypeAlias = Callable[Concatenate[Tensor, Tensor, P], Tensor]
MassKind = Literal["channel", "position"]
MASSES: tuple[MassKind, ...] = ("channel", "position")


class Statistics(TypedDict, total=False):
    """The keyword arguments that every balanced layer function shares.

    All are optional, and mean what the layer's option of the same name means (see :class:`balnorm.BalNormConv2d`).
    """

    one_pass: bool
    """Take the sign of w (``True``, the paper's experiments) or of the shifted weight w' (``False``)."""
    stats_fraction: float
    """Take the mass from this leading fraction of the batch (at least one sample)."""
    signed_input: bool
    """Take the mass of ``|x|``: for inputs that can be negative."""
    sync_stats: bool
    """Sum the statistics over all processes of ``process_group``, differentiably."""
    process_group: ProcessGroup | None
    training: bool
    """Use the mass of this batch (``True``, the default), or ``running_mass`` where there is one."""
    running_mass: Tensor | None
    """Moving average of the mass: read when not training, updated in place when training."""
    num_batches_tracked: Tensor | None
    """Counter of the batches in ``running_mass``, updated in place with it."""
    momentum: float | None
    """Weight of the newest batch in ``running_mass``; ``None`` is the plain average."""


# --------------------------------------------------------------------------------------------------------------------
# Mass and balance
# --------------------------------------------------------------------------------------------------------------------


def input_mass(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    mass: MassKind = "channel",
    padding_mode: str = "zeros",
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    stats_fraction: float = 1.0,
    signed_input: bool = False,
    sync_stats: bool = False,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    r"""How much input a weight of a convolution meets per output element.

    ``channel`` is the paper's: :math:`m_c = v_c / r`, with :math:`v_c` the sum of channel c over batch and space and
    r = batch size x output size x stride (over all axes; a transposed convolution's taps meet every input whatever
    the stride, so there r = batch size x output size). ``position`` counts for each tap of the kernel exactly the
    inputs that it multiplies, with padding, stride and dilation honoured.

    Args:
        input: (N, C, \*in), with one spatial axis or more.
        kernel_size, stride, padding, dilation, padding_mode, output_padding: as in the convolution, an int or one for
            each spatial axis.
        mass: ``"channel"`` or ``"position"``.
        transposed: whether the convolution is a transposed one.
        stats_fraction, signed_input, sync_stats, process_group: see :class:`Statistics`.

    Returns:
        (1, C, 1, ..., 1) for ``channel``, (1, C, \*kernel_size) for ``position``: it broadcasts over the weight.
        float32 or wider. NaN for a batch of 0.

    Example:
        >>> x = torch.ones(2, 1, 4, 4)
        >>> input_mass(x, 3, padding=1).flatten()  # every output meets one input per tap, were it not for the border
        tensor([1.])
        >>> input_mass(x, 3, padding=1, mass="position")  # the outer taps miss one row, or column, of four
        tensor([[[[0.5625, 0.7500, 0.5625],
                  [0.7500, 1.0000, 0.7500],
                  [0.5625, 0.7500, 0.5625]]]])
    """
    _check_mass(mass)
    axes = input.dim() - 2
    if axes < 1:
        raise ValueError(f"input_mass takes an input of shape (N, C, *in), got {tuple(input.shape)}")
    kernel = _per_axis(kernel_size, axes)
    geometry = _geometry(kernel, stride, padding, dilation, 1, padding_mode, transposed, output_padding)
    return _batch_mass(input, geometry, mass, stats_fraction, signed_input, sync_stats, process_group)


def balance(
    weight: Tensor,
    mass: Tensor,
    gain: Tensor | None = None,
    one_pass: bool = True,
    groups: int = 1,
    *,
    transposed: bool = False,
) -> Tensor:
    r"""The effective weight w'': w shifted and scaled so that positive and negative weights contribute equally.

    With sums over all but the output channel d, and m broadcast over w:

    .. math::
        b_d = -\frac{\sum m\,w_d}{\sum m}, \qquad w'_d = w_d + b_d, \qquad
        s_d = \frac{1}{\sum m\,w'_d\,I}, \qquad w''_d = \mathrm{gain}_d\,s_d\,w'_d

    where :math:`I = [w_d > 0]` in one pass and :math:`[w'_d > 0]` in two. There is no epsilon. Where :math:`\sum m` or
    the denominator of s vanishes to rounding error (dead inputs, equal weights, in one pass weights of one sign), w''
    is zero, and so are its gradients.

    Args:
        weight: (D, C / groups, \*kernel); (C, D / groups, \*kernel) if ``transposed``; (D, C) for a linear layer.
        mass: (1, C, 1, ..., 1) or (1, C, \*kernel); (1, C) for a linear layer.
        gain: (D,), or ``None`` for ones.
        one_pass: which of the two definitions of I.
        groups: groups of the convolution.
        transposed: whether ``weight`` belongs to a transposed convolution.

    Returns:
        w'', in the shape, dtype and memory format of ``weight``.

    Example:
        >>> m = torch.tensor([[1.0, 3.0]])
        >>> w = balance(torch.tensor([[1.0, -1.0], [2.0, 1.0]]), m, one_pass=False)
        >>> w  # in each row the positive weight contributes +1 and the negative one -1
        tensor([[ 1.0000, -0.3333],
                [ 1.0000, -0.3333]])
        >>> (m * w).sum(1)
        tensor([0., 0.])
    """
    dtype = torch.promote_types(torch.promote_types(weight.dtype, mass.dtype), torch.float32)
    w = by_output(weight, groups, transposed).to(dtype)
    m = mass.to(dtype).view(groups, 1, mass.shape[1] // groups, *mass.shape[2:])
    m = m.expand(-1, -1, *w.shape[2:])
    per_output = tuple(range(2, w.dim()))
    limits = torch.finfo(dtype)

    # w'' is homogeneous of degree -1 in m and of degree 0 in w. So m is measured in units of its own size, and the
    # denominator in units of its own, both as constants: nothing overflows for inputs or weights of any magnitude.
    size = m.detach().abs().sum(per_output, keepdim=True)
    present = (size > limits.tiny / limits.eps) & (size < math.inf)
    size = torch.where(present, size, 1.0)
    m = torch.where(present, m, 0.0) / size
    total = m.sum(per_output, keepdim=True)
    alive = total.abs() > limits.eps
    share = m / torch.where(alive, total, 1.0)

    b = -(share * w).sum(per_output, keepdim=True)
    shifted = w + b
    positive = w > 0 if one_pass else shifted > 0
    denominator = (share * torch.where(positive, shifted, 0.0)).sum(per_output, keepdim=True)
    alive = alive & (denominator.abs() > _rounding_error(w[0, 0].numel(), dtype) * b.abs())
    unit = torch.where(alive, denominator.detach().abs(), 1.0)
    scale = torch.where(alive, 1.0, 0.0) / torch.where(alive, denominator / unit * total, 1.0)
    if gain is not None:
        scale = scale * gain.to(dtype).view(scale.shape[:2] + (1,) * len(per_output))
    balanced = (shifted / unit) * (scale / size)
    return _saturate(_from_by_output(balanced, transposed), weight.dtype)


def update_running_mass(
    running_mass: Tensor, num_batches_tracked: Tensor | None, mass: Tensor, momentum: float | None
) -> None:
    r"""Take the mass of a batch into its moving average, in place and with no synchronisation with the host.

    ``running_mass`` becomes ``(1 - a) * running_mass + a * mass`` with ``a = max(momentum, 1 / n)``, n counting this
    batch: the first batch is copied, the next ones are averaged, until the average becomes the moving one.
    ``momentum=None`` is the plain average. Without a counter, a is the momentum. A mass that is not finite, or would
    not be in the dtype of ``running_mass``, changes nothing.
    """
    if momentum is None and num_batches_tracked is None:
        raise ValueError("momentum=None needs num_batches_tracked: a plain average has to count its batches")
    with torch.no_grad():
        mass = mass.detach()
        if num_batches_tracked is None:
            rate = torch.full((), momentum, dtype=mass.dtype, device=mass.device)  # type: ignore[arg-type]
        else:
            rate = (num_batches_tracked + 1).to(mass.dtype).reciprocal()
            if momentum is not None:
                rate = rate.clamp(min=momentum)
        updated = torch.lerp(running_mass.to(mass.dtype), mass, rate).to(running_mass.dtype)
        finite = updated.isfinite().all()
        running_mass.copy_(torch.where(finite, updated, running_mass))
        if num_batches_tracked is not None:
            num_batches_tracked.add_(finite)


# --------------------------------------------------------------------------------------------------------------------
# Balanced layers
# --------------------------------------------------------------------------------------------------------------------


def bal_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    mass: MassKind = "channel",
    **statistics: Unpack[Statistics],
) -> Tensor:
    r"""Balanced convolution, ``conv(input, w'') + bias``, over as many axes as the kernel has.

    w'' is :func:`balance` of the weight and the input's mass. ``bal_conv1d``, ``bal_conv2d`` and ``bal_conv3d`` are
    the same function and check the number of axes.

    Args:
        input: (N, C, \*in) or (C, \*in).
        weight: (D, C / groups, \*kernel).
        bias: (D,) or ``None``.
        gain: (D,) or ``None`` for ones. It multiplies w'': scaling the output costs no pass over it.
        stride, padding, dilation, groups: as in :func:`torch.nn.functional.conv2d`.
        padding_mode: as in :class:`torch.nn.Conv2d`.
        mass: ``"channel"`` or ``"position"``, see :func:`input_mass`.
        **statistics: see :class:`Statistics`.

    Example:
        >>> x, w = torch.rand(8, 3, 10, 10), torch.randn(4, 3, 3, 3)
        >>> y = bal_conv2d(x, w, mass="position", one_pass=False)
        >>> y.mean((0, 2, 3)).abs().max() < 1e-5
        tensor(True)
    """
    geometry = _geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups, padding_mode)
    return _balanced(input, weight, bias, gain, geometry, mass, **statistics)


def bal_conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    mass: MassKind = "channel",
    **statistics: Unpack[Statistics],
) -> Tensor:
    r"""Balanced transposed convolution over as many axes as the kernel has.

    ``weight`` is (C, D / groups, \*kernel), the other arguments are those of
    :func:`torch.nn.functional.conv_transpose2d` and of :func:`bal_conv`. ``bal_conv_transpose1d``,
    ``bal_conv_transpose2d`` and ``bal_conv_transpose3d`` are the same function and check the number of axes.

    Example:
        >>> x, w = torch.rand(8, 3, 10, 10), torch.randn(3, 4, 3, 3)
        >>> y = bal_conv_transpose2d(x, w, stride=2, mass="position", one_pass=False)
        >>> tuple(y.shape), bool(y.mean((0, 2, 3)).abs().max() < 1e-5)
        ((8, 4, 21, 21), True)
    """
    kernel = tuple(weight.shape[2:])
    geometry = _geometry(kernel, stride, padding, dilation, groups, transposed=True, output_padding=output_padding)
    return _balanced(input, weight, bias, gain, geometry, mass, **statistics)


def bal_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    **statistics: Unpack[Statistics],
) -> Tensor:
    r"""Balanced linear map, ``input @ w''.T + bias``: a 1x1 convolution whose mass is the mean input.

    Args:
        input: (\*, C) with any leading dimensions; the first of them is the batch that ``stats_fraction`` divides.
        weight: (D, C).
        bias, gain: (D,) or ``None``.
        **statistics: see :class:`Statistics`.

    Example:
        >>> y = bal_linear(torch.rand(5, 7, 16), torch.randn(4, 16))
        >>> tuple(y.shape), bool(y.mean((0, 1)).abs().max() < 1e-5)
        ((5, 7, 4), True)
    """
    return _balanced(input, weight, bias, gain, _geometry(()), "channel", **statistics)


def _over_axes(axes: int, function: BalancedConv[P]) -> BalancedConv[P]:
    """``function`` for a kernel with just so many axes."""
    name = f"{function.__name__}{axes}d"

    @functools.wraps(function)
    def checked(input: Tensor, weight: Tensor, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if weight.dim() != axes + 2:
            raise ValueError(f"{name} takes a weight with {axes + 2} dimensions, got {tuple(weight.shape)}")
        return function(input, weight, *args, **kwargs)

    checked.__name__ = checked.__qualname__ = name
    return cast("BalancedConv[P]", checked)


bal_conv1d = _over_axes(1, bal_conv)
bal_conv2d = _over_axes(2, bal_conv)
bal_conv3d = _over_axes(3, bal_conv)
bal_conv_transpose1d = _over_axes(1, bal_conv_transpose)
bal_conv_transpose2d = _over_axes(2, bal_conv_transpose)
bal_conv_transpose3d = _over_axes(3, bal_conv_transpose)


def _balanced(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gain: Tensor | None,
    geometry: _Geometry,
    mass: MassKind,
    *,
    one_pass: bool = True,
    stats_fraction: float = 1.0,
    signed_input: bool = False,
    sync_stats: bool = False,
    process_group: ProcessGroup | None = None,
    training: bool = True,
    running_mass: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
) -> Tensor:
    _check_mass(mass)
    x, unbatched = _batched(input, weight, geometry)
    device = x.device.type
    compute_dtype = weight.dtype
    precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # As with torch's own layers the convolution runs in the lower precision; mass and balance do not.
        compute_dtype, precision = torch.get_autocast_dtype(device), torch.autocast(device, enabled=False)
        x = x.to(compute_dtype)
    with precision:
        if training or running_mass is None:
            m = _batch_mass(x, geometry, mass, stats_fraction, signed_input, sync_stats, process_group)
            if training and running_mass is not None and not _recomputing():
                update_running_mass(running_mass, num_batches_tracked, m, momentum)
        else:
            # A copy: backward may need it after another forward, or DDP's broadcast, has changed the buffer.
            m = running_mass.clone()
        effective = balance(weight, m, gain, one_pass, geometry.groups, transposed=geometry.transposed)
        y = geometry.convolve(x, _saturate(effective, compute_dtype), None if bias is None else bias.to(compute_dtype))
    return y.squeeze(0) if unbatched else y


# --------------------------------------------------------------------------------------------------------------------
# How a kernel meets its input
# --------------------------------------------------------------------------------------------------------------------


class _Geometry(NamedTuple):
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

    def padded(self) -> _Geometry:
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

    def taps(self, size: Sequence[int]) -> Iterator[list[slice]]:
        """For each axis, the inputs that each tap of the kernel multiplies."""
        for n, out, k, s, p, d in zip(
            size, self.output_size(size), self.kernel, self.stride, self.padding, self.dilation, strict=True
        ):
            yield [self._tap(n, out, s, j * d - p[0]) for j in range(k)]

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
            return _CONV_TRANSPOSE[axes](
                x, weight, bias, self.stride, padding, self.output_padding, self.groups, self.dilation
            )
        return _CONV[axes](x, weight, bias, self.stride, padding, self.dilation, self.groups)


_CONV: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)
_CONV_TRANSPOSE: tuple[Callable[..., Tensor], ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def _geometry(
    kernel: tuple[int, ...],
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
) -> _Geometry:
    axes = len(kernel)
    dilations = _per_axis(dilation, axes)
    if padding == "same":
        missing = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        sides = tuple((n // 2, n - n // 2) for n in missing)
    elif padding == "valid":
        sides = ((0, 0),) * axes
    elif isinstance(padding, str):
        raise ValueError(f"padding must be 'same', 'valid', an int or an int for each axis, got {padding!r}")
    else:
        sides = tuple((p, p) for p in _per_axis(padding, axes))
    return _Geometry(
        kernel,
        _per_axis(stride, axes),
        sides,
        dilations,
        groups,
        padding_mode,
        transposed,
        _per_axis(output_padding, axes),
    )


def _per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * axes
    values = tuple(value)
    if len(values) != axes:
        raise ValueError(f"expected an int or {axes} of them, got {value!r}")
    return values


def _batch_mass(
    x: Tensor,
    geometry: _Geometry,
    mass: MassKind,
    stats_fraction: float,
    signed_input: bool,
    sync_stats: bool,
    process_group: ProcessGroup | None,
) -> Tensor:
    """The mass of a batch (N, C, *in); for a linear layer of a batch (N, *, C)."""
    if stats_fraction != 1.0:
        x = x[: max(1, int(x.shape[0] * stats_fraction + 0.5))]
    if not geometry.kernel:
        x = x.flatten(0, -2)
    if signed_input:
        x = x.abs()
    # Everything else happens on this one sum (1, C, *in): no second pass over the batch.
    sums = x.sum(0, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    outputs = x.shape[0] * math.prod(geometry.output_size(sums.shape[2:]))
    if mass == "position":
        if geometry.pads_beforehand:
            sums, geometry = geometry.pad(sums), geometry.padded()
        # One axis at a time, each replaced by the kernel's: the first spatial axis goes, a kernel axis comes last.
        for taps in geometry.taps(sums.shape[2:]):
            sums = torch.stack([sums[:, :, tap].sum(2) for tap in taps], dim=-1)
    elif geometry.kernel:
        sums = sums.sum(tuple(range(2, sums.dim())), keepdim=True)
        if not geometry.transposed:
            outputs = outputs * math.prod(geometry.stride)
    if sync_stats and torch.distributed.is_available() and torch.distributed.is_initialized():
        return _mean_over_processes(sums, outputs, process_group)
    return sums / outputs


def _mean_over_processes(sums: Tensor, count: int, group: ProcessGroup | None) -> Tensor:
    """``sums / count``, with both summed over the processes of ``group`` in one differentiable collective."""
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.distributed_c10d import _get_default_group

    flat = torch.cat([sums.flatten(), sums.new_full((1,), count)])
    flat = cast(Tensor, all_reduce(flat, "sum", group if group is not None else _get_default_group()))
    return flat[:-1].view_as(sums) / flat[-1]


# --------------------------------------------------------------------------------------------------------------------
# Helpers
# --------------------------------------------------------------------------------------------------------------------


def by_output(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """View ``weight`` as (groups, D / groups, C / groups, *kernel)."""
    grouped = weight.view(groups, weight.shape[0] // groups, *weight.shape[1:])
    return grouped.transpose(1, 2) if transposed else grouped


def _from_by_output(weight: Tensor, transposed: bool) -> Tensor:
    """The inverse of :func:`by_output`."""
    return (weight.transpose(1, 2) if transposed else weight).flatten(0, 1)


def _rounding_error(terms: int, dtype: torch.dtype) -> float:
    """A generous bound on the relative error of a sum of so many terms: what is smaller counts as zero."""
    return float(4 * torch.finfo(dtype).eps * math.sqrt(terms))


def _saturate(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``; what float16 cannot hold becomes its largest number, not infinity."""
    if weight.dtype == dtype:
        return weight
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        weight = weight.clamp(-largest, largest)
    return weight.to(dtype)


def _batched(input: Tensor, weight: Tensor, geometry: _Geometry) -> tuple[Tensor, bool]:
    """``input`` with a batch axis, and whether it had none."""
    axes = len(geometry.kernel)
    if axes == 0:
        channels, unbatched, allowed, channel_axis = weight.shape[1], input.dim() == 1, input.dim() >= 1, -1
        expected = f"(*, {channels})"
    else:
        channels = weight.shape[0] if geometry.transposed else weight.shape[1] * geometry.groups
        unbatched, allowed, channel_axis = input.dim() == axes + 1, axes < input.dim() <= axes + 2, -axes - 1
        expected = f"(N, {channels}, *in) or ({channels}, *in) with {axes} spatial axes"
    if not allowed or input.shape[channel_axis] != channels:
        raise ValueError(f"expected an input of shape {expected}, got {tuple(input.shape)}")
    return (input.unsqueeze(0) if unbatched else input), unbatched


def _check_mass(mass: str) -> None:
    if mass not in MASSES:
        raise ValueError(f"mass must be one of {', '.join(map(repr, MASSES))}, got {mass!r}")


def _recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing repeats it, and it is counted already."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
