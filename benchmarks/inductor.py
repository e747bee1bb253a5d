"""What Inductor's code for CUDA launches, without a GPU. ``python -m benchmarks gpu`` runs this in its own process.

Tensors are fake CUDA tensors, and the code that Inductor generates is read, not run. For that, torch is told that there
is an A100: by a small library, which stands in for the part of torch that a build without CUDA lacks (``no_gpu.cpp``),
and by a stub of Inductor's interface for devices. Convolutions are cuDNN's, as far as memory formats are concerned.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._subclasses.fake_tensor import FakeTensorMode

from balnorm import BalNormConv2d
from balnorm._core.backends import triton as backend
from balnorm._core.backends import triton_kernels
from benchmarks import gpu

ROOT = Path(__file__).parents[1]
SHAPE = (64, 64, 56, 56)


def batchnorm(**options: Any) -> list[nn.Module]:
    return [nn.Conv2d(64, 64, 3, padding=1, bias=False, **options), nn.BatchNorm2d(64), nn.ReLU()]


def balanced(**options: Any) -> list[nn.Module]:
    return [BalNormConv2d(64, 64, 3, padding=1, **options), nn.ReLU()]


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "BatchNorm": batchnorm,
    "BalNorm, channel": balanced,
    "BalNorm, position": lambda: balanced(mass="position"),
    "BatchNorm, depthwise": lambda: batchnorm(groups=64),
    "BalNorm, channel, depthwise": lambda: balanced(groups=64),
}
"""A convolution of 64 to 64 channels, its norm, and a ReLU."""


PLAIN = ", plain operations"
"""Added to a name: without the operators."""
Counts: TypeAlias = dict[str, list[list[int]]]
"""For float32 and bfloat16 (autocast), forward and backward: how many launches, and how many of kernels of ours."""


def launches(names: Iterable[str]) -> dict[str, Counts]:
    """What blocks launch beside their convolution, in the middle of a network. Needs a C++ compiler."""
    source, lib = Path(__file__).with_name("no_gpu.cpp"), Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / "no_gpu.so"
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{lib.parent / 'include'}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
        subprocess.run(["c++", *flags, source, "-o", stub, "-lc10", "-ltorch_cpu"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(stub), "TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-m", "benchmarks.inductor", *names]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Counts] = json.loads(done.stdout.splitlines()[-1])
    return found


def table() -> Iterable[str]:
    yield "### Launches of a compiled layer\n"
    yield "In the code that Inductor generates for an A100: forward + backward, for a convolution (3x3, 64 to 64"
    yield "channels, 56x56 images, batch 64, channels_last), its norm and its ReLU, in the middle of a network; without"
    yield "the convolution itself. In brackets: how many of them are kernels of this package.\n"
    yield "| layer | float32 | bfloat16 autocast |"
    yield "|---|---|---|"
    plain = [name + PLAIN for name in BLOCKS if name.startswith("BalNorm")]
    for name, counts in launches([*BLOCKS, *plain]).items():
        cells = []
        for forward, backward in counts.values():
            every, ours = (sum(pair) for pair in zip(forward, backward, strict=True))
            cells.append(f"{forward[0]} + {backward[0]} = {every}" + (f" ({ours})" if ours else ""))
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


# --------------------------------------------------------------------------------------------------------------------
# The process with a CUDA device that is none
# --------------------------------------------------------------------------------------------------------------------

_DEVICE = SimpleNamespace(
    name="A100",
    major=8,
    minor=0,
    multi_processor_count=108,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=40 * 2**30,
    gcnArchName="",
)


class _Interface(device_interface.CudaInterface):
    class Worker(device_interface.CudaInterface.Worker):
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: _DEVICE)  # noqa: ARG005

    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    is_triton_capable = staticmethod(lambda device=None: True)  # noqa: ARG005
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)  # noqa: ARG005
    raise_if_triton_unavailable = staticmethod(lambda device=None: None)  # noqa: ARG005
    get_device_properties = staticmethod(lambda device=None: _DEVICE)  # noqa: ARG005
    get_compute_capability = staticmethod(lambda device=None: 80)  # noqa: ARG005


class _NotRunError(Exception):
    """The code is there, and that is all that was wanted."""


@contextlib.contextmanager
def a100(sources: list[str]) -> Iterator[None]:
    """Inductor compiles for an A100, and leaves its code in ``sources``."""

    def keep(graph: GraphLowering) -> Any:
        sources.append(graph.codegen()[0].value)
        compile_ours(sources[-1])

        def call(_: Any) -> None:
            raise _NotRunError

        return SimpleNamespace(__file__="none", call=call, runner=None, key="")

    def memory_format(x: Tensor, weight: Tensor, _: Any) -> torch.memory_format:
        """As cuDNN."""
        for tensor in (x, weight):
            if not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
                return torch.channels_last
        return torch.contiguous_format

    patches = (
        mock.patch.dict(device_interface.device_interfaces, {"cuda": _Interface, "cuda:0": _Interface}),
        mock.patch.object(device_interface, "_device_initialized", True),
        mock.patch.object(GraphLowering, "compile_to_module", keep),
        mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)),
        mock.patch("torch.cuda.get_device_properties", return_value=_DEVICE),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch._C._select_conv_backend", return_value=torch._C._ConvBackend.Cudnn),
        mock.patch("torch._C._conv_determine_backend_memory_format", memory_format),
        mock.patch("torch._C._cuda_getCurrentRawStream", return_value=0, create=True),
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        # No time can be measured, so matrices are not padded to find out which is faster.
        torch._inductor.config.patch(force_disable_caches=True, compile_threads=1, shape_padding=False),
        torch._functorch.config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        gpu.target("sm_80"),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def on_the_host() -> list[torch.library.Library]:
    """Constants that torch folds have memory: on the CPU. They last as long as what is returned."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided"):
        operation = getattr(torch.ops.aten, name.split(".")[0])

        def allocate(*sizes: Any, device: Any = None, operation: Any = operation, **options: Any) -> Tensor:  # noqa: ARG001
            result: Tensor = operation(*sizes, device="cpu", **options)
            return result

        library.impl(name, allocate, "CUDA")
    return [library]


def code_of(model: nn.Module, autocast: bool) -> list[str]:
    """Inductor's code for the two passes of a network."""
    sources: list[str] = []
    torch._dynamo.reset()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with a100(sources):
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="cuda"))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cuda")
        x = torch.empty(SHAPE, device="cuda").contiguous(memory_format=torch.channels_last).requires_grad_()
        compiled = torch.compile(model, fullgraph=True)
        with contextlib.suppress(_NotRunError), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            compiled(x)
    return sources


def compile_ours(source: str) -> None:
    """Compile the kernels of this package, as Inductor has written them down, for the GPU that is set."""

    def precompile(kernel: Any, *_: Any, **__: Any) -> None:
        if not kernel.fn.__name__.startswith("triton_"):
            kernel._precompile_worker()
            assert kernel.compile_results

    with mock.patch.object(triton_heuristics.CachingAutotuner, "precompile", precompile):
        exec(compile(source, "inductor's code", "exec"), {"__name__": "generated"})


def kernels_in(source: str) -> list[str]:
    """What the code launches, but for convolutions."""
    body = source[source.index("    def call(") :]
    called = re.findall(r"(\w+)\.run\(|extern_kernels\.(\w+)\(|torch\.ops\.(\w+\.\w+)", body)
    names = [a or b or c for a, b, c in called]
    return [name for name in names if name not in ("convolution", "aten.convolution", "aten.convolution_backward")]


def measure(name: str) -> Counts:
    """What three blocks launch more than two."""
    kind, plain = name.removesuffix(PLAIN), name.endswith(PLAIN)
    found = {}

    def registered(_: int) -> bool:
        return not plain

    with mock.patch.object(backend, "_registered", registered):
        for precision, autocast in (("float32", False), ("bfloat16", True)):
            two, three = (
                [
                    kernels_in(code)
                    for code in code_of(nn.Sequential(*(m for _ in range(n) for m in BLOCKS[kind]())), autocast)
                ]
                for n in (2, 3)
            )
            found[precision] = [
                [len(more) - len(less), sum(map(is_ours, more)) - sum(map(is_ours, less))]
                for less, more in zip(two, three, strict=True)
            ]
    return found


def is_ours(kernel: str) -> bool:
    """Inductor numbers the kernels."""
    return kernel.rpartition("_")[0] in triton_kernels.__all__


if __name__ == "__main__":
    importlib.import_module("balnorm._core.backends.triton_operators")
    held = on_the_host()
    print(json.dumps({name: measure(name) for name in sys.argv[1:]}))
