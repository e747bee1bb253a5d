"""torch.compile, autocast, activation checkpointing, torch.func: what breaks layers of this kind elsewhere."""

import copy
import itertools

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import balnorm.functional as BF
from balnorm import BalNormConv2d, BalNormConvTranspose2d, BalNormConvTranspose3d
from cases import CASES, MASS_AND_PASS, small_network

# Raised inside torch's own compiler and checkpointing code, not by ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def step(model, x):
    for parameter in model.parameters():
        parameter.grad = None
    y = model(x)
    y.square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
    return y.detach()


@pytest.mark.parametrize(("mass", "momentum"), [("channel", 0.1), ("position", None)])
def test_compile_in_full_graphs_without_recompiling(mass, momentum):
    """weight_norm broke torch.compile for years; Python counters made BatchNorm recompile at every step."""
    torch._dynamo.reset()
    eager = small_network(mass=mass, momentum=momentum, one_pass=False)
    compiled_model = copy.deepcopy(eager)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(compiled_model, backend=counter, fullgraph=True)
    for _ in range(4):
        x = torch.rand(4, 3, 6, 6)
        torch.testing.assert_close(step(compiled, x), step(eager, x), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1
    torch.testing.assert_close(compiled_model.state_dict(), eager.state_dict(), atol=1e-5, rtol=1e-4)
    eager.eval()
    compiled.eval()
    for _ in range(3):
        x = torch.rand(4, 3, 6, 6)
        torch.testing.assert_close(compiled(x), eager(x), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "options", [{"stats_fraction": 0.5, "centred": True}, {"shift": False, "track_running_stats": False}]
)
def test_compile_with_options(options):
    torch._dynamo.reset()
    eager = small_network(**options)
    compiled_model = copy.deepcopy(eager)
    compiled = torch.compile(compiled_model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        x = torch.rand(4, 3, 6, 6)
        torch.testing.assert_close(step(compiled, x), step(eager, x), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_compile_with_a_changing_batch_size():
    torch._dynamo.reset()
    eager = small_network(mass="position", stats_fraction=0.5)
    compiled_model = copy.deepcopy(eager)
    compiled = torch.compile(compiled_model, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, size in ((4, 6), (6, 6), (3, 8)):
        x = torch.rand(batch, 3, size, size)
        torch.testing.assert_close(step(compiled, x), step(eager, x), atol=1e-5, rtol=1e-4)


def test_inductor_gives_the_same_numbers():
    torch._dynamo.reset()
    eager = BalNormConv2d(3, 8, 3, stride=2, padding=1, mass="position")
    compiled_model = copy.deepcopy(eager)
    compiled = torch.compile(compiled_model, fullgraph=True)
    for _ in range(3):
        x = torch.rand(4, 3, 6, 6)
        torch.testing.assert_close(step(compiled, x), step(eager, x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(compiled_model.state_dict(), eager.state_dict(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
@pytest.mark.parametrize("name", CASES)
def test_autocast(name, mass, one_pass, dtype):
    """The convolution runs in the lower precision, the statistics and the balance in float32."""
    layer = CASES[name].build(mass=mass, one_pass=one_pass)
    full = copy.deepcopy(layer)
    x = CASES[name].input().to(dtype).float()  # values that survive the cast, so that only the arithmetic differs
    low_x, full_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        y = layer(low_x)
    expected = full(full_x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, atol=0.06, rtol=0.06)
    for buffer in ("running_mean", "running_mass"):
        assert getattr(layer, buffer).dtype == torch.float32
        torch.testing.assert_close(getattr(layer, buffer), getattr(full, buffer))
    direction = torch.randn_like(expected)
    (y.float() * direction).sum().backward()
    (expected * direction).sum().backward()
    assert layer.weight.grad.dtype == low_x.grad.dtype == torch.float32
    for low, exact in [(low_x, full_x), *zip(layer.parameters(), full.parameters(), strict=True)]:
        scale = exact.grad.abs().max()
        torch.testing.assert_close(low.grad / scale, exact.grad / scale, atol=0.05, rtol=0.05)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", ["linear", "conv2d", "transposed2d"])
def test_a_backward_pass_under_autocast_is_that_without(name, create_graph):
    layer, x = CASES[name].build(mass="position"), CASES[name].input().requires_grad_()
    gradients = []
    for inside in (False, True):
        loss = layer(x).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            gradients.append(torch.autograd.grad(loss, [x, *layer.parameters()], create_graph=create_graph))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("centred", [False, True])
def test_statistics_are_in_full_precision_under_autocast(centred):
    x = torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = BF.statistics(x, 3, padding=1, mass="position", centred=centred)
    expected = BF.statistics(x, 3, padding=1, mass="position", centred=centred)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_autocast_sums_are_exact_where_bfloat16_would_lose_them():
    layer = BalNormConv2d(2, 4, 1)
    x = torch.ones(64, 2, 32, 32)  # a sum of 65,536 ones: bfloat16 stops counting at 256
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
    assert torch.equal(layer.running_mean, torch.ones(1, 2, 1, 1))
    assert torch.equal(layer.running_mass, torch.ones(1, 2, 1, 1))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_a_batch_once(reentrant):
    """The forward pass is repeated in backward, and must not be taken into the statistics again."""
    plain = small_network()
    repeated = copy.deepcopy(plain)
    for _ in range(3):
        x = torch.rand(4, 3, 6, 6, requires_grad=True)
        plain(x).square().mean().backward()
        checkpoint(repeated, x.detach().requires_grad_(), use_reentrant=reentrant).square().mean().backward()
    torch.testing.assert_close(repeated.state_dict(), plain.state_dict())
    assert repeated[0].num_batches_tracked == 3
    for ours, theirs in zip(repeated.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("before", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("after", [torch.contiguous_format, torch.channels_last])
@pytest.mark.usefixtures("backend")
def test_saved_tensors_may_come_back_in_another_memory_format(before, after):
    """save_on_cpu(pin_memory=True) returns them contiguous: gradients of weights in channels_last were wrong."""
    torch.manual_seed(0)
    layer = BalNormConv2d(4, 3, 3, mass="position", dtype=torch.float64).to(memory_format=before)
    x = torch.rand(2, 4, 6, 6, dtype=torch.float64) * torch.tensor([1.0, 2.0, 5.0, 10.0]).view(4, 1, 1)
    factors = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    expected = torch.autograd.grad((layer(x) * factors).sum(), list(layer.parameters()))

    def other_format(tensor):
        return tensor.contiguous(memory_format=after if tensor.dim() == 4 else torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(other_format, lambda tensor: tensor):
        y = layer(x)
    torch.testing.assert_close(torch.autograd.grad((y * factors).sum(), list(layer.parameters())), expected)


@pytest.mark.usefixtures("backend")
def test_two_forwards_before_one_backward():
    """Buffers that change in place are not kept for backward, in training, frozen or eval mode."""
    layer = BalNormConv2d(3, 4, 3)
    x = torch.rand(2, 3, 6, 6)
    frozen = copy.deepcopy(layer)
    frozen.stats_frozen = True
    for model in (layer, frozen):
        loss = model(x).square().sum()
        model.running_mass.mul_(1.5)  # as DDP's broadcast of buffers does before each forward
        loss = loss + model(2 * x).square().sum()
        loss.backward()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mass", BF.MASSES)
def test_torch_func(name, mass):
    """vmap and grad reject in-place changes of buffers: without running statistics there are none."""
    layer = CASES[name].build(mass=mass, track_running_stats=False)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().mean()

    x = CASES[name].input()
    gradients = torch.func.grad(loss)(parameters, x)
    layer(x).square().mean().backward()
    for key, parameter in layer.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad)

    batches = torch.stack([CASES[name].input() for _ in range(3)])
    per_batch = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batches)
    for i, batch in enumerate(batches):
        expected = torch.func.grad(loss)(parameters, batch)
        for key, value in expected.items():
            torch.testing.assert_close(per_batch[key][i], value, atol=1e-5, rtol=1e-4)


def test_torch_func_with_frozen_statistics():
    layer = BalNormConv2d(3, 4, 3).eval()
    jacobian = torch.func.jacrev(layer)(torch.rand(1, 3, 3, 3))
    torch.testing.assert_close(jacobian[0, :, 0, 0, 0], layer.effective_weight())


def test_forward_mode():
    layer = BalNormConv2d(3, 4, 3, padding=1, track_running_stats=False, dtype=torch.float64)
    x, tangent = torch.rand(2, 3, 5, 5).double(), torch.rand(2, 3, 5, 5).double()
    _, forward = torch.func.jvp(layer, (x,), (tangent,))
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, forward)
    h = 1e-6
    torch.testing.assert_close((layer(x + h * tangent) - layer(x - h * tangent)) / (2 * h), forward)


@pytest.mark.usefixtures("backend")
def test_inference_mode():
    layer = BalNormConv2d(3, 4, 3, mass="position")
    with torch.inference_mode():
        layer(torch.rand(2, 3, 6, 6))
        y = layer.eval()(torch.rand(2, 3, 6, 6))
    assert y.is_inference()
    layer.train()(torch.rand(2, 3, 6, 6)).sum().backward()
    assert layer.num_batches_tracked == 2


@pytest.mark.parametrize("name", ["linear", "conv1d", "conv2d", "transposed2d"])
def test_batched_gradients(name):
    """is_grads_batched=True sends many gradients through one backward pass."""
    layer = CASES[name].build(track_running_stats=False, dtype=torch.float64)
    x = CASES[name].input(dtype=torch.float64)
    one_by_one = torch.autograd.functional.jacobian(layer, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, x, vectorize=True), one_by_one)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_vmap_over_gradients(name):
    layer = CASES[name].build(track_running_stats=False, dtype=torch.float64)
    x = CASES[name].input(dtype=torch.float64).requires_grad_()
    y = layer(x)
    inputs, seeds = [x, *layer.parameters()], torch.randn(3, *y.shape, dtype=torch.float64)

    def gradients(seed):
        return torch.autograd.grad(y, inputs, seed, retain_graph=True)

    one_by_one = [torch.stack(each) for each in zip(*map(gradients, seeds), strict=True)]
    torch.testing.assert_close(list(torch.func.vmap(gradients)(seeds)), one_by_one)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # shapes of weights become constants, as they should
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mass", BF.MASSES)
def test_export_and_trace(name, mass):
    layer = CASES[name].build(mass=mass)
    layer(CASES[name].input())
    layer.eval()
    example, x = CASES[name].input(), CASES[name].input()
    torch.testing.assert_close(torch.export.export(layer, (example,)).module()(x), layer(x))
    torch.testing.assert_close(torch.jit.trace(layer, example)(x), layer(x))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("mode", "groups"), [*itertools.product(["training", "eval", "no_grad"], [1, 2]), ("compiled", 2)]
)
@pytest.mark.parametrize(
    ("kind", "layout", "size"),
    [
        (BalNormConv2d, torch.channels_last, (5, 6)),
        (BalNormConvTranspose2d, torch.channels_last, (5, 6)),
        (BalNormConvTranspose3d, torch.channels_last_3d, (3, 4, 5)),
    ],
)
def test_the_memory_format_of_the_weight_is_that_of_the_output(kind, layout, size, mode, groups):
    """As in torch's own layers. The transposed ones answered a contiguous input in contiguous format."""
    torch._dynamo.reset()
    layer, plain = (each(4, 6, 3, groups=groups).to(memory_format=layout) for each in (kind, kind.plain))
    x = torch.rand(2, 4, *size)
    expected, layer = plain(x), layer.train(mode in ("training", "compiled"))
    with torch.set_grad_enabled(mode != "no_grad"):
        y = torch.compile(layer, backend="aot_eager")(x) if mode == "compiled" else layer(x)
    assert y.is_contiguous(memory_format=layout)
    assert y.stride() == expected.stride()
    assert layer.effective_weight().stride() == layer.weight.stride()
    if y.requires_grad:
        y.sum().backward()
        assert layer.weight.grad.stride() == layer.weight.stride()
