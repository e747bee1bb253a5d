"""Decide which activations can keep less for the backward pass. Like ``_decisions``, it changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from balnorm.activations import GATES, lean_activation
from balnorm.layers import BalNormLayer
from balnorm.surgery._decisions import Action, Balanced, Decision, Removed, has_own_code, is_norm_act
from balnorm.surgery._flow import Call, Flow

__all__ = ["Lean", "lean_activations"]

# Operations that keep at most the shape of their input for the backward pass
_KEEP_NOTHING = {"add", "cat", "mean", "sum", "adaptiveavgpool", "upsample"}


@dataclass(frozen=True)
class Lean:
    """A module becomes one of :mod:`balnorm.activations`."""

    action: ClassVar[Action] = "lean"
    feeds: tuple[nn.Module, ...]
    """The balanced layers and gates that read its output (for a gate: the product)."""
    multiplies: nn.Module | None = None
    """For a gate: the activation that it multiplies, if that becomes such a module."""

    def explain(self, names: Mapping[nn.Module, str]) -> str:
        """The reason, in the words of a report."""
        parts = [] if self.multiplies is None else [f"multiplies {names[self.multiplies]}"]
        if self.feeds:
            parts.append(f"feeds {', '.join(names[module] for module in self.feeds)}")
        return ", ".join(parts)


def lean_activations(
    model: nn.Module, flow: Flow, decisions: Mapping[nn.Module, Decision], skipped: Collection[nn.Module]
) -> dict[nn.Module, Lean]:
    """The activations, and the gates of squeeze-and-excitation, that are to be replaced, in the model's order.

    An activation is one of them if balanced layers or products with a gate read its output, and all other readers keep
    nothing of it. A gate is one if it multiplies such an activation, or if balanced layers alone read its product.
    """
    calls = _calls_of_activations(model, flow, skipped)
    gates = {module for module in calls if isinstance(lean_activation(module), GATES)}
    products = {product: gate for gate in gates for product in _products(calls[gate])}
    found, multiplied = dict[nn.Module, Lean](), dict[Call, nn.Module]()

    def modules_fed(call: Call) -> dict[nn.Module, None] | None:
        """The balanced layers and gates that read an output; ``None`` if anything else keeps or changes it."""
        fed = dict[nn.Module, None]()
        for reader in _readers(call, decisions):
            if reader in products:
                fed[products[reader]] = None
            elif reader.module is not None and _is_balanced(reader.module, decisions):
                fed[reader.module] = None
            elif reader.name not in _KEEP_NOTHING or reader.in_place:
                return None
        return fed

    for module in calls.keys() - gates:
        fed = [modules_fed(call) for call in calls[module]]
        together = {it: None for each in fed if each for it in each}
        if together and None not in fed:
            found[module] = Lean(tuple(together))
            readers = (reader for call in calls[module] for reader in _readers(call, decisions))
            multiplied |= {reader: module for reader in readers if reader in products}
    for product, gate in products.items():
        fed_by_product = modules_fed(product)
        if product in multiplied or fed_by_product:
            found[gate] = Lean(tuple(fed_by_product or ()), multiplied.get(product))
    return {module: found[module] for module in model.modules() if module in found}


def _calls_of_activations(model: nn.Module, flow: Flow, skipped: Collection[nn.Module]) -> dict[nn.Module, list[Call]]:
    """The calls of every module that has a lean form, including the last step inside one of timm's norms."""
    calls = dict[nn.Module, list[Call]]()
    for module in model.modules():
        step = getattr(module, "act", None) if is_norm_act(module) else module
        if isinstance(step, nn.Module) and lean_activation(step) and step not in skipped and not has_own_code(step):
            calls.setdefault(step, []).extend(flow.by_module.get(module, []))
    return calls


def _products(calls: list[Call]) -> list[Call]:
    """The products of a gate's output with another tensor, if nothing else reads that output at any call."""
    products = [user for call in calls for user in call.users]
    are_products = all(it.name == "mul" and len(it.inputs) == 2 and not it.in_place for it in products)
    return products if are_products and len(products) == len(calls) else []


def _readers(call: Call, decisions: Mapping[nn.Module, Decision]) -> Iterator[Call]:
    """The steps that read an output, past those that pass it on unchanged."""
    for user in call.users:
        if _hands_on(user, decisions):
            yield from _readers(user, decisions)
        else:
            yield user


def _hands_on(call: Call, decisions: Mapping[nn.Module, Decision]) -> bool:
    if call.name == "dropout":
        return getattr(call.module, "p", None) == 0
    module = call.module
    removed = module is not None and isinstance(decisions.get(module), Removed) and not is_norm_act(module)
    return removed or call.name == "identity"


def _is_balanced(module: nn.Module, decisions: Mapping[nn.Module, Decision]) -> bool:
    return isinstance(module, BalNormLayer) or isinstance(decisions.get(module), Balanced)
