"""Progress of a run: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from balnorm.bench.console import printable, say

__all__ = ["Progress"]


class Progress:
    """Shows the steps of an epoch as they happen, and a line for each finished epoch.

    Of several processes, the first one does; the others have ``show=False``.
    """

    def __init__(self, title: str, epochs: int, show: bool = True) -> None:
        self.title, self.epochs, self.show = printable(title), epochs, show
        self.bar: Any = None
        self.last = 0.0

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

    def step(self, epoch: int, step: int, steps: int, loss: float, accuracy: float, speed: float) -> None:
        """Report a finished step, with the speed in images per second. Updates the bar at most ten times a second."""
        now = time.monotonic()
        if self.bar is None or now - self.last < 0.1:
            return
        self.last = now
        note = f"epoch {epoch + 1}/{self.epochs}  loss {loss:.3f}  accuracy {accuracy:.1%}  {speed:,.0f} images/s"
        completed, total = epoch * steps + step, self.epochs * steps
        self.bar.update(self.task, completed=completed, total=total, note=note, visible=True)

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
