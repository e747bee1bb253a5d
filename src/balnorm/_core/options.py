"""The options of a balanced layer, defined and checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

__all__ = [
    "MASSES",
    "ConstructorKeywords",
    "LayerKeywords",
    "LayerOptions",
    "MassKind",
    "OptionKeywords",
    "Options",
]

MassKind = Literal["channel", "position"]
MASSES: tuple[MassKind, ...] = ("channel", "position")


@dataclass(frozen=True)
class Options:
    """How a weight is balanced. An invalid value raises a ValueError that says what is allowed."""

    mass: MassKind = "channel"
    """Sum each input channel as a whole (``"channel"``, the paper), or count for each tap of the kernel exactly the
    inputs that it meets (``"position"``), which stays exact under zero padding, stride and dilation. If a
    zero-padded image (of a transposed convolution: the output) is smaller than the kernel, ``"position"`` spreads the
    inputs evenly over the taps, as ``"channel"`` does."""
    one_pass: bool = True
    """Take the signs of the weight before the shift (``True``, the paper's experiments) or after it (``False``,
    exactly balanced)."""
    stats_fraction: float = 1.0
    """Take the mass from this leading fraction of the batch (at least one sample). Less than 1 adds noise that
    regularises."""
    shift: bool | Literal["auto"] = "auto"
    """Subtract the weighted mean from every output kernel, as the paper does. It takes one degree of freedom from the
    kernel, so ``"auto"`` leaves it out if an output kernel has a single input channel (depthwise layers)."""
    centred: bool = False
    """Take the mass of ``|x - mean|`` in place of ``|x|``: for inputs that do not come from a ReLU. It reads the input
    twice."""
    equalise: bool = False
    """Give every input channel the same say: multiply its weights by q = mean(a) / max(a, 0.1 mean(a)), the mean taken
    over the channels, and balance for the mass a q. On trial: it runs in differentiable operations only, which are
    slower and keep more for the backward pass."""
    momentum: float | None = 0.1
    """Weight of the newest batch in the running statistics; ``None`` is the simple average of all batches."""
    sync_stats: bool = False
    """In training, sum the statistics over all processes, if :mod:`torch.distributed` is initialised."""
    process_group: ProcessGroup | None = None
    """The processes to sum over; ``None`` is all of them."""

    @classmethod
    def of(cls, owner: str, keywords: dict[str, Any]) -> Self:
        """Options from the keyword arguments of ``owner``. An unknown one raises a TypeError that names ``owner``."""
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                why = _NOT_OURS.get(name, f"; its options are {', '.join(cls.__dataclass_fields__)}")
                raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{why}")
        return cls(**keywords)

    def __post_init__(self) -> None:
        if self.mass not in MASSES:
            raise ValueError(f"mass must be one of {', '.join(map(repr, MASSES))}, got {self.mass!r}")
        if not _is_number(self.stats_fraction) or not 0.0 < self.stats_fraction <= 1.0:
            raise ValueError(f"stats_fraction must be above 0 and at most 1, got {self.stats_fraction!r}")
        if self.momentum is not None and not (_is_number(self.momentum) and 0.0 <= self.momentum <= 1.0):
            raise ValueError(f"momentum must be None (the simple average) or between 0 and 1, got {self.momentum!r}")
        if self.process_group is not None and not self.sync_stats:
            raise ValueError("process_group needs sync_stats=True: without it nothing is sent between processes")
        if self.shift != "auto" and not isinstance(self.shift, bool):
            raise ValueError(f"shift must be True, False or 'auto', got {self.shift!r}")
        _check_switches(self, "one_pass", "centred", "equalise", "sync_stats")

    def shifts(self, inputs_per_group: int) -> bool:
        """Whether an output kernel with this many input channels is shifted."""
        return inputs_per_group > 1 if self.shift == "auto" else self.shift


@dataclass(frozen=True)
class LayerOptions(Options):
    """The options of a layer: those of the balance, and those of the layer's state."""

    output_scale: float | Literal["unit_variance"] = "unit_variance"
    """A constant factor of the output: ``"unit_variance"`` gives outputs of variance 1 for rectified Gaussian inputs;
    1.0 is the literal reading of the paper."""
    affine: bool = True
    """Whether the gain is learned. If not, it stays at 1. (The bias has its own argument.)"""
    track_running_stats: bool = True
    """Whether to keep running statistics. Without them, eval mode uses the batch too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scale = self.output_scale
        if scale != "unit_variance" and not (_is_number(scale) and 0.0 < scale < math.inf):
            raise ValueError(f"output_scale must be 'unit_variance' or a positive finite number, got {scale!r}")
        _check_switches(self, "affine", "track_running_stats")


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`Options` for type checkers, as in ``**options: Unpack[OptionKeywords]``."""

    mass: MassKind
    one_pass: bool
    stats_fraction: float
    shift: bool | Literal["auto"]
    centred: bool
    equalise: bool
    momentum: float | None
    sync_stats: bool
    process_group: ProcessGroup | None


class LayerKeywords(OptionKeywords, total=False):
    """The fields of :class:`LayerOptions` for type checkers."""

    output_scale: float | Literal["unit_variance"]
    affine: bool
    track_running_stats: bool


class ConstructorKeywords(LayerKeywords, total=False):
    """The keywords that ``from_conv`` and ``from_linear`` pass on to the constructor."""

    bias: bool
    device: torch.device | str | int | None
    dtype: torch.dtype | None


_NOT_OURS = {
    "eps": ": BalNorm needs no epsilon",
    "signed_input": ": any input will do now; for inputs that do not come from a ReLU, give centred=True",
}


def _check_switches(options: Options, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
