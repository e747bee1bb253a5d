"""What a layer decides once, and the types that the closed form and its two backends exchange."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from balnorm.core.geometry import Geometry
from balnorm.core.options import MassKind, Options

__all__ = ["Call", "Gradients", "Plan", "Running"]


class Plan:
    """How a layer computes, apart from its tensors. A layer makes it once, not at every call."""

    def __init__(self, geometry: Geometry, options: Options) -> None:
        self.geometry = geometry
        self.options = options
        self.kind: MassKind = "channel" if geometry.is_pointwise else options.mass
        """Under a pointwise kernel the two masses are the same, and ``channel`` is the cheaper one."""
        self.own_mass = not (options.signed_input or options.sync_stats or geometry.pads_beforehand)
        """Whether the closed form can take the mass itself, and hand its gradient on."""
        self.padded = Plan(geometry.padded(), options) if geometry.pads_beforehand else None
        """What is left of the plan after padding that torch's convolution cannot do, with the mass already taken."""
        self.shapes: dict[Any, Any] = {}
        """The native backend's cache: what it worked out for each shape it has seen."""

    def mass_shape(self, inputs: int) -> tuple[int, ...]:
        """The shape of the mass of an input with this many channels."""
        kernel = self.geometry.kernel
        return (1, inputs, *(kernel if self.kind == "position" else (1,) * len(kernel)))

    def __getstate__(self) -> dict[str, Any]:
        return {"geometry": self.geometry, "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Plan.__init__(self, state["geometry"], state["options"])  # what is cached belongs to this version of the code


class Running(NamedTuple):
    """The moving average of the mass, updated in place."""

    mass: Tensor
    batches: Tensor | None


class Call(NamedTuple):
    """One forward pass, apart from the tensors that get gradients."""

    plan: Plan
    samples: int
    """How many leading samples of the batch the mass is taken from."""
    output_scale: Tensor | None
    running: Running | None


Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Gradients of the weight, as kernels; of the gain, (D,); and of the mass, (1, C, ...), unless already added to dx."""
