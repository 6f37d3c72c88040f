"""The files in which ranks report their saves and loads."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.cli.checkpoints.report import choose_newest
from replicated_ckpt.core.rank_report import Kind, RankReport, Span
from replicated_ckpt.errors import StoreError
from replicated_ckpt.node.state.rank_reports import KEPT, RankReports
from replicated_ckpt.stores.local.store import LocalStore


def report(number: int, rank: int = 0, kind: Kind = "save", checkpoint_id: str = "run/step-1") -> RankReport:
    """The report of save or load `number`, which ended at second `number`."""
    spans = (Span("plan", 0.0, 0.5, 0.5), Span("send", 0.5, 0.7, 0.1, "b", by_agent=True))
    named = (kind, checkpoint_id, "a" * 32, rank, "host", 1e9 + number, 0.7)
    return RankReport(*named, {"plan": 0.5}, node_id="a", operation=f"{number:032x}", spans=spans)


def store_in(path: Path) -> LocalStore:
    store = LocalStore(path)
    store.agent_directory()
    return store


def test_the_reports_of_the_last_saves_and_loads_are_kept(tmp_path: Path) -> None:
    """The newest reports are read back unchanged, with those of all ranks. Each kind has its own limit."""
    store = store_in(tmp_path)
    books = [RankReports(store) for _ in range(2)]
    for number in range(KEPT + 3):
        for rank, book in enumerate(books):
            book.keep(report(number, rank))
            for path in tmp_path.glob(f".agent/report-save-{number:032x}-*.json"):
                os.utime(path, (number, number))
    books[0].keep(replace(report(0, kind="load"), ranks=(report(0, kind="load"), report(0, 1, kind="load"))))
    books[0].keep(report(99, checkpoint_id="run/step-2"))
    found = books[0].read("run/step-1")
    saves = [one for one in found if one.kind == "save"]
    assert sorted((one.operation, one.rank) for one in saves) == [
        (f"{number:032x}", rank) for number in range(4, KEPT + 3) for rank in (0, 1)
    ]
    assert saves[0] == report(4)
    (load,) = (one for one in found if one.kind == "load")
    assert [one.rank for one in load.ranks] == [0, 1]
    assert choose_newest(found, "save") == [report(KEPT + 2), report(KEPT + 2, 1)]
    assert [one.rank for one in choose_newest(found, "load")] == [0, 1]


def test_a_damaged_report_is_left_out(tmp_path: Path) -> None:
    """A truncated report and one with invalid values are skipped, and the others are read."""
    book = RankReports(store_in(tmp_path))
    for number in range(3):
        book.keep(report(number))
    first, second, _ = sorted((tmp_path / ".agent").glob("report-*.json"))
    first.write_bytes(first.read_bytes()[:-9])
    second.write_text(json.dumps({**report(1).to_json(), "seconds": "long"}))
    assert book.read("run/step-1") == [report(2)]


def test_a_report_that_cannot_be_written_is_an_error_of_the_store(tmp_path: Path) -> None:
    """The root does not exist: `keep` raises a StoreError. The caller decides that the save succeeds all the same."""
    with pytest.raises(StoreError):
        RankReports(LocalStore(tmp_path / "no store")).keep(report(1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("operation", "../../x"),
        ("node_id", "a\nb"),
        ("seconds_by_node", {"b": -1.0}),
        ("seconds_by_node", [1.0]),
        ("spans", [["plan", 0.0, 0.5]]),
        ("spans", [["plan", 0.0, float("nan"), 0.5, "", False]]),
        ("spans", [["<plan>", 0.0, 0.5, 0.5, "", False]]),
        ("ranks", [{"kind": "save"}]),
        ("ranks", 7),
    ],
)
def test_a_report_with_an_invalid_field_is_refused(field: str, value: Any) -> None:
    """A report may come from another node, so each field is checked."""
    valid = report(1).to_json()
    assert RankReport.from_json(json.loads(json.dumps(valid))) == report(1)
    with pytest.raises((KeyError, TypeError, ValueError)):
        RankReport.from_json({**valid, field: value})


def test_a_report_that_another_rank_removes_meanwhile_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks remove old reports at the same time: each one skips the files that are already gone."""
    book = RankReports(store_in(tmp_path))
    book.keep(report(1))
    monkeypatch.setattr(Path, "glob", lambda path, _: iter([path / f"report-save-{2:032x}-0.json", *path.iterdir()]))
    book.keep(report(3))
    monkeypatch.undo()
    assert [one.operation for one in book.read("run/step-1")] == [f"{number:032x}" for number in (1, 3)]
