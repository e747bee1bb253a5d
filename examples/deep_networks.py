"""Deep residual networks: what initial gain should the last convolution of each branch have?

Usage: python examples/deep_networks.py [folder with the data, then seeds]

A wide ResNet of depth 110 on 5,000 images of CIFAR-10, five epochs, as in the study of depth (docs/results/depth). Each
run takes about three minutes on one core. It needs the extra `bench`, and CIFAR-10 (`balnorm data get cifar10`).
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from balnorm.bench.data import DataError, load
from balnorm.bench.recipes import get_recipe
from balnorm.bench.training.learner import Learner
from balnorm.bench.training.processes import Processes

DEPTH = 110
BLOCKS = (DEPTH - 2) // 2

if sys.argv[1:] in (["-h"], ["--help"]) or not all(seed.isdecimal() for seed in sys.argv[2:]):
    sys.exit(__doc__)
root = Path(sys.argv[1] if len(sys.argv) > 1 else "data")
seeds = [int(seed) for seed in sys.argv[2:]] or [0, 1, 2]
try:
    load("cifar10", root, "test", limit=1)
except DataError as error:
    sys.exit(str(error))
recipe = replace(get_recipe("cifar10-desk"), depth=DEPTH, width=8, epochs=5)
torch.set_num_threads(1)

# Every branch adds an output of variance 1 to the sum of those before it, and in a network of balanced layers no norm
# stands after the last one. So with gains of 1 the features grow with the square root of the number of blocks.

for seed in seeds:
    for name, gain in (("1", 1.0), ("1 / sqrt(blocks)", BLOCKS**-0.5), ("0", 0.0)):
        learner = Learner(replace(recipe, seed=seed), Processes(0, 1, torch.device("cpu")), root)
        for stage in (learner.model.stage1, learner.model.stage2, learner.model.stage3):
            for block in stage:
                block.conv2.gain.data.fill_(gain)
        for epoch in range(recipe.epochs):
            learner.model.train()
            for step, (images, labels) in enumerate(learner.train_loader.epoch(epoch)):
                learner.follow_schedule(epoch + step / len(learner.train_loader))
                learner.step(images, labels, epoch, step)
        found = learner.evaluate()
        accuracy, loss = 100 * found["test_accuracy"], found["test_loss"]
        print(f"seed {seed}, gain {name:16}   test accuracy {accuracy:.2f}, loss {loss:.3f}", flush=True)
