"""The processes of a run, started by torchrun or alone: rank, device, and sums over all of them."""

from __future__ import annotations

import datetime as dt
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from balnorm.bench.errors import Failure

__all__ = ["LostProcessError", "Processes", "processes"]

_PATIENCE = dt.timedelta(minutes=10)  # after which a process that does not respond counts as dead

_LOST = ("gloo", "nccl", "connection reset", "connection closed", "broken pipe", "connection refused", "timed out")
"""Phrases in the errors of torch's collectives if another process cannot be reached."""


class LostProcessError(Failure):
    """Another process of the run has ended, or cannot be reached."""


@dataclass(frozen=True)
class Processes:
    """This process among all processes of a run."""

    rank: int
    world: int
    device: torch.device
    _sent: deque[weakref.ref[torch.Tensor]] = field(default_factory=lambda: deque(maxlen=8), repr=False)

    @property
    def first(self) -> bool:
        """Whether this process writes the files and shows progress."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        if self.world == 1:
            return values
        sent = values.clone()
        dist.all_reduce(sent)
        self._sent.append(weakref.ref(sent))
        return sent.clone()

    def any(self, *values: bool) -> list[bool]:
        """For each value, whether it is true in any process."""
        return [count > 0 for count in self.sum(torch.tensor(values, dtype=torch.float32, device=self.device)).tolist()]

    def share_buffers(self, module: nn.Module) -> None:
        """Copy the first process's running statistics to all: DDP does so only before a forward pass in training."""
        if self.world > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, 0)

    def wait(self) -> None:
        """Wait until all processes get here."""
        if self.world > 1:
            dist.barrier()

    def let_go(self, seconds: float = 10.0) -> None:
        """Wait until gloo's threads have released the tensors that they summed, some time after the sum is done.

        If one does so after Python has begun to exit, SIGABRT ends the process, and torchrun then ends the others.
        """
        deadline = time.monotonic() + seconds
        while any(sent() is not None for sent in self._sent) and time.monotonic() < deadline:
            time.sleep(0.001)


@contextmanager
def processes(device: str | None = None) -> Iterator[Processes]:
    """Connect the processes that torchrun started (nccl on GPUs, gloo elsewhere); otherwise, just this one.

    Raises a :class:`LostProcessError` if the connection to another process fails, also later, inside the context.
    """
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    rank = int(os.environ.get("RANK", "0")) if world > 1 else 0
    team = Processes(rank, world, _place(device, local, world))
    if team.device.type == "cuda":
        torch.cuda.set_device(team.device)
    if world == 1:
        yield team
        return
    try:
        # After a restart torchrun's store still has the addresses of the earlier processes.
        store, _, _ = next(rendezvous("env://", timeout=_PATIENCE))
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "nccl" if team.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_PATIENCE)
        yield team
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(sign in str(error).lower() for sign in _LOST):
            raise
        raise LostProcessError(
            f"process {rank} lost its connection to another one of the {world}: if that one was killed or has failed, "
            "repeat the command to resume"
        ) from error
    finally:
        if dist.is_initialized():
            team.let_go()
            dist.destroy_process_group()


def _place(device: str | None, local: int, world: int) -> torch.device:
    """The requested device, or a GPU if there is one. Each process on a machine gets its own."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be something like cpu, cuda or cuda:1, got {device!r}") from None
    if place.type == "meta":
        raise ValueError("device 'meta' holds no numbers: it must be something like cpu, cuda or cuda:1")
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device {device!r} is not available: torch sees no GPU")
        if place.index is not None and world > 1:
            raise ValueError(f"give device cuda, not {device!r}, for several processes: each takes its own GPU")
        place = torch.device("cuda", local) if place.index is None else place
    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"device {device!r} is not available ({reason})") from None
    return place
