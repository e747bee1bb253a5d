"""Balanced initialisation."""

import math

import pytest
import torch
from torch import nn

from balnorm import BalNormConv2d
from balnorm.init import balanced_normal_, unit_variance_scale


@pytest.mark.parametrize(
    ("shape", "groups", "transposed"),
    [
        ((512, 1, 2), 1, False),
        ((512, 2), 1, False),
        ((512, 1, 2, 1), 512, False),
        ((4, 128, 1, 1), 2, True),
        ((2, 512, 1), 1, True),
    ],
)
def test_every_output_kernel_has_both_signs(shape, groups, transposed):
    weight = balanced_normal_(torch.empty(shape), groups, transposed)
    if transposed:
        kernels = weight.view(groups, shape[0] // groups, *shape[1:]).transpose(1, 2).flatten(0, 1).flatten(1)
    else:
        kernels = weight.flatten(1)
    assert (kernels > 0).any(1).all()
    assert (kernels < 0).any(1).all()


def test_a_kernel_of_one_weight_keeps_its_sign():
    weight = balanced_normal_(torch.empty(100, 1, 1, 1))
    assert (weight > 0).any()
    assert (weight < 0).any()


@pytest.mark.parametrize(
    ("shape", "groups", "transposed", "fan_out"),
    [
        ((64, 32, 3, 3), 1, False, 64 * 9),
        ((64, 8, 3, 3), 4, False, 16 * 9),
        ((32, 64, 3, 3), 1, True, 64 * 9),
        ((64, 16, 3, 3), 4, True, 16 * 9),
        ((300, 200), 1, False, 300),
    ],
)
def test_variance_is_two_over_fan_out(shape, groups, transposed, fan_out):
    weight = balanced_normal_(torch.empty(shape), groups, transposed)
    assert weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
    assert weight.mean().item() == pytest.approx(0, abs=0.05 * math.sqrt(2 / fan_out))


def test_a_generator_decides_everything():
    weights = [balanced_normal_(torch.empty(64, 1, 2), generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*weights)


def test_signs_are_as_likely_either_way():
    weight = balanced_normal_(torch.empty(20_000, 2))
    assert (weight[:, 0] > 0).float().mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    assert balanced_normal_(torch.empty(64, 1, 2, dtype=dtype)).dtype == dtype


def test_unit_variance_scale():
    assert unit_variance_scale(2 * math.pi * (math.pi - 1)) == pytest.approx(1.0)
    assert unit_variance_scale(2 * math.pi * 1.6, centred=True) == pytest.approx(1.0)


@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.Softplus()], ids=str)
def test_centred_layers_start_with_unit_variance_whatever_they_are_given(activation):
    layer = BalNormConv2d(64, 64, 3, padding=1, padding_mode="circular", centred=True)  # no border
    y = layer(activation(torch.randn(16, 64, 10, 10)))
    assert 0.75 < y.var((0, 2, 3)).mean() < 1.1
