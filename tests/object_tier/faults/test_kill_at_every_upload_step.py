"""SIGKILL of the agent at every failpoint of an upload: the bucket has the old or the new checkpoint, and after a
restart the new.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, failpoints
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.core.layout import STAGING_DIR
from tests.agent.agents import stop_agent, wait_for
from tests.buckets.servers import Server
from tests.harness.processes import is_running
from tests.marks import mark_long

pytestmark = [
    pytest.mark.fault,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
POINTS = [name for name in failpoints.POINTS if name.startswith("upload.") and name != "upload.slim-marked"]
"""`upload.slim-marked` is in tests/object_tier/test_slimming.py."""


def state_of(number: int, items: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((items,), float(number)), "bias": torch.arange(1000.0) * number}


def loaded(where: Mapping[str, Any], checkpoint_id: str, items: int) -> int:
    """Loads from the bucket, compares every value, and returns the number of the save."""
    state = state_of(0, items)
    dcp.load(state, checkpoint_id=checkpoint_id, storage_reader=ReplicatedReader(**where))
    number = int(state["weights"][0])
    assert all(torch.equal(value, state_of(number, items)[name]) for name, value in state.items())
    return number


@pytest.mark.parametrize(
    "checkpoint_id", mark_long(["step-1", "step-2"], keep=["step-2"]), ids=["the same id", "another id"]
)
@pytest.mark.parametrize("point", mark_long(POINTS, keep=["upload.part-sent"]))
def test_an_agent_dies_in_an_upload(
    root: Path, where: Mapping[str, Any], moto: Server, monkeypatch: pytest.MonkeyPatch, point: str, checkpoint_id: str
) -> None:
    """After the kill, the committed save loads bit for bit. After a restart the new save does, and no unfinished upload
    or file is left.
    """
    items = 5_000_000 if point == "upload.part-sent" else 5_000  # 20 MB are two parts
    writer = ReplicatedWriter(root, overwrite=True, **where)
    dcp.save(state_of(1, items), checkpoint_id="step-1", storage_writer=writer)
    writer.wait()
    stop_agent(root)
    monkeypatch.setenv(failpoints.ENV, f"{point}=kill")
    dcp.save(state_of(2, items), checkpoint_id=checkpoint_id, storage_writer=writer)
    endpoint = wait_for(lambda: read_endpoint(root / ".agent"), 10, "an agent")
    wait_for(lambda: not is_running(endpoint.pid), 30, f"the kill at {point}")
    assert loaded(where, "latest", items) == (2 if point == "upload.marked" else 1)
    assert loaded(where, "step-1", items) == (2 if point == "upload.marked" and checkpoint_id == "step-1" else 1)
    monkeypatch.delenv(failpoints.ENV)
    assert writer.wait() == (checkpoint_id,)
    assert loaded(where, "latest", items) == 2
    assert loaded(where, checkpoint_id, items) == 2
    bucket = where["object_store"].split("/")[2]
    assert "Uploads" not in moto.client().list_multipart_uploads(Bucket=bucket)
    assert not list((root / STAGING_DIR).iterdir())
    assert json.loads((root / ".agent" / "uploads.json").read_text())["begun"] == []


def test_every_failpoint_of_an_upload_is_killed_at() -> None:
    assert POINTS == ["upload.part-sent", "upload.shard-arrived", "upload.manifest-put", "upload.marked"]
