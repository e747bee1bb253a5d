"""Statistics over runs: medians, quartiles, differences. This module knows nothing of figures.

From the epoch in which a run diverges, it counts as worse than any other: accuracy 0 and infinite loss. Leaving it out
would make a method that diverges half of the time look as good as one that never does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from balnorm.study.results import Result, Results, Setting

__all__ = [
    "Difference", "Differences", "Spread", "difference", "differences_to", "epochs_to_reach", "final", "final_spread",
    "levels", "probability_of_improvement", "quantile", "spread", "values_by_epoch", "worst",
]  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n values."""

    median: float
    low: float
    high: float
    n: int


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


def quantile(values: Collection[float], q: float) -> float:
    """Interpolates linearly, as numpy does, but handles infinite values correctly."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below, above, part = ordered[math.floor(place)], ordered[math.ceil(place)], place % 1
    return below if below == above else below * (1 - part) + above * part


def spread(values: Collection[float]) -> Spread | None:
    """Median and quartiles, or ``None`` if there are no values."""
    if not values:
        return None
    low, median, high = (quantile(values, q) for q in (0.25, 0.5, 0.75))
    return Spread(median, low, high, len(values))


def worst(name: str) -> float:
    """The value that a diverged run counts with."""
    return 0.0 if name.endswith("accuracy") else math.inf


def values_by_epoch(runs: Sequence[Result], name: str) -> dict[int, Spread]:
    """A metric by epoch, over all runs that have reached it."""
    columns: dict[int, list[float]] = {}
    for run in runs:
        values = [record[name] for record in run.records]
        if run.state == "diverged":
            values += [worst(name)] * (run.recipe.epochs - len(values))
        for epoch, value in enumerate(values, 1):
            columns.setdefault(epoch, []).append(value)
    return {epoch: found for epoch in sorted(columns) if (found := spread(columns[epoch]))}


def final(runs: Sequence[Result], name: str) -> dict[int, float]:
    """The metric after the last epoch, by seed, for the runs that have ended."""
    values = {run.recipe.seed: run.records[-1][name] for run in runs if run.state == "finished"}
    return values | {run.recipe.seed: worst(name) for run in runs if run.state == "diverged"}


def final_spread(runs: Sequence[Result], name: str = "test_accuracy") -> Spread | None:
    """The spread of a metric after the last epoch."""
    return spread(final(runs, name).values())


def epochs_to_reach(runs: Sequence[Result], accuracy: float) -> list[float]:
    """For each run that has ended, the first epoch with this test accuracy; infinite if there is none."""
    return [
        next((float(r["epoch"]) for r in run.records if r["test_accuracy"] >= accuracy), math.inf)
        for run in runs
        if run.ended
    ]


def levels(results: Results) -> list[float]:
    """Accuracies to report the epochs for: about 75%, 90% and 97% of the best median, in whole percents."""
    spreads = map(final_spread, results.by_setting.values())
    best = max((found.median for found in spreads if found), default=0.0)
    return sorted({math.floor(100 * best * part) / 100 for part in (0.75, 0.9, 0.97)} - {0.0})


@dataclass(frozen=True)
class Differences:
    """How the settings of a study differ from the baseline norm with all else equal."""

    baseline: str
    by_setting: dict[Setting, Difference]


def differences_to(results: Results, baseline: str) -> Differences:
    """The difference in final test accuracy for every setting with a counterpart that has the baseline norm."""
    found = {}
    for setting, runs in results.by_setting.items():
        others = results.by_setting.get(Setting(baseline, setting.varied), [])
        ours, theirs = (final(each, "test_accuracy") for each in (runs, others))
        if setting.norm != baseline and (one := difference(ours, theirs)):
            found[setting] = one
    return Differences(baseline, found)


def difference(ours: dict[int, float], theirs: dict[int, float]) -> Difference | None:
    """Ours minus theirs for the seeds that both have: the median, with a 95% percentile bootstrap over seeds.

    Of fewer than five seeds the interval is infinite: the median of so few, drawn again, is too often on one side of 0
    by chance (in one of four cases with three seeds, where there is no difference).
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    each = np.array([ours[seed] - theirs[seed] for seed in seeds])
    low, high = -math.inf, math.inf
    if len(seeds) >= 5:
        draws = np.random.default_rng(0).integers(len(seeds), size=(10_000, len(seeds)))
        low, high = map(float, np.quantile(np.median(each[draws], axis=1), [0.025, 0.975]))
    improvement = probability_of_improvement([ours[s] for s in seeds], [theirs[s] for s in seeds])
    return Difference(float(np.median(each)), low, high, improvement, len(seeds))


def probability_of_improvement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How often a value of ours exceeds one of theirs, over all pairs; ties count half."""
    pairs = [(a > b) + 0.5 * (a == b) for a in ours for b in theirs]
    return float(np.mean(pairs))
