"""Learning rate and momentum as pure functions of the epoch: no state, nothing in a checkpoint."""

from __future__ import annotations

import math
from typing import NamedTuple

from balnorm.bench.training.config import Recipe

__all__ = ["Rates", "rates"]


class Rates(NamedTuple):
    """The optimiser's settings for one step."""

    lr: float
    momentum: float


def rates(recipe: Recipe, epoch: float) -> Rates:
    """Learning rate and momentum after so many epochs, which may be a fraction.

    Example:
        >>> recipe = Recipe("r", "digits", "wide_resnet", epochs=300, schedule="multistep", drops=(150, 225))
        >>> [round(rates(recipe, epoch).lr, 6) for epoch in (0, 149.9, 150, 225)]
        [0.1, 0.1, 0.01, 0.001]
    """
    progress = min(1.0, epoch / recipe.epochs)
    if recipe.schedule == "multistep":
        return Rates(recipe.lr * 0.1 ** sum(epoch >= drop for drop in recipe.drops), recipe.momentum)
    if recipe.schedule == "cosine":
        return Rates(recipe.lr * 0.5 * (1 + math.cos(math.pi * progress)), recipe.momentum)
    if recipe.schedule == "onecycle":
        return _one_cycle(recipe.lr, progress)
    return Rates(recipe.lr, recipe.momentum)


def _one_cycle(lr: float, progress: float) -> Rates:
    """The paper's section on shorter training, for its 30 epochs or as many as there are.

    Five times up to epoch 13 and down again to epoch 26, then 100 times down to the end; momentum from 0.95 to 0.85 and
    back, and 0.85 in the last epochs. All in straight lines; the paper does not say how.
    """
    epoch = 30 * progress
    if epoch < 13:
        up = epoch / 13
        return Rates(lr * (1 + 4 * up), 0.95 - 0.10 * up)
    if epoch < 26:
        down = (epoch - 13) / 13
        return Rates(lr * (5 - 4 * down), 0.85 + 0.10 * down)
    return Rates(lr * (1 - 0.99 * (epoch - 26) / 4), 0.85)
