"""The paper's sentences, and what follows from them, for whatever hypothesis comes up with."""

import math

import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

import balnorm.functional as BF

seeds = st.integers(0, 2**31 - 1)
magnitudes = st.floats(-6, 6).map(lambda exponent: 10.0**exponent)


@st.composite
def convolutions(draw, cyclic=False):
    """Input, weight and geometry of a random convolution over one to three axes, in float64."""
    axes = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2]))
    inputs, outputs = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    if math.prod(kernel) * inputs // groups < 2:
        kernel = (2, *kernel[1:])  # a single weight cannot balance
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    reach = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    size = tuple(draw(st.integers(n, n + 4)) for n in reach)
    generator = torch.Generator().manual_seed(draw(seeds))
    x = torch.rand(draw(st.integers(1, 4)), inputs, *size, generator=generator, dtype=torch.float64)
    x = x.where(torch.rand(x.shape, generator=generator) > 0.3, 0.0) + 1e-3  # mostly the zeros of a ReLU
    w = torch.randn(outputs, inputs // groups, *kernel, generator=generator, dtype=torch.float64)
    if cyclic:
        geometry = {"padding": "same", "padding_mode": "circular", "dilation": dilation, "groups": groups}
    else:
        geometry = {
            "stride": tuple(draw(st.integers(1, 3)) for _ in range(axes)),
            "padding": tuple(draw(st.integers(0, r - 1)) for r in reach),
            "dilation": dilation,
            "groups": groups,
        }
    return x, w, geometry


def contributions(x, w, geometry, **options):
    """Mean output of each channel, and what positive and negative weights contribute to it, per output element."""
    axes = (0, *range(2, x.dim()))
    mass_arguments = {name: value for name, value in geometry.items() if name != "groups"}
    _, mass = BF.statistics(x, w.shape[2:], mass=options["mass"], **mass_arguments)
    live = (mass.expand(1, -1, *w.shape[2:]) > 0).view(geometry["groups"], -1)
    assume((live.sum(1) > 1).all())  # a single weight that meets any input has to be zero to balance
    effective = BF.balance(w, mass, one_pass=options["one_pass"], groups=geometry["groups"], shift=True)
    y = BF.bal_conv(x, w, **geometry, **options, shift=True)
    torch.testing.assert_close(y, plain_convolution(x, effective, geometry))
    parts = [
        plain_convolution(x, part, geometry).mean(axes) for part in (effective.clamp(min=0), effective.clamp(max=0))
    ]
    return y.mean(axes), *parts


def plain_convolution(x, w, geometry):
    conv = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    geometry = dict(geometry)
    if geometry.pop("padding_mode", "zeros") == "circular":
        missing = [d * (k - 1) for d, k in zip(geometry["dilation"], w.shape[2:], strict=True)]
        x = F.pad(x, [side for n in reversed(missing) for side in (n // 2, n - n // 2)], mode="circular")
        geometry["padding"] = 0
    return conv(x, w, **geometry)


@given(convolutions(cyclic=True), st.sampled_from(BF.MASSES))
def test_cyclic_padding_and_stride_one_balance_exactly(convolution, mass):
    """ "We can constrain the mean of the output to be zero"; "the contribution is of average 1 per output element";
    "this automatically results in the negative weight contribution also being of magnitude r".
    """
    mean, positive, negative = contributions(*convolution, mass=mass, one_pass=False)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-9, rtol=0)
    torch.testing.assert_close(positive, torch.ones_like(positive))
    torch.testing.assert_close(negative, -torch.ones_like(negative))


@given(convolutions())
def test_position_mass_balances_exactly_under_any_geometry(convolution):
    """Without the paper's assumptions 2 (stride one) and 3 (cyclic padding)."""
    mean, positive, negative = contributions(*convolution, mass="position", one_pass=False)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-9, rtol=0)
    torch.testing.assert_close(positive, torch.ones_like(positive))
    torch.testing.assert_close(negative, -torch.ones_like(negative))


@given(convolutions(), st.booleans())
def test_the_mean_output_is_zero_in_one_pass_too(convolution, one_pass):
    mean, _, _ = contributions(*convolution, mass="position", one_pass=one_pass)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-6, rtol=0)


@given(convolutions(), st.sampled_from(BF.MASSES))
def test_the_one_pass_denominator_is_never_negative(convolution, mass):
    """So w'' keeps the direction of w': a larger weight stays the larger one."""
    x, w, geometry = convolution
    mass_arguments = {name: value for name, value in geometry.items() if name != "groups"}
    _, m = BF.statistics(x, w.shape[2:], mass=mass, **mass_arguments)
    effective = BF.balance(w, m, one_pass=True, groups=geometry["groups"]).flatten(1)
    order = w.flatten(1).argsort(1)
    assert (effective.gather(1, order).diff(dim=1) >= -1e-9 * effective.abs().max()).all()


@given(convolutions(), st.sampled_from(BF.MASSES), magnitudes)
def test_the_output_ignores_the_scale_of_the_input(convolution, mass, scale):
    x, w, geometry = convolution
    for one_pass in (True, False):
        y = BF.bal_conv(x, w, **geometry, mass=mass, one_pass=one_pass)
        torch.testing.assert_close(BF.bal_conv(scale * x, w, **geometry, mass=mass, one_pass=one_pass), y)


@given(convolutions(), magnitudes, st.floats(-3, 3))
def test_the_effective_weight_ignores_scale_and_shift_of_the_weight(convolution, scale, shift):
    """Two-pass: both; one-pass: the scale only, as a shift may change signs."""
    x, w, geometry = convolution
    _, m = BF.statistics(x, w.shape[2:], dilation=geometry["dilation"])
    groups = geometry["groups"]
    two_pass = BF.balance(w, m, one_pass=False, groups=groups, shift=True)
    moved = BF.balance(scale * (w + shift), m, one_pass=False, groups=groups, shift=True)
    torch.testing.assert_close(moved, two_pass)
    for shifts in (True, False):
        scaled, plain = (BF.balance(weight, m, groups=groups, shift=shifts) for weight in (scale * w, w))
        torch.testing.assert_close(scaled, plain)


@given(convolutions(), st.sampled_from(BF.MASSES), st.booleans())
def test_a_negative_scale_mirrors_the_weight_in_two_passes(convolution, mass, flip_gain):
    x, w, geometry = convolution
    _, m = BF.statistics(x, w.shape[2:], dilation=geometry["dilation"], mass=mass)
    gain = torch.full((w.shape[0],), -2.0 if flip_gain else 2.0, dtype=torch.float64)
    balanced = BF.balance(w, m, gain, one_pass=False, groups=geometry["groups"])
    mirrored = BF.balance(-w, m, -gain, one_pass=False, groups=geometry["groups"])
    torch.testing.assert_close(mirrored, balanced)


@given(convolutions(), st.booleans(), st.booleans(), st.floats(-100, 100))
def test_the_mean_output_is_the_bias_for_any_input(convolution, shift, centred, level):
    """No input is a trap: the statistics by position take its mean out, whatever it is."""
    x, w, geometry = convolution
    y = BF.bal_conv(x - 0.3 + level, w, **geometry, mass="position", one_pass=False, shift=shift, centred=centred)
    mean = y.mean((0, *range(2, y.dim())))
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-9 * max(1.0, float(y.abs().max())), rtol=0)


@given(convolutions(cyclic=True), st.floats(-100, 100))
def test_a_centred_layer_ignores_the_level_of_its_input(convolution, level):
    x, w, geometry = convolution
    assume((x.std((0, *range(2, x.dim())), correction=0) > 1e-3).all())  # a constant channel has no mass at all
    y, moved = (BF.bal_conv(values, w, **geometry, centred=True) for values in (x, x + level))
    torch.testing.assert_close(moved, y, atol=1e-6, rtol=1e-6)


@given(convolutions(), st.sampled_from(BF.MASSES))
def test_the_mass_is_never_smaller_than_the_mean(convolution, mass):
    x, w, geometry = convolution
    arguments = {name: value for name, value in geometry.items() if name != "groups"}
    mean, a = BF.statistics(x - 0.3, w.shape[2:], mass=mass, **arguments)
    assert (a >= mean.abs() - 1e-12).all()
    mean, a = BF.statistics(x, w.shape[2:], mass=mass, **arguments)
    torch.testing.assert_close(mean, a)


@given(seeds, st.integers(1, 6))
def test_a_moving_average_of_one_batch_is_that_batch(seed, batches):
    mean, mass = torch.rand(2, 1, 3, 1, 1, generator=torch.Generator().manual_seed(seed))
    running_mean, running_mass, counter = torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1), torch.tensor(0)
    for _ in range(batches):
        BF.update_running_stats(running_mean, running_mass, counter, mean, mass, 0.1)
    torch.testing.assert_close((running_mean, running_mass), (mean, mass))
    assert counter == batches
