"""Some seconds of `make fuzz` for each target, and what it has found before."""

import pytest

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS

SECONDS = 3.0

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_found(target: str) -> None:
    """Every input of the corpus and those of some seconds are read alike by all, or refused; and both happens."""
    outcome = run(target, seed=20260101, seconds=SECONDS)
    assert outcome.failed == []
    assert outcome.inputs > 20
