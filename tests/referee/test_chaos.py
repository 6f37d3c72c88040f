"""ckpt-chaos as a referee: every resume after a kill passes."""

import pytest

from tests.referee.chaos.__main__ import main


@pytest.mark.multiprocess
@pytest.mark.fault
@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("way", ["manager", "manager-async"])
def test_every_resume_after_a_kill_passes(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 or rank 1 of two is killed at a file event: the resume takes the newest checkpoint, with the same result."""
    assert main(["--ways", way]) == 0
    assert capsys.readouterr().out.count(f"| {way} | rank ") == 2
