"""The errors of stock DCP that users search for are quoted in the pages as this torch prints them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from replicated_ckpt import ReplicatedReader
from replicated_ckpt.errors import ShardLost
from tests.docs.test_docs import text_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
ADDED_LATER = {"w": torch.zeros(3), "scheduler_state": {"last_epoch": 1}}


def failure(folder: Path, state: dict[str, Any], **reader: Any) -> str:
    with pytest.raises(CheckpointException) as raised:
        dcp.load(state, **(reader or {"checkpoint_id": folder}))
    return str(raised.value)


def test_errors_that_people_search_for_are_explained(tmp_path: Path) -> None:
    """Each error is provoked with FileSystemReader, and docs/migrating.md quotes it."""
    page, folder = text_of("docs/migrating.md"), tmp_path / "step-1"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    message = "Missing key in checkpoint state_dict: scheduler_state.last_epoch."
    assert message in page
    assert message in failure(folder, dict(ADDED_LATER))
    assert message in failure(
        folder, dict(ADDED_LATER), checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path)
    )
    message = "Size mismatch between saved torch.Size([3]) and current: torch.Size([4])"
    assert message in page
    assert message in failure(folder, {"w": torch.zeros(4)})
    (folder / "__0_0.distcp").unlink()
    assert "FileNotFoundError: [Errno 2] No such file or directory: '.../__2_0.distcp'" in page
    assert f"FileNotFoundError: [Errno 2] No such file or directory: '{folder}/__0_0.distcp'" in failure(
        folder, {"w": torch.zeros(3)}
    )
    ours = failure(folder, {"w": torch.zeros(3)}, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert ShardLost.__name__ in ours
    assert "__0_0.distcp" in ours
    (folder / ".metadata").unlink()
    message = failure(folder, {"w": torch.zeros(3)})
    assert ".metadata" in message or "assert metadata is not None" in message  # torch 2.9 hides the error of the file
    assert "/.metadata'" in page


def test_missing_keys_may_be_left_out(tmp_path: Path) -> None:
    """The remedy of the page works: a partial load."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-1")
    state = {"w": torch.zeros(3), "scheduler_state": {"last_epoch": 1}}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path), planner=planner)
    assert state["w"].tolist() == [1, 1, 1]  # type: ignore[attr-defined]
    assert state["scheduler_state"] == {"last_epoch": 1}
