"""What becomes of a layer or a norm, as data. :func:`explain` puts it into words; no code depends on the words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

from torch import nn

__all__ = ["Action", "Balanced", "Because", "Decision", "Kept", "Place", "Reason", "Removed", "explain"]

Action = Literal["balanced", "removed", "kept"]


class Place(Enum):
    """Where a norm stands, seen from a balanced layer. The value is the wording of the report for the norm ``{}``."""

    FOLLOWS = "{} follows it"
    FEEDS = "{} feeds it"
    BEHIND_A_SUM = "{} normalised what it contributed to"
    NOWHERE = "included, as asked"


class Reason(Enum):
    """Why a module stays. The value is the wording of the report; ``{}`` is what the reason is about."""

    # What cannot be touched, whatever surrounds it
    SKIPPED = "skipped, as asked"
    BALANCED_ALREADY = "balanced already"
    NOT_OF_TORCH = "not one of torch's own layers: a {} may do something else"
    NOT_CALLED = "the forward pass does not call it, or only inside another layer"
    USED_DIRECTLY = "its tensors are used outside its own call too"
    HAS_HOOKS = "it has hooks, which would be lost"
    FORWARD_REPLACED = "its forward was replaced, which would be lost"
    ONE_WEIGHT = "one weight per output: there is nothing to balance"
    # A layer
    NO_NORM = "no BatchNorm follows or feeds it"
    ITS_NORM_STAYS = "its {} stays"
    # A norm, and what it follows
    FOLLOWS_NO_LAYER = "it follows {}"
    FOLLOWS_KEPT = "it follows {}, which stays ({})"
    UNKNOWN_DIMENSIONS = "it follows {}, and only an example_input shows which dimension it normalises"
    DOES_NOT_FIT = "it does not fit {}, which it follows"
    SHARES_OUTPUT = "the output of {} goes elsewhere too"
    ONE_OF_SEVERAL = "it is not the only norm of a layer that is called more than once"
    # A norm, and why it cannot be given up for what it feeds either
    STRANGE_ORIGIN = "which comes from {}"
    FEEDS_NO_LAYER = "and it feeds {}"
    FEEDS_KEPT = "and it feeds {}, which stays ({})"
    FEEDS_NOTHING = "and it feeds nothing"
    CHANGED_IN_PLACE = "and {} works in place on its output"


@dataclass(frozen=True)
class Because:
    """A reason, and what it is about: a module, a class of modules, or a step of the forward pass by its name."""

    reason: Reason
    about: nn.Module | type[nn.Module] | str = ""
    which_stays: Because | None = None
    """Why the module that it is about has to stay, if that is the reason."""


@dataclass(frozen=True)
class Balanced:
    """A layer becomes balanced, and does the work of its norm, if it has one."""

    action: ClassVar[Action] = "balanced"
    norm: nn.Module | None
    place: Place
    signed: bool
    """Whether the layer's input can be negative."""


@dataclass(frozen=True)
class Removed:
    """A norm is removed: it follows these layers, or feeds them."""

    action: ClassVar[Action] = "removed"
    place: Place
    layers: tuple[nn.Module, ...]
    in_place: tuple[nn.Module, ...] = ()
    """Activations that work in place on the norm's output; without the norm they would overwrite its input."""


@dataclass(frozen=True)
class Kept:
    """A layer or a norm stays."""

    action: ClassVar[Action] = "kept"
    because: tuple[Because, ...]

    def depends_on(self, reason: Reason) -> bool:
        """Whether this is a reason, for the module itself or for one that keeps it in place."""
        causes = [cause for because in self.because for cause in (because, because.which_stays) if cause]
        return any(cause.reason is reason for cause in causes)


Decision = Balanced | Removed | Kept


def explain(decision: Decision, names: Mapping[nn.Module, str]) -> str:
    """The reason for the decision, in the words of a report."""
    if isinstance(decision, Balanced):
        why = decision.place.value.format(names[decision.norm] if decision.norm else "")
        return f"{why}, its input can be negative" if decision.signed else why
    if isinstance(decision, Removed):
        layers = ", ".join(names[layer] for layer in decision.layers)
        return f"follows {layers}" if decision.place is Place.FOLLOWS else f"feeds {layers}"
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
