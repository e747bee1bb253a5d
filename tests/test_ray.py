"""Studies on a Ray cluster: two nodes, and what happens when a part of it dies."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from balnorm.bench.cli import main
from folders import results
from held import PATIENCE

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
PROGRAM = Path(__file__).parent / "ray_study.py"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The folder of the studies on a cluster, and what they printed."""
    folder = tmp_path_factory.mktemp("cluster")
    environment = {
        **os.environ,
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    environment |= {"PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), *sys.path]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("All 4 runs finished.") == 3
    return folder, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("what", ["nothing", "worker", "node"])
def test_a_cluster_gives_the_same_result_whatever_dies(whole_study, cluster, what):
    folder, printed = cluster
    assert results(folder / what) == results(whole_study)  # which had one thread, as a task has
    kept = [json.loads(path.read_text()) for path in (folder / what).glob("runs/*/environment.json")]
    assert all("ray_study.py" in start["command"][0] for run in kept for start in run)  # not Ray's own command
    starts = sorted(len(run) for run in kept)
    assert starts == ([1, 1, 1, 1] if what == "nothing" else [1, 1, 1, 2])  # it was started again, and went on
    assert (f"the {what} is gone" in printed) == (what != "nothing")


def test_more_than_any_machine_has_is_refused(tmp_path):
    """It would wait for ever."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "balnorm",
        "compare",
        "digits",
        "--ray",
        "local",
        "--threads",
        "999",
    ]
    command += ["--out", str(tmp_path / "study")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "no machine of the Ray cluster has 999 CPUs and 0 GPUs for a run" in done.stderr
    assert not (tmp_path / "study").exists()


def test_no_cluster_is_one_sentence(tmp_path, capsys):
    assert main(["compare", "digits", "--ray", "127.0.0.1:1", "--out", str(tmp_path / "study")]) == 1
    answer = capsys.readouterr().err
    assert "no Ray cluster at '127.0.0.1:1'" in answer
    assert "Traceback" not in answer
    assert not (tmp_path / "study").exists()


def test_ray_that_does_not_start_is_one_sentence(tmp_path, capsys, monkeypatch):
    """If its processes take too long, Ray raises a bare Exception."""
    reason = "The current node timed out during startup.\nThis could happen because"
    monkeypatch.setattr("ray.init", mock.Mock(side_effect=Exception(reason)))
    assert main(["compare", "digits", "--ray", "local", "--out", str(tmp_path / "study")]) == 1
    expected = "balnorm: Ray did not start here (The current node timed out during startup.)\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "study").exists()
