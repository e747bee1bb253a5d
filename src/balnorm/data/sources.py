"""Files on disk to arrays: each data set in the official format of its authors. Nothing is unpickled, ever."""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from balnorm.errors import Failure

__all__ = [
    "SETS",
    "DataError",
    "DataFile",
    "DataSet",
    "ImageSpec",
    "Images",
    "channel_statistics",
    "load",
    "stratified",
]

Split = Literal["train", "test"]


class DataError(Failure):
    """A data set is missing, truncated or not what it should be. The message says what to do."""


@dataclass(frozen=True)
class Images:
    """A data set, or a part of one, in memory.

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
    """What there is to know of a run's images, without having them.

    Attributes:
        channels, size: of an image as the network is fed it.
        classes: their names.
        mean, std: of the pixels in [0, 1], for each channel.
        count: how many there are to train with, and to test with.
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


@dataclass(frozen=True)
class DataFile:
    """A file to download: where from, what to call it, its published MD5, and what is in it, if it is an archive."""

    url: str
    path: str
    md5: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set.

    Attributes:
        read: the images of a split, from a root folder.
        files: what to download for it; empty for what comes with scikit-learn.
        channels, size: of an image.
        classes: how many.
        flip: whether a mirrored image is still one of its class; digits are not.
    """

    read: Callable[[Path, Split], Images]
    files: tuple[DataFile, ...]
    channels: int
    size: int
    classes: int
    flip: bool


def load(
    name: str,
    root: str | Path,
    split: Split,
    *,
    limit: int | None = None,
    fraction: float | None = None,
    seed: int = 0,
) -> Images:
    """A split of a data set, or a part of it that is stratified by class and fixed by ``seed``.

    Args:
        name: a name from :data:`SETS`.
        root: the folder that holds the data set's files, as ``balnorm.data.download`` leaves them.
        split: ``"train"`` or ``"test"``.
        limit: at most so many images.
        fraction: this part of them, above 0 and at most 1.
        seed: chooses which ones; the seed of a training run has no part in it.

    Example:
        >>> digits = load("digits", ".", "train", limit=100)
        >>> digits.images.shape, np.bincount(digits.labels)
        ((100, 1, 8, 8), array([10, 10, 10, 10, 10, 10, 10, 10, 10, 10]))
    """
    if name not in SETS:
        raise ValueError(f"the data set must be one of {', '.join(SETS)}, got {name!r}")
    if split not in ("train", "test"):
        raise ValueError(f"the split must be 'train' or 'test', got {split!r}")
    everything = SETS[name].read(Path(root), split)
    return everything[stratified(everything.labels, limit=limit, fraction=fraction, seed=seed)]


def stratified(
    labels: NDArray[np.int64], *, limit: int | None = None, fraction: float | None = None, seed: int = 0
) -> NDArray[np.int64]:
    """Indices, in ascending order, of a part of a data set in which every class keeps its share to within one image."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if fraction is not None and not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    total = len(labels)
    wanted = total if fraction is None else max(1, round(fraction * total))
    wanted = min(wanted, total if limit is None else limit)
    if wanted == total:
        return np.arange(total)
    # Each class's share, rounded down; what is missing goes to the largest remainders.
    sizes = np.bincount(labels)
    shares = wanted * sizes / total
    counts = np.floor(shares).astype(np.int64)
    for label in np.argsort(counts - shares, kind="stable")[: wanted - counts.sum()]:
        counts[label] += 1
    random = np.random.default_rng([seed, 0x5717])
    chosen = [
        random.permutation(np.flatnonzero(labels == label))[:count] for label, count in enumerate(counts) if count > 0
    ]
    return np.sort(np.concatenate(chosen))


def channel_statistics(images: NDArray[np.uint8]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of each channel of pixels in [0, 1], exact: from a histogram."""
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

_DOWNLOAD = "download it with `balnorm data get {name} --root {root}`, or put it there"


def _find(root: Path, name: str, *candidates: str) -> Path:
    """The first of several files that exists."""
    for candidate in candidates:
        if (root / candidate).is_file():
            return root / candidate
    advice = _DOWNLOAD.format(name=name, root=root)
    raise DataError(f"{name} is not in {root} (looked for {' and '.join(candidates)}): {advice}")


def _damaged(path: Path | str, why: str) -> DataError:
    return DataError(f"{path} is damaged ({why}): delete it and download it again")


def _check_md5(data: bytes, md5: str | None, path: Path | str) -> bytes:
    if md5 is not None and hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
        raise _damaged(path, f"its MD5 is not {md5}")
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): check its permissions") from error


def _decompressed(path: Path) -> bytes:
    """The contents of a file, unpacked if its name ends in .gz or .xz."""
    data = _read(path)
    try:
        if path.suffix == ".gz":
            return gzip.decompress(data)
        if path.suffix == ".xz":
            return lzma.decompress(data)
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise _damaged(path, str(error)) from error
    return data


def _members(archive: Path, md5: str, wanted: Iterable[str]) -> list[bytes]:
    """Files of a tar archive, straight from it: nothing is written."""
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
    folder, archive, label_bytes, parts, classes = _CIFAR[name]
    data: list[bytes] = []
    archive_path = root / archive.path
    unpacked = any((root / folder / f"{part}.bin{suffix}").is_file() for part in parts[split] for suffix in ("", ".xz"))
    if archive_path.is_file() and not unpacked:
        data = _members(archive_path, archive.md5, [f"{folder}/{part}.bin" for part in parts[split]])
    else:
        for part, md5 in parts[split].items():
            path = _find(root, name, f"{folder}/{part}.bin", f"{folder}/{part}.bin.xz")
            data.append(_check_md5(_decompressed(path), md5, path))
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


def _read_svhn(root: Path, split: Split) -> Images:
    """MATLAB files with X (32, 32, 3, N) and y (N, 1), where 10 stands for the digit 0. Train includes "extra"."""
    from scipy.io import loadmat

    images, labels = [], []
    for file in _SVHN if split == "train" else _SVHN_TEST:
        path = _find(root, "svhn", file.path)
        contents = _check_md5(_read(path), file.md5, path)
        try:
            arrays = loadmat(io.BytesIO(contents), variable_names=["X", "y"])
            pixels, digits = arrays["X"], arrays["y"].reshape(-1)
        except Exception as error:  # scipy's parser meets whatever is in the file, and raises whatever it likes
            raise _damaged(path, str(error)) from error
        if pixels.shape[:3] != (32, 32, 3) or pixels.dtype != np.uint8:
            raise _damaged(path, f"X is {pixels.dtype} {pixels.shape}, not uint8 (32, 32, 3, N)")
        images.append(pixels.transpose(3, 2, 0, 1))
        labels.append(digits % 10)
    return _checked(np.concatenate(images), np.concatenate(labels), _DIGITS, root)


def _read_idx(root: Path, split: Split, name: str) -> Images:
    """MNIST's format: a magic number, sizes in big-endian, and bytes; usually compressed with gzip."""
    stem = "train" if split == "train" else "t10k"
    arrays = []
    for kind, axes in (("images-idx3", 3), ("labels-idx1", 1)):
        file = f"{name}/{stem}-{kind}-ubyte"
        path = _find(root, name, f"{file}.gz", file)
        if path.suffix == ".gz":
            _check_md5(_read(path), next(f.md5 for f in _IDX[name] if f.path == f"{file}.gz"), path)
        data = _decompressed(path)
        header = 4 + 4 * axes
        if len(data) < header or data[:4] != bytes([0, 0, 8, axes]):
            raise _damaged(path, f"it does not start as an idx file of bytes with {axes} axes")
        shape = struct.unpack(f">{axes}I", data[4:header])
        if len(data) - header != np.prod(shape, dtype=np.int64):
            raise _damaged(path, f"{len(data) - header} bytes where its header says {shape}")
        arrays.append(np.frombuffer(data, np.uint8, offset=header).reshape(shape))
    classes = _DIGITS if name == "mnist" else _FASHION
    return _checked(arrays[0][:, None], arrays[1], classes, root / name)


def _read_digits(root: Path, split: Split) -> Images:  # noqa: ARG001
    """scikit-learn's 1,797 images of digits, 8x8 with 17 levels of grey. A fifth of each class is the test set."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.round(data.images * (255 / 16)).astype(np.uint8)[:, None]
    everything = Images(images, data.target.astype(np.int64), _DIGITS)
    test = stratified(everything.labels, fraction=0.2)
    return everything[test if split == "test" else np.setdiff1d(np.arange(len(images)), test)]


# --------------------------------------------------------------------------------------------------------------------
# The data sets
# --------------------------------------------------------------------------------------------------------------------

_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_STANFORD = "http://ufldl.stanford.edu/housenumbers"

# Folder, archive, bytes of a label, the files of each split with their MD5 where it is published, classes.
_CIFAR: dict[str, tuple[str, DataFile, int, dict[Split, dict[str, str | None]], tuple[str, ...]]] = {
    "cifar10": (
        "cifar-10-batches-bin",
        DataFile(
            f"{_TORONTO}/cifar-10-binary.tar.gz",
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            tuple(
                f"cifar-10-batches-bin/{part}.bin" for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
            ),
        ),
        1,
        {
            "train": {
                "data_batch_1": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5": "53f37980c15c3d472c316c40844f3f0d",
            },
            "test": {"test_batch": "803d5f7f4d78ea53de84dbe85f74fb6d"},
        },
        _CIFAR10,
    ),
    "cifar100": (
        "cifar-100-binary",
        DataFile(
            f"{_TORONTO}/cifar-100-binary.tar.gz",
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
        ),
        2,
        {"train": {"train": None}, "test": {"test": None}},
        tuple(f"class {label}" for label in range(100)),
    ),
}
_SVHN = (
    DataFile(f"{_STANFORD}/train_32x32.mat", "svhn/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
    DataFile(f"{_STANFORD}/extra_32x32.mat", "svhn/extra_32x32.mat", "a93ce644f1a588dc4d68dda5feec44a7"),
)
_SVHN_TEST = (DataFile(f"{_STANFORD}/test_32x32.mat", "svhn/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),)


def _idx_files(name: str, address: str, *md5s: str) -> tuple[DataFile, ...]:
    files = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        DataFile(f"{address}/{file}-ubyte.gz", f"{name}/{file}-ubyte.gz", md5)
        for file, md5 in zip(files, md5s, strict=True)
    )


_IDX = {
    "mnist": _idx_files(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion-mnist": _idx_files(
        "fashion-mnist",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
}


def _cifar(name: str) -> DataSet:
    classes = len(_CIFAR[name][4])
    return DataSet(lambda root, split: _read_cifar(root, split, name), (_CIFAR[name][1],), 3, 32, classes, flip=True)


def _idx(name: str, flip: bool) -> DataSet:
    return DataSet(lambda root, split: _read_idx(root, split, name), _IDX[name], 1, 28, 10, flip)


SETS: dict[str, DataSet] = {
    "cifar10": _cifar("cifar10"),
    "cifar100": _cifar("cifar100"),
    "svhn": DataSet(_read_svhn, (*_SVHN, *_SVHN_TEST), 3, 32, 10, flip=False),
    "mnist": _idx("mnist", flip=False),
    "fashion-mnist": _idx("fashion-mnist", flip=True),
    "digits": DataSet(_read_digits, (), 1, 8, 10, flip=False),
}
"""The data sets that fit into memory, by name. Image folders, as ImageNet's, are in :mod:`balnorm.data.folders`."""
