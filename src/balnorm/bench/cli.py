"""The command line: from words to options and exit codes. What the commands do is in ``commands``."""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import tyro

from balnorm.bench.commands import (
    Bench,
    BenchOptions,
    Compare,
    Data,
    Fold,
    Grid,
    Inspect,
    Pack,
    ReportOptions,
    StudyRecipe,
    Train,
    Where,
    bench,
    compare,
    data,
    experiment_options,
    fold,
    inspect,
    pack,
    report,
    train,
)  # fmt: skip
from balnorm.bench.console import patient_output, remark
from balnorm.bench.errors import Failure, Stopped, sentence
from balnorm.bench.norms import NORMS
from balnorm.bench.recipes import RECIPES, get_recipe
from balnorm.bench.training.config import NormName, Recipe
from balnorm.bench.training.experiment import Experiment, load_function

__all__ = ["main"]

_USAGE = """usage: balnorm COMMAND [options]

  compare     train several normalisations over several seeds, and report
  train       train one network
  report      write figures, tables and a web page for a study, at any time
  pack        write a study's finished runs as two files, to publish or archive
  data        list, download and check data sets
  bench       measure the speed and memory of normalisations on this machine
  inspect     show how well balanced a trained network's layers are
  fold        write a trained network as plain convolutions
  completion  print a completion script for bash, zsh or fish

Repeat a command to resume what was stopped. `balnorm COMMAND --help` shows options and examples.

recipes:
{recipes}

examples:
  balnorm compare digits --jobs 2                               a few minutes, nothing to download
  balnorm compare cifar10-desk --norms balnorm batchnorm --seeds 5 --out studies/x --root data
  balnorm compare experiment.py:train --norms balnorm batchnorm  a training function of your own
  balnorm report studies/x
  balnorm train digits --seed 3 --out runs/a                    half a minute
  balnorm fold runs/a --out digits.onnx
  balnorm data get cifar10 --root data                          162 MB; resumes broken downloads

exit codes: 0 done, 1 failed, 2 a mistake in the command, 130 Ctrl-C
"""

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
            return _fail(f"the output could not be written ({sentence(out.error)})", 1)
    return code


def _dispatch(given: list[str]) -> int:
    if (longest := max(map(len, given), default=0)) > 10_000:  # messages would repeat it
        return _fail(f"an argument has {longest:,} characters: 10,000 are enough for any name or list", 2)
    if not given or given[0] in ("-h", "--help"):
        return _usage(asked=bool(given))
    name, *rest = given
    if name == "train" and (not rest or rest[0] in ("-h", "--help")):  # its options depend on the recipe
        return _usage(asked=bool(rest))
    if name not in _COMMANDS:
        near = difflib.get_close_matches(name, _COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(_COMMANDS)}."
        return _fail(f"there is no command {name!r}: {hint} `balnorm --help` shows examples", 2)
    try:
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
        if not isinstance(error, MemoryError) and not any(sign in text for sign in _NO_MEMORY):
            raise
        return _fail("there is not enough memory: a smaller batch, width or image size needs less", 1)
    except SystemExit as stop:  # tyro has explained the mistake
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return _fail("stopped: repeat the command to resume from what was saved", 130)


def _usage(asked: bool) -> int:
    recipes = "\n".join(f"  {name:22}{_first_line(build.__doc__)}" for name, build in RECIPES.items())
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
    """The recipe's name (digits by default) and the remaining arguments."""
    named = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if named else ("digits", arguments)


def _compare(arguments: list[str]) -> None:
    name, rest = _recipe_and_rest(arguments)
    if own := re.fullmatch(r"(.+\.py)(?::(\w+))?", name):
        file, function = Path(own[1]), load_function(Path(own[1]), own[2] or "train")
        options: Any = _parse(experiment_options(function), rest, f"compare {name}", function.__doc__)
        vary = _varied(options.recipe, options.grid.vary, vars(options.recipe), f"an option of {function.__name__}")
        own_fields = {"experiment": f"{file.name}:{function.__name__}", "metric": options.grid.metric, "norm": ""}
        experiment = Experiment.from_dict({**own_fields, "seed": options.grid.seed, **vars(options.recipe)})
        compare(experiment, options.grid, vary, file)
        return
    base = get_recipe(name)
    options = _parse(
        Compare, rest, f"compare {name}", RECIPES[name].__doc__, Compare(StudyRecipe(**vars(base)), Grid())
    )
    allowed = vars(base).keys() - {"name", "norm", "seed"}
    vary = _varied(options.recipe, options.grid.vary, allowed, "a field of the recipe")
    compare(Recipe(**vars(options.recipe)), options.grid, vary, base)


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


def _report(arguments: list[str]) -> None:
    about = "Write figures, tables and a web page for a study (running, finished or packed)."
    report(_parse(ReportOptions, arguments, "report", about))


def _pack(arguments: list[str]) -> None:
    about = (
        "Write the finished runs of a study as two files, study.json and metrics.csv, which need no folder of runs. "
        "`report` reads them, and `compare` treats their runs as finished. Pack again to add new runs."
    )
    pack(_parse(Pack, arguments, "pack", about))


def _train(arguments: list[str]) -> None:
    name, *rest = arguments
    base = get_recipe(name)
    train(_parse(Train, rest, f"train {name}", RECIPES[name].__doc__, Train(base, Where())), base)


def _data(arguments: list[str]) -> int:
    return data(_parse(Data, arguments, "data", Data.__doc__))


def _bench(arguments: list[str]) -> None:
    name, rest = _recipe_and_rest(arguments)
    recipe = get_recipe(name)
    default = Bench(StudyRecipe(**vars(recipe)), BenchOptions())
    about = "Measure the time and memory of training steps of a recipe's network, interleaving the norms."
    options = _parse(Bench, rest, f"bench {name}", about, default)
    norm_options = NORMS["balnorm"].options
    vary = _varied(recipe, options.bench.vary, norm_options, "an option of the norms", "mass=channel,position")
    bench(options, vary, recipe)


def _inspect(arguments: list[str]) -> None:
    about = "Describe a run's checkpoint, and measure the balance of every layer on a batch of test images."
    inspect(_parse(Inspect, arguments, "inspect", about))


def _fold(arguments: list[str]) -> None:
    about = "Write a trained network with its balanced layers folded to plain convolutions."
    fold(_parse(Fold, arguments, "fold", about))


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


_NO_MEMORY = ("out of memory", "not enough memory", "allocate memory")
"""What torch's errors say, on GPUs and on CPUs."""
_PRINTING = {"data", "bench", "inspect", "completion"}
"""The commands whose only result is what they print."""


def _fail(error: Exception | str, code: int) -> int:
    remark(str(error))
    return code


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0].split(" (")[0].rstrip(".")
