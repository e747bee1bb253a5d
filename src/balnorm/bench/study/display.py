"""Progress of a study: a live table with a row per setting, or a line per run if there is no terminal.

It reads the runs' folders, so it works wherever they are trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from balnorm.bench.console import printable, say
from balnorm.bench.errors import many
from balnorm.bench.study.metrics import lower_is_better, shown
from balnorm.bench.training.run import Run

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Display", "clock"]


class Display:
    """Shows the progress of every setting.

    Args:
        runs: all runs of the study, including those that have ended.
        at_once: how many are trained at a time.
        show: whether to show anything.
    """

    def __init__(self, runs: Sequence[Run], at_once: int, show: bool = True) -> None:
        self.runs = runs
        self.running: set[Run] = set()
        self.over = {run for run in runs if run.ended}
        """The runs that this command is done with."""
        self.kept, self.at_once, self.show = len(self.over), at_once, show
        self.live: Any = None

    def __enter__(self) -> Display:
        if self.show and sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(get_renderable=self.table, refresh_per_second=2)
            self.live.start()
        if self.kept:
            total = many(len(self.runs), "run")
            self.say(f"{self.kept} of {total} {'is' if len(self.runs) == 1 else 'are'} already finished")
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def started(self, run: Run) -> None:
        self.running.add(run)

    def ended(self, run: Run) -> None:
        self.running.discard(run)
        self.over.add(run)
        text = f"[{len(self.over)}/{len(self.runs)}] {run.setting} seed {run.recipe.seed}: "
        if run.reason:
            self.say(f"{text}{'failed, ' if run.state == 'failed' else ''}{run.reason}")
        elif self.live is None:
            name = run.metric
            measured = f"{name.replace('_', ' ')} {shown(name, run.records[-1][name])}" if run.records else ""
            if run.state == "diverged":
                what = run.lines[-1]["diverged"]
                measured = f"diverged, its {what} was not finite," if isinstance(what, str) else "diverged"
            text += measured
            self.say(f"{text} in {clock(sum(run.seconds))}, about {clock(self.time_left())} left")

    def look(self) -> None:
        """Read how far the runs are."""
        if self.live is not None:
            for run in self.running:
                run.look()

    def say(self, text: str) -> None:
        """Print a line."""
        if self.live is not None:
            self.live.console.print(printable(text), highlight=False, markup=False)
        elif self.show:
            say(text)

    def left(self, run: Run) -> int:
        """How many epochs are left."""
        return 0 if run in self.over else max(0, self.epochs(run) - len(run.lines))

    def epochs(self, run: Run) -> int:
        """How many epochs a run has: what its recipe or an option of that name says, or as many as the longest."""
        planned = run.recipe.fields.get("epochs")
        return planned if type(planned) is int else max(len(other.lines) for other in self.runs)

    def time_left(self, setting: str | None = None) -> float:
        """Seconds left, estimated from finished epochs of the same setting, or of all settings if it has none yet."""
        times: dict[str, list[float]] = {}
        for run in self.runs:
            times.setdefault(str(run.setting), []).extend(run.seconds)
        everything = [second for seconds in times.values() for second in seconds] or [0.0]
        mean = {name: fmean(own or everything) for name, own in times.items() if setting in (None, name)}
        chosen = [run for run in self.runs if str(run.setting) in mean and self.left(run)]
        times_left = [self.left(run) * mean[str(run.setting)] for run in chosen]
        return sum(times_left) / max(1, min(self.at_once, len(times_left)))

    def table(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("setting")
        for name in ("done", "running (seed: epoch)", "best so far", "diverged", "failed", "time left"):
            table.add_column(name, justify="left" if name.startswith("running") else "right")
        for setting in dict.fromkeys(str(run.setting) for run in self.runs):
            table.add_row(Text(printable(setting)), *self.row(setting))
        table.caption = f"{clock(self.time_left())} left" if any(run.lines for run in self.runs) else ""
        return table

    def row(self, setting: str) -> list[str]:
        """The cells of a setting's row."""
        runs = [run for run in self.runs if str(run.setting) == setting]
        over = [run.state for run in runs if run in self.over]
        running = [f"{run.recipe.seed}: {_done(run)}/{self.epochs(run)}" for run in runs if run in self.running]
        name = next((run.metric for run in runs if run.records), "")
        values = [record[name] for run in runs for record in run.records if name in record]
        best = [shown(name, (min if lower_is_better(name) else max)(values))] if values else []
        return [
            f"{over.count('finished')}/{len(runs)}",
            "  ".join(running[:4]) + (" ..." if len(running) > 4 else ""),
            *(best or [""]),
            str(over.count("diverged") or ""),
            str(over.count("failed") or ""),
            clock(self.time_left(setting)) if best and any(map(self.left, runs)) else "",
        ]


def _done(run: Run) -> str:
    return f"{len(run.lines) + run.part:.1f}".removesuffix(".0")


def clock(seconds: float) -> str:
    """As ``7.2 s``, ``1:20 min`` or ``3:05 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"
