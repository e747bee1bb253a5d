"""Statistics over runs: medians, quartiles, differences. This module knows nothing of figures.

From the epoch in which a run diverges, it counts as worse than any other: accuracy 0, infinite loss. Leaving it out
would make a method that diverges half of the time look as good as one that never does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from balnorm.bench.study.metrics import is_share, lower_is_better, worst
from balnorm.bench.study.results import Results
from balnorm.bench.training.run import Run, Setting

__all__ = [
    "Difference", "Differences", "Spread", "difference", "differences_to", "epochs_to_reach", "final", "final_spread",
    "levels", "probability_of_improvement", "quantile", "seconds_by_epoch", "spread", "values_by_epoch",
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

    @property
    def interval(self) -> bool:
        """Whether there are enough seeds for an interval."""
        return self.n >= 5


def quantile(values: Collection[float], q: float) -> float:
    """Interpolates linearly, as numpy does, but handles infinite values correctly."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below, above, part = ordered[math.floor(place)], ordered[math.ceil(place)], place % 1
    if below == above or part == 0:
        return below
    return 0.0 if below == -math.inf and above == math.inf else below * (1 - part) + above * part


def spread(values: Collection[float]) -> Spread | None:
    """Median and quartiles, or ``None`` if there are no values."""
    if not values:
        return None
    low, median, high = (quantile(values, q) for q in (0.25, 0.5, 0.75))
    return Spread(median, low, high, len(values))


def values_by_epoch(runs: Sequence[Run], name: str) -> dict[int, Spread]:
    """A metric by epoch, over all runs that have reached it."""
    columns: dict[int, list[float]] = {}
    last = max((run.epochs for run in runs), default=0)
    for run in runs:
        values = [record[name] for record in run.records if name in record]
        if run.state == "diverged":
            values += [worst(name)] * (last - len(values))
        for epoch, value in enumerate(values, 1):
            columns.setdefault(epoch, []).append(value)
    return {epoch: found for epoch in sorted(columns) if (found := spread(columns[epoch]))}


def seconds_by_epoch(runs: Sequence[Run]) -> list[float]:
    """How long it takes to the end of each epoch: the sum of the epochs' median times."""
    columns = itertools.zip_longest(*(run.seconds for run in runs))
    return list(itertools.accumulate(quantile([s for s in column if s is not None], 0.5) for column in columns))


def final(runs: Sequence[Run], name: str) -> dict[int, float]:
    """The metric after the last epoch, by seed, for the runs that have ended."""
    ended = [run for run in runs if run.state == "finished" and name in run.records[-1]]
    values = {run.recipe.seed: run.records[-1][name] for run in ended}
    return values | {run.recipe.seed: worst(name) for run in runs if run.state == "diverged"}


def final_spread(runs: Sequence[Run], name: str) -> Spread | None:
    """The spread of a metric after the last epoch."""
    return spread(final(runs, name).values())


def epochs_to_reach(runs: Sequence[Run], level: float, name: str = "test_accuracy") -> list[float]:
    """For each run that has ended, the first epoch in which the metric was as good; infinite if there is none."""

    def reached(value: float) -> bool:
        return value <= level if lower_is_better(name) else value >= level

    return [
        next((float(r["epoch"]) for r in run.records if name in r and reached(r[name])), math.inf)
        for run in runs
        if run.ended
    ]


def levels(results: Results) -> list[float]:
    """Values to report the epochs for: about 75%, 90% and 97% of the best median, shares in whole percents."""
    name = results.metric
    medians = [found.median for runs in results.by_setting.values() if (found := final_spread(runs, name))]
    best = (min if lower_is_better(name) else max)(medians, default=0.0)
    if not 0 < best < math.inf:
        return []
    if is_share(name):
        return sorted({math.floor(100 * best * part) / 100 for part in (0.75, 0.9, 0.97)} - {0.0})
    parts = [best / part if lower_is_better(name) else best * part for part in (0.75, 0.9, 0.97)]
    return list(dict.fromkeys(float(f"{part:.2g}") for part in parts))


@dataclass(frozen=True)
class Differences:
    """How the settings of a study differ from the baseline method with all else equal."""

    baseline: str
    metric: str
    by_setting: dict[Setting, Difference]


def differences_to(results: Results, baseline: str) -> Differences:
    """The difference in the final leading metric for every setting with a counterpart of the baseline method."""
    found, metric = {}, results.metric
    base = {setting.varied: runs for setting, runs in results.by_setting.items() if setting.method == baseline}
    for setting, runs in results.by_setting.items():
        ours, theirs = (final(each, metric) for each in (runs, base.get(setting.varied, [])))
        if setting.method != baseline and (one := difference(ours, theirs, lower_is_better(metric))):
            found[setting] = one
    return Differences(baseline, metric, found)


def difference(ours: dict[int, float], theirs: dict[int, float], lower: bool = False) -> Difference | None:
    """Ours minus theirs for the seeds that both have: the median, with a 95% percentile bootstrap over seeds.

    With fewer than five seeds the interval is infinite: the median of so few, drawn again, is too often on one side of
    0 by chance (with three seeds and no difference, in one of four cases). If both runs of a seed diverged,
    they are level. ``lower`` means that a lower value wins.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    each = np.array([0.0 if ours[seed] == theirs[seed] else ours[seed] - theirs[seed] for seed in seeds])
    median, low, high = quantile(each.tolist(), 0.5), -math.inf, math.inf
    if len(seeds) >= 5:
        draws = np.random.default_rng(0).integers(len(seeds), size=(10_000, len(seeds)))
        if np.isfinite(each).all():
            low, high = map(float, np.quantile(np.median(each[draws], axis=1), [0.025, 0.975]))
        else:  # which numpy would turn into NaN
            medians = [quantile(drawn, 0.5) for drawn in each[draws].tolist()]
            low, high = quantile(medians, 0.025), quantile(medians, 0.975)
    better = (theirs, ours) if lower else (ours, theirs)
    improvement = probability_of_improvement(*([values[seed] for seed in seeds] for values in better))
    return Difference(median, low, high, improvement, len(seeds))


def probability_of_improvement(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How often a value of ours exceeds one of theirs, over all pairs; ties count half."""
    pairs = [(a > b) + 0.5 * (a == b) for a in ours for b in theirs]
    return float(np.mean(pairs))
