"""ckpt-chaos as a referee: every resume after a kill passes."""

import pytest

from tests.frameworks.running import require
from tests.referee.chaos import bench
from tests.referee.chaos.__main__ import main

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.long, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("way", ["manager", "manager-async"])
def test_every_resume_after_a_kill_passes(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One of two ranks is killed at a file event. The resumed run loads the newest checkpoint and ends with the same
    result.
    """
    assert main(["--ways", way]) == 0
    assert capsys.readouterr().out.count(f"| {way} | rank ") == 2


@pytest.mark.parametrize("target", bench.NEEDS)
def test_every_resume_of_a_framework_passes(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for ckpt-chaos' own programs, with our class instead of the framework's."""
    require(bench.NEEDS[target])
    assert bench.main(["--targets", target, "--ranks", "2"]) == 0
    assert f"| {target} | " in capsys.readouterr().out
