"""What is kept for the backward pass. Speed is measured in benchmarks/, never asserted here; bytes can be counted."""

import pytest
import torch
from torch import nn

from balnorm import BalNormConv2d
from balnorm.bench.profiling import saved_bytes
from cases import MASS_AND_PASS

pytestmark = pytest.mark.usefixtures("backend")


def network(conv, norm):
    layers = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32), (32, 64)):
        layers += [conv(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


@pytest.mark.parametrize(("mass", "one_pass"), MASS_AND_PASS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_balanced_network_keeps_what_an_unnormalised_one_keeps(mass, one_pass, layout):
    x = torch.rand(8, 3, 16, 16).contiguous(memory_format=layout)
    plain = network(nn.Conv2d, lambda _: nn.Identity())
    batchnorm = network(lambda *a, **k: nn.Conv2d(*a, **k, bias=False), nn.BatchNorm2d)
    balanced = network(lambda *a, **k: BalNormConv2d(*a, **k, mass=mass, one_pass=one_pass), lambda _: nn.Identity())
    sizes = [saved_bytes(model.to(memory_format=layout), x) for model in (plain, batchnorm, balanced)]
    assert sizes[2] <= 1.02 * sizes[0]
    assert sizes[2] <= 0.55 * sizes[1]


def test_nothing_as_large_as_the_weight_is_saved_bytes():
    layer = BalNormConv2d(64, 64, 3, padding=1)
    x = torch.rand(1, 64, 4, 4)
    assert saved_bytes(layer, x) < layer.weight.nbytes / 16


def test_frozen_statistics_keep_no_more():
    layer = BalNormConv2d(64, 64, 3, padding=1).eval()
    assert saved_bytes(layer, torch.rand(1, 64, 4, 4)) < layer.weight.nbytes / 16
