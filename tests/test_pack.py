"""Packed studies: two files in the place of a folder of runs, with every bit of their numbers."""

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest

from balnorm.bench.cli import main
from balnorm.bench.recipes import get_recipe
from balnorm.bench.study.packed import read_packed, write_packed
from balnorm.bench.study.report import write_report
from balnorm.bench.study.results import read_results
from balnorm.bench.study.runner import plan
from balnorm.bench.study.statistics import differences_to, spread
from balnorm.bench.study.tables import study_tables
from balnorm.bench.training.run import RunError
from folders import make_run

RESULTS = Path(__file__).parent.parent / "docs" / "results"
AWKWARD = [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 1 / 3]


@pytest.fixture
def study(tmp_path):
    """Three settings of two seeds; one run diverged in its second epoch."""
    folder = tmp_path / "study"
    for seed in range(2):
        make_run(folder, "balnorm", seed, [0.5, 0.6, 0.7 + seed / 10], lr=0.1)
        make_run(folder, "batchnorm", seed, [0.5, 0.6, 0.65], lr=0.1)
        make_run(folder, "balnorm", seed, [0.4] if seed else [0.4, 0.5, 0.6], epochs=3, diverged=bool(seed), lr=0.5)
    return folder


def lines_of(folder):
    return {run.recipe: run.lines for run in read_results([folder]).runs}


def packed_copy(study, out):
    assert main(["pack", str(study), "--out", str(out)]) == 0
    return out


# --------------------------------------------------------------------------------------------------------------------
# What is in the files
# --------------------------------------------------------------------------------------------------------------------


def test_every_bit_comes_back(tmp_path):
    make_run(tmp_path / "study", "balnorm", 0, [0.1] * 4, AWKWARD)
    make_run(tmp_path / "study", "none", 3, [0.1] * 2, epochs=4, diverged=True, name="plain", width=None)
    make_run(tmp_path / "study", "lrn", 0, [0.0] * 4, [-0.0] * 4, schedule="multistep", drops=(1, 3), compile=True)
    before = lines_of(tmp_path / "study")
    after = lines_of(packed_copy(tmp_path / "study", tmp_path / "packed"))
    assert len(before) == 3
    for recipe, lines in before.items():
        assert [repr(sorted(line.items())) for line in after[recipe]] == [repr(sorted(line.items())) for line in lines]


def test_a_report_of_the_two_files_is_that_of_the_folders(study, tmp_path):
    write_report([study], tmp_path / "first", formats=["svg"])
    packed_copy(study, tmp_path / "packed")
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {"study.json", "metrics.csv"}
    report = write_report([tmp_path / "packed"], tmp_path / "second", formats=["svg"])
    assert not report.problems
    names = {path.name for path in (tmp_path / "first").iterdir()}
    assert names == {path.name for path in (tmp_path / "second").iterdir()}
    for name in names - {"index.html"}:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    assert 'href="../packed/metrics.csv">metrics.csv</a>' in report.page.read_text()


def test_the_table_of_metrics_reads_well_elsewhere(study, tmp_path):
    packed_copy(study, tmp_path / "packed")
    with (tmp_path / "packed" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:6] == ["norm", "lr", "seed", "epoch", "epoch_lr", "epoch_momentum"]
    assert [row["epoch"] for row in rows[:4]] == ["1", "2", "3", "1"]
    assert [row["diverged"] for row in rows if (row["lr"], row["seed"]) == ("0.5", "1")] == ["", "true"]
    assert {(row["norm"], row["lr"]) for row in rows} == {("balnorm", "0.1"), ("batchnorm", "0.1"), ("balnorm", "0.5")}


def test_where_it_ran_is_said_once_and_without_paths(study, tmp_path):
    runs = sorted((study / "runs").iterdir())
    for number, run in enumerate(runs):
        command = ["/home/alice/bin/balnorm", "compare", "digits", "--root", "/home/alice/my data", "--out=C:\\al\\x"]
        command += ["--title", "~/alice", "../alice/studies/y", "studies/z"]
        start = {"started": f"2026-01-0{number + 1}T00:00:00", "command": command, "torch": "2.13.0", "gpu": None}
        start |= {"commit": f"{number % 2}", "kernels": "native (/home/alice/lib/kernels.so)", "odd": {"a": [1]}}
        (run / "environment.json").write_text(json.dumps([start, {**start, "resumed": True}]))
    packed_copy(study, tmp_path / "packed")
    text = (tmp_path / "packed" / "study.json").read_text()
    assert "alice/" not in text
    assert "/home" not in text
    found = json.loads(text)
    assert found["commands"] == [
        "balnorm compare digits --root 'my data' --out=x --title alice y studies/z"  # as somebody else would type it
    ]
    first, second = found["environments"]
    assert first == {
        "starts": 6,
        "first_start": "2026-01-01T00:00:00",
        "last_start": "2026-01-05T00:00:00",
        "torch": "2.13.0",
        "commit": "0",
        "kernels": "native (kernels.so)",
    }
    assert second["last_start"] == "2026-01-06T00:00:00"
    assert found["varies"] == {"norm": ["balnorm", "batchnorm"], "lr": [0.1, 0.5], "seed": [0, 1]}
    assert found["recipe"]["depth"] == 8


def test_runs_that_have_not_ended_are_left_out(study, tmp_path, capsys):
    make_run(study, "none", 0, [0.1], epochs=3)
    failed = make_run(study, "none", 1, [0.1, 0.2, 0.3])
    (failed.folder / "error.txt").write_text("ValueError: no")
    packed_copy(study, tmp_path / "packed")
    assert "2 of 8 runs not finished: left out" in capsys.readouterr().err
    assert len(lines_of(tmp_path / "packed")) == 6
    assert main(["pack", str(study / "runs" / "none-seed0")]) == 2
    assert "there is no finished run in" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(study, tmp_path, capsys):
    """The other one of the two was."""
    packed_copy(study, tmp_path / "packed")
    (tmp_path / "packed" / "study.json").unlink()
    (tmp_path / "packed" / "study.json").mkdir()
    assert main(["pack", str(study), "--out", str(tmp_path / "packed")]) == 1
    assert "study.json" in (printed := capsys.readouterr().err)
    assert "metrics.csv" not in printed


def test_a_packed_study_never_loses_runs(study, tmp_path, capsys):
    packed_copy(study, tmp_path / "packed")
    before = (tmp_path / "packed" / "metrics.csv").read_bytes()
    make_run(tmp_path / "other", "balnorm", 7)
    assert main(["pack", str(tmp_path / "other"), "--out", str(tmp_path / "packed")]) == 1
    assert "holds a packed study, of which this one lacks 6 runs" in capsys.readouterr().err
    other_numbers = shutil.copytree(study, tmp_path / "again") / "runs" / "balnorm-lr=0.1-seed0" / "metrics.jsonl"
    other_numbers.write_text(other_numbers.read_text().replace('"test_accuracy": 0.7', '"test_accuracy": 0.8'))
    assert main(["pack", str(tmp_path / "again"), "--out", str(tmp_path / "packed")]) == 1
    assert "holds a packed study, of which this one lacks 1 run:" in capsys.readouterr().err
    (tmp_path / "packed" / "study.json").write_text("{")
    assert main(["pack", str(study), "--out", str(tmp_path / "packed")]) == 1
    assert "study.json cannot be read" in capsys.readouterr().err
    (tmp_path / "packed" / "study.json").unlink()
    assert main(["pack", str(study), "--out", str(tmp_path / "packed")]) == 1
    assert "study.json cannot be read (No such file or directory)" in capsys.readouterr().err
    assert (tmp_path / "packed" / "metrics.csv").read_bytes() == before
    with pytest.raises(RunError, match="no finished run"):
        write_packed(replace(read_results([study]).packed(), runs={}), tmp_path / "packed")


# --------------------------------------------------------------------------------------------------------------------
# Beside run folders
# --------------------------------------------------------------------------------------------------------------------


def test_beside_its_run_folders_every_run_counts_once(study, capsys):
    assert main(["pack", str(study)]) == 0
    report = write_report([study], study / "report", formats=["svg"])
    assert not report.problems
    assert "Of 6 runs, 5 finished, 1 diverged." in report.summary
    make_run(study, "balnorm", 2, [0.5, 0.6, 0.7], lr=0.1)
    assert main(["pack", str(study)]) == 0  # the new run joins the others
    shutil.rmtree(study / "runs")
    assert len(lines_of(study)) == 7
    make_run(study, "balnorm", 2, [0.5, 0.6, 0.9], lr=0.1)
    (problem,) = read_results([study]).problems
    assert "runs/balnorm-lr=0.1-seed2 is the same run as" in problem
    assert problem.endswith("metrics.csv: left out")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's
def test_compare_goes_on_with_a_packed_study(tmp_path, capfd):
    small = {"width": 8, "train_limit": 200, "test_limit": 60, "batch_size": 20}
    make_run(tmp_path, "balnorm", 0, [0.5, 0.6], name="a", **small)
    make_run(tmp_path, "none", 0, [], epochs=2, diverged=True, name="b", **small)
    assert main(["pack", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "runs")
    before = (tmp_path / "metrics.csv").read_bytes()
    command = ["compare", "digits", "--epochs", "2", "--norms", "balnorm", "none", "--threads", "1"]
    command += [word for name, value in small.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main([*command, "--seeds", "2", "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "2 of 4 runs are already finished" in printed
    assert "Of 4 runs, 3 finished, 1 diverged." in printed
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"balnorm-seed1", "none-seed1"}
    assert (tmp_path / "metrics.csv").read_bytes() == before
    assert main(["pack", str(tmp_path)]) == 0
    shutil.rmtree(tmp_path / "runs")
    assert main([*command, "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert "4 of 4 runs are already finished" in capfd.readouterr().out
    assert not (tmp_path / "runs").exists()
    assert main([*command, "--lr", "0.7", "--out", str(tmp_path)]) == 1
    assert "was started with a different recipe (lr: 0.7, was 0.1)" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_plan_knows_what_is_packed_and_what_is_not(study):
    assert main(["pack", str(study)]) == 0
    recipe = replace(get_recipe("digits"), epochs=3)
    members = plan(recipe, study, ["balnorm", "none"], 3, {"lr": [0.1, 0.5]})
    states = {(m.recipe.norm, m.recipe.lr, m.recipe.seed): m.state for m in members if m.packed}
    assert set(states) == {("balnorm", lr, seed) for lr in (0.1, 0.5) for seed in (0, 1)}
    assert [key for key, state in states.items() if state == "diverged"] == [("balnorm", 0.5, 1)]
    with pytest.raises(RunError, match="width: 8, was 16"):
        plan(replace(recipe, width=8), study, ["balnorm"], 1, {"lr": [0.1]})


# --------------------------------------------------------------------------------------------------------------------
# Damaged and hostile files
# --------------------------------------------------------------------------------------------------------------------


def change(name, old, new):
    def damage(folder):
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return damage


def write(name, contents):
    return lambda folder: (folder / name).write_bytes(contents)


def cut(name, lines):
    def damage(folder):
        kept = (folder / name).read_text().splitlines(keepends=True)[:lines]
        (folder / name).write_text("".join(kept))

    return damage


def lose_metrics(folder):
    (folder / "metrics.csv").unlink()


DAMAGE = {
    "empty": (write("study.json", b""), "study.json cannot be read"),
    "no JSON": (cut("study.json", 5), "study.json cannot be read"),
    "no text": (write("study.json", b"\xff\xfe"), "study.json cannot be read"),
    "a list": (write("study.json", b"[]"), "it is not a packed study"),
    "deep": (write("study.json", b"[" * 100_000), "it is nested too deeply"),
    "of the future": (change("study.json", '"format": 1', '"format": 2'), "its format is 2; this version reads 1"),
    "a key less": (change("study.json", '"runs": 6,', ""), "it should have commands, environments, format"),
    "twice": (change("study.json", '"name"', '"norm": "balnorm",\n"name"'), "a field either varies or belongs"),
    "unknown field": (change("study.json", '"norm": [', '"speed": [1], "norm": ['), "varies should name norm, seed"),
    "wrong recipe": (change("study.json", '"epochs": 3', '"epochs": "3"'), "line 2: epochs cannot be '3'"),
    "half a recipe": (change("study.json", '"model": "wide_resnet",', ""), "line 2: the recipe lacks its model"),
    "evil recipe": (change("study.json", '"epochs"', '"evil": 1, "epochs"'), "line 2: a recipe has no evil"),
    "commands": (change("study.json", '["balnorm compare digits"]', "[5]"), "commands should be a list of texts"),
    "no start": (change("study.json", '"starts": 6', '"starts": 0'), "environments should be a list"),
    "other values": (change("study.json", "[0.1, 0.5]", "[0.1, 0.7]"), "does not hold the 6 runs that study.json"),
    "environments": (change("study.json", '"starts": 6', '"starts": "6"'), "environments should be a list"),
    "no metrics": (lose_metrics, "metrics.csv cannot be read (No such file or directory)"),
    "no table": (write("metrics.csv", b"\xff\x00\n"), "metrics.csv cannot be read"),
    "huge cell": (write("metrics.csv", b"norm,lr,seed,epoch\n" + b"1" * 200_000), "metrics.csv cannot be read"),
    "other columns": (change("metrics.csv", "norm,lr", "norm,rate"), "its first line should begin with norm,lr,seed"),
    "column twice": (change("metrics.csv", "test_loss", "train_loss"), "its first line should begin with norm,lr"),
    "a cell less": (change("metrics.csv", "balnorm,0.1,0,1,", "balnorm,0.1,0,"), "line 2 has 12 cells instead of 13"),
    "lost runs": (cut("metrics.csv", 4), "does not hold the 6 runs that study.json beside it lists"),
    "lost epochs": (cut("metrics.csv", 3), "the run at line 2 ends after epoch 2 of 3"),
    "half a line": (write("metrics.csv", b""), "its first line should begin with"),
    "other norm": (change("metrics.csv", "balnorm,0.1,0,1", "foo,0.1,0,1"), "line 2: norm cannot be 'foo'"),
    "no number": (change("metrics.csv", "0,1,0.1,0.9", "0,1,high,0.9"), "line 2 has a cell that is not a number"),
    "not finite": (change("metrics.csv", "0,1,0.1,0.9", "0,1,NaN,0.9"), "line 2 has no finite number for lr"),
    "overflow": (change("metrics.csv", "0,1,0.1,0.9", "0,1,1e999,0.9"), "line 2 has no finite number for lr"),
    "huge number": (change("metrics.csv", "0,1,0.1,0.9", f"0,1,{'9' * 5000},0.9"), "line 2 has"),
    "deep cell": (change("metrics.csv", "0,1,0.1,0.9", f"0,1,{'[' * 90_000},0.9"), "line 2 has a cell that is not"),
    "epoch again": (change("metrics.csv", "0.1,0,2,", "0.1,0,1,"), "the run at line 2 ends after epoch 1 of 3"),
    "epoch of later": (change("metrics.csv", "0.1,0,3,", "0.1,0,7,"), "line 4 is epoch 7 instead of 3"),
    "too good": (
        change("metrics.csv", ",0.7,1.5", ",7.0,1.5"),
        "line 4 has 7.0 for test_accuracy, which is impossible",
    ),
    "too fast": (change("metrics.csv", ",0.7,1.5", ",0.7,-1.5"), "line 4 has -1.5 for seconds, which is impossible"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_packed_study_is_one_sentence(study, tmp_path, capsys, kind):
    packed = packed_copy(study, tmp_path / "packed")
    damage, answer = DAMAGE[kind]
    damage(packed)
    capsys.readouterr()
    assert main(["report", str(packed)]) == 2
    printed = capsys.readouterr().err
    assert answer in printed
    assert printed.count("\n") == 1
    assert main(["compare", "digits", "--dry-run", "--out", str(packed)]) == 1
    printed = capsys.readouterr().err
    assert answer in printed
    assert printed.count("\n") == 1
    results = read_results([packed, study])  # what is good is read
    assert len(results.problems) == 1
    assert (results.count("finished"), results.count("diverged")) == (5, 1)


def test_a_run_that_comes_twice_is_refused(study, tmp_path):
    packed = packed_copy(study, tmp_path / "packed")
    header, *rows = (packed / "metrics.csv").read_text().splitlines(keepends=True)
    (packed / "metrics.csv").write_text("".join([header, *rows, *rows[:3]]))
    with pytest.raises(RunError, match=r"line 19 starts a run for the second time"):
        read_packed(packed)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_starts_are_those_of_the_packed_runs(study):
    """Those of unfinished runs were counted at each pack, and once more when the run was finished."""
    assert main(["pack", str(study)]) == 0
    without = files_of(study)
    make_run(study, "none", 0, [0.5], epochs=3, lr=0.1)
    for _ in range(2):
        assert main(["pack", str(study)]) == 0
        assert files_of(study) == without
    assert sum(machine["starts"] for machine in read_packed(study).environments) == 6


def test_a_disk_that_is_full_leaves_the_packed_study_as_it_was(study, monkeypatch):
    """The new metrics.csv with the old study.json could not be read, nor packed again."""
    assert main(["pack", str(study)]) == 0
    before, more = files_of(study), make_run(study, "none", 0, [0.5] * 3, lr=0.1)
    real_open = Path.open

    def full(path, *args, **options):
        if path.name.startswith("study.json."):
            raise OSError(28, "No space left on device")
        return real_open(path, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    assert main(["pack", str(study)]) == 1
    assert files_of(study) == before
    monkeypatch.undo()
    assert main(["pack", str(study)]) == 0
    assert more.recipe in read_packed(study).runs


# --------------------------------------------------------------------------------------------------------------------
# The published studies
# --------------------------------------------------------------------------------------------------------------------


def spreads_of_gains(path):
    """What ``gain.csv`` says: an absolute gain is one of version 0.1, which a study of this one cannot hold."""
    runs = list(csv.DictReader(path.read_text().splitlines()))
    for width, gain in {(run["width"], run["gain"]) for run in runs}:
        chosen = [run for run in runs if (run["width"], run["gain"]) == (width, gain)]
        for column, factor, digits in (("test_accuracy", 100, 2), ("train_loss", 1, 3)):
            found = spread([factor * float(run[column]) for run in chosen])
            yield f"{found.median:.{digits}f} ({found.low:.{digits}f}-{found.high:.{digits}f})"


STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/study.json"))


@pytest.mark.parametrize("name", STUDIES)
def test_a_published_page_says_what_its_study_says(name):
    """Every median with quartiles, and every difference with its interval, is one that the report has."""
    page = (RESULTS / name / "README.md").read_text()
    baseline = re.search(r"--baseline\s+(\w+)", page)
    results = read_results([RESULTS / name])
    assert not results.problems
    compared = differences_to(results, baseline[1] if baseline else "batchnorm")
    tables = study_tables(results, [level / 100 for level in range(1, 100)], compared)
    said = {cell.text.replace("–", "-") for table in tables for row in table.rows for cell in row}  # noqa: RUF001
    for table in tables:
        if table.key == "differences":
            said |= {f"{row[2].text} ({row[3].text})" for row in table.rows}
    if (RESULTS / name / "gain.csv").exists():
        said |= set(spreads_of_gains(RESULTS / name / "gain.csv"))
    spreads = re.findall(r"\| (\d+(?:\.\d+)? \(\d+(?:\.\d+)?-\d+(?:\.\d+)?\))", page)
    differences = re.findall(r"\| ([+-]\d+\.\d\d \([+-][\d.]+ to [+-][\d.]+\))", page)
    assert len(spreads) >= 4
    assert set(spreads) | set(differences) <= said
    assert "balnorm compare" in page


def words_and_positions(svg):
    """The texts of a figure, and all its numbers, without those inside of names and colours."""
    numbers = re.findall(r"(?<![\w#.])-?\d+(?:\.\d+)?(?![\w.])", svg)
    return re.findall(r">([^<>\n]+)</text>", svg), [float(number) for number in numbers]


DRAWN = ["batch-sizes", "short-cifar10"]  # one that varies something, and one that does not; the rest is slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DRAWN else [pytest.mark.slow]) for name in STUDIES]
)
def test_published_figures_are_those_that_the_code_draws(name, tmp_path):
    """A legend had moved, and the published figures of one study had not: nobody drew them again."""
    report = write_report([RESULTS / name], tmp_path, formats=["svg"])
    assert not report.problems
    published = sorted((RESULTS / name / "report").glob("*.svg"))
    assert published
    for path in published:
        drawn, stored = (tmp_path / path.name).read_text(), path.read_text()
        (words, positions), (their_words, their_positions) = map(words_and_positions, (drawn, stored))
        assert words == their_words
        if f"Matplotlib v{mpl.__version__}," in stored:  # another one may place things differently
            assert positions == pytest.approx(their_positions, abs=0.5)
