"""Every normalisation by name: it does what its paper says, and works in every network."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from balnorm import BalNormConv2d, ChannelCentre, fold
from balnorm.bench.models import create_model
from balnorm.bench.norms import (
    NORMS,
    BatchRenorm2d,
    DynamicTanh2d,
    FilterResponseNorm2d,
    LeadingBatchNorm2d,
    ThresholdedLinear,
    get_norm,
    set_progress,
)
from balnorm.bench.recipes import get_recipe
from balnorm.bench.training.images import make_loaders
from balnorm.bench.training.processes import Processes


@pytest.mark.parametrize("name", NORMS)
def test_every_norm_trains_and_evaluates(name):
    model = create_model("wide_resnet", norm=name, depth=8, width=8)
    x, y = torch.rand(8, 3, 8, 8), torch.arange(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    copy.deepcopy(model)
    model.eval()
    assert torch.allclose(model(x[:3]), model(x)[:3], atol=1e-4)  # nothing of the batch is left
    state = model.state_dict()
    fresh = create_model("wide_resnet", norm=name, depth=8, width=8)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.eval()(x), model(x))


def test_only_balnorm_is_fed_unit_pixels():
    def smallest(norm):
        recipe = replace(get_recipe("digits"), norm=norm, train_limit=100, test_limit=100)
        loader = make_loaders(recipe, Processes(0, 1, torch.device("cpu")), Path("nowhere"))[0]
        return next(images for images, _ in loader.epoch(0)).min().item()

    assert {norm for norm in NORMS if smallest(norm) == 0.0} == {"balnorm"}


@pytest.mark.parametrize("name", NORMS)
def test_weights_start_normal_by_fan_out(name):
    conv = NORMS[name].conv(64, 128, 3, stride=2, padding=1, groups=2)
    standardised = name.startswith("weightstandardization")
    weight = conv.parametrizations.weight.original if standardised else conv.weight
    assert weight.shape == (128, 32, 3, 3)
    if not standardised:
        expected = (2 / (128 * 9)) ** 0.5 * (2**0.5 if isinstance(conv, BalNormConv2d) else 1.0)  # ours counts groups
        assert weight.std().item() == pytest.approx(expected, rel=0.02)


def test_a_bias_stands_where_no_norm_would_take_it_away():
    with_bias = {name for name, norm in NORMS.items() if norm.conv(4, 4, 3).bias is not None}
    others = {"weightnorm", "lrn", "weightstandardization-scaled", "dynamictanh", "none"}
    assert with_bias == {"balnorm"} | others


def test_options_of_norms():
    """Only what differs from the defaults is given to a layer, and only to the layer that has it."""
    assert all(norm.source for norm in NORMS.values())
    options = {"one_pass": False, "mass": "position", "stats_fraction": 0.25, "output_scale": 2.0}
    options |= {"shift": False, "centred": True, "equalise": True}
    options |= {"centre_stream": False}
    assert NORMS["balnorm"].options == tuple(options)
    layer = get_norm("balnorm", **options).conv(3, 4, 3)
    assert {
        name: getattr(layer.options, name) for name in options if name != "centre_stream"
    }.items() <= options.items()
    assert get_norm("balnorm", **options).norm(4)(torch.ones(1, 4, 1, 1)).shape == (1, 4, 1, 1)
    assert get_norm("batchnorm", stats_fraction=0.5).norm(4).stats_fraction == 0.5
    assert type(get_norm("batchnorm", stats_fraction=1.0).norm(4)) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="groupnorm has no option 'mass'; it has none"):
        get_norm("groupnorm", mass="position")


def test_batchnorm_of_a_quarter_is_batchnorm_where_the_quarters_are_alike():
    """Then its output, gradients and running statistics are torch's, but for the count in the unbiased variance."""
    quarter = torch.randn(3, 5, 4, 4, dtype=torch.float64)
    x = torch.cat([quarter] * 4)
    ours, theirs = LeadingBatchNorm2d(5, 0.25).double(), nn.BatchNorm2d(5).double()
    y, expected = ours(x), theirs(x)
    assert torch.allclose(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(ours.weight.grad, theirs.weight.grad)
    assert torch.allclose(ours.running_mean, theirs.running_mean)
    assert torch.allclose(ours.running_var - 0.9, (theirs.running_var - 0.9) * (191 / 192) * (48 / 47))


def test_batchnorm_of_a_quarter_looks_at_the_first_quarter_only():
    norm, x = LeadingBatchNorm2d(3, 0.25).double(), torch.randn(8, 3, 2, 2, dtype=torch.float64)
    changed = torch.cat([x[:2], x[2:] * 100 + 7])
    assert torch.equal(norm(x)[:2], norm(changed)[:2])
    assert torch.autograd.gradcheck(norm, x.requires_grad_())
    assert LeadingBatchNorm2d(3, 0.25)(torch.ones(1, 3, 1, 1)).isfinite().all()
    with pytest.raises(TypeError):
        LeadingBatchNorm2d(3, 0.25, affine=False)


def test_batchnorm_of_a_quarter_is_exact_far_from_zero_in_bfloat16():
    x = (torch.randn(8, 3, 8, 8) + 30).bfloat16()
    expected = F.batch_norm(x[:2].double(), None, None, training=True)
    assert (LeadingBatchNorm2d(3, 0.25)(x)[:2].double() - expected).abs().max() < 0.02


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 32), (96, 32), (48, 16), (40, 8), (7, 1), (32, 16), (8, 4), (2, 1), (1, 1)]
)
def test_groups_divide_the_channels(channels, groups):
    assert NORMS["groupnorm"].norm(channels).num_groups == groups


@pytest.mark.parametrize(("name", "axes"), [("layernorm", (1, 2, 3)), ("instancenorm", (2, 3))])
def test_what_is_normalised_together(name, axes):
    x = torch.randn(3, 8, 5, 5) + torch.arange(8.0).view(8, 1, 1)  # channels that differ
    std, mean = torch.std_mean(x, axes, correction=0, keepdim=True)
    torch.testing.assert_close(NORMS[name].norm(8)(x), (x - mean) / std, rtol=1e-4, atol=1e-4)


def test_local_response_is_alexnets():
    """b = a / (2 + 1e-4 sum of a^2 over the five channels around) ^ 0.75, as in section 3.3 of their paper."""
    a = torch.rand(2, 9, 3, 3) * 100
    expected = torch.empty_like(a)
    for channel in range(9):
        window = a[:, max(0, channel - 2) : channel + 3]
        expected[:, channel] = a[:, channel] / (2 + 1e-4 * window.square().sum(1)) ** 0.75
    assert torch.allclose(NORMS["lrn"].norm(9)(a), expected, rtol=1e-5)


def test_weight_normalisation_separates_length_and_direction():
    conv = NORMS["weightnorm"].conv(3, 4, 3)
    length, direction = (parameter.detach() for parameter in conv.parametrizations.weight.parameters())
    expected = length * direction / direction.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    assert torch.allclose(conv.weight, expected, atol=1e-6)


def test_standardised_weights():
    weight = NORMS["weightstandardization"].conv(3, 8, 3).weight.flatten(1)
    assert torch.allclose(weight.mean(1), torch.zeros(8), atol=1e-5)
    assert torch.allclose(weight.std(1), torch.ones(8), rtol=1e-3)


@pytest.mark.parametrize("groups", [1, 2])
def test_scaled_standardised_weights_are_the_papers(groups):
    """Equation 4 of Brock, De and Smith 2021, with the gain of section 4.1 and gamma of a ReLU."""
    conv = NORMS["weightstandardization-scaled"].conv(4, 6, 3, groups=groups).double()
    w = conv.parametrizations.weight.original
    nn.init.normal_(conv.parametrizations.weight[0].gain)
    for channel in range(6):
        row = w[channel].flatten()
        mean = row.sum() / row.numel()
        std = ((row - mean).square().sum() / row.numel()).sqrt()
        expected = (2 / (1 - 1 / torch.pi)) ** 0.5 * (row - mean) / (std * row.numel() ** 0.5)
        expected = expected * conv.parametrizations.weight[0].gain[channel]
        assert torch.allclose(conv.weight[channel].flatten(), expected)
    assert NORMS["weightstandardization-scaled"].conv(1, 2, 1).weight.isfinite().all()  # one weight, and no deviation


def test_scaled_standardised_weights_keep_the_variance():
    """Behind a ReLU of unit Gaussians, at the start: that is what the paper's gamma is for."""
    torch.manual_seed(0)
    conv = NORMS["weightstandardization-scaled"].conv(64, 64, 3)
    y = conv(torch.randn(16, 64, 10, 10).relu())
    assert y.var((0, 2, 3)).mean().item() == pytest.approx(1.0, rel=0.05)


def test_filter_response_norm_is_the_papers():
    """Equations 1 and 2 of Singh and Krishnan 2020, one channel of one image at a time, and gradients."""
    norm = FilterResponseNorm2d(3).double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    for image in range(2):
        for channel in range(3):
            plane = x[image, channel]
            nu2 = plane.square().sum() / 20
            expected = norm.weight[channel] * plane / (nu2 + 1e-6).sqrt() + norm.bias[channel]
            assert torch.allclose(y[image, channel], expected)
    assert torch.autograd.gradcheck(norm, x)
    assert norm(torch.zeros(1, 3, 2, 2, dtype=torch.float64)).isfinite().all()


def test_the_thresholded_linear_unit_learns_its_threshold():
    unit = ThresholdedLinear(2).double()
    with torch.no_grad():
        unit.threshold.copy_(torch.tensor([-0.5, 0.75]))
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    y = unit(x)
    assert torch.equal(y[:, 0], x[:, 0].clamp(min=-0.5))
    assert torch.equal(y[:, 1], x[:, 1].clamp(min=0.75))
    y.sum().backward()
    assert unit.threshold.grad.tolist() == [(x[:, 0] < -0.5).sum(), (x[:, 1] < 0.75).sum()]


@pytest.mark.parametrize(
    "name", ["wide_resnet", "cifar_resnet", "preact_resnet18", "preact_resnet50", "resnet18", "resnet50"]
)
def test_networks_take_the_activation_of_their_norm(name):
    """Filter response normalisation comes with its own; every ReLU of the network becomes one."""
    model, plain = (create_model(name, norm, width=8) for norm in ("frn", "batchnorm"))
    relus, units = (
        sum(isinstance(module, kind) for module in each.modules())
        for each, kind in ((plain, nn.ReLU), (model, ThresholdedLinear))
    )
    assert units == relus > 8
    model(torch.rand(2, 3, 32, 32)).sum().backward()
    assert all(module.threshold.grad is not None for module in model.modules() if isinstance(module, ThresholdedLinear))


def test_dynamic_tanh_is_the_papers():
    """Equation 1 of Zhu et al. 2025: one alpha for the layer, from 0.5, and scale and shift for each channel."""
    norm = DynamicTanh2d(3).double()
    assert norm.alpha.shape == ()
    assert norm.alpha == 0.5
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64) * 3
    expected = torch.stack([(0.5 * x[:, c]).tanh() * norm.weight[c] + norm.bias[c] for c in range(3)], 1)
    assert torch.allclose(norm(x), expected)


def test_a_centred_stream_stands_where_batch_norm_does():
    model, plain = (
        create_model("wide_resnet", get_norm(norm, **options), depth=8, width=8)
        for norm, options in (("balnorm", {"centre_stream": True}), ("batchnorm", {}))
    )
    centres, norms = (
        [name for name, module in each.named_modules() if isinstance(module, kind)]
        for each, kind in ((model, ChannelCentre), (plain, nn.BatchNorm2d))
    )
    assert centres == norms
    assert all(module.bias is None for module in model.modules() if isinstance(module, BalNormConv2d))
    assert type(get_norm("balnorm", centre_stream=False).norm(4)) is nn.Identity
    x, layer = torch.rand(8, 3, 16, 16), get_norm("weightnorm-meanonly").norm(3)
    assert layer(x).mean((0, 2, 3)).abs().max() < 1e-6
    model(x).sum().backward()
    folded = fold(model.eval())
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-4)
    convolutions = [module for module in folded.modules() if isinstance(module, nn.Conv2d)]
    streams = ["stage1.0.norm1", "stage2.0.norm1", "stage3.0.norm1", "norm"]  # sums have no convolution to merge with
    assert [name for name in centres if type(folded.get_submodule(name)) is nn.Conv2d] == streams
    assert len(convolutions) == len(list(filter(lambda m: isinstance(m, BalNormConv2d), model.modules()))) + 4


# --------------------------------------------------------------------------------------------------------------------
# Batch renormalisation
# --------------------------------------------------------------------------------------------------------------------


def renormalised(norm, x):
    """The paper's algorithm 1, in float64 and word for word."""
    x = x.double()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    std = (variance + norm.eps).sqrt()
    running_mean, running_std = norm.running_mean.double(), norm.running_std.double()
    r_max, d_max = (float(limit) for limit in norm.limits())
    r = (std.detach() / running_std).clamp(1 / r_max, r_max)
    d = ((mean.detach() - running_mean) / running_std).clamp(-d_max, d_max)
    view = (1, -1, 1, 1)
    normalised = (x - mean.view(view)) / std.view(view) * r.view(view) + d.view(view)
    return normalised * norm.weight.double().view(view) + norm.bias.double().view(view)


@pytest.mark.parametrize("progress", [0.0, 0.02, 0.1, 0.2, 0.5])
def test_batch_renormalisation_is_the_papers(progress):
    norm = BatchRenorm2d(3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    norm.running_mean.uniform_(-1, 1)
    norm.running_std.uniform_(0.5, 2)
    norm.num_batches_tracked.fill_(1000)
    set_progress(nn.Sequential(norm), progress)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    expected = renormalised(norm, x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    before = norm.running_mean.clone(), norm.running_std.clone()
    y = norm(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.allclose(y.double(), expected, atol=1e-4)
    assert torch.allclose(grad, expected_grad.float(), atol=1e-3)
    mean, std = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + norm.eps).sqrt()
    assert torch.allclose(norm.running_mean, torch.lerp(before[0], mean, 0.01).detach())
    assert torch.allclose(norm.running_std, torch.lerp(before[1], std, 0.01).detach())
    assert norm.num_batches_tracked == 1001


def test_the_limits_of_renormalisation_open_with_training():
    norm = BatchRenorm2d(1)
    found = {}
    for step in (0, 5_000, 15_000, 25_000, 40_000, 130_000):
        set_progress(norm, step / 130_000)
        found[step] = tuple(round(float(limit), 3) for limit in norm.limits())
    assert found == {
        0: (1.0, 0.0),
        5_000: (1.0, 0.0),
        15_000: (1.571, 2.5),
        25_000: (2.143, 5.0),
        40_000: (3.0, 5.0),
        130_000: (3.0, 5.0),
    }
    with pytest.raises(ValueError, match=r"progress must be between 0 and 1, got 1.5"):
        set_progress(norm, 1.5)


def test_renormalisation_without_freedom_is_batch_norm():
    renorm, norm = BatchRenorm2d(3), nn.BatchNorm2d(3, eps=1e-3)
    x = torch.randn(4, 3, 5, 5) * 3 + 1
    assert torch.allclose(renorm(x), norm(x), atol=1e-5)


def test_statistics_stay_in_float32():
    norm, x = BatchRenorm2d(3), torch.full((4, 3, 32, 32), 300.0, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert norm.running_mean.dtype == torch.float32
    assert y.isfinite().all()
    assert torch.allclose(norm.running_mean, torch.full((3,), 300.0))


@pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast")  # which the checkpoints of torch 2.4 use themselves
def test_running_statistics_cannot_be_ruined():
    norm = BatchRenorm2d(3)
    good = torch.rand(4, 3, 8, 8)
    norm(good)
    before = {name: value.clone() for name, value in norm.named_buffers()}
    bad = good.clone()
    bad[0] = torch.inf
    norm(bad)
    assert norm(good[:0]).shape == (0, 3, 8, 8)
    assert all(torch.equal(value, before[name]) for name, value in norm.named_buffers())
    checkpoint(norm, good.requires_grad_(), use_reentrant=False).sum().backward()
    assert norm.num_batches_tracked == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in NORMS if name != "lrn"])  # torch has no lrn in half on the CPU
def test_norms_in_other_precisions(name, dtype):
    model = create_model("wide_resnet", name, depth=8, width=8).to(dtype)
    out = model(torch.rand(4, 3, 8, 8, dtype=dtype))
    out.sum().backward()
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert model.eval()(torch.rand(4, 3, 8, 8, dtype=dtype)).dtype == dtype
    renorms = [module for module in model.modules() if isinstance(module, BatchRenorm2d)]
    assert all(module.running_mean.dtype in (torch.float32, torch.float64) for module in renorms)


def test_renormalisation_starts_from_the_first_batch():
    """Its moving average of 0.01 a step kept the initial 0 and 1 for hundreds of steps, and pulled outputs there."""
    norm = BatchRenorm2d(3)
    x = torch.randn(8, 3, 4, 4) * 5 + 3
    norm(x)
    assert torch.allclose(norm.running_mean, x.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(norm.eval()(x).std(), torch.tensor(1.0), atol=0.05)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"norm must be one of balnorm, .*, got 'batch'"):
        get_norm("batch")
