"""The networks that are measured, and the normalisations that they are measured with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from balnorm.models import create_model

METHODS = ("none", "batchnorm", "groupnorm", "weightstandardization", "balnorm", "balnorm-position")


@dataclass(frozen=True)
class Network:
    model: str
    batch: int
    size: int
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, method: str) -> nn.Module:
        return create_model(self.model, method, **self.options)


NETWORKS = {
    "WRN-20 width 16, batch 128": Network("wide_resnet", 128, 32, {"width": 16}),
    "WRN-20 width 96, batch 16": Network("wide_resnet", 16, 32, {"width": 96}),
    "PreActResNet-18, batch 32": Network("preact_resnet18", 32, 32),
    "ResNet-50, 224x224, batch 4": Network("resnet50", 4, 224, {"num_classes": 1000}),
}
