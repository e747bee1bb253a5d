"""Reports on what each layer of a network does to a batch, as in the paper's figure of balanced contributions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from balnorm._core.geometry import by_output
from balnorm._core.options import Options
from balnorm.layers import BalNormLayer, layer_statistics
from balnorm.surgery._model import in_double_precision, input_of_batch, uncompiled, undisturbed
from balnorm.text_table import text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BalanceReport", "LayerBalance", "balance_report"]


@dataclass(frozen=True)
class LayerBalance:
    """One call of a layer. Tensors have one value for each output channel; a BatchNorm has no weights and no mass."""

    layer: str
    kind: str
    positive: Tensor | None
    """The contribution of the positive weights to an output element, on average over the batch: of ``|x|``, or of
    ``|x - mean|`` in a layer with ``centred=True``."""
    negative: Tensor | None
    """The contribution of the negative weights. If no input is negative and the weights are shifted, the mean output is
    ``positive - negative + bias``."""
    mean: Tensor
    std: Tensor
    """The standard deviation of the output over batch and space, as ``mean`` is its mean."""
    mass: Tensor | None
    """How much input the weights of an output channel meet in all, per output element."""
    gain: Tensor | None
    """The learned factor of a balanced layer or a BatchNorm."""


@dataclass(frozen=True)
class BalanceReport:
    """The layers of a network in the order of their calls. Prints as a table of medians over the output channels.

    Attributes:
        layers: one entry for each call of a convolution, a linear layer or a BatchNorm.
        before: an earlier report of the same network and batch, for comparison.
    """

    layers: tuple[LayerBalance, ...]
    before: BalanceReport | None = None

    def shift(self) -> list[tuple[Tensor, Tensor]]:
        """How far each layer's output moved since ``before``: |change of the mean| / std, and std / std, by channel.

        This is the covariate shift that the next layer sees. It leaves out channels that were constant.
        """
        if self.before is None:
            raise ValueError("nothing to compare with: give balance_report the earlier report, before=...")
        moves = []
        for then, now in zip(self.before.layers, self.layers, strict=True):
            alive = then.std > 0
            moved = (now.mean - then.mean).abs()[alive] / then.std[alive]
            moves.append((moved, now.std[alive] / then.std[alive]))
        return moves

    def __str__(self) -> str:
        header = ["layer", "kind", "positive", "negative", "mean", "std", "mass", "gain"]
        rows = [
            [row.layer, row.kind]
            + [_median(value) for value in (row.positive, row.negative, row.mean, row.std, row.mass, row.gain)]
            for row in self.layers
        ]
        if self.before is not None:
            header += ["mean moved by (std)", "std times"]
            rows = [row + [_median(value) for value in moves] for row, moves in zip(rows, self.shift(), strict=True)]
        return text_table(header, rows)

    def figure(self) -> Figure:
        """The report as a matplotlib figure; save it with ``report.figure().savefig("balance.svg")``."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("the figure needs matplotlib: pip install matplotlib") from error
        panels = 2 if self.before is None else 3
        width = min(24.0, 3.5 + 0.28 * len(self.layers))
        figure = Figure(figsize=(max(7.0, width), 2.4 * panels + 1.2), layout="constrained")
        axes = figure.subplots(panels, 1, sharex=True)
        self._draw_contributions(axes[0])
        self._draw_outputs(axes[1])
        if self.before is not None:
            self._draw_shift(axes[2])
        axes[-1].set_xticks(range(len(self.layers)), [row.layer for row in self.layers], rotation=90, fontsize=8)
        for panel in axes:
            panel.grid(axis="y", color="0.9")
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
        return figure

    def _draw_contributions(self, axes: Axes) -> None:
        sides = [("positive", 1.0, _BLUE), ("negative", -1.0, _ORANGE)]
        for name, sign, colour in sides:
            values = {i: sign * v for i, row in enumerate(self.layers) if (v := getattr(row, name)) is not None}
            axes.bar(
                list(values), [float(v.median()) for v in values.values()], 0.7, color=colour, label=f"{name} weights"
            )
            _whiskers(axes, values, "0.25")
        axes.axhline(0, color="0.3", linewidth=0.8)
        axes.set_ylabel("contribution\nper output")
        axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
        axes.set_title("median and quartiles over the channels", fontsize=9, color="0.4", loc="right")

    def _draw_outputs(self, axes: Axes) -> None:
        means = {i: row.mean for i, row in enumerate(self.layers)}
        spread = [float(row.std.median()) for row in self.layers]
        middle = [float(value.median()) for value in means.values()]
        axes.errorbar(list(means), middle, spread, fmt="o", color=_BLUE, ecolor="0.6", capsize=2, markersize=4)
        axes.set_ylabel("output\nmean ± std")

    def _draw_shift(self, axes: Axes) -> None:
        moved = {i: mean for i, (mean, _) in enumerate(self.shift()) if mean.numel()}
        axes.bar(list(moved), [float(v.median()) for v in moved.values()], 0.7, color=_BLUE)
        _whiskers(axes, moved, "0.25")
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("mean moved by\n(standard deviations)")


def balance_report(
    model: nn.Module, batch: Tensor | Sequence[Any], *, before: BalanceReport | None = None
) -> BalanceReport:
    """Report what every convolution, linear layer and BatchNorm of ``model`` does to a batch.

    The report shows, per output element, what positive and negative weights contribute (in balanced layers the two are
    equal), the mean and standard deviation of the output, the mass of the input, and the gain. The model runs in its
    current mode. Neither its running statistics nor the random state change.

    To see the covariate shift, take a report, make a few steps of the optimiser, and take another one with ``before=``
    the first. It also shows how far each layer's output has moved, for balanced layers and BatchNorms alike.

    Args:
        model: any module.
        batch: its input, or a tuple or list that starts with it.
        before: an earlier report of the same model and batch.

    Example:
        >>> from balnorm import BalNormConv2d
        >>> model = nn.Sequential(BalNormConv2d(3, 8, 3, padding=1, mass="position", one_pass=False, output_scale=1.0))
        >>> print(balance_report(model, torch.ones(4, 3, 8, 8)))  # doctest: +ELLIPSIS
        layer  kind           positive  negative  mean   std  mass  gain
        -----  -------------  --------  --------  ----  ----  ----  ----
        0      BalNormConv2d      1.00      1.00  0.00  ...  22.7  1.00
    """
    model = uncompiled(model)
    names = {module: name for name, module in model.named_modules()}
    rows: list[LayerBalance] = []
    calls: dict[str, int] = defaultdict(int)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        name = names[module]
        calls[name] += 1
        label = name if calls[name] == 1 else f"{name} (call {calls[name]})"
        x = args[0] if args else kwargs["input"]
        rows.append(_measure(label, module, x.detach(), output.detach()))

    x = input_of_batch(batch, model)
    with undisturbed(model), torch.no_grad(), ExitStack() as hooks:
        for module in names:
            if isinstance(module, _ConvNd | nn.Linear | _BatchNorm):
                hooks.enter_context(module.register_forward_hook(note, with_kwargs=True, prepend=True))
        model(x)
    report = BalanceReport(tuple(rows), before)
    if before is not None and [row.layer for row in before.layers] != [row.layer for row in rows]:
        raise ValueError("before= is a report of another model: its layers have other names")
    return report


def _measure(name: str, module: nn.Module, x: Tensor, output: Tensor) -> LayerBalance:
    values = in_double_precision(output.movedim(_channel_axis(module), 0)[:, None].flatten(1))
    kind, mean, std = type(module).__name__, values.mean(1), values.std(1, correction=0)
    if isinstance(module, _BatchNorm):
        gain = module.weight.detach() if module.affine else None
        return LayerBalance(name, kind, None, None, mean, std, None, gain)
    assert isinstance(module, _ConvNd | nn.Linear)
    weight = module.weight
    if isinstance(module, BalNormLayer):
        from_batch = module.running_mass is None or (module.training and not module.stats_frozen)
        weight = module.effective_weight(x, output.shape) if from_batch else module.effective_weight()
    groups, transposed = getattr(module, "groups", 1), getattr(module, "transposed", False)
    centred = isinstance(module, BalNormLayer) and module.options.centred
    options = Options(mass="position", centred=centred)
    _, met = layer_statistics(module, x, output.shape, options=options, exact=True)
    mass = in_double_precision(met)
    m = mass.view(groups, 1, mass.shape[1] // groups, *mass.shape[2:])
    w = by_output(in_double_precision(weight), groups, transposed)
    others = tuple(range(2, w.dim()))
    positive = (m * w.clamp(min=0)).sum(others).flatten()
    negative = (m * -w.clamp(max=0)).sum(others).flatten()
    total = m.expand(-1, w.shape[1], *w.shape[2:]).sum(others).flatten()
    gain = module.gain.detach() if isinstance(module, BalNormLayer) else None
    return LayerBalance(name, kind, positive, negative, mean, std, total, gain)


def _channel_axis(module: nn.Module) -> int:
    """The channel axis of the output, counted from the end for layers that also take single samples."""
    if isinstance(module, _ConvNd):
        return -1 - len(module.kernel_size)
    return -1 if isinstance(module, nn.Linear) else 1


_BLUE, _ORANGE = "#0072B2", "#D55E00"  # from Okabe and Ito's palette, which colour-blind readers can tell apart


def _whiskers(axes: Axes, values: dict[int, Tensor], colour: str) -> None:
    quartiles = [value.double().quantile(value.new_tensor([0.25, 0.75]).double()).tolist() for value in values.values()]
    axes.vlines(list(values), [low for low, _ in quartiles], [high for _, high in quartiles], color=colour, linewidth=1)


def _median(values: Tensor | None) -> str:
    if values is None or not values.numel():
        return ""
    number = float(in_double_precision(values).median())
    if abs(number) < 0.005:
        return "0.00"
    return f"{number:.2f}" if abs(number) < 10 else f"{number:.1f}" if abs(number) < 1000 else f"{number:.3g}"
