"""Depthwise layers: an experiment that compares the shift of balanced layers where a kernel has nine weights.

This page is the script `examples/depthwise_study.py`, an [experiment](../docs/experiments.md) to copy. It trains timm's
`mobilenetv2_050` from scratch on a part of CIFAR-10 (`balnorm data get cifar10 --root data`). Run it in a clone, after
`pip install '.[bench]' timm`:

```
balnorm compare examples/depthwise_study.py:train --root data
```

The [results](../docs/results/depthwise/README.md) are those of this script.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from balnorm import convert, param_groups
from balnorm.bench.data import load

# `balnorm` leaves the shift out in depthwise layers, which is the default; `shifted` has it there too. A run takes two
# or three minutes and does not resume: one that was cut short starts again.


def train(
    norm: Literal["batchnorm", "balnorm", "shifted"],
    seed: int,
    folder: Path,  # noqa: ARG001
    root: Path,
    epochs: int = 4,
    batch_size: int = 64,
    lr: float = 0.05,
) -> Iterator[dict[str, float]]:
    """Train a MobileNetV2 of half the width on 7,680 images of CIFAR-10, and test it on 5,000."""
    images, labels = pixels(root, "train", 7_680)
    test_images, test_labels = pixels(root, "test", 5_000)
    torch.manual_seed(seed)
    model = timm.create_model("mobilenetv2_050", num_classes=10)
    model.conv_stem.stride = (1, 1)  # the images are small
    nn.init.normal_(model.classifier.weight, std=0.01)  # timm's own start has a loss of 8
    if norm != "batchnorm":
        model, _ = convert(model, shift=True if norm == "shifted" else "auto")
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(param_groups(model, weight_decay=5e-4), momentum=0.9)
    steps = len(images) // batch_size
    for epoch in range(epochs):
        torch.manual_seed(1000 * seed + epoch)
        losses = []
        for step, chosen in enumerate(torch.randperm(len(images))[: steps * batch_size].split(batch_size)):
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 + math.cos(math.pi * (epoch + step / steps) / epochs)) / 2
            mirrored = (torch.rand(batch_size) < 0.5).view(-1, 1, 1, 1)
            batch = torch.where(mirrored, images[chosen].flip(3), images[chosen])
            loss = F.cross_entropy(model.train()(batch.contiguous(memory_format=torch.channels_last)), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            scores = torch.cat([model.eval()(batch) for batch in test_images.split(200)])
        accuracy = (scores.argmax(1) == test_labels).float().mean().item()
        test_loss = F.cross_entropy(scores, test_labels).item()
        yield {"train_loss": sum(losses) / len(losses), "test_loss": test_loss, "test_accuracy": accuracy}


def pixels(root: Path, split: str, limit: int) -> tuple[Tensor, Tensor]:
    """Images of mean 0 and variance 1 in each channel, and their labels."""
    data = load("cifar10", root, split, limit=limit)
    mean, deviation = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]).view(2, 1, 3, 1, 1)
    images = torch.tensor(data.images)
    return (images / 255 - mean) / deviation, torch.tensor(data.labels)
