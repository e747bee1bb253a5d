"""The paper's networks: their sizes, their shapes, and that one file serves every normalisation."""

import functools
import importlib.util

import pytest
import torch
from torch import nn

from balnorm import BalNormConv2d
from balnorm.bench.models import MODELS, create_model
from balnorm.bench.norms import NORMS


def parameters(name, norm="batchnorm", **options):
    with torch.device("meta"):
        return sum(p.numel() for p in create_model(name, norm, **options).parameters())


def test_parameter_counts_are_the_papers():
    assert parameters("wide_resnet") == pytest.approx(9.7e6, rel=0.005)
    assert parameters("wide_resnet", "balnorm") == pytest.approx(9.7e6, rel=0.005)
    assert parameters("preact_resnet152") == pytest.approx(58.1e6, rel=0.001)
    assert parameters("preact_resnet152", "balnorm") == pytest.approx(58.1e6, rel=0.001)
    assert parameters("resnet50", num_classes=1000) == 25_557_032
    assert parameters("cifar_resnet") == 269_722  # "0.27M", as counted by others who follow option A
    assert parameters("cifar_resnet", depth=110) == 1_727_962  # "1.7M"


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
@pytest.mark.parametrize("family", ["resnet", "preact_resnet"])
def test_a_resnet_is_as_deep_as_it_says(family, depth):
    model = create_model(f"{family}{depth}", "batchnorm", width=2)
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    in_line = [name for name in convolutions if "shortcut" not in name and "downsample" not in name]
    assert len(in_line) + 1 == depth  # and the classifier


def test_the_wide_resnet_has_20_layers():
    with torch.device("meta"):
        model = create_model("wide_resnet")
    layers = [
        m for m in model.modules() if isinstance(m, nn.Linear) or (isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1))
    ]
    assert len(layers) == 20
    assert model.stem.out_channels == 96


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", ["balnorm", "batchnorm"])
def test_shapes_and_mix_points(name, norm):
    size = 64 if name.startswith("resnet") else 16
    options = {"depth": 14} if name in ("wide_resnet", "cifar_resnet") else {}
    model = create_model(name, norm, num_classes=7, width=4, in_channels=1, **options)
    sizes = {}
    for point in model.mix_points[1:]:
        model.get_submodule(point).register_forward_hook(
            functools.partial(lambda p, _, __, output: sizes.update({p: output.shape[2:]}), point)
        )
    out = model(torch.rand(2, 1, size, size))
    assert out.shape == (2, 7)
    out.sum().backward()
    assert model.mix_points[0] == "input"
    first, second = sizes.values()
    assert first[0] == 2 * second[0] == 16


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["preact_resnet18", "resnet50"])  # the others train with two norms above
def test_every_norm_fits_both_kinds_of_network(name, norm):
    model = create_model(name, norm, width=8)
    loss = model(torch.rand(2, 3, 64 if name.startswith("resnet") else 32, 64)).square().mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_every_convolution_is_the_norms():
    for name in MODELS:
        with torch.device("meta"):
            model = create_model(name, "balnorm")
        assert not [m for m in model.modules() if isinstance(m, nn.Conv2d) and not isinstance(m, BalNormConv2d)]
        assert not [m for m in model.modules() if "Norm2d" in type(m).__name__]


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize("depth", [18, 50])
def test_torchvisions_weights_load(depth):
    from benchmarks.zoo import import_timm

    import_timm()
    import torchvision

    theirs = torchvision.models.get_model(f"resnet{depth}", weights=None)
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight)
            nn.init.normal_(module.bias)
    ours = create_model(f"resnet{depth}", "batchnorm", num_classes=1000)
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(2, 3, 64, 64)
    assert torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-5)


def test_mistakes_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"the model must be one of wide_resnet, .*, got 'vgg'"):
        create_model("vgg")
    with pytest.raises(ValueError, match="resnet18 has no option 'depth'; it has width, in_channels"):
        create_model("resnet18", depth=20)
    with pytest.raises(ValueError, match=r"the depth of such a ResNet is 6 n \+ 2: 8, 14, 20, 26, ..., got 21"):
        create_model("wide_resnet", depth=21)
    with pytest.raises(ValueError, match=r"8, 14, 20, 26, ..., got 2"):
        create_model("wide_resnet", depth=2)


def test_networks_compile_and_trace():
    model = create_model("wide_resnet", depth=8, width=8).eval()
    x = torch.rand(2, 3, 16, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)


@pytest.mark.parametrize("name", ["wide_resnet", "preact_resnet18", "preact_resnet50"])
def test_identity_shortcuts_take_the_raw_input_and_projections_the_activated_one(name):
    model = create_model(name, "none", width=4)
    blocks = [block for block in model.modules() if hasattr(block, "shortcut")]
    assert {block.shortcut is None for block in blocks} == {True, False}
    for block in blocks:
        last = [
            module for module in block.children() if isinstance(module, nn.Conv2d) and module is not block.shortcut
        ][-1]
        nn.init.zeros_(last.weight)
        x = torch.randn(2, block.conv1.in_channels, 8, 8)
        expected = x if block.shortcut is None else block.shortcut(x.relu())
        assert torch.equal(block(x), expected)
