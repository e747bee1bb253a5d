"""What used to go wrong in silence, in other people's hands: each of these is a warning, or works now."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import balnorm.functional as BF
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
from balnorm.models import create_model
from balnorm.surgery._attribution import attribute
from balnorm.surgery._decisions import Place, Removed
from balnorm.surgery._flow import data_flow
from balnorm.surgery._model import replace_modules
from balnorm.surgery._shifts import move_shifts


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


# A trained network survives -----------------------------------------------------------------------------------------


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


def test_a_calibrated_network_keeps_most_of_its_accuracy(digits):
    """How much is a matter of luck, and so of rounding; that the scores are nearer is not."""
    images, labels = digits
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    trained = train(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)), *digits)
    before, scores = accuracy(trained, images, labels), trained(images[1500:]).detach()
    uncalibrated, _ = convert(copy.deepcopy(trained))
    update_stats(images[:512].split(256), uncalibrated)
    calibrated, _ = convert(trained, calibrate=[(batch, None) for batch in images[:512].split(256)])
    assert before > 0.8
    assert accuracy(calibrated, images, labels) > before - 0.3
    near, far = ((model.eval()(images[1500:]) - scores).square().mean() for model in (calibrated, uncalibrated))
    assert near < far / 2


def small_trained(last):
    """Two layers with BatchNorms of scales of both signs."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), last, nn.BatchNorm2d(8))
    for norm in (model[1], model[4]):
        nn.init.normal_(norm.weight)
        nn.init.uniform_(norm.bias, 0.5, 1.5)  # no channel is dead
    x = torch.rand(64, 3, 8, 8)
    model(x)
    return model.eval(), x


def test_a_channel_that_cannot_be_balanced_is_calibrated_to_a_finite_gain():
    layer = nn.Conv2d(3, 4, 3)
    nn.init.constant_(layer.weight[0], 0.1)  # nothing is left of it after the shift
    model = nn.Sequential(layer, nn.BatchNorm2d(4, affine=False)).eval()
    with pytest.warns(BalNormWarning, match="one sign"):
        convert(model, calibrate=torch.rand(8, 3, 6, 6))
    assert model[0].gain.isfinite().all()


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


def test_every_channel_has_the_mean_and_deviation_that_it_had():
    """Where the inputs cannot be laid out as a matrix: in transposed convolutions."""
    model, x = small_trained(nn.ConvTranspose2d(6, 8, 2, stride=2))
    expected = model(x)
    converted, _ = convert(copy.deepcopy(model), calibrate=x)
    y = converted.eval()(x)
    torch.testing.assert_close(y.mean((0, 2, 3)), expected.mean((0, 2, 3)), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(y.std((0, 2, 3)), expected.std((0, 2, 3)), atol=1e-3, rtol=1e-2)
    correlation = ((y - y.mean((0, 2, 3), True)) * (expected - expected.mean((0, 2, 3), True))).mean((0, 2, 3))
    assert (correlation > 0).float().mean() > 0.9  # a channel that the norm turned round is turned round still
    assert converted[0].num_batches_tracked == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Conv2d(6, 8, 3, padding=1),
        lambda: nn.Conv2d(6, 8, 3, stride=2, padding="valid", bias=False),
        lambda: nn.Conv2d(6, 8, (1, 3), dilation=2, groups=2),
        lambda: nn.Conv2d(6, 8, 3, padding="same", padding_mode="reflect"),
    ],
)
def test_calibration_finds_the_balanced_weight_of_least_error(build, monkeypatch):
    """Against a constrained least-squares problem solved as such, by Lagrange multipliers, one channel at a time."""
    monkeypatch.setattr("balnorm.surgery._calibrate._RIDGE", 1e-9)
    model, x = small_trained(build())
    model, x = model.double(), x.double()
    wanted = model(x).detach().movedim(1, -1).flatten(0, 2)
    converted, _ = convert(copy.deepcopy(model), calibrate=x)
    layer = converted.eval()[3]
    inputs = converted[:3](x).detach()
    y = layer(inputs).movedim(1, -1).flatten(0, 2)
    torch.testing.assert_close(y.mean(0), wanted.mean(0), atol=1e-4, rtol=1e-4)
    per_group, taps = 6 // layer.groups, layer.weight[0, 0].numel()
    probe = nn.Conv2d(6, 6 * taps, layer.kernel_size, layer.stride, layer.padding, layer.dilation, groups=6, bias=False)
    probe.padding_mode, probe._reversed_padding_repeated_twice = (
        layer.padding_mode, layer._reversed_padding_repeated_twice,
    )  # fmt: skip
    probe.weight = nn.Parameter(torch.eye(taps, dtype=torch.float64).repeat(6, 1).view(6 * taps, 1, *layer.kernel_size))
    rows = probe(inputs).detach().movedim(1, -1).flatten(0, 2)
    for channel in range(8):
        first = channel // (8 // layer.groups) * per_group * taps
        A = torch.cat([rows[:, first : first + per_group * taps], torch.ones(len(rows), 1, dtype=torch.float64)], 1)
        m = layer.running_mass[0].expand(-1, *layer.kernel_size).flatten()[first : first + per_group * taps]
        m = torch.cat([m, torch.zeros(1, dtype=torch.float64)])  # the bias is free
        system = torch.cat([torch.cat([A.T @ A, m[:, None]], 1), torch.cat([m, m.new_zeros(1)])[None]])
        solution = torch.linalg.lstsq(system, torch.cat([A.T @ wanted[:, channel], m.new_zeros(1)])).solution
        best = (A @ solution[:-1] - wanted[:, channel]).square().mean()
        found = (y[:, channel] - wanted[:, channel]).square().mean()
        assert found <= best + 1e-3 * wanted[:, channel].var()


def test_the_report_says_what_calibration_matched():
    def trained(layer, channels=8):
        return nn.Sequential(layer, nn.BatchNorm2d(channels), nn.ReLU())

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = trained(nn.Conv2d(3, 8, 3))
            self.up = trained(nn.ConvTranspose2d(8, 8, 2, stride=2))
            self.plain = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, affine=False))
            self.never = trained(nn.Conv2d(8, 8, 3))

        def forward(self, x):
            x = self.plain(self.up(self.conv(x)))
            return self.never(x) if len(x) == 7 else x

    x = torch.rand(16, 3, 10, 10)
    _, report = convert(Network().eval(), example_input=x[:7], calibrate=x)
    assert {row.layer: row.matched for row in report.rows if row.matched} == {
        "conv.0": "outputs",
        "up.0": "mean and deviation",
        "plain.0": "deviation",
        "never.0": "nothing",
    }
    assert "matched" in str(report).splitlines()[0]
    _, report = convert(Network(), example_input=x[:7])
    assert "matched" not in str(report)


def test_calibration_fits_linear_layers_and_signals_of_one_axis():
    model = nn.Sequential(
        nn.Conv1d(4, 8, 5, stride=2), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 14, 16), nn.BatchNorm1d(16),
    )  # fmt: skip
    x = torch.rand(512, 4, 31)
    for _ in range(50):
        model(x)
    expected = model.eval()(x)
    errors = []
    for matrix in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not matrix:
                patch.setattr("balnorm.surgery._calibrate._has_matrix", lambda *_: False)
            converted, _ = convert(copy.deepcopy(model), calibrate=x, example_input=x[:2])
        errors.append((converted.eval()(x) - expected).square().mean().item())
    assert errors[0] < 0.9 * errors[1]


def test_a_calibrated_pre_activation_network_survives(digits):
    """Matching means and deviations alone lost half of such a network's accuracy."""
    images = digits[0]
    torch.manual_seed(0)
    trained = train(create_model("wide_resnet", "batchnorm", depth=14, width=8, in_channels=1), *digits)
    scores = trained(images[1500:]).detach()
    calibrated, _ = convert(copy.deepcopy(trained), calibrate=images[:512])
    with torch.no_grad():
        same = (calibrated.eval()(images[1500:]).argmax(1) == scores.argmax(1)).float().mean()
    assert accuracy(trained, *digits) > 0.8
    assert same > 0.75


def moved(model, shifts, decisions):
    """The network with shifts and factors in its convolutions, and without the norms that they come from."""
    with torch.no_grad():
        for layer, shift in shifts.added.items():
            bias = shift if layer.bias is None else layer.bias + shift
            layer.bias = nn.Parameter(bias)
        for layer, factor in shifts.factors.items():
            layer.weight.mul_(factor.view(1, -1, *[1] * (layer.weight.dim() - 2)))
    gone = {norm for norm, decision in decisions.items() if set(getattr(decision, "layers", ())) & set(shifts.factors)}
    return replace_modules(model, {norm: nn.Identity() for norm in gone if decisions[norm].place is Place.FEEDS})


class Tapped(nn.Module):
    """A pre-activation block. If it is tapped, what its norm is given also goes elsewhere."""

    def __init__(self, activation=nn.ReLU, tapped=False):
        super().__init__()
        self.stem, self.norm, self.activation = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), activation()
        self.branch, self.last, self.tapped = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), tapped

    def forward(self, x):
        x = self.stem(x)
        y = self.last(self.branch(self.activation(self.norm(x))) + x)
        return (x.relu(), y) if self.tapped else y


def statistics_of_training(model):
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(norm.weight, 0.5, 2.0)
            nn.init.uniform_(norm.bias, -1.0, 1.0)
    return model.double().eval()


@pytest.mark.parametrize(
    ("network", "norms"),
    [
        (lambda: create_model("wide_resnet", "batchnorm", depth=14, width=4), 6),
        (lambda: create_model("preact_resnet18", "batchnorm", width=4), 8),
        (lambda: create_model("preact_resnet50", "batchnorm", width=4), 15),
        (Tapped, 1),
        (lambda: Tapped(nn.PReLU), 1),
    ],
)
def test_the_shifts_of_pre_activation_norms_move_into_the_layers_before_them(network, norms):
    """Without them, the layers behind such a norm met another input: six points of a network were lost, not two."""
    model, x = statistics_of_training(network()), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    before, flow = model(x), data_flow(model, x)
    decisions = attribute(model, flow)
    shifts = move_shifts(decisions, flow)
    feeding = [it for it in decisions.values() if isinstance(it, Removed) and it.place is Place.FEEDS]
    assert len(feeding) == norms
    moved(model, shifts, decisions)
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("network", [Tapped(nn.GELU), Tapped(tapped=True)])
def test_shifts_stay_where_moving_them_would_show(network):
    """Behind an activation that is not linear for positive numbers, and where the sum is used by something else."""
    flow = data_flow(statistics_of_training(network), torch.rand(2, 3, 16, 16, dtype=torch.float64))
    assert move_shifts(attribute(network, flow), flow).added == {}


def test_a_layer_without_a_bias_adds_no_shift():
    """It could not, and the layers behind it would take away what nobody had added."""
    model = statistics_of_training(Tapped())
    flow = data_flow(model, torch.rand(2, 3, 16, 16, dtype=torch.float64))
    decisions = attribute(model, flow)
    assert set(move_shifts(decisions, flow).added) == {model.stem, model.branch}
    assert move_shifts(decisions, flow, [model.stem]).added == {}


@pytest.mark.parametrize("bias", [True, False])
def test_calibration_asks_no_shift_of_layers_without_a_bias(bias, monkeypatch):
    trained, asked = statistics_of_training(Tapped()), []
    trained.stem.bias = trained.branch.bias = None
    layers = {trained.stem, trained.branch}

    def spied(decisions, flow, without_bias):
        asked.append(layers - set(without_bias))
        return move_shifts(decisions, flow, without_bias)

    monkeypatch.setattr("balnorm.surgery._convert.move_shifts", spied)
    convert(trained, calibrate=torch.rand(64, 3, 8, 8, dtype=torch.float64), bias=bias)
    assert asked == [layers if bias else set()]


def test_shifts_of_channels_that_are_always_on_stay_small():
    model = statistics_of_training(Tapped())
    nn.init.constant_(model.norm.weight, 1e-9)
    model.norm.weight.data[0] = -1.0
    flow = data_flow(model, torch.rand(2, 3, 16, 16, dtype=torch.float64))
    shifts = move_shifts(attribute(model, flow), flow)
    largest = model.norm.running_mean.abs() + 3.01 * model.norm.running_var.sqrt()
    assert (shifts.added[model.stem].abs() <= largest).all()
    assert shifts.factors[model.branch][0] == 0


@pytest.mark.parametrize(
    ("calibrate", "error", "message"), [([], ValueError, "calibrate"), (3, TypeError, "calibrate must be")]
)
def test_calibration_without_data_is_refused(calibrate, error, message):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
    with pytest.raises(error, match=message):
        convert(model, calibrate=calibrate)
    assert isinstance(model[1], nn.BatchNorm2d)


# A scale that fits the data -----------------------------------------------------------------------------------------


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
    way = r"^0 was given the weight of a layer that is not balanced.*balnorm.convert\(model, calibrate=batch\)"
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


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_kernels_of_one_sign_warn_where_one_pass_leaves_them_constant(kind):
    """As trained depthwise kernels, which often blur."""

    def model(dead):
        made = nn.Sequential(kind(16, 16, 3, groups=16), nn.BatchNorm2d(16), nn.ReLU())
        with torch.no_grad():
            made[0].weight[:dead].abs_()
            made[0].weight[dead:, :, 0, 0], made[0].weight[dead:, :, 1, 1] = 0.1, -0.1
        return made

    x = torch.rand(2, 16, 8, 8)
    with pytest.warns(BalNormWarning, match=r"one sign .*: 3 of 16 in 0\. Give convert one_pass=False"):
        converted, _ = convert(model(3), example_input=x)
    varies = converted(x).std((0, 2, 3)) > 1e-6
    assert varies.tolist() == [False] * 3 + [True] * 13
    convert(model(0), example_input=x)
    convert(model(3).to("meta"))
    alive, _ = convert(model(3), example_input=x, one_pass=False)
    assert (alive(x).std((0, 2, 3)) > 1e-6).all()


class OneNormForTwo(nn.Module):
    def __init__(self, stride):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=stride)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.second(F.relu(self.norm(self.first(x)))))))


def pooled():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("build", [pooled, lambda: OneNormForTwo(1), lambda: OneNormForTwo(4)])
def test_calibration_fits_a_layer_to_its_own_output(build, size):
    """With a pool between layer and norm, and with a norm that two layers share."""
    x = F.interpolate(torch.rand(64, 3, size // 4, size // 4), size=(size, size), mode="bilinear")
    model = build()
    for _ in range(50):
        model(x)
    wanted = model.eval()(x).detach()
    model, _ = convert(model, example_input=x, calibrate=x)
    error = (model.eval()(x) - wanted).norm() / (wanted - wanted.mean((0, 2, 3), keepdim=True)).norm()
    assert error < 0.55


@pytest.mark.parametrize("outputs", [5, 36])
def test_calibration_of_a_linear_layer_over_tokens(outputs):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.linear = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, outputs)

        def forward(self, x):
            return self.linear(F.relu(self.norm(self.conv(x))).flatten(2).mT)

    x, model = torch.rand(32, 3, 8, 8), Tokens().eval()
    wanted = model(x).mean((0, 1)).detach()
    model, _ = convert(model, example_input=x, include="linear", calibrate=x)
    torch.testing.assert_close(model.eval()(x).mean((0, 1)), wanted, rtol=0, atol=0.05)


def test_batches_given_for_one_batch_are_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with pytest.raises(ValueError, match="join them with"):
        convert(model, calibrate=torch.rand(8, 3, 8, 8).split(4))
    assert isinstance(model[1], nn.BatchNorm2d)


def test_calibration_leaves_balanced_layers_alone_that_were_there_before():
    """A trained backbone of balanced layers lost its statistics when the head behind it was converted."""
    torch.manual_seed(0)
    backbone = nn.Sequential(BalNormConv2d(3, 8, 3), nn.ReLU())
    for _ in range(3):
        backbone(torch.rand(16, 3, 8, 8))
    head = nn.Sequential(nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    model = nn.Sequential(backbone, head).eval()
    x, before = 0.3 * torch.rand(32, 3, 8, 8), copy.deepcopy(backbone.state_dict())
    middle = backbone(x)
    converted, _ = convert(model, example_input=x, calibrate=x)
    torch.testing.assert_close(converted[0].state_dict(), before)
    torch.testing.assert_close(converted[1][0].running_mass, BF.input_mass(middle.detach(), 3), rtol=1e-4, atol=0.0)
