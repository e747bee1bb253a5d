"""Data for the study: reading, downloading, augmenting and mixing images.

>>> from balnorm.bench.data import MemoryLoader, load
>>> train = load("digits", root=".", split="train")
>>> loader = MemoryLoader(train, batch_size=64, training=True, seed=1)
"""

import importlib
from typing import TYPE_CHECKING, Any

from balnorm.bench.data.sets import SETS

if TYPE_CHECKING:
    from balnorm.bench.data.downloads import check, download
    from balnorm.bench.data.folders import IMAGENET_STATISTICS, FolderLoader, ImageFolder
    from balnorm.bench.data.loaders import MemoryLoader
    from balnorm.bench.data.mixup import Blend, Mixup, soft_cross_entropy
    from balnorm.bench.data.sources import DataError, Images, ImageSpec, channel_statistics, load

__all__ = [
    "IMAGENET_STATISTICS",
    "SETS",
    "Blend",
    "DataError",
    "FolderLoader",
    "ImageFolder",
    "ImageSpec",
    "Images",
    "MemoryLoader",
    "Mixup",
    "channel_statistics",
    "check",
    "download",
    "load",
    "soft_cross_entropy",
]

_HOMES = {
    "downloads": ("check", "download"),
    "folders": ("IMAGENET_STATISTICS", "FolderLoader", "ImageFolder"),
    "loaders": ("MemoryLoader",),
    "mixup": ("Blend", "Mixup", "soft_cross_entropy"),
    "sources": ("DataError", "Images", "ImageSpec", "channel_statistics", "load"),
}


def __getattr__(name: str) -> Any:
    """Import torch and numpy on first use of these names; the names of the data sets need neither."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"balnorm.bench.data.{home}"), name)
    raise AttributeError(f"module 'balnorm.bench.data' has no attribute {name!r}")
