"""``balnorm bench --check``: whether a device computes what it should, how fast, and in how much memory.

It is for GPUs, on which nobody has run this package yet, and writes one file of Markdown to post. Every part has a
process of its own: after an illegal access to memory, which a wrong kernel can make, no call to the GPU works any more
in that process, and a kernel or a compiler may end it. The file is written after each part. On a CPU the same parts
measure smaller networks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from balnorm.bench.console import say
from balnorm.bench.errors import Failure, Stopped, is_out_of_memory, many, one_line
from balnorm.bench.files import write_atomically
from balnorm.bench.models import create_model
from balnorm.bench.norms import NORMS
from balnorm.bench.profiling import interleaved, markdown_table, saved_bytes, spread, stopwatch, training_step
from balnorm.bench.training.learner import autocast
from balnorm.bench.training.machine import ProcessorError, check_precision, environment
from balnorm.functional import backend
from balnorm.layers import (
    BalNormConv2d,
    BalNormConv3d,
    BalNormConvTranspose2d,
    BalNormLinear,
)

__all__ = ["check_device", "known_device"]


def known_device(name: str) -> torch.device:
    """The device, if it can be checked. A ValueError or a Failure says why not."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"the device to check must be cuda, cuda:1 (or another number) or cpu, got {name!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None and torch.version.hip is None:
        raise Failure(
            f"this torch ({torch.__version__}) is built for CPUs only: install one that is built for your GPU"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        why = f" ({one_line(caught[0].message)})" if caught and isinstance(caught[0].message, Warning) else ""
        raise Failure(f"torch finds no GPU here{why}: `nvidia-smi` says whether the driver does")
    if (index := device.index or 0) >= count:
        raise Failure(f"there is no {device}: torch finds {many(count, 'GPU')}, the last one is cuda:{count - 1}")
    return torch.device("cuda", index)


def check_device(device: torch.device, out: Path, rounds: int) -> list[str]:
    """Run all parts, and write the report. Returns what went wrong, a sentence each.

    After Ctrl-C the file has the parts that are done.
    """
    todo = parts(device)
    began, text, problems = time.monotonic(), f"# balnorm {version('balnorm')} on {device}\n", list[str]()
    write_atomically(out, text.encode())
    estimate = math.ceil(sum(part.seconds for part in todo) / 60)
    say(f"{many(len(todo), 'part')}, about {many(estimate, 'minute')} in all, most of it to compile (an estimate).")
    say(f"After each part, {out} has what was measured. Ctrl-C stops.")
    for number, part in enumerate(todo, 1):
        title = f"[{number}/{len(todo)}] {part.title}"
        section: list[str] = []
        try:
            problems += _run(part, title, device, rounds, section)
        except KeyboardInterrupt:
            left = "; ".join(each.title for each in todo[number - 1 :])
            section.append(f"\n*Stopped. Not measured: {left}.*")
            raise Stopped(f"stopped: {out} has what was measured until then") from None
        finally:
            text += "\n" + "\n".join(section) + "\n"
            write_atomically(out, text.encode())
    say(f"done in {_duration(time.monotonic() - began)}")
    return problems


class Part(NamedTuple):
    title: str
    arguments: tuple[str, ...]
    """The name of one of the generators below, and what it takes beyond the device and the rounds."""
    seconds: float
    """A guess."""
    backend: str = "auto"


def parts(device: torch.device) -> list[Part]:
    """What there is to do, in order of importance for each second that it takes."""
    gpu = device.type == "cuda"
    names, eager, compiled = networks(small=not gpu), 45 if gpu else 15, 300 if gpu else 120
    precisions = ("float32", "autocast") if gpu else ("float32",)
    return [
        Part("machine", ("machine",), 15),
        Part("agreement of the kernels", ("agreement", "eager"), 60),
        Part("agreement of torch operations", ("agreement", "eager"), 30, backend="torch"),
        *(
            Part(f"{name}, {precision}, eager", ("timings", name, precision, "eager"), eager)
            for precision in reversed(precisions)
            for name in names
        ),
        Part("agreement of compiled layers", ("agreement", "compiled"), 150 if gpu else 60),
        *(
            Part(f"{name}, {precisions[-1]}, compiled", ("timings", name, precisions[-1], "compiled"), compiled)
            for name in names
        ),
    ]


# --------------------------------------------------------------------------------------------------------------------
# A part in its process
# --------------------------------------------------------------------------------------------------------------------

# How each line of its output begins that is not for the report.
_PROGRESS = "\t"
_PROBLEM = "\v"


def _command(part: Part, device: torch.device, rounds: int) -> list[str]:
    return [sys.executable, "-m", "balnorm.bench.device_check", str(device), str(rounds), *part.arguments]


def _run(part: Part, title: str, device: torch.device, rounds: int, section: list[str]) -> list[str]:
    """Run a part, and add its lines to the section, also after Ctrl-C. Returns what went wrong."""
    began, live, problems = time.monotonic(), sys.stdout.isatty(), list[str]()
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        out, errors = (opened.enter_context((folder / name).open("w")) for name in ("out", "errors"))
        process = subprocess.Popen(
            _command(part, device, rounds), stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
            env={**os.environ, "BALNORM_BACKEND": part.backend},
        )  # fmt: skip
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5 if live else None)
                if live:
                    told = [line for line in _lines(out) if line.startswith(_PROGRESS)] or ["starting"]
                    print(f"\r\033[K{title}: {told[-1].strip()}", end="", flush=True)
        finally:
            process.kill()  # does nothing if it has ended
            process.wait()
            for line in _lines(out):
                if line.startswith(_PROBLEM):
                    problems.append(line.strip())
                    section.append(f"\n**{line.strip()}**\n")
                elif not line.startswith(_PROGRESS):
                    section.append(line)
        if process.returncode:
            problems.append(f"not finished, because {_why(process.returncode, _lines(errors))}")
            section.append(f"\n**{part.title}: {problems[-1]}**")
    found = f"; {many(len(problems), 'problem')}" if problems else ""
    print("\r\033[K" if live else "", end="")
    say(f"{title}: {_duration(time.monotonic() - began)}{found}")
    return [f"{part.title}: {problem}" for problem in problems]


def _lines(file: Any) -> list[str]:
    return Path(file.name).read_text(errors="replace").split("\n")


def _why(code: int, errors: list[str]) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    last = [line for line in errors if line.strip()] or [f"the process ended with code {code}"]
    return one_line(Exception(last[-1]))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _tell(what: str) -> None:
    print(f"{_PROGRESS}{what}", flush=True)


# --------------------------------------------------------------------------------------------------------------------
# The machine
# --------------------------------------------------------------------------------------------------------------------


def machine(device: torch.device, rounds: int) -> Iterator[str]:
    """Hardware, versions and settings."""
    found = environment()
    rows = [["balnorm", f"{found['balnorm']}, commit {found['commit'] or 'unknown'}"], ["date", found["started"][:10]]]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        rows += [
            ["GPU", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"],
            ["processors", f"{properties.multi_processor_count} of capability {properties.major}.{properties.minor}"],
            ["driver", _driver()],
            ["CUDA", f"{torch.version.cuda or torch.version.hip}, cuDNN {cudnn}"],
        ]
    rows += [
        ["torch", f"{found['torch']}, Triton {_version('triton')}, Python {found['python']}"],
        ["CPU", f"{found['processor']}, {found['threads']} threads; {found['platform']}"],
        ["backend", backend(device)],
        ["TF32", f"convolutions {_tf32(torch.backends.cudnn)}, matrices {_tf32(torch.backends.cuda.matmul)}"],
    ]
    yield from markdown_table(["", ""], rows)
    yield ""
    yield "TF32 is as torch has it by default; agreement is measured without it. Times are of forward and backward"
    yield f"passes, with cuDNN's benchmark mode, by CUDA events on a GPU: {rounds} interleaved rounds (A, B, C, A, B,"
    yield "C, ...) after a warm-up; medians, and ratios by round with their quartiles. Peak memory is the most that a"
    yield "step adds to parameters and input (gradients included); kept is what it keeps for the backward pass."


def _tf32(settings: Any) -> str:
    return "on" if settings.allow_tf32 else "off"


def _version(package: str) -> str:
    try:
        return str(importlib.import_module(package).__version__)
    except Exception as error:  # whatever a broken installation raises
        return f"cannot be imported ({one_line(error)})"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return f"unknown ({one_line(error)})"


# --------------------------------------------------------------------------------------------------------------------
# Agreement
# --------------------------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3x3": (lambda: BalNormConv2d(32, 48, 3, padding=1), (8, 32, 20, 20)),
    "3x3, stride 2, position": (
        lambda: BalNormConv2d(32, 48, 3, stride=2, padding=1, mass="position"),
        (8, 32, 20, 20),
    ),
    "7x7, stride 2, of pixels": (lambda: BalNormConv2d(3, 16, 7, stride=2, padding=3), (4, 3, 40, 40)),
    "1x1": (lambda: BalNormConv2d(64, 32, 1), (8, 64, 14, 14)),
    "depthwise": (lambda: BalNormConv2d(32, 32, 3, padding=1, groups=32), (8, 32, 20, 20)),
    "groups, dilated, position, two passes": (
        lambda: BalNormConv2d(32, 32, 3, dilation=2, padding=2, groups=4, mass="position", one_pass=False),
        (8, 32, 15, 15),
    ),
    "centred": (lambda: BalNormConv2d(32, 48, 3, padding=1, centred=True), (8, 32, 20, 20)),
    "statistics of a quarter": (lambda: BalNormConv2d(32, 48, 3, padding=1, stats_fraction=0.25), (8, 32, 20, 20)),
    "volume, position": (lambda: BalNormConv3d(8, 16, 3, padding=1, mass="position"), (2, 8, 10, 10, 10)),
    "transposed": (lambda: BalNormConvTranspose2d(16, 8, 2, stride=2), (8, 16, 10, 10)),
    "linear": (lambda: BalNormLinear(128, 64), (64, 128)),
}
_TO_COMPILE = ("3x3", "3x3, stride 2, position")  # each takes a compiler a while

TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}
"""The largest error, relative to the largest value: ten times that of torch's operations on a CPU, or more."""
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def agreement(device: torch.device, rounds: int, form: str) -> Iterator[str]:  # noqa: ARG001
    """How far layers are from float64 on the CPU, forward and backward."""
    compiled = form == "compiled"
    yield f"## Agreement: {'torch.compile' if compiled else backend(device)}\n"
    yield "Largest error of one training step against float64 by torch operations on the CPU, relative to the largest"
    yield "value: of output and running statistics / of all gradients. float16 and bfloat16 are under autocast.\n"
    precisions = []
    for precision in TOLERANCES:
        try:
            check_precision(precision, device.type)
        except ProcessorError as error:  # noqa: PERF203
            yield f"{one_line(error)}.\n"
        else:
            precisions.append(precision)
    columns = [(precision, last) for precision in precisions for last in ((True,) if compiled else (False, True))]
    worst, rows = dict.fromkeys(TOLERANCES, 0.0), []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), _matrices_without_tf32():
        for name in _TO_COMPILE if compiled else LAYERS:
            build, shape = LAYERS[name]
            row = [name]
            for precision, last in columns:
                _tell(f"{name}, {precision}{', channels last' if last else ''}")
                if last and len(shape) not in _LAST:
                    row.append("")
                    continue
                try:
                    forward, backward = errors_of(build, shape, precision, last, compiled, device)
                except Exception as error:  # it is to be reported, whatever it is
                    if _is_broken(error):
                        raise
                    row.append("failed")
                    print(f"{_PROBLEM}{name}, {precision}: {one_line(error)}", flush=True)
                    continue
                worst[precision] = max(worst[precision], forward, backward)
                row.append(f"{forward:.0e} / {backward:.0e}")
                if not max(forward, backward) <= TOLERANCES[precision]:
                    row[-1] = f"**{row[-1]}**"
                    print(f"{_PROBLEM}{name}, {precision}: differs by {max(forward, backward):.1e}", flush=True)
            rows.append(row)
    header = ["layer", *(f"{precision}{', channels last' if last else ''}" for precision, last in columns)]
    yield from markdown_table(header, rows)
    limits = ", ".join(
        f"{worst[name]:.0e} in {name} (limit {limit:.0e})" for name, limit in TOLERANCES.items() if name in precisions
    )
    yield f"\nLargest: {limits}. Afterwards the backend was: {backend(device)}."


def errors_of(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    precision: str,
    last: bool,
    compiled: bool,
    device: torch.device,
) -> tuple[float, float]:
    """The largest relative error of a layer's outputs and statistics, and of its gradients."""
    torch.manual_seed(0)
    low = getattr(torch, precision)
    layer: Any = build()
    exact = copy.deepcopy(layer).double()
    x = torch.randn(shape)
    x = (x if layer.options.centred else x.relu()).to(low).double()
    with _EveryOperation():  # type: ignore[no-untyped-call]
        dy = torch.randn_like(exact(x)).to(low).double()
        exact.reset_running_stats()
        expected = step_of(exact, exact, x, dy)
    order = _LAST[len(shape)] if last else torch.contiguous_format
    layer = layer.to(device).to(memory_format=order)
    x, dy = (each.to(device, torch.float32).contiguous(memory_format=order) for each in (x, dy))
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    with torch.autocast(device.type, low, enabled=low is not torch.float32, cache_enabled=False):
        found = step_of(run, layer, x, dy)
    errors = {}
    for name, value in expected.items():
        error = (found[name].double().cpu() - value).abs().max() / value.abs().max()
        errors[name] = math.inf if error.isnan() else float(error)
    ours = [name for name in errors if name.startswith("gradient")]
    return max(errors[name] for name in errors if name not in ours), max(errors[name] for name in ours)


def step_of(run: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """What a training step gives: output, running statistics and gradients."""
    x = x.detach().requires_grad_()
    y = run(x)
    y.backward(dy.to(y.dtype))  # type: ignore[no-untyped-call]
    given = {"x": x, **dict(layer.named_parameters())}
    gradients = {f"gradient of {name}": each.grad for name, each in given.items() if each.grad is not None}
    buffers = {name: each for name, each in layer.named_buffers() if name.startswith("running")}
    return {"output": y.detach(), **buffers, **gradients}


class _EveryOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Watches every operation, which kernels of ours cannot be: torch's operations do their work."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


@contextlib.contextmanager
def _matrices_without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _is_broken(error: Exception) -> bool:
    """Whether the GPU is of no more use to this process."""
    return "CUDA error" in str(error) or "HIP error" in str(error)


# --------------------------------------------------------------------------------------------------------------------
# Time and memory
# --------------------------------------------------------------------------------------------------------------------

METHODS = ("none", "batchnorm", "groupnorm", "balnorm")


class Network(NamedTuple):
    build: Callable[[str], nn.Module]
    """With a norm."""
    shape: tuple[int, ...]
    """Of the input."""

    @property
    def order(self) -> torch.memory_format:
        """What GPUs compute fastest: channels_last for images; not for volumes."""
        return torch.channels_last if len(self.shape) == 4 else torch.contiguous_format


def networks(small: bool) -> dict[str, Network]:
    """Those of which training steps are measured: on GPUs; or small ones, for CPUs."""

    def of(model: str, **options: Any) -> Callable[[str], nn.Module]:
        return lambda norm: create_model(model, norm, **options)

    if small:
        return {
            "ResNet-50": Network(of("resnet50", width=8), (2, 3, 32, 32)),
            "WRN-20": Network(of("wide_resnet", width=4), (4, 3, 16, 16)),
            "3D U-Net": Network(functools.partial(UNet, width=4, levels=1), (1, 1, 12, 12, 12)),
        }
    return {
        "ResNet-50": Network(of("resnet50", num_classes=1000), (64, 3, 224, 224)),
        "WRN-20": Network(of("wide_resnet"), (128, 3, 32, 32)),
        "3D U-Net": Network(UNet, (2, 1, 96, 96, 96)),
    }


class UNet(nn.Module):
    """A network of the usual form for volumes: two convolutions, then the same at half the resolution, and two more.

    Its input and its output are what the convolutions are given, ``width`` channels come out.
    """

    def __init__(self, norm: str, inputs: int = 1, width: int = 32, levels: int = 3) -> None:
        super().__init__()
        self.enter = _twice(norm, inputs, width)
        self.below = UNet(norm, width, 2 * width, levels - 1) if levels else None
        self.leave = _twice(norm, 3 * width, width) if levels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.below is not None:
            x = torch.cat([F.interpolate(self.below(F.max_pool3d(x, 2)), scale_factor=2.0), x], 1)
        return self.leave(x)  # type: ignore[no-any-return]


def _twice(norm: str, inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        if norm == "balnorm":
            layers += [BalNormConv3d(channels, outputs, 3, padding=1)]
        else:
            after = nn.BatchNorm3d(outputs) if norm == "batchnorm" else NORMS[norm].norm(outputs)
            layers += [nn.Conv3d(channels, outputs, 3, padding=1, bias=norm == "none"), after]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def timings(device: torch.device, rounds: int, name: str, precision: str, form: str) -> Iterator[str]:
    """Time and memory of training steps of a network with every norm."""
    network = networks(small=device.type != "cuda")[name]
    gpu = device.type == "cuda"
    if precision == "autocast":
        # Where bfloat16 is emulated, nobody trains in it.
        precision = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    yield f"## {name}, {precision if precision == 'float32' else f'{precision} autocast'}, {form}"
    torch.backends.cudnn.benchmark = True
    batch, *size = network.shape
    while True:
        try:
            measured = measure(network, batch, device, rounds, precision, form == "compiled")
        except Exception as error:  # also of other classes, as one that a compiler passes on
            if not is_out_of_memory(error) or batch == 1:
                raise
        else:
            break
        yield f"\nOut of memory with batch {batch}: half of it."
        batch //= 2
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    order = "channels last" if network.order is torch.channels_last else "contiguous"
    yield f"\nBatch {batch} of {'x'.join(map(str, size))}, {order}; n = {rounds}.\n"
    yield from _table(measured)
    yield f"\nAfterwards the backend was: {backend(device)}."


class Measured(NamedTuple):
    first: float
    """Seconds of the first step, in which kernels are compiled."""
    peak: int | None
    kept: int | None
    times: list[float]


def measure(
    network: Network, batch: int, device: torch.device, rounds: int, precision: str, compiled: bool
) -> dict[str, Measured]:
    """Measure training steps of a network with each norm. Tells of norms that fail, and leaves them out."""
    order = network.order
    x = torch.rand(batch, *network.shape[1:], device=device).contiguous(memory_format=order)
    context = functools.partial(autocast, precision, device)
    steps: dict[str, Callable[[], None]] = {}
    found: dict[str, tuple[float, int | None, int | None]] = {}
    seconds = stopwatch(device)
    for norm in METHODS:
        _tell(f"{norm}, {'compiling' if compiled else 'first steps'}")
        torch.manual_seed(0)
        try:
            model = network.build(norm).to(device).to(memory_format=order)  # type: ignore[call-overload]
            kept = None
            if not compiled:
                with context():
                    kept = saved_bytes(model, x)
            run: Any = torch.compile(model, fullgraph=True) if compiled else model
            step = training_step(run, x, precision=context)
            first = seconds(step)
            step()  # cuDNN has tried its algorithms by now, some of which need much memory
            found[norm] = first, _peak(model, step, device), kept
        except Exception as error:  # one that fails must not lose the others
            if is_out_of_memory(error) or _is_broken(error):
                raise
            print(f"{_PROBLEM}{norm} failed: {one_line(error)}", flush=True)
        else:
            steps[norm] = step
    if not steps:
        return {}
    calls = 1
    if device.type == "cuda":  # long enough that the launch of the first kernel does not count
        calls = math.ceil(0.1 / min(seconds(step) for step in steps.values()))
    done = itertools.count(1)

    def clock(function: Callable[[], object]) -> float:
        _tell(f"round {(next(done) - 1) // len(steps) + 1} of {rounds}")
        return stopwatch(device, calls)(function)

    times = interleaved(steps, rounds, clock=clock)
    return {norm: Measured(*found[norm], times[norm]) for norm in steps}


def _peak(model: nn.Module, step: Callable[[], None], device: torch.device) -> int | None:
    """The most bytes that a step needs beyond what is there before. ``None`` on a CPU, whose memory is not counted."""
    if device.type != "cuda":
        return None
    for parameter in model.parameters():
        parameter.grad = None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def _table(measured: dict[str, Measured]) -> Iterator[str]:
    rows = []
    for norm, (first, peak, kept, times) in measured.items():
        row = [norm, f"{1000 * statistics.median(times):.2f}"]
        row += [spread(times, measured[base].times) if base in measured else "" for base in ("none", "batchnorm")]
        for name, value in (("peak", peak), ("kept", kept)):
            base = getattr(measured.get("batchnorm"), name, None)
            row += ["", ""] if value is None else [f"{value / 2**20:.1f}", f"{value / base:.2f}" if base else ""]
        rows.append([*row, f"{first:.1f}"])
    header = ["norm", "ms", "time / none", "time / batchnorm", "peak MiB", "/ batchnorm", "kept MiB", "/ batchnorm"]
    yield from markdown_table([*header, "first step, s"], rows)


def main(arguments: list[str]) -> None:
    """Run a part, as :func:`_command` starts it."""
    device, rounds, name, *rest = arguments
    generators: dict[str, Callable[..., Iterator[str]]] = {
        "machine": machine,
        "agreement": agreement,
        "timings": timings,
    }
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
    for line in generators[name](torch.device(device), int(rounds), *rest):
        print(line, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process, and the first one ends this one
    main(sys.argv[1:])
