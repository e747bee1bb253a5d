"""A constant factor and a learned shift for each channel."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from balnorm import BalNormConv2d, ChannelAffine, fold


def affine(channels=4, axes=2, dtype=None):
    layer = ChannelAffine(channels, axes, dtype=dtype)
    nn.init.normal_(layer.factor)
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 7), (5, 4, 7, 6), (2, 4, 3, 3, 3), (0, 4, 3, 3)])
def test_value_and_gradient(shape):
    layer, x = affine(axes=len(shape) - 2, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    each = (-1, *[1] * (len(shape) - 2))
    assert torch.equal(layer(x), torch.addcmul(layer.bias.view(each), x, layer.factor.view(each)))
    assert torch.autograd.gradcheck(layer, x.requires_grad_())


def test_nothing_of_the_input_is_kept_for_backward():
    layer, x, kept = affine(), torch.randn(8, 4, 16, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        layer(x).sum().backward()
    assert max(kept, default=0) <= 4
    assert layer.bias.grad is not None


def test_precision_is_that_of_the_input():
    layer, x = affine(), torch.randn(2, 4, 3, 3)
    y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16().float()).bfloat16())  # rounded once
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32  # as BatchNorm
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert affine(dtype=torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_channels_last_stays():
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    assert affine()(x).is_contiguous(memory_format=torch.channels_last)


def test_copies_pickles_and_state_dicts():
    layer, x = affine(), torch.randn(2, 4, 3, 3)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), ChannelAffine(4)):
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x))
        assert [name for name, _ in other.named_parameters()] == ["bias"]
    assert str(layer) == "ChannelAffine(4, axes=2)"
    assert torch.compile(layer, backend="eager", fullgraph=True)(x).shape == x.shape


FOLDED = {
    "a convolution that does not pad": (lambda: [affine(), nn.Conv2d(4, 6, 3, groups=2)], [nn.Identity, nn.Conv2d]),
    "one that pads with its input": (
        lambda: [affine(), nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", bias=False)],
        [nn.Identity, nn.Conv2d],
    ),
    "a balanced one": (lambda: [affine(), BalNormConv2d(4, 6, 3)], [nn.Identity, nn.Conv2d]),
    "one that pads": (lambda: [affine(), nn.Conv2d(4, 6, 3, padding=1)], [nn.Conv2d, nn.Conv2d]),
    "a transposed one": (lambda: [affine(), nn.ConvTranspose2d(4, 6, 3)], [nn.Conv2d, nn.ConvTranspose2d]),
    "an activation": (lambda: [affine(), nn.ReLU(), nn.Conv2d(4, 6, 3)], [nn.Conv2d, nn.ReLU, nn.Conv2d]),
    "a linear layer": (
        lambda: [nn.AdaptiveAvgPool2d(1), nn.Flatten(), affine(axes=0), nn.Linear(4, 3)],
        [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity, nn.Linear],
    ),
    "a linear layer over another axis": (lambda: [affine(), nn.Linear(7, 3)], [nn.Conv2d, nn.Linear]),
    "vectors": (
        lambda: [nn.AdaptiveAvgPool2d(1), nn.Flatten(), affine(axes=0)],
        [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Sequential],
    ),
    "signals": (lambda: [nn.Flatten(2), affine(axes=1)], [nn.Flatten, nn.Conv1d]),
    "volumes": (lambda: [nn.Unflatten(2, (7, 1)), affine(axes=3)], [nn.Unflatten, nn.Conv3d]),
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("inplace", [False, True])
def test_folding(name, inplace):
    build, kinds = FOLDED[name]
    model, x = nn.Sequential(*build()), torch.rand(5, 4, 7, 7)
    for _ in range(3):
        model(x)
    expected, text = model.eval()(x).detach(), str(model)
    folded = fold(model, inplace=inplace)
    assert [type(module) for module in folded] == kinds
    torch.testing.assert_close(folded(x).detach(), expected)
    if not inplace:
        assert str(model) == text
        torch.testing.assert_close(model(x).detach(), expected)
    buffer = io.BytesIO()
    torch.save(folded, buffer)
    assert b"balnorm" not in buffer.getvalue()


@pytest.mark.parametrize("traceable", [True, False])
def test_what_something_else_reads_is_not_merged(traceable):
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine, self.conv = affine(), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.affine(x)
            if not traceable and y.sum() > 1e9:
                return y
            return self.conv(y) + y if traceable else self.conv(y)

    model, x = Forked().eval(), torch.randn(2, 4, 5, 5)
    folded = fold(model)
    assert type(folded.affine) is nn.Conv2d
    torch.testing.assert_close(folded(x), model(x))
