"""The known data sets: their files and contents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CIFAR", "DIGITS", "FASHION", "IDX", "SETS", "SVHN", "DataFile", "DataSet", "Split"]

Split = Literal["train", "test"]


@dataclass(frozen=True)
class DataFile:
    """A file to download: its address, its name, its published MD5 and, for an archive, its contents."""

    url: str
    path: str
    md5: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """The properties of a data set.

    Attributes:
        format: the one that its authors chose; it selects the reader.
        files: the files to download; none for a set that comes with scikit-learn.
        channels, size: of an image.
        classes: how many.
        flip: whether a mirrored image is still one of its class; digits are not.
    """

    format: Literal["cifar", "svhn", "idx", "digits"]
    files: tuple[DataFile, ...]
    channels: int
    size: int
    classes: int
    flip: bool


DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TORONTO = "https://www.cs.toronto.edu/~kriz"
_STANFORD = "http://ufldl.stanford.edu/housenumbers"

# Folder, archive, bytes of a label, the files of each split with their MD5 if it is published, classes.
CIFAR: dict[str, tuple[str, DataFile, int, dict[Split, dict[str, str | None]], tuple[str, ...]]] = {
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
_SVHN_TRAIN = DataFile(f"{_STANFORD}/train_32x32.mat", "svhn/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373")
_SVHN_EXTRA = DataFile(f"{_STANFORD}/extra_32x32.mat", "svhn/extra_32x32.mat", "a93ce644f1a588dc4d68dda5feec44a7")
_SVHN_TEST = DataFile(f"{_STANFORD}/test_32x32.mat", "svhn/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3")
SVHN: dict[str, dict[Split, tuple[DataFile, ...]]] = {
    "svhn": {"train": (_SVHN_TRAIN,), "test": (_SVHN_TEST,)},
    "svhn-extra": {"train": (_SVHN_TRAIN, _SVHN_EXTRA), "test": (_SVHN_TEST,)},
}


def _idx_files(name: str, address: str, *md5s: str) -> tuple[DataFile, ...]:
    files = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(
        DataFile(f"{address}/{file}-ubyte.gz", f"{name}/{file}-ubyte.gz", md5)
        for file, md5 in zip(files, md5s, strict=True)
    )


IDX = {
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


SETS: dict[str, DataSet] = {
    **{name: DataSet("cifar", (entry[1],), 3, 32, len(entry[4]), flip=True) for name, entry in CIFAR.items()},
    **{name: DataSet("svhn", (*files["train"], *files["test"]), 3, 32, 10, flip=False) for name, files in SVHN.items()},
    "mnist": DataSet("idx", IDX["mnist"], 1, 28, 10, flip=False),
    "fashion-mnist": DataSet("idx", IDX["fashion-mnist"], 1, 28, 10, flip=True),
    "digits": DataSet("digits", (), 1, 8, 10, flip=False),
}
"""The data sets that fit into memory, by name. For folders of images, see :mod:`balnorm.bench.data.folders`."""
