"""What used to go wrong in silence, in other people's hands: each of these is a warning, or works now."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import balnorm.functional as BF
from balnorm import (
    BalNormConv1d,
    BalNormConv2d,
    BalNormLinear,
    BalNormWarning,
    _checks,
    convert,
    fold,
    update_stats,
)
from cases import CASES

# Inputs of any sign -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("change", [lambda x: x, torch.abs, torch.relu, F.silu, lambda x: -x.abs()])
def test_no_input_is_a_trap(change, centred):
    """Where inputs cancelled, outputs exploded. (And a warning would be an error.)"""
    layer = BalNormConv2d(16, 8, 3, centred=centred)
    x = change(torch.randn(8, 16, 8, 8))
    assert 0.1 < layer(x).std() < 3
    layer.eval()
    assert 0.1 < layer(x).std() < 3
    layer.state_dict()
    fold(nn.Sequential(layer))


def test_the_option_for_signed_inputs_says_what_took_its_place():
    with pytest.raises(TypeError, match=r"signed_input.*: any input will do now; .* centred=True"):
        BalNormConv2d(3, 4, 3, signed_input=True)


# Statistics that were never taken -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [lambda model, x: model.eval()(x), lambda model, x: fold(model)])
def test_statistics_that_were_never_taken_are_noticed(use):
    model, _ = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), example_input=torch.rand(1, 3, 5, 5))
    with pytest.warns(BalNormWarning, match=r"no statistics yet: .*update_stats\(loader, model\)"):
        use(model, torch.rand(2, 3, 5, 5))


class Module(nn.Module):
    """As a LightningModule, whose steps are no calls of a module; its network is a part of a wrapper."""

    def __init__(self, network):
        super().__init__()
        self.network = nn.Sequential(network)

    def forward(self, x):
        return self.network(x)

    def validation_step(self, x):
        return self(x).sum()


def warnings_of(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(each.message) for each in caught if each.category is BalNormWarning]


def several_layers():
    return nn.Sequential(BalNormConv2d(3, 4, 3), nn.Sequential(BalNormConv2d(4, 4, 1)), BalNormConv2d(4, 2, 1))


@pytest.mark.parametrize("use", [lambda model, x: model.eval().validation_step(x), lambda model, x: fold(model)])
def test_a_model_without_statistics_warns_once(use):
    """In Lightning's sanity check there were as many warnings as layers, and none said that training would follow."""
    model, x = Module(several_layers()), torch.rand(2, 3, 5, 5)
    (text,) = warnings_of(lambda: use(model, x))
    assert text.startswith("all 3 balanced layers of this Module (network.0.0, ...) have no statistics yet: ")
    assert "harmless if training follows, e.g. after Lightning's sanity check" in text
    assert not warnings_of(lambda: use(model, x))
    assert len(warnings_of(lambda: use(Module(several_layers()), x))) == 1  # another model, another warning


def test_the_layers_without_statistics_are_counted_and_named():
    model, x = several_layers(), torch.rand(2, 3, 5, 5)
    model(x)
    model[1][0].reset_running_stats()
    (text,) = warnings_of(lambda: model.eval()(x))
    assert text.startswith("1 of 3 balanced layers of this Sequential (1.0) have no statistics yet: ")
    (text,) = warnings_of(lambda: BalNormConv2d(3, 4, 1).eval()(x))
    assert text.startswith("BalNormConv2d(3, 4, kernel_size=(1, 1), stride=(1, 1)) has no statistics yet: ")


def test_a_layer_that_a_part_of_the_model_warned_of_is_silent_later():
    model, x = several_layers().eval(), torch.rand(2, 3, 5, 5)
    assert len(warnings_of(lambda: model[0](x))) == 1
    (text,) = warnings_of(lambda: model(x))
    assert text.startswith("all 3 balanced layers")
    assert not warnings_of(lambda: (model(x), fold(model), model[1](torch.rand(2, 4, 5, 5))))


def test_statistics_that_were_taken_are_enough():
    model = nn.Sequential(BalNormConv2d(3, 4, 3))
    update_stats([torch.rand(2, 3, 5, 5)], model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fold(model.eval())
        model(torch.rand(2, 3, 5, 5))


def test_statistics_are_looked_for_once(monkeypatch):
    """To look at values is to wait for the device. New statistics are looked at anew."""
    layer, looks = BalNormConv2d(3, 4, 3), []
    monkeypatch.setattr(_checks, "has_no_statistics", looks.append)

    def evaluate():
        layer.eval()
        for _ in range(3):
            layer(torch.rand(2, 3, 8, 8))
        return len(looks)

    for _ in range(5):
        layer(torch.rand(2, 3, 8, 8))
        layer.state_dict()
    assert len(looks) == 0
    assert evaluate() == 1
    update_stats([torch.rand(2, 3, 8, 8)] * 2, layer)
    layer.train()(torch.rand(2, 3, 8, 8))
    seen = evaluate()
    layer.load_state_dict(layer.state_dict())
    assert evaluate() == seen + 1
    layer.reset_running_stats()
    assert evaluate() == seen + 2


@pytest.mark.filterwarnings("error")
def test_replicas_of_data_parallel_are_not_looked_at():
    """They are new at every step, so each of them would look for ever."""
    layer = BalNormConv2d(3, 4, 3).eval()
    layer._is_replica = True  # as nn.DataParallel does
    layer(torch.rand(2, 3, 8, 8))  # and a warning would be an error


@pytest.mark.filterwarnings("error")
def test_the_warning_can_be_switched_off():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BalNormWarning)
        BalNormConv2d(3, 4, 3).eval()(torch.rand(2, 3, 8, 8))


def average(ema, model, decay):
    """As timm's ModelEmaV2 does: whatever is in the state dict, integers too, which stay 0."""
    with torch.no_grad():
        for mine, new in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
            mine.copy_(decay * mine + (1 - decay) * new)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("options", [{}, {"one_pass": False, "centred": True}])
@pytest.mark.parametrize("use", [lambda model, x: model.eval()(x), lambda model, x: fold(model)])
def test_averaged_statistics_are_statistics_though_nobody_counted(use, options):
    model = nn.Sequential(BalNormConv2d(3, 4, 3, **options), nn.ReLU(), BalNormConv2d(4, 4, 3, **options))
    ema = copy.deepcopy(model).eval()
    for _ in range(5):
        model(torch.rand(4, 3, 8, 8))
        average(ema, model, 0.9999)
    assert ema[0].num_batches_tracked == 0
    use(ema, torch.rand(2, 3, 8, 8))
    other = copy.deepcopy(model)
    other.load_state_dict(ema.state_dict())
    use(other, torch.rand(2, 3, 8, 8))


def statistics_of_training(model):
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.uniform_(norm.bias, -1.0, 1.0)
    return model.double().eval()


# Activations whose outputs are far from 0 ----------------------------------------------------------------------------


def train(model, images, labels, steps=100):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        batch = torch.randint(0, 1500, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return model.eval()


def accuracy(model, images, labels):
    with torch.no_grad():
        return (model.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()


def activated(activation, **options):
    layers = [BalNormConv2d(1, 16, 3, padding=1, **options), activation()]
    for _ in range(3):
        layers += [BalNormConv2d(16, 16, 3, padding=1, **options), activation()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def test_centred_sigmoid_networks_train(digits):
    results = []
    for centred in (False, True):
        torch.manual_seed(0)
        results.append(accuracy(train(activated(nn.Sigmoid, centred=centred), *digits), *digits))
    assert results[0] < 0.3
    assert results[1] > 0.6


# Checkpoints of other networks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["batchnorm", "folded"])
def test_a_checkpoint_of_plain_layers_names_the_way_that_works(state):
    plain = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4))
    model, _ = convert(copy.deepcopy(plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BalNormWarning)  # no statistics yet
        saved = (plain if state == "batchnorm" else fold(model)).state_dict()
    way = r"^0 was given the weight of a layer that is not balanced.*balnorm.convert\(model, example_input=images\)"
    with pytest.warns(BalNormWarning, match=way) as caught, pytest.raises(RuntimeError, match=r"0\.gain"):
        model.load_state_dict(saved)
    assert len(caught) == 1  # for all layers together
    model, _ = convert(copy.deepcopy(plain))
    with pytest.warns(BalNormWarning, match=way):
        assert model.load_state_dict(saved, strict=False).missing_keys  # who says so gets what fits


def test_a_damaged_checkpoint_of_balanced_layers_is_not_taken_for_another_networks():
    model = nn.Sequential(BalNormConv2d(3, 4, 3))
    saved = model.state_dict()
    del saved["0.running_mass"]
    with pytest.raises(RuntimeError, match="running_mass"):
        model.load_state_dict(saved)  # and a warning would be an error


FORMS = [
    ({"one_pass": False}, {}),
    ({}, {"one_pass": False}),
    ({"shift": False}, {}),
    ({"centred": True}, {"centred": False}),
]


@pytest.mark.parametrize("averaged", [1.0, 0.9999])
@pytest.mark.parametrize(("saved", "loaded"), FORMS, ids=str)
def test_a_checkpoint_of_other_options_is_noticed(saved, loaded, averaged):
    """It loaded without a word, and the outputs were others. Averages of weights make a 1 a 0.9999."""

    def network(options):
        return nn.ModuleDict({"trunk": nn.Sequential(nn.ReLU(), BalNormConv2d(3, 4, 3, **options))})

    state, layer = network(saved).state_dict(), network(loaded)["trunk"][1]
    state["trunk.1.form"] *= averaged
    (name,) = {**saved, **loaded}
    theirs, ours = (getattr(network(options)["trunk"][1], name) for options in (saved, loaded))
    ours, theirs = (True if value == "auto" else value for value in (ours, theirs))
    said = rf"trunk\.1 has {name}={ours}, and the loaded state was trained with {name}={theirs}: "
    model = network(loaded)
    with pytest.warns(BalNormWarning, match=said) as caught:
        model.load_state_dict(state)
    assert len(caught) == 1
    assert torch.equal(model["trunk"][1].form, layer.form)  # which says what the layer does
    network(saved).load_state_dict(state)  # and a warning would be an error


def test_a_checkpoint_of_the_other_mass_is_noticed():
    state = BalNormConv2d(3, 4, 3, mass="position").state_dict()
    with (
        pytest.warns(BalNormWarning, match="has mass='channel', and the loaded state was trained with mass='position'"),
        pytest.raises(RuntimeError, match="size mismatch for running_mass"),
    ):
        BalNormConv2d(3, 4, 3).load_state_dict(state)
    pointwise = BalNormConv2d(3, 4, 1, mass="position").state_dict()
    BalNormConv2d(3, 4, 1).load_state_dict(pointwise)  # where both masses are the same


@pytest.mark.parametrize("change", [{"one_pass": False}, {"shift": False}, {"centred": True}], ids=str)
def test_options_that_are_set_later_travel_too(change):
    layer = BalNormConv2d(3, 4, 3)
    ((name, value),) = change.items()
    setattr(layer, name, value)
    with pytest.warns(BalNormWarning, match=f"trained with {name}={value}"):
        BalNormConv2d(3, 4, 3).load_state_dict(layer.state_dict())


# Checkpoints of balnorm 0.2 -----------------------------------------------------------------------------------------


def effective_weight_of_version_2(weight, mass, gain, scale, one_pass, groups, transposed):
    """Kernel by kernel, from the equations of that version: every kernel is shifted, and there is no offset."""
    taps = weight.shape[2:]
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    inputs = weight.shape[0] // groups if transposed else weight.shape[1]
    effective = torch.zeros_like(weight)
    for d in range(outputs):
        group = d // (outputs // groups)
        part = slice(group * inputs, (group + 1) * inputs)
        index = (part, d % (outputs // groups)) if transposed else (d, slice(None))
        w, m = weight[index], mass[0, part].expand(inputs, *taps)
        shifted = w - (m * w).sum() / m.sum()
        positive = w > 0 if one_pass else shifted > 0
        effective[index] = gain[d] * scale * shifted / (m * shifted * positive).sum()
    return effective


OLD = {name: (case.layer, case.arguments, case.input_shape) for name, case in CASES.items()}
OLD["depthwise"] = (BalNormConv2d, {"in_channels": 4, "out_channels": 8, "kernel_size": 3, "groups": 4}, (2, 4, 6, 6))
OLD["one channel"] = (BalNormConv1d, {"in_channels": 1, "out_channels": 4, "kernel_size": 5}, (2, 1, 9))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("mass", ["channel", "position"])
@pytest.mark.parametrize("name", OLD)
def test_a_checkpoint_of_version_2_evaluates_as_it_did(name, mass, one_pass):
    kind, arguments, input_shape = OLD[name]
    options = {"one_pass": one_pass} if kind is BalNormLinear else {"one_pass": one_pass, "mass": mass}
    layer = kind(**arguments, **options, dtype=torch.float64)
    state = {name: value.clone() for name, value in layer.state_dict().items() if name not in ("running_mean", "form")}
    for vector in ("gain", "bias", "running_mass"):
        state[vector].uniform_(0.5, 2.0)
    state["output_scale"] = torch.tensor(1.7, dtype=torch.float64)
    state["num_batches_tracked"] += 30
    effective = effective_weight_of_version_2(
        state["weight"], state["running_mass"], state["gain"], 1.7, one_pass, layer.groups, layer.transposed
    )
    plain = layer.plain(**layer._shared_arguments(layer), dtype=torch.float64)
    plain.load_state_dict({"weight": effective, "bias": state["bias"]})
    layer.load_state_dict(state)
    x = torch.randn(input_shape, dtype=torch.float64)
    layer.eval()
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.fuse()(x), plain(x), rtol=1e-12, atol=1e-12)
    again = kind(**arguments, **options, dtype=torch.float64)
    if again.shifts:  # what is saved now is of today's form
        again.load_state_dict(layer.state_dict())
    else:
        with pytest.warns(BalNormWarning, match="trained with shift=True"):
            again.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("given", [{"shift": False}, {"centred": True}], ids=str)
def test_a_checkpoint_of_version_2_is_not_loaded_into_other_options_in_silence(given):
    ((name, value),) = given.items()
    state = BalNormConv2d(3, 4, 3).state_dict()
    del state["running_mean"], state["form"]
    state["output_scale"] = state["output_scale"][0]
    with pytest.warns(BalNormWarning, match=f"has {name}={value}, .* trained with {name}={not value}"):
        BalNormConv2d(3, 4, 3, **given).load_state_dict(state)


def test_a_checkpoint_of_version_2_without_running_statistics_loads():
    options = {"groups": 4, "track_running_stats": False}
    layer, x = BalNormConv2d(4, 4, 3, **options), torch.rand(2, 4, 6, 6)
    state = layer.state_dict()
    del state["form"]
    state["output_scale"] = state["output_scale"][0]
    layer.load_state_dict(state)
    expected = BF.bal_conv2d(x, layer.weight, gain=layer.gain * layer.output_scale, groups=4, shift=True)
    torch.testing.assert_close(layer(x), expected)


# Quantisation of a model that was not folded ------------------------------------------------------------------------

quantised = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min")


def quantisable():
    model = nn.Sequential(BalNormConv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), BalNormLinear(288, 5))
    for _ in range(4):
        model(torch.rand(16, 3, 8, 8))
    return model.eval()


@quantised
def test_quantisation_of_prepared_modules_warns():
    quantization = pytest.importorskip("torch.ao.quantization")
    model = quantisable()
    model.qconfig = quantization.get_default_qconfig("x86")
    with pytest.warns(BalNormWarning, match=r"quantised.*balnorm.fold\(model\)") as caught:
        quantization.prepare(model)
    assert sum("fold" in str(each.message) for each in caught) == 2
    folded = fold(quantisable())
    folded.qconfig = quantization.get_default_qconfig("x86")
    quantization.prepare(folded)  # and a warning would be an error


@quantised
def test_dynamic_quantisation_warns_about_linear_layers():
    quantization = pytest.importorskip("torch.ao.quantization")
    with pytest.warns(BalNormWarning, match=r"BalNormLinear\(.*balnorm.fold\(model\)") as caught:
        quantization.quantize_dynamic(quantisable(), {nn.Linear})
    assert sum("fold" in str(each.message) for each in caught) == 1  # convolutions stay in floating point for everybody


@quantised
def test_quantisation_of_graphs_says_what_to_do():
    fx = pytest.importorskip("torch.ao.quantization.quantize_fx")
    mapping = pytest.importorskip("torch.ao.quantization").get_default_qconfig_mapping("x86")
    with pytest.raises(TypeError, match=r"trace through a BalNormConv2d: fold the model first"):
        fx.prepare_fx(quantisable(), mapping, (torch.rand(2, 3, 8, 8),))


def test_a_weight_that_torchao_quantised_is_refused():
    kind = type("Int8Tensor", (torch.Tensor,), {"__module__": "torchao.quantization"})
    layer = BalNormLinear(4, 3)
    with pytest.raises(TypeError, match=r"quantised weight cannot be balanced: fold .* \(BalNormLinear\)"):
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(kind))


def test_a_layer_of_torchao_is_refused_in_the_place_of_a_balanced_one():
    """Training in float8 and quantisation-aware training swap every nn.Linear, and the gain was lost in silence."""
    kind = type("FakeQuantizedLinear", (nn.Linear,), {"__module__": "torchao.quantization.qat.linear"})
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(BalNormLinear(4, 3)))
    model[0] = kind(4, 4)
    with pytest.raises(TypeError, match=r"FakeQuantizedLinear of torchao cannot replace a BalNormLinear.*balnorm.fold"):
        setattr(model[1], "0", kind(4, 3))
    assert isinstance(model[1][0], BalNormLinear)
    update_stats([torch.rand(8, 4)], model)
    folded = fold(model)
    setattr(folded[1], "0", kind(4, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torchao_itself_is_refused():
    quantization, qat = (pytest.importorskip(f"torchao.quantization{name}") for name in ("", ".qat"))
    config = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
    swaps = [
        lambda model: quantization.quantize_(model, qat.QATConfig(weight_config=config, step="prepare")),
        pytest.importorskip("torchao.float8").convert_to_float8_training,
    ]
    for swap in swaps:
        with pytest.raises(TypeError, match="cannot replace a BalNormLinear"):
            swap(nn.Sequential(BalNormLinear(64, 32)))
