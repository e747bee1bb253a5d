"""Processors that end torch's convolutions: found out beforehand, with stand-ins for the trial."""

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from balnorm.bench.cli import main
from balnorm.bench.recipes import get_recipe
from balnorm.bench.study import executors
from balnorm.bench.study.executors import LocalExecutor, Resources
from balnorm.bench.study.runner import plan
from balnorm.bench.training import machine as machine_module
from balnorm.bench.training.machine import CAP, Defect, find_defect

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no signals")
TINY = ["--epochs", "1", "--width", "4", "--train-limit", "64", "--device", "cpu"]
CAPS = ["AVX512_CORE_FP16", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"]


def dying(*survive, by="ILL"):
    """A command that ends itself with a signal unless it runs under one of these caps."""
    return ["sh", "-c", f'case "${CAP}" in {"|".join([*survive, "-"])}) exit 0;; *) kill -{by} $$;; esac']


@pytest.fixture
def machine(monkeypatch):
    """This machine as one with something to cap, and with another command for the trial."""
    # Later tests need the cap that this environment may have. oneDNN reads it at its first convolution; runs are forked
    # from a server, which keeps the environment it was started in.
    torch.conv2d(torch.ones(2, 16, 8, 8), torch.ones(16, 16, 3, 3))
    LocalExecutor(1, Resources())
    monkeypatch.delenv(CAP, raising=False)
    monkeypatch.setattr(machine_module, "caps", lambda: CAPS)
    machine_module.remedy_after.cache_clear()
    yield lambda trial: monkeypatch.setattr(machine_module, "TRIAL", trial)
    machine_module.remedy_after.cache_clear()


@pytest.fixture
def defective(machine, monkeypatch):
    """This machine as one that needs a cap."""
    machine(dying("AVX512_CORE_BF16", "AVX2"))
    monkeypatch.setattr(LocalExecutor, "call", lambda _, function, *arguments: function(*arguments))


def test_the_highest_cap_that_survives_is_found(machine, monkeypatch):
    machine(dying("AVX512_CORE_BF16", "AVX512_CORE", "AVX2"))
    assert find_defect() == Defect("SIGILL", "AVX512_CORE_BF16")
    machine(dying("AVX2", by="SEGV"))
    assert find_defect() == Defect("SIGSEGV", "AVX2")
    machine(dying(by="ABRT"))
    assert find_defect() == Defect("SIGABRT", None)
    monkeypatch.setenv(CAP, "AVX2")  # a cap that somebody has set counts
    machine(dying("AVX2"))
    assert find_defect() is None


def test_the_caps_are_tried_from_the_highest_and_the_precisions_are_told(machine, tmp_path):
    machine(["sh", "-c", f'echo "${CAP}" $@ >> "{tmp_path}/tried"; kill -ILL $$', "sh"])
    find_defect(["float16"])
    assert (tmp_path / "tried").read_text().splitlines() == [" float16", *(f"{cap} float16" for cap in CAPS)]


def test_where_nothing_dies_nothing_is_found(machine):
    for end in ("exit 0", "exit 1", "kill -KILL $$", "kill -TERM $$"):  # torch is missing, memory is short: other news
        machine(["sh", "-c", end])
        assert find_defect() is None


def test_caps_are_those_below_what_the_processor_has(monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    for flags, caps in {
        "sse4_1 avx avx2 fma": ["AVX", "SSE41"],
        "sse4_1 avx avx2 avx512f avx512_vnni": ["AVX512_CORE", "AVX2", "AVX", "SSE41"],
        "sse4_1": [],
    }.items():
        cpuinfo.write_text(f"model name\t: amx_bf16 in name only\nflags\t\t: {flags}\n")
        assert machine_module.caps(cpuinfo) == caps
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert machine_module.caps(tmp_path / "nowhere") == []
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    assert machine_module.caps(tmp_path / "nowhere")[0] == "AVX512_CORE_AMX_FP16"


def test_a_processor_with_nothing_to_cap_is_not_tried(machine, monkeypatch):
    machine(dying())
    monkeypatch.setattr(machine_module, "caps", list)
    assert find_defect() is None


def test_the_trial_is_torchs_convolutions():
    """Under the cap that the tests run with, if any, it lives. What it computes is counted."""
    count = "import torch, collections; seen = collections.Counter(); run = torch.Tensor.backward\n"
    count += "def backward(tensor): seen[str(tensor.dtype)] += 1; run(tensor)\n"
    count += "torch.Tensor.backward = backward\n"
    program = f"{count}{machine_module.TRIAL[-1]}\nprint(dict(seen))"
    done = subprocess.run(
        [sys.executable, "-c", program, "float32", "bfloat16", "float16"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'torch.float32': 410, 'torch.bfloat16': 10, 'torch.float16': 10}\n"


# --------------------------------------------------------------------------------------------------------------------
# Commands
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("defective")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("command", [["train"], ["compare"], ["compare", "--dry-run"], ["bench"]])
def test_a_precision_that_would_end_the_process_is_answered_with_the_remedy(tmp_path, capsys, command, precision):
    name, *options = command
    options += ["--out", str(tmp_path / "out")] if name != "bench" else []
    assert main([name, "digits", *TINY, "--precision", precision, *options]) == 1
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
    (run,) = plan(replace(get_recipe("digits"), precision="bfloat16"), tmp_path, ["balnorm"], 1)
    run.folder.parent.mkdir()
    resources = Resources(tmp_path, device="cpu")
    state, reason = executors._execute_on_node(run.folder, run.recipe, resources)
    assert state == "failed"
    assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in reason


def test_neither_float32_nor_a_gpu_is_tried(monkeypatch):
    monkeypatch.setattr(machine_module, "find_defect", pytest.fail)
    machine_module.check_precision("float32", "cpu")
    machine_module.check_precision("bfloat16", "cuda:1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    machine_module.check_precision("bfloat16", None)


@pytest.mark.usefixtures("defective")
def test_without_a_device_the_cpu_is_tried_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(machine_module.ProcessorError, match="AVX512_CORE_BF16"):
        machine_module.check_precision("float16", None)


def test_a_process_that_died_is_answered_with_the_remedy_where_there_is_one(machine):
    machine(["true"])
    assert machine_module.remedy_after(signal.SIGSEGV) is None
    assert machine_module.remedy_after(signal.SIGILL) == "set ONEDNN_MAX_CPU_ISA=AVX2 in the environment"
    machine_module.remedy_after.cache_clear()
    machine(dying("AVX512_CORE"))
    assert machine_module.remedy_after(signal.SIGSEGV) == "set ONEDNN_MAX_CPU_ISA=AVX512_CORE in the environment"
    assert machine_module.remedy_after(signal.SIGKILL) is None


def _die(*_):
    os.kill(os.getpid(), signal.SIGILL)


def test_a_run_that_dies_of_an_illegal_instruction_is_told_with_the_remedy(tmp_path, machine, monkeypatch, capfd):
    machine(dying("AVX512_CORE_BF16"))
    monkeypatch.setattr(executors, "_execute_in_process", _die)
    assert main(["compare", "digits", *TINY, "--norms", "none", "--seeds", "1", "--out", str(tmp_path)]) == 1
    remedy = "its process was ended by signal 4: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, and"
    assert remedy in capfd.readouterr().out
    assert remedy in (tmp_path / "runs" / "none-seed0" / "error.txt").read_text()


# --------------------------------------------------------------------------------------------------------------------
# The tests themselves
# --------------------------------------------------------------------------------------------------------------------

INNER = f"""
import os, pytest
@pytest.fixture(autouse=True)
def _one_thread(): "And no torch, which takes longer to import than all of this."
_one_thread_for_fixtures = _seed = _one_thread
def test_the_cap_is_here(): assert os.environ[{CAP!r}] == "AVX512_CORE_BF16"
@pytest.mark.slow
def test_slow(): test_the_cap_is_here()
@pytest.mark.parametrize("number", [1, 2])
def test_skipped(number): pytest.skip("there is no such thing")
@pytest.mark.skip(reason="nor another")
def test_skipped_too(): pass
"""
SAID = "2 skipped: there is no such thing\n1 skipped: nor another\n1 slow test left to make test-all\n"


def test_a_run_of_the_tests_is_capped_and_says_so_and_what_it_left_out(tmp_path):
    """Twice; the second one knows it from the first, and is that of the slow tests."""
    (tmp_path / "test_inner.py").write_text(INNER)
    tests = Path(__file__).parent
    trial = ["sh", "-c", f'echo "${CAP}" >> {tmp_path}/tried; {dying("AVX512_CORE_BF16")[-1]}']
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTEST_XDIST_WORKER", CAP)}
    environment["BALNORM_TEST_TRIAL"] = shlex.join(trial)
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), *filter(None, sys.path)])
    options = ["-p", "conftest", "-c", os.devnull, "--rootdir", str(tmp_path), "-o", f"cache_dir={tmp_path}/cache"]
    for which, said in ((["-n", "1"], SAID), (["-n", "0", "--slow=only"], "")):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *which, str(tmp_path)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.partition(" not tested ")[2].partition("\n")[2].startswith(said)
        assert ("not tested" in done.stdout) == bool(said)
        assert re.search(r"\b1 passed", done.stdout)
        line = "processor: torch's own convolutions end in SIGILL here: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
        assert done.stdout.splitlines().count(line) == 1
        assert (tmp_path / "tried").read_text().splitlines() == ["", "AVX512_CORE_BF16"]
