"""The command line: parsing only. It imports torch when there is something to do, so that help comes at once."""

from __future__ import annotations

import contextlib
import difflib
import errno
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import tyro

from balnorm.console import patient_output
from balnorm.errors import Failure, Stopped
from balnorm.recipes import RECIPES, get_recipe
from balnorm.training.config import NormName, Recipe, without_effect
from balnorm.training.files import write_atomically

if TYPE_CHECKING:
    from balnorm.export import Saved

__all__ = ["main"]

_USAGE = """usage: balnorm COMMAND [options]

  compare   train several normalisations over several seeds, and report
  train     train one network
  report    figures, tables and a page from the runs of a study, at any time
  pack      write a study's finished runs as two files, to publish or to keep
  data      list, get and check data sets
  bench     speed and memory of normalisations on this machine
  inspect   what a trained network's layers do to images
  fold      write a trained network as plain convolutions
  completion  for bash, zsh or fish

The same command again goes on with what was stopped. `balnorm COMMAND --help` shows options and examples.

recipes:
{recipes}

examples:
  balnorm compare digits --jobs 2                               some minutes, nothing to download
  balnorm compare cifar10-desk --norms balnorm batchnorm --seeds 5 --out studies/x --root data
  balnorm report studies/x
  balnorm train digits --norm batchnorm --seed 3 --out runs/a   half a minute
  balnorm fold runs/a --out digits.onnx
  balnorm data get cifar10 --root data                          162 MB; goes on where it broke off

exit codes: 0 done, 1 failed, 2 a mistake in the command, 130 Ctrl-C
"""

_EXAMPLES = {
    "compare": """
  balnorm compare {recipe} --norms balnorm batchnorm groupnorm --seeds 10 --out studies/x --jobs 2
  balnorm compare {recipe} --vary lr=0.01,0.1,1 batch_size=32,128 --dry-run
  balnorm compare {recipe} --ray local --threads 2
  balnorm compare {recipe} --ray 10.0.0.1:6379 --gpus 1 --out /shared/x --root /shared/data""",
    "train": """
  balnorm train {recipe} --norm batchnorm --seed 3 --out runs/a
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
  balnorm bench imagenet-resnet50 --batch-size 4 --rounds 5""",
    "inspect": """
  balnorm inspect runs/a
  balnorm inspect studies/digits/runs/balnorm-seed0/checkpoint.pt --figure balance.svg""",
    "fold": """
  balnorm fold runs/a --out digits.onnx
  balnorm fold runs/a/checkpoint.pt --out digits.pt2""",
}

_Options = TypeVar("_Options")


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


@dataclass(frozen=True)
class ReportOptions:
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Of studies, packed or still running, or of runs."""
    out: Path | None = None
    """Where to write; None is the folder report in that of the study, or here if there are several."""
    title: str | None = None
    """Of the page; None takes the recipes' names."""
    baseline: NormName = "batchnorm"
    """What the others are compared with."""
    reach: tuple[float, ...] = ()
    """Test accuracies, such as 0.9, to tell the epochs until which; some near the best if none are given."""
    formats: tuple[Literal["svg", "png", "pdf"], ...] = ("svg", "png", "pdf")
    """Of the figures' files."""
    quiet: bool = False
    """Print the path of the page and nothing else."""


@dataclass(frozen=True)
class Pack:
    study: Annotated[Path, tyro.conf.Positional]
    """The folder of a study."""
    out: Path | None = None
    """Where to write study.json and metrics.csv; None is the study's own folder."""


@dataclass(frozen=True)
class BenchOptions:
    norms: tuple[NormName, ...] = ("none", "batchnorm", "groupnorm", "balnorm", "balnorm-position")
    """The first is what the others are compared with."""
    rounds: int = 11
    """In each of which every norm has one training step."""
    device: str | None = None
    """Such as cuda:1; None takes a GPU if there is one."""


@dataclass(frozen=True)
class Bench:
    recipe: StudyRecipe
    bench: BenchOptions


@dataclass(frozen=True)
class Inspect:
    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Of a run, or its folder."""
    root: Path = Path("data")
    """The folder that the data is in: the layers are shown a batch of its test images."""
    images: int = 64
    """How many of them."""
    figure: Path | None = None
    """Draw the balance of every layer into this file (svg, png or pdf)."""


@dataclass(frozen=True)
class Fold:
    checkpoint: Annotated[Path, tyro.conf.Positional]
    """Of a run, or its folder."""
    out: Path
    """The file to write: .pt for a state dict, .pt2 for a torch.export program, .onnx for ONNX."""


@dataclass(frozen=True)
class Completion:
    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]


def main(arguments: list[str] | None = None) -> int:
    """Run a command. The exit code is 0, or 1 if it failed, 2 for a mistake in the command, 130 after Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    with patient_output() as out:
        code = _dispatch(given)
        out.flush()
        lost = out.error is not None and out.error.errno != errno.EPIPE  # whoever closes a pipe has read enough
        if lost and code == 0 and (given[0] in _PRINTING or {"-h", "--help"} & set(given)):
            return _fail(f"the output could not be written ({_sentence(out.error)})", 1)
    return code


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help"):
        return _usage(asked=bool(given))
    name, *rest = given
    if name == "train" and (not rest or rest[0] in ("-h", "--help")):  # its options are a recipe's
        return _usage(asked=bool(rest))
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(_COMMANDS)}"
        return _fail(f"there is no command {name!r}: {hint} `balnorm --help` shows examples", 2)
    try:
        return _COMMANDS[name](rest)
    except ValueError as error:
        return _fail(error, 2)
    except (Failure, OSError) as error:
        return _fail(_sentence(error), 1)
    except Stopped as stop:
        return _fail(stop, 130) if os.environ.get("RANK", "0") == "0" else 130
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
            raise
        return _fail("there is not enough memory: a smaller batch, width or image size needs less", 1)
    except SystemExit as stop:  # tyro has said what is wrong
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _fail("stopped: the same command goes on from what was saved", 130)


def _usage(asked: bool) -> int:
    recipes = "\n".join(f"  {name:22}{_first_sentence(build.__doc__)}" for name, build in RECIPES.items())
    print(_USAGE.format(recipes=recipes), end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


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
    """A recipe's name, digits if there is none, and the rest of the arguments."""
    named = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if named else ("digits", arguments)


# --------------------------------------------------------------------------------------------------------------------
# Studies
# --------------------------------------------------------------------------------------------------------------------


def _compare(arguments: list[str]) -> int:
    name, rest = _recipe_and_rest(arguments)
    recipe = get_recipe(name)
    default = Compare(StudyRecipe(**{**vars(recipe), "norm": "balnorm"}), Grid())

    def parse(arguments: list[str]) -> Compare:
        return _parse(Compare, arguments, f"compare {name}", RECIPES[name].__doc__, default)

    options = parse(rest)
    vary = {}
    for text in options.grid.vary:
        field, _, values = text.partition("=")
        field = field.replace("-", "_")
        if not values or field not in vars(recipe) or field in ("name", "norm", "seed"):
            raise ValueError(f"--vary takes a field of the recipe and its values, as lr=0.01,0.1,1, not {text!r}")
        if field in vary:
            raise ValueError(f"--vary has {field} twice: give all of its values at once, as lr=0.01,0.1,1")
        parsed = [parse(_as_option(field, value, getattr(recipe, field))) for value in values.split(",")]
        vary[field] = [getattr(each.recipe, field) for each in parsed]
    return _run(Recipe(**vars(options.recipe)), options.grid, vary, recipe)


def _as_option(field: str, value: str, default: Any) -> list[str]:
    if isinstance(default, bool):
        if value not in ("True", "False"):
            raise ValueError(f"{field} is True or False, not {value!r}")
        return [f"--{field}" if value == "True" else f"--no-{field}"]
    return [f"--{field}", value]


def _run(recipe: Recipe, grid: Grid, vary: dict[str, list[Any]], base: Recipe) -> int:
    from balnorm.study.executors import Executor, LocalExecutor, RayExecutor, Resources
    from balnorm.study.grid import plan
    from balnorm.study.runner import cores, dry_run, run_study

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
    out = grid.out or Path("studies") / recipe.name
    threads = grid.threads or (1 if grid.ray else max(1, cores() // grid.jobs))
    resources = Resources(grid.root.absolute(), threads, grid.device)
    runs = plan(recipe, out, grid.norms, grid.seeds, vary)
    _remark(*without_effect(base, [run.recipe for run in runs]))
    if grid.dry_run:
        print(dry_run(runs, grid.jobs, resources))
        return 0
    executor: Executor
    executor = RayExecutor(grid.ray, resources, grid.gpus) if grid.ray else LocalExecutor(grid.jobs, resources)
    with contextlib.closing(executor):
        ended = run_study(runs, executor, show=not grid.quiet)
    code = _write_report(ReportOptions((out,), quiet=grid.quiet))
    failed = sum(run.state in ("failed", "unfinished") for run in ended)
    return _fail(f"{failed} of {len(runs)} runs failed; the same command tries them again", 1) if failed else code


def _report(arguments: list[str]) -> int:
    about = "Figures, tables and one page from the runs of a study, also while it runs, or from a packed study."
    return _write_report(_parse(ReportOptions, arguments, "report", about))


def _write_report(options: ReportOptions) -> int:
    from balnorm.study.report import write_report

    if not options.folders:
        raise ValueError("which folder? that of a study or of a run, as in `balnorm report studies/digits`")
    out = options.out or (options.folders[0] / "report" if len(options.folders) == 1 else Path("report"))
    try:
        report = write_report(
            options.folders,
            out,
            title=options.title,
            baseline=options.baseline,
            reach=options.reach,
            formats=options.formats,
        )
    except OSError as error:
        return _fail(f"the report could not be written ({_sentence(error)})", 1)
    if not options.quiet:
        print(f"\n{report}\n")
    _remark(*report.problems)
    print(report.page if options.quiet else f"report: {report.page}")
    return 0


def _pack(arguments: list[str]) -> int:
    about = (
        "Write the finished runs of a study as two files, study.json and metrics.csv, which need no folder of runs. "
        "`report` reads them, and `compare` knows their runs as finished; another `pack` adds new runs to them."
    )
    options = _parse(Pack, arguments, "pack", about)
    from balnorm.study.packed import METRICS, STUDY, write_packed
    from balnorm.study.results import read_results

    results, out = read_results([options.study]), options.out or options.study
    _remark(*results.problems)
    packed = results.packed()
    if left := len(results.runs) - len(packed.runs):
        _remark(f"{left} of {len(results.runs)} runs are not finished: left out")
    if not packed.runs:
        raise ValueError(f"there is no finished run in {options.study}")
    write_packed(packed, out)
    print(f"{len(packed.runs)} runs: {out / STUDY} and {out / METRICS}")
    return 0


# --------------------------------------------------------------------------------------------------------------------
# Single runs
# --------------------------------------------------------------------------------------------------------------------


def _train(arguments: list[str]) -> int:
    name, *rest = arguments
    default = Train(get_recipe(name), Where())
    options = _parse(Train, rest, f"train {name}", RECIPES[name].__doc__, default)
    recipe, where = options.recipe, options.where
    recipe.check()
    _remark(*without_effect(get_recipe(name), [recipe]))
    from balnorm.training.processor import check_precision
    from balnorm.training.trainer import train

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
    return 0


def _data(arguments: list[str]) -> int:
    options = _parse(Data, arguments, "data", Data.__doc__)
    from balnorm.data import SETS, check, download

    if options.action != "list" and options.name is None:
        raise ValueError(f"which data set? one of {', '.join(SETS)}, as in `balnorm data {options.action} cifar10`")
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
    return 0


def _bench(arguments: list[str]) -> int:
    name, rest = _recipe_and_rest(arguments)
    default = Bench(StudyRecipe(**{**vars(get_recipe(name)), "norm": "balnorm"}), BenchOptions())
    about = "Time and memory of training steps of a recipe's network, in one interleaved run."
    options = _parse(Bench, rest, f"bench {name}", about, default)
    recipe, bench_options = Recipe(**vars(options.recipe)), options.bench
    recipe.check()
    if not bench_options.norms or bench_options.rounds < 2:
        raise ValueError("bench needs a norm and two rounds at least")
    import platform

    import torch

    from balnorm.profiling import bench
    from balnorm.training.images import image_shape
    from balnorm.training.processes import processes
    from balnorm.training.processor import check_precision

    (channels, size, _), classes = image_shape(recipe)
    with processes(bench_options.device) as team:
        device = team.device
    check_precision(recipe.precision, device.type)
    print(
        f"{recipe.model} {recipe.name}, batch {recipe.batch_size} of {channels}x{size}x{size}, {recipe.precision}, "
        f"forward and backward; {device}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"{platform.platform()}; {bench_options.rounds} interleaved rounds"
    )
    print(bench(recipe, bench_options.norms, (channels, size, size), classes, bench_options.rounds, device))
    return 0


def _inspect(arguments: list[str]) -> int:
    about = "What a run's checkpoint holds, and the balance of every layer on a batch of test images."
    options = _parse(Inspect, arguments, "inspect", about)
    if options.images < 1:
        raise ValueError(f"images must be at least 1, got {options.images}")
    if options.figure is not None and options.figure.suffix not in (".svg", ".png", ".pdf"):
        raise ValueError(f"the figure must end in .svg, .png or .pdf, got {options.figure}")
    from balnorm.diagnostics import balance_report
    from balnorm.export import test_batch

    saved = _loaded(options.checkpoint)
    recipe = saved.recipe
    state = saved.state if saved.state == "finished" else f"{saved.state} after {saved.epoch} of {recipe.epochs} epochs"
    count = sum(parameter.numel() for parameter in saved.model.parameters())
    print(f"{recipe.name} {recipe.norm} seed {recipe.seed}: {recipe.model}, {count:,} parameters, {state}\n")
    report = balance_report(saved.model, test_batch(saved, options.root, options.images))
    print(report)
    if options.figure is not None:
        picture = io.BytesIO()
        report.figure().savefig(picture, format=options.figure.suffix[1:])
        write_atomically(options.figure, picture.getvalue())
        print(f"\nfigure: {options.figure}")
    return 0


def _loaded(checkpoint: Path) -> Saved:
    """The network of a run, with a word where its last checkpoint was damaged."""
    from balnorm.export import load_saved

    saved = load_saved(checkpoint)
    if saved.remark:
        _remark(saved.remark)
    return saved


def _fold(arguments: list[str]) -> int:
    about = "Write a trained network with its balanced layers folded to plain convolutions."
    options = _parse(Fold, arguments, "fold", about)
    from balnorm.export import export_folded

    saved = _loaded(options.checkpoint)
    if saved.state != "finished":
        epochs = f"{saved.epoch} of {saved.recipe.epochs} epochs"
        what = "has diverged" if saved.state == "diverged" else "is not finished"
        _remark(f"the run {what}; this is its network after {epochs}")
    export_folded(saved, options.out)
    print(options.out)
    return 0


# --------------------------------------------------------------------------------------------------------------------
# Completion
# --------------------------------------------------------------------------------------------------------------------


def _completion(arguments: list[str]) -> int:
    about = "Print a script for your shell: `source <(balnorm completion bash)`, or put it where your shell looks."
    shell = _parse(Completion, arguments, "completion", about).shell
    words = {name: " ".join(_words(name)) for name in _COMMANDS}
    commands = " ".join(_COMMANDS)
    if shell == "fish":
        lines = [f"complete -c balnorm -f -n __fish_use_subcommand -a '{commands}'"]
        lines += [
            f"complete -c balnorm -n '__fish_seen_subcommand_from {name}' -a '{words[name]}'" for name in _COMMANDS
        ]
        print("\n".join(lines))
        return 0
    cases = "\n".join(f"    {name}) words='{words[name]}' ;;" for name in _COMMANDS)
    start = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    print(f"""{start}_balnorm() {{
  local words='{commands}'
  [ "$COMP_CWORD" -gt 1 ] && case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _balnorm balnorm""")
    return 0


def _words(command: str) -> list[str]:
    """What may follow a command: recipes, norms, options."""
    options: dict[str, Sequence[type]] = {
        "compare": (StudyRecipe, Grid),
        "train": (Recipe, Where),
        "bench": (StudyRecipe, BenchOptions),
        "report": (ReportOptions,),
        "pack": (Pack,),
        "data": (Data,),
        "inspect": (Inspect,),
        "fold": (Fold,),
    }
    hidden = {"folders", "study", "checkpoint", "action", *(["norm"] if command in ("compare", "bench") else [])}
    hidden |= {"name"} if command == "data" else set()
    names = [field.name for each in options.get(command, ()) for field in fields(each) if field.name not in hidden]
    words = [f"--{name.replace('_', '-')}" for name in names]
    if command in ("compare", "train", "bench"):
        words += [*RECIPES, *get_args(NormName)]
    return words + {"data": ["list", "get", "check"], "completion": ["bash", "zsh", "fish"]}.get(command, [])


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
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


_PRINTING = {"data", "bench", "inspect", "completion"}
"""The commands that have done nothing if what they print does not arrive."""


def _fail(error: Exception | str, code: int) -> int:
    _remark(str(error))
    return code


def _remark(*sentences: str) -> None:
    for sentence in sentences:
        print(f"balnorm: {sentence}", file=sys.stderr)


def _sentence(error: BaseException | None) -> str:
    """What an error says, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _first_sentence(text: str | None) -> str:
    return (text or "").strip().splitlines()[0].split(" (")[0].rstrip(".")
