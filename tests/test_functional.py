"""The maths against the slow reference, over geometries, and over many training steps."""

import functools
import itertools

import pytest
import torch
from torch import nn

import balnorm.functional as BF
import reference
from balnorm import BalNormConv2d, BalNormLinear
from balnorm.init import balanced_normal_
from cases import MASS_AND_PASS

pytestmark = pytest.mark.usefixtures("backend")
CONV_GEOMETRIES = [
    # kernel, stride, padding, dilation, groups, padding_mode
    ((3,), (1,), (1,), (1,), 1, "zeros"),
    ((4,), (3,), (2,), (2,), 2, "zeros"),
    ((1, 1), (1, 1), (0, 0), (1, 1), 1, "zeros"),
    ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros"),
    ((3, 3), (2, 2), (1, 1), (1, 1), 1, "zeros"),
    ((3, 3), (2, 2), (0, 0), (1, 1), 4, "zeros"),
    ((5, 2), (1, 3), (2, 0), (1, 2), 2, "zeros"),
    ((3, 3), (1, 1), (3, 4), (2, 2), 1, "zeros"),
    ((3, 3), (4, 4), (0, 1), (1, 1), 1, "zeros"),
    ((3, 3), (1, 1), (1, 1), (1, 1), 1, "circular"),
    ((3, 3), (2, 1), (2, 1), (1, 1), 2, "reflect"),
    ((3, 2), (1, 2), (1, 2), (2, 1), 1, "replicate"),
    ((7, 3), (2, 1), (3, 1), (1, 1), 2, "zeros"),  # larger than the image, as is that of reach 7 above
    ((7, 3), (2, 1), (3, 1), (1, 1), 2, "reflect"),
    ((2, 3, 1), (1, 2, 1), (1, 1, 0), (2, 1, 1), 2, "zeros"),
]
TRANSPOSED_GEOMETRIES = [
    # kernel, stride, padding, dilation, groups, output_padding
    ((3,), (2,), (1,), (1,), 1, (1,)),
    ((3, 3), (1, 1), (0, 0), (1, 1), 1, (0, 0)),
    ((4, 4), (2, 2), (1, 1), (1, 1), 2, (0, 0)),
    ((3, 2), (3, 2), (2, 1), (2, 1), 4, (2, 0)),
    ((3, 3), (1, 1), (3, 2), (2, 2), 1, (0, 0)),  # larger than its output
    ((2, 2, 3), (2, 1, 2), (0, 0, 1), (1, 1, 1), 2, (0, 0, 1)),
]
STATISTICS = [
    {"mass": mass, "fraction": fraction, "centred": centred}
    for mass, (fraction, centred) in itertools.product(BF.MASSES, ((1.0, False), (0.4, False), (1.0, True)))
]
WEIGHTS = [{"one_pass": True, "shift": True}, {"one_pass": False, "shift": True}, {"one_pass": True, "shift": False}]


def tensors(kernel, groups, transposed, signed=False, inputs=4, outputs=8):
    shape = (3, inputs, *(6, 7, 4)[: len(kernel)])
    x = torch.randn(shape, dtype=torch.float64)
    x = x.where(torch.rand(shape) > 0.2, 0.0) if signed else x.relu()  # exact zeros among them, as after a ReLU
    weight = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    w = balanced_normal_(torch.empty(*weight, *kernel, dtype=torch.float64), groups, transposed)
    return x, w, torch.randn(outputs, dtype=torch.float64), torch.rand(outputs, dtype=torch.float64) + 0.5


def reference_geometry(geometry, transposed):
    _, stride, padding, dilation, groups, last = geometry
    found = {"stride": stride, "padding": [(p, p) for p in padding], "dilation": dilation, "groups": groups}
    return found | ({"transposed": True, "output_padding": last} if transposed else {"mode": last})


def convolve(geometry, transposed, x, w, bias, gain, **options):
    _, stride, padding, dilation, groups, last = geometry
    if transposed:
        return BF.bal_conv_transpose(x, w, bias, gain, stride, padding, last, groups, dilation, **options)
    return BF.bal_conv(x, w, bias, gain, stride, padding, dilation, groups, padding_mode=last, **options)


@functools.cache  # the slow part, once for both backends
def tensors_and_reference(geometry, transposed, **options):
    """Input, weight, bias and gain; and output, effective weight, mean and mass by the reference."""
    torch.manual_seed(0)
    given = tensors(geometry[0], geometry[4], transposed, signed=True)
    return given, reference.balanced_conv(*given, **reference_geometry(geometry, transposed), **options)


GEOMETRIES = [(geometry, False) for geometry in CONV_GEOMETRIES] + [(g, True) for g in TRANSPOSED_GEOMETRIES]


# The weight meets the statistics as two tensors only. So every geometry is tried with all kinds of statistics, and with
# the forms of the weight in turn.
@pytest.mark.parametrize("statistics", range(len(STATISTICS)), ids=map(str, STATISTICS))
@pytest.mark.parametrize("number", range(len(GEOMETRIES)), ids=map(str, GEOMETRIES))
def test_convolution_is_the_reference(number, statistics):
    geometry, transposed = GEOMETRIES[number]
    taken, weight = STATISTICS[statistics], WEIGHTS[(number + statistics) % len(WEIGHTS)]
    (x, w, bias, gain), expected = tensors_and_reference(geometry, transposed, **taken, **weight)
    expected_output, expected_weight, expected_mean, expected_mass = expected
    mean, mass, counter = torch.zeros_like(expected_mean), torch.ones_like(expected_mass), torch.tensor(0)
    running = {"running_mean": mean, "running_mass": mass, "num_batches_tracked": counter}
    options = {"mass": taken["mass"], "stats_fraction": taken["fraction"], "centred": taken["centred"], **weight}
    y = convolve(geometry, transposed, x, w, bias, gain, **options, **running)
    torch.testing.assert_close(y, expected_output)
    torch.testing.assert_close(mean, expected_mean)
    torch.testing.assert_close(mass, expected_mass)
    assert counter == 1
    effective = BF.balance(w, mass, gain, groups=geometry[4], transposed=transposed, **weight)
    torch.testing.assert_close(effective, expected_weight)


def output_and_gradients(function, given):
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y.pow(3).sum(), leaves)


@functools.cache  # once for both backends
def tensors_and_papers_layer(geometry, transposed, one_pass):
    torch.manual_seed(0)
    given = tensors(geometry[0], geometry[4], transposed)
    arguments = {**reference_geometry(geometry, transposed), "one_pass": one_pass, "paper": True}
    return given, output_and_gradients(lambda *leaves: reference.balanced_conv(*leaves, **arguments)[0], given)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(("geometry", "transposed"), GEOMETRIES, ids=str)
def test_without_negative_inputs_it_is_the_papers_layer(geometry, transposed, one_pass):
    """In value and gradient, zeros among the inputs."""
    given, expected = tensors_and_papers_layer(geometry, transposed, one_pass)
    options = {"one_pass": one_pass, "shift": True}
    found = output_and_gradients(lambda *leaves: convolve(geometry, transposed, *leaves, **options), given)
    for ours, papers in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, papers, rtol=0, atol=1e-12 * max(1.0, float(papers.abs().max())))


@pytest.mark.parametrize("mass", BF.MASSES)
def test_a_nearly_dead_group_is_divided_by_a_thousandth_of_the_mean(mass):
    """Its outputs would be a million times as large as the others', and so would be its gradients."""
    x, w, bias, gain = tensors((3, 3), 4, False)
    x[:, 1] *= 1e-6
    geometry = {"stride": (1, 1), "padding": [(1, 1)] * 2, "dilation": (1, 1), "groups": 4, "mass": mass}
    given = (x, w, bias, gain)
    expected = output_and_gradients(lambda *leaves: reference.balanced_conv(*leaves, shift=False, **geometry)[0], given)
    found = output_and_gradients(lambda *leaves: BF.bal_conv2d(*leaves, padding=1, groups=4, mass=mass), given)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"mass": "position", "centred": True}, {"shift": False}], ids=str)
@pytest.mark.parametrize(("geometry", "transposed"), [GEOMETRIES[0], GEOMETRIES[5], GEOMETRIES[-4]], ids=str)
def test_equalised_convolution_is_the_reference(geometry, transposed, options):
    """In value and gradient, with masses on both sides of a tenth of their mean."""
    x, *rest = tensors(geometry[0], geometry[4], transposed, signed=True)
    x[:, 0] *= 0.01
    x[:, 1] *= 3
    given = (x, *rest)
    arguments = reference_geometry(geometry, transposed) | {"shift": geometry[4] < 4} | options | {"equalise": True}
    expected = output_and_gradients(lambda *leaves: reference.balanced_conv(*leaves, **arguments)[0], given)
    options = {**options, "equalise": True}
    found = output_and_gradients(lambda *leaves: convolve(geometry, transposed, *leaves, **options), given)
    torch.testing.assert_close(found, expected)


def test_an_equalised_layer_answers_alike_to_inputs_of_other_sizes():
    """Each channel has the same say: making one larger changes nothing, as long as none is below a tenth."""
    x, w, bias, gain = tensors((3, 3), 1, False)
    larger = x * torch.tensor([1.0, 2.0, 0.5, 1.5]).view(1, 4, 1, 1)
    y, same, plain = (
        BF.bal_conv2d(x, w, bias, gain, equalise=True),
        BF.bal_conv2d(larger, w, bias, gain, equalise=True),
        BF.bal_conv2d(larger, w, bias, gain),
    )
    torch.testing.assert_close(same, y)
    assert not torch.allclose(plain, y)


@pytest.mark.parametrize("equalise", [False, True])
def test_dead_inputs_give_the_bias_whether_equalised_or_not(equalise):
    x, w, bias, gain = tensors((3, 3), 1, False)
    x = torch.zeros_like(x).requires_grad_()
    y = BF.bal_conv2d(x, w, bias, gain, equalise=equalise)
    torch.testing.assert_close(y, bias.view(1, -1, 1, 1).expand_as(y))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert gradient.isfinite().all()


def test_a_constant_signal_of_any_length_has_its_own_mass():
    """In float32, 0.1 added up two million times in a row is 0.0985 on average."""
    x, w = torch.full((1, 1, 2_000_000), 0.1), torch.randn(2, 1, 3)
    mean, mass, counter = torch.zeros(1, 1, 3), torch.ones(1, 1, 3), torch.tensor(0)
    BF.bal_conv1d(x, w, mass="position", running_mean=mean, running_mass=mass, num_batches_tracked=counter)
    torch.testing.assert_close(mass, torch.full_like(mass, 0.1), rtol=1e-5, atol=0)
    torch.testing.assert_close(mean, mass, rtol=1e-5, atol=0)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("mode", ["zeros", "circular"])
@pytest.mark.parametrize("mass", BF.MASSES)
def test_padding_by_name_is_the_reference(padding, mode, mass):
    x, w, bias, gain = tensors((3, 3), 1, False)
    sides = {"same": [(2, 2), (1, 1)], "valid": [(0, 0), (0, 0)]}[padding]
    expected, *_ = reference.balanced_conv(
        x, w, bias, gain, stride=(1, 1), padding=sides, dilation=(2, 1), mode=mode, mass=mass
    )
    y = BF.bal_conv2d(x, w, bias, gain, 1, padding, (2, 1), padding_mode=mode, mass=mass)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
@pytest.mark.parametrize("mass", BF.MASSES)
def test_same_padding_of_an_even_kernel_is_one_sided(mode, mass):
    x, w, bias, gain = tensors((4, 2), 1, False)
    expected, *_ = reference.balanced_conv(
        x, w, bias, gain, stride=(1, 1), padding=[(1, 2), (0, 1)], dilation=(1, 1), mode=mode, mass=mass
    )
    torch.testing.assert_close(BF.bal_conv2d(x, w, bias, gain, 1, "same", padding_mode=mode, mass=mass), expected)


@pytest.mark.parametrize("one_pass", [True, False])
def test_linear_is_the_reference(one_pass):
    x, w = torch.rand(6, 5).double(), torch.randn(4, 5).double()
    bias, gain = torch.randn(4).double(), torch.rand(4).double()
    expected, *_ = reference.balanced_linear(x, w, bias, gain, one_pass=one_pass)
    torch.testing.assert_close(BF.bal_linear(x, w, bias, gain, one_pass=one_pass), expected)


@pytest.mark.parametrize("mass", BF.MASSES)
def test_a_weight_of_zero_is_not_among_the_positive_ones(mass):
    """Pruned networks have many. By the closed form, by its gradient and by the composed form."""
    x, w, bias, gain = tensors((3, 3), 1, False)
    w = torch.where(torch.rand_like(w) < 0.5, 0.0, w)
    geometry = {"stride": (1, 1), "padding": [(1, 1)] * 2, "dilation": (1, 1)}

    def output_and_gradient(function):
        leaf = w.clone().requires_grad_()
        y = function(leaf)
        return y.detach(), *torch.autograd.grad(y.pow(3).sum(), leaf)

    expected = output_and_gradient(lambda w: reference.balanced_conv(x, w, bias, gain, **geometry, mass=mass)[0])
    found = output_and_gradient(lambda w: BF.bal_conv2d(x, w, bias, gain, padding=1, mass=mass))
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        composed = BF.bal_conv2d(x, w, bias, gain, padding=1, mass=mass, training=False)
    torch.testing.assert_close(composed, expected[0])


@pytest.mark.parametrize("mass", BF.MASSES)
def test_statistics_are_the_reference(mass):
    x = torch.randn(3, 2, 6, 5).double()
    options = {"stride": (2, 1), "dilation": (1, 2)}
    w = torch.randn(1, 2, 3, 2).double()
    _, _, *expected = reference.balanced_conv(x, w, padding=[(1, 1), (0, 0)], mass=mass, **options)
    torch.testing.assert_close(list(BF.statistics(x, (3, 2), padding=(1, 0), mass=mass, **options)), expected)


@pytest.mark.parametrize("function", [BF.bal_conv2d, BF.bal_conv_transpose2d])
@pytest.mark.parametrize(("size", "same"), [((1, 1), True), ((2, 8), True), ((8, 2), True), ((3, 3), False)])
def test_position_is_channel_where_the_image_is_smaller_than_the_kernel(function, size, same):
    """On single pixels the one tap in nine that meets anything carried the whole output: networks stayed at chance."""
    x, w = torch.rand(4, 3, *size), torch.randn(3, 3, 3, 3)
    channel, position = (function(x, w, padding=1, mass=mass) for mass in BF.MASSES)
    assert torch.allclose(channel, position, atol=1e-6) == same


def test_an_even_kernel_of_same_padding_is_compared_with_the_image_before_it_is_padded():
    x = torch.rand(2, 3, 3, 3)
    channel, position = (BF.statistics(x, 4, padding="same", mass=mass)[1] for mass in BF.MASSES)
    assert position.shape == (1, 3, 4, 4)
    torch.testing.assert_close(position, channel.expand_as(position))


@pytest.mark.parametrize("momentum", [0.3, 0.0, 1.0, None])
def test_running_statistics_are_the_reference(momentum):
    layer = BalNormConv2d(3, 4, 3, padding=1, stride=2, mass="position", momentum=momentum, dtype=torch.float64)
    means, masses = [], []
    for _ in range(7):
        x = torch.randn(2, 3, 8, 8).double()
        layer(x)
        mean, mass = BF.statistics(x, 3, 2, 1, mass="position")
        means.append(mean)
        masses.append(mass)
        torch.testing.assert_close(layer.running_mean, reference.running_average(means, momentum))
        torch.testing.assert_close(layer.running_mass, reference.running_average(masses, momentum))
    assert layer.num_batches_tracked == 7


def test_a_plain_average_in_float16_goes_on_beyond_its_largest_number():
    mean, mass = torch.ones(2, 1, dtype=torch.float16)
    counter = torch.tensor(99_999)
    BF.update_running_stats(mean, mass, counter, torch.full((1,), 6e4), torch.full((1,), 6e4), None)
    assert mass.item() == mean.item() == pytest.approx(1.6, rel=0.05)
    assert counter == 100_000


def test_the_statistics_of_a_linear_layers_input_are_means():
    x = torch.randn(4, 5, 3)
    mean, mass = BF.statistics(x, ())
    torch.testing.assert_close(mean, x.mean((0, 1)).view(1, 3))
    torch.testing.assert_close(mass, x.abs().mean((0, 1)).view(1, 3))
    _, centred = BF.statistics(x, (), centred=True)
    torch.testing.assert_close(centred, (x - mean).abs().mean((0, 1)).view(1, 3))


def test_running_statistics_without_a_counter_use_the_momentum():
    mean, mass = torch.zeros(2), torch.ones(2)
    BF.update_running_stats(mean, mass, None, torch.tensor([-3.0, 5.0]), torch.tensor([3.0, 5.0]), 0.25)
    torch.testing.assert_close(mean, torch.tensor([-0.75, 1.25]))
    torch.testing.assert_close(mass, torch.tensor([1.5, 2.0]))
    with pytest.raises(ValueError, match="momentum=None needs num_batches_tracked"):
        BF.update_running_stats(mean, mass, None, torch.ones(2), torch.ones(2), None)


@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
def test_many_training_steps_are_the_reference(mass, one_pass):
    """The same gradients, step after step: weights, gains, biases and running statistics stay together."""
    network = _three_layers(mass, one_pass)

    def forward(x):
        x = network[1](network[0](x).relu())
        return network[2](x.mean((2, 3)))

    losses = _train(forward, list(network.parameters()))
    expected, parameters, statistics = _trained_by_the_reference(mass, one_pass)
    assert losses == pytest.approx(expected, rel=1e-7)
    for layer, theirs, history in zip(network, parameters, statistics, strict=True):
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-6, atol=1e-8)
        for running, values in zip((layer.running_mean, layer.running_mass), zip(*history, strict=True), strict=True):
            torch.testing.assert_close(running, reference.running_average(values, 0.1), rtol=1e-6, atol=1e-8)


@functools.cache  # the slow part, once for both backends
def _trained_by_the_reference(mass, one_pass):
    """The losses, the parameters of each layer, and the statistics of all its batches."""
    network = _three_layers(mass, one_pass)
    parameters = [
        {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()} for layer in network
    ]
    statistics = [[], [], []]

    def arguments(layer):
        its = parameters[layer]
        return {"w": its["weight"], "bias": its["bias"], "gain": its["gain"] * network[layer].output_scale}

    def forward(x):
        geometry = {"stride": (2, 2), "padding": [(1, 1)] * 2, "dilation": (1, 1)}
        x, _, *s0 = reference.balanced_conv(x, **arguments(0), **geometry, mass=mass, one_pass=one_pass)
        geometry = {"stride": (1, 1), "padding": [(0, 0)] * 2, "dilation": (1, 1), "groups": 2}
        x, _, *s1 = reference.balanced_conv(x.relu(), **arguments(1), **geometry, mass=mass, one_pass=one_pass)
        x, _, *s2 = reference.balanced_linear(x.mean((2, 3)), **arguments(2), one_pass=one_pass, centred=True)
        for history, found in zip(statistics, (s0, s1, s2), strict=True):
            history.append([statistic.detach() for statistic in found])
        return x

    losses = _train(forward, [p for layer in parameters for p in layer.values()])
    return losses, parameters, statistics


def _three_layers(mass, one_pass):
    torch.manual_seed(0)
    options = {"mass": mass, "one_pass": one_pass, "dtype": torch.float64}
    return nn.ModuleList(
        [
            BalNormConv2d(2, 4, 3, stride=2, padding=1, **options),
            BalNormConv2d(4, 4, 2, groups=2, **options),
            BalNormLinear(4, 3, one_pass=one_pass, centred=True, dtype=torch.float64),
        ]
    )


def _train(forward, parameters):
    """The losses of 30 steps with the same data each time. After 10 batches a simple average becomes a moving one."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(parameters, lr=0.02, momentum=0.9), []
    for _ in range(30):
        x, target = torch.rand(3, 2, 5, 5).double(), torch.randint(0, 3, (3,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_wrong_calls_say_what_is_allowed():
    x, w = torch.rand(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    with pytest.raises(ValueError, match="mass must be one of 'channel', 'position', got 'pixel'"):
        BF.bal_conv2d(x, w, mass="pixel")
    with pytest.raises(
        TypeError, match=r"bal_conv\(\) got an unexpected keyword argument 'masses'; its options are mass"
    ):
        BF.bal_conv2d(x, w, masses="channel")
    with pytest.raises(ValueError, match="padding must be 'same', 'valid', an int or"):
        BF.bal_conv2d(x, w, padding="full")
    with pytest.raises(ValueError, match="padding='same' is for stride 1, got stride 2"):
        BF.bal_conv2d(x, w, stride=2, padding="same")
    with pytest.raises(ValueError, match="stats_fraction must be above 0 and at most 1, got 2"):
        BF.bal_conv2d(x, w, stats_fraction=2.0)
    for wrong in ({"stride": -1}, {"stride": (1, 0)}, {"dilation": 0}, {"groups": 0}):
        with pytest.raises(ValueError, match="stride, dilation and groups must be at least 1"):
            BF.bal_conv2d(x, w, mass="position", **wrong)
    with pytest.raises(ValueError, match="padding must not be negative, got -1"):
        BF.bal_conv2d(x, w, padding=-1)
    with pytest.raises(ValueError, match=r"a weight of shape \(5, 64, 3, 3\) does not divide into 2 groups"):
        BF.bal_conv2d(torch.rand(2, 128, 8, 8), torch.randn(5, 64, 3, 3), groups=2)
    with pytest.raises(ValueError, match=r"a weight of shape \(3, 4, 3, 3\) does not divide into 2 groups"):
        BF.bal_conv_transpose2d(x, torch.randn(3, 4, 3, 3), groups=2)
    with pytest.raises(ValueError, match="expected an int or 2 of them"):
        BF.bal_conv2d(x, w, stride=(1, 2, 3))
    with pytest.raises(
        ValueError, match=r"expected an input of shape \(N, 3, \*in\) or \(3, \*in\) with 2 spatial axes"
    ):
        BF.bal_conv2d(x[:, :2], w)
    for function, name in ((BF.bal_conv, "bal_conv"), (BF.bal_conv_transpose, "bal_conv_transpose")):
        for weight in (torch.randn(8, 8), torch.randn(3, 4, 1, 1, 1, 1)):
            with pytest.raises(ValueError, match=f"{name} takes a weight with 3, 4 or 5 dimensions"):
                function(x, weight)
    with pytest.raises(ValueError, match="expected a weight with 2 dimensions"):
        BF.bal_linear(x, w)
    with pytest.raises(ValueError, match="bal_conv1d takes a weight with 3 dimensions"):
        BF.bal_conv1d(x, w)
    with pytest.raises(ValueError, match=r"expected an input of shape \(\*, 5\)"):
        BF.bal_linear(x, torch.randn(4, 5))
    with pytest.raises(ValueError, match=r"input of shape \(N, C, \*in\)"):
        BF.statistics(torch.rand(3, 4), 1)
    with pytest.raises(ValueError, match="shift must be True, False or 'auto', got 'yes'"):
        BF.bal_conv2d(x, w, shift="yes")
    with pytest.raises(TypeError, match=r"a weight must have floating-point numbers to be balanced, got torch\.int64"):
        BF.bal_conv2d(x, w.long())
    with pytest.raises(ValueError, match=r"expected a bias of shape \(4,\), got \(3,\)"):
        BF.bal_conv2d(x, w, torch.zeros(3))
    with pytest.raises(ValueError, match="output_padding must be smaller than stride or dilation, got 2"):
        BF.bal_conv_transpose2d(x, torch.randn(3, 4, 3, 3), stride=2, output_padding=2)
    with pytest.raises(ValueError, match="every axis of a kernel needs at least one tap"):
        BF.bal_conv2d(x, torch.randn(4, 3, 0, 3), mass="position")


# --------------------------------------------------------------------------------------------------------------------
# Buffers and kernels of unusual kinds
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64])
def test_any_counter_counts(dtype):
    counter, running_mass = torch.zeros((), dtype=dtype), torch.ones(1, 2)
    for _ in range(3):
        BF.bal_linear(
            torch.full((4, 2), 3.0), torch.randn(3, 2), running_mass=running_mass, num_batches_tracked=counter
        )
    assert counter == 3
    assert torch.equal(running_mass, torch.full((1, 2), 3.0))


def test_a_part_of_a_larger_running_mass_is_updated_and_nothing_else():
    large = torch.zeros(1, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    x, counter = torch.rand(4, 2, 6, 6), torch.tensor(0)
    options = {"mass": "position", "running_mass": large[:, :2], "num_batches_tracked": counter}
    BF.bal_conv2d(x, torch.randn(3, 2, 3, 3), **options)
    torch.testing.assert_close(large[:, :2], BF.statistics(x, 3, mass="position")[1])
    assert not large[:, 2:].any()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_running_mass_of_any_layout_is_updated_tap_by_tap(layout):
    running, counter = torch.ones(1, 3, 2, 4).contiguous(memory_format=layout), torch.tensor(0)
    x, options = torch.rand(4, 3, 6, 6), {"padding": 1, "mass": "position"}
    BF.bal_conv2d(x, torch.randn(5, 3, 2, 4), running_mass=running, num_batches_tracked=counter, **options)
    torch.testing.assert_close(running, BF.statistics(x, (2, 4), **options)[1])


@pytest.mark.parametrize("mass", BF.MASSES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_part_of_larger_images_has_the_mass_of_that_part(mass, layout):
    part = torch.rand(3, 4, 9, 8).contiguous(memory_format=layout)[:, :, 1:7, 2:7]
    w, options = torch.randn(5, 4, 3, 3), {"padding": 1, "mass": mass}
    with torch.no_grad():
        torch.testing.assert_close(BF.statistics(part, 3, **options), BF.statistics(part.contiguous(), 3, **options))
    torch.testing.assert_close(BF.bal_conv2d(part, w, **options), BF.bal_conv2d(part.contiguous(), w, **options))


def test_a_running_mass_elsewhere_is_refused():
    """C would have read its address, which is nowhere."""
    x, w = torch.rand(2, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="device"):
        BF.bal_conv2d(x, w, running_mass=torch.ones(1, 3, 1, 1, device="meta"), training=False)


def test_a_gain_elsewhere_is_refused():
    with pytest.raises(RuntimeError, match="meta"):
        BF.bal_linear(torch.rand(4, 2), torch.randn(3, 2), gain=torch.ones(3, device="meta"))


@pytest.mark.parametrize("mass", ["channel", "position"])
def test_a_batch_that_the_kernel_does_not_fit_changes_no_statistics(mass):
    layer = BalNormConv2d(3, 4, 3, mass=mass)
    with pytest.raises(RuntimeError, match=r"a kernel of size \(3, 3\) does not fit an input of size \(1, 1\)"):
        layer(torch.rand(2, 3, 1, 1))
    assert layer.num_batches_tracked == 0
    assert (layer.running_mass == 1).all()
