"""Read data sets from the official files of their authors into arrays. Nothing is ever unpickled."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import math
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balnorm.bench.data.sets import CIFAR, DIGITS, FASHION, IDX, SETS, SVHN, Split
from balnorm.bench.errors import Failure

__all__ = ["DataError", "ImageSpec", "Images", "MissingDataError", "channel_statistics", "load", "stratified"]


class DataError(Failure):
    """A data set is truncated or damaged. The message says what to do."""


class MissingDataError(DataError, ValueError):
    """A data set is missing. That is a mistake in the command, so it is a ValueError."""


@dataclass(frozen=True)
class Images:
    """A data set, or a subset of one, in memory.

    Attributes:
        images: uint8, (N, C, H, W).
        labels: int64, (N,).
        classes: their names.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: NDArray[np.int64]) -> Images:
        return replace(self, images=self.images[index], labels=self.labels[index])


@dataclass(frozen=True)
class ImageSpec:
    """A specification of a run's images, without the images themselves.

    Attributes:
        channels, size: of an image as the network receives it.
        classes: their names.
        mean, std: of the pixels in [0, 1], for each channel.
        count: how many images there are for training and for testing.
    """

    channels: int
    size: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    count: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.channels, self.size, self.size

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.mean, self.std

    def changes(self, saved: dict[str, Any]) -> str:
        """Describe how this differs from a saved specification, as :func:`dataclasses.asdict` returned it."""
        if list(self.classes) != list(saved["classes"]):
            before, now = (
                ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
                for classes in (saved["classes"], self.classes)
            )
            return f"the classes were {before}, and are {now}"
        if list(self.count) != list(saved["count"]):
            before, now = (
                f"{train} to train with and {test} to test with" for train, test in (saved["count"], self.count)
            )
            return f"there were {before}, and are {now}"
        # Processors differ in the last bits of sums.
        same = all(
            len(now) == len(saved[name]) and all(map(_nearly_equal, now, saved[name]))
            for name, now in (("mean", self.mean), ("std", self.std))
        )
        same = same and (self.channels, self.size) == (saved["channels"], saved["size"])
        return "" if same else "their size or their pixels differ"


def _nearly_equal(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


def load(name: str, root: str | Path, split: Split, *, limit: int | None = None) -> Images:
    """Load a split of a data set, or a subset of it in which every class keeps its share, always the same one.

    Args:
        name: a name from :data:`SETS`.
        root: the folder that holds the data set's files, as ``balnorm.bench.data.download`` leaves them.
        split: ``"train"`` or ``"test"``.
        limit: load at most this many images.

    Example:
        >>> digits = load("digits", ".", "train", limit=100)
        >>> digits.images.shape, np.bincount(digits.labels)
        ((100, 1, 8, 8), array([10, 10, 10, 10, 10, 10, 10, 10, 10, 10]))
    """
    if name not in SETS:
        raise ValueError(f"the data set must be one of {', '.join(SETS)}, got {name!r}")
    if split not in ("train", "test"):
        raise ValueError(f"the split must be 'train' or 'test', got {split!r}")
    everything = _READERS[SETS[name].format](Path(root), split, name)
    return everything[stratified(everything.labels, limit)]


def stratified(labels: NDArray[np.int64], limit: int | None) -> NDArray[np.int64]:
    """Indices, in ascending order, of a subset in which every class keeps its share to within one image."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    total = len(labels)
    wanted = total if limit is None else min(limit, total)
    if wanted == total:
        return np.arange(total)
    # Each class's share, rounded down; the largest remainders get the rest.
    sizes = np.bincount(labels)
    shares = wanted * sizes / total
    counts = np.floor(shares).astype(np.int64)
    for label in np.argsort(counts - shares, kind="stable")[: wanted - counts.sum()]:
        counts[label] += 1
    random = np.random.default_rng([0, 0x5717])
    chosen = [
        random.permutation(np.flatnonzero(labels == label))[:count] for label, count in enumerate(counts) if count > 0
    ]
    return np.sort(np.concatenate(chosen))


def channel_statistics(images: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The exact mean and standard deviation of each channel, for pixels in [0, 1], computed from a histogram."""
    values = np.arange(256) / 255
    counts = np.zeros((images.shape[1], 256))
    for start in range(0, len(images), 4096):  # counting makes a copy of eight times the size
        for channel in range(len(counts)):
            counts[channel] += np.bincount(images[start : start + 4096, channel].reshape(-1), minlength=256)
    shares = counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    return mean, np.sqrt(shares @ values**2 - mean**2)


# --------------------------------------------------------------------------------------------------------------------
# Readers
# --------------------------------------------------------------------------------------------------------------------

_LARGEST = 2 << 30  # bytes, more than any of the files has
_DOWNLOAD = "download it with `balnorm data get {name} --root {root}`, or put it there"


def _find(root: Path, name: str, *candidates: str) -> Path:
    """The first of several files that exists."""
    for candidate in candidates:
        if (root / candidate).is_file():
            return root / candidate
    advice = _DOWNLOAD.format(name=name, root=root)
    raise MissingDataError(f"{name} is not in {root} (looked for {' and '.join(candidates)}): {advice}")


def _damaged(path: Path | str, why: str) -> DataError:
    return DataError(f"{path} is damaged ({why}): delete it and download it again")


def _check_md5(data: bytes, md5: str | None, path: Path | str) -> bytes:
    if md5 is not None and hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
        raise _damaged(path, f"its MD5 is not {md5}")
    return data


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > _LARGEST:
            raise _damaged(path, f"it has {size:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check its permissions") from error


def _decompressed(path: Path, most: int) -> bytes:
    """The contents of a file, decompressed if its name ends in .gz or .xz; no more than so many bytes."""
    data = _read(path)
    kinds: dict[str, Any] = {".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".xz": lzma.LZMAFile}
    if path.suffix in kinds:
        try:
            with kinds[path.suffix](io.BytesIO(data)) as file:
                data = file.read(most + 1)
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise _damaged(path, str(error)) from error
    if len(data) > most:
        raise _damaged(path, f"it contains more than {most:,} bytes")
    return data


def _members(archive: Path, md5: str, wanted: Iterable[str]) -> list[bytes]:
    """Read files directly from a tar archive, without writing anything."""
    data = _check_md5(_read(archive), md5, archive)
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            return [tar.extractfile(name).read() for name in wanted]  # type: ignore[union-attr]
    except (EOFError, KeyError, OSError, AttributeError, tarfile.TarError, zlib.error) as error:
        raise _damaged(archive, str(error)) from error


def _checked(images: NDArray[np.uint8], labels: NDArray[Any], classes: tuple[str, ...], path: Path | str) -> Images:
    if len(labels) == 0 or len(images) != len(labels):
        raise _damaged(path, f"{len(images)} images and {len(labels)} labels")
    if labels.min() < 0 or labels.max() >= len(classes):
        raise _damaged(path, f"a label is {labels.max()}, and there are {len(classes)} classes")
    return Images(np.ascontiguousarray(images), labels.astype(np.int64), classes)


def _read_cifar(root: Path, split: Split, name: str) -> Images:
    """Records of one label byte (two for CIFAR-100: coarse and fine) and 3072 pixels in three planes."""
    folder, archive, label_bytes, parts, classes = CIFAR[name]
    data: list[bytes] = []
    archive_path = root / archive.path
    unpacked = any((root / folder / f"{part}.bin{suffix}").is_file() for part in parts[split] for suffix in ("", ".xz"))
    if archive_path.is_file() and not unpacked:
        data = _members(archive_path, archive.md5, [f"{folder}/{part}.bin" for part in parts[split]])
    else:
        for part, md5 in parts[split].items():
            path = _find(root, name, f"{folder}/{part}.bin", f"{folder}/{part}.bin.xz")
            data.append(_check_md5(_decompressed(path, 50_000 * (label_bytes + 3072)), md5, path))
    records = []
    for part, contents in zip(parts[split], data, strict=True):
        size = label_bytes + 3072
        if not contents or len(contents) % size:
            raise _damaged(
                f"{root / folder / part}.bin", f"{len(contents)} bytes are not a number of {size}-byte records"
            )
        records.append(np.frombuffer(contents, np.uint8).reshape(-1, size))
    everything = np.concatenate(records)
    labels = everything[:, label_bytes - 1]
    return _checked(everything[:, label_bytes:].reshape(-1, 3, 32, 32), labels, classes, root / folder)


def _read_svhn(root: Path, split: Split, name: str) -> Images:
    """MATLAB files with X (32, 32, 3, N) and y (N, 1), in which 10 means the digit 0."""
    from scipy.io import loadmat

    images, labels = [], []
    for file in SVHN[name][split]:
        path = _find(root, name, file.path)
        contents = _check_md5(_read(path), file.md5, path)
        try:
            arrays = loadmat(io.BytesIO(contents), variable_names=["X", "y"])
            pixels, digits = arrays["X"], arrays["y"].reshape(-1)
        except Exception as error:  # on unexpected contents, scipy's parser can raise anything
            raise _damaged(path, str(error)) from error
        if pixels.shape[:3] != (32, 32, 3) or pixels.ndim != 4 or pixels.dtype != np.uint8:
            raise _damaged(path, f"X is {pixels.dtype} {pixels.shape}, not uint8 (32, 32, 3, N)")
        if digits.dtype.kind not in "iu":
            raise _damaged(path, f"y is {digits.dtype}, not whole numbers")
        images.append(pixels.transpose(3, 2, 0, 1))
        labels.append(digits % 10)
    return _checked(np.concatenate(images), np.concatenate(labels), DIGITS, root)


def _read_idx(root: Path, split: Split, name: str) -> Images:
    """MNIST's format: a magic number, sizes in big-endian, and bytes; usually compressed with gzip."""
    stem = "train" if split == "train" else "t10k"
    arrays = []
    for kind, axes in (("images-idx3", 3), ("labels-idx1", 1)):
        file = f"{name}/{stem}-{kind}-ubyte"
        path = _find(root, name, f"{file}.gz", file)
        if path.suffix == ".gz":
            _check_md5(_read(path), next(f.md5 for f in IDX[name] if f.path == f"{file}.gz"), path)
        data = _decompressed(path, 16 + 60_000 * 28 * 28)
        header = 4 + 4 * axes
        if len(data) < header or data[:4] != bytes([0, 0, 8, axes]):
            raise _damaged(path, f"it does not start as an idx file of bytes with {axes} axes")
        shape = struct.unpack(f">{axes}I", data[4:header])
        if len(data) - header != math.prod(shape) or shape[1:] not in ((), (28, 28)):
            raise _damaged(path, f"{len(data) - header} bytes, and its header says {shape}")
        arrays.append(np.frombuffer(data, np.uint8, offset=header).reshape(shape))
    classes = DIGITS if name == "mnist" else FASHION
    return _checked(arrays[0][:, None], arrays[1], classes, root / name)


def _read_digits(root: Path, split: Split, name: str) -> Images:  # noqa: ARG001
    """scikit-learn's 1,797 images of digits, 8x8 with 17 levels of grey. A fifth of each class is the test set."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)[:, None]
    everything = Images(images, data.target.astype(np.int64), DIGITS)
    test = stratified(everything.labels, round(0.2 * len(images)))
    return everything[test if split == "test" else np.setdiff1d(np.arange(len(images)), test)]


_READERS: dict[str, Callable[[Path, Split, str], Images]] = {
    "cifar": _read_cifar,
    "svhn": _read_svhn,
    "idx": _read_idx,
    "digits": _read_digits,
}
