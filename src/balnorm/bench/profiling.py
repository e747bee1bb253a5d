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
from torch.utils._pytree import tree_leaves

from balnorm.bench.training.config import Recipe
from balnorm.bench.training.learner import Learner, autocast, make_network
from balnorm.bench.training.processes import Processes, processes
from balnorm.text_table import text_table

__all__ = [
    "bench", "bench_models", "epoch_seconds", "interleaved", "markdown_table", "ratio", "saved_bytes", "spread",
    "stopwatch", "training_step",
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
    first = recipes[0]
    x = torch.rand(first.batch_size, *image, device=device).contiguous(memory_format=torch.channels_last)
    models: dict[str, nn.Module] = {}
    for recipe in recipes:
        torch.manual_seed(recipe.seed)
        model = make_network(recipe, channels, classes).to(device)
        models[recipe.method] = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return bench_models(models, (x,), rounds, functools.partial(autocast, first.precision, device), first.compile)


def bench_models(
    models: Mapping[str, nn.Module],
    inputs: Sequence[Tensor],
    rounds: int,
    precision: Callable[[], AbstractContextManager[Any]],
    compile: bool,
) -> str:
    """The same table of any models, which are where their inputs are; the first is the one to compare with."""
    steps, kept = {}, {}
    for name, model in models.items():
        with precision():
            kept[name] = saved_bytes(model, *inputs)
        compiled: Any = torch.compile(model) if compile else model
        steps[name] = training_step(compiled, *inputs, precision=precision)
    times, first = interleaved(steps, rounds, clock=stopwatch(inputs[0].device)), next(iter(models))
    rows = []
    for name in steps:
        middle, low, high = ratio(times[name], times[first])
        rows.append(
            [
                name,
                f"{1000 * statistics.median(times[name]):.1f}",
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
                f"{kept[name] / 2**20:.1f}",
                f"{kept[name] / kept[first]:.2f}" if kept[first] else "",
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
    model: nn.Module,
    *inputs: Tensor,
    precision: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[[], None]:
    """A function that runs forward (within ``precision()``) and backward, with fresh gradients each time.

    The loss is the cross-entropy of scores, or else the mean square of every tensor that the model returns.
    """
    parameters = list(model.parameters())
    target = torch.zeros(inputs[0].shape[0], dtype=torch.long, device=inputs[0].device)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        with precision():
            output = model(*inputs)
        if isinstance(output, Tensor) and output.shape[:1] == target.shape and output.dim() == 2:
            loss = nn.functional.cross_entropy(output.float(), target)
        else:
            loss = torch.stack([each.float().square().mean() for each in _outputs(output)]).sum()
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def _outputs(output: Any) -> list[Tensor]:
    """Every tensor in what a model returned that depends on its parameters."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise ValueError("the model returns no tensor that depends on its parameters: there is nothing to train")
    return found


def saved_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes saved for the backward pass: each storage once, without parameters and the input batch."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *inputs]}
    storages: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*inputs)
    del output
    return sum(storages.values())
