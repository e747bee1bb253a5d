"""Training: from a recipe to a finished run, and what happens when it is killed, damaged or interrupted."""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import types
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import held
from balnorm import BalNormConv2d
from balnorm.bench import export
from balnorm.bench.data import Images, ImageSpec
from balnorm.bench.errors import Stopped
from balnorm.bench.files import create_atomically, write_atomically
from balnorm.bench.norms import NORMS
from balnorm.bench.recipes import RECIPES, get_recipe
from balnorm.bench.study.executors import LocalExecutor, Resources
from balnorm.bench.training import config, machine
from balnorm.bench.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from balnorm.bench.training.images import make_loaders
from balnorm.bench.training.learner import Learner, make_optimizer, set_rates
from balnorm.bench.training.processes import LostProcessError, Processes, processes
from balnorm.bench.training.progress import Progress
from balnorm.bench.training.run import Run, RunBusyError, RunError
from balnorm.bench.training.schedules import Rates, rates
from balnorm.bench.training.trainer import Position, train
from held import PATIENCE, gate, train_and_die, wait_until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's
SMALL = replace(get_recipe("digits"), width=4, epochs=2, train_limit=640, test_limit=101)


def results(folder):
    """The records of a run, without what the clock and the memory say."""
    return [
        {name: value for name, value in record.items() if name not in ("seconds", "peak_memory")}
        for record in Run(folder).read()
    ]


def weights(folder):
    state, _ = load_checkpoint(Run(folder).checkpoint)
    return state["model"], state["optimizer"]["state"]


def assert_same(first, second):
    assert results(first) == results(second)
    for ours, theirs in zip(weights(first), weights(second), strict=True):
        flat, other = (torch.utils._pytree.tree_leaves(tree) for tree in (ours, theirs))
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(flat, other, strict=True))


def balnorm(*arguments, **options):
    """The command, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    command = [sys.executable, "-W", "ignore", "-m", "balnorm", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


OPTIONS = ["--width", "4", "--epochs", "2", "--train-limit", "640", "--test-limit", "101"]

# --------------------------------------------------------------------------------------------------------------------
# Recipes and schedules
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_consistent(name):
    recipe = get_recipe(name)
    assert recipe.name == name
    recipe.check()
    assert config.Recipe.from_dict(json.loads(json.dumps(vars(recipe)))) == recipe
    assert config.Recipe.from_dict(vars(recipe) | {"scale_to_data": True}) == recipe  # a field of 0.2
    assert RECIPES[name].__doc__


def test_a_recipes_drops_follow_its_epochs_and_schedule():
    recipe = get_recipe("cifar10-wrn")
    assert [(r.epochs, r.schedule, r.drops) for r in (recipe.replaced(epochs=each) for each in (1, 3, 30, 600))] == [
        (1, "constant", ()),
        (3, "multistep", (2,)),
        (30, "multistep", (15, 22)),
        (600, "multistep", (300, 450)),
    ]
    assert recipe.replaced(schedule="cosine").drops == ()
    assert recipe.replaced(epochs=30, drops=(1,)).drops == (1,)
    assert recipe.replaced(precision="bf16") == recipe.replaced(precision="bfloat16")


def test_the_papers_numbers():
    recipe = get_recipe("cifar10-wrn")
    assert (recipe.lr, recipe.momentum, recipe.weight_decay, recipe.batch_size) == (0.1, 0.9, 1e-4, 128)
    assert (recipe.epochs, recipe.drops, recipe.depth, recipe.width) == (300, (150, 225), 20, 96)
    assert (recipe.data, recipe.model, recipe.padding, recipe.mixup) == ("cifar10", "wide_resnet", 4, "none")
    assert get_recipe("cifar10-wrn-quarter") == replace(recipe, name="cifar10-wrn-quarter", stats_fraction=0.25)
    mixed = get_recipe("cifar10-wrn-mixup")
    assert mixed == replace(recipe, name="cifar10-wrn-mixup", mixup="manifold", alpha=6.0)
    preact = get_recipe("cifar10-preact152")
    assert preact == replace(mixed, name=preact.name, model="preact_resnet152", depth=None, width=64)
    assert get_recipe("cifar100-preact152") == replace(preact, name="cifar100-preact152", data="cifar100")
    assert get_recipe("svhn-wrn") == replace(mixed, name="svhn-wrn", data="svhn-extra", epochs=160, drops=(80, 120))
    short = get_recipe("cifar10-short")
    assert short == replace(mixed, name="cifar10-short", epochs=30, schedule="onecycle", drops=())
    large = get_recipe("imagenet-resnet50")
    assert (large.lr, large.momentum, large.weight_decay, large.batch_size) == (0.1, 0.9, 1e-4, 256)
    assert (large.model, large.epochs, large.drops, large.image_size) == ("resnet50", 90, (30, 60), 224)


def test_one_cycle_is_the_papers():
    recipe = get_recipe("cifar10-short")
    expected = {0: (0.1, 0.95), 6.5: (0.3, 0.90), 13: (0.5, 0.85), 13.65: (0.48, 0.855), 26: (0.1, 0.85)}
    expected |= {28: (0.0505, 0.85), 30: (0.001, 0.85)}
    for epoch, (lr, momentum) in expected.items():
        assert rates(recipe, epoch) == pytest.approx((lr, momentum))
    assert rates(recipe, 25.999) == pytest.approx((0.1, 0.95), rel=1e-3)


def test_schedules():
    recipe = replace(SMALL, epochs=10, lr=0.4)
    assert [rates(recipe, epoch).lr for epoch in (0, 5, 10)] == pytest.approx([0.4, 0.2, 0.0])
    steps = replace(recipe, schedule="multistep", drops=(3, 6))
    assert [rates(steps, epoch).lr for epoch in (0, 2.9, 3, 6, 9.9)] == pytest.approx([0.4, 0.4, 0.04, 0.004, 0.004])
    assert rates(replace(recipe, schedule="constant"), 7).lr == 0.4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be above 0, got 0"),
        ({"momentum": 1.0}, "momentum must be from 0 to below 1, got 1.0"),
        ({"schedule": "multistep"}, "drops belong to the multistep schedule"),
        ({"schedule": "multistep", "drops": (5, 20)}, r"drops must be ascending epochs below 2, got \(5, 20\)"),
        ({"model": "cifar_resnet", "centre_stream": True}, "centre_stream is for pre-activation networks"),
        ({"depth": 9}, "depth is for wide_resnet and cifar_resnet, and must be 6 n"),
        ({"ema": 1.5}, "ema must be between 0 and 1"),
        ({"lr": float("inf")}, "lr must be finite, got inf"),
        ({"seed": -1}, r"seed must be from 0 to below 2\*\*63, got -1"),
        ({"seed": 2**63}, r"seed must be from 0 to below 2\*\*63, got 9223372036854775808"),
        ({"label_smoothing": 0.1, "mixup": "input"}, "label_smoothing needs cross_entropy"),
        ({"sync_stats": True, "norm": "lrn"}, "sync_stats is for balnorm and batchnorm, not for lrn"),
        ({"optimizer": "adamw"}, r"lr 0.1 is one for sgd: adamw moves .* give it 0.03 at most"),
    ],
)
def test_bad_recipes_fail_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        train(replace(SMALL, **change), tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


def test_a_batch_that_is_too_large_fails_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="batch_size must be from 1 to 640 for 640 images, got 1000"):
        train(replace(SMALL, batch_size=1000), tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------------------
# A run
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(SMALL, folder, show=False)
    return folder


def test_a_run_is_a_folder(whole):
    assert {path.name for path in whole.iterdir()} == {
        *("config.json", "environment.json", "metrics.jsonl", "tensorboard"),
        *("checkpoint.pt", "checkpoint.pt.previous", "lock"),
    }
    assert Run(whole).recipe == SMALL
    (start,) = json.loads((whole / "environment.json").read_text())
    assert {"torch", "balnorm", "commit", "processor", "threads", "started"} <= start.keys()
    records = Run(whole).read()
    assert [record["epoch"] for record in records] == [1, 2]
    assert records[1].keys() == {
        *("epoch", "lr", "momentum", "train_loss", "train_accuracy", "test_loss", "test_accuracy"),
        *("seconds", "peak_memory"),
    }
    assert records[1]["test_loss"] < records[0]["test_loss"]
    assert list((whole / "tensorboard").iterdir())


def test_a_run_repeats_bit_for_bit(whole, tmp_path):
    train(SMALL, tmp_path / "again", show=False)
    assert_same(whole, tmp_path / "again")
    train(replace(SMALL, seed=1), tmp_path / "other", show=False)
    assert results(tmp_path / "other") != results(whole)


def test_a_finished_run_stays_as_it_is(whole):
    before = (whole / "metrics.jsonl").read_bytes()
    train(SMALL, whole, show=False)
    assert (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "batchnorm", "label_smoothing": 0.1},
        {"norm": "batchrenorm", "clip_norm": 1.0},
        {"mixup": "manifold", "loss": "bce"},
        {"mixup": "input", "precision": "bfloat16"},
        {"ema": 0.9, "schedule": "onecycle"},
        {"stats_fraction": 0.25, "mass": "position", "schedule": "multistep", "drops": (1,)},
        {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.05},
        {"optimizer": "adamw", "lr": 0.001, "schedule": "onecycle", "norm": "batchnorm", "clip_norm": 1.0},
    ],
    ids=lambda change: ", ".join(f"{name}={value}" for name, value in change.items()),
)
def test_options_train_and_resume(tmp_path, change):
    recipe = replace(SMALL, **change)
    train(recipe, tmp_path / "whole", show=False)
    assert results(tmp_path / "whole")[-1]["test_loss"] < 2.4
    stop_after(recipe, tmp_path / "parts", 13)
    train(recipe, tmp_path / "parts", show=False)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_run_of_version_0_2_resumes(tmp_path, whole):
    stop_after(SMALL, tmp_path / "old", 13)
    run = Run(tmp_path / "old")
    state, _ = load_checkpoint(run.checkpoint)
    fields = json.loads(run.config.read_text())
    for values in (state["recipe"], fields):
        for option in NORMS["balnorm"].options:
            del values[option]
        values["scale_to_data"] = False
    save_checkpoint(run.checkpoint, state)
    (tmp_path / "old" / "checkpoint.pt.previous").unlink()
    run.config.write_text(json.dumps(fields))
    saved = export.load_saved(tmp_path / "old")
    assert (saved.state, len(saved.images.classes)) == ("unfinished", 10)
    train(SMALL, tmp_path / "old", show=False)
    assert_same(whole, tmp_path / "old")
    with pytest.raises(RunError, match=r"a different recipe \(equalise: True, was False"):
        train(replace(SMALL, equalise=True), tmp_path / "old", show=False)


def test_a_state_of_version_0_1_is_refused(tmp_path):
    """It has no images, and one word for runs that finished and that diverged."""
    stop_after(SMALL, tmp_path / "old", 13)
    path = Run(tmp_path / "old").checkpoint
    state, _ = load_checkpoint(path)
    del state["images"], state["position"]["diverged"]
    for _ in range(2):  # also the one before
        save_checkpoint(path, {**state, "position": {**state["position"], "finished": False}})
    answer = r"does not fit this run \(its contents differ: another version wrote it\)"
    with pytest.raises(CheckpointError, match=answer):
        export.load_saved(path)
    with pytest.raises(CheckpointError, match=answer + ".*: move .* away to start again"):
        train(SMALL, tmp_path / "old", show=False)


def test_adamw_is_decoupled_and_its_first_beta_is_the_momentum():
    """Loshchilov and Hutter 2019, algorithm 2, for two steps with a learning rate that changes between them."""
    layer = BalNormConv2d(2, 3, 3).double()
    recipe = replace(SMALL, optimizer="adamw", lr=0.01, weight_decay=0.1)
    optimizer = make_optimizer(recipe, layer)
    expected = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    m, v = ({name: torch.zeros_like(value) for name, value in expected.items()} for _ in range(2))
    for step, rate in enumerate([Rates(0.01, 0.9), Rates(0.03, 0.9)], 1):
        for group in optimizer.param_groups:
            set_rates(group, rate)
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            m[name] = rate.momentum * m[name] + (1 - rate.momentum) * parameter.grad
            v[name] = 0.999 * v[name] + 0.001 * parameter.grad**2
            decay = 0.1 if name == "weight" else 0.0
            update = m[name] / (1 - rate.momentum**step) / ((v[name] / (1 - 0.999**step)).sqrt() + 1e-8)
            expected[name] = expected[name] - rate.lr * (update + decay * expected[name])
        optimizer.step()
    for name, parameter in layer.named_parameters():
        assert torch.allclose(parameter, expected[name], rtol=1e-9), name


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_schedule_moves_learning_rate_and_momentum(optimizer):
    group = make_optimizer(replace(SMALL, optimizer=optimizer, lr=0.01), BalNormConv2d(2, 3, 3)).param_groups[0]
    set_rates(group, Rates(0.02, 0.85))
    assert group["lr"] == 0.02
    assert (group["betas"] if optimizer == "adamw" else group["momentum"]) in ((0.85, 0.999), 0.85)


@pytest.mark.parametrize(("norm", "stats_fraction"), [("balnorm", 1.0), ("batchnorm", 1.0), ("batchnorm", 0.25)])
def test_averaged_weights_are_evaluated_with_statistics_of_their_own(tmp_path, norm, stats_fraction):
    """An average of the statistics on the way lost BatchNorm 15 points, and BalNorm one, where the average lags."""
    recipe = replace(SMALL, norm=norm, stats_fraction=stats_fraction, ema=0.95, train_limit=320, lr=0.3)
    train(recipe, tmp_path / "run", show=False)
    model = export.load_saved(tmp_path / "run").model
    saved = {name: value.clone() for name, value in model.named_buffers() if "running" in name}
    loader = make_loaders(recipe, Processes(0, 1, torch.device("cpu")), Path("data"))[0]
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d | BalNormConv2d):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    with torch.no_grad():
        for images, _ in loader.epoch():
            model(images)
    found = {name: value for name, value in model.named_buffers() if "running" in name}
    assert found
    torch.testing.assert_close(found, saved, rtol=1e-3, atol=1e-4)


def stop_after(recipe, folder, steps):
    """Train for so many steps, with a checkpoint at each, and stop as if the power had failed."""

    class PowerFailure(Exception):  # noqa: N818
        pass

    step, count = Learner.step, 0

    def failing(self, *arguments):
        nonlocal count
        count += 1
        if count > steps:
            raise PowerFailure
        return step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "step", failing)
        with pytest.raises(PowerFailure):
            train(recipe, folder, show=False, checkpoint_steps=1)


def stop_while_saving(recipe, folder):
    """Stop between the two renames of the first save: the last good checkpoint must not be lost then."""

    class PowerFailure(Exception):  # noqa: N818
        pass

    replace_ = os.replace

    def failing(source, target):
        if Path(target).name == "checkpoint.pt":
            raise PowerFailure
        replace_(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(PowerFailure):
            train(recipe, folder, show=False, checkpoint_steps=1)


def test_a_diverged_run_is_a_result(tmp_path):
    recipe = replace(SMALL, norm="none", lr=1e6, schedule="constant", epochs=5)
    train(recipe, tmp_path / "run", show=False)
    record = Run(tmp_path / "run").read()[-1]
    assert record["diverged"]
    assert "test_accuracy" not in record
    assert len(Run(tmp_path / "run").read()) < 5
    train(recipe, tmp_path / "run", show=False)  # it is finished, and stays so
    json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_test_loss_that_is_not_finite_is_divergence(tmp_path, monkeypatch, loss):
    """Also where all losses in training were finite."""
    monkeypatch.setattr(Learner, "evaluate", lambda _: {"test_loss": loss, "test_accuracy": 0.1})
    (record,) = train(SMALL, tmp_path / "run", show=False)
    assert record.keys() == {"epoch", "diverged", "seconds", "peak_memory"}
    assert (record["epoch"], record["diverged"]) == (1, True)


@pytest.mark.parametrize(("data", "flip"), [("cifar10", True), ("svhn", False)])
@pytest.mark.parametrize(("norm", "pixels"), [("balnorm", "unit"), ("batchnorm", "standardised")])
def test_loaders_are_what_the_recipe_says(monkeypatch, data, flip, norm, pixels):
    def load(name, root, split, limit):
        images = np.random.default_rng(0).integers(0, 256, (limit, 3, 32, 32), dtype=np.uint8)
        return Images(images, np.arange(limit) % 10, tuple(f"{name} {n}" for n in range(10)))

    monkeypatch.setattr("balnorm.bench.training.images.load", load)
    recipe = replace(SMALL, data=data, norm=norm, seed=7, padding=3, batch_size=8, train_limit=40, test_limit=30)
    train_loader, test_loader, images = make_loaders(recipe, Processes(1, 2, torch.device("cpu")), Path("data"))
    assert (train_loader.flip, train_loader.padding, train_loader.shares.seed) == (flip, 3, 7)
    assert (test_loader.flip, test_loader.padding, test_loader.shares.training) == (False, 0, False)
    assert train_loader.pixels == test_loader.pixels == pixels
    assert train_loader.statistics == test_loader.statistics == images.statistics
    assert (images.count, images.channels, images.size, images.classes[0]) == ((40, 30), 3, 32, f"{data} 0")
    for loader in (train_loader, test_loader):
        assert (loader.shares.rank, loader.shares.world) == (1, 2)
    make_loaders(replace(recipe, padding=32), Processes(0, 1, torch.device("cpu")), Path("data"))
    with pytest.raises(ValueError, match="padding must be at most 32, the size of an image, got 33"):
        make_loaders(replace(recipe, padding=33), Processes(0, 1, torch.device("cpu")), Path("data"))


def test_images_in_folders_train(tmp_path):
    from PIL import Image

    for split in ("train", "val"):
        for label, colour in enumerate(("red", "blue")):
            (tmp_path / "images" / split / colour).mkdir(parents=True)
            for i in range(8):
                pixels = (200 - 10 * i, 20, 10 * i) if label == 0 else (10 * i, 20, 200 - 10 * i)
                Image.new("RGB", (40, 40), pixels).save(tmp_path / "images" / split / colour / f"{i}.png")
    recipe = replace(get_recipe("folder"), epochs=2, batch_size=4, width=4, image_size=32, workers=0, lr=0.01)
    records = train(recipe, tmp_path / "run", root=tmp_path / "images", show=False)
    assert records[-1]["test_accuracy"] > 0.5


# --------------------------------------------------------------------------------------------------------------------
# Killed, interrupted, changed
# --------------------------------------------------------------------------------------------------------------------


def test_killed_ten_times_and_the_same_result(tmp_path):
    """Anywhere between steps, or while a checkpoint is being written: some 35 such events make an epoch."""
    recipe = replace(SMALL, epochs=8)
    train(recipe, tmp_path / "whole", show=False)
    LocalExecutor(1, Resources())  # its processes have imported torch already
    processes = multiprocessing.get_context("forkserver")
    chance, steps = random.Random(7), []
    for _ in range(10):
        process = processes.Process(target=train_and_die, args=(recipe, tmp_path / "killed", chance.randint(3, 25)))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        found = load_checkpoint(Run(tmp_path / "killed").checkpoint)
        steps.append(found[0]["position"]["step"] if found else 0)
    assert len([step for step in steps if step]) > 2, "no kill came in the middle of an epoch"
    train(recipe, tmp_path / "killed", show=False)
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    for_ever = ["--epochs", "1000000"]
    process = balnorm("train", "digits", *OPTIONS, *for_ever, "--out", str(tmp_path / "run"))
    wait_until(Run(tmp_path / "run").read, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert "repeat the command to resume" in errors
    assert "Traceback" not in errors
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")[1] is None


@pytest.mark.parametrize(("times", "answer"), [(1, Stopped), (2, KeyboardInterrupt)])
def test_ctrl_c_ends_an_epoch_of_few_steps_and_a_second_one_a_step(tmp_path, monkeypatch, times, answer):
    recipe, step = replace(SMALL, epochs=1, train_limit=192), Learner.step
    steps = []

    def interrupted(self, *arguments):
        for _ in range(0 if steps else times):
            signal.raise_signal(signal.SIGINT)
        steps.append(arguments)
        return step(self, *arguments)

    monkeypatch.setattr(Learner, "step", interrupted)
    with pytest.raises(answer):
        train(recipe, tmp_path / "run", show=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(steps) == (3 if answer is Stopped else 0)
    assert Run(tmp_path / "run").checkpoint.exists() == (answer is Stopped)


@pytest.mark.parametrize(("minutes", "steps"), [(0.0, [10, 0, 10, 0]), (1e6, [0, 0]), (None, [0, 0])])
def test_a_run_is_saved_within_an_epoch_when_it_is_time(tmp_path, monkeypatch, minutes, steps):
    """Which it looks up after ten steps, and they are an epoch here."""
    saved = []
    monkeypatch.setattr(
        "balnorm.bench.training.trainer.save_checkpoint", lambda _, state: saved.append(state["position"]["step"])
    )
    train(SMALL, tmp_path / "run", show=False, checkpoint_minutes=minutes)
    assert saved == steps


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(tmp_path, monkeypatch, whole):
    """The record of its first epoch is there already."""

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("balnorm.bench.training.trainer.save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, tmp_path / "run", show=False)
    assert len(Run(tmp_path / "run").read()) == 1
    monkeypatch.undo()
    train(SMALL, tmp_path / "run", show=False)
    assert_same(whole, tmp_path / "run")


def test_the_time_of_an_epoch_is_that_of_all_its_parts(tmp_path):
    run, hours = Run(tmp_path / "run"), 1e6
    stop_after(SMALL, run.folder, 13)
    state, _ = load_checkpoint(run.checkpoint)
    state["position"]["seconds"] = hours
    save_checkpoint(run.checkpoint, state)
    stop_after(SMALL, run.folder, 2)
    position = load_checkpoint(run.checkpoint).result["position"]
    assert (position["step"], position["seconds"] > hours) == (5, True)
    first, second = train(SMALL, run.folder, show=False)
    assert first["seconds"] < hours < second["seconds"]


def test_a_changed_recipe_is_refused_by_name(whole, capsys):
    from balnorm.bench.cli import main

    with pytest.raises(
        RunError, match=r"a different recipe \(lr: 0.2, was 0.1; epochs: 3, was 2\)|epochs: 3, was 2; lr"
    ):
        train(replace(SMALL, lr=0.2, epochs=3), whole, show=False)
    assert main(["train", "digits", *OPTIONS, "--norm", "none", "--out", str(whole)]) == 1
    errors = capsys.readouterr().err
    assert "norm: 'none', was 'balnorm'" in errors
    assert "Traceback" not in errors


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match="is not empty and holds no run"):
        train(SMALL, tmp_path, show=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_results_without_a_checkpoint_are_not_overwritten(tmp_path):
    """Deleting checkpoints to make room, and giving the command again, wiped the metrics."""
    train(SMALL, tmp_path / "run", show=False)
    for path in (tmp_path / "run").glob("checkpoint*"):
        path.unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match="has results but no checkpoint to resume from"):
        train(SMALL, tmp_path / "run", show=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_one_folder_is_for_one_process(tmp_path, whole):
    """Two starts of the same command wrote every epoch twice."""
    with Run(whole).alone():
        process = balnorm("train", "digits", *OPTIONS, "--out", str(whole))
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "is being trained by another process" in errors


def test_of_two_starts_at_once_one_gets_the_folder(tmp_path, monkeypatch):
    """The second found no folder either, and makes one while the first has it locked."""
    first, second = Run(tmp_path / "run", SMALL), Run(tmp_path / "run", SMALL)
    with contextlib.ExitStack() as stack:

        def meanwhile(path, contents):
            monkeypatch.undo()
            first.create()
            stack.enter_context(first.alone())
            create_atomically(path, contents)

        monkeypatch.setattr("balnorm.bench.training.run.create_atomically", meanwhile)
        second.create()
        with pytest.raises(RunBusyError), second.alone():
            pass
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "lock"}


def test_a_folder_is_locked_on_nfs_too(tmp_path, monkeypatch):
    """There a lock needs a file that is open for writing. Every run was taken for busy."""
    run = Run(tmp_path / "run", SMALL)
    run.create()
    monkeypatch.setattr(fcntl, "flock", fcntl.lockf)
    with run.alone():  # or a bad file descriptor
        pass


def test_a_folder_that_cannot_be_locked_is_not_busy(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", SMALL)
    run.create()
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with run.alone():
        pass


def test_a_finished_run_gets_no_start_and_loses_its_failure(tmp_path, whole):
    """Another start of it was listed, and a failure of an earlier one kept it out of reports."""
    copy = tmp_path / "run"
    shutil.copytree(whole, copy)
    before = (copy / "environment.json").read_bytes()
    (copy / "error.txt").write_text("Traceback")
    train(Run(copy).recipe, copy, show=False)
    assert (copy / "environment.json").read_bytes() == before
    assert not (copy / "error.txt").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_ours_or_none(tmp_path, monkeypatch):
    """balnorm installed inside another project's clone recorded that project's commit."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    ours, theirs = tmp_path / "ours.py", tmp_path / "theirs.py"
    ours.touch()
    theirs.touch()
    subprocess.run([*git, "add", "ours.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    assert len(machine._commit(ours)) == 40
    assert machine._commit(theirs) is None


def test_images_are_the_same_up_to_the_last_bits_of_their_statistics():
    """Processors differ in them, and a run that was moved to another did not resume."""
    images = ImageSpec(1, 8, ("a", "b"), (0.3,), (0.2,), (10, 5))
    saved = asdict(images)
    assert not images.changes({**saved, "mean": (math.nextafter(0.3, 1),), "std": (math.nextafter(0.2, 0),)})
    for other in ({"mean": (0.3001,)}, {"std": (0.2, 0.2)}, {"size": 9}):
        assert images.changes({**saved, **other}) == "their size or their pixels differ"


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_made_with_links_and_without(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError()))
    create_atomically(tmp_path / "new", b"first")
    assert (tmp_path / "new").read_bytes() == b"first"
    if links:
        create_atomically(tmp_path / "new", b"second")
        assert (tmp_path / "new").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_devices():
    from balnorm.bench.training.processes import processes

    for device, message in (
        ("cuda", "torch sees no GPU"),
        ("tpu9", "device must be something like cpu, cuda or cuda:1"),
    ):
        if device == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=message), processes(device):
            pass
    with pytest.raises(ValueError, match="needs GPUs"):
        train(replace(SMALL, norm="batchnorm", sync_stats=True), "nowhere", device="cpu", show=False)


def test_each_process_of_a_machine_takes_its_own_gpu(monkeypatch):
    from balnorm.bench.training.processes import _place

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # there is one
    assert _place(None, local=1, world=2) == _place("cuda", local=1, world=2) == torch.device("cuda", 1)
    assert _place("cuda:3", local=0, world=1) == torch.device("cuda", 3)
    with pytest.raises(ValueError, match="give device cuda, not 'cuda:3', for several processes"):
        _place("cuda:3", local=1, world=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": -1}, "there is no epoch -1, step 3"),
        ({"epoch": 3}, "there is no epoch 3, step 3"),
        ({"epoch": 1.0}, "there is no epoch 1.0, step 3"),
        ({"step": 11}, "there is no epoch 2, step 11"),
        ({"step": -1}, "there is no epoch 2, step -1"),
        ({"diverged": 1}, "there is no epoch 2, step 3"),
        ({"seconds": -1.0}, "an epoch cannot take -1.0 seconds"),
        ({"seconds": float("nan")}, "an epoch cannot take nan seconds"),
        ({"sums": torch.zeros(3)}, "its sums are not those of an epoch"),
        ({"sums": torch.zeros(2).double()}, "its sums are not those of an epoch"),
    ],
)
def test_a_position_that_a_run_cannot_have_is_refused(change, message):
    position = {"epoch": 2, "sums": torch.zeros(3).double(), "step": 3, "seconds": 1.0}
    Position(**position).check(epochs=2, steps=10)
    with pytest.raises(ValueError, match=message):
        Position(**{**position, **change}).check(epochs=2, steps=10)


# --------------------------------------------------------------------------------------------------------------------
# Damaged files
# --------------------------------------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hacked",)


def damaged(kind, good):
    if kind == "truncated":
        return good[: len(good) // 2]
    if kind == "changed":
        return good[:-100] + bytes([good[-100] ^ 1]) + good[-99:]
    if kind == "empty":
        return b""
    if kind == "foreign":
        return b"PK\x03\x04 something else"
    payload = pickle.dumps(Hostile())
    if kind == "of another run":
        buffer = io.BytesIO()
        torch.save({"weights": torch.zeros(3)}, buffer)
        payload = buffer.getvalue()
    return good.split(b"\n")[0] + b"\n" + hashlib.sha256(payload).hexdigest().encode() + b"\n" + payload


@pytest.mark.parametrize("kind", ["truncated", "changed", "empty", "foreign", "of another run", "hostile"])
def test_damaged_checkpoints_fall_back_to_the_one_before(tmp_path, monkeypatch, whole, kind):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    stop_after(SMALL, folder, 13)
    path = folder / "checkpoint.pt"
    path.write_bytes(damaged(kind, path.read_bytes()))
    if kind != "of another run":
        state, problem = load_checkpoint(path)
        assert state["position"]["step"] == 2  # the one before: 10 steps of the first epoch, then 2
        assert "using the previous one" in problem
        assert "\n" not in problem
    stop_while_saving(SMALL, folder)
    train(SMALL, folder, show=False)
    assert_same(folder, whole)
    assert not (tmp_path / "hacked").exists()


def test_no_good_checkpoint_is_one_sentence(tmp_path):
    run = Run(tmp_path, SMALL)
    run.create()
    for name in ("checkpoint.pt", "checkpoint.pt.previous"):
        (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of balnorm"):
        load_checkpoint(run.checkpoint)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of balnorm.*move .* away to start again"):
        train(SMALL, tmp_path, show=False)
    assert load_checkpoint(tmp_path / "nothing.pt") is None


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    for step in range(2):
        save_checkpoint(path, {"step": step})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"could not write .* \(No space left on device\); the previous checkpoint is intact"
        ):
            save_checkpoint(path, {"step": 9})
    assert load_checkpoint(path) == ({"step": 1}, None)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_really_full_disk(tmp_path, whole):
    """A file system of one megabyte, where we may make one."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False, capture_output=True
    ).returncode:
        pytest.skip("no permission to mount")
    try:
        path = tmp_path / "checkpoint.pt"
        save_checkpoint(path, {"step": 1, "weights": torch.zeros(50_000)})
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_checkpoint(path, {"step": 2, "weights": torch.zeros(400_000)})
        state, problem = load_checkpoint(path)
        assert (state["step"], problem) == (1, None)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [("config.json", "[]", "cannot be read"), ("metrics.jsonl", '{"epoch": "x"}\n', "is not a record of an epoch")],
)
def test_files_that_hold_something_else_are_named(tmp_path, name, contents, message):
    train(SMALL, tmp_path / "run", show=False)
    (tmp_path / "run" / "environment.json").write_text("5")
    train(SMALL, tmp_path / "run", show=False)
    (tmp_path / "run" / name).write_text(contents)
    with pytest.raises(RunError, match=message):
        train(SMALL, tmp_path / "run", show=False)


def test_metrics_survive_a_line_that_broke_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"epoch": 1}\n{"epoch": 2}\n{"epo')
    assert [record["epoch"] for record in Run(tmp_path).read()] == [1, 2]
    path.write_text('{"epoch": 1}\nnonsense\n{"epoch": 2}\n')
    with pytest.raises(RunError, match="line 2 is not JSON"):
        Run(tmp_path).read()


def test_atomic_writes_leave_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


# --------------------------------------------------------------------------------------------------------------------
# Several processes
# --------------------------------------------------------------------------------------------------------------------


def torchrun(*arguments, restarts=0):
    """The command in two processes, whose runs can be held."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.2", held.__file__, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_processes_wait_until_nobody_holds_what_they_summed(monkeypatch):
    """A thread of gloo that let go of it while Python was about to exit ended the process with SIGABRT."""
    held_by_gloo, waits = [], []
    monkeypatch.setattr("torch.distributed.all_reduce", held_by_gloo.append)
    monkeypatch.setattr("time.sleep", lambda _: waits.append(held_by_gloo.pop().item()))
    team = Processes(0, 2, torch.device("cpu"))
    assert [team.sum(torch.tensor([n])).item() for n in (3, 4)] == [3, 4]
    team.let_go()
    assert not held_by_gloo
    assert waits == [4, 3]


def test_two_processes_give_the_result_of_one(tmp_path):
    alone = replace(SMALL, sync_stats=True)
    train(alone, tmp_path / "one", show=False)
    process = torchrun(
        "train", "digits", *OPTIONS, "--batch-size", "32", "--sync-stats", "--out", str(tmp_path / "two")
    )
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    for one, two in zip(results(tmp_path / "one"), results(tmp_path / "two"), strict=True):
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)
        assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-2)
    with pytest.raises(RunError, match="a different recipe"):
        train(alone, tmp_path / "two", show=False)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_is_one_sentence_of_the_other(tmp_path, killed):
    """It was a traceback that ended in gloo's "Connection reset by peer"."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-W", "ignore", held.__file__, "train", "digits", *OPTIONS, "--epochs", "3"]
    command += ["--batch-size", "32", "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    gate(tmp_path / "run").touch()
    pair = [
        subprocess.Popen(
            command,
            env={**environment, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        wait_until(lambda: len(Run(tmp_path / "run").read()) == held.EPOCH, pair[0])
        pair[killed].kill()
    finally:
        gate(tmp_path / "run").unlink()
    _, told = pair[1 - killed].communicate(timeout=PATIENCE)
    pair[killed].communicate()
    assert pair[1 - killed].returncode == 1
    told = [line for line in told.splitlines() if not line.startswith("[W")]  # torch's own warnings
    assert told == [
        f"balnorm: process {1 - killed} lost its connection to another one of the 2: if that one was killed or has "
        "failed, repeat the command to resume"
    ]


def test_other_errors_of_several_processes_stay_as_they_are(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("rendezvous", "PrefixStore"):
        monkeypatch.setattr(f"balnorm.bench.training.processes.{name}", lambda *_, **__: iter([(None, 0, 2)]))
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), processes("cpu"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(LostProcessError, match="process 0 lost its connection"), processes("cpu"):
        raise torch.distributed.DistNetworkError("")


@pytest.mark.slow
def test_a_killed_process_ends_the_job_and_a_restart_resumes_it(tmp_path):
    """With an average of weights and statistics, and with a checkpoint at the last of an epoch's ten steps."""
    arguments = ["train", "digits", *OPTIONS, "--epochs", "3", "--batch-size", "32", "--checkpoint-steps", "5"]
    arguments += ["--norm", "batchnorm", "--ema", "0.9"]
    process = torchrun(*arguments, "--out", str(tmp_path / "whole"))
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    gate(tmp_path / "killed").touch()
    process = torchrun(*arguments, "--out", str(tmp_path / "killed"), restarts=2)
    try:
        wait_until(lambda: len(Run(tmp_path / "killed").read()) == held.EPOCH, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
    finally:
        gate(tmp_path / "killed").unlink()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert "resuming" in output
    assert_same(tmp_path / "whole", tmp_path / "killed")


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path):
    process = balnorm("train", "digits", *OPTIONS, "--norm", "groupnorm", "--seed", "3", cwd=tmp_path)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert "digits groupnorm seed 3  epoch 2/2  train loss" in output
    assert Run(tmp_path / "runs" / "digits-groupnorm-3").recipe.norm == "groupnorm"


def test_a_terminal_sees_how_far_a_run_is_ten_times_a_second(monkeypatch):
    now = 5.0
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("balnorm.bench.training.progress.time", types.SimpleNamespace(monotonic=lambda: now))
    with Progress("a run", epochs=3) as progress:
        progress.measured(loss=0.5, accuracy=0.25, speed=1234.4)
        progress.step(1, 4, 10)
        (task,) = progress.bar.tasks
        assert (task.description, task.completed, task.total) == ("a run", 14, 30)
        assert task.fields["note"] == "epoch 2/3  loss 0.500  accuracy 25.0%  1,234 images/s"
        now = 5.05
        progress.step(1, 5, 10)
        assert task.completed == 14
        now = 5.15
        progress.step(1, 6, 10)
        assert task.completed == 16


def test_a_run_that_is_to_say_nothing_says_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    train(replace(SMALL, epochs=1, train_limit=64), tmp_path / "run", show=False)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, "balnorm train digits --seed 3 --out runs/a"),
        (["train", "--help"], 0, "--batch-size"),
        (["train", "--help"], 0, "imagenet-resnet50"),
        (["compare", "--help"], 0, "--seeds"),
        (["--version"], 0, f"balnorm {version('balnorm')}\n"),
        (["train"], 2, "balnorm: which recipe? as in `balnorm train digits`:\n  digits                scikit-learn's"),
        (
            ["train", "cifar10-wrn", "--epochs", "10", "--root", "x"],
            2,
            "at epochs 150, 225 of 300; with 10 epochs, at 5, 8 of 10",
        ),
        (["train", "cifar10-wrn", "--epochs", "1", "--root", "x"], 2, "with 1 epoch, never"),
        (
            ["train", "cifar10-wrn", "--epochs", "9", "--drops", "9"],
            2,
            "drops must be ascending epochs below 9, got (9,)",
        ),
        (["train", "folder", "--root", "nowhere"], 2, "nowhere has no folder train or training"),
        ([], 2, "usage: balnorm COMMAND"),
        (["trian", "digits"], 2, "balnorm: there is no command 'trian': did you mean train?"),
        (["train", "digit"], 2, "the recipe must be one of digits, "),
        (["train", "digits", "--epoch", "3"], 2, "Perhaps you meant"),
        (["train", "digits", "--lr", "fast"], 2, "could not convert string to float: 'fast'"),
        (["train", "digits", "--norm", "batch"], 2, "weightnorm-meanonly"),
        (["train", "digits", "--epochs", "0"], 2, "epochs must be above 0, got 0"),
        (["train", "digits", "--checkpoint-steps", "0"], 2, "checkpoint_steps must be at least 1, got 0"),
        (["train", "cifar10-desk", "--root", "nowhere"], 2, "balnorm data get cifar10 --root nowhere"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, monkeypatch, capsys, arguments, code, message):
    from balnorm.bench.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    output = capsys.readouterr()
    assert message in (output.out if code == 0 else output.err + output.out)
    assert "Traceback" not in output.err


def test_data_commands(tmp_path, capsys):
    from balnorm.bench.cli import main

    assert main(["data", "list", "--root", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "digits         inside scikit-learn" in output
    assert "cifar10        missing" in output
    assert main(["data", "check", "mnist", "--root", str(tmp_path)]) == 1
    assert "mnist/train-images-idx3-ubyte.gz" in capsys.readouterr().out
    assert main(["data", "get", "digits", "--root", str(tmp_path)]) == 0
    assert main(["data", "get"]) == 2
    assert "which data set? one of cifar10" in capsys.readouterr().err
    assert main(["data", "get", "imagenet"]) == 2
    assert main(["data", "delete", "mnist"]) == 2


def test_without_the_extra_the_command_says_what_to_install():
    program = "import sys; sys.modules['tyro'] = None; from balnorm_command import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, "data", "list"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "balnorm: the command line needs tyro: pip install '.[bench]' in a clone of the repository\n"
