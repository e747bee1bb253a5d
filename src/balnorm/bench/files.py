"""Atomic writes, locks, and JSON from files that may be damaged."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

__all__ = ["create_atomically", "locked", "parse_json", "regular", "remove_leftovers", "write_atomically", "written"]


_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def parse_json(text: str) -> Any:
    """Parse JSON. Raises a ValueError also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def regular(path: Path) -> Path:
    """The path of a file to read. Raises an OSError for a pipe, which might never answer, or a device."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def write_atomically(path: Path, contents: bytes) -> None:
    """Write a file such that at any moment either the old or the new one exists, complete."""
    with written(path, contents) as temporary:
        os.replace(temporary, path)


def create_atomically(path: Path, contents: bytes) -> None:
    """Write a file unless there is one. Of several processes that try at once, one succeeds, and its file stays."""
    with written(path, contents) as temporary:
        try:
            os.link(temporary, path)
        except OSError:
            if not path.exists():  # a file system without links
                os.replace(temporary, path)


def remove_leftovers(*paths: Path) -> None:
    """Remove the temporary files of killed processes. No other process may be writing to any of the paths."""
    for path in paths:
        for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
            with contextlib.suppress(OSError):
                leftover.unlink()


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock file, which stays, against other processes. Yields whether the disk has locks.

    Raises a :class:`filelock.Timeout` if another process holds it, unless ``wait`` is true.
    """
    lock = FileLock(path)
    try:
        lock.acquire(blocking=wait)
    except OSError as error:
        if error.errno not in _NO_LOCKS:  # a Timeout is one
            raise
    try:
        yield lock.is_locked
    finally:
        lock.release()


@contextlib.contextmanager
def written(path: Path, contents: bytes) -> Iterator[Path]:
    """Write a temporary file beside ``path`` and sync it to disk. Rename it inside the context, or it is removed."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(temporary):
            raise  # something else failed inside the context
        raise OSError(error.errno, error.strerror, str(path)) from error  # the name that the caller knows
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system can sync directories
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
