"""Reports of saves and loads: a log line, a table, JSON, and the user's callbacks."""

import json
import logging
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, LoadReport, ReplicatedReader, ReplicatedWriter, SaveReport
from replicated_ckpt.dcp.load.load_report import PHASES as LOAD_PHASES
from replicated_ckpt.dcp.save.save_report import PHASES
from replicated_ckpt.wording import align, describe_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
STATE = {"x": torch.arange(1 << 20, dtype=torch.int64), "text": "t"}
LOGGER = "replicated_ckpt"


def save(writer: ReplicatedWriter, checkpoint_id: str = "step-1") -> None:
    dcp.save(STATE, checkpoint_id=checkpoint_id, storage_writer=writer, no_dist=True)


def load(reader: ReplicatedReader) -> None:
    state = {"x": torch.zeros(1 << 20, dtype=torch.int64), "text": ""}
    dcp.load(state, checkpoint_id="step-1", storage_reader=reader, no_dist=True)


def test_a_save_and_a_load_are_one_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save and a load each log one INFO line with the id, the copies or sources, bytes, rate and the slowest rank."""
    with caplog.at_level(logging.INFO, LOGGER):
        save(ReplicatedWriter(tmp_path))
        load(ReplicatedReader(tmp_path))
    (saved, loaded) = [one.getMessage() for one in caplog.records if one.levelno == logging.INFO]
    assert saved.startswith("saved step-1 (save ")
    assert "1 copy on 1 node, 8.39 MB in " in saved
    assert "/s); slowest rank 0 on " in saved
    assert loaded.startswith("loaded step-1 (save ")
    assert "8.39 MB local, 0 B from peers, 0 B from the bucket" in loaded
    assert "\n" not in saved + loaded


def test_unknown_counts_are_left_out_of_the_line(tmp_path: Path) -> None:
    """A save that was acknowledged as staged has no counts of copies and bytes: the log line omits them."""
    writer = ReplicatedWriter(tmp_path)
    save(writer)
    assert writer.last_save is not None
    line = str(replace(writer.last_save, copies_made=0, bytes_written=0, ranks=()))
    assert re.match(r"saved step-1 \(save [0-9a-f]{8}\): on 1 node in [0-9.]+ s; slowest rank 0 on ", line), line


def test_the_phases_of_a_save_are_measured(tmp_path: Path) -> None:
    """Each phase has a time within the save's duration. The table and the JSON contain all phases."""
    writer = ReplicatedWriter(tmp_path)
    save(writer)
    report = writer.last_save
    assert report is not None
    assert set(report.phases) == set(PHASES)
    assert all(0 <= spent <= report.seconds for spent in report.phases.values())
    assert report.phases["send"] < 0.01, "the node has no buddy"
    assert min(report.phases[name] for name in ("plan", "serialise", "write", "fsync", "commit")) > 0
    header, line = report.table().splitlines()
    assert header.split() == ["rank", "host", "bytes", "copies", *PHASES, "seconds"]
    assert line.split()[0] == "0"
    assert f"{report.phases['commit']:.3f}" in line
    found = json.loads(json.dumps(report.as_dict()))
    assert found["phases"].keys() == report.phases.keys()
    assert [one["rank"] for one in found["ranks"]] == [0]


def test_the_report_of_a_load_is_a_table_and_json(tmp_path: Path) -> None:
    """The report of a load gives the sources of the bytes by rank, as a table and as JSON."""
    save(ReplicatedWriter(tmp_path))
    reader = ReplicatedReader(tmp_path)
    load(reader)
    report = reader.last_load
    assert report is not None
    assert set(report.phases) == set(LOAD_PHASES)
    header, line = report.table().splitlines()
    assert header.split()[:6] == ["rank", "host", "local", "peer", "bucket", "shared"]
    assert "8.39 MB" in line
    assert LoadReport.from_dict(json.loads(json.dumps(report.as_dict()))) == report.ranks[0]


def test_the_callbacks_are_called_after_commit_and_load(tmp_path: Path) -> None:
    """`on_save` is called once after the commit, and `on_load` once after the load, with the report."""
    seen: list[Any] = []

    def on_save(report: SaveReport) -> None:
        assert (tmp_path / report.checkpoint_id / ".metadata").exists()
        seen.append(report)

    writer = ReplicatedWriter(tmp_path, on_save=on_save)
    save(writer)
    assert seen == [writer.last_save]
    reader = ReplicatedReader(tmp_path, on_load=seen.append)
    load(reader)
    assert seen[1:] == [reader.last_load]


def test_a_save_that_fails_calls_no_callback(tmp_path: Path) -> None:
    seen: list[SaveReport] = []
    writer = ReplicatedWriter(tmp_path, overwrite=False, on_save=seen.append)
    save(writer)
    with pytest.raises(CheckpointException):
        save(writer)  # the id is taken
    assert len(seen) == 1


@pytest.mark.parametrize(
    "error", [ValueError("mine"), AssertionError("mine"), CheckpointException("a load of mine", {})]
)
def test_an_error_of_a_callback_is_only_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """An error of a callback is logged, and does not fail the save or load."""

    def broken(_: object) -> None:
        raise error

    save(ReplicatedWriter(tmp_path, on_save=broken))
    load(ReplicatedReader(tmp_path, on_load=broken))
    logged = [one for one in caplog.records if one.exc_info is not None and one.exc_info[1] is error]
    assert len(logged) == 2
    assert all("is not affected" in one.getMessage() for one in logged)


def test_a_manager_passes_its_callbacks_on(tmp_path: Path) -> None:
    """A manager's callbacks are called for its saves, background saves and loads."""
    seen: list[Any] = []
    with CheckpointManager(tmp_path, on_save=seen.append, on_load=seen.append) as manager:
        manager.save(1, STATE)
        manager.async_save(2, STATE)
        manager.wait()
        manager.restore_latest({"x": torch.zeros(1 << 20, dtype=torch.int64), "text": ""})
    assert [(type(one).__name__, one.checkpoint_id) for one in seen] == [
        ("SaveReport", "step-1"),
        ("SaveReport", "step-2"),
        ("LoadReport", "step-2"),
    ]


def test_a_pickled_writer_keeps_its_callback(tmp_path: Path) -> None:
    """A pickled writer keeps its `on_save`, as for an asynchronous save in another process."""
    writer = pickle.loads(pickle.dumps(ReplicatedWriter(tmp_path, on_save=print)))
    assert writer._on_save is print


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1250, "1.25 kB"), (8_388_608, "8.39 MB"), (5e12, "5 TB"), (1.5e15, "1.5 PB")],
)
def test_sizes_have_three_digits(count: float, text: str) -> None:
    """`describe_bytes` uses the largest unit in which the number is at least 1, with three digits."""
    assert describe_bytes(count) == text


def test_columns_are_aligned() -> None:
    """The first column is aligned left, the others right."""
    assert align([["rank", "s"], ["10", "1.5"]]) == "rank    s\n10    1.5"


def test_a_report_without_phases_is_still_a_line() -> None:
    """A report that a program creates without phases can be printed."""
    assert "saved a (save b)" in str(SaveReport("a", "b", (), 0, 0, 2, 2, 0.0))
    assert "loaded a (save b)" in str(LoadReport("a", "b", 0, 0, 0, 0, 0.0, ()))
