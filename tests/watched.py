"""Every address that a kernel reads or writes in Triton's interpreter, checked.

A kernel may touch no byte outside of its tensors, and no program what another one of the same launch writes: the
interpreter runs them one after the other, a GPU does not. The interpreter itself notices neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder


class Watch:
    """What is wrong with the launches so far."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._kernel = ""
        self._ranges: dict[str, tuple[int, int]] = {}
        self._read: dict[Any, list[Any]] = {}
        self._written: dict[Any, list[Any]] = {}

    def begin(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        self._kernel, self._read, self._written = kernel.__name__, {}, {}
        named = zip(kernel.arg_names, arguments, strict=False)
        self._ranges = {name: _range(tensor) for name, tensor in named if isinstance(tensor, torch.Tensor)}

    def end(self) -> None:
        """Compare the programs of a launch with each other."""
        written = {program: np.unique(np.concatenate(parts)) for program, parts in self._written.items()}
        if not written:
            return
        every = np.concatenate(list(written.values()))
        owners = np.repeat(np.arange(len(written)), [len(part) for part in written.values()])
        order = np.argsort(every, kind="stable")
        every, owners = every[order], owners[order]
        twice = every[1:][every[1:] == every[:-1]]
        if len(twice):
            self._add(f"two programs write {self._name(twice[0])}")
        for program, parts in self._read.items():
            read = np.unique(np.concatenate(parts))
            at = np.minimum(np.searchsorted(every, read), len(every) - 1)
            mine = list(written).index(program) if program in written else -1
            clash = read[(every[at] == read) & (owners[at] != mine)]
            if len(clash):
                self._add(f"a program reads {self._name(clash[0])}, which another one writes")

    def access(self, pointers: Any, mask: Any, program: Any, write: bool) -> None:
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        addresses = addresses[np.broadcast_to(mask.data.astype(bool), addresses.shape)]
        if not addresses.size:
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(addresses.shape, bool)
        for low, high in self._ranges.values():
            inside |= (addresses >= low) & (addresses + size <= high)
        if not inside.all():
            self._add(f"{'writes' if write else 'reads'} {self._name(addresses[~inside][0])}")
            raise IndexError(self.found[-1])
        (self._written if write else self._read).setdefault(program, []).append(addresses)

    def _add(self, what: str) -> None:
        self.found.append(f"{self._kernel}: {what}")

    def _name(self, address: int) -> str:
        """An address, counted from the nearest tensor."""
        distances = {name: int(address) - low for name, (low, high) in self._ranges.items() if address >= low}
        name = min(distances, key=lambda name: distances[name], default="no tensor")
        low, high = self._ranges.get(name, (0, 0))
        return f"byte {distances.get(name, 0)} of {name}, which has {high - low}"


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@contextlib.contextmanager
def watched(backend: Any) -> Iterator[Watch]:
    """All launches of this backend. An access beyond its tensors raises an error in place of being done."""
    watch, launch = Watch(), backend.run
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def run(kernel: Any, grid: Any, arguments: Any, options: Any) -> Any:
        watch.begin(kernel, arguments)
        result = launch(kernel, grid, arguments, options)
        watch.end()
        return result

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.access(pointers, mask, self.grid_idx, write=False)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.access(pointers, mask, self.grid_idx, write=True)
        return store(self, pointers, value, mask, *rest)

    with (
        mock.patch.object(backend, "run", run),
        mock.patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", checked_store),
    ):
        yield watch
