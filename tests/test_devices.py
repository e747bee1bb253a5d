"""GPUs without a GPU: nothing mixes tensors of two devices, and nothing waits for the device, but for what is listed.

Tensors on torch's meta device have shapes and no values, so whatever asks for a value raises: ``item()``, ``bool()``, a
shape that depends on data. What they let pass, ``gpu()`` catches. Autocast knows no meta device: it is tested on fake
tensors of the CPU. Where torch is built for CUDA (``make test-torch TORCH=2.15.0``) fake tensors say that they are on a
GPU, and so take the ways that are for CUDA only; torch cannot differentiate them without a driver.

What has to look at values, and so waits:

- the initialisation of a layer (signs are drawn again until they are right), where it is not on the meta device;
- ``update_stats``, which says so if no batch came, ``convert`` with an example (is an input ever negative?), and a
  ``balance_report`` that is printed or drawn;
- a layer in its first evaluation (has it statistics?), ``fuse`` and ``fold``;
- the loading of a state dict (was it trained with the same options?);
- the trainer in every tenth step (has the loss diverged, and what to show), at the end of an epoch, and to save;
- with float16, torch's ``GradScaler`` in every step: it skips one whose gradients are not finite;
- with EMA, torch's ``AveragedModel`` in every step: it sends its counter to the device.
"""

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import balnorm
import balnorm.functional as BF
from balnorm import BalNormConv2d, balance_report, convert, fold, update_stats
from balnorm._core.backends import cpu
from balnorm.bench.data import ImageSpec
from balnorm.bench.models import BLOCKS, create_model
from balnorm.bench.norms import NORMS, get_norm, set_progress
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.processes import Processes
from balnorm.bench.training.progress import Progress
from balnorm.bench.training.run import Run
from balnorm.bench.training.trainer import Trainer
from balnorm.layers import LayerOptions
from balnorm.surgery._model import in_double_precision
from cases import CASES, MASS_AND_PASS, small_network


class DeviceError(Exception):
    pass


NO_VALUE = (RuntimeError, NotImplementedError)  # what torch raises when it is asked for a value that is not there


class OneDevice(TorchDispatchMode):
    """Raises where an operation takes tensors of the device and of the CPU, or where a copy from the CPU waits.

    Many operations on meta tensors do not mind. A number on the CPU may go with tensors of a GPU.
    """

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor.device.type == self.device for tensor in given]
        if operation in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            waits = not (kwargs.get("non_blocking") or args[2:] == (True,))
            if waits and result.device.type == self.device and not there[-1]:
                raise DeviceError(f"{operation} waits for the device: say non_blocking=True")
        elif any(there) and any(tensor.dim() for tensor, is_there in zip(given, there, strict=True) if not is_there):
            raise DeviceError(f"{operation} mixes {', '.join(str(tensor.device) for tensor in given)}")
        return result


class NoConstants(TorchFunctionMode):
    """Raises where a tensor is made on the device from Python numbers: they are copied, and that waits."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if (
            function in (torch.tensor, torch.as_tensor, Tensor.new_tensor)
            and result.device.type == self.device != "cpu"
        ):
            raise DeviceError(f"{function.__name__}() waits for the device: torch.full() does not")
        return result


@contextlib.contextmanager
def gpu(device, *modules):
    """Tensors on this device behave as on a GPU: they have no values here. The modules, made on meta, move to it."""
    fake = FakeTensorMode() if device != "meta" else contextlib.nullcontext()
    differentiable = device != "cuda" or torch.cuda.is_available()  # without a driver torch ends the process
    with fake, torch.set_grad_enabled(differentiable), NoConstants(device), OneDevice(device):
        for module in modules:
            move(module, device)
        yield


def move(module, device):
    """As ``to_empty()``, which fails for fake tensors now and then."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            child._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in child.named_buffers(recurse=False):
            child._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def on_meta(build, *args, **options):
    with torch.device("meta"):
        return build(*args, **options)


def empty(*shape, device, dtype=torch.float32):
    """An input. (Random numbers on CUDA need a driver, even fake ones.)"""
    return torch.empty(shape, device=device, dtype=dtype, requires_grad=torch.is_grad_enabled())


def forward_and_backward(module, x):
    y = module(x)
    assert y.device == x.device
    if torch.is_grad_enabled():
        y.float().square().sum().backward()
        for tensor in (x, *module.parameters()):
            assert tensor.grad.device == tensor.device
    return y


def fake_cuda_works():
    """Whether this torch can compute with fake CUDA tensors, which older ones cannot without a driver."""
    if torch.version.cuda is None:
        return False
    try:
        with FakeTensorMode(), torch.no_grad():
            torch.empty(2, device="cuda").copy_(torch.empty(2, device="cuda"))
    except RuntimeError:
        return False
    return True


needs_cuda = pytest.mark.skipif(not fake_cuda_works(), reason="fake CUDA tensors need a torch 2.15 built for CUDA")
both = pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=needs_cuda)])


# --------------------------------------------------------------------------------------------------------------------
# The checks themselves
# --------------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "matmul": lambda x: x @ torch.empty(3, 3),
    "layer": lambda x: F.linear(x, torch.empty(3, 3)),
    "index": lambda x: x[torch.arange(2)],
    "to": lambda x: torch.arange(3).to(x.device),
    "copy_": lambda x: x.detach().copy_(torch.empty(3, 3)),
    "new_tensor": lambda x: x.new_tensor(2.0),
    "tensor": lambda x: torch.tensor(2.0, device=x.device),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "mask": lambda x: x[x > 0],
    "cpu": lambda x: x.cpu().numpy(),
    "tolist": lambda x: x.tolist(),
}


@both
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise(device, mistake):
    with gpu(device), pytest.raises((DeviceError, *NO_VALUE)):
        MISTAKES[mistake](torch.empty(3, 3, device=device))


@both
def test_what_is_right_does_not_raise(device):
    with gpu(device):
        x = torch.empty(3, 3, device=device)
        x = x + torch.arange(3).to(device, non_blocking=True) + torch.tensor(1.0) + torch.ones((), device=device)
        x.copy_(torch.empty(3, 3), non_blocking=True)
        assert x.device.type == device


# --------------------------------------------------------------------------------------------------------------------
# The library
# --------------------------------------------------------------------------------------------------------------------

OPTIONS = [
    *({"mass": mass, "one_pass": one_pass} for mass, one_pass in MASS_AND_PASS),
    {"stats_fraction": 0.5},
    {"stats_fraction": 0.5, "mass": "position"},
    {"centred": True},
    {"centred": True, "mass": "position", "stats_fraction": 0.5},
    {"shift": True},
    {"equalise": True, "mass": "position"},
    {"shift": False, "mass": "position"},
    {"output_scale": 1.0},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"sync_stats": True, "process_group": None},
    {"bias": False},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "mass": "position"},
]


def test_no_option_is_forgotten():
    assert {name for options in OPTIONS for name in options} >= {
        field.name for field in dataclasses.fields(LayerOptions)
    }


# A linear, a convolutional and a transposed layer with every option, and the others with either mass.
LAYERS = [(name, options) for name in ("linear", "conv2d-grouped", "transposed2d") for options in OPTIONS]
LAYERS += [(name, {"mass": mass}) for name in CASES for mass in BF.MASSES]


@pytest.mark.parametrize(("name", "options"), LAYERS, ids=str)
def test_layers(name, options):
    layer = CASES[name].build(device="meta", **options)
    with gpu("meta", layer):
        x = empty(*CASES[name].input_shape, device="meta", dtype=layer.weight.dtype)
        for training in (True, False):
            y = forward_and_backward(layer.train(training), x)
            with torch.no_grad():
                assert layer(x).shape == y.shape
        assert {tensor.device.type for tensor in layer.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", CASES)
def test_other_ways_through_a_layer(name):
    """Without a batch axis, with frozen statistics, folded, twice differentiated."""
    layer = CASES[name].build(device="meta")
    with gpu("meta", layer):
        x = empty(*CASES[name].input_shape, device="meta")
        layer(x[0])
        layer.reset_running_stats()
        layer.stats_frozen = True
        y = forward_and_backward(layer, x)
        assert layer.fuse()(x).shape == y.shape
        layer.stats_frozen = False
        assert layer.effective_weight(x).device == x.device
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("mass", BF.MASSES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_padding_and_memory_formats(padding_mode, mass, layout):
    layer = BalNormConv2d(4, 6, 3, padding="same", groups=2, padding_mode=padding_mode, mass=mass, device="meta")
    with gpu("meta", layer):
        x = torch.empty(3, 4, 5, 5, device="meta").to(memory_format=layout).requires_grad_()
        forward_and_backward(layer.to(memory_format=layout), x)


@contextlib.contextmanager
def autocast(device, dtype):
    """As ``torch.autocast``, which does nothing for CUDA where there is no GPU."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


@pytest.mark.parametrize("mass", BF.MASSES)
@pytest.mark.parametrize("name", CASES)
def test_autocast(name, mass):
    layer = CASES[name].build(device="meta", mass=mass)
    with gpu("cpu", layer):
        x = empty(*CASES[name].input_shape, device="cpu")
        for dtype in (torch.bfloat16, torch.float16):
            for training in (True, False):
                with autocast("cpu", dtype):
                    assert forward_and_backward(layer.train(training), x).dtype == dtype


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_layers_on_cuda(name):
    for options in OPTIONS:
        layer = CASES[name].build(device="meta", **options)
        with gpu("cuda", layer):
            x = empty(*CASES[name].input_shape, device="cuda", dtype=layer.weight.dtype)
            for training in (True, False):
                assert layer.train(training)(x).device.type == "cuda"
            if layer.weight.dtype == torch.float32:
                for dtype in (torch.bfloat16, torch.float16):
                    with autocast("cuda", dtype):
                        assert layer(x).dtype == dtype


class Context:
    """What the two halves of an autograd function have in common."""

    def __init__(self, inputs):
        self.needs_input_grad = [isinstance(each, Tensor) for each in inputs]

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_on_cuda(name, dtype, monkeypatch):
    """Forward and backward pass called by hand: torch's autograd would need a driver."""
    calls = []

    def apply(function, *inputs):
        context = Context(inputs)
        output = function.forward(context, *inputs)
        calls.append((function, context, inputs, output))
        return output

    monkeypatch.setattr("balnorm._core.function.apply_function", apply)
    for mass, one_pass in MASS_AND_PASS:
        layer = CASES[name].build(device="meta", mass=mass, one_pass=one_pass, dtype=dtype)
        with gpu("cuda", layer):
            layer(empty(*CASES[name].input_shape, device="cuda", dtype=dtype))
            ((function, context, inputs, output),) = calls
            calls.clear()
            gradients = function.backward(context, torch.empty_like(output))
            of_parameters = 0
            for given, gradient in zip(inputs, gradients, strict=True):
                if gradient is not None:
                    of_parameters += isinstance(given, nn.Parameter)
                    assert (gradient.shape, gradient.device, gradient.dtype) == (given.shape, given.device, given.dtype)
            assert of_parameters == 3  # weight, bias and gain


@both
@pytest.mark.parametrize(("momentum", "counted"), [(0.1, True), (0.1, False), (None, True)])
def test_the_update_of_the_running_statistics(device, momentum, counted):
    with gpu(device):
        running_mean, running_mass, mean, mass = (torch.empty(1, 3, 1, 1, device=device) for _ in range(4))
        count = torch.empty((), dtype=torch.long, device=device) if counted else None
        for dtype in (torch.float16, torch.float32, torch.float64):
            found = mean.to(dtype), mass.to(dtype)
            BF.update_running_stats(running_mean, running_mass, count, *found, momentum)


def weight_norm_has_a_meta_gradient():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, device="meta"))
    try:
        layer(torch.empty(1, 2, device="meta")).sum().backward()
    except NotImplementedError:
        return False
    return True


@both
@pytest.mark.parametrize(
    ("norm", "options"), [*((norm, {}) for norm in NORMS), ("batchnorm", {"stats_fraction": 0.25})]
)
def test_norms(device, norm, options):
    if "weightnorm" in norm and not weight_norm_has_a_meta_gradient():
        pytest.skip("this torch cannot differentiate its own weight normalisation on the meta device")
    made = get_norm(norm, **options)
    conv, beside = made.conv, made.norm
    for dtype in (torch.float32, torch.float16):
        model = on_meta(lambda: nn.Sequential(conv(3, 8, 3), beside(8), nn.ReLU(), conv(8, 8, 1, stride=2), beside(8)))
        with gpu(device, model.to(dtype)):
            for training in (True, False):
                set_progress(model, 0.5)
                forward_and_backward(model.train(training), empty(4, 3, 8, 8, device=device, dtype=dtype))


# The deeper ones have more of the same blocks.
@both
@pytest.mark.parametrize(
    "name", ["wide_resnet", "cifar_resnet", "preact_resnet18", "preact_resnet50", "resnet18", "resnet50"]
)
def test_networks(device, name, monkeypatch):
    for depth in BLOCKS:
        monkeypatch.setitem(BLOCKS, depth, (1, 1, 1, 1))
    model = on_meta(create_model, name, width=4, **({"depth": 8} if name in ("wide_resnet", "cifar_resnet") else {}))
    with gpu(device, model):
        for training in (True, False):
            forward_and_backward(model.train(training), empty(2, 3, 32, 32, device=device))


def test_initialisation_looks_at_values():
    with gpu("cpu"), pytest.raises(NO_VALUE):
        BalNormConv2d(3, 4, 3)
    with gpu("meta"):
        BalNormConv2d(3, 4, 3, device="meta")  # where there is nothing to look at


def test_other_things_that_look_at_values():
    model, plain = on_meta(small_network), on_meta(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    with gpu("meta", model, plain):
        x = empty(2, 3, 6, 6, device="meta")
        report = balance_report(model, x)
        for look in (lambda: update_stats([x], model), lambda: str(report), lambda: convert(plain, example_input=x)):
            with pytest.raises(NO_VALUE):
                look()


# --------------------------------------------------------------------------------------------------------------------
# The trainer
# --------------------------------------------------------------------------------------------------------------------


class Counter(int):
    """In the place of AveragedModel's counter, which is sent to the device in every step."""

    def __add__(self, other):
        return Counter(int(self) + other)

    def to(self, _):
        return self


def make_trainer(folder, device, **fields):
    recipe = Recipe("devices", "digits", "wide_resnet", depth=8, width=8, batch_size=8, train_limit=80, **fields)
    team, progress = Processes(0, 1, torch.device(device)), Progress("", recipe.epochs, show=False)
    trainer = Trainer(recipe, Run(folder), team, progress, Path(), None, None)
    learner = trainer.learner
    learner.scaler._maybe_opt_step = lambda optimizer, _: optimizer.step()  # which looks whether gradients are finite
    if learner.averaged is not None:
        del learner.averaged.n_averaged
        learner.averaged.n_averaged = Counter(0)
    return trainer


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm": "batchnorm", "padding": 0},
        {"norm": "batchrenorm", "label_smoothing": 0.1},
        {"mixup": "input"},
        {"mixup": "manifold", "loss": "bce"},
        {"ema": 0.9, "clip_norm": 1.0},
        {"precision": "float16", "mixup": "manifold", "ema": 0.9, "clip_norm": 1.0},
    ],
    ids=str,
)
def test_the_trainer_looks_at_values_to_report_only(fields, monkeypatch, tmp_path):
    monkeypatch.setattr("balnorm.bench.training.trainer._LOOK_UP", 3)
    monkeypatch.setattr("balnorm.bench.training.learner.autocast", lambda *_: contextlib.nullcontext())
    trainer = make_trainer(tmp_path, "meta", **fields)
    with gpu("meta"), pytest.raises(NO_VALUE) as error:
        trainer.train_epoch(0.0)
    assert trainer.at.step == 3
    package = Path(balnorm.__file__).parent  # the clone, with torch in its .venv, may be called balnorm too
    ours = [entry.name for entry in error.traceback if package in Path(entry.path).parents]
    assert ours[-1] == "train_epoch"


IMAGES = ImageSpec(1, 8, tuple("0123456789"), (0.3,), (0.3,), (80, 20))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "norm", [get_norm("balnorm", mass="position"), get_norm("batchnorm")], ids=["balnorm", "batchnorm"]
)
def test_a_step_under_autocast(precision, norm, monkeypatch, tmp_path):
    model = on_meta(create_model, "wide_resnet", norm, depth=8, width=8, in_channels=1)
    monkeypatch.setattr("balnorm.bench.training.learner.make_model", lambda *_: model)
    monkeypatch.setattr("balnorm.bench.training.learner.make_loaders", lambda *_: (None, None, IMAGES))
    with gpu("cpu", model):
        trainer = make_trainer(tmp_path, "cpu", precision=precision, clip_norm=1.0)
        for _ in range(2):
            scores, loss = trainer.learner.step(torch.empty(8, 1, 8, 8), torch.empty(8, dtype=torch.long))
            assert scores.dtype == getattr(torch, precision)
            assert loss.dtype == torch.float32


class MatrixProductsInTF32(TorchDispatchMode):
    """What a GPU does with torch.set_float32_matmul_precision("high"): ten bits of the mantissa are left."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mv.default):
            args = [((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for tensor in args]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layer", [BalNormConv2d(4, 4, 3, groups=4, shift=True), BalNormConv2d(4, 4, 3)])
def test_what_counts_as_zero_does_not_depend_on_the_precision_of_matrix_products(layer, monkeypatch):
    """Rounded shares no longer add up to 1: kernels of one sign seemed alive, and their outputs were huge."""
    monkeypatch.setattr(cpu, "_library", None)
    with torch.no_grad():
        layer.weight.abs_()
        layer.bias.normal_()
    x = torch.rand(2, 4, 6, 6)
    with MatrixProductsInTF32():
        y = layer(x)
    assert torch.equal(y, layer.bias.view(1, 4, 1, 1).expand_as(y))


class NoDoublePrecision(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result)):
            raise DeviceError(f"{function} gives float64")
        return result


@pytest.mark.parametrize(
    "look",
    [
        lambda model, x: str(balance_report(model, x)),
        lambda model, x: fold(convert(model, example_input=x, trained=True)[0]),
    ],
)
def test_double_precision_is_left_to_the_function_that_knows_who_has_none(look, monkeypatch):
    """Apple's GPUs do not: there, these functions failed. (Here a CPU without it stands for them.)"""
    for module in ("diagnostics", "surgery._exact", "surgery._fold"):
        monkeypatch.setattr(f"balnorm.{module}.in_double_precision", Tensor.float)
    monkeypatch.setattr("balnorm.surgery._statistics.widest", lambda _: torch.float32)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    with NoDoublePrecision():
        look(model, torch.rand(8, 3, 6, 6))


def test_double_precision_of_apple_gpus_is_that_of_the_cpu():
    class OnAppleGpu:
        device = torch.device("mps")

        def cpu(self):
            return torch.ones(2)

    assert in_double_precision(OnAppleGpu()).dtype == torch.float64
    assert in_double_precision(torch.empty(2, device="meta")).device.type == "meta"
