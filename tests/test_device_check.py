"""``balnorm bench --check``: what it measures, on a CPU; and what it keeps when something goes wrong."""

import contextlib
import io
import re
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from balnorm._core.backends import cpu
from balnorm.bench import device_check
from balnorm.bench.cli import main
from balnorm.bench.device_check import Network, Part
from balnorm.bench.profiling import stopwatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _settings():
    """A process of a part changes them for good."""
    with torch.backends.cudnn.flags(enabled=True):
        yield


def lines_of(part, *arguments):
    """What a part tells and returns, as its process prints it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        device_check.main(["cpu", "2", part, *arguments])
    told = [line for line in out.getvalue().split("\n") if not line.startswith("\t")]
    return "\n".join(told), [line[1:] for line in told if line.startswith("\v")]


def rows_of(text):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if line.startswith("|")]
    return dict(zip(rows[0], zip(*rows[2:], strict=True), strict=True))


# --------------------------------------------------------------------------------------------------------------------
# The parts
# --------------------------------------------------------------------------------------------------------------------


def test_the_machine_is_described():
    text, problems = lines_of("machine")
    assert f"| torch | {torch.__version__}, Triton " in text
    assert "| TF32 | convolutions on, matrices off |" in text
    assert not problems


FEW = ("3x3, stride 2, position", "linear")


@pytest.mark.usefixtures("backend")
def test_layers_agree_with_float64(monkeypatch):
    monkeypatch.setattr(device_check, "LAYERS", {name: device_check.LAYERS[name] for name in FEW})
    monkeypatch.setattr(device_check, "check_precision", lambda *_: None)
    text, problems = lines_of("agreement", "eager")
    assert not problems
    table = rows_of(text)
    assert table["layer"] == FEW
    for name, limit in device_check.TOLERANCES.items():
        for column in (name, f"{name}, channels last"):
            cells = [cell for cell in table[column] if cell]
            assert len(cells) == (1 if "last" in column else 2)
            assert all(0 < float(error) < limit for cell in cells for error in cell.split(" / "))


@pytest.mark.parametrize(("factor", "error"), [(1.001, "1.0e-03"), (float("nan"), "inf")])
def test_a_wrong_kernel_is_found(factor, error, monkeypatch):
    if cpu._library is None:
        pytest.skip(f"no native kernels ({cpu.status()})")
    right = cpu.backward

    def wrong(*arguments):
        dw, dgain = right(*arguments)
        return dw * factor, dgain

    monkeypatch.setattr(cpu, "backward", wrong)
    monkeypatch.setattr(device_check, "LAYERS", {"1x1": device_check.LAYERS["1x1"]})
    monkeypatch.setattr(device_check, "TOLERANCES", {"float32": 1e-4})
    text, problems = lines_of("agreement", "eager")
    assert problems == [f"1x1, float32: differs by {error}"] * 2
    assert "**" in rows_of(text)["float32"][0]


def test_a_layer_that_fails_leaves_the_others(monkeypatch):
    monkeypatch.setattr(
        device_check, "LAYERS", {"bad": (lambda: 1 / 0, (1, 2, 3, 4)), "1x1": device_check.LAYERS["1x1"]}
    )
    monkeypatch.setattr(device_check, "TOLERANCES", {"float32": 1e-4})
    text, problems = lines_of("agreement", "eager")
    assert problems == ["bad, float32: division by zero"] * 2
    failed, measured = rows_of(text)["float32"]
    assert failed == "failed"
    assert float(measured.split(" / ")[0]) < 1e-4


class Small(nn.Module):
    """A network of one layer; with BatchNorm, one that needs more memory than there is for three samples."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.layers = norm, device_check._twice(norm, 4, 4)

    def forward(self, x):
        if self.norm == "batchnorm" and x.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB")
        return self.layers(x)


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(device_check, "networks", lambda small: {"small": Network(Small, (4, 4, 20, 20, 20))})


@pytest.mark.usefixtures("_small")
def test_steps_are_timed_and_half_a_batch_is_tried_where_memory_runs_out():
    text, problems = lines_of("timings", "small", "float32", "eager")
    assert not problems
    assert "Out of memory with batch 4: half of it." in text
    assert "Batch 2 of 4x20x20x20, contiguous; n = 2." in text
    table = rows_of(text)
    assert table["norm"] == ("none", "batchnorm", "groupnorm", "balnorm")
    assert table["time / none"][0] == "1.00 [1.00, 1.00]"
    assert all(float(number) > 0 for number in table["ms"])
    none, batchnorm, _, balnorm = map(float, table["kept MiB"])
    assert none <= balnorm < batchnorm


@pytest.mark.usefixtures("_small")
def test_a_norm_that_cannot_be_compiled_leaves_the_others(monkeypatch):
    def compiled(model, fullgraph):
        if model.norm == "balnorm":
            raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    text, problems = lines_of("timings", "small", "float32", "compiled")
    assert problems == ["balnorm failed: Failed to find C compiler. Please specify via CC environment variable."]
    assert rows_of(text)["norm"] == ("none", "batchnorm", "groupnorm")


@pytest.mark.usefixtures("_small")
def test_a_gpu_that_is_broken_ends_the_part(monkeypatch):
    """Every later call would fail too, and for a reason that is not its own."""

    def broken(model, fullgraph):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        lines_of("timings", "small", "float32", "compiled")


def test_a_gpu_is_timed_by_its_own_clock():
    seen = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            seen.append("event")

        def elapsed_time(self, end):
            return 12.0

    with (
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.cuda.device"),
        mock.patch("torch.cuda.synchronize", side_effect=lambda: seen.append("synchronise")),
    ):
        assert stopwatch(torch.device("cuda"), calls=3)(lambda: seen.append("step")) == 0.004
    assert seen == ["synchronise", "event", "step", "step", "step", "event", "synchronise"]


# --------------------------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------------------------

PROGRAMS = {
    "good": "print('| a | 1 |')",
    "wrong": r"print('\v3x3, float32: differs by 5.0e-01')",
    "killed": "import os, signal; print('| b | 2 |', flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    "raises": "print('| c | 3 |', flush=True); raise RuntimeError('CUDA error: unspecified launch failure')",
    "stops": "import os, signal, time; print('| d | 4 |', flush=True); os.kill(os.getppid(), 2); time.sleep(600)",
    "backend": "import os; print('backend', os.environ['BALNORM_BACKEND'])",
}


def check(monkeypatch, tmp_path, *names, backend="auto"):
    """Run the command with such parts."""
    monkeypatch.setattr(device_check, "parts", lambda device: [Part(name, (name,), 1, backend) for name in names])
    monkeypatch.setattr(device_check, "_command", lambda part, *_: [sys.executable, "-S", "-c", PROGRAMS[part.title]])
    code = main(["bench", "--check", "--device", "cpu", "--out", str(tmp_path / "report.md")])
    return code, (tmp_path / "report.md").read_text()


def test_a_part_that_dies_leaves_the_others(monkeypatch, tmp_path, capsys):
    code, text = check(monkeypatch, tmp_path, "killed", "wrong", "raises", "good")
    assert code == 1
    assert re.findall(r"\| . \| \d \|", text) == ["| b | 2 |", "| c | 3 |", "| a | 1 |"]
    assert "**killed: not finished, because the process was ended by SIGKILL**" in text
    assert "**3x3, float32: differs by 5.0e-01**" in text
    assert "**raises: not finished, because RuntimeError: CUDA error: unspecified launch failure**" in text
    printed = capsys.readouterr()
    assert "4 parts, about 1 minute in all" in printed.out
    assert "wrong: 3x3, float32: differs by 5.0e-01" in printed.err
    assert printed.err.count("\n") == 3


def test_after_ctrl_c_the_report_has_what_was_measured(monkeypatch, tmp_path, capsys):
    code, text = check(monkeypatch, tmp_path, "good", "stops", "killed")
    assert code == 130
    assert re.findall(r"\| . \| \d \|", text) == ["| a | 1 |", "| d | 4 |"]
    assert "*Stopped. Not measured: stops; killed.*" in text
    assert "report.md has what was measured until then" in capsys.readouterr().err


def test_a_part_without_our_kernels(monkeypatch, tmp_path):
    assert check(monkeypatch, tmp_path, "backend", backend="torch") == (0, mock.ANY)
    assert "\nbackend torch\n" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("options", "code", "answer"),
    [
        (["--device", "mps"], 2, "must be cuda, cuda:1 (or another number) or cpu, got 'mps'"),
        (["--device", "nonsense"], 2, "got 'nonsense'"),
        (["--device", "cpu", "--rounds", "1"], 2, "rounds must be at least 2"),
        (["--device", "cpu", "--out", "no/such/folder.md"], 1, "No such file or directory"),
    ],
)
def test_mistakes_are_answered_before_anything_starts(options, code, answer, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device_check, "_run", None)
    assert main(["bench", "--check", *options]) == code
    printed = capsys.readouterr()
    assert answer in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("cuda", "count", "device", "answer"),
    [
        (None, 0, "cuda", "is built for CPUs only"),
        ("13.0", 0, "cuda", "torch finds no GPU here"),
        ("13.0", 2, "cuda:2", "there is no cuda:2: torch finds 2 GPUs, the last one is cuda:1"),
    ],
)
def test_without_a_gpu_a_sentence_says_so(cuda, count, device, answer, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert main(["bench", "--check", "--device", device]) == 1
    printed = capsys.readouterr()
    assert answer in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.slow
def test_a_cpu_is_checked(tmp_path, capsys, monkeypatch):
    """All kinds of parts, in their own processes, with the network that takes the least time to compile."""
    unet = device_check.networks(small=True)["3D U-Net"]
    monkeypatch.setattr(device_check, "networks", lambda small: {"3D U-Net": unet})
    out = tmp_path / "report.md"
    assert main(["bench", "--check", "--device", "cpu", "--rounds", "2", "--out", str(out)]) == 0, capsys.readouterr()
    text = out.read_text()
    assert re.findall("^## (.*)$", text, re.MULTILINE) == [
        mock.ANY,
        "Agreement: torch: BALNORM_BACKEND=torch is set",
        *(f"{name}, float32, eager" for name in device_check.networks(small=True)),
        "Agreement: torch.compile",
        *(f"{name}, float32, compiled" for name in device_check.networks(small=True)),
    ]
    assert len(re.findall(r"^\| balnorm \| \d+\.\d\d \|", text, re.MULTILINE)) == 2
    assert "**" not in text
