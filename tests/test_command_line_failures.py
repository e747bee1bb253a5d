"""The command line where something is in its way: nobody reads, the disk is full, names and files are odd."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from balnorm.cli import main
from balnorm.recipes import get_recipe
from balnorm.study.results import read_results
from balnorm.training.run import Run
from balnorm.training.trainer import train
from folders import make_run

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's
SMALL = ["--width", "8", "--epochs", "3", "--train-limit", "100", "--test-limit", "20", "--batch-size", "50"]
RECIPE = replace(get_recipe("digits"), width=8, epochs=3, train_limit=100, test_limit=20, batch_size=50)


# --------------------------------------------------------------------------------------------------------------------
# Output that does not arrive
# --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def printing_to(kind):
    """Standard output that takes nothing. (A fixture cannot do this: pytest has its own from one phase to the next.)"""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, open("/dev/full", "w") as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", pipe if kind == "a closed pipe" else full)
        yield


nowhere = pytest.mark.parametrize("kind", ["a closed pipe", "a full disk"])


@nowhere
def test_training_goes_on_when_nobody_reads(kind, tmp_path):
    """`balnorm train ... | head -1` stopped after two epochs and called that success."""
    with printing_to(kind):
        assert main(["train", "digits", *SMALL, "--out", str(tmp_path / "run")]) == 0
    assert len(Run(tmp_path / "run").records()) == 3


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
