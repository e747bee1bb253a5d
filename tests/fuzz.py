"""Random layers and random misuse: every call is right, or raises an exception and leaves the layer as it was.

`python tests/fuzz.py 10000` runs that many cases, with the kernels built under AddressSanitizer and UBSan when
`make fuzz` starts it; tests/test_fuzz.py runs a few hundred. A case is a function of its number alone.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
from pathlib import Path

import torch
from torch import nn

import balnorm
from balnorm import BalNormLinear
from balnorm._core import function
from balnorm._core.backends import cpu

LAYERS = [
    (balnorm.BalNormConv1d, balnorm.BalNormConvTranspose1d),
    (balnorm.BalNormConv2d, balnorm.BalNormConvTranspose2d),
    (balnorm.BalNormConv3d, balnorm.BalNormConvTranspose3d),
]
REFUSALS = (ValueError, TypeError, RuntimeError)


def build(draw: random.Random) -> tuple[balnorm.BalNormLayer, torch.Tensor]:
    """A layer in float64, and an input for it."""
    axes, groups = draw.choice([0, 1, 2, 2, 3]), draw.choice([1, 1, 1, 2, 3])
    options = {
        "one_pass": draw.random() < 0.5,
        "stats_fraction": draw.choice([1.0, 1.0, 0.5, 0.01]),
        "momentum": draw.choice([0.1, None, 0.9]),
        "shift": draw.choice(["auto", True, False]),
        "centred": draw.random() < 0.3,
        "bias": draw.random() < 0.7,
        "affine": draw.random() < 0.8,
        "dtype": torch.float64,
    }
    samples, inputs, outputs = draw.choice([0, 1, 2, 3, 5, 7]), draw.choice([1, 2, 5, 9]), draw.choice([1, 3, 17])
    if axes == 0:
        leading = draw.choice([(), (3,)])
        return BalNormLinear(inputs, outputs, **options), torch.randn(samples, *leading, inputs).double()
    transposed = draw.random() < 0.35
    kernel = tuple(draw.choice([1, 2, 3, 4]) for _ in range(axes))
    stride, dilation = (tuple(draw.choice(values) for _ in range(axes)) for values in ((1, 1, 2, 3), (1, 1, 2)))
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = tuple(draw.randint(0, n // 2 if transposed else n) for n in reach)
    size = [max(1, n + 1 - 2 * p) + draw.choice([0, 1, 4, 30 // axes]) for n, p in zip(reach, padding, strict=True)]
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        most = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        geometry["output_padding"] = tuple(draw.randint(0, n) for n in most)
    else:
        geometry["padding_mode"] = draw.choice(["zeros", "zeros", "zeros", "circular", "replicate"])
    mass = draw.choice(["channel", "position"])
    layer = LAYERS[axes - 1][transposed](inputs * groups, outputs * groups, kernel, mass=mass, **geometry, **options)
    return layer, torch.randn(samples, inputs * groups, *size).double()


def dress(draw: random.Random, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Other values: as after a ReLU, far from zero, huge, tiny, dead channels; and whether float32 takes its toll."""
    kind = draw.choice(["signed", "relu", "relu", "shifted", "huge", "tiny", "dead", "nearly dead"])
    if kind == "relu":
        x = x.relu()
    elif kind == "shifted":
        x = x + 5
    elif kind in ("huge", "tiny"):
        x = x * (1e15 if kind == "huge" else 1e-15)
    elif kind.endswith("dead") and x.dim() > 2:
        x[:, 0] *= 1e-7 if kind == "nearly dead" else 0
    return x, kind in ("tiny", "nearly dead")


def lay_out(draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """The same values in another order of memory: dense, with gaps, backwards, or at an odd address."""
    layout = draw.choice(["contiguous", "contiguous", "last", "last", "transposed", "gaps", "offset", "expanded"])
    if layout == "last" and x.dim() > 2:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "gaps":
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    if layout == "expanded" and x.dim() > 1 and x.shape[0]:
        return x[:1].expand(x.shape)
    return x


@contextlib.contextmanager
def everything_plain():
    """Compute in the plain differentiable form."""
    before = function.torch_transforms_the_program
    function.torch_transforms_the_program = lambda: True
    try:
        yield
    finally:
        function.torch_transforms_the_program = before


def step(layer: balnorm.BalNormLayer, x: torch.Tensor, frozen: tuple[str, ...] = ()) -> dict[str, torch.Tensor | None]:
    """Output, gradients and buffers of one training step."""
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen and parameter.is_floating_point())
        parameter.grad = None
    leaf = x.detach().requires_grad_("input" not in frozen and x.is_floating_point())
    y = layer(leaf)
    if y.requires_grad:
        weights = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
        (y * weights).sum().backward()
    gradients = {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": y.detach(), "dinput": leaf.grad, **gradients, **dict(layer.named_buffers())}


def twin(layer: balnorm.BalNormLayer, dtype: torch.dtype) -> balnorm.BalNormLayer:
    """The same layer in another precision, sharing nothing."""
    return copy.deepcopy(layer).to(dtype)


# Ways to hand the layer something else than it expects. Each changes the layer, and returns whether a call must be
# refused; if not, it has to be right.


def other_kernel(draw, layer):
    shape = list(layer.weight.shape)
    if len(shape) == 2:
        return False
    axis = draw.randrange(2, len(shape))
    shape[axis] = max(0, shape[axis] + draw.choice([-1, 1, 2]))
    layer.weight = nn.Parameter(torch.randn(shape, dtype=layer.weight.dtype))
    return True


def lost_memory(draw, layer):
    victim = draw.choice([layer.weight, layer.gain, layer.running_mass])
    victim.data = victim.data.clone()
    victim.data.untyped_storage().resize_(0)
    return True


def odd_counter(draw, layer):
    values = (torch.tensor(-1), torch.tensor(-5), torch.empty(0, dtype=torch.int64), torch.tensor(3, dtype=torch.int32))
    layer.num_batches_tracked = draw.choice(values)
    return layer.num_batches_tracked.numel() == 0


def odd_scale(draw, layer):
    layer.output_scale = torch.rand(draw.choice([(), (1,), (0,), (2,), (4,)]), dtype=layer.weight.dtype) + 0.5
    return layer.output_scale.numel() not in (1, layer.gain.numel())


def wrong_vector(draw, layer):
    name = draw.choice(["bias", "gain"])
    old = getattr(layer, name)
    if old is None:
        return False
    vector = torch.randn(old.numel() + draw.choice([-1, 1]), dtype=old.dtype)
    setattr(layer, name, nn.Parameter(vector) if isinstance(old, nn.Parameter) else vector)
    return True


def integer_weight(draw, layer):
    layer.weight = nn.Parameter(layer.weight.detach().long(), requires_grad=False)
    return True


def wrong_buffer(draw, layer):
    name = draw.choice(["running_mean", "running_mass"])
    shape = list(getattr(layer, name).shape)
    shape[draw.randrange(len(shape))] += 1
    setattr(layer, name, torch.ones(shape, dtype=layer.weight.dtype))
    return True


def strided_buffer(draw, layer):
    for name in ("running_mean", "running_mass"):
        setattr(layer, name, lay_out(draw, getattr(layer, name)).detach())
    return False


MISUSES = [
    other_kernel,
    lost_memory,
    odd_counter,
    odd_scale,
    wrong_vector,
    integer_weight,
    wrong_buffer,
    strided_buffer,
]


def hooks(draw: random.Random):
    """A context in which saved tensors come back changed, and whether what comes back is equal."""
    kind = draw.choice(["strided", "strided", "clone", "shorter", "lower", "longer"])

    def unpack(tensor):
        if kind == "clone":
            return tensor.clone()
        if kind == "strided":
            return torch.stack([tensor, tensor], -1)[..., 0]
        if tensor.dim() != 1:
            return tensor
        if kind == "lower":
            return tensor.bfloat16()
        return tensor[: tensor.numel() // 2] if kind == "shorter" else torch.cat([tensor, tensor])

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack), kind in ("strided", "clone")


def compare(
    number: int, found: dict, expected: dict, layer: balnorm.BalNormLayer, x: torch.Tensor, low: bool, delicate: bool
) -> None:
    """Equal up to rounding, in units of what a value is made of: outputs of size 1 may cancel, and so may gradients."""
    outputs = max(1, expected["output"].numel())
    largest = float(x.abs().max()) if x.numel() else 0.0
    reach = 1.0 if layer.training else max(1.0, largest)  # of the output, which only the batch's own statistics limit
    smallest = max(largest * (1e-7 if delicate else 1.0), 1e-300)  # of a channel that is nearly dead
    units = {"output": reach, "dinput": outputs * reach / smallest, "dbias": outputs}
    units |= {"dweight": outputs * reach / max(float(layer.weight.abs().max()), 1e-300), "dgain": outputs * reach}
    for name, true in expected.items():
        ours = found[name]
        if name in ("form", "num_batches_tracked") or true is None or ours is None:
            assert (true is None) == (ours is None), f"case {number}: {name} is missing"
            continue
        assert ours.shape == true.shape, f"case {number}: {name} has another shape"
        if true.numel() and true.isfinite().all():
            error, size = float((ours.double() - true).abs().max()), float(true.abs().max())
            tolerance = 1e-7 if not low else 1e-3 if name.startswith("running") else 1e-2
            allowed = tolerance * (size + units.get(name, 0.0))
            assert error <= allowed, f"case {number}: {name} is off by {error:.2e}, the largest value is {size:.2e}"


def run(number: int) -> str:
    """Run a case; the kind of its outcome."""
    draw = random.Random(number)
    torch.manual_seed(number)
    exact, x = build(draw)
    x, delicate = dress(draw, x)
    x = lay_out(draw, x)
    if number % 97 == 0:  # long signals: sums of many equal numbers
        exact = balnorm.BalNormConv1d(1, 2, 3, mass=draw.choice(["channel", "position"]), dtype=torch.float64)
        x = torch.full((1, 1, 1_000_000), 0.1, dtype=torch.float64)
    if draw.random() < 0.3:
        with torch.no_grad():
            exact.weight[torch.rand_like(exact.weight) < 0.2] = 0
    exact.weight = nn.Parameter(lay_out(draw, exact.weight.detach()))
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    layer = twin(exact, dtype)
    names = ["input", *(name for name, _ in layer.named_parameters())]
    frozen = tuple(name for name in names if draw.random() < 0.3)
    if draw.random() < 0.2:
        layer.eval()
        exact.eval()
    kind, must_refuse = draw.choice(["use", "use", "misuse", "hooks"]), False
    if kind == "misuse":
        misuse = draw.choice(MISUSES)
        must_refuse = misuse(draw, layer)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers() if buffer.untyped_storage().nbytes()}
    if kind == "misuse":
        exact = None if lost_memory is misuse else twin(layer, torch.float64)
    context, equal = hooks(draw) if kind == "hooks" else (contextlib.nullcontext(), True)
    found, refusal = None, None
    try:
        with context:
            found = step(layer, x.to(layer.weight.dtype), frozen)
    except REFUSALS as error:
        refusal = error
    assert refusal or not must_refuse, f"case {number} should have been refused"
    buffers = dict(layer.named_buffers())
    if refusal is not None and equal:
        for name, buffer in before.items():
            assert torch.equal(buffers[name], buffer), f"case {number} was refused and moved {name}"
    for name in ("running_mean", "running_mass"):
        if buffers[name].untyped_storage().nbytes():
            assert buffers[name].isfinite().all(), f"case {number}: {name} is not finite"
    if not equal or exact is None:  # a refusal, or nothing used what was taken away
        return "refused" if refusal else "unharmed"
    expected = None
    # contiguous: torch's own gradients of float64 convolutions fail for some other layouts
    exact.weight = nn.Parameter(exact.weight.detach().contiguous(), requires_grad=exact.weight.is_floating_point())
    with everything_plain(), contextlib.suppress(*REFUSALS):
        expected = step(exact, x.contiguous(), frozen)
    assert (expected is None) == (found is None), f"case {number}: {refusal or 'should have been refused'}"
    if expected is None:
        return "refused"
    if dtype != torch.float64 and delicate:
        return "rounded"  # float32 has other limits than float64
    compare(number, found, expected, exact, x, dtype != torch.float64, delicate)
    return kind


def use_library(path: str) -> None:
    """Replace the loaded kernels by those of another file."""
    cpu.LIBRARY = Path(path)
    cpu._library, cpu._status = cpu._load()
    assert cpu._library is not None, cpu._status
    cpu._functions = cpu._bind(cpu._library)


def main() -> None:
    cases = int(sys.argv[1])
    if len(sys.argv) > 2:
        use_library(sys.argv[2])
    torch.set_num_threads(1)
    outcomes: dict[str, int] = {}
    for number in range(cases):
        kind = run(number)
        outcomes[kind] = outcomes.get(kind, 0) + 1
        if math.log10(number + 1) % 1 == 0 or number % 1000 == 999:
            print(f"{number + 1} cases: {outcomes}", flush=True)


if __name__ == "__main__":
    main()
