"""A training loop as in timm's train.py, with averaged weights (--model-ema) whose statistics are renewed.

Run, in a clone: pip install . timm scikit-learn && python examples/timm_averages.py
"""

from itertools import islice

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

from balnorm import convert, param_groups, update_stats

torch.manual_seed(0)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # in [0, 1], as BalNorm likes it
images, labels = F.interpolate(images, scale_factor=4), torch.tensor(data.target)
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), 50, shuffle=True)

model = timm.create_model("resnet10t", in_chans=1, num_classes=10)
# Convert first: the optimiser, the averaged model and DistributedDataParallel take note of the layers.
model, _ = convert(model, example_input=images[:2], mass="position")
model_ema = ModelEmaV3(model, decay=0.95)
optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.05, momentum=0.9)


@torch.no_grad()
def validate(model):
    model.eval()
    return (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()


for epoch in range(4):
    model.train()
    for batch, targets in train:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), targets).backward()
        optimizer.step()
        model_ema.update(model)
    # The line to add to train.py, in every process: no batch has met the averaged weights yet. With mixup, switch it
    # off for these batches (loader_train.mixup_enabled = False), because the images of the test are not mixed.
    update_stats(islice(train, 20), model_ema.module)
    print(f"epoch {epoch + 1}: accuracy {validate(model):.1%}, of averaged weights {validate(model_ema.module):.1%}")
