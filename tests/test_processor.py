"""Processors that end torch's convolutions in lower precision: found out beforehand, with stand-ins for the trial."""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from balnorm.cli import main
from balnorm.recipes import get_recipe
from balnorm.study import executors
from balnorm.study.executors import LocalExecutor
from balnorm.study.grid import plan
from balnorm.training import processor
from balnorm.training.processor import CAP, CAPS, Defect, find_defect

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signals")
TINY = ["--epochs", "1", "--width", "4", "--train-limit", "64", "--device", "cpu"]


def dying(*survive, by="ILL"):
    """A command that ends itself with a signal unless it runs under one of these caps."""
    return ["sh", "-c", f'case "${CAP}" in {"|".join([*survive, "-"])}) exit 0;; *) kill -{by} $$;; esac']


@pytest.fixture
def defective(monkeypatch):
    """This machine as one that needs a cap."""
    monkeypatch.delenv(CAP, raising=False)
    monkeypatch.setattr(processor, "TRIAL", dying("AVX512_CORE_BF16", "AVX2"))
    monkeypatch.setattr(processor, "exceeds_lowest_cap", lambda: True)
    monkeypatch.setattr(LocalExecutor, "call", lambda _, function, *arguments: function(*arguments))


def test_the_highest_cap_that_survives_is_found(monkeypatch):
    monkeypatch.delenv(CAP, raising=False)
    assert find_defect(dying("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")) == Defect("SIGILL", "AVX512_CORE_BF16")
    assert find_defect(dying("AVX2", by="SEGV")) == Defect("SIGSEGV", "AVX2")
    assert find_defect(dying()) == Defect("SIGILL", None)
    monkeypatch.setenv(CAP, CAPS[2])  # a cap that somebody has set counts
    assert find_defect(dying(CAPS[2])) is None


def test_the_caps_are_tried_from_the_highest(monkeypatch, tmp_path):
    monkeypatch.delenv(CAP, raising=False)
    command = ["sh", "-c", f'echo "${CAP}" >> "{tmp_path}/tried"; kill -ILL $$']
    find_defect(command)
    assert (tmp_path / "tried").read_text().splitlines() == ["", *CAPS]


def test_where_nothing_dies_nothing_is_found():
    for end in ("exit 0", "exit 1", "kill -KILL $$", "kill -TERM $$"):  # torch is missing, memory is short: other news
        assert find_defect(["sh", "-c", end]) is None


def test_a_processor_with_nothing_to_cap_is_not_tried(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    for flags, more in {
        "fpu avx avx2 fma": False,
        "avx2 avx512f": True,
        "avx2 amx_bf16": True,
        "avx_vnni": True,
    }.items():
        cpuinfo.write_text(f"model name\t: avx512 in name only\nflags\t\t: {flags}\n")
        assert processor.exceeds_lowest_cap(cpuinfo) == more
    for machine, more in {"arm64": False, "AMD64": True}.items():
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert processor.exceeds_lowest_cap(tmp_path / "nowhere") == more
    monkeypatch.setattr(processor, "exceeds_lowest_cap", lambda: False)
    monkeypatch.setattr(processor, "TRIAL", dying())
    assert find_defect() is None


def test_the_trial_is_torchs_convolutions():
    """On a machine without the defect it lives; what it computes is counted in place of torch."""
    program = processor.TRIAL[-1]
    count = "import torch, collections; seen = collections.Counter(); run = torch.Tensor.backward\n"
    count += "def backward(tensor): seen[tensor.grad_fn.next_functions[0][0].name(), tensor.dtype] += 1; run(tensor)\n"
    count += "torch.Tensor.backward = backward\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{count}{program}\nprint(dict(seen))"], capture_output=True, text=True, check=False
    )
    if -done.returncode in processor._DEADLY:
        pytest.skip("this processor has the defect, and no cap was set for the tests")
    assert done.stderr == ""
    for dtype in ("bfloat16", "float16"):
        assert f"torch.{dtype}): 10" in done.stdout


def test_nothing_here_imports_torch():
    """Which would be too late for the cap."""
    program = "import sys, balnorm.training.processor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


# --------------------------------------------------------------------------------------------------------------------
# Commands
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("defective")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("command", [["train"], ["compare"], ["compare", "--dry-run"], ["bench"]])
def test_a_precision_that_would_end_the_process_is_answered_with_the_remedy(tmp_path, capsys, command, precision):
    name, *options = command
    options += ["--out", str(tmp_path / "out")] if name != "bench" else []
    assert main([name, "digits", *TINY, "--precision", precision, *options]) == (2 if name == "bench" else 1)
    assert capsys.readouterr().err == (
        f"balnorm: torch's convolutions in {precision} end the process on this processor (SIGILL): "
        "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("defective")
def test_a_study_that_varies_the_precision_is_tried_too(tmp_path, capsys):
    vary = ["--vary", "precision=bfloat16,float32", "--norms", "none", "--seeds", "1"]
    assert main(["compare", "digits", *TINY, *vary, "--out", str(tmp_path / "study")]) == 1
    assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


@pytest.mark.usefixtures("defective")
def test_a_task_on_a_cluster_is_tried_on_its_own_machine(tmp_path):
    (member,) = plan(replace(get_recipe("digits"), precision="bfloat16"), tmp_path, ["balnorm"], 1)
    member.folder.parent.mkdir()
    end, reason = executors._execute_on_node(executors.Task(member, tmp_path, 1, "cpu"))
    assert end == "failed"
    assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in reason


def test_neither_float32_nor_a_gpu_is_tried(monkeypatch):
    monkeypatch.setattr(processor, "find_defect", pytest.fail)
    processor.check_precision("float32", "cpu")
    processor.check_precision("bfloat16", "cuda:1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    processor.check_precision("bfloat16", None)


@pytest.mark.usefixtures("defective")
def test_without_a_device_the_cpu_is_tried_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="AVX512_CORE_BF16"):
        processor.check_precision("float16", None)


def _die(task, slot, pipe):
    os.kill(os.getpid(), signal.SIGILL)


def test_a_worker_that_dies_of_an_illegal_instruction_is_told_with_the_remedy(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(executors, "_execute_in_process", _die)
    arguments = ["--norms", "none", "--seeds", "1", "--threads", "1", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["compare", "digits", *arguments]) == 1
    printed = capfd.readouterr()
    remedy = "signal 4, an illegal instruction: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or AVX2"
    assert remedy in printed.out
    assert remedy in (tmp_path / "runs" / "none-seed0" / "error.txt").read_text()


# --------------------------------------------------------------------------------------------------------------------
# The tests themselves
# --------------------------------------------------------------------------------------------------------------------

INNER = f"""
import os
def test_the_cap_is_here(): assert os.environ[{CAP!r}] == "AVX512_CORE_BF16"
"""


def test_a_run_of_the_tests_is_capped_and_says_so(tmp_path):
    (tmp_path / "test_inner.py").write_text(INNER)
    tests = Path(__file__).parent
    environment = {**os.environ, "BALNORM_TEST_TRIAL": shlex.join(dying("AVX512_CORE_BF16", "AVX2"))}
    for name in ("PYTEST_XDIST_WORKER", CAP):
        environment.pop(name, None)
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), *filter(None, sys.path)])
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-n", "1", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = (
        "processor: torch's own convolutions in lower precision end in SIGILL here: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    )
    assert done.stdout.splitlines().count(line) == 1
