"""Experiments: studies of a training function of the user's own."""

import gzip
import json
import math
import re
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from balnorm.bench.cli import main
from balnorm.bench.study.executors import Resources, execute
from balnorm.bench.study.figures import STYLES, styles_of
from balnorm.bench.study.metrics import number, shown, worst
from balnorm.bench.study.results import read_results
from balnorm.bench.study.statistics import difference, levels
from balnorm.bench.training.experiment import Experiment
from balnorm.bench.training.run import Run, leading
from held import PATIENCE

ROOT = Path(__file__).parent.parent
EXPERIMENT = '''
from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path


def train(
    norm: str, seed: int, folder: Path, root: str, batch_size: int = 2, rate: float = 0.5, sure: bool = False
) -> Iterator[dict[str, float]]:
    """Pretend to train."""
    noise = random.Random(f"{norm} {seed} {batch_size}")
    for epoch in range(9):
        if norm == "raises" and epoch == 2:
            print({}["dice"])
        if norm == "file":
            open("nowhere.nii")
        if norm == "nothing":
            return
        dice = 1 - 1 / (epoch + 2) + 0.01 * noise.random() - 0.05 * (norm == "mine")
        yield {"train_loss": 1 / (epoch + 2), "dice": math.nan if norm == "nan" and epoch == 4 else dice}
'''


def write(folder, text=EXPERIMENT):
    """An experiment's file."""
    path = folder / "experiment.py"
    path.write_text(text)
    return path


def compare(file, *options):
    return main(["compare", f"{file}:train", "--threads", "1", *map(str, options)])


def functions(tmp_path, body, signature="norm: str, seed: int, folder"):
    """An experiment's file with this body of the function ``train``."""
    text = "import math, os, sys\nfrom pathlib import Path\nfrom typing import Literal\n\n\n"
    return write(tmp_path, f"{text}def train({signature}):\n" + "\n".join(f"    {line}" for line in body.splitlines()))


def run_once(file, out, metric=None):
    """One run in this process: how it ended, and its records without what time they took."""
    end = execute(out, Experiment("experiment.py:train", "a", 0, metric), Resources(file=file))
    records = [{name: value for name, value in each.items() if name != "peak_memory"} for each in Run(out).read()]
    return end, [{name: value for name, value in each.items() if name != "seconds"} for each in records]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Two norms, one of them unknown to us, five seeds, two batch sizes."""
    folder = tmp_path_factory.mktemp("experiment")
    options = ["--norms", "balnorm", "mine", "--seeds", 5, "--vary", "batch-size=2,8", "--metric", "dice"]
    assert compare(write(folder), *options, "--root", folder, "--jobs", 2, "--out", folder / "study") == 0
    return folder / "study"


# --------------------------------------------------------------------------------------------------------------------
# What a study does
# --------------------------------------------------------------------------------------------------------------------


def test_a_run_is_a_folder_as_any_other(study):
    run = Run(study / "runs" / "mine-batch_size=8-seed4")
    assert json.loads(run.config.read_text()) == {
        "experiment": "experiment.py:train",
        "metric": "dice",
        "norm": "mine",
        "seed": 4,
        "batch_size": 8,
        "rate": 0.5,
        "sure": False,
    }
    records = run.read()
    assert [list(record) for record in records[:-1]] == [["epoch", "train_loss", "dice", "seconds", "peak_memory"]] * 8
    assert records[-1]["last"]
    assert all(record["seconds"] >= 0 and record["peak_memory"] > 2**20 for record in records)
    (start,) = json.loads(run.environment.read_text())
    assert {"torch", "processor", "command", "file"} <= start.keys()
    assert list(run.tensorboard.iterdir())
    assert (run.folder / "files").is_dir()


def test_the_report_is_about_its_metric(study):
    report = study / "report"
    assert {path.stem for path in report.glob("*.svg")} == {"dice", "train-loss"}
    assert (report / "results.md").read_text().splitlines()[2].startswith("| setting | n | dice | train loss |")
    differences = (report / "differences.md").read_text()
    assert re.search(r"\| mine batch_size=2 \| 5 \| -0\.05\d \| -0\.05\d to -0\.04\d \| 0\.00 \|", differences)
    page = (report / "index.html").read_text()
    assert "balnorm batch_size=8 came out highest: a median dice of 0." in page
    assert "All 20 runs finished." in page
    assert '"norm": "mine"' in page
    assert not read_results([study]).problems


def test_a_study_can_be_packed_moved_and_extended(study, tmp_path, capfd):
    assert main(["pack", str(study), "--out", str(tmp_path / "packed")]) == 0
    assert main(["report", str(tmp_path / "packed"), "--out", str(tmp_path / "report"), "--quiet"]) == 0
    for path in (study / "report").iterdir():
        if path.name != "index.html":  # which links to the runs
            assert (tmp_path / "report" / path.name).read_bytes() == path.read_bytes()
    assert "/" not in json.dumps(json.loads((tmp_path / "packed/study.json").read_text())["recipe"])
    capfd.readouterr()
    options = ["--norms", "balnorm", "mine", "--vary", "batch_size=2,8", "--metric", "dice"]
    options += ["--out", tmp_path / "packed"]
    assert compare(write(tmp_path), *options, "--root", "elsewhere", "--seeds", "6") == 0
    printed = capfd.readouterr().out
    assert "20 of 24 runs are already finished" in printed
    assert "All 24 runs finished." in printed


def test_the_report_can_be_about_another_metric(study, tmp_path, capsys):
    command = ["report", str(study), "--out", str(tmp_path), "--formats", "svg"]
    assert main([*command, "--metric", "train_loss", "--baseline", "mine"]) == 0
    assert "came out lowest, alike: a median train loss of 0.100" in capsys.readouterr().out
    assert main([*command, "--metric", "iou"]) == 2
    assert "metric must be one of train_loss, dice, got 'iou'" in capsys.readouterr().err
    assert main([*command, "--baseline", "frozen"]) == 2
    assert "baseline must be one of balnorm, mine, batchnorm," in capsys.readouterr().err


def test_a_new_report_removes_the_figures_of_the_old_one(study, tmp_path):
    (tmp_path / "metrics.csv").write_text("not ours")
    (tmp_path / "notes.svg").write_text("not ours")
    (tmp_path / "index.html").write_text(
        (study / "report/index.html").read_text().replace('href="dice.svg"', 'href="iou.svg"')
        + '<a href="metrics.csv"></a>'
    )
    (tmp_path / "iou.svg").write_text("old")
    assert main(["report", str(study), "--out", str(tmp_path), "--formats", "svg", "--quiet"]) == 0
    assert not (tmp_path / "iou.svg").exists()
    assert (tmp_path / "notes.svg").exists()
    assert (tmp_path / "metrics.csv").exists()


def test_what_goes_wrong_is_one_sentence_and_the_others_go_on(tmp_path, capfd):
    norms = ["raises", "file", "nothing", "nan", "balnorm"]
    assert compare(write(tmp_path), "--norms", *norms, "--seeds", 1, "--out", tmp_path / "study") == 1
    printed = capfd.readouterr()
    for sentence in (
        "raises seed 0: failed, KeyError: 'dice' (experiment.py, line 17)\n",
        "file seed 0: failed, FileNotFoundError: nowhere.nii: No such file or directory (experiment.py, line 19)\n",
        "nothing seed 0: failed, train ended without yielding a record\n",
        "nan seed 0: diverged, its dice was not finite, in ",
        "balnorm seed 0: dice 0.9",
        "Of 5 runs, 1 finished, 1 diverged, 3 failed.",
    ):
        assert sentence in printed.out
    assert "3 of 5 runs failed" in printed.err
    assert "Traceback" in (tmp_path / "study/runs/raises-seed0/error.txt").read_text()
    (diverged,) = (run for run in read_results([tmp_path]).runs if run.recipe.norm == "nan")
    assert (diverged.state, len(diverged.records), diverged.lines[-1]["diverged"]) == ("diverged", 4, "dice")


def test_a_dry_run_lists_what_would_run(tmp_path, capfd):
    out = tmp_path / "study"
    assert compare(write(tmp_path), "--norms", "a", "b", "--seeds", 3, "--out", out, "--dry-run", "--jobs", 2) == 0
    assert "6 of 6 runs to do, 2 at a time" in capfd.readouterr().out
    assert not out.exists()


@pytest.mark.slow
def test_an_experiment_on_a_cluster(tmp_path):
    pytest.importorskip("ray")
    command = [sys.executable, "-W", "ignore", "-m", "balnorm", "compare", str(write(tmp_path)), "--norms", "a", "nan"]
    command += ["--seeds", "1", "--ray", "local", "--out", str(tmp_path / "study")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "Of 2 runs, 1 finished, 1 diverged." in done.stdout
    assert done.returncode == 0


# --------------------------------------------------------------------------------------------------------------------
# What it is given
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--size", "2"], "--size"),
        (["--batch-size", "two"], "two"),
        (["--vary", "size=2,8"], "--vary takes an option of train and its values, as lr=0.01,0.1,1, not 'size=2,8'"),
        (["--vary", "batch_size=2,x"], "x"),
        (["--vary", "sure=yes"], "invalid choice 'yes'"),
        (["--vary", "root=a,b"], "--vary takes an option of train"),
        (["--rate", "nan"], "rate must be finite"),
        (["--seed", "-1"], "seed must be from 0"),
    ],
)
def test_mistakes_are_answered_before_anything_runs(tmp_path, capsys, options, answer):
    assert compare(write(tmp_path), "--norms", "a", "--out", tmp_path / "study", *options) == 2
    assert answer in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_norms_are_required(tmp_path, capsys):
    assert compare(write(tmp_path), "--out", tmp_path / "study") == 2
    assert "--norms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("signature", "answer"),
    [
        ("norm: str, seed: int", "train must take norm, seed and folder; it lacks folder"),
        ("norm: str, seed: int, folder, width=8", "train must say the type of width"),
        ("norm: str, seed: int, folder, where: Path = Path()", "train must say the type of where"),
        ("norm, seed: int, folder", "train must say the type of norm"),
        ("norm: str, seed: int, folder, jobs: int = 8", "train cannot have an option jobs"),
        ("norm: str, seed: int, folder, **options: int", "train cannot take **options"),
        ("norm: str, seed: int, folder, width: 'Nothing' = 1", "the annotations of train cannot be read"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(tmp_path, capsys, signature, answer):
    assert compare(functions(tmp_path, "yield {}", signature), "--norms", "a", "--out", tmp_path / "study") == 2
    assert answer in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("text", "name", "answer"),
    [
        (None, "experiment.py:train", "there is no file"),
        ("def fit(): ...", "experiment.py", "has no function 'train'; it has fit"),
        ("import nothing_of_this_name", "experiment.py:train", "cannot be imported (ModuleNotFoundError: No module"),
        ("def train(:", "experiment.py:train", "cannot be imported (SyntaxError"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path, capsys, text, name, answer):
    if text is not None:
        write(tmp_path, text)
    assert main(["compare", str(tmp_path / name), "--norms", "a"]) in (1, 2)
    assert answer in capsys.readouterr().err


def test_a_function_gets_its_options_with_their_types_and_what_is_the_machine_s(tmp_path):
    """And it can import what is beside it; a Literal gives the norms."""
    (tmp_path / "beside.py").write_text("VALUE = 1.5")
    signature = "norm: Literal['a', 'b/c'], seed: int, folder, *, root: str, device, size: int | None = None"
    signature += ", drops: tuple[int, ...] = (), rate: float"
    body = "import beside\n(folder / 'given.txt').write_text(repr((norm, seed, root, device, size, drops, rate)))\n"
    body += "yield {'value': beside.VALUE}"
    file, out = functions(tmp_path, body, signature), tmp_path / "study"
    options = ["--seeds", 1, "--seed", 3, "--drops", 1, 2, "--rate", 1, "--root", tmp_path, "--device", "cpu"]
    assert compare(file, *options, "--out", out, "--vary", "size=4") == 0
    given = sorted(path.read_text() for path in out.glob("runs/*/files/given.txt"))
    assert given == [repr((norm, 3, str(tmp_path), "cpu", 4, (1, 2), 1.0)) for norm in ("a", "b/c")]
    assert compare(file, *options, "--out", out, "--vary", "size=4", "--root", "moved") == 0  # nothing to do
    assert len(list(out.glob("runs/*/environment.json"))) == 2
    assert compare(file, *options, "--out", out, "--vary", "size=4", "--norms", "d") == 2


# --------------------------------------------------------------------------------------------------------------------
# What it yields
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return 5", "train must yield a record after each epoch, but it returned 5"),
        ("return {'dice': 1.0}", "train must yield a record after each epoch, but it returned {'dice': 1.0}"),
        ("yield 5", "train must yield dictionaries, got 5"),
        ("yield {}", "train yields no metric, only nothing"),
        ("yield {'dice': 'high'}", "train yielded 'high' for dice, which is not a number"),
        ("yield {'seconds': 1.0}", "train cannot call a metric 'seconds': choose another name"),
        ("yield {'accuracy': 93.5}", "train yielded 93.5 for accuracy: an accuracy is a share, from 0 to 1"),
        ("yield {'a': 1}\nyield {'a': 1, 'b': 2}", "train must yield the same metrics after each epoch: b is not in"),
        ("yield {'epoch': 2, 'a': 1}", "train yielded epoch 2, expected 1"),
        ("yield {'epoch': 1, 'a': 1}\nyield {'epoch': 3, 'a': 1}", "train yielded epoch 3, expected 2"),
        ("yield {'epoch': 1.0, 'a': 1}", "train yielded epoch 1.0, expected 1"),
    ],
)
def test_records_that_are_none_fail_the_run(tmp_path, body, sentence):
    (state, reason), _ = run_once(functions(tmp_path, body), tmp_path / "run")
    assert state == "failed"
    assert sentence in reason
    assert sentence in (tmp_path / "run/error.txt").read_text()


def test_a_metric_that_is_not_measured_fails_the_run(tmp_path):
    file = functions(tmp_path, "yield {'train_loss': 1.0, 'iou': 0.5}")
    assert run_once(file, tmp_path / "run", "dice")[0] == ("failed", "train yields no dice, only train_loss, iou")


def test_numbers_may_be_tensors_and_negative(tmp_path):
    file = functions(tmp_path, "import torch\nyield {'gain': torch.tensor(-2.0), 'loss': -1}")
    end, records = run_once(file, tmp_path / "run")
    assert end == ("finished", "")
    assert records == [{"epoch": 1, "gain": -2.0, "loss": -1.0, "last": True}]
    assert Run(tmp_path / "run").look().state == "finished"


# --------------------------------------------------------------------------------------------------------------------
# Interrupted runs
# --------------------------------------------------------------------------------------------------------------------

START = "mark = folder / 'mark'\nstarted = int(mark.read_text()) if mark.exists() else 0\n"
START += "mark.write_text(str(started + 1))\n"


def test_a_run_that_was_cut_short_starts_again(tmp_path):
    body = (
        START
        + "for epoch in range(4):\n    assert started or epoch < 3, 'cut'\n    yield {'value': 10 * started + epoch}"
    )
    file = functions(tmp_path, body)
    (state, reason), records = run_once(file, tmp_path / "run")
    assert (state, reason) == ("failed", "AssertionError: cut (experiment.py, line 11)")
    assert [record["value"] for record in records] == [0, 1, 2]
    end, records = run_once(file, tmp_path / "run")
    assert end == ("finished", "")
    assert [(record["epoch"], record["value"]) for record in records] == [(1, 10), (2, 11), (3, 12), (4, 13)]
    assert not (tmp_path / "run/error.txt").exists()
    assert [start["resumed"] for start in json.loads((tmp_path / "run/environment.json").read_text())] == [False, True]


@pytest.mark.parametrize("goes_on", [2, 3, 4])
def test_a_run_that_resumes_replaces_only_what_it_repeats(tmp_path, goes_on):
    body = START + f"for epoch in range({goes_on} if started else 1, 6):\n    assert started or epoch < 4, 'cut'\n"
    body += "    yield {'epoch': epoch, 'value': 10 * started + epoch}"
    file, run = functions(tmp_path, body), Run(tmp_path / "run")
    run_once(file, run.folder)
    before = run.read()
    _, records = run_once(file, run.folder)
    assert [record["value"] for record in records] == [*range(1, goes_on), *range(10 + goes_on, 16)]
    assert run.read()[: goes_on - 1] == before[: goes_on - 1]  # with the seconds that they took


def test_a_gap_after_resuming_is_one_sentence(tmp_path):
    body = START + "yield {'epoch': 3 if started else 1, 'value': 1}\nraise ValueError('cut')"
    file = functions(tmp_path, body)
    run_once(file, tmp_path / "run")
    end, records = run_once(file, tmp_path / "run")
    assert end == ("failed", "train yielded epoch 3, expected 2")
    assert len(records) == 1


def test_a_run_with_nothing_to_add_is_finished(tmp_path):
    """It was killed between its last record and its end."""
    body = START + "for epoch in range(2 * (not started)):\n    yield {'value': epoch}\nassert started"
    file = functions(tmp_path, body)
    assert run_once(file, tmp_path / "run")[0][0] == "failed"
    end, records = run_once(file, tmp_path / "run")
    assert end == ("finished", "")
    assert [(record["value"], record.get("last")) for record in records] == [(0, None), (1, True)]


def test_a_killed_run_is_told_and_goes_on(tmp_path, capfd):
    body = (
        START + "yield {'value': 1}\nif not started and norm == 'a':\n    os.kill(os.getpid(), 9)\nyield {'value': 2}"
    )
    file, options = functions(tmp_path, body), ["--norms", "a", "b", "--seeds", 1, "--out", tmp_path / "study"]
    assert compare(file, *options) == 1
    printed = capfd.readouterr().out
    assert "a seed 0: failed, its process was ended by signal 9: repeat the command to resume it" in printed
    assert "b seed 0: value 2.000" in printed
    assert compare(file, *options) == 0
    assert "1 of 2 runs are already finished" in capfd.readouterr().out


def test_other_options_for_the_same_folder_are_refused(study, tmp_path, capfd):
    options = ["--norms", "balnorm", "--vary", "batch_size=2", "--out", study]
    assert compare(write(tmp_path), *options, "--rate", 0.25, "--metric", "dice") == 1
    assert "was started with a different recipe (rate: 0.25, was 0.5)" in capfd.readouterr().err
    assert compare(write(tmp_path), *options) == 1
    assert "was started with a different recipe (metric: None, was 'dice')" in capfd.readouterr().err


def test_a_file_that_changed_between_runs_is_told(tmp_path):
    options = ["--norms", "a", "--out", tmp_path / "study", "--seeds"]
    assert compare(write(tmp_path), *options, 1) == 0
    assert compare(write(tmp_path, EXPERIMENT + "\n"), *options, 2) == 0
    assert "several machines or versions" in (tmp_path / "study/report/cost.md").read_text()


# --------------------------------------------------------------------------------------------------------------------
# Metrics and norms of any name
# --------------------------------------------------------------------------------------------------------------------


def test_what_the_name_of_a_metric_says():
    assert leading(["train_loss", "dice", "iou"]) == "dice"
    assert leading(["train_loss", "val_loss"]) == "train_loss"
    assert leading(["train_loss", "dice"], "iou") == "iou"
    assert [worst(name) for name in ("dice", "accuracy", "val_loss", "Word_Error")] == [
        -math.inf,
        0,
        math.inf,
        math.inf,
    ]
    assert [shown("accuracy", 0.5), shown("dice", 0.5), shown("mse", 2e-5)] == ["50.00%", "0.500", "2e-05"]
    assert number(-math.inf) == "-∞"


def test_of_an_error_the_lower_one_wins(tmp_path):
    body = "yield {'error': 0.2 + 0.1 * (norm == 'b') + 0.001 * seed}"
    assert compare(functions(tmp_path, body), "--norms", "a", "b", "--out", tmp_path / "study") == 0
    page = (tmp_path / "study/report/index.html").read_text()
    assert "a came out lowest: a median error of 0.202 after 1 epoch" in page
    assert "Seed by seed, b is +0.100 from a" in page
    rows = (tmp_path / "study/report/differences.csv").read_text().splitlines()
    assert rows[1].split(",")[-1] == "0.0"  # how often b is better
    assert levels(read_results([tmp_path])) == [0.27, 0.22, 0.21]


def test_differences_of_diverged_runs_are_infinite_or_none():
    ours, theirs = dict.fromkeys(range(6), 0.5), dict.fromkeys(range(6), 0.4)
    one = difference(ours | {0: -math.inf}, theirs | {1: -math.inf})
    assert one.median == pytest.approx(0.1)
    assert (one.low, one.high) == (-math.inf, math.inf)
    both = difference(dict.fromkeys(range(6), math.inf), dict.fromkeys(range(6), math.inf), lower=True)
    assert (both.median, both.low, both.high, both.improvement) == (0, 0, 0, 0.5)
    assert difference(ours, dict.fromkeys(range(6), math.inf), lower=True).improvement == 1


def test_norms_of_any_name_have_styles_of_their_own():
    names = ["balnorm", "batchnorm", *(f"mine {n}" for n in range(12))]
    styles = styles_of(names)
    assert [styles[name] for name in names[:2]] == [STYLES[name] for name in names[:2]]
    assert len(set(styles.values())) == len(names)
    assert len({styles[name].colour for name in names[:6]}) == 6
    assert styles_of([f"mine {n}" for n in range(100)])  # and no end


def test_experiments_do_not_mix_in_a_pack(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    for folder, signature in (
        (tmp_path, "norm: str, seed: int, folder"),
        (tmp_path / "b", "norm: str, seed: int, folder, n: int = 1"),
    ):
        assert run_once(functions(folder, "yield {'value': 1}", signature), folder / "run")[0][0] == "finished"
    other = Run(tmp_path / "b/run")
    other.config.write_text(json.dumps(other.recipe.fields | {"n": 1}))
    assert main(["pack", str(tmp_path)]) == 1
    assert "runs of different experiments cannot be packed together" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--formats", "svg"]) == 0


# --------------------------------------------------------------------------------------------------------------------
# The page and the example
# --------------------------------------------------------------------------------------------------------------------


def test_the_experiment_in_the_documents_runs(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/experiments.md").read_text(), re.DOTALL)
    norms = ["--norms", "balnorm", "batchnorm", "instancenorm", "--seeds", 1, "--epochs", 1]
    assert compare(write(tmp_path, block), *norms, "--out", tmp_path / "study") == 0
    assert {run.metric for run in read_results([tmp_path]).runs} == {"accuracy"}


def test_the_volumes_of_the_example(tmp_path):
    """It reads NIfTI files, learns from volumes of different sizes, and resumes to the same numbers."""
    for number_ in range(130):
        shape = (8, 9 + number_ % 3, 8)
        labels = torch.zeros(shape, dtype=torch.uint8)
        labels[2:5, 2:6, 2:6], labels[5:7, 2:6, 2:6] = 1, 2
        image = 100.0 * labels + torch.rand(shape, generator=torch.Generator().manual_seed(number_))
        for part, voxels, kind in (("images", image, 16), ("labels", labels, 2)):
            header = bytearray(352)
            struct.pack_into("<4h", header, 40, 3, *shape)
            struct.pack_into("<h", header, 70, kind)
            struct.pack_into("<f", header, 108, 352.0)
            header[344:347] = b"n+1"
            (tmp_path / part).mkdir(exist_ok=True)
            packed = gzip.compress(bytes(header) + voxels.numpy().tobytes(order="F"), 1)
            (tmp_path / part / f"volume_{number_:03}.nii.gz").write_bytes(packed)
    example = runpy.run_path(str(ROOT / "examples/volumes.py"))
    folders = [tmp_path / name for name in ("whole", "stopped")]
    for folder in folders:
        folder.mkdir()
    whole = list(example["train"]("balnorm", 0, folders[0], tmp_path, epochs=2))
    stopped = example["train"]("balnorm", 0, folders[1], tmp_path, epochs=2)
    first = next(stopped)
    assert not (folders[1] / "state.pt").exists()  # it saves once the record is written
    next(stopped)
    stopped.close()
    (second,) = example["train"]("balnorm", 0, folders[1], tmp_path, epochs=2)
    assert [first, second] == whole
    assert whole[-1]["dice"] > 0.5
    with pytest.raises(FileNotFoundError, match="has 0 volumes, 130 are needed"):
        next(example["train"]("balnorm", 0, folders[0], tmp_path / "nowhere"))


def test_the_study_of_fine_tuning(tmp_path):
    """Each network starts from the same function, trains on, and resumes to the same numbers."""
    for label in range(2):
        (tmp_path / f"images/{label}").mkdir(parents=True)
        for number_ in range(14):
            pixels = torch.randint(0, 128, (32, 32, 3), generator=torch.Generator().manual_seed(number_))
            Image.fromarray((pixels + 127 * label).byte().numpy()).save(tmp_path / f"images/{label}/{number_:02}.png")
    example = runpy.run_path(str(ROOT / "examples/fine_tune_study.py"))
    root, options = tmp_path / "images", {"size": 32, "batch_size": 4, "epochs": 2}
    (images, _), (test, labels) = example["load"](root, 32)
    assert (len(images), labels.tolist()) == (8, [0] * 10 + [1] * 10)
    found = [example["prepare"](norm, images)(example["scaled"](test)) for norm in ("batchnorm", "folded", "balnorm")]
    torch.testing.assert_close(found[1:], found[:1] * 2, atol=1e-3, rtol=1e-3)
    for name in ("whole", "pilot"):
        (tmp_path / name).mkdir()
    stopped = example["train"]("balnorm", 0, tmp_path / "whole", root, **options)
    first, second = next(stopped), next(stopped)  # it saves once the record is written
    stopped.close()
    assert list(example["train"]("balnorm", 0, tmp_path / "whole", root, **options)) == [second]
    assert first["train_loss"] != second["train_loss"]
    (record,) = example["train"]("batchnorm-frozen", 0, tmp_path / "pilot", root, **options | {"epochs": 1}, pilot=True)
    assert record["accuracy"] in (0.0, 0.5, 1.0)  # of two of the training images
