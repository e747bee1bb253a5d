"""Test whether torch's convolutions run on this processor. This module does not import torch.

On some processors oneDNN, which computes them for torch, crashes the process. Seen with torch 2.13:

- Intel AMX in a virtual machine: an illegal instruction, in bfloat16, with strides above 1;
- AVX2 without AVX-512: memory is overwritten in backward of 1x1 kernels with stride, channels last, below 8 channels
  (https://github.com/uxlfoundation/oneDNN/issues/6035), which the recipes' networks are too wide for, and tests not.

So a separate process tries them; if it dies, another tries with one instruction set less, and so on.
"""

from __future__ import annotations

import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from balnorm.bench.errors import Failure

__all__ = ["CAP", "TRIAL", "Defect", "ProcessorError", "caps", "check_precision", "find_defect", "remedy_after"]

CAP = "ONEDNN_MAX_CPU_ISA"
"""The environment variable that limits oneDNN's instructions. oneDNN reads it when torch is loaded."""

# oneDNN's names of instruction sets, from the highest, and what Linux calls the one that each adds.
_LEVELS = {
    "AVX512_CORE_AMX_FP16": "amx_fp16",
    "AVX512_CORE_AMX": "amx_bf16",
    "AVX512_CORE_FP16": "avx512_fp16",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_VNNI": "avx512_vnni",
    "AVX512_CORE": "avx512f",
    "AVX2": "avx2",
    "AVX": "avx",
    "SSE41": "sse4_1",
}

# What a processor ends a process with, and glibc (SIGABRT) when it finds its memory overwritten. Not all systems
# have all of them.
_DEADLY = [getattr(signal, name, None) for name in ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT")]

_PROGRAM = """
import contextlib, os, sys
with contextlib.suppress(ImportError, ValueError):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # if it dies, then without a file to remember it by
import torch
from torch import nn
torch.set_num_threads(1)
layers = [(nn.Conv1d, 3, 4), (nn.Conv2d, 3, 4), (nn.Conv2d, 16, 32), (nn.ConvTranspose2d, 16, 32), (nn.Conv2d, 64, 64)]
for precision in sys.argv[1:]:
    dtype = getattr(torch, precision)
    for kind, channels, out in layers:
        for stride in (1, 2):
            image = torch.rand(4, channels, *[9] * (1 if kind is nn.Conv1d else 2), dtype=dtype, requires_grad=True)
            layer = kind(channels, out, 3, stride=stride, padding=1).to(dtype)
            with contextlib.suppress(RuntimeError):  # a torch that cannot do it says so, and lives
                layer(image).sum().backward()
if "float32" in sys.argv:
    for channels in [3, 4, 5, 6] * 50:  # more than once: memory that is overwritten need not matter at once
        for size in (8, 16):
            image = torch.rand(32, channels, size, size).to(memory_format=torch.channels_last)
            layer = nn.Conv2d(channels, 8, 1, stride=2).to(memory_format=torch.channels_last)
            layer(image).sum().backward()
            right = image[:, :, ::2, ::2].sum((0, 2, 3))
            if not torch.allclose(layer.weight.grad[:, :, 0, 0], right, rtol=1e-3):
                os.abort()
"""

TRIAL: tuple[str, ...] = (sys.executable, "-W", "ignore", "-c", _PROGRAM)
"""The command that runs torch's convolutions, forward and backward; append the precisions."""


class ProcessorError(Failure):
    """The processor cannot run what was requested."""


@dataclass(frozen=True)
class Defect:
    """The signal that ended the trial, and the highest cap under which it survives, if any."""

    signal: str
    cap: str | None

    @property
    def remedy(self) -> str:
        """What to do, phrased to follow a colon."""
        return f"set {CAP}={self.cap} in the environment" if self.cap else "use another processor, or a GPU"


def find_defect(precisions: Sequence[str] = ("float32", "bfloat16", "float16")) -> Defect | None:
    """Try the convolutions in another process; if it dies, try again under lower and lower caps.

    This takes as long as loading torch, or no time if there is nothing to cap.
    """
    lower = caps()
    if not lower or (end := _end_of([*TRIAL, *precisions])) is None:
        return None
    return Defect(end, next((cap for cap in lower if _end_of([*TRIAL, *precisions], cap) is None), None))


def caps(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The caps that have an effect on this processor, highest first; all of them if the processor is unknown."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return list(_LEVELS) if platform.machine().lower() in ("x86_64", "amd64") else []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return [cap for cap, flag in _LEVELS.items() if flag in flags][1:]


def check_precision(precision: str, device: str | None) -> None:
    """Raise a ProcessorError that names the remedy if training in this precision would crash the process.

    Tries only a CPU (``None`` takes a GPU if there is one), and never float32, whose defect is one of networks narrower
    than the recipes'.
    """
    if precision == "float32":
        return
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cpu") and (defect := find_defect([precision])) is not None:
        raise ProcessorError(
            f"torch's convolutions in {precision} end the process on this processor ({defect.signal}): {defect.remedy}"
        )


@functools.cache
def remedy_after(number: int) -> str | None:
    """What to do about a process that this signal ended, if the processor is to blame."""
    if number not in _DEADLY:
        return None
    defect = find_defect()
    if defect is None and number == signal.SIGILL:  # something else that the processor cannot do
        defect = Defect("SIGILL", "AVX2")
    return None if defect is None else defect.remedy


def _end_of(trial: Sequence[str], cap: str | None = None) -> str | None:
    """The name of the signal with which the processor ended the trial; ``None`` for any other end."""
    environment = os.environ if cap is None else {**os.environ, CAP: cap}
    done = subprocess.run(trial, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return signal.Signals(-done.returncode).name if -done.returncode in _DEADLY else None
