"""Reading, augmenting and batching, on small files in each official format, and on real photographs."""

import dataclasses
import gzip
import hashlib
import lzma
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageStat
from scipy.io import savemat

from balnorm.bench.data import (
    SETS,
    DataError,
    FolderLoader,
    ImageFolder,
    Images,
    MemoryLoader,
    channel_statistics,
    load,
    sets,
    sources,
)
from balnorm.bench.data.augment import Moves, crop_and_flip, draw_moves, generator, to_float
from balnorm.bench.data.folders import _Decoder
from balnorm.bench.data.loaders import Shares
from balnorm.bench.data.sources import stratified

PHOTOGRAPHS = Path(__file__).parent / "images"  # see the README there
SHARED = Path(__file__).parents[2] / "shared" / "data"  # whole data sets, on the machines that have them


def random_images(n, channels=3, size=32, classes=10, seed=0):
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(n) % classes)
    return random.integers(0, 256, (n, channels, size, size), dtype=np.uint8), labels.astype(np.int64)


def md5(data):
    return hashlib.md5(data).hexdigest()


# --------------------------------------------------------------------------------------------------------------------
# Official formats
# --------------------------------------------------------------------------------------------------------------------


def write_cifar10(root, monkeypatch, records):
    """Six files of 20 records each, and their checksums in the place of the published ones."""
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    parts = {name: b"".join(records[20 * i : 20 * (i + 1)]) for i, name in enumerate(names)}
    folder, archive, label_bytes, _, classes = sources.CIFAR["cifar10"]
    checksums = {name: md5(data) for name, data in parts.items()}
    test = {"test_batch": checksums.pop("test_batch")}
    entry = (folder, archive, label_bytes, {"train": checksums, "test": test}, classes)
    monkeypatch.setitem(sources.CIFAR, "cifar10", entry)
    (root / folder).mkdir()
    for name, data in parts.items():
        (root / folder / f"{name}.bin").write_bytes(data)


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    images, labels = random_images(120)
    write_cifar10(
        tmp_path,
        monkeypatch,
        [bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)],
    )
    return tmp_path, images, labels


def test_cifar10_from_binary_files(cifar10):
    root, images, labels = cifar10
    train, test = load("cifar10", root, "train"), load("cifar10", root, "test")
    assert (len(train), len(test)) == (100, 20)
    assert np.array_equal(train.images, images[:100])
    assert np.array_equal(test.labels, labels[100:])
    assert train.images.dtype == np.uint8
    assert train.labels.dtype == np.int64
    assert train.classes[3] == "cat"


@pytest.mark.parametrize("packing", ["xz", "archive"])
def test_cifar10_from_packed_files(cifar10, monkeypatch, packing):
    root, images, _ = cifar10
    folder = root / "cifar-10-batches-bin"
    if packing == "xz":
        for path in folder.iterdir():
            path.with_suffix(".bin.xz").write_bytes(lzma.compress(path.read_bytes(), preset=0))
            path.unlink()
    else:
        with tarfile.open(root / "cifar-10-binary.tar.gz", "w:gz") as tar:
            tar.add(folder, folder.name)
        for path in folder.iterdir():
            path.unlink()
        entry = list(sources.CIFAR["cifar10"])
        entry[1] = dataclasses.replace(entry[1], md5=md5((root / "cifar-10-binary.tar.gz").read_bytes()))
        monkeypatch.setitem(sources.CIFAR, "cifar10", tuple(entry))
    assert np.array_equal(load("cifar10", root, "train").images, images[:100])


def test_what_is_unpacked_is_read_whatever_the_archive_is(cifar10):
    root, images, _ = cifar10
    (root / "cifar-10-binary.tar.gz").write_bytes(b"a download that broke off")
    assert np.array_equal(load("cifar10", root, "train").images, images[:100])


def test_a_file_that_may_not_be_read_gives_one_sentence(cifar10, monkeypatch):
    def forbidden(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(
        DataError, match=r"data_batch_1.bin cannot be read \(Permission denied\): check its permissions"
    ):
        load("cifar10", cifar10[0], "train")


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "truncated xz"])
def test_a_damaged_file_gives_one_sentence(cifar10, damage):
    root, _, _ = cifar10
    path = root / "cifar-10-batches-bin" / "data_batch_3.bin"
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
        message = r"cifar10 is not in .*: download it with `balnorm data get cifar10 --root .*`, or put it there"
    elif damage == "truncated xz":
        path.with_suffix(".bin.xz").write_bytes(lzma.compress(data)[:-100])
        path.unlink()
        message = r"data_batch_3.bin.xz is damaged \(.*\): delete it and download it again"
    else:
        path.write_bytes(data[:-100] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
        message = r"data_batch_3.bin is damaged \(its MD5 is not \w+\): delete it and download it again"
    with pytest.raises(DataError, match=message) as raised:
        load("cifar10", root, "train")
    assert "\n" not in str(raised.value)
    assert len(load("cifar10", root, "test")) == 20


def test_cifar100_has_two_labels_and_uses_the_fine_one(tmp_path):
    images, labels = random_images(200, classes=100)
    coarse = np.full((200, 1), 19, np.uint8)
    records = np.concatenate([coarse, labels.astype(np.uint8)[:, None], images.reshape(200, -1)], axis=1)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(records.tobytes())
    (folder / "test.bin").write_bytes(records[:50].tobytes()[:-1])
    train = load("cifar100", tmp_path, "train")
    assert np.array_equal(train.labels, labels)
    assert np.array_equal(train.images, images)
    with pytest.raises(DataError, match="153699 bytes are not a number of 3074-byte records"):
        load("cifar100", tmp_path, "test")
    (folder / "test.bin").write_bytes(np.full(3074, 200, np.uint8).tobytes())
    with pytest.raises(DataError, match="a label is 200, and there are 100 classes"):
        load("cifar100", tmp_path, "test")


def test_svhn_reads_train_and_svhn_extra_both(tmp_path, monkeypatch):
    (tmp_path / "svhn").mkdir()
    files, parts = {}, {}
    for seed, name in enumerate(("train", "extra", "test")):
        images, labels = random_images(30, seed=seed)
        y = np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)
        path = tmp_path / "svhn" / f"{name}_32x32.mat"
        savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": y}, do_compression=True)
        files[name] = sets.DataFile("", f"svhn/{name}_32x32.mat", md5(path.read_bytes()))
        parts[name] = images, labels
    splits = {"train": (files["train"],), "test": (files["test"],)}
    monkeypatch.setitem(sources.SVHN, "svhn", splits)
    monkeypatch.setitem(sources.SVHN, "svhn-extra", splits | {"train": (files["train"], files["extra"])})
    assert np.array_equal(load("svhn", tmp_path, "train").images, parts["train"][0])
    train = load("svhn-extra", tmp_path, "train")
    assert len(train) == 60
    assert np.array_equal(train.images[30:], parts["extra"][0])
    assert np.array_equal(train.labels[:30], parts["train"][1])
    for name in ("svhn", "svhn-extra"):
        assert np.array_equal(load(name, tmp_path, "test").labels, parts["test"][1])
        assert not SETS[name].flip
    (tmp_path / "svhn" / "extra_32x32.mat").unlink()
    assert len(load("svhn", tmp_path, "train")) == 30
    with pytest.raises(DataError, match=r"extra_32x32.mat.*svhn-extra"):
        load("svhn-extra", tmp_path, "train")
    hostile = pickle.dumps({"X": 1})
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(hostile)
    with pytest.raises(DataError, match="its MD5 is not"):
        load("svhn", tmp_path, "test")
    monkeypatch.setitem(splits, "test", (dataclasses.replace(files["test"], md5=md5(hostile)),))
    with pytest.raises(DataError, match=r"test_32x32.mat is damaged"):
        load("svhn", tmp_path, "test")
    path = tmp_path / "svhn" / "test_32x32.mat"
    for pixels, labels, message in (
        (np.zeros((28, 28, 3, 9), np.uint8), 9, r"X is uint8 \(28, 28, 3, 9\), not uint8 \(32, 32, 3, N\)"),
        (np.zeros((32, 32, 3, 9)), 9, r"X is float64 \(32, 32, 3, 9\), not uint8 \(32, 32, 3, N\)"),
        (np.zeros((32, 32, 3, 9), np.uint8), 8, "9 images and 8 labels"),
    ):
        savemat(path, {"X": pixels, "y": np.ones((labels, 1), np.uint8)})
        monkeypatch.setitem(splits, "test", (dataclasses.replace(files["test"], md5=md5(path.read_bytes())),))
        with pytest.raises(DataError, match=message):
            load("svhn", tmp_path, "test")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files(tmp_path, monkeypatch, name, packed):
    (tmp_path / name).mkdir()
    images, labels = random_images(40, channels=1, size=28)
    files = []
    for stem in ("train", "t10k"):
        for kind, header, data in (
            ("images-idx3", [0, 0, 8, 3, 0, 0, 0, 40, 0, 0, 0, 28, 0, 0, 0, 28], images),
            ("labels-idx1", [0, 0, 8, 1, 0, 0, 0, 40], labels.astype(np.uint8)),
        ):
            contents = bytes(header) + data.tobytes()
            path = f"{name}/{stem}-{kind}-ubyte"
            contents = gzip.compress(contents) if packed else contents
            (tmp_path / (path + ".gz" * packed)).write_bytes(contents)
            files.append(sets.DataFile("", path + ".gz", md5(contents)))
    monkeypatch.setitem(sources.IDX, name, tuple(files))
    train = load(name, tmp_path, "train")
    assert np.array_equal(train.images, images)
    assert np.array_equal(load(name, tmp_path, "test").labels, labels)
    if not packed:
        path = tmp_path / name / "t10k-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(DataError, match=r"31355 bytes, and its header says \(40, 28, 28\)"):
            load(name, tmp_path, "test")
        path.write_bytes(b"\x80\x04hostile")
        with pytest.raises(DataError, match="does not start as an idx file"):
            load(name, tmp_path, "test")


def test_a_file_that_unpacks_to_more_than_it_may_is_refused(cifar10):
    """A megabyte of zeros in each kilobyte: memory for all of it is never taken."""
    root, _, _ = cifar10
    path = root / "cifar-10-batches-bin" / "test_batch.bin"
    path.unlink()
    packer = lzma.LZMACompressor(preset=0)
    with path.with_suffix(".bin.xz").open("wb") as file:
        for _ in range(200):
            file.write(packer.compress(bytes(1 << 20)))
        file.write(packer.flush())
    with pytest.raises(DataError, match="it contains more than 153,650,000 bytes"):
        load("cifar10", root, "test")


def test_a_file_larger_than_any_data_set_is_not_read(cifar10):
    root, _, _ = cifar10
    with (root / "cifar-10-batches-bin" / "test_batch.bin").open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(DataError, match=r"is damaged \(it has 1,099,511,627,776 bytes\)"):
        load("cifar10", root, "test")


def link_to_itself(member):
    member.type, member.linkname = tarfile.SYMTYPE, member.name


def link_away(member):
    member.type, member.linkname = tarfile.LNKTYPE, "/etc/passwd"


def be_a_pipe(member):
    member.type = tarfile.FIFOTYPE


@pytest.mark.parametrize("change", [link_to_itself, link_away, be_a_pipe])
@pytest.mark.parametrize("published", [True, False])
def test_archives_with_links_are_refused(cifar10, monkeypatch, change, published):
    """By their checksum; and if they were published like that, for what they are."""
    root, _, _ = cifar10
    folder, archive = root / "cifar-10-batches-bin", root / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for path in folder.iterdir():
            member = tarfile.TarInfo(f"{folder.name}/{path.name}")
            change(member)
            tar.addfile(member)
            path.unlink()
    if published:
        entry = list(sources.CIFAR["cifar10"])
        entry[1] = dataclasses.replace(entry[1], md5=md5(archive.read_bytes()))
        monkeypatch.setitem(sources.CIFAR, "cifar10", tuple(entry))
    with pytest.raises(DataError, match=r"tar.gz is damaged \(" if published else "its MD5 is not"):
        load("cifar10", root, "train")


HOSTILE_IDX = {
    "sizes whose product overflows": ([0, 0, 8, 3, *[128, 0, 0, 0] * 2, 0, 0, 0, 4], b""),
    "the largest sizes": ([0, 0, 8, 3, *[255] * 12], b"1"),
    "another shape": ([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 7], bytes(70)),
    "no image": ([0, 0, 8, 3, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 28], b""),
    "floats": ([0, 0, 13, 3, 0, 0, 0, 1, 0, 0, 0, 28, 0, 0, 0, 28], bytes(4 * 784)),
    "a header that breaks off": ([0, 0, 8, 3, 0, 0], b""),
    "nothing": ([], b""),
}


@pytest.mark.parametrize("kind", HOSTILE_IDX)
def test_hostile_idx_files_are_damaged(tmp_path, kind):
    """Sizes were multiplied in 64 bits, and images of another size were taken."""
    header, data = HOSTILE_IDX[kind]
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte").write_bytes(bytes(header) + data)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 0]))
    with pytest.raises(DataError, match="is damaged"):
        load("mnist", tmp_path, "test")


HOSTILE_MAT = {
    "three axes": {"X": np.zeros((32, 32, 3), np.uint8), "y": np.ones((1, 1), np.uint8)},
    "text for labels": {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array(["a", "b"])},
    "objects for labels": {"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([1, "a"], dtype=object)},
    "labels that are no number": {"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.array([[np.nan]])},
    "no pixels": {"y": np.ones((1, 1), np.uint8)},
    "a structure": {"X": {"a": 1}, "y": np.ones((1, 1), np.uint8)},
}


@pytest.mark.parametrize("kind", HOSTILE_MAT)
def test_hostile_mat_files_are_damaged(tmp_path, monkeypatch, kind):
    """As if they had the right checksum."""
    (tmp_path / "svhn").mkdir()
    path = tmp_path / "svhn" / "test_32x32.mat"
    savemat(path, HOSTILE_MAT[kind])
    file = dataclasses.replace(sources.SVHN["svhn"]["test"][0], md5=md5(path.read_bytes()))
    monkeypatch.setitem(sources.SVHN["svhn"], "test", (file,))
    with pytest.raises(DataError, match="is damaged"):
        load("svhn", tmp_path, "test")


def test_digits_come_with_scikit_learn():
    train, test = load("digits", "nowhere", "train"), load("digits", "nowhere", "test")
    assert (len(train), len(test)) == (1438, 359)
    assert train.images.shape[1:] == (1, 8, 8)
    assert train.images.max() == 255
    both = np.concatenate([train.images, test.images]).reshape(1797, -1)
    assert len(np.unique(both, axis=0)) > 1790  # no image is in both
    assert np.abs(np.bincount(test.labels) * 5 - np.bincount(np.concatenate([train.labels, test.labels]))).max() <= 5


def test_photographs_come_out_of_cifars_format_as_pillow_shows_them(tmp_path, monkeypatch):
    with Image.open(PHOTOGRAPHS / "train" / "palace" / "0.jpg") as image:
        parts = [image.crop((left, top, left + 32, top + 32)) for top in range(0, 88, 9) for left in range(0, 148, 12)]
    parts = parts[:120]
    labels = [i % 10 for i in range(120)]
    planes = [b"".join(channel.tobytes() for channel in part.split()) for part in parts]
    write_cifar10(tmp_path, monkeypatch, [bytes([label]) + p for label, p in zip(labels, planes, strict=True)])
    train, test = load("cifar10", tmp_path, "train"), load("cifar10", tmp_path, "test")
    assert [*train.labels, *test.labels] == labels
    for image, part in zip([*train.images, *test.images], parts, strict=True):
        assert np.array_equal(image.transpose(1, 2, 0), np.asarray(part))
    beside_each_other = Image.new("RGB", (32 * 100, 32))
    for i, part in enumerate(parts[:100]):
        beside_each_other.paste(part, (32 * i, 0))
    pillow = ImageStat.Stat(beside_each_other)
    mean, std = channel_statistics(train.images)
    assert np.allclose(mean * 255, pillow.mean)
    assert np.allclose(std * 255, pillow.stddev)


@pytest.mark.skipif(
    not (SHARED / "cifar-10-batches-bin").is_dir(),
    reason="the whole of CIFAR-10 is not here: photographs of ours stand in for it",
)
def test_real_cifar10():
    test = load("cifar10", SHARED, "test")
    assert np.array_equal(np.bincount(test.labels), [1000] * 10)
    mean, std = channel_statistics(test.images)
    assert np.allclose(mean, [0.494, 0.485, 0.450], atol=1e-3)
    assert np.allclose(std, [0.247, 0.243, 0.262], atol=1e-3)


def test_wrong_names_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"the data set must be one of cifar10, cifar100, svhn, .*, got 'cifar'"):
        load("cifar", ".", "train")
    with pytest.raises(ValueError, match="the split must be 'train' or 'test', got 'val'"):
        load("digits", ".", "val")


def test_channel_statistics_are_exact():
    images, _ = random_images(50)
    mean, std = channel_statistics(images)
    pixels = images.astype(np.float64) / 255
    assert np.allclose(mean, pixels.mean((0, 2, 3)), atol=1e-12)
    assert np.allclose(std, pixels.std((0, 2, 3)), atol=1e-12)


# --------------------------------------------------------------------------------------------------------------------
# Parts of a data set
# --------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), min_size=1, max_size=200), st.integers(1, 250))
def test_parts_are_stratified_and_always_the_same(labels, limit):
    labels = np.array(labels)
    index = stratified(labels, limit)
    assert len(index) == min(limit, len(labels))
    assert np.all(np.diff(index) > 0)
    assert np.array_equal(index, stratified(labels, limit))
    shares = np.bincount(labels) * len(index) / len(labels)
    assert np.abs(np.bincount(labels[index], minlength=len(shares)) - shares).max() < 1


def test_a_part_has_images():
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        stratified(np.arange(3), 0)


# --------------------------------------------------------------------------------------------------------------------
# Augmentation
# --------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 7), st.integers(0, 100))
def test_crop_and_flip_is_padding_cutting_and_mirroring(padding, height, width, seed):
    images = torch.randint(0, 256, (5, 3, height, width), generator=torch.Generator().manual_seed(seed)).byte()
    moves = draw_moves(5, padding, True, torch.Generator().manual_seed(seed))
    result = crop_and_flip(images, moves, padding)
    assert result.is_contiguous(memory_format=torch.channels_last)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    for i in range(5):
        down, right = int(moves.down[i]), int(moves.right[i])
        expected = padded[i, :, down : down + height, right : right + width]
        assert torch.equal(result[i], expected.flip(2) if moves.flip[i] else expected)


def test_every_key_has_random_numbers_of_its_own():
    assert len({generator(seed, epoch).initial_seed() for seed in range(40) for epoch in range(50)}) == 2000
    assert generator(1, 2).initial_seed() == generator(1, 2).initial_seed()


def test_moves_are_uniform():
    moves = draw_moves(9000, 4, True, generator(0))
    for shift in (moves.down, moves.right):
        assert torch.bincount(shift).tolist() == pytest.approx([1000] * 9, abs=150)
    assert moves.flip.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert not draw_moves(100, 4, False, generator(0)).flip.any()
    still = Moves(torch.full((2,), 3), torch.full((2,), 3), torch.zeros(2, dtype=torch.bool))
    images = torch.rand(2, 3, 4, 4)
    assert torch.equal(crop_and_flip(images, still, 3), images)


def test_pixels():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    assert torch.allclose(to_float(images, "unit").flatten(), torch.tensor([0.0, 0.2, 1.0]))
    standardised = to_float(images, "standardised", ([0.5], [0.25])).flatten()
    assert torch.allclose(standardised, torch.tensor([-2.0, -1.2, 2.0]))
    with pytest.raises(ValueError, match="standardised pixels need the data set's mean and standard deviation"):
        to_float(images, "standardised")
    with pytest.raises(ValueError, match="pixels must be 'unit' or 'standardised', got 'raw'"):
        to_float(images, "raw")


# --------------------------------------------------------------------------------------------------------------------
# Loaders
# --------------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_processes_share_an_epoch_without_overlap(images, batch_size, world, training, epoch):
    if training and batch_size > images // world:
        with pytest.raises(ValueError, match="batch_size must be from 1 to"):
            Shares(images, batch_size, training, 0, 0, world)
        return
    shares = [Shares(images, batch_size, training, 5, rank, world) for rank in range(world)]
    batches = [[batch.tolist() for batch in share.batches(epoch)] for share in shares]
    assert [len(share) for share in shares] == [len(parts) for parts in batches]
    seen = [index for parts in batches for batch in parts for index in batch]
    assert len(seen) == len(set(seen))
    if training:
        assert len({len(share) for share in shares}) == 1
        assert len(seen) == images // (batch_size * world) * batch_size * world
        alone = Shares(images, batch_size * world, True, 5, 0, 1)
        together = [[i for parts in batches for i in parts[step]] for step in range(len(shares[0]))]
        assert together == [batch.tolist() for batch in alone.batches(epoch)]
    else:
        assert sorted(seen) == list(range(images))


def images_of(n=100, **options):
    images, labels = random_images(n, **options)
    return Images(images, labels, tuple("0123456789"))


def memory_loader(**options):
    return MemoryLoader(images_of(), 16, **{"training": True, "seed": 3, "padding": 4, "flip": True, **options})


def collect(loader, epoch=0, start=0):
    batches = list(loader.epoch(epoch, start))
    return torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches])


def test_an_epoch_is_a_function_of_seed_and_epoch():
    first, second = collect(memory_loader(), 2), collect(memory_loader(), 2)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    loader = memory_loader()
    collect(loader, 0)
    torch.rand(5)
    assert torch.equal(collect(loader, 2)[0], first[0])
    assert not torch.equal(collect(loader, 1)[0], first[0])
    assert not torch.equal(collect(memory_loader(seed=4), 2)[0], first[0])


def test_an_epoch_can_start_in_the_middle():
    whole, rest = collect(memory_loader(), 1), collect(memory_loader(), 1, start=4)
    assert torch.equal(whole[0][4 * 16 :], rest[0])
    assert torch.equal(whole[1][4 * 16 :], rest[1])


def test_two_processes_see_the_same_augmented_images_as_one():
    alone = [images for images, _ in memory_loader().epoch(1)]
    halves = [
        MemoryLoader(images_of(), 8, training=True, seed=3, padding=4, flip=True, rank=r, world=2) for r in (0, 1)
    ]
    for whole, left, right in zip(alone, *(loader.epoch(1) for loader in halves), strict=True):
        assert torch.equal(whole, torch.cat([left[0], right[0]]))


def test_evaluation_changes_nothing():
    data = images_of()
    loader = MemoryLoader(data, 16, training=False, padding=4, flip=True)
    images, labels = collect(loader)
    assert len(loader) == 7
    assert torch.allclose(images, torch.from_numpy(data.images) / 255)
    assert torch.equal(labels, torch.from_numpy(data.labels))
    assert images.dtype == torch.float32


def test_batches_are_channels_last_and_standardised():
    data = images_of()
    loader = memory_loader(pixels="standardised", statistics=channel_statistics(data.images), padding=0)
    images, _ = next(loader.epoch(0))
    assert images.is_contiguous(memory_format=torch.channels_last)
    whole, _ = collect(
        MemoryLoader(data, 100, training=False, pixels="standardised", statistics=channel_statistics(data.images))
    )
    assert torch.allclose(whole.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(whole.std((0, 2, 3)), torch.ones(3), atol=1e-3)


def test_bad_options_fail_at_once():
    with pytest.raises(ValueError, match="batch_size must be from 1 to 100 for 100 images, got 101"):
        MemoryLoader(images_of(), 101, training=True)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        MemoryLoader(images_of(), 0, training=False)
    with pytest.raises(ValueError, match="seed must not be negative, got -1"):
        MemoryLoader(images_of(), 10, training=True, seed=-1)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        MemoryLoader(images_of(), 10, training=True, rank=2, world=2)
    with pytest.raises(ValueError, match="standardised pixels need"):
        memory_loader(pixels="standardised")


# --------------------------------------------------------------------------------------------------------------------
# Image folders
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Three classes, each a colour, in images of several shapes and formats."""
    colours = {"blue": (20, 30, 230), "green": (20, 220, 30), "red": (230, 20, 30)}
    for split, n in (("train", 8), ("val", 3)):
        for name, colour in colours.items():
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(n):
                suffix = ("jpg", "png", "JPEG")[i % 3]
                Image.new("RGB", (40 + 7 * i, 60 - 3 * i), colour).save(tmp_path / split / name / f"{i}.{suffix}")
    (tmp_path / "train" / "red" / "notes.txt").write_text("not an image")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("training", [True, False])
def test_folders_give_batches(folder, workers, training):
    data = ImageFolder.scan(folder, "train" if training else "test")
    assert data.classes == ("blue", "green", "red")
    loader = FolderLoader(data, 5, training=training, size=32, workers=workers, seed=1)
    batches = list(loader.epoch(0))
    assert len(batches) == len(loader) == (4 if training else 2)
    for images, labels in batches:
        assert images.shape[1:] == (3, 32, 32)
        assert images.is_contiguous(memory_format=torch.channels_last)
        brightest = images.mean((2, 3)).argmax(1)  # red, green, blue
        assert torch.equal(brightest, 2 - labels)
    if training:
        assert torch.equal(next(loader.epoch(0))[0], batches[0][0])
        assert torch.equal(next(loader.epoch(0, start=2))[0], batches[2][0])


def test_evaluation_shows_the_centre(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        pixels = np.zeros((64, 128, 3), np.uint8)
        pixels[:, 32:96] = 255  # the middle half is white
        Image.fromarray(pixels).save(tmp_path / split / "a" / "0.png")
    images, _ = next(FolderLoader(ImageFolder.scan(tmp_path, "test"), 1, training=False, size=28, workers=0).epoch(0))
    assert (images > 0.99).all()


def test_random_crops_vary_and_stay_inside(folder):
    decoder = _Decoder(ImageFolder.scan(folder, "train"), 32, True, True, (0, 0))
    areas = []
    for seed in range(300):
        left, top, right, bottom = decoder._box(100, 60, np.random.default_rng(seed))
        assert 0 <= left < right <= 100
        assert 0 <= top < bottom <= 60
        areas.append((right - left) * (bottom - top) / 6000)
    assert min(areas) < 0.15
    assert max(areas) > 0.7


def test_corrupt_images_are_named(folder):
    bad = folder / "train" / "green" / "0.jpg"
    bad.write_bytes(bad.read_bytes()[:100])
    data = ImageFolder.scan(folder, "train")
    for workers in (0, 1):
        with pytest.raises(
            DataError, match=r"green/0.jpg cannot be decoded \(.*\): replace it, or remove it"
        ) as raised:
            list(FolderLoader(data, 4, training=True, size=16, workers=workers).epoch(0))
        assert "\n" not in str(raised.value)


def test_an_image_that_breaks_off_between_its_chunks_is_corrupt_too(folder):
    """For which Pillow has a SyntaxError."""
    bad = folder / "train" / "green" / "1.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8)).save(bad)
    before, _, after = bad.read_bytes().rpartition(b"IDAT")
    bad.write_bytes(before + b"\1\1\1\1" + after)
    with pytest.raises(DataError, match=r"green/1.png cannot be decoded"):
        list(FolderLoader(ImageFolder.scan(folder, "train"), 4, training=True, size=16, workers=0).epoch(0))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n0 0 10 10 rectfill\nshowpage\n%%EOF\n"


def test_an_image_is_only_what_its_name_says(folder, monkeypatch):
    """Pillow started Ghostscript on a PostScript file that was called .jpg; damaged AVIF and DDS ended training."""
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("started a program"))
    picture = Image.open(folder / "train" / "red" / "1.png").convert("RGB")
    red = folder / "train" / "red"
    (red / "eps.jpg").write_bytes(EPS)
    for name, kind in (("avif.png", "AVIF"), ("dds.gif", "DDS"), ("jpeg.png", "JPEG"), ("tga.tif", "TGA")):
        picture.save(red / name, kind)
    picture.save(red / "png.JPEG", "PNG")  # as one of ImageNet's
    data = ImageFolder.scan(folder, "train")
    decoder = _Decoder(data, 16, False, False, (0, 0))
    told = {path.name: decoder[i] for i, path in enumerate(data.paths) if isinstance(decoder[i], str)}
    kinds = {"eps.jpg": "JPEG or PNG", "avif.png": "PNG", "dds.gif": "GIF", "jpeg.png": "PNG", "tga.tif": "TIFF"}
    assert told == {
        name: f"{red / name} cannot be decoded (it is not a {kind} file): replace it, or remove it"
        for name, kind in kinds.items()
    }


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, MemoryError, IndexError, struct.error])
def test_whatever_pillow_raises_is_a_corrupt_image(folder, monkeypatch, error):
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", mock.Mock(side_effect=error))
    with pytest.raises(DataError, match=rf"cannot be decoded \({error.__name__}\)"):
        list(FolderLoader(ImageFolder.scan(folder, "train"), 24, training=False, size=16, workers=0).epoch(0))


SAVED = {"jpg": {}, "png": {}, "bmp": {}, "webp": {}, "gif": {}, "tif": {"compression": "tiff_lzw"}, "ppm": {}}


@pytest.mark.filterwarnings("ignore")  # Pillow's, about what it reads over
@pytest.mark.parametrize("kind", SAVED)
def test_damaged_images_end_in_no_other_error(folder, kind):
    """Files that are cut short, and have some bytes changed; as training and as testing read them."""
    random = np.random.default_rng(0)
    path = folder / "train" / "red" / f"damaged.{kind}"
    noise = random.integers(0, 256, (40, 30, 3), np.uint8)
    Image.fromarray(noise).save(path, **SAVED[kind])
    whole = path.read_bytes()
    index = ImageFolder.scan(folder, "train").paths.index(path)
    decoders = [_Decoder(ImageFolder.scan(folder, "train"), 16, training, True, (0, 0)) for training in (True, False)]
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole[: random.integers(len(whole)) if random.random() < 0.3 else None])
        for place in random.integers(
            0, max(1, min(len(damaged), random.choice([64, len(whole)]))), random.integers(1, 9)
        ):
            damaged[place : place + 1] = random.bytes(1)
        path.write_bytes(damaged)
        for decoder in decoders:
            item = decoder[index]
            assert isinstance(item, str) or item[0].shape == (3, 16, 16)
            refused += isinstance(item, str)
    assert refused


@pytest.mark.parametrize(
    ("split", "name"), [("train", "training"), ("test", "test"), ("test", "valid"), ("test", "validation")]
)
def test_folders_have_one_of_several_names(folder, split, name):
    before = ImageFolder.scan(folder, split)
    (folder / {"train": "train", "test": "val"}[split]).rename(folder / name)
    assert len(ImageFolder.scan(folder, split).labels) == len(before.labels) > 0


def test_folders_take_limits_and_say_what_is_missing(folder):
    assert np.bincount(ImageFolder.scan(folder, "train", limit=6).labels).tolist() == [2, 2, 2]
    with pytest.raises(DataError, match="has no folder train or training"):
        ImageFolder.scan(folder / "train", "train")
    (folder / "empty" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match="empty/train has no folders: put the images of each class"):
        ImageFolder.scan(folder / "empty", "train")
    (folder / "val" / "yellow").mkdir()
    with pytest.raises(DataError, match=r"has classes that are not in .*: yellow"):
        ImageFolder.scan(folder, "test")
    for path in (folder / "train").rglob("*.*"):
        path.unlink()
    with pytest.raises(DataError, match=r"has no images: their names should end in .bmp, "):
        ImageFolder.scan(folder, "train")


def test_deep_pixels_are_scaled_or_refused(folder):
    """Sixteen bits became all white, and floats all black."""
    ramp = np.arange(64)[:, None] * np.ones((1, 64))
    Image.fromarray((ramp * 1000).astype(np.uint16)).save(folder / "val" / "red" / "0.png")
    data = ImageFolder.scan(folder, "test")
    images, _ = next(FolderLoader(data, 100, training=False, size=32, workers=0).epoch(0))
    deep = images[[path.name for path in data.paths].index("0.png")]
    assert torch.allclose(deep[0], deep[2])
    assert 0.05 < deep[0].std() < 0.5
    Image.fromarray(ramp.astype(np.float32)).save(folder / "val" / "red" / "1.tif")
    with pytest.raises(DataError, match=r"1.tif cannot be decoded .pixels of mode F have no known range"):
        list(FolderLoader(ImageFolder.scan(folder, "test"), 100, training=False, workers=0).epoch(0))


def test_hidden_files_are_no_classes_and_no_images(folder):
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    (folder / "train" / "blue" / "._1.png").write_bytes(b"")
    (folder / "train" / "blue" / "folder.png").mkdir()
    data = ImageFolder.scan(folder, "train")
    assert data.classes == ("blue", "green", "red")
    assert len(data) == 24


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux do all workers fork")
def test_workers_fork_on_linux(folder, monkeypatch):
    """In the runs of a study they would come from a fork server, and import torch anew in every epoch."""
    seen = []
    monkeypatch.setattr(
        "balnorm.bench.data.folders.DataLoader",
        lambda *_, **options: seen.append(options["multiprocessing_context"]) or [],
    )
    for workers in (0, 2):
        list(FolderLoader(ImageFolder.scan(folder, "train"), 4, training=True, size=8, workers=workers).epoch(0))
    assert seen == [None, "fork"]


@pytest.mark.parametrize("start", ["fork", "forkserver"])  # as on Linux, and as on a system that does not fork
def test_the_terminals_ctrl_c_leaves_the_workers_at_work(folder, start):
    """It reaches them too; the process that trains needs some more batches before it saves."""
    program = f"""
import multiprocessing, os, signal
if __name__ == "__main__":
    from balnorm.bench.data import FolderLoader, ImageFolder, folders
    folders._start_method = lambda: {start!r}
    loader = FolderLoader(ImageFolder.scan({str(folder)!r}, "train"), 1, training=True, size=16, workers=1)
    batches = loader.epoch()
    next(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGINT)
    print(sum(1 for _ in batches))
"""
    script = folder / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == "23\n", done.stderr


def test_folder_loaders_leave_the_random_state_alone(folder):
    state = torch.get_rng_state()
    list(FolderLoader(ImageFolder.scan(folder, "train"), 4, training=True, size=8, workers=0).epoch(0))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options", [{"seed": -1}, {"epoch": -1}, {"start": -1}])
def test_negative_numbers_are_refused(options):
    def batches(seed=0, **where):
        return list(memory_loader(seed=seed).epoch(**where))

    with pytest.raises(ValueError, match="must not be negative"):
        batches(**options)


def test_a_constant_channel_is_no_division_by_zero():
    data = Images(np.full((4, 1, 2, 2), 7, np.uint8), np.zeros(4, np.int64), ("a",))
    loader = MemoryLoader(data, 4, training=False, pixels="standardised", statistics=channel_statistics(data.images))
    assert next(loader.epoch())[0].abs().max() < 1e-5


@pytest.mark.parametrize("size", [64, 40, 20])  # decoded whole, at a half and at a quarter
def test_jpegs_show_what_pillow_shows(size):
    data = ImageFolder.scan(PHOTOGRAPHS, "train")
    assert data.classes == ("flower", "palace")
    images, labels = next(FolderLoader(data, 6, training=False, size=size, workers=0).epoch(0))
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    for path, image in zip(data.paths, images, strict=True):
        with Image.open(path) as photograph:
            side = min(photograph.size) * 224 / 256
            left, top = ((length - side) / 2 for length in photograph.size)
            box = (left, top, left + side, top + side)
            expected = photograph.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
        difference = np.abs(image.numpy().transpose(1, 2, 0) - np.asarray(expected) / 255)
        assert difference.mean() < 0.03, path


def test_jpegs_are_cut_anew_in_every_epoch():
    data = ImageFolder.scan(PHOTOGRAPHS, "train")
    images, labels = next(FolderLoader(data, 6, training=True, size=32, workers=0).epoch(0))
    assert images.shape == (6, 3, 32, 32)
    assert torch.bincount(labels).tolist() == [3, 3]
    assert 0.05 < images.std() < 0.5
    one = FolderLoader(ImageFolder(data.paths[:1], data.labels[:1], data.classes), 1, training=True, size=32, workers=0)
    assert not torch.equal(next(one.epoch(0))[0], next(one.epoch(1))[0])


@pytest.mark.skipif(
    not (SHARED / "tiny-imagenet-10.tar").is_file(),
    reason="Tiny-ImageNet is not here: photographs of ours stand in for it",
)
def test_real_jpegs(tmp_path):
    with tarfile.open(SHARED / "tiny-imagenet-10.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    data = ImageFolder.scan(tmp_path / "tiny-imagenet-10", "train", limit=40)
    images, labels = next(FolderLoader(data, 40, training=True, size=64, workers=0).epoch(0))
    assert images.shape == (40, 3, 64, 64)
    assert torch.bincount(labels).tolist() == [4] * 10
    assert 0.05 < images.std() < 0.5
