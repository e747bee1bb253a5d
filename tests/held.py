"""Runs that wait, or die, where a test wants them, so that nothing depends on how fast the machine is.

While there is a file ``<folder>.hold`` beside the folder of a run or of a study, a run goes no further than its second
epoch: its record is written, its checkpoint is the first epoch's. Ctrl-C is noticed there as anywhere else, and the run
goes on to where it answers. ``python held.py compare ...`` is the command ``balnorm`` with such runs.
"""

import os
import signal
import sys
import time
from pathlib import Path

from balnorm.bench.study import executors
from balnorm.bench.training.run import Run

EPOCH = 2
PATIENCE = 1200  # seconds until a test gives up on what hangs; nothing that is only slow takes as long


def gate(folder):
    """The file that holds a run or a study."""
    return Path(f"{folder}.hold")


def wait_until(happened, process=None):
    """Until something has happened, or the process that should do it has ended."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert process is None or process.poll() is None, "it has ended before"
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def waiting(study):
    """The runs of a study that have come as far as they are let."""
    return [path.parent for path in study.glob("runs/*/metrics.jsonl") if len(path.read_text().splitlines()) == EPOCH]


def trainers(folder):
    """The processes that hold a run's lock open, and so locked."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            files = [os.readlink(f"/proc/{process}/fd/{fd}") for fd in os.listdir(f"/proc/{process}/fd")]
        except OSError:
            continue
        if any(file.startswith(str(folder)) and file.endswith("/lock") for file in files):
            found.append(int(process))
    return found


def hold_runs():
    """In this process: make runs wait while there is a gate."""
    add = Run.add_record

    def add_and_wait(run, record):
        answer = signal.getsignal(signal.SIGINT)  # the trainer's, which puts back another when it was called
        add(run, record)  # from here on a test may send the signal
        while (
            record["epoch"] >= EPOCH
            and (gate(run.folder).exists() or gate(run.folder.parent.parent).exists())
            and signal.getsignal(signal.SIGINT) is answer
        ):
            time.sleep(0.02)

    Run.add_record = add_and_wait


def train_and_die(recipe, out, events):
    """In this process: train, and be killed after so many steps and operations on files."""
    import torch

    from balnorm.bench.training.learner import Learner
    from balnorm.bench.training.trainer import train

    torch.set_num_threads(1)
    left = events

    def counted(function):
        def counting(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return counting

    for owner, name in ((os, "replace"), (os, "fsync"), (torch, "save"), (Learner, "step")):
        setattr(owner, name, counted(getattr(owner, name)))
    train(recipe, out, show=False, checkpoint_steps=2)


class Resources(executors.Resources):
    """What a study gives its runs, which wait in the processes that it is sent to."""

    def __reduce__(self):
        return _arrive, (vars(self),)


def _arrive(values):
    hold_runs()
    return Resources.__base__(**values)


def main():
    from balnorm.bench import cli
    from balnorm_command import main

    hold_runs()
    cli.Resources = Resources
    return main()


if __name__ == "__main__":
    import held  # where the processes that it starts find it too

    sys.exit(held.main())
