"""Convert a timm network to BalNorm, train it on images of digits, fold it and export it to ONNX.

Run, in a clone: pip install . timm scikit-learn onnxscript && python examples/convert_timm.py
"""

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from balnorm import convert, fold, param_groups, update_stats

torch.manual_seed(0)
data = load_digits()
images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16  # in [0, 1], as BalNorm likes it
images, labels = F.interpolate(images, scale_factor=4), torch.tensor(data.target)
train, test = slice(0, 1500), slice(1500, None)

model = timm.create_model("resnet18", in_chans=1, num_classes=10)
# Position mass honours the border, which is a large part of images as small as these.
model, report = convert(model, example_input=images[:2], mass="position")
print(report)

optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.05, momentum=0.9)
for step in range(80):
    batch = torch.randint(0, 1500, (64,))
    loss = F.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.3f}")

update_stats(images[train].split(250), model)  # exact statistics for the last weights
deployed = fold(model.eval())  # plain convolutions, no BalNorm and no BatchNorm left
accuracy = (deployed(images[test]).argmax(1) == labels[test]).float().mean().item()
batch_size = torch.export.Dim("batch", min=1)
torch.onnx.export(deployed, (images[:2],), "digits.onnx", dynamic_shapes=({0: batch_size},), dynamo=True, verbose=False)
print(f"test accuracy {accuracy:.1%}, written to digits.onnx")
