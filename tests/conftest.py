import collections
import os
import shlex
import signal
from importlib.metadata import version

import hypothesis
import pytest

from balnorm.bench.training import machine

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


# They have to be started with the environment that they need: test_triton.py does so.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted.py", "watched.py"]

LEFT = "slow"  # why a test is skipped that make test-all runs


def pytest_addoption(parser):
    parser.addoption("--slow", choices=("skip", "only", "too"), default="skip", help="what to do with the slow tests")


def pytest_collection_modifyitems(config, items):
    slow = [item for item in items if item.get_closest_marker("slow")]
    if config.getoption("--slow") == "only":
        items[:] = slow
    elif config.getoption("--slow") == "skip":
        for item in slow:
            item.add_marker(pytest.mark.skip(reason=LEFT))


def pytest_terminal_summary(terminalreporter):
    """What was not tested, as the last lines before pytest's own."""
    skipped = collections.Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")
    )
    slow = skipped.pop(LEFT, 0)
    if skipped or slow:
        terminalreporter.section("not tested")
    for reason, count in skipped.most_common():
        terminalreporter.line(f"{count} skipped: {reason}")
    if slow:
        terminalreporter.line(f"{slow} slow test{'s' * (slow > 1)} left to make test-all")


def pytest_configure(config):
    """Before torch's first convolution, here and in all processes started from here: limit it to what works.

    Some processors end torch's own convolutions, and with them the process of the tests. What was found is kept in
    pytest's cache: the trial takes seconds.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # which has the environment of the process that started it
        return
    if stand_in := os.environ.pop("BALNORM_TEST_TRIAL", None):  # for the test of this
        machine.TRIAL = tuple(shlex.split(stand_in))
        machine.caps = lambda: ["AVX512_CORE_BF16", "AVX2"]
    cache = getattr(config, "cache", None)
    known = [version("torch"), *machine.TRIAL, *machine.caps(), os.environ.get(machine.CAP)]
    found = cache.get("balnorm/processor", {}) if cache else {}
    if found.get("known") != known:
        defect = machine.find_defect()
        found = {"known": known, "defect": defect and vars(defect)}
        if cache:
            cache.set("balnorm/processor", found)
    if found["defect"] is None:
        return
    defect = machine.Defect(**found["defect"])
    if defect.cap is not None:
        os.environ[machine.CAP] = defect.cap
    remedy = f"{machine.CAP}={defect.cap}" if defect.cap else f"no {machine.CAP} helps, and tests will die"
    config.processor = f"processor: torch's own convolutions end in {defect.signal} here: {remedy}"


def pytest_report_header(config):
    return getattr(config, "processor", [])


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_works():
    """Also where the suite was started in the background by a script: whatever runs there, children too, ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _one_thread_for_fixtures():
    """What a whole file or session shares is made before the fixture below has its turn."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread():
    """The suite runs one process a core: more threads in each would only fight for them.

    For each test anew: a command that ran in this process may have asked for more, and results depend on it.
    """
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture(params=["native", "torch"])
def backend(request, monkeypatch):
    """Run a test with the native kernels, and with torch's own operations in their place."""
    from balnorm._core.backends import cpu

    if request.param == "torch":
        monkeypatch.setattr(cpu, "_library", None)
    elif cpu._library is None:
        pytest.skip(f"no native kernels ({cpu.status()})")
    return request.param


@pytest.fixture(scope="session")
def digits():
    """1,797 images of digits, (N, 1, 8, 8) in [0, 1], and their labels."""
    import torch

    data = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


@pytest.fixture(scope="session")
def whole_study(tmp_path_factory):
    """The folder of a small study that nothing happened to, and that had one thread."""
    from balnorm.bench.cli import main
    from folders import STUDY

    out = tmp_path_factory.mktemp("whole") / "study"
    assert main([*STUDY, "--threads", "1", "--quiet", "--out", str(out)]) == 0
    return out
