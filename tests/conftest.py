import os

import hypothesis
import pytest
import torch

# The suite runs one process a core: more threads in each would only fight for them.
torch.set_num_threads(1)

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def digits():
    """1,797 images of digits, (N, 1, 8, 8) in [0, 1], and their labels."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
