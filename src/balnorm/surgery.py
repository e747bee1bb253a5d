"""Operations on whole models: convert to balanced layers, fold them away, re-estimate or freeze their statistics."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from balnorm.attribution import Attribution, Partner, is_batch_norm, is_norm_act
from balnorm.flow import data_flow, input_of_batch, undisturbed
from balnorm.layers import BALANCED, BalNormConv2d, BalNormLayer, LayerOptions
from balnorm.tables import text_table

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ConversionReport", "convert", "fold", "freeze_stats", "param_groups", "unfreeze_stats", "update_stats"]

ModelT = TypeVar("ModelT", bound=nn.Module)
logger = logging.getLogger(__name__)

# --------------------------------------------------------------------------------------------------------------------
# Convert and fold
# --------------------------------------------------------------------------------------------------------------------


class ConversionRow(NamedTuple):
    """What became of one layer: ``action`` is ``"balanced"``, ``"removed"`` or ``"kept"``."""

    layer: str
    kind: str
    action: str
    why: str


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`convert` did with every convolution and BatchNorm, and why it left the others. Prints as a table."""

    rows: tuple[ConversionRow, ...]

    @property
    def balanced(self) -> list[str]:
        """Names of the layers that became balanced layers."""
        return [row.layer for row in self.rows if row.action == "balanced"]

    @property
    def removed(self) -> list[str]:
        """Names of the BatchNorms that are gone."""
        return [row.layer for row in self.rows if row.action == "removed"]

    @property
    def kept(self) -> list[str]:
        """Names of the layers and BatchNorms that stay what they are."""
        return [row.layer for row in self.rows if row.action == "kept"]

    def __str__(self) -> str:
        norms = [row for row in self.rows if "Norm" in row.kind and "Conv" not in row.kind and "Linear" not in row.kind]
        layers = len(self.rows) - len(norms)
        return (
            text_table(["layer", "kind", "action", "why"], self.rows)
            + f"\n\n{len(self.balanced)} of {layers} layers balanced, "
            + f"{len(self.removed)} of {len(norms)} BatchNorms removed"
        )


def convert(
    model: ModelT,
    *,
    example_input: Tensor | tuple[Any, ...] | None = None,
    skip: str | Iterable[str] = (),
    strict: bool = False,
    dry_run: bool = False,
    **options: Unpack[LayerOptions],
) -> tuple[ModelT, ConversionReport]:
    """Replace every convolution and its BatchNorm by a balanced convolution, in place.

    A BatchNorm belongs to the layer that it follows *in the data flow*: the layer's output goes to it and nowhere else.
    In a pre-activation network, where a norm follows a sum, it belongs to the convolutions that it feeds. The norm
    becomes an :class:`~torch.nn.Identity`, or the activation and dropout of timm's ``BatchNormAct2d``. Linear layers
    with a BatchNorm are converted too, given an ``example_input``. What cannot be attributed stays, and the report says
    why.

    A balanced layer keeps the weight, as the same parameter object, and takes over the scale (as a factor on its own
    initial gain), shift, momentum and synchronisation of the norm that followed. A norm whose scales are all zero, as
    some libraries start the last one of each residual block, leaves the initial gain: from zero, gains grow too slowly.
    A balanced layer does not compute what the pair computed, so the converted model has to be trained, or trained on.
    Layers whose input can be negative, as far as the data flow tells, get ``signed_input=True``. Convert first; make
    the optimiser, wrap in DDP and compile then.

    Args:
        model: any module. It is changed in place (unless ``dry_run``) and returned.
        example_input: a batch, or a tuple of arguments, that the model can be run on: needed where the model cannot be
            traced symbolically, and for linear layers. Where it has negative values, the layers that get it count as
            signed.
        skip: names of modules to leave alone, with all that is inside them; ``*`` and ``?`` as in file names.
        strict: raise a ValueError, and change nothing, if a BatchNorm would stay (other than by ``skip``).
        dry_run: only report.
        **options: for every balanced layer, e.g. ``mass="position"`` or ``one_pass=False``; they override what comes
            from the norm. See :class:`~balnorm.BalNormConv2d`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
        >>> model, report = convert(model)
        >>> print(report)
        layer  kind         action    why
        -----  -----------  --------  --------------------------------
        0      Conv2d       balanced  1 follows it
        1      BatchNorm2d  removed   follows 0
        3      Conv2d       kept      no BatchNorm follows or feeds it
        <BLANKLINE>
        1 of 2 layers balanced, 1 of 1 BatchNorms removed
    """
    _refuse_wrapped(model, "convert")
    BalNormConv2d(2, 2, 1, device="meta", **options)  # a bad option fails here, before anything is done
    found = Attribution(model, data_flow(model, example_input), [skip] if isinstance(skip, str) else skip)
    report = _report(found)
    if strict:
        left = [norm for norm in found.kept if is_batch_norm(norm) and not found.left_as_asked(norm)]
        if left:
            reasons = "; ".join(f"{found.names[norm]}: {found.kept[norm]}" for norm in left)
            raise ValueError(f"strict=True, and these norms would stay: {reasons}")
    if not dry_run:
        new = {
            layer: _balance(layer, partner, found.signed(layer), options) for layer, partner in found.balanced.items()
        }
        _replace(model, {**new, **{norm: _without_norm(norm, found) for norm in found.removed}})
        for activation in found.not_in_place:
            activation.inplace = False  # type: ignore[assignment]
    return model, report


def fold(model: ModelT, *, inplace: bool = False) -> ModelT:
    """Replace every balanced layer by the plain torch layer with the same output in eval mode.

    The result needs no balnorm to be used or unpickled, and costs what an unnormalised network costs. Its
    weights are those for ``running_mass`` (see :func:`update_stats`), so it is for inference: training it would train
    without normalisation. The names of the folded layers go to the log, at level INFO.

    Args:
        model: any module with balanced layers; without any, it is returned as it is.
        inplace: change ``model`` itself rather than a copy.

    Example:
        >>> model = nn.Sequential(BalNormConv2d(3, 8, 3), nn.ReLU()).eval()
        >>> fold(model)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
        )
    """
    _refuse_wrapped(model, "fold")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, BalNormLayer)}
    for name, layer in layers.items():
        if layer.running_mass is None:
            raise ValueError(
                f"{name or 'the layer'} has track_running_stats=False: its weight depends on each batch, "
                "and cannot be folded"
            )
    logger.info("folding %d layers: %s", len(layers), ", ".join(layers))
    plain: dict[nn.Module, nn.Module] = {layer: layer.fuse() for layer in layers.values()}
    if inplace:
        return _replace(model, plain)
    # The copy gets the plain layers right away: balanced ones need not be copied first.
    return copy.deepcopy(model, {id(layer): folded for layer, folded in plain.items()})


_WHY = {"follows": "{} follows it", "feeds": "{} feeds it", "behind a sum": "{} normalised what it contributed to"}


def _report(found: Attribution) -> ConversionReport:
    rows = []
    for module, name in found.names.items():
        if module in found.balanced:
            partner = found.balanced[module]
            action, why = "balanced", _WHY[partner.place].format(found.names[partner.norm])
            if found.signed(module):
                why += ", its input can be negative"
        elif module in found.removed:
            action, why = "removed", found.removed[module]
        elif module in found.kept and not (isinstance(module, nn.Linear) and "no BatchNorm" in found.kept[module]):
            action, why = "kept", found.kept[module]
        else:
            continue
        rows.append(ConversionRow(name, type(module).__name__, action, why))
    return ConversionReport(tuple(rows))


def _balance(layer: nn.Module, partner: Partner, signed: bool, options: LayerOptions) -> nn.Module:
    norm = partner.norm
    assert isinstance(norm, _BatchNorm)
    taken_over: LayerOptions = {
        "momentum": norm.momentum,
        "track_running_stats": norm.track_running_stats,
        "signed_input": signed,
        "affine": norm.affine or partner.place != "follows",
    }
    if isinstance(norm, nn.SyncBatchNorm) and options.get("sync_stats", True):
        taken_over |= {"sync_stats": True, "process_group": norm.process_group}
    kind = BALANCED[type(layer)]
    if isinstance(layer, nn.Linear):
        options = {name: value for name, value in options.items() if name != "mass"}  # type: ignore[assignment]
    balanced = kind._from_plain(layer, {**taken_over, **options})
    balanced.weight = layer.get_parameter("weight")  # the same object: parameters that are shared stay shared
    if partner.place == "follows":
        # What the layer's own bias added, the norm took away again.
        balanced.bias = None
        if norm.affine:
            if norm.bias is not None:
                balanced.bias = nn.Parameter(norm.bias.detach().to(balanced.gain).clone(), norm.bias.requires_grad)
            if norm.weight.is_meta or norm.weight.any():
                with torch.no_grad():
                    balanced.gain.mul_(norm.weight.to(balanced.gain))
            balanced.gain.requires_grad_(norm.weight.requires_grad)
    return balanced


def _without_norm(norm: nn.Module, found: Attribution) -> nn.Module:
    if not is_norm_act(norm):
        return nn.Identity().train(norm.training)
    parts = OrderedDict((name, getattr(norm, name)) for name in ("drop", "act") if hasattr(norm, name))
    if found.removed[norm].startswith("feeds"):
        for part in parts.values():
            if hasattr(part, "inplace"):
                part.inplace = False  # it would change what the norm was given
    return nn.Sequential(parts).train(norm.training)


def _replace(model: ModelT, new: dict[nn.Module, nn.Module]) -> ModelT:
    """Put new modules into the places of old ones, under every name that they have, in plain lists and tuples too."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in new:
                setattr(parent, name, new[child])
        for name, value in list(vars(parent).items()):
            if not name.startswith("_"):
                vars(parent)[name] = _with_new(value, new)
    return new.get(model, model)  # type: ignore[return-value]


def _with_new(value: Any, new: dict[nn.Module, nn.Module]) -> Any:
    """``value`` with new modules in the places of old ones; lists and dictionaries remain the same objects."""
    if isinstance(value, nn.Module):
        return new.get(value, value)
    if isinstance(value, list):
        value[:] = [_with_new(item, new) for item in value]
    elif isinstance(value, dict):
        value.update({key: _with_new(item, new) for key, item in value.items()})
    elif type(value) is tuple:
        return tuple(_with_new(item, new) for item in value)
    return value


def _refuse_wrapped(model: nn.Module, operation: str) -> None:
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for name, module in model.named_modules():
        where = f"the model's {name}" if name else "the model"
        if isinstance(module, parallel):
            raise ValueError(
                f"{where} is wrapped in {type(module).__name__}, which has taken note of its parameters: "
                f"{operation} the model inside (its .module), and wrap it afterwards"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{where} is a TorchScript module, which cannot be changed: {operation} it before scripting"
            )
        if hasattr(module, "_orig_mod"):
            raise ValueError(f"{where} is compiled: {operation} the model first, and compile it afterwards")


# --------------------------------------------------------------------------------------------------------------------
# Statistics and parameters
# --------------------------------------------------------------------------------------------------------------------


def update_stats(loader: Iterable[Any], model: nn.Module) -> None:
    """Re-estimate the running mass of every balanced layer, exactly, over the batches of ``loader``.

    For models whose weights were not those of the training steps: averaged ones (EMA, SWA, schedule-free) or edited
    ones. Afterwards ``running_mass`` is the mass of all samples together, whatever the sizes of the batches, and
    summed over all processes where :mod:`torch.distributed` is initialised. The model runs as it is evaluated, but its
    balanced layers use each batch's own mass, as in training. Layers with frozen statistics keep them. If it fails, the
    statistics are what they were.

    BatchNorm layers in the same model are left alone: call :func:`torch.optim.swa_utils.update_bn` for them first.

    Args:
        loader: gives batches: tensors, or tuples or lists whose first item is the model's input.
        model: any module, with or without ``AveragedModel`` around it.

    Example:
        >>> model = nn.Sequential(BalNormConv2d(1, 4, 1), nn.ReLU())
        >>> update_stats([torch.full((2, 1, 5, 5), 1.0), torch.full((6, 1, 5, 5), 5.0)], model)
        >>> model[0].running_mass.item()
        4.0
    """
    model = getattr(model, "_orig_mod", model)  # what was compiled: the hooks below would not be seen
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, BalNormLayer) and layer.running_mass is not None and not layer.stats_frozen
    ]
    sums = {layer: _MassSum(layer) for layer in layers}
    handles: list[Any] = []
    with undisturbed(model), torch.no_grad():
        model.eval()
        for layer in layers:
            # The running mass is to be that of the latest batch, all of it, of this process.
            layer.momentum, layer.stats_fraction, layer.sync_stats = 1.0, 1.0, False
            layer.train()
            handles.append(layer.register_forward_pre_hook(sums[layer].before))
            handles.append(layer.register_forward_hook(sums[layer].after, prepend=True))
        try:
            for batch in loader:
                model(input_of_batch(batch, model))
        finally:
            for handle in handles:
                handle.remove()
        results = [(layer, *sums[layer].result()) for layer in layers]
    if layers and all(int(batches) == 0 for _, _, batches in results):
        raise ValueError(
            "no batch reached a balanced layer, so the statistics stay what they were: is the loader empty or used up?"
        )
    for layer, mass, batches in results:
        assert layer.running_mass is not None
        assert layer.num_batches_tracked is not None
        if batches:
            layer.running_mass.copy_(mass)
            layer.num_batches_tracked.copy_(batches)


class _MassSum:
    """The mass of many batches together: that of each, by the number of outputs that it is an average over."""

    def __init__(self, layer: BalNormLayer) -> None:
        assert layer.running_mass is not None
        mass, device = layer.running_mass, layer.running_mass.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.layer = layer
        self.mass = torch.zeros_like(mass, dtype=dtype)
        self.outputs = torch.zeros((), dtype=dtype, device=device)
        self.batches = torch.zeros((), dtype=torch.long, device=device)

    def before(self, layer: BalNormLayer, _: Any) -> None:
        layer.reset_running_stats()

    def after(self, layer: BalNormLayer, _: Any, output: Tensor) -> None:
        """Take up what the layer has just tracked; it has not counted a batch that is empty or not finite."""
        assert layer.running_mass is not None
        assert layer.num_batches_tracked is not None
        outputs = layer.num_batches_tracked * (output.numel() // layer.gain.numel())
        self.mass += layer.running_mass * outputs
        self.outputs += outputs
        self.batches += layer.num_batches_tracked

    def result(self) -> tuple[Tensor, Tensor]:
        """The mass, and the number of batches that it comes from, over all processes."""
        if dist.is_available() and dist.is_initialized():
            for tensor in (self.mass, self.outputs, self.batches):
                dist.all_reduce(tensor, group=self.layer.process_group)
        return self.mass / self.outputs, self.batches


def freeze_stats(model: ModelT) -> ModelT:
    """Let every balanced layer use its running mass and leave it alone, in training mode too, and return the model.

    Unlike ``eval()`` this survives ``train()``. For fine-tuning on few samples.

    Example:
        >>> model = freeze_stats(nn.Sequential(BalNormConv2d(1, 4, 3))).train()
        >>> model[0].stats_frozen
        True
    """
    return _set_frozen(model, True)


def unfreeze_stats(model: ModelT) -> ModelT:
    """Undo :func:`freeze_stats`."""
    return _set_frozen(model, False)


def _set_frozen(model: ModelT, frozen: bool) -> ModelT:
    for module in model.modules():
        if isinstance(module, BalNormLayer):
            module.stats_frozen = frozen
    return model


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters for an optimiser, with weight decay on weights only.

    Gains, biases, the parameters of normalisation layers and all others with fewer than two dimensions get none.

    Example:
        >>> model = nn.Sequential(BalNormConv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(param_groups(model, weight_decay=1e-4), lr=0.1, momentum=0.9)
        >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
        [(0.0001, 2), (0.0, 3)]
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, got {weight_decay!r}")
    decayed, others = dict[Tensor, None](), dict[Tensor, None]()
    for module in model.modules():
        is_norm = isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                (others if is_norm or parameter.dim() < 2 else decayed)[parameter] = None
    groups = [{"params": list(decayed), "weight_decay": weight_decay}, {"params": list(others), "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
