"""CheckpointManager.delete: what goes, what stays, and what another job still reads."""

import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from replicated_ckpt import CheckpointManager
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.dcp.agreement.node_post import ask_agent
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import stop_agent, wait_for
from tests.dcp.manager.test_manager_steps import state

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def test_a_deleted_step_is_gone(root: Path) -> None:
    """From the node and for good, also one that was replaced, restored, or lost; others stay, and it may be saved again."""
    with CheckpointManager(root) as manager:
        assert not manager.delete(1)
        for step in (1, 2, 2, 3):
            manager.save(step, state(step))
        manager.restore(state(0), 2)
        assert manager.delete(2)
        wait_for(lambda: manager.all_steps() == (1, 3), 20, "the others alone")
        assert not (root / "step-2").exists()
        assert not manager.delete(2)
        (root / "step-1" / "__0_0.distcp").unlink()
        assert manager.delete(1)
        assert not (root / "step-1").exists()
        manager.save(2, state(2))
        assert manager.all_steps() == (2, 3)
        assert manager.restore(state(0), 2) == 2


def test_a_deleted_step_is_gone_from_the_bucket(root: Path, tmp_path: Path) -> None:
    """With the nodes' copies its objects go; a blank node lists the others alone."""
    bucket = f"file://{tmp_path}/bucket/run"
    with CheckpointManager(root, object_store=bucket) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.wait()
        assert manager.delete(1)
    with CheckpointManager(tmp_path / "blank", object_store=bucket) as manager:
        assert manager.all_steps() == (2,)
    stop_agent(tmp_path / "blank")
    assert not list((tmp_path / "bucket" / "run").glob("step-1/*.distcp"))


def test_what_an_upload_has_begun_is_gone_from_the_bucket(root: Path, tmp_path: Path) -> None:
    """Its agent was killed, or waits for its next try, with a shard in the bucket and no mark: no upload takes it back."""
    bucket = tmp_path / "bucket" / "run" / "step-1"
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    bucket.mkdir(parents=True)
    shutil.copy(root / "step-1" / "__0_0.distcp", bucket)
    (bucket / "__1_0.distcp").write_bytes(b"of another save")
    with CheckpointManager(root, object_store=f"file://{bucket.parent}") as manager:
        assert manager.delete(1)
    assert [path.name for path in bucket.iterdir()] == ["__1_0.distcp"]


def test_a_step_of_an_older_run_is_deleted(root: Path, tmp_path: Path) -> None:
    """It is removed although the newest checkpoint in the root is another run's, whose steps stay."""
    with CheckpointManager(root) as manager:
        manager.save(1, state(1))
    with CheckpointManager(tmp_path / "other") as manager:
        manager.save(2, state(2))
    stop_agent(tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "step-2", root / "step-2")
    with CheckpointManager(root) as manager:
        assert manager.latest_step() == 2
        assert manager.delete(1)
        assert not (root / "step-1").exists()
        assert not manager.delete(1)
        assert manager.all_steps() == (2,)


def test_what_another_job_reads_is_deleted_afterwards(root: Path) -> None:
    """Its load is not disturbed; once it reads another checkpoint the node's agent removes the step."""
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        for step in (1, 2):
            raw_manifest = (root / f"step-{step}" / ".manifest.json").read_bytes()
            save_id = decode_manifest(raw_manifest, "this test").save_id
            told = {"lineage": "", "sequence": 1, "save_id": save_id, "reader": "another job/1"}
            ask_agent(LocalStore(root), "POST", "/v1/sequence", told)
            if step == 1:
                assert manager.delete(1)
                assert (root / "step-1").exists()
        ask_agent(LocalStore(root), "POST", "/v1/forget", {"node_id": "nobody"})  # has the agent look now
        wait_for(lambda: not (root / "step-1").exists(), 20, "the removal")
        assert manager.all_steps() == (2,)


def test_a_step_that_cannot_be_named_is_not_said_to_be_deleted(root: Path) -> None:
    """What stock torch wrote under a step's id exists and is no save of ours: an error says what to do, and it stays."""
    with CheckpointManager(root) as manager:
        manager.save(1, state(1))
        dcp.save(state(7), storage_writer=dcp.FileSystemWriter(root / "step-7"), no_dist=True)
        with pytest.raises(StoreUnavailable, match="step-7") as raised:
            manager.delete(7)
        assert "by hand, on each node" in raised.value.hint
        assert (root / "step-7" / ".metadata").exists()
