"""Files that are there whole or not at all. It imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["parse_json", "write_atomically", "written"]


def parse_json(text: str) -> Any:
    """What a JSON text holds; a ValueError also where it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_atomically(path: Path, contents: bytes) -> None:
    """Write a file so that there is always either the old one or the new one, whole, whatever happens meanwhile."""
    with written(path, contents) as temporary:
        os.replace(temporary, path)


@contextlib.contextmanager
def written(path: Path, contents: bytes) -> Iterator[Path]:
    """A file beside ``path``, safely on the disk, to be given its name inside."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # the name that was asked for
    with contextlib.suppress(OSError):  # not every file system has directories that can be synchronised
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
