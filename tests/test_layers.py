"""The modules: options, state, equivalences, and what users of such layers have hit elsewhere."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import balnorm
import balnorm.functional as BF
from balnorm import BalNormConv1d, BalNormConv2d, BalNormConvTranspose2d, BalNormLinear
from cases import CASES, MASS_AND_PASS

ALL = pytest.mark.parametrize("name", CASES)


def trained(name, **options):
    """A layer that has seen a few batches and whose parameters are not the initial ones."""
    layer = CASES[name].build(**options)
    for _ in range(3):
        layer(CASES[name].input(dtype=layer.weight.dtype))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


# Options ------------------------------------------------------------------------------------------------------------


@ALL
def test_it_is_the_torch_layer_with_more(name):
    layer = CASES[name].build()
    assert isinstance(layer, layer.plain)
    assert isinstance(layer, balnorm.BalNormLayer)
    plain = inspect.signature(layer.plain.__init__).parameters
    ours = [p for p in inspect.signature(type(layer).__init__).parameters if p in plain]
    assert [p for p in plain if p not in ("device", "dtype")] == [p for p in ours if p not in ("device", "dtype")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mass": "pixel"}, "mass must be one of 'channel', 'position', got 'pixel'"),
        ({"stats_fraction": 0.0}, "stats_fraction must be above 0 and at most 1, got 0.0"),
        ({"stats_fraction": 1.5}, "stats_fraction must be above 0 and at most 1"),
        ({"momentum": -0.1}, "momentum must be None .* or between 0 and 1, got -0.1"),
        ({"output_scale": "ones"}, "output_scale must be 'unit_variance' or a positive finite number, got 'ones'"),
        ({"output_scale": float("nan")}, "output_scale must be 'unit_variance' or a positive finite number"),
        ({"output_scale": None}, "output_scale must be 'unit_variance' or a positive finite number, got None"),
        ({"output_scale": float("inf")}, "output_scale must be 'unit_variance' or a positive finite number, got inf"),
        ({"output_scale": True}, "output_scale must be 'unit_variance' or a positive finite number, got True"),
        ({"output_scale": 0.0}, "output_scale must be 'unit_variance' or a positive finite number, got 0.0"),
        ({"momentum": "0.1"}, "momentum must be None .* or between 0 and 1, got '0.1'"),
        ({"momentum": True}, "momentum must be None .* or between 0 and 1, got True"),
        ({"stats_fraction": True}, "stats_fraction must be above 0 and at most 1, got True"),
        ({"stats_fraction": None}, "stats_fraction must be above 0 and at most 1, got None"),
        ({"one_pass": "two"}, "one_pass must be True or False, got 'two'"),
        ({"centred": 1}, "centred must be True or False, got 1"),
        ({"shift": 1}, "shift must be True, False or 'auto', got 1"),
        ({"sync_stats": None}, "sync_stats must be True or False, got None"),
        ({"affine": 0}, "affine must be True or False, got 0"),
        ({"track_running_stats": "no"}, "track_running_stats must be True or False, got 'no'"),
        ({"process_group": object()}, "process_group needs sync_stats=True"),
        ({"padding_mode": "mirror"}, "padding_mode must be one of"),
    ],
)
def test_wrong_options_raise_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        BalNormConv2d(3, 4, 3, **options)


def test_unknown_options_raise_at_construction():
    with pytest.raises(TypeError, match=r"BalNormConv2d\(\) got an unexpected keyword argument 'eps': .* no.* epsilon"):
        BalNormConv2d(3, 4, 3, eps=1e-5)
    with pytest.raises(TypeError, match=r"BalNormLinear\(\) got .* 'onepass'; its options are mass, one_pass, "):
        BalNormLinear(3, 4, onepass=True)
    with pytest.raises(ValueError, match="BalNormLinear has one kind of mass"):
        BalNormLinear(3, 4, mass="position")


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(BalNormConv2d(3, 4, 3)) == "BalNormConv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))"
    layer = BalNormConv2d(3, 4, 1, bias=False, mass="position", one_pass=False, stats_fraction=0.25, output_scale=1.0)
    layer.stats_frozen = True
    assert repr(layer) == (
        "BalNormConv2d(3, 4, kernel_size=(1, 1), stride=(1, 1), bias=False, "
        "mass='position', one_pass=False, stats_fraction=0.25, output_scale=1.0, stats_frozen=True)"
    )


def test_affine_false_keeps_the_gain_out_of_the_parameters():
    layer = BalNormConv2d(3, 4, 3, affine=False, output_scale=2.0)
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}
    assert layer.gain.tolist() == [1.0] * 4
    assert layer.output_scale.tolist() == [2.0] * 4
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(layer(x), 2.0 * BF.bal_conv2d(x, layer.weight))


def test_an_output_scale_of_unit_variance_gives_outputs_of_unit_variance():
    x = torch.randn(64, 128, 12, 12).relu()
    layers = [
        BalNormConv2d(128, 64, 3, padding=1),
        BalNormConv2d(128, 64, 3, padding=1, stride=2, groups=2),
        BalNormConv2d(128, 64, 3, mass="position"),
        BalNormConvTranspose2d(128, 64, 4, stride=2, padding=1),
        BalNormConvTranspose2d(128, 64, 3, padding=1),
    ]
    for layer in layers:
        y = layer(x)[..., 2:-2, 2:-2]  # without the border, where zero padding takes its share
        assert y.var((0, 2, 3)).mean().sqrt().item() == pytest.approx(1.0, abs=0.06)
    softplus = nn.functional.softplus(torch.randn(64, 128, 12, 12))
    for values in (x, softplus, torch.randn(64, 128, 12, 12).tanh() + 3):  # a centred mass is for any input
        y = BalNormConv2d(128, 64, 3, padding=1, centred=True)(values)[..., 2:-2, 2:-2]
        assert y.var((0, 2, 3)).mean().sqrt().item() == pytest.approx(1.0, abs=0.15)
    y = BalNormLinear(128, 64)(x[..., 0, 0])
    assert y.var(0).mean().sqrt().item() == pytest.approx(1.0, abs=0.12)


def test_stats_fraction_takes_the_leading_samples():
    layer = BalNormConv2d(3, 4, 3, stats_fraction=0.25)
    x = torch.rand(8, 3, 8, 8)
    x[2:] *= 100
    layer(x)
    torch.testing.assert_close(layer.running_mass, BF.statistics(x[:2], 3)[1])
    layer.reset_running_stats()
    layer(x[:1])
    torch.testing.assert_close(layer.running_mass, BF.statistics(x[:1], 3)[1])


@pytest.mark.parametrize(("fraction", "counted"), [(0.5, 3), (0.3, 2), (0.29, 1), (0.01, 1)])
def test_a_fraction_is_rounded_to_the_nearest_sample_halves_up(fraction, counted):
    x = torch.rand(5, 3, 6, 6)
    torch.testing.assert_close(BF.statistics(x, 3, stats_fraction=fraction), BF.statistics(x[:counted], 3))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_a_fraction_of_no_samples_changes_no_statistics(name):
    layer = CASES[name].build(stats_fraction=0.5)
    layer(CASES[name].input()[:0])
    assert layer.num_batches_tracked == 0
    assert (layer.running_mass == 1).all()


def test_linear_takes_the_fraction_of_the_first_dimension():
    layer = BalNormLinear(3, 4, stats_fraction=0.5)
    x = torch.rand(3, 5, 3)  # two of three, and not half of fifteen
    layer(x)
    torch.testing.assert_close(layer.running_mass, x[:2].mean((0, 1), keepdim=True)[0])


def test_without_running_stats_eval_uses_the_batch():
    layer = BalNormConv2d(3, 4, 3, track_running_stats=False)
    x = torch.rand(2, 3, 8, 8)
    assert layer.running_mass is None
    assert layer.num_batches_tracked is None
    torch.testing.assert_close(layer(x), layer.eval()(x))
    with pytest.raises(RuntimeError, match="track_running_stats=False"):
        layer.fuse()


def test_frozen_statistics_survive_train():
    layer = BalNormConv2d(3, 4, 3)
    x = torch.rand(2, 3, 8, 8)
    layer(x)
    layer.stats_frozen = True
    before = copy.deepcopy(layer.state_dict())
    layer.train()
    torch.testing.assert_close(layer(10 * x), layer.eval()(10 * x))
    torch.testing.assert_close(layer.state_dict(), before)


# Equivalences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_pass", [True, False])
def test_linear_is_a_one_by_one_convolution(one_pass):
    linear = BalNormLinear(5, 4, one_pass=one_pass)
    conv = BalNormConv2d(5, 4, 1, one_pass=one_pass)
    with torch.no_grad():
        conv.weight.copy_(linear.weight[..., None, None])
    x = torch.rand(6, 7, 8, 5)
    torch.testing.assert_close(linear(x), conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
    torch.testing.assert_close(linear.running_mass, conv.running_mass[..., 0, 0])


@pytest.mark.parametrize("one_pass", [True, False])
def test_position_is_channel_for_circular_padding_and_stride_one(one_pass):
    torch.manual_seed(1)
    x, w = torch.rand(3, 4, 7, 6), torch.randn(5, 4, 3, 3)
    options = {"padding": 1, "padding_mode": "circular", "one_pass": one_pass}
    channel = BF.bal_conv2d(x, w, mass="channel", **options)
    torch.testing.assert_close(BF.bal_conv2d(x, w, mass="position", **options), channel)


@ALL
@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
def test_eval_does_not_depend_on_the_rest_of_the_batch(name, mass, one_pass):
    layer = trained(name, mass=mass, one_pass=one_pass).eval()
    x = CASES[name].input()
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]))


def test_eval_does_not_depend_on_the_image_size():
    layer = trained("conv2d", mass="position").eval()
    x = torch.rand(1, 3, 20, 20)
    torch.testing.assert_close(layer(x)[..., :8, :8], layer(x[..., :9, :9])[..., :8, :8])


@ALL
@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
def test_fuse_gives_the_plain_layer(name, mass, one_pass):
    layer = trained(name, mass=mass, one_pass=one_pass).eval()
    state = torch.get_rng_state()
    plain = layer.fuse()
    assert torch.equal(torch.get_rng_state(), state)
    assert type(plain) is layer.plain
    assert not plain.training
    x = CASES[name].input()
    torch.testing.assert_close(plain(x), layer(x))
    assert plain.weight.data_ptr() != layer.weight.data_ptr()
    assert plain.bias.data_ptr() != layer.bias.data_ptr()


@pytest.mark.parametrize("kind", [BalNormConv1d, BalNormConv2d])
def test_depthwise_is_a_layer_for_each_channel(kind):
    axes = 1 if kind is BalNormConv1d else 2
    layer = kind(3, 6, 3, groups=3, padding=1, mass="position")
    x = torch.rand(4, 3, *(7,) * axes)
    y = layer(x)
    for c in range(3):
        single = kind(1, 2, 3, padding=1, mass="position")
        single.load_state_dict({**single.state_dict(), "weight": layer.weight[2 * c : 2 * c + 2]})
        torch.testing.assert_close(y[:, 2 * c : 2 * c + 2], single(x[:, c : c + 1]))


def test_what_is_not_to_be_learned_stays_so():
    for learned in (True, False):
        plain = nn.Conv2d(3, 4, 3).requires_grad_(learned)
        layer = BalNormConv2d.from_conv(plain)
        assert layer.weight.requires_grad == layer.bias.requires_grad == learned
        folded = layer.fuse()
        assert folded.weight.requires_grad == folded.bias.requires_grad == learned


@ALL
def test_from_plain_keeps_geometry_weight_and_bias(name):
    layer = trained(name)
    plain = layer.fuse()
    build = type(layer).from_linear if isinstance(layer, BalNormLinear) else type(layer).from_conv
    rebuilt = build(plain, momentum=None)
    assert rebuilt.momentum is None
    assert torch.equal(rebuilt.weight, plain.weight)
    assert torch.equal(rebuilt.bias, plain.bias)
    x = CASES[name].input()
    assert rebuilt(x).shape == plain(x).shape
    assert {k: getattr(rebuilt, k) for k in layer._arguments} == {k: getattr(layer, k) for k in layer._arguments}


def test_from_conv_options():
    conv = nn.Conv2d(3, 4, 3, bias=False, dtype=torch.float64).eval()
    conv.weight.requires_grad_(False)
    layer = BalNormConv2d.from_conv(conv)
    assert not layer.training
    assert not layer.weight.requires_grad
    assert layer.weight.dtype == layer.gain.dtype == torch.float64
    assert layer.bias.tolist() == [0.0] * 4
    assert BalNormConv2d.from_conv(conv, bias=False).bias is None
    with pytest.raises(ValueError, match="bias=False would drop the bias"):
        BalNormConv2d.from_conv(nn.Conv2d(3, 4, 3), bias=False)
    with pytest.raises(TypeError, match="BalNormConv2d can be made from a Conv2d, got a Conv1d"):
        BalNormConv2d.from_conv(nn.Conv1d(3, 4, 3))


@ALL
def test_unbatched_input_is_a_batch_of_one(name):
    layer = CASES[name].build(track_running_stats=False)
    x = CASES[name].input()[:1]
    torch.testing.assert_close(layer(x[0]), layer(x)[0])


def test_linear_takes_any_leading_dimensions():
    layer = BalNormLinear(5, 4, track_running_stats=False)
    x = torch.rand(2, 3, 4, 5)
    torch.testing.assert_close(layer(x), layer(x.flatten(0, 2)).unflatten(0, (2, 3, 4)))


def test_transposed_output_size():
    layer = BalNormConvTranspose2d(3, 4, 3, stride=2, mass="position", one_pass=False, output_scale=1.0)
    x = torch.rand(2, 3, 5, 5)
    assert layer(x, output_size=(12, 12)).shape[2:] == (12, 12)
    assert layer(x, output_size=[12, 12]).mean().abs() < 1e-5
    with pytest.raises(ValueError, match="requested an output size"):
        layer(x, output_size=(30, 30))


@ALL
def test_outputs_may_be_changed_in_place(name):
    """conv1d and linear return views of what they computed, which autograd functions must not hand out."""
    layer = CASES[name].build()
    x = CASES[name].input()
    expected = torch.autograd.grad(layer(x).relu().sum(), list(layer.parameters()))
    changed = torch.autograd.grad(layer(x).relu_().sum(), list(layer.parameters()))
    torch.testing.assert_close(changed, expected)


def test_outputs_of_linear_over_leading_dimensions_may_be_changed_in_place():
    layer = BalNormLinear(5, 4)
    layer(torch.rand(2, 3, 5)).relu_().sum().backward()


@pytest.mark.parametrize("other", [torch.uint8, torch.long, torch.float64, torch.bfloat16])
def test_an_input_of_another_dtype_is_refused(other):
    layer, x = BalNormConv2d(3, 4, 3), torch.ones(2, 3, 5, 5).to(other)
    for training in (True, False):
        with pytest.raises(RuntimeError, match=r"the input is .* and the weight torch\.float32: convert one"):
            layer.train(training)(x)
    double = BalNormLinear(3, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # leaves float64 alone, as torch does
        assert double(torch.rand(2, 3).double()).dtype == torch.float64


# State --------------------------------------------------------------------------------------------------------------


def test_state_dict_names_are_frozen():
    """Renamed keys would make old checkpoints load as newly initialised, in silence."""
    names = ["weight", "bias", "gain", "output_scale", "running_mean", "running_mass", "num_batches_tracked", "form"]
    for affine in (True, False):
        assert sorted(BalNormConv2d(3, 4, 3, affine=affine).state_dict()) == sorted(names)
    shapes = {key: tuple(value.shape) for key, value in BalNormConv2d(6, 4, 3, groups=2).state_dict().items()}
    assert shapes == {
        "weight": (4, 3, 3, 3),
        "bias": (4,),
        "gain": (4,),
        "output_scale": (4,),
        "running_mean": (1, 6, 1, 1),
        "running_mass": (1, 6, 1, 1),
        "num_batches_tracked": (),
        "form": (5,),
    }
    assert BalNormConv2d(6, 4, 3, mass="position").running_mass.shape == (1, 6, 3, 3)
    assert BalNormConvTranspose2d(6, 4, 3).running_mass.shape == (1, 6, 1, 1)
    assert BalNormLinear(6, 4).running_mass.shape == (1, 6)


def test_parameters_alone_are_taken_as_they_are():
    """As some averages of weights and some files have them."""
    layer = BalNormConv2d(2, 4, 3, track_running_stats=False)
    layer.gain.data.uniform_(0.5, 2.0)
    other = BalNormConv2d(2, 4, 3, track_running_stats=False)
    found = other.load_state_dict(dict(layer.named_parameters()), strict=False)
    assert found.missing_keys == ["output_scale"]
    assert torch.equal(other.gain, layer.gain)


def test_a_layer_leaves_its_process_group_when_it_stops_to_synchronise():
    layer = BalNormConv2d(3, 4, 3, sync_stats=True, process_group=object())
    layer.sync_stats = False
    assert (layer.sync_stats, layer.process_group) == (False, None)


def test_options_are_attributes():
    layer = BalNormConv2d(3, 4, 3)
    layer.momentum = None
    assert layer.options.momentum is None
    assert repr(layer).endswith("momentum=None)")
    with pytest.raises(ValueError, match="momentum must be None"):
        layer.momentum = 2.0
    with pytest.raises(AttributeError, match="mass is fixed when the layer is made"):
        layer.mass = "position"
    assert inspect.signature(BalNormConv2d).parameters["stats_fraction"].default == 1.0


def test_geometry_that_is_changed_later_counts():
    """People set ``padding_mode`` or ``stride`` on the layers of a finished network."""
    layer, x = BalNormConv2d(3, 4, 3, padding=1), torch.rand(2, 3, 6, 6)
    layer.padding_mode, layer.stride = "circular", (2, 2)
    expected = BF.bal_conv2d(x, layer.weight, None, layer.output_scale, 2, 1, padding_mode="circular")
    torch.testing.assert_close(layer(x), expected)


@ALL
def test_deepcopy_after_backward_and_pickle(name):
    """weight_norm stored a computed, non-leaf weight on the module: deepcopy failed, and with it EMA and SWA."""
    layer = trained(name)
    layer(CASES[name].input()).square().sum().backward()
    x = CASES[name].input()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other.eval()(x), layer.eval()(x))
        assert repr(other) == repr(layer)
    fresh = CASES[name].build()
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fresh.eval()(x), layer.eval()(x))
    assert not [key for key, value in vars(layer).items() if isinstance(value, torch.Tensor)]


def test_weight_is_the_real_parameter():
    """Under weight_norm's hooks m.weight.data.normal_() was a silent no-op."""
    layer = BalNormConv2d(3, 4, 3).eval()
    x = torch.rand(1, 3, 6, 6)
    before = layer(x)
    layer.weight.data.normal_()
    assert layer.weight.is_leaf
    assert not torch.allclose(layer(x), before)


@ALL
def test_dtype_conversion(name):
    layer = CASES[name].build().double()
    assert {p.dtype for p in layer.state_dict().values()} == {torch.float64, torch.long}
    x = CASES[name].input(dtype=torch.float64)
    half = copy.deepcopy(layer).half()
    assert half.running_mass.dtype == torch.float16
    y = half(x.half())
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), layer(x), atol=0.03, rtol=0.03)
    torch.testing.assert_close(half.running_mass.double(), layer.running_mass, atol=1e-3, rtol=1e-2)


@ALL
def test_meta_construction(name):
    meta = CASES[name].build(device="meta")
    assert {t.device.type for t in meta.state_dict().values()} == {"meta"}
    assert meta(CASES[name].input(device="meta")).device.type == "meta"
    real = meta.to_empty(device="cpu")
    torch.manual_seed(3)
    real.reset_parameters()
    torch.manual_seed(3)
    torch.testing.assert_close(real.state_dict(), CASES[name].build().state_dict())


def test_the_same_seed_gives_the_same_layer_and_draws_once():
    torch.manual_seed(5)
    layer = BalNormConv2d(3, 64, 3)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    weight = balnorm.init.balanced_normal_(torch.empty(64, 3, 3, 3))
    assert torch.equal(layer.weight, weight)
    assert torch.equal(torch.get_rng_state(), after)


def test_an_infinite_batch_does_not_enter_the_running_mass():
    """One infinite batch under float16 ruined the running statistics for good, visible only in eval mode."""
    layer = BalNormConv2d(3, 4, 3)
    layer(torch.rand(2, 3, 6, 6))
    before = copy.deepcopy(layer.state_dict())
    for bad in (float("inf"), float("nan"), -float("inf")):
        x = torch.rand(2, 3, 6, 6)
        x[0, 1, 2, 3] = bad
        layer(x)
        torch.testing.assert_close(layer.state_dict(), before)
    layer(torch.rand(2, 3, 6, 6))
    assert layer.num_batches_tracked == 2


def test_a_mass_beyond_float16_does_not_enter_a_float16_buffer():
    layer = BalNormConv2d(3, 4, 3, dtype=torch.float16, stats_fraction=0.5)
    layer(torch.full((2, 3, 5, 5), 1.0).half())
    layer(torch.full((2, 3, 5, 5), 6e4).half())
    assert layer.running_mass.isfinite().all()
    assert (layer.running_mass <= 6e4).all()


def test_eval_forward_before_any_training_uses_a_mass_of_one():
    layer = BalNormConv2d(3, 4, 3).eval()
    expected = BF.balance(layer.weight, torch.ones(1, 3, 1, 1), layer.gain)
    torch.testing.assert_close(layer(torch.ones(1, 3, 5, 5)), F.conv2d(torch.ones(1, 3, 5, 5), expected, layer.bias))
