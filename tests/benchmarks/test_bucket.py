"""The benchmark of buckets runs. Its figures are not checked."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bucket
from benchmarks.bucket_case import READS, UPLOADS


@pytest.mark.long
def test_it_measures_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both tables are printed, and the JSON file has each sample."""
    file = tmp_path / "samples.json"
    monkeypatch.setattr(sys, "argv", ["bucket", "--server", "moto", "--quick", "--mib", "18", "--json", str(file)])
    assert bucket.main() == 0
    printed, samples = capsys.readouterr().out, json.loads(file.read_text())
    for name in (*UPLOADS, *READS):
        if not name.startswith("obstore"):
            assert name in printed
            assert samples[name][0]["seconds"] > 0


@pytest.mark.long
@pytest.mark.multiprocess
def test_it_measures_an_agent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The upload is committed, and the agent's peak memory is printed."""
    monkeypatch.setattr(sys, "argv", ["bucket", "--server", "moto", "--agent-memory", "--mib", "18"])
    assert bucket.main() == 0
    assert "at its peak" in capsys.readouterr().out
