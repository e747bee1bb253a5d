"""Activations that keep one tensor: the same numbers as torch's, fewer bytes, and never a stale input."""

import copy
import gc
import importlib.util
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from benchmarks.zoo import build
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from balnorm import BalNormConv1d, BalNormConv2d, BalNormLinear, activations, convert, fold
from balnorm.bench.profiling import saved_bytes
from cases import Steps

# Raised inside torch's own compiler, functional transforms and checkpointing, not by ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FROM_INPUT = {
    "silu": (activations.SiLU, {}),
    "silu in place": (activations.SiLU, {"inplace": True}),
    "gelu": (activations.GELU, {}),
    "gelu tanh": (activations.GELU, {"approximate": "tanh"}),
    "hardswish": (activations.Hardswish, {}),
    "hardswish in place": (activations.Hardswish, {"inplace": True}),
    "mish": (activations.Mish, {}),
    "mish in place": (activations.Mish, {"inplace": True}),
}
FROM_OUTPUT = {
    "relu6": (activations.ReLU6, {}),
    "relu6 in place": (activations.ReLU6, {"inplace": True}),
    "hardtanh": (activations.Hardtanh, {"min_val": -0.3, "max_val": 0.9}),
    "hardtanh in place": (activations.Hardtanh, {"inplace": True}),
}
ALL = FROM_INPUT | FROM_OUTPUT
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "every other": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.transpose(1, 3),
}


class TwoInputs(Steps):
    """Steps with a second input, for the gradient of both."""

    def forward(self, x, *gate):
        return self.run(self, x, *gate)


def pair(name):
    """torch's module, and ours."""
    kind, options = ALL[name]
    return kind.plain(**options), kind(**options)


def gradients(function, *inputs):
    """The output of a function that may write into its inputs, and the gradients of a sum over it."""
    leaves = [it.detach().clone().requires_grad_() for it in inputs]
    y = function(*(1 * leaf for leaf in leaves))
    torch.manual_seed(1)
    (y * torch.randn_like(y)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(found, expected, tolerance=0.0):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


# The activations by themselves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients_are_those_of_torch(name, dtype):
    x = (4 * torch.randn(3, 4, 5, 4)).to(dtype)
    x[0, 0, 0] = torch.tensor([0.0, 6.0, -3.0, 3.0])
    plain, ours = pair(name)
    for layout in LAYOUTS.values():
        expected, found = (gradients(lambda z, act=act: act(layout(z)), x) for act in (plain, ours))  # noqa: B023
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("name", ALL)
def test_in_place_means_in_place(name):
    _, act = pair(name)
    x = torch.randn(3, 4, requires_grad=True)
    z = 1 * x
    y = act(z)
    assert (y is z) == act.inplace if hasattr(act, "inplace") else y is not z
    assert torch.equal(z, y if "place" in name else x)
    z = (2 * x)[1:]  # a view of what others may read
    base = z._base
    act(z).sum().backward()
    assert torch.equal(base[1:], act.plain.forward(act, 2 * x)[1:] if "place" in name else 2 * x[1:])
    if "place" in name:
        with pytest.raises(RuntimeError, match="leaf"):
            act(x)


@pytest.mark.parametrize("name", ALL)
def test_without_gradients_they_are_those_of_torch(name):
    _, act = pair(name)
    x = torch.randn(3, 4, requires_grad=True)
    with torch.no_grad():
        assert act(1 * x).grad_fn is None
    with torch.inference_mode():
        assert act(1 * x).is_inference()
    assert act(torch.randn(3, 4)).grad_fn is None
    assert act.eval()(1 * x).requires_grad


def test_limits_that_a_low_precision_rounds():
    """torch compares the inputs with the limits before rounding: the outputs do not show what was cut off."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.linspace(0, 1, 257).to(dtype)
        expected, found = (gradients(lambda z, f=f: f(z, 0.1, 0.7), x) for f in (F.hardtanh, activations.hardtanh))
        assert_same(found, expected)


def test_functions_are_those_of_the_modules():
    x = torch.randn(3, 4, requires_grad=True)
    for name in ("silu", "gelu", "hardswish", "mish", "relu6", "hardtanh"):
        y = getattr(activations, name)(x)
        assert torch.equal(y, getattr(F, name)(x))
        assert type(y.grad_fn).__name__ == "_ActivationBackward"


@pytest.mark.parametrize("name", ALL)
def test_second_derivatives(name):
    plain, act = pair(name)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    second = []
    for module in (plain, act):
        (dx,) = torch.autograd.grad(module(1 * x).square().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(dx.square().sum(), x)[0])
    assert_same(second[1:], second[:1], 1e-12)
    assert torch.autograd.gradgradcheck(lambda z: act(1 * z), (x.detach().clone().requires_grad_(),))


@pytest.mark.parametrize("name", ["silu", "relu6"])
def test_many_gradients_at_once(name):
    _, act = pair(name)
    layer = BalNormLinear(4, 3, dtype=torch.float64)
    x = torch.randn(5, 4, dtype=torch.float64)

    def run(x):
        return layer(act(2 * x))

    one_by_one = torch.autograd.functional.jacobian(run, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(run, x, vectorize=True), one_by_one)


def test_copies_and_pickles():
    model = nn.Sequential(activations.SiLU(True), activations.GELU("tanh"), activations.Hardtanh(-2, 3))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in copied] == [type(module) for module in model]
        assert str(copied) == str(model)
    assert "activations.SiLU(inplace=True)" in str(model)
    assert str(model[2].fuse()) == "Hardtanh(min_val=-2, max_val=3)"
    assert type(model[0].fuse()) is nn.SiLU
    y = model[0](1 * torch.randn(2, 3, requires_grad=True))
    file = io.BytesIO()
    torch.save(y, file)  # an output drags nothing along
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), y)


# What is kept -------------------------------------------------------------------------------------------------------


def chain(act, blocks=4, **options):
    torch.manual_seed(0)
    layers = [it for _ in range(blocks) for it in (BalNormConv2d(8, 8, 3, padding=1, centred=True, **options), act)]
    return nn.Sequential(*layers)


def activations_kept(model, x):
    """In units of the input, which is kept too."""
    return 1 + saved_bytes(model, x) / x.nbytes


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ALL)
def test_a_chain_keeps_one_tensor_for_each_activation(name):
    plain, act = pair(name)
    x = torch.randn(4, 8, 32, 32)
    before, after = (activations_kept(chain(it), x) for it in (plain, act))
    assert after <= 5.1
    assert after <= activations_kept(chain(nn.ReLU()), x) + 0.01
    assert before >= 8
    expected, found = (
        [*gradients(model, x), *torch.autograd.grad(model(x).square().sum(), list(model.parameters()))]
        for model in (chain(plain), chain(act))
    )
    assert_same(found, expected)


@pytest.mark.parametrize("layer", [BalNormLinear(64, 5), BalNormConv1d(64, 5, 3, mass="position")])
def test_layers_without_images(layer):
    x = torch.randn(128, 64) if isinstance(layer, BalNormLinear) else torch.randn(8, 64, 16)
    plain, lean = (Steps(lambda self, x, act=act: self.layer(act(2 * x)), layer=layer) for act in pair("silu"))
    assert_same(gradients(lean, x), gradients(plain, x))
    assert activations_kept(lean, x.requires_grad_()) < activations_kept(plain, x) - 0.9


@pytest.mark.parametrize("gate", [activations.Sigmoid, activations.Hardsigmoid])
def test_a_product_with_a_gate_keeps_the_gate(gate):
    ways = [lambda x, g: x * g, lambda x, g: g * x, torch.mul, lambda x, g: x.multiply(g), activations.multiply]
    layer = BalNormConv2d(4, 4, 3, padding=1, centred=True)
    x, g = torch.randn(3, 4, 16, 16), torch.randn(3, 4, 1, 1)

    def network(act, gate, way):
        return TwoInputs(lambda self, x, g=g: self.layer(way(act(2 * x), gate(2 * g))), layer=layer)

    torchs = network(nn.SiLU(), gate.plain(), torch.mul)
    expected = gradients(torchs, x, g)
    for way in ways:
        assert_same(gradients(network(activations.SiLU(), gate(), way), x, g), expected)
        assert_same(gradients(network(nn.SiLU(), gate(), way), x, g), expected)
    g.requires_grad_()
    assert 4 < activations_kept(torchs, x.requires_grad_()) < 4.1
    assert 3 < activations_kept(network(nn.SiLU(), gate(), torch.mul), x) < 3.1
    assert 2 < activations_kept(network(activations.SiLU(), gate(), torch.mul), x) < 2.1


def test_a_gate_is_an_ordinary_tensor_to_all_others():
    g = torch.randn(3, 4, 1, 1, requires_grad=True)
    gate = activations.Sigmoid()(g)
    for result in (gate + 1, gate * 2, 2 * gate, gate.mean(), torch.cat([gate, gate]), gate * gate, 1 - gate):
        assert type(result) is torch.Tensor
    assert torch.equal(gate * 2, torch.sigmoid(g) * 2)
    y = torch.randn(3, 4, 5, 5)
    y *= gate
    assert type(y) is torch.Tensor
    y.sum().backward()
    assert torch.equal(activations.multiply(torch.ones(3, 4, 5, 5), torch.ones(4, 5, 5)), torch.ones(3, 4, 5, 5))


# A tensor that is not what the activation made ------------------------------------------------------------------------


def changed_without_autograd(y):
    with torch.no_grad():
        y.add_(1.0)
    return y


def other_data(y):
    y.data = y.detach() + 1
    return y


CHANGES = {
    "added to": lambda y: y.add_(1.0),
    "a sum in place": lambda y: y.__iadd__(y.detach().flip(0)),
    "dropout in place": nn.Dropout(0.5, inplace=True),
    "multiplied without autograd": changed_without_autograd,
    "other data": other_data,
    "a view": lambda y: y[1:],
    "all of it, as a view": lambda y: y[...],
    "transposed in place": lambda y: y.transpose_(2, 3),
    "a cast": lambda y: y.double().float(),
    "a copy": lambda y: y.clone(),
    "nothing": lambda y: y,
    "identity": nn.Identity(),
    "dropout without effect": nn.Dropout(0.0),
}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["silu", "silu in place", "gelu", "a product"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_output_is_another_tensor(name, change):
    """A stale input would give wrong gradients in silence."""
    layer = BalNormConv2d(4, 4, 3, padding=1, centred=True)
    x, g = torch.randn(3, 4, 6, 6), torch.randn(3, 4, 1, 1)
    plain, ours = pair("silu" if name == "a product" else name)

    def run(act, gate):
        def forward(x, g):
            torch.manual_seed(0)
            made = act(x) * gate(g) if name == "a product" else act(x)
            y = layer(CHANGES[change](made)) + 0 * g.sum()
            saved.append(y.grad_fn.next_functions[0][0].saved_tensors[0])
            return y

        layer.zero_grad()
        return [*gradients(forward, x, g), layer.weight.grad.clone()]

    saved = []
    expected = run(plain, nn.Sigmoid())
    assert_same(run(ours, activations.Sigmoid()), expected)
    assert saved[0] is not None
    assert (saved[1] is None) == (change in ("nothing", "identity", "dropout without effect"))


def test_an_input_that_changes_afterwards_is_noticed():
    """As with torch's own: here the activation's backward pass need not run for it."""
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    layer = BalNormConv2d(4, 4, 3)
    for late in (False, True):
        z = 2 * x
        y = activations.silu(z)
        if not late:
            z += 1
        loss = layer(y).sum()
        del y
        if late:
            z += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, layer.weight)


def test_what_one_backward_pass_read_is_not_taken_for_another():
    z = 2 * torch.randn(2, 4, 6, 6, requires_grad=True)
    layer = BalNormConv2d(4, 4, 3)
    loss = layer(activations.silu(z)).sum()
    torch.autograd.grad(loss, layer.weight, retain_graph=True)  # which leaves the activation's own part undone
    z += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, layer.weight)


def test_an_output_that_gives_the_gradient_must_not_change():
    y = activations.relu6(2 * torch.randn(3, 4, requires_grad=True))
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_two_layers_and_two_backward_passes():
    first, second = BalNormConv2d(4, 4, 3, centred=True), BalNormConv2d(4, 4, 3, centred=True)
    x = torch.randn(3, 4, 6, 6)

    def run(act):
        leaf = x.clone().requires_grad_()
        y = act(2 * leaf)
        a, b = first(y).square().sum(), second(y).square().sum()
        found = [torch.autograd.grad(a, [first.weight], retain_graph=True)]
        found += [torch.autograd.grad(a + b, [leaf, first.weight, second.weight], retain_graph=True) for _ in range(2)]
        found.append(torch.autograd.grad(a, [leaf]))
        return [gradient for some in found for gradient in some]

    assert_same(run(activations.silu), run(F.silu))


# Second derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["silu", "silu in place", "relu6", "gelu"])
@pytest.mark.parametrize("gated", [False, True])
def test_second_derivatives_through_layers(name, gated):
    """Also with respect to a tensor on the way, of which the layer saved nothing."""
    layers = [BalNormConv2d(3, 3, 3, centred=True, dtype=torch.float64) for _ in range(2)]
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)

    def run(act, gate):
        leaf = x.clone().requires_grad_()
        y = act(layers[0](leaf))
        middle = y * gate(y.mean((2, 3), keepdim=True)) if gated else y
        first = torch.autograd.grad(layers[1](middle).square().sum(), [leaf, layers[1].weight], create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        wanted = [leaf, y, middle, layers[0].weight, layers[1].weight, layers[1].gain]
        return torch.autograd.grad(penalty, wanted)

    plain, ours = pair(name)
    expected, found = run(plain, nn.Sigmoid()), run(ours, activations.Sigmoid())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12 * float(b.abs().max()), rtol=1e-10)


@pytest.mark.parametrize("name", ["silu", "silu in place", "relu6"])
def test_second_derivatives_where_the_output_is_gone(name):
    layer = BalNormConv2d(2, 2, 3, centred=True, track_running_stats=False, dtype=torch.float64)
    _, act = pair(name)
    gate = activations.Sigmoid()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 2, 1, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, g: layer(act(1 * x) * gate(g)), (x, g))
    assert torch.autograd.gradgradcheck(lambda x: layer(act(1 * x)), (x,))


# Hooks, checkpointing, autocast, compilation --------------------------------------------------------------------------


def with_hooks(model):
    for module in model:
        module.register_forward_hook(lambda module, args, output: output * 1.5)
        module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        module.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    return model


@pytest.mark.parametrize("name", ["silu", "relu6"])
def test_hooks_of_modules(name):
    x = torch.randn(2, 8, 8, 8)
    plain, ours = pair(name)
    assert_same(gradients(with_hooks(chain(ours)), x), gradients(with_hooks(chain(plain)), x))


@pytest.mark.parametrize("name", ["silu", "silu in place", "relu6"])
@pytest.mark.parametrize(
    "hooks",
    [
        save_on_cpu,
        lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
        lambda: saved_tensors_hooks(lambda t: t.contiguous(memory_format=torch.preserve_format), lambda t: t.clone()),
    ],
)
@pytest.mark.usefixtures("backend")
def test_hooks_on_saved_tensors(name, hooks):
    x = torch.randn(2, 8, 8, 8)
    plain, ours = pair(name)
    expected = gradients(chain(plain), x)
    packed = []
    with hooks():
        leaf = x.clone().requires_grad_()
        y = chain(ours)(1 * leaf)
    torch.manual_seed(1)
    assert_same([y.detach(), *torch.autograd.grad((y * torch.randn_like(y)).sum(), leaf)], expected)
    with saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        chain(ours)(leaf)
    images = sum(shape == x.shape for shape in packed)
    assert images == (5 if name.startswith("silu") else 8)  # once each, for those that copy what they get


class Blocks(nn.Module):
    """Blocks that are repeated in the backward pass, each on its own; activation and layer in one, or apart."""

    def __init__(self, act, apart, **options):
        super().__init__()
        layers = chain(act)
        self.blocks = nn.ModuleList([layers[:1], layers[1:4], layers[4:]] if apart else [layers[:4], layers[4:]])
        self.options = options

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        return x


@pytest.mark.parametrize("name", ["silu", "silu in place", "gelu", "relu6"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_checkpointing(name, apart, options):
    if "place" in name and apart:
        return  # a block that overwrites its own input cannot be repeated, whoever wrote the activation
    x = torch.randn(2, 8, 8, 8)
    plain, ours = pair(name)
    assert_same(gradients(Blocks(ours, apart, **options), x), gradients(Blocks(plain, apart), x))
    leaf = x.clone().requires_grad_()
    loss = Blocks(ours, apart, **options)(1 * leaf).square().sum()
    for _ in range(2):  # what one backward pass found is not taken for another's
        leaf.grad = None
        loss.backward(retain_graph=True)
    expected = Blocks(plain, apart)(1 * (again := x.clone().requires_grad_())).square().sum()
    assert_same([leaf.grad], torch.autograd.grad(expected, again))


def test_checkpointing_keeps_no_more_at_the_seams():
    x, alive = torch.randn(2, 8, 16, 16, requires_grad=True), []
    for act in pair("silu"):
        model, storages = Blocks(act, False, use_reentrant=False), []
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(
                    lambda *args, to=storages: to.append(StorageWeakRef(args[2].untyped_storage()))
                )
        y = model(1 * x)
        assert len(storages) == 8
        alive.append(sum(not storage.expired() for storage in storages))
        del y
    assert alive == [2, 2]  # the input of the second block, and the output


@pytest.mark.parametrize("name", ["silu", "gelu", "mish", "hardswish", "relu6"])
def test_autocast(name):
    x = torch.randn(2, 8, 8, 8)
    plain, ours = pair(name)

    def run(act):
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(chain(act), x)

    assert_same(run(ours), run(plain))
    with torch.autocast("cpu", torch.bfloat16):
        sizes = [saved_bytes(chain(act), x) for act in (plain, ours)]
    assert sizes[1] < 0.7 * sizes[0]


def test_functional_transforms():
    model = nn.Sequential(BalNormConv2d(3, 4, 3, track_running_stats=False), activations.SiLU(), activations.ReLU6())
    x = torch.randn(2, 3, 5, 5)
    plain = fold_activations(model)
    for run in (
        lambda model: torch.func.grad(lambda x: model(x).sum())(x),
        lambda model: torch.func.vmap(torch.func.grad(lambda x: model(x[None]).sum()))(x),
        lambda model: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    ):
        torch.testing.assert_close(run(model), run(plain))


def fold_activations(model):
    """The same model with torch's activations."""
    copied = copy.deepcopy(model)
    return nn.Sequential(*(it.fuse() if isinstance(it, activations.LeanActivation) else it for it in copied))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_compilers_and_exports_see_torchs_own():
    class Excited(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.act, self.cap = BalNormConv2d(3, 3, 3), activations.SiLU(True), activations.ReLU6()
            self.gate = activations.Sigmoid()

        def forward(self, x):
            y = self.cap(self.act(self.layer(x)))
            return y * self.gate(y.mean((2, 3), keepdim=True))

    torch._dynamo.reset()
    model, x = Excited(), torch.randn(2, 3, 6, 6)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for run, leaf in zip((compiled, model), leaves, strict=True):
        run(leaf).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    model.eval()
    program = torch.export.export(model, (x,))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"aten.silu_.default", "aten.sigmoid.default"} <= targets
    torch.testing.assert_close(program.module()(x), model(x))
    torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x))
    symbols = torch.fx.symbolic_trace(nn.Sequential(activations.SiLU(), activations.Sigmoid(), activations.ReLU6()))
    assert next(node.target for node in symbols.graph.nodes if node.op == "call_function") is F.silu


# How long it is kept --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["silu", "gelu", "silu in place", "mish in place"])
@pytest.mark.parametrize("gated", [False, True])
def test_nothing_outlives_the_backward_pass(name, gated):
    """Not even where the output is held. And there are no cycles, which only the garbage collector would find."""
    _, act = pair(name)
    layer = BalNormConv2d(4, 4, 3, centred=True)
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    gc.disable()
    try:
        y = act(1 * x)
        held = y * activations.Sigmoid()(y.mean((2, 3), keepdim=True)) if gated else y
        nodes = [weakref.ref(tensor.grad_fn) for tensor in (y, held)]
        kept = StorageWeakRef(y.grad_fn.saved_tensors[0].untyped_storage())
        assert not kept.expired()
        layer(held).sum().backward()
        assert kept.expired()
        del y, held
        assert all(node() is None for node in nodes)
    finally:
        gc.enable()


# Whole networks -------------------------------------------------------------------------------------------------------


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False, **options)


class Block(nn.Module):
    """Norms, activations, squeeze-and-excitation, and a sum."""

    def __init__(self, act=nn.SiLU):
        super().__init__()
        self.conv1, self.bn1, self.act1 = conv(8, 8), nn.BatchNorm2d(8), act(inplace=True)
        self.reduce, self.act2, self.expand = nn.Conv2d(8, 2, 1), act(), nn.Conv2d(2, 8, 1)
        self.gate = nn.Sigmoid()
        self.conv2, self.bn2, self.act3 = conv(8, 8), nn.BatchNorm2d(8), act()

    def forward(self, x):
        y = self.act1(self.bn1(self.conv1(x)))
        y = y * self.gate(self.expand(self.act2(self.reduce(y.mean((2, 3), keepdim=True)))))
        return self.act3(self.bn2(self.conv2(y))) + x


def network(act=nn.SiLU):
    torch.manual_seed(0)
    return nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), act(), Block(act), Block(act), conv(8, 8), nn.BatchNorm2d(8))


def test_convert_uses_them_where_they_help():
    x = torch.rand(2, 3, 16, 16)
    dry, planned = convert(network(), example_input=x, dry_run=True)
    assert not any(isinstance(module, activations.LeanActivation) for module in dry.modules())
    model, report = convert(network(), example_input=x)
    assert str(report) == str(planned)
    # act2 feeds a convolution without a norm, and act3 a sum alone
    assert report.lean == ["2", "3.act1", "3.gate", "4.act1", "4.gate"]
    assert [row.why for row in report.rows if row.layer in ("2", "3.act1", "3.gate")] == [
        "feeds 3.conv1",
        "feeds 3.gate",
        "multiplies 3.act1, feeds 3.conv2",
    ]
    assert str(report).endswith(
        "6 of 10 layers balanced, 6 of 6 BatchNorms removed, 5 activations keep less for backward"
    )
    other, without = convert(network(), example_input=x, lean=False)
    assert without.lean == []
    assert not any(isinstance(module, activations.LeanActivation) for module in other.modules())
    assert_same(gradients(model, x), gradients(other, x))
    assert activations_kept(model, x) < 0.7 * activations_kept(other, x)


def test_convert_leaves_them_alone_where_others_look():
    x = torch.rand(2, 3, 16, 16)
    skipped = convert(network(), example_input=x, skip="4.*")[1]
    assert skipped.lean == ["2", "3.act1", "3.gate"]
    hooked = network()
    hooked[2].register_forward_hook(lambda module, args, output: None)
    assert convert(hooked, example_input=x)[1].lean == ["3.act1", "3.gate", "4.act1", "4.gate"]


@pytest.mark.parametrize(
    "after",
    [
        lambda self, y: self.conv2(y) + F.max_pool2d(y, 3, 1, 1),
        lambda self, y: self.conv2(y).add(y.add_(1.0)),
        lambda self, y: (self.conv2(y), y)[0] * y,
        lambda self, y: self.conv2(y.transpose(2, 3)),
    ],
)
def test_convert_leaves_them_alone_where_the_output_is_kept_or_changed(after):
    x = torch.rand(2, 3, 6, 6)
    for act in (nn.SiLU, nn.ReLU6):
        assert convert(two_layers(act(), after), include="conv2", example_input=x)[1].lean == []


def test_sums_and_concatenations_keep_nothing():
    model = two_layers(nn.SiLU(), lambda self, y: torch.cat([self.conv2(y) + y, y]))
    assert convert(model, include="conv2", example_input=torch.rand(2, 3, 6, 6))[1].lean == ["act"]


def two_layers(act, after):
    layers = {"conv1": conv(3, 4), "bn1": nn.BatchNorm2d(4), "act": act, "conv2": conv(4, 4)}
    return Steps(lambda self, x: after(self, self.act(self.bn1(self.conv1(x)))), **layers)


def test_fold_puts_back_what_was_there():
    x = torch.rand(2, 3, 16, 16)
    model, _ = convert(network(), example_input=x)
    model(x)
    model.eval()
    folded = fold(model)
    assert not any(type(module).__module__.startswith("balnorm") for module in folded.modules())
    assert str(folded[3].act1) == "SiLU(inplace=True)"
    assert type(model[3].act1) is activations.SiLU
    assert folded[3].act1._forward_hooks is not model[3].act1._forward_hooks
    torch.testing.assert_close(folded(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize(
    ("name", "share", "lean_share"), [("mobilenetv2_100", 0.70, 0.38), ("efficientnet_b0", 0.75, 0.37)]
)
def test_networks_of_timm(name, share, lean_share):
    model, x = build("timm", name)
    batchnorm = saved_bytes(model, x)
    plain, ours = copy.deepcopy(model), model
    convert(plain, example_input=x, lean=False)
    convert(ours, example_input=x)
    assert saved_bytes(plain, x) / batchnorm < share
    assert saved_bytes(ours, x) / batchnorm < lean_share <= 0.48
