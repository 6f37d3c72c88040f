"""`rm` takes a checkpoint from the bucket with the last copy on a node, and never the one without the other by mistake."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket_client.opening import open_client
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from tests.agent.agents import stop_agent
from tests.object_tier.test_one_node import assert_loads, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def in_bucket(where: Mapping[str, Any]) -> list[str]:
    client = open_client(ObjectTarget.check(where["object_store"], where["storage_options"]))
    try:
        return sorted(found.checkpoint_id for found in Bucket(client).saves())
    finally:
        client.close()


def test_it_goes_from_both_and_is_not_uploaded_again(
    root: Path, where: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the URL that its save named; what is kept in the bucket on purpose loads from there."""
    writer = ReplicatedWriter(root, **where)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
    writer.wait()
    assert main(["rm", "step-1", "--root", str(root)]) == ExitCode.OK
    assert in_bucket(where) == ["step-2"]
    assert not (root / "step-1").exists()
    stop_agent(root)
    assert main(["status", "--root", str(root), "--start-agents"]) == ExitCode.OK
    time.sleep(3)
    assert in_bucket(where) == ["step-2"]
    capsys.readouterr()
    assert main(["rm", "step-2", "--root", str(root), "--force", "--keep-in-bucket"]) == ExitCode.OK
    assert f"not removed from {where['object_store']}: step-2" in capsys.readouterr().out
    assert not (root / "step-2").exists()
    assert_loads(ReplicatedReader(**where), "step-2", 2)


def test_a_bucket_that_cannot_be_reached_keeps_it_on_the_node(
    root: Path, where: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing goes anywhere, and the same command works once the bucket is known again."""
    writer = ReplicatedWriter(root, **where)
    for number in (1, 2):
        save(writer, f"step-{number}", number)
    writer.wait()
    stop_agent(root)
    targets = root / ".agent" / "targets.json"
    raw = targets.read_bytes()
    targets.unlink()
    assert main(["rm", "step-1", "--root", str(root)]) == ExitCode.FAILED
    said = capsys.readouterr().out
    assert "kept: step-1: " in said
    assert "No rank of this node has named the object store" in said
    assert (root / "step-1").exists()
    assert in_bucket(where) == ["step-1", "step-2"]
    stop_agent(root)
    targets.write_bytes(raw)
    assert main(["rm", "step-1", "--root", str(root)]) == ExitCode.OK
    assert not (root / "step-1").exists()
    assert in_bucket(where) == ["step-2"]
