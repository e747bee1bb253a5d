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
