"""CheckpointManager's steps: which there are, what was noted with them, which is the best, and what `close` ends."""

import json
import shutil
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import CheckpointManager, Retention
from replicated_ckpt.config import Ack
from replicated_ckpt.core.notes import NOTES_BYTES_MAX
from replicated_ckpt.dcp.node.local_agent import ask_agent
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid, ManagerClosed, ShardLost, StoreUnavailable
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import stop_agent, wait_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "root"
    stop_agent(tmp_path / "root")


def state(value: int) -> dict[str, Any]:
    return {"weights": torch.full((100,), float(value)), "step": value}


def test_any_step_is_restored(root: Path) -> None:
    """Nothing at first; then each step by its number, and the newest without one."""
    found = state(0)
    with CheckpointManager(root) as manager:
        assert (manager.latest_step(), manager.all_steps(), manager.restore(found)) == (None, (), None)
        for step in (10, 20, 30):
            manager.async_save(step, state(step))
        assert (manager.latest_step(), manager.all_steps()) == (30, (10, 20, 30))
        assert manager.restore(found, 20) == 20
        assert (found["step"], float(found["weights"].mean())) == (20, 20.0)
        assert manager.restore(found) == found["step"] == 30
        with pytest.raises(CheckpointNotFound, match="step-25"):
            manager.restore(found, 25)
        with pytest.raises(CheckpointNotFound, match="25"):
            manager.notes(25)


def test_a_step_that_is_lost_is_not_listed(root: Path) -> None:
    """What cannot be restored is no step; where nothing can be, that is an error and no first start."""
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        (root / "step-2" / "__0_0.distcp").unlink()
        assert (manager.latest_step(), manager.all_steps()) == (1, (1,))
        (root / "step-1" / "__0_0.distcp").unlink()
        for look in (manager.latest_step, manager.all_steps):
            with pytest.raises(ShardLost):
                look()


def test_notes_come_back_with_their_step(root: Path) -> None:
    """Metrics and metadata of each save, also of one in the background, replaced with it; other saves have none."""
    with CheckpointManager(root) as manager:
        metadata = {"commit": "abc", "data": {"shards": [1, 2], "name": "größe"}}
        manager.async_save(1, state(1), metrics={"loss": torch.tensor(0.5), "lr": 1}, metadata=metadata)
        manager.save(2, state(2), metrics={"loss": float("nan")})
        manager.save(3, state(3))
        found = [manager.notes(step) for step in (1, 2, 3)]
        assert found[0].metrics == {"loss": 0.5, "lr": 1.0}
        assert found[0].metadata == metadata
        assert isnan(found[1].metrics["loss"])
        assert (dict(found[2].metrics), dict(found[2].metadata)) == ({}, {})
        assert found[0].saved_unix_s < found[1].saved_unix_s < found[2].saved_unix_s
        manager.save(1, state(1), metrics={"loss": 0.25})
        assert (manager.notes(1).metrics, manager.notes(1).metadata) == ({"loss": 0.25}, {})
    assert CheckpointManager(root, preempt_on=()).notes(1).metrics == {"loss": 0.25}


@pytest.mark.parametrize(
    "notes",
    [
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": torch.zeros(2)}},
        {"metadata": {"model": object()}},
        {"metadata": {"text": "x" * NOTES_BYTES_MAX}},
        {"metadata": {"nan": float("nan")}},
    ],
)
def test_notes_that_cannot_be_kept_are_refused(root: Path, notes: dict[str, Any]) -> None:
    """No number, no JSON, or too much of it: the save says so before it begins, and nothing is saved."""
    with CheckpointManager(root) as manager:
        with pytest.raises(ConfigInvalid, match="cannot be kept"):
            manager.save(1, state(1), **notes)
        assert manager.all_steps() == ()


def test_the_best_step_is_found(root: Path) -> None:
    """Smallest or largest, NaN and steps without the metric never, of equals the newest."""
    with CheckpointManager(root) as manager:
        for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.25), (4, 0.25), (5, 0.75)):
            manager.save(step, state(step), metrics={"loss": loss})
        manager.save(6, state(6))
        assert manager.best_step("loss") == 4
        assert manager.best_step("loss", best_is="max") == 5
        assert manager.best_step("accuracy") is None
        with pytest.raises(ConfigInvalid, match="best_is"):
            manager.best_step("loss", best_is="smallest")  # type: ignore[arg-type]


def test_retention_keeps_the_best(root: Path) -> None:
    """With keep_best the best stays, however old, beside the newest; a better one takes its place."""
    with CheckpointManager(root, retention=Retention(keep_last=1)) as manager:
        manager.keep_best("accuracy", best_is="max")
        for step, accuracy in enumerate((0.5, 0.9, 0.6, 0.7), start=1):
            manager.save(step, state(step), metrics={"accuracy": accuracy})
        wait_for(lambda: manager.all_steps() == (2, 4), 30, "the best and the newest")
        manager.save(5, state(5), metrics={"accuracy": 0.95})
        manager.save(6, state(6), metrics={"accuracy": 0.1})
        wait_for(lambda: manager.all_steps() == (5, 6), 30, "the new best and the newest")
    with CheckpointManager(root) as manager, pytest.raises(ConfigInvalid, match="retention"):
        manager.keep_best("accuracy")


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
            save_id = json.loads((root / f"step-{step}" / ".manifest.json").read_bytes())["save_id"]
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
        assert "remove on each node" in raised.value.hint
        assert (root / "step-7" / ".metadata").exists()


def test_a_closed_manager_says_so(root: Path) -> None:
    """Whatever saves, looks or loads is ManagerClosed; what it remembers, `repr` and a second `close` are not."""
    manager = CheckpointManager(root, preempt_on=())
    manager.save(1, state(1))
    assert "open" in repr(manager)
    manager.close()
    manager.close()
    assert "closed" in repr(manager)
    assert manager.last_save is not None
    assert manager.last_load is None
    assert not manager.preempted
    calls: dict[str, tuple[Any, ...]] = {
        "should_save": (1,),
        "save": (2, state(2)),
        "async_save": (2, state(2)),
        "keep_best": ("loss",),
        "delete": (1,),
        "restore": (state(0),),
        "restore_latest": (state(0),),
        "latest_step": (),
        "all_steps": (),
        "notes": (1,),
        "best_step": ("loss",),
        "wait": (),
    }
    public = {name for name in vars(CheckpointManager) if name[0] != "_" and callable(getattr(manager, name))}
    assert public - {"close"} == calls.keys()
    for name, arguments in calls.items():
        with pytest.raises(ManagerClosed, match=r"after close\(\)"):
            getattr(manager, name)(*arguments)
    assert [path.parent.name for path in root.glob("*/.metadata")] == ["step-1"]


@pytest.mark.parametrize("ack", ["local", "peer-memory", "peer"])
def test_promises_are_arguments(root: Path, ack: Ack) -> None:
    """copies, ack and domain reach the writer; `repr` shows them; what cannot work is refused by name."""
    manager = CheckpointManager(root, copies=1, ack=ack, domain="rack-1", preempt_on=())
    assert f"copies=1, ack={ack!r}" in repr(manager)
    manager.save(1, state(1))
    assert manager.last_save is not None
    assert manager.last_save.copies_wanted == 1
    for wrong in ({"copies": 0}, {"ack": "soon"}, {"domain": ""}):
        with pytest.raises(ConfigInvalid, match=next(iter(wrong))):
            CheckpointManager(root, preempt_on=(), **wrong)


def test_help_tells_all() -> None:
    """Every argument of the constructor, and every public name, has its words in the docstrings."""
    text = CheckpointManager.__doc__ or ""
    arguments = [name for name in CheckpointManager.__init__.__annotations__ if name != "return"]
    assert [name for name in arguments if name not in text] == []
    public = {name: member for name, member in vars(CheckpointManager).items() if name[0] != "_"}
    assert [name for name, member in public.items() if not (member.__doc__ or "").strip()] == []
