"""The machine that a run is on: its hardware and versions, and the memory that the run uses."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from balnorm.functional import backend

__all__ = ["environment", "forget_peak_memory", "peak_memory"]


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
    """The commit of the clone that the file belongs to, if it belongs to one: it may lie in another project's."""

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
    """Reset the peak, if the system can: reading the data may need more memory than training."""
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
