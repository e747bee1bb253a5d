"""Peak memory of training steps, each in a fresh process."""

from __future__ import annotations

import functools
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from balnorm.bench.profiling import training_step

VOLUMES = Path(__file__).parent.parent / "examples" / "volumes.py"


def peak_memory_of_step(network: str, method: str, batch: int) -> int:
    """Peak resident bytes that training steps of a network add to a fresh process."""
    return _in_a_process(f"print_peak_memory({network!r}, {method!r}, {batch})")


def largest_cube(norm: str, limit: int) -> tuple[int, int]:
    """The edge of the largest cube, a multiple of 4, on which the U-Net of volumes trains, and its peak in bytes.

    ``limit`` is for all resident memory of the process, torch included.
    """

    @functools.cache
    def peak(edge: int) -> int:
        return _in_a_process(f"print_peak_memory_of_cube({norm!r}, {edge})")

    a_voxel = (peak(64) - peak(32)) / (64**3 - 32**3)
    edge = int((64**3 + (limit - peak(64)) / a_voxel) ** (1 / 3)) // 4 * 4
    while peak(edge) > limit:
        edge -= 4
    while peak(edge + 4) <= limit:
        edge += 4
    return edge, peak(edge)


def _in_a_process(call: str) -> int:
    program = f"import benchmarks.memory as memory; memory.{call}"
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


def print_peak_memory(network: str, method: str, batch: int) -> None:
    from benchmarks.networks import NETWORKS

    spec = NETWORKS[network]
    model = spec.build(method).to(memory_format=torch.channels_last)
    x = torch.rand(batch, 3, spec.size, spec.size).contiguous(memory_format=torch.channels_last)
    before = status("VmRSS")
    step = training_step(model, x)
    for _ in range(2):
        step()
    print(status("VmHWM") - before)


def print_peak_memory_of_cube(norm: str, edge: int) -> None:
    volumes = runpy.run_path(str(VOLUMES))
    model = volumes["UNet"](norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.rand(2, 1, edge, edge, edge), torch.randint(3, (2, edge, edge, edge))
    for _ in range(2):
        loss = volumes["loss_of"](model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(status("VmHWM"))


def status(field: str) -> int:
    """Resident bytes of this process, now (VmRSS) or at their peak (VmHWM). getrusage's peak is the parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
