"""A user's function as an experiment: its name and its options."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from balnorm.bench.errors import one_line
from balnorm.bench.training.config import Recipe

__all__ = ["MACHINE", "Config", "Experiment", "function_options", "read_config"]

MACHINE = ("root", "device")
"""Arguments about the machine, not the experiment: a function that takes them gets those of the command."""

_OWN = ("experiment", "metric", "norm", "seed")  # what an experiment has besides its options
_SIMPLE = (bool, int, float, str, types.NoneType)


@dataclass(frozen=True)
class Experiment:
    """A call of the user's function, as a :class:`Recipe` is one of the trainer."""

    name: str
    """The file and the function, such as ``volumes.py:train``."""
    norm: str = ""
    seed: int = 0
    metric: str | None = None
    """The metric that leads in a report; ``None`` means the first one that is not a loss."""
    options: tuple[tuple[str, Any], ...] = ()
    """The function's other arguments, sorted by name."""

    epochs: ClassVar[None] = None
    """Unknown: a run is finished when the function ends."""

    @property
    def function(self) -> str:
        return self.name.partition(":")[2]

    @property
    def fields(self) -> dict[str, Any]:
        """Everything that defines the run, by name."""
        return dict(zip(_OWN, (self.name, self.metric, self.norm, self.seed), strict=True)) | dict(self.options)

    @property
    def variant(self) -> tuple[tuple[str, Any], ...]:
        """For a recipe, the options of the norm; here all options are alike."""
        return ()

    def idle(self) -> dict[str, str]:
        """For a recipe, the fields without effect; here they are not known."""
        return {}

    def replaced(self, **changes: Any) -> Experiment:
        return Experiment.from_dict(self.fields | changes)

    def check(self) -> None:
        """Raise a ValueError that states what is allowed."""
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to below 2**63, got {self.seed}")
        for name, value in self.options:
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Experiment:
        """Build an experiment from its fields, also read back from JSON."""
        name, metric, norm, seed = (values.get(each) for each in _OWN)
        if not isinstance(name, str) or not isinstance(norm, str) or type(seed) is not int:
            raise ValueError("not the fields of an experiment")
        if not isinstance(metric, str | None):
            raise ValueError(f"metric cannot be {metric!r}")
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name not in _OWN}
        for option, value in options.items():
            if not all(isinstance(each, _SIMPLE) for each in (value if isinstance(value, tuple) else [value])):
                raise ValueError(f"{option} cannot be {value!r}")
        return Experiment(name, norm, seed, metric, tuple(sorted(options.items())))


Config = Recipe | Experiment
"""The definition of a run."""


def read_config(values: Any) -> Config:
    """The recipe or the experiment with these fields."""
    if isinstance(values, dict) and "experiment" in values:
        return Experiment.from_dict(values)
    return Recipe.from_dict(values)


def function_options(function: Callable[..., Any], taken: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """The type and default (or ``inspect.Parameter.empty``) of a function's arguments, without those of the machine.

    Raises a ValueError unless the function takes norm, seed and folder, and the rest can be given in a command whose
    own options have the names ``taken``.
    """
    name, arguments = function.__name__, inspect.signature(function).parameters
    try:
        kinds = get_type_hints(function)
    except Exception as error:  # an annotation can be any expression
        raise ValueError(f"the annotations of {name} cannot be read ({one_line(error)})") from error
    if missing := [each for each in ("norm", "seed", "folder") if each not in arguments]:
        raise ValueError(f"{name} must take norm, seed and folder; it lacks {' and '.join(missing)}")
    found = {}
    for option, argument in arguments.items():
        if option in ("seed", "folder", *MACHINE):
            continue
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise ValueError(f"{name} cannot take {argument}: each option needs a name")
        if option in {"experiment", "metric", *taken}:
            raise ValueError(f"{name} cannot have an option {option}, which is one of the command: choose another name")
        if not _is_simple(kind := kinds.get(option)):
            raise ValueError(
                f"{name} must say the type of {option}, as in {option}: int (or float, str, bool, Literal)"
            )
        found[option] = (kind, argument.default)
    return found


def _is_simple(kind: Any) -> bool:
    """Whether a command can give a value of this type, and JSON can keep it."""
    inner = [each for each in get_args(kind) if each is not Ellipsis]
    if get_origin(kind) is Literal:
        return all(isinstance(each, _SIMPLE) for each in inner)
    if get_origin(kind) in (tuple, Union, types.UnionType):
        return all(map(_is_simple, inner))
    return kind in _SIMPLE
