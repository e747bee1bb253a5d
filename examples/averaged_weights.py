"""Which statistics fit averaged weights? Accuracy on digits with those of the last step, averaged ones and new ones.

Run, in a clone: pip install '.[bench]' && python examples/averaged_weights.py

It takes some minutes on one core.
"""

import copy
import statistics
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from balnorm import param_groups, update_stats
from balnorm.bench.data import MemoryLoader, channel_statistics, load
from balnorm.bench.models import create_model
from balnorm.bench.norms import get_norm

EPOCHS, SEEDS = 6, 3


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    right = [(model(images).argmax(1) == labels).float() for images, labels in loader.epoch()]
    return 100 * torch.cat(right).mean().item()


def run(norm, decay, seed):
    images = load("digits", ".", "train")
    options = {"pixels": get_norm(norm).pixels, "statistics": channel_statistics(images.images)}
    train = MemoryLoader(images, 64, training=True, seed=seed, padding=1, **options)
    test = MemoryLoader(load("digits", ".", "test"), 500, training=False, **options)
    torch.manual_seed(seed)
    model = create_model("wide_resnet", norm, depth=8, width=8, in_channels=1)
    optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.1, momentum=0.9)
    ema = get_ema_multi_avg_fn(decay)
    last, averaged = (AveragedModel(model, multi_avg_fn=ema, use_buffers=buffers) for buffers in (False, True))
    for epoch in range(EPOCHS):
        for batch, labels in train.epoch(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(batch), labels).backward()
            optimizer.step()
            last.update_parameters(model)
            averaged.update_parameters(model)
    results = {"of the last step": accuracy(last, test), "averaged": accuracy(averaged, test)}
    batches = [batch for batch, _ in train.epoch(EPOCHS)]
    for name, some in (("new, from 4 batches", batches[:4]), ("new, from all", batches)):
        renewed = copy.deepcopy(averaged)
        (update_stats if norm == "balnorm" else update_bn)(some, renewed)
        results[name] = accuracy(renewed, test)
    return results


for norm in ("balnorm", "batchnorm"):
    for decay in (0.9, 0.99):
        found = defaultdict(list)
        for seed in range(SEEDS):
            for name, value in run(norm, decay, seed).items():
                found[name].append(value)
        for name, values in found.items():
            shown = " ".join(f"{value:.1f}" for value in sorted(values))
            print(f"{norm:10} {decay:<5} {name:20} {statistics.median(values):.1f}  ({shown})", flush=True)
