"""Balanced normalisation of weights (BalNorm) for PyTorch.

>>> import torch
>>> from balnorm import BalNormConv2d
>>> layer = BalNormConv2d(3, 16, kernel_size=3, padding=1)  # replaces Conv2d and BatchNorm2d
>>> layer(torch.rand(8, 3, 32, 32)).shape
torch.Size([8, 16, 32, 32])
"""

from balnorm import activations, functional
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
    "activations",
    "backend",
    "balance_report",
    "convert",
    "fold",
    "freeze_stats",
    "functional",
    "param_groups",
    "unfreeze_stats",
    "update_stats",
]

__version__ = "0.3.0"
