"""The command line: parsing only. It imports torch when there is something to do, so that help comes at once."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from balnorm.recipes import RECIPES, get_recipe
from balnorm.training.config import NormName, Recipe

__all__ = ["main"]

_USAGE = """usage: balnorm compare [RECIPE] [--norms ...] [--seeds N] [--out DIR] [options]
       balnorm train RECIPE [options]
       balnorm data list|get|check [NAME] [--root DIR]

Compare normalisations over many seeds, or train one network. The same command again goes on with what was stopped.

recipes:
{recipes}

examples:
  balnorm compare digits                                        some minutes, nothing to download
  balnorm compare cifar10-desk --norms balnorm batchnorm --seeds 5 --out studies/x --root data
  balnorm compare digits --vary lr=0.01,0.1,1 --dry-run         what would run, and how long
  balnorm train digits                                          half a minute
  balnorm train digits --norm batchnorm --seed 3 --out runs/a
  balnorm data get cifar10 --root data                          162 MB; goes on where it broke off
  torchrun --nproc-per-node 2 -m balnorm train svhn-wrn         two processes
  balnorm train digits --help                                   all options of a recipe
"""


@dataclass(frozen=True)
class StudyRecipe(Recipe):
    norm: Annotated[NormName, tyro.conf.Suppress] = "balnorm"
    seed: int = 0
    """The first of the seeds."""


@dataclass(frozen=True)
class Grid:
    """Which runs there are, and where."""

    norms: tuple[NormName, ...] = ("balnorm", "batchnorm", "groupnorm", "none")
    """The normalisations to compare."""
    seeds: int = 5
    """How many runs of each."""
    vary: tuple[str, ...] = ()
    """Fields to vary besides, each with its values: lr=0.01,0.1,1 batch_size=8,128"""
    out: Path | None = None
    """The study's folder; None is studies/<recipe>."""
    root: Path = Path("data")
    """The folder that the data is in."""
    device: str | None = None
    """Such as cuda:1; None takes the GPUs in turn if there are any."""
    jobs: int = 1
    """Runs at a time on this machine, which share its cores."""
    threads: int | None = None
    """Cores for each run; None divides the machine's by the jobs, and is 1 on a Ray cluster."""
    ray: str | None = None
    """The address of a Ray cluster to run them on, or "local"; --out and --root must be on storage it shares."""
    gpus: float = 0.0
    """GPUs for each run on a Ray cluster; 0.5 lets two share one."""
    dry_run: bool = False
    """Show what would be run and how long it would take, and run nothing."""
    quiet: bool = False
    """Show nothing meanwhile."""


@dataclass(frozen=True)
class Compare:
    recipe: StudyRecipe
    grid: Grid


@dataclass(frozen=True)
class Where:
    """Where a run is, and how it is kept."""

    out: Path | None = None
    """The run's folder; None is runs/<recipe>-<norm>-<seed>."""
    root: Path = Path("data")
    """The folder that the data is in."""
    device: str | None = None
    """Such as cuda:1; None takes a GPU if there is one."""
    checkpoint_steps: int | None = None
    """Save the state inside an epoch after every so many steps."""
    checkpoint_minutes: float | None = 10.0
    """Save the state inside an epoch after so many minutes."""
    quiet: bool = False
    """Show nothing."""


@dataclass(frozen=True)
class Train:
    recipe: Recipe
    where: Where


@dataclass(frozen=True)
class Data:
    """List the data sets, fetch one, or check its files."""

    action: Annotated[Literal["list", "get", "check"], tyro.conf.Positional]
    name: Annotated[str | None, tyro.conf.Positional] = None
    """The data set."""
    root: Path = Path("data")
    """The folder that it is in, or goes to."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command. The exit code is 0, or 1 if it failed, 2 for a mistake in the command, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    asked_for_help = bool(given) and (
        given[0] in ("-h", "--help") or given[:2] in (["train", "-h"], ["train", "--help"])
    )
    try:
        if given[:1] == ["data"]:
            return _data(tyro.cli(Data, args=given[1:], prog="balnorm data"))
        if given[:1] == ["compare"]:
            return _compare(*_compare_options(given[1:]))
        if given[:1] == ["train"] and len(given) > 1 and not asked_for_help:
            options = _train_options(given[1], given[2:])
            return _train(options.recipe, options.where)
    except ValueError as error:
        return _fail(error, 2)
    except SystemExit as stop:  # tyro has said what is wrong
        return int(stop.code or 0)
    if given and given[0] not in ("train", "-h", "--help"):
        return _fail(
            f"there is no command {given[0]!r}: it is compare, train or data, and `balnorm --help` shows examples", 2
        )
    recipes = "\n".join(f"  {name:22}{_first_sentence(build.__doc__)}" for name, build in RECIPES.items())
    print(_USAGE.format(recipes=recipes), end="", file=sys.stdout if asked_for_help else sys.stderr)
    return 0 if asked_for_help else 2


def _train_options(name: str, arguments: list[str]) -> Train:
    recipe = get_recipe(name)
    options = tyro.cli(
        Train,
        default=Train(recipe, Where()),
        args=arguments,
        prog=f"balnorm train {name}",
        description=RECIPES[name].__doc__,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    options.recipe.check()
    return options


def _compare_options(arguments: list[str]) -> tuple[Recipe, Grid, dict[str, list[Any]]]:
    named = bool(arguments) and not arguments[0].startswith("-")
    name, rest = (arguments[0], arguments[1:]) if named else ("digits", arguments)
    recipe = get_recipe(name)

    def parse(arguments: list[str]) -> Compare:
        return tyro.cli(
            Compare,
            default=Compare(StudyRecipe(**{**vars(recipe), "norm": "balnorm"}), Grid()),
            args=arguments,
            prog=f"balnorm compare {name}",
            description=RECIPES[name].__doc__,
            config=(tyro.conf.OmitArgPrefixes,),
        )

    options = parse(rest)
    vary: dict[str, list[Any]] = {}
    for text in options.grid.vary:
        field, _, values = text.partition("=")
        field = field.replace("-", "_")
        if not values or field not in vars(recipe) or field in ("name", "norm", "seed"):
            raise ValueError(f"--vary takes a field of the recipe and its values, as lr=0.01,0.1,1, not {text!r}")
        if isinstance(getattr(recipe, field), bool):
            parsed = [parse([f"--{'' if value == 'True' else 'no-'}{field}"]) for value in values.split(",")]
        else:
            parsed = [parse([f"--{field}", value]) for value in values.split(",")]
        vary[field] = [getattr(each.recipe, field) for each in parsed]
    return Recipe(**vars(options.recipe)), options.grid, vary


def _compare(recipe: Recipe, grid: Grid, vary: dict[str, list[Any]]) -> int:
    from balnorm.study.executors import Executor, LocalExecutor, RayExecutor, StudyError
    from balnorm.study.grid import plan
    from balnorm.study.runner import Stopped, cores, run_study

    if grid.jobs < 1 or (grid.threads is not None and grid.threads < 1):
        raise ValueError("jobs and threads must be at least 1")
    if grid.ray is None and grid.gpus:
        raise ValueError("gpus is for a Ray cluster; give --ray too")
    if grid.ray is not None and grid.jobs != 1:
        raise ValueError("jobs is for this machine: a Ray cluster runs as many as it has room for")
    out = grid.out or Path("studies") / recipe.name
    members = plan(recipe, out, grid.norms, grid.seeds, vary)
    try:
        threads = grid.threads or (1 if grid.ray else max(1, cores() // grid.jobs))
        executor: Executor = RayExecutor(grid.ray, grid.gpus) if grid.ray else LocalExecutor(grid.jobs)
        outcomes = run_study(
            members, executor, root=grid.root, threads=threads, device=grid.device, show=not grid.quiet
        )
    except Stopped as stop:
        return _fail(stop, 130)
    except (StudyError, OSError) as error:
        return _fail(error, 1)
    return 1 if any(outcome.end == "failed" for outcome in outcomes) else 0


def _data(options: Data) -> int:
    from balnorm.data import SETS, DataError, check, download

    if options.action != "list" and options.name is None:
        raise ValueError(f"which data set? one of {', '.join(SETS)}, as in `balnorm data {options.action} cifar10`")
    try:
        for name in SETS if options.name is None else [options.name]:
            if options.action == "get":
                for path in download(name, options.root):
                    print(path)
            states = check(name, options.root)
            if options.action == "list":
                files = "inside scikit-learn" if not states else ", ".join(sorted(set(states.values())))
                print(f"{name:15}{files}")
            elif options.action == "check":
                for file, state in states.items():
                    print(f"{file:40}{state}")
                if set(states.values()) & {"missing", "damaged"}:
                    return 1
    except DataError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("stopped; the same command goes on from what was fetched", 130)
    return 0


def _train(recipe: Recipe, where: Where) -> int:
    from balnorm.data import DataError
    from balnorm.training.checkpoint import CheckpointError
    from balnorm.training.run import RunError
    from balnorm.training.trainer import Interrupted, train

    try:
        train(
            recipe,
            where.out or Path("runs") / f"{recipe.name}-{recipe.norm}-{recipe.seed}",
            root=where.root,
            device=where.device,
            checkpoint_steps=where.checkpoint_steps,
            checkpoint_minutes=where.checkpoint_minutes,
            show=not where.quiet,
        )
    except Interrupted as stop:
        return _fail(stop, 130) if os.environ.get("RANK", "0") == "0" else 130
    except KeyboardInterrupt:
        return _fail("stopped; the same command goes on from what was saved last", 130)
    except (CheckpointError, DataError, RunError, ValueError, OSError) as error:
        return _fail(error, 1)
    return 0


def _fail(error: Exception | str, code: int) -> int:
    print(f"balnorm: {error}", file=sys.stderr)
    return code


def _first_sentence(text: str | None) -> str:
    return (text or "").strip().splitlines()[0].split(" (")[0].rstrip(".")
