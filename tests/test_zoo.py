"""Networks that other people wrote: converted, trained for a step, folded. ``make bench`` makes a table of all."""

import importlib.util

import pytest
import torch
from benchmarks.zoo import SLOW, TIMM, TORCHVISION, build, import_timm, trial

from balnorm.surgery._attribution import attribute
from balnorm.surgery._decisions import Kept
from balnorm.surgery._flow import recorded, traced
from balnorm.surgery._model import undisturbed

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
HEAVY = {"cspresnet50", "darknet53", "densenet121", "dpn68", "ecaresnet26t", "efficientformer_l1", "hrnet_w18_small"}
HEAVY |= {"inception_v3", "mobileone_s0", "res2net50_26w_4s", "resnext50_32x4d", "selecsls42b", "wide_resnet50_2"}
HEAVY |= {"xception41", "xception41p"}
NETWORKS = [("torchvision", name) for name in TORCHVISION]
NETWORKS += [
    pytest.param("timm", name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in TIMM if name not in SLOW
]
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

    from balnorm import BalNormConv2d, convert

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


def test_timm_folds_with_its_own_function():
    import_timm()
    from timm.utils import reparameterize_model

    from balnorm import BalNormLayer, convert

    model, _ = convert(build("timm", "resnet18")[0])
    x = torch.rand(2, 3, 64, 64)
    model(x)
    model.eval()
    folded = reparameterize_model(model)
    assert not any(isinstance(module, BalNormLayer) for module in folded.modules())
    with torch.no_grad():
        assert torch.allclose(folded(x), model(x), atol=1e-5)
