"""Gradients, first and second, of every layer kind; memory formats."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from balnorm import BalNormConv2d, BalNormConv3d, BalNormConvTranspose2d
from cases import CASES, MASS_AND_PASS

with_both_backends = pytest.mark.usefixtures("backend")


def layer_function(layer, x):
    """The layer as a function of its input and all its parameters."""
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def function(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    return function, (x.requires_grad_(), *parameters)


@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, mass, one_pass, backend):
    """All of the Jacobian once for each kind of layer; elsewhere its product with random vectors, which is fast."""
    layer = CASES[name].build(mass=mass, one_pass=one_pass, track_running_stats=False, dtype=torch.float64)
    function, inputs = layer_function(layer, CASES[name].input(dtype=torch.float64))
    assert gradcheck(function, inputs, fast_mode=(backend, mass, one_pass) != ("native", "position", True))


@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
@pytest.mark.parametrize("name", CASES)
def test_second_gradients(name, mass, one_pass):
    """Of the composed form, whichever backend there is."""
    layer = CASES[name].build(mass=mass, one_pass=one_pass, track_running_stats=False, dtype=torch.float64)
    function, inputs = layer_function(layer, CASES[name].input(dtype=torch.float64))
    assert gradgradcheck(function, inputs, fast_mode=True)


def assert_gradients(layer, x, backend):
    """The second ones are of the composed form, whichever backend there is: once is enough."""
    function, inputs = layer_function(layer, x)
    assert gradcheck(function, inputs, fast_mode=True)
    if backend == "torch":
        assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("options", [{"stats_fraction": 0.5}, {}, {"centred": True}, {"affine": False, "bias": False}])
@pytest.mark.parametrize("mass", ["channel", "position"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "depthwise", "conv2d-dilated-circular", "transposed2d"])
def test_gradients_with_negative_inputs(name, mass, options, shift, backend):
    case = CASES[name]
    layer = case.build(mass=mass, shift=shift, track_running_stats=False, dtype=torch.float64, **options)
    assert_gradients(layer, torch.randn(case.input_shape, dtype=torch.float64), backend)


@with_both_backends
def test_gradients_of_a_single_sample_in_channels_last_do_not_depend_on_create_graph():
    """A view of it had strides by which torch's grouped convolutions give wrong gradients."""
    layer = BalNormConv2d(4, 6, 1, groups=2, dtype=torch.float64).to(memory_format=torch.channels_last)
    x = torch.rand(1, 4, 7, 4, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    inputs = [x, *layer.parameters()]
    loss = layer(x).pow(3).sum()
    composed = torch.autograd.grad(loss, inputs, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), composed)


@pytest.mark.parametrize("options", [{}, {"centred": True}, {"stats_fraction": 0.5}])
@pytest.mark.parametrize("layer", [BalNormConv2d, BalNormConvTranspose2d])
def test_gradients_where_the_image_is_smaller_than_the_kernel(layer, options, backend):
    layer = layer(4, 6, 3, 2, 1, groups=2, mass="position", track_running_stats=False, dtype=torch.float64, **options)
    assert_gradients(layer, torch.rand(4, 4, 1, 1 if layer.transposed else 2, dtype=torch.float64), backend)


@pytest.mark.parametrize("name", CASES)
def test_gradients_with_frozen_statistics(name, backend):
    """In eval mode the mass is a constant: the input's gradient is that of a plain convolution."""
    layer = CASES[name].build(dtype=torch.float64)
    layer(CASES[name].input(dtype=torch.float64))
    assert_gradients(layer.eval(), CASES[name].input(dtype=torch.float64), backend)


@with_both_backends
@pytest.mark.parametrize(
    "options", [{}, {"shift": True}, {"shift": False}, {"centred": True}, {"stats_fraction": 0.5}, {"affine": False}]
)
@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_create_graph(name, mass, one_pass, options):
    """With create_graph=True they come from the composed form, without it from the closed form."""
    layer = CASES[name].build(mass=mass, one_pass=one_pass, dtype=torch.float64, **options)
    x = CASES[name].input(dtype=torch.float64) - 0.1
    x = x.where(x > -0.05, 0.0).requires_grad_()  # negative values, and zeros
    inputs = [x, *layer.parameters()]
    loss = layer(x).pow(3).sum()
    composed = torch.autograd.grad(loss, inputs, create_graph=True)
    closed = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(closed, composed)


@with_both_backends
def test_backward_twice_through_one_graph():
    layer = BalNormConv2d(3, 4, 3)
    loss = layer(torch.rand(2, 3, 6, 6)).square().sum()
    loss.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(layer.weight.grad, 2 * once)


@with_both_backends
@pytest.mark.parametrize("needs_grad", ["x", "weight", "gain", "bias"])
@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "conv3d", "transposed1d"])
def test_only_the_gradient_that_is_asked_for(name, needs_grad):
    """Frozen parameters, or an input that needs no gradient, do not change the other gradients.

    For a 1d convolution torch returns a gradient of the weight that nobody asked for, of another shape.
    """
    everything = _gradients(name, {"x", "weight", "gain", "bias"})
    alone = _gradients(name, {needs_grad})
    assert {name for name, grad in alone.items() if grad is not None} == {needs_grad}
    torch.testing.assert_close(alone[needs_grad], everything[needs_grad])


def _gradients(name, wanted):
    torch.manual_seed(0)
    layer, x = CASES[name].build(), CASES[name].input()
    tensors = {"x": x, "weight": layer.weight, "gain": layer.gain, "bias": layer.bias}
    for which, tensor in tensors.items():
        tensor.requires_grad_(which in wanted)
    layer(x).square().sum().backward()
    return {which: tensor.grad for which, tensor in tensors.items()}


def variants(x):
    """The same values: contiguous, channels_last, a transposed view, every other element of a larger tensor."""
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    wide = torch.stack([x, x], -1).flatten(-2)[..., ::2]
    return {
        "contiguous": x,
        "channels_last": x.contiguous(memory_format=last),
        "transposed": x.transpose(2, 3).contiguous().transpose(2, 3),
        "strided": wide,
        "expanded": x[:1].expand(x.shape),
    }


@with_both_backends
@pytest.mark.parametrize(("mass", "one_pass"), [("channel", True), ("position", False)])
@pytest.mark.parametrize("name", ["conv2d", "conv2d-grouped", "conv2d-dilated-circular", "conv3d", "transposed2d"])
@pytest.mark.parametrize("variant", ["channels_last", "transposed", "strided", "expanded"])
@pytest.mark.parametrize("weight_variant", ["contiguous", "channels_last", "strided"])
def test_any_layout_gives_the_same_numbers(name, mass, one_pass, variant, weight_variant):
    """Of the input and of the weight, whose memory is read in its own order."""
    layer = CASES[name].build(mass=mass, one_pass=one_pass, dtype=torch.float64)
    other = variants(CASES[name].input(dtype=torch.float64))[variant]
    results = []
    for leaf in (other.contiguous().detach().requires_grad_(), other.detach().requires_grad_()):
        y = layer(leaf)
        gradients = torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])
        results.append((y, *gradients))
        layer.weight = torch.nn.Parameter(variants(layer.weight.detach())[weight_variant])
    torch.testing.assert_close(results[0], results[1])


@with_both_backends
@pytest.mark.parametrize("layer", [BalNormConv2d(8, 16, 3, padding=1), BalNormConvTranspose2d(8, 16, 3)])
@pytest.mark.parametrize("training", [True, False])
def test_channels_last_is_kept(layer, training):
    layer = layer.to(memory_format=torch.channels_last).train(training)
    x = torch.rand(2, 8, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    assert layer.effective_weight().is_contiguous(memory_format=torch.channels_last)
    y = layer(x)
    y.sum().backward()
    for tensor in (layer.weight, y, x.grad, layer.weight.grad, layer.fuse().weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


@with_both_backends
def test_channels_last_3d_is_kept():
    layer = BalNormConv3d(4, 8, 3).to(memory_format=torch.channels_last_3d)
    y = layer(torch.rand(2, 4, 5, 5, 5).contiguous(memory_format=torch.channels_last_3d))
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    (gradient,) = torch.autograd.grad(y.sum(), layer.weight)
    assert gradient.is_contiguous(memory_format=torch.channels_last_3d)
    assert layer.effective_weight().is_contiguous(memory_format=torch.channels_last_3d)
