"""Some seconds of `make fuzz`, and what it has found before."""

import pytest

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS
from tests.marks import long

SECONDS, MORE_SECONDS = 1.0, 10.0

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seconds", [SECONDS, long(MORE_SECONDS)])
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_found(target: str, seconds: float) -> None:
    """Every input of the corpus and those of some seconds are read alike by all, or refused; and both happens."""
    outcome = run(target, seed=20260101, seconds=seconds)
    assert outcome.failed == []
    assert outcome.inputs > 20
