import os
import shlex

import hypothesis
import pytest

from balnorm.training.processor import CAP, find_defect


def capped() -> str:
    """Before torch is loaded, here and in the processes started from here: limit it to what the processor can do.

    Some processors end torch's own convolutions in bfloat16, and with them the process of the tests.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # which has the environment of the process that started it
        return ""
    stand_in = os.environ.pop("BALNORM_TEST_TRIAL", None)  # for the test of this
    defect = find_defect(shlex.split(stand_in) if stand_in else None)
    if defect is None:
        return ""
    if defect.cap is not None:
        os.environ[CAP] = defect.cap
    remedy = f"{CAP}={defect.cap}" if defect.cap else f"no {CAP} helps, and tests will die"
    return f"processor: torch's own convolutions in lower precision end in {defect.signal} here: {remedy}"


CAPPED = capped()

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_report_header():
    return [CAPPED] if CAPPED else []


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """The suite runs one process a core: more threads in each would only fight for them."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture(params=["native", "torch"])
def backend(request, monkeypatch):
    """Run a test with the native kernels, and with torch's own operations in their place."""
    from balnorm.core import native

    if request.param == "torch":
        monkeypatch.setattr(native, "_library", None)
    elif native._library is None:
        pytest.skip(f"no native kernels ({native.status()})")


@pytest.fixture(scope="session")
def digits():
    """1,797 images of digits, (N, 1, 8, 8) in [0, 1], and their labels."""
    import torch

    data = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
