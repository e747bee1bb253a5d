"""The images of a recipe: their specification, and loaders for training and test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from balnorm.data import (
    IMAGENET_STATISTICS,
    SETS,
    DataError,
    FolderLoader,
    ImageFolder,
    Images,
    ImageSpec,
    MemoryLoader,
    channel_statistics,
    load,
)
from balnorm.norms import NORMS
from balnorm.training.config import Recipe
from balnorm.training.processes import Processes

__all__ = ["Loader", "image_shape", "make_loaders", "make_test_loader"]

Loader = MemoryLoader | FolderLoader

_TEST_BATCH = 500  # of small images, in memory


def make_loaders(recipe: Recipe, team: Processes, root: Path) -> tuple[Loader, Loader, ImageSpec]:
    """Loaders for training and test, and the images' specification."""
    (channels, size, _), _ = image_shape(recipe)
    data: Images | ImageFolder
    mean: Any
    std: Any
    if recipe.data == "folder":
        data = ImageFolder.scan(root, "train", limit=recipe.train_limit)
        if len(data.classes) < 2:
            raise DataError(f"{root} has one class only, {data.classes[0]}: each class needs a folder of its own")
        mean, std = IMAGENET_STATISTICS
    else:
        if recipe.padding > size:
            raise ValueError(f"padding must be at most {size}, the size of an image, got {recipe.padding}")
        data = load(recipe.data, root, "train", limit=recipe.train_limit)
        mean, std = channel_statistics(data.images)
    spec = ImageSpec(channels, size, data.classes, tuple(map(float, mean)), tuple(map(float, std)), (len(data), 0))
    options = {"training": True, "seed": recipe.seed, **_options(recipe, team, spec)}
    train: Loader
    if isinstance(data, ImageFolder):
        train = FolderLoader(data, recipe.batch_size, **options)
    else:
        flip = SETS[recipe.data].flip
        train = MemoryLoader(data, recipe.batch_size, padding=recipe.padding, flip=flip, **options)
    test = make_test_loader(recipe, team, root, spec, recipe.batch_size if recipe.data == "folder" else _TEST_BATCH)
    return train, test, replace(spec, count=(len(data), test.shares.images))


def make_test_loader(recipe: Recipe, team: Processes, root: Path, spec: ImageSpec, batch_size: int) -> Loader:
    """A loader for the test images only, for a network trained on images of this specification."""
    options = _options(recipe, team, spec)
    if recipe.data == "folder":
        folder = ImageFolder.scan(root, "test", classes=spec.classes, limit=recipe.test_limit)
        return FolderLoader(folder, batch_size, training=False, **options)
    return MemoryLoader(load(recipe.data, root, "test", limit=recipe.test_limit), batch_size, training=False, **options)


def image_shape(recipe: Recipe) -> tuple[tuple[int, int, int], int]:
    """Channels, height and width of a recipe's images, and the number of classes (1000 for folders)."""
    if recipe.data == "folder":
        return (3, recipe.image_size, recipe.image_size), 1000
    known = SETS[recipe.data]
    return (known.channels, known.size, known.size), known.classes


def _options(recipe: Recipe, team: Processes, spec: ImageSpec) -> dict[str, Any]:
    options: dict[str, Any] = {"rank": team.rank, "world": team.world, "device": team.device}
    options |= {"pixels": NORMS[recipe.norm].pixels, "statistics": spec.statistics}
    return options | ({"size": spec.size, "workers": recipe.workers} if recipe.data == "folder" else {})
