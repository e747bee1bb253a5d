"""What a person sees of a study: a live table with a row for each setting, or a line for each run where there is no
terminal. It reads the runs' folders, and so works wherever they are run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from balnorm.console import say
from balnorm.study.executors import Outcome
from balnorm.study.grid import Member, State, settings_of
from balnorm.training.run import Run, RunError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Display", "clock"]


@dataclass
class Watched:
    """A run as it was when last looked at."""

    member: Member
    setting: str
    state: State = "new"
    running: bool = False
    tried: bool = False
    """Whether this command has run it to an end."""
    size: int = -1
    records: list[dict[str, Any]] = field(default_factory=list)

    def look(self) -> None:
        if self.member.packed:
            self.records = list(self.member.packed)
            return
        run = Run(self.member.folder)
        try:
            size = run.metrics.stat().st_size
        except OSError:
            return
        if size != self.size:
            try:
                self.size, self.records = size, run.records()
            except RunError:
                self.records = []

    @property
    def seconds(self) -> list[float]:
        return [record["seconds"] for record in self.records if "seconds" in record]

    @property
    def left(self) -> int:
        """Epochs to do."""
        return 0 if self.over else max(0, self.member.recipe.epochs - len(self.records))

    @property
    def over(self) -> bool:
        """Whether there is no more to come of it."""
        return not self.running and (self.tried or self.state in ("finished", "diverged"))


class Display:
    """Shows how far every setting is.

    Args:
        members: all runs of the study, also those that are finished already.
        at_once: how many run at a time.
        show: whether to show anything.
    """

    def __init__(self, members: Sequence[Member], at_once: int, show: bool = True) -> None:
        names = map(str, settings_of([member.recipe for member in members]))
        self.watched = {m.folder.absolute(): Watched(m, name) for m, name in zip(members, names, strict=True)}
        self.at_once = at_once
        self.show = show
        self.live: Any = None
        for run in self.watched.values():
            run.state = run.member.state
            run.look()
        self.kept = sum(run.state in ("finished", "diverged") for run in self.watched.values())

    def __enter__(self) -> Display:
        if self.show and sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(get_renderable=self.table, refresh_per_second=2)
            self.live.start()
        if self.kept:
            self.say(f"{self.kept} of {len(self.watched)} runs are finished and are kept")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()

    def started(self, member: Member) -> None:
        self.watched[member.folder].running = True

    def ended(self, outcome: Outcome) -> None:
        """A run has ended."""
        run = self.watched[outcome.member.folder]
        run.look()
        run.running, run.tried, run.state = False, True, run.member.state
        number = sum(run.over for run in self.watched.values())
        text = f"[{number}/{len(self.watched)}] {run.setting} seed {run.member.recipe.seed}: "
        if outcome.end == "failed":
            self.say(f"{text}failed, {outcome.reason}")
        elif outcome.end == "busy":
            self.say(f"{text}left to the other process that is training it")
        elif outcome.end == "stopped":
            self.say(f"{text}stopped, and saved")
        elif outcome.end == "done" and self.live is None:
            last = run.records[-1]
            text += "diverged" if last.get("diverged") else f"test accuracy {last['test_accuracy']:.2%}"
            self.say(f"{text} in {clock(sum(run.seconds))}, about {clock(self.time_left())} left")

    def look(self) -> None:
        """See how far the runs are."""
        if self.live is not None:
            for run in self.watched.values():
                if run.running:
                    run.look()

    def say(self, text: str) -> None:
        """A line of its own."""
        if self.show and self.live is not None:
            self.live.console.print(text, highlight=False, markup=False)
        elif self.show:
            say(text)

    def time_left(self, setting: str | None = None) -> float:
        """Seconds, from what epochs took so far: of the same setting, or of all where it has none yet."""
        times: dict[str, list[float]] = {}
        for run in self.watched.values():
            times.setdefault(run.setting, []).extend(run.seconds)
        everything = [second for seconds in times.values() for second in seconds] or [0.0]
        mean = {name: sum(own or everything) / len(own or everything) for name, own in times.items()}
        chosen = [run for run in self.watched.values() if setting in (None, run.setting)]
        times_left = [run.left * mean[run.setting] for run in chosen if run.left]
        return sum(times_left) / max(1, min(self.at_once, len(times_left)))

    def table(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("setting")
        for name in ("done", "running (seed: epoch)", "best so far", "diverged", "failed", "time left"):
            table.add_column(name, justify="right" if name != "running (seed: epoch)" else "left")
        for setting in dict.fromkeys(run.setting for run in self.watched.values()):
            table.add_row(setting, *self.row(setting))
        table.caption = f"{clock(self.time_left())} left" if any(run.seconds for run in self.watched.values()) else ""
        return table

    def row(self, setting: str) -> list[str]:
        """The cells of a setting."""
        runs = [run for run in self.watched.values() if run.setting == setting]
        count = {state: sum(run.state == state for run in runs) for state in ("finished", "diverged", "failed")}
        running = [
            f"{run.member.recipe.seed}: {len(run.records)}/{run.member.recipe.epochs}"
            for run in runs
            if run.running and run.size >= 0
        ]
        best = [record["test_accuracy"] for run in runs for record in run.records if "test_accuracy" in record]
        return [
            f"{count['finished']}/{len(runs)}",
            "  ".join(running[:4]) + (" ..." if len(running) > 4 else ""),
            f"{max(best):.2%}" if best else "",
            str(count["diverged"] or ""),
            str(count["failed"] or ""),
            clock(self.time_left(setting)) if best and any(run.left for run in runs) else "",
        ]


def clock(seconds: float) -> str:
    """As ``7.2 s``, ``1:20 min`` or ``3:05 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    if minutes < 60:
        return f"{int(minutes)}:{int(seconds % 60):02d} min"
    return f"{int(minutes // 60)}:{int(minutes % 60):02d} h"
