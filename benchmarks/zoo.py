"""Architectures that other people wrote, converted: how much of each becomes balanced, and does it still work?"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from balnorm import BalNormLayer, convert, fold, param_groups
from balnorm.surgery import ConversionReport
from balnorm.surgery._decisions import Balanced, Place, Removed, attribute
from balnorm.surgery._flow import data_flow
from balnorm.surgery._model import replace_modules

# A family each; the quick ones are part of the tests. Sizes are those of the images, as small as the network allows.
TIMM = {
    "resnet18": 64,
    "resnet26d": 64,
    "resnetv2_50": 64,  # pre-activation, norms with built-in activations
    "resnext50_32x4d": 64,
    "wide_resnet50_2": 32,
    "seresnet18": 64,
    "skresnet18": 64,
    "resnest14d": 64,
    "res2net50_26w_4s": 64,
    "ecaresnet26t": 64,
    "regnetx_002": 64,
    "regnety_002": 64,
    "densenet121": 64,  # pre-activation over concatenations
    "vgg11_bn": 32,
    "mobilenetv2_100": 64,
    "mobilenetv3_small_100": 64,
    "mobilenetv4_conv_small": 64,
    "efficientnet_b0": 64,
    "tf_efficientnet_b0": 64,
    "mnasnet_100": 64,
    "fbnetc_100": 64,
    "mixnet_s": 64,
    "ghostnet_100": 64,
    "rexnet_100": 64,
    "lcnet_050": 64,
    "hrnet_w18_small": 64,
    "dla34": 64,
    "dpn68": 64,
    "xception41": 64,
    "xception41p": 64,
    "inception_v3": 96,
    "repvgg_a0": 64,
    "cspresnet50": 64,
    "darknet53": 64,
    "gernet_s": 64,
    "selecsls42b": 64,
    "ese_vovnet19b_dw": 64,
    "convnext_atto": 64,  # no BatchNorm: left alone
    "mobileone_s0": 64,
    "fastvit_t8": 64,
    "efficientformer_l1": 224,
    "visformer_tiny": 224,
    "inception_v4": 128,
    "inception_resnet_v2": 128,
    "nasnetalarge": 96,
    "pnasnet5large": 96,
    "senet154": 64,
}
TORCHVISION = {
    "resnet18": 64,
    "resnext50_32x4d": 64,
    "vgg11_bn": 32,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "densenet121": 64,
    "shufflenet_v2_x0_5": 64,
    "mnasnet0_5": 64,
    "efficientnet_b0": 64,
    "regnet_y_400mf": 64,
    "googlenet": 64,
}
SLOW = {"inception_v4", "inception_resnet_v2", "nasnetalarge", "pnasnet5large", "senet154", "visformer_tiny"}

_operators: list[Any] = []


def import_timm() -> Any:
    """timm, and torchvision with it: torchvision has no build for this torch, and misses two operators of its own."""
    if not _operators:
        _operators.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _operators[0].define(f"{name}(Tensor boxes, Tensor scores, float iou) -> Tensor")
    import timm

    return timm


def build(library: str, name: str) -> tuple[nn.Module, torch.Tensor]:
    """A fresh network, and a batch for it. VGG without its head's hundred million weights, which no norm follows."""
    timm = import_timm()
    if library == "timm":
        options = {"mlp_ratio": 0.01} if name == "vgg11_bn" else {}
        model, size = timm.create_model(name, num_classes=10, **options), TIMM[name]
    else:
        import torchvision

        options = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, weights=None, num_classes=10, **options)
        size = TORCHVISION[name]
        if name == "vgg11_bn":
            model.classifier = nn.Linear(model.classifier[0].in_features, 10)
    return model, torch.rand(4, 3, size, size)


def as_trained(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Give every norm the statistics of a batch, perturbed by up to half, and weights of both signs, 5 % of them 0."""
    model.train()(x)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None and norm.running_var is not None:
                for statistic in (norm.running_mean, norm.running_var):
                    statistic.mul_(0.5 + torch.rand(statistic.shape, generator=random))
                size = 0.5 + torch.rand(norm.num_features, generator=random)
                sign = torch.randint(0, 2, size.shape, generator=random) * 2 - 1
                alive = torch.rand(size.shape, generator=random) > 0.05
                if norm.weight is not None:
                    norm.weight.copy_(size * sign * alive)
                    norm.bias.copy_(0.5 * torch.randn(size.shape, generator=random))
    return model.eval()


@dataclass(frozen=True)
class Exactness:
    """How far the outputs of a converted network are from the original's in float64, relative to the largest."""

    report: ConversionReport
    double: float
    """Of the converted network in float64."""
    single: float
    """Of the converted network in float32."""
    folded: float
    """Of the original in float32, with its BatchNorms folded into the convolutions."""
    folded_again: float
    """Of the converted network after ``fold``, in float32."""


def exactness(model: nn.Module, x: torch.Tensor) -> Exactness:
    """Convert a trained network in both precisions."""
    original = copy.deepcopy(model).double()

    def error(network: nn.Module) -> float:
        return float((network(x.to(next(network.parameters()).dtype)).double() - expected).abs().max() / largest)

    with torch.no_grad():
        expected = original(x.double())
        largest = expected.abs().max()
        folded = error(_with_folded_norms(copy.deepcopy(model), x))
        single, report = convert(model, example_input=x)
        double, _ = convert(original, example_input=x.double())
        return Exactness(report, error(double), error(single), folded, error(fold(single)))


def _with_folded_norms(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """The network with each BatchNorm that follows a convolution folded into it by torch's own function."""
    new = dict[nn.Module, nn.Module]()
    for module, decision in attribute(model, data_flow(model, (x,))).items():
        if isinstance(decision, Balanced) and decision.place is Place.FOLLOWS:
            transposed = getattr(module, "transposed", False)
            fuse = fuse_linear_bn_eval if isinstance(module, nn.Linear) else fuse_conv_bn_eval
            new[module] = fuse(module, decision.norm, **({"transpose": True} if transposed else {}))
        elif isinstance(decision, Removed) and decision.place is Place.FOLLOWS:
            act = {name: getattr(module, name) for name in ("drop", "act") if hasattr(module, name)}
            new[module] = nn.Sequential(OrderedDict(act))
    return replace_modules(model, new)


@dataclass(frozen=True)
class Trial:
    """What became of one network."""

    report: ConversionReport
    convolutions: int
    balanced: int
    centred: int
    loss: float
    finite: bool
    """Whether all gradients of a training step are."""
    difference: float
    """The largest between folded and unfolded eval outputs, in units of the largest output."""


def trial(model: nn.Module, x: torch.Tensor) -> Trial:
    """Convert, train one step, fold."""
    convolutions = sum(isinstance(module, _ConvNd) for module in model.modules())
    model, report = convert(model, example_input=x)
    layers = [module for module in model.modules() if isinstance(module, BalNormLayer)]
    optimizer = torch.optim.SGD(param_groups(model.train(), weight_decay=1e-4), lr=0.01, momentum=0.9)
    loss = F.cross_entropy(model(x), torch.arange(len(x)))
    loss.backward()
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    model.eval()
    folded = fold(model)
    assert not any(isinstance(module, BalNormLayer) for module in folded.modules())
    with torch.no_grad():
        expected, got = model(x), folded(x)
    difference = float((got - expected).abs().max() / expected.abs().max())
    centred = sum(layer.centred for layer in layers)
    return Trial(report, convolutions, len(layers), centred, loss.item(), finite, difference)
