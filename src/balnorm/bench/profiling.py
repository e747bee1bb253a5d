"""Speed and memory of training: interleaved timings, bytes saved for the backward pass, seconds per epoch."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from balnorm.bench.training.config import Recipe
from balnorm.bench.training.learner import Learner, autocast, make_network
from balnorm.bench.training.processes import Processes, processes
from balnorm.text_table import text_table

__all__ = [
    "bench", "epoch_seconds", "interleaved", "markdown_table", "ratio", "saved_bytes", "spread", "stopwatch",
    "training_step",
]  # fmt: skip


def bench(
    recipes: Sequence[Recipe], image: tuple[int, int, int], classes: int, rounds: int, device: torch.device
) -> str:
    """A table of training steps of recipes' networks: time and memory of each method, and their ratios to the first.

    Args:
        recipes: they differ in norm and its options; the first is the one that the others are compared with.
        image: channels, height and width.
        classes: of the network.
        rounds: in each of which every network has one step.
        device: to measure on.
    """
    channels, *_ = image
    x = torch.rand(recipes[0].batch_size, *image, device=device).contiguous(memory_format=torch.channels_last)
    steps, kept = {}, {}
    for recipe in recipes:
        torch.manual_seed(recipe.seed)
        norm = recipe.method
        model = make_network(recipe, channels, classes).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with autocast(recipe, x.device):
            kept[norm] = saved_bytes(model, x)
        compiled: Any = torch.compile(model) if recipe.compile else model
        steps[norm] = training_step(compiled, x, functools.partial(autocast, recipe, x.device))
    times, first = interleaved(steps, rounds, clock=stopwatch(device)), recipes[0].method
    rows = []
    for norm in steps:
        middle, low, high = ratio(times[norm], times[first])
        rows.append(
            [
                norm,
                f"{1000 * statistics.median(times[norm]):.1f}",
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
                f"{kept[norm] / 2**20:.1f}",
                f"{kept[norm] / kept[first]:.2f}",
            ]
        )
    return text_table(["norm", "ms a step", "ratio (quartiles)", "MiB kept for backward", "ratio"], rows)


def epoch_seconds(recipe: Recipe, root: Path, device: str | None = None, steps: int = 5) -> float:
    """Estimate the time of an epoch from a few steps of training and evaluation. Writes nothing."""
    recipe.check()
    with processes(device) as team:
        learner = Learner(recipe, team, root)
        training = _seconds_a_batch(lambda batch: learner.step(*batch), learner.train_loader.epoch(0), steps, team)
        learner.model.eval()
        with torch.no_grad():
            testing = _seconds_a_batch(lambda batch: learner.model(batch[0]), learner.test_loader.epoch(), 2, team)
    return training * len(learner.train_loader) + testing * len(learner.test_loader)


def _seconds_a_batch(work: Callable[[Any], object], batches: Iterable[Any], count: int, team: Processes) -> float:
    """The mean time to fetch and process a batch; the first, which is slower, counts only if it is the only one."""
    times = []
    started = time.perf_counter()
    for batch in itertools.islice(batches, count + 1):
        work(batch)
        if team.device.type == "cuda":
            torch.cuda.synchronize(team.device)
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
    times = times[1:] or times
    return sum(times) / max(1, len(times))


def stopwatch(device: torch.device, calls: int = 1) -> Callable[[Callable[[], object]], float]:
    """What times a function: the seconds of a call, on average over so many calls in a row.

    A GPU is timed by its own clock (CUDA events), from when it has nothing else to do until it has done all of this.
    """

    def on_cpu(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls

    def on_gpu(function: Callable[[], object]) -> float:
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            start.record()
            for _ in range(calls):
                function()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end)) / 1000 / calls

    return on_gpu if device.type == "cuda" else on_cpu


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 3,
    clock: Callable[[Callable[[], object]], float] = stopwatch(torch.device("cpu")),  # noqa: B008
) -> dict[str, list[float]]:
    """Time each function in each round: A, B, C, A, B, C, ... so that drift of the machine affects all alike."""
    for _ in range(warmup):
        for function in functions.values():
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, function in functions.items():
                times[name].append(clock(function))
    finally:
        gc.enable()
    return times


def ratio(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratio, computed per round."""
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, low, high


def spread(times: list[float], base: list[float]) -> str:
    """The ratio by round, as ``1.05 [1.04, 1.07]``."""
    middle, low, high = ratio(times, base)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    header = list(header)
    yield "| " + " | ".join(header) + " |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"


def training_step(
    model: nn.Module, x: Tensor, precision: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
) -> Callable[[], None]:
    """A function that runs forward (within ``precision()``) and backward, with fresh gradients each time."""
    parameters = list(model.parameters())
    target = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with precision():
            output = model(x)
        loss = nn.functional.cross_entropy(output.float(), target) if output.dim() == 2 else output.square().mean()
        loss.backward()

    return step


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes saved for the backward pass: each storage once, without parameters and the input batch."""
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
