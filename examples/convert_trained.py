"""The accuracy of a network trained with BatchNorm before and after its conversion, and after one epoch of fine-tuning.

Usage: python examples/convert_trained.py RUN [folder with the data]

RUN is the folder of a finished run, such as that of `balnorm train digits --norm batchnorm --out RUN`.
It needs the extra `bench`.
"""

import copy
import itertools
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from balnorm import convert, freeze_stats, param_groups, unfreeze_stats
from balnorm.bench.errors import Failure
from balnorm.bench.export import load_saved
from balnorm.bench.training.images import make_loaders
from balnorm.bench.training.processes import Processes

IMAGES, LR = 512, 0.02

if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
    sys.exit(__doc__)
try:
    saved = load_saved(sys.argv[1])
    if saved.recipe.norm != "batchnorm":
        sys.exit(f"{sys.argv[1]} was trained with {saved.recipe.norm}: a run with batchnorm is needed")
    root = Path(sys.argv[2] if len(sys.argv) > 2 else ".")
    train, test, _ = make_loaders(saved.recipe, Processes(0, 1, torch.device("cpu")), root)
except Failure as failure:
    sys.exit(str(failure))
batches = [images for images, _ in itertools.islice(train.epoch(), math.ceil(IMAGES / saved.recipe.batch_size))]


@torch.no_grad()
def accuracy(model):
    """In percent, on all test images."""
    model.eval()
    right = [(model(images).argmax(1) == labels).float() for images, labels in test.epoch()]
    return 100 * torch.cat(right).mean().item()


def fine_tuned(model, lr, freeze=unfreeze_stats):
    """A copy after one more epoch, the learning rate going down to 0 in a cosine."""
    model = copy.deepcopy(model).train()
    freeze(model)
    optimizer = torch.optim.SGD(param_groups(model, saved.recipe.weight_decay), lr=lr, momentum=0.9)
    for step, (images, labels) in enumerate(train.epoch(saved.recipe.epochs)):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * step / len(train))) / 2
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def freeze_norms(model):
    """Let every BatchNorm use its running statistics, in training too."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()


def show(name, model, freeze):
    print(f"{name:28} {accuracy(model):6.2f}", end="", flush=True)
    print(f"   one epoch more: {accuracy(fine_tuned(model, LR)):6.2f}", end="", flush=True)
    print(f"   with frozen statistics: {accuracy(fine_tuned(model, LR, freeze)):6.2f}", flush=True)


show("batchnorm", saved.model, freeze_norms)
for mass in ("channel", "position"):
    converted, report = convert(copy.deepcopy(saved.model), example_input=iter(batches), mass=mass)
    show(f"{mass} mass", converted, freeze_stats)
    print(report.proof)
