"""The benchmark of planning runs. Its figures are not checked."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import planning
from benchmarks.planning_world import World
from benchmarks.rank.collectives import messages_of


@pytest.mark.long
def test_it_measures_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables have time, growth and memory of each step, and so has the JSON file."""
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
    assert sent_mb > 4, "the coordinator sends the metadata at least once"


def test_a_repeated_save_gathers_a_constant_size() -> None:
    """A rank with kept plan and layout gathers at most 256 bytes per collective, with any number of items and ranks."""
    few, many = messages_of(World(16, 160)), messages_of(World(64, 6400))
    kept = [name for name in many if "kept" in name]
    assert len(kept) == 3
    assert all(few[name] <= many[name] <= 256 for name in kept)
    assert all(many[name.partition(" that is")[0].partition(", layout")[0]] > 10_000 for name in kept)
