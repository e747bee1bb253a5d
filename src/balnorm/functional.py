"""The maths of balanced normalisation on tensors: mass, balance and the balanced layers. No modules, no state.

The symbols are those of ``docs/method.md``: input x, weight w, mass m, shift b, scale s, gain, effective weight w''.
Everything here is a function of its arguments; only :func:`update_running_mass` writes, and only into the two buffers
that it is given (as :func:`torch.nn.functional.batch_norm` does).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypedDict, cast

import torch
from torch import Tensor

from balnorm.composed import MASSES, MassKind, balance, batch_mass, full_precision, saturate
from balnorm.fused import Plan, fused_conv
from balnorm.geometry import Geometry, geometry_of, per_axis

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
    "input_mass",
    "update_running_mass",
]

P = ParamSpec("P")
BalancedConv: TypeAlias = Callable[Concatenate[Tensor, Tensor, P], Tensor]


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
    """In training, sum the statistics over all processes of ``process_group``, differentiably."""
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
        input: (N, C, \*in), with one spatial axis or more; (\*, C) for a linear layer.
        kernel_size: an int or one for each spatial axis; ``()`` for a linear layer.
        stride, padding, dilation, padding_mode, output_padding: as in the convolution.
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
    check_statistics(mass, stats_fraction)
    axes = input.dim() - 2
    if kernel_size == ():
        mass, geometry = "channel", geometry_of(())
    elif axes < 1:
        raise ValueError(f"input_mass takes an input of shape (N, C, *in), got {tuple(input.shape)}")
    else:
        kernel = per_axis(kernel_size, axes)
        geometry = geometry_of(kernel, stride, padding, dilation, 1, padding_mode, transposed, output_padding)
    with full_precision(input.device.type):
        return batch_mass(input, geometry, mass, stats_fraction, signed_input, sync_stats, process_group)


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
        if mass.dtype != running_mass.dtype:
            mass = mass.to(running_mass.dtype)
        total = mass.sum(dtype=torch.promote_types(mass.dtype, torch.float32))
        finite = (total - total) == 0  # as isfinite(), in half the time
        mass = torch.where(finite, mass, running_mass)
        if num_batches_tracked is None:
            running_mass.lerp_(mass, float(momentum))  # type: ignore[arg-type]
            return
        num_batches_tracked.add_(finite)
        # at most 1, for a count of 0 when the very first mass is not finite
        rate = num_batches_tracked.to(total.dtype).reciprocal_().clamp_(momentum, 1.0)
        running_mass.lerp_(mass, rate.to(mass.dtype))


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
    geometry = geometry_of(tuple(weight.shape[2:]), stride, padding, dilation, groups, padding_mode)
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
    geometry = geometry_of(kernel, stride, padding, dilation, groups, transposed=True, output_padding=output_padding)
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
    return _balanced(input, weight, bias, gain, geometry_of(()), "channel", **statistics)


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
    geometry: Geometry,
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
    check_statistics(mass, stats_fraction)
    x, unbatched = _batched(input, weight, geometry)
    device = x.device.type
    # Without gradients and statistics there is nothing to save; the output is then exactly that of the folded layer.
    composed = _torch_transforms_the_program() or not (training or torch.is_grad_enabled())
    if geometry.is_pointwise:
        mass = "channel"  # which is then the same, and cheaper
    compute_dtype = weight.dtype
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and x.is_floating_point() and x.dtype != torch.float64:
        # As in torch's own layers the convolution runs in the lower precision; mass and balance do not.
        compute_dtype = torch.get_autocast_dtype(device)
        x = x.to(compute_dtype)
    if x.dtype != compute_dtype:
        raise RuntimeError(f"the input is {x.dtype} and the weight {weight.dtype}: convert one, or use torch.autocast")
    with full_precision(device):
        m: Tensor | None = None
        if not training and running_mass is not None:
            # A copy: backward may need it after another forward, or DDP's broadcast, has changed the buffer.
            m = running_mass.clone()
        elif composed or signed_input or sync_stats or geometry.pads_beforehand:
            together = sync_stats and training  # one process may evaluate alone
            m = batch_mass(x, geometry, mass, stats_fraction, signed_input, together, process_group)
        if geometry.pads_beforehand:
            x, geometry = geometry.pad(x), geometry.padded()
        if composed:
            assert m is not None
            effective = balance(weight, m, gain, one_pass, geometry.groups, transposed=geometry.transposed)
            low_bias = None if bias is None else saturate(bias, compute_dtype)
            y = geometry.convolve(x, saturate(effective, compute_dtype), low_bias)
        else:
            y, m = fused_conv(x, weight, bias, gain, m, Plan(geometry, mass, one_pass, stats_fraction))
        if training and running_mass is not None and not recomputing():
            update_running_mass(running_mass, num_batches_tracked, m, momentum)
    return y.squeeze(0) if unbatched else y


def _torch_transforms_the_program() -> bool:
    """Whether torch is to see the single operations: to compile, export or trace them, or for ``torch.func``."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def _batched(input: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, bool]:
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


def check_statistics(mass: str, stats_fraction: float) -> None:
    """Raise a ValueError that names what is allowed."""
    if mass not in MASSES:
        raise ValueError(f"mass must be one of {', '.join(map(repr, MASSES))}, got {mass!r}")
    if not isinstance(stats_fraction, int | float) or not 0.0 < stats_fraction <= 1.0:
        raise ValueError(f"stats_fraction must be above 0 and at most 1, got {stats_fraction!r}")


def recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing repeats it, and it is counted already."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
