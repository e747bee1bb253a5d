"""The command line: from words to options, what each command does, and its exit code."""

from __future__ import annotations

import contextlib
import copy
import difflib
import errno
import functools
import math
import os
import platform
import re
import sys
import types
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from datetime import datetime
from importlib.metadata import version
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import torch
import tyro
from torch import Tensor, nn

from balnorm.bench import profiling
from balnorm.bench.console import patient_output, remark, say
from balnorm.bench.data import SETS, check, download
from balnorm.bench.device_check import check_device, known_device
from balnorm.bench.errors import Failure, Stopped, is_out_of_memory, many, one_line, sentence
from balnorm.bench.export import (
    Saved,
    check_format,
    export_folded,
    load_saved,
    load_state,
    test_batch,
    write_folded,
)
from balnorm.bench.files import write_atomically
from balnorm.bench.norms import NORMS
from balnorm.bench.recipes import RECIPES, get_recipe
from balnorm.bench.study.executors import Executor, LocalExecutor, RayExecutor, Resources
from balnorm.bench.study.packed import METRICS, STUDY, write_packed
from balnorm.bench.study.plots import picture
from balnorm.bench.study.report import write_report
from balnorm.bench.study.results import read_results
from balnorm.bench.study.runner import combinations, cores, dry_run, plan, run_study
from balnorm.bench.training.config import NormName, Recipe, followed, without_effect
from balnorm.bench.training.experiment import Config, Experiment, function_options
from balnorm.bench.training.images import image_shape
from balnorm.bench.training.learner import autocast
from balnorm.bench.training.machine import check_precision
from balnorm.bench.training.processes import processes
from balnorm.bench.training.trainer import train
from balnorm.bench.user_code import load_function, load_model, names_a_function
from balnorm.diagnostics import balance_report
from balnorm.layers import BalNormLayer
from balnorm.surgery import convert
from balnorm_command import USAGE

__all__ = ["main"]

_EXAMPLES = {
    "compare": """
  balnorm compare {recipe} --norms balnorm batchnorm groupnorm --seeds 10 --out studies/x --jobs 2
  balnorm compare {recipe} --vary lr=0.01,0.1,1 batch_size=32,128 --dry-run
  balnorm compare {recipe} --ray local --threads 2
  balnorm compare {recipe} --ray 10.0.0.1:6379 --gpus 1 --out /shared/x --root /shared/data""",
    "train": """
  balnorm train {recipe} --seed 3 --out runs/a
  torchrun --nproc-per-node 2 -m balnorm train {recipe}""",
    "report": """
  balnorm report studies/digits
  balnorm report studies/a studies/b --out both --reach 0.9 0.95 --formats svg""",
    "pack": """
  balnorm pack studies/x
  balnorm pack studies/x --out published/x""",
    "data": """
  balnorm data list --root data
  balnorm data get cifar10 --root data
  balnorm data check cifar10 --root data""",
    "bench": """
  balnorm bench cifar10-wrn --norms none batchnorm balnorm --batch-size 32
  balnorm bench imagenet-resnet50 --batch-size 4 --rounds 5
  balnorm bench mynet.py:build --shape 8,3,224,224               your model, as it is and converted
  balnorm bench --device cuda --check                            a report of your GPU, to post""",
    "inspect": """
  balnorm inspect runs/a
  balnorm inspect studies/digits/runs/balnorm-seed0/checkpoint.pt --figure balance.svg
  balnorm inspect mynet.py:build --shape 64,3,224,224 --weights state.pt""",
    "fold": """
  balnorm fold runs/a --out digits.onnx
  balnorm fold runs/a/checkpoint.pt --out digits.pt2
  balnorm fold mynet.py:build --weights state.pt --shape 2,3,224,224 --out mynet.onnx""",
}

# --------------------------------------------------------------------------------------------------------------------
# Options
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyRecipe(Recipe):
    norm: Annotated[NormName, tyro.conf.Suppress] = "balnorm"
    seed: int = 0
    """The first of the seeds."""


@dataclass(frozen=True)
class Grid:
    """The runs, and where to train them."""

    norms: tuple[NormName, ...] = ("balnorm", "batchnorm", "groupnorm", "none")
    """The normalisations to compare."""
    seeds: int = 5
    """How many runs of each."""
    vary: tuple[str, ...] = ()
    """Other fields to vary, each with its values: lr=0.01,0.1,1 batch_size=8,128"""
    out: Path | None = None
    """The study's folder; None means studies/<recipe>."""
    root: Path = Path("data")
    """The folder that holds the data."""
    device: str | None = None
    """For example cuda:1; None uses the GPUs in turn, or the CPU if there are none."""
    jobs: int = 1
    """How many runs to train at a time on this machine; they share its cores."""
    threads: int | None = None
    """Cores for each run; None divides the machine's cores among the jobs (1 on a Ray cluster)."""
    ray: str | None = None
    """The address of a Ray cluster to run on, or "local"; --out and --root must be on storage that it shares."""
    gpus: float = 0.0
    """GPUs for each run on a Ray cluster; 0.5 lets two share one."""
    dry_run: bool = False
    """List what would run and estimate how long it would take, without running it."""
    quiet: bool = False
    """Show no progress."""


@dataclass(frozen=True)
class Compare:
    recipe: StudyRecipe
    grid: Grid


@dataclass(frozen=True)
class ExperimentGrid(Grid):
    metric: str | None = None
    """The metric that leads; None means the first that is not a loss. Of losses and errors, less is better."""
    seed: int = 0
    """The first of the seeds."""


@dataclass(frozen=True)
class Where:
    """Where a run is stored, and how often it is saved."""

    out: Path | None = None
    """The run's folder; None means runs/<recipe>-<norm>-<seed>."""
    root: Path = Path("data")
    """The folder that holds the data."""
    device: str | None = None
    """For example cuda:1; None uses a GPU if there is one."""
    checkpoint_steps: int | None = None
    """Also save every N steps within an epoch."""
    checkpoint_minutes: float | None = 10.0
    """Also save every N minutes within an epoch."""
    quiet: bool = False
    """Show no progress."""


@dataclass(frozen=True)
class Train:
    recipe: Recipe
    where: Where


@dataclass(frozen=True)
class Data:
    action: Annotated[Literal["list", "get", "check"], tyro.conf.Positional]
    name: Annotated[str | None, tyro.conf.Positional] = None
    """The data set."""
    root: Path = Path("data")
    """The folder that holds it, or that it is downloaded to."""


@dataclass(frozen=True)
class ReportOptions:
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of studies (running, finished or packed) or of single runs."""
    out: Path | None = None
    """Where to write; None means the folder report inside the study, or ./report for several studies."""
    title: str | None = None
    """The page's title; None uses the names of the recipes."""
    baseline: str | None = None
    """The normalisation that the others are compared with; None means batchnorm, if there is one."""
    metric: str | None = None
    """The metric that leads; None means the study's own."""
    reach: tuple[float, ...] = ()
    """Report how many epochs it took to reach these test accuracies, such as 0.9; by default, some near the best."""
    formats: tuple[Literal["svg", "png", "pdf"], ...] = ("svg", "png", "pdf")
    """File formats of the figures."""
    quiet: bool = False
    """Print only the path of the page."""


@dataclass(frozen=True)
class Pack:
    study: Annotated[Path, tyro.conf.Positional]
    """The folder of a study."""
    out: Path | None = None
    """Where to write study.json and metrics.csv; None means the study's own folder."""


@dataclass(frozen=True)
class BenchOptions:
    norms: tuple[NormName, ...] = ("none", "batchnorm", "groupnorm", "balnorm")
    """The normalisations to measure; the first is the one that the others are compared with."""
    vary: tuple[str, ...] = ()
    """Options of the norms to vary, each with its values: mass=channel,position"""
    rounds: int = 11
    """In each round, every norm takes one training step."""
    device: str | None = None
    """For example cuda:1; None uses a GPU if there is one."""
    check: bool = False
    """Check a device in place of that, with networks of its own: see `balnorm bench --check --help`."""


@dataclass(frozen=True)
class Bench:
    recipe: StudyRecipe
    bench: BenchOptions


@dataclass(frozen=True)
class Check:
    device: str = "cuda"
    """A GPU, such as cuda:1, or cpu, for which the networks are smaller."""
    rounds: int = 21
    """In each round, every norm takes training steps of a tenth of a second (on a CPU one step)."""
    out: Path | None = None
    """The file to write, in Markdown; None means balnorm-check-<device>-<time>.md."""


@dataclass(frozen=True)
class Inspect:
    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A run's checkpoint, or its folder."""
    root: Path = Path("data")
    """The folder that holds the data; the balance is measured on its test images."""
    images: int = 64
    """How many test images to use."""
    figure: Path | None = None
    """Plot the balance of every layer to this file (svg, png or pdf)."""


@dataclass(frozen=True)
class Fold:
    checkpoint: Annotated[Path, tyro.conf.Positional]
    """A run's checkpoint, or its folder."""
    out: Path
    """The file to write: .pt for a state dict, .pt2 for a torch.export program, .onnx for ONNX."""


@dataclass(frozen=True)
class OwnModel:
    """A model that a function of the user's builds."""

    shape: tuple[str, ...] = ()
    """The shape of its input, such as 8,3,224,224 (of several inputs, one each), filled with random numbers from 0 to
    1; None takes the example input that the function returns with the model."""
    weights: Path | None = None
    """A state dict to load, saved by torch.save(model.state_dict(), ...)."""


@dataclass(frozen=True)
class BenchOwn(OwnModel):
    vary: tuple[str, ...] = ()
    """Options of the conversion to vary, each with its values: mass=channel,position"""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Other than float32: under autocast."""
    compile: bool = False
    """Compile the models with torch.compile."""
    rounds: int = 11
    """In each round, every model takes one training step."""
    device: str | None = None
    """For example cuda:1; None uses a GPU if there is one."""


@dataclass(frozen=True)
class InspectOwn(OwnModel):
    figure: Path | None = None
    """Plot the balance of every layer to this file (svg, png or pdf)."""


@dataclass(frozen=True)
class FoldOwn(OwnModel):
    out: Path = field(kw_only=True)
    """The file to write: .pt for a state dict, .pt2 for a torch.export program, .onnx for ONNX."""


@dataclass(frozen=True)
class Completion:
    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


# --------------------------------------------------------------------------------------------------------------------
# From words to options, and exit codes
# --------------------------------------------------------------------------------------------------------------------


_Options = TypeVar("_Options")


def main(arguments: list[str] | None = None) -> int:
    """Run a command. The exit code is 0, or 1 if it failed, 2 for a mistake in the command, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    with patient_output() as out:
        code = _dispatch(given)
        out.flush()
        lost = out.error is not None and out.error.errno != errno.EPIPE  # whoever closes a pipe has read enough
        if lost and code == 0 and (given[0] in _PRINTING or {"-h", "--help"} & set(given)):
            return _fail(f"the output could not be written ({sentence(out.error)})", 1)
    return code


def _dispatch(given: list[str]) -> int:
    if (longest := max(map(len, given), default=0)) > 10_000:  # messages would repeat it
        return _fail(f"an argument has {longest:,} characters: 10,000 are enough for any name or list", 2)
    if not given or given[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if given else sys.stderr)
        return 0 if given else 2
    name, *rest = given
    if name == "--version":
        print(f"balnorm {version('balnorm')}")
        return 0
    if name == "train" and not rest:
        remark("which recipe? as in `balnorm train digits`:")
        print(*(f"  {key:22}{_summary(build.__doc__)}" for key, build in RECIPES.items()), sep="\n", file=sys.stderr)
        return 2
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(_COMMANDS)}."
        return _fail(f"there is no command {name!r}: {hint} `balnorm --help` shows examples", 2)
    try:
        if name in _FOR_OWN and (own := _own(rest)):
            _FOR_OWN[name](*own)
            return 0
        return _COMMANDS[name](rest) or 0
    except ValueError as error:
        return _fail(error, 2)
    except (Failure, OSError) as error:
        return _fail(sentence(error), 1)
    except Stopped as stop:
        return _fail(stop, 130) if os.environ.get("RANK", "0") == "0" else 130
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if "out of shared memory" in text:
            return _fail(
                "the decoding workers lack shared memory: increase it (Docker: --shm-size), or use --workers 0", 1
            )
        if "dataloader worker" in text:
            return _fail("a process that decodes images died: is there enough memory? --workers 0 needs less", 1)
        if not is_out_of_memory(error):
            raise
        return _fail("there is not enough memory: a smaller batch, width or image size needs less", 1)
    except SystemExit as stop:  # tyro has explained the mistake
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _fail("stopped: repeat the command to resume from what was saved", 130)


def _parse(
    options: type[_Options], arguments: list[str], command: str, about: str | None, default: _Options | None = None
) -> _Options:
    name, _, recipe = command.partition(" ")
    examples = _EXAMPLES.get(name, "").format(recipe=recipe)
    given: dict[str, Any] = {} if default is None else {"default": default}
    parsed: _Options = tyro.cli(
        options,
        **given,
        args=arguments,
        prog=f"balnorm {command}",
        description="\n\n".join(filter(None, [about, "examples:" + examples if examples else ""])),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return parsed


def _recipe_and_rest(arguments: list[str]) -> tuple[str, list[str]]:
    """The recipe's name (digits by default) and the remaining arguments."""
    named = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if named else ("digits", arguments)


def _about(recipe: str) -> str:
    others = ", ".join(name for name in RECIPES if name != recipe)
    return f"{RECIPES[recipe].__doc__}\n\nWith other defaults: {others}."


def _adjusted(base: Recipe, recipe: Recipe, arguments: list[str]) -> Recipe:
    """A recipe from options, with its own drops in proportion if the epochs are others. Says so."""
    if any(re.match("--drops(=|$)", argument) for argument in arguments):
        return recipe
    adjusted = followed(base, recipe)
    if recipe.schedule == base.schedule and adjusted != recipe:
        now = f"at {', '.join(map(str, adjusted.drops))} of {recipe.epochs}" if adjusted.drops else "never"
        before = f"at epochs {', '.join(map(str, base.drops))} of {base.epochs}"
        remark(f"{base.name} divides the learning rate by ten {before}; with {many(recipe.epochs, 'epoch')}, {now}")
    return adjusted


def _varied(
    recipe: Any, texts: Sequence[str], allowed: Collection[str], what: str, example: str = "lr=0.01,0.1,1"
) -> dict[str, list[Any]]:
    """The values of each field that varies, from texts such as the example."""
    kinds, vary = get_type_hints(type(recipe)), dict[str, list[Any]]()
    for text in texts:
        field, _, values = text.partition("=")
        field = field.replace("-", "_")
        if not values or field not in allowed:
            raise ValueError(f"--vary takes {what} and its values, as {example}, not {text!r}")
        if field in vary:
            raise ValueError(f"--vary has {field} twice: give all of its values at once, as {example}")
        alone = make_dataclass("Alone", [(field, kinds[field])])
        parsed: list[Any] = [
            tyro.cli(alone, args=[f"--{field}", value], prog="balnorm", config=(tyro.conf.FlagConversionOff,))
            for value in values.split(",")
        ]
        vary[field] = [getattr(each, field) for each in parsed]
    return vary


def _experiment_options(function: Callable[..., Any]) -> type:
    """As :class:`Compare` for a recipe: the arguments of a user's function, and the grid."""
    found = function_options(function, [each.name for each in fields(ExperimentGrid)])
    norm = found.pop("norm")[0]
    norms = ("norms", types.GenericAlias(tuple, (norm, ...)), field(default=get_args(norm) or MISSING))  # of a Literal
    grid = make_dataclass("Grid", [norms], bases=(ExperimentGrid,), frozen=True)
    own = [
        (name, kind, field(default=MISSING if default is Parameter.empty else default))
        for name, (kind, default) in found.items()
    ]
    options = make_dataclass("Options", own, frozen=True, kw_only=True)
    return make_dataclass("Compare", [("recipe", options), ("grid", grid)], frozen=True)


# --------------------------------------------------------------------------------------------------------------------
# Studies
# --------------------------------------------------------------------------------------------------------------------


def _compare(arguments: list[str]) -> None:
    """Run a study, then write its report."""
    name, rest = _recipe_and_rest(arguments)
    base: Recipe | Path
    recipe: Config
    if own := re.fullmatch(r"(.+\.py)(?::(\w+))?", name):
        base, function = Path(own[1]), load_function(Path(own[1]), own[2] or "train")
        options: Any = _parse(_experiment_options(function), rest, f"compare {name}", function.__doc__)
        vary = _varied(options.recipe, options.grid.vary, vars(options.recipe), f"an option of {function.__name__}")
        own_fields = {"experiment": f"{base.name}:{function.__name__}", "metric": options.grid.metric, "norm": ""}
        recipe = Experiment.from_dict({**own_fields, "seed": options.grid.seed, **vars(options.recipe)})
    else:
        base = get_recipe(name)
        default = Compare(StudyRecipe(**vars(base)), Grid())
        options = _parse(Compare, rest, f"compare {name}", _about(name), default)
        allowed = vars(base).keys() - {"name", "norm", "seed"}
        vary = _varied(options.recipe, options.grid.vary, allowed, "a field of the recipe")
        recipe = _adjusted(base, Recipe(**vars(options.recipe)), rest)
    grid: Grid = options.grid
    if grid.jobs < 1 or (grid.threads is not None and grid.threads < 1):
        raise ValueError("jobs and threads must be at least 1")
    if grid.ray == "":
        raise ValueError('ray must be the address of a cluster, or "local"')
    if not 0 <= grid.gpus < math.inf or (grid.ray is None and grid.gpus):
        raise ValueError("gpus must not be negative, and is for a Ray cluster: give --ray too")
    if grid.gpus > 1 and grid.gpus % 1:
        raise ValueError(f"gpus must be a whole number, or below 1 to share one, got {grid.gpus}")
    if grid.ray is not None and grid.jobs != 1:
        raise ValueError("jobs is for this machine: a Ray cluster runs as many as it has room for")
    out = grid.out or Path("studies") / recipe.name.replace(".py:", "-")
    threads = grid.threads or (1 if grid.ray else max(1, cores() // grid.jobs))
    file = base.absolute() if isinstance(base, Path) else Path()
    resources = Resources(grid.root.absolute(), threads, grid.device, file=file)
    runs = plan(recipe, out, grid.norms, grid.seeds, vary)
    if isinstance(base, Recipe) and isinstance(recipe, Recipe):
        asked = [replace(recipe, norm=norm, **changed) for norm, changed in combinations(grid.norms, vary)]
        remark(*without_effect(base, asked))
    if grid.dry_run:
        print(dry_run(runs, grid.jobs, resources))
        return
    executor: Executor
    executor = RayExecutor(grid.ray, resources, grid.gpus) if grid.ray else LocalExecutor(grid.jobs, resources)
    with contextlib.closing(executor):
        ended = run_study(runs, executor, show=not grid.quiet)
    _write_report(ReportOptions((out,), quiet=grid.quiet))
    if failed := sum(run.state in ("failed", "unfinished") for run in ended):
        raise Failure(f"{failed} of {many(len(runs), 'run')} failed; repeat the command to try again")


def _report(arguments: list[str]) -> None:
    """Write figures, tables and a web page for a study (running, finished or packed)."""
    _write_report(_parse(ReportOptions, arguments, "report", _report.__doc__))


def _write_report(options: ReportOptions) -> None:
    """Write a report, and print its tables."""
    if not options.folders:
        raise ValueError("which folder? give that of a study or a run, as in `balnorm report studies/digits`")
    out = options.out or (options.folders[0] / "report" if len(options.folders) == 1 else Path("report"))
    try:
        written = write_report(
            options.folders,
            out,
            title=options.title,
            baseline=options.baseline,
            metric=options.metric,
            reach=options.reach,
            formats=options.formats,
        )
    except OSError as error:
        raise Failure(f"the report could not be written ({sentence(error)})") from error
    if not options.quiet:
        say(f"\n{written}\n")
    remark(*written.problems)
    print(written.page if options.quiet else f"report: {written.page}")


def _pack(arguments: list[str]) -> None:
    """Write the finished runs of a study as two files, study.json and metrics.csv, which need no folder of runs.

    `report` reads them, and `compare` treats their runs as finished. Pack again to add new runs.
    """
    options = _parse(Pack, arguments, "pack", _pack.__doc__)
    results, out = read_results([options.study]), options.out or options.study
    remark(*results.problems)
    packed = results.packed()
    if left := len(results.runs) - len(packed.runs):
        remark(f"{left} of {many(len(results.runs), 'run')} not finished: left out")
    if not packed.runs:
        raise ValueError(f"there is no finished run in {options.study}")
    write_packed(packed, out)
    print(f"{many(len(packed.runs), 'run')}: {out / STUDY} and {out / METRICS}")


# --------------------------------------------------------------------------------------------------------------------
# Single runs
# --------------------------------------------------------------------------------------------------------------------


def _train(arguments: list[str]) -> None:
    """Train one network."""
    name, rest = _recipe_and_rest(arguments)
    base = get_recipe(name)
    options = _parse(Train, rest, f"train {name}", _about(name), Train(base, Where()))
    recipe, where = _adjusted(base, options.recipe, rest), options.where
    recipe.check()
    remark(*without_effect(base, [recipe]))
    check_precision(recipe.precision, where.device)
    train(
        recipe,
        where.out or Path("runs") / f"{recipe.name}-{recipe.norm}-{recipe.seed}",
        root=where.root,
        device=where.device,
        checkpoint_steps=where.checkpoint_steps,
        checkpoint_minutes=where.checkpoint_minutes,
        show=not where.quiet,
    )


def _data(arguments: list[str]) -> int:
    """List the data sets, fetch one, or check its files."""
    options = _parse(Data, arguments, "data", _data.__doc__)
    if options.action != "list" and options.name is None:
        raise ValueError(f"which data set? one of {', '.join(SETS)}, as in `balnorm data {options.action} cifar10`")
    for name in SETS if options.name is None else [options.name]:
        if options.action == "get":
            for path in download(name, options.root):  # which checks them too
                print(path)
            continue
        states = check(name, options.root)
        if options.action == "list":
            files = "inside scikit-learn" if not states else ", ".join(sorted(set(states.values())))
            print(f"{name:15}{files}")
        elif options.action == "check":
            for file, state in states.items():
                print(f"{file:40}{state}")
            if set(states.values()) & {"missing", "damaged"}:
                return 1
    return 0


def _bench(arguments: list[str]) -> int | None:
    """Measure the time and memory of training steps of a recipe's network, interleaving the norms."""
    if "--check" in arguments:
        return _check(arguments)
    name, rest = _recipe_and_rest(arguments)
    if name not in RECIPES and Path(name).suffix:
        raise ValueError(
            f"to measure a model of yours, name the function that builds it, as mynet.py:build, not {name!r}"
        )
    base = get_recipe(name)
    default = Bench(StudyRecipe(**vars(base)), BenchOptions())
    options = _parse(Bench, rest, f"bench {name}", _bench.__doc__, default)
    what, example = "an option of the norms", "mass=channel,position"
    vary = _varied(base, options.bench.vary, NORMS["balnorm"].options, what, example)
    recipe, bench_options = Recipe(**vars(options.recipe)), options.bench
    if not bench_options.norms or bench_options.rounds < 2:
        raise ValueError("bench needs a norm and two rounds at least")
    asked = [replace(recipe, norm=norm, **changed) for norm, changed in combinations(bench_options.norms, vary)]
    remark(*without_effect(base, asked))
    recipes = list(dict.fromkeys(each.replaced() for each in asked))
    for each in recipes:
        each.check()
    channels, size, classes = image_shape(recipe)
    with processes(bench_options.device) as team:
        device = team.device
    check_precision(recipe.precision, device.type)
    what = f"{recipe.model} {recipe.name}, batch {recipe.batch_size} of {channels}x{size}x{size}"
    print(_conditions(what, recipe.precision, device, bench_options.rounds))
    print(profiling.bench(recipes, (channels, size, size), classes, bench_options.rounds, device))
    return None


def _conditions(what: str, precision: str, device: torch.device, rounds: int) -> str:
    return (
        f"{what}, {precision}, forward and backward; {device}, {many(torch.get_num_threads(), 'thread')}, torch "
        f"{torch.__version__}, {platform.platform()}; {rounds} interleaved rounds"
    )


def _own(arguments: list[str]) -> tuple[str, list[str]] | None:
    """The name of a function of the user's own, if there is one among the arguments, and the others."""
    own = next((each for each in arguments if names_a_function(each)), None)
    return None if own is None else (own, [each for each in arguments if each != own])


def _built(target: str, options: OwnModel, needs_input: str | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of the user's own with its weights, and its inputs."""
    model, inputs = load_model(target, options.shape)
    if not inputs and needs_input:
        raise ValueError(f"{needs_input} needs an input: give its shape, as --shape 8,3,224,224, one for each argument")
    if options.weights is not None:
        load_state(model, options.weights)
    return model, inputs


def _bench_own(target: str, arguments: list[str]) -> None:
    """Measure the time and memory of training steps of a model of yours, as it is and converted, in turns.

    The function takes no arguments. It returns the model, or the model and its example input.
    """
    options = _parse(BenchOwn, arguments, f"bench {target}", _bench_own.__doc__)
    if options.rounds < 2:
        raise ValueError(f"rounds must be at least 2, for quartiles, got {options.rounds}")
    base = get_recipe("digits")  # whose fields include the options
    allowed = set(NORMS["balnorm"].options) - {"centre_stream"}
    vary = _varied(base, options.vary, allowed, "an option of the conversion", "mass=channel,position")
    with processes(options.device) as team:
        device = team.device
    check_precision(options.precision, device.type)
    model, inputs = _built(target, options, "bench")
    models = {"as it is": model}
    for _, changed in combinations(["balnorm"], vary):
        copied, name = copy.deepcopy(model), replace(base, norm="balnorm", **changed).method
        example = inputs if len(inputs) > 1 else inputs[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            converted, report = convert(copied, example_input=example, **changed)
        if report.balanced:
            models[name] = converted
            gone = len(report.removed) + len(report.affine)
            remark(f"{name}: {many(len(report.balanced), 'layer')} balanced, {many(gone, 'norm')} removed")
        remark(*dict.fromkeys(one_line(each.message) for each in caught if isinstance(each.message, Warning)))
    for each in models.values():
        each.train().to(device)
    inputs = tuple(each.to(device) for each in inputs)
    shapes = " and ".join("x".join(map(str, each.shape)) for each in inputs)
    print(_conditions(f"{target}, {shapes}", options.precision, device, options.rounds))
    precision = functools.partial(autocast, options.precision, device)
    print(profiling.bench_models(models, inputs, options.rounds, precision, options.compile))


def _check(arguments: list[str]) -> int:
    """Check a device, and write a report to post: do all backends agree, how long do training steps take?

    It compares balanced layers with float64 on the CPU, forward and backward, in float32, float16 and bfloat16. Then it
    measures time and memory of training steps of a ResNet-50, a wide ResNet and a 3D U-Net, eager and compiled, with no
    normalisation, BatchNorm, GroupNorm and BalNorm.
    """
    options = _parse(Check, [each for each in arguments if each != "--check"], "bench --check", _check.__doc__)
    if options.rounds < 2:
        raise ValueError(f"rounds must be at least 2, for quartiles, got {options.rounds}")
    device = known_device(options.device)
    out = options.out or Path(f"balnorm-check-{device.type}-{datetime.now():%Y%m%d-%H%M%S}.md")
    problems = check_device(device, out, options.rounds)
    remark(*problems)
    print(f"report: {out}")
    return 1 if problems else 0


def _inspect(arguments: list[str]) -> None:
    """Describe a run's checkpoint, and measure the balance of every layer on a batch of test images."""
    options = _parse(Inspect, arguments, "inspect", _inspect.__doc__)
    if options.images < 1:
        raise ValueError(f"images must be at least 1, got {options.images}")
    _check_figure(options.figure)
    saved = _loaded(options.checkpoint)
    recipe = saved.recipe
    epochs = f"{saved.epoch} of {many(recipe.epochs, 'epoch')}"
    state = saved.state if saved.state == "finished" else f"{saved.state} after {epochs}"
    count = sum(parameter.numel() for parameter in saved.model.parameters())
    say(f"{recipe.name} {recipe.norm} seed {recipe.seed}: {recipe.model}, {count:,} parameters, {state}\n")
    _show_balance(saved.model, test_batch(saved, options.root, options.images), options.figure)


def _inspect_own(target: str, arguments: list[str]) -> None:
    """Measure the balance of every layer of a model of yours on its input: in eval mode with --weights, else as built.

    The function takes no arguments. It returns the model, or the model and its example input: better images than random
    numbers.
    """
    options = _parse(InspectOwn, arguments, f"inspect {target}", _inspect_own.__doc__)
    _check_figure(options.figure)
    model, inputs = _built(target, options, "inspect")
    if len(inputs) != 1:
        raise ValueError(f"inspect takes a model with one input, and this one has {len(inputs)}")
    if options.weights is not None:
        model.eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    mode = "training" if model.training else "eval"
    say(f"{target}: {type(model).__name__}, {count:,} parameters, in {mode} mode\n")
    _show_balance(model, inputs[0], options.figure)


def _check_figure(figure: Path | None) -> None:
    if figure is not None and figure.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"the figure must end in .svg, .png or .pdf, got {figure}")


def _show_balance(model: nn.Module, batch: Tensor, figure: Path | None) -> None:
    report = balance_report(model, batch)
    print(report)
    if figure is not None:
        write_atomically(figure, picture(report.figure(), figure.suffix[1:]))
        print(f"\nfigure: {figure}")


def _fold(arguments: list[str]) -> None:
    """Write a trained network with its balanced layers folded to plain convolutions."""
    options = _parse(Fold, arguments, "fold", _fold.__doc__)
    saved = _loaded(options.checkpoint)
    if saved.state != "finished":
        epochs = f"{saved.epoch} of {many(saved.recipe.epochs, 'epoch')}"
        what = "has diverged" if saved.state == "diverged" else "is not finished"
        remark(f"the run {what}; this is its network after {epochs}")
    export_folded(saved, options.out)
    print(options.out)


def _fold_own(target: str, arguments: list[str]) -> None:
    """Write a model of yours with its balanced layers folded to plain convolutions.

    The function takes no arguments. It returns the model, or the model and its example input.
    """
    options = _parse(FoldOwn, arguments, f"fold {target}", _fold_own.__doc__)
    check_format(options.out)
    model, inputs = _built(target, options, None if options.out.suffix == ".pt" else f"a {options.out.suffix} file")
    if not any(isinstance(module, BalNormLayer) for module in model.modules()):
        raise ValueError(f"there is nothing to fold: the model of {target} has no balanced layer; is it converted?")
    write_folded(model.eval(), options.out, inputs)
    print(options.out)


def _loaded(checkpoint: Path) -> Saved:
    """The network of a run. Says so if its last checkpoint was damaged."""
    saved = load_saved(checkpoint)
    if saved.remark:
        remark(saved.remark)
    return saved


# --------------------------------------------------------------------------------------------------------------------
# Completion
# --------------------------------------------------------------------------------------------------------------------


def _completion(arguments: list[str]) -> None:
    about = "Print a completion script: `source <(balnorm completion bash)`, or save it where your shell looks."
    shell = _parse(Completion, arguments, "completion", about).shell
    words = {name: " ".join(_words(name)) for name in _COMMANDS}
    names = " ".join(_COMMANDS)
    if shell == "fish":
        lines = [f"complete -c balnorm -f -n __fish_use_subcommand -a '{names}'"]
        lines += [
            f"complete -c balnorm -n '__fish_seen_subcommand_from {name}' -a '{words[name]}'" for name in _COMMANDS
        ]
        print("\n".join(lines))
        return
    cases = "\n".join(f"    {name}) words='{words[name]}' ;;" for name in _COMMANDS)
    start = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(f"""{start}_balnorm() {{
  local words='{names}'
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _balnorm balnorm""")


def _words(command: str) -> list[str]:
    """The words that can follow a command: recipes, norms, options."""
    options: dict[str, Sequence[type]] = {
        "compare": (StudyRecipe, Grid),
        "train": (Recipe, Where),
        "bench": (StudyRecipe, BenchOptions, BenchOwn, Check),
        "report": (ReportOptions,),
        "pack": (Pack,),
        "data": (Data,),
        "inspect": (Inspect, InspectOwn),
        "fold": (Fold, FoldOwn),
    }
    hidden = {"folders", "study", "checkpoint", "action", *(["norm"] if command in ("compare", "bench") else [])}
    hidden |= {"name"} if command == "data" else set()
    names = [field.name for each in options.get(command, ()) for field in fields(each) if field.name not in hidden]
    words = [f"--{name.replace('_', '-')}" for name in dict.fromkeys(names)]
    if command in ("compare", "train", "bench"):
        words += [*RECIPES, *get_args(NormName)]
    return words + {"data": ["list", "get", "check"], "completion": ["bash", "zsh", "fish"]}.get(command, [])


_COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "compare": _compare,
    "train": _train,
    "report": _report,
    "pack": _pack,
    "data": _data,
    "bench": _bench,
    "inspect": _inspect,
    "fold": _fold,
    "completion": _completion,
}
_FOR_OWN = {"bench": _bench_own, "inspect": _inspect_own, "fold": _fold_own}
"""What does the same for a model of the user's own, whose function is named in place of a recipe or a run."""


_PRINTING = {"data", "bench", "inspect", "completion"}
"""The commands whose only result is what they print."""


def _fail(error: Exception | str, code: int) -> int:
    remark(str(error))
    return code


def _summary(text: str | None) -> str:
    return (text or "").strip().splitlines()[0].split(" (")[0].rstrip(".")
