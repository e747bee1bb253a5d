"""Standard output that cannot stop a command: a closed pipe, a full disk and a plain terminal are all handled."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from balnorm.bench.errors import shortened

__all__ = ["Output", "patient_output", "printable", "remark", "say"]

_PLAIN = str.maketrans({"–": "-", "∞": "inf"})  # noqa: RUF001  # the characters beyond ASCII in our tables


class Output(io.TextIOBase):
    """A stream that goes silent once a write fails, and that replaces characters its encoding lacks."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.error: OSError | None = None
        """Why it went silent, if it did."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self.stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(_encodable(text, self.encoding)))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def isatty(self) -> bool:
        return self.error is None and bool(self.stream.isatty())

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def _try(self, action: Callable[[], object]) -> None:
        if self.error is not None:
            return
        try:
            action()
        except OSError as error:
            self.error = error
            # Otherwise Python would write the rest of the buffer at exit, fail again and change the exit code.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())


@contextlib.contextmanager
def patient_output() -> Iterator[Output]:
    """Make standard output and error an :class:`Output` inside the context, which yields the former."""
    before = sys.stdout, sys.stderr
    out, err = _opened(sys.stdout, 1), _opened(sys.stderr, 2)
    sys.stdout, sys.stderr = out, err
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def say(text: str) -> None:
    """Print a line. If nobody reads it, carry on."""
    if sys.stdout is not None:
        out = sys.stdout if isinstance(sys.stdout, Output) else Output(sys.stdout)
        print("\n".join(map(printable, text.split("\n"))), file=out, flush=True)


def remark(*sentences: str) -> None:
    """Print sentences to standard error, each on a line, with the name of the command. Shortens very long ones."""
    for each in sentences:
        print(f"balnorm: {printable(shortened(each))}", file=sys.stderr)


def printable(text: str) -> str:
    """Escape control characters, and those that fonts and files lack, such as bytes of a name that is not UTF-8."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _opened(stream: Any, number: int) -> Output:
    """Wrap a stream. If it was closed at the start, open the null device, or the next file would get its number."""
    if stream is not None:
        return Output(stream)
    opened = -1
    while opened < number:  # lower numbers may be closed too
        opened = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(opened, True)
    output = Output(open(number, "w", closefd=False))  # noqa: SIM115  # until the process ends
    output.error = OSError(errno.EBADF, os.strerror(errno.EBADF))
    return output


def _encodable(text: str, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text
