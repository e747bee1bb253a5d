"""Which runs a study has, and how far each of them is: read from its folder alone, without torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from balnorm.study.packed import STUDY, Records, read_packed
from balnorm.training.config import Recipe
from balnorm.training.run import Run, RunError, check_same, has_ended

__all__ = ["FAILURE", "Member", "Setting", "State", "plan", "run_name", "settings_of", "state_after", "state_of"]

State = Literal["new", "unfinished", "finished", "diverged", "failed"]

FAILURE = "error.txt"
"""The file in a run's folder that says why it failed; the next start removes it."""


@dataclass(frozen=True)
class Member:
    """A run of a study: its folder and its recipe."""

    folder: Path
    recipe: Recipe
    packed: Records = ()
    """Its metrics, where the packed study in the study's folder has it: it is finished, and needs no folder."""

    @property
    def state(self) -> State:
        return state_after(self.packed, self.recipe.epochs) if self.packed else state_of(Run(self.folder))


def plan(
    recipe: Recipe,
    out: str | Path,
    norms: Sequence[str],
    seeds: int,
    vary: Mapping[str, Sequence[Any]] | None = None,
) -> list[Member]:
    """Every norm with every seed and every combination of the varied fields, seed by seed.

    The seeds count up from the recipe's own. All of one seed come before the next, so that a study that is stopped
    early has compared something. Those that a packed study in ``out`` has are marked.
    """
    vary = vary or {}
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if not norms:
        raise ValueError("norms must name at least one normalisation")
    for values, what in ((norms, "norms"), *((vary[name], name) for name in vary)):
        if len(set(values)) < len(values):
            raise ValueError(f"{what} has a value twice: {', '.join(map(str, values))}")
    members = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        for norm, *values in itertools.product(norms, *vary.values()):
            changed = dict(zip(vary, values, strict=True))
            member = replace(recipe, norm=norm, seed=seed, **changed)
            member.check()
            members.append(Member(Path(out) / "runs" / run_name(member, changed), member))
    return _with_packed(members, Path(out))


def _with_packed(members: list[Member], out: Path) -> list[Member]:
    if not (out / STUDY).exists():
        return members
    packed = read_packed(out)
    names = {
        run_name(recipe, {name: getattr(recipe, name) for name in packed.varied}): recipe for recipe in packed.runs
    }
    for member in members:
        if member.recipe not in packed.runs and (theirs := names.get(member.folder.name)) is not None:
            check_same(member.recipe, theirs, out)
    return [replace(member, packed=packed.runs.get(member.recipe, ())) for member in members]


def run_name(recipe: Recipe, changed: Mapping[str, Any]) -> str:
    """What a run's folder is called, as ``batchnorm-lr=0.3-seed2``."""
    return "-".join([recipe.norm, *(f"{name}={_text(value)}" for name, value in changed.items()), f"seed{recipe.seed}"])


def state_of(run: Run) -> State:
    """How far a run is. A folder that cannot be read counts as failed."""
    if not run.config.exists():
        return "new"
    if (run.folder / FAILURE).exists():  # also where all epochs are done: their last state may not be saved
        return "failed"
    try:
        recipe, records = run.recipe(), run.records()
    except (RunError, OSError):
        return "failed"
    return state_after(records, recipe.epochs)


def state_after(records: Sequence[dict[str, Any]], epochs: int) -> Literal["unfinished", "finished", "diverged"]:
    """How far a run of so many epochs is that has these records."""
    if not has_ended(records, epochs):
        return "unfinished"
    return "diverged" if records[-1].get("diverged") else "finished"


@dataclass(frozen=True)
class Setting:
    """What runs that differ in their seeds only have in common: the norm, and those fields that vary in a study."""

    norm: str
    varied: tuple[tuple[str, Any], ...] = ()

    @property
    def variation(self) -> str:
        """The varied fields, as ``lr=0.1 width=8``."""
        return " ".join(f"{name}={_text(value)}" for name, value in self.varied)

    def __str__(self) -> str:
        return f"{self.norm} {self.variation}".strip()


def settings_of(recipes: Sequence[Recipe]) -> list[Setting]:
    """The setting of each recipe.

    A field that follows from the others, such as a learning rate that was chosen for each batch size, is left out.
    """
    rows = [asdict(recipe) for recipe in recipes]
    varying = [
        field.name
        for field in fields(Recipe)
        if field.name not in ("norm", "seed") and len({repr(row[field.name]) for row in rows}) > 1
    ]
    whole = _combinations(rows, varying)
    for name in reversed(list(varying)):
        others = [other for other in varying if other != name]
        if _combinations(rows, others) == whole:
            varying = others
    return [Setting(row["norm"], tuple((name, row[name]) for name in varying)) for row in rows]


def _combinations(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> int:
    return len({repr([row[name] for name in names]) for row in rows})


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
