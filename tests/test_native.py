"""The native kernels against torch's own operations, over shapes, layouts and options; how they are found and used."""

import contextlib
import copy
import inspect
import math
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import hatch_build
import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import balnorm
import balnorm.functional as BF
from balnorm._core import function, method, torch_private
from balnorm._core.backends import Running, Setup, cpu
from balnorm._core.geometry import Geometry
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


def setup_of(layer, samples, takes_statistics=True):
    """What the layer hands to a backend, apart from its tensors."""
    geometry, options = layer._geometry, layer.options
    kind, outputs, dtype = geometry.kind_of(options.mass), layer.gain.numel(), layer.weight.dtype
    return Setup(geometry, options, kind, layer.shifts, samples, None, takes_statistics, outputs, dtype)


def layer_averages(layer):
    return Running(layer.running_mean, layer.running_mass, layer.num_batches_tracked)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mass", BF.MASSES)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_bfloat16_samples_are_read_exactly_and_rounded_as_torch_does(mass, layout, fraction):
    """Under autocast the weight is in float32 and the samples are not. All bit patterns occur among the gradients."""
    layer = balnorm.BalNormConv2d(8, 6, 3, padding=1, mass=mass, stats_fraction=fraction)
    samples = int(64 * fraction)
    geometry, setup = layer._geometry, setup_of(layer, samples)
    x, w = laid_out(torch.randn(64, 8, 16, 8).bfloat16(), layout), torch.randn(6, 8, 3, 3)
    matrix = WeightMatrix.of(w, geometry)
    exact = method.statistics(x.double(), samples, geometry, mass)
    with mock.patch.object(cpu, "_call", wraps=cpu._call) as called:
        effective, _, _, _, saved, _ = cpu.forward(x, matrix, None, None, None, None, layer_averages(layer), setup)
    assert called.call_args.args[0].low == torch.bfloat16
    torch.testing.assert_close(layer.running_mass.double(), exact.mass, rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_mean.double(), exact.mean, rtol=0, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float16):  # C writes the first, torch converts to the second
        low, full = (cpu.effective(matrix, None, None, saved, setup, each) for each in (dtype, torch.float32))
        assert torch.equal(low, full.to(dtype))
    assert torch.equal(effective, full.bfloat16())

    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(x.shape)
    ours, theirs = laid_out(patterns.clone(), layout), patterns.clone()
    g, t = 1e3 * torch.randn(w.shape), torch.randn(6)
    cpu.backward(g.clone(), t, ours, x, matrix, None, None, saved, setup)
    with mock.patch.object(cpu, "_samples", return_value=None):
        cpu.backward(g, t, theirs, x, matrix, None, None, saved, setup_of(layer, samples))
    changed = (theirs != patterns) & ~patterns.isnan()
    assert changed[:samples].any()
    # sums over the taps that meet an input may differ in the last bit of float32
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-6, equal_nan=True)
    assert (ours != theirs)[~patterns.isnan()].sum() < 50


def test_bfloat16_samples_and_a_float64_weight_meet_in_torch():
    layer = balnorm.BalNormConv2d(3, 4, 3)
    x, w = torch.rand(2, 3, 6, 6).bfloat16(), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    matrix, setup = WeightMatrix.of(w, layer._geometry), setup_of(layer, 2)
    low, full = (
        cpu.forward(samples, matrix, None, None, None, None, None, setup).effective for samples in (x, x.double())
    )
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low, full.bfloat16(), rtol=2**-7, atol=0)


def test_bfloat16_gradients_in_the_middle_go_to_the_even_one():
    """The gradient of the mass is exactly 1 here, half a unit of the last place for numbers from 256 to 512."""
    layer = balnorm.BalNormConv1d(1, 1, 2, stride=2, shift=True)
    x, w = torch.ones(2, 1, 128).bfloat16(), torch.tensor([[[1.0, -1.0]]])
    matrix, setup = WeightMatrix.of(w, layer._geometry), setup_of(layer, 2)
    saved = cpu.forward(x, matrix, None, None, None, None, None, setup).saved
    before = torch.arange(0, 512, 2).bfloat16().view(x.shape)
    dx = before.clone()
    with mock.patch.object(cpu.torch_backend, "add_statistics_gradient", side_effect=AssertionError):  # C adds it
        cpu.backward(torch.tensor([[[0.0, 256.0]]]), torch.zeros(1), dx, x, matrix, None, None, saved, setup)
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
        matrix, setup = WeightMatrix.of(layer.weight.detach(), layer._geometry), setup_of(layer, 16)
        effective, bias, _, _, saved, _ = cpu.forward(x, matrix, None, gain, scale, None, None, setup)
        g, dx = torch.linspace(-1, 1, effective.numel()).view_as(effective), torch.zeros_like(x)
        dy, t = laid_out(torch.sin(torch.arange(16.0 * 160 * 20 * 20)).view(16, 160, 20, 20), layout), torch.zeros(160)
        dy = dy if cpu.adds_up(dy, matrix, setup) else None
        dweight, dgain = cpu.backward(g, t, dx, x, matrix, gain, scale, saved, setup, dy)
        found.append((effective, bias, *saved, t, dweight, dgain, dx))
    torch.set_num_threads(threads)
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert torch.equal(ours, theirs)


def gradients_and_needs(layer, x, dy):
    """The gradients of parameters, and what the convolution was asked for: gradients of input, weight and bias."""
    asked, backward = [], Geometry.convolve_backward

    def spy(self, dy, x, weight, needs):
        asked.append(needs)
        return backward(self, dy, x, weight, needs)

    y = layer(x)
    with mock.patch.object(Geometry, "convolve_backward", spy):
        return torch.autograd.grad(y, [layer.bias, layer.gain, layer.weight], dy), asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "centred": True}, {"groups": 2, "mass": "position"}])
def test_in_channels_last_c_adds_up_the_gradient_of_the_output(options, dtype):
    layer = balnorm.BalNormConv2d(6, 8, 3, padding=1, dtype=dtype, **options)
    x = laid_out(torch.randn(4, 6, 9, 7, dtype=dtype), "channels_last")
    dy = torch.randn(layer(x).shape, dtype=dtype)
    expected, asked = gradients_and_needs(layer, x, dy)
    assert asked == [[False, True, True]]
    found, asked = gradients_and_needs(layer, x, laid_out(dy, "channels_last"))
    assert asked == [[False, True, False]]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[0], dy.sum((0, 2, 3)))


def test_the_gradient_of_the_output_may_have_memory_of_any_kind():
    layer, shape = balnorm.BalNormConv2d(6, 8, 1), (4, 8, 5, 7)
    images = [torch.ones(()).expand(shape), torch.randn(4, 8, 5, 14)[..., ::2]]
    pixels = [torch._neg_view(torch.randn(4, 8, 1, 1)), torch._efficientzerotensor((4, 8, 1, 1))]
    for dy in (*images, *pixels):  # memory with gaps or without, that does not hold the values one by one
        x = laid_out(torch.randn(4, 6, *dy.shape[2:]), "channels_last")
        found, asked = gradients_and_needs(layer, x, dy)
        assert asked == [[False, True, True]]
        values = laid_out(torch.zeros(dy.shape) + dy, "channels_last")
        expected, asked = gradients_and_needs(layer, x, values)
        assert asked == [[False, True, False]]
        torch.testing.assert_close(found, expected)


def test_linear_layers_add_up_in_c_too():
    layer, x, dy = balnorm.BalNormLinear(6, 8), torch.randn(5, 3, 6), torch.randn(5, 3, 8)
    found, asked = gradients_and_needs(layer, x, dy)
    assert asked == [[False, True, False]]
    torch.testing.assert_close(found[0], dy.sum((0, 1)))


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
    assert len(function._setups) <= 1000


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
# C checks every tensor
# --------------------------------------------------------------------------------------------------------------------


def test_no_memory_is_reached_by_another_way():
    """Python hands over tensors, not addresses; C asks for an address in one place, after all that it checks."""
    assert "data_ptr" not in inspect.getsource(cpu)
    source = cpu.LIBRARY.with_name("kernels.c").read_text()
    assert source.count("torch.address(") == 1
    assert source.count("find(") == 3  # it is defined, called for every tensor by find_all(), and named in a comment
    assert source.count("find_all(tensors, ") == source.count("EXPORT int NAME(") == 3


def replaced(weight, **changes):
    """Call C for the effective weight, with one of its tensors replaced."""
    layer = balnorm.BalNormConv2d(2, 4, 1)
    matrix, setup = WeightMatrix.of(weight, layer._geometry), setup_of(layer, 2)
    saved = cpu.forward(torch.ones(2, 2, 3, 3), matrix, None, None, None, None, None, setup).saved
    tensors = {"gain": None, "scale": None, "saved": saved[0], **changes}
    return cpu.effective(matrix, tensors["gain"], tensors["scale"], [tensors["saved"]], setup, torch.float32)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3), r"found torch.float32 of shape \(3,\)"),
        (torch.ones(4, 1), r"found torch.float32 of shape \(4, 1\)"),
        (torch.ones(4, device="meta"), "on meta"),
        (torch.ones(4).to_sparse(), "a balanced layer expected"),
    ],
)
def test_a_tensor_that_is_not_as_expected_is_refused(tensor, message):
    with pytest.raises(RuntimeError, match=message):
        replaced(torch.randn(4, 2, 1, 1), gain=tensor)


@pytest.mark.parametrize("size", [0, 12])
def test_a_tensor_that_lost_memory_is_refused(size):
    for dtype in (torch.float32, torch.float64):
        lost = torch.ones(4, dtype=dtype)
        lost.untyped_storage().resize_(size)
        with pytest.raises(RuntimeError, match="has it lost its memory"):
            replaced(torch.randn(4, 2, 1, 1), gain=lost)
    part = torch.ones(8)[4:]
    part.untyped_storage().resize_(20)
    with pytest.raises(RuntimeError, match="has it lost its memory"):
        replaced(torch.randn(4, 2, 1, 1), gain=part)


@pytest.mark.parametrize("gain", [torch.arange(4.0).double(), torch.arange(8.0)[::2] / 2, torch.arange(-4.0, 4)[4:]])
def test_a_vector_of_another_type_or_stride_is_copied(gain):
    weight = torch.randn(4, 2, 1, 1)
    torch.testing.assert_close(replaced(weight, gain=gain), replaced(weight) * torch.arange(4.0).view(4, 1, 1, 1))


def test_moving_averages_are_as_before_if_the_convolution_is_refused():
    layer, x = trained_layer(), torch.rand(2, 3, 8, 8)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with mock.patch.object(Geometry, "convolve", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        layer(x)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name])
    layer(x * math.inf)
    with mock.patch.object(Geometry, "convolve", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        layer(x * math.nan)
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name])


def test_layers_that_share_shapes_may_differ_in_their_averages():
    """What C expects of moving averages is remembered for all layers of these shapes."""
    x = torch.rand(2, 3, 8, 8)
    layers = [balnorm.BalNormConv2d(3, 4, 3, padding=1, mass="position") for _ in range(4)]
    layers[1].running_mass = layers[1].running_mass.double()
    layers[2].running_mean = layers[2].running_mean.contiguous(memory_format=torch.channels_last)
    layers[2].running_mass = layers[2].running_mass.contiguous(memory_format=torch.channels_last)
    layers[3].running_mass = torch.ones(1, 3, 3, 6)[..., ::2]
    for layer in layers * 2:
        layer(x)
        torch.testing.assert_close(layer.running_mean, layers[0].running_mean)
        torch.testing.assert_close(layer.running_mass.float(), layers[0].running_mass)


def test_layers_of_one_shape_may_run_in_many_threads():
    """They share what was worked out for this shape, and nothing else."""

    layers = [balnorm.BalNormConv2d(3, 4, 3) for _ in range(40)]
    x = torch.rand(2, 3, 9, 7, requires_grad=True)

    def gradients(layer):
        return torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])

    expected = [gradients(layer) for layer in layers]
    function._setups.clear()
    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(gradients, layers), expected, strict=True):
            assert all(map(torch.equal, found, right))


def test_given_statistics_are_those_of_the_batch():
    layer = balnorm.BalNormConv2d(3, 4, 3, padding=1, centred=True)
    x, matrix = torch.randn(2, 3, 6, 6), WeightMatrix.of(layer.weight.detach(), layer._geometry)
    own = cpu.forward(x, matrix, None, None, None, None, None, setup_of(layer, 2))
    running = Running(torch.zeros(1, 3, 1, 1), torch.zeros(1, 3, 1, 1), torch.tensor(0))
    cpu.forward(x, matrix, None, None, None, None, running, setup_of(layer, 2))
    given = Statistics(*running[:2])
    again = cpu.forward(x, matrix, None, None, None, given, None, setup_of(layer, 2, False))
    torch.testing.assert_close((again.effective, again.bias), (own.effective, own.bias))


@pytest.mark.parametrize("counter", [-1, -5, 0, 3])
def test_moving_averages_move_as_torch_moves_them(counter):
    x = torch.randn(2, 3, 4, 4)
    statistics = method.batch_statistics(x, 2, balnorm.BalNormConv2d(3, 4, 1)._geometry, "channel")
    for momentum in (0.1, None):
        results = []
        setup = setup_of(balnorm.BalNormConv2d(3, 4, 1, momentum=momentum), 2)
        for _ in range(2):
            running = Running(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1), torch.tensor(counter))
            if results:
                cpu.forward(x, WeightMatrix.of(torch.randn(4, 3, 1, 1), setup.geometry), *[None] * 4, running, setup)
            else:
                cpu.track(running, statistics, momentum)
            results.append(running)
        torch.testing.assert_close(results[0], results[1])
        assert results[0].mass.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mode_that_watches_only_the_backward_pass_may_do_so(dtype):
    """Gradients in another type or order of memory were refused under it, though copies of them will do."""
    layer = balnorm.BalNormConv2d(4, 8, 3).to(memory_format=torch.channels_last)
    x = torch.rand(2, 4, 6, 6, requires_grad=True)
    gradients = []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = layer(x).float().square().sum()
        with mode:
            gradients.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_views_that_are_negated_when_read_are_read_so():
    """Their memory holds the opposite signs."""
    x = torch.randn(2, 3, 6, 6, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    weight = torch.randn(4, 3, 3, 3)
    assert torch.equal(BF.bal_conv2d(x, weight), BF.bal_conv2d(x.resolve_neg(), weight))
