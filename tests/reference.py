"""The equations, slowly: float64, plain loops over channels and taps, nothing taken from the package.

`paper_weight` is the paper's "Full case" and "Single pass formulation" to the letter (with n+ a count of positive
weights: the s_d in its definition is a misprint), for inputs that are not negative. `general_weight` is the general
form of docs/method.md. All of it is made of differentiable torch scalars, so that training steps can be compared too.
"""

from __future__ import annotations

import itertools
import math

import torch


def output_size(size, kernel, stride, padding, dilation, transposed=False, output_padding=None):
    """Output size of each axis; padding is (before, after) for each."""
    result = []
    for a in range(len(size)):
        if transposed:
            result.append(
                (size[a] - 1) * stride[a] - sum(padding[a]) + dilation[a] * (kernel[a] - 1) + output_padding[a] + 1
            )
        else:
            # count the positions at which the dilated kernel fits into the padded input
            fits = [
                o
                for o in range(0, size[a] + sum(padding[a]), stride[a])
                if o + dilation[a] * (kernel[a] - 1) < size[a] + sum(padding[a])
            ]
            result.append(len(fits))
    return result


def pad(x, padding, mode):
    """Pad each spatial axis by (before, after), element by element."""
    for axis, (before, after) in enumerate(padding, start=2):
        n = x.shape[axis]
        slices = []
        for i in range(-before, n + after):
            if 0 <= i < n:
                slices.append(x.select(axis, i))
            elif mode == "zeros":
                slices.append(torch.zeros_like(x.select(axis, 0)))
            elif mode == "circular":
                slices.append(x.select(axis, i % n))
            elif mode == "replicate":
                slices.append(x.select(axis, min(max(i, 0), n - 1)))
            elif mode == "reflect":
                slices.append(x.select(axis, -i if i < 0 else 2 * (n - 1) - i))
        x = torch.stack(slices, axis)
    return x


def meetings(x, kernel, stride, padding, dilation, mode="zeros", transposed=False, output_padding=None):
    """For each tap: the inputs that it multiplies, laid out as the output (N, C, *out), zeros where it meets none."""
    size = x.shape[2:]
    out = output_size(size, kernel, stride, padding, dilation, transposed, output_padding)
    if not transposed:
        x = pad(x, padding, mode)
    met = {}
    for tap in itertools.product(*(range(k) for k in kernel)):
        view = x
        for a in range(len(size)):
            axis = a + 2
            if transposed:
                rows = []
                for o in range(out[a]):
                    i, rest = divmod(o + padding[a][0] - tap[a] * dilation[a], stride[a])
                    inside = rest == 0 and 0 <= i < size[a]
                    rows.append(view.select(axis, i) if inside else torch.zeros_like(view.select(axis, 0)))
                view = torch.stack(rows, axis)
            else:
                view = torch.stack(
                    [view.select(axis, o * stride[a] + tap[a] * dilation[a]) for o in range(out[a])], axis
                )
        met[tap] = view
    return met, out


def paper_weight(w, v, r, one_pass):
    """The paper's updates for w (D, C, *kernel), v a list of the C input sums."""
    outputs, inputs = w.shape[:2]
    taps = list(itertools.product(*(range(k) for k in w.shape[2:])))
    rows = []
    for d in range(outputs):
        v_sum = sum(v)
        b = -sum(v[c] * sum(w[(d, c, *t)] for t in taps) for c in range(inputs)) / (len(taps) * v_sum)
        if one_pass:
            w_plus = [sum(w[(d, c, *t)] for t in taps if w[(d, c, *t)] > 0) for c in range(inputs)]
            n_plus = [sum(1 for t in taps if w[(d, c, *t)] > 0) for c in range(inputs)]
            s = r / sum(v[c] * (w_plus[c] + b * n_plus[c]) for c in range(inputs))
        else:
            w_plus = [sum(w[(d, c, *t)] + b for t in taps if w[(d, c, *t)] + b > 0) for c in range(inputs)]
            s = r / sum(v[c] * w_plus[c] for c in range(inputs))
        rows.append(torch.stack([torch.stack([s * (w[(d, c, *t)] + b) for t in taps]) for c in range(inputs)]))
    return torch.stack(rows).reshape(w.shape)


def general_weight(w, a, divisor, one_pass, shift):
    """v / M for w (D, C, *kernel), a[c, *tap] the mass that a weight meets, and the divisor M of the group."""
    outputs, inputs = w.shape[:2]
    taps = list(itertools.product(*(range(k) for k in w.shape[2:])))
    where = [(c, *t) for c in range(inputs) for t in taps]
    total = sum(a[i] for i in where)
    rows = []
    for d in range(outputs):
        weights = {i: w[(d, *i)] for i in where}
        if shift:
            mean = sum(a[i] / total * weights[i] for i in where)
            shifted = {i: weights[i] - mean for i in where}
            positive = [i for i in where if (weights[i] if one_pass else shifted[i]) > 0]
            contribution = sum(a[i] / total * shifted[i] for i in positive)
        else:
            shifted = weights
            contribution = sum(a[i] / total * weights[i].abs() for i in where) / 2
        rows.append(torch.stack([shifted[i] / contribution / divisor for i in where]))
    return torch.stack(rows).reshape(w.shape)


def magnitude(x):
    """|x|, with the derivative 1 at 0."""
    return torch.where(x < 0, -x, x)


def balanced_conv(
    x,
    w,
    bias=None,
    gain=None,
    *,
    stride,
    padding,
    dilation,
    groups=1,
    mode="zeros",
    transposed=False,
    output_padding=None,
    mass="channel",
    one_pass=True,
    fraction=1.0,
    shift=True,
    centred=False,
    equalise=False,
    paper=False,
):
    """Output, effective weight, mean and mass of a balanced convolution. Geometry as one number (or pair) an axis.

    x is (N, C, *in), w is (D, C / groups, *kernel), or (C, D / groups, *kernel) if transposed. Under a kernel that is
    larger than the zero-padded image (of a transposed convolution: the output), every tap has the mass of its channel.
    With `paper` the weight is that of the paper's own equations, and nothing is subtracted from the output. With
    `equalise` the layer sees each input times q, which evens out the masses.
    """
    kernel = w.shape[2:]
    taps = list(itertools.product(*(range(k) for k in kernel)))
    met, out = meetings(x, kernel, stride, padding, dilation, mode, transposed, output_padding)
    counted = x[: max(1, math.floor(fraction * x.shape[0] + 0.5))]  # to the nearest number of samples, halves up
    elements = counted.shape[0] * math.prod(out)
    image = out if transposed else x.shape[2:]
    too_large = mode == "zeros" and any(image[a] < dilation[a] * (kernel[a] - 1) + 1 for a in range(len(kernel)))
    by_channel = mass == "channel" or too_large
    r = elements * (1 if transposed else math.prod(stride))

    sized = []
    for c in range(x.shape[1]):
        centre = counted[:, c].sum() / counted[:, c].numel() if centred else 0
        sized.append(magnitude(counted[:, c] - centre))
    sized = torch.stack(sized, 1)

    def per_output(values):
        """What each tap of each channel meets per output element."""
        if by_channel:
            return {(c, *t): values[:, c].sum() / r for c in range(x.shape[1]) for t in taps}
        met_values, _ = meetings(values, kernel, stride, padding, dilation, mode, transposed, output_padding)
        return {(c, *t): met_values[t][:, c].sum() / elements for c in range(x.shape[1]) for t in taps}

    mu, a = per_output(counted), per_output(sized)
    q = dict.fromkeys(a, 1.0)
    if equalise:
        for t in taps:
            mean = sum(a[(c, *t)] for c in range(x.shape[1])) / x.shape[1]
            for c in range(x.shape[1]):
                q[(c, *t)] = mean / torch.maximum(a[(c, *t)], 0.1 * mean)
    in_per_group = x.shape[1] // groups
    outputs = w.shape[1] * groups if transposed else w.shape[0]
    out_per_group = outputs // groups
    channels = [range(g * in_per_group, (g + 1) * in_per_group) for g in range(groups)]
    totals = [sum(a[(c, *t)] * q[(c, *t)] for c in cs for t in taps) for cs in channels]
    planes, weights = [], []
    for g, cs in enumerate(channels):
        if transposed:
            w_group = w[g * in_per_group : (g + 1) * in_per_group].transpose(0, 1)
        else:
            w_group = w[g * out_per_group : (g + 1) * out_per_group]
        if paper and by_channel:
            effective = paper_weight(w_group, [counted[:, c].sum() for c in cs], r, one_pass)
        else:
            floor = sum(totals) / groups / 1000
            divisor = floor if floor > totals[g] else totals[g]
            masses = {(i, *t): a[(c, *t)] * q[(c, *t)] for i, c in enumerate(cs) for t in taps}
            effective = general_weight(w_group, masses, divisor, one_pass, shift)
            if equalise:
                factors = torch.stack([q[(c, *t)] for c in cs for t in taps]).reshape(effective.shape[1:])
                effective = effective * factors
        if gain is not None:
            g_gain = gain[g * out_per_group : (g + 1) * out_per_group]
            effective = torch.stack([g_gain[d] * effective[d] for d in range(out_per_group)])
        for d in range(out_per_group):
            plane = sum(effective[(d, i, *t)] * met[t][:, c] for i, c in enumerate(cs) for t in taps)
            if not paper:
                plane = plane - sum(effective[(d, i, *t)] * mu[(c, *t)] for i, c in enumerate(cs) for t in taps)
            planes.append(plane if bias is None else plane + bias[g * out_per_group + d])
        weights.append(effective.transpose(0, 1) if transposed else effective)
    shape = (1, x.shape[1], *(kernel if mass == "position" else (1,) * len(kernel)))
    kept = taps if mass == "position" else taps[:1]
    statistics = [
        torch.stack([values[(c, *t)] for c in range(x.shape[1]) for t in kept]).reshape(shape) for values in (mu, a)
    ]
    return torch.stack(planes, 1), torch.cat(weights), *statistics


def balanced_linear(x, w, bias=None, gain=None, **options):
    """A balanced linear layer: a convolution with one tap on one pixel."""
    geometry = {"stride": [1], "padding": [(0, 0)], "dilation": [1]}
    results = balanced_conv(x[..., None], w[..., None], bias, gain, **geometry, **options)
    return tuple(result[..., 0] for result in results)


def running_average(values, momentum):
    """The moving average of a list of values: (1 - r) * running + r * value, r = max(momentum, 1 / n)."""
    running = torch.zeros_like(values[0])
    for n, value in enumerate(values, start=1):
        rate = 1 / n if momentum is None else max(momentum, 1 / n)
        running = (1 - rate) * running + rate * value
    return running
