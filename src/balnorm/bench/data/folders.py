"""Images in one folder per class, too many for memory, such as ImageNet. Worker processes decode them."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from balnorm.bench.data.augment import ChannelStatistics, Pixels, to_float
from balnorm.bench.data.loaders import Shares
from balnorm.bench.data.sources import DataError, MissingDataError, stratified
from balnorm.bench.errors import one_line

__all__ = ["IMAGENET_STATISTICS", "FolderLoader", "ImageFolder"]

IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The customary mean and standard deviation of ImageNet's pixels in each channel."""

# The formats that a file may have, by its name: for others, Pillow may start other programs. ImageNet has a PNG
# file that is called .JPEG.
_FORMATS = {".jpg": ("JPEG", "PNG"), ".jpeg": ("JPEG", "PNG"), ".png": ("PNG",), ".bmp": ("BMP",), ".webp": ("WEBP",)}
_FORMATS |= {".gif": ("GIF",), ".tif": ("TIFF",), ".tiff": ("TIFF",), ".ppm": ("PPM",)}
_SPLITS = {"train": ("train", "training"), "test": ("val", "test", "valid", "validation")}


@dataclass(frozen=True)
class ImageFolder:
    """The files of one split, their labels and the names of the classes; the pixels stay on disk."""

    paths: tuple[Path, ...]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    @staticmethod
    def scan(
        root: str | Path,
        split: str,
        *,
        classes: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> ImageFolder:
        """Find the images in ``root/train`` (or ``root/val``), which has one folder per class.

        Classes are numbered in the alphabetical order of the training folders, as is usual for ImageNet, or as in
        ``classes`` if those folders are missing. Every class has to have images. ``limit`` is that of
        :func:`balnorm.bench.data.load`.
        """
        root = Path(root)
        folder = _split_folder(root, split)
        found = _class_folders(folder)
        source = "the run"
        if classes is None:
            train = _split_folder(root, "train")
            classes, source = _class_folders(train), str(train)
        if unknown := sorted(set(found) - set(classes)):
            raise DataError(f"{folder} has classes that are not in {source}: {', '.join(unknown[:5])}")
        paths: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            images = _images_in(folder / name)
            paths += images
            labels += [label] * len(images)
        if not paths:
            raise DataError(f"{folder} has no images: their names should end in {', '.join(sorted(_FORMATS))}")
        known = set(labels)
        if empty := [name for label, name in enumerate(classes) if label not in known]:
            raise DataError(f"{folder} has no images of {_some(empty)}: add some, or remove the class everywhere")
        everything = ImageFolder(tuple(paths), np.array(labels, dtype=np.int64), tuple(classes))
        chosen = stratified(everything.labels, limit)
        return replace(everything, paths=tuple(paths[i] for i in chosen), labels=everything.labels[chosen])


def _split_folder(root: Path, split: str) -> Path:
    if split not in _SPLITS:
        raise ValueError(f"the split must be 'train' or 'test', got {split!r}")
    for name in _SPLITS[split]:
        if (root / name).is_dir():
            return root / name
    raise MissingDataError(f"{root} has no folder {' or '.join(_SPLITS[split])}, with a folder for each class inside")


def _class_folders(folder: Path) -> list[str]:
    """The names of the folders inside, sorted, without hidden ones."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read ({error.strerror}): check its permissions") from error
    if not names:
        raise DataError(
            f"{folder} has no folders: put the images of each class into a separate folder, named as in train"
        )
    return names


def _images_in(folder: Path) -> list[Path]:
    if not folder.exists():
        return []
    if not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"{folder} cannot be read: check its permissions")
    candidates = [path for path in folder.rglob("*") if path.suffix.lower() in _FORMATS]
    if broken := sorted(str(path) for path in candidates if path.is_symlink() and not path.exists()):
        raise DataError(f"{_some(broken)} cannot be opened: the link is broken, fix or remove it")
    return sorted(path for path in candidates if path.is_file() and not path.name.startswith("."))


def _some(names: Sequence[str]) -> str:
    """The first of several names, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


class FolderLoader:
    """Batches of an image folder: decoded, cropped and resized by worker processes, as floats on ``device``.

    In training each image gives a random part of it, resized to ``size`` and mirrored half of the time; otherwise the
    centre, after the shorter side has been resized to 256/224 of ``size``. Order and augmentation depend on seed, epoch
    and image only. Arguments not listed are those of :class:`~balnorm.bench.data.loaders.MemoryLoader`.

    Args:
        data: the files.
        size: side of the images of a batch, in pixels.
        workers: processes that decode; 0 decodes in this one.
    """

    def __init__(
        self,
        data: ImageFolder,
        batch_size: int,
        *,
        training: bool,
        size: int = 224,
        seed: int = 0,
        flip: bool = True,
        pixels: Pixels = "unit",
        statistics: ChannelStatistics | None = IMAGENET_STATISTICS,
        rank: int = 0,
        world: int = 1,
        workers: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shares = Shares(len(data), batch_size, training, seed, rank, world)
        self.data, self.size, self.flip, self.workers = data, size, flip, workers
        self.pixels: Pixels = pixels
        self.statistics, self.device = statistics, device
        to_float(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), pixels, statistics)  # bad options fail now

    def __len__(self) -> int:
        return len(self.shares)

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, starting at number ``start``."""
        if epoch < 0 or start < 0:
            raise ValueError(f"epoch and start must not be negative, got {epoch} and {start}")
        decoder = _Decoder(self.data, self.size, self.shares.training, self.flip, (self.shares.seed, epoch))
        on_gpu = torch.device(self.device).type == "cuda"
        batches = DataLoader(
            decoder,
            batch_sampler=[index.tolist() for index in self.shares.batches(epoch, start)],
            num_workers=self.workers,
            multiprocessing_context=_start_method() if self.workers else None,
            collate_fn=_collate,
            pin_memory=on_gpu,
            generator=torch.Generator(),  # else it draws from the global one
            worker_init_fn=_ignore_interrupts,
        )
        for batch in batches:
            if isinstance(batch, str):
                raise DataError(batch)
            images, labels = (each.to(self.device, non_blocking=on_gpu) for each in batch)
            yield to_float(images, self.pixels, self.statistics), labels


_Item = tuple[Tensor, int] | str
"""The pixels and the label of an image, or why it cannot be decoded: an error would show a worker's traceback."""


@dataclass(frozen=True)
class _Decoder(Dataset[_Item]):
    """Decode a file to uint8 pixels (3, size, size)."""

    data: ImageFolder
    size: int
    training: bool
    flip: bool
    key: tuple[int, int]

    def __getitem__(self, index: int) -> _Item:
        from PIL import Image, UnidentifiedImageError

        path, label = self.data.paths[index], int(self.data.labels[index])
        random, formats = np.random.default_rng([*self.key, index]), _FORMATS[path.suffix.lower()]
        try:
            with Image.open(path, formats=formats) as image:
                # JPEG can be decoded at a half, a quarter or an eighth of its size for much less work.
                box = self._box(*image.size, random)
                scale = min(box[2] - box[0], box[3] - box[1]) / self.size
                before = image.size
                if scale >= 2:
                    image.draft("RGB", (math.ceil(before[0] / scale), math.ceil(before[1] / scale)))
                shrunk = image.size[0] / before[0], image.size[1] / before[1]
                scaled = (box[0] * shrunk[0], box[1] * shrunk[1], box[2] * shrunk[0], box[3] * shrunk[1])
                pixels = np.asarray(
                    _as_rgb(image).resize((self.size, self.size), Image.Resampling.BILINEAR, box=scaled)
                )
        except UnidentifiedImageError:
            return f"{path} cannot be decoded (it is not a {' or '.join(formats)} file): replace it, or remove it"
        except Exception as error:  # on damaged files, Pillow's decoders raise whatever they like
            return f"{path} cannot be decoded ({one_line(error)}): replace it, or remove it"
        if self.training and self.flip and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1), label

    def _box(self, width: int, height: int, random: np.random.Generator) -> tuple[float, float, float, float]:
        """The part of an image to use: left, top, right, bottom."""
        if self.training:
            for _ in range(10):  # 8 % to 100 % of the area, of shape 3:4 to 4:3, if that fits
                area = width * height * random.uniform(0.08, 1.0)
                ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
                w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
                if w <= width and h <= height:
                    left, top = random.uniform(0, width - w), random.uniform(0, height - h)
                    return left, top, left + w, top + h
        side = min(width, height) * (1.0 if self.training else 224 / 256)
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side


def _as_rgb(image: Any) -> Any:
    """Convert to three channels of bytes. Sixteen-bit values are scaled; Pillow would clip them."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


def _start_method() -> str | None:
    """How workers start: on Linux they fork, which takes milliseconds, and elsewhere as torch decides.

    In the runs of a study torch would start them with a fork server, and each would import torch again in every epoch.
    """
    return "fork" if sys.platform == "linux" else None


def _ignore_interrupts(_: int) -> None:
    """In a worker: a terminal's Ctrl-C is for the process that trains, which needs more batches before it saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collate(items: list[_Item]) -> tuple[Tensor, Tensor] | str:
    for item in items:
        if isinstance(item, str):
            return item
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.tensor(labels, dtype=torch.int64)
