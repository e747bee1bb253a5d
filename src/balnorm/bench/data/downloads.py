"""Download the files of a data set: with a progress bar, resumable, and verified before they are put in place."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from balnorm.bench.data.sets import SETS, DataFile
from balnorm.bench.data.sources import DataError
from balnorm.bench.files import locked

__all__ = ["check", "download", "fetch"]

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes so far and the total (``None`` if the server does not say)."""

_BLOCK = 1 << 20


def download(name: str, root: str | Path, progress: Progress | None = None) -> list[Path]:
    """Download the missing files of a data set to ``root``, and return all its files.

    Without ``progress`` there is a progress bar in a terminal, if rich is installed.
    """
    files = _files(name)
    if progress is not None:
        return [fetch(file, Path(root), progress) for file in files]
    with _progress_bar() as show:
        return [fetch(file, Path(root), show) for file in files]


def check(name: str, root: str | Path) -> dict[str, str]:
    """For every file of a data set: ``"good"``, ``"missing"``, ``"damaged"``, or ``"unpacked"`` for an archive."""
    state = {}
    for file in _files(name):
        path = Path(root) / file.path
        if path.is_file():
            state[file.path] = "good" if _md5(path) == file.md5 else "damaged"
        else:
            state[file.path] = "unpacked" if _is_unpacked(file, Path(root)) else "missing"
    return state


def fetch(file: DataFile, root: Path, progress: Progress) -> Path:
    """Download one file. It is kept as ``<name>.part`` until it is complete, so that a broken transfer can resume.

    Several processes may ask for the same file: one fetches it, the others wait.
    """
    target = root / file.path
    part = target.with_name(target.name + ".part")
    try:
        if not target.is_file() and _is_unpacked(file, root):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(target.name + ".lock"), wait=True):
            if target.is_file():
                if _md5(target) == file.md5:
                    return target
                raise DataError(f"{target} exists but is not the published file (its MD5 differs): delete or move it")
            _transfer(file, part, progress)
            if _md5(part) != file.md5:
                part.unlink()
                raise DataError(
                    f"{file.url} sent something other than the published file (its MD5 differs), which was "
                    "deleted: try again"
                )
            os.replace(part, target)
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        kept = f", {part.stat().st_size:,} bytes are kept" if part.is_file() else ""
        raise DataError(f"could not download {file.url} ({error}){kept}: repeat the command to resume") from error
    return target


def _is_unpacked(file: DataFile, root: Path) -> bool:
    """Whether all contents of an archive are already there, unpacked or compressed one by one."""
    members = [root / member for member in file.members]
    return bool(members) and all(m.is_file() or m.with_name(m.name + ".xz").is_file() for m in members)


def _transfer(file: DataFile, part: Path, progress: Progress) -> None:
    done = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(file.url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to send; the checksum will tell whether it is all there
            return
        raise
    with response:
        if response.status != 206:  # the server sends all of it again
            done = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with part.open("ab" if done else "wb") as out:
            progress(file.path, done, total)
            while block := response.read(_BLOCK):
                out.write(block)
                done += len(block)
                progress(file.path, done, total)
            out.flush()
            os.fsync(out.fileno())
    if total is not None and done < total:
        raise OSError(f"the connection was lost at {done:,} of {total:,} bytes")


class _progress_bar:  # noqa: N801  # a context manager, used as a function
    """A bar for each file, if there is a terminal and rich is installed."""

    def __enter__(self) -> Progress:
        try:
            from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
        except ImportError:
            self.bars = None
            return lambda *_: None
        columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self.bars = bars = Progress(*columns)
        bars.start()
        tasks: dict[str, int] = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)  # type: ignore[arg-type]

        return show

    def __exit__(self, *_: object) -> None:
        if self.bars is not None:
            self.bars.stop()


def _files(name: str) -> tuple[DataFile, ...]:
    if name not in SETS:
        raise ValueError(f"the data set must be one of {', '.join(SETS)}, got {name!r}")
    return SETS[name].files


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
