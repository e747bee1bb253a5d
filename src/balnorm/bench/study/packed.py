"""A finished study in two files: ``study.json`` describes the runs, ``metrics.csv`` holds the results, bit for bit.

Numbers in ``metrics.csv`` are written as in JSON, so that each reads back as the same float; names are written as they
are. A run is a block of lines, one for each epoch; ``epoch_lr`` is the learning rate of an epoch, ``lr`` the recipe's.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, get_origin, get_type_hints

from balnorm.bench.errors import many, one_line
from balnorm.bench.files import parse_json, regular, written
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.experiment import Config, read_config
from balnorm.bench.training.run import Record, Records, RunError, check_records, state_after

__all__ = ["METRICS", "STUDY", "Packed", "command_line", "read_packed", "varied_fields", "write_packed"]

STUDY, METRICS = "study.json", "metrics.csv"
_FORMAT = 1
_FIELDS = [field.name for field in fields(Recipe)]
_PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[/\\]+(?:[^\s/\\]+[/\\]+)+")
_KEYS = {"format", "runs", "recipe", "varies", "commands", "environments"}


@dataclass(frozen=True)
class Packed:
    """The finished runs of a study, and their origin."""

    runs: dict[Config, Records]
    commands: tuple[str, ...]
    """The commands that started them."""
    environments: tuple[dict[str, Any], ...]
    """Each machine with its versions and the number of starts on it."""


def write_packed(packed: Packed, folder: Path) -> None:
    """Write the two files. An existing packed study is replaced only if none of its runs is lost."""
    if not packed.runs:
        raise RunError("there is no finished run to pack")
    if (folder / STUDY).exists() or (folder / METRICS).exists():
        there = read_packed(folder).runs
        if lost := sum(packed.runs.get(recipe) != records for recipe, records in there.items()):
            lacks = f"of which this one lacks {many(lost, 'run')}"
            raise RunError(f"{folder} holds a packed study, {lacks}: choose another folder")
    if len({tuple(config.fields) for config in packed.runs}) > 1:
        raise RunError("runs of different experiments cannot be packed together")
    varies = _varies(packed.runs)
    common = next(iter(packed.runs)).fields
    study = {
        "format": _FORMAT,
        "runs": len(packed.runs),
        "recipe": {name: value for name, value in common.items() if name not in varies},
        "varies": varies,
        "commands": packed.commands,
        "environments": [
            {name: _PATH.sub("", v) if isinstance(v, str) else v for name, v in each.items()}
            for each in packed.environments
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Names and commands may not be UTF-8. JSON escapes the bytes that are not; CSV cannot.
    metrics = _csv(packed.runs, list(varies)).encode(errors="surrogatepass")
    description = (_pretty(study) + "\n").encode(errors="backslashreplace")
    # The two belong together: neither is replaced until both are on the disk.
    with written(folder / METRICS, metrics) as new_metrics, written(folder / STUDY, description) as new_study:
        os.replace(new_metrics, folder / METRICS)
        os.replace(new_study, folder / STUDY)


def read_packed(folder: Path) -> Packed:
    """Read the packed study in a folder. Raises a :class:`RunError` that says in one sentence what is wrong."""
    path = folder / STUDY
    try:
        study = _check_study(parse_json(regular(path).read_text(encoding="utf-8")))
        path = folder / METRICS
        runs = _read_csv(path, study["recipe"], list(study["varies"]))
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or one_line(error)  # an OSError would name the path again
        raise RunError(f"{path} cannot be read ({reason})") from error
    if len(runs) != study["runs"] or _varies(runs) != study["varies"]:
        raise RunError(f"{path} does not hold the {many(study['runs'], 'run')} that {STUDY} beside it lists")
    return Packed(runs, tuple(study["commands"]), tuple(study["environments"]))


# --------------------------------------------------------------------------------------------------------------------
# study.json
# --------------------------------------------------------------------------------------------------------------------


def varied_fields(recipes: Iterable[Config]) -> list[str]:
    """The fields that differ between recipes, besides the norm and the seed."""
    return list(_varies(recipes))[1:-1]


def _varies(recipes: Iterable[Config]) -> dict[str, list[Any]]:
    """The values, as in JSON, of the norm, of every other field that differs, and of the seed: the first columns."""
    rows = [recipe.fields for recipe in recipes]
    names = dict.fromkeys(["norm", "seed", *(name for row in rows for name in row)])
    texts = {name: dict.fromkeys(json.dumps(row.get(name)) for row in rows) for name in names}
    others = [name for name in names if name not in ("norm", "seed") and len(texts[name]) > 1]
    return {name: [json.loads(text) for text in texts[name]] for name in ("norm", *others, "seed")}


def _check_study(study: Any) -> dict[str, Any]:
    if not isinstance(study, dict) or "format" not in study:
        raise ValueError("it is not a packed study")
    if study["format"] != _FORMAT:
        raise ValueError(f"its format is {study['format']!r}; this version reads {_FORMAT}")
    if study.keys() != _KEYS:
        raise ValueError(f"it should have {', '.join(sorted(_KEYS))}")
    recipe, varies = study["recipe"], study["varies"]
    if not isinstance(recipe, dict) or not isinstance(varies, dict) or recipe.keys() & varies.keys():
        raise ValueError("a field either varies or belongs to the recipe")
    fields = {*recipe, *varies}
    if not {"norm", "seed"} <= varies.keys() <= (fields if "experiment" in fields else set(_FIELDS)):
        raise ValueError("varies should name norm, seed and other fields of a recipe")
    if not isinstance(study["commands"], list) or not all(isinstance(each, str) for each in study["commands"]):
        raise ValueError("commands should be a list of texts")
    environments = study["environments"]
    if not isinstance(environments, list) or not all(
        isinstance(each, dict) and type(each.get("starts")) is int and each["starts"] > 0 for each in environments
    ):
        raise ValueError("environments should be a list of machines with their starts")
    return study


def command_line(words: Sequence[str]) -> str:
    """A command as typed on another machine: absolute paths are reduced to their last part."""
    return shlex.join(["balnorm", *map(_without_folder, words[1:])])


def _without_folder(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    windows, posix = PureWindowsPath(value), PurePosixPath(value)
    if windows.is_absolute() or posix.is_absolute() or value.startswith("~") or ".." in windows.parts:
        value = windows.name
    return option + equals + value


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with one line for every value that fits, so that diffs are small."""
    text, inner = json.dumps(value, ensure_ascii=False), indent + "  "
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(name)}: {_pretty(each, inner)}" for name, each in value.items()]
    elif isinstance(value, list | tuple) and len(text) > 100:
        items = [_pretty(each, inner) for each in value]
    else:
        return text
    return f"{text[0]}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{text[-1]}"


# --------------------------------------------------------------------------------------------------------------------
# metrics.csv
# --------------------------------------------------------------------------------------------------------------------


def _csv(runs: Mapping[Config, Records], varied: Sequence[str]) -> str:
    numbers = list(dict.fromkeys(name for records in runs.values() for record in records for name in record))
    text, all_fields = io.StringIO(), next(iter(runs)).fields
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*varied, *(f"epoch_{name}" if name in all_fields else name for name in numbers)])
    for recipe, records in runs.items():
        row = recipe.fields
        setting = [row[name] if _is_text(name, row) else json.dumps(row[name]) for name in varied]
        for record in records:
            writer.writerow([*setting, *(json.dumps(record[name]) if name in record else "" for name in numbers)])
    return text.getvalue()


def _read_csv(path: Path, common: dict[str, Any], varied: list[str]) -> dict[Config, Records]:
    blocks: list[tuple[int, list[str], list[Record]]] = []  # of each run: its first line, varied fields and records
    with regular(path).open(encoding="utf-8", errors="surrogatepass", newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        all_fields = {*common, *varied}
        names = {f"epoch_{name}": name for name in all_fields}  # the columns of numbers that share a name with a field
        numbers = [names.get(column, column) for column in header[len(varied) :]]
        if header[: len(varied)] != varied or len(set(header)) < len(header) or "epoch" not in numbers:
            raise ValueError(f"its first line should begin with {','.join(varied)},epoch")
        for line, cells in enumerate(rows, 2):
            if len(cells) != len(header):
                raise ValueError(f"line {line} has {len(cells)} cells instead of {len(header)}")
            setting, values = cells[: len(varied)], zip(numbers, cells[len(varied) :], strict=True)
            record = {name: _parsed(cell, line) for name, cell in values if cell}
            if not blocks or blocks[-1][1] != setting or record.get("epoch") == 1:
                blocks.append((line, setting, []))
            blocks[-1][2].append(record)
    runs: dict[Config, Records] = {}
    for line, setting, records in blocks:
        own = {
            name: cell if _is_text(name, all_fields) else _parsed(cell, line)
            for name, cell in zip(varied, setting, strict=True)
        }
        try:
            recipe = read_config({**common, **own})
        except ValueError as error:
            raise ValueError(f"line {line}: {error}") from error
        if recipe in runs:
            raise ValueError(f"line {line} starts a run for the second time")
        check_records(path, records, recipe.epochs, line)
        if state_after(records, recipe.epochs) == "unfinished":
            planned = f" of {recipe.epochs}" if recipe.epochs else ", which is not its last"
            raise ValueError(f"the run at line {line} ends after epoch {len(records)}{planned}")
        runs[recipe] = tuple(records)
    return runs


def _parsed(cell: str, line: int) -> Any:
    try:
        return parse_json(cell)
    except ValueError:
        raise ValueError(f"line {line} has a cell that is not a number") from None


def _is_text(name: str, all_fields: Collection[str]) -> bool:
    """Whether a field holds text, which is written without quotes: of an experiment's, only the norm surely does."""
    return name == "norm" if "experiment" in all_fields else name in _texts()


@functools.cache
def _texts() -> set[str]:
    return {name for name, kind in get_type_hints(Recipe).items() if kind is str or get_origin(kind) is Literal}
