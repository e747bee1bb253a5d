"""The command line where something is in its way: nobody reads, the disk is full, names and files are odd."""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from dataclasses import replace
from unittest import mock

import pytest
import torch

from balnorm.bench import cli
from balnorm.bench.cli import main
from balnorm.bench.console import printable
from balnorm.bench.export import load_saved
from balnorm.bench.export import test_batch as batch_of_tests
from balnorm.bench.files import create_atomically
from balnorm.bench.recipes import get_recipe
from balnorm.bench.study.display import Display
from balnorm.bench.study.plots import figure_files
from balnorm.bench.study.report import write_report
from balnorm.bench.study.results import read_results
from balnorm.bench.training import learner
from balnorm.bench.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from balnorm.bench.training.config import without_effect
from balnorm.bench.training.run import Run, RunBusyError, Setting
from balnorm.bench.training.trainer import train
from folders import make_run
from held import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's
SMALL = ["--width", "8", "--epochs", "3", "--train-limit", "100", "--test-limit", "20", "--batch-size", "50"]
RECIPE = replace(get_recipe("digits"), width=8, epochs=3, train_limit=100, test_limit=20, batch_size=50)


# --------------------------------------------------------------------------------------------------------------------
# Output that does not arrive
# --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def printing_to(kind):
    """Standard output that takes nothing. (A fixture cannot do this: pytest has its own from one phase to the next.)"""
    where = "/dev/full"
    if kind == "a closed pipe":
        reader, where = os.pipe()
        os.close(reader)
    elif not os.path.exists(where):
        pytest.skip(f"this system has no {where}")
    with open(where, "w") as out, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        yield


nowhere = pytest.mark.parametrize("kind", ["a closed pipe", "a full disk"])


@nowhere
def test_training_goes_on_when_nobody_reads(kind, tmp_path):
    """`balnorm train ... | head -1` stopped after two epochs and called that success."""
    with printing_to(kind):
        assert main(["train", "digits", *SMALL, "--out", str(tmp_path / "run")]) == 0
    assert len(Run(tmp_path / "run").read()) == 3


@nowhere
def test_training_from_python_goes_on_when_nobody_reads(kind, tmp_path):
    with printing_to(kind):
        assert len(train(RECIPE, tmp_path / "run")) == 3


@nowhere
def test_a_failure_is_one_also_when_nobody_reads(kind, tmp_path):
    with printing_to(kind):
        assert main(["data", "check", "mnist", "--root", str(tmp_path)]) == 1
        assert main(["report", str(tmp_path)]) == 2


@nowhere
def test_a_report_is_written_when_nobody_reads(kind, tmp_path):
    make_run(tmp_path)
    with printing_to(kind):
        assert main(["report", str(tmp_path), "--formats", "svg"]) == 0
        assert main(["pack", str(tmp_path)]) == 0
    assert (tmp_path / "report" / "index.html").exists()
    assert (tmp_path / "metrics.csv").exists()


@nowhere
@pytest.mark.parametrize("command", [["--help"], ["data", "list"], ["report", "--help"]])
def test_a_command_that_only_prints_says_when_it_could_not(kind, command, capsys):
    with printing_to(kind):
        assert main(command) == (0 if kind == "a closed pipe" else 1)
    expected = "balnorm: the output could not be written (No space left on device)\n"
    assert capsys.readouterr().err == ("" if kind == "a closed pipe" else expected)


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_plain_terminal_gets_what_it_can_show(tmp_path, monkeypatch, encoding):
    """A dash and an infinity in the tables ended the report with a traceback."""
    for seed in range(3):
        make_run(tmp_path, "none", seed, [0.2, 0.3, 0.4][: 2 + (seed > 0)], epochs=3, diverged=seed == 0)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert main(["report", str(tmp_path), "--formats", "svg"]) == 0
    assert "1.200 (1.200-inf)" in stream.buffer.getvalue().decode(encoding)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of Unix")
def test_closed_streams_are_no_obstacle(tmp_path):
    """With `>&-` the next file that is opened would become standard output, and be written into."""
    command = " ".join([sys.executable, "-W", "ignore", "-m", "balnorm"])
    options = " ".join([*SMALL, "--norms none --seeds 1 --threads 1 --out", str(tmp_path / "study")])
    for program, code in {f"compare digits {options} >&- 2>&- <&-": 0, "data list >&-": 1, "--help >&-": 1}.items():
        done = subprocess.run(["bash", "-c", f"{command} {program}"], capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    (run,) = read_results([tmp_path / "study"]).runs
    assert run.state == "finished"
    assert (tmp_path / "study" / "report" / "index.html").exists()


# --------------------------------------------------------------------------------------------------------------------
# Trained networks
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that finished, one that diverged, and one with standardised pixels."""
    folder = tmp_path_factory.mktemp("runs")
    train(RECIPE, folder / "finished", show=False)
    train(replace(RECIPE, norm="balnorm", lr=1e12, schedule="constant"), folder / "diverged", show=False)
    train(replace(RECIPE, norm="batchnorm", epochs=1), folder / "standardised", show=False)
    return folder


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 16 kB, where we may make one."""
    place = tmp_path / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no permission to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("kind", ["pt", "pt2", "onnx"])
def test_a_network_that_cannot_be_written_is_one_sentence(runs, full_disk, tmp_path, capsys, kind):
    """On a full disk, torch's writers ended the process with SIGABRT, or with a traceback."""
    (tmp_path / f"folder.{kind}").mkdir()
    (tmp_path / "file").write_text("")
    for place, reason in {
        full_disk / f"x.{kind}": "No space left on device",
        tmp_path / f"folder.{kind}": "Is a directory",
        tmp_path / "file" / f"x.{kind}": "File exists",
    }.items():
        assert main(["fold", str(runs / "finished"), "--out", str(place)]) == 1
        printed = capsys.readouterr()
        assert printed.err.endswith(f": {reason}\n")
        assert printed.err.count("\n") == 1
        assert printed.out == ""
    assert list(full_disk.iterdir()) == []
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]


def test_a_diverged_run_is_called_that(runs, tmp_path, capsys):
    assert main(["fold", str(runs / "diverged"), "--out", str(tmp_path / "x.pt")]) == 0
    assert "the run has diverged; this is its network after 1 of 3 epochs" in capsys.readouterr().err
    assert main(["inspect", str(runs / "diverged")]) == 0
    printed = capsys.readouterr().out
    assert "diverged after 1 of 3 epochs" in printed
    assert "finished" not in printed
    assert (
        main(["train", "digits", *SMALL, "--lr", "1e12", "--schedule", "constant", "--out", str(runs / "diverged")])
        == 0
    )
    assert "has diverged" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["finished", "standardised"])
def test_a_network_is_inspected_with_the_test_images_there_are(runs, monkeypatch, capsys, name):
    """20 test images, fewer than the 64 that are asked for by default, were said to be too few for a "batch_size"."""
    monkeypatch.setattr("balnorm.bench.training.images.channel_statistics", pytest.fail)  # of the training images
    assert main(["inspect", str(runs / name)]) == 0
    assert "stem" in capsys.readouterr().out
    saved = load_saved(runs / name)
    assert len(batch_of_tests(saved, "data", 64)) == 20
    assert len(batch_of_tests(saved, "data", 7)) == 7
    assert saved.images.count == (100, 20)


def test_a_figure_that_cannot_be_written_is_one_sentence(runs, tmp_path, capsys):
    assert main(["inspect", str(runs / "finished"), "--figure", str(tmp_path / "nowhere" / "x.svg")]) == 1
    assert capsys.readouterr().err.endswith("x.svg: No such file or directory\n")


# --------------------------------------------------------------------------------------------------------------------
# Images that changed, and states that do not fit
# --------------------------------------------------------------------------------------------------------------------

FOLDER = replace(get_recipe("folder"), epochs=2, batch_size=4, width=8, image_size=16, workers=0, lr=0.01)


def make_images(root, classes=("blue", "red"), count=4, splits=("train", "val")):
    from PIL import Image

    for split in splits:
        for shade, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (16, 16), (80 * shade, 20, 10 * i)).save(root / split / name / f"{i}.png")
    return root


def test_inspecting_needs_no_training_images(tmp_path, capsys):
    images = make_images(tmp_path / "images")
    train(FOLDER, tmp_path / "run", root=images, show=False)
    shutil.rmtree(images / "train")
    assert main(["inspect", str(tmp_path / "run"), "--root", str(images)]) == 0
    assert load_saved(tmp_path / "run").images.classes == ("blue", "red")
    shutil.rmtree(images / "val" / "red")
    assert main(["inspect", str(tmp_path / "run"), "--root", str(images)]) == 1
    assert "val has no images of red" in capsys.readouterr().err


def test_a_changed_image_folder_is_told_at_resume(tmp_path, capsys):
    images = make_images(tmp_path / "images")
    train(replace(FOLDER, epochs=1), tmp_path / "run", root=images, show=False)
    options = ["train", "folder", "--epochs", "1", "--batch-size", "4", "--width", "8", "--image-size", "16"]
    options += ["--workers", "0", "--lr", "0.01", "--out", str(tmp_path / "run"), "--root", str(images)]
    assert main(options) == 0
    (images / "train" / "red" / "0.png").unlink()
    assert main(options) == 1
    told = "are not those that {} was started with: there were 8 to train with and 8 to test with, and are 7 to"
    assert told.format(tmp_path / "run") in capsys.readouterr().err
    make_images(images, classes=["green"])
    assert main(options) == 1
    assert "the classes were blue, red, and are blue, green, red\n" in capsys.readouterr().err


def change_position(**values):
    return lambda state: state["position"].update(values)


def make_whole(state):
    state["model"] = {name: value.long() for name, value in state["model"].items()}


def change_optimizer(state):
    next(iter(state["optimizer"]["state"].values()))["momentum_buffer"] = torch.zeros(3)


UNFIT = {
    "weights that are whole numbers": make_whole,
    "a weight of another shape": lambda state: state["model"].update({"head.weight": torch.zeros(2, 2)}),
    "a weight less": lambda state: state["model"].popitem(),
    "no weights": lambda state: state.update(model=7),
    "no images": lambda state: state.update(images=[]),
    "an epoch beyond the last": change_position(epoch=99),
    "an epoch that is no number": change_position(epoch="1"),
    "a step beyond the last": change_position(step=3),
    "a time that is none": change_position(seconds=float("nan")),
    "other sums": change_position(sums=torch.zeros(2)),
    "a position of more": change_position(speed=1),
    "an optimiser of another network": change_optimizer,
    "an optimiser with other options": lambda state: state["optimizer"]["param_groups"][0].update(nesterov=True),
    "no optimiser": lambda state: state.update(optimizer={}),
    "no random state": lambda state: state.update(rng=[torch.zeros(3)]),
    "a part more": lambda state: state.update(more=1),
    "another recipe": lambda state: state["recipe"].update(lr=0.2),
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run with two checkpoints, of one epoch and of two; and the same run to its end."""
    folder = tmp_path_factory.mktemp("interrupted")
    train(RECIPE, folder / "whole", show=False)
    add_record = Run.add_record

    def failing(self, record):
        if record["epoch"] == 3:
            raise KeyboardInterrupt
        add_record(self, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "add_record", failing)
        with pytest.raises(KeyboardInterrupt):
            train(RECIPE, folder / "run", show=False)
    return folder


@pytest.mark.parametrize("kind", UNFIT)
def test_a_state_that_does_not_fit_leaves_the_one_before(interrupted, tmp_path, capsys, kind):
    """With the right checksum and wrong content, the resumed run ended with a traceback."""
    shutil.copytree(interrupted / "run", tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    state = load_checkpoint(path).result
    UNFIT[kind](state)
    previous = path.with_name("checkpoint.pt.previous").read_bytes()
    save_checkpoint(path, state)
    path.with_name("checkpoint.pt.previous").write_bytes(previous)
    train(RECIPE, tmp_path / "run")
    printed = capsys.readouterr().out
    assert "checkpoint.pt does not fit this run (" in printed
    assert "using the previous one" in printed
    assert "at epoch 2, step 0" in printed
    ours, theirs = (Run(folder).read()[-1] for folder in (tmp_path / "run", interrupted / "whole"))
    assert (ours["epoch"], ours["test_loss"]) == (3, theirs["test_loss"])


def test_two_states_that_do_not_fit_are_one_sentence(interrupted, tmp_path, capsys):
    shutil.copytree(interrupted / "run", tmp_path / "run")
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt").result
    for _ in range(2):
        save_checkpoint(tmp_path / "run" / "checkpoint.pt", {**state, "model": {}})
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(["train", "digits", *SMALL, "--out", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().err
    assert printed.endswith(f"move {tmp_path / 'run'} away to start again\n")
    assert printed.count("\n") == 1
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    for command in (["inspect"], ["fold", "--out", str(tmp_path / "x.pt")]):
        assert main([command[0], str(tmp_path / "run"), *command[1:]]) == 1
        assert "does not fit this run" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------
# Folders of images
# --------------------------------------------------------------------------------------------------------------------


def break_link(images):
    (images / "train" / "red" / "9.png").symlink_to(images / "gone.png")


FOLDERS = {
    "an empty class": (
        lambda images: [p.unlink() for p in (images / "train/red").iterdir()],
        "train has no images of red",
    ),
    "no class to test": (
        lambda images: shutil.rmtree(images / "val/red"),
        "val has no images of red: add some, or remove",
    ),
    "a broken link": (break_link, "red/9.png cannot be opened: the link is broken, fix or remove it"),
    "one class": (
        lambda images: [shutil.rmtree(images / s / "red") for s in ("train", "val")],
        "has one class only, blue",
    ),
    "no image": (lambda images: (images / "val/red/0.png").write_bytes(b"no"), "0.png cannot be decoded"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_of_images_that_cannot_be_meant_are_refused(tmp_path, capsys, kind):
    images = make_images(tmp_path / "images")
    change, answer = FOLDERS[kind]
    change(images)
    options = ["--epochs", "1", "--batch-size", "2", "--width", "8", "--image-size", "16", "--workers", "0"]
    assert main(["train", "folder", *options, "--root", str(images), "--out", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().err
    assert answer in printed
    assert printed.count("\n") == 1
    assert "skip_corrupt" not in printed  # which the command line does not have


# --------------------------------------------------------------------------------------------------------------------
# Mistakes in a command
# --------------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "--lr 1e300": "lr must be at most 1e+30, got 1e+300",
    "--weight-decay 1e308": "weight_decay must be at most 1e+30, got 1e+308",
    "--mixup input --alpha 1e300": "alpha must be at most 1e+06, got 1e+300",
    "--clip-norm 1e300": "clip_norm must be at most 1e+30",
    "--epochs 99999999999999999999": "epochs must be at most 1e+09",
    "--model wide_resnet --depth 600000002": "depth must be at most 10000, got 600000002",
    "--padding 100000": "padding must be at most 8, the size of an image, got 100000",
    "--device meta": "device 'meta' holds no numbers",
    "--device foo": "device must be something like cpu, cuda or cuda:1, got 'foo'",
    "--batch-size 5000": "batch_size must be from 1 to 100 for 100 images, got 5000",
    "--train-limit -5": "train_limit must be above 0, got -5",
}
OF_TRAIN = {
    "--checkpoint-minutes nan": "checkpoint_minutes must be 0 or more, and finite, got nan",
    "--checkpoint-minutes -1": "checkpoint_minutes must be 0 or more",
    "--checkpoint-steps 0": "checkpoint_steps must be at least 1, got 0",
}
OF_COMPARE = {
    "--seeds 1000000": "a study of 4,000,000 runs is too large: 10,000 is the most",
    "--seeds 99 --vary lr=0.1,0.2,0.3 momentum=0.1,0.2,0.3,0.4,0.5 batch_size=10,20": "a study of 11,880 runs is too",
    "--ray=": 'ray must be the address of a cluster, or "local"',
    "--ray local --gpus nan": "gpus must not be negative",
    "--vary batch_size=50,5000": "batch_size must be from 1 to 100 for 100 images, got 5000",
}


@pytest.mark.parametrize(
    ("command", "options", "answer"),
    [("train", *each) for each in (MISTAKES | OF_TRAIN).items()]
    + [("compare", *each) for each in (MISTAKES | OF_COMPARE).items()],
)
def test_mistakes_exit_with_two_and_a_sentence(tmp_path, capfd, command, options, answer):
    assert main([command, "digits", *SMALL, *options.split(" "), "--out", str(tmp_path / "out")]) == 2
    printed = capfd.readouterr().err
    assert answer in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_network_beyond_the_memory_is_one_sentence(tmp_path, capsys):
    assert main(["train", "digits", *SMALL, "--width", "3000000", "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err.startswith("balnorm: there is not enough memory: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", "there is not enough memory"),
        ("DataLoader worker (pid 7) is killed: you might be out of shared memory", "lack shared memory"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "a process that decodes images died"),
        ("CUDA error: an illegal memory access was encountered", None),
    ],
)
def test_only_a_lack_of_memory_is_called_one(monkeypatch, capsys, text, answer):
    monkeypatch.setitem(cli._COMMANDS, "train", mock.Mock(side_effect=RuntimeError(text)))
    if answer is None:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            main(["train", "digits"])
    else:
        assert main(["train", "digits"]) == 1
        assert answer in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ("--alpha 2", "alpha has no effect: there is no mixup"),
        ("--workers 7", "workers has no effect: the images come from no folder"),
        ("--schedule onecycle --momentum 0.5", "momentum has no effect: the one-cycle schedule has its own"),
        ("--padding 0", ""),
        ("--mixup input --alpha 2", ""),
    ],
)
def test_options_without_effect_are_told(tmp_path, capsys, options, answer):
    folder = ["--root", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run")]
    assert main(["train", "cifar10-desk", *options.split(), *folder]) == 2  # there is no data
    *told, _ = capsys.readouterr().err.splitlines()
    assert told == ([f"balnorm: {answer}"] if answer else [])
    assert main(["compare", "cifar10-desk", *options.split(), *folder]) == 2
    *told, _ = capsys.readouterr().err.splitlines()
    assert told == ([f"balnorm: {answer}"] if answer else [])


def test_an_option_that_matters_to_some_runs_is_no_mistake():
    base = get_recipe("digits")
    mixed, plain = replace(base, alpha=2.0, mixup="input"), replace(base, alpha=2.0)
    assert without_effect(base, [plain, plain]) == ["alpha has no effect: there is no mixup"]
    assert without_effect(base, [plain, mixed]) == []
    assert without_effect(base, [replace(base, image_size=64, workers=1)]) == [
        "image_size has no effect: the images come from no folder",
        "workers has no effect: the images come from no folder",
    ]
    assert without_effect(get_recipe("folder"), [replace(get_recipe("folder"), padding=2)]) == [
        "padding has no effect: images from folders are cropped at random instead"
    ]


# --------------------------------------------------------------------------------------------------------------------
# Reports of odd names and hostile files
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes there")
def test_a_name_that_is_not_utf8_stops_no_report(tmp_path, capsys):
    run = make_run(tmp_path, name="balnorm-\udcff-seed0")
    (run.folder / "holiday-\udcfe.jpg").write_text("")
    assert main(["report", str(tmp_path)]) == 0
    assert "holiday-\\udcfe.jpg" in capsys.readouterr().err
    page = (tmp_path / "report" / "index.html").read_bytes().decode()
    assert "balnorm-%FF-seed0/metrics.jsonl" in page
    assert "holiday-\\udcfe.jpg" in page


ODD_NAMES = ["a$b", "$", "$\\alpha$", "\udcff", "\x00\x1b", "_", "名前", "</td><script>alert(1)</script>", "`[x](y)`|*"]


def test_odd_names_are_drawn_as_they_are(tmp_path):
    """A lone dollar in one of two names ended the report between its files."""
    for name in ODD_NAMES:
        run = make_run(tmp_path, name=f"run{ODD_NAMES.index(name)}", lr=0.1)
        run.config.write_text(json.dumps({**json.loads(run.config.read_text()), "name": name}))
    report = write_report([tmp_path], tmp_path / "report", title="$")
    assert not report.problems
    drawing = (tmp_path / "report" / "accuracy.svg").read_text()
    assert ET.fromstring(drawing).tag.endswith("svg")
    for shown in ("name=a$b", "name=$", r"name=$\alpha$", r"name=\udcff", r"name=\x00\x1b", "name=名前"):
        assert f">{shown}</text>" in drawing
    text = (tmp_path / "report" / "results.md").read_text()
    assert "<script" not in text
    assert "balnorm name=&lt;/td&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert r"balnorm name=\`\[x\](y)\`\|\*" in text


def test_a_figure_that_cannot_be_drawn_stops_no_page_and_leaves_nothing_stale(tmp_path, monkeypatch):
    for lr in (0.1, 0.2, 0.3):
        make_run(tmp_path, lr=lr)
    folder = tmp_path / "report"
    write_report([tmp_path], folder)
    (folder / "mine.svg").write_text("")
    assert (folder / "by-lr.png").exists()
    shutil.rmtree(tmp_path / "runs" / "balnorm-lr=0.3-seed0")

    def fail(figure, formats):
        if figure.key == "loss":
            raise RuntimeError("no font\nat all")
        return figure_files(figure, formats)

    monkeypatch.setattr("balnorm.bench.study.report.figure_files", fail)
    report = write_report([tmp_path], folder, formats=["svg"])
    assert report.problems == ("loss could not be drawn (no font at all)",)
    assert "loss could not be drawn" in report.page.read_text()
    names = {path.name for path in folder.iterdir() if path.suffix not in (".csv", ".md", ".tex")}
    assert names == {"index.html", "accuracy.svg", "training-loss.svg", "mine.svg"}


def test_a_file_that_cannot_be_written_stops_no_other(tmp_path, capsys):
    make_run(tmp_path)
    (tmp_path / "out" / "accuracy.svg" / "full").mkdir(parents=True)
    assert main(["report", str(tmp_path), "--formats", "svg", "--out", str(tmp_path / "out")]) == 1
    assert "the report could not be written (" in capsys.readouterr().err
    assert {"index.html", "loss.svg", "results.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_a_folder_of_somebody_else_is_not_cleared(tmp_path):
    make_run(tmp_path)
    (tmp_path / "out").mkdir()
    for name in ("by-lr.svg", "differences.csv", "index.html"):
        (tmp_path / "out" / name).write_text("mine")
    write_report([tmp_path], tmp_path / "out", formats=["svg"])
    assert (tmp_path / "out" / "by-lr.svg").read_text() == "mine"
    assert (tmp_path / "out" / "differences.csv").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "environment.json"])
def test_deeply_nested_files_are_told(tmp_path, name):
    make_run(tmp_path, seed=0)
    run = make_run(tmp_path, seed=1)
    (run.folder / name).write_text("[" * 100_000 + "\n")
    results = read_results([tmp_path])
    assert len(results.problems) == 1
    assert name in results.problems[0]


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


GOOD = {"epoch": 1, "lr": 0.1, "momentum": 0.9, "train_loss": 1.0, "train_accuracy": 0.5, "test_loss": 1.0}
GOOD |= {"test_accuracy": 0.5, "seconds": 1.0, "peak_memory": None}
IMPOSSIBLE = {
    "line 1 has 5.0 for test_accuracy, which is impossible": [{**GOOD, "test_accuracy": 5.0}],
    "line 1 has -0.1 for train_accuracy, which is impossible": [{**GOOD, "train_accuracy": -0.1}],
    "line 1 has -3 for seconds, which is impossible": [{**GOOD, "seconds": -3}],
    "line 1 has -1.0 for test_loss, which is impossible": [{**GOOD, "test_loss": -1.0}],
    "line 1 has True for peak_memory, which is impossible": [{**GOOD, "peak_memory": True}],
    "line 2 is epoch 3 instead of 2": [GOOD, {**GOOD, "epoch": 3}],
    "line 3 is epoch 3 of a run of 2": [{**GOOD, "epoch": epoch} for epoch in (1, 2, 3)],
    "line 2 comes after the run diverged": [{"epoch": 1, "diverged": True, "seconds": 1.0}, {**GOOD, "epoch": 2}],
}


@pytest.mark.parametrize("answer", IMPOSSIBLE)
def test_metrics_that_cannot_be_are_a_failed_run(tmp_path, answer):
    run = make_run(tmp_path)
    run.metrics.write_text(lines(*IMPOSSIBLE[answer]))
    results = read_results([tmp_path])
    assert results.count("failed") == 1
    assert answer in results.problems[0]


# --------------------------------------------------------------------------------------------------------------------
# Text that would control the terminal, and files that are none
# --------------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("name", ["[/x]", "[red]", "\x1b[2Jgone"])
def test_a_name_is_shown_as_it_is(tmp_path, monkeypatch, name):
    """Rich took a name in brackets for markup, and ended training with a MarkupError."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["train", "digits", *SMALL, "--epochs", "1", "--name", name, "--out", str(tmp_path / "run")]) == 0
    shown = printable(name)
    assert f"{shown} balnorm seed 0  epoch 1/1" in terminal.getvalue().replace("\n", " ")
    assert "\x1b[2J" not in terminal.getvalue()


def test_a_setting_is_shown_as_it_is():
    from rich.console import Console

    run = Run("x", RECIPE)
    run.setting = Setting("balnorm", (("name", "[/x]\x1b[2J"),))
    with Console(file=io.StringIO(), width=200) as console:
        console.print(Display([run], 1).table())
    assert r"balnorm name=[/x]\x1b[2J" in console.file.getvalue()


def test_escape_codes_in_a_file_do_not_reach_the_terminal(tmp_path, capsys):
    for seed in (0, 1):
        make_run(tmp_path, seed=seed, name=f"run{seed}")
    run = Run(tmp_path / "runs" / "run0")
    run.error.write_text("Traceback\nValueError: \x1b]0;mine\x07\x1b[31mred\x9b2J\n")
    (run.folder / "a\x1b[31m.jpg").write_text("")
    other = Run(tmp_path / "runs" / "run1")
    other.config.write_text(json.dumps({**json.loads(other.config.read_text()), "name": "\x1b[31m", "epochs": 2}))
    assert main(["report", str(tmp_path), "--formats", "svg"]) == 0
    printed = capsys.readouterr()
    assert not set("\x1b\x07\x9b") & set(printed.out + printed.err)
    assert r"ValueError: \x1b]0;mine\x07\x1b[31mred\x9b2J" in printed.err
    assert r"name=\x1b[31m" in printed.out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    """As metrics.jsonl it made `report` wait for ever."""
    commands, pipes = [], []
    for name in ("metrics.jsonl", "config.json", "environment.json", "error.txt", "checkpoint.pt"):
        study = tmp_path / name
        run = make_run(study, seed=0)
        make_run(study, seed=1)
        pipes += [run.folder / name, study / "report" / "index.html"]
        (run.folder / name).unlink(missing_ok=True)
        (study / "report").mkdir()
        commands += [["report", str(study / "runs"), "--formats", "svg", "--out", str(study / "report")]]
        commands += [["pack", str(study / "runs")], ["inspect", str(run.folder)]]
    for pipe in pipes:
        os.mkfifo(pipe)
    code = f"from balnorm.bench.cli import main; print([main(command) for command in {commands!r}])"
    program = [sys.executable, "-W", "ignore", "-c", code]  # which can be ended if it hangs
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout.endswith(f"{[0, 0, 1] * 5}\n"), done.stderr
    assert all(str(pipe) in done.stderr for pipe in pipes[::2]), done.stderr


@pytest.mark.parametrize("name", ["study.json", "metrics.csv"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_a_packed_study_is_not_waited_for(tmp_path, name):
    make_run(tmp_path)
    assert main(["pack", str(tmp_path), "--out", str(tmp_path / "packed")]) == 0
    (tmp_path / "packed" / name).unlink()
    os.mkfifo(tmp_path / "packed" / name)
    (problem,) = read_results([tmp_path / "packed"]).problems
    assert problem.endswith(f"{name} cannot be read (not a regular file): left out")


LONG = "x" * 100_000
COMMANDS = ["train digits --norm {}", "train digits --out {}", "{}", "report {}", "compare --vary {}", "train --{}"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_argument_of_100_000_characters_is_not_repeated(capsys, command):
    assert main(command.format(LONG).split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("balnorm: an argument has 100,00")
    assert printed.err.endswith(" characters: 10,000 are enough for any name or list\n")
    assert printed.out == ""


def test_messages_are_shortened(tmp_path, capsys):
    """Their beginning and their end are kept: one says what is wrong, the other what to do."""
    long = LONG[:10_000]  # figures are drawn with it
    run = make_run(tmp_path, seed=0)
    run.error.write_text(f"Traceback\nValueError: {long}\n")
    other = make_run(tmp_path, seed=1)
    other.config.write_text(json.dumps({**json.loads(other.config.read_text()), "name": long}))
    assert main(["report", str(tmp_path), "--formats", "svg"]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert len(told) < 3000
    assert "seed0 failed: ValueError: xxx" in told
    assert "x ... x" in told
    assert main(["train", "digits", "--seed", "1", "--epochs", "2", "--out", str(other.folder)]) == 1
    told = capsys.readouterr().err
    assert len(told) < 3000
    assert "was started with a different recipe (name: 'digits', was 'xxx" in told
    assert told.endswith("to resume it, or another folder\n")


def test_a_command_that_is_not_utf8_is_packed(tmp_path):
    """`pack` failed with an error of encoding, `report` did not."""
    run = make_run(tmp_path)
    starts = json.loads(run.environment.read_text())
    starts[0] |= {"command": ["balnorm", "compare", "digits", "--name", "\udcff"], "host": "h\udcfe"}
    run.environment.write_text(json.dumps(starts))
    for seed, name in enumerate(("a\udcff", "b"), 1):
        make_run(tmp_path, seed=seed, name=f"run{seed}")
        config = tmp_path / "runs" / f"run{seed}" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "name": name}))
    assert main(["pack", str(tmp_path), "--out", str(tmp_path / "packed")]) == 0
    ours, theirs = (read_results([folder]).packed() for folder in (tmp_path / "runs", tmp_path / "packed"))
    assert ours == theirs
    assert "\udcff" in "".join(ours.commands)
    assert main(["report", str(tmp_path / "packed"), "--formats", "svg"]) == 0


# --------------------------------------------------------------------------------------------------------------------
# Checkpoints
# --------------------------------------------------------------------------------------------------------------------


def test_only_a_checkpoint_that_exists_is_called_intact(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "checkpoint.pt"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"there is no earlier checkpoint: free .* to start again"):
            save_checkpoint(path, {})
    save_checkpoint(path, {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"the previous checkpoint is intact: free .* to resume"):
        save_checkpoint(path, {})


def test_what_killed_processes_left_is_removed(tmp_path):
    run = Run(tmp_path / "run", RECIPE)
    run.create()
    names = [f"{name}.4711.tmp" for name in ("checkpoint.pt", "metrics.jsonl", "environment.json", "error.txt")]
    for name in [*names, "mine.tmp"]:
        (run.folder / name).write_text("half")
    with run.alone():
        assert {path.name for path in run.folder.iterdir()} == {"config.json", "lock", "mine.tmp"}
        (run.folder / names[0]).write_text("being written")
        with pytest.raises(RunBusyError), Run(run.folder).alone():  # whoever has the lock may be writing it
            pass
        assert (run.folder / names[0]).exists()


def test_nothing_is_removed_where_there_are_no_locks(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", RECIPE)
    run.create()
    (run.folder / "checkpoint.pt.4711.tmp").write_text("perhaps being written")
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with run.alone():
        assert (run.folder / "checkpoint.pt.4711.tmp").exists()


def test_a_file_that_another_process_created_first_is_kept(tmp_path, monkeypatch):
    """Also if that process has removed our temporary file, which it may take for a leftover."""

    def late(temporary, path):
        path.write_text("theirs")
        os.unlink(temporary)
        return link(temporary, path)

    link = os.link
    monkeypatch.setattr(os, "link", late)
    create_atomically(tmp_path / "config.json", b"ours")
    assert (tmp_path / "config.json").read_text() == "theirs"


IMPOSSIBLE_STATES = {
    "epoch -1": (change_position(epoch=-1), "there is no epoch -1 in a run of 3"),
    "epoch 4 of 3": (change_position(epoch=4), "there is no epoch 4 in a run of 3"),
    "epoch True": (change_position(epoch=True), "there is no epoch True in a run of 3"),
    "diverged 7": (change_position(diverged=7), "there is no epoch 3 in a run of 3"),
    "no epoch": (lambda state: state["position"].pop("epoch"), "there is no epoch None in a run of 3"),
    "int64 weights": (make_whole, "is torch.int64 instead of torch.float32"),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE_STATES)
def test_a_checkpoint_that_cannot_be_is_neither_inspected_nor_folded(runs, tmp_path, capsys, kind):
    change, answer = IMPOSSIBLE_STATES[kind]
    state = load_checkpoint(runs / "finished" / "checkpoint.pt").result
    change(state)
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    for command in (["inspect"], ["fold", "--out", str(tmp_path / "x.pt")]):
        assert main([command[0], str(tmp_path / "checkpoint.pt"), *command[1:]]) == 1
        assert answer in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


def test_a_checkpoint_that_unpacks_to_more_is_not_loaded(tmp_path):
    """A compressed archive of a megabyte took a gigabyte of memory."""
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save({"model": {"weight": torch.zeros(100_000)}}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {})
    magic = path.read_bytes().split(b"\n")[0]
    checksum = hashlib.sha256(packed.getvalue()).hexdigest().encode()
    path.write_bytes(b"\n".join([magic, checksum, packed.getvalue()]))
    with pytest.raises(CheckpointError, match=r"would take 400,\d+ bytes of memory, more than it has"):
        load_checkpoint(path)


@pytest.mark.parametrize("change", [{"width": 10**8}, {"depth": 6 * 10**4 + 2}, {"channels": 10**9}])
def test_a_checkpoint_cannot_ask_for_a_network_beyond_the_memory(runs, tmp_path, monkeypatch, change):
    """The network was built first, and the weights were compared with it afterwards."""
    state = load_checkpoint(runs / "finished" / "checkpoint.pt").result
    for part in ("recipe", "images"):
        state[part] |= {name: value for name, value in change.items() if name in state[part]}
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    devices = []
    build = learner.create_model
    monkeypatch.setattr(
        learner, "create_model", lambda *a, **k: devices.append(torch.get_default_device().type) or build(*a, **k)
    )
    with pytest.raises(CheckpointError, match="does not fit this run"):
        load_saved(tmp_path)
    assert set(devices) <= {"meta"}


# --------------------------------------------------------------------------------------------------------------------
# Somebody else's folder
# --------------------------------------------------------------------------------------------------------------------

ELSEWHERE = """
import sys
from balnorm.bench.cli import main

folder, run, small = sys.argv[1], sys.argv[1] + "/study/runs/balnorm-seed0", sys.argv[2:]
for command in (
    ["train", "digits", *small, "--out", folder + "/new"],
    ["train", "digits", *small, "--out", run],
    ["compare", "digits", *small, "--norms", "none", "--seeds", "1", "--out", folder + "/hidden"],
    ["report", folder + "/study", "--formats", "svg"],
    ["report", folder + "/hidden", "--out", "."],
    ["pack", folder + "/study"],
    ["fold", run, "--out", folder + "/x.pt"],
    ["inspect", folder + "/hidden/run"],
    ["data", "get", "mnist", "--root", folder + "/data"],
):
    print(main(command), command[0])
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give folders away")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv to give up root's rights with")
def test_a_folder_of_somebody_else_is_one_sentence(runs, tmp_path):
    place = tmp_path / "theirs"
    shutil.copytree(runs / "finished", place / "study" / "runs" / "balnorm-seed0")
    (place / "hidden" / "run").mkdir(parents=True)
    (place / "hidden").chmod(0o700)
    for path in (place, *place.rglob("*")):
        os.chown(path, 65534, 65534)
    limited = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", sys.executable, "-W", "ignore", "-c"]
    done = subprocess.run([*limited, ELSEWHERE, place, *SMALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {line[:2] for line in done.stdout.split("\n") if line} == {"1 ", "2 "}
    told = done.stderr.splitlines()
    assert len(told) == 9, done.stderr
    assert all(line.startswith("balnorm: ") and "Permission denied" in line for line in told), done.stderr
