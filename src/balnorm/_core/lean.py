"""Activations, and products with a gate, that keep less for the backward pass.

An activation such as SiLU keeps its input z for its own gradient, and the convolution after it keeps its output y. But
y is one elementwise pass over z. So a function here marks its node in the autograd graph: the output can be remade from
the tensors that the node keeps. A balanced layer that gets such an output does not save it. Its backward pass follows
the graph to the node, which torch runs later, and remakes the output there.

Nothing is attached to tensors and nothing refers back, so memory lives as long as the graph needs it, and hooks on
saved tensors (offloading, checkpointing) see z once. The mark holds the version and the address of the output, so a
tensor that was changed in place counts as another one. A view, a cast or a copy has another node.

ReLU6 and hardtanh are simpler: their gradient can be read off the output, which they keep in place of the input.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from balnorm._core.torch_private import apply_function, current_backward, is_view, torch_transforms_the_program

__all__ = ["Rule", "activate", "multiply", "saved_input", "takes", "to_save"]


class Rule(NamedTuple):
    """An elementwise function of torch's, and its gradient: the same operators, so the same bits."""

    forward: Any
    """An operator with the overloads ``default`` and ``out``."""
    backward: Callable[..., Tensor]
    """A function of the output's gradient and the tensor that is kept."""
    arguments: Mapping[str, Any] = {}
    keeps_output: bool = False
    """Whether the tensor that is kept is the output, not the input."""


def takes(input: Tensor, inplace: bool = False) -> bool:
    """Whether there is anything to save. If not, call torch's own function."""
    return (
        not torch_transforms_the_program()
        and torch.is_grad_enabled()
        and type(input) is Tensor
        and input.requires_grad
        and input.layout is torch.strided
        and not (inplace and (input.is_leaf or is_view(input)))
    )


def activate(input: Tensor, rule: Rule, inplace: bool) -> Tensor:
    """Apply the activation to an input that :func:`takes` accepts."""
    z = input.clone() if inplace and not rule.keeps_output else input  # in place, torch's own keep a copy too
    y = apply_function(_Activation, z, input if inplace else None, rule)
    if not rule.keeps_output:
        y.grad_fn.remade_output = _mark(y)  # type: ignore[union-attr]
    return y


def multiply(input: Tensor, gate: Tensor) -> Tensor:
    """``input * gate``. Keeps the gate, and the input only if it cannot be remade. The output can be."""
    if (
        not takes(gate)
        or type(input) is not Tensor
        or input.dtype != gate.dtype
        or input.dim() != gate.dim()
        or any(there not in (1, here) for here, there in zip(input.shape, gate.shape, strict=True))
    ):
        return torch.mul(input, gate)
    y = apply_function(_Product, input, gate)
    y.grad_fn.remade_output = _mark(y)  # type: ignore[union-attr]
    return y


def to_save(ctx: Any, x: Tensor) -> Tensor | None:
    """The tensor that a function saves for ``x``, its first input: ``None`` if ``x`` can be remade."""
    mark = getattr(x.grad_fn, "remade_output", None)
    if mark is None or mark != _mark(x):
        return x
    ctx.first_input = weakref.ref(x)
    return None


def saved_input(ctx: Any, saved: Tensor | None) -> Tensor:
    """The first input of a function in its backward pass: the tensor that it saved, or remade."""
    if saved is not None:
        return saved
    node = ctx.next_functions[0][0]
    x: Tensor | None = ctx.first_input()
    if x is not None and node.remade_output == _mark(x):
        return x  # it still has an owner, who may ask for second derivatives with respect to it
    return cast(Tensor, node.remake(node))


def _mark(output: Tensor) -> tuple[int, int]:
    return (output._version, output.data_ptr())


def _kept(node: Any) -> tuple[Tensor, ...]:
    """The tensors that a node saved, unpacked once in a backward pass: checkpointing allows no second time."""
    now = current_backward()
    before, kept = getattr(node, "kept", (None, ()))
    if before != now:
        kept = node.saved_tensors
        node.kept = (now, kept)
    return cast("tuple[Tensor, ...]", kept)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, into: Tensor | None, rule: Rule) -> Tensor:
        if into is None:
            y = rule.forward.default(z, **rule.arguments)
        else:
            y = rule.forward.out(z, **rule.arguments, out=into)
            ctx.mark_dirty(into)
        ctx.rule, ctx.remake = rule, _activation_again
        ctx.save_for_backward(y if rule.keeps_output else z)
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        rule = ctx.rule
        if rule.keeps_output:
            return rule.backward(dy, *ctx.saved_tensors, **rule.arguments), None, None
        (z,) = _kept(ctx)
        ctx.kept = (None, ())
        if not torch.is_grad_enabled():
            return rule.backward(dy, z, **rule.arguments), None, None
        z = z[...]  # this gradient will itself be differentiated, also with respect to z
        (dz,) = torch.autograd.grad(rule.forward.default(z, **rule.arguments), z, dy, create_graph=True)
        return dz, None, None


def _activation_again(node: Any) -> Tensor:
    (z,) = _kept(node)
    return cast(Tensor, node.rule.forward.default(z, **node.rule.arguments))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, gate: Tensor) -> Tensor:
        ctx.remake = _product_again
        ctx.save_for_backward(to_save(ctx, input), gate)
        return input * gate

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        saved, gate = _kept(ctx)
        ctx.kept = (None, ())
        needs_input, needs_gate = ctx.needs_input_grad
        dinput = dy * gate if needs_input else None
        dgate = (dy * saved_input(ctx, saved)).sum_to_size(gate.shape) if needs_gate else None
        return dinput, dgate


def _product_again(node: Any) -> Tensor:
    saved, gate = _kept(node)
    return saved_input(node, saved) * gate
