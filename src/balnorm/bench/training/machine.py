"""The machine that a run is on: its hardware and versions, its memory, and whether torch's convolutions work on it.

On some processors oneDNN, which computes them for torch, crashes the process. Seen with torch 2.13:

- Intel AMX in a virtual machine: an illegal instruction, in bfloat16, with strides above 1;
- AVX2 without AVX-512: memory is overwritten in backward of 1x1 kernels with stride, channels last, below 8 channels
  (https://github.com/uxlfoundation/oneDNN/issues/6035). The recipes' networks are wider, but those of tests are not.

So a separate process tries them; if it dies, another tries with one instruction set less, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from balnorm.bench.errors import Failure
from balnorm.functional import backend

__all__ = [
    "CAP", "TRIAL", "Defect", "ProcessorError", "caps", "check_precision", "environment", "find_defect",
    "forget_peak_memory", "peak_memory", "remedy_after",
]  # fmt: skip


def environment() -> dict[str, Any]:
    """The hardware and versions that can affect a result."""
    cuda = torch.cuda.is_available()
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "balnorm": version("balnorm"),
        "commit": _commit(Path(__file__)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "backend": backend(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
    }


def _commit(file: Path) -> str | None:
    """The commit of the clone that tracks the file, if any: the file may also lie inside another project's clone."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(file.parent), *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()

    with contextlib.suppress(OSError):  # no git here
        return (git("ls-files", file.name) and git("rev-parse", "HEAD")) or None
    return None


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if "model name" in line)
    return platform.processor()


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak, if the system supports it: reading the data may need more memory than training."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Peak memory of this process in bytes, on its GPU or else in main memory; ``None`` if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):  # Linux
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    try:
        import resource
    except ImportError:  # on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --------------------------------------------------------------------------------------------------------------------
# The processor
# --------------------------------------------------------------------------------------------------------------------

CAP = "ONEDNN_MAX_CPU_ISA"
"""The environment variable that limits oneDNN's instructions. oneDNN reads it at the first convolution."""

# oneDNN's names of instruction sets, from the highest, and Linux's name for the one that each adds.
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

# Signals with which a processor ends a process, or glibc (SIGABRT) when it finds its memory overwritten. Not all
# systems have all of them.
_DEADLY = [getattr(signal, name, None) for name in ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT")]

_PROGRAM = """
import contextlib, os, sys
with contextlib.suppress(ImportError, ValueError):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump
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
        """The remedy, phrased to follow a colon."""
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

    Tries only a CPU (``None`` takes a GPU if there is one), and never float32, whose defect only affects networks
    narrower than the recipes'.
    """
    if precision == "float32":
        return
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cpu") and (defect := find_defect([precision])) is not None:
        raise ProcessorError(
            f"torch's convolutions in {precision} end the process on this processor ({defect.signal}): {defect.remedy}"
        )


@functools.cache
def remedy_after(number: int) -> str | None:
    """The remedy for a process that this signal ended, if the processor is to blame."""
    if number not in _DEADLY:
        return None
    defect = find_defect()
    if defect is None and number == signal.SIGILL:  # something else that the processor does not support
        defect = Defect("SIGILL", "AVX2")
    return None if defect is None else defect.remedy


def _end_of(trial: Sequence[str], cap: str | None = None) -> str | None:
    """The name of the signal with which the processor ended the trial; ``None`` for any other end."""
    environment = os.environ if cap is None else {**os.environ, CAP: cap}
    done = subprocess.run(trial, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return signal.Signals(-done.returncode).name if -done.returncode in _DEADLY else None
