"""The maths of balanced normalisation on tensors: statistics, balance and the balanced layers. No modules, no state.

This is the public interface of :mod:`balnorm._core`, whose modules are internal. The symbols are those of
``docs/method.md``: input x with mean mu and mass a, weight w, shares p, contribution c, gain, effective weight w''. The
functions have no side effects, with one exception: :func:`update_running_stats`, and the layers if given its buffers,
write to those buffers (as :func:`torch.nn.functional.batch_norm` does).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from balnorm._core import backends, function, method
from balnorm._core.geometry import channels_of, geometry_of, per_axis
from balnorm._core.options import MASSES, MassKind, OptionKeywords, Options

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
    "statistics",
    "update_running_stats",
]


def backend(device: torch.device | str = "cpu") -> str:
    """Which backend computes the balance of tensors on a device, and why.

    The answer starts with ``native``, ``triton`` or ``torch``. On a CPU it is native kernels, which are compiled when
    balnorm is installed, if there is a C compiler. Older torch does not expose its thread pool; the kernels then run
    single-threaded. On CUDA and ROCm devices it is Triton kernels, if Triton can be imported and a small layer gives
    the same results with them as with torch; the first layer on a device, or this function, tries it. Other devices use
    torch's own operations, and all devices do with ``BALNORM_BACKEND=torch`` in the environment.
    """
    return backends.status(torch.device(device))


FunctionT = TypeVar("FunctionT", bound=Callable[..., Tensor])


update_running_stats = method.update_running


def statistics(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    padding_mode: str = "zeros",
    transposed: bool = False,
    output_padding: int | Sequence[int] = 0,
    **options: Unpack[OptionKeywords],
) -> tuple[Tensor, Tensor]:
    r"""The mean and the mass of an input: how much of x, and of \|x\|, a weight meets per output element.

    ``channel`` is the paper's: :math:`v_c / r`, where :math:`v_c` is the sum of channel c over batch and space, and
    r = batch size x output size x stride (over all axes). The taps of a transposed convolution meet every input
    whatever the stride, so r is then batch size x output size. ``position`` counts for each tap of the kernel exactly
    the inputs that it multiplies, and honours padding, stride and dilation. If a zero-padded image (of a transposed
    convolution: the output) is smaller than the kernel with its dilation, every tap gets the statistics of ``channel``:
    the few taps that meet anything would otherwise carry the whole output, and networks do not train that way.

    Args:
        input: (N, C, \*in), with one spatial axis or more; (\*, C) for a linear layer.
        kernel_size: one int, or one for each spatial axis; ``()`` for a linear layer.
        stride, padding, dilation, padding_mode, output_padding: as in the convolution.
        transposed: whether the convolution is transposed.
        **options: ``mass``, ``centred`` (the mass of \|x - mean\|) and the other fields of :class:`Options`.

    Returns:
        Mean and mass, each (1, C, 1, ..., 1) for ``channel``, (1, C, \*kernel_size) for ``position``: they broadcast
        over the weight. They are float32 or wider, and NaN for an empty batch. If no input is negative they are equal.

    Example:
        >>> import torch
        >>> x = torch.ones(2, 1, 4, 4)
        >>> mean, mass = statistics(x, 3, padding=1)
        >>> mass.flatten()  # every output meets one input per tap, were it not for the border
        tensor([1.])
        >>> mean, mass = statistics(-x, 3, padding=1, mass="position")
        >>> mass  # the outer taps miss one row, or column, of four
        tensor([[[[0.5625, 0.7500, 0.5625],
                  [0.7500, 1.0000, 0.7500],
                  [0.5625, 0.7500, 0.5625]]]])
    """
    checked = Options.of("statistics()", {**options})
    axes = input.dim() - 2
    if kernel_size == ():
        geometry = geometry_of(())
    elif axes < 1:
        raise ValueError(f"statistics takes an input of shape (N, C, *in), got {tuple(input.shape)}")
    else:
        kernel = per_axis(kernel_size, axes)
        geometry = geometry_of(kernel, stride, padding, dilation, 1, padding_mode, transposed, output_padding)
    mean, mass, _ = function.input_statistics(input, geometry, checked)
    return mean, mass


def balance(
    weight: Tensor,
    mass: Tensor,
    gain: Tensor | None = None,
    one_pass: bool = True,
    groups: int = 1,
    *,
    shift: bool | Literal["auto"] = "auto",
    transposed: bool = False,
) -> Tensor:
    r"""The effective weight w'': w shifted and scaled so that positive and negative weights contribute equally.

    With sums over all but the output channel d, and the mass a broadcast over w:

    .. math::
        p = \frac{a}{\sum a}, \qquad w'_d = w_d - \sum p\,w_d, \qquad
        c_d = \sum p\,w'_d\,I, \qquad w''_d = \frac{\mathrm{gain}_d\,w'_d}{c_d \sum a}

    where :math:`I = [w_d > 0]` in one pass and :math:`[w'_d > 0]` in two. Without the shift, :math:`w' = w` and
    :math:`c = \frac12 \sum p\,|w|`. There is no epsilon. Where :math:`\sum a` or c vanishes to rounding error (dead
    inputs, equal weights, in one pass weights of one sign), w'' is zero, and so are its gradients.

    Args:
        weight: (D, C / groups, \*kernel); (C, D / groups, \*kernel) if ``transposed``; (D, C) for a linear layer.
        mass: (1, C, 1, ..., 1) or (1, C, \*kernel); (1, C) for a linear layer.
        gain: (D,), or ``None`` for ones.
        one_pass: which of the two definitions of I.
        groups: groups of the convolution.
        shift: whether to subtract the weighted mean; ``"auto"`` does so if an output kernel has more than one input
            channel.
        transposed: whether ``weight`` belongs to a transposed convolution.

    Returns:
        w'', in the shape, dtype and memory format of ``weight``.

    Example:
        >>> import torch
        >>> a = torch.tensor([[1.0, 3.0]])
        >>> w = balance(torch.tensor([[1.0, -1.0], [2.0, 1.0]]), a, one_pass=False)
        >>> w  # in each row the positive weight contributes +1 and the negative one -1
        tensor([[ 1.0000, -0.3333],
                [ 1.0000, -0.3333]])
        >>> (a * w).sum(1)
        tensor([0., 0.])
    """
    _, inputs = channels_of(weight, groups, transposed)
    shifted = Options(shift=shift).shifts(inputs // groups)
    return method.balance(weight, mass, gain, one_pass, groups, shift=shifted, transposed=transposed)[0]


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
    running_mean: Tensor | None = None,
    running_mass: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    **options: Unpack[OptionKeywords],
) -> Tensor:
    r"""Balanced convolution, ``conv(input, w'') + bias - sum w'' mu``, over as many axes as the kernel has.

    w'' is the :func:`balance` of the weight for the input's mass, and mu the input's mean. ``bal_conv1d``,
    ``bal_conv2d`` and ``bal_conv3d`` are the same function, but check the number of axes.

    Args:
        input: (N, C, \*in) or (C, \*in).
        weight: (D, C / groups, \*kernel).
        bias: (D,) or ``None``.
        gain: (D,) or ``None`` for ones. It multiplies w'', so it costs no pass over the output. There is no output
            scale here: for outputs of variance 1, as from the layers, multiply the gain by
            :func:`balnorm.init.unit_variance_scale`.
        stride, padding, dilation, groups: as in :func:`torch.nn.functional.conv2d`.
        padding_mode: as in :class:`torch.nn.Conv2d`.
        training: use the statistics of this batch (``True``, the default), or the running ones if there are any.
        running_mean, running_mass, num_batches_tracked: the moving averages of the statistics and the number of batches
            in them; updated in place in training, and only read otherwise. Without a ``running_mass`` the others are
            not used.
        **options: ``mass``, ``one_pass`` and the other fields of :class:`Options`.

    Example:
        >>> import torch
        >>> x, w = torch.rand(8, 3, 10, 10), torch.randn(4, 3, 3, 3)
        >>> y = bal_conv2d(x, w, mass="position", one_pass=False)
        >>> y.mean((0, 2, 3)).abs().max() < 1e-5
        tensor(True)
    """
    geometry = geometry_of(_kernel("bal_conv", weight), stride, padding, dilation, groups, padding_mode)
    checked = Options.of("bal_conv()", {**options})
    running = (running_mean, running_mass, num_batches_tracked)
    return function.balanced_conv(input, weight, bias, gain, None, geometry, checked, training, *running)


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
    running_mean: Tensor | None = None,
    running_mass: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    **options: Unpack[OptionKeywords],
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
    checked = Options.of("bal_conv_transpose()", {**options})
    running = (running_mean, running_mass, num_batches_tracked)
    return function.balanced_conv(input, weight, bias, gain, None, geometry, checked, training, *running)


def bal_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    *,
    training: bool = True,
    running_mean: Tensor | None = None,
    running_mass: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    **options: Unpack[OptionKeywords],
) -> Tensor:
    r"""Balanced linear map, ``input @ w''.T + bias - sum w'' mu``: a 1x1 convolution.

    Args:
        input: (\*, C) with any leading dimensions; ``stats_fraction`` takes its part of the first.
        weight: (D, C).
        bias, gain: (D,) or ``None``.
        training, running_mean, running_mass, num_batches_tracked, **options: as in :func:`bal_conv`, with one kind of
            mass.

    Example:
        >>> import torch
        >>> y = bal_linear(torch.rand(5, 7, 16), torch.randn(4, 16))
        >>> tuple(y.shape), bool(y.mean((0, 1)).abs().max() < 1e-5)
        ((5, 7, 4), True)
    """
    checked = Options.of("bal_linear()", {**options})
    running = (running_mean, running_mass, num_batches_tracked)
    return function.balanced_conv(input, weight, bias, gain, None, geometry_of(()), checked, training, *running)


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
