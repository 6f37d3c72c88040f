"""The benchmark of the memory tier runs. Its figures are not checked."""

import sys
from pathlib import Path

import pytest

from benchmarks.suites import memory_tier


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_it_prints_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step reaches the buddy's memory. The table has memory, blocking time and the ratio of loads."""
    small = [
        "--size-mib",
        "1",
        "--steps",
        "4",
        "--step-s",
        "0",
        "--disk-every",
        "2",
        "--loads",
        "1",
        "--medium",
        "tmpfs",
    ]
    monkeypatch.setattr(sys, "argv", ["memory_tier", *small, "--disk", str(tmp_path)])
    assert memory_tier.main() == 0
    printed = capsys.readouterr().out
    assert "in the buddy's memory: 4 of 4 steps" in printed
    for figure in ("held training up", "x the state", "a whole load", "reading alone"):
        assert figure in printed
