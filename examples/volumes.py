"""Volumes in batches of two: an experiment that compares normalisations in a small 3D U-Net.

This page is the script `examples/volumes.py`, an [experiment](../docs/experiments.md) to copy. It marks the front and
the back of the hippocampus in MRI volumes (NIfTI files of the same names in `images/` and `labels/`, from the Medical
Segmentation Decathlon). Run it in a clone, after `pip install '.[bench]'`:

```
balnorm compare examples/volumes.py:train --norms balnorm batchnorm instancenorm groupnorm none --root hippocampus
```

The [results](../docs/results/volumes/README.md) are those of this script.
"""

import gzip
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from balnorm import BalNormConv3d, param_groups

# `compare` passes the norm, the seed and a folder, `--root`, and the options. A run that was stopped resumes from the
# folder: its state is saved after the `yield`, when the epoch's record is on the disk, and the order of the volumes
# depends on seed and epoch only.


def train(
    norm: str, seed: int, folder: Path, root: Path, epochs: int = 15, lr: float = 0.1, pilot: bool = False
) -> Iterator[dict[str, float]]:
    """Segment hippocampi with a small 3D U-Net. A pilot tests on 30 of the training volumes, to choose a rate."""
    pairs = load(root)
    fit, test = (pairs[:70], pairs[70:100]) if pilot else (pairs[:100], pairs[100:130])
    torch.manual_seed(seed)
    model, done = UNet(norm), 0
    optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), momentum=0.9)
    if (folder / "state.pt").exists():
        done, weights, steps = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(steps)
    for epoch in range(done, epochs):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
        torch.manual_seed(1000 * seed + epoch)
        losses = []
        for chosen in torch.randperm(len(fit)).split(2):
            scores, labels = segment(model.train(), [fit[i] for i in chosen])
            optimizer.zero_grad()
            loss = loss_of(scores, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        yield {"epoch": epoch + 1, "train_loss": sum(losses) / len(losses), "dice": dice(model.eval(), test)}
        torch.save([epoch + 1, model.state_dict(), optimizer.state_dict()], folder / "new.pt")
        (folder / "new.pt").replace(folder / "state.pt")  # a kill leaves the old one or the new one


# A convolution and what normalises it, for each norm that `--norms` may name.


def layer(norm: str, inputs: int, outputs: int) -> nn.Sequential:
    if norm in ("balnorm", "equalised"):
        return nn.Sequential(BalNormConv3d(inputs, outputs, 3, padding=1, equalise=norm == "equalised"), nn.ReLU())
    norms = {
        "batchnorm": nn.BatchNorm3d(outputs),
        "instancenorm": nn.InstanceNorm3d(outputs, affine=True),
        "groupnorm": nn.GroupNorm(outputs // 2, outputs),
        "none": nn.Identity(),
    }
    conv = nn.Conv3d(inputs, outputs, 3, padding=1, bias=norm == "none")
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(conv, norms[norm], nn.ReLU())


class UNet(nn.Module):
    def __init__(self, norm: str, width: int = 8) -> None:
        super().__init__()
        sizes = [(1, width), (width, 2 * width), (2 * width, 4 * width), (6 * width, 2 * width), (3 * width, width)]
        self.blocks = nn.ModuleList(nn.Sequential(layer(norm, i, o), layer(norm, o, o)) for i, o in sizes)
        self.head = nn.Conv3d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.blocks[0](x)
        middle = self.blocks[1](F.max_pool3d(fine, 2))
        x = self.blocks[2](F.max_pool3d(middle, 2))
        x = self.blocks[3](torch.cat([F.interpolate(x, scale_factor=2), middle], 1))
        return self.head(self.blocks[4](torch.cat([F.interpolate(x, scale_factor=2), fine], 1)))


def segment(model: nn.Module, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The network's scores and the labels of volumes, padded with zeros to the same size, a multiple of 4."""
    size = [-(-max(sizes) // 4) * 4 for sizes in zip(*(labels.shape for _, labels in pairs), strict=True)]
    images, labels = (torch.zeros(len(pairs), *size, dtype=kind) for kind in (torch.float32, torch.int64))
    for n, (image, parts) in enumerate(pairs):
        inside = (n, *map(slice, parts.shape))
        images[inside], labels[inside] = image, parts
    return model(images[:, None]), labels


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, plus one minus the Dice coefficient of the probabilities of the two parts."""
    shares, truth = scores.softmax(1)[:, 1:], F.one_hot(labels, 3).movedim(-1, 1)[:, 1:]
    common, total = (shares * truth).sum((0, 2, 3, 4)), (shares + truth).sum((0, 2, 3, 4))
    return F.cross_entropy(scores, labels) + 1 - (2 * common / total).mean()


@torch.no_grad()
def dice(model: nn.Module, test: list[tuple[Tensor, Tensor]]) -> float:
    """The Dice coefficient, averaged over the two parts and the volumes."""
    values = []
    for scores, labels in (segment(model, [pair]) for pair in test):
        for ours, theirs in ((scores.argmax(1) == part, labels == part) for part in (1, 2)):
            values.append(2 * (ours & theirs).sum().item() / (ours.sum() + theirs.sum()).item())
    return sum(values) / len(values)


# A NIfTI-1 file is a header of 352 bytes and the voxels. BalNorm expects inputs that are not negative, so intensities
# are scaled to [0, 1]. Labels are 0 for the rest, 1 for the front, 2 for the back.


def load(root: Path) -> list[tuple[Tensor, Tensor]]:
    names = sorted(path.name for path in (root / "images").glob("*.nii*"))
    if len(names) < 130:
        raise FileNotFoundError(f"{root / 'images'} has {len(names)} volumes, 130 are needed")
    images, labels = ([read_nifti(root / part / name) for name in names] for part in ("images", "labels"))
    scaled = [(image / np.percentile(image, 99)).clip(0, 1) for image in images]
    return [(torch.tensor(a, dtype=torch.float32), torch.tensor(b)) for a, b in zip(scaled, labels, strict=True)]


def read_nifti(path: Path) -> np.ndarray:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    count, *shape = struct.unpack_from("<4h", data, 40)
    (kind,), (start,) = struct.unpack_from("<h", data, 70), struct.unpack_from("<f", data, 108)
    if data[344:347] != b"n+1" or count != 3:
        raise ValueError(f"{path} is not a NIfTI-1 volume")
    types = {2: "u1", 4: "<i2", 8: "<i4", 16: "<f4", 64: "<f8", 512: "<u2"}
    return np.frombuffer(data, types[kind], math.prod(shape), int(start)).reshape(shape, order="F")
