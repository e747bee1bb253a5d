"""The runs of a study, planned from a command and compared with what is already there. Imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from balnorm.bench.study.packed import STUDY, Packed, read_packed, varied_fields
from balnorm.bench.study.results import Result, settings_of, text_of
from balnorm.bench.training.experiment import Config
from balnorm.bench.training.run import Run, RunError, check_same, state_after

__all__ = ["combinations", "plan", "run_name"]

_MOST = 10_000  # runs of a study: each is a folder, which the display looks at and the report reads


def plan(
    recipe: Config,
    out: str | Path,
    norms: Sequence[str],
    seeds: int,
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> list[Result]:
    """Every norm with every seed and every combination of the varied fields, each with its current state.

    Seeds count up from the recipe's own. All runs of one seed come before the next seed, so that a study that is
    stopped early has compared something. Combinations that differ only in what has no effect are one run. A run that
    ``out`` already holds under another name, since other fields varied when it was made, keeps it. Raises a RunError if
    ``out`` holds other runs under the same names.
    """
    vary, out = vary or {}, Path(out)
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if not norms:
        raise ValueError("norms must name at least one normalisation")
    if (count := seeds * len(norms) * math.prod(map(len, vary.values()))) > _MOST:
        raise ValueError(f"a study of {count:,} runs is too large: {_MOST:,} is the most")
    for values, what in ((norms, "norms"), *((vary[name], name) for name in vary)):
        if len(set(values)) < len(values):
            raise ValueError(f"{what} has a value twice: {', '.join(map(str, values))}")
    named = {}
    for seed in range(recipe.seed, recipe.seed + seeds):
        for norm, changed in combinations(norms, vary):
            each = recipe.replaced(norm=norm, seed=seed, **changed)
            each.check()
            named[run_name(each, changed)] = each
    packed = read_packed(out) if (out / STUDY).exists() else Packed({}, (), ())
    varied = varied_fields(packed.runs)
    known = {run_name(each, {name: each.fields.get(name) for name in varied}): each for each in packed.runs}
    folders, runs = _folders_by_recipe(out / "runs"), list[Result]()
    for (name, each), setting in zip(named.items(), settings_of(list(named.values())), strict=True):
        if each in packed.runs:
            lines = packed.runs[each]
            runs.append(Result(out, each, setting, state_after(lines, each.epochs), lines, packed=True))
            continue
        own = out / "runs" / name
        if there := [Result(folder, each, setting).now() for folder in folders.get(each, [])]:
            runs.append(min(there, key=lambda run: (not run.ended, run.folder != own, run.folder)))
            continue
        check_same(each, known.get(name, each), out)
        Run(own).check(each)
        runs.append(Result(own, each, setting).now())
    return runs


def combinations(norms: Sequence[str], vary: Mapping[str, Sequence[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every norm with every combination of the varied fields."""
    for norm, *values in itertools.product(norms, *vary.values()):
        yield norm, dict(zip(vary, values, strict=True))


def _folders_by_recipe(parent: Path) -> dict[Config, list[Path]]:
    found: dict[Config, list[Path]] = {}
    for folder in parent.glob("*/"):
        with contextlib.suppress(RunError, OSError):  # reported if it is in the way
            found.setdefault(Run(folder).recipe(), []).append(folder)
    return found


def run_name(recipe: Config, changed: Mapping[str, Any]) -> str:
    """The name of a run's folder, such as ``batchnorm-lr=0.3-seed2``, without what has no effect."""
    idle = recipe.idle()
    varied = (f"{name}={text_of(value)}" for name, value in changed.items() if name not in idle)
    return quote("-".join([recipe.norm, *varied, f"seed{recipe.seed}"]), safe="=+, ")  # a norm may have any name
