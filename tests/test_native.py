"""The native kernels against torch's own operations, over shapes, layouts and options; how they are found and used."""

import copy
import inspect
import multiprocessing
import os
import subprocess
import sys
from unittest import mock

import hatch_build
import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import balnorm
import balnorm.functional as BF
from balnorm._core import method, torch_private
from balnorm._core.backends import Call, Running, cpu
from balnorm._core.matrix import WeightMatrix
from balnorm._core.method import Statistics
from balnorm._core.options import Options
from held import PATIENCE

pytestmark = pytest.mark.skipif(cpu._library is None, reason=f"no native kernels ({cpu.status()})")


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


def call_of(layer, samples, takes_statistics=True):
    """What the layer hands to a backend, apart from its tensors."""
    geometry, options = layer._geometry, layer.options
    return Call(geometry, options, geometry.kind_of(options.mass), layer.shifts, samples, None, takes_statistics)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mass", BF.MASSES)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_bfloat16_samples_are_read_exactly_and_rounded_as_torch_does(mass, layout, fraction):
    """Under autocast the weight is in float32 and the samples are not. All bit patterns occur among the gradients."""
    layer = balnorm.BalNormConv2d(8, 6, 3, padding=1, mass=mass, stats_fraction=fraction)
    samples = int(64 * fraction)
    geometry, call = layer._geometry, call_of(layer, samples)
    x, w = laid_out(torch.randn(64, 8, 16, 8).bfloat16(), layout), torch.randn(6, 8, 3, 3)
    matrix = WeightMatrix.of(w, geometry)
    exact = method.statistics(x.double(), samples, geometry, mass)
    with mock.patch.object(cpu, "_call", wraps=cpu._call) as called:
        effective, _, _, found, saved, _ = cpu.forward(x, matrix, None, None, None, None, None, call)
    assert called.call_args.args[:2] == ("forward", (torch.float32, torch.bfloat16))
    torch.testing.assert_close(found.mass.double(), exact.mass, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=0, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float16):  # C writes the first, torch converts to the second
        low, full = (cpu.effective(matrix, None, None, saved, call, each) for each in (dtype, torch.float32))
        assert torch.equal(low, full.to(dtype))
    assert torch.equal(effective, full.bfloat16())

    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(x.shape)
    ours, theirs = laid_out(patterns.clone(), layout), patterns.clone()
    g, t = 1e3 * torch.randn(w.shape), torch.randn(6)
    cpu.backward(g.clone(), t, ours, x, matrix, None, None, saved, call)
    with mock.patch.object(cpu, "_layout", return_value=None):
        cpu.backward(g, t, theirs, x, matrix, None, None, saved, call)
    changed = (theirs != patterns) & ~patterns.isnan()
    assert changed[:samples].any()
    # sums over the taps that meet an input may differ in the last bit of float32
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6, equal_nan=True)
    assert (ours != theirs)[~patterns.isnan()].sum() < 50


def test_bfloat16_samples_and_a_float64_weight_meet_in_torch():
    layer = balnorm.BalNormConv2d(3, 4, 3)
    x, w = torch.rand(2, 3, 6, 6).bfloat16(), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    matrix, call = WeightMatrix.of(w, layer._geometry), call_of(layer, 2)
    low, full = (
        cpu.forward(samples, matrix, None, None, None, None, None, call).effective for samples in (x, x.double())
    )
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, full.bfloat16(), rtol=2**-7, atol=0)


def test_bfloat16_gradients_in_the_middle_go_to_the_even_one():
    """The gradient of the mass is exactly 1 here, half a unit of the last place for numbers from 256 to 512."""
    layer = balnorm.BalNormConv1d(1, 1, 2, stride=2, shift=True)
    x, w = torch.ones(2, 1, 128).bfloat16(), torch.tensor([[[1.0, -1.0]]])
    matrix, call = WeightMatrix.of(w, layer._geometry), call_of(layer, 2)
    saved = cpu.forward(x, matrix, None, None, None, None, None, call).saved
    before = torch.arange(0, 512, 2).bfloat16().view(x.shape)
    dx = before.clone()
    with mock.patch.object(cpu.torch_backend, "add_statistics_gradient", side_effect=AssertionError):  # C adds it
        cpu.backward(torch.tensor([[[0.0, 256.0]]]), torch.zeros(1), dx, x, matrix, None, None, saved, call)
    assert torch.equal(dx, before + 1)
    assert (before[dx == before] >= 256).all()
    assert ((before >= 256) & (before < 512) & (dx > before)).any()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("options", [{}, {"mass": "position"}, {"centred": True}, {"shift": False}])
@pytest.mark.parametrize("values", [torch.rand, torch.randn])
def test_the_number_of_threads_changes_no_bit(options, layout, values):
    """Work is divided by its size. So a run can be resumed on more cores, as far as this layer is concerned."""
    layer = balnorm.BalNormConv2d(48, 160, 3, padding=1, **options)
    x = laid_out(values(16, 48, 20, 20), layout)
    threads, found = torch.get_num_threads(), []
    gain, scale = layer.gain.detach(), layer.output_scale
    for count in (1, 2, 2, 5):
        torch.set_num_threads(count)
        matrix, call = WeightMatrix.of(layer.weight.detach(), layer._geometry), call_of(layer, 16)
        effective, bias, _, _, saved, _ = cpu.forward(x, matrix, None, gain, scale, None, None, call)
        g, dx = torch.linspace(-1, 1, effective.numel()).view_as(effective), torch.zeros_like(x)
        t = torch.linspace(-1, 1, 160)
        dweight, dgain = cpu.backward(g, t, dx, x, matrix, gain, scale, saved, call)
        found.append((effective, bias, *saved, dweight, dgain, dx))
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
    for size in range(1, 1200):
        layer(torch.rand(1, 1, 1, size))
    assert len(cpu._layouts) <= 1000


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
        (
            {"running_mass": torch.ones(1, 3, 1, 1), "running_mean": torch.ones(1, 3, 3, 3)},
            r"expected a running mean of shape \(1, 3, 1, 1\), got \(1, 3, 3, 3\)",
        ),
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
    assert balnorm.backend() == cpu.status()
    program = "import balnorm; print(balnorm.backend())"
    for value, expected in (("torch", "torch: BALNORM_BACKEND=torch is set"), ("auto", cpu.status())):
        environment = {**os.environ, "BALNORM_BACKEND": value}
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
    monkeypatch.setattr(cpu, "thread_pool", lambda: None)
    library, status = cpu._load()
    assert library is not None
    assert status == f"native, on one thread: torch {torch.__version__} does not expose its thread pool"


def test_a_library_that_is_missing_or_broken_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "kernels.so")
    assert cpu._load() == (None, "torch: the native kernels were not compiled when balnorm was installed")
    (tmp_path / "kernels.so").write_bytes(b"no library")
    library, status = cpu._load()
    assert library is None
    assert status.startswith("torch: the native kernels could not be loaded (")


def test_kernels_of_another_version_are_left_alone(monkeypatch):
    """They would read their arguments where others are now."""
    monkeypatch.delenv("BALNORM_BACKEND", raising=False)
    monkeypatch.setattr(cpu, "INTERFACE", cpu.INTERFACE + 1)
    if not cpu.LIBRARY.exists():
        pytest.skip("no native kernels")
    library, status = cpu._load()
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
    monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "kernels.so")
    library, _ = cpu._load()
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


# --------------------------------------------------------------------------------------------------------------------
# Every address goes through one function
# --------------------------------------------------------------------------------------------------------------------


def test_no_address_reaches_c_by_another_way():
    """data_ptr() is read in one place, and what is read there was checked."""
    source = inspect.getsource(cpu)
    assert source.count("data_ptr()") == 1
    assert "return tensor.data_ptr()" in inspect.getsource(cpu._address)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(4, dtype=torch.float64), "expected a torch.float32 tensor of shape"),
        (torch.ones(3), "expected a torch.float32 tensor of shape"),
        (torch.ones(4, device="meta"), "on meta"),
        (torch.ones(8)[::2], "cannot read a tensor with strides"),
    ],
)
def test_an_address_is_given_for_what_c_expects_only(tensor, message):
    with pytest.raises(RuntimeError, match=message):
        cpu._address(tensor, (4,), torch.float32)
    lost = torch.ones(4)
    lost.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has lost its memory"):
        cpu._address(lost, (4,), torch.float32)
    part = torch.ones(4)
    assert cpu._address(part, (4,), torch.float32) == part.data_ptr()


def test_given_statistics_are_those_of_the_batch():
    layer = balnorm.BalNormConv2d(3, 4, 3, padding=1, centred=True)
    x, matrix = torch.randn(2, 3, 6, 6), WeightMatrix.of(layer.weight.detach(), layer._geometry)
    own = cpu.forward(x, matrix, None, None, None, None, None, call_of(layer, 2))
    given = Statistics(own.statistics.mean, own.statistics.mass)
    again = cpu.forward(x, matrix, None, None, None, given, None, call_of(layer, 2, False))
    torch.testing.assert_close((again.effective, again.bias), (own.effective, own.bias))


@pytest.mark.parametrize("counter", [-1, -5, 0, 3])
def test_moving_averages_move_as_torch_moves_them(counter):
    statistics = Statistics(torch.randn(1, 3, 1, 1), torch.rand(1, 3, 1, 1))
    for momentum in (0.1, None):
        results = []
        for track in (cpu.track, cpu.torch_backend.track):
            running = Running(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1), torch.tensor(counter))
            track(running, statistics, momentum)
            results.append(running)
        torch.testing.assert_close(results[0], results[1])
        assert results[0].mass.isfinite().all()
