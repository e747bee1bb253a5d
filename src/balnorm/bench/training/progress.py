"""Progress of a run: a live bar in a terminal, lines of text elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from balnorm.bench.console import printable, say

__all__ = ["Progress"]


class Progress:
    """Shows the steps of an epoch as they happen, and a line for each finished epoch.

    With several processes, only the first one does; the others have ``show=False``. A run of a study instead writes its
    progress within an epoch to a file, for the study's display.
    """

    def __init__(self, title: str, epochs: int, show: bool = True, file: Path | None = None) -> None:
        self.title, self.epochs, self.show, self.file = printable(title), epochs, show, file
        self.bar: Any = None
        self.last, self.note = 0.0, ""

    def __enter__(self) -> Progress:
        if self.show and sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            title = TextColumn("{task.description}", style="bold", markup=False)  # a name may contain brackets
            self.bar = Progress(title, BarColumn(bar_width=20), "{task.fields[note]}", TimeRemainingColumn(), "left")
            self.task = self.bar.add_task(self.title, note="", visible=False)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Report how many steps of an epoch are done: at most ten times a second, or once a second to a file."""
        now = time.monotonic()
        if now - self.last < (1 if self.bar is None else 0.1):
            return
        self.last = now
        if self.bar is not None:
            completed, total = epoch * steps + step, self.epochs * steps
            note = f"epoch {epoch + 1}/{self.epochs}  {self.note}"
            self.bar.update(self.task, completed=completed, total=total, note=note, visible=True)
        elif self.file is not None:
            with contextlib.suppress(OSError):  # it is only for show
                self.file.write_text(f"{epoch} {step / steps:.3f}")

    def measured(self, loss: float, accuracy: float, speed: float) -> None:
        """Show these numbers of the epoch so far from now on; the speed is in images per second."""
        self.note = f"loss {loss:.3f}  accuracy {accuracy:.1%}  {speed:,.0f} images/s"

    def epoch(self, record: dict[str, Any]) -> None:
        """Report a finished epoch."""
        if record.get("diverged"):
            self.say(f"{self.title}  epoch {record['epoch']}: the loss is not finite, the run has diverged")
            return
        self.say(
            f"{self.title}  epoch {record['epoch']}/{self.epochs}  train loss {record['train_loss']:.3f}  "
            f"test loss {record['test_loss']:.3f}  test accuracy {record['test_accuracy']:.2%}  "
            f"{record['seconds']:.1f} s"
        )

    def say(self, text: str) -> None:
        """Print a line."""
        if self.bar is not None:
            self.bar.console.print(printable(text), highlight=False, markup=False)
        elif self.show:
            say(text)
