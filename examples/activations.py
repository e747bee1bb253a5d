"""Which activations BalNorm trains with, and where a measured output scale helps: five convolutions on digits.

Run, in a clone: pip install . scikit-learn && python examples/activations.py
"""

import statistics

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from balnorm import BalNormConv2d, scale_to_data

data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(data.target)
ACTIVATIONS = {
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
}


def network(activation, norm, signed):
    layers, inputs = [], 1
    for _ in range(5):
        if norm == "BatchNorm":
            layers += [nn.Conv2d(inputs, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
        else:
            layers += [BalNormConv2d(inputs, 16, 3, padding=1, signed_input=signed and inputs > 1)]
        layers, inputs = [*layers, activation()], 16
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def accuracy(activation, norm, seed):
    torch.manual_seed(seed)
    model = network(activation, norm, signed=activation is nn.Tanh)
    if norm == "measured":
        scale_to_data(model, images[:256])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(4):
        for batch in torch.randperm(1500).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return 100 * (model.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()


print("test accuracy in percent, median of three seeds (all three)")
for name, activation in ACTIVATIONS.items():
    for norm in ("BatchNorm", "BalNorm", "measured"):
        values = [accuracy(activation, norm, seed) for seed in (1, 2, 3)]
        print(
            f"{name:9} {norm:10} {statistics.median(values):5.1f}  ({' '.join(f'{value:.1f}' for value in values)})",
            flush=True,
        )
