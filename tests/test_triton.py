"""The backend for GPUs without one: its kernels interpreted and compiled, its launches, and when torch takes over."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

import balnorm
from balnorm import BalNormConv2d
from balnorm._core import backends, function
from balnorm._core.backends import torch as torch_backend
from balnorm._core.backends import triton as triton_backend

pytest.importorskip("triton", reason="no Triton")
from benchmarks import gpu

ROOT = Path(__file__).parents[1]


def test_the_kernels_in_the_interpreter():
    """In a process of its own: Triton has to be told before it is imported. `make fuzz` runs more cases."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "tests/interpreted.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]


@pytest.mark.parametrize("mass", ["channel", "position"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("autocast", "most"), [(False, 8), (True, 9)])
@pytest.mark.parametrize(("centred", "ours"), [(False, 6), (True, 8)])
def test_a_layer_launches_few_kernels(mass, layout, autocast, most, centred, ours):
    """Six of ours, and of torch the bias, the sum over dy, and under autocast the conversion of that sum.

    Centred statistics take two more, for the centre of each channel.
    """
    layer = BalNormConv2d(64, 64, 3, padding=1, mass=mass, centred=centred).to(memory_format=layout)
    x = torch.rand(8, 64, 24, 24, dtype=torch.bfloat16 if autocast else torch.float32).contiguous(memory_format=layout)
    seen = gpu.launches_of(layer, x, autocast=autocast, triton=True)
    assert len(seen.ours) == ours
    assert len(seen.ours) + len(seen.torch) <= most + ours - 6


@pytest.mark.parametrize(("name", "low", "centred"), [("sm_80", True, False), ("gfx942", False, True)])
def test_kernels_compile_for_gpus_that_are_not_here(name, low, centred, tmp_path):
    module = BalNormConv2d(16, 32, 3, padding=1, mass="position", centred=centred)
    layer = gpu.Layer("", module, torch.Size((8, 16, 28, 28)))
    with gpu.target(name), gpu.cached_in(str(tmp_path)):
        compiled = gpu.compile_layer(layer, low, low)
    assert {kernel for kernel, _ in compiled.values()} == {
        "sum_samples", "finish_statistics", "balance_rows", "scale_rows", "backward_rows", "add_to_samples"
    }  # fmt: skip
    for kernel, binary in compiled.values():
        registers, spills, _ = gpu.resources(binary)
        assert registers <= 255, kernel
        assert spills == 0, kernel


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "names", [["BalNorm, channel"], pytest.param(["BatchNorm", "BalNorm, position"], marks=pytest.mark.slow)]
)
def test_a_compiled_layer_launches_few_kernels(names):
    """Inductor's code for a GPU: BatchNorm launches 9 in float32, and 11 under autocast."""
    from benchmarks import inductor

    for name, counts in inductor.launches(names).items():
        most = {"BatchNorm": (9, 11), "BalNorm, channel": (11, 11), "BalNorm, position": (12, 12)}[name]
        ours = 0 if name == "BatchNorm" else 4
        for precision, limit in zip(("float32", "bfloat16"), most, strict=True):
            (forward, forward_ours), (backward, backward_ours) = counts[precision]
            assert forward + backward <= limit, (name, counts)
            assert forward_ours + backward_ours == ours, (name, counts)
    assert len(counts) == 2


# --------------------------------------------------------------------------------------------------------------------
# Which backend a device uses
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_gpu(monkeypatch):
    """Torch says that there is a GPU. Nothing is known of it yet."""
    monkeypatch.setattr(triton_backend, "_states", {})
    monkeypatch.setattr(triton_backend, "_direct", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("BALNORM_BACKEND", raising=False)


def status_after(monkeypatch, deviation):
    monkeypatch.setattr(triton_backend, "deviation", deviation)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = balnorm.backend("cuda")
        assert balnorm.backend("cuda:0") == found  # is tried once, and warns once
    return found, [str(warning.message) for warning in warned]


def test_a_gpu_where_the_kernels_are_right_uses_them(one_gpu, monkeypatch):
    found, warned = status_after(monkeypatch, lambda device: 1e-7)
    assert found.startswith("triton 3.")
    assert "a GPU" in found
    assert not warned


@pytest.mark.parametrize("difference", [0.01, float("nan"), float("inf")])
def test_a_gpu_where_the_kernels_are_wrong_does_not(one_gpu, monkeypatch, difference):
    found, warned = status_after(monkeypatch, lambda device: difference)
    assert found.startswith("torch: the kernels of Triton 3.")
    assert len(warned) == 1
    assert "give other results than torch on a GPU" in warned[0]


def test_a_compiler_that_fails_is_named(one_gpu, monkeypatch):
    def fail(device):
        raise triton_backend.LaunchError("RuntimeError: ptxas was not found")

    found, warned = status_after(monkeypatch, fail)
    assert found == f"torch: {warned[0].split('operations: ')[1]}"
    assert "ptxas was not found" in found
    assert len(warned) == 1


def test_without_triton_torch_does_the_work(one_gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = balnorm.backend("cuda")
    assert found.startswith("torch: Triton could not be imported")


def test_the_environment_switches_it_off(one_gpu, monkeypatch):
    monkeypatch.setenv("BALNORM_BACKEND", "torch")
    assert balnorm.backend("cuda") == "torch: BALNORM_BACKEND=torch is set"


def test_a_graph_that_is_captured_is_no_time_for_a_trial(one_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert balnorm.backend("cuda").startswith("torch: the first layer")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton_backend, "deviation", lambda device: 0.0)
    assert balnorm.backend("cuda").startswith("triton")


def test_other_devices():
    assert balnorm.backend("mps") == "torch: there are no kernels for mps"
    assert balnorm.backend("cuda") == "torch: it finds no GPU" or torch.cuda.is_available()
    assert balnorm.backend() == balnorm.backend("cpu")


def test_the_first_layer_tries_the_device(one_gpu, monkeypatch):
    """With tensors that say that they are on a GPU."""
    calls = []
    monkeypatch.setattr(triton_backend, "deviation", lambda device: calls.append(device) or 0.0)

    class OnGpu(torch.Tensor):
        is_cuda, is_cpu = True, False

        def get_device(self):
            return 0

    monkeypatch.setattr(triton_backend, "ORDINARY", (OnGpu,))
    x = torch.rand(2, 3).as_subclass(OnGpu)
    assert triton_backend.takes(x, None, x)
    assert triton_backend.takes(x)
    assert calls == [torch.device("cuda", 0)] * 2  # the second time with what the first has compiled
    assert backends.choose(x) is triton_backend
    assert not triton_backend.takes(x, torch.rand(2))  # another device
    assert not triton_backend.takes(x[:0])
    assert not triton_backend.takes(x.to(torch.complex64))


class TestErrors:
    """A kernel that cannot be launched: torch's operations compute the same, with one warning."""

    @pytest.fixture(autouse=True)
    def _on_triton(self, monkeypatch):
        monkeypatch.setattr(triton_backend, "_states", {})
        monkeypatch.setattr(triton_backend, "_direct", False)
        monkeypatch.setattr(function, "_setups", {})
        monkeypatch.setattr(function.backends, "choose", lambda *tensors: triton_backend)

    @pytest.mark.parametrize("options", [{}, {"mass": "position", "groups": 2}, {"centred": True}])
    def test_forward(self, options, monkeypatch):
        def fail(kernel, *_):
            raise RuntimeError(f"no {kernel.__name__} here")

        monkeypatch.setattr(triton_backend, "run", fail)
        layer, x = BalNormConv2d(4, 6, 3, **options), torch.randn(2, 4, 6, 6)
        expected = self.training_step(layer, x)
        with pytest.warns(RuntimeWarning, match="no sum_samples here|no balance_rows here") as warned:
            found = self.training_step(layer, x, triton_backend)
        assert len(warned) == 1
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert triton_backend._states[-1].text.startswith("torch: Triton could not run a kernel")

    def training_step(self, layer, x, backend=torch_backend):
        layer.reset_running_stats()
        layer.zero_grad()
        with mock.patch.object(function.backends, "choose", return_value=backend):
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            y.square().sum().backward()
        return y.detach(), leaf.grad, layer.weight.grad, layer.gain.grad, layer.running_mean, layer.running_mass
