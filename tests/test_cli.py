"""The command line: its help, answers in a sentence, and commands on trained networks."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from balnorm.bench.cli import _COMMANDS, main
from balnorm.bench.export import load_saved
from balnorm.bench.export import test_batch as batch_of_tests
from balnorm.bench.models import create_model
from balnorm.bench.recipes import RECIPES, get_recipe
from balnorm.bench.training.trainer import train
from balnorm_command import USAGE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's
SMALL = replace(get_recipe("digits"), width=4, epochs=1, train_limit=200, test_limit=101)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with BalNorm, one with averaged weights, and one with BatchNorm."""
    folder = tmp_path_factory.mktemp("runs")
    train(SMALL, folder / "balnorm", show=False)
    train(replace(SMALL, ema=0.9), folder / "averaged", show=False)
    train(replace(SMALL, norm="batchnorm"), folder / "batchnorm", show=False)
    train(replace(SMALL, epochs=2), folder / "two", show=False)
    return folder


COMMANDS = [[], *([name] for name in _COMMANDS), *(["train", recipe] for recipe in RECIPES)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_shows_examples(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main([*command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "usage: balnorm" in printed
    if command[:1] != ["completion"]:
        assert "examples:" in printed
        shown = re.findall(r"^  (balnorm .*|torchrun .*)$", printed, re.MULTILINE)
        assert len(shown) >= 2


def test_the_general_help_lists_the_commands():
    assert re.findall(r"^  (\w+)  ", USAGE, re.MULTILINE) == list(_COMMANDS)


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert main(["comapre"]) == 2
    assert "did you mean compare?" in capsys.readouterr().err
    assert main(["xyz"]) == 2
    assert "the commands are compare, train," in capsys.readouterr().err
    assert main([]) == 2
    assert main(["compare", "cifar"]) == 2
    assert "the recipe must be one of digits" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_error():
    for command in ("completion bash", "--help", "data list"):
        process = subprocess.Popen(
            [sys.executable, "-m", "balnorm", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.close()  # before it has written anything
        with process:
            assert process.stderr.read() == b""
        assert process.returncode == 0


@pytest.fixture(scope="module")
def completion():
    command = [sys.executable, "-m", "balnorm", "completion", "bash"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["balnorm", "co"], {"compare", "completion"}),
        (["balnorm", "train", "dig"], {"digits"}),
        (["balnorm", "train", "digits", "--norm", "batchr"], {"batchrenorm"}),
        (["balnorm", "compare", "--dry"], {"--dry-run"}),
        (["balnorm", "data", "g"], {"get"}),
    ],
)
def test_bash_completes(completion, words, completed):
    script = (
        'source <(printf "%s" "$1"); shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _balnorm; echo ${COMPREPLY[@]}'
    )
    command = ["bash", "-c", script, "bash", completion, *words]
    assert set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()) == completed


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_completion(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "compare" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n", "-c", script], check=True)


# --------------------------------------------------------------------------------------------------------------------
# Trained networks
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["balnorm", "averaged"])
@pytest.mark.parametrize("kind", ["pt", "pt2", "onnx"])
def test_a_folded_network_is_the_trained_one(runs, tmp_path, name, kind, capsys):
    out = tmp_path / "new" / f"network.{kind}"
    assert main(["fold", str(runs / name), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    saved = load_saved(runs / name / "checkpoint.pt")
    images = batch_of_tests(saved, "data", 5)
    expected = saved.model(images).detach()
    if kind == "pt":
        plain = create_model("wide_resnet", norm="none", num_classes=10, in_channels=1, depth=8, width=4).eval()
        plain.load_state_dict(torch.load(out, weights_only=True))
        found = plain(images)
    elif kind == "pt2":
        found = torch.export.load(out).module()(images)
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(out)
        found = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_damaged_checkpoint_is_told_where_the_one_before_is_used(runs, tmp_path, capsys):
    shutil.copytree(runs / "two", tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-50])
    assert main(["fold", str(tmp_path / "run"), "--out", str(tmp_path / "x.pt")]) == 0
    told = capsys.readouterr().err
    assert "checkpoint.pt is truncated or damaged: using the previous one" in told
    assert "the run is not finished; this is its network after 1 of 2 epochs" in told


def test_averaged_weights_are_the_ones_that_count(runs):
    plain, averaged = load_saved(runs / "balnorm").model, load_saved(runs / "averaged").model
    assert not torch.equal(plain.head.weight, averaged.head.weight)


def test_a_network_is_inspected(runs, tmp_path, capsys):
    figure = tmp_path / "balance.svg"
    assert main(["inspect", str(runs / "balnorm"), "--images", "16", "--figure", str(figure)]) == 0
    printed = capsys.readouterr().out
    assert "digits balnorm seed 0: wide_resnet" in printed
    assert re.search(r"stem +BalNormConv2d", printed)
    assert "<svg" in figure.read_text()
    assert main(["inspect", str(runs / "batchnorm")]) == 0
    assert "BatchNorm2d" in capsys.readouterr().out


def test_mistakes_with_checkpoints_are_answered_in_a_sentence(runs, tmp_path, capsys):
    bad = tmp_path / "bad.pt"
    bad.write_bytes((runs / "balnorm" / "checkpoint.pt").read_bytes()[:-100])
    foreign = tmp_path / "foreign.pt"
    torch.save({"a": 1}, foreign)
    out = str(tmp_path / "x.pt")
    for arguments, code, answer in [
        (["fold", str(bad), "--out", out], 1, "is truncated or damaged"),
        (["inspect", str(foreign)], 1, "is not a checkpoint of balnorm"),
        (["fold", str(tmp_path / "nowhere"), "--out", out], 1, "does not exist"),
        (["fold", str(runs / "batchnorm"), "--out", out], 2, "there is nothing to fold: the network has batchnorm"),
        (["fold", str(runs / "balnorm"), "--out", str(tmp_path / "x.h5")], 2, "must end in .pt, .pt2, .onnx"),
        (["fold", str(runs / "balnorm"), "--out", str(runs / "balnorm/checkpoint.pt")], 2, "choose another name"),
        (["inspect", str(runs / "balnorm"), "--images", "0"], 2, "images must be at least 1"),
        (["inspect", str(runs / "balnorm"), "--figure", "x.bmp"], 2, "must end in .svg, .png or .pdf"),
        (["bench", "digits", "--rounds", "1"], 2, "two rounds at least"),
    ]:
        assert main(arguments) == code, arguments
        printed = capsys.readouterr().err
        assert answer in printed
        assert printed.count("\n") == 1
    assert not (tmp_path / "x.pt").exists()


def test_a_bench_compares_with_the_first(capsys):
    options = ["--width", "4", "--batch-size", "8", "--rounds", "2", "--norms", "none", "batchnorm", "balnorm"]
    assert main(["bench", "digits", *options, "--vary", "mass=channel,position"]) == 0
    heading, *table = capsys.readouterr().out.splitlines()
    assert "2 interleaved rounds" in heading
    rows = {line.split("  ")[0]: line.split() for line in table[2:]}
    assert list(rows) == ["none", "batchnorm", "balnorm", "balnorm mass=position"]
    assert rows["none"][2] == "1.00"
    kept = {name: float(row[-1]) for name, row in rows.items()}
    assert kept["none"] == 1.0
    assert kept["batchnorm"] > 1.5  # a normalised copy of every activation
    assert kept["balnorm"] < 1.2
