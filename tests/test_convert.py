"""Conversion: which BatchNorm belongs to which convolution, and what takes its place."""

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from balnorm import (
    BalNormConv1d,
    BalNormConv2d,
    BalNormConv3d,
    BalNormConvTranspose2d,
    BalNormLayer,
    BalNormLinear,
    convert,
    fold,
)
from balnorm.init import unit_variance_scale
from balnorm.surgery._decisions import attribute
from balnorm.surgery._flow import data_flow, recorded, traced
from balnorm.surgery._model import undisturbed
from cases import Steps

may_balance_nothing = pytest.mark.filterwarnings("ignore:convert balances nothing")


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)


class PreActivationBlock(nn.Module):
    """norm-relu-conv, twice; the norm's output also feeds the projection, the identity takes the raw input."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, outputs)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), conv(outputs, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = conv(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x):
        y = self.relu(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(y)
        return self.conv2(F.relu(self.norm2(self.conv1(y)))) + shortcut


class PostActivationBlock(nn.Module):
    """One ReLU module for all, as in torchvision."""

    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = conv(channels, channels), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = conv(channels, channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


def pre_activation_network(last_norm=True):
    return nn.Sequential(
        conv(3, 8),
        PreActivationBlock(8, 8),
        PreActivationBlock(8, 16),
        PreActivationBlock(16, 16),
        nn.BatchNorm2d(16) if last_norm else nn.Identity(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


class Untraceable(nn.Module):
    """Python that depends on values, which symbolic tracing cannot follow."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x if x.sum() > 0 else x + 1)


MODELS = {
    "sequential": lambda: nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 4), nn.BatchNorm2d(4)),
    "post-activation": lambda: nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), PostActivationBlock(8)),
    "pre-activation": pre_activation_network,
    "pre-activation, no last norm": lambda: pre_activation_network(last_norm=False),
    "depthwise": lambda: nn.Sequential(
        conv(3, 8), nn.BatchNorm2d(8), nn.ReLU6(), conv(8, 8, groups=8), nn.BatchNorm2d(8), conv(8, 4, 1)
    ),
}


def loss(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("traceable", [True, False])
def test_a_converted_model_trains_and_is_not_converted_again(name, traceable):
    model = MODELS[name]() if traceable else Untraceable(MODELS[name]())
    x = torch.rand(4, 3, 8, 8)
    model, report = convert(model, example_input=None if traceable else x)
    assert report.balanced
    assert sum(isinstance(module, BalNormLayer) for module in model.modules()) == len(report.balanced)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss(model, x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    optimizer.step()
    assert loss(model, x).isfinite()

    state = {name: value.clone() for name, value in model.state_dict().items()}
    again, second = convert(model, example_input=x, trained=False)  # a norm that stayed has statistics by now
    assert again is model
    assert not second.balanced
    assert not second.removed
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_tracing_and_recording_agree(name):
    model = MODELS[name]()
    x = torch.randn(2, 3, 8, 8)
    with undisturbed(model):
        symbolic, watched = (attribute(model, flow) for flow in (traced(model, (x,)), recorded(model, (x,))))
    assert symbolic == watched


@pytest.mark.parametrize("name", MODELS)
def test_deciding_changes_nothing(name):
    """Asking what a norm feeds once noted its activations, as often as it was asked."""
    model = MODELS[name]()
    original, flow = str(model), traced(model)
    called = list(flow.by_module)
    assert attribute(model, flow) == attribute(model, flow)
    assert str(model) == original
    assert list(flow.by_module) == called


def test_every_convolution_of_a_pre_activation_network_is_balanced():
    for last_norm in (True, False):
        model, report = convert(pre_activation_network(last_norm))
        assert not any(type(module) is nn.Conv2d for module in model.modules()), report
        left = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
        assert left == (["4"] if last_norm else [])


def test_without_its_norm_an_activation_in_place_leaves_the_shortcut_alone():
    """A removed norm in front of an in-place ReLU once let the ReLU overwrite the residual stream."""
    model, _ = convert(pre_activation_network())
    block = model[1]
    x = torch.randn(2, 8, 4, 4)
    before = x.clone()
    out = block(x)
    assert torch.equal(x, before)
    expected = block.conv2(F.relu(block.conv1(F.relu(before)))) + before
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"example_input": 3}, {"bias": False}])
def test_a_conversion_that_fails_changes_nothing(wrong):
    block = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Steps(lambda self, x: self.block(x) + x, block=block))
    before = repr(model)
    with pytest.raises((TypeError, ValueError)):
        convert(model, **wrong)
    assert repr(model) == before


def test_an_activation_that_a_layer_feeds_stays_in_place():
    """Behind a norm that followed a layer it changes only the layer's own output, which nobody else uses."""
    block = nn.Sequential(
        nn.BatchNorm2d(8), nn.ReLU(inplace=True), conv(8, 8), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
    )
    model = nn.Sequential(conv(3, 8), Steps(lambda self, x: self.conv(self.block(x)) + x, block=block, conv=conv(8, 8)))
    _, report = convert(model)
    assert report.removed == ["1.block.0", "1.block.3"]
    assert [block[1].inplace, block[4].inplace] == [False, True]


def test_an_output_layer_without_a_norm_stays():
    model, report = convert(nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 2)))
    assert report.balanced == ["0"]
    assert type(model[3]) is nn.Conv2d
    assert report.rows[-1].why == "no BatchNorm follows or feeds it"


@pytest.mark.parametrize(
    ("layer", "norm", "expected"),
    [
        (nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), BalNormConv1d),
        (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), BalNormConv2d),
        (nn.Conv2d(2, 4, 3), nn.SyncBatchNorm(4), BalNormConv2d),
        (nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), BalNormConv3d),
        (nn.ConvTranspose2d(2, 4, 3), nn.BatchNorm2d(4), BalNormConvTranspose2d),
        (nn.Linear(2, 4), nn.BatchNorm1d(4), BalNormLinear),
    ],
)
def test_every_kind_of_layer_is_converted(layer, norm, expected):
    example = torch.rand(3, 2) if isinstance(layer, nn.Linear) else None
    model, _ = convert(nn.Sequential(layer, norm), example_input=example, mass="position", one_pass=False)
    assert type(model[0]) is expected
    assert type(model[1]) is nn.Identity
    assert model[0].weight is layer.weight
    assert not model[0].one_pass
    assert model[0].mass == ("channel" if expected is BalNormLinear else "position")
    assert model[0].sync_stats == isinstance(norm, nn.SyncBatchNorm)


def test_scale_shift_and_momentum_of_the_norm_are_taken_over():
    norm = nn.BatchNorm2d(4, momentum=None)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm.bias.requires_grad_(False)
    scale, shift = norm.weight.detach().clone(), norm.bias.detach().clone()
    layer = convert(nn.Sequential(nn.Conv2d(3, 4, 3, bias=True), norm))[0][0]
    assert torch.equal(layer.gain, scale)
    assert layer.output_scale.tolist() == pytest.approx([unit_variance_scale(27, centred=True)] * 4)
    assert torch.equal(layer.bias, shift)
    assert layer.momentum is None
    assert layer.gain.requires_grad
    assert not layer.bias.requires_grad


class ZeroInitialised(nn.Module):
    """A residual network whose branches start at zero, as in timm: the last norm of each has a weight of zero."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.branches = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
                *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(8, 10)
        for branch in self.branches:
            nn.init.zeros_(branch[-1].weight)

    def forward(self, x):
        x = self.stem(x).relu()
        for branch in self.branches:
            x = (x + branch(x)).relu()
        return self.head(x.mean((2, 3)))


def test_branches_that_start_at_zero_learn(digits):
    """A gain that contained the output scale hardly left zero: it moved 10 to 340 times less than BatchNorm's."""
    images, labels = digits
    model, _ = convert(ZeroInitialised())
    assert not any(branch[3].gain.any() for branch in model.branches)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in torch.arange(1536).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    assert all(branch[3].gain.abs().mean() > 0.02 for branch in model.branches)
    assert all(not torch.equal(branch[0].gain, torch.ones(8)) for branch in model.branches)


def test_a_norm_without_scale_and_shift_leaves_none():
    layer = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)))[0][0]
    assert layer.bias is None
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


def test_a_layer_that_such_a_norm_feeds_has_a_gain_of_its_own():
    block = PreActivationBlock(8, 8)
    block.norm1, block.norm2 = nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, affine=False)
    convert(nn.Sequential(conv(3, 8), block))
    assert not isinstance(block.conv1.gain, nn.Parameter)  # norm2 follows it, and had none
    assert isinstance(block.conv2.gain, nn.Parameter)


def test_a_gain_that_is_not_to_be_learned_gets_no_gradient():
    """It was a buffer that required a gradient."""
    layer = convert(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4)), affine=False)[0][0]
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert not layer.gain.requires_grad


def test_options_override_what_the_norm_says():
    layer = convert(MODELS["sequential"](), momentum=0.5, centred=True, output_scale=1.0)[0][3]
    assert (layer.momentum, layer.centred, layer.output_scale.tolist()) == (0.5, True, [1.0] * 4)


def test_layers_with_negative_inputs_are_centred():
    def layers():
        return nn.Sequential(
            *(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU()),
            *(conv(8, 8), nn.BatchNorm2d(8)),  # no activation: the next one gets both signs
            *(conv(8, 8), nn.BatchNorm2d(8), nn.SiLU()),
            *(conv(8, 8), nn.BatchNorm2d(8), nn.Hardtanh(0, 6), nn.MaxPool2d(2), nn.Dropout()),
            *(conv(8, 8), nn.BatchNorm2d(8)),
        )

    def signed(example):
        model, _ = convert(layers(), example_input=example)
        return [module.centred for module in model if isinstance(module, BalNormLayer)]

    pixels = torch.rand(2, 3, 8, 8)
    assert signed(None) == [True, False, True, True, False]  # nothing says that pixels are in [0, 1]
    assert signed(pixels) == [False, False, True, True, False]
    assert signed(pixels - 0.5) == [True, False, True, True, False]


def test_a_dry_run_changes_nothing():
    model = pre_activation_network()
    original = copy.deepcopy(model)
    same, report = convert(model, dry_run=True)
    assert same is model
    assert str(model) == str(original)
    assert report == convert(model)[1]


def test_modes_devices_and_dtypes_are_kept():
    model = MODELS["sequential"]().to(torch.float64).eval()
    model[0].train()
    model, _ = convert(model)
    assert [module.training for module in model] == [True, False, False, False, False]
    assert all(tensor.dtype == torch.float64 for tensor in model.state_dict().values() if tensor.is_floating_point())
    assert all(tensor.is_meta for tensor in convert(MODELS["sequential"]().to("meta"))[0].state_dict().values())


def test_converting_draws_no_random_numbers():
    model = MODELS["sequential"]()
    state = torch.get_rng_state()
    convert(model, example_input=torch.ones(1, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)


# --------------------------------------------------------------------------------------------------------------------
# Shared modules, and what cannot be attributed
# --------------------------------------------------------------------------------------------------------------------


def test_a_module_with_two_names_is_replaced_under_both():
    model = nn.Sequential(conv(3, 3), nn.BatchNorm2d(3), nn.ReLU())
    model = nn.ModuleDict({"a": model, "b": model})
    both = Steps(lambda self, x: self.pair["b"](self.pair["a"](x)), pair=model)
    convert(both)
    assert type(both.pair["a"][0]) is BalNormConv2d
    assert both.pair["a"][0] is both.pair["b"][0]


def test_shared_weights_stay_shared():
    first, second = conv(3, 3), conv(3, 3)
    second.weight = first.weight
    model, _ = convert(nn.Sequential(first, nn.BatchNorm2d(3), nn.ReLU(), second, nn.BatchNorm2d(3)))
    assert model[0].weight is model[3].weight
    assert model[0].gain is not model[3].gain


def test_one_norm_behind_two_convolutions_goes_with_both():
    model = Steps(
        lambda self, x: self.norm(self.first(x)) + self.norm(self.second(x)),
        first=conv(3, 4),
        second=conv(3, 4, 1),
        norm=nn.BatchNorm2d(4),
    )
    assert convert(model)[1].balanced == ["first", "second"]
    assert type(model.norm) is nn.Identity


def shared_convolution():
    return Steps(
        lambda self, x: self.norm2(self.conv(self.norm1(self.conv(x)).relu())),
        conv=conv(3, 3),
        norm1=nn.BatchNorm2d(3),
        norm2=nn.BatchNorm2d(3),
    )


def also_used_elsewhere():
    return Steps(lambda self, x: (y := self.conv(x)) + self.norm(y), conv=conv(3, 3), norm=nn.BatchNorm2d(3))


def written_in_between():
    def forward(self, x):
        y = self.conv(x)
        y[:, :1].relu_()
        return self.norm(y)

    return Steps(forward, conv=conv(3, 3), norm=nn.BatchNorm2d(3))


def used_as_a_function():
    return Steps(
        lambda self, x: self.norm(F.conv2d(self.conv(x), self.conv.weight, padding=1)),
        conv=conv(3, 3),
        norm=nn.BatchNorm2d(3),
    )


def with_a_hook():
    layer = conv(3, 3)
    layer.register_forward_hook(lambda *_: None)
    return nn.Sequential(layer, nn.BatchNorm2d(3))


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class OwnConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) + 1


class NamedConv(nn.Conv2d):
    """As torchvision's Conv3DSimple: a constructor and some functions, and nothing that a call would run."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, padding=1)

    @staticmethod
    def downsampling():
        return 2


UNATTRIBUTABLE = {
    "a convolution called twice, with two norms": (shared_convolution, "called more than once"),
    "an output that is used twice": (also_used_elsewhere, "the output of conv is used elsewhere too"),
    "an output that is written to": (
        written_in_between,
        ("the output of conv is used elsewhere too", "it follows relu()"),  # traced, and seen in a run
    ),
    "a weight that is used as such": (used_as_a_function, "it follows conv"),
    "a hook": (with_a_hook, "it has hooks, which would be lost"),
    "an unknown norm": (lambda: nn.Sequential(conv(3, 3), OwnNorm(3)), "a OwnNorm may do something else"),
    "an unknown convolution": (
        lambda: nn.Sequential(OwnConv(3, 3, 1), nn.BatchNorm2d(3)),
        "it follows 0, which stays (not one of torch's own layers: a OwnConv may do something else)",
    ),
    "a norm of the input": (lambda: nn.Sequential(nn.BatchNorm2d(3), conv(3, 3)), "it follows the model's input"),
    "a norm of a layer and of something else": (
        lambda: Steps(lambda self, x: self.norm(self.conv(x)) + self.norm(x), conv=conv(3, 3), norm=nn.BatchNorm2d(3)),
        "it follows the model's input",
    ),
    "a norm before the head": (
        lambda: nn.Sequential(nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 2)),
        "it follows 1",
    ),
    "a kernel of one weight": (
        lambda: nn.Sequential(conv(3, 3, 1, groups=3), nn.BatchNorm2d(3)),
        "one weight per output: there is nothing to balance",
    ),
    "a transposed kernel of one weight": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 3, 1, groups=3), nn.BatchNorm2d(3)),
        "one weight per output: there is nothing to balance",
    ),
    "a norm that is never called": (
        lambda: Steps(lambda self, x: self.conv(x), conv=conv(3, 3), norm=nn.BatchNorm2d(3)),
        "the forward pass does not call it",
    ),
}


@pytest.mark.parametrize("name", UNATTRIBUTABLE)
@pytest.mark.parametrize("traceable", [True, False])
def test_what_cannot_be_attributed_stays_and_the_report_says_why(name, traceable):
    build, reason = UNATTRIBUTABLE[name]
    reason = reason if isinstance(reason, str) else reason[not traceable]
    model = build() if traceable else Untraceable(build())
    original = str(model)
    x = torch.rand(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"convert balances nothing in this \w+: no layer can do the work"):
        model, report = convert(model, example_input=x)
    assert str(model) == original
    reasons = [row.why.replace("inner.", "") for row in report.rows if row.is_norm]
    assert reasons
    assert all(reason in why for why in reasons), reasons
    with pytest.raises(ValueError, match="these norms would stay"):
        convert(model, example_input=x, strict=True)
    assert str(model) == original


def test_subclasses_that_change_nothing_are_converted():
    """Of torchvision's r3d_18, 16 of 20 norms stayed because its convolutions have a class of their own."""

    class NamedNorm(nn.BatchNorm2d):
        pass

    layer = NamedConv(3, 4)
    model, report = convert(nn.Sequential(layer, NamedNorm(4), nn.ReLU()), strict=True)
    assert report.balanced == ["0"]
    assert type(model[0]) is BalNormConv2d
    assert model[0].weight is layer.weight
    assert type(layer) is NamedConv


@may_balance_nothing
def test_a_parametrised_layer_stays():
    layer = nn.utils.parametrizations.weight_norm(conv(3, 3))
    assert not convert(nn.Sequential(layer, nn.BatchNorm2d(3)))[1].balanced


UPSAMPLING = {
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "antialiased": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "area": lambda x: F.interpolate(x, size=(4, 4), mode="area"),
    "nn.Upsample": nn.Upsample(scale_factor=2),
    "nn.Upsample, bicubic": nn.Upsample(scale_factor=2, mode="bicubic"),
    "nn.UpsamplingBilinear2d": nn.UpsamplingBilinear2d(scale_factor=2),
}


@pytest.mark.parametrize("way", UPSAMPLING)
@pytest.mark.parametrize("traceable", [True, False])
def test_norms_beside_upsampling(way, traceable):
    """Tracing kept the norm after F.interpolate and recording removed it; neither knew nn.Upsample."""
    after = nn.Sequential(conv(8, 8), Steps(lambda self, x: self.up(x), up=UPSAMPLING[way]), nn.BatchNorm2d(8))
    before = nn.Sequential(nn.ReLU(), Steps(lambda self, x: self.up(x), up=UPSAMPLING[way]), conv(8, 8))
    layers = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), before, nn.BatchNorm2d(8), nn.ReLU(), after)
    model = layers if traceable else Untraceable(layers)
    _, report = convert(model, example_input=torch.rand(2, 3, 8, 8), strict=True)
    assert len(report.balanced) == 3
    assert layers[2][2].centred == ("bicubic" in way)  # which overshoots


@may_balance_nothing
@pytest.mark.parametrize("reshape", [lambda x: x.flatten(0, 1), lambda x: x.reshape(-1, x.shape[-1])])
def test_a_norm_of_a_flattened_linear_layer(reshape):
    """As in LeViT, where 48 of 52 norms stayed."""

    def forward(self, x):
        x = self.linear(x)
        return self.norm(reshape(x)).reshape_as(x)

    def model():
        return Steps(forward, linear=nn.Linear(4, 16), norm=nn.BatchNorm1d(16))

    converted, report = convert(model(), example_input=torch.rand(2, 5, 4), strict=True)
    assert report.balanced == ["linear"]
    assert type(converted.linear) is BalNormLinear
    assert converted(torch.rand(2, 5, 4)).shape == (2, 5, 16)
    assert not convert(model(), dry_run=True)[1].removed  # how many dimensions there are, nobody knows


@may_balance_nothing
def test_a_norm_of_other_features_is_no_linear_layers():
    model = Steps(
        lambda self, x: self.norm(self.linear(x).transpose(1, 2).flatten(0, 1)),
        linear=nn.Linear(4, 16),
        norm=nn.BatchNorm1d(16),
    )
    assert not convert(model, example_input=torch.rand(2, 16, 4))[1].removed


@may_balance_nothing
def test_an_unknown_activation_after_the_norm_is_not_crossed():
    """x * sigmoid(x) written out: whether the norm can go is not known, so in a pre-activation network it stays."""
    block = Steps(
        lambda self, x: x + self.conv((y := self.norm(x)) * torch.sigmoid(y)), conv=conv(3, 3), norm=nn.BatchNorm2d(3)
    )
    _, report = convert(nn.Sequential(conv(3, 3), nn.ReLU(), block))
    assert not report.balanced
    assert report.rows[-1].why == "it follows 1, and it feeds mul()"


# --------------------------------------------------------------------------------------------------------------------
# Skipping, refusing, reporting
# --------------------------------------------------------------------------------------------------------------------


@may_balance_nothing
def test_skipped_modules_stay_with_their_norm():
    model, report = convert(MODELS["sequential"](), skip="0")
    assert report.balanced == ["3"]
    assert type(model[1]) is nn.BatchNorm2d
    model, report = convert(pre_activation_network(), skip=["[12]", "3.conv?"])
    assert {row.layer for row in report.rows if row.why == "skipped, as asked"} >= {"1.conv1", "2.norm2", "3.conv2"}
    with pytest.raises(ValueError, match="skip='layer9' matches no module"):
        convert(MODELS["sequential"](), skip=["layer9"])
    convert(MODELS["sequential"](), skip="1", strict=True)
    convert(pre_activation_network(last_norm=False), skip="2.shortcut", strict=True)  # its norm stays, as asked too


def test_layers_without_a_norm_are_balanced_if_asked_for():
    """The transposed convolutions of a U-Net stayed what they were, and nothing could be done about it."""

    def network():
        def forward(self, x):
            inside = self.encoder(x)
            upsampled = self.up(F.max_pool2d(inside, 2))
            return self.head(self.decoder(torch.cat([upsampled, inside], 1)))

        encoder = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU())
        decoder = nn.Sequential(conv(12, 8), nn.BatchNorm2d(8), nn.ReLU())
        up = nn.Sequential(nn.ConvTranspose2d(8, 4, 2, stride=2))
        return Steps(forward, encoder=encoder, up=up, decoder=decoder, head=conv(8, 2, 1))

    x = torch.rand(2, 3, 8, 8)
    assert convert(network())[1].kept == ["up.0", "head"]
    model = network()
    weight, bias = model.up[0].weight, model.up[0].bias.detach().clone()
    model, report = convert(model, include="up", example_input=x, mass="position")
    assert report.kept == ["head"]
    assert "up.0       ConvTranspose2d  balanced  included, as asked" in str(report)
    assert model.up[0].weight is weight
    assert torch.equal(model.up[0].bias, bias)
    assert (type(model.up[0]), model.up[0].mass) == (BalNormConvTranspose2d, "position")
    loss(model, x).backward()
    assert model.up[0].gain.grad.isfinite().all()

    _, report = convert(network(), include=["*"], skip="head", strict=True)
    assert report.kept == ["head"]  # skip wins
    assert [row.why for row in report.rows if row.layer == "decoder.0"] == [
        "decoder.1 follows it, its input can be negative"
    ]
    with pytest.raises(ValueError, match="include='lateral' matches no module"):
        convert(network(), include="lateral")
    with pytest.raises(ValueError, match=r"include='encoder\.2' matches no convolution and no linear layer"):
        convert(network(), include=["up", "encoder.2"])


def test_linear_layers_are_included_too():
    model, report = convert(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), include="1", mass="position", strict=True)
    assert type(model[1]) is BalNormLinear
    assert report.balanced == ["1"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_converting_what_has_no_batch_norm_warns(dry_run):
    """It passed in silence, and people trained what they took for a BalNorm network."""
    model = nn.Sequential(conv(3, 8), nn.GroupNorm(2, 8), nn.ReLU())
    with pytest.warns(UserWarning, match="convert balances nothing in this Sequential: it has no BatchNorm") as caught:
        convert(model, dry_run=dry_run)
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="strict=True, and convert balances nothing"):
        convert(model, strict=True, dry_run=dry_run)


def test_what_was_asked_for_or_done_before_is_no_reason_to_warn():
    model = MODELS["sequential"]()
    convert(model, skip="*", strict=True)
    convert(model, strict=True)
    convert(model, strict=True)
    convert(model, strict=True, skip="*")


def test_taking_what_convert_returns_for_the_model():
    """It ended in "'tuple' object is not callable"."""
    model = convert(MODELS["sequential"]())
    for mistake in (lambda: model(torch.rand(1, 3, 8, 8)), lambda: model.train().eval(), lambda: fold(model)):
        with pytest.raises((TypeError, AttributeError), match=r"write model, report = convert\(model\)"):
            mistake()
    assert not hasattr(model, "parameters")
    assert isinstance(model, tuple)
    assert pickle.loads(pickle.dumps(model))[1] == copy.deepcopy(model)[1] == model[1]


def test_bad_options_fail_before_anything_changes():
    model = MODELS["sequential"]()
    with pytest.raises(ValueError, match="mass must be one of 'channel', 'position', got 'median'"):
        convert(model, mass="median")
    with pytest.raises(TypeError, match="epsilon"):
        convert(model, epsilon=1e-5)
    assert type(model[0]) is nn.Conv2d


def test_models_that_cannot_be_traced_need_an_example():
    with pytest.raises(ValueError, match=r"cannot be traced symbolically .* give example_input"):
        convert(Untraceable(MODELS["sequential"]()))


def test_wrapped_models_are_refused():
    model = MODELS["sequential"]()
    with pytest.raises(ValueError, match=r"the model is wrapped in DataParallel.*its \.module"):
        convert(nn.DataParallel(model))
    with pytest.raises(ValueError, match="compile it afterwards"):
        convert(torch.compile(model, backend="eager"))


def test_recording_leaves_the_model_as_it_was():
    model = Untraceable(nn.Sequential(MODELS["sequential"](), nn.Dropout(), OwnNorm(4)))
    model.inner[0][0].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    data_flow(model, (torch.rand(2, 3, 8, 8),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError):
        data_flow(model, (torch.rand(2, 5, 8, 8),))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_report_prints_as_a_table():
    _, report = convert(nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 2)))
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "kind", "action", "why"]
    assert len(lines) == 2 + 3 + 2
    assert lines[-1] == "1 of 2 layers balanced, 1 of 1 BatchNorms removed"
    assert (report.balanced, report.removed, report.kept) == (["0"], ["1"], ["3"])


# --------------------------------------------------------------------------------------------------------------------
# InstanceNorm and GroupNorm
# --------------------------------------------------------------------------------------------------------------------


def monai_block(layer, norm):
    """A convolution, and MONAI's default order after it: norm, dropout, activation."""
    return nn.Sequential(nn.ReLU(), layer, nn.Sequential(norm, nn.Dropout(0.1), nn.PReLU()))


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(4, 6, 3), nn.InstanceNorm1d(6), (3, 4, 9)),
        (nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(6, affine=True), (3, 4, 6, 6)),
        (nn.Conv3d(4, 6, 2), nn.InstanceNorm3d(6, track_running_stats=True, momentum=0.3), (3, 4, 4, 4, 4)),
        (nn.ConvTranspose3d(4, 6, 2, 2), nn.InstanceNorm3d(6), (3, 4, 3, 3, 3)),
        (nn.Conv2d(4, 6, 3, bias=False), nn.GroupNorm(2, 6), (3, 4, 6, 6)),
        (nn.Conv3d(4, 6, 2), nn.GroupNorm(6, 6, affine=False), (3, 4, 4, 4, 4)),
        (nn.ConvTranspose2d(4, 6, 2), nn.GroupNorm(1, 6), (3, 4, 6, 6)),
        (nn.Linear(4, 6), nn.GroupNorm(2, 6), (3, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("wrap", [nn.Sequential, Untraceable])
def test_instance_and_group_norms_are_replaced_if_asked_for(layer, norm, shape, wrap):
    model, x = wrap(copy.deepcopy(monai_block(layer, norm))), torch.rand(shape)
    kind = "group" if isinstance(norm, nn.GroupNorm) else "instance"
    model, report = convert(model, example_input=x, norms=kind, strict=True)
    (balanced,) = [module for module in model.modules() if isinstance(module, BalNormLayer)]
    assert report.inexact == (kind,)
    assert str(report).endswith(f"removed\nnot exact: each {kind.title()}Norm normalised every sample by itself")
    assert balanced.running_mass is not None
    assert balanced.momentum == getattr(norm, "momentum", 0.1)
    loss(model, x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    folded = fold(model.eval())
    torch.testing.assert_close(folded(x), model(x))
    torch.testing.assert_close(model(x)[:1], model(x[:1]))  # no sample depends on others


def test_scale_and_shift_of_an_instance_or_group_norm_are_taken_over():
    """A network may start with some of them at 0, as BatchNorm networks do."""
    for norm in (nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        model, _ = convert(nn.Sequential(nn.Conv2d(3, 8, 3), norm), norms=("instance", "group"))
        assert torch.equal(model[0].gain, norm.weight)
        assert torch.equal(model[0].bias, norm.bias)


def group_norms(model):
    """The network with a GroupNorm in the place of every BatchNorm."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(child.num_features // 4, child.num_features))
    return model


@pytest.mark.parametrize("name", ["post-activation", "pre-activation"])
@pytest.mark.parametrize("traceable", [True, False])
def test_a_network_of_group_norms_is_converted_like_one_of_batch_norms(name, traceable):
    x = torch.rand(2, 3, 8, 8)
    model, alike = MODELS[name](), group_norms(MODELS[name]())
    _, report = convert(model if traceable else Untraceable(model), example_input=x)
    _, other = convert(alike if traceable else Untraceable(alike), example_input=x, norms=["group"])
    assert report.balanced == other.balanced
    assert report.removed == other.removed


def test_group_norms_stay_unless_asked_for():
    """Nothing shows whether they are trained, and the outputs would change."""
    model = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8), nn.GroupNorm(2, 8), conv(8, 4))
    model, report = convert(model, strict=True)
    assert type(model[4]) is nn.GroupNorm
    assert report.balanced == ["0"]
    assert {row.layer: row.why for row in report.rows if row.action == "kept"} == {
        "3": "its 4 stays",
        "4": "stays unless norms=... names its kind",
        "5": "no BatchNorm follows or feeds it",
    }
    assert str(report).endswith(
        "1 of 3 layers balanced, 1 of 1 BatchNorms removed, 0 of 1 GroupNorms removed\n"
        "norms=('batch', 'group') replaces the GroupNorms too, to train the network from scratch"
    )
    with pytest.warns(
        UserWarning, match=r"it has no BatchNorm, and norms=\('batch', 'group'\) replaces the GroupNorms"
    ):
        convert(nn.Sequential(conv(3, 8), nn.GroupNorm(2, 8)))
    assert convert(model, include="3")[1].balanced == ["3"]


def test_a_trained_network_keeps_its_group_norms_and_its_outputs():
    model = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 8), nn.GroupNorm(2, 8))
    x = torch.rand(8, 3, 6, 6)
    model(x)
    _, report = convert(copy.deepcopy(model.eval()), example_input=x)
    assert report.proof.difference < 1e-5
    _, report = convert(model, example_input=x, norms=("batch", "group"))
    assert (report.proof, report.inexact) == (None, ("group",))


def test_an_instance_norm_with_statistics_is_a_batch_norm_in_eval_mode():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True, track_running_stats=True), nn.ReLU())
    x = torch.rand(16, 3, 6, 6)
    model(x)
    with pytest.raises(ValueError, match="is trained: give example_input"):
        convert(model, norms="instance")
    expected = model.eval()(x).detach()
    model, report = convert(model, example_input=x, norms="instance")
    assert report.inexact == ()
    assert report.proof.difference < 1e-5
    torch.testing.assert_close(model(x).detach(), expected)


def test_what_has_no_statistics_cannot_be_converted_as_trained():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))
    with pytest.raises(ValueError, match="trained=True, and no layer can compute what the GroupNorms"):
        convert(model, norms="group", trained=True)
    assert type(model[1]) is nn.GroupNorm


@pytest.mark.parametrize("wrong", ["layer", ("batch", "layer"), ""])
def test_other_kinds_of_norms_are_refused(wrong):
    with pytest.raises(ValueError, match=r"norms must be of 'batch', 'instance', 'group', got '(layer)?'"):
        convert(MODELS["sequential"](), norms=wrong)


# --------------------------------------------------------------------------------------------------------------------
# What once went wrong
# --------------------------------------------------------------------------------------------------------------------


class InAList(nn.Module):
    """Registers its layers, and runs them from a plain list of tuples."""

    def __init__(self):
        super().__init__()
        self.pairs, self.by_name = [], {}
        for i in range(2):
            pair = (conv(3, 3), nn.BatchNorm2d(3))
            self.add_module(f"conv{i}", pair[0])
            self.add_module(f"norm{i}", pair[1])
            self.pairs.append(pair)
            self.by_name[i] = pair[0]

    def forward(self, x):
        for layer, norm in self.pairs:
            x = norm(layer(x)).relu()
        return x


def test_modules_in_plain_lists_are_replaced_there_too():
    """They were reported as balanced while forward went on using the old ones."""
    model, report = convert(InAList())
    assert report.balanced == ["conv0", "conv1"]
    assert model.pairs[1][0] is model.conv1 is model.by_name[1]
    assert type(model.pairs[0][1]) is nn.Identity
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    assert model.conv0.num_batches_tracked == 1
    assert model.conv0.gain.grad is not None
    assert type(fold(model, inplace=True).pairs[0][0]) is nn.Conv2d


class OwnLayer(nn.Module):
    """A convolution that is not a module of torch's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, x):
        return F.conv2d(x, self.weight, padding=1)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(conv(3, 3), nn.ReLU(), OwnLayer(), nn.BatchNorm2d(3), nn.ReLU(), conv(3, 3)),
        Steps(lambda self, x: self.conv(self.norm(x.float())), conv=conv(3, 3), norm=nn.BatchNorm2d(3)),
        Steps(lambda self, x: self.conv(self.norm(x.flip(1) + 1).relu()), conv=conv(3, 3), norm=nn.BatchNorm2d(3)),
    ],
    ids=["after a layer that is not torch's", "of a converted input", "of a changed input"],
)
@may_balance_nothing
def test_a_norm_is_not_taken_from_something_else(model):
    """Such norms went away because of the convolution that they feed, and left what they normalised without."""
    assert not convert(model)[1].removed
    with torch.no_grad():
        assert not convert(Untraceable(model), example_input=torch.rand(2, 3, 8, 8))[1].removed


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = conv(3, 3), nn.BatchNorm2d(3)

    def forward(self, x, context=None):
        y = self.conv(x)
        return (self.norm(y), y) if context is None else self.norm(y) * context


@may_balance_nothing
def test_optional_arguments_are_at_their_defaults():
    """A symbol is not None: tracing took the branch of a call that nobody makes."""
    assert not convert(Optional())[1].removed
    assert convert(Optional(), example_input=(torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8)))[1].removed


@pytest.mark.skipif("bias" not in inspect.signature(nn.BatchNorm2d).parameters, reason="BatchNorm2d(bias=) is newer")
def test_a_norm_with_a_scale_and_no_shift():
    layer = convert(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4, bias=False)))[0][0]
    assert layer.bias is None
    assert isinstance(layer.gain, nn.Parameter)


class WithState(nn.Module):
    """A forward pass that leaves traces."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.count = conv(3, 3), nn.BatchNorm2d(3), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.features = self.conv(x + torch.rand(()))
        self.count += 1
        self.seen += 1
        return self.norm(self.features)


@pytest.mark.parametrize("wrap", [nn.Identity, Untraceable])
def test_looking_at_a_model_leaves_no_traces(wrap):
    """A stored symbol made the model unpicklable; counters and random numbers moved on."""
    inner = WithState()
    model = inner if wrap is nn.Identity else Untraceable(inner)
    state = torch.get_rng_state()
    convert(model, example_input=torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), dry_run=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert (inner.count, inner.seen.item()) == (0, 0.0)
    assert not hasattr(inner, "features")
    pickle.dumps(model)


class Output:
    def __init__(self, y, raw):
        self.y, self.raw = y, raw


@may_balance_nothing
def test_outputs_inside_objects_count():
    """The raw output leaves the model inside an object; its norm was removed all the same."""
    model = Steps(lambda self, x: Output(self.norm(y := self.conv(x)), y), conv=conv(3, 3), norm=nn.BatchNorm2d(3))
    assert not convert(model, example_input=torch.rand(2, 3, 8, 8))[1].removed


def test_an_example_without_samples_is_as_good_as_any():
    """All tensors are then at the same address."""

    def forward(self, x):
        first, second = self.conv1(x), self.conv2(x)
        return self.norm1(first) + self.norm2(second)

    norms = {"norm1": nn.BatchNorm2d(3), "norm2": nn.BatchNorm2d(3)}
    model = Untraceable(Steps(forward, conv1=conv(3, 3), conv2=conv(3, 3), **norms))
    none, some = (convert(model, example_input=torch.rand(n, 3, 8, 8), dry_run=True)[1] for n in (0, 2))
    assert none == some
    assert len(none.removed) == 2


@may_balance_nothing
def test_a_positional_true_is_not_in_place():
    """mean((2, 3), True) keeps a dimension, and does not write into its input."""
    model = Steps(
        lambda self, x: self.last(self.norm(y := self.conv(x)).relu()) + y.mean((2, 3), True) * 0,
        conv=conv(3, 3),
        norm=nn.BatchNorm2d(3),
        last=conv(3, 3),
    )
    assert not convert(model)[1].removed


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.clamp(max=6),
        lambda x: x.clamp(-0.5, 6),
        nn.Hardtanh(-0.5, 6),
        lambda x: F.pad(x.relu(), (1, 1), value=-1.0),
        nn.Sequential(nn.ReLU(), nn.ConstantPad2d(1, -1.0)),
        lambda x: x.relu() + torch.randn(x.shape),
        lambda x: torch.cat([x.relu(), torch.linspace(-1, 1, x.size(3)).expand(x.size(0), 1, x.size(2), -1)], 1)[:, 1:],
    ],
    ids=[
        "clamped above",
        "clamped below zero",
        "by a module",
        "padded below",
        "padded by a module",
        "with noise",
        "with coordinates",
    ],
)
@pytest.mark.parametrize("traceable", [True, False])
def test_inputs_that_can_be_negative_are_found(between, traceable):
    model = Steps(
        lambda self, x: self.norm2(self.conv2(self.between(self.norm1(self.conv1(x))))),
        conv1=conv(3, 3),
        norm1=nn.BatchNorm2d(3),
        conv2=conv(3, 3),
        norm2=nn.BatchNorm2d(3),
        between=between,
    )
    whole = model if traceable else Untraceable(model)
    convert(whole, example_input=torch.rand(2, 3, 8, 8))
    assert model.conv2.centred
    assert not model.conv1.centred


@pytest.mark.parametrize("traceable", [True, False])
def test_what_was_written_in_place_by_a_method_is_not_negative(traceable):
    def forward(self, x):
        y = self.norm1(self.conv1(x))
        y.relu_()
        return self.norm2(self.conv2(y))

    layers = {"conv1": conv(3, 3), "norm1": nn.BatchNorm2d(3), "conv2": conv(3, 3), "norm2": nn.BatchNorm2d(3)}
    model = Steps(forward, **layers)
    convert(model if traceable else Untraceable(model), example_input=torch.rand(2, 3, 8, 8))
    assert not model.conv2.centred


class ConvBatchNormReLU(nn.Sequential):
    """A block, and not a norm, whatever its name says."""


def test_a_block_named_after_its_norm_is_no_norm():
    _, report = convert(nn.Sequential(ConvBatchNormReLU(conv(3, 3), nn.BatchNorm2d(3), nn.ReLU())), strict=True)
    assert [row.layer for row in report.rows] == ["0.0", "0.1"]


@may_balance_nothing
def test_a_norm_over_another_dimension_is_no_linear_layers():
    """BatchNorm1d of (N, 16, 16) goes over the second dimension, the linear layer over the last."""
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16))
    assert not convert(model)[1].removed
    assert not convert(model, example_input=torch.rand(2, 16, 4))[1].removed
    assert convert(model, example_input=torch.rand(2, 4))[1].removed


@may_balance_nothing
def test_reading_the_dtype_of_a_weight_is_no_use_of_it():
    for build in (lambda m: m, Untraceable):
        model = Steps(
            lambda self, x: self.norm(self.conv(x.to(self.conv.weight.dtype))), conv=conv(3, 3), norm=nn.BatchNorm2d(3)
        )
        assert convert(build(model), example_input=torch.rand(2, 3, 8, 8))[1].balanced
    tied = Steps(
        lambda self, x: F.conv2d(self.norm(self.conv(x)), self.tied, padding=1), conv=conv(3, 3), norm=nn.BatchNorm2d(3)
    )
    tied.tied = tied.conv.weight
    assert not convert(tied)[1].balanced


def test_a_norm_that_stays_with_a_skipped_layer_is_as_asked():
    _, report = convert(nn.Sequential(conv(3, 3), nn.BatchNorm2d(3)), skip="0", strict=True)
    assert report.kept == ["0", "1"]


def test_an_auxiliary_output_is_not_balanced():
    class Supervised(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head, self.norm, self.last = conv(3, 3), conv(3, 3), nn.BatchNorm2d(3), conv(3, 3)

        def forward(self, x):
            x = self.stem(x)
            logits = self.head(x)
            return logits, self.last(F.relu(self.norm(x + logits)))

    model, _ = convert(Supervised())
    assert type(model.head) is nn.Conv2d
    assert type(model.last) is BalNormConv2d


def test_synchronisation_can_be_switched_off():
    norm = nn.SyncBatchNorm(3)
    norm.process_group = "a group"
    layer = convert(nn.Sequential(conv(3, 3), norm), sync_stats=False)[0][0]
    assert (layer.sync_stats, layer.process_group) == (False, None)


@may_balance_nothing
def test_a_replaced_forward_stays():
    model = nn.Sequential(conv(3, 3), nn.BatchNorm2d(3))
    model[0].forward = lambda x: x
    assert not convert(model)[1].balanced


def test_an_error_inside_a_layer_that_the_model_survives():
    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            self.conv(x[:, :1])
        return self.norm(self.other(x))

    model = Untraceable(Steps(forward, conv=conv(3, 3), other=conv(3, 3), norm=nn.BatchNorm2d(3)))
    assert convert(model, example_input=torch.rand(2, 3, 8, 8))[1].balanced == ["inner.other"]


@pytest.mark.parametrize("wrap", [nn.Identity, Untraceable])
def test_a_list_is_one_argument_and_a_tuple_is_several(wrap):
    """Detection models take a list of images, which was unpacked."""
    images, norms = [torch.rand(3, 8, 8), torch.rand(3, 8, 8)], {"conv": conv(3, 3), "norm": nn.BatchNorm2d(3)}
    stacked = Steps(lambda self, images: self.norm(self.conv(torch.stack(list(images)[:2]))), **norms)
    if wrap is Untraceable:
        stacked.run = lambda self, images: self.norm(self.conv(torch.stack([it for it in images if it.sum() > 0])))
    assert convert(stacked, example_input=images)[1].balanced == ["conv"]
    assert convert(Optional(), example_input=(torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8)))[1].removed


@pytest.mark.parametrize("operation", [convert, fold])
def test_what_is_no_model_is_refused(operation):
    """It ended in "'str' object has no attribute 'named_modules'"."""
    expected = rf"{operation.__name__} takes a model, which is a torch.nn.Module, got "
    for wrong, name in (("resnet18", "'resnet18'"), ({}, "a dict"), (None, "a NoneType"), (nn.Conv2d, "a type")):
        with pytest.raises(TypeError, match=expected + name):
            operation(wrong)


def test_examples_of_other_kinds_are_refused():
    with pytest.raises(
        TypeError, match=r"must be the model's argument .*, a tuple of arguments or an iterable of batches, got a dict"
    ):
        convert(MODELS["sequential"](), example_input={"x": torch.rand(1, 3, 8, 8)})
    with pytest.raises(ValueError, match="0 does not know its shape yet: run a batch through the model first"):
        convert(nn.Sequential(nn.LazyConv2d(3, 3), nn.BatchNorm2d(3)))
