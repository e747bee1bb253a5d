"""No NaN and no infinity for finite input, forward or backward, in float32, bfloat16 and float16."""

import copy

import pytest
import torch

import balnorm.functional as BF
from balnorm import BalNormConv2d, BalNormLinear
from cases import CASES, MASS_AND_PASS

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Every two of the three together: what a dtype does wrong, it does not do for one mass in one form only.
DTYPE_MASS_PASS = [
    *((torch.float32, "channel", True), (torch.float32, "position", False)),
    *((torch.bfloat16, "channel", False), (torch.bfloat16, "position", True)),
    *((torch.float16, "channel", True), (torch.float16, "position", False)),
]
MAGNITUDES = [(x, w) for x in (1e-30, 1.0, 1e30) for w in (1e-30, 1.0, 1e30) if (x, w) != (1.0, 1.0)]


def assert_finite(layer, x, outputs_are_the_bias=False):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.no_grad():
        layer.bias.normal_()
    y = layer(x)
    assert y.isfinite().all()
    y.float().square().mean().backward()
    for name, tensor in [("input", x), *layer.named_parameters()]:
        assert tensor.grad.isfinite().all(), f"gradient of {name}"
    assert layer.running_mean.isfinite().all()
    assert layer.running_mass.isfinite().all()
    if outputs_are_the_bias:
        bias = layer.bias if isinstance(layer, BalNormLinear) else layer.bias.view(-1, *(1,) * (y.dim() - 2))
        torch.testing.assert_close(y, bias.expand_as(y))


@pytest.mark.parametrize(("dtype", "mass", "one_pass"), DTYPE_MASS_PASS)
@pytest.mark.parametrize("name", CASES)
def test_all_zero_input_gives_the_bias(name, mass, one_pass, dtype):
    layer = CASES[name].build(mass=mass, one_pass=one_pass, dtype=dtype)
    assert_finite(layer, torch.zeros(CASES[name].input_shape, dtype=dtype), outputs_are_the_bias=True)
    layer.eval()  # with a running mass of zero
    assert_finite(layer, CASES[name].input(dtype=dtype), outputs_are_the_bias=True)


@pytest.mark.parametrize(("dtype", "mass", "one_pass"), DTYPE_MASS_PASS)
@pytest.mark.parametrize("name", CASES)
def test_dead_channels(name, mass, one_pass, dtype):
    layer = CASES[name].build(mass=mass, one_pass=one_pass, dtype=dtype)
    x = CASES[name].input(dtype=dtype)
    x[:, 1:] = 0
    assert_finite(layer, x)


@pytest.mark.parametrize(("dtype", "mass", "one_pass"), DTYPE_MASS_PASS)
def test_one_live_channel_under_a_one_by_one_kernel_gives_the_bias(mass, one_pass, dtype):
    """Its only weight that meets anything has to be zero to balance."""
    layer = BalNormConv2d(5, 4, 1, mass=mass, one_pass=one_pass, dtype=dtype)
    x = torch.zeros(3, 5, 4, 4, dtype=dtype)
    x[:, 2] = torch.rand(3, 4, 4)
    assert_finite(layer, x, outputs_are_the_bias=True)


@pytest.mark.parametrize(("dtype", "mass", "one_pass"), DTYPE_MASS_PASS)
@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e-30, 1e30])
@pytest.mark.parametrize("channels", [3, 600])
def test_equal_weights_give_the_bias(mass, one_pass, dtype, value, channels):
    """All weights are the mean: nothing is left after the shift but rounding error, which must not be amplified."""
    if dtype == torch.float16 and value in (1e-30, 1e30):
        pytest.skip("out of float16's range")
    layer = BalNormConv2d(channels, 4, 3, padding=1, mass=mass, one_pass=one_pass, dtype=dtype)
    torch.nn.init.constant_(layer.weight, value)
    assert_finite(layer, torch.rand(2, channels, 5, 5).to(dtype), outputs_are_the_bias=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mass", ["channel", "position"])
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_of_one_sign_give_the_bias_in_one_pass(mass, dtype, sign):
    layer = BalNormConv2d(64, 4, 3, mass=mass, one_pass=True, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(sign * (layer.weight.abs() + 0.1))
    x = torch.rand(2, 64, 5, 5).to(dtype)
    assert_finite(layer, x, outputs_are_the_bias=True)
    layer.one_pass = False
    assert_finite(layer, x)
    assert layer(x).std() > 0.1  # two passes need no negative weight


def test_many_weights_of_one_sign_give_the_bias():
    """The total of thousands of masses, added one by one in float32, was off by more than the rule for zero allows."""
    layer = BalNormLinear(10_000, 2)
    with torch.no_grad():
        layer.weight.abs_()
    assert_finite(layer, torch.full((4, 10_000), 0.1), outputs_are_the_bias=True)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_layer_without_inputs_gives_the_bias(samples):
    """As nn.Linear does. A single sample divided by zero in C, which ends the process."""
    layer = BalNormLinear(0, 3)
    with torch.no_grad():
        layer.bias.normal_()
    y = layer(torch.rand(samples, 0))
    assert torch.equal(y, layer.bias.expand(samples, 3))
    y.sum().backward()
    assert layer.gain.grad.eq(0).all()


@pytest.mark.parametrize(("dtype", "mass", "one_pass"), DTYPE_MASS_PASS)
@pytest.mark.parametrize("leftover", [0.0, 1e-7, 1e-3])
@pytest.mark.parametrize("centred", [False, True])
def test_inputs_that_cancel(mass, one_pass, dtype, leftover, centred):
    options = {"one_pass": one_pass, "centred": centred, "dtype": dtype}
    layer = BalNormConv2d(4, 4, 3, padding=1, mass=mass, **options)
    half = torch.rand(2, 2, 5, 5)
    x = torch.cat([half, -half], 1) + leftover
    assert_finite(layer, x.to(dtype))
    assert layer(x.to(dtype)).abs().max() < 100  # their mass is what they are without the sign
    assert_finite(BalNormLinear(4, 4, **options), x.to(dtype).permute(0, 2, 3, 1))


@pytest.mark.parametrize(("dtype", "mass", "one_pass"), DTYPE_MASS_PASS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_and_one(name, mass, one_pass, dtype, batch):
    layer = CASES[name].build(mass=mass, one_pass=one_pass, dtype=dtype)
    x = CASES[name].input(dtype=dtype)
    shape = layer(x).shape
    layer.reset_running_stats()
    x = x[:batch].requires_grad_()
    y = layer(x)
    assert y.shape == (batch, *shape[1:])
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert layer.num_batches_tracked == batch
    for parameter in layer.parameters():
        assert parameter.grad.isfinite().all()
        if batch == 0:
            assert (parameter.grad == 0).all()
    assert (layer.running_mean == 0).all() == (batch == 0)
    assert (layer.running_mass == 1).all() == (batch == 0)
    layer.eval()(x)


@pytest.mark.parametrize(("dtype", "mass", "one_pass"), DTYPE_MASS_PASS[:4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("of_input", "of_weight"), MAGNITUDES)
def test_magnitudes(name, mass, one_pass, dtype, of_input, of_weight):
    layer = CASES[name].build(mass=mass, one_pass=one_pass, dtype=dtype)
    with torch.no_grad():
        layer.weight *= of_weight
    assert_finite(layer, CASES[name].input(dtype=dtype) * of_input)


@pytest.mark.parametrize(("of_input", "of_weight"), MAGNITUDES)
@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
def test_magnitudes_change_no_result(mass, one_pass, of_input, of_weight):
    """Scale-free arithmetic: tiny and huge inputs and weights give the output, and the gradients, of ordinary ones."""
    layer = BalNormConv2d(3, 4, 3, mass=mass, one_pass=one_pass)
    x, weight = torch.rand(2, 3, 6, 6), layer.weight.detach().clone()
    results = []
    for scale_x, scale_w in ((1.0, 1.0), (of_input, of_weight)):
        layer.zero_grad()
        layer.weight.data = weight * scale_w
        scaled = (x * scale_x).requires_grad_()
        y = layer(scaled)
        y.square().mean().backward()
        results.append((y.detach(), scaled.grad * scale_x, layer.weight.grad * scale_w, layer.gain.grad.clone()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def paths(layer, x):
    """The output in training, by every way to compute it, and in eval mode, folded."""
    state = dict(layer.named_parameters())
    frozen = copy.deepcopy(layer)
    with torch.no_grad():
        yield "training, no_grad", copy.deepcopy(layer)(x)
    yield "functional_call", torch.func.functional_call(without_statistics(layer), state, (x,))
    gain = (layer.gain * layer.output_scale).detach()
    yield "compiled", compiled(x, layer.weight, layer.bias, gain, mass=layer.mass, one_pass=layer.one_pass)
    yield "torch.func.vmap", torch.func.vmap(without_statistics(layer))(x.unsqueeze(0))[0]
    frozen(x)
    frozen.eval()
    yield "eval", frozen(x)
    with torch.no_grad():
        yield "eval, no_grad", frozen(x)
    yield "folded", frozen.fuse()(x)


compiled = torch.compile(BF.bal_conv2d, backend="aot_eager", fullgraph=True)


def without_statistics(layer):
    other = BalNormConv2d(4, 3, 1, mass=layer.mass, one_pass=layer.one_pass, track_running_stats=False)
    other.load_state_dict({name: value for name, value in layer.state_dict().items() if name in other.state_dict()})
    return other


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(
    "mass", ["ordinary", "cancelling", "nearly cancelling", "zero", "one channel", *range(-45, -26, 3), 18, 36]
)
def test_every_path_agrees_on_what_is_zero(mass, one_pass):
    """Around the smallest numbers the plain form once gave up at 1e-31 and the closed form later."""
    layer = BalNormConv2d(4, 3, 1, one_pass=one_pass)
    x = torch.rand(5, 4, 1, 1)
    if isinstance(mass, int):
        x = x * torch.tensor(10.0, dtype=torch.float64).pow(mass).float()
    elif "cancelling" in mass:
        x = torch.cat([x[:, :2], -x[:, :2]], 1) + (0.1 if "nearly" in mass else 0)
    elif mass == "zero":
        x = torch.zeros_like(x)
    elif mass == "one channel":
        x[:, 1:] = 0
    y = layer(x)
    assert y.isfinite().all()
    layer.reset_running_stats()
    for path, other in paths(layer, x):
        torch.testing.assert_close(other, y, rtol=1e-3, atol=1e-4, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_weight_beyond_float16_is_its_largest_number(name, grad):
    """Which a network reaches that balances inputs of about 1e-6."""
    layer = CASES[name].build(dtype=torch.float16)
    x = CASES[name].input().half() * 1e-6
    with torch.set_grad_enabled(grad):
        layer(x)
        assert layer.eval().effective_weight().abs().max() == torch.finfo(torch.float16).max
        assert layer(x).isfinite().all()
        assert layer.train()(x).isfinite().all()


def test_inputs_whose_sum_overflows_give_the_bias():
    layer = BalNormConv2d(3, 4, 3)
    layer(torch.rand(2, 3, 6, 6))
    tracked = layer.running_mean.clone(), layer.running_mass.clone()
    y = layer(torch.full((4, 3, 6, 6), 3e38))
    torch.testing.assert_close(y, layer.bias.view(-1, 1, 1).expand_as(y))
    assert torch.equal(layer.running_mean, tracked[0])
    assert torch.equal(layer.running_mass, tracked[1])


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_after_a_dead_batch(name):
    """A dead batch moves nothing but the bias, and the next one trains as if it had not been there."""
    layer = CASES[name].build()
    weight = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    gain = layer.gain.detach().clone()
    for x in (torch.zeros(CASES[name].input_shape), CASES[name].input()):
        optimizer.zero_grad()
        (layer(x) + 1).square().mean().backward()
        optimizer.step()
        dead = not x.any()
        assert torch.equal(layer.weight, weight) == dead
        assert torch.equal(layer.gain, gain) == dead
        assert layer.bias.any()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mass", BF.MASSES)
@pytest.mark.parametrize("level", [0.1, -1000.0, 1e-20])
def test_a_constant_input_has_no_centred_mass(mass, level):
    """What was left of it were rounding errors, which were balanced: outputs of size 1 and gradients of 1e7."""
    layer = BalNormConv2d(3, 4, 3, mass=mass, centred=True)
    x = torch.full((2, 3, 8, 8), level, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, layer.bias.detach().view(1, 4, 1, 1).expand_as(y))
    y.square().sum().backward()
    assert not x.grad.any()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mass", BF.MASSES)
def test_windows_of_zeros_give_exactly_the_bias_after_a_relu(mass):
    """With an offset of rounding errors, the gradient of the next ReLU would depend on their sign."""
    layer = BalNormConv2d(3, 4, 3, mass=mass, bias=False)
    x = torch.randn(4, 3, 9, 9).relu()
    x[:, :, :4, :4] = 0
    for training in (True, False):
        assert not layer.train(training)(x)[:, :, :2, :2].any()
