"""Statistics over runs: medians, quartiles, differences. This module knows nothing of figures.

From the epoch in which a run diverges, it counts as worse than any other: accuracy 0 and infinite loss. Leaving it out
would make a method that diverges half of the time look as good as one that never does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balnorm.study.results import Result, Results, Setting

__all__ = [
    "Band",
    "Difference",
    "Differences",
    "Spread",
    "difference",
    "differences_to",
    "epochs_to_reach",
    "final",
    "levels",
    "probability_of_improvement",
    "quantile",
    "spread",
    "values_by_epoch",
]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n values."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Band:
    """A spread for each epoch."""

    epochs: tuple[int, ...]
    spreads: tuple[Spread, ...]


@dataclass(frozen=True)
class Difference:
    """The difference between two settings by seed: median, 95% bootstrap interval, and how often the first wins."""

    median: float
    low: float
    high: float
    improvement: float
    """The probability that a run of the first beats one of the second; ties count half."""
    n: int
    """How many seeds both have."""


def quantile(values: Sequence[float], q: float) -> float:
    """Interpolates linearly, as numpy does, but handles infinite values correctly."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below, part = int(place), place - int(place)
    if part == 0.0 or ordered[below] == ordered[below + 1]:
        return ordered[below]
    return ordered[below] * (1 - part) + ordered[below + 1] * part


def spread(values: Sequence[float]) -> Spread | None:
    """Median and quartiles, or ``None`` if there are no values."""
    if not values:
        return None
    low, median, high = (quantile(values, q) for q in (0.25, 0.5, 0.75))
    return Spread(median, low, high, len(values))


def worst(name: str) -> float:
    """The value that a diverged run counts with."""
    return 0.0 if name.endswith("accuracy") else math.inf


def values_by_epoch(runs: Sequence[Result], name: str) -> Band:
    """A metric by epoch, over all runs that have reached it."""
    epochs = max((run.recipe.epochs for run in runs), default=0)
    columns: list[list[float]] = [[] for _ in range(epochs)]
    for run in runs:
        values = [record[name] for record in run.records]
        if run.state == "diverged":
            values += [worst(name)] * (run.recipe.epochs - len(values))
        for column, value in zip(columns, values, strict=False):
            column.append(value)
    kept = [(epoch, found) for epoch, column in enumerate(columns, 1) if (found := spread(column)) is not None]
    return Band(tuple(epoch for epoch, _ in kept), tuple(found for _, found in kept))


def final(runs: Sequence[Result], name: str) -> dict[int, float]:
    """The metric after the last epoch, by seed, for the runs that have ended."""
    values = {run.recipe.seed: run.records[-1][name] for run in runs if run.state == "finished" and run.records}
    return values | {run.recipe.seed: worst(name) for run in runs if run.state == "diverged"}


def epochs_to_reach(runs: Sequence[Result], accuracy: float) -> list[float]:
    """For each run that has ended, the first epoch with this test accuracy; infinite if there is none."""
    return [
        next((float(r["epoch"]) for r in run.records if r["test_accuracy"] >= accuracy), math.inf)
        for run in runs
        if run.state in ("finished", "diverged")
    ]


def levels(results: Results) -> list[float]:
    """Accuracies to report the epochs for: about 75%, 90% and 97% of the best median, in whole percents."""
    finals = [final(results.of(setting), "test_accuracy") for setting in results.settings]
    medians = [quantile(list(values.values()), 0.5) for values in finals if values]
    best = max(medians, default=0.0)
    return sorted({math.floor(100 * best * part) / 100 for part in (0.75, 0.9, 0.97)} - {0.0})


@dataclass(frozen=True)
class Differences:
    """How the settings of a study differ from the baseline norm with all else equal."""

    baseline: str
    by_setting: dict[Setting, Difference]


def differences_to(results: Results, baseline: str) -> Differences:
    """The difference in final test accuracy for every setting with a counterpart that has the baseline norm."""
    found = {}
    for setting in results.settings:
        if setting.norm != baseline and (other := Setting(baseline, setting.varied)) in results.settings:
            ours, theirs = (final(results.of(each), "test_accuracy") for each in (setting, other))
            if (one := difference(ours, theirs)) is not None:
                found[setting] = one
    return Differences(baseline, found)


def difference(ours: dict[int, float], theirs: dict[int, float], resamples: int = 10_000) -> Difference | None:
    """Ours minus theirs for the seeds that both have: the median, with a 95% percentile bootstrap over seeds.

    Of fewer than five seeds the interval is infinite: the median of so few, drawn again, is too often on one side of 0
    by chance (in one of four cases with three seeds, where there is no difference).
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    each = np.array([ours[seed] - theirs[seed] for seed in seeds])
    median = float(np.median(each))
    improvement = probability_of_improvement([ours[s] for s in seeds], [theirs[s] for s in seeds])
    if len(seeds) < 5:
        return Difference(median, -math.inf, math.inf, improvement, len(seeds))
    draws = np.random.default_rng(0).integers(len(seeds), size=(resamples, len(seeds)))
    low, high = np.quantile(np.median(each[draws], axis=1), [0.025, 0.975])
    return Difference(median, float(low), float(high), improvement, len(seeds))


def probability_of_improvement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How often a value of ours exceeds one of theirs, over all pairs; ties count half."""
    pairs = [(a > b) + 0.5 * (a == b) for a in ours for b in theirs]
    return float(np.mean(pairs))
