"""Operations on whole models: convert to balanced layers, fold them, re-estimate or freeze their statistics."""

from balnorm.surgery._convert import ConversionReport, convert
from balnorm.surgery._fold import fold
from balnorm.surgery._param_groups import param_groups
from balnorm.surgery._statistics import freeze_stats, unfreeze_stats, update_stats

__all__ = [
    "ConversionReport",
    "convert",
    "fold",
    "freeze_stats",
    "param_groups",
    "unfreeze_stats",
    "update_stats",
]
