"""The images of a recipe: their specification, and loaders for training and test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from balnorm.bench.data.folders import IMAGENET_STATISTICS, FolderLoader, ImageFolder
from balnorm.bench.data.loaders import MemoryLoader
from balnorm.bench.data.sets import SETS
from balnorm.bench.data.sources import DataError, Images, ImageSpec, channel_statistics, load
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.processes import Processes

__all__ = ["Loader", "image_shape", "make_loaders", "make_test_loader"]

Loader = MemoryLoader | FolderLoader

_TEST_BATCH = 500  # of small images, in memory


def make_loaders(recipe: Recipe, team: Processes, root: Path) -> tuple[Loader, Loader, ImageSpec]:
    """Loaders for training and test, and the images' specification."""
    channels, size, _ = image_shape(recipe)
    data: Images | ImageFolder
    statistics: Any
    if recipe.data == "folder":
        data = ImageFolder.scan(root, "train", limit=recipe.train_limit)
        if len(data.classes) < 2:
            raise DataError(f"{root} has one class only, {data.classes[0]}: each class needs its own folder")
        statistics, augmentation, test_batch = IMAGENET_STATISTICS, {}, recipe.batch_size
    else:
        if recipe.padding > size:
            raise ValueError(f"padding must be at most {size}, the size of an image, got {recipe.padding}")
        data = load(recipe.data, root, "train", limit=recipe.train_limit)
        augmentation = {"padding": recipe.padding, "flip": SETS[recipe.data].flip}
        statistics, test_batch = channel_statistics(data.images), _TEST_BATCH
    mean, std = (tuple(map(float, values)) for values in statistics)
    spec = ImageSpec(channels, size, data.classes, mean, std, (len(data), 0))
    train = _loader(recipe, team, spec, data, recipe.batch_size, training=True, seed=recipe.seed, **augmentation)
    test = make_test_loader(recipe, team, root, spec, test_batch)
    return train, test, replace(spec, count=(len(data), test.shares.images))


def make_test_loader(recipe: Recipe, team: Processes, root: Path, spec: ImageSpec, batch_size: int) -> Loader:
    """A loader for the test images only, for a network trained on images of this specification."""
    data: Images | ImageFolder
    if recipe.data == "folder":
        data = ImageFolder.scan(root, "test", classes=spec.classes, limit=recipe.test_limit)
    else:
        data = load(recipe.data, root, "test", limit=recipe.test_limit)
    return _loader(recipe, team, spec, data, batch_size, training=False)


def _loader(
    recipe: Recipe, team: Processes, spec: ImageSpec, data: Images | ImageFolder, batch_size: int, **options: Any
) -> Loader:
    options |= {"rank": team.rank, "world": team.world, "device": team.device}
    # BalNorm's inputs are not negative, so its paper recommends pixels in [0, 1]. Other norms get the customary ones.
    pixels = "unit" if recipe.norm == "balnorm" else "standardised"
    options |= {"pixels": pixels, "statistics": spec.statistics}
    if isinstance(data, ImageFolder):
        return FolderLoader(data, batch_size, size=spec.size, workers=recipe.workers, **options)
    return MemoryLoader(data, batch_size, **options)


def image_shape(recipe: Recipe) -> tuple[int, int, int]:
    """Channels and size of a recipe's images, and the number of classes (1000 for folders)."""
    if recipe.data == "folder":
        return 3, recipe.image_size, 1000
    known = SETS[recipe.data]
    return known.channels, known.size, known.classes
