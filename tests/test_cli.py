"""The command line: its help, answers in a sentence, and commands on trained networks."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from balnorm import fold
from balnorm.bench.cli import _COMMANDS, main
from balnorm.bench.export import load_saved
from balnorm.bench.export import test_batch as batch_of_tests
from balnorm.bench.models import create_model
from balnorm.bench.recipes import RECIPES, get_recipe
from balnorm.bench.training.trainer import train
from balnorm.bench.user_code import load_model
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
        (["balnorm", "fold", "--"], {"--out", "--shape", "--weights"}),
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


# --------------------------------------------------------------------------------------------------------------------
# Models of the user's own
# --------------------------------------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn
from balnorm import convert


def plain():
    layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


def balanced():
    return convert(plain())[0], torch.rand(4, 3, 8, 8)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = plain()

    def forward(self, x, y):
        return {"sum": self.layers(x + y), "other": [x]}


def constant():
    return nn.Identity()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with models, the state of one of them, the same model pickled, and that of a plain network."""
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    model, x = load_model("own_net.py:balanced")
    model(*x)
    torch.save(model.state_dict(), "state.pt")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, "lightning.ckpt")
    torch.save(model, "whole.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), "other.pt")
    return model.eval()


@pytest.mark.usefixtures("own")
def test_a_model_of_ones_own_is_measured_as_it_is_and_converted(capsys):
    command = ["bench", "own_net.py:plain", "--shape", "4,3,24,24", "--rounds", "2"]
    assert main([*command, "--vary", "mass=channel,position"]) == 0
    printed = capsys.readouterr()
    heading, *table = printed.out.splitlines()
    assert heading.startswith("own_net.py:plain, 4x3x24x24, float32, forward and backward; ")
    rows = {line.split("  ")[0]: line.split() for line in table[2:]}
    assert list(rows) == ["as it is", "balnorm", "balnorm mass=position"]
    assert float(rows["balnorm"][-1]) < 0.8 < float(rows["as it is"][-1])
    assert "balnorm: balnorm mass=position: 2 layers balanced, 2 norms removed" in printed.err


@pytest.mark.usefixtures("own")
def test_a_model_may_have_several_inputs_and_outputs(capsys):
    command = ["bench", "--shape", "2,3,8,8", "2,3,8,8", "--rounds", "2", "own_net:Two"]
    assert main(command) == 0
    assert "own_net:Two, 2x3x8x8 and 2x3x8x8" in capsys.readouterr().out


@pytest.mark.usefixtures("own")
def test_a_model_of_ones_own_is_inspected(tmp_path, capsys):
    assert main(["inspect", "own_net.py:balanced", "--figure", "balance.svg"]) == 0
    printed = capsys.readouterr().out
    assert "own_net.py:balanced: Sequential, " in printed
    assert "in training mode" in printed
    assert re.search(r"0 +BalNormConv2d", printed)
    assert "<svg" in (tmp_path / "balance.svg").read_text()
    assert main(["inspect", "own_net.py:balanced", "--weights", "lightning.ckpt", "--shape", "2,3,9,9"]) == 0
    assert "in eval mode" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["pt", "pt2", "onnx"])
def test_a_model_of_ones_own_is_folded(own, kind, capsys):
    shape = [] if kind == "pt" else ["--shape", "1,3,8,8"]
    assert main(["fold", "own_net.py:balanced", "--weights", "state.pt", *shape, "--out", f"new/net.{kind}"]) == 0
    assert capsys.readouterr().out.strip() == f"new/net.{kind}"
    images = torch.rand(5, 3, 8, 8)  # another batch than that of the example
    expected = own(images).detach()
    if kind == "pt":
        plain = fold(own)
        plain.load_state_dict(torch.load("new/net.pt", weights_only=True))
        found = plain(images)
    elif kind == "pt2":
        found = torch.export.load("new/net.pt2").module()(images)
    else:
        session = pytest.importorskip("onnxruntime").InferenceSession("new/net.onnx")
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("arguments", "code", "answer"),
    [
        ("fold own_net.py:balanced --out x.h5", 2, "must end in .pt, .pt2, .onnx"),
        (
            "fold own_net.py:plain --out x.pt",
            2,
            "the model of own_net.py:plain has no balanced layer; is it converted?",
        ),
        (
            "fold own_net.py:plain --out x.onnx",
            2,
            "a .onnx file needs an input: give its shape, as --shape 8,3,224,224",
        ),
        ("fold own_net.py:balanced --weights whole.pt --out x.pt", 1, "whole.pt is damaged, or holds something other"),
        ("fold own_net.py:balanced --weights other.pt --out x.pt", 1, "other.pt does not fit the model: Error(s) in"),
        ("fold own_net.py:balanced --weights no.pt --out x.pt", 1, "no.pt: No such file or directory"),
        ("fold own_net.py:nothing --out x.pt", 2, "own_net.py has no function 'nothing'; it has plain, balanced, Two"),
        ("fold whole.pt --out x.pt", 1, "name the function that builds it, as mynet.py:build"),
        ("inspect own_net.py:plain", 2, "inspect needs an input"),
        ("inspect own_net.py:Two --shape 2,3,8,8 2,3,8,8", 2, "takes a model with one input, and this one has 2"),
        ("inspect own_net.py:balanced --figure x.bmp", 2, "must end in .svg, .png or .pdf"),
        ("bench own_net.py:plain", 2, "bench needs an input"),
        ("bench own_net.py:plain --shape 2x3", 2, "a shape is given as 1,3,224,224"),
        ("bench own_net.py:plain --shape 2,3,8,8 --rounds 1", 2, "rounds must be at least 2"),
        ("bench own_net.py:plain --shape 2,3,8,8 --vary centre_stream=True", 2, "takes an option of the conversion"),
        ("bench whole.pt", 2, "name the function that builds it, as mynet.py:build, not 'whole.pt'"),
        ("bench own_net.py", 2, "name the function that builds it"),
    ],
)
def test_mistakes_with_models_of_ones_own_are_answered_in_a_sentence(arguments, code, answer, tmp_path, capsys):
    before = set(tmp_path.iterdir())
    assert main(arguments.split()) == code
    printed = capsys.readouterr()
    assert answer in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before - {tmp_path / "__pycache__"}


@pytest.mark.usefixtures("own")
@pytest.mark.filterwarnings("ignore:convert balances nothing")
def test_a_model_without_anything_to_train_is_told(capsys):
    assert main(["bench", "own_net.py:constant", "--shape", "2,3,8,8"]) == 2
    assert "returns no tensor that depends on its parameters" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "inspect", "fold"])
def test_help_for_models_of_ones_own(command, capsys):
    assert main([command, "mynet.py:build", "--help"]) == 0
    printed = capsys.readouterr().out
    assert f"usage: balnorm {command} mynet.py:build" in printed
    assert "--shape" in printed
    assert "--weights" in printed
    assert f"balnorm {command} mynet.py:build " in printed.partition("examples:")[2]


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
