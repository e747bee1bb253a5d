"""Activations that, with the layer after them, keep one tensor for the backward pass; torch's keep two.

ReLU keeps its output, which the next convolution keeps anyway. torch's other activations keep their input, so a network
of SiLUs needs twice the activation memory of one of ReLUs. The modules and functions here have torch's names and
arguments and compute the same values. If a balanced layer follows, only one tensor is kept:

- :class:`ReLU6` and :class:`Hardtanh` keep their output in place of the input.
- :class:`SiLU`, :class:`GELU`, :class:`Hardswish` and :class:`Mish` keep their input. A balanced layer that gets their
  output does not keep it, but computes it again in its backward pass.
- :func:`multiply`, for squeeze-and-excitation, does so too. :class:`Sigmoid` and :class:`Hardsigmoid` are gates: any
  product of their output with a tensor becomes such a product.

:func:`~balnorm.convert` puts them into a network, and :func:`~balnorm.fold` takes them out. If the output of one is
changed in place, viewed or cast before it reaches the layer, the layer keeps its input as usual. (A change through
``.data``, which is hidden from autograd, is hidden from this too.) Without gradients, under :func:`torch.compile`, in
exports and under :mod:`torch.func` they are torch's own.

Example:
    >>> import torch
    >>> from torch import nn
    >>> from balnorm import BalNormConv2d, activations
    >>> model = nn.Sequential(BalNormConv2d(3, 8, 3), activations.SiLU(), BalNormConv2d(8, 8, 3, centred=True))
    >>> model(torch.rand(4, 3, 8, 8)).sum().backward()
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from balnorm._core import lean
from balnorm._core.lean import Rule

__all__ = [
    "GATES",
    "GELU",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeanActivation",
    "Mish",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "gelu",
    "hardswish",
    "hardtanh",
    "lean_activation",
    "mish",
    "multiply",
    "relu6",
    "silu",
]

_aten = torch.ops.aten
_SILU = Rule(_aten.silu, _aten.silu_backward.default)
_HARDSWISH = Rule(_aten.hardswish, _aten.hardswish_backward.default)
_MISH = Rule(_aten.mish, _aten.mish_backward.default)
_GELU = {
    approximate: Rule(_aten.gelu, _aten.gelu_backward.default, {"approximate": approximate})
    for approximate in ("none", "tanh")
}


# --------------------------------------------------------------------------------------------------------------------
# Functions
# --------------------------------------------------------------------------------------------------------------------


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.silu`. See :mod:`balnorm.activations`."""
    return lean.activate(input, _SILU, inplace) if lean.takes(input, inplace) else F.silu(input, inplace)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.hardswish`."""
    return lean.activate(input, _HARDSWISH, inplace) if lean.takes(input, inplace) else F.hardswish(input, inplace)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.mish`."""
    return lean.activate(input, _MISH, inplace) if lean.takes(input, inplace) else F.mish(input, inplace)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """As :func:`torch.nn.functional.gelu`."""
    if approximate in _GELU and lean.takes(input):
        return lean.activate(input, _GELU[approximate], inplace=False)
    return F.gelu(input, approximate=approximate)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.hardtanh`. Like that of ReLU, its output must not be changed in place."""
    limits = {"min_val": min_val, "max_val": max_val}
    # torch compares inputs of lower precision with the unrounded limits: the output then does not show what was cut.
    if lean.takes(input, inplace) and min_val <= max_val and all(_fits(v, input.dtype) for v in limits.values()):
        return lean.activate(input, Rule(_aten.hardtanh, _aten.hardtanh_backward.default, limits, True), inplace)
    return F.hardtanh(input, min_val, max_val, inplace)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.relu6`. Like that of ReLU, its output must not be changed in place."""
    return hardtanh(input, 0.0, 6.0, inplace)


def multiply(input: Tensor, gate: Tensor) -> Tensor:
    """``input * gate``, as in squeeze-and-excitation. Along an axis where the gate does not vary, its size is 1.

    Keeps the gate, and the input unless that comes from an activation of this module. A balanced layer that gets the
    product does not keep it.
    """
    return lean.multiply(input, gate)


def _fits(value: float, dtype: torch.dtype) -> bool:
    return dtype not in (torch.float16, torch.bfloat16) or float(torch.tensor(value, dtype=dtype)) == value


# --------------------------------------------------------------------------------------------------------------------
# Modules
# --------------------------------------------------------------------------------------------------------------------


class LeanActivation(nn.Module):
    """The base of all modules here. Use it to find them, as in ``isinstance(module, LeanActivation)``."""

    plain: ClassVar[type[nn.Module]]
    """The torch class that computes the same, and that :meth:`fuse` returns."""
    if TYPE_CHECKING:
        __call__: Callable[..., Tensor]

    def fuse(self) -> nn.Module:
        """Return torch's own module with the same arguments."""
        return _recast(self.plain, self)

    def _get_name(self) -> str:
        return f"activations.{type(self).__name__}"


class SiLU(LeanActivation, nn.SiLU):
    """As :class:`torch.nn.SiLU`. See :mod:`balnorm.activations`."""

    plain = nn.SiLU

    def forward(self, input: Tensor) -> Tensor:
        return silu(input, self.inplace)


class Hardswish(LeanActivation, nn.Hardswish):
    """As :class:`torch.nn.Hardswish`."""

    plain = nn.Hardswish

    def forward(self, input: Tensor) -> Tensor:
        return hardswish(input, self.inplace)


class Mish(LeanActivation, nn.Mish):
    """As :class:`torch.nn.Mish`."""

    plain = nn.Mish

    def forward(self, input: Tensor) -> Tensor:
        return mish(input, self.inplace)


class GELU(LeanActivation, nn.GELU):
    """As :class:`torch.nn.GELU`."""

    plain = nn.GELU

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, self.approximate)


class Hardtanh(LeanActivation, nn.Hardtanh):
    """As :class:`torch.nn.Hardtanh`. Like that of ReLU, its output must not be changed in place."""

    plain = nn.Hardtanh

    def forward(self, input: Tensor) -> Tensor:
        return hardtanh(input, self.min_val, self.max_val, self.inplace)


class ReLU6(LeanActivation, nn.ReLU6):
    """As :class:`torch.nn.ReLU6`. Like that of ReLU, its output must not be changed in place."""

    plain = nn.ReLU6

    def forward(self, input: Tensor) -> Tensor:
        return hardtanh(input, self.min_val, self.max_val, self.inplace)


class Sigmoid(LeanActivation, nn.Sigmoid):
    """As :class:`torch.nn.Sigmoid`, for a gate: :func:`multiply` computes any product of its output with a tensor."""

    plain = nn.Sigmoid

    def forward(self, input: Tensor) -> Tensor:
        return _as_gate(input, torch.sigmoid(input))


class Hardsigmoid(LeanActivation, nn.Hardsigmoid):
    """As :class:`torch.nn.Hardsigmoid`, for a gate. See :class:`Sigmoid`."""

    plain = nn.Hardsigmoid

    def forward(self, input: Tensor) -> Tensor:
        return _as_gate(input, F.hardsigmoid(input, self.inplace))


class _Gate(Tensor):
    """A tensor for which ``x * gate`` calls :func:`multiply`. All other operations give ordinary tensors."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function not in _PRODUCTS or len(args) != 2 or kwargs:
                return function(*args, **(kwargs or {}))
            first, second = (it.as_subclass(Tensor) if isinstance(it, _Gate) else it for it in args)
            if not isinstance(first, Tensor) or not isinstance(second, Tensor):
                return torch.mul(first, second)
            return lean.multiply(second, first) if isinstance(args[0], _Gate) else lean.multiply(first, second)


_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}


def _as_gate(input: Tensor, output: Tensor) -> Tensor:
    return output.as_subclass(_Gate) if lean.takes(input) else output


# --------------------------------------------------------------------------------------------------------------------
# For existing networks
# --------------------------------------------------------------------------------------------------------------------

GATES = (Sigmoid, Hardsigmoid)
_LEAN: Mapping[type[nn.Module], type[LeanActivation]] = {
    kind.plain: kind for kind in (SiLU, Hardswish, Mish, GELU, Hardtanh, ReLU6, *GATES)
}
_OF_TIMM: Mapping[str, Callable[[], LeanActivation]] = {
    "GELU": GELU,
    "GELUTanh": lambda: GELU("tanh"),
    "Sigmoid": Sigmoid,
}
"""timm's own classes for activations that torch has too."""


def lean_activation(module: nn.Module) -> LeanActivation | None:
    """The module of this file that computes the same as ``module``, if there is one."""
    kind = type(module)
    if kind in _LEAN:
        return cast(LeanActivation, _recast(_LEAN[kind], module))
    if kind.__module__ == "timm.layers.activations" and kind.__name__ in _OF_TIMM:
        return None if getattr(module, "inplace", False) else _OF_TIMM[kind.__name__]().train(module.training)
    return None


def _recast(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    """A copy of a module as another class. Its dictionaries are copied too, so that the two do not share hooks."""
    made = copy.copy(module)
    vars(made).update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)})
    made.__class__ = kind
    return made
