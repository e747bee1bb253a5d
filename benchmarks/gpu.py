"""What layers launch on a GPU, counted, compiled and timed on the host without one.

- Launches: a dispatch mode sees what eager torch would launch. Views and allocations launch nothing. A convolution
  itself is left out, but not what its bias adds to it on a GPU: one pass that adds it to y, and one that sums dy.
  Reductions and BatchNorm count as one launch each; in fact they may be up to three.
- Launches of compiled layers: Inductor generates its code for fake CUDA tensors, which is counted (``inductor.py``).
- Compiled kernels: Triton's compiler needs no GPU. The backend runs on meta tensors, with a launch that only compiles,
  so these are the kernels, types and specialisations of real layers.
- Host: the backend runs with a driver that launches nothing.
- Estimate: what normalisation adds to a step of ResNet-50, from the bytes of all these launches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from balnorm import BalNormConv2d, BalNormLayer, convert
from balnorm._core.backends import Running, Setup
from balnorm._core.backends import torch as torch_backend
from balnorm._core.backends import triton as backend
from balnorm._core.matrix import WeightMatrix
from balnorm.bench.models import create_model
from benchmarks.zoo import import_timm

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
"""An A100, an H100 and an MI300."""


def gpu(rounds: int) -> Iterable[str]:
    """Launches, compiled kernels and host time of the backend for GPUs, without a GPU."""
    import triton

    yield "## GPUs, without one\n"
    yield f"Triton {triton.__version__}. No kernel ran on a GPU: these are counts, numbers from compilers, and times"
    yield "of the host.\n"
    yield from launches()
    yield from launches_of_compiled_layers()
    yield from compiled()
    yield from host(rounds)
    yield from estimate()


# --------------------------------------------------------------------------------------------------------------------
# Launches
# --------------------------------------------------------------------------------------------------------------------

_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "is_same_size", "set_"),
    *("view", "_unsafe_view", "as_strided", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze", "slice"),
    *("select", "detach", "alias", "_reshape_alias", "promote_types", "unbind"),
}


class Launches(TorchDispatchMode):
    """What torch's operations would launch on a GPU, and what Triton would, which computes nothing here."""

    def __init__(self) -> None:
        super().__init__()
        self.torch: list[str] = []
        self.ours: list[str] = []
        self.moved: list[int] = []
        """The bytes that each of them reads and writes."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation.overloadpacket.__name__
        if name == "convolution":
            self.torch += ["bias"] * (args[2] is not None)
        elif name == "convolution_backward":
            self.torch += ["sum over dy"] * args[-1][2]
        elif not operation.is_view and name not in _NO_KERNEL:
            self.torch.append(name)
            read = args[1:2] if name == "copy_" else (args, {k: v for k, v in (kwargs or {}).items() if k != "out"})
            self.moved.append(sum(map(_bytes, tree_leaves((read, result)))))
        return result

    def launch(self, kernel: Any, grid: Any, arguments: Any, options: Any) -> None:  # noqa: ARG002
        self.ours.append(kernel.__name__)
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        if kernel.__name__ == "add_to_samples":
            named["again"] = named["dx"]
            if not named["CENTRED"]:
                del named["x"]  # after a ReLU nothing is negative
        self.moved.append(sum(map(_bytes, named.values())))


@contextlib.contextmanager
def chosen(run: Callable[..., Any]) -> Iterator[None]:
    """Layers on any device use the Triton backend, with this in the place of its launches."""
    with (
        mock.patch.object(backend, "run", run),
        mock.patch("balnorm._core.function._setups", {}),
        mock.patch("balnorm._core.backends.choose", return_value=backend),
    ):
        yield


def launches_of(layer: nn.Module, x: Tensor, *, autocast: bool, triton: bool) -> Launches:
    """What one training step launches. On the CPU, with small tensors: autocast has no meta device."""
    seen, leaf = Launches(), x.detach().requires_grad_()
    layer.zero_grad()
    choice = chosen(seen.launch) if triton else contextlib.nullcontext()
    with choice:
        with seen, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = layer(leaf)
        dy = torch.ones_like(y)
        with seen:
            y.backward(dy)
    return seen


def launches() -> Iterable[str]:
    yield "### Launches of a layer\n"
    yield "3x3, 64 to 64 channels, a step forward and backward with its moving averages, without the convolution.\n"
    yield "| layer | float32 | bfloat16 autocast |"
    yield "|---|---|---|"
    x = torch.rand(8, 64, 24, 24).contiguous(memory_format=torch.channels_last)
    layers: dict[str, tuple[nn.Module, bool]] = {
        "BatchNorm": (nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)), False)
    }
    for name, options in (("channel", {}), ("position", {"mass": "position"}), ("centred", {"centred": True})):
        layers[f"BalNorm, {name}, torch operations"] = (BalNormConv2d(64, 64, 3, padding=1, **options), False)
        layers[f"BalNorm, {name}, Triton"] = (BalNormConv2d(64, 64, 3, padding=1, **options), True)
    for name, (layer, triton) in layers.items():
        cells = []
        for autocast in (False, True):
            module = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            seen = launches_of(module, x.bfloat16() if autocast else x, autocast=autocast, triton=triton)
            ours = f" ({len(seen.ours)} of them ours)" if triton else ""
            cells.append(f"{len(seen.torch) + len(seen.ours)}{ours}")
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def launches_of_compiled_layers() -> Iterable[str]:
    from benchmarks import inductor

    yield from inductor.table()


# --------------------------------------------------------------------------------------------------------------------
# Compiled kernels
# --------------------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A balanced layer as a network calls it."""

    name: str
    layer: BalNormLayer
    shape: torch.Size


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks on the meta device, and the shape of their inputs."""
    from examples.volumes import UNet

    with torch.device("meta"):
        mobilenet = import_timm().create_model("mobilenetv2_100")
        convert(mobilenet)
        return {
            "ResNet-50": (create_model("resnet50", "balnorm", num_classes=1000), (256, 3, 224, 224)),
            "MobileNetV2": (mobilenet, (256, 3, 224, 224)),
            "3D U-Net": (UNet("balnorm", 32), (4, 1, 128, 128, 128)),
        }


def layers_of(name: str, model: nn.Module, shape: tuple[int, ...]) -> list[Layer]:
    """The balanced layers of a network, one of those that are alike."""
    found: dict[Any, Layer] = {}

    def note(module: Any, inputs: Any) -> None:
        key = (module._geometry, module.weight.shape, inputs[0].shape, module.options)
        found.setdefault(key, Layer(name, module, inputs[0].shape))

    handles = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, BalNormLayer)]
    with torch.no_grad():
        model(torch.empty(shape, device="meta"))
    for handle in handles:
        handle.remove()
    return list(found.values())


class _Driver:
    """What Triton asks of a driver. Its launches do nothing."""

    def __init__(self, target: Any, device: int) -> None:
        self._target, self._device = target, device
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:  # noqa: ARG002
        return lambda *_: None

    def load_binary(self, *arguments: Any) -> tuple[Any, ...]:  # noqa: ARG002
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002
        return {"max_shared_mem": 2**20}

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0


@contextlib.contextmanager
def target(name: str) -> Iterator[None]:
    """Triton compiles for this GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = _Driver(GPUTarget(*TARGETS[name]), list(TARGETS).index(name))
    with mock.patch.object(triton.runtime.driver, "_active", driver):
        yield


def compile_layer(layer: Layer, low: bool, last: bool) -> dict[Any, tuple[str, Any]]:
    """What a training step of a layer launches, compiled: bfloat16 samples (``low``), channels_last."""
    found: dict[Any, tuple[str, Any]] = {}

    def only_compile(kernel: Any, grid: Any, arguments: Any, options: Any) -> None:
        compiled = kernel.warmup(*arguments, grid=grid, **options)
        found[compiled.hash] = (kernel.__name__, compiled)

    with chosen(only_compile):
        training_step(layer, low, last, "meta")()
    return found


def training_step(layer: Layer, low: bool, last: bool, device: str, by: Any = backend) -> Callable[[], None]:
    """What the autograd function does in a training step, without the convolution."""
    module, axes = layer.layer, len(layer.shape) - 2
    order = {2: torch.channels_last, 3: torch.channels_last_3d}[axes] if last else torch.contiguous_format

    def empty(like: Tensor | torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = like if isinstance(like, torch.Size) else like.shape
        return torch.empty(shape, dtype=dtype, device=device)

    kind = module._geometry.kind_of(module.options.mass)
    x = empty(layer.shape, torch.bfloat16 if low else torch.float32).to(memory_format=order)
    weight = empty(module.weight).to(memory_format=order)
    gain, scale, bias = (empty(module.output_scale) for _ in range(3))
    average = torch.Size(module._geometry.statistics_shape(layer.shape[1], kind))
    running = Running(empty(average), empty(average), torch.empty((), dtype=torch.int64, device=device))
    setup = Setup(
        module._geometry, module.options, kind, module.shifts, layer.shape[0], None, True, len(scale), x.dtype
    )
    matrix = WeightMatrix.of(weight, module._geometry)
    g, t, dx = torch.empty_like(weight, dtype=x.dtype), empty(module.output_scale, x.dtype), torch.empty_like(x)
    if layer.shape[1] <= 3:  # the first layer of a network, whose input needs no gradient
        dx = None

    def run() -> None:
        found = by.forward(x, matrix, bias, gain, scale, None, running, setup)
        if found.undo is None:
            by.track(running, found.statistics, module.options.momentum)
        by.effective(matrix, gain, found.scale, found.saved, setup, x.dtype)
        by.backward(g, t, dx, x, matrix, gain, found.scale, found.saved, setup)

    return run


def resources(compiled: Any) -> tuple[int, int, int]:
    """Registers of a thread; bytes on its stack (NVIDIA), or registers spilled (AMD); bytes of shared memory."""
    import triton

    shared = compiled.metadata.shared
    if "cubin" in compiled.asm:
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        return used["REG"], used["STACK"] + used["LOCAL"], shared
    assembly = compiled.asm["amdgcn"]
    used = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", assembly)}
    return used["vgpr_count"], used["vgpr_spill_count"], shared


def compiled(names: Iterable[str] = TARGETS) -> Iterable[str]:
    yield "### Compiled kernels\n"
    yield "Every variant that a training step of these networks launches: under bfloat16 autocast in channels_last, and"
    yield "in float32 in the other order. Registers are those of a thread. Spills are on NVIDIA's GPUs bytes of stack"
    yield "or local memory, on AMD's vector registers. Shared memory is in bytes. Seconds are of one core, for variants"
    yield "that no network above has.\n"
    yield "| GPU | network | variants | seconds | most registers | spills | most shared memory |"
    yield "|---|---|---|---|---|---|---|"
    every: dict[str, dict[Any, tuple[str, str, tuple[int, int, int]]]] = {}
    for gpu_name in names:
        every[gpu_name] = {}
        for name, (model, shape) in networks().items():
            of_network, begun = {}, seconds_used()
            with target(gpu_name), tempfile.TemporaryDirectory() as cache, cached_in(cache):
                for layer in layers_of(name, model, shape):
                    for low in (True, False):
                        of_network.update(compile_layer(layer, low, low))
                seconds = seconds_used() - begun
            numbers = {key: (kernel, name, resources(binary)) for key, (kernel, binary) in of_network.items()}
            every[gpu_name].update(numbers)
            registers, spills, shared = zip(*(used for *_, used in numbers.values()), strict=True)
            spilling = f"{sum(n > 0 for n in spills)} variants, at most {max(spills)}" if max(spills) else "none"
            cells = (gpu_name, name, len(numbers), f"{seconds:.0f}", max(registers), spilling, max(shared))
            yield f"| {' | '.join(map(str, cells))} |"
    yield "\n| GPU | kernel | variants | registers | spills | shared memory |"
    yield "|---|---|---|---|---|---|"
    for gpu_name, variants in every.items():
        by_kernel = collections.defaultdict(list)
        for kernel, _, used in variants.values():
            by_kernel[kernel].append(used)
        for kernel, used in sorted(by_kernel.items()):
            ranges = (f"{min(n)} to {max(n)}" if min(n) < max(n) else str(max(n)) for n in zip(*used, strict=True))
            yield f"| {gpu_name} | `{kernel}` | {len(used)} | {' | '.join(ranges)} |"
    yield ""


@contextlib.contextmanager
def cached_in(folder: str) -> Iterator[None]:
    with mock.patch.dict("os.environ", {"TRITON_CACHE_DIR": folder}):
        yield


def seconds_used() -> float:
    """Processor time, with that of ptxas: the wall's is that of everything else on the machine."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


# --------------------------------------------------------------------------------------------------------------------
# Host
# --------------------------------------------------------------------------------------------------------------------


def host(rounds: int) -> Iterable[str]:
    yield "### Time on the host\n"
    yield "A layer of 64 to 64 channels, 3x3, float32, without the convolution: the three calls of the backend in a"
    yield "training step, with 6 launches, by a driver that launches nothing. The time of a real one comes on top."
    yield f"Medians [quartiles] of {rounds} rounds of 100 steps.\n"
    yield "| launches | microseconds a layer |"
    yield "|---|---|"
    layer = BalNormConv2d(64, 64, 3, padding=1)
    once = training_step(Layer("", layer, torch.Size((8, 64, 24, 24))), False, True, "cpu")
    with chosen(backend.run):
        times: dict[bool, list[float]] = {True: [], False: []}
        with target("sm_80"), tempfile.TemporaryDirectory() as cache, cached_in(cache):
            for _ in range(rounds + 2):
                for direct, spent in times.items():
                    with mock.patch.object(backend, "_direct", direct):
                        begun = time.perf_counter()
                        for _ in range(100):
                            once()
                        spent.append((time.perf_counter() - begun) / 100)
        for direct, spent in times.items():
            how = "direct, as in use" if direct else "by Triton's own dispatch"
            low, middle, high = (1e6 * value for value in statistics.quantiles(spent[2:], n=4))
            yield f"| {how} | {middle:.0f} [{low:.0f}, {high:.0f}] |"
    yield ""


# --------------------------------------------------------------------------------------------------------------------
# An estimate
# --------------------------------------------------------------------------------------------------------------------

BANDWIDTH, LEAST = 1.5e12, 2.5e-6
"""Bytes per second of an A100, and the seconds of its smallest kernel."""
OPERATION, OURS, DRIVER = 4.5e-6, 7e-6, 2.5e-6
"""Seconds of the host for an operation of torch, and for a launch of ours (above) and of the driver under it."""
STEP = 0.1
"""Seconds of the step."""


class Cost(NamedTuple):
    """What normalisation and bias add to a training step."""

    launches: int = 0
    activations: float = 0
    """Bytes, read or written."""
    weights: float = 0
    """Bytes of everything else."""
    gpu: float = 0
    """Seconds."""
    host: float = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    @classmethod
    def of(cls, launches: Iterable[float], host: float, large: float) -> Cost:
        """From the bytes of each launch. Activations are those of at least ``large`` bytes."""
        moved = list(launches)
        return cls(
            len(moved),
            sum(n for n in moved if n >= large),
            sum(n for n in moved if n < large),
            sum(max(LEAST, n / BANDWIDTH) for n in moved),
            host,
        )


def estimate() -> Iterable[str]:
    yield "### Estimate of a training step\n"
    yield "**Nothing here was measured on a GPU.** What normalisation and bias add to a step of ResNet-50 (batch 256,"
    yield f"224 px, bfloat16 autocast, channels_last, about {1e3 * STEP:.0f} ms) on an A100, eager. Every launch takes"
    yield f"its bytes over {BANDWIDTH / 1e12} TB/s, and at least {1e6 * LEAST} us; a tensor that a kernel reads twice"
    yield f"comes from a cache the second time. On the host an operation of torch takes {1e6 * OPERATION} us, and a"
    yield f"launch of ours {1e6 * OURS} us and {1e6 * DRIVER} us of the driver. Convolutions, ReLU and the optimiser"
    yield "are left out; the bias of a balanced layer counts: one pass over y adds it, another one sums dy. BatchNorm"
    yield "reads its operands once where they stay in the chip, and else twice. Passes are bytes over those of all"
    yield "inputs of convolutions in bfloat16, and of all weights in float32.\n"
    yield "| | launches | activations, GB (passes) | weights, GB (passes) | GPU, ms | host, ms |"
    yield "|---|---|---|---|---|---|"
    rows = {"BatchNorm, reading once": batch_norm(1), "BatchNorm, reading twice": batch_norm(2)}
    for mass, centred in (("channel", False), ("position", False), ("channel", True)):
        name = f"BalNorm, {mass}{', centred' if centred else ''}"
        rows[f"{name}, torch operations"] = balanced(mass, centred, triton=False)
        rows[f"{name}, Triton"] = balanced(mass, centred, triton=True)
    sizes = [(2 * x, 4 * layer.layer.weight.numel()) for layer, x, _ in convolutions_of_resnet()]
    for name, cost in rows.items():
        moved = zip((cost.activations, cost.weights), map(sum, zip(*sizes, strict=True)), strict=True)
        cells = [f"{1e-9 * n:.1f} ({n / size:.1f})" for n, size in moved]
        cells += [f"{1e3 * seconds:.0f}" for seconds in (cost.gpu, cost.host)]
        yield f"| {name} | {cost.launches} | {' | '.join(cells)} |"
    yield ""


def convolutions_of_resnet() -> Iterator[tuple[Layer, int, int]]:
    """The convolutions of a ResNet-50, each with the elements of its input and output."""
    model, shape = networks()["ResNet-50"]
    found: list[tuple[Layer, int, int]] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        found.append((Layer("", module, inputs[0].shape), inputs[0].numel(), output.numel()))

    for module in model.modules():
        if isinstance(module, BalNormLayer) and len(module._geometry.kernel) == 2:
            module.register_forward_hook(note)
    with torch.no_grad():
        model(torch.empty(shape, device="meta"))
    return iter(found)


def batch_norm(reads: int) -> Cost:
    """Forward, backward and the counter, and the casts of the weight and of its gradient."""
    total = Cost()
    for layer, _, y in convolutions_of_resnet():
        cast = 6 * layer.layer.weight.numel()
        moved = [2 * y * (reads + 1), 2 * y * (2 * reads + 1), 0, cast, cast]
        total = total.plus(Cost.of(moved, len(moved) * OPERATION, 2 * y))
    return total


def balanced(mass: str, centred: bool, triton: bool) -> Cost:
    total = Cost()
    for layer, x, y in convolutions_of_resnet():
        module = layer.layer
        module.options = dataclasses.replace(module.options, mass=mass, centred=centred)
        seen = Launches()
        step = training_step(layer, True, True, "meta", backend if triton else torch_backend)
        with chosen(seen.launch), seen:
            step()
        moved = [*seen.moved, 4 * y, 2 * y, 0]  # the bias, the sum over dy, and its conversion
        host = (len(seen.torch) + 3) * OPERATION + len(seen.ours) * (OURS + DRIVER)
        total = total.plus(Cost.of(moved, host, min(2 * x, 2 * y)))
    return total


def _bytes(tensor: object) -> int:
    """What a kernel touches of a tensor: little, if it is expanded."""
    if not isinstance(tensor, Tensor):
        return 0
    return tensor.element_size() * math.prod(
        n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 1
    )
