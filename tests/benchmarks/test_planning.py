"""The benchmark of planning runs, so that it does not rot; what it measures here counts for nothing."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import planning


@pytest.mark.long
def test_it_measures_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables are printed, with time, growth and memory of each step, and all of it is in the file for machines."""
    file = tmp_path / "planning.json"
    monkeypatch.setattr(sys, "argv", ["planning", "--quick", "--json", str(file)])
    assert planning.main() == 0
    printed, found = capsys.readouterr().out, json.loads(file.read_text())
    for step in ("decide", "read posts", "finish", "stock: finish", "read metadata", "stock: read metadata", "survey"):
        assert f"\n{step} " in printed
        assert all(run["seconds"][step] > 0 and run["peak_bytes"][step] > 0 for run in found["steps"])
    assert all(run["sizes"]["metadata"] > run["sizes"]["manifest"] / 100 > 0 for run in found["steps"])
    opened_s, published_s, sent_mb = found["publishing"]["0 hang"]
    assert opened_s > 0 < published_s
    assert sent_mb > 4, "the coordinator sends the metadata once at least"
