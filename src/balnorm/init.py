"""Balanced initialisation: the paper's fan_out normal, with both signs in every output kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from balnorm._core.geometry import by_output

__all__ = ["balanced_normal_", "unit_variance_scale"]


def balanced_normal_(
    weight: Tensor, groups: int = 1, transposed: bool = False, generator: torch.Generator | None = None
) -> Tensor:
    r"""Fill ``weight`` from a normal distribution of variance 2 / fan_out, then balance its signs, in place.

    fan_out (`He et al. <https://arxiv.org/abs/1502.01852>`_) is the number of outputs that an input reaches. As the
    paper proposes, an output kernel whose weights all share a sign gets new random signs until it has both; a kernel of
    one weight keeps its sign.

    Args:
        weight: (D, C / groups, \*kernel); (C, D / groups, \*kernel) if ``transposed``; (D, C) for a linear layer.
        groups: groups of the convolution.
        transposed: whether the weight belongs to a transposed convolution.
        generator: the source of randomness; ``None`` is torch's global generator.

    Example:
        >>> w = balanced_normal_(torch.empty(64, 1, 2))  # an eighth of such kernels would have one sign
        >>> bool(((w > 0).any((1, 2)) & (w < 0).any((1, 2))).all())
        True
    """
    outputs_per_group = weight.shape[1] if transposed else weight.shape[0] // groups
    fan_out = outputs_per_group * math.prod(weight.shape[2:])
    with torch.no_grad():
        weight.normal_(0.0, math.sqrt(2.0 / max(1, fan_out)), generator=generator)
        if weight.is_meta:  # no values to balance; reset_parameters() draws them once there is memory
            return weight
        kernels = by_output(weight, groups, transposed)
        axes = tuple(range(2, kernels.dim()))
        if kernels[0, 0].numel() < 2:
            return weight
        while (one_sign := (kernels > 0).all(axes, True) | (kernels < 0).all(axes, True)).any():
            flip = torch.randint(0, 2, kernels.shape, generator=generator, device=weight.device) == 1
            kernels.copy_(torch.where(one_sign & flip, -kernels, kernels))
    return weight


def unit_variance_scale(fan_in: float, phases: int = 1, *, centred: bool = False) -> float:
    r"""The output scale that gives outputs of variance 1 for independent inputs.

    Balanced outputs shrink with fan-in, the number of weights that an output element meets. For normal weights,
    Var(y) = 2 pi k / fan_in, where k is the variance of the inputs in units of their squared mass: pi - 1 for rectified
    Gaussians. With a ``centred`` mass it hardly depends on the input: 1.57 for Gaussians, 1.60 for rectified ones.

    The outputs of a transposed convolution fall into as many phases as its stride has steps, each made by weights of
    its own. The weights are balanced together, not phase by phase, which leaves k = pi - 1 / phases.

    Example:
        >>> round(unit_variance_scale(64 * 9), 3)
        6.543
    """
    k = 1.6 if centred else math.pi - 1 / phases
    return math.sqrt(fan_in / (2 * math.pi * k))
