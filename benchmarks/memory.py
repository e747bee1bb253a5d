"""Peak memory of training steps, each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from balnorm.bench.profiling import training_step


def peak_memory_of_step(network: str, method: str, batch: int) -> int:
    """Peak resident bytes that training steps of a network add to a fresh process."""
    program = f"from benchmarks.memory import print_peak_memory; print_peak_memory({network!r}, {method!r}, {batch})"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    return int(output)


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


def status(field: str) -> int:
    """Resident bytes of this process, now (VmRSS) or at their peak (VmHWM). getrusage's peak is the parent's too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
