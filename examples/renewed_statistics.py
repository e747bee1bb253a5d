"""How much of a network's test accuracy depends on its running statistics: as saved, and estimated anew.

Usage: python examples/renewed_statistics.py DATA RUN...

DATA is the folder with the data; each RUN is the folder of a run, finished or not, such as that of
`balnorm train digits --out RUN`. While weights move fast, running statistics lag behind them, and mixup gives them
other images than those of the test. It needs the extra `bench`.
"""

import itertools
import sys
from pathlib import Path

import torch
from torch.optim.swa_utils import update_bn

from balnorm import update_stats
from balnorm.bench.errors import Failure
from balnorm.bench.export import load_saved
from balnorm.bench.training.images import make_loaders
from balnorm.bench.training.processes import Processes

BATCHES = 100

if len(sys.argv) < 3:
    sys.exit(__doc__)


@torch.no_grad()
def accuracy(model, loader):
    """In percent, on all images of the loader."""
    model.eval()
    right = [(model(images).argmax(1) == labels).float() for images, labels in loader.epoch()]
    return 100 * torch.cat(right).mean().item()


for folder in sys.argv[2:]:
    try:
        saved = load_saved(folder)
        train, test, _ = make_loaders(saved.recipe, Processes(0, 1, torch.device("cpu")), Path(sys.argv[1]))
    except Failure as failure:
        sys.exit(str(failure))
    name = f"{saved.recipe.norm}, seed {saved.recipe.seed}, epoch {saved.epoch}"
    print(f"{name:32} as saved {accuracy(saved.model, test):6.2f}", end="", flush=True)
    batches = [images for images, _ in itertools.islice(train.epoch(), BATCHES)]  # as in training, but not mixed
    update_bn(batches, saved.model)  # of BatchNorms
    update_stats(batches, saved.model)  # of balanced layers
    print(f"   statistics anew {accuracy(saved.model, test):6.2f}", flush=True)
