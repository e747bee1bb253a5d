"""Decide from the data flow what happens to every layer and every norm. This module changes nothing.

A decision is data; :func:`explain` puts it into words, and no code depends on the words. :func:`attribute` applies
these rules in order:

1. A module stays if replacing it would lose something: hooks, the behaviour of an unknown class, and so on.
2. A norm belongs to the layers that it follows, if it alone reads their outputs, at every call of either.
3. Another norm that has statistics becomes a constant factor and a learned shift, unless it follows a layer that stays.
   Without statistics, it belongs to the convolutions that it feeds, if it feeds nothing else, and otherwise stays.
4. In the branch that such a norm opens, norm-conv-norm-conv, each norm stands for the convolution after it; so the
   last convolution, which no norm follows, is balanced too.
5. So is a convolution that adds to a sum that such a norm normalised: nothing else would keep its size in check.
6. So are layers without a norm, if the caller asks for it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal, TypeGuard

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from balnorm._checks import is_readable
from balnorm.layers import BALANCED, BalNormLayer
from balnorm.surgery._flow import Call, Flow

__all__ = [
    "Action",
    "Affine",
    "Balanced",
    "Because",
    "Decision",
    "Kept",
    "NormKind",
    "Place",
    "Reason",
    "Removed",
    "attribute",
    "explain",
    "foldable_norms",
    "has_own_code",
    "is_batch_norm",
    "is_norm_act",
    "named",
    "norm_kind",
    "torch_class",
]

Action = Literal["balanced", "removed", "affine", "kept", "lean"]
NormKind = Literal["batch", "instance", "group"]


class Place(Enum):
    """Where a norm stands, seen from a balanced layer. The value is the wording of the report for the norm ``{}``."""

    FOLLOWS = "{} follows it"
    FEEDS = "{} feeds it"
    AFTER_A_SUM = "{} normalised what it contributed to"
    NOWHERE = "included, as asked"


class Reason(Enum):
    """Why a module stays. The value is the wording of the report; ``{}`` is its subject."""

    # Modules that cannot be replaced, whatever surrounds them
    SKIPPED = "skipped, as asked"
    NOT_ASKED_FOR = "stays unless norms=... names its kind"
    BALANCED_ALREADY = "balanced already"
    NOT_OF_TORCH = "not one of torch's own layers: a {} may do something else"
    NOT_CALLED = "the forward pass does not call it, or only inside another layer"
    USED_DIRECTLY = "its tensors are used outside its own call too"
    HAS_HOOKS = "it has hooks, which would be lost"
    FORWARD_REPLACED = "its forward was replaced, which would be lost"
    ONE_WEIGHT = "one weight per output: there is nothing to balance"
    NO_STATISTICS = "it has no running statistics"
    # A layer
    NO_NORM = "no BatchNorm follows or feeds it"
    ITS_NORM_STAYS = "its {} stays"
    # A norm after a layer
    FOLLOWS_NO_LAYER = "it follows {}"
    FOLLOWS_KEPT = "it follows {}, which stays ({})"
    UNKNOWN_DIMENSIONS = "it follows {}, and only an example_input shows which dimension it normalises"
    DOES_NOT_FIT = "it does not fit {}, which it follows"
    SHARES_OUTPUT = "the output of {} is used elsewhere too"
    ONE_OF_SEVERAL = "it is not the only norm of a layer that is called more than once"
    # A norm that cannot be replaced by the layers that it feeds either
    STRANGE_ORIGIN = "which comes from {}"
    FEEDS_NO_LAYER = "and it feeds {}"
    FEEDS_KEPT = "and it feeds {}, which stays ({})"
    FEEDS_NOTHING = "and it feeds nothing"
    CHANGED_IN_PLACE = "and {} works in place on its output"


@dataclass(frozen=True)
class Because:
    """A reason and its subject: a module, a class of modules, or a step of the forward pass by its name."""

    reason: Reason
    about: nn.Module | type[nn.Module] | str = ""
    which_stays: Because | None = None
    """Why its subject, a module, has to stay, if that is the reason."""


@dataclass(frozen=True)
class Balanced:
    """A layer becomes balanced, and does the work of its norm, if it has one."""

    action: ClassVar[Action] = "balanced"
    norm: nn.Module | None
    place: Place
    signed: bool
    """Whether the layer's input can be negative, if that matters."""
    exact: bool = False
    """Whether it must compute the same as the trained layer, with the norm if that follows it."""


@dataclass(frozen=True)
class Removed:
    """A norm is removed: it follows these layers, or feeds them."""

    action: ClassVar[Action] = "removed"
    place: Place
    layers: tuple[nn.Module, ...]
    in_place: tuple[nn.Module, ...] = ()
    """Activations that work in place on the norm's output; without the norm they would overwrite its input."""


@dataclass(frozen=True)
class Affine:
    """A norm becomes a constant factor and a learned shift: the reason says why no layer can do its work."""

    action: ClassVar[Action] = "affine"
    because: Because


@dataclass(frozen=True)
class Kept:
    """A layer or a norm stays."""

    action: ClassVar[Action] = "kept"
    because: tuple[Because, ...]

    def depends_on(self, reason: Reason) -> bool:
        """Whether this is a reason, for the module itself or for one because of which it stays."""
        causes = [cause for because in self.because for cause in (because, because.which_stays) if cause]
        return any(cause.reason is reason for cause in causes)


Decision = Balanced | Removed | Affine | Kept


def explain(decision: Decision, names: Mapping[nn.Module, str]) -> str:
    """The reason for the decision, in the words of a report."""
    if isinstance(decision, Balanced):
        why = decision.place.value.format(names[decision.norm] if decision.norm else "")
        return f"{why}, its input can be negative" if decision.signed else why
    if isinstance(decision, Removed):
        layers = ", ".join(names[layer] for layer in decision.layers)
        return f"follows {layers}" if decision.place is Place.FOLLOWS else f"feeds {layers}"
    if isinstance(decision, Affine):
        return _sentence(decision.because, names)
    return ", ".join(_sentence(because, names) for because in decision.because)


def _sentence(because: Because, names: Mapping[nn.Module, str]) -> str:
    about = because.about
    if isinstance(about, nn.Module):
        name = names[about]
    elif isinstance(about, type):
        name = about.__name__
    else:
        steps = {"input": "the model's input", "output": "the model's output", "attribute": "a parameter or buffer"}
        name = steps.get(about, f"{about}()")
    which_stays = _sentence(because.which_stays, names) if because.which_stays else ""
    return because.reason.value.format(name, which_stays)


# --------------------------------------------------------------------------------------------------------------------
# The rules
# --------------------------------------------------------------------------------------------------------------------

# The dimensions of the weights that a norm can follow: 2 for a linear layer, 4 for a 2d convolution.
_WEIGHT_DIMENSIONS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.SyncBatchNorm: (2, 3, 4, 5),
    nn.InstanceNorm1d: (3,),
    nn.InstanceNorm2d: (4,),
    nn.InstanceNorm3d: (5,),
    nn.GroupNorm: (2, 3, 4, 5),
}
# Steps allowed between a layer and the norm that follows it, and between a norm and a convolution that it feeds.
_BEFORE_A_NORM = {"identity", "dropout", "contiguous", "clone", "avgpool", "adaptiveavgpool", "upsample"}
# Between a linear layer, whose features are the last dimension, and a norm of two dimensions
_AFTER_A_LINEAR = {"identity", "dropout", "contiguous", "clone", "view"}
_AFTER_A_NORM = {
    *(_BEFORE_A_NORM - {"adaptiveavgpool"}),  # after which a convolution is a classifier
    *("relu", "relu6", "leakyrelu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish"),
    *("hardtanh", "hardsigmoid", "sigmoid", "tanh", "softplus", "softsign", "logsigmoid", "clamp", "clampmin"),
    *("maxpool", "paddedavgpool", "pad"),
}
_AFTER_A_SUM = {*_AFTER_A_NORM, "add", "cat"}
# Steps allowed between layers and a norm that belongs to the layers that it feeds: sums, and steps that keep channels.
_BEFORE_A_SUM = {*_AFTER_A_SUM, "mul", "getitem", "slice", "split", "splitwithsizes", "chunk"}

_Fixed = Mapping[nn.Module, Because]  # the modules that have to stay
_Partners = dict[nn.Module, tuple[nn.Module | None, Place]]  # the norm whose work a layer can do


def attribute(
    model: nn.Module,
    flow: Flow,
    skip: Iterable[str] = (),
    include: Iterable[str] = (),
    trained: bool | None = None,
    kinds: tuple[NormKind, ...] = ("batch",),
) -> dict[nn.Module, Decision]:
    """Decide what becomes of every layer and every norm of a model, in the model's order.

    A network is trained if one of its norms has statistics, unless the caller knows better. Norms of other kinds than
    these stay.
    """
    # Rule 1: modules that have to stay
    candidates = [module for module in model.modules() if _is_layer(module) or norm_kind(module)]
    skipped, included = named(model, "skip", skip), named(model, "include", include)
    fixed = {module: because for module in candidates if (because := _why_fixed(module, flow, skipped, kinds))}
    layers: list[nn.Module] = [module for module in candidates if _is_layer(module) and module not in fixed]
    norms = [module for module in candidates if norm_kind(module) and module not in fixed]

    exact = {norm for norm in norms if _is_exact(norm, trained)}

    # Rule 2: norms after layers
    following = {layer: norm for layer in layers if (norm := _following(layer, flow))}
    followed = {norm: its_layers for norm in norms if (its_layers := _followed(norm, following, flow))}
    partners = _Partners((layer, (norm, Place.FOLLOWS)) for norm in followed for layer in followed[norm])

    # Rules 3 and 4: norms that follow no layer
    other_norms = {
        norm: _affine_or_kept(norm, flow, fixed) if norm in exact else _fed_or_kept(norm, flow, fixed)
        for norm in norms
        if norm not in followed
    }
    feeding = [norm for norm, decision in other_norms.items() if not isinstance(decision, Kept)]
    partners |= _along_branches(feeding, partners, flow, fixed)

    # Rule 5: layers that add to a sum
    others = [layer for layer in layers if layer not in partners]
    summed = {layer: norm for layer in others if (norm := _norm_of_the_sum(layer, flow, feeding))}
    partners |= {layer: (norm, Place.AFTER_A_SUM) for layer, norm in summed.items()}

    # Rule 6: layers that the caller asks for
    with_norm = {layer for layer, norm in following.items() if norm_kind(norm) in kinds}
    asked_for = included - with_norm - partners.keys()
    partners |= {layer: (None, Place.NOWHERE) for layer in layers if layer in asked_for}

    decided: dict[nn.Module, Decision] = {
        **{module: Kept((because,)) for module, because in fixed.items()},
        **{norm: Removed(Place.FOLLOWS, its_layers) for norm, its_layers in followed.items()},
        **other_norms,
    }
    for layer in layers:
        if layer in partners:
            norm, place = partners[layer]
            as_trained = norm in exact if place is Place.FOLLOWS else bool(exact or trained)
            decided[layer] = Balanced(norm, place, not as_trained and _is_signed(layer, flow), as_trained)
        elif isinstance(decided.get(following.get(layer, layer)), Kept):
            decided[layer] = Kept((Because(Reason.ITS_NORM_STAYS, following[layer]),))
        else:
            decided[layer] = Kept((Because(Reason.NO_NORM),))
    return {module: decided[module] for module in candidates}


def foldable_norms(model: nn.Module, flow: Flow) -> dict[nn.Module, Removed | Kept]:
    """Decide which BatchNorms can become part of the layers that they follow, in eval mode."""
    candidates = [module for module in model.modules() if _is_layer(module) or is_batch_norm(module)]
    fixed = {module: because for module in candidates if (because := _why_untouchable(module, flow))}
    layers: list[nn.Module] = [module for module in candidates if _is_layer(module) and module not in fixed]
    following = {layer: norm for layer in layers if (norm := _following(layer, flow))}
    found = dict[nn.Module, Removed | Kept]()
    for norm in (module for module in candidates if is_batch_norm(module)):
        if norm in fixed:
            found[norm] = Kept((fixed[norm],))
        elif norm.running_mean is None:
            found[norm] = Kept((Because(Reason.NO_STATISTICS),))
        elif its_layers := _followed(norm, following, flow):
            found[norm] = Removed(Place.FOLLOWS, its_layers)
        else:
            found[norm] = Kept((_why_not_following(norm, flow, fixed),))
    return found


def is_batch_norm(module: nn.Module | None) -> bool:
    """Whether it is a BatchNorm of any kind, even one that only its name and its buffers show."""
    return isinstance(module, _BatchNorm) or (
        module is not None
        and "BatchNorm" in type(module).__name__
        and "running_mean" in dict(module.named_buffers(recurse=False))
    )


def norm_kind(module: nn.Module | None) -> NormKind | None:
    """Which of the norms that a balanced layer can replace this is, if any."""
    if isinstance(module, _InstanceNorm):
        return "instance"
    if isinstance(module, nn.GroupNorm):
        return "group"
    return "batch" if is_batch_norm(module) else None


def is_norm_act(module: nn.Module) -> bool:
    """Whether it is one of timm's norms with built-in dropout and activation."""
    return _is_of_timm(type(module), "BatchNormAct2d", "SyncBatchNormAct", "GroupNormAct", "GroupNorm1Act")


def _is_of_timm(kind: type[nn.Module], *names: str) -> bool:
    return kind.__name__ in names and kind.__module__.startswith("timm.")


def torch_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch that the module computes like: its own, or the one that it inherits everything from."""
    kind = type(module)
    if _is_of_timm(kind, "GroupNorm", "GroupNorm1"):  # which compute the same in another way
        return nn.GroupNorm
    base = next((base for base in kind.__mro__ if base in BALANCED or base in _WEIGHT_DIMENSIONS), None)
    code = ("__call__", "__getattr__", "forward", "_conv_forward", "_output_padding", "_check_input_dim", "weight")
    return base if all(getattr(kind, name, None) is getattr(base, name, None) for name in code) else None


def has_own_code(module: nn.Module) -> bool:
    """Whether this module was given code that a replacement would not have."""
    return _has_hooks(module) or "forward" in vars(module)


def _is_layer(module: nn.Module | None) -> TypeGuard[_ConvNd | nn.Linear]:
    return isinstance(module, _ConvNd | nn.Linear)


def _is_exact(norm: nn.Module, trained: bool | None) -> bool:
    """Whether the layers must compute the same as with this norm, which they can if it has statistics."""
    if not isinstance(norm, _NormBase) or norm.running_mean is None or norm.running_var is None:
        return False
    if trained is None and is_readable(norm.running_mean):
        return bool((norm.running_mean != 0).any() or (norm.running_var != 1).any())
    return bool(trained)


def _is_signed(layer: nn.Module, flow: Flow) -> bool:
    """Whether the layer's input can be negative."""
    return not all(source.nonnegative for call in flow.by_module[layer] for source in call.inputs)


def named(model: nn.Module, option: Literal["skip", "include"], patterns: Iterable[str]) -> set[nn.Module]:
    """The modules whose names match, and everything inside them."""
    found = set[nn.Module]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        roots = [module for name, module in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
        modules = {module for root in roots for module in root.modules()}
        if not roots:
            raise ValueError(f"{option}={pattern!r} matches no module; see model.named_modules() for their names")
        if option == "include" and not any(_is_layer(module) for module in modules):
            raise ValueError(f"include={pattern!r} matches no convolution and no linear layer")
        found |= modules
    return found


def _why_fixed(
    module: nn.Module, flow: Flow, skipped: Collection[nn.Module], kinds: Collection[NormKind]
) -> Because | None:
    if module in skipped:
        return Because(Reason.SKIPPED)
    if norm_kind(module) not in (None, *kinds):
        return Because(Reason.NOT_ASKED_FOR)
    if isinstance(module, BalNormLayer):
        return Because(Reason.BALANCED_ALREADY)
    if because := _why_untouchable(module, flow):
        return because
    if _is_layer(module) and _fan_in(module) < 2:
        return Because(Reason.ONE_WEIGHT)
    return None


def _why_untouchable(module: nn.Module, flow: Flow) -> Because | None:
    """Why nothing can take the place of a layer or a norm, whatever it is."""
    if not isinstance(module, BalNormLayer) and torch_class(module) is None and not is_norm_act(module):
        return Because(Reason.NOT_OF_TORCH, type(module))
    if module not in flow.by_module:
        return Because(Reason.NOT_CALLED)
    if module in flow.used_directly:
        return Because(Reason.USED_DIRECTLY)
    if _has_hooks(module):
        return Because(Reason.HAS_HOOKS)
    if "forward" in vars(module):
        return Because(Reason.FORWARD_REPLACED)
    return None


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _fan_in(layer: _ConvNd | nn.Linear) -> int:
    if isinstance(layer, _ConvNd) and layer.transposed:
        return layer.weight[:, 0].numel() // layer.groups
    return layer.weight[0].numel()


# --------------------------------------------------------------------------------------------------------------------
# Layers, and norms that follow them
# --------------------------------------------------------------------------------------------------------------------


def _following(layer: nn.Module, flow: Flow) -> nn.Module | None:
    """The norm that always reads the output of a layer, if nothing else does."""
    users = [_only_user(call) for call in flow.by_module[layer]]
    modules = {user.module if user else None for user in users}
    norm = modules.pop() if len(modules) == 1 else None
    return norm if _fits(layer, norm, flow) else None


def _followed(norm: nn.Module, following: Mapping[nn.Module, nn.Module], flow: Flow) -> tuple[nn.Module, ...]:
    """The layers that a norm follows, if it is called on nothing else."""
    layers = tuple(layer for layer, its_norm in following.items() if its_norm is norm)
    calls = sum(len(flow.by_module[layer]) for layer in layers)
    return layers if calls == len(flow.by_module[norm]) else ()


def _fits(layer: nn.Module | None, norm: nn.Module | None, flow: Flow) -> bool:
    """Whether the channels of the norm are the outputs of the layer."""
    if not isinstance(norm, _NormBase | nn.GroupNorm) or not _is_layer(layer):
        return False
    if isinstance(layer, nn.Linear):
        # Given three dimensions, a norm normalises the second, and a linear layer maps the last. Reshaping to two
        # dimensions, the second of the same size, preserves the last one.
        outputs, fitting = layer.out_features, all(call.dimensions == 2 for call in flow.by_module[norm])
    else:
        outputs, fitting = layer.out_channels, True
    channels = norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features
    allowed = [dimensions for kind, dimensions in _WEIGHT_DIMENSIONS.items() if isinstance(norm, kind)]
    return fitting and channels == outputs and any(layer.weight.dim() in some for some in allowed)


def _why_not_following(norm: nn.Module, flow: Flow, fixed: _Fixed) -> Because:
    for call in flow.by_module[norm]:
        source = _source(call)
        layer = source.module
        if not _is_layer(layer):
            return Because(Reason.FOLLOWS_NO_LAYER, _what(source))
        if layer in fixed:
            return Because(Reason.FOLLOWS_KEPT, layer, fixed[layer])
        if isinstance(layer, nn.Linear) and source.dimensions is None:
            return Because(Reason.UNKNOWN_DIMENSIONS, layer)
        if not _fits(layer, norm, flow):
            return Because(Reason.DOES_NOT_FIT, layer)
        if _only_user(source) is not call:
            return Because(Reason.SHARES_OUTPUT, layer)
    return Because(Reason.ONE_OF_SEVERAL)


# --------------------------------------------------------------------------------------------------------------------
# Norms that follow no layer, the layers that they feed, and those that add to what they normalised
# --------------------------------------------------------------------------------------------------------------------


def _affine_or_kept(norm: nn.Module, flow: Flow, fixed: _Fixed) -> Affine | Kept:
    """A norm stays if it follows a layer that stays: nothing else would normalise that layer in training."""
    why = _why_not_following(norm, flow, fixed)
    return Kept((why,)) if why.which_stays and why.which_stays.reason is not Reason.ONE_WEIGHT else Affine(why)


def _fed_or_kept(norm: nn.Module, flow: Flow, fixed: _Fixed) -> Removed | Kept:
    """Whether the layers that it feeds can replace a norm that belongs to no layer before it."""
    why = _why_not_following(norm, flow, fixed)
    for call in flow.by_module[norm]:
        source = _source(call)
        for_this_norm = source.module in fixed or _only_user(source) is call
        if _is_layer(source.module) and (for_this_norm or not _only_for_sums(source)):
            return Kept((why,))  # decided, whatever it feeds
        origin = _strange_origin(call)
        if origin is not None:
            return Kept((why,) if origin is source else (why, Because(Reason.STRANGE_ORIGIN, _what(origin))))
    fed = _fed(norm, flow, fixed)
    return fed if isinstance(fed, Removed) else Kept((why, fed))


def _fed(norm: nn.Module, flow: Flow, fixed: _Fixed) -> Removed | Because:
    """The convolutions that a norm feeds, or the reason why they cannot replace it."""
    layers, in_place = dict[nn.Module, None](), list[nn.Module]()
    steps = list(flow.by_module[norm])
    while steps:
        for user in steps.pop().users:
            if _is_layer(user.module) and not isinstance(user.module, nn.Linear):
                if user.module in fixed:
                    return Because(Reason.FEEDS_KEPT, user.module, fixed[user.module])
                layers[user.module] = None
            elif user.name not in _AFTER_A_NORM:
                return Because(Reason.FEEDS_NO_LAYER, _what(user))
            elif not user.in_place:
                steps.append(user)
            elif user.module is None:
                return Because(Reason.CHANGED_IN_PLACE, user.name)
            else:
                steps.append(user)
                in_place.append(user.module)
    return Removed(Place.FEEDS, tuple(layers), tuple(in_place)) if layers else Because(Reason.FEEDS_NOTHING)


def _strange_origin(call: Call) -> Call | None:
    """The first step, neither layer nor norm, that a norm's input comes from, past sums and the like."""
    seen, steps = set[Call](), [call]
    while steps:
        for source in steps.pop().inputs:
            if source in seen or _is_layer(source.module) or norm_kind(source.module):
                continue
            if source.name not in _BEFORE_A_SUM:
                return source
            seen.add(source)
            steps.append(source)
    return None


def _along_branches(openings: Iterable[nn.Module], partners: _Partners, flow: Flow, fixed: _Fixed) -> _Partners:
    """Partners for the layers without one in the branches that these norms open."""
    found, norms = _Partners(), list(openings)
    for norm in norms:  # and those that are found on the way
        fed = _fed(norm, flow, fixed)
        for layer in fed.layers if isinstance(fed, Removed) else ():
            its_norm, _ = partners.get(layer) or found.setdefault(layer, (norm, Place.FEEDS))
            if its_norm and its_norm not in norms:
                norms.append(its_norm)
    return found


def _norm_of_the_sum(layer: nn.Module, flow: Flow, norms: Collection[nn.Module]) -> nn.Module | None:
    """The first of these norms that normalises a sum, or a concatenation, that a convolution is part of."""
    steps = list(flow.by_module[layer]) if not isinstance(layer, nn.Linear) else []
    if not all(_only_for_sums(step) for step in steps):
        return None
    for step in steps:  # and those that are found on the way
        for user in step.users:
            if user.module in norms:
                return user.module
            if user.name in _AFTER_A_SUM and user not in steps:
                steps.append(user)
    return None


# --------------------------------------------------------------------------------------------------------------------
# Steps of the forward pass
# --------------------------------------------------------------------------------------------------------------------


def _what(call: Call) -> nn.Module | str:
    return call.name if call.module is None else call.module


def _source(call: Call) -> Call:
    """The step that the input comes from, past those that may stand before a norm."""
    for between in (_AFTER_A_LINEAR, _BEFORE_A_NORM):
        source = call
        while source.inputs:
            source = source.inputs[0]
            if source.name not in between:
                break
        if isinstance(source.module, nn.Linear):
            break
    return source


def _only_user(call: Call) -> Call | None:
    """The only step that reads the output of a layer, past those that may stand before a norm."""
    between = _AFTER_A_LINEAR if isinstance(call.module, nn.Linear) else _BEFORE_A_NORM
    while len(call.users) == 1:
        (user,) = call.users
        if user.name not in between:
            return user
        call = user
    return None


def _only_for_sums(call: Call) -> bool:
    """Whether only norms, or steps on the way to a sum, read the output."""
    return all(user.name in _AFTER_A_SUM or norm_kind(user.module) for user in call.users)
