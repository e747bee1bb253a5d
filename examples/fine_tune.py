"""Fine-tune a network that was trained with BatchNorm in batches of four: convert, train, fold, export.

Run, in a clone: pip install . scikit-learn onnxscript && python examples/fine_tune.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from balnorm import convert, fold, param_groups

torch.manual_seed(0)
data = load_digits()
images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
old, new = labels < 5, labels >= 5  # the network knows the digits from 0 to 4; it is to tell those from 5 to 9


def train(model, images, labels, lr, batch_size, steps):
    """SGD, the learning rate going down to 0 in a line."""
    optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[-1]["lr"] = lr * (1 - step / steps)
        batch = torch.randint(0, len(images), (batch_size,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model


# A network with BatchNorm. Yours comes from somewhere else, with its weights.
layers = [nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
for _ in range(3):
    layers += [nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    layers += [nn.Conv2d(32, 32, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 5))
train(model, images[old], labels[old], lr=0.05, batch_size=64, steps=150)

# Convert it. The images supply statistics, so take those that it will be trained on; the last line of the report says
# that the outputs are the same.
test, rest = new.nonzero().flatten().split([200, int(new.sum()) - 200])
model, report = convert(model.eval(), example_input=images[rest][:256])
print(report)

# Give it a new head and train it. The statistics of four images say little: it keeps those of the conversion.
model[-1] = nn.Linear(128, 5)
train(model.train(), images[rest], labels[rest] - 5, lr=0.01, batch_size=4, steps=300)

# Plain convolutions, ready for anything that knows torch or ONNX.
deployed = fold(model.eval())
accuracy = (deployed(images[test]).argmax(1) == labels[test] - 5).float().mean().item()
batch_size = torch.export.Dim("batch", min=1)
torch.onnx.export(deployed, (images[:2],), "digits.onnx", dynamic_shapes=({0: batch_size},), dynamo=True, verbose=False)
print(f"test accuracy {accuracy:.1%}, written to digits.onnx")
