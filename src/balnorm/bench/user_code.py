"""The user's code: how a command finds a function by its name, and the model that the function builds."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from balnorm.bench.errors import Failure, one_line, sentence

__all__ = ["OwnModel", "load_function", "load_model", "names_a_function", "reason"]


class OwnModel(NamedTuple):
    """The model that a user's function built."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    """Its arguments: of the shapes that the command gives, or else those that the function returned with it."""


def names_a_function(text: str) -> bool:
    """Whether this is a file and a function, or a module and a function, as in ``package.module:build``."""
    return re.fullmatch(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*", text) is not None


def load_function(place: Path | str, name: str) -> Callable[..., Any]:
    """A function (or a class) of a Python file, or of a module that Python would find from the current folder.

    A ValueError says that there is no such thing; a :class:`~balnorm.bench.errors.Failure` that the import failed.
    """
    module = _module_of(Path(place)) if str(place).endswith(".py") else _imported(str(place))
    own: dict[str, Callable[..., Any]] = {
        each: value
        for each, value in vars(module).items()
        if callable(value) and hasattr(value, "__name__") and each[0] != "_"
    }
    function = own.get(name)
    if function is None:
        there = [each for each, value in own.items() if getattr(value, "__module__", None) == module.__name__]
        listed = ", ".join(there[:10]) + (", ..." if len(there) > 10 else "")
        raise ValueError(f"{place} has no function {name!r}; it has {listed or 'none'}")
    return function


def load_model(target: str, shapes: Sequence[str] = ()) -> OwnModel:
    """Call a user's function, such as ``package.module:build``, which takes no arguments, for its model.

    It returns a module, or a module and its example input (a tensor or a tuple of tensors). ``shapes`` replace
    the latter: one for each argument, as ``"1,3,224,224"``, filled with random numbers from 0 to 1.
    """
    inputs = tuple(torch.rand(_shape(text)) for text in shapes)  # first: a mistake in it needs no model
    place, _, name = target.rpartition(":")
    function = load_function(place, name)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{target} must work without arguments ({error}): give each of them a default") from None
    except ValueError:  # some functions have no signature
        pass
    try:
        built = function()
    except Exception as error:  # the code is the user's: anything can happen
        raise Failure(f"{target} failed: {reason(error, _file_of(function))}") from error
    model, example = built if isinstance(built, tuple) and len(built) == 2 else (built, ())
    example = (example,) if isinstance(example, Tensor) else example
    if not isinstance(model, nn.Module) or not isinstance(example, tuple | list) or not _are_tensors(example):
        what = ", ".join(type(each).__name__ for each in built) if isinstance(built, tuple) else type(built).__name__
        raise ValueError(
            f"{target} must return a model, or a model and its example input (a tensor or a tuple of tensors), "
            f"but it returned {what}"
        )
    place_of = next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
    return OwnModel(model, tuple(tensor.to(place_of) for tensor in inputs or example))


def reason(error: Exception, file: Path) -> str:
    """What went wrong in a user's file, and in which line."""
    if isinstance(error, Failure):
        return one_line(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    place = f" ({file.name}, line {lines[-1]})" if lines else ""
    return " ".join(f"{type(error).__name__}: {sentence(error)}{place}".split())


def _file_of(function: Callable[..., Any]) -> Path:
    try:
        return Path(inspect.getfile(inspect.unwrap(function)))
    except (TypeError, OSError):  # it was not written in Python, or not in a file
        return Path()


def _module_of(file: Path) -> types.ModuleType:
    """Import a file as Python would run it, with its folder on the path."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}: give a Python file and a function, as experiment.py:train")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)  # its classes need this; it replaces no other module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the file is the user's: anything can happen
        raise Failure(f"{file} cannot be imported ({type(error).__name__}: {one_line(error)})") from error
    return module


def _imported(name: str) -> types.ModuleType:
    """Import a module as ``python -m`` would, which looks in the current folder first."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"there is no module {name}, neither installed nor in {here}") from None
        raise Failure(f"{name} cannot be imported (ModuleNotFoundError: {one_line(error)})") from error
    except Exception as error:  # as above
        raise Failure(f"{name} cannot be imported ({type(error).__name__}: {one_line(error)})") from error


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(f"a shape is given as 1,3,224,224 (with several inputs, one for each), not {text!r}")
    return tuple(map(int, text.split(",")))


def _are_tensors(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)
