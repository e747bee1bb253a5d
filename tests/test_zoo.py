"""Networks that other people wrote: converted, trained for a step, folded. ``make bench`` makes a table of all."""

import importlib.util

import pytest
import torch
from benchmarks.zoo import SLOW, TIMM, TORCHVISION, as_trained, build, exactness, import_timm, trial
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from balnorm import BalNormConv2d, BalNormLayer, ChannelAffine, convert, fold
from balnorm.surgery._decisions import Kept, attribute
from balnorm.surgery._flow import recorded, traced
from balnorm.surgery._model import undisturbed

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
HEAVY = {"cspresnet50", "darknet53", "densenet121", "dpn68", "ecaresnet26t", "efficientformer_l1", "gernet_s"}
HEAVY |= {"hrnet_w18_small", "inception_v3", "mobileone_s0", "res2net50_26w_4s", "resnext50_32x4d", "selecsls42b"}
HEAVY |= {"vgg11_bn", "wide_resnet50_2", "xception41", "xception41p"}
QUICK = [("timm", name) for name in ("resnetv2_50", "densenet121", "repvgg_a0", "mixnet_s")]  # and the rest is slow
QUICK += [("torchvision", "mobilenet_v2")]
FAMILIES = [("timm", name) for name in TIMM] + [("torchvision", name) for name in TORCHVISION]
NETWORKS = [
    pytest.param(*family, marks=[pytest.mark.slow] if family[1] in HEAVY else [])
    for family in FAMILIES
    if family[1] not in SLOW
]
TRAINED = [
    pytest.param(*family, marks=[] if family in QUICK else [pytest.mark.slow])
    for family in FAMILIES
    if family[1] != "convnext_atto"  # it has no BatchNorm
]
FOLLOWS_OTHERS = {"tf_efficientnet_b0", "pnasnet5large"}  # norms after a convolution of another class than torch's
UNTRACEABLE = {"vgg11_bn", "xception41p"}

# The least share of convolutions that becomes balanced, where it is not all: squeeze-and-excitation has no norms, some
# convolutions are subclasses of torch's, and so on.
SHARES = {
    "resnetv2_50": 0.98,
    "seresnet18": 0.55,
    "skresnet18": 0.8,
    "resnest14d": 0.85,
    "ecaresnet26t": 0.79,
    "regnety_002": 0.62,
    "vgg11_bn": 0.8,
    "mobilenetv3_small_100": 0.64,
    "mobilenet_v3_small": 0.65,
    "efficientnet_b0": 0.6,
    "tf_efficientnet_b0": 0.54,
    "mixnet_s": 0.15,
    "ghostnet_100": 0.84,
    "rexnet_100": 0.82,
    "lcnet_050": 0.84,
    "dla34": 0.97,
    "dpn68": 0.98,
    "xception41p": 0.47,
    "ese_vovnet19b_dw": 0.56,
    "convnext_atto": 0.0,
    "mobileone_s0": 0.89,
    "fastvit_t8": 0.5,
    "visformer_tiny": 0.84,
    "inception_resnet_v2": 0.83,
    "nasnetalarge": 0.54,
    "pnasnet5large": 0.53,
    "senet154": 0.61,
    "regnet_y_400mf": 0.62,
}


@pytest.mark.parametrize(("library", "name"), NETWORKS)
def test_networks_convert_train_and_fold(library, name):
    model, x = build(library, name)
    if name not in UNTRACEABLE:
        assert_tracing_and_recording_see_the_same(model, x)
    result = trial(model, x)
    assert result.balanced / result.convolutions >= SHARES.get(name, 1.0), result.report
    assert result.balanced == len(result.report.balanced)
    assert torch.tensor(result.loss).isfinite()
    assert result.finite
    assert result.difference < 1e-5


@pytest.mark.parametrize(("library", "name"), TRAINED)
def test_trained_networks_compute_the_same(library, name):
    torch.manual_seed(0)
    model, x = build(library, name)
    model = as_trained(model, x)
    convolutions = sum(isinstance(module, _ConvNd) for module in model.modules())
    result = exactness(model, x)
    assert result.double < 1e-9
    assert result.single <= 10 * max(result.folded, 1e-7)
    assert result.folded_again <= 10 * max(result.folded, 1e-7)
    assert sum(isinstance(module, _ConvNd) for module in model.modules()) == convolutions
    assert len(result.report.balanced) / convolutions >= SHARES.get(name, 1.0), result.report
    left = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    assert set(left) <= set(result.report.kept)
    assert not left or name in FOLLOWS_OTHERS


@pytest.mark.parametrize(
    "family", [("torchvision", "resnet18"), ("torchvision", "densenet121"), ("timm", "mobilenetv2_100")]
)
def test_a_converted_network_is_saved_and_loaded(family):
    """Into an untrained copy, strictly."""
    model, x = build(*family)
    converted, _ = convert(as_trained(model, x), example_input=x)
    other, _ = convert(build(*family)[0], example_input=torch.rand_like(x), trained=True)
    other.load_state_dict(converted.state_dict())
    with torch.no_grad():
        assert torch.equal(other.eval()(x), converted.eval()(x))


def assert_tracing_and_recording_see_the_same(model, x):
    with undisturbed(model):
        symbolic, watched = (attribute(model, flow) for flow in (traced(model, (x,)), recorded(model, (x,))))
    assert symbolic.keys() == watched.keys()
    for module, decision in symbolic.items():
        if isinstance(decision, Kept):  # for the same reason, but a run does not see the same functions
            assert isinstance(watched[module], Kept)
        else:
            assert decision == watched[module]


def test_activation_and_dropout_inside_a_norm_stay():
    """Converting timm's BatchNormAct2d as if it were a BatchNorm2d loses its activation."""
    import_timm()
    from timm.layers import BatchNormAct2d

    for layers in (
        [torch.nn.Conv2d(3, 8, 3), BatchNormAct2d(8, act_layer=torch.nn.SiLU, drop_layer=torch.nn.Dropout)],
        [torch.nn.Conv2d(3, 8, 3), BatchNormAct2d(8, apply_act=False)],
    ):
        model, _ = convert(torch.nn.Sequential(*layers).eval())
        x = torch.rand(2, 3, 8, 8)
        assert type(model[0]) is BalNormConv2d
        assert type(model[1].act) is type(layers[1].act)
        assert type(model[1].drop) is type(layers[1].drop)
        assert torch.equal(model(x), layers[1].act(model[0](x)))


def test_a_norm_with_an_activation_becomes_both():
    """After a sum, as in pre-activation networks of timm's."""
    import_timm()
    from timm.layers import BatchNormAct2d

    model = torch.nn.Sequential(torch.nn.ReLU(), BatchNormAct2d(3, act_layer=torch.nn.SiLU, inplace=True))
    model.append(torch.nn.Conv2d(3, 4, 1))
    x = torch.rand(8, 3, 5, 5)
    model(x)
    expected = model.eval()(x).detach()
    model, report = convert(model, example_input=x)
    assert report.affine == ["1"]
    assert type(model[1].affine) is ChannelAffine
    assert isinstance(model[1].act, torch.nn.SiLU)
    torch.testing.assert_close(model(x).detach(), expected)


def test_group_norms_of_timm_are_replaced_if_asked_for():
    """timm computes them in its own way, with an activation inside or without one."""
    import_timm()
    from timm.layers import GroupNorm, GroupNorm1, GroupNormAct

    x = torch.rand(2, 3, 8, 8)
    layers = [torch.nn.Conv2d(3, 8, 3), GroupNorm(8, 2), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 1)]
    model = torch.nn.Sequential(*layers, GroupNormAct(8, 2, act_layer=torch.nn.SiLU), torch.nn.Conv2d(8, 8, 1))
    _, report = convert(model.append(GroupNorm1(8)), norms="group", strict=True)
    assert report.balanced == ["0", "3", "5"]
    assert [layer.options.centred for layer in model if isinstance(layer, BalNormConv2d)] == [True, False, True]
    model(x)
    model.eval()
    torch.testing.assert_close(fold(model)(x), model(x))
    assert [type(step).__name__ for step in fold(model)[4]] == ["Identity", "SiLU"]


def test_a_folded_norm_leaves_its_activation():
    import_timm()
    from timm.layers import BatchNormAct2d

    x = torch.randn(8, 3, 5, 5)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act_layer=torch.nn.SiLU))
    model(x)
    folded = fold(model.eval())
    assert isinstance(folded[1].act, torch.nn.SiLU)
    assert folded[1].act is not model[1].act
    torch.testing.assert_close(folded(x), model(x))


def test_timm_folds_with_its_own_function():
    import_timm()
    from timm.utils import reparameterize_model

    model, _ = convert(build("timm", "resnet18")[0])
    x = torch.rand(2, 3, 64, 64)
    model(x)
    model.eval()
    folded = reparameterize_model(model)
    assert not any(isinstance(module, BalNormLayer) for module in folded.modules())
    with torch.no_grad():
        assert torch.allclose(folded(x), model(x), atol=1e-5)
