"""The balance of a weight as plain differentiable operations, and the one rule for what counts as zero.

Eager training runs the closed form in :mod:`balnorm.core.closed_form`. This form serves wherever torch transforms the
program (compilation, export, ``torch.func``), for second derivatives, for folding, and as a check of the closed form.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from balnorm.core.geometry import by_output, from_by_output

__all__ = ["autocast_device", "balance", "counts", "full_gain", "inverse_total", "saturate", "without_autocast"]


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
    m = mass.to(dtype).view(groups, 1, mass.shape[1] // groups, *mass.shape[2:]).expand(-1, -1, *w.shape[2:])
    row = tuple(range(2, w.dim()))  # all axes of an output kernel
    terms = math.prod(w.shape[2:])

    # w'' does not change with the size of w, and is inverse to the size of m. So both are measured in units of their
    # own, which are constants: nothing overflows, here or in the gradient, whatever the size of inputs and weights.
    total = m.detach().sum(row, keepdim=True)
    present = counts(total, m.detach().abs().sum(row, keepdim=True), terms)
    unit_of_mass = torch.where(present, total, 1.0)
    m = torch.where(present, m, 0.0) / unit_of_mass
    total = torch.where(present, m.sum(row, keepdim=True), 1.0)
    share = m / total

    mean = (share * w).sum(row, keepdim=True)
    shifted = w - mean
    positive = w > 0 if one_pass else shifted > 0
    contribution = (share * torch.where(positive, shifted, 0.0)).sum(row, keepdim=True)
    alive = present & counts(contribution.detach(), mean.detach(), terms)
    unit_of_weight = torch.where(alive, contribution.detach(), 1.0)
    scale = torch.where(alive, 1.0, 0.0) / torch.where(alive, contribution / unit_of_weight * total, 1.0)
    scale = scale * inverse_total(unit_of_mass, present)
    if gain is not None:
        scale = scale * gain.to(dtype).view(scale.shape[:2] + (1,) * len(row))
    return saturate(from_by_output((shifted / unit_of_weight) * scale, transposed), weight.dtype)


def full_gain(gain: Tensor | None, output_scale: Tensor | None) -> Tensor | None:
    """The product of what is learned and what is constant; ``None`` is 1. There is no scale without a gain."""
    return gain if gain is None or output_scale is None else gain * output_scale


def counts(value: Tensor, magnitude: Tensor, terms: int) -> Tensor:
    """Whether a sum of this many terms, whose magnitudes are about ``magnitude``, is more than rounding error.

    This is the one rule for what can be balanced: the total mass against the sum of its magnitudes, and the
    contribution of the positive weights against their mean. It is false for infinities and NaN, and for numbers so
    small that their inverse does not exist.
    """
    limits = torch.finfo(value.dtype)
    rounding_error = 4 * limits.eps * math.sqrt(terms)
    return (value.abs() > (magnitude.abs() * rounding_error).clamp(min=limits.tiny)) & (value.abs() <= limits.max)


def inverse_total(total: Tensor, present: Tensor) -> Tensor:
    """1 / ``total`` where there is a mass and 0 elsewhere, at most so large that products with it stay finite."""
    limits = torch.finfo(total.dtype)
    largest = limits.max * limits.eps
    return torch.where(present, total.reciprocal().clamp(-largest, largest), 0.0)


def saturate(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to ``dtype``; what float16 cannot hold becomes its largest number, not infinity."""
    if tensor.dtype == dtype:
        return tensor
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        tensor = tensor.clamp(-largest, largest)
    return tensor.to(dtype)


def autocast_device(tensor: Tensor) -> str | None:
    """The device type of this tensor if autocast is on for it, else ``None``."""
    device = "cpu" if tensor.is_cpu else tensor.device.type  # the first costs a tenth of the second
    # Those two have it, and torch 2.4 cannot compile the question.
    known = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    if known and torch.is_autocast_enabled(device):
        return device
    return None


def without_autocast(device: str | None) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast, if it is on for this device, lowers no precision."""
    return contextlib.nullcontext() if device is None else torch.autocast(device, enabled=False)
