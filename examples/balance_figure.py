"""Draw what positive and negative weights contribute in a ResNet-18, with BatchNorm and with BalNorm.

Run, in a clone: pip install . timm scikit-learn matplotlib && python examples/balance_figure.py
"""

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from balnorm import balance_report, convert

data = load_digits()
images = torch.tensor(data.images[:64], dtype=torch.float32).unsqueeze(1) / 16
images, labels = F.interpolate(images, scale_factor=8), torch.tensor(data.target[:64])

for name in ("batchnorm", "balnorm"):
    torch.manual_seed(0)
    model = timm.create_model("resnet18", in_chans=1, num_classes=10, zero_init_last=False)
    if name == "balnorm":
        model, _ = convert(model)
    before = balance_report(model, images)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    report = balance_report(model, images, before=before)
    print(f"{name}\n{report}\n")
    report.figure().savefig(f"balance-{name}.svg")
