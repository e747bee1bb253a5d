"""What each command does, once its options are parsed. Torch is imported only where needed, so help is instant."""

from __future__ import annotations

import contextlib
import io
import math
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from balnorm.bench.console import remark, say
from balnorm.bench.errors import Failure, sentence
from balnorm.bench.training.config import NormName, Recipe, without_effect
from balnorm.bench.training.experiment import Config, function_options
from balnorm.bench.training.files import write_atomically

if TYPE_CHECKING:
    from balnorm.bench.export import Saved

__all__ = [
    "Bench", "BenchOptions", "Compare", "Data", "Fold", "Grid", "Inspect", "Pack", "ReportOptions", "StudyRecipe",
    "Train", "Where", "bench", "compare", "data", "experiment_options", "fold", "inspect", "pack", "report", "train",
]  # fmt: skip


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
    """Which runs there are, and where."""

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


def experiment_options(function: Callable[..., Any]) -> type:
    """What :class:`Compare` is for a recipe: the arguments of a function of the user's own, and the grid."""
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
    """List the data sets, fetch one, or check its files."""

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


@dataclass(frozen=True)
class Bench:
    recipe: StudyRecipe
    bench: BenchOptions


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


# --------------------------------------------------------------------------------------------------------------------
# Studies
# --------------------------------------------------------------------------------------------------------------------


def compare(recipe: Config, grid: Grid, vary: dict[str, list[Any]], base: Recipe | Path) -> None:
    """Run a study, then write its report.

    Args:
        recipe: what its runs have in common: a recipe, or an experiment.
        grid: which runs there are, and where.
        vary: the values of each field that varies.
        base: the recipe as it was before options changed it, or the file of the experiment's function.
    """
    from balnorm.bench.study.executors import Executor, LocalExecutor, RayExecutor, Resources
    from balnorm.bench.study.grid import combinations, plan
    from balnorm.bench.study.runner import cores, dry_run, run_study

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
    report(ReportOptions((out,), quiet=grid.quiet))
    if failed := sum(run.state in ("failed", "unfinished") for run in ended):
        raise Failure(f"{failed} of {len(runs)} runs failed; repeat the command to try them again")


def report(options: ReportOptions) -> None:
    """Write a report, and print its tables."""
    from balnorm.bench.study.report import write_report

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


def pack(options: Pack) -> None:
    """Write the finished runs of a study as two files."""
    from balnorm.bench.study.packed import METRICS, STUDY, write_packed
    from balnorm.bench.study.results import read_results

    results, out = read_results([options.study]), options.out or options.study
    remark(*results.problems)
    packed = results.packed()
    if left := len(results.runs) - len(packed.runs):
        remark(f"{left} of {len(results.runs)} runs are not finished: left out")
    if not packed.runs:
        raise ValueError(f"there is no finished run in {options.study}")
    write_packed(packed, out)
    print(f"{len(packed.runs)} runs: {out / STUDY} and {out / METRICS}")


# --------------------------------------------------------------------------------------------------------------------
# Single runs
# --------------------------------------------------------------------------------------------------------------------


def train(options: Train, base: Recipe) -> None:
    """Train one network; ``base`` is the recipe as it was before options changed it."""
    from balnorm.bench.training import trainer
    from balnorm.bench.training.processor import check_precision

    recipe, where = options.recipe, options.where
    recipe.check()
    remark(*without_effect(base, [recipe]))
    check_precision(recipe.precision, where.device)
    trainer.train(
        recipe,
        where.out or Path("runs") / f"{recipe.name}-{recipe.norm}-{recipe.seed}",
        root=where.root,
        device=where.device,
        checkpoint_steps=where.checkpoint_steps,
        checkpoint_minutes=where.checkpoint_minutes,
        show=not where.quiet,
    )


def data(options: Data) -> int:
    """List data sets, fetch one, or check its files. Returns the exit code."""
    from balnorm.bench.data import SETS, check, download

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


def bench(options: Bench, vary: dict[str, list[Any]], base: Recipe) -> None:
    """Print the time and memory that training steps take; ``base`` is the recipe before options changed it."""
    recipe, bench_options = Recipe(**vars(options.recipe)), options.bench
    if not bench_options.norms or bench_options.rounds < 2:
        raise ValueError("bench needs a norm and two rounds at least")
    import platform

    import torch

    from balnorm.bench.profiling import bench as measured
    from balnorm.bench.study.grid import combinations
    from balnorm.bench.training.images import image_shape
    from balnorm.bench.training.processes import processes
    from balnorm.bench.training.processor import check_precision

    asked = [replace(recipe, norm=norm, **changed) for norm, changed in combinations(bench_options.norms, vary)]
    remark(*without_effect(base, asked))
    recipes = list(dict.fromkeys(each.replaced() for each in asked))
    for each in recipes:
        each.check()
    channels, size, classes = image_shape(recipe)
    with processes(bench_options.device) as team:
        device = team.device
    check_precision(recipe.precision, device.type)
    print(
        f"{recipe.model} {recipe.name}, batch {recipe.batch_size} of {channels}x{size}x{size}, {recipe.precision}, "
        f"forward and backward; {device}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{platform.platform()}; {bench_options.rounds} interleaved rounds"
    )
    print(measured(recipes, (channels, size, size), classes, bench_options.rounds, device))


def inspect(options: Inspect) -> None:
    """Print what a checkpoint holds, and the balance of every layer."""
    if options.images < 1:
        raise ValueError(f"images must be at least 1, got {options.images}")
    if options.figure is not None and options.figure.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"the figure must end in .svg, .png or .pdf, got {options.figure}")
    from balnorm.bench.export import test_batch
    from balnorm.diagnostics import balance_report

    saved = _loaded(options.checkpoint)
    recipe = saved.recipe
    state = saved.state if saved.state == "finished" else f"{saved.state} after {saved.epoch} of {recipe.epochs} epochs"
    count = sum(parameter.numel() for parameter in saved.model.parameters())
    say(f"{recipe.name} {recipe.norm} seed {recipe.seed}: {recipe.model}, {count:,} parameters, {state}\n")
    report = balance_report(saved.model, test_batch(saved, options.root, options.images))
    print(report)
    if options.figure is not None:
        picture = io.BytesIO()
        report.figure().savefig(picture, format=options.figure.suffix[1:])
        write_atomically(options.figure, picture.getvalue())
        print(f"\nfigure: {options.figure}")


def fold(options: Fold) -> None:
    """Write a trained network as plain convolutions."""
    from balnorm.bench.export import export_folded

    saved = _loaded(options.checkpoint)
    if saved.state != "finished":
        epochs = f"{saved.epoch} of {saved.recipe.epochs} epochs"
        what = "has diverged" if saved.state == "diverged" else "is not finished"
        remark(f"the run {what}; this is its network after {epochs}")
    export_folded(saved, options.out)
    print(options.out)


def _loaded(checkpoint: Path) -> Saved:
    """The network of a run. Says so if its last checkpoint was damaged."""
    from balnorm.bench.export import load_saved

    saved = load_saved(checkpoint)
    if saved.remark:
        remark(saved.remark)
    return saved
