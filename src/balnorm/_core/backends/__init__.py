"""The choice of the module that computes the closed form for some tensors.

A backend is a module with the functions of :mod:`balnorm._core.backends.torch`. That one takes all tensors that no
other backend takes.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor, device

from balnorm._core.backends import cpu, torch, triton
from balnorm._core.backends.torch import Forward, Running, Setup

__all__ = ["Forward", "Running", "Setup", "choose", "cpu", "status", "torch", "triton"]


def choose(*tensors: Tensor | None) -> ModuleType:
    """The backend for a layer with these tensors."""
    return cpu if cpu.takes(*tensors) else triton if triton.takes(*tensors) else torch


def status(where: device) -> str:
    """Which backend a device uses, and why."""
    if where.type == "cpu":
        return cpu.status()
    if where.type == "cuda":
        return triton.status(where.index)
    return f"torch: there are no kernels for {where.type}"
