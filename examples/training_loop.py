"""From BatchNorm to BalNorm in your own training loop.

This page is the script `examples/training_loop.py`. It trains a small network on images of handwritten digits,
in seconds, without a download. Run it in a clone:

```
pip install . scikit-learn && python examples/training_loop.py
```
"""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from balnorm import BalNormConv2d, balance_report, fold, param_groups, update_stats

# ## The data
#
# BalNorm expects inputs that are not negative, as after a ReLU. So scale pixels to [0, 1], and do not subtract their
# mean. (If your loader has to subtract it, give the first layer `centred=True`.)

torch.manual_seed(0)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(data.target)
train, test = slice(0, 1500), slice(1500, None)

# ## The network
#
# This is the pair of layers you have now, and the layer that replaces it. A BalNorm layer takes the arguments of the
# convolution. It has a bias of its own, which does the work of BatchNorm's shift, so `bias=False` goes.


def with_batchnorm(inputs, outputs, stride=1):
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def with_balnorm(inputs, outputs, stride=1):
    return [BalNormConv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU()]


def network(block):
    return nn.Sequential(
        *block(1, 16),
        *block(16, 32, stride=2),
        *block(32, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


# The classifier stays a plain linear layer: nothing normalised it before.
#
# ## The loop
#
# Nothing changes here. A BalNorm layer is an `nn.Conv2d`: optimisers, learning rates, schedules, autocast,
# `torch.compile` and DDP treat it as one. `param_groups` puts weight decay on weights, and none on gains, biases and
# norms.


def fit(model, epochs=5):
    optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(1500).split(50):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# As with BatchNorm, call `eval()` before you evaluate. The layer then uses its running statistics, so the output for
# an image does not depend on the rest of its batch.


def accuracy(model):
    with torch.no_grad():
        return (model.eval()(images[test]).argmax(1) == labels[test]).float().mean().item()


for block in (with_batchnorm, with_balnorm):
    model = network(block)
    fit(model)
    print(f"{block.__name__}: test accuracy {accuracy(model):.1%}")

# ## What the layers do
#
# The report shows what positive and negative weights contribute in every layer. With BalNorm the two are equal, up to
# the difference between this batch and the running statistics. (`balance_report(...).figure()` draws it.)

print(balance_report(model, images[test]))

# ## Averaged weights
#
# Average the weights of two models, as SWA and EMA do, and the average has seen no data: its running statistics fit
# other weights. `update_stats` computes them exactly from a pass over the training images. For BatchNorm you would
# call `torch.optim.swa_utils.update_bn`.

later = copy.deepcopy(model).train()
fit(later, epochs=1)
averaged = torch.optim.swa_utils.AveragedModel(model)
averaged.update_parameters(later)
update_stats(images[train].split(250), averaged)
print(f"averaged: test accuracy {accuracy(averaged.module):.1%}")

# ## Deployment
#
# `fold` returns a copy with plain convolutions. It computes the same, costs what a network without normalisation
# costs, and needs no balnorm: save it, export it or quantise it like any other model.

deployed = fold(model.eval())
with torch.no_grad():
    difference = (deployed(images[test]) - model(images[test])).abs().max().item()
print(f"folded: {type(deployed[0]).__name__}, largest difference {difference:.0e}")

# To convert a network that exists already, see [converting a model](../docs/convert.md).
