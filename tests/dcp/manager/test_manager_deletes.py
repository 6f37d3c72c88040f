"""CheckpointManager.delete: what is removed, what stays, and what another job still reads."""

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
    """`delete` removes a step from the node, also one that was replaced, restored or lost. Other steps stay, and the
    step can be saved again.
    """
    with CheckpointManager(root) as manager:
        assert not manager.delete(1)
        for step in (1, 2, 2, 3):
            manager.save(step, state(step))
        manager.restore(state(0), 2)
        assert manager.delete(2)
        wait_for(lambda: manager.all_steps() == (1, 3), 20, "only the other steps are listed")
        assert not (root / "step-2").exists()
        assert not manager.delete(2)
        (root / "step-1" / "__0_0.distcp").unlink()
        assert manager.delete(1)
        assert not (root / "step-1").exists()
        manager.save(2, state(2))
        assert manager.all_steps() == (2, 3)
        assert manager.restore(state(0), 2) == 2


def test_a_deleted_step_is_gone_from_the_bucket(root: Path, tmp_path: Path) -> None:
    """`delete` removes the step's objects from the bucket, too. A blank node lists only the other step."""
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


def test_delete_removes_an_unfinished_upload(root: Path, tmp_path: Path) -> None:
    """`delete` removes the shards of an unfinished upload. Objects of another save stay."""
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
    """`delete` removes a step of this run, although the newest checkpoint in the root belongs to another run. That
    run's step stays.
    """
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


def test_a_step_that_another_job_reads_is_deleted_afterwards(root: Path) -> None:
    """Another job reads the step: `delete` keeps the files until that job reads another checkpoint. Then the agent
    removes the step.
    """
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
        ask_agent(LocalStore(root), "POST", "/v1/forget", {"node_id": "nobody"})  # makes the agent check now
        wait_for(lambda: not (root / "step-1").exists(), 20, "the removal")
        assert manager.all_steps() == (2,)


def test_delete_of_a_stock_checkpoint_raises(root: Path) -> None:
    """A step that stock torch wrote is not deleted: `delete` raises, and the hint explains how to remove it by hand."""
    with CheckpointManager(root) as manager:
        manager.save(1, state(1))
        dcp.save(state(7), storage_writer=dcp.FileSystemWriter(root / "step-7"), no_dist=True)
        with pytest.raises(StoreUnavailable, match="step-7") as raised:
            manager.delete(7)
        assert "by hand, on each node" in raised.value.hint
        assert (root / "step-7" / ".metadata").exists()
