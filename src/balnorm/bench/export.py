"""Load trained networks, from the checkpoints of their runs or from state dicts, and write them folded."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from balnorm.bench.data import ImageSpec
from balnorm.bench.errors import Failure, one_line, sentence
from balnorm.bench.files import regular, write_atomically
from balnorm.bench.training.checkpoint import CheckpointError, check_contents, load_checkpoint, load_weights
from balnorm.bench.training.config import Recipe
from balnorm.bench.training.images import make_test_loader
from balnorm.bench.training.learner import make_network
from balnorm.bench.training.processes import Processes
from balnorm.layers import BalNormLayer

__all__ = ["Saved", "check_format", "export_folded", "load_saved", "load_state", "test_batch", "write_folded"]


@dataclass(frozen=True)
class Saved:
    """A run's network in eval mode, with averaged weights if the run averages them."""

    recipe: Recipe
    images: ImageSpec
    model: nn.Module
    epoch: int
    """How many epochs are done."""
    state: Literal["unfinished", "finished", "diverged"]
    remark: str | None = None
    """The fault in the checkpoint, if the previous one was loaded instead."""


def load_saved(path: str | Path) -> Saved:
    """Load the network from a checkpoint, or from the folder of a run.

    Nothing in the file is executed; a :class:`CheckpointError` says what is wrong with it.
    """
    path = Path(path)
    path = path / "checkpoint.pt" if path.is_dir() else path
    try:
        loaded = load_checkpoint(path, _saved)  # which tries the previous checkpoint if this one does not fit
    except CheckpointError as error:
        if path.name == "checkpoint.pt":
            raise
        raise CheckpointError(
            f"{error}. For a network that is not from a run, name the function that builds it, as mynet.py:build, and "
            "give its state dict with --weights"
        ) from error
    if loaded is None:
        raise CheckpointError(f"{path} does not exist: give the checkpoint.pt of a run, or its folder")
    saved: Saved = loaded.result
    return replace(saved, remark=loaded.problem)


def _saved(state: dict[str, Any]) -> Saved:
    """The network of a state. Raises an error of some type if the state does not fit together."""
    check_contents(state)
    recipe, images = Recipe.from_dict(state["recipe"]), ImageSpec(**state["images"])
    weights: dict[str, Any] = state["model"]
    if state["averaged"] is not None:
        averaged = state["averaged"].items()
        weights = {name.removeprefix("module."): value for name, value in averaged if name.startswith("module.")}
    with torch.device("meta"):  # a prepared file could ask for a network larger than the memory
        shapes = make_network(recipe, images.channels, len(images.classes)).state_dict()
    for name, value in shapes.items():
        if name in weights and weights[name].shape != value.shape:
            raise ValueError(f"{name} is {tuple(weights[name].shape)} instead of {tuple(value.shape)}")
    model = make_network(recipe, images.channels, len(images.classes))
    load_weights(model, weights)
    epoch, diverged = (state["position"].get(name) for name in ("epoch", "diverged"))
    if type(epoch) is not int or not 0 <= epoch <= recipe.epochs or type(diverged) is not bool:
        raise ValueError(f"there is no epoch {epoch!r} in a run of {recipe.epochs}")
    ended: Literal["unfinished", "finished"] = "finished" if epoch == recipe.epochs else "unfinished"
    return Saved(recipe, images, model.eval(), epoch, "diverged" if diverged else ended)


def test_batch(saved: Saved, root: str | Path, images: int) -> Tensor:
    """The first test images, preprocessed for the network; all of them if there are fewer."""
    team = Processes(0, 1, torch.device("cpu"))
    loader = make_test_loader(saved.recipe, team, Path(root), saved.images, images)
    return next(batch for batch, _ in loader.epoch())


def load_state(model: nn.Module, path: Path) -> None:
    """Load a state dict that ``torch.save`` wrote, alone or under ``state_dict`` or ``model`` among other things.

    Nothing in the file is executed: a file with other objects, such as a whole model, is refused.
    """
    try:
        state = torch.load(regular(path), map_location="cpu", weights_only=True)
    except OSError as error:
        raise Failure(sentence(error)) from error
    except Exception as error:  # a prepared file can make the unpickler raise anything
        raise Failure(
            f"{path} is damaged, or holds something other than tensors, which could run any code: give a state "
            "dict, saved as torch.save(model.state_dict(), path)"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    try:
        model.load_state_dict(state)
    except Exception as error:
        raise Failure(f"{path} does not fit the model: {one_line(error)}") from error


def export_folded(saved: Saved, out: Path) -> None:
    """Write a run's network with its balanced layers folded to plain convolutions.

    The file's ending selects the format: ``.pt`` is a state dict, which ``create_model(..., norm="none")`` loads;
    ``.pt2`` a program of :mod:`torch.export`; ``.onnx`` a model for ONNX Runtime and others (it needs the package
    onnxscript). Both programs take pixels in [0, 1], channels first, in batches of any size.
    """
    check_format(out)
    if not any(isinstance(module, BalNormLayer) for module in saved.model.modules()):
        raise ValueError(f"there is nothing to fold: the network has {saved.recipe.norm}, and no balanced layer")
    inputs = (torch.rand(2, *saved.images.shape),)
    batch = torch.export.Dim("batch")
    write_folded(saved.model, out, inputs, batch, input_names=["images"], output_names=["scores"])


def check_format(out: Path) -> None:
    """Raise a ValueError unless the file's ending is that of a format."""
    kinds = (".pt", ".pt2", ".onnx")
    if out.name == "checkpoint.pt":
        raise ValueError(f"{out} holds the state of a run: choose another name")
    if out.suffix not in kinds:
        raise ValueError(f"the file to write must end in {', '.join(kinds)}, got {out}")


def write_folded(
    model: nn.Module, out: Path, inputs: tuple[Tensor, ...], batch: Any = torch.export.Dim.AUTO, **names: Any
) -> None:
    """Write any model in eval mode, folded. By default its program takes batches of any size, if the model can."""
    from balnorm.surgery import fold

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters' own
        contents = _serialized(fold(model), inputs, out.suffix, batch, **names)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, contents)


def _serialized(model: nn.Module, inputs: tuple[Tensor, ...], kind: str, batch: Any, **names: Any) -> bytes:
    """Serialise in memory: torch's own file writers abort the process if the disk is full."""
    buffer = io.BytesIO()
    if kind == ".pt":
        torch.save(model.state_dict(), buffer)
        return buffer.getvalue()
    # An example with one sample makes a program for one sample.
    inputs = tuple(torch.cat([each, each]) if each.shape[:1] == (1,) else each for each in inputs)
    batches = tuple({0: batch} for _ in inputs)
    if kind == ".pt2":
        torch.export.save(torch.export.export(model, inputs, dynamic_shapes=batches), buffer)
        return buffer.getvalue()
    try:
        program = torch.onnx.export(
            model, inputs, dynamic_shapes=batches, dynamo=True, verbose=False, **names
        )  # fmt: skip
    except ModuleNotFoundError as error:
        raise ValueError(f"writing ONNX needs {error.name}: pip install onnx onnxscript") from None
    assert program is not None
    serialized: bytes = program.model_proto.SerializeToString()
    return serialized
