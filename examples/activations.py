"""Which activations and inputs BalNorm trains with, and what helps where it does not: five convolutions on digits.

Run, in a clone: pip install . scikit-learn && python examples/activations.py
"""

import statistics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from balnorm import BalNormConv2d

data = load_digits()
pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(data.target)


def network(norm, activation, centred, centred_pixels):
    layers, inputs = [], 1
    for _ in range(5):
        if norm == "BatchNorm":
            layers += [nn.Conv2d(inputs, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
        else:
            layers += [BalNormConv2d(inputs, 16, 3, padding=1, centred=centred_pixels if inputs == 1 else centred)]
        layers, inputs = [*layers, activation()], 16
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def accuracy(norm, seed, activation, centred, images):
    torch.manual_seed(seed)
    model = network(norm, activation, centred, centred_pixels=bool(images.min() < 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        for batch in torch.randperm(1500).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * (model.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()


def show(name, activation=nn.ReLU, centred=False, images=pixels):
    for norm in ("BatchNorm", "BalNorm"):
        values = [accuracy(norm, seed, activation, centred, images) for seed in (1, 2, 3)]
        each = " ".join(f"{value:.1f}" for value in values)
        print(f"{name:24} {norm:10} {statistics.median(values):5.1f}  ({each})", flush=True)


print("test accuracy in percent, median of three seeds (all three)")
for activation in (nn.ReLU, nn.GELU, nn.SiLU, nn.Softplus, nn.Sigmoid):
    show(activation.__name__, activation)
for activation in (nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus, nn.Sigmoid):  # they are no ReLUs
    show(f"{activation.__name__}, centred", activation, centred=True)

for contrast in (1.0, 0.3, 0.1, 0.03):  # of grey images: the darkest pixel is far from 0
    grey = 0.5 + contrast * (pixels - 0.5)
    show(f"contrast {contrast}", images=grey)
    show(f"contrast {contrast}, from 0", images=grey - grey.min())
    show(f"contrast {contrast}, standard", images=(grey - grey.mean()) / grey.std())
