"""The balance report: the paper's Figure 1 in numbers, and the covariate shift between two of them."""

import copy

import pytest
import torch
from torch import nn

from balnorm import BalNormConv2d, BalNormConvTranspose2d, balance_report, convert, freeze_stats
from balnorm.diagnostics import BalanceReport, LayerBalance
from cases import CASES, small_network


@pytest.mark.parametrize("name", CASES)
def test_balanced_layers_contribute_their_gain_on_both_sides(name):
    layer = CASES[name].build(mass="position", one_pass=False, shift=True)
    (row,) = balance_report(layer, CASES[name].input()).layers
    # the pointwise mass of a linear layer leaves nothing out; a transposed one with stride likewise
    assert torch.allclose(row.positive, (layer.gain * layer.output_scale).double(), rtol=1e-4)
    assert torch.allclose(row.negative, (layer.gain * layer.output_scale).double(), rtol=1e-4)
    assert torch.allclose(row.mean, torch.zeros_like(row.mean), atol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_contributions_add_up_to_the_mean_output(name, training):
    layer = CASES[name].build(shift=True).train(training)
    nn.init.normal_(layer.bias)
    x = CASES[name].input()
    for module in (layer, layer.fuse()):
        (row,) = balance_report(module, x).layers
        y = module(x).detach()
        channel = -1 if name == "linear" else 1
        expected = y.movedim(channel, 0).flatten(1).mean(1).double()
        assert torch.allclose(row.mean, expected, atol=1e-5)
        assert torch.allclose(row.positive - row.negative + module.bias.detach(), expected, atol=1e-3, rtol=1e-3)
        assert torch.allclose(row.std, y.movedim(channel, 0).flatten(1).std(1, correction=0).double(), atol=1e-5)


def test_contributions_are_exact_where_the_mass_is_not():
    """On images smaller than the kernel, the layer counts the mass of the channel; the report counts what taps meet."""
    layer, x = BalNormConv2d(3, 4, 3, padding=1, mass="position"), torch.rand(4, 3, 1, 1)
    (row,) = balance_report(layer, x).layers
    assert torch.allclose(row.positive - row.negative, layer(x).mean((0, 2, 3)).double(), atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Conv2d(3, 4, 3), BalNormConv2d(3, 4, 3), nn.Linear(5, 4)], ids=str)
def test_a_single_sample_is_a_batch_of_one(layer):
    """Its rows were taken for channels, and a linear layer's report failed."""
    sample = torch.rand(5) if isinstance(layer, nn.Linear) else torch.rand(3, 6, 6)
    (row,), (expected,) = balance_report(layer, sample).layers, balance_report(layer, sample[None]).layers
    for name in ("positive", "negative", "mean", "std", "mass"):
        assert torch.allclose(getattr(row, name), getattr(expected, name), atol=1e-6), name


def test_a_layer_without_running_statistics_is_measured_with_the_batch_in_eval_mode_too():
    layer = BalNormConv2d(3, 4, 3, mass="position", one_pass=False, track_running_stats=False).eval()
    (row,) = balance_report(layer, torch.rand(2, 3, 6, 6)).layers
    assert torch.allclose(row.positive, (layer.gain * layer.output_scale).double(), rtol=1e-4)


@pytest.mark.parametrize("centred", [False, True])
def test_signed_inputs_are_measured_by_their_magnitude(centred):
    layer = BalNormConv2d(3, 4, 3, mass="position", one_pass=False, centred=centred)
    (row,) = balance_report(layer, torch.randn(2, 3, 6, 6)).layers
    assert torch.allclose(row.positive, (layer.gain * layer.output_scale).double(), rtol=1e-4)


def test_the_report_changes_nothing():
    model = nn.Sequential(small_network(), nn.Dropout(), nn.BatchNorm1d(5))
    model(torch.rand(4, 3, 6, 6))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    balance_report(model, (torch.rand(4, 3, 6, 6), torch.zeros(4)))
    torch.set_rng_state(random)
    first = balance_report(model, torch.ones(4, 3, 6, 6))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in model.modules())
    assert [row.kind for row in first.layers] == [
        "BalNormConv2d",
        "BalNormConvTranspose2d",
        "BalNormLinear",
        "BatchNorm1d",
    ]


def test_transposed_layers_with_an_output_size():
    class Up(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = BalNormConvTranspose2d(
                3, 4, 3, stride=2, padding=1, mass="position", one_pass=False, output_scale=1.0
            )

        def forward(self, x):
            return self.up(input=x, output_size=(12, 12))

    (row,) = balance_report(Up(), torch.rand(2, 3, 6, 6)).layers
    assert torch.allclose(row.positive, torch.ones(4).double(), rtol=1e-4)
    assert torch.allclose(row.mean, torch.zeros(4).double(), atol=1e-5)


def test_other_batches_are_refused_and_leave_no_hooks():
    model = small_network()
    with pytest.raises(TypeError, match=r"a batch must be a tensor, or a tuple or list .*, got a dict"):
        balance_report(model, {"image": torch.rand(2, 3, 6, 6)})
    with pytest.raises(ValueError, match="expected an input of shape"):
        balance_report(model, torch.rand(2, 5, 6, 6))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_compiled_model_is_looked_into():
    model = small_network()
    compiled = torch.compile(model, backend="eager")
    x = torch.rand(2, 3, 6, 6)
    assert str(balance_report(compiled, x)) == str(balance_report(model, x))


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


def compiled_inside(model):
    return nn.Sequential(torch.compile(model, backend="eager"))


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="this torch cannot switch compiled code off")
@pytest.mark.parametrize("compiled", [compiled_in_place, compiled_inside])
def test_a_model_that_has_run_compiled_is_looked_into(compiled):
    """The compiled code does not notice hooks that came later, and the report was empty."""
    torch._dynamo.reset()
    plain = small_network().eval()
    model, x = compiled(copy.deepcopy(plain)).eval(), torch.rand(2, 3, 6, 6)
    with torch.no_grad():
        model(x)
    values = [row.mean for row in balance_report(model, x).layers]
    torch.testing.assert_close(values, [row.mean for row in balance_report(plain, x).layers])


def test_frozen_layers_are_measured_with_their_running_mass():
    layer = freeze_stats(BalNormConv2d(1, 4, 3, mass="position", one_pass=False, shift=True))
    layer.running_mass.fill_(2.0)
    (row,) = balance_report(layer, torch.ones(2, 1, 5, 5)).layers
    assert torch.allclose(row.positive, (layer.gain * layer.output_scale).double() / 2)


def test_a_layer_that_is_called_twice_has_two_rows():
    layer = BalNormConv2d(3, 3, 3, padding=1)
    report = balance_report(nn.Sequential(layer, nn.ReLU(), layer), torch.rand(2, 3, 6, 6))
    assert [row.layer for row in report.layers] == ["0", "0 (call 2)"]


def network(norm):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )


def test_the_shift_over_two_steps_is_smaller_with_balanced_layers():
    """The paper's claim, on a small network: balanced and batch-normalised outputs move less than unnormalised ones."""
    x, y = torch.rand(32, 3, 8, 8), torch.arange(32) % 4
    shifts = {}
    for name in ("none", "batchnorm", "balnorm"):
        torch.manual_seed(0)
        model = network(nn.Identity if name == "none" else nn.BatchNorm2d)
        if name == "balnorm":
            model, _ = convert(model)
        before = balance_report(model, x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        report = balance_report(model, x, before=before)
        watched = "BatchNorm2d" if name == "batchnorm" else ("BalNormConv2d" if name == "balnorm" else "Conv2d")
        moves = zip(report.layers, report.shift(), strict=True)
        shifts[name] = max(moved.median().item() for row, (moved, _) in moves if row.kind == watched)
        assert "mean moved by (std)" in str(report).splitlines()[0]
    assert shifts["balnorm"] < shifts["none"] / 2
    assert shifts["batchnorm"] < shifts["none"] / 2


def test_only_reports_of_the_same_layers_compare():
    report = balance_report(BalNormConv2d(3, 4, 3), torch.rand(2, 3, 6, 6))
    with pytest.raises(ValueError, match="before= is a report of another model"):
        balance_report(small_network(), torch.rand(2, 3, 6, 6), before=report)
    with pytest.raises(ValueError, match="nothing to compare with"):
        report.shift()


def row(name, mean, std, *weights, gain=None):
    """One layer of a report; ``weights`` are its positive and negative contributions and its mass."""
    tensors = [torch.tensor(values) for values in (*weights, mean, std)]
    positive, negative, mass = tensors[:3] if weights else (None, None, None)
    return LayerBalance(name, "Conv2d", positive, negative, *tensors[-2:], mass, gain)


@pytest.fixture
def moved():
    """A report and the one before. One channel of the first layer was constant, and all of the second's."""
    before = BalanceReport((row("a", [1.0, 2.0, 3.0], [2.0, 0.0, 4.0]), row("b", [1.0], [0.0])))
    weights = ([0.004, 0.3, 0.5], [12.34, 1.0, 20.0], [1234.5, 1.0, 2000.0])
    now = row("a", [0.0, 5.0, 5.0], [3.0, 1.0, 2.0], *weights, gain=torch.tensor([-0.003]))
    return BalanceReport((now, row("b", [-0.3], [1.0])), before)


def test_the_shift_leaves_out_what_was_constant(moved):
    (means, stds), (no_means, no_stds) = moved.shift()
    assert means.tolist() == [0.5, 0.5]
    assert stds.tolist() == [1.5, 0.5]
    assert no_means.numel() == no_stds.numel() == 0


def test_the_table_shows_medians_in_columns(moved):
    assert str(moved).splitlines() == [
        "layer  kind    positive  negative   mean   std      mass  gain  mean moved by (std)  std times",
        "-----  ------  --------  --------  -----  ----  --------  ----  -------------------  ---------",
        "a      Conv2d      0.30      12.3   5.00  2.00  1.23e+03  0.00                 0.50       0.50",
        "b      Conv2d                      -0.30  1.00",
    ]


def test_the_figure_draws_medians_and_quartiles(moved):
    pytest.importorskip("matplotlib")
    contributions, outputs, shift = moved.figure().axes
    assert [bar.get_height() for bar in contributions.patches] == pytest.approx([0.3, -12.34])
    whiskers = [line.get_segments()[0][:, 1].tolist() for line in contributions.collections]
    assert whiskers == [pytest.approx([0.152, 0.4]), pytest.approx([-16.17, -6.67])]
    assert outputs.lines[0].get_ydata().tolist() == pytest.approx([5.0, -0.3])
    assert [bar.get_height() for bar in shift.patches] == [0.5]


def test_a_norm_without_a_gain_has_none():
    (row,) = balance_report(nn.BatchNorm2d(3, affine=False), torch.rand(2, 3, 4, 4)).layers
    assert row.gain is None
    assert torch.allclose(row.mean, torch.zeros(3).double(), atol=1e-6)


def test_the_figure_shows_every_layer(tmp_path):
    pytest.importorskip("matplotlib")
    model, x = network(nn.BatchNorm2d), torch.rand(4, 3, 8, 8)
    before = balance_report(model, x)
    for report, panels in ((before, 2), (balance_report(model, x, before=before), 3)):
        figure = report.figure()
        assert len(figure.axes) == panels
        assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["0", "1", "3", "4", "7"]
        figure.savefig(tmp_path / "report.svg")
        assert (tmp_path / "report.svg").read_text().startswith("<?xml")
