"""Training with accelerate, and averaged weights whose running statistics are renewed.

Run, in a clone: pip install . accelerate scikit-learn && accelerate launch --cpu examples/accelerate_averages.py
"""

from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from balnorm import convert, fold, param_groups, update_stats

accelerator = Accelerator()
torch.manual_seed(0)
data = load_digits()
images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
train = DataLoader(TensorDataset(images[:1500], labels[:1500]), 50, shuffle=True)
test = DataLoader(TensorDataset(images[1500:], labels[1500:]), 100)

layers = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
layers += [nn.Conv2d(16, 32, 3, 2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))
model, _ = convert(model)  # before prepare(), which may wrap the model
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95)).to(accelerator.device)
optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.1, momentum=0.9)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for _ in range(5):
    model.train()
    for batch, targets in train:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(batch), targets))
        optimizer.step()
        averaged.update_parameters(accelerator.unwrap_model(model))

update_stats(islice(train, 20), averaged)  # in every process: the statistics are those of all processes' batches
deployed = fold(averaged.module.eval())
with torch.no_grad():
    right = [accelerator.gather_for_metrics(deployed(batch).argmax(1) == targets) for batch, targets in test]
accelerator.print(f"test accuracy {torch.cat(right).float().mean().item():.1%}")
