"""Mixup and manifold mixup: mixing at a point equals mixing there by hand."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

from balnorm.bench.data import Blend, Mixup, soft_cross_entropy
from balnorm.bench.models import create_model


@pytest.fixture
def model():
    return create_model("wide_resnet", "groupnorm", depth=8, width=8)


def by_hand(model, x, blend):
    """The forward pass of the wide ResNet, with the mixing written into it."""
    x = blend.mix(x) if blend.point == "input" else x
    x = model.stage1(model.stem(x))
    x = blend.mix(x) if blend.point == "stage1" else x
    x = model.stage2(x)
    x = blend.mix(x) if blend.point == "stage2" else x
    return model.head(F.relu(model.norm(model.stage3(x))).mean((2, 3)))


@pytest.mark.parametrize("point", ["input", "stage1", "stage2"])
def test_mixing_at_a_point_is_mixing_there_by_hand(model, point):
    x = torch.rand(6, 3, 8, 8, requires_grad=True)
    blend = Blend(torch.tensor(0.3), torch.tensor([3, 1, 5, 0, 2, 4]), point)
    expected = by_hand(model, x, blend)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    plain = model(x)
    mixup = Mixup(model, 6.0, model.mix_points)
    assert torch.equal(model(x), plain)
    with mixup.active(blend):
        mixed = model(x)
    assert torch.equal(model(x), plain)
    assert torch.allclose(mixed, expected, atol=1e-6)
    (grad,) = torch.autograd.grad(mixed.square().sum(), x)
    assert torch.allclose(grad, expected_grad, atol=1e-6)
    assert not torch.allclose(mixed, plain)
    mixup.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_targets_are_mixed_like_the_images():
    blend = Blend(torch.tensor(0.25), torch.tensor([1, 2, 0]), "input")
    targets = blend.targets(torch.tensor([0, 1, 1]), 3)
    assert torch.allclose(targets, torch.tensor([[0.25, 0.75, 0.0], [0.0, 1.0, 0.0], [0.75, 0.25, 0.0]]))


def test_draws_come_from_the_generator_alone(model):
    mixup = Mixup(model, 6.0, model.mix_points)
    state = torch.get_rng_state()
    first, second = (mixup.draw(32, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.share, second.share)
    assert torch.equal(first.partner, second.partner)
    assert first.point == second.point


@pytest.mark.parametrize("alpha", [0.2, 1.0, 6.0])
def test_shares_are_beta_and_points_equally_likely(model, alpha):
    mixup, source = Mixup(model, alpha, model.mix_points), torch.Generator().manual_seed(0)
    draws = [mixup.draw(4, source) for _ in range(3000)]
    shares = torch.stack([draw.share for draw in draws])
    assert ((shares >= 0) & (shares <= 1)).all()
    assert shares.mean().item() == pytest.approx(0.5, abs=0.02)
    assert shares.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)
    for point in model.mix_points:
        assert sum(draw.point == point for draw in draws) == pytest.approx(1000, abs=100)
    assert sorted(draws[0].partner.tolist()) == [0, 1, 2, 3]


def test_a_compiled_model_mixes(model):
    mixup = Mixup(model, 6.0, model.mix_points)
    compiled = torch.compile(model, backend="eager")
    x = torch.rand(4, 3, 8, 8)
    plain = compiled(x)
    for point in model.mix_points:
        for share in (0.2, 0.7):
            blend = Blend(torch.tensor(share), torch.tensor([1, 0, 3, 2]), point)
            with mixup.active(blend):
                mixed = compiled(x)
                assert torch.allclose(mixed, model(x), atol=1e-6)
            assert not torch.allclose(mixed, plain, atol=1e-3)
    assert torch.equal(compiled(x), plain)


def test_copies_pickles_and_keywords(model):
    """A copy was mixed at some points and not at others, and a model with hooks could not be saved."""
    mixup = Mixup(model, 6.0, model.mix_points)
    x, copied = torch.rand(4, 3, 8, 8), copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    for point in model.mix_points:
        with mixup.active(Blend(torch.tensor(0.3), torch.tensor([1, 0, 3, 2]), point)):
            mixed = model(x)
            assert torch.equal(copied(x), mixed)
            assert torch.equal(model(x=x), mixed)


def test_losses():
    scores, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 0])
    one_hot = F.one_hot(labels, 4).float()
    assert torch.allclose(soft_cross_entropy(scores, one_hot), F.cross_entropy(scores, labels))
    targets = 0.3 * one_hot + 0.7 * one_hot.roll(1, 0)
    expected = F.binary_cross_entropy(scores.softmax(1), targets)
    assert torch.allclose(soft_cross_entropy(scores, targets, "bce"), expected, atol=1e-6)
    certain = torch.tensor([[1e4, -1e4]], requires_grad=True)
    loss = soft_cross_entropy(certain, torch.tensor([[0.0, 1.0]]), "bce")
    loss.backward()
    assert loss.isfinite()
    assert certain.grad.isfinite().all()


def test_mistakes_say_what_is_allowed(model):
    with pytest.raises(ValueError, match="alpha must be above 0, got 0"):
        Mixup(model, 0)
    with pytest.raises(ValueError, match="no module 'layer1' to mix after; its own points are input, stage1, stage2"):
        Mixup(model, 1.0, ["layer1"])
    elsewhere = Mixup(model, 1.0).active(Blend(torch.tensor(0.5), torch.tensor([0]), "stage1"))
    with pytest.raises(ValueError, match="this Mixup mixes at input, got 'stage1'"), elsewhere:
        pass
    with pytest.raises(ValueError, match="the loss must be 'cross_entropy' or 'bce', got 'mse'"):
        soft_cross_entropy(torch.zeros(1, 2), torch.zeros(1, 2), "mse")
