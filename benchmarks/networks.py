"""The networks that are measured, and the normalisations that they are measured with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from balnorm.bench.models import create_model
from balnorm.bench.models._stages import make_stages
from balnorm.bench.models.resnet import Bottleneck
from balnorm.bench.norms import NORMS, Normalization, get_norm

METHODS = {name: NORMS[name] for name in ("none", "batchnorm", "groupnorm", "weightstandardization", "balnorm")}
METHODS["position mass"] = get_norm("balnorm", mass="position")


@dataclass(frozen=True)
class Network:
    model: str
    batch: int
    size: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.options.get("width", 3) if self.model == "layer" else 3, self.size, self.size)

    def build(self, method: str) -> nn.Module:
        if self.model == "layer":
            norm, width = METHODS[method], self.options["width"]
            return nn.Sequential(norm.conv(width, width, 3, padding=1), norm.norm(width))
        if self.model == "bottlenecks":
            return bottlenecks(METHODS[method])
        return create_model(self.model, METHODS[method], **self.options)


def bottlenecks(norm: Normalization) -> nn.Module:
    """A short ResNet-50: 1x1, 3x3 and 1x1 convolutions, most of whose weights are in the stages of small images."""
    stem = norm.conv(3, 64, 7, stride=2, padding=3), norm.norm(64), norm.activation(64), nn.MaxPool2d(3, 2, padding=1)
    stages, outputs = make_stages(norm, Bottleneck, (2, 3, 4, 2), 64)
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, 10))


NETWORKS = {
    "WRN-20 width 16, batch 128": Network("wide_resnet", 128, 32, {"width": 16}),
    "WRN-20 width 96, batch 16": Network("wide_resnet", 16, 32, {"width": 96}),
    "PreActResNet-18, batch 32": Network("preact_resnet18", 32, 32),
    "ResNet-50, 224x224, batch 4": Network("resnet50", 4, 224, {"num_classes": 1000}),
    "digits network (depth 8, width 16, 8x8), batch 64": Network("wide_resnet", 64, 8, {"depth": 8, "width": 16}),
    "bottlenecks of 256 to 2048 channels, 128x128, batch 4": Network("bottlenecks", 4, 128),
    "one layer, 64 channels, 32x32, batch 1": Network("layer", 1, 32, {"width": 64}),
}

# Compiling larger ones takes longer than all the rest.
COMPILED = [name for name in NETWORKS if name.startswith(("WRN", "bottlenecks"))]
