"""The command line: parsing only. It imports torch when there is something to do, so that help comes at once."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from balnorm.recipes import RECIPES, get_recipe
from balnorm.training.config import Recipe

__all__ = ["main"]

_USAGE = """usage: balnorm train RECIPE [options]
       balnorm data list|get|check [NAME] [--root DIR]

Train a network as a recipe says. The same command again goes on with a run that was stopped.

recipes:
{recipes}

examples:
  balnorm train digits                                          half a minute, nothing to download
  balnorm train digits --norm batchnorm --seed 3 --out runs/a
  balnorm data get cifar10 --root data                          162 MB; goes on where it broke off
  balnorm train cifar10-desk --root data --epochs 5
  torchrun --nproc-per-node 2 -m balnorm train svhn-wrn         two processes
  balnorm train digits --help                                   all options of a recipe
"""


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
        if given[:1] == ["train"] and len(given) > 1 and not asked_for_help:
            options = _train_options(given[1], given[2:])
            return _train(options.recipe, options.where)
    except ValueError as error:
        return _fail(error, 2)
    except SystemExit as stop:  # tyro has said what is wrong
        return int(stop.code or 0)
    if given and given[0] not in ("train", "-h", "--help"):
        return _fail(f"there is no command {given[0]!r}: it is train or data, and `balnorm --help` shows examples", 2)
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
