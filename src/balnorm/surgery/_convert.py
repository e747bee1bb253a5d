"""Replace convolutions and their BatchNorms by balanced convolutions."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from balnorm._core.geometry import by_output
from balnorm._checks import BalNormWarning, is_readable
from balnorm.layers import BALANCED, BalNormConv2d, BalNormLayer
from balnorm.surgery._attribution import attribute, is_batch_norm, is_norm_act, torch_class
from balnorm.surgery._decisions import Action, Balanced, Because, Decision, Kept, Place, Reason, Removed, explain
from balnorm.surgery._flow import data_flow
from balnorm.surgery._model import ModelT, refuse_wrapped, replace_modules
from balnorm.text_table import text_table

__all__ = ["ConversionReport", "convert"]


class ConversionRow(NamedTuple):
    """What became of one layer or norm."""

    layer: str
    kind: str
    action: Action
    why: str
    is_norm: bool
    matched: str = ""
    """What ``calibrate`` matched: ``outputs`` (by least squares), ``mean and deviation`` of each channel (of layers
    whose weight it does not change), ``deviation`` (without a bias), or ``nothing``, where no sample came by."""


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did with every convolution and BatchNorm, and why. Prints as a table."""

    rows: tuple[ConversionRow, ...]

    @property
    def balanced(self) -> list[str]:
        """Names of the layers that became balanced layers."""
        return [row.layer for row in self.rows if row.action == "balanced"]

    @property
    def removed(self) -> list[str]:
        """Names of the BatchNorms that were removed."""
        return [row.layer for row in self.rows if row.action == "removed"]

    @property
    def kept(self) -> list[str]:
        """Names of the layers and BatchNorms that stay."""
        return [row.layer for row in self.rows if row.action == "kept"]

    def __str__(self) -> str:
        norms = sum(row.is_norm for row in self.rows)
        headings, rows = ["layer", "kind", "action", "why"], [list(row[:4]) for row in self.rows]
        if any(row.matched for row in self.rows):
            headings.append("matched")
            rows = [[*cells, row.matched] for cells, row in zip(rows, self.rows, strict=True)]
        return (
            text_table(headings, rows)
            + f"\n\n{len(self.balanced)} of {len(self.rows) - norms} layers balanced, "
            + f"{len(self.removed)} of {norms} BatchNorms removed"
        )


def convert(
    model: ModelT,
    *,
    example_input: Tensor | list[Any] | tuple[Any, ...] | None = None,
    skip: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    strict: bool = False,
    dry_run: bool = False,
    **options: Any,
) -> tuple[ModelT, ConversionReport]:
    """Replace every convolution and its BatchNorm by a balanced convolution, in place.

    A BatchNorm belongs to the layer that it follows *in the data flow*: the layer's output goes to it and nowhere else.
    In a pre-activation network, where a norm follows a sum, it belongs to the convolutions that it feeds. The norm
    becomes an :class:`~torch.nn.Identity`, or the activation and dropout of timm's ``BatchNormAct2d``. Linear layers
    with a BatchNorm are converted too, if you give an ``example_input``. Anything else stays, and the report says why.

    A balanced layer keeps the weight, as the same parameter object, and takes over the scale (as its gain), shift,
    momentum and synchronisation of the norm that followed. It does not compute what the pair computed. For a trained
    network, use ``calibrate``: it takes the statistics, and gives each layer the balanced weight, gain and bias whose
    outputs are nearest to what they were. Most of the accuracy remains, and training recovers more. Layers whose input
    can be negative, according to the data flow, get ``signed_input=True``. Convert first; then create the optimiser,
    wrap the model in DDP and compile it.

    Args:
        model: any module. It is changed in place (unless ``dry_run``) and returned.
        example_input: what to run the model on: its argument (a tensor or a list), or a tuple of several arguments.
            It is needed for linear layers, and if the model cannot be traced symbolically. Layers that get the model's
            input count as signed unless an example without negative values shows otherwise.
        skip: names of modules to leave alone, with everything inside them; ``*`` and ``?`` work as in file names.
        include: names, in the same form, of layers to balance even without a BatchNorm, such as the transposed
            convolutions of a U-Net.
        calibrate: unlabelled data of the kind that a trained ``model`` was trained on: a batch, or a loader whose
            batches are taken together (a few hundred samples are enough). Where a norm follows its layer, the
            balanced layer is fitted to the norm's output; elsewhere, as in pre-activation networks, to the layer's own
            output, and the norm's shift moves into the layers before it. Transposed and 3d convolutions keep their
            weight: their channels get the mean and standard deviation that they had.
        strict: raise a ValueError, and change nothing, if a BatchNorm would stay (other than by ``skip``), or if there
            is nothing to balance. Without it, the latter is a warning.
        dry_run: only report.
        **options: for every balanced layer, e.g. ``mass="position"`` or ``one_pass=False``; they override those taken
            from the norm. See :class:`~balnorm.BalNormConv2d`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
        >>> model, report = convert(model, example_input=torch.rand(1, 3, 8, 8))
        >>> print(report)
        layer  kind         action    why
        -----  -----------  --------  --------------------------------
        0      Conv2d       balanced  1 follows it
        1      BatchNorm2d  removed   follows 0
        3      Conv2d       kept      no BatchNorm follows or feeds it
        <BLANKLINE>
        1 of 2 layers balanced, 1 of 1 BatchNorms removed
    """
    refuse_wrapped(model, "convert")
    BalNormConv2d(2, 2, 1, device="meta", **options)  # a bad option fails here, before anything is done
    flow = data_flow(model, example_input)
    decisions = attribute(model, flow, skip, include)
    names = {module: name for name, module in model.named_modules()}
    left = [
        f"{names[module]}: {explain(decision, names)}"
        for module, decision in decisions.items()
        if is_batch_norm(module) and isinstance(decision, Kept) and not decision.depends_on(Reason.SKIPPED)
    ]
    if strict and left:
        raise ValueError(f"strict=True, and these norms would stay: {'; '.join(left)}")
    if nothing := _why_nothing(decisions, left):
        message = f"convert balances nothing in this {type(model).__name__}: {nothing}"
        if strict:
            raise ValueError(f"strict=True, and {message}")
        warnings.warn(message, stacklevel=2)
    matched: dict[nn.Module, str] = {}
    if not dry_run:
        new = dict[nn.Module, nn.Module]()
        for module, decision in decisions.items():
            if isinstance(decision, Balanced):
                new[module] = _balanced_layer(module, decision, options)
            elif isinstance(decision, Removed):
                new[module] = _without_norm(module)
        # Up to here nothing has changed the model, so a mistake in the arguments leaves it as it was.
        _let_activations_copy(decisions)
        replace_modules(model, new)
        if dead := [text for module, layer in new.items() if (text := _of_one_sign(names[module], layer))]:
            message = f"kernels whose weights all have one sign stay constant in one pass: {'; '.join(dead)}"
            warnings.warn(f"{message}. Give convert one_pass=False", BalNormWarning, stacklevel=2)
    return _Conversion((model, _report(decisions, names, matched)))


def _of_one_sign(name: str, layer: nn.Module) -> str | None:
    """How many kernels of a layer one pass cannot balance, if they are more than chance would give."""
    if not isinstance(layer, BalNormLayer) or not layer.one_pass or not is_readable(layer.weight):
        return None
    positive = by_output(layer.weight.detach() > 0, layer.groups, layer.transposed).flatten(2)
    dead = (positive.all(2) | ~positive.any(2)).flatten()
    chance = 2 ** (1 - positive.shape[2])
    return f"{int(dead.sum())} of {len(dead)} in {name}" if dead.float().mean() > 0.05 + 2 * chance else None


class _Conversion(tuple[Any, Any]):
    """A model and a report; an error explains this to anyone who uses the pair as the model."""

    __slots__ = ()
    _message = "convert returns two things: write model, report = convert(model)"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._message)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"there is no {name} here: {self._message}")


def _why_nothing(decisions: Mapping[nn.Module, Decision], left: Sequence[str]) -> str | None:
    """Why there is nothing to balance, unless the caller asked for that or the model is balanced already."""
    if any(isinstance(it, BalNormLayer) or isinstance(decision, Balanced) for it, decision in decisions.items()):
        return None
    if left:
        return f"no layer can do the work of its BatchNorms ({left[0]}{'; ...' if len(left) > 1 else ''})"
    if any(is_batch_norm(module) for module in decisions):
        return None
    return "it has no BatchNorm, and include=... names no layer to balance without one"


def _report(
    decisions: Mapping[nn.Module, Decision], names: Mapping[nn.Module, str], matched: Mapping[nn.Module, str]
) -> ConversionReport:
    no_norm = Kept((Because(Reason.NO_NORM),))  # which goes without saying of a linear layer
    rows = [
        ConversionRow(
            names[it],
            type(it).__name__,
            decision.action,
            explain(decision, names),
            is_batch_norm(it),
            matched.get(it, "nothing") if matched and isinstance(decision, Balanced) else "",
        )
        for it, decision in decisions.items()
        if not (isinstance(it, nn.Linear) and decision == no_norm)
    ]
    return ConversionReport(tuple(rows))


def _balanced_layer(layer: nn.Module, decision: Balanced, options: dict[str, Any]) -> nn.Module:
    norm, follows = decision.norm, decision.place is Place.FOLLOWS
    taken_over: dict[str, Any] = {"centred": decision.signed}
    if isinstance(norm, _BatchNorm):
        taken_over |= {
            "momentum": norm.momentum,
            "track_running_stats": norm.track_running_stats,
            "affine": norm.affine or not follows,
        }
    if isinstance(norm, nn.SyncBatchNorm) and options.get("sync_stats", True):
        taken_over |= {"sync_stats": True, "process_group": norm.process_group}
    kind = BALANCED[torch_class(layer)]  # type: ignore[index]  # only layers that have one are balanced
    if isinstance(layer, nn.Linear):
        options = {name: value for name, value in options.items() if name != "mass"}
    plain = copy.copy(layer)  # which shares all tensors
    plain.__class__ = kind.plain  # the layer may be of a subclass that changes nothing
    balanced = kind._from_plain(plain, {**taken_over, **options})
    balanced.weight = layer.get_parameter("weight")  # the same object: parameters that are shared stay shared
    if isinstance(norm, _BatchNorm) and follows:
        # What the layer's own bias added, the norm took away again.
        balanced.bias = None
        if norm.affine:
            if norm.bias is not None:
                balanced.bias = nn.Parameter(norm.bias.detach().to(balanced.gain).clone(), norm.bias.requires_grad)
            with torch.no_grad():
                balanced.gain.copy_(norm.weight)
            balanced.gain.requires_grad_(isinstance(balanced.gain, nn.Parameter) and norm.weight.requires_grad)
    return balanced


def _without_norm(norm: nn.Module) -> nn.Module:
    if not is_norm_act(norm):
        return nn.Identity().train(norm.training)
    return nn.Sequential(_beside_the_norm(norm)).train(norm.training)


def _beside_the_norm(norm: nn.Module) -> OrderedDict[str, nn.Module]:
    """What else a norm of timm's does: dropout and activation."""
    return OrderedDict((name, getattr(norm, name)) for name in ("drop", "act") if hasattr(norm, name))


def _let_activations_copy(decisions: Mapping[nn.Module, Decision]) -> None:
    """Behind a norm that goes, an activation in place would change what the norm was given, which others may need."""
    for norm, decision in decisions.items():
        if isinstance(decision, Removed) and decision.place is Place.FEEDS:
            inside = _beside_the_norm(norm).values() if is_norm_act(norm) else ()
            for activation in (*decision.in_place, *inside):
                if hasattr(activation, "inplace"):
                    activation.inplace = False
