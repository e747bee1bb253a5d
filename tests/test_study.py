"""Studies: which runs there are, and that they come to the same end whatever happens on the way."""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch

import held
from balnorm.bench.cli import main
from balnorm.bench.errors import Stopped
from balnorm.bench.recipes import get_recipe
from balnorm.bench.study import executors
from balnorm.bench.study.display import Display, clock
from balnorm.bench.study.executors import LocalExecutor, Resources, StudyError, execute
from balnorm.bench.study.results import settings_of
from balnorm.bench.study.runner import dry_run, plan, run_study
from balnorm.bench.training.experiment import Experiment
from balnorm.bench.training.run import Run, Setting
from folders import SMALL, STUDY, make_run, results
from held import PATIENCE, gate, trainers, wait_until, waiting

DIGITS = replace(get_recipe("digits"), **SMALL)


def compare(out, *options):
    return main([*STUDY, "--out", str(out), *options])


# --------------------------------------------------------------------------------------------------------------------
# The grid
# --------------------------------------------------------------------------------------------------------------------


def test_the_grid_is_every_combination_seed_by_seed(tmp_path):
    recipe = replace(DIGITS, seed=5)
    members = plan(recipe, tmp_path, ["balnorm", "none"], 2, {"lr": [0.1, 0.2], "width": [4, 8]})
    names = [member.folder.name for member in members]
    assert len(names) == len(set(names)) == 16
    assert names[:2] == ["balnorm-lr=0.1-width=4-seed5", "balnorm-lr=0.1-width=8-seed5"]
    assert {member.recipe.seed for member in members[:8]} == {5}
    assert {(m.recipe.norm, m.recipe.lr, m.recipe.width, m.recipe.seed) for m in members} == {
        (norm, lr, width, seed)
        for norm in ("balnorm", "none")
        for lr in (0.1, 0.2)
        for width in (4, 8)
        for seed in (5, 6)
    }


@pytest.mark.parametrize(
    ("norms", "seeds", "vary", "problem"),
    [
        (["balnorm"], 0, {}, "seeds must be at least 1"),
        ([], 1, {}, "at least one normalisation"),
        (["balnorm", "balnorm"], 1, {}, "twice"),
        (["balnorm"], 1, {"lr": [0.1, 0.1]}, "twice"),
        (["balnorm"], 1, {"lr": [0.1, -1.0]}, "lr must be above 0"),
    ],
)
def test_a_wrong_grid_is_refused(tmp_path, norms, seeds, vary, problem):
    with pytest.raises(ValueError, match=problem):
        plan(DIGITS, tmp_path, norms, seeds, vary)


def test_a_folder_is_for_one_run(tmp_path):
    members = plan(DIGITS, tmp_path, ["balnorm"], 1, {})
    with pytest.raises(StudyError, match=r"two runs have the folder .*balnorm-seed0"):
        run_study([*members, *members], LocalExecutor(1, Resources(tmp_path)))
    assert not (tmp_path / "runs").exists()


def test_a_run_keeps_its_folder_when_other_fields_vary(tmp_path):
    """The same run was trained a second time, under the name that the new command would have given it."""
    fields = {name: value for name, value in SMALL.items() if name != "epochs"}
    make_run(tmp_path, "balnorm", 0, [0.5] * DIGITS.epochs, name="balnorm-seed0", **fields)
    first, second = plan(DIGITS, tmp_path, ["balnorm"], 1, {"lr": [DIGITS.lr, 0.3]})
    assert (first.folder.name, first.state) == ("balnorm-seed0", "finished")
    assert (second.folder.name, second.state) == ("balnorm-lr=0.3-seed0", "new")


@pytest.mark.parametrize("copied", ["finished", "unfinished"])
def test_of_two_copies_of_a_run_the_finished_one_counts_and_then_the_one_with_its_name(tmp_path, copied):
    fields = {name: value for name, value in SMALL.items() if name != "epochs"}
    ours, theirs = ([0.5] * 3, [0.5]) if copied == "unfinished" else ([0.5] * 3, [0.6] * 3)
    make_run(tmp_path, "balnorm", 0, ours, epochs=3, name="balnorm-seed0", **fields)
    make_run(tmp_path, "balnorm", 0, theirs, epochs=3, name="a-copy", **fields)
    (run,) = plan(DIGITS, tmp_path, ["balnorm"], 1)
    assert (run.folder.name, run.state) == ("balnorm-seed0", "finished")
    (run,) = plan(DIGITS, tmp_path, ["balnorm"], 1, {"lr": [DIGITS.lr]})
    assert run.folder.name == ("balnorm-seed0" if copied == "unfinished" else "a-copy")


def test_a_norm_is_trained_once_for_the_options_that_it_lacks(tmp_path):
    vary = {"mass": ["channel", "position"], "stats_fraction": [1.0, 0.25]}
    runs = plan(replace(DIGITS, output_scale=2.0), tmp_path, ["balnorm", "batchnorm", "none"], 1, vary)
    assert [run.folder.name for run in runs] == [
        "balnorm-mass=channel-stats_fraction=1.0-seed0",
        "balnorm-mass=channel-stats_fraction=0.25-seed0",
        "balnorm-mass=position-stats_fraction=1.0-seed0",
        "balnorm-mass=position-stats_fraction=0.25-seed0",
        "batchnorm-stats_fraction=1.0-seed0",
        "batchnorm-stats_fraction=0.25-seed0",
        "none-seed0",
    ]
    assert [str(run.setting) for run in runs] == [
        "balnorm output_scale=2.0",
        "balnorm stats_fraction=0.25 output_scale=2.0",
        "balnorm mass=position output_scale=2.0",
        "balnorm mass=position stats_fraction=0.25 output_scale=2.0",
        "batchnorm",
        "batchnorm stats_fraction=0.25",
        "none",
    ]
    assert [run.recipe.method for run in runs] == [run.setting.method for run in runs]
    assert runs[-1].recipe == replace(DIGITS, norm="none")  # as any study without the options trains it


def test_the_command_says_which_norms_an_option_does_not_concern(tmp_path, capsys):
    assert compare(tmp_path, "--vary", "mass=channel,position", "--alpha", "2", "--dry-run", "--seeds", "1") == 0
    assert capsys.readouterr().err.splitlines() == [
        "balnorm: alpha has no effect: there is no mixup",
        "balnorm: batchnorm: mass has no effect, so its values share a run",
    ]
    assert compare(tmp_path, "--norms", "batchnorm", "--mass", "position", "--dry-run", "--seeds", "1") == 0
    assert capsys.readouterr().err == "balnorm: mass has no effect: it is an option of balnorm\n"


def test_settings_name_what_varies_and_nothing_else():
    recipes = [
        replace(DIGITS, norm=norm, lr=lr, seed=seed) for norm in ("a", "b") for lr in (0.1, 1.0) for seed in (0, 1)
    ]
    assert settings_of(recipes)[0] == settings_of(recipes)[1] == Setting("a", (("lr", 0.1),))
    assert str(settings_of(recipes)[-1]) == "b lr=1.0"
    assert str(settings_of(recipes[:2])[0]) == "a"


def test_a_rate_chosen_for_each_method_does_not_set_them_apart():
    """They had no counterparts, and so no differences. Other fields must be alike."""
    base = replace(DIGITS, norm="balnorm", lr=0.3)
    chosen = [base, replace(base, equalise=True, lr=0.1), replace(base, norm="batchnorm", lr=0.03)]
    assert [str(each) for each in settings_of(chosen)] == ["balnorm", "balnorm equalise=True", "batchnorm"]
    sizes = [replace(each, batch_size=size, lr=each.lr * size) for each in chosen for size in (2, 8)]
    assert {each.variation for each in settings_of(sizes)} == {"batch_size=2", "batch_size=8"}
    assert str(settings_of([*chosen, replace(base, lr=1.0)])[0]) == "balnorm lr=0.3"
    assert str(settings_of([base, replace(base, norm="batchnorm", depth=14)])[1]) == "batchnorm depth=14"
    own = [Experiment("a.py:train", norm, options=(("lr", lr),)) for norm, lr in (("a", 0.1), ("b", 0.3))]
    assert [str(each) for each in settings_of(own)] == ["a", "b"]


def test_the_state_of_a_run(tmp_path):
    def state_of(run):
        return Run(run.folder).look().state

    assert Run(tmp_path / "nowhere").look().state == "new"
    assert state_of(make_run(tmp_path, seed=0, accuracies=[0.5], epochs=1)) == "finished"
    assert state_of(make_run(tmp_path, seed=1, accuracies=[0.5], epochs=2)) == "unfinished"
    assert state_of(make_run(tmp_path, seed=2, accuracies=[0.5], epochs=3, diverged=True)) == "diverged"
    failed = make_run(tmp_path, seed=3, accuracies=[0.5], epochs=2)
    (failed.folder / "error.txt").write_text("Traceback")
    assert state_of(failed) == "failed"
    unsaved = make_run(tmp_path, seed=4, accuracies=[0.5], epochs=1)  # its last checkpoint could not be written
    (unsaved.folder / "error.txt").write_text("Traceback")
    assert state_of(unsaved) == "failed"
    (failed.folder / "error.txt").unlink()
    failed.metrics.write_text('{"epoch": 2}\n')
    assert state_of(failed) == "failed"


# --------------------------------------------------------------------------------------------------------------------
# Running
# --------------------------------------------------------------------------------------------------------------------


def test_a_study_runs_all_and_ends_with_a_report(whole_study):
    assert set(results(whole_study)) == {f"{norm}-seed{seed}" for norm in ("balnorm", "batchnorm") for seed in (0, 1)}
    assert all(len(records) == 3 for records in results(whole_study).values())
    page = (whole_study / "report" / "index.html").read_text()
    assert "All 4 runs finished." in page


def test_several_jobs_give_the_same_numbers(whole_study, tmp_path, capfd):
    assert compare(tmp_path / "study", "--jobs", "2", "--threads", "1") == 0
    assert results(tmp_path / "study") == results(whole_study)
    printed = capfd.readouterr().out
    assert len(re.findall(r"\[\d/4\] \w+ seed \d: test accuracy [\d.]+% in .*, about .* left", printed)) == 4
    assert "Results after the last epoch" in printed
    assert "report/index.html" in printed


def test_finished_runs_are_kept_also_in_another_place(whole_study, tmp_path, capfd):
    shutil.copytree(whole_study, tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "copy" / "runs").rglob("*")}
    assert compare(tmp_path / "copy", "--threads", "1") == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "copy" / "runs").rglob("*")} == before
    assert "4 of 4 runs are already finished" in capfd.readouterr().out
    assert compare(tmp_path / "copy", "--threads", "1", "--seeds", "3") == 0  # more seeds join them
    assert len(results(tmp_path / "copy")) == 6
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_another_recipe_for_the_same_folder_is_refused_before_anything_runs(whole_study, tmp_path, capfd):
    shutil.copytree(whole_study, tmp_path / "copy")
    assert compare(tmp_path / "copy", "--seeds", "3", "--lr", "0.5") == 1
    assert "was started with a different recipe (lr: 0.5, was 0.1)" in capfd.readouterr().err
    assert len(results(tmp_path / "copy")) == 4


def test_a_run_that_fails_is_told_counted_and_tried_again(tmp_path, capfd):
    """batchnorm cannot have synchronised statistics on a CPU; balnorm can."""
    options = ["--device", "cpu", "--threads", "1"]
    assert compare(tmp_path / "study", "--sync-stats", *options) == 1
    printed = capfd.readouterr()
    assert "batchnorm seed 0: failed, sync_stats for batchnorm is torch's SyncBatchNorm" in printed.out
    assert "2 of 4 runs failed" in printed.err
    assert "Of 4 runs, 2 finished, 2 failed." in printed.out
    assert "batchnorm-seed0 failed: ValueError: sync_stats for batchnorm" in printed.err
    assert "Traceback" in (tmp_path / "study" / "runs" / "batchnorm-seed0" / "error.txt").read_text()
    assert set(results(tmp_path / "study")) == {"balnorm-seed0", "balnorm-seed1"}
    assert compare(tmp_path / "study", "--sync-stats", *options) == 1
    assert "2 of 4 runs are already finished" in capfd.readouterr().out


def test_a_run_that_diverges_is_a_result(tmp_path, capfd):
    arguments = ["--norms", "none", "--seeds", "1", "--lr", "1e12", "--threads", "1"]
    assert compare(tmp_path, *arguments) == 0
    printed = capfd.readouterr().out
    assert "none seed 0: diverged" in printed
    assert "The run diverged." in printed
    assert compare(tmp_path, *arguments) == 0
    assert "1 of 1 run is already finished" in capfd.readouterr().out


def test_metrics_that_lost_epochs_are_told_each_time(whole_study, tmp_path, capfd):
    shutil.copytree(whole_study, tmp_path / "copy")
    lines = (tmp_path / "copy/runs/balnorm-seed0/metrics.jsonl").read_text().splitlines()
    (tmp_path / "copy/runs/balnorm-seed0/metrics.jsonl").write_text("\n".join(lines[:2])[:-9])
    (tmp_path / "copy/runs/balnorm-seed1/metrics.jsonl").unlink()
    for _ in range(2):
        assert compare(tmp_path / "copy", "--threads", "1") == 1
        printed = capfd.readouterr()
        assert "2 of 4 runs failed" in printed.err
        assert printed.out.count("move") == 2


def test_a_folder_that_was_just_being_made_is_no_obstacle(tmp_path):
    (tmp_path / "runs" / "balnorm-seed0").mkdir(parents=True)
    (tmp_path / "runs" / "balnorm-seed0" / "config.json.17.tmp").write_text("{")
    run_study(plan(DIGITS, tmp_path, ["balnorm"], 1), LocalExecutor(1, Resources()), show=False)
    assert len(results(tmp_path)["balnorm-seed0"]) == 3


def test_ctrl_c_while_a_run_is_taken_back_ends_the_study(tmp_path):
    """The executor has no run any more, whatever the study had time to note."""

    class Interrupted:
        resources, slots, at_once = Resources(), 1, 1

        def __init__(self):
            self.runs = []

        @property
        def running(self):
            return len(self.runs)

        def call(self, *_):
            pass

        def submit(self, run):
            self.runs.append(run)

        def ended(self, _):
            if not self.runs:
                pytest.fail("it waits for a run that is gone")
            self.runs.pop()
            raise KeyboardInterrupt

        def stop(self):
            pass

    with pytest.raises(Stopped):
        run_study(plan(DIGITS, tmp_path, ["balnorm"], 1), Interrupted(), show=False)


def test_a_run_refused_for_its_folder_leaves_the_folder_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("all my work")
    state, reason = execute(tmp_path, DIGITS, Resources())
    assert state == "failed"
    assert "choose another folder" in reason
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


ABSENT = [device for device in ("cuda", "mps") if not getattr(torch, device).is_available()]


@pytest.mark.parametrize("device", [*ABSENT, "foo"])
@pytest.mark.parametrize("command", [["compare"], ["compare", "--dry-run"], ["bench"], ["train"]])
def test_a_device_that_is_not_here_is_told_at_once(tmp_path, capfd, command, device):
    name, *options = command
    out = ["--out", str(tmp_path / "out")] if name != "bench" else []
    assert main([name, "digits", *options, "--device", device, *out]) == 2
    printed = capfd.readouterr().err
    assert "device" in printed
    assert device in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "out").exists()


def test_missing_data_is_told_before_anything_runs(tmp_path, capfd):
    both = ["data=digits,cifar10", "data=cifar10,digits"]
    for recipe in (["cifar10-desk"], *(["digits", "--vary", data] for data in both)):
        where = ["--root", str(tmp_path / "data"), "--out", str(tmp_path / "study")]
        little = ["--norms", "none", "--seeds", "1", "--epochs", "1", "--train-limit", "200"]
        assert main(["compare", *recipe, *where, *little]) == 2
        printed = capfd.readouterr().err
        assert printed.count("\n") == 1
        assert "balnorm data get cifar10" in printed
        assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--jobs", "0"], "jobs and threads must be at least 1"),
        (["--threads", "0"], "jobs and threads must be at least 1"),
        (["--gpus", "1"], "give --ray too"),
        (["--ray", "local", "--jobs", "2"], "jobs is for this machine"),
        (["--vary", "speed=1"], "--vary takes a field of the recipe"),
        (["--vary", "norm=balnorm"], "--vary takes a field of the recipe"),
        (["--vary", "lr=0.1,0.2", "lr=0.3"], "--vary has lr twice"),
        (["--ray", "local", "--gpus", "1.5"], "gpus must be a whole number"),
        (["--sync-stats", "--norms", "none"], "sync_stats is for balnorm and batchnorm"),
        (["--sync-stats", "--norms", "batchnorm", "--stats-fraction", "0.25"], "which takes the whole batch"),
        (["--stats-fraction", "1.5"], "stats_fraction must be above 0 and at most 1"),
        (["--output-scale", "0"], "output_scale must be unit_variance or above 0"),
        (["--vary", "lr"], "--vary takes a field of the recipe"),
        (["--vary", "compile=maybe"], "invalid choice 'maybe'"),
        (["--vary", "lr=-1"], "lr must be above 0"),
        (["--norms", "batchnorn"], "invalid choice"),
        (["--norm", "batchnorm"], "--norm"),
        (["--seeds", "0"], "seeds must be at least 1"),
    ],
)
def test_mistakes_are_answered_before_anything_runs(tmp_path, capsys, options, answer):
    assert main(["compare", "digits", *options, "--out", str(tmp_path / "study")]) == 2
    printed = capsys.readouterr()
    assert answer in " ".join((printed.out + printed.err).split())
    assert not (tmp_path / "study").exists()


def test_a_dry_run_estimates_and_writes_nothing(tmp_path, capfd):
    vary = ["--vary", "lr=0.1,0.2", "sync_stats=False"]
    assert compare(tmp_path / "study", "--dry-run", "--jobs", "2", *vary) == 0
    printed = capfd.readouterr().out
    assert re.search(r"balnorm lr=0.1 +2 +6 ", printed)
    assert re.search(r"8 of 8 runs to do, 2 at a time: about [\d.:]+ (s|min|h) on this machine", printed)
    assert not (tmp_path / "study").exists()


def test_a_dry_run_counts_the_epochs_that_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalExecutor, "call", lambda *_: 10.0)  # seconds for an epoch
    done, begun, new = plan(DIGITS, tmp_path, ["balnorm"], 3)
    done.state, done.lines = "finished", ({},) * 3
    begun.state, begun.lines = "unfinished", ({},)
    runs = [done, begun, new]
    printed = dry_run(runs, 8, Resources())
    assert re.search(r"\nbalnorm +2 +5 +10\.0 s +50\.0 s\n", printed)
    assert "2 of 3 runs to do, 2 at a time: about 25.0 s on this machine" in printed


def test_a_run_gets_a_slot_that_is_free(tmp_path):
    slots, pipe = [], types.SimpleNamespace(close=lambda: None)

    class Process:
        def __init__(self, target, args):
            slots.append(args[3])
            self.sentinel = len(slots)

        def start(self):
            pass

    executor = LocalExecutor(3, Resources())
    executor._context = types.SimpleNamespace(Pipe=lambda duplex: (pipe, pipe), Process=Process)
    *first, last = plan(DIGITS, tmp_path, ["balnorm"], 4)
    for run in first:
        executor.submit(run)
    del executor._running[2]  # the second has ended
    executor.submit(last)
    assert slots == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("device", "used"),
    [
        (None, ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda", ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", ["cuda:1"] * 3),
        ("cpu", ["cpu"] * 3),
    ],
)
def test_two_gpus_are_used_in_turn_unless_one_was_asked_for(tmp_path, monkeypatch, device, used):
    found = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(os, "setpgrp", lambda: None, raising=False)  # this is no process of a run
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(executors, "execute", lambda _, __, resources: found.append(resources.device))
    pipe = types.SimpleNamespace(send=lambda _: None)
    for slot in range(3):
        executors._execute_in_process(tmp_path, DIGITS, Resources(device=device), slot, pipe)
    assert found == used


@pytest.mark.parametrize(
    ("machine", "threads", "gpus", "runs"),
    [
        ({"CPU": 7.0}, 2, 0.0, 3),
        ({"CPU": 8.0, "GPU": 2.0}, 1, 0.5, 4),
        ({"CPU": 2.0, "GPU": 4.0}, 1, 1.0, 2),
        ({"CPU": 8.0}, 1, 1.0, 0),
        ({"GPU": 1.0}, 1, 1.0, 0),
    ],
)
def test_a_machine_has_room_for_what_its_processors_and_gpus_both_allow(machine, threads, gpus, runs):
    assert executors._room(machine, threads, gpus) == runs


@pytest.mark.parametrize(("busy", "end"), [(2, "finished"), (1000, "busy")])
def test_a_task_waits_a_minute_for_a_lock_that_outlives_its_process(tmp_path, monkeypatch, busy, end):
    waited = []
    monkeypatch.setattr(sys, "argv", sys.argv)  # which a task replaces
    monkeypatch.setattr(executors, "execute", lambda *_: ("busy" if len(waited) < busy else "finished", ""))
    clock = types.SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append)
    monkeypatch.setattr(executors, "time", clock)
    assert executors._execute_on_node(tmp_path / "run", DIGITS, Resources()) == (end, "")
    assert sum(waited) == min(busy, 61)


# --------------------------------------------------------------------------------------------------------------------
# Killed and stopped
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path):
    """The folder of a study whose runs wait to be let on."""
    out = tmp_path / "study"
    gate(out).touch()
    yield out
    gate(out).unlink(missing_ok=True)  # where a test has failed, nothing is to wait for ever


def held_study(out, **options):
    """The study as a process of its own."""
    command = [sys.executable, held.__file__, *STUDY, "--jobs", "2", "--threads", "1", "--out", str(out)]
    return subprocess.Popen(command, **options)


def assert_the_same_command_goes_on(out, whole_study):
    assert compare(out, "--jobs", "2", "--threads", "1") == 0
    assert results(out) == results(whole_study)
    assert not list(out.rglob("error.txt"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", ["killed", "Ctrl-C"])
def test_a_study_that_is_killed_or_stopped_goes_on_to_the_same_result(whole_study, out, how):
    """Also one that a script has put into the background, where Ctrl-C is ignored at first."""
    log = out.with_suffix(".log")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with log.open("w") as printed:
            process = held_study(out, stdout=printed, stderr=printed, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_until(lambda: len(waiting(out)) == 2, process)
    assert len(trainers(out)) == 2
    if how == "killed":
        process.kill()
        process.wait()
        wait_until(lambda: not trainers(out))  # they save, and end by themselves
        assert "Traceback" not in log.read_text()
    else:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert "stopped and saved: repeat the command to resume" in log.read_text()
        assert not trainers(out)
    assert [len(records) for records in results(out).values()] == [2, 2]
    gate(out).unlink()
    assert_the_same_command_goes_on(out, whole_study)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_runs_that_are_killed_or_stopped_go_on_to_the_same_result(whole_study, out, monkeypatch, capfd):
    """One is killed and one is asked to stop, while two others go on."""
    killed, stopped = out / "runs" / "balnorm-seed0", out / "runs" / "batchnorm-seed1"
    monkeypatch.setattr("balnorm.bench.cli.Resources", held.Resources)

    def disturb():
        try:
            wait_until(lambda: len(waiting(out)) == 4)
            os.kill(*trainers(killed), signal.SIGKILL)
            os.kill(*trainers(stopped), signal.SIGINT)
            wait_until(lambda: not trainers(killed) and not trainers(stopped))
        finally:
            gate(out).unlink()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        disturbed = pool.submit(disturb)
        assert compare(out, "--jobs", "4", "--threads", "1") == 1
        disturbed.result()
    printed = capfd.readouterr()
    assert "balnorm seed 0: failed, its process was ended by signal 9: repeat the command to resume it" in printed.out
    assert "batchnorm seed 1: stopped and saved" in printed.out
    assert "2 of 4 runs failed" in printed.err
    lengths = {name: len(records) for name, records in results(out).items()}
    assert lengths == {"balnorm-seed0": 2, "batchnorm-seed0": 3, "balnorm-seed1": 3, "batchnorm-seed1": 2}
    assert_the_same_command_goes_on(out, whole_study)


# --------------------------------------------------------------------------------------------------------------------
# What is seen
# --------------------------------------------------------------------------------------------------------------------


def test_a_terminal_sees_a_row_for_each_norm(out):
    ours, theirs = pty.openpty()
    process = held_study(out, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "120", "TERM": "xterm"})
    os.close(theirs)
    seen = b""

    def sees(pattern):
        nonlocal seen
        if select.select([ours], [], [], 0)[0]:
            with contextlib.suppress(OSError):  # the other side is closed
                seen += os.read(ours, 65536)
        return re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode(errors="replace")))

    headings = r"setting\s+done\s+running \(seed: epoch\)\s+best so far\s+diverged\s+failed\s+time left"
    wait_until(lambda: sees(headings), process)
    wait_until(lambda: sees(r"\n balnorm\s+0/2\s+0: 2/3\s+[\d.]+%.*\s+batchnorm\s+0/2\s+0: 2/3"), process)
    gate(out).unlink()
    wait_until(lambda: sees(r"\n balnorm\s+2/2\s+[\d.]+%.*\s+batchnorm\s+2/2\s+[\d.]+%"))
    wait_until(lambda: sees("report/index.html"))
    assert process.wait(PATIENCE) == 0
    os.close(ours)


def test_the_time_left_is_what_the_epochs_took(tmp_path):
    make_run(tmp_path, "balnorm", 0, [0.5, 0.6], epochs=2)  # 1.5 seconds an epoch
    members = plan(
        replace(DIGITS, epochs=2, width=16, batch_size=64, train_limit=None, test_limit=None), tmp_path, ["balnorm"], 3
    )
    display = Display(members, at_once=2, show=False)
    assert display.kept == 1
    assert display.time_left() == pytest.approx(2 * 2 * 1.5 / 2)
    make_run(tmp_path, "balnorm", 1, [], epochs=2, diverged=True)
    display.ended(members[1].look())
    assert display.time_left() == pytest.approx(2 * 1.5, rel=0.2)  # one is left, and two cannot share it
    assert display.row("balnorm")[:4] == ["1/3", "", "60.00%", "1"]


def test_the_time_left_of_a_setting_is_what_its_own_epochs_took(tmp_path):
    took, runs = {"balnorm": 1.0, "none": 4.0}, []
    for member in plan(DIGITS, tmp_path, list(took), 2):
        line = {"seconds": took[member.recipe.norm], "test_accuracy": 0.5}
        if not member.recipe.seed:
            member.state, member.lines = "finished", (line,) * 3
        runs.append(member)
    display = Display(runs, at_once=1, show=False)
    assert [display.time_left(setting) for setting in ("balnorm", "none", None)] == [3.0, 12.0, 15.0]
    assert display.row("none")[-1] == "12.0 s"


def test_of_many_runs_at_once_four_are_named(tmp_path):
    members = plan(DIGITS, tmp_path, ["balnorm"], 6)
    display = Display(members, at_once=6, show=False)
    for count, member in enumerate(members, 1):
        display.started(member)
        named = "  ".join(f"{seed}: 0/3" for seed in range(min(count, 4)))
        assert display.row("balnorm")[1] == named + (" ..." if count > 4 else "")


def test_clocks():
    assert [clock(s) for s in (7.24, 80, 3600 * 3 + 300)] == ["7.2 s", "1:20 min", "3:05 h"]
    assert [clock(s) for s in (59.9, 60, 3599, 3600)] == ["59.9 s", "1:00 min", "59:59 min", "1:00 h"]


def test_a_trial_whose_study_is_gone_ends_in_silence():
    """It could not send its answer, and printed a traceback."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    ours.close()
    executors._call_in_process(len, ("abc",), theirs)
    executors._call_in_process(len, (), theirs)


def test_a_trial_that_is_killed_is_one_sentence():
    executor = LocalExecutor(1, Resources())
    with pytest.raises(StudyError, match="the trial before the study was ended by signal 9: is there enough memory"):
        executor.call(signal.raise_signal, signal.SIGKILL)
    with pytest.raises(StudyError, match="ended by signal 4: set ONEDNN_MAX_CPU_ISA"):
        executor.call(signal.raise_signal, signal.SIGILL)


def test_a_run_that_somebody_else_trains_is_left_to_them(tmp_path, capfd):
    member = plan(DIGITS, tmp_path, ["balnorm"], 1)[0]
    run = Run(member.folder, member.recipe)
    run.create()
    with run.alone():
        ended = run_study([member], LocalExecutor(1, Resources()))
    assert [run.state for run in ended] == ["busy"]
    assert "skipped, another process is training it" in capfd.readouterr().out
    assert not (member.folder / "error.txt").exists()
    assert json.loads(run.config.read_text())["norm"] == "balnorm"
