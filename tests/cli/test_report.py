"""`report` without other nodes: of one process, of a removed checkpoint, and without a report."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.cli.exit_codes import ExitCode
from tests.cli.commands import as_json, command

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def save(root: Path) -> None:
    state = {"x": torch.arange(1 << 18)}
    dcp.save(state, checkpoint_id="step-1", storage_writer=ReplicatedWriter(root), no_dist=True)


def test_a_process_alone_has_a_report_without_an_agent(tmp_path: Path) -> None:
    """The reports of the save and of the last load are found without an agent, also after the checkpoint is removed."""
    root = tmp_path / "root"
    save(root)
    done = command("report", "step-1", "--root", root)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert "no report of a load was found" in done.stdout
    dcp.load({"x": torch.zeros(1 << 18)}, checkpoint_id="step-1", storage_reader=ReplicatedReader(root), no_dist=True)
    shutil.rmtree(root / "step-1")
    code, report = as_json("report", "step-1", "--root", root)
    assert code == ExitCode.OK
    assert {kind: [one["rank"] for one in report[kind]["ranks"]] for kind in ("save", "load")} == {
        "save": [0],
        "load": [0],
    }
    assert report["save"]["slowest"] is None


def test_a_checkpoint_without_a_report_is_an_error(tmp_path: Path) -> None:
    """The error says where a report may be, and no trace is written. A trace that cannot be written is an error, too."""
    root, trace = tmp_path / "root", tmp_path / "trace.json"
    save(root)
    done = command("report", "step-9", "--root", root, "--trace", trace)
    assert (done.returncode, done.stdout) == (ExitCode.NOT_FOUND, "")
    assert "No node that was reached has a report of a save or load of 'step-9'" in done.stderr
    assert "Hint: Each node keeps the reports of its last 16 saves" in done.stderr
    assert not trace.exists()
    done = command("report", "step-1", "--root", root, "--trace", tmp_path / "none" / "trace.json")
    assert (done.returncode, done.stdout) == (ExitCode.FAILED, "")
    assert str(tmp_path / "none") in done.stderr
    done = command("report", "latest", "--root", root, "--trace", trace)
    assert done.returncode == ExitCode.OK
    assert f"trace written to {trace}: " in done.stdout
    assert json.loads(trace.read_bytes())["traceEvents"]
