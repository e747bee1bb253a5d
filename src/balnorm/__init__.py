"""Balanced normalisation of weights (BalNorm) for PyTorch.

>>> import torch
>>> from balnorm import BalNormConv2d
>>> layer = BalNormConv2d(3, 16, kernel_size=3, padding=1)  # in the place of Conv2d and BatchNorm2d
>>> layer(torch.rand(8, 3, 32, 32)).shape
torch.Size([8, 16, 32, 32])
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from balnorm.channels import ChannelAffine, ChannelCentre
    from balnorm.diagnostics import balance_report
    from balnorm.functional import backend
    from balnorm.layers import (
        BalNormConv1d,
        BalNormConv2d,
        BalNormConv3d,
        BalNormConvTranspose1d,
        BalNormConvTranspose2d,
        BalNormConvTranspose3d,
        BalNormLayer,
        BalNormLinear,
        BalNormWarning,
    )
    from balnorm.surgery import (
        convert,
        fold,
        freeze_stats,
        param_groups,
        unfreeze_stats,
        update_stats,
    )

__all__ = [
    "BalNormConv1d",
    "BalNormConv2d",
    "BalNormConv3d",
    "BalNormConvTranspose1d",
    "BalNormConvTranspose2d",
    "BalNormConvTranspose3d",
    "BalNormLayer",
    "BalNormLinear",
    "BalNormWarning",
    "ChannelAffine",
    "ChannelCentre",
    "__version__",
    "backend",
    "balance_report",
    "convert",
    "fold",
    "freeze_stats",
    "param_groups",
    "unfreeze_stats",
    "update_stats",
]

__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
    """Import torch when the first of these names is used, and not before: the command line answers faster."""
    if name in ("activations", "functional"):
        return importlib.import_module(f"balnorm.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'balnorm' has no attribute {name!r}")
    from balnorm import channels, diagnostics, functional, layers, surgery

    homes = {"balance_report": diagnostics, "backend": functional}
    prefixes = {"BalNorm": layers, "Channel": channels}
    home = next((prefixes[each] for each in prefixes if name.startswith(each)), homes.get(name, surgery))
    globals()[name] = getattr(home, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
