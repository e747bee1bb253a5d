"""Whether torch's convolutions in bfloat16 and float16 run on this processor. It imports no torch.

On some machines they do not: oneDNN, which computes them for torch, uses every instruction that the processor claims to
have, and where one of them does not work (seen with Intel AMX in a virtual machine, torch 2.13, strides above 1), the
process dies without a word. So a process of its own tries them first.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "CAP",
    "CAPS",
    "TRIAL",
    "Defect",
    "after_illegal_instruction",
    "check_precision",
    "exceeds_lowest_cap",
    "find_defect",
]

CAP = "ONEDNN_MAX_CPU_ISA"
"""The environment variable that limits oneDNN's instructions. It is read when torch is loaded."""

CAPS = (
    "AVX512_CORE_AMX",
    "AVX512_CORE_FP16",
    "AVX512_CORE_BF16",
    "AVX512_CORE_VNNI",
    "AVX512_CORE",
    "AVX2",
)
"""From the highest to the lowest."""

_DEADLY = {signal.SIGILL, signal.SIGSEGV, signal.SIGFPE, *([signal.SIGBUS] if hasattr(signal, "SIGBUS") else [])}

_PROGRAM = """
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # if it dies, then without a file to remember it by
except (ImportError, ValueError):
    pass
import torch
from torch import nn
layers = [(nn.Conv1d, 3, 4), (nn.Conv2d, 3, 4), (nn.Conv2d, 16, 32), (nn.ConvTranspose2d, 16, 32), (nn.Conv2d, 64, 64)]
for dtype in (torch.bfloat16, torch.float16):
    for kind, channels, out in layers:
        for stride in (1, 2):
            image = torch.rand(4, channels, *[9] * (1 if kind is nn.Conv1d else 2), dtype=dtype, requires_grad=True)
            layer = kind(channels, out, 3, stride=stride, padding=1).to(dtype)
            try:
                layer(image).sum().backward()
            except RuntimeError:  # a torch that cannot do it says so, and lives
                pass
"""

TRIAL: tuple[str, ...] = (sys.executable, "-W", "ignore", "-c", _PROGRAM)
"""The command that does torch's convolutions, forward and backward."""


@dataclass(frozen=True)
class Defect:
    """What ended the trial, and the highest cap under which it survives, if there is one."""

    signal: str
    cap: str | None

    @property
    def remedy(self) -> str:
        """What to do, to stand behind a colon."""
        return f"set {CAP}={self.cap} in the environment" if self.cap else "train in float32"


def find_defect(trial: Sequence[str] | None = None) -> Defect | None:
    """Try the convolutions in another process, and if it dies, again under one cap after the other.

    Args:
        trial: the command to try; ``None`` is :data:`TRIAL`, which takes the seconds that loading torch takes, and is
            spared where there is nothing to cap.
    """
    if trial is None:
        if not exceeds_lowest_cap():
            return None
        trial = TRIAL
    if (end := _end_of(trial)) is None:
        return None
    return Defect(end, next((cap for cap in CAPS if _end_of(trial, cap) is None), None))


def exceeds_lowest_cap(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor claims to have more than AVX2; one that is not known counts."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine().lower() in ("x86_64", "amd64")
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return any(flag.startswith(("avx512", "avx10", "avx_", "amx")) for flag in flags)


def check_precision(precision: str, device: str | None) -> None:
    """Raise a ValueError that has the remedy, where training in this precision would end the process.

    Args:
        precision: a recipe's; float32 is never tried.
        device: to train on; ``None`` takes a GPU if there is one. Only a CPU is tried.
    """
    if precision == "float32":
        return
    if device is None:
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cpu") and (defect := find_defect()) is not None:
        raise ValueError(
            f"torch's convolutions in {precision} end the process on this processor ({defect.signal}): {defect.remedy}"
        )


def after_illegal_instruction() -> str:
    """What to do about a process that died of SIGILL, in whatever precision, to stand behind a colon."""
    return f"set {CAP}=AVX512_CORE_BF16 in the environment, or AVX2 if that does not help"


def _end_of(trial: Sequence[str], cap: str | None = None) -> str | None:
    """The name of the signal that the processor ended the trial with; ``None`` for any other end."""
    environment = os.environ if cap is None else {**os.environ, CAP: cap}
    code = subprocess.run(trial, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode
    return signal.Signals(-code).name if -code in _DEADLY else None
