"""The failure of a save or load fits on one log line: the cause, its rank and its entry."""

import socket
import threading
from pathlib import Path
from traceback import StackSummary

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedWriter, failpoints
from replicated_ckpt.dcp.agreement.nodes import LoneNode
from replicated_ckpt.dcp.runtime.user_code import describe_failure
from replicated_ckpt.errors import AckNotReached, SaveAborted, StoreFull
from replicated_ckpt.testing.shards import table_of


def test_the_cause_is_named_before_the_aborts_that_followed() -> None:
    """`describe_failure` puts the root cause first, then the aborts that followed, without tracebacks."""
    full = StoreFull("/nvme/ckpt", "write", "step-1/__7_0.distcp", "OSError: No space left on device")
    full.add_note("Raised on host n7.")
    failures = {rank: (SaveAborted("Rank 7 failed.\nIt was aborted."), StackSummary()) for rank in range(7)}
    said = describe_failure(CheckpointException("save", {**failures, 7: (full, StackSummary())}))
    assert said.startswith(
        f"rank 7: StoreFull: {full} (Raised on host n7); rank 0: SaveAborted: Rank 7 failed.\\nIt was"
    )
    assert said.endswith("; and 5 more ranks")


def test_another_error_is_described_with_its_class() -> None:
    """The description of another exception starts with its class, as the message alone may not identify the error."""
    assert describe_failure(ValueError("no\nsuch")) == "ValueError: no\\nsuch"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_reason_of_an_abort_names_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the abort names the host of the failed rank, as all nodes use the same root path."""
    said = list[str]()
    monkeypatch.setattr(LoneNode, "abort", lambda _self, _save_id, why: said.append(why))
    with pytest.raises(CheckpointException):
        dcp.save({"lock": threading.Lock()}, checkpoint_id="a", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    assert said[0].startswith(f"rank 0 on {socket.gethostname()} failed: TypeError: ")


def test_a_staged_shard_with_other_bytes_is_not_acknowledged(tmp_path: Path) -> None:
    """A staged shard is replaced by other bytes before the decision: the save raises AckNotReached and publishes no
    shard.
    """
    other = b"evil" * 1000

    def replace_shard(_: str) -> None:
        (path,) = (tmp_path / ".staging").glob("*/__0_0.distcp")
        path.write_bytes(other + table_of([other]).encode())

    writer = ReplicatedWriter(tmp_path, copies=1)
    with failpoints.arm("coordinator.accounted", replace_shard), pytest.raises(CheckpointException) as raised:
        dcp.save({"w": torch.zeros(10)}, checkpoint_id="a", storage_writer=writer, no_dist=True)
    assert [type(failure[0]) for failure in raised.value.failures.values()] == [AckNotReached]
    assert not (tmp_path / "a" / "__0_0.distcp").exists()
