"""A finished study in two files: ``study.json`` describes the runs, ``metrics.csv`` holds the results, bit for bit.

Numbers in ``metrics.csv`` are written as in JSON, so that each reads back as the same float; names are written as they
are. A run is a block of lines, one for each epoch; ``epoch_lr`` is the learning rate of an epoch, ``lr`` the recipe's.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, get_origin, get_type_hints

from balnorm.errors import one_line
from balnorm.training.config import Recipe
from balnorm.training.files import parse_json, write_atomically
from balnorm.training.run import Record, RunError, check_records, state_after

__all__ = ["METRICS", "STUDY", "Packed", "Records", "command_line", "read_packed", "write_packed"]

STUDY, METRICS = "study.json", "metrics.csv"
_FORMAT = 1
_FIELDS = [field.name for field in fields(Recipe)]
_KEYS = {"format", "runs", "recipe", "varies", "commands", "environments"}

Records = tuple[Record, ...]
"""A run's measurements by epoch."""


@dataclass(frozen=True)
class Packed:
    """The finished runs of a study, and their origin."""

    runs: dict[Recipe, Records]
    commands: tuple[str, ...]
    """The commands that started them."""
    environments: tuple[dict[str, Any], ...]
    """Each machine with its versions and the number of starts on it."""

    @property
    def varied(self) -> list[str]:
        """The fields that differ between runs, besides the norm and the seed."""
        return [name for name in _varies(self.runs) if name not in ("norm", "seed")]


def write_packed(packed: Packed, folder: Path) -> None:
    """Write the two files. An existing packed study is replaced only if none of its runs is lost."""
    if not packed.runs:
        raise RunError("there is no finished run to pack")
    if (folder / STUDY).exists() or (folder / METRICS).exists():
        lost = sum(packed.runs.get(recipe) != records for recipe, records in read_packed(folder).runs.items())
        if lost:
            raise RunError(f"{folder} holds a packed study with {lost} runs that are not in this one: choose another")
    varies = _varies(packed.runs)
    common = asdict(next(iter(packed.runs)))
    study = {
        "format": _FORMAT,
        "runs": len(packed.runs),
        "recipe": {name: value for name, value in common.items() if name not in varies},
        "varies": varies,
        "commands": packed.commands,
        "environments": [{k: _without_paths(v) for k, v in each.items()} for each in packed.environments],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / METRICS, _csv(packed.runs, list(varies)).encode())
    write_atomically(folder / STUDY, (_pretty(study) + "\n").encode())


def read_packed(folder: Path) -> Packed:
    """Read the packed study in a folder. Raises a :class:`RunError` that says in one sentence what is wrong."""
    path = folder / STUDY
    try:
        study = _check_study(parse_json(path.read_text(encoding="utf-8")))
        path = folder / METRICS
        runs = _read_csv(path, study["recipe"], list(study["varies"]))
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or one_line(error)  # an OSError would name the path again
        raise RunError(f"{path} cannot be read ({reason})") from error
    if len(runs) != study["runs"] or _varies(runs) != study["varies"]:
        raise RunError(f"{path} does not hold the {study['runs']} runs that {STUDY} beside it lists")
    return Packed(runs, tuple(study["commands"]), tuple(study["environments"]))


# --------------------------------------------------------------------------------------------------------------------
# study.json
# --------------------------------------------------------------------------------------------------------------------


def _varies(recipes: Iterable[Recipe]) -> dict[str, list[Any]]:
    """The values of every field that differs between recipes, in the order of the columns."""
    rows = [asdict(recipe) for recipe in recipes]
    values = {name: list({json.dumps(row[name]): row[name] for row in rows}.values()) for name in _FIELDS}
    others = {name: found for name, found in values.items() if name not in ("norm", "seed") and len(found) > 1}
    varies = {"norm": values["norm"], **others, "seed": values["seed"]}
    return {name: [list(v) if isinstance(v, tuple) else v for v in found] for name, found in varies.items()}


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
    if not {"norm", "seed"} <= varies.keys() <= set(_FIELDS):
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


_PATH = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[/\\]+(?:[^\s/\\]+[/\\]+)+")


def _without_paths(value: Any) -> Any:
    return _PATH.sub("", value) if isinstance(value, str) else value


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with one line for every value that fits, so that diffs are small."""
    text = json.dumps(value, ensure_ascii=False)
    if not indent or (isinstance(value, dict) and value) or (len(text) > 100 and isinstance(value, list | tuple)):
        inner = indent + "  "
        if isinstance(value, dict):
            items = [f"{inner}{json.dumps(name)}: {_pretty(each, inner)}" for name, each in value.items()]
            return "{\n" + ",\n".join(items) + f"\n{indent}}}"
        return "[\n" + ",\n".join(inner + _pretty(each, inner) for each in value) + f"\n{indent}]"
    return text


# --------------------------------------------------------------------------------------------------------------------
# metrics.csv
# --------------------------------------------------------------------------------------------------------------------


def _csv(runs: Mapping[Recipe, Records], varied: Sequence[str]) -> str:
    numbers = list(dict.fromkeys(name for records in runs.values() for record in records for name in record))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*varied, *(f"epoch_{name}" if name in _FIELDS else name for name in numbers)])
    for recipe, records in runs.items():
        row = asdict(recipe)
        setting = [row[name] if _is_text(name) else json.dumps(row[name]) for name in varied]
        for record in records:
            writer.writerow([*setting, *(json.dumps(record[name]) if name in record else "" for name in numbers)])
    return text.getvalue()


def _read_csv(path: Path, common: dict[str, Any], varied: list[str]) -> dict[Recipe, Records]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        numbers = [_number(column) for column in header[len(varied) :]]
        if header[: len(varied)] != varied or len(set(header)) < len(header) or "epoch" not in numbers:
            raise ValueError(f"its first line should begin with {','.join(varied)},epoch")
        blocks = list(_blocks(rows, varied, numbers))
    runs: dict[Recipe, Records] = {}
    for line, setting, records in blocks:
        try:
            recipe = Recipe.from_dict({**common, **setting})
        except ValueError as error:
            raise ValueError(f"line {line}: {error}") from error
        if recipe in runs:
            raise ValueError(f"line {line} starts a run for the second time")
        check_records(path, records, recipe.epochs, line)
        if state_after(records, recipe.epochs) == "unfinished":
            raise ValueError(f"the run at line {line} ends after epoch {len(records)} of {recipe.epochs}")
        runs[recipe] = tuple(records)
    return runs


def _blocks(
    rows: Iterator[list[str]], varied: list[str], numbers: list[str]
) -> Iterator[tuple[int, dict[str, Any], list[Record]]]:
    """For each run: its first line, its varied fields and its records."""
    block: tuple[int, dict[str, Any], list[Record]] | None = None
    before: list[str] = []
    for line, cells in enumerate(rows, 2):
        if len(cells) != len(varied) + len(numbers):
            raise ValueError(f"line {line} has {len(cells)} cells instead of {len(varied) + len(numbers)}")
        try:
            record = {name: parse_json(cell) for name, cell in zip(numbers, cells[len(varied) :], strict=True) if cell}
            if block is None or cells[: len(varied)] != before or record.get("epoch") == 1:
                if block is not None:
                    yield block
                before = cells[: len(varied)]
                setting = zip(varied, before, strict=True)
                block = line, {name: cell if _is_text(name) else parse_json(cell) for name, cell in setting}, []
        except ValueError:
            raise ValueError(f"line {line} has a cell that is not a number") from None
        block[2].append(record)
    if block is not None:
        yield block


def _number(column: str) -> str:
    name = column.removeprefix("epoch_")
    return name if name in _FIELDS else column


@functools.cache
def _is_text(name: str) -> bool:
    """Whether a recipe's field holds text, which is written without quotes."""
    kind = get_type_hints(Recipe)[name]
    return kind is str or get_origin(kind) is Literal
