"""Checkpoints: written atomically, with a checksum; the previous one is kept."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from balnorm.bench.errors import Failure
from balnorm.bench.files import regular, written

__all__ = [
    "CheckpointError",
    "Loaded",
    "check_contents",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
    "set_aside",
]

_MAGIC = b"balnorm checkpoint 1\n"
_CONTENTS = {"recipe", "images", "world", "position", "model", "averaged", "optimizer", "scaler", "rng"}


class CheckpointError(Failure):
    """A checkpoint is unusable, or could not be written. The message is one sentence."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` (tensors, numbers and texts) to ``path``. The previous file is kept as ``<name>.previous``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    contents = _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload
    try:
        # Between the two renames only the previous checkpoint exists; a reader then finds that one.
        with written(path, contents) as temporary:
            if path.exists():
                os.replace(path, f"{path}.previous")
            os.replace(temporary, path)
    except OSError as error:
        intact = path.exists() or Path(f"{path}.previous").exists()
        raise CheckpointError(
            f"could not write {path} ({error.strerror}); "
            f"{'the previous checkpoint is intact' if intact else 'there is no earlier checkpoint'}: free some space, "
            f"then repeat the command to {'resume' if intact else 'start again'}"
        ) from error


class Loaded(NamedTuple):
    """The result of ``use`` for a state, and a sentence if it is not the last one that was saved."""

    result: Any
    problem: str | None


def load_checkpoint(path: Path, use: Callable[[dict[str, Any]], Any] = lambda state: state) -> Loaded | None:
    """Load the state in ``path``, or the previous one if that is damaged; ``None`` if there is neither.

    Returns what ``use`` returns for the state. If ``use`` raises an error, the previous checkpoint is tried. Nothing
    in a file is executed. Raises a :class:`CheckpointError` if there are files but none is usable.
    """
    problems: list[str] = []
    for candidate in (path, Path(f"{path}.previous")):
        if not candidate.exists():
            continue
        try:
            result = use(_read(candidate))
        except CheckpointError as error:
            problems.append(f"{candidate} {error}")
        except Failure:  # the state is fine, but something else is wrong
            raise
        except Exception as error:  # a state with unexpected content can raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            problems.append(f"{candidate} does not fit this run ({reason})")
        else:
            return Loaded(result, f"{problems[0]}: using the previous one" if problems else None)
    if problems:
        raise CheckpointError("; ".join(problems))
    return None


def check_contents(state: dict[str, Any]) -> None:
    """Raise a ValueError unless the state has the parts of a run's."""
    if state.keys() != _CONTENTS:
        raise ValueError("its contents differ: another version wrote it")


def load_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load a network's state dict. Raises an error if it does not fit, or if numbers would have to be converted."""
    model.load_state_dict(weights)
    for name, value in model.state_dict().items():
        if (given := weights.get(name, value).dtype) != value.dtype:
            raise ValueError(f"{name} is {given} instead of {value.dtype}")


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint. Otherwise the next save would keep it as the previous one."""
    if path.exists():
        os.replace(path, f"{path}.damaged")


def _read(path: Path) -> dict[str, Any]:
    """The state in a file. The message of a CheckpointError follows the name of the file."""
    try:
        contents = regular(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})") from error
    if not contents.startswith(_MAGIC):
        raise CheckpointError("is not a checkpoint of balnorm")
    digest, _, payload = contents[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise CheckpointError("is truncated or damaged")
    try:
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > len(payload):  # torch does not compress
            raise CheckpointError(f"would take {unpacked:,} bytes of memory, more than it has, and was not loaded")
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a prepared file can make the unpickler raise anything
        raise CheckpointError("contains something other than tensors and numbers, and was not loaded") from error
    if not isinstance(state, dict):
        raise CheckpointError("is not a checkpoint of balnorm")
    return state
