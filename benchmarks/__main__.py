"""``python -m benchmarks``: measure everything, and write it to benchmarks/results as Markdown of today's date.

``python -m benchmarks networks memory`` measures only these parts; the parts are the functions in PARTS.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import functools
import itertools
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from balnorm import BalNormConv2d, BalNormLayer, convert
from balnorm._core.backends import cpu
from balnorm.bench.data import Images, MemoryLoader, channel_statistics
from balnorm.bench.profiling import interleaved, markdown_table, ratio, saved_bytes, spread, training_step
from balnorm.bench.recipes import get_recipe
from balnorm.bench.training import images, learner, trainer
from balnorm.bench.training.machine import ProcessorError, check_precision, environment
from benchmarks.gpu import gpu
from benchmarks.memory import VOLUMES, largest_cube, peak_memory_of_step
from benchmarks.networks import COMPILED, METHODS, NETWORKS
from benchmarks.zoo import TIMM, TORCHVISION, as_trained, build, exactness, import_timm, trial

RESULTS = Path(__file__).parent / "results"
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"what to measure: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds of each comparison (default: 21)")
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds must be at least 2, for quartiles, got {arguments.rounds}")
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")

    today = dt.date.today().isoformat()
    name = "-".join([today, *arguments.parts])
    page = RESULTS / f"{name}.md"
    text = f"# Benchmarks, {today}\n\n{machine()}\n\n"
    for part in arguments.parts or PARTS:
        print(f"\n--- {part}", flush=True)
        for line in PARTS[part](arguments.rounds):
            print(line, flush=True)
            text += line + "\n"
        text += "\n"
    RESULTS.mkdir(exist_ok=True)
    page.write_text(text)
    print(f"\nwritten to {page}")


def machine() -> str:
    here = environment()
    return (
        f"{here['processor']}, {here['threads']} threads; {here['platform']}; Python {here['python']}, "
        f"torch {here['torch']}, backend: {here['backend']}. float32 unless a heading says otherwise. A step is a "
        "forward and a backward pass. Ratios are taken by round of one interleaved run (A, B, C, A, B, C, ...): median "
        "[quartiles]; n is the number of rounds."
    )


def in_layout(model: nn.Module, shape: tuple[int, ...], layout: str) -> tuple[nn.Module, torch.Tensor]:
    return model.to(memory_format=LAYOUTS[layout]), torch.rand(shape).contiguous(memory_format=LAYOUTS[layout])


def better_layout(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> str:
    """The memory format in which a model trains faster."""
    times = interleaved({layout: training_step(*in_layout(build(), shape, layout)) for layout in LAYOUTS}, 3, warmup=1)
    return min(times, key=lambda layout: statistics.median(times[layout]))


def networks(rounds: int) -> Iterable[str]:
    """Training steps of whole networks, eager; and how far BalNorm is from the least that it could cost."""
    yield "## Networks, eager"
    speed = bytes_per_second(rounds)
    limits = []
    for name, network in NETWORKS.items():
        shape = network.shape
        steps: dict[str, Step] = {}
        layouts, saved = {}, {}
        for method in METHODS:
            torch.manual_seed(0)
            layouts[method] = better_layout(lambda: network.build(method), shape)  # noqa: B023
            model, x = in_layout(network.build(method), shape, layouts[method])
            saved[method] = saved_bytes(model, x)
            steps[method] = training_step(model, x)
        alone = interleaved({"none": steps["none"]}, 3)["none"]
        n = rounds if statistics.median(alone) > 0.05 else 10 * rounds  # steps of a few milliseconds vary more
        times = interleaved(steps, n)
        yield f"\n### {name} (n = {n})\n"
        yield from markdown_table(
            [
                "method",
                "layout",
                "ms",
                "time / none",
                "time / batchnorm",
                "saved MiB",
                "saved / none",
                "saved / batchnorm",
            ],
            [
                [
                    method,
                    layouts[method],
                    f"{1e3 * statistics.median(times[method]):.1f}",
                    spread(times[method], times["none"]),
                    spread(times[method], times["batchnorm"]),
                    f"{saved[method] / 2**20:.1f}",
                    f"{saved[method] / saved['none']:.2f}" if saved["none"] else "",
                    f"{saved[method] / saved['batchnorm']:.2f}",
                ]
                for method in METHODS
            ],
        )
        overhead = statistics.median(a - b for a, b in zip(times["balnorm"], times["none"], strict=True))
        model, x = in_layout(network.build("balnorm"), shape, layouts["balnorm"])
        limits.append([name, f"{1e3 * overhead:.2f}", *limit_row(model, x, speed, rounds)])
    yield "\n### How far from the limit\n"
    yield "What BalNorm adds to a step, in milliseconds, against the least that it has to move through memory: one"
    yield "read of each layer's input, a read and a write of its gradient, and seven passes over the weight, all at"
    yield f"the speed of a copy of 256 MiB, {speed / 1e9:.1f} GB/s. (Small layers stay in faster caches.)"
    yield "What the native calls do not take goes to Python, to small calls of torch and to cold caches.\n"
    yield from markdown_table(["network", "BalNorm - none", "limit", "native calls", "their number"], limits)


def bytes_per_second(rounds: int) -> float:
    """How fast torch copies memory, reads and writes together."""
    source = torch.rand(2**26)
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, rounds)
    return 2 * source.nbytes / statistics.median(times["copy"])


def limit_row(model: nn.Module, x: torch.Tensor, speed: float, rounds: int) -> list[str]:
    """Milliseconds of a step for the bytes that every balanced layer has to move, and in its native calls."""
    least, calls = 0, [0.0]

    def count(layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        nonlocal least
        (x,) = inputs
        assert isinstance(layer.weight, torch.Tensor)
        least += x.nbytes * (3 if x.requires_grad else 1) + 7 * layer.weight.nbytes

    def timed(*arguments: Any) -> int:
        start = time.perf_counter()
        code = call(*arguments)
        calls.append(time.perf_counter() - start)
        return code

    hooks = [m.register_forward_pre_hook(count) for m in model.modules() if isinstance(m, BalNormLayer)]
    model(x)
    for hook in hooks:
        hook.remove()
    call, step, sums = cpu._call, training_step(model, x), []
    with mock.patch.object(cpu, "_call", timed):
        for _ in range(2 + rounds):
            calls.clear()
            step()
            sums.append(sum(calls))
    return [f"{1e3 * least / speed:.2f}", f"{1e3 * statistics.median(sums[2:]):.2f}", str(len(calls))]


def compiled(rounds: int) -> Iterable[str]:
    """Training steps of whole networks under torch.compile."""

    def step_of(model: nn.Module, x: torch.Tensor) -> Step:
        torch._dynamo.reset()
        step = training_step(torch.compile(model, fullgraph=True), x)  # type: ignore[arg-type]
        step()
        return step

    yield "## Networks, torch.compile"
    for name in COMPILED:
        yield from in_channels_last(name, step_of, rounds)


def bfloat16(rounds: int) -> Iterable[str]:
    """Training steps of whole networks under autocast."""
    yield "## Networks, eager, bfloat16 autocast"
    try:
        check_precision("bfloat16", "cpu")
    except ProcessorError as error:
        yield f"\nNot measured: {error}"
        return
    context = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    for name in list(NETWORKS)[:4]:  # in the small ones little is left but Python, which has no precision
        yield from in_channels_last(name, lambda model, x: training_step(model, x, precision=context), rounds)


def in_channels_last(name: str, step_of: Callable[[nn.Module, torch.Tensor], Step], rounds: int) -> Iterable[str]:
    """A table of one network's training steps, all in channels_last."""
    network = NETWORKS[name]
    steps = {method: step_of(*in_layout(network.build(method), network.shape, "channels_last")) for method in METHODS}
    times = interleaved(steps, rounds)
    yield f"\n### {name}, channels_last (n = {rounds})\n"
    yield from markdown_table(
        ["method", "ms", "time / none", "time / batchnorm"],
        [
            [
                method,
                f"{1e3 * statistics.median(times[method]):.0f}",
                spread(times[method], times["none"]),
                spread(times[method], times["batchnorm"]),
            ]
            for method in steps
        ],
    )


def growth(rounds: int) -> Iterable[str]:
    """How the cost of one layer grows with batch, width, kernel and image."""
    yield "## One layer: how cost grows\n"
    yield f"A 3x3 convolution, 64 to 64 channels, 32x32 images, batch 32, but for what the row changes (n = {rounds})."
    default = {"batch": 32, "width": 64, "kernel": 3, "image": 32}
    changes = {
        "batch": (1, 4, 16, 64, 256),
        "width": (16, 64, 256, 512),
        "kernel": (1, 3, 5, 7),
        "image": (8, 16, 32, 64, 112, 224),
    }
    rows = []
    for what, values in changes.items():
        for value in values:
            spec = {**default, what: value}
            if what == "width":
                spec["image"] = 16
            if what == "image" and value > 64:
                spec["batch"] = 4
            rows.append(
                [f"{what} {value}", *one_layer(spec["batch"], spec["width"], spec["kernel"], spec["image"], rounds)]
            )
    yield "(Rows of width have 16x16 images; rows of images above 64x64 have batch 4.)\n"
    yield from markdown_table(["", "none, ms", "batchnorm / none", "balnorm / none", "position / channel"], rows)


def one_layer(batch: int, width: int, kernel: int, image: int, rounds: int) -> list[str]:
    steps = {}
    for method in ("none", "batchnorm", "balnorm", "position mass"):
        conv, norm = METHODS[method].conv, METHODS[method].norm
        # the leading ReLU stands for the layer before: its output needs a gradient, as in a network
        layer = nn.Sequential(Scale(), nn.ReLU(), conv(width, width, kernel, padding=kernel // 2), norm(width))
        steps[method] = training_step(*in_layout(layer, (batch, width, image, image), "channels_last"))
    times = interleaved(steps, rounds)
    return [
        f"{1e3 * statistics.median(times['none']):.1f}",
        spread(times["batchnorm"], times["none"]),
        spread(times["balnorm"], times["none"]),
        spread(times["position mass"], times["balnorm"]),
    ]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def inference(rounds: int) -> Iterable[str]:
    """A folded layer against a plain convolution."""
    yield "## Inference\n"
    x = torch.rand(32, 64, 32, 32).contiguous(memory_format=torch.channels_last)
    layer = BalNormConv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last)
    layer(x)  # takes its statistics
    layer.eval()
    layers = {"plain": nn.Conv2d(64, 64, 3, padding=1).to(memory_format=torch.channels_last), "folded": layer.fuse()}
    layers["not folded"] = layer

    def forward(module: nn.Module) -> Step:
        def step() -> None:
            with torch.inference_mode():
                module(x)

        return step

    times = interleaved({name: forward(module) for name, module in layers.items()}, 5 * rounds)
    yield f"One layer, 3x3, 64 to 64 channels, 32x32 images, batch 32, channels_last (n = {5 * rounds}).\n"
    yield from markdown_table(
        ["layer", "time / plain convolution"],
        [[name, spread(times[name], times["plain"])] for name in ("folded", "not folded")],
    )


def memory(rounds: int) -> Iterable[str]:  # noqa: ARG001
    """Peak resident memory of a training step in a fresh process."""
    name, batch = "ResNet-50, 224x224, batch 4", 16
    peaks = {method: peak_memory_of_step(name, method, batch) for method in METHODS}
    yield "## Peak memory\n"
    yield f"ResNet-50, 224x224, batch {batch}, channels_last: what two training steps add to the resident memory of a"
    yield "fresh process that holds the model and the batch (gradients included; one process for each row).\n"
    yield from markdown_table(
        ["method", "MiB", "/ none", "/ batchnorm"],
        [
            [method, f"{peak / 2**20:.0f}", f"{peak / peaks['none']:.2f}", f"{peak / peaks['batchnorm']:.2f}"]
            for method, peak in peaks.items()
        ],
    )


def cubes(rounds: int) -> Iterable[str]:  # noqa: ARG001
    """The largest cube that a 3D U-Net trains on in 4 GiB."""
    unet, size = runpy.run_path(str(VOLUMES))["UNet"], (36, 52, 36)
    yield "## Cubes\n"
    yield "The U-Net of examples/volumes.py in batches of two: what it keeps for the backward pass of volumes of"
    yield f"{' x '.join(map(str, size))} voxels, and the edge of the largest cube (a multiple of 4) on which two"
    yield "training steps have a peak of at most 4 GiB in a process of their own, all resident memory included.\n"
    rows = []
    for norm in ("none", "balnorm", "equalised", "batchnorm", "instancenorm", "groupnorm"):
        kept = saved_bytes(unet(norm), torch.rand(2, 1, *size))
        edge, peak = largest_cube(norm, 4 * 2**30)
        rows.append([norm, f"{kept / 2**20:.0f}", str(edge), f"{edge**3 / 1e6:.2f}", f"{peak / 2**20:.0f}"])
        print(*rows[-1], flush=True)
    yield from markdown_table(["norm", "MiB kept", "largest edge", "million voxels", "peak, MiB"], rows)


def profile(rounds: int) -> Iterable[str]:
    """Where a training step spends its time, operation by operation."""
    yield "## Profile"
    for name, network in NETWORKS.items():
        if network.model == "layer" or network.size > 32:  # the one is too small for it, the other takes too long
            continue
        shape = (network.batch, 3, network.size, network.size)
        yield f"\n### {name}, channels_last, {rounds} steps under torch.profiler\n"
        rows = {}
        for method in ("none", "batchnorm", "balnorm"):
            step = training_step(*in_layout(network.build(method), shape, "channels_last"))
            step()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                for _ in range(rounds):
                    step()
            rows[method] = [method, *profile_row(profiler, rounds)]
        yield from markdown_table(
            ["method", "calls of small operations", "their ms", "convolutions, ms", "everything else, ms"],
            rows.values(),
        )
    yield "\nA small operation takes less than 0.1 ms on average: mostly the cost of the call, not of the arithmetic."


def profile_row(profiler: torch.profiler.profile, steps: int) -> list[str]:
    small_calls, small, convolutions, rest = 0, 0.0, 0.0, 0.0
    for event in profiler.key_averages():
        milliseconds = event.self_cpu_time_total / 1e3 / steps
        if "convolution" in event.key.lower():
            convolutions += milliseconds
        elif event.self_cpu_time_total / event.count < 100:
            small_calls, small = small_calls + event.count // steps, small + milliseconds
        else:
            rest += milliseconds
    return [str(small_calls), f"{small:.1f}", f"{convolutions:.1f}", f"{rest:.1f}"]


def families(rounds: int) -> Iterable[str]:
    """Networks with other activations than ReLU, converted: bytes and time with and without balnorm.activations."""
    batch = 8
    yield "## Families: bytes kept for backward, and time\n"
    yield f"{versions()}, 224x224 pixels, batch {batch}, channels_last, converted for training from scratch."
    yield "Saved-tensor hooks count each storage once, parameters and input left out. BalNorm:"
    yield "`convert(model, lean=False)`; lean: `convert(model)`. Time of a training step, where anything differs: lean"
    yield f"against BalNorm (n = {rounds}).\n"
    yield from markdown_table(
        ["network", "activations", "BatchNorm, MiB", "BalNorm / BatchNorm", "lean / BatchNorm", "replaced", "time"],
        (family_row(name, batch, rounds) for name in FAMILIES),
    )


FAMILIES = {
    "resnet50": "ReLU",
    "densenet121": "ReLU",
    "regnety_002": "ReLU, gates",
    "mobilenetv2_100": "ReLU6",
    "efficientnet_b0": "SiLU, gates",
}


def family_row(name: str, batch: int, rounds: int) -> list[str]:
    """Count a network's bytes in three forms; time the last two, if they differ."""
    x = torch.rand(batch, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    models, kept, replaced = {}, {}, 0
    for form in ("batchnorm", "balnorm", "lean"):
        torch.manual_seed(0)
        model = import_timm().create_model(name)
        if form != "batchnorm":
            model, report = convert(model, example_input=x[:1], lean=form == "lean")
            replaced = len(report.lean)
        models[form] = model.to(memory_format=torch.channels_last)
        kept[form] = saved_bytes(models[form], x)
    time = ""
    if replaced:
        steps = {form: training_step(models[form], x) for form in ("balnorm", "lean")}
        times = interleaved(steps, rounds, warmup=1)
        time = spread(times["lean"], times["balnorm"])
    shares = [f"{kept[form] / kept['batchnorm']:.2f}" for form in ("balnorm", "lean")]
    return [name, FAMILIES[name], f"{kept['batchnorm'] / 2**20:.0f}", *shares, str(replaced), time]


def input_pipeline(rounds: int) -> Iterable[str]:
    """Batches from memory, against a training step and against a DataLoader that transforms image by image."""
    random = np.random.default_rng(0)
    data = Images(random.integers(0, 256, (10_240, 3, 32, 32), np.uint8), random.integers(0, 10, 10_240), ("",) * 10)
    statistics_ = channel_statistics(data.images)
    loader = MemoryLoader(data, 128, training=True, padding=4, flip=True, pixels="standardised", statistics=statistics_)
    network = NETWORKS["WRN-20 width 16, batch 128"]
    model, x = in_layout(network.build("balnorm"), (128, 3, 32, 32), "channels_last")
    batches = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
    times = interleaved({"step": training_step(model, x), "batch": lambda: next(batches)}, 5 * rounds)
    yield "## Input pipeline\n"
    yield "CIFAR-shaped images in memory, batch 128: crop after padding by 4, flip, standardise."
    share, low, high = ratio(times["batch"], times["step"])
    batch_ms, step_ms = (1e3 * statistics.median(times[name]) for name in ("batch", "step"))
    yield f"A batch takes {batch_ms:.1f} ms, a training step of WRN-20 width 16 with BalNorm {step_ms:.0f} ms:"
    yield f"{share:.1%} [{low:.1%}, {high:.1%}] (n = {5 * rounds}).\n"

    loaders: dict[str, Callable[[], Iterable[object]]] = {"balnorm.bench.data.MemoryLoader": lambda: loader.epoch(0)}
    for workers in (0, 2):
        usual = per_image_loader(data, statistics_, workers)
        loaders[f"DataLoader, torchvision transforms, {workers} workers"] = lambda usual=usual: usual  # type: ignore[misc]
    epochs = {name: (lambda make=make: sum(1 for _ in make())) for name, make in loaders.items()}  # type: ignore[misc]
    times = interleaved(epochs, 5, warmup=1)
    ours = times["balnorm.bench.data.MemoryLoader"]
    yield from markdown_table(
        ["loader", "images a second", "its time / ours"],
        [[name, f"{10_240 / statistics.median(t):,.0f}", spread(t, ours)] for name, t in times.items()],
    )


def per_image_loader(data: Images, channels: Any, workers: int) -> Iterable[object]:
    """What most scripts do: a PIL image, a crop, a flip, a tensor, one after the other."""
    import_timm()
    from PIL import Image
    from torchvision import transforms

    mean, std = (values.tolist() for values in channels)
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )

    class PerImage(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> Any:
            return transform(Image.fromarray(data.images[index].transpose(1, 2, 0))), int(data.labels[index])

    return torch.utils.data.DataLoader(PerImage(), 128, shuffle=True, num_workers=workers, drop_last=True)


def training(rounds: int) -> Iterable[str]:
    """What the trainer adds to forward, backward and step; and how long importing and help take."""
    random = np.random.default_rng(0)
    data = Images(random.integers(0, 256, (5_000, 3, 32, 32), np.uint8), random.integers(0, 10, 5_000), ("",) * 10)
    spent = {"step": 0.0, "evaluate": 0.0}

    def timed(name: str) -> Callable[..., Any]:
        function = getattr(learner.Learner, name)

        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            spent[name] += time.perf_counter() - start
            return result

        return run

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(images, "load", lambda *_, limit, **__: data[np.arange(limit)]))
        for name in spent:
            patches.enter_context(mock.patch.object(learner.Learner, name, timed(name)))
        recipe = dataclasses.replace(get_recipe("cifar10-desk"), epochs=3)
        records = trainer.train(recipe, folder + "/run", show=False)
    total = sum(record["seconds"] for record in records)
    rest = total - sum(spent.values())
    yield "## Trainer\n"
    yield "Three epochs of cifar10-desk on CIFAR-shaped random images, with evaluation and checkpoints:"
    yield f"{total:.1f} s, of which forward, backward and step of training {spent['step']:.1f} s, evaluation"
    yield f"{spent['evaluate']:.1f} s, and all else {rest:.2f} s: {rest / total:.1%}.\n"
    commands = {
        "import torch": ["-c", "import torch"],
        "import torch, and all of balnorm": ["-c", "import torch; from balnorm import *"],
        "balnorm --help": ["-c", "import balnorm_command; balnorm_command.main()", "--help"],
        "balnorm train digits --help": ["-m", "balnorm", "train", "digits", "--help"],
    }
    functions = {
        name: functools.partial(subprocess.run, [sys.executable, *command], check=True, capture_output=True)
        for name, command in commands.items()
    }
    times = interleaved(functions, rounds, warmup=1)
    yield from markdown_table(["", "seconds"], [[name, f"{statistics.median(t):.2f}"] for name, t in times.items()])


def zoo(rounds: int) -> Iterable[str]:  # noqa: ARG001
    """Networks of timm and torchvision, converted, trained for one step and folded."""

    def row(library: str, name: str, size: int) -> list[str]:
        result = trial(*build(library, name))
        norms = sum(row.is_norm for row in result.report.rows)
        share = f"{result.balanced} of {result.convolutions}"
        kept = f"{norms - len(result.report.removed)} of {norms}"
        loss = f"{result.loss:.2f}" + ("" if result.finite else ", gradients not finite")
        return [f"{library} {name}", str(size), share, str(result.centred), kept, loss, f"{result.difference:.0e}"]

    yield "## Converted networks\n"
    yield f"{versions()}, fresh weights, images as small as each network allows, batch 4."
    yield "Difference: the largest between eval outputs before and after folding, relative to the largest output.\n"
    header = ["network", "pixels", "convolutions balanced", "of them centred", "BatchNorms left", "loss", "difference"]
    yield from markdown_table(header, (row(*network) for network in all_networks()))


def trained(rounds: int) -> Iterable[str]:  # noqa: ARG001
    """Networks of timm and torchvision, as if they were trained, converted: how exact?"""

    def row(library: str, name: str, size: int) -> list[str]:  # noqa: ARG001
        model, x = build(library, name)
        convolutions = sum(isinstance(module, _ConvNd) for module in model.modules())
        result = exactness(as_trained(model, x), x)
        norms, affine = sum(row.is_norm for row in result.report.rows), len(result.report.affine)
        share = f"{len(result.report.balanced)} of {convolutions}"
        kept = f"{norms - len(result.report.removed) - affine} of {norms}"
        errors = (result.double, result.single, result.folded, result.folded_again)
        return [f"{library} {name}", share, str(affine), kept, *(f"{error:.0e}" for error in errors)]

    yield "## Trained networks, converted\n"
    yield f"{versions()}, images as small as each network allows, batch 4."
    yield "Every BatchNorm has the statistics of one batch, each perturbed by up to half, and weights of both signs,"
    yield "5 % of them 0. Errors: the largest difference from the outputs of the original in float64, relative to the"
    yield "largest output: of the converted network in float64 and in float32; in float32, of the original with its"
    yield "norms folded into the convolutions by torch, and of the converted network after `fold`.\n"
    header = ["network", "layers balanced", "ChannelAffine", "BatchNorms left", "float64", "float32"]
    yield from markdown_table([*header, "folded by torch", "after fold"], (row(*network) for network in all_networks()))


def versions() -> str:
    return f"timm {import_timm().__version__} and torchvision"


def all_networks() -> Iterable[tuple[str, str, int]]:
    for library, networks in (("timm", TIMM), ("torchvision", TORCHVISION)):
        for name, size in networks.items():
            torch.manual_seed(0)
            yield library, name, size


PARTS: dict[str, Callable[[int], Iterable[str]]] = {
    "networks": networks,
    "memory": memory,
    "cubes": cubes,
    "families": families,
    "growth": growth,
    "inference": inference,
    "compiled": compiled,
    "bfloat16": bfloat16,
    "profile": profile,
    "input": input_pipeline,
    "training": training,
    "zoo": zoo,
    "trained": trained,
    "gpu": gpu,
}

if __name__ == "__main__":
    main()
