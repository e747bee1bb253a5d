"""Trained networks, read again from the checkpoints of their runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from balnorm.data import SETS
from balnorm.layers import BalNormLayer
from balnorm.models import create_model
from balnorm.training.checkpoint import CheckpointError, load_checkpoint
from balnorm.training.config import Recipe
from balnorm.training.processes import Processes
from balnorm.training.trainer import make_loaders

__all__ = ["Saved", "export_folded", "load_saved", "test_batch"]


@dataclass(frozen=True)
class Saved:
    """A network as a run left it, in eval mode; the averaged one where the run averaged."""

    recipe: Recipe
    model: nn.Module
    epoch: int
    """How many are done."""
    finished: bool
    remark: str | None
    """What was wrong with the checkpoint, where the one before it was read instead."""

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that it was trained on."""
        if self.recipe.data == "folder":
            return 3, self.recipe.image_size, self.recipe.image_size
        information = SETS[self.recipe.data]
        return information.channels, information.size, information.size


def load_saved(path: str | Path) -> Saved:
    """The network in a checkpoint, or in the run's folder that holds one.

    Nothing in the file is executed; a :class:`CheckpointError` says what is wrong with it.
    """
    path = Path(path)
    path = path / "checkpoint.pt" if path.is_dir() else path
    found = load_checkpoint(path)
    if found is None:
        raise CheckpointError(f"{path} does not exist: give the checkpoint.pt of a run, or its folder")
    state, remark = found
    try:
        recipe = Recipe.from_dict(state["recipe"])
        weights: dict[str, Any] = state["model"]
        if state["averaged"] is not None:
            prefix = "module."
            averaged = state["averaged"].items()
            weights = {name.removeprefix(prefix): value for name, value in averaged if name.startswith(prefix)}
        last = [value for value in weights.values() if value.dim() == 2][-1]  # the classifier
        channels = 3 if recipe.data == "folder" else SETS[recipe.data].channels
        model = create_model(recipe.model, recipe.norm, last.shape[0], in_channels=channels, **recipe.model_options())
        model.load_state_dict(weights)
        position = state["position"]
        return Saved(recipe, model.eval(), int(position["epoch"]), bool(position["finished"]), remark)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is not the checkpoint of a run of this version ({_first_line(error)})"
        ) from error


def test_batch(saved: Saved, root: str | Path, images: int) -> Tensor:
    """Some test images, as the network is fed them."""
    recipe = replace(saved.recipe, batch_size=images)
    team = Processes(0, 1, torch.device("cpu"))
    _, loader, _, _ = make_loaders(recipe, team, Path(root))
    batches: list[Tensor] = []
    for batch, _ in loader.epoch():
        batches.append(batch)
        if sum(map(len, batches)) >= images:
            break
    return torch.cat(batches)[:images]


def export_folded(saved: Saved, out: Path) -> None:
    """Write the network with its balanced layers folded to plain convolutions.

    The file's ending says as what: ``.pt`` is a state dict, which ``create_model(..., norm="none")`` loads; ``.pt2``
    a program of :mod:`torch.export`; ``.onnx`` a model for ONNX Runtime and others (it needs the package onnxscript).
    Both programs take pixels in [0, 1], channels first, in batches of any size.
    """
    from balnorm.surgery import fold

    kinds = (".pt", ".pt2", ".onnx")
    if out.name == "checkpoint.pt":
        raise ValueError(f"{out} is what a run keeps its own state in: choose another name")
    if out.suffix not in kinds:
        raise ValueError(f"the file to write must end in {', '.join(kinds)}, got {out}")
    if not any(isinstance(module, BalNormLayer) for module in saved.model.modules()):
        raise ValueError(f"there is nothing to fold: the network has {saved.recipe.norm}, and no balanced layer")
    folded = fold(saved.model)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.tmp{out.suffix}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters' own
            _write(folded, saved.image, temporary)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _write(model: nn.Module, image: tuple[int, int, int], path: Path) -> None:
    if path.suffix == ".pt":
        torch.save(model.state_dict(), path)
        return
    example = torch.rand(2, *image)
    batch = {0: torch.export.Dim("batch")}
    if path.suffix == ".pt2":
        torch.export.save(torch.export.export(model, (example,), dynamic_shapes=(batch,)), path)
        return
    try:
        torch.onnx.export(
            model, (example,), path, input_names=["images"], output_names=["scores"], dynamic_shapes=(batch,),
            dynamo=True, external_data=False, verbose=False,
        )  # fmt: skip
    except ModuleNotFoundError as error:
        raise ValueError(f"writing ONNX needs {error.name}: pip install onnx onnxscript") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
