"""The maths of balanced normalisation on tensors: mass, balance and the balanced layers. No modules, no state.

This is the public interface of :mod:`balnorm.core`, whose modules are internal. The symbols are those of
``docs/method.md``: input x, weight w, mass m, shift b, scale s, gain, effective weight w''. The functions have no side
effects, with one exception: :func:`update_running_mass`, and the layers if given its two buffers, write to those
buffers (as :func:`torch.nn.functional.batch_norm` does).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from balnorm.core import conv, native
from balnorm.core.balance import balance
from balnorm.core.geometry import geometry_of, per_axis
from balnorm.core.mass import update_running_mass
from balnorm.core.options import MASSES, MassKind, Options
from balnorm.core.plan import Plan

__all__ = [
    "MASSES",
    "MassKind",
    "Options",
    "backend",
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


def backend() -> str:
    """What computes the balance of tensors in a CPU's memory, and why: ``"native, ..."`` or ``"torch: ..."``.

    The native kernels are compiled when balnorm is installed, if there is a C compiler; ``BALNORM_NATIVE=0`` in the
    environment switches them off. Older versions of torch do not lend their threads; the kernels then run on one. Other
    devices always use torch's own operations.
    """
    return native.status()


FunctionT = TypeVar("FunctionT", bound=Callable[..., Tensor])


def input_mass(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    padding_mode: str = "zeros",
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    **options: Any,
) -> Tensor:
    r"""How much input a weight of a convolution meets per output element.

    ``channel`` is the paper's mass: :math:`m_c = v_c / r`, where :math:`v_c` is the sum of channel c over batch and
    space, and r = batch size x output size x stride (over all axes). The taps of a transposed convolution meet every
    input whatever the stride, so there r = batch size x output size. ``position`` counts for each tap of the kernel
    exactly the inputs that it multiplies, and honours padding, stride and dilation. Where a zero-padded image (of a
    transposed convolution: the output) is smaller than the kernel with its dilation, every tap gets the mass of
    ``channel``: the few taps that meet anything would otherwise carry the whole output, and networks do not train that
    way.

    Args:
        input: (N, C, \*in), with one spatial axis or more; (\*, C) for a linear layer.
        kernel_size: one int, or one for each spatial axis; ``()`` for a linear layer.
        stride, padding, dilation, padding_mode, output_padding: as in the convolution.
        transposed: whether the convolution is transposed.
        **options: ``mass`` and the other fields of :class:`Options`.

    Returns:
        (1, C, 1, ..., 1) for ``channel``, (1, C, \*kernel_size) for ``position``: it broadcasts over the weight.
        It is float32 or wider, and NaN for an empty batch.

    Example:
        >>> import torch
        >>> x = torch.ones(2, 1, 4, 4)
        >>> input_mass(x, 3, padding=1).flatten()  # every output meets one input per tap, were it not for the border
        tensor([1.])
        >>> input_mass(x, 3, padding=1, mass="position")  # the outer taps miss one row, or column, of four
        tensor([[[[0.5625, 0.7500, 0.5625],
                  [0.7500, 1.0000, 0.7500],
                  [0.5625, 0.7500, 0.5625]]]])
    """
    checked = Options.of("input_mass()", options)
    axes = input.dim() - 2
    if kernel_size == ():
        return conv.input_mass(input, Plan(geometry_of(()), checked))
    if axes < 1:
        raise ValueError(f"input_mass takes an input of shape (N, C, *in), got {tuple(input.shape)}")
    kernel = per_axis(kernel_size, axes)
    geometry = geometry_of(kernel, stride, padding, dilation, 1, padding_mode, transposed, output_padding)
    return conv.input_mass(input, Plan(geometry, checked))


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
    training: bool = True,
    running_mass: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    **options: Any,
) -> Tensor:
    r"""Balanced convolution, ``conv(input, w'') + bias``, over as many axes as the kernel has.

    w'' is the :func:`balance` of the weight for the input's mass. ``bal_conv1d``, ``bal_conv2d`` and ``bal_conv3d`` are
    the same function, but check the number of axes.

    Args:
        input: (N, C, \*in) or (C, \*in).
        weight: (D, C / groups, \*kernel).
        bias: (D,) or ``None``.
        gain: (D,) or ``None`` for ones. It multiplies w'', so it costs no pass over the output. There is no output
            scale here: for outputs of variance 1, as from the layers, multiply the gain by
            :func:`balnorm.init.unit_variance_scale`.
        stride, padding, dilation, groups: as in :func:`torch.nn.functional.conv2d`.
        padding_mode: as in :class:`torch.nn.Conv2d`.
        training: use the mass of this batch (``True``, the default), or ``running_mass`` if there is one.
        running_mass, num_batches_tracked: the moving average of the mass and the number of batches in it; updated in
            place in training, and only read otherwise.
        **options: ``mass``, ``one_pass`` and the other fields of :class:`Options`.

    Example:
        >>> import torch
        >>> x, w = torch.rand(8, 3, 10, 10), torch.randn(4, 3, 3, 3)
        >>> y = bal_conv2d(x, w, mass="position", one_pass=False)
        >>> y.mean((0, 2, 3)).abs().max() < 1e-5
        tensor(True)
    """
    geometry = geometry_of(_kernel("bal_conv", weight), stride, padding, dilation, groups, padding_mode)
    checked = Options.of("bal_conv()", options)
    plan = Plan(geometry, checked)
    return conv.balanced_conv(input, weight, bias, gain, None, plan, training, running_mass, num_batches_tracked)


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
    training: bool = True,
    running_mass: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    **options: Any,
) -> Tensor:
    r"""Balanced transposed convolution over as many axes as the kernel has.

    ``weight`` is (C, D / groups, \*kernel); the other arguments are those of
    :func:`torch.nn.functional.conv_transpose2d` and of :func:`bal_conv`. ``bal_conv_transpose1d``,
    ``bal_conv_transpose2d`` and ``bal_conv_transpose3d`` are the same function, but check the number of axes.

    Example:
        >>> import torch
        >>> x, w = torch.rand(8, 3, 10, 10), torch.randn(3, 4, 3, 3)
        >>> y = bal_conv_transpose2d(x, w, stride=2, mass="position", one_pass=False)
        >>> tuple(y.shape), bool(y.mean((0, 2, 3)).abs().max() < 1e-5)
        ((8, 4, 21, 21), True)
    """
    kernel = _kernel("bal_conv_transpose", weight)
    geometry = geometry_of(kernel, stride, padding, dilation, groups, transposed=True, output_padding=output_padding)
    checked = Options.of("bal_conv_transpose()", options)
    plan = Plan(geometry, checked)
    return conv.balanced_conv(input, weight, bias, gain, None, plan, training, running_mass, num_batches_tracked)


def bal_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    *,
    training: bool = True,
    running_mass: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    **options: Any,
) -> Tensor:
    r"""Balanced linear map, ``input @ w''.T + bias``: a 1x1 convolution whose mass is the mean input.

    Args:
        input: (\*, C) with any leading dimensions; ``stats_fraction`` takes its part of the first.
        weight: (D, C).
        bias, gain: (D,) or ``None``.
        training, running_mass, num_batches_tracked, **options: as in :func:`bal_conv`, with one kind of mass.

    Example:
        >>> import torch
        >>> y = bal_linear(torch.rand(5, 7, 16), torch.randn(4, 16))
        >>> tuple(y.shape), bool(y.mean((0, 1)).abs().max() < 1e-5)
        ((5, 7, 4), True)
    """
    checked = Options.of("bal_linear()", options)
    plan = Plan(geometry_of(()), checked)
    return conv.balanced_conv(input, weight, bias, gain, None, plan, training, running_mass, num_batches_tracked)


def _kernel(name: str, weight: Tensor) -> tuple[int, ...]:
    if not 3 <= weight.dim() <= 5:
        raise ValueError(f"{name} takes a weight with 3, 4 or 5 dimensions, got {tuple(weight.shape)}")
    return tuple(weight.shape[2:])


def _over_axes(axes: int, function: FunctionT) -> FunctionT:
    """``function``, restricted to kernels with this many axes."""
    name = f"{function.__name__}{axes}d"

    @functools.wraps(function)
    def checked(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if weight.dim() != axes + 2:
            raise ValueError(f"{name} takes a weight with {axes + 2} dimensions, got {tuple(weight.shape)}")
        return function(input, weight, *args, **kwargs)

    checked.__name__ = checked.__qualname__ = name
    return cast(FunctionT, checked)


bal_conv1d = _over_axes(1, bal_conv)
bal_conv2d = _over_axes(2, bal_conv)
bal_conv3d = _over_axes(3, bal_conv)
bal_conv_transpose1d = _over_axes(1, bal_conv_transpose)
bal_conv_transpose2d = _over_axes(2, bal_conv_transpose)
bal_conv_transpose3d = _over_axes(3, bal_conv_transpose)
