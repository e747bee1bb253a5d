"""What follows from the name of a metric: whether less of it is better, and how to write it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

__all__ = ["change", "is_share", "lower_is_better", "metric_names", "number", "shown", "worst"]

_OF_RECIPES = {  # the figure's files, and the quantity
    "test_accuracy": ("accuracy", "test accuracy"),
    "test_loss": ("loss", "test loss"),
    "train_loss": ("training-loss", "training loss"),
}


def lower_is_better(name: str) -> bool:
    """Whether it is a loss or an error. Of everything else, more is better."""
    return "loss" in name.lower() or "error" in name.lower()


def is_share(name: str) -> bool:
    """Whether its values are from 0 to 1, written in percent."""
    return name.endswith("accuracy")


def worst(name: str) -> float:
    """The value that a diverged run counts with."""
    return math.inf if lower_is_better(name) else 0.0 if is_share(name) else -math.inf


def metric_names(names: Iterable[str], first: str, recipes: bool) -> dict[str, tuple[str, str]]:
    """The metrics to report, the leading one first: each with the name of its figure and its name in words."""
    known = _OF_RECIPES if recipes else {n: (re.sub(r"\W|_", "-", n), n.replace("_", " ")) for n in names}
    return {name: known[name] for name in sorted(known, key=lambda name: name != first)}


def shown(name: str, value: float) -> str:
    return f"{value:.2%}" if is_share(name) else number(value)


def change(name: str, value: float) -> str:
    """A difference of two values, with its sign; that of shares in percentage points."""
    return number(100 * value, "+.2f") if is_share(name) else number(value, "+.3f" if abs(value) >= 0.01 else "+.3g")


def number(value: float, form: str | None = None) -> str:
    """By default with three decimals, or three digits if that would show too few."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return format(value, form or (".3f" if abs(value) >= 0.01 or value == 0 else ".3g"))
