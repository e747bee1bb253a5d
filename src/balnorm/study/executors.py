"""Where runs are run: in processes of this machine, or as tasks of a Ray cluster. Both tell when a run has ended.

What a run has reached is in its folder, on a disk that both sides see; an executor only says how its process ended.
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
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from balnorm.errors import Failure, Stopped
from balnorm.study.results import Result
from balnorm.training.config import Recipe
from balnorm.training.processor import ProcessorError, check_precision, remedy_after
from balnorm.training.run import Run, State

__all__ = ["Executor", "LocalExecutor", "RayExecutor", "Resources", "StudyError", "execute"]

End = tuple[State, str]
"""The state that a process left its run in, and why the run has not ended, if so."""

_STOPPED: End = ("unfinished", "stopped, and saved")


class StudyError(Failure):
    """A study cannot be run. The message is one sentence and says what to do."""


@dataclass(frozen=True)
class Resources:
    """What every run of a study is given."""

    root: Path = Path("data")
    """Where the data is."""
    threads: int = 1
    """Cores to use."""
    device: str | None = None
    """``None`` takes a GPU if there is one."""
    command: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    """What somebody typed, for the record."""


class Executor(Protocol):
    """Takes runs, as many at a time as there are ``slots``, and gives them back when their processes have ended."""

    resources: Resources
    slots: int
    at_once: int
    """How many run at a time: no more than the slots, and fewer where some wait in a queue of its own."""

    def submit(self, run: Result) -> None: ...

    def ended(self, seconds: float) -> list[Result]:
        """The runs whose processes ended within so many seconds; returns at the first."""
        ...

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A function's result, or what it raises, from a process of its own where runs are run."""
        ...

    def stop(self) -> None:
        """Ask all runs to save and end."""
        ...

    def close(self) -> None:
        """Let go of what it holds."""
        ...


def execute(folder: Path, recipe: Recipe, resources: Resources) -> End:
    """Train one run, in this process. What goes wrong is kept in its folder, in ``error.txt``, and in one sentence."""
    import torch

    from balnorm.training.run import RunBusyError
    from balnorm.training.trainer import train

    run = Run(folder)
    try:
        torch.set_num_threads(resources.threads)
        run.error.unlink(missing_ok=True)
        train(recipe, folder, root=resources.root, device=resources.device, show=False)
    except RunBusyError:
        return "busy", "left to the other process that is training it"
    except (Stopped, KeyboardInterrupt):
        return _STOPPED
    except Exception as error:  # whatever it is, it ends this run and not the study
        run.keep_failure(recipe, traceback.format_exc())
        return "failed", " ".join(f"{error}".split()) or type(error).__name__
    return "finished", ""


# --------------------------------------------------------------------------------------------------------------------
# This machine
# --------------------------------------------------------------------------------------------------------------------


class LocalExecutor:
    """A fresh process for each run, ``slots`` of them at a time; on GPUs they take turns over them.

    A fresh process has its own peak memory, and one that crashes takes nothing with it. They are forked from one that
    has imported torch already, where the system can do that, which saves seconds for each.
    """

    def __init__(self, slots: int, resources: Resources) -> None:
        self.slots = self.at_once = slots
        self.resources = resources
        fork = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
        if fork:
            from multiprocessing import forkserver

            preload = ["balnorm.training.trainer", "torch._dynamo", "torch.utils.tensorboard", "sklearn.datasets"]
            self._context.set_forkserver_preload(preload)
            with _ignoring_interrupts():  # Ctrl-C is this process's to answer
                forkserver.ensure_running()
        self._running: dict[Any, tuple[Any, Any, int, Result]] = {}

    def submit(self, run: Result) -> None:
        slot = min(set(range(self.slots)) - {slot for _, _, slot, _ in self._running.values()})
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (run.folder.absolute(), run.recipe, self.resources, slot, theirs)
        process = self._context.Process(target=_execute_in_process, args=arguments)
        process.start()
        theirs.close()
        self._running[process.sentinel] = (process, ours, slot, run)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with ProcessPoolExecutor(1, mp_context=self._context) as pool:
            return pool.submit(function, *arguments).result()

    def ended(self, seconds: float) -> list[Result]:
        ended = wait(list(self._running), timeout=seconds) if self._running else []
        return [self._ended(sentinel) for sentinel in ended]

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

    def _ended(self, sentinel: Any) -> Result:
        process, pipe, _, run = self._running.pop(sentinel)
        process.join()
        with contextlib.closing(pipe):
            if pipe.poll():
                with contextlib.suppress(EOFError):
                    state, reason = pipe.recv()
                    return replace(run, state=state, reason=reason)
        code = process.exitcode
        how = f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
        remedy = f"{remedy}, and " if (remedy := remedy_after(-code)) else ""
        return replace(run, state="failed", reason=f"{how}: {remedy}the same command goes on with it")


def _execute_in_process(folder: Path, recipe: Recipe, resources: Resources, slot: int, pipe: Any) -> None:
    """In a process of its own: apart from the terminal's Ctrl-C, and ending, saved, when the parent is gone."""
    import torch

    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever it was where the study was started
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_stop_without, args=(parent.sentinel,), daemon=True).start()
    gpus = torch.cuda.device_count() if resources.device in (None, "cuda") else 0
    if gpus:  # where none was asked for, they take turns
        resources = replace(resources, device=f"cuda:{slot % gpus}")
    with _quiet():
        try:
            result = execute(folder, recipe, resources)
        except KeyboardInterrupt:  # before training began, or after it ended
            result = _STOPPED
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
        resources: for each run; its threads are the CPUs that it needs.
        gpus: that each run needs; a part of one, such as 0.5, lets two share it.
        retries: of a run whose process or machine died. It goes on from its checkpoint.
    """

    def __init__(self, address: str, resources: Resources, gpus: float = 0.0, retries: int = 3) -> None:
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
        self._ray, self._gpus, self._retries, self.resources = ray, gpus, retries, resources
        self.slots = sys.maxsize  # Ray has its own queue
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        self.at_once = sum([_room(node["Resources"], resources.threads, gpus) for node in nodes if node["Alive"]])
        if not self.at_once:
            self.close()
            raise StudyError(f"no machine of the Ray cluster has {resources.threads} CPUs and {gpus:g} GPUs for a run")
        self._running: dict[Any, Result] = {}

    def submit(self, run: Result) -> None:
        self._running[self._start(_execute_on_node, run.folder.absolute(), run.recipe, self.resources)] = run

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._ray.get(self._start(function, *arguments))
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def ended(self, seconds: float) -> list[Result]:
        if not self._running:
            return []
        ended, _ = self._ray.wait(list(self._running), timeout=seconds)
        return [self._ended(reference) for reference in ended]

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
            max_retries=self._retries,
            max_calls=1,  # a fresh process for each run, which has its own peak memory
        )
        return remote(function).remote(*arguments)

    def _ended(self, reference: Any) -> Result:
        run = self._running.pop(reference)
        try:
            state, reason = self._ray.get(reference)
        except self._ray.exceptions.TaskCancelledError:
            state, reason = _STOPPED
        except self._ray.exceptions.RayError as error:
            Run(run.folder).keep_failure(run.recipe, f"{error}\n")
            state, reason = "failed", (str(error).strip().splitlines() or [type(error).__name__])[0]
        return replace(run, state=state, reason=reason)


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


def _execute_on_node(folder: Path, recipe: Recipe, resources: Resources) -> End:
    shared = folder.parent
    if not shared.is_dir():
        return "failed", f"{shared} is not on {platform.node()}: --out must be on storage that all machines share"
    try:
        check_precision(recipe.precision, resources.device)  # each machine of a cluster has its own processor
    except ProcessorError as error:
        return "failed", str(error)
    sys.argv = list(resources.command)  # of which the run keeps a record
    patience = time.monotonic() + 60
    while True:
        state, reason = execute(folder, recipe, resources)
        # The process that died a moment ago may still hold the folder, where its machine has not noticed yet.
        if state != "busy" or time.monotonic() > patience:
            return state, reason
        time.sleep(1)
