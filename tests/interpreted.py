"""The Triton kernels in Triton's interpreter, on the CPU: against torch's operations, and against the reference.

tests/test_triton.py runs this file in a process of its own, because Triton has to be told before it is imported:

    TRITON_INTERPRET=1 pytest -n 0 tests/interpreted.py

`CASES` in the environment is the number of random layers, `FIRST` the first one. A case is a function of its number.
"""

import contextlib
import copy
import itertools
import os
import random
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensor

import balnorm.functional as BF
from balnorm import BalNormConv1d, BalNormConv2d, BalNormConv3d, BalNormConvTranspose2d, BalNormLinear
from balnorm._core import function
from balnorm._core.backends import Running, Setup
from balnorm._core.backends import torch as torch_backend
from balnorm._core.backends import triton as triton_backend
from balnorm._core.geometry import geometry_of
from balnorm._core.matrix import WeightMatrix
from balnorm._core.method import Statistics
from balnorm._core.options import Options
from balnorm._core.torch_private import is_compiled_for_training
from reference import balanced_conv, balanced_linear
from watched import watched

assert os.environ.get("TRITON_INTERPRET") == "1", "run this as tests/test_triton.py does"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy")

CASES, FIRST = int(os.environ.get("CASES", "40")), int(os.environ.get("FIRST", "0"))
PRECISIONS = {  # of weight and samples
    "float32": (torch.float32, torch.float32),
    "autocast bfloat16": (torch.float32, torch.bfloat16),
    "autocast float16": (torch.float32, torch.float16),
    "float64": (torch.float64, torch.float64),
}
TROUBLE = ("no mass", "dead group", "equal weights", "one sign", "zeros", "tiny", "huge", "nan", "inf")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """So that small layers need several."""
    monkeypatch.setattr(function, "_setups", {})
    monkeypatch.setattr(triton_backend, "_TILE", 256)
    monkeypatch.setattr(triton_backend, "_PROGRAMS", 4)


@pytest.fixture(autouse=True)
def watch():
    """No kernel of any test may touch what is not its own."""
    with watched(triton_backend) as watch:
        yield watch
    assert not watch.found


@pytest.fixture
def _chosen(monkeypatch):
    """Layers on the CPU use the Triton kernels."""
    monkeypatch.setattr(function.backends, "choose", lambda *tensors: triton_backend)


# --------------------------------------------------------------------------------------------------------------------
# Random layers against torch's operations
# --------------------------------------------------------------------------------------------------------------------


def draw_geometry(draw: random.Random):
    """A geometry, the numbers of inputs and outputs of a group, and the size of an image."""
    axes = draw.choice([0, 1, 2, 2, 2, 2, 3])
    transposed = axes > 0 and draw.random() < 0.2
    groups, inputs, outputs = draw.choice([1, 1, 1, 2, 3]), draw.choice([1, 2, 3, 5, 17]), draw.choice([1, 2, 5, 9])
    unusual = draw.random()
    if unusual < 0.15:
        groups, inputs, outputs = draw.choice([6, 20]), 1, draw.choice([1, 2])  # depthwise
    elif unusual < 0.25:
        inputs, outputs = 130, 3  # more than one block of columns
    elif unusual < 0.35:
        groups, inputs, outputs = 1, 2, 50  # many blocks of rows
    kernel = tuple(draw.choice([1, 2, 3]) for _ in range(axes))
    stride, dilation = (tuple(draw.choice(some) for _ in range(axes)) for some in ((1, 1, 2, 3), (1, 1, 2)))
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = tuple(draw.randint(0, n // 2) for n in reach)
    size = tuple(max(1, n + 1) + draw.choice([0, 2, 5]) for n in reach)
    if draw.random() < 0.1:  # images smaller than the kernel
        size, padding = tuple(max(1, n) for n in reach), padding if transposed else tuple(reach)
    extra = tuple(draw.randrange(max(s, d)) if transposed else 0 for s, d in zip(stride, dilation, strict=True))
    groups = groups if axes else 1
    mode = "circular" if axes and not transposed and draw.random() < 0.1 else "zeros"
    if mode == "circular":
        padding = tuple(min(p, n) for p, n in zip(padding, size, strict=True))
    geometry = geometry_of(kernel, stride, padding, dilation, groups, mode, transposed, extra)
    fits = all(n >= 1 for n in geometry.output_size(size))
    return (geometry, inputs, outputs, size) if fits else draw_geometry(draw)


def lay_out(draw: random.Random, x: Tensor) -> Tensor:
    """The same values in another order of memory."""
    layout = draw.choice(["contiguous", "contiguous", "last", "last", "gaps", "cut", "half", "offset"])
    if layout == "last" and x.dim() > 2:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "gaps":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout == "cut":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if layout == "half":
        return torch.cat([x, x], 1)[:, : x.shape[1]]
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    return x


def dress(draw: random.Random, kind: str, x: Tensor, weight: Tensor, groups: int) -> None:
    """Other values, in place."""
    if draw.random() < 0.6:
        x.relu_()  # no channel has negative values; else all have, or
    elif draw.random() < 0.5:
        x[:, ::2].relu_()
    if kind == "no mass":
        x.zero_()
    elif kind == "dead group":
        x[:, : x.shape[1] // groups] *= draw.choice([0.0, 1e-6])
    elif kind in ("tiny", "huge"):
        x *= 1e-30 if kind == "tiny" else 1e30
        weight *= 1e-25 if kind == "tiny" else 1e25
    elif kind == "equal weights":
        weight.fill_(0.7)
    elif kind == "one sign":
        weight.abs_()
    elif kind == "zeros":
        weight[torch.rand_like(weight) < 0.3] = 0
    elif kind in ("nan", "inf"):
        x[0, 0] = float(kind)


def one_layer(number: int) -> None:
    draw = random.Random(number)
    torch.manual_seed(number)
    geometry, inputs, outputs, size = draw_geometry(draw)
    groups, transposed = geometry.groups, geometry.transposed
    precision = draw.choice(list(PRECISIONS))
    real, sample = PRECISIONS[precision]
    trouble = draw.choice(TROUBLE) if draw.random() < 0.4 else "none"
    batch = draw.choice([1, 2, 5, 9])
    x = torch.randn(batch, groups * inputs, *size, dtype=torch.float64)
    shape = (groups * inputs, outputs) if transposed else (groups * outputs, inputs)
    weight = torch.randn(*shape, *geometry.kernel, dtype=torch.float64)
    dress(draw, "none" if trouble == "huge" and sample == torch.float16 else trouble, x, weight, groups)
    x, weight = lay_out(draw, x.to(sample)), lay_out(draw, weight.to(real))
    options = Options(
        mass=draw.choice(["channel", "position"]),
        one_pass=draw.random() < 0.5,
        momentum=draw.choice([0.1, None, 1.0]),
        centred=draw.random() < 0.3,
    )
    kind = geometry.kind_of(options.mass)
    samples = batch if draw.random() < 0.7 else max(1, batch // 2)
    statistics = geometry.statistics_shape(groups * inputs, kind)
    given = None
    if draw.random() < 0.2:
        given = Statistics(torch.rand(statistics, dtype=real), 1 + torch.rand(statistics, dtype=real))
    shift, sizes = draw.random() < 0.6, (groups * outputs, sample)
    setup = Setup(geometry, options, kind, shift, samples, None, given is None, *sizes)
    gain, scale, bias = (
        None if draw.random() < 0.3 else torch.rand(groups * outputs, dtype=real) + 0.5 for _ in range(3)
    )
    kept = [lay_out(draw, torch.rand(statistics).to(draw.choice([real, real, torch.bfloat16]))) for _ in range(2)]
    counter = None if options.momentum is not None and draw.random() < 0.2 else draw.choice([0, 3, -1])
    matrix = WeightMatrix.of(weight, geometry)
    g = lay_out(draw, torch.randn(weight.shape, dtype=torch.float64).to(sample))
    t = torch.randn(groups * outputs, dtype=torch.float64).to(sample)
    dx = lay_out(draw, torch.zeros(x.shape, dtype=sample) if draw.random() < 0.5 else torch.randn_like(x))

    def compute(backend):
        running = Running(*(buffer.clone() for buffer in kept), None if counter is None else torch.tensor(counter))
        found = backend.forward(x, matrix, bias, gain, scale, given, running, setup)
        assert (found.scale is None) == (scale is None)
        if found.undo is None:
            backend.track(running, found.statistics, options.momentum)
        effective = backend.effective(matrix, gain, found.scale, found.saved, setup, sample)
        to = dx.clone()
        dw, dgain = backend.backward(g.clone(), t, to, x, matrix, gain, found.scale, found.saved, setup)
        results = {"effective": found.effective, "again": effective, "bias": found.bias, "dw": dw, "dgain": dgain}
        results |= {"dx": to, "mean": running.mean.clone(), "mass": running.mass.clone()}
        results["batches"] = None if counter is None else running.batches.clone()
        if found.undo is not None:
            found.undo()
            for before, after in zip(kept, running[:2], strict=True):
                assert torch.equal(before, after), "the averages are not what they were"
            assert counter is None or running.batches == counter
        return results, found

    expected, theirs = compute(torch_backend)
    found, _ = compute(triton_backend)
    units = terms(matrix, g, t, gain, scale, bias, theirs.saved, setup)
    name = f"{number}: {precision}, {trouble}, {geometry}, {tuple(x.shape)}, {options}, shift {setup.shift}"
    if not expected["dx"].isfinite().all():
        expected.pop("dx")  # torch multiplies with zeros what the kernels leave out
    for key, value in expected.items():
        compare(f"{key} of {name}", value, found[key], units.get(key, 0.0))


def terms(matrix, g, t, gain, scale, bias, saved, setup) -> dict[str, float]:
    """How large the terms are of which values are sums: these can be zero but for rounding, as with two inputs."""
    share, met, inverse_total, inverse_divisor, mean, positive, inverse = (each.double() for each in saved[:7])
    w, g = matrix.rows(matrix.values).double(), matrix.rows(matrix.like(g)).double()
    t = t.double().view_as(mean)
    gains = torch.ones_like(mean)
    for vector in (gain, scale):
        gains = gains if vector is None else gains * vector.double().view_as(gains)
    v = ((w.abs() + mean.abs()) * inverse).abs()
    g = g.abs() + (t * met).abs()
    effective = v * (inverse_divisor * gains).abs()
    s = (g * v).sum(-1, keepdim=True) * inverse_divisor.abs()
    u = s * gains.abs()
    q = u + (g.sum(-1, keepdim=True) * inverse_divisor * gains).abs() + u * positive.abs()
    dmass = (q * v).sum(-2) * inverse_total.abs().squeeze(-2) + u.sum(-2) * inverse_total.abs().squeeze(-2)
    dmean = (t.abs() * effective).sum(-2)
    found = {
        "effective": effective,
        "again": effective,
        "bias": (effective * met.abs()).sum(-1) + (0 if bias is None else bias.abs().max()),
        "dw": ((g * (inverse_divisor * gains).abs()) + q * share.abs()) * inverse.abs(),
        "dgain": s * (1 if scale is None else scale.double().view_as(s)),
        "dx": (dmass.abs() + dmean).sum(-1),
    }
    return {key: float(value.nan_to_num(0.0, 0.0, 0.0).max()) for key, value in found.items()}


def compare(name: str, expected: Tensor | None, found: Tensor | None, unit: float) -> None:
    if expected is None or found is None:
        assert expected is found, name
        return
    assert (expected.dtype, expected.shape) == (found.dtype, found.shape), name
    if expected.dtype == torch.int64:
        assert torch.equal(expected, found), name
        return
    assert torch.equal(expected.isfinite(), found.isfinite()), f"{name}: not finite elsewhere\n{expected}\n{found}"
    eps, finite = torch.finfo(expected.dtype).eps, expected.isfinite()
    a, b = expected[finite].double(), found[finite].double()
    if a.numel():
        bound = 2 * eps if eps > 1e-4 else 200 * eps
        largest = max(float(a.abs().max()), unit)
        error = float((a - b).abs().max())
        assert error <= bound * largest + 1e-300, f"{name}: off by {error:.2e}, {error / largest:.2e} of the largest"


@pytest.mark.parametrize("first", range(FIRST, FIRST + CASES, 10))
def test_random_layers_agree_with_torch(first, monkeypatch):
    for number in range(first, min(first + 10, FIRST + CASES)):
        draw = random.Random(-number)
        monkeypatch.setattr(triton_backend, "_TILE", draw.choice([128, 2048]))
        monkeypatch.setattr(triton_backend, "_PROGRAMS", draw.choice([1, 4]))
        monkeypatch.setattr(triton_backend, "_BLOCKS", draw.choice([4, 32]))
        one_layer(number)


@pytest.mark.parametrize("mass", ["channel", "position"])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("change", ["", "constant", "cut", "signed in a corner"])
def test_sizes_that_do_not_divide_the_blocks(change, last, centred, mass, monkeypatch):
    """Several chunks of several blocks. A constant channel is at its centre; a tap may meet the only negative input."""
    monkeypatch.setattr(triton_backend, "_TILE", 64)
    monkeypatch.setattr(triton_backend, "_PROGRAMS", 1 if last else 4)
    layer = BalNormConv2d(3, 5, 3, stride=2, padding=1, mass=mass, centred=centred).double()
    x = torch.randn(6, 3, 9, 7, dtype=torch.float64)
    if change == "constant":
        x[:, 1] = 0.5
    elif change == "cut":
        x = torch.cat([x, x], 2)
    elif change:
        x.abs_()[0, :, -1, -1] = -1
    if last:
        x, layer = x.contiguous(memory_format=torch.channels_last), layer.to(memory_format=torch.channels_last)
    both_agree(layer, x, (lambda leaf: leaf[:, :, ::2]) if change == "cut" else lambda leaf: leaf)


@pytest.mark.parametrize("mass", ["channel", "position"])
@pytest.mark.parametrize(
    "build",
    [
        lambda mass: BalNormConv2d(6, 10, 3, groups=2, mass=mass),
        lambda mass: BalNormConv2d(4, 4, 3, groups=4, mass=mass),
        lambda mass: BalNormConv2d(6, 10, 3, groups=2, mass=mass, padding=1, padding_mode="circular"),
    ],
)
def test_a_group_that_is_nearly_dead(build, mass):
    """Its divisor is the floor, through which all groups get gradients. A weight of 0 has no sign."""
    layer, x = build(mass).double(), torch.randn(2, 6, 5, 6, dtype=torch.float64)[:, : build(mass).in_channels].clone()
    x[:, : x.shape[1] // layer.groups] *= 1e-5
    with torch.no_grad():
        layer.weight[:, 0, 0, 0] = 0
    both_agree(layer, x)


def test_inputs_that_are_constant_have_no_mass_when_centred():
    both_agree(BalNormConv2d(3, 5, 3, centred=True).double(), torch.full((3, 3, 5, 5), 0.1, dtype=torch.float64))


def both_agree(layer, x: Tensor, view=lambda leaf: leaf) -> None:
    """A training step of a layer with torch's operations and with Triton."""
    results = []
    for backend in (torch_backend, triton_backend):
        layer.reset_running_stats()
        layer.num_batches_tracked.fill_(50)
        leaf = x.clone().requires_grad_()
        with mock.patch.object(function.backends, "choose", return_value=backend):
            y = layer(view(leaf))
            results.append((y, *torch.autograd.grad(y.square().sum(), (leaf, layer.weight, layer.gain))))
        results[-1] += (layer.running_mean.clone(), layer.running_mass.clone())
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


# --------------------------------------------------------------------------------------------------------------------
# Layers against the reference
# --------------------------------------------------------------------------------------------------------------------

LAYERS = {
    "strided": (lambda **options: BalNormConv2d(4, 6, 3, stride=2, padding=1, groups=2, **options), (3, 4, 6, 7)),
    "depthwise": (lambda **options: BalNormConv2d(3, 3, 3, padding=1, groups=3, **options), (2, 3, 5, 5)),
    "dilated": (lambda **options: BalNormConv1d(3, 5, 3, dilation=2, padding=2, **options), (4, 3, 9)),
    "volume": (lambda **options: BalNormConv3d(2, 3, (1, 2, 3), **options), (2, 2, 3, 4, 4)),
    "transposed": (lambda **options: BalNormConvTranspose2d(4, 6, 3, stride=2, padding=1, **options), (2, 4, 3, 4)),
    "linear": (lambda mass="channel", **options: BalNormLinear(7, 4, **options), (9, 7)),
}


@pytest.mark.usefixtures("_chosen")
@pytest.mark.parametrize(
    ("options", "signed"),
    [
        *itertools.product(
            [{}, {"mass": "position", "one_pass": False}, {"mass": "position", "shift": False}], [False, True]
        ),
        ({"centred": True, "one_pass": False}, True),
        ({"centred": True, "mass": "position"}, True),
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_agree_with_the_reference(name, options, signed):
    build, shape = LAYERS[name]
    layer = build(**options, stats_fraction=0.5).double()
    with torch.no_grad():
        layer.gain.uniform_(0.5, 2)
        layer.bias.normal_()
    x = torch.randn(shape, dtype=torch.float64)
    x = (x if signed else x.relu()).requires_grad_()
    inputs = [x, layer.weight, layer.bias, layer.gain]
    y = layer(x)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(y, inputs, dy)
    shared = {"one_pass": layer.options.one_pass, "shift": layer.shifts, "fraction": 0.5}
    shared["centred"] = layer.options.centred
    gain = layer.gain * layer.output_scale
    if name == "linear":
        z, _, mean, mass = balanced_linear(x, layer.weight, layer.bias, gain, **shared)
    else:
        g = layer._geometry
        geometry = {"stride": g.stride, "padding": g.padding, "dilation": g.dilation, "groups": g.groups}
        if g.transposed:
            geometry |= {"transposed": True, "output_padding": g.output_padding}
        z, _, mean, mass = balanced_conv(
            x, layer.weight, layer.bias, gain, mass=layer.options.mass, **geometry, **shared
        )
    expected = torch.autograd.grad(z, inputs, dy)
    torch.testing.assert_close(y, z, rtol=1e-10, atol=1e-10)
    for value, true in zip(gradients, expected, strict=True):
        torch.testing.assert_close(value, true, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.running_mean, mean.detach().view_as(layer.running_mean), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.running_mass, mass.detach().view_as(layer.running_mass), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_chosen")
@pytest.mark.parametrize("mass", ["channel", "position"])
@pytest.mark.parametrize("far", [1e3, -1e5])
def test_inputs_far_from_zero_lose_no_digits_when_centred(far, mass):
    layer, x = BalNormConv2d(3, 4, 3, padding=1, mass=mass, centred=True), torch.randn(6, 3, 9, 9) + far
    layer(x)
    true_mean, true_mass = BF.statistics(x.double(), 3, padding=1, mass=mass, centred=True)
    torch.testing.assert_close(layer.running_mean.double(), true_mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_mass.double(), true_mass, rtol=1e-3 if far < 0 else 1e-5, atol=0)


@pytest.mark.parametrize(("culprit", "which"), [("backward_rows", 6), ("sum_samples", 2)])
def test_the_trial_of_a_device_finds_errors(culprit, which, monkeypatch):
    """In dw, and in statistics that are centred."""
    assert triton_backend.deviation(torch.device("cpu")) < 1e-5
    run = triton_backend.run

    def wrong(kernel, grid, arguments, options):
        run(kernel, grid, arguments, options)
        if kernel.__name__ == culprit and arguments[1] is not None:
            arguments[which].mul_(1.001)

    monkeypatch.setattr(triton_backend, "run", wrong)
    assert triton_backend.deviation(torch.device("cpu")) > triton_backend._TOLERANCE


@triton.jit
def careless(x, y, n, SIZE: tl.constexpr):  # noqa: N803
    """Copies n numbers."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


@pytest.mark.parametrize(
    ("x", "y", "found"),
    [
        (slice(10, 20), slice(30, 40), []),
        (slice(10, 19), slice(30, 40), ["reads byte 36 of x, which has 36"]),
        (slice(10, 20), slice(30, 39), ["writes byte 36 of y, which has 36"]),
        (slice(10, 20), slice(16, 26), ["a program reads byte 0 of y, which has 40, which another one writes"]),
    ],
)
def test_the_watch_finds_errors(watch, x, y, found):
    memory = torch.rand(50)
    with contextlib.suppress(triton.runtime.errors.InterpreterError):
        triton_backend.run(careless, (3,), (memory[x], memory[y], 10, 4), {})
    assert watch.found[:1] == [f"careless: {error}" for error in found]
    watch.found.clear()


# --------------------------------------------------------------------------------------------------------------------
# What goes wrong on the way
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_chosen")
@pytest.mark.parametrize("options", [{}, {"mass": "position", "groups": 2}, {"centred": True}])
@pytest.mark.parametrize("culprit", ["scale_rows", "backward_rows", "add_to_samples|statistics_gradient"])
def test_an_error_in_the_backward_pass_leaves_the_work_to_torch(options, culprit, monkeypatch):
    monkeypatch.setattr(triton_backend, "_states", {})
    layer, x = BalNormConv2d(4, 6, 3, **options), torch.randn(2, 4, 6, 6, requires_grad=True)
    inputs, run = (x, layer.weight, layer.gain, layer.bias), triton_backend.run
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)

    def fail(kernel, grid, arguments, options):
        if kernel.__name__ in culprit:
            raise RuntimeError("no registers left")
        return run(kernel, grid, arguments, options)

    loss = layer(x).square().sum()
    monkeypatch.setattr(triton_backend, "run", fail)
    with pytest.warns(RuntimeWarning, match="no registers left") as warned:
        found = torch.autograd.grad(loss, inputs)
    assert len(warned) == 1
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("_chosen")
@pytest.mark.parametrize("mass", ["channel", "position"])
def test_a_convolution_that_is_refused_has_moved_no_average(mass, monkeypatch):
    layer = BalNormConv2d(3, 4, 3, mass=mass)
    layer(torch.rand(2, 3, 5, 5))
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}

    def refuse(*_):
        raise MemoryError("too large")

    monkeypatch.setattr(type(layer._geometry), "convolve", refuse)
    with pytest.raises(MemoryError):
        layer(torch.rand(2, 3, 5, 5))
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.usefixtures("_chosen")
@pytest.mark.parametrize("change", [lambda v: v[:-1], lambda v: torch.cat([v, v]), lambda v: v.bfloat16()])
def test_saved_vectors_that_were_replaced_are_refused(change):
    """A kernel would read beyond their end."""
    layer, x = BalNormConv2d(3, 4, 3), torch.rand(2, 3, 5, 5)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: change(t) if t.dim() == 1 else t)
    with hooks, pytest.raises(RuntimeError, match="replaced"):
        layer(x).sum().backward()


@pytest.mark.usefixtures("_chosen")
def test_a_change_of_the_averages_is_noticed_by_autograd():
    layer, x = BalNormConv2d(3, 4, 3), torch.rand(2, 3, 6, 6)
    loss = (layer.running_mass * layer.weight).sum()
    layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --------------------------------------------------------------------------------------------------------------------
# Operators of compiled programs
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def _operators(monkeypatch):
    """``torch.compile`` uses the operators on the CPU, without looking into them: the interpreter launches kernels."""
    from balnorm._core.backends import triton_operators

    def launch(launch, *tensors):
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            triton_backend.run(launch.kernel, launch.grid, (*tensors, *launch.arguments), launch.options)

    monkeypatch.setattr(triton_operators, "_launch", launch)
    monkeypatch.setattr(triton_backend, "has_operators", lambda *tensors: is_compiled_for_training())
    torch._dynamo.reset()
    with torch._functorch.config.patch(decompose_custom_triton_ops=False):
        yield


def compiled(layer):
    """A layer that is compiled whole, and how many times that was done."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return aot_module_simplified(graph, inputs, fw_compiler=lambda graph, _: make_boxed_func(graph.forward))

    return torch.compile(layer, backend=count, fullgraph=True), graphs


def training_step(model, x, autocast=False):
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(leaf)
    loss = (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return y.detach(), *torch.autograd.grad(loss, (leaf, *parameters))


OPERATORS = {
    "channel": ({}, torch.contiguous_format),
    "position, channels_last": ({"mass": "position"}, torch.channels_last),
    "groups, two passes": ({"groups": 2, "one_pass": False}, torch.channels_last),
    "depthwise": ({"groups": 4, "stride": 2}, torch.contiguous_format),
    "no parameters": ({"affine": False, "bias": False, "shift": True}, torch.contiguous_format),
    "centred": ({"centred": True}, torch.contiguous_format),
}


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_layers_agree_with_plain_operations(name):
    options, layout = OPERATORS[name]
    layer = BalNormConv2d(4, 8, 3, padding=1, **options).to(memory_format=layout)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    plain = copy.deepcopy(layer)
    model, graphs = compiled(layer)
    for batch in (3, 5, 7):  # the third is no longer compiled for
        x = torch.randn(batch, 4, 6, 5).contiguous(memory_format=layout)
        torch.testing.assert_close(training_step(model, x), training_step(plain, x), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2  # the second is for any batch
    assert all("balnorm.balance" in graph.print_readable(False) for graph in graphs)
    for (key, found), expected in zip(layer.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("build", [lambda: BalNormConvTranspose2d(4, 6, 3, stride=2), lambda: BalNormLinear(5, 4)])
def test_other_compiled_layers_agree_with_plain_operations(build):
    layer = build()
    x = torch.randn(3, 4, 4, 5)
    model, _ = compiled(copy.deepcopy(layer))
    torch.testing.assert_close(training_step(model, x), training_step(layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_operators")
def test_a_compiled_layer_under_autocast():
    layer, x = BalNormConv2d(4, 6, 3, mass="position"), torch.randn(3, 4, 6, 5)
    model, _ = compiled(copy.deepcopy(layer))
    y, dx, *gradients = training_step(model, x, autocast=True)
    expected, expected_dx, *others = training_step(layer, x, autocast=True)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close((y, dx), (expected, expected_dx), rtol=0.02, atol=0.02)
    for found, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(found, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


@pytest.mark.usefixtures("_operators")
def test_transforms_of_compiled_programs_see_plain_operations():
    layer, x = BalNormConv2d(4, 6, 3, track_running_stats=False), torch.randn(3, 4, 6, 5)

    def gradient(x):
        return torch.func.grad(lambda x: layer(x).square().sum())(x)

    model, graphs = compiled(gradient)
    torch.testing.assert_close(model(x), gradient(x))
    assert "balnorm.balance" not in graphs[0].print_readable(False)


@pytest.mark.usefixtures("_operators")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_are_registered_right(groups, dtype):
    weight = torch.randn(6, 4 // groups, 3, 3, requires_grad=True)
    mean = torch.rand(1, 4, 3, 3)
    mass = (mean + 0.5).requires_grad_()
    gain = torch.rand(6, requires_grad=True)
    how = (groups, True, False, True, True)
    operators = torch.ops.balnorm
    vectors = (gain, torch.rand(6), torch.rand(6))
    torch.library.opcheck(operators.balance, (weight, mean, mass, *vectors, *how, dtype))
    torch.library.opcheck(operators.balance, (weight, mean, mass, None, None, None, *how, dtype))
    saved = operators.balance(weight, mean, mass, *vectors, *how, dtype)[2].detach()
    gradients = (torch.randn(6, 4 // groups, 3, 3, dtype=dtype), torch.randn(6, dtype=dtype))
    constants = (weight.detach(), saved, gain.detach())
    torch.library.opcheck(operators.balance_backward, (*gradients, *constants, True, *how))
    running = (torch.rand(1, 4, 3, 3), torch.rand(1, 4, 3, 3), torch.tensor(3))
    torch.library.opcheck(operators.track, (mean, mass.detach(), *running, 9, 1, 0.1))


def test_a_device_is_tried_while_a_program_is_compiled(monkeypatch):
    """The trial needs real tensors."""

    def start(_):
        deviation = triton_backend.deviation(torch.device("cpu"))
        return triton_backend._State(deviation < triton_backend._TOLERANCE, "tried")

    monkeypatch.setattr(triton_backend, "_states", {})
    monkeypatch.setattr(triton_backend, "_start", start)
    torch._dynamo.reset()
    chosen = torch.compile(lambda x: x + int(triton_backend._registered(0)), backend="eager", fullgraph=True)
    assert chosen(torch.zeros(())) == 1
