"""Measuring: interleaved times, bytes saved for backward, peak memory of a fresh process."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 3) -> dict[str, list[float]]:
    """Seconds of each function in each round: A, B, C, A, B, C, ... so that a drift of the machine meets all alike."""
    for _ in range(warmup):
        for function in functions.values():
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def ratio(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratio, taken round by round."""
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward pass, with fresh gradients each time."""
    parameters = list(model.parameters())
    target = torch.zeros(x.shape[0], dtype=torch.long)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        output = model(x)
        loss = nn.functional.cross_entropy(output, target) if output.dim() == 2 else output.square().mean()
        loss.backward()

    return step


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes kept for the backward pass: each storage once, parameters and the input batch left out."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), x]}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    del output
    return sum(storages.values())


def peak_memory_of_step(network: str, method: str, batch: int) -> int:
    """Peak resident bytes that training steps of a network add to a fresh process."""
    program = f"from benchmarks.measure import print_peak_memory; print_peak_memory({network!r}, {method!r}, {batch})"
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
