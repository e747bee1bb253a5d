"""What used to go wrong in silence, in other people's hands: each of these is a warning, or works now."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from balnorm import (
    BalNormConv2d,
    BalNormConvTranspose2d,
    BalNormLinear,
    BalNormWarning,
    convert,
    fold,
    scale_to_data,
    update_stats,
)


def signed_images():
    return torch.randn(8, 3, 8, 8)


# Inputs that cancel -------------------------------------------------------------------------------------------------


def test_mean_subtracted_pixels_are_noticed_once():
    layer = BalNormConv2d(3, 4, 3)
    with pytest.warns(BalNormWarning, match=r"BalNormConv2d\(3, 4, .*\) gets negative .* \[0, 1\].* signed_input=True"):
        layer(signed_images())
    layer(signed_images())  # and a second warning would be an error
    layer.eval()
    layer.state_dict()


@pytest.mark.parametrize("options", [{"signed_input": True}, {}])
def test_no_warning_without_a_reason(options):
    layer = BalNormConv2d(3, 4, 3, **options)
    images = signed_images()
    for x in (images if options else images.relu(), F.silu(images) if not options else images, images[:0].relu()):
        layer(x)
    layer.eval()
    fold(nn.Sequential(layer))


def test_statistics_are_read_once_in_a_stretch_of_training(monkeypatch):
    """Reading them waits for the device, and averages of weights ask for the state dict at every step."""
    layer, read = BalNormConv2d(3, 4, 3), []
    monkeypatch.setattr("balnorm.layers.is_readable", lambda tensor: read.append(tensor) or True)
    for expected in (1, 2):
        layer.train()
        for _ in range(3):
            layer.state_dict()
        assert len(read) == expected


@pytest.mark.parametrize("look", [BalNormConv2d.eval, BalNormConv2d.state_dict, BalNormConv2d.fuse])
def test_a_running_mass_that_cancels_is_noticed_later_too(look):
    """Early batches may look right; evaluation, saving and folding look once more."""
    layer = BalNormConv2d(3, 4, 3)
    for _ in range(3):
        layer(signed_images().abs())
    for _ in range(100):
        layer(-signed_images().abs())
    with pytest.warns(BalNormWarning, match="gets negative inputs"):
        look(layer)


def test_replicas_of_data_parallel_are_not_looked_at():
    """They are new at every step, so each of them would be early for ever."""
    layer = BalNormConv2d(3, 4, 3)
    layer._is_replica = True  # as nn.DataParallel does
    layer(signed_images())  # and a warning would be an error


def test_the_warning_can_be_switched_off():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BalNormWarning)
        BalNormConv2d(3, 4, 3)(signed_images())


def test_later_batches_are_not_looked_at(monkeypatch):
    """To look at values is to wait for the device."""
    layer, looks, look = BalNormConv2d(3, 4, 3), [], BalNormConv2d._look_at
    monkeypatch.setattr(BalNormConv2d, "_look_at", lambda self, x: looks.append(x) or look(self, x))
    for _ in range(5):
        layer(torch.rand(2, 3, 8, 8))
    assert len(looks) == 3
    update_stats([torch.rand(2, 3, 8, 8)] * 2, layer)
    assert len(looks) == 3


# Statistics that were never taken -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [lambda model, x: model.eval()(x), lambda model, x: fold(model)])
def test_statistics_that_were_never_taken_are_noticed(use):
    model, _ = convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), example_input=torch.rand(1, 3, 5, 5))
    with pytest.warns(BalNormWarning, match=r"has no statistics yet: .*update_stats\(loader, model\)"):
        use(model, torch.rand(2, 3, 5, 5))


def test_statistics_that_were_taken_are_enough():
    model = nn.Sequential(BalNormConv2d(3, 4, 3))
    update_stats([torch.rand(2, 3, 5, 5)], model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fold(model.eval())
        model(torch.rand(2, 3, 5, 5))


def test_a_scale_is_measured_about_the_mean():
    """Where a stride meets bright pixels with some taps only, the outputs are not balanced about 0."""
    layer, x = BalNormConv2d(2, 1, 3, stride=2), torch.rand(64, 2, 7, 7)
    x[..., ::2, ::2] += 1
    scale_to_data(layer, x)
    y = layer(x)
    assert y.mean().square() > 0.1
    assert y.var(correction=0).item() == pytest.approx(1, rel=1e-3)


def test_new_statistics_are_looked_at_anew():
    layer, x = BalNormConv2d(3, 4, 3), torch.rand(8, 3, 6, 6)
    for _ in range(20):
        layer(x)
    layer.reset_running_stats()
    with pytest.warns(BalNormWarning, match="gets negative inputs"):
        layer(x - x.mean())


def statistics_of_training(model):
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.uniform_(norm.bias, -1.0, 1.0)
    return model.double().eval()


# A scale that fits the data -----------------------------------------------------------------------------------------


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


def test_measured_scales_give_unit_variance_in_every_layer():
    model = nn.Sequential(
        BalNormConv2d(3, 8, 3), nn.Softplus(), BalNormConvTranspose2d(8, 6, 2, stride=2), nn.Sigmoid(), nn.Flatten(),
        BalNormLinear(6 * 144, 12),
    )  # fmt: skip
    x = torch.rand(64, 3, 8, 8)
    with torch.no_grad():
        model[2].gain.zero_()  # as a residual branch may start: it hides nothing
        model[2].bias.fill_(0.3)
    before = copy.deepcopy(model.state_dict())
    scales = scale_to_data(model, (x, None))
    assert list(scales) == ["0", "2", "5"]
    assert model[0](x).std().item() == pytest.approx(1.0, rel=1e-3)
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    of_the_call_above = {"0.running_mass", "0.num_batches_tracked"}
    assert changed - of_the_call_above == {"0.output_scale", "2.output_scale", "5.output_scale"}
    with torch.no_grad():
        model[2].gain.fill_(1.0)
        model[2].bias.zero_()
    z = model[2](F.softplus(model[0](x)))
    assert z.std().item() == pytest.approx(1.0, rel=1e-2)


def test_with_measured_scales_sigmoid_networks_train(digits):
    results = []
    for measured in (False, True):
        torch.manual_seed(0)
        model = activated(nn.Sigmoid)
        if measured:
            scale_to_data(model, digits[0][:256])
        results.append(accuracy(train(model, *digits), *digits))
    assert results[0] < 0.3
    assert results[1] > 0.6


def test_a_layer_without_variance_keeps_its_scale():
    model = nn.Sequential(BalNormConv2d(3, 4, 3))
    scale = model[0].output_scale.clone()
    with pytest.warns(BalNormWarning, match="0 gives the same output for every input of this batch"):
        assert scale_to_data(model, torch.zeros(2, 3, 5, 5)) == {}
    assert torch.equal(model[0].output_scale, scale)


def test_scales_survive_a_state_dict():
    model = activated(nn.Softplus)
    scale_to_data(model, torch.rand(32, 1, 8, 8))
    other = activated(nn.Softplus)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[2].output_scale, model[2].output_scale)


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
