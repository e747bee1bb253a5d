"""A recipe holds every setting of an experiment in one frozen dataclass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from balnorm.bench.data.sets import SETS
from balnorm.bench.models import MODELS
from balnorm.bench.norms import NORMS

__all__ = ["ModelName", "NormName", "Recipe", "SetName", "followed", "without_effect"]

if TYPE_CHECKING:
    ModelName = str
    NormName = str
    SetName = str
else:  # each name is written only once
    ModelName, NormName, SetName = Literal[tuple(MODELS)], Literal[tuple(NORMS)], Literal[(*SETS, "folder")]

_POSITIVE = ("epochs", "batch_size", "lr", "alpha", "width", "train_limit", "test_limit", "clip_norm", "image_size")
_LARGEST = {"lr": 1e30, "weight_decay": 1e30, "clip_norm": 1e30, "alpha": 1e6, "workers": 1000, "depth": 10_000}
"""The largest values that float32, a Beta distribution and a machine can handle."""
_REMOVED = ("scale_to_data",)
"""Fields of earlier versions."""


@dataclass(frozen=True)
class Recipe:
    """An experiment. On the same machine with the same number of threads, it always gives the same numbers."""

    name: str
    """The recipe's name."""
    data: SetName
    """The data set, or "folder" for your own images."""
    model: ModelName
    norm: NormName = "balnorm"
    seed: int = 0
    """Determines the initial weights, the order of the data, augmentation and mixup."""

    # Options of the norm: balnorm has all, batchnorm has one. docs/norms.md explains them.
    one_pass: bool = True
    """Take the signs of the weights before the shift, as in the paper's experiments, not after it."""
    mass: Literal["channel", "position"] = "channel"
    """Sum every input channel as a whole, or for each tap of the kernel the inputs that it meets."""
    stats_fraction: float = 1.0
    """Take the statistics from this leading fraction of the batch; batchnorm has this option too."""
    output_scale: float | Literal["unit_variance"] = "unit_variance"
    """A constant factor of every output; 1.0 is the literal reading of the paper."""
    shift: bool | Literal["auto"] = "auto"
    """Subtract the weighted mean from every output kernel; "auto" leaves it out in depthwise layers."""
    centred: bool = False
    """Take the mass of |x - mean| in place of |x|."""
    equalise: bool = False
    """Give every input channel the same say."""
    centre_stream: bool = False
    """In pre-activation networks, subtract each channel's mean in BatchNorm's place."""

    epochs: int = 30
    batch_size: int = 128
    """Images per batch, in each process."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """AdamW needs a smaller learning rate, such as 0.01."""
    lr: float = 0.1
    """The initial learning rate. onecycle raises it five-fold and ends at a hundredth of it."""
    momentum: float = 0.9
    """For AdamW, the first beta; the second is 0.999."""
    weight_decay: float = 1e-4
    """Applies to weights, not to gains, biases and norms. AdamW decouples it from the gradient."""
    schedule: Literal["multistep", "onecycle", "cosine", "constant"] = "cosine"
    drops: tuple[int, ...] = ()
    """The epochs at which a multistep schedule divides the learning rate by ten."""

    width: int | None = None
    """Channels of the network's first stage; None uses the network's default."""
    depth: int | None = None
    """The depth of a wide or CIFAR ResNet, 6 n + 2; None means 20."""

    padding: int = 4
    """Shift training images by up to this many pixels; images from folders are cropped at random instead."""
    mixup: Literal["none", "input", "manifold"] = "none"
    """Mix images at the input, or, with "manifold", also after the first or second stage."""
    alpha: float = 6.0
    """The parameter of mixup's Beta distribution."""
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    """Clip the norm of the whole gradient to this value."""
    ema: float | None = None
    """Evaluate a moving average of the weights, with this decay."""

    precision: Literal["float32", "bfloat16", "bf16", "float16", "fp16"] = "float32"
    """Of training; bf16 and fp16 are short for bfloat16 and float16."""
    compile: bool = False
    sync_stats: bool = False
    """Compute statistics over all processes together; for batchnorm, on GPUs only."""
    train_limit: int | None = None
    """Train on this many images; every class keeps its share."""
    test_limit: int | None = None
    image_size: int = 224
    """The size of images from folders."""
    workers: int = 2
    """How many processes decode images from folders."""

    metric: ClassVar[str] = "test_accuracy"
    """The metric that leads in a report."""

    def __post_init__(self) -> None:
        short = {"bf16": "bfloat16", "fp16": "float16"}
        object.__setattr__(self, "precision", short.get(self.precision, self.precision))  # one recipe, one spelling

    @property
    def fields(self) -> dict[str, Any]:
        """All fields by name."""
        return vars(self)

    @property
    def norm_options(self) -> dict[str, Any]:
        """The options that its norm has."""
        return {name: getattr(self, name) for name in _options_of(self.norm)}

    @property
    def variant(self) -> tuple[tuple[str, Any], ...]:
        """The norm's options that are not at their defaults."""
        return tuple((name, value) for name, value in self.norm_options.items() if value != getattr(Recipe, name))

    @property
    def method(self) -> str:
        """The norm and its variant, such as ``balnorm mass=position``."""
        return " ".join([self.norm, *(f"{name}={value}" for name, value in self.variant)])

    def replaced(self, **changes: Any) -> Recipe:
        """The recipe with these changes. Fields without effect get their defaults: one run has one recipe."""
        changed = followed(self, replace(self, **changes)) if "drops" not in changes else replace(self, **changes)
        return replace(changed, **{name: getattr(Recipe, name) for name in changed.idle()})

    def check(self) -> None:
        """Raise a ValueError that states what is allowed."""
        for name, value in vars(self).items():
            if name in _POSITIVE and value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
            most = _LARGEST.get(name, 10**9 if type(value) is int and name != "seed" else math.inf)
            if isinstance(value, int | float) and value > most:
                raise ValueError(f"{name} must be at most {most:g}, got {value}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to below 2**63, got {self.seed}")
        for name in ("momentum", "label_smoothing"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if self.optimizer == "adamw" and self.lr > 0.03:
            raise ValueError(
                f"lr {self.lr} is one for sgd: adamw moves every weight by about lr at each step, give it 0.03 at most"
            )
        if self.weight_decay < 0 or self.padding < 0 or self.workers < 0:
            raise ValueError("weight_decay, padding and workers must not be negative")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise ValueError(f"ema must be between 0 and 1, got {self.ema}")
        if list(self.drops) != sorted(set(self.drops)) or any(not 0 < drop < self.epochs for drop in self.drops):
            raise ValueError(f"drops must be ascending epochs below {self.epochs}, got {self.drops}")
        if bool(self.drops) != (self.schedule == "multistep"):
            raise ValueError("drops belong to the multistep schedule, which needs them")
        deep = self.model in ("wide_resnet", "cifar_resnet")
        if self.depth is not None and (not deep or self.depth < 8 or (self.depth - 2) % 6):
            raise ValueError("depth is for wide_resnet and cifar_resnet, and must be 6 n + 2: 8, 14, 20, 26, ...")
        if self.centre_stream and not self.model.startswith(("wide_resnet", "preact_resnet")):
            raise ValueError(
                f"centre_stream is for pre-activation networks (wide_resnet and preact_resnet), not for {self.model}"
            )
        if self.label_smoothing and (self.mixup != "none" or self.loss != "cross_entropy"):
            raise ValueError("label_smoothing needs cross_entropy and no mixup")
        if self.sync_stats and self.norm not in ("balnorm", "batchnorm"):
            raise ValueError(f"sync_stats is for balnorm and batchnorm, not for {self.norm}")
        if self.sync_stats and self.norm == "batchnorm" and self.stats_fraction != 1.0:
            raise ValueError("sync_stats for batchnorm is torch's SyncBatchNorm, which takes the whole batch")
        if not 0.0 < self.stats_fraction <= 1.0:
            raise ValueError(f"stats_fraction must be above 0 and at most 1, got {self.stats_fraction}")
        if self.output_scale != "unit_variance" and not self.output_scale > 0:
            raise ValueError(f"output_scale must be unit_variance or above 0, got {self.output_scale}")

    def idle(self) -> dict[str, str]:
        """The fields that have no effect in combination with the others, and why."""
        folder = self.data == "folder"
        reasons = [
            ("alpha", self.mixup == "none", "there is no mixup"),
            ("momentum", self.schedule == "onecycle", "the one-cycle schedule has its own"),
            ("padding", folder, "images from folders are cropped at random instead"),
            ("image_size", not folder, "the images come from no folder"),
            ("workers", not folder, "the images come from no folder"),
        ]
        found = {name: reason for name, idle, reason in reasons if idle}
        for name in NORMS["balnorm"].options:
            if name not in _options_of(self.norm):
                found[name] = f"it is an option of {' and '.join(n for n in NORMS if name in _options_of(n))}"
        return found

    def model_options(self) -> dict[str, int]:
        """The network's options besides its name and norm."""
        return {name: value for name in ("width", "depth") if (value := getattr(self, name)) is not None}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Recipe:
        """Build a recipe from its fields, as :func:`dataclasses.asdict` returns them, read back from JSON.

        Fields that only earlier versions used are ignored, so that their runs can still be read.
        """
        if not isinstance(values, dict):
            raise ValueError("not the fields of a recipe")
        values = {name: value for name, value in values.items() if name not in _REMOVED}
        kinds = get_type_hints(Recipe)
        if unknown := sorted(values.keys() - kinds):
            raise ValueError(f"a recipe has no {', '.join(unknown)}")
        if missing := [f.name for f in fields(Recipe) if f.default is MISSING and f.name not in values]:
            raise ValueError(f"the recipe lacks its {', '.join(missing)}")
        if str(values.get("norm")).startswith(("balnorm-", "batchnorm-")):
            raise ValueError(f"norm {values['norm']} of version 0.2 is now an option, such as mass=position of balnorm")
        for name, value in values.items():
            if not _is_a(value, kinds[name]):
                raise ValueError(f"{name} cannot be {value!r}")
        recipe = Recipe(**{**values, "drops": tuple(values.get("drops", ()))})
        recipe.check()
        return recipe


def _options_of(norm: str) -> tuple[str, ...]:
    return NORMS[norm].options if norm in NORMS else ()


def _is_a(value: object, kind: Any) -> bool:
    """Whether a value read from JSON has a field's type."""
    kinds = get_args(kind)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in kinds
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is_a(each, kinds[0]) for each in value)
    if get_origin(kind) in (UnionType, Union):
        return any(_is_a(value, each) for each in kinds)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def followed(base: Recipe, changed: Recipe) -> Recipe:
    """A recipe that changes the epochs or the schedule of another, with its drops in the same proportion."""
    if not base.drops or (changed.epochs, changed.schedule) == (base.epochs, base.schedule):
        return changed
    scaled = {round(drop * changed.epochs / base.epochs) for drop in base.drops if changed.schedule == base.schedule}
    drops = tuple(sorted(drop for drop in scaled if 0 < drop < changed.epochs))
    return replace(
        changed, drops=drops, schedule=changed.schedule if drops or changed.schedule != "multistep" else "constant"
    )


def without_effect(base: Recipe, recipes: Sequence[Recipe]) -> list[str]:
    """A sentence for each field that differs from the base recipe but has no effect in any of the recipes.

    Also one for each option that varies, but that some norms lack.
    """
    sentences = []
    for name in {name: None for recipe in recipes for name in recipe.idle()}:
        idle = [recipe for recipe in recipes if name in recipe.idle()]
        if len(idle) == len(recipes) and any(getattr(each, name) != getattr(base, name) for each in recipes):
            sentences.append(f"{name} has no effect: {idle[0].idle()[name]}")
        elif (
            name in NORMS["balnorm"].options
            and len({getattr(each, name) for each in idle}) > 1
            and len(idle) < len(recipes)
        ):
            norms = list(dict.fromkeys(each.norm for each in idle))
            sentences.append(f"{' and '.join(norms)}: {name} has no effect, so its values share a run")
    return sentences
