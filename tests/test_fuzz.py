"""Two hundred cases of the fuzz, on both backends. `make fuzz` runs ten thousand under AddressSanitizer."""

import pytest

import fuzz

pytestmark = pytest.mark.usefixtures("backend")


@pytest.mark.parametrize("first", range(0, 200, 50))
@pytest.mark.filterwarnings("ignore")
def test_every_call_is_right_or_refused(first):
    for number in range(first, first + 50):
        fuzz.run(number)
