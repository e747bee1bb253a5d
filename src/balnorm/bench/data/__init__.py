"""Data for the study: reading, downloading, augmenting and mixing images.

>>> from balnorm.bench.data import MemoryLoader, load
>>> train = load("digits", root=".", split="train")
>>> loader = MemoryLoader(train, batch_size=64, training=True, seed=1)
"""

from balnorm.bench.data.downloads import check, download
from balnorm.bench.data.folders import IMAGENET_STATISTICS, FolderLoader, ImageFolder
from balnorm.bench.data.loaders import MemoryLoader
from balnorm.bench.data.mixup import Blend, Mixup, soft_cross_entropy
from balnorm.bench.data.sets import SETS
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
