"""Layers that treat every channel by itself: a constant factor and a learned shift, and centring."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from balnorm import BalNormConv2d, ChannelAffine, ChannelCentre, fold, freeze_stats, unfreeze_stats, update_stats


def affine(channels=4, axes=2, dtype=None):
    layer = ChannelAffine(channels, axes, dtype=dtype)
    nn.init.normal_(layer.factor)
    nn.init.normal_(layer.bias)
    return layer


def centre(channels=4, axes=2, dtype=None):
    layer = ChannelCentre(channels, axes, dtype=dtype)
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 7), (5, 4, 7, 6), (2, 4, 3, 3, 3), (0, 4, 3, 3)])
def test_value_and_gradient(shape):
    layer, x = affine(axes=len(shape) - 2, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    each = (-1, *[1] * (len(shape) - 2))
    assert torch.equal(layer(x), torch.addcmul(layer.bias.view(each), x, layer.factor.view(each)))
    assert torch.autograd.gradcheck(layer, x.requires_grad_())


@pytest.mark.parametrize("build", [affine, centre])
def test_nothing_of_the_input_is_kept_for_backward(build):
    layer, x, kept = build(), torch.randn(8, 4, 16, 16, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t):
        layer(x).sum().backward()
    assert max(kept, default=0) <= 4
    assert layer.bias.grad is not None


@pytest.mark.parametrize("build", [affine, centre])
def test_precision_is_that_of_the_input(build):
    layer, x = build(), torch.randn(2, 4, 3, 3)
    y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16().float()).bfloat16())  # rounded once
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32  # as BatchNorm
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert build(dtype=torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("build", [affine, centre])
def test_channels_last_stays(build):
    x = torch.randn(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    assert build()(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("build", "text"), [(affine, "ChannelAffine(4, axes=2)"), (centre, "ChannelCentre(4, axes=2, momentum=0.1)")]
)
def test_copies_pickles_and_state_dicts(build, text):
    layer, x = build(), torch.randn(2, 4, 3, 3)
    layer(x)
    layer.eval()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), build().eval()):
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other(x), layer(x))
        assert [name for name, _ in other.named_parameters()] == ["bias"]
    assert str(layer) == text
    expected = copy.deepcopy(layer).train()
    compiled = torch.compile(layer.train(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected(x))
    assert all(map(torch.equal, layer.buffers(), expected.buffers()))


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 7), (5, 4, 7, 6), (2, 4, 3, 3, 3), (1, 4)])
def test_centring_in_training(shape):
    layer, x = centre(axes=len(shape) - 2, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    means = [x[:, c].sum() / x[:, c].numel() for c in range(4)]
    expected = torch.stack([x[:, c] - means[c] + layer.bias[c] for c in range(4)], 1)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, torch.stack(means), rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(layer, x.requires_grad_())


@pytest.mark.parametrize("momentum", [0.4, None])
def test_the_running_mean_averages_until_it_moves(momentum):
    layer, batches = ChannelCentre(2, momentum=momentum), torch.randn(4, 3, 2, 5, 5)
    running = torch.zeros(2)
    for number, batch in enumerate(batches, 1):
        layer(batch)
        rate = max(momentum or 0, 1 / number)
        running = (1 - rate) * running + rate * batch.mean((0, 2, 3))
        torch.testing.assert_close(layer.running_mean, running)
    layer.eval()
    torch.testing.assert_close(layer(batches[0]), batches[0] - running.view(2, 1, 1) + layer.bias.view(2, 1, 1))
    torch.testing.assert_close(layer.running_mean, running)
    layer.reset_running_stats()
    assert torch.equal(layer(batches[0]), batches[0])


def test_nothing_ruins_the_running_mean():
    layer, good = ChannelCentre(4), torch.rand(4, 4, 8, 8)
    bad = good.clone()
    bad[0] = torch.inf
    layer(bad)
    assert torch.equal(layer.running_mean, torch.zeros(4))
    layer(good)
    before = layer.running_mean.clone()
    layer(bad)
    assert layer(good[:0].requires_grad_()).shape == (0, 4, 8, 8)
    layer(good[:0]).sum().backward()
    assert layer.bias.grad.tolist() == [0, 0, 0, 0]
    assert torch.equal(layer.running_mean, before)
    assert layer.num_batches_tracked == 1
    checkpoint(layer, good.requires_grad_(), use_reentrant=False).sum().backward()
    assert layer.num_batches_tracked == 2


def test_frozen_and_renewed_statistics():
    model, x = nn.Sequential(BalNormConv2d(4, 4, 1), centre()), torch.rand(6, 4, 3, 3)
    update_stats([x[:1], x[1:]], model)
    torch.testing.assert_close(model[1].running_mean, model[0].train()(x).mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    assert (model[1].num_batches_tracked, model[1].momentum) == (2, 0.1)
    expected = freeze_stats(model).eval()(x)
    assert torch.equal(model.train()(x), expected)
    assert model[1].num_batches_tracked == 2
    assert "stats_frozen=True" in str(model[1])
    assert not torch.equal(unfreeze_stats(model)(x), expected)


def test_centring_never_waits_for_the_device():
    """There are no values on the meta device: asking for one is an error."""
    layer, x = ChannelCentre(4, device="meta"), torch.empty(2, 4, 5, 5, device="meta")
    layer(x.requires_grad_()).sum().backward()
    assert layer.eval()(x).device == x.device


def test_the_options_of_centring_are_checked():
    with pytest.raises(ValueError, match=r"between 0 and 1, got 2"):
        ChannelCentre(4, momentum=2)
    with pytest.raises(ValueError, match=r"process_group needs sync_stats=True"):
        ChannelCentre(4, process_group=object())


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
    "centring before a convolution": (lambda: [centre(), nn.Conv2d(4, 6, 3)], [nn.Identity, nn.Conv2d]),
    "centring after one": (
        lambda: [nn.Conv2d(4, 4, 3, padding=1, bias=False), centre(), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)],
        [nn.Conv2d, nn.Identity, nn.ReLU, nn.Conv2d],
    ),
    "centring after a balanced one": (
        lambda: [BalNormConv2d(4, 4, 3, padding=1), centre(), nn.ReLU(), BalNormConv2d(4, 4, 3, padding=1)],
        [nn.Conv2d, nn.Identity, nn.ReLU, nn.Conv2d],
    ),
    "centring after a transposed one": (
        lambda: [nn.ConvTranspose2d(4, 4, 3), centre(), nn.ReLU()],
        [nn.ConvTranspose2d, nn.Identity, nn.ReLU],
    ),
    "centring after a linear layer": (
        lambda: [nn.Flatten(), nn.Linear(196, 4), centre(axes=0)],
        [nn.Flatten, nn.Linear, nn.Identity],
    ),
    "centring over another axis": (lambda: [nn.Linear(7, 7), centre()], [nn.Linear, nn.Conv2d]),
    "centring after an activation": (lambda: [nn.ReLU(), centre()], [nn.ReLU, nn.Conv2d]),
    "centring before a factor": (
        lambda: [nn.Conv2d(4, 4, 1), centre(), affine(), nn.Conv2d(4, 4, 1)],
        [nn.Conv2d, nn.Identity, nn.Identity, nn.Conv2d],
    ),
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


@pytest.mark.parametrize("build", [affine, centre])
@pytest.mark.parametrize("traceable", [True, False])
def test_what_something_else_reads_is_not_merged(build, traceable):
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.affine, self.conv = build(), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.affine(x)
            if not traceable and y.sum() > 1e9:
                return y
            return self.conv(y) + y if traceable else self.conv(y)

    model, x = Forked().eval(), torch.randn(2, 4, 5, 5)
    folded = fold(model)
    assert type(folded.affine) is nn.Conv2d
    torch.testing.assert_close(folded(x), model(x))


@pytest.mark.parametrize("read", ["by another module", "by a hook", "twice"])
def test_the_layer_before_keeps_its_output_where_something_reads_it(read):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.centre = nn.Conv2d(4, 4, 3, padding=1), centre()

        def forward(self, x):
            y = self.conv(x)
            if read == "twice":
                return self.centre(self.conv(y))
            return self.centre(y).relu() + (y if read == "by another module" else x)

    model, x = Residual(), torch.randn(2, 4, 5, 5)
    model(x)
    if read == "by a hook":
        model.conv.register_forward_hook(lambda *_: None)
    folded = fold(model.eval())
    assert type(folded.centre) is nn.Conv2d
    torch.testing.assert_close(folded(x), model(x))
