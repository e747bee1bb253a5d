"""SGD and AdamW with BalNorm and BatchNorm: learning rates, weight decays, and what weight decay on gains does.

Usage: python examples/optimisers.py [folder with CIFAR-10]

Without a folder it trains on scikit-learn's digits. It needs the extra `bench`, and some minutes on one core.
"""

import statistics
import sys

import torch
import torch.nn.functional as F

from balnorm import param_groups
from balnorm.bench.data import DataError, MemoryLoader, channel_statistics, load
from balnorm.bench.models import create_model
from balnorm.bench.norms import get_norm
from balnorm.bench.recipes import get_recipe
from balnorm.bench.training.schedules import rates

if sys.argv[1:] in (["-h"], ["--help"]):
    sys.exit(__doc__)
NAME, ROOT = ("cifar10", sys.argv[1]) if len(sys.argv) > 1 else ("digits", ".")
try:
    load(NAME, ROOT, "test", limit=1)
except DataError as error:
    sys.exit(str(error))
EPOCHS, SEEDS, TRAIN, TEST = 4, 3, 1500, 1000
KINDS = {
    "sgd": lambda groups, lr, decay: torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=decay),
    "adamw": lambda groups, lr, decay: torch.optim.AdamW(groups, lr=lr, weight_decay=decay),
}


def run(norm, kind, lr, decay, spare, seed):
    """Test accuracy in percent after the last epoch, with the learning rate going down to 0 in a cosine."""
    images = load(NAME, ROOT, "train", limit=TRAIN if NAME == "cifar10" else None)
    options = {"pixels": get_norm(norm).pixels, "statistics": channel_statistics(images.images)}
    train = MemoryLoader(images, 64, training=True, seed=seed, padding=1, **options)
    test = MemoryLoader(
        load(NAME, ROOT, "test", limit=TEST if NAME == "cifar10" else None), 250, training=False, **options
    )
    torch.manual_seed(seed)
    model = create_model("wide_resnet", norm, depth=8, width=8, in_channels=images.images.shape[1])
    groups = param_groups(model, decay) if spare else [{"params": list(model.parameters())}]
    optimizer = KINDS[kind](groups, lr, decay)
    recipe = get_recipe("digits")
    for epoch in range(EPOCHS):
        for step, (batch, labels) in enumerate(train.epoch(epoch)):
            share = (epoch + step / len(train)) / EPOCHS
            for group in optimizer.param_groups:
                group["lr"] = lr / recipe.lr * rates(recipe, share * recipe.epochs).lr
            optimizer.zero_grad()
            F.cross_entropy(model.train()(batch), labels).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [(model(batch).argmax(1) == labels).float() for batch, labels in test.epoch()]
    return 100 * torch.cat(right).mean().item()


def show(norm, kind, lr, decay, spare=True):
    values = sorted(run(norm, kind, lr, decay, spare, seed) for seed in range(SEEDS))
    shown = " ".join(f"{value:.1f}" for value in values)
    on = "weights" if spare else "everything"
    print(
        f"{norm:10} {kind:6} lr {lr:<6} decay {decay:<6} on {on:11} {statistics.median(values):.1f}  ({shown})",
        flush=True,
    )


torch.set_num_threads(1)
for kind, learning_rates, decay in (("adamw", (0.001, 0.003, 0.01, 0.03), 0.05), ("sgd", (0.03, 0.1, 0.3), 1e-4)):
    for lr in learning_rates:
        for norm in ("balnorm", "batchnorm"):
            show(norm, kind, lr, decay)
for kind, lr, decays in (("adamw", 0.01, (0.0, 0.5)), ("sgd", 0.1, (0.0, 1e-3))):
    for decay in decays:
        show("balnorm", kind, lr, decay)
    show("balnorm", kind, lr, decays[1], spare=False)
