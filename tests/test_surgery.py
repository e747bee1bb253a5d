"""Folding, re-estimating and freezing statistics, and parameter groups."""

import copy
import io
import logging
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from balnorm import (
    BalNormConv2d,
    BalNormLayer,
    BalNormLinear,
    BalNormWarning,
    fold,
    freeze_stats,
    param_groups,
    unfreeze_stats,
    update_stats,
)
from balnorm.surgery._model import undisturbed
from cases import CASES, MASS_AND_PASS, Steps, digits_network, small_network


def trained(**options):
    model = small_network(**options)
    for _ in range(3):
        model(torch.rand(4, 3, 6, 6))
    return model


# --------------------------------------------------------------------------------------------------------------------
# Fold
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
def test_a_folded_model_computes_the_same(mass, one_pass):
    model = trained(mass=mass, one_pass=one_pass).eval()
    folded = fold(model)
    x = torch.rand(5, 3, 9, 7)
    assert torch.allclose(folded(x), model(x), atol=1e-5)
    with torch.no_grad():
        assert torch.equal(folded(x), model(x))


def test_what_a_forward_pass_remembers_is_forgotten():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = {"before": 1}

        def forward(self, x):
            self.seen["batch"] = x
            return x

    model = Remembering()
    seen = model.seen
    with undisturbed(model):
        model(torch.zeros(1))
        assert len(seen) == 2
    assert model.seen is seen
    assert seen == {"before": 1}


def test_no_weight_decay_is_allowed_and_a_negative_one_is_not():
    assert {group["weight_decay"] for group in param_groups(small_network(), 0.0)} == {0.0}
    for wrong in (-1e-4, math.nan):
        with pytest.raises(ValueError, match="weight_decay must not be negative"):
            param_groups(small_network(), wrong)


def test_wrapped_models_are_not_folded():
    with pytest.raises(ValueError, match=r"the model is wrapped in DataParallel.*: fold the model inside"):
        fold(nn.DataParallel(small_network().eval()))


def test_fold_copies_unless_asked_not_to():
    model = trained()
    original = copy.deepcopy(model)
    folded = fold(model)
    assert str(model) == str(original)
    assert not any(isinstance(module, BalNormLayer) for module in folded.modules())
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint(p.data_ptr() for p in folded.parameters())
    assert fold(model, inplace=True) is model
    assert str(model) == str(folded)
    assert str(fold(model)) == str(model)


def test_a_single_layer_folds():
    layer = BalNormConv2d(3, 4, 3)
    assert type(fold(layer)) is nn.Conv2d
    assert type(fold(layer, inplace=True)) is nn.Conv2d


def test_a_shared_layer_is_folded_once():
    layer = BalNormConv2d(3, 3, 3, padding=1)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    for inplace in (False, True):
        folded = fold(model, inplace=inplace)
        assert folded[0] is folded[2]
        assert type(folded[0]) is nn.Conv2d


def test_a_folded_model_unpickles_without_balnorm():
    model = fold(trained().eval())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    program = """if True:
        import io, sys
        sys.modules["balnorm"] = None  # any import of it fails
        import torch
        model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)
        print(tuple(model(torch.rand(2, 3, 6, 6)).shape))
    """
    done = subprocess.run([sys.executable, "-c", program], input=buffer.getvalue(), capture_output=True, check=False)
    assert done.stdout.decode().strip() == "(2, 5)", done.stderr.decode()


def test_a_model_that_keeps_outputs_folds():
    """Deep supervision in MONAI's DynUNet: deepcopy refuses tensors that have a history."""

    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.heads = BalNormConv2d(3, 4, 3), [torch.zeros(1)]

        def forward(self, x):
            self.last = self.layer(x)
            self.heads[0] = {"output": self.last}
            return self.last

    model, x = Keeping(), torch.rand(2, 3, 6, 6)
    kept = model(x)
    folded = fold(model.eval())
    assert type(folded.layer) is nn.Conv2d
    assert torch.equal(folded.heads[0]["output"], kept)
    assert folded.heads[0]["output"] is folded.last is not kept
    assert model.last is kept
    assert torch.allclose(folded(x), model(x), atol=1e-5)


def test_fold_tells_what_it_folded(caplog):
    with caplog.at_level(logging.INFO, "balnorm"):
        fold(trained())
    assert caplog.messages == ["folding 3 layers: 0, 2, 6"]


def with_statistics(norm):
    """The norm in eval mode, with random statistics and parameters of both signs."""
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.weight, norm.bias):
            if tensor is not None:
                tensor.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm.eval()


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), (2, 4, 5, 5)),
        (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6, affine=False), (2, 4, 5, 5)),
        (nn.Conv2d(4, 4, 1, groups=4), nn.BatchNorm2d(4), (2, 4, 5, 5)),
        (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 9)),
        (nn.Conv3d(4, 6, 2), nn.SyncBatchNorm(6), (2, 4, 3, 4, 5)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), (2, 4, 5, 5)),
        (nn.ConvTranspose3d(4, 6, 2, groups=2), nn.BatchNorm3d(6), (2, 4, 3, 3, 3)),
        (nn.ConvTranspose1d(6, 4, 3, groups=2, bias=False), nn.BatchNorm1d(4), (2, 6, 7)),
        (BalNormConv2d(4, 6, 3), nn.BatchNorm2d(6), (2, 4, 5, 5)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_batch_norm_that_stayed_becomes_part_of_its_convolution(layer, norm, shape, inplace, caplog):
    model = nn.Sequential(layer, nn.Dropout(), with_statistics(norm), nn.ReLU(inplace=True)).double()
    model = copy.deepcopy(model)
    model(torch.rand(shape, dtype=torch.float64))
    x = torch.randn(shape, dtype=torch.float64)
    expected = model.eval()(x).detach()
    with caplog.at_level(logging.INFO, "balnorm"):
        folded = fold(model, inplace=inplace)
    assert (folded is model) == inplace
    assert "folding 1 BatchNorms: 2" in caplog.messages
    assert type(folded[2]) is nn.Identity
    assert type(folded[0]) in (type(layer), nn.Conv2d)
    torch.testing.assert_close(folded(x).detach(), expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


def hooked():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            Steps(lambda self, x: self.norm(y := self.conv(x)) + y, conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3)),
            "the output of conv is used elsewhere too",
        ),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.BatchNorm2d(3)), "it follows 1"),
        (hooked(), "it follows 0, which stays (it has hooks, which would be lost)"),
        (
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)),
            "it has no running statistics",
        ),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1)), nn.BatchNorm2d(3)),
            "it follows 0, which stays (not one of torch's own layers: a ParametrizedConv2d may do something else)",
        ),
        (
            Steps(
                lambda self, x: self.conv(x) if x.sum() < 0 else self.norm(self.conv(x)),
                conv=nn.Conv2d(3, 3, 1),
                norm=nn.BatchNorm2d(3),
            ),
            "the model cannot be traced symbolically",
        ),
    ],
)
def test_a_batch_norm_that_cannot_be_folded_stays_and_the_log_says_why(model, reason, caplog):
    x = torch.rand(2, 3, 4, 4)
    expected = model.eval()(x).detach()
    with caplog.at_level(logging.INFO, "balnorm"):
        folded = fold(model)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in folded.modules()) == 1
    assert [message for message in caplog.messages if message.endswith(f": {reason}")]
    assert torch.equal(folded(x).detach(), expected)


def test_a_norm_after_two_convolutions_is_folded_into_both():
    model = Steps(
        lambda self, x: self.norm(self.first(x)) + self.norm(self.second(x)),
        first=nn.Conv2d(3, 4, 1),
        second=nn.Conv2d(3, 4, 1),
        norm=with_statistics(nn.BatchNorm2d(4)),
    ).eval()
    x = torch.randn(2, 3, 4, 4)
    folded = fold(model)
    assert type(folded.norm) is nn.Identity
    torch.testing.assert_close(folded(x), model(x))


def test_layers_without_a_running_mass_cannot_be_folded():
    model = nn.Sequential(nn.ReLU(), BalNormConv2d(3, 4, 3, track_running_stats=False))
    with pytest.raises(ValueError, match="1 has track_running_stats=False"):
        fold(model)
    with pytest.raises(ValueError, match="the layer has track_running_stats=False"):
        fold(model[1], inplace=True)


# --------------------------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mass", ["channel", "position"])
def test_update_stats_is_exact_over_batches_of_any_size(name, mass):
    case = CASES[name]
    layer = case.build(mass=mass, stats_fraction=0.5, momentum=0.3)
    everything = torch.cat([case.input() for _ in range(4)])
    sizes = [1, 5, len(everything) - 6]
    update_stats([(batch, "target") for batch in everything.split(sizes)], nn.Sequential(layer))
    alone = case.build(mass=mass, momentum=None)
    alone(everything)
    assert torch.allclose(layer.running_mass, alone.running_mass, atol=1e-6)
    assert layer.num_batches_tracked == 3
    assert (layer.momentum, layer.stats_fraction) == (0.3, 0.5)


def test_update_stats_weighs_images_by_their_size():
    layer = BalNormConv2d(1, 2, 1)
    update_stats([torch.full((1, 1, 2, 2), 1.0), torch.full((1, 1, 4, 4), 6.0)], layer)
    assert layer.running_mass.item() == pytest.approx((4 * 1 + 16 * 6) / 20)


def test_update_stats_in_half_precision_does_not_overflow():
    model, x = nn.Sequential(BalNormConv2d(2, 3, 1)).half(), torch.rand(256, 2, 32, 32).half()
    update_stats([x], model)
    expected = x.float().mean((0, 2, 3)).view(1, 2, 1, 1)
    torch.testing.assert_close(model[0].running_mass.float(), expected, rtol=1e-2, atol=0)


def test_update_stats_leaves_everything_else_alone():
    model = nn.Sequential(BalNormConv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), BalNormConv2d(4, 4, 1))
    freeze_stats(model[3])
    model[0].eval()
    before = copy.deepcopy(model.state_dict())
    update_stats([torch.rand(4, 3, 6, 6)], model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.running_mean", "0.running_mass", "0.num_batches_tracked"}
    assert [module.training for module in model] == [False, True, True, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_update_stats_ignores_what_is_not_finite_or_empty():
    layer = BalNormConv2d(1, 2, 3)
    good, bad = torch.rand(2, 1, 5, 5), torch.full((2, 1, 5, 5), torch.inf)
    update_stats([good, bad, good[:0]], layer)
    assert torch.allclose(layer.running_mass, good.sum() / (2 * 9))
    assert layer.num_batches_tracked == 1


def test_hooks_that_change_an_output_do_not_change_its_weight():
    layer = BalNormConv2d(1, 2, 1)
    layer.register_forward_hook(lambda module, args, output: output[:1])
    update_stats([torch.full((1, 1, 2, 2), 1.0), torch.full((9, 1, 2, 2), 5.0)], layer)
    assert layer.running_mass.item() == pytest.approx(4.6)


def test_a_compiled_model_is_updated():
    model = nn.Sequential(BalNormConv2d(1, 2, 1))
    compiled = torch.compile(model, backend="eager")
    compiled(torch.rand(2, 1, 3, 3))
    update_stats([torch.full((1, 1, 2, 2), 7.0)], compiled)
    assert model[0].running_mass.item() == pytest.approx(7.0)


def test_other_batches_are_refused():
    with pytest.raises(TypeError, match=r"a batch must be a tensor, or a tuple or list .*, got a dict: .*forward="):
        update_stats([{"image": torch.rand(2, 1, 3, 3)}], BalNormConv2d(1, 2, 1))


def test_batches_of_any_kind_with_a_function_that_runs_the_model():
    model = nn.Sequential(BalNormConv2d(1, 2, 1))
    batches = [{"image": torch.full((n, 1, 2, 2), value)} for n, value in ((1, 1.0), (9, 5.0))]
    update_stats(batches, model, forward=lambda model, batch: model(batch["image"]))
    assert model[0].running_mass.item() == pytest.approx(4.6)
    with pytest.raises(ValueError, match="no batch reached a balanced layer"):
        update_stats(batches, model, forward=lambda model, batch: None)


def test_a_failed_update_loses_nothing():
    model = trained()
    before = copy.deepcopy(model.state_dict())

    def batches():
        yield torch.rand(2, 3, 6, 6)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        update_stats(batches(), model)
    with pytest.raises(ValueError, match="no batch reached a balanced layer"):
        update_stats([], model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].momentum == 0.1


def test_averaged_weights_need_new_statistics(digits):
    """EMA: the averaged weights have met none of the batches that the statistics come from."""
    images, labels = digits
    model = digits_network()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))
    optimizer = torch.optim.SGD(param_groups(model, 1e-4), lr=0.3, momentum=0.9)
    for _ in range(40):
        batch = torch.randperm(len(images))[:64]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        averaged.update_parameters(model)

    def loss():
        with torch.no_grad():
            return nn.functional.cross_entropy(averaged(images), labels).item()

    averaged.eval()
    stale = loss()
    update_stats(images.split(100), averaged)
    renewed = loss()
    averaged.train()
    assert renewed == pytest.approx(loss(), rel=0.02)  # that of training mode, where each batch has its own statistics
    assert stale > 1.3 * renewed


def test_update_stats_says_that_everything_is_frozen():
    """As it is after the conversion of a trained network: averaged weights would be evaluated with old statistics."""
    model = freeze_stats(small_network())
    with pytest.warns(BalNormWarning, match=r"Call balnorm.unfreeze_stats\(model\) first"):
        update_stats([torch.rand(2, 3, 8, 8)], model)
    update_stats([torch.rand(2, 3, 8, 8)], unfreeze_stats(model))  # a warning would be an error


def test_frozen_statistics_survive_train():
    model = freeze_stats(trained()).train()
    before = copy.deepcopy(model.state_dict())
    x = torch.rand(4, 3, 6, 6)
    out = model(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.allclose(out, copy.deepcopy(model).eval()(x))
    unfreeze_stats(model)(x)
    assert not torch.equal(model[0].running_mass, before["0.running_mass"])


# --------------------------------------------------------------------------------------------------------------------
# Parameter groups
# --------------------------------------------------------------------------------------------------------------------


def test_gains_biases_and_norms_are_not_decayed():
    model = nn.Sequential(
        BalNormConv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.LayerNorm((4, 6, 6)),
        nn.PReLU(),
        nn.Flatten(),
        BalNormLinear(144, 2),
    )
    decayed, others = param_groups(model, weight_decay=0.01)
    assert {id(p) for p in decayed["params"]} == {id(model[0].weight), id(model[5].weight)}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("weight_norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), nn.Linear(3, 1), nn.Linear(1, 3)])
def test_the_gain_of_weight_normalisation_is_not_decayed(weight_norm, layer):
    """It has as many dimensions as the weight, and was taken for one."""
    normalised = weight_norm(copy.deepcopy(layer))
    decayed, others = param_groups(nn.Sequential(normalised), weight_decay=0.01)
    assert [parameter.shape for parameter in decayed["params"]] == [layer.weight.shape]
    assert {parameter.numel() for parameter in others["params"]} == {layer.weight.shape[0]}
    assert len(others["params"]) == 2


def test_frozen_and_shared_parameters():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    first.bias.requires_grad_(False)
    decayed, others = param_groups(nn.Sequential(first, second), weight_decay=0.01)
    assert (len(decayed["params"]), len(others["params"])) == (1, 1)
    assert len(param_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
    with pytest.raises(ValueError, match="weight_decay must not be negative, got -1"):
        param_groups(first, -1)


def test_folding_warns_of_hooks_that_it_loses():
    """The folded network gave another output, and nothing said so. Pruning is part of the weight."""
    model = nn.Sequential(BalNormConv2d(3, 8, 3))
    model(torch.rand(4, 3, 8, 8))
    prune.random_unstructured(model[0], "weight", amount=0.2)
    fold(model)
    model[0].register_forward_hook(lambda module, inputs, output: 0 * output)
    with pytest.warns(BalNormWarning, match="0 has hooks, which the folded layer does not get"):
        fold(model)
