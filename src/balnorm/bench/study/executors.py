"""Where runs are trained: in processes on this machine, or as tasks on a Ray cluster.

A run's progress is in its folder, on a disk that both sides see; an executor only reports how its process ended. It
takes up to ``slots`` runs at a time and trains ``at_once`` of them at a time, fewer if it has its own queue;
``running`` were submitted and have not been returned.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from balnorm.bench.errors import Failure, Stopped, one_line
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.experiment import Config
from balnorm.bench.training.keep import perform
from balnorm.bench.training.machine import ProcessorError, check_precision, remedy_after
from balnorm.bench.training.run import Run, RunBusyError, State
from balnorm.bench.training.trainer import train
from balnorm.bench.user_code import reason

__all__ = ["Executor", "LocalExecutor", "RayExecutor", "Resources", "StudyError", "execute"]

End = tuple[State, str]
"""The state that a process left its run in, and the reason if the run has not ended."""

_STOPPED: End = ("unfinished", "stopped and saved")


class StudyError(Failure):
    """A study cannot be run. The message is one sentence that says what to do."""


@dataclass(frozen=True)
class Resources:
    """What all runs of a study share."""

    root: Path = Path("data")
    """The folder that holds the data."""
    threads: int = 1
    """Cores to use."""
    device: str | None = None
    """``None`` uses a GPU if there is one."""
    command: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    """The command that was typed, which the run records."""
    file: Path = Path()
    """The file of an experiment's function."""


def execute(folder: Path, recipe: Config, resources: Resources) -> End:
    """Train one run in this process. Errors go to ``error.txt`` in its folder, and are returned as one sentence."""
    run = Run(folder, recipe)
    try:
        torch.set_num_threads(resources.threads)
        if isinstance(recipe, Recipe):
            train(recipe, folder, root=resources.root, device=resources.device, show=False)
        else:
            perform(recipe, folder, file=resources.file, root=resources.root, device=resources.device)
    except RunBusyError:
        return "busy", "skipped, another process is training it"
    except (Stopped, KeyboardInterrupt):
        return _STOPPED
    except Exception as error:  # any error ends this run, but not the study
        run.keep_failure(traceback.format_exc())
        return "failed", one_line(error) if isinstance(recipe, Recipe) else reason(error, resources.file)
    return "finished", ""


# --------------------------------------------------------------------------------------------------------------------
# This machine
# --------------------------------------------------------------------------------------------------------------------


class LocalExecutor:
    """Trains each run in a fresh process, ``slots`` at a time; several GPUs are used in turn.

    A fresh process has its own peak memory, and its crash affects nothing else. If the system supports it, they are
    forked from a process that has already imported torch, which saves seconds for each.
    """

    def __init__(self, slots: int, resources: Resources) -> None:
        self.resources = resources
        self.slots = self.at_once = slots
        self._running: dict[Any, tuple[Any, Any, int, Run]] = {}
        fork = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:
            from multiprocessing import forkserver

            preload = ["balnorm.bench.training.trainer", "torch._dynamo", "torch.utils.tensorboard", "sklearn.datasets"]
            self._context.set_forkserver_preload(preload)
            # The server inherits that Ctrl-C is ignored, which only a main thread can set: this process responds to it.
            main = threading.current_thread() is threading.main_thread()
            before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
            try:
                forkserver.ensure_running()
            finally:
                if main:
                    signal.signal(signal.SIGINT, before)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, run: Run) -> None:
        slot = min(set(range(self.slots)) - {slot for _, _, slot, _ in self._running.values()})
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (run.folder.absolute(), run.recipe, self.resources, slot, theirs)
        process = self._context.Process(target=_execute_in_process, args=arguments)
        process.start()
        theirs.close()
        self._running[process.sentinel] = (process, ours, slot, run)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a separate process where runs are trained. Returns its result, or raises its error."""
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_call_in_process, args=(function, arguments, theirs))
        process.start()
        theirs.close()
        try:
            result, error = ours.recv()
        except EOFError:
            process.join()
            cause = remedy_after(-process.exitcode) or "is there enough memory?"
            raise StudyError(f"the trial before the study {_end(process.exitcode)}: {cause}") from None
        finally:
            process.kill()
            ours.close()
        if error is not None:
            raise error
        return result

    def ended(self, seconds: float) -> list[Run]:
        """Wait up to so many seconds for a process to end, and return the runs whose processes have."""
        return [self._ended(*self._running.pop(sentinel)) for sentinel in wait(list(self._running), timeout=seconds)]

    def stop(self) -> None:
        """Ask all runs to save and stop."""
        for process, *_ in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)

    def close(self) -> None:
        """Kill what is still running: it can resume from its last checkpoint."""
        for process, pipe, *_ in self._running.values():
            process.kill()
            pipe.close()
        self._running.clear()

    def _ended(self, process: Any, pipe: Any, _slot: int, run: Run) -> Run:
        process.join()
        with contextlib.closing(pipe), contextlib.suppress(EOFError):
            if pipe.poll():
                run.state, run.reason = pipe.recv()
                return run
        remedy = f"{remedy}, and " if (remedy := remedy_after(-process.exitcode)) else ""
        run.state = "failed"
        run.reason = f"its process {_end(process.exitcode)}: {remedy}repeat the command to resume it"
        run.keep_failure(f"{run.reason}\n")
        return run


def _execute_in_process(folder: Path, recipe: Config, resources: Resources, slot: int, pipe: Any) -> None:
    """The body of a run's process. It ignores the terminal's Ctrl-C; it saves and ends when the parent has ended."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent's handler is
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_stop_without, args=(parent.sentinel,), daemon=True).start()
    gpus = torch.cuda.device_count() if resources.device in (None, "cuda") else 0
    if gpus:  # use them in turn unless one was requested
        resources = replace(resources, device=f"cuda:{slot % gpus}")
    nowhere = os.open(os.devnull, os.O_WRONLY)  # for all output, which would disturb the live display
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        result = execute(folder, recipe, resources)
    except KeyboardInterrupt:  # before training started, or after it ended
        result = _STOPPED
    with contextlib.suppress(OSError):  # the parent has ended
        pipe.send(result)


def _call_in_process(function: Callable[..., Any], arguments: tuple[Any, ...], pipe: Any) -> None:
    try:
        answer: tuple[Any, Exception | None] = (function(*arguments), None)
    except Exception as error:  # for the parent to raise
        answer = (None, error)
    with contextlib.suppress(OSError):  # the parent has ended
        pipe.send(answer)


def _end(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _stop_without(sentinel: Any) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGINT)


# --------------------------------------------------------------------------------------------------------------------
# A Ray cluster
# --------------------------------------------------------------------------------------------------------------------


class RayExecutor:
    """Trains each run as a task on a Ray cluster, and restarts it when a machine or a process dies.

    The runs' folders and the data must be on storage that all machines share, under the same path.

    Args:
        address: the cluster's address, or ``"local"`` for one on this machine.
        resources: of each run; its threads are CPUs of the cluster.
        gpus: how many GPUs each run gets; with 0.5, two runs share one.
    """

    def __init__(self, address: str, resources: Resources, gpus: float = 0.0) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise StudyError("ray is not installed: pip install ray") from None
        self._ray, self._gpus, self.resources = ray, gpus, resources
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            host, separator, port = address.removeprefix("ray://").rpartition(":")
            try:
                if separator:  # neither "local" nor "auto": try to connect first, because Ray itself waits for minutes
                    socket.create_connection((host, int(port)), timeout=10).close()
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
            except Exception as error:  # if Ray does not start in time, it raises a bare one
                ray.shutdown()
                problem = "Ray did not start here" if address == "local" else f"no Ray cluster at {address!r}"
                raise StudyError(f"{problem} ({_first_line(error)})") from None
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        self.slots = sys.maxsize  # Ray has its own queue
        self.at_once = sum([_room(node["Resources"], resources.threads, gpus) for node in nodes if node["Alive"]])
        self._running: dict[Any, Run] = {}
        if not self.at_once:
            self.close()
            raise StudyError(f"no machine of the Ray cluster has {resources.threads} CPUs and {gpus:g} GPUs for a run")

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, run: Run) -> None:
        self._running[self._start(_execute_on_node, run.folder.absolute(), run.recipe, self.resources)] = run

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._ray.get(self._start(function, *arguments))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise StudyError(f"the trial before the study ended early ({_first_line(error)})") from None

    def ended(self, seconds: float) -> list[Run]:
        ended, _ = self._ray.wait(list(self._running), timeout=seconds)
        return [self._ended(reference, self._running.pop(reference)) for reference in ended]

    def stop(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference)

    def close(self) -> None:
        if self._connected_here:
            self._ray.shutdown()

    def _start(self, function: Callable[..., Any], *arguments: Any) -> Any:
        remote = self._ray.remote(
            num_cpus=self.resources.threads,
            num_gpus=self._gpus,
            max_retries=3,  # it resumes from its checkpoint
            max_calls=1,  # a fresh process for each run, with its own peak memory
        )
        return remote(function).remote(*arguments)

    def _ended(self, reference: Any, run: Run) -> Run:
        try:
            run.state, run.reason = self._ray.get(reference)
        except self._ray.exceptions.TaskCancelledError:
            run.state, run.reason = _STOPPED
        except self._ray.exceptions.RayError as error:
            run.keep_failure(f"{error}\n")
            run.state, run.reason = "failed", _first_line(error)
        return run


Executor = LocalExecutor | RayExecutor


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _room(resources: dict[str, float], threads: int, gpus: float) -> int:
    """How many runs a machine can train at a time."""
    cpus = int(resources.get("CPU", 0) / threads)
    return min(cpus, int(resources.get("GPU", 0) / gpus)) if gpus else cpus


def _execute_on_node(folder: Path, recipe: Config, resources: Resources) -> End:
    shared = folder.parent
    if not shared.is_dir():
        return "failed", f"{shared} is not on {platform.node()}: --out must be on storage that all machines share"
    try:
        if isinstance(recipe, Recipe):
            check_precision(recipe.precision, resources.device)  # machines of a cluster differ in their processors
    except ProcessorError as error:
        return "failed", str(error)
    sys.argv = list(resources.command)  # the run records it
    patience = time.monotonic() + 60
    while True:
        state, reason = execute(folder, recipe, resources)
        # The lock of a process that has just died may persist until its machine notices.
        if state != "busy" or time.monotonic() > patience:
            return state, reason
        time.sleep(1)
