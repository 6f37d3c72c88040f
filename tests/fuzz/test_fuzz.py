"""Some inputs of `make fuzz` for each target, and the corpus of earlier findings."""

import pytest

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS

INPUTS = 1500
NOTHING_TO_REFUSE = {"valid"}

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_found(target: str) -> None:
    """On every input, all readers agree or the input is refused. Each target has inputs of both kinds."""
    outcome = run(target, seed=20260101, inputs=INPUTS)
    assert outcome.failed == []
    assert outcome.inputs == INPUTS
    refused = outcome.said["refused"]
    assert (refused > INPUTS // 10) != (target in NOTHING_TO_REFUSE)
    assert INPUTS - refused > INPUTS // 10
