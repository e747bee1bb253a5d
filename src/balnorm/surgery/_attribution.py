"""Which BatchNorm belongs to which convolution, read off the data flow. It decides, and changes nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from balnorm.layers import BALANCED, BalNormLayer
from balnorm.surgery._flow import Call, Flow

__all__ = ["Attribution", "Partner", "is_batch_norm", "is_norm_act"]

# The dimensions of the weights that a norm can follow: 2 for a linear layer, 4 for a 2d convolution.
_WEIGHT_DIMENSIONS: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
    nn.SyncBatchNorm: (2, 3, 4, 5),
}
# What may stand between a layer and the norm that follows it, and between a norm and a convolution that it feeds.
_BEFORE_A_NORM = {"identity", "dropout", "contiguous", "clone", "avgpool"}
_BEHIND_A_NORM = {
    *_BEFORE_A_NORM,
    *("relu", "relu6", "leakyrelu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "hardswish"),
    *("hardtanh", "hardsigmoid", "sigmoid", "tanh", "softplus", "softsign", "logsigmoid", "clamp", "clampmin"),
    *("maxpool", "pad"),
}
_BEHIND_A_SUM = {*_BEHIND_A_NORM, "add", "cat"}
# What may stand between layers and a norm that belongs to what it feeds: sums and all that leaves channels channels.
_BEFORE_A_SUM = {*_BEHIND_A_SUM, "mul", "getitem", "slice", "split", "splitwithsizes", "chunk", "upsamplenearest"}


@dataclass(frozen=True)
class Partner:
    """The norm whose work a layer can do, and where it stands."""

    norm: nn.Module
    place: Literal["follows", "feeds", "behind a sum"]


class Attribution:
    """Which layers of a model can be balanced, which norms can go then, and why the others have to stay.

    A norm belongs to a layer that it follows if the layer's output goes to it and nowhere else, at every call of
    either. A norm that follows something else, such as the sum of a pre-activation network, belongs to the convolutions
    that it feeds, if it feeds nothing else. In such a branch, norm-conv-norm-conv, each norm stands for the convolution
    behind it; so the last convolution, which no norm follows, is to be balanced as well. So is a convolution that adds
    to a sum which such a norm normalised: nothing else would hold its size.
    """

    def __init__(self, model: nn.Module, flow: Flow, skip: Iterable[str] = ()) -> None:
        self.flow = flow
        self.names = {module: name for name, module in model.named_modules()}
        self.skipped = self._named(skip)
        self.balanced: dict[nn.Module, Partner] = {}
        self.removed: dict[nn.Module, str] = {}
        self.kept: dict[nn.Module, str] = {}
        self.not_in_place: list[nn.Module] = []
        """Activations that work in place on what a norm gave them, and without it would change the norm's input."""

        candidates = [module for module in self.names if _is_layer(module) or is_batch_norm(module)]
        self.kept = {module: reason for module in candidates if (reason := self._excluded(module))}
        norms = [module for module in candidates if is_batch_norm(module) and module not in self.kept]
        layers = [module for module in candidates if _is_layer(module) and module not in self.kept]
        followed = {layer: norm for layer in layers if (norm := self._following(layer))}
        for norm in norms:
            its_layers = [layer for layer, following in followed.items() if following is norm]
            if its_layers and self._calls(its_layers) == self._calls([norm]):
                self.balanced.update({layer: Partner(norm, "follows") for layer in its_layers})
                self.removed[norm] = f"follows {self._list(its_layers)}"
        for norm in norms:
            if norm not in self.removed:
                self._attribute_to_fed_layers(norm)
        for layer in layers:
            if layer not in self.balanced and (norm := self._behind_a_sum(layer)):
                self.balanced[layer] = Partner(norm, "behind a sum")
        for layer in layers:
            if layer not in self.balanced:
                norm = followed.get(layer)
                self.kept[layer] = f"its {self.names[norm]} stays" if norm else "no BatchNorm follows or feeds it"

    def left_as_asked(self, norm: nn.Module) -> bool:
        """Whether a norm stays because it, or the layer that it follows, is to be skipped."""
        calls = self.flow.by_module.get(norm, [])
        return norm in self.skipped or any(_source(call).module in self.skipped for call in calls)

    def signed(self, layer: nn.Module) -> bool:
        """Whether the layer's input can be negative."""
        return not all(source.nonnegative for call in self.flow.by_module[layer] for source in call.inputs)

    def _named(self, patterns: Iterable[str]) -> set[nn.Module]:
        found = set[nn.Module]()
        for pattern in patterns:
            roots = [module for module, name in self.names.items() if fnmatch.fnmatchcase(name, pattern)]
            if not roots:
                raise ValueError(f"skip={pattern!r} matches no module; see model.named_modules() for their names")
            found.update(module for root in roots for module in root.modules())
        return found

    def _excluded(self, module: nn.Module) -> str | None:
        """Why a module cannot be touched at all."""
        kind = type(module)
        if module in self.skipped:
            return "skipped, as asked"
        if isinstance(module, BalNormLayer):
            return "balanced already"
        if kind not in BALANCED and kind not in _WEIGHT_DIMENSIONS and not is_norm_act(module):
            return f"not one of torch's own layers: a {kind.__name__} may do something else"
        if module not in self.flow.by_module:
            return "the forward pass does not call it, or only inside another layer"
        if module in self.flow.used_directly:
            return "its tensors are used outside its own call too"
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks):
            return "it has hooks, which would be lost"
        if "forward" in vars(module):
            return "its forward was replaced, which would be lost"
        if _is_layer(module) and _fan_in(module) < 2:
            return "one weight per output: there is nothing to balance"
        return None

    def _calls(self, modules: Iterable[nn.Module]) -> int:
        return sum(len(self.flow.by_module[module]) for module in modules)

    def _following(self, layer: nn.Module) -> nn.Module | None:
        """The norm that the output of a layer always goes to, and nothing else."""
        users = [_only_user(call) for call in self.flow.by_module[layer]]
        modules = {user.module if user else None for user in users}
        norm = modules.pop() if len(modules) == 1 else None
        return norm if norm is not None and is_batch_norm(norm) and self._fits(layer, norm) else None

    def _fits(self, layer: nn.Module, norm: nn.Module) -> bool:
        """Whether the channels of the norm are the outputs of the layer."""
        assert isinstance(layer, _ConvNd | nn.Linear)
        if not isinstance(norm, _BatchNorm):
            return False
        if isinstance(layer, nn.Linear):
            # A norm of something with three dimensions goes over the second, a linear layer over the last.
            outputs, fitting = layer.out_features, all(call.dimensions == 2 for call in self.flow.by_module[layer])
        else:
            outputs, fitting = layer.out_channels, True
        allowed = [dimensions for kind, dimensions in _WEIGHT_DIMENSIONS.items() if isinstance(norm, kind)]
        return fitting and norm.num_features == outputs and any(layer.weight.dim() in some for some in allowed)

    def _attribute_to_fed_layers(self, norm: nn.Module) -> None:
        self.kept[norm] = self._why_not_following(norm)
        for call in self.flow.by_module[norm]:
            source = _source(call)
            of_a_layer = source.module is not None and _is_layer(source.module)
            own = source.module in self.kept or _only_user(source) is call
            if of_a_layer and (own or not _only_for_sums(source)):
                return  # it has its place, whatever it feeds
            if origin := self._strange_origin(call):
                if origin is not source:
                    self.kept[norm] += f", which comes from {self._describe(origin)}"
                return
        fed, obstacle = self._fed(norm)
        if obstacle:
            self.kept[norm] += f", and {obstacle}"
            return
        del self.kept[norm]
        self.removed[norm] = f"feeds {self._list(fed)}"
        reached, branch = {norm}, [(norm, layer) for layer in fed]
        while branch:
            norm, layer = branch.pop()
            partner = self.balanced.setdefault(layer, Partner(norm, "feeds"))
            if partner.norm not in reached:
                reached.add(partner.norm)
                fed, obstacle = self._fed(partner.norm)
                branch.extend((partner.norm, layer) for layer in fed if not obstacle)

    def _fed(self, norm: nn.Module) -> tuple[list[nn.Module], str | None]:
        """The convolutions that a norm feeds, and what stands against giving it up for them."""
        fed, in_place = dict[nn.Module, None](), list[nn.Module]()
        steps = list(self.flow.by_module[norm])
        while steps:
            for user in steps.pop().users:
                layer = user.module
                if layer is not None and _is_layer(layer) and not isinstance(layer, nn.Linear):
                    if layer in self.kept:
                        return [], f"it feeds {self.names[layer]}, which stays ({self.kept[layer]})"
                    fed[layer] = None
                elif user.name not in _BEHIND_A_NORM:
                    return [], f"it feeds {self._describe(user)}"
                elif user.in_place and user.module is None:
                    return [], f"{user.name} works in place on its output"
                else:
                    steps.append(user)
                    if user.in_place and user.module is not None:
                        in_place.append(user.module)
        if not fed:
            return [], "it feeds nothing"
        self.not_in_place.extend(in_place)
        return list(fed), None

    def _strange_origin(self, call: Call) -> Call | None:
        """Something other than layers and norms that a norm's input comes from, past sums and the like."""
        seen, steps = set[Call](), [call]
        while steps:
            for source in steps.pop().inputs:
                known = source.module is not None and (_is_layer(source.module) or is_batch_norm(source.module))
                if not known and source.name not in _BEFORE_A_SUM:
                    return source
                if not known and source not in seen:
                    seen.add(source)
                    steps.append(source)
        return None

    def _behind_a_sum(self, layer: nn.Module) -> nn.Module | None:
        """The first norm that is removed and normalised a sum, or a concatenation, that a convolution is part of."""
        seen = set[Call]()
        steps = list(self.flow.by_module[layer]) if not isinstance(layer, nn.Linear) else []
        if not all(_only_for_sums(step) for step in steps):
            return None
        while steps:
            for user in steps.pop(0).users:
                if user.module is not None and self.removed.get(user.module, "").startswith("feeds"):
                    return user.module
                if user.name in _BEHIND_A_SUM and user not in seen:
                    seen.add(user)
                    steps.append(user)
        return None

    def _why_not_following(self, norm: nn.Module) -> str:
        for call in self.flow.by_module[norm]:
            source = _source(call)
            layer = source.module
            if layer is None or not _is_layer(layer):
                return f"it follows {self._describe(source)}"
            if layer in self.kept:
                return f"it follows {self.names[layer]}, which stays ({self.kept[layer]})"
            if isinstance(layer, nn.Linear) and source.dimensions is None:
                return f"it follows {self.names[layer]}, and only an example_input tells over which dimension it goes"
            if not self._fits(layer, norm):
                return f"it does not fit {self.names[layer]}, which it follows"
            if _only_user(source) is not call:
                return f"the output of {self.names[layer]} goes elsewhere too"
        return "it is not the only norm of a layer that is called more than once"

    def _describe(self, call: Call) -> str:
        if call.module is not None:
            return str(self.names[call.module])
        special = {"input": "the model's input", "output": "the model's output", "attribute": "a parameter or buffer"}
        return special.get(call.name, f"{call.name}()")

    def _list(self, modules: Iterable[nn.Module]) -> str:
        return ", ".join(self.names[module] for module in modules)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether it is a BatchNorm of any kind, also of a kind that only its name and its buffers tell."""
    return isinstance(module, _BatchNorm) or (
        "BatchNorm" in type(module).__name__ and "running_mean" in dict(module.named_buffers(recurse=False))
    )


def is_norm_act(module: nn.Module) -> bool:
    """Whether it is one of timm's norms with a dropout and an activation inside."""
    kind = type(module)
    return kind.__name__ in ("BatchNormAct2d", "SyncBatchNormAct") and kind.__module__.startswith("timm.")


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd | nn.Linear)


def _fan_in(layer: nn.Module) -> int:
    if isinstance(layer, _ConvNd) and layer.transposed:
        return layer.weight[:, 0].numel() // layer.groups
    assert isinstance(layer, _ConvNd | nn.Linear)
    return layer.weight[0].numel()


def _only_user(call: Call) -> Call | None:
    """The one step that the output goes to, past those that may stand before a norm."""
    while len(call.users) == 1:
        (user,) = call.users
        if user.name not in _BEFORE_A_NORM:
            return user
        call = user
    return None


def _only_for_sums(call: Call) -> bool:
    """Whether the output goes to norms, or towards sums, and nowhere else."""
    return all(
        user.name in _BEHIND_A_SUM or (user.module is not None and is_batch_norm(user.module)) for user in call.users
    )


def _source(call: Call) -> Call:
    """The step that the input comes from, past those that may stand before a norm."""
    while call.inputs:
        call = call.inputs[0]
        if call.name not in _BEFORE_A_NORM:
            break
    return call
