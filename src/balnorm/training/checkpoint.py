"""Checkpoints that survive anything: written whole or not at all, with a checksum, and the one before is kept."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from balnorm.errors import Failure
from balnorm.training.files import written

__all__ = ["CheckpointError", "Loaded", "load_checkpoint", "save_checkpoint", "set_aside"]

_MAGIC = b"balnorm checkpoint 1\n"


class CheckpointError(Failure):
    """A file is no good checkpoint, or none could be written. The message is one sentence."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state``, tensors and plain values, to ``path``. What was there before stays as ``<name>.previous``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    contents = _MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload
    try:
        # Between the two renames there is only the previous one, which is then what a reader finds.
        with written(path, contents) as temporary:
            if path.exists():
                os.replace(path, _previous(path))
            os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(
            f"could not write {path} ({error.strerror}); what was saved before is unharmed: make room, and the same "
            "command goes on from there"
        ) from error


class Loaded(NamedTuple):
    """A state, and a sentence where it is not the last one that was saved."""

    state: dict[str, Any]
    problem: str | None


def load_checkpoint(path: Path, use: Callable[[dict[str, Any]], object] = lambda _: None) -> Loaded | None:
    """The state in ``path``, or in the one before where that is damaged; ``None`` where there is neither.

    Nothing in a file is executed. Raises a :class:`CheckpointError` if there are files and none is good.

    Args:
        path: the file.
        use: takes the state up. Where that fails, for whatever the state holds, the one before is tried.
    """
    problems: list[str] = []
    for candidate in (path, _previous(path)):
        if candidate.exists():
            state = _used(candidate, use, problems)
            if state is not None:
                return Loaded(state, f"{problems[0]}: going on from the one before" if problems else None)
    if problems:
        raise CheckpointError("; ".join(problems))
    return None


def _used(path: Path, use: Callable[[dict[str, Any]], object], problems: list[str]) -> dict[str, Any] | None:
    try:
        state = _read(path)
        use(state)
    except CheckpointError as error:
        problems.append(str(error))
    except Failure:  # the state is good, and something else is not
        raise
    except Exception as error:  # whatever a state of other content leads to
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problems.append(f"{path} holds no state that fits ({reason})")
    else:
        return state
    return None


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint: else the next one to be saved would take it for the last good one."""
    if path.exists():
        os.replace(path, path.with_name(path.name + ".damaged"))


def _read(path: Path) -> dict[str, Any]:
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    if not contents.startswith(_MAGIC):
        raise CheckpointError(f"{path} is not a checkpoint of balnorm")
    digest, _, payload = contents[len(_MAGIC) :].partition(b"\n")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is truncated or damaged")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the unpickler makes of a file that somebody prepared
        raise CheckpointError(f"{path} holds something else than tensors and numbers, and was not loaded") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is not a checkpoint of balnorm")
    return _renewed(state)


def _renewed(state: dict[str, Any]) -> dict[str, Any]:
    """A state from before version 0.2 as one of today: it says whether the run has ended, and nothing of its images."""
    position = state.get("position")
    if isinstance(position, dict) and "finished" in position:
        ended = position.pop("finished")
        position["diverged"] = bool(ended and position["epoch"] < state["recipe"]["epochs"])
        state.setdefault("images", None)
    return state


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")
