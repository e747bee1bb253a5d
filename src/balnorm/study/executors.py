"""Where runs are run: in processes of this machine, or as tasks of a Ray cluster. Both tell when a run has ended.

What a run has reached is in its folder, on a disk that both sides see; an executor only says how it ended.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, Protocol

from balnorm.errors import Failure, Stopped
from balnorm.study.grid import FAILURE, Member
from balnorm.training.files import write_atomically
from balnorm.training.processor import ProcessorError, check_precision, remedy_after
from balnorm.training.run import Run

__all__ = ["Executor", "LocalExecutor", "Outcome", "RayExecutor", "StudyError", "Task", "execute"]

End = Literal["done", "failed", "busy", "stopped"]


class StudyError(Failure):
    """A study cannot be run. The message is one sentence and says what to do."""


@dataclass(frozen=True)
class Task:
    """A run, and what it needs."""

    member: Member
    root: Path
    threads: int
    """Cores for it to use."""
    device: str | None = None
    """``None`` takes a GPU if there is one."""
    command: tuple[str, ...] = ()
    """What somebody typed, for the record."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``busy`` is trained by somebody else, ``stopped`` was asked to and can go on."""

    member: Member
    end: End
    reason: str = ""


class Executor(Protocol):
    """Takes tasks, as many at a time as there are ``slots``, and gives outcomes."""

    slots: int
    at_once: int
    """How many run at a time: no more than the slots, and fewer where some wait in a queue of its own."""

    def submit(self, task: Task) -> None: ...

    def outcomes(self, seconds: float) -> list[Outcome]:
        """Those that came within so many seconds; returns at the first."""
        ...

    def stop(self) -> None:
        """Ask all runs to save and end."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


def execute(task: Task) -> tuple[End, str]:
    """Train one run, in this process. What goes wrong is kept in its folder, in ``error.txt``, and in one sentence."""
    import torch

    from balnorm.training.run import RunBusyError
    from balnorm.training.trainer import train

    member = task.member
    failure = member.folder / FAILURE
    try:
        torch.set_num_threads(task.threads)
        failure.unlink(missing_ok=True)
        train(member.recipe, member.folder, root=task.root, device=task.device, show=False)
    except RunBusyError as busy:
        return "busy", str(busy)
    except (Stopped, KeyboardInterrupt) as stop:
        return "stopped", str(stop)
    except Exception as error:  # whatever it is, it ends this run and not the study
        keep_failure(member, traceback.format_exc())
        return "failed", " ".join(f"{error}".split()) or type(error).__name__
    return "done", ""


def keep_failure(member: Member, text: str) -> None:
    """Write why a run failed into its folder, which a run that failed early has not made yet."""
    with contextlib.suppress(OSError):
        Run(member.folder).create(member.recipe)
        write_atomically(member.folder / FAILURE, text.encode())


# --------------------------------------------------------------------------------------------------------------------
# This machine
# --------------------------------------------------------------------------------------------------------------------


class LocalExecutor:
    """A fresh process for each run, ``slots`` of them at a time; on GPUs they take turns over them.

    A fresh process has its own peak memory, and one that crashes takes nothing with it. They are forked from one that
    has imported torch already, where the system can do that, which saves seconds for each.
    """

    def __init__(self, slots: int) -> None:
        self.slots = self.at_once = slots
        fork = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:
            from multiprocessing import forkserver

            preload = ["balnorm.training.trainer", "torch._dynamo", "torch.utils.tensorboard", "sklearn.datasets"]
            self._context.set_forkserver_preload(preload)
            with _ignoring_interrupts():  # Ctrl-C is this process's to answer
                forkserver.ensure_running()
        self._running: dict[Any, tuple[Any, Any, int, Member]] = {}

    def submit(self, task: Task) -> None:
        slot = min(set(range(self.slots)) - {slot for _, _, slot, _ in self._running.values()})
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_execute_in_process, args=(task, slot, theirs))
        process.start()
        theirs.close()
        self._running[process.sentinel] = (process, ours, slot, task.member)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function's result, from a process of its own."""
        with ProcessPoolExecutor(1, mp_context=self._context) as pool:
            return pool.submit(function, *arguments).result()

    def outcomes(self, seconds: float) -> list[Outcome]:
        ended = wait(list(self._running), timeout=seconds) if self._running else []
        return [self._outcome(sentinel) for sentinel in ended]

    def stop(self) -> None:
        for process, _, _, _ in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)

    def close(self) -> None:
        """End what is still running at once: it goes on from its last checkpoint."""
        for process, pipe, _, _ in self._running.values():
            process.kill()
            pipe.close()
        self._running.clear()

    def _outcome(self, sentinel: Any) -> Outcome:
        process, pipe, _, member = self._running.pop(sentinel)
        process.join()
        with contextlib.closing(pipe):
            if pipe.poll():
                with contextlib.suppress(EOFError):
                    return Outcome(member, *pipe.recv())
        code = process.exitcode
        reason = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
        remedy = remedy_after(-code)
        reason += (
            f": {remedy}, and the same command goes on with it" if remedy else ": the same command goes on with it"
        )
        keep_failure(member, reason + "\n")
        return Outcome(member, "failed", reason)


def _execute_in_process(task: Task, slot: int, pipe: Any) -> None:
    """In a process of its own: apart from the terminal's Ctrl-C, and ending, saved, when the parent is gone."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever it was where the study was started
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_stop_without, args=(parent.sentinel,), daemon=True).start()
    with _quiet():
        try:
            result = execute(_on_gpu(task, slot))
        except KeyboardInterrupt:  # before training began, or after it ended
            result = ("stopped", "")
    with contextlib.suppress(OSError):  # nobody listens any more
        pipe.send(result)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """What is started inside inherits it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _on_gpu(task: Task, slot: int) -> Task:
    """The task on one of several GPUs, where there are any and none was asked for."""
    import torch

    gpus = torch.cuda.device_count() if task.device in (None, "cuda") else 0
    return replace(task, device=f"cuda:{slot % gpus}") if gpus else task


def _stop_without(sentinel: Any) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without output, which would go through a live display."""
    with open(os.devnull, "w") as nowhere:
        kept = os.dup(1), os.dup(2)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            yield
        finally:
            for number, copy in enumerate(kept, 1):
                os.dup2(copy, number)
                os.close(copy)


# --------------------------------------------------------------------------------------------------------------------
# A Ray cluster
# --------------------------------------------------------------------------------------------------------------------


class RayExecutor:
    """Each run is a task of a Ray cluster, with its CPUs and GPUs, started again when a machine or a process dies.

    The runs' folders and the data must be on storage that all machines share, under the same path.

    Args:
        address: of the cluster, or ``"local"`` for one on this machine.
        threads: CPUs that each run needs.
        gpus: that each run needs; a part of one, such as 0.5, lets two share it.
        retries: of a run whose process or machine died. It goes on from its checkpoint.
    """

    def __init__(self, address: str, threads: int = 1, gpus: float = 0.0, retries: int = 3) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise StudyError("ray is not installed: pip install ray") from None
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            _check_reachable(address)
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=True)
            except (ConnectionError, RuntimeError, ValueError) as error:
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise StudyError(f"no Ray cluster at {address!r} ({first})") from None
        self._ray, self._gpus, self._retries = ray, gpus, retries
        self.slots = sys.maxsize  # Ray has its own queue
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        self.at_once = sum([_room(node["Resources"], threads, gpus) for node in nodes if node["Alive"]])
        if not self.at_once:
            self.close()
            raise StudyError(f"no machine of the Ray cluster has {threads} CPUs and {gpus:g} GPUs for a run")
        self._running: dict[Any, Member] = {}

    def submit(self, task: Task) -> None:
        remote = self._ray.remote(
            num_cpus=task.threads,
            num_gpus=self._gpus,
            max_retries=self._retries,
            max_calls=1,  # a fresh process for each run, which has its own peak memory
        )(_execute_on_node)
        self._running[remote.remote(task)] = task.member

    def outcomes(self, seconds: float) -> list[Outcome]:
        if not self._running:
            return []
        ended, _ = self._ray.wait(list(self._running), timeout=seconds)
        return [self._outcome(reference) for reference in ended]

    def stop(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference)

    def close(self) -> None:
        if self._connected_here:
            self._ray.shutdown()

    def _outcome(self, reference: Any) -> Outcome:
        member = self._running.pop(reference)
        try:
            return Outcome(member, *self._ray.get(reference))
        except self._ray.exceptions.TaskCancelledError:
            return Outcome(member, "stopped")
        except self._ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            keep_failure(member, f"{error}\n")
            return Outcome(member, "failed", reason)


def _room(resources: dict[str, float], threads: int, gpus: float) -> int:
    """How many runs a machine can take at a time."""
    cpus = int(resources.get("CPU", 0) / threads)
    return min(cpus, int(resources.get("GPU", 0) / gpus)) if gpus else cpus


def _check_reachable(address: str) -> None:
    """Where the address is one of a network, knock first: Ray itself waits for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator:  # "local", "auto"
        return
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            pass
    except (OSError, ValueError) as error:
        raise StudyError(f"no Ray cluster at {address!r} ({error})") from None


def _execute_on_node(task: Task) -> tuple[End, str]:
    shared = task.member.folder.parent
    if not shared.is_dir():
        return "failed", f"{shared} is not on {platform.node()}: --out must be on storage that all machines share"
    try:
        check_precision(task.member.recipe.precision, task.device)  # each machine of a cluster has its own processor
    except ProcessorError as error:
        return "failed", str(error)
    sys.argv = list(task.command) or sys.argv  # of which the run keeps a record
    patience = time.monotonic() + 60
    while True:
        end, reason = execute(task)
        # The process that died a moment ago may still hold the folder, where its machine has not noticed yet.
        if end != "busy" or time.monotonic() > patience:
            return end, reason
        time.sleep(1)
