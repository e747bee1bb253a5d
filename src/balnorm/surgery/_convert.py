"""Replace convolutions and their norms by balanced convolutions."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_map_only

from balnorm._checks import BalNormWarning
from balnorm._core.options import LayerKeywords
from balnorm.activations import lean_activation
from balnorm.channels import ChannelAffine
from balnorm.layers import BALANCED, BalNormConv2d, BalNormLayer
from balnorm.surgery._decisions import (
    Action,
    Affine,
    Balanced,
    Because,
    Decision,
    Kept,
    NormKind,
    Place,
    Reason,
    Removed,
    attribute,
    explain,
    is_norm_act,
    named,
    norm_kind,
    torch_class,
)
from balnorm.surgery._exact import Original, Proof, is_exact
from balnorm.surgery._flow import data_flow
from balnorm.surgery._lean import Lean, lean_activations
from balnorm.surgery._model import ModelT, device_of, refuse_wrapped, replace_modules
from balnorm.text_table import text_table

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ConversionReport", "convert", "with_activation"]


class ConversionRow(NamedTuple):
    """What :func:`convert` did with one layer, norm or activation."""

    layer: str
    kind: str
    action: Action
    why: str
    norm: NormKind | None
    """Which kind of norm it is, if it is one."""

    @property
    def is_norm(self) -> bool:
        return self.norm is not None


_NAMES: dict[NormKind, str] = {"batch": "BatchNorm", "instance": "InstanceNorm", "group": "GroupNorm"}


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did with every convolution and norm, and why. Prints as a table.

    Of the activations it lists those that keep less for the backward pass now.
    """

    rows: tuple[ConversionRow, ...]
    proof: Proof | None = None
    """How far the outputs of a trained network differ from the original's."""
    frozen: bool = False
    """Whether balanced layers have frozen statistics, as those of a trained network do."""
    norms: tuple[NormKind, ...] = ("batch",)
    """The kinds of norms that were to be replaced."""
    inexact: tuple[NormKind, ...] = ()
    """Kinds of norms that were removed although no balanced layer does what they did: normalise every sample alone."""

    @property
    def balanced(self) -> list[str]:
        """Names of the layers that became balanced layers."""
        return [row.layer for row in self.rows if row.action == "balanced"]

    @property
    def removed(self) -> list[str]:
        """Names of the norms that were removed."""
        return [row.layer for row in self.rows if row.action == "removed"]

    @property
    def affine(self) -> list[str]:
        """Names of the norms that became a constant factor and a learned shift."""
        return [row.layer for row in self.rows if row.action == "affine"]

    @property
    def kept(self) -> list[str]:
        """Names of the layers and norms that stay."""
        return [row.layer for row in self.rows if row.action == "kept"]

    @property
    def lean(self) -> list[str]:
        """Names of the activations, and gates, that became those of :mod:`balnorm.activations`."""
        return [row.layer for row in self.rows if row.action == "lean"]

    def __str__(self) -> str:
        norms = {kind: [row for row in self.rows if row.norm == kind] for kind in _NAMES}
        layers = len(self.rows) - sum(map(len, norms.values())) - len(self.lean)
        counts = [
            f"{sum(row.action != 'kept' for row in rows)} of {len(rows)} {_NAMES[kind]}s removed"
            for kind, rows in norms.items()
            if rows
        ]
        offer = _offer([kind for kind, rows in norms.items() if rows], self.norms)
        return (
            text_table(["layer", "kind", "action", "why"], [list(row[:4]) for row in self.rows])
            + f"\n\n{len(self.balanced)} of {layers} layers balanced, {', '.join(counts) or 'no norms'}"
            + (f" ({len(self.affine)} became a ChannelAffine)" if self.affine else "")
            + (f", {len(self.lean)} activations keep less for backward" if self.lean else "")
            + "".join(f"\nnot exact: each {_NAMES[kind]} normalised every sample by itself" for kind in self.inexact)
            + (f"\n{offer}" if offer else "")
            + ("\nstatistics frozen: unfreeze_stats(model) lets them follow the batches" if self.frozen else "")
            + (f"\n{self.proof}" if self.proof else "")
        )


def _offer(present: Iterable[NormKind], kinds: Sequence[NormKind]) -> str:
    """How to replace the norms of other kinds too."""
    others = [kind for kind in present if kind not in kinds]
    names = " and ".join(f"{_NAMES[kind]}s" for kind in others)
    return f"norms={(*kinds, *others)} replaces the {names} too, to train the network from scratch" if others else ""


def convert(
    model: ModelT,
    *,
    example_input: Tensor | list[Any] | tuple[Any, ...] | Iterable[Any] | None = None,
    skip: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    trained: bool | None = None,
    strict: bool = False,
    dry_run: bool = False,
    lean: bool = True,
    norms: NormKind | Iterable[NormKind] = "batch",
    **options: Unpack[LayerKeywords],
) -> tuple[ModelT, ConversionReport]:
    """Replace every convolution and its BatchNorm by a balanced convolution, in place.

    A BatchNorm belongs to the layer that it follows *in the data flow*: it alone reads the layer's output.
    The norm becomes an :class:`~torch.nn.Identity`, or the activation and dropout of timm's ``BatchNormAct2d``. Linear
    layers with a BatchNorm are converted too, if you give an ``example_input``. A balanced layer keeps the weight, as
    the same parameter object, and takes over the scale (as its gain), shift, momentum and synchronisation of the norm
    that followed. Anything else stays, and the report says why.

    **A trained network** computes the same in eval mode after conversion, up to rounding. Its norms have statistics: a
    running mean other than 0 or a running variance other than 1. Give a few hundred images of the kind that it was
    trained on as ``example_input``: they supply the statistics of the balanced layers, and ``convert`` compares the
    outputs of both networks. ``report.proof`` has the result, and a difference that is more than rounding is a warning.
    A norm that no convolution precedes becomes a :class:`~balnorm.ChannelAffine`. The statistics are frozen: training
    uses them too, until :func:`unfreeze_stats` lets them follow the batches.

    **A network to be trained from scratch** gets the paper's layers. In a pre-activation network, where a norm follows
    a sum, the norm belongs to the convolutions that it feeds. Layers whose input can be negative, according to the data
    flow, get ``centred=True``.

    Convert first; then create the optimiser, wrap the model in DDP and compile it.

    Args:
        model: any module. It is changed in place (unless ``dry_run``) and returned.
        example_input: what to run the model on: its argument (a tensor or a list), a tuple of several arguments, or any
            other iterable, such as a loader: a series of batches, of which a tuple or list gives its first item. It is
            needed for trained networks, for linear layers, and if the model cannot be traced symbolically.
        skip: names of modules to leave alone, with everything inside them; ``*`` and ``?`` work as in file names.
        include: names, in the same form, of layers to balance even without a BatchNorm, such as the transposed
            convolutions of a U-Net.
        trained: convert every norm as that of a trained network (``True``) or of one to be trained from scratch
            (``False``); by default, its statistics decide. ``True`` makes an untrained copy of the network ready for
            the state dict of a converted one.
        strict: raise a ValueError, and change nothing, if a norm of the kinds ``norms`` would stay (other than by
            ``skip``), or if there is nothing to balance. Without it, the latter is a warning.
        dry_run: only report.
        lean: replace activations that balanced layers follow by those of :mod:`balnorm.activations`, which compute the
            same and keep less for the backward pass: ReLU6, SiLU, GELU, Hardswish, Mish and Hardtanh, and the gates of
            squeeze-and-excitation.
        norms: the kinds of norms to replace: ``"batch"``, ``"instance"``, ``"group"``, or several of them. An
            InstanceNorm or a GroupNorm normalises every sample by itself, which no balanced layer does, and nothing
            shows whether it has been trained. Name these kinds only for networks that you train from scratch.
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
    kinds = _kinds(norms)
    batches = _batches(example_input, model)
    first = next(batches, ())
    flow = data_flow(model, first)
    decisions = attribute(model, flow, skip, include, trained, kinds)
    leaner = lean_activations(model, flow, decisions, named(model, "skip", skip)) if lean else {}
    names = {module: name for name, module in model.named_modules()}
    left = [
        f"{names[module]}: {explain(decision, names)}"
        for module, decision in decisions.items()
        if norm_kind(module) in kinds and isinstance(decision, Kept) and not decision.depends_on(Reason.SKIPPED)
    ]
    if strict and left:
        raise ValueError(f"strict=True, and these norms would stay: {'; '.join(left)}")
    if nothing := _why_nothing(decisions, left, kinds):
        message = f"convert balances nothing in this {type(model).__name__}: {nothing}"
        if strict:
            raise ValueError(f"strict=True, and {message}")
        warnings.warn(message, stacklevel=2)
    exact = [module for module, decision in decisions.items() if is_exact(decision)]
    inexact = _inexact(decisions)
    if trained and inexact and not exact:
        names_of_kinds = " and ".join(f"{_NAMES[kind]}s" for kind in inexact)
        raise ValueError(
            f"trained=True, and no layer can compute what the {names_of_kinds} of this {type(model).__name__} compute, "
            "because they have no statistics. To train it from scratch, leave trained=True out"
        )
    if exact:
        _refuse_inexact(f"{names[exact[0]]} of this {type(model).__name__}", bool(first) or dry_run, options)
    proof = None
    if not dry_run:
        new = {module: made for module, decision in decisions.items() if (made := _new(module, decision, options))}
        original = Original(model, decisions, new, itertools.chain([first], batches)) if exact else None
        # Up to here nothing has changed the model, so a mistake in the arguments leaves it as it was.
        _let_activations_copy(decisions)
        model = replace_modules(model, {it: made for it in leaner if (made := lean_activation(it))})
        whole = {it: with_activation(it, made) if is_norm_act(it) else made for it, made in new.items()}
        model = replace_modules(model, whole)
        if original:
            proof = original.compare(model)
            different = original.first_that_differs(model) if not proof or proof.difference > original.bound else None
            if different or (proof and proof.difference > original.bound):
                where = (
                    f"the first layer that differs is {names[different]}" if different else "by itself, each layer is"
                )
                message = f"the converted network is not the original: {proof or 'outputs differ'} ({where})"
                warnings.warn(message, BalNormWarning, stacklevel=2)
    return _Conversion((model, _report(decisions, leaner, names, proof, kinds, inexact)))


def _kinds(norms: NormKind | Iterable[NormKind]) -> tuple[NormKind, ...]:
    kinds: tuple[NormKind, ...] = (norms,) if isinstance(norms, str) else tuple(norms)
    if unknown := [kind for kind in kinds if kind not in _NAMES]:
        raise ValueError(f"norms must be of {', '.join(map(repr, _NAMES))}, got {unknown[0]!r}")
    return kinds


def _batches(example_input: Any, model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """The arguments of the model, batch by batch."""
    if example_input is None:
        return iter(())
    if isinstance(example_input, Tensor | list | tuple):
        return iter([example_input if isinstance(example_input, tuple) else (example_input,)])
    if not isinstance(example_input, Iterable) or isinstance(example_input, Mapping | str):
        raise TypeError(
            "example_input must be the model's argument (a tensor or a list), a tuple of arguments or an iterable of "
            f"batches, got a {type(example_input).__name__}"
        )
    series = iter(example_input)
    first = next(series, None)
    if first is None:
        raise ValueError("example_input has no batch: is the loader empty or used up?")
    return (_first_item(batch, model) for batch in itertools.chain([first], series))


def _first_item(batch: Any, model: nn.Module) -> tuple[Any, ...]:
    """The argument in a batch of a series, on the model's device."""
    item = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(item, Tensor | list):
        raise TypeError(
            f"a batch must be a tensor, or a tuple or list that starts with one, got a {type(item).__name__}"
        )
    return (tree_map_only(Tensor, lambda tensor: tensor.to(device_of(model, tensor)), item),)


def _refuse_inexact(what: str, has_images: bool, options: Mapping[str, Any]) -> None:
    if not has_images:
        raise ValueError(
            f"{what} is trained: give example_input=..., a batch or a loader with a few hundred images of the kind "
            "that it was trained on, so that its outputs stay what they are. To train it from scratch, give "
            "trained=False"
        )
    changing = options.get("shift") or options.get("equalise") or "output_scale" in options
    if changing or not options.get("track_running_stats", True):
        raise ValueError(
            f"{what} is trained, and its outputs cannot stay what they are with the options shift, equalise, "
            "output_scale and track_running_stats. To train it from scratch, give trained=False"
        )


class _Conversion(tuple[Any, Any]):
    """A model and a report; an error explains this to anyone who uses the pair as the model."""

    __slots__ = ()
    _message = "convert returns two things: write model, report = convert(model)"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(self._message)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"there is no {name} here: {self._message}")


def _why_nothing(decisions: Mapping[nn.Module, Decision], left: Sequence[str], kinds: Sequence[NormKind]) -> str | None:
    """Why there is nothing to balance, unless the caller asked for that or the model is balanced already."""
    if any(isinstance(it, BalNormLayer) or isinstance(decision, Balanced) for it, decision in decisions.items()):
        return None
    if left:
        names = " and ".join(f"{_NAMES[kind]}s" for kind in kinds)
        return f"no layer can do the work of its {names} ({left[0]}{'; ...' if len(left) > 1 else ''})"
    present = {kind: None for module in decisions if (kind := norm_kind(module))}
    if any(kind in kinds for kind in present):
        return None
    offer = _offer(present, kinds) or "include=... names no layer to balance without one"
    return f"it has no {' or '.join(_NAMES[kind] for kind in kinds)}, and {offer}"


def _inexact(decisions: Mapping[nn.Module, Decision]) -> tuple[NormKind, ...]:
    """The kinds of norms that are removed although no balanced layer does what they did."""
    removed = [(it, decision.layers) for it, decision in decisions.items() if isinstance(decision, Removed)]
    kinds = [norm_kind(it) for it, layers in removed if not all(is_exact(decisions[layer]) for layer in layers)]
    return tuple(kind for kind in _NAMES if kind in kinds and kind != "batch")


def _report(
    decisions: Mapping[nn.Module, Decision],
    leaner: Mapping[nn.Module, Lean],
    names: Mapping[nn.Module, str],
    proof: Proof | None,
    kinds: tuple[NormKind, ...],
    inexact: tuple[NormKind, ...],
) -> ConversionReport:
    no_norm = Kept((Because(Reason.NO_NORM),))  # too obvious to report for a linear layer
    rows = [
        ConversionRow(names[it], type(it).__name__, decision.action, explain(decision, names), norm_kind(it))
        for it, decision in decisions.items()
        if not (isinstance(it, nn.Linear) and decision == no_norm)
    ]
    rows += [
        ConversionRow(names[it], type(it).__name__, "lean", why.explain(names), None) for it, why in leaner.items()
    ]
    order = {name: place for place, name in enumerate(names.values())}
    rows.sort(key=lambda row: order[row.layer])
    frozen = any(isinstance(decision, Balanced) and decision.exact for decision in decisions.values())
    return ConversionReport(tuple(rows), proof, frozen, kinds, inexact)


def _new(module: nn.Module, decision: Decision, options: LayerKeywords) -> nn.Module | None:
    """The replacement of a module, without the state of a trained network."""
    if isinstance(decision, Balanced):
        return _balanced_layer(module, decision, options)
    if isinstance(decision, Affine):
        assert isinstance(module, _NormBase)
        like = module.running_mean if module.weight is None else module.weight
        assert like is not None
        return ChannelAffine(module.num_features, device=like.device, dtype=like.dtype).train(module.training)
    return nn.Identity().train(module.training) if isinstance(decision, Removed) else None


def _balanced_layer(layer: nn.Module, decision: Balanced, options: LayerKeywords) -> BalNormLayer:
    norm, follows = decision.norm, decision.place is Place.FOLLOWS
    taken_over: dict[str, Any] = {"shift": False} if decision.exact else {"centred": decision.signed}
    if isinstance(norm, _BatchNorm) or (isinstance(norm, _NormBase) and norm.track_running_stats):
        taken_over |= {
            "momentum": norm.momentum,
            "track_running_stats": norm.track_running_stats or decision.exact,
        }
    if isinstance(norm, _NormBase | nn.GroupNorm):
        taken_over["affine"] = norm.affine or not follows
    if isinstance(norm, nn.SyncBatchNorm) and options.get("sync_stats", True):
        taken_over |= {"sync_stats": True, "process_group": norm.process_group}
    kind = BALANCED[torch_class(layer)]  # type: ignore[index]  # only layers that have one are balanced
    given = {name: value for name, value in options.items() if name != "mass" or not isinstance(layer, nn.Linear)}
    plain = copy.copy(layer)  # shares all tensors
    plain.__class__ = kind.plain  # the layer may be of a subclass that changes nothing
    balanced = kind._from_plain(plain, {**taken_over, **given})
    balanced.weight = layer.get_parameter("weight")  # the same object: parameters that are shared stay shared
    if isinstance(norm, _NormBase | nn.GroupNorm) and follows:
        # The norm cancelled the layer's own bias.
        balanced.bias = None
        if norm.affine:
            if norm.bias is not None:
                balanced.bias = nn.Parameter(norm.bias.detach().to(balanced.gain).clone(), norm.bias.requires_grad)
            with torch.no_grad():
                balanced.gain.copy_(norm.weight)
            balanced.gain.requires_grad_(isinstance(balanced.gain, nn.Parameter) and norm.weight.requires_grad)
    balanced.stats_frozen = decision.exact  # with the statistics of its batches, a trained network learns worse
    return balanced


def with_activation(norm: nn.Module, made: nn.Module) -> nn.Module:
    """The replacement of one of timm's norms, with the activation and dropout that the norm contained."""
    first = {} if isinstance(made, nn.Identity) else {"affine": made}
    return nn.Sequential(OrderedDict(first | _beside_the_norm(norm))).train(norm.training)


def _beside_the_norm(norm: nn.Module) -> dict[str, nn.Module]:
    """The dropout and activation inside a norm of timm's."""
    return {name: getattr(norm, name) for name in ("drop", "act") if hasattr(norm, name)}


def _let_activations_copy(decisions: Mapping[nn.Module, Decision]) -> None:
    """With the norm removed, an in-place activation would overwrite an input that other branches still read."""
    for norm, decision in decisions.items():
        if isinstance(decision, Removed) and decision.place is Place.FEEDS:
            inside = _beside_the_norm(norm).values() if is_norm_act(norm) else ()
            for activation in (*decision.in_place, *inside):
                if hasattr(activation, "inplace"):
                    activation.inplace = False
