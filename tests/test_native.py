"""The native kernels against torch's own operations, over shapes, layouts and options; how they are found and used."""

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from unittest import mock

import hatch_build
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import balnorm
import balnorm.functional as BF
from balnorm.core import native, torch_private
from balnorm.core.mass import add_mass_gradient, batch_mass
from balnorm.core.matrix import WeightMatrix
from balnorm.core.options import Options
from balnorm.core.plan import Call, Running
from held import PATIENCE

pytestmark = pytest.mark.skipif(native._library is None, reason=f"no native kernels ({native.status()})")


def laid_out(x, layout):
    """The same values in another order of memory: dense, with gaps, or at an odd address."""
    if layout == "channels_last" and x.dim() in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gaps":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    return x


LAYOUTS = ["contiguous", "channels_last", "transposed", "gaps", "offset"]


@st.composite
def calls(draw):
    """A function, its tensors and its options: any convolution, transposed convolution or linear map."""
    axes = draw(st.integers(0, 3))
    groups = draw(st.integers(1, 3)) if axes else 1
    inputs, outputs = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    samples = draw(st.integers(0, 5))
    options = {
        "one_pass": draw(st.booleans()),
        "stats_fraction": draw(st.sampled_from([1.0, 0.5, 0.01])),
        "momentum": draw(st.sampled_from([0.1, None, 0.9])),
    }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(*shape):
        return torch.rand(*shape, generator=generator, dtype=dtype)

    kernel = [draw(st.integers(1, 4)) for _ in range(axes)]
    size = [draw(st.integers(1, 7)) for _ in range(axes)]
    transposed = axes > 0 and draw(st.booleans())
    if axes == 0:
        function, geometry = BF.bal_linear, {}
        leading = draw(st.sampled_from([(), (3,)]))
        x, w = random(samples, *leading, inputs), random(outputs, inputs) - 0.5
    else:
        options["mass"] = draw(st.sampled_from(BF.MASSES))
        geometry = {
            "stride": tuple(draw(st.integers(1, 3)) for _ in kernel),
            "dilation": tuple(draw(st.integers(1, 2)) for _ in kernel),
            "groups": groups,
        }
        if transposed:
            function, w = BF.bal_conv_transpose, random(inputs, outputs // groups, *kernel) - 0.5
            sides = list(zip(size, kernel, geometry["stride"], geometry["dilation"], strict=True))
            reach = [(n - 1) * s + d * (k - 1) for n, k, s, d in sides]  # one less than the output without padding
            geometry["padding"] = tuple(draw(st.integers(0, min(2, most // 2))) for most in reach)
            geometry["output_padding"] = tuple(draw(st.integers(0, max(s, d) - 1)) for _, _, s, d in sides)
        else:
            function, w = BF.bal_conv, random(outputs, inputs // groups, *kernel) - 0.5
            geometry["padding"] = tuple(draw(st.integers(0, 2)) for _ in kernel)
            reach = zip(kernel, geometry["dilation"], geometry["padding"], strict=True)
            size = [max(n, d * (k - 1) + 1 - 2 * p) for n, (k, d, p) in zip(size, reach, strict=True)]
        x = random(samples, inputs, *size)
    x, w = laid_out(x, draw(st.sampled_from(LAYOUTS))), laid_out(w, draw(st.sampled_from(LAYOUTS)))
    gain, bias = random(outputs) + 0.5, random(outputs)
    taps = kernel if options.get("mass") == "position" else [1] * axes
    running = random(1, inputs, *taps)
    if axes == 2 and draw(st.booleans()):
        running = running.contiguous(memory_format=torch.channels_last)
    training = draw(st.sampled_from([True, True, False]))
    return function, x, w, bias, gain, running, {**geometry, **options, "training": training}


def results(call):
    """Output, running mass and all gradients."""
    function, x, w, bias, gain, running, options = call
    leaves = [t.detach().requires_grad_() for t in (x, w, bias, gain)]
    running, counter = running.clone(), torch.tensor(3)
    y = function(*leaves, **options, running_mass=running, num_batches_tracked=counter)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    (y * weights).sum().backward()
    return y.detach(), running, counter, *(leaf.grad for leaf in leaves)


def by_torch(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_library", None)
        return results(call)


@given(calls())
def test_native_is_torch(call):
    """Up to rounding: in float32, about as far from the result in float64 as torch's own operations are."""
    names = ("output", "running mass", "counter", "input", "weight", "bias", "gain")
    function, *tensors, options = call
    low = call[1].dtype == torch.float32
    exact = by_torch((function, *(t.double() for t in tensors), options))
    for name, ours, theirs, true in zip(names, results(call), by_torch(call), exact, strict=True):
        if not true.numel():
            continue
        scale = true.abs().max().clamp(min=1)
        # Where a gradient nearly vanishes, what is left of it is rounding, and a small contribution magnifies it.
        allowed = 2e-3 * scale + 50 * (theirs - true).abs().max() if low else 1e-7 * scale
        assert (ours - true).abs().max() <= allowed, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mass", BF.MASSES)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_bfloat16_samples_are_read_exactly_and_rounded_as_torch_does(mass, layout, fraction):
    """Under autocast the weight is in float32 and the samples are not. All bit patterns occur among the gradients."""
    plan = balnorm.BalNormConv2d(8, 6, 3, padding=1, mass=mass, stats_fraction=fraction)._plan
    samples = int(64 * fraction)
    x, w = laid_out(torch.rand(64, 8, 16, 8).bfloat16(), layout), torch.randn(6, 8, 3, 3)
    matrix, counter = WeightMatrix.of(w, plan.geometry), torch.tensor(0)
    exact = batch_mass(x.double(), samples, plan.geometry, mass)
    running = Running(torch.ones(exact.shape), counter)
    call = Call(plan, samples, None, running)
    with mock.patch.object(native, "_call", wraps=native._call) as called:
        effective, saved = native.forward(x, matrix, None, None, call)
    assert called.call_args.args[:2] == ("forward", (torch.float32, torch.bfloat16))
    torch.testing.assert_close(running.mass.double(), exact, rtol=1e-6, atol=0)
    for dtype in (torch.bfloat16, torch.float16):  # C writes the first, torch converts to the second
        low, full = (native.effective(matrix, None, call, saved, each) for each in (dtype, torch.float32))
        assert torch.equal(low, full.to(dtype))
    assert torch.equal(effective, full.bfloat16())

    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(x.shape)
    ours, theirs = laid_out(patterns.clone(), layout), patterns.clone()
    g = 1e3 * torch.randn(w.shape)
    _, _, dmass = native.backward(g.clone(), None, matrix, None, call, saved)
    _, _, left = native.backward(g, ours, matrix, None, call, saved)
    assert (left is None) == (layout in ("contiguous", "channels_last", "offset"))  # where C has added it itself
    add_mass_gradient(theirs, dmass, samples, plan.geometry, mass)
    changed = (theirs != patterns) & ~patterns.isnan()
    assert changed[:samples].any()
    if mass == "channel":
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    else:  # sums over the taps that meet an input may differ in the last bit of float32
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6, equal_nan=True)
        assert (ours != theirs)[~patterns.isnan()].sum() < 50


def test_bfloat16_samples_and_a_float64_weight_meet_in_torch():
    plan = balnorm.BalNormConv2d(3, 4, 3)._plan
    x, w = torch.rand(2, 3, 6, 6).bfloat16(), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    call = Call(plan, 2, None, None)
    low, _ = native.forward(x, WeightMatrix.of(w, plan.geometry), None, None, call)
    full, _ = native.forward(x.double(), WeightMatrix.of(w, plan.geometry), None, None, call)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, full.bfloat16(), rtol=2**-7, atol=0)


def test_bfloat16_gradients_in_the_middle_go_to_the_even_one():
    """The gradient of the mass is exactly 1 here, half a unit of the last place for numbers from 256 to 512."""
    plan = balnorm.BalNormConv1d(1, 1, 2, stride=2)._plan
    x, w = torch.ones(2, 1, 128).bfloat16(), torch.tensor([[[1.0, -1.0]]])
    matrix, call = WeightMatrix.of(w, plan.geometry), Call(plan, 2, None, None)
    _, saved = native.forward(x, matrix, None, None, call)
    before = torch.arange(0, 512, 2).bfloat16().view(x.shape)
    dx = before.clone()
    _, _, left = native.backward(torch.tensor([[[0.0, 256.0]]]), dx, matrix, None, call, saved)
    assert left is None  # C has added it itself
    assert torch.equal(dx, before + 1)
    assert (before[dx == before] >= 256).all()
    assert ((before >= 256) & (before < 512) & (dx > before)).any()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("mass", BF.MASSES)
def test_the_number_of_threads_changes_no_bit(mass, layout):
    """Work is divided by its size. So a run can be resumed on more cores, as far as this layer is concerned."""
    layer = balnorm.BalNormConv2d(48, 160, 3, padding=1, mass=mass)
    x = laid_out(torch.rand(16, 48, 20, 20), layout)
    threads, found = torch.get_num_threads(), []
    plan = layer._plan
    for count in (1, 2, 2, 5):
        torch.set_num_threads(count)
        matrix, call = WeightMatrix.of(layer.weight.detach(), plan.geometry), Call(plan, 16, layer.output_scale, None)
        effective, saved = native.forward(x, matrix, layer.gain.detach(), None, call)
        g, dx = torch.linspace(-1, 1, effective.numel()).view_as(effective), torch.zeros_like(x)
        dweight, dgain, _ = native.backward(g, dx, matrix, layer.gain.detach(), call, saved)
        found.append((effective, *saved, dweight, dgain, dx))
    torch.set_num_threads(threads)
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert torch.equal(ours, theirs)


def test_sums_of_many_numbers_lose_nothing_to_speak_of():
    for layout in ("contiguous", "channels_last"):
        x = laid_out(torch.rand(64, 3, 256, 256) * 1e-3 + 1, layout)
        layer = balnorm.BalNormConv2d(3, 2, 1)
        layer(x)
        torch.testing.assert_close(
            layer.running_mass.double(), x.double().mean((0, 2, 3), keepdim=True), rtol=3e-7, atol=0
        )


def test_images_of_ever_new_sizes_are_not_remembered_for_ever():
    layer = balnorm.BalNormConv2d(1, 1, 1)
    for size in range(1, 300):
        layer(torch.rand(1, 1, 1, size))
    assert len(layer._plan.shapes) < 110


def test_a_change_of_the_running_mass_is_noticed_by_autograd():
    layer, x = balnorm.BalNormConv2d(3, 4, 3), torch.rand(2, 3, 6, 6)
    loss = (layer.running_mass * layer.weight).sum()
    layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def in_a_child(queue):
    torch.set_num_threads(1)
    queue.put(balnorm.BalNormConv2d(3, 4, 3, dtype=torch.float64)(torch.ones(2, 3, 6, 6).double()).shape)


def test_forked_processes_compute_too():
    balnorm.BalNormConv2d(3, 4, 3)(torch.rand(2, 3, 6, 6))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_a_child, args=(queue,))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert queue.get() == (2, 4, 4, 4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"gain": torch.ones(3)}, r"expected a gain of shape \(4,\), got \(3,\)"),
        (
            {"running_mass": torch.ones(1, 2, 1, 1)},
            r"expected a running mass of shape \(1, 3, 1, 1\), got \(1, 2, 1, 1\)",
        ),
        ({"running_mass": torch.ones(3), "training": False}, r"expected a running mass of shape \(1, 3, 1, 1\)"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_tensors_that_do_not_fit_are_refused(tensors, message, backend, grad):
    counter = torch.tensor(0)
    with pytest.raises(ValueError, match=message), torch.set_grad_enabled(grad):
        BF.bal_conv2d(
            torch.rand(2, 3, 6, 6), torch.randn(4, 3, 3, 3, requires_grad=True), **tensors, num_batches_tracked=counter
        )


def test_what_is_in_use_can_be_asked_for():
    assert balnorm.backend() == native.status()
    program = "import balnorm; print(balnorm.backend())"
    for value, expected in (("0", "torch: BALNORM_NATIVE=0 is set"), ("1", native.status())):
        environment = {**os.environ, "BALNORM_NATIVE": value}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_without_torch_s_threads_there_is_one(monkeypatch):
    """As in versions of torch whose library has no torch_parallel_for, which is looked up here in a library without."""
    monkeypatch.setattr(torch, "__file__", "/nowhere/torch/__init__.py")
    assert torch_private.thread_pool() is None
    monkeypatch.setattr(torch_private.ctypes, "CDLL", lambda _: object())
    assert torch_private.thread_pool() is None
    monkeypatch.undo()
    monkeypatch.setattr(native, "thread_pool", lambda: None)
    library, status = native._load()
    assert library is not None
    assert status == f"native, on one thread: torch {torch.__version__} does not lend its own"


def test_a_library_that_is_missing_or_broken_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "kernels.so")
    assert native._load() == (None, "torch: the native kernels were not compiled when balnorm was installed")
    (tmp_path / "kernels.so").write_bytes(b"no library")
    library, status = native._load()
    assert library is None
    assert status.startswith("torch: the native kernels could not be loaded (")


def test_kernels_of_another_version_are_left_alone(monkeypatch):
    """They would read their arguments where others are now."""
    monkeypatch.delenv("BALNORM_NATIVE", raising=False)
    monkeypatch.setattr(native, "INTERFACE", native.INTERFACE + 1)
    if not native.LIBRARY.exists():
        pytest.skip("no native kernels")
    library, status = native._load()
    assert library is None
    assert "another version" in status


@pytest.mark.parametrize(
    ("compiler", "problem"),
    [("/nowhere/cc", "there is no C compiler (/nowhere/cc)"), ("false", "the C compiler false failed: no message")],
)
def test_a_compiler_that_is_missing_or_fails_is_said(monkeypatch, tmp_path, compiler, problem):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(hatch_build, "LIBRARY", tmp_path / "kernels.so")
    assert hatch_build.compile_kernels() == problem
    assert not list(tmp_path.iterdir())


def test_the_kernels_compile_without_several_versions_of_a_function(monkeypatch, tmp_path):
    """As on processors other than x86, and with compilers that cannot choose at run time."""
    monkeypatch.setattr(hatch_build.platform, "machine", lambda: "other")
    monkeypatch.setattr(hatch_build, "LIBRARY", tmp_path / "kernels.so")
    assert hatch_build.compile_kernels() is None
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "kernels.so")
    library, _ = native._load()
    assert library.balnorm_forward_float


def test_options_have_no_switch_for_it():
    assert "native" not in Options.__dataclass_fields__


# --------------------------------------------------------------------------------------------------------------------
# What C must not touch
# --------------------------------------------------------------------------------------------------------------------


def trained_layer():
    """A layer behind its early batches, at whose values it looks."""
    layer = balnorm.BalNormConv2d(3, 4, 3, padding=1, mass="position")
    for _ in range(5):
        layer(torch.rand(2, 3, 8, 8))
    return layer


def test_another_default_device_changes_nothing():
    """C wrote to memory of that device, and the process died."""
    layer, x = trained_layer(), torch.rand(2, 3, 8, 8, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    with torch.device("meta"):
        found = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(found, expected)


def test_fake_tensors_stay_fake():
    """C read real tensors, wrote to memory that was not there, and the process died."""
    layer, x = trained_layer(), torch.rand(2, 3, 8, 8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(layer(x)) is FakeTensor


def test_a_traced_graph_has_every_operation():
    """It had a convolution with memory that nothing had written to."""
    layer, x = trained_layer().eval(), torch.rand(2, 3, 8, 8)
    expected = layer(x)
    torch.testing.assert_close(make_fx(layer)(x)(x), expected)
    other = trained_layer()
    graph = make_fx(copy.deepcopy(other))(x)
    torch.testing.assert_close(graph(x), other(x))


def test_what_is_cached_for_c_is_not_saved():
    """It is of the version that saved it."""
    layer = trained_layer()
    assert layer._plan.shapes
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert not again._plan.shapes
        x = torch.rand(2, 3, 8, 8)
        torch.testing.assert_close(again(x), layer(x))
