"""CheckpointManager's steps: the list, their metrics and metadata, the best step, and what `close` forbids."""

import shutil
from collections.abc import Callable
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, ReplicatedWriter, Retention
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.config import Ack
from replicated_ckpt.core.manifest import NOTES_BYTES_MAX
from replicated_ckpt.dcp.agreement import node_post
from replicated_ckpt.dcp.convert.importing import import_checkpoint
from replicated_ckpt.dcp.memory.root import find_memory_root
from replicated_ckpt.dcp.save.save_report import SaveReport
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid, ManagerClosed, ReplicatedCkptError, ShardLost
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import stop_agent, wait_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def state(value: int) -> dict[str, Any]:
    return {"weights": torch.full((100,), float(value)), "step": value}


def test_any_step_is_restored(root: Path) -> None:
    """`restore` returns None at first, then the newest step, or the step with the given number."""
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
    """A lost step is not listed. If all are lost, look-ups raise ShardLost."""
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        (root / "step-2" / "__0_0.distcp").unlink()
        assert (manager.latest_step(), manager.all_steps()) == (1, (1,))
        (root / "step-1" / "__0_0.distcp").unlink()
        for look in (manager.latest_step, manager.all_steps):
            with pytest.raises(ShardLost):
                look()


def test_notes_are_returned_with_their_step(root: Path) -> None:
    """Metrics and metadata are returned with their step, also from a background save. A new save of the step replaces
    them.
    """
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
        {"metrics": [0.5]},
        {"metrics": {"loss": torch.zeros(2)}},
        {"metadata": {"model": object()}},
        {"metadata": {"text": "x" * NOTES_BYTES_MAX}},
        {"metadata": {"nan": float("nan")}},
    ],
)
def test_invalid_notes_are_refused(root: Path, notes: dict[str, Any]) -> None:
    """Metrics that are no numbers, and metadata that is no JSON or too large, are refused before the save begins."""
    with CheckpointManager(root) as manager:
        with pytest.raises(ConfigInvalid, match="cannot be stored"):
            manager.save(1, state(1), **notes)
        assert manager.all_steps() == ()


def test_the_best_step_is_found(root: Path) -> None:
    """`best_step` returns the step with the smallest or largest metric, and the newest of equals. It skips NaN and
    steps without the metric.
    """
    with CheckpointManager(root) as manager:
        for step, loss in ((1, 0.5), (2, float("nan")), (3, 0.25), (4, 0.25), (5, 0.75)):
            manager.save(step, state(step), metrics={"loss": loss})
        manager.save(6, state(6))
        assert manager.best_step("loss") == 4
        assert manager.best_step("loss", best_is="max") == 5
        assert manager.best_step("accuracy") is None
        with pytest.raises(ConfigInvalid, match="best_is"):
            manager.best_step("loss", best_is="smallest")  # type: ignore[arg-type]


def test_other_ids_in_the_root_are_not_listed_as_steps(root: Path) -> None:
    """Checkpoints with other ids are not listed as steps, and do not hide the manager's own, even if one is the newest."""
    final: dict[str, Any] = {"checkpoint_id": "final", "no_dist": True}
    with CheckpointManager(root) as manager:
        manager.save(1, state(1), metrics={"loss": 0.5})
        dcp.save(state(7), storage_writer=ReplicatedWriter(root), **final)
        assert (manager.all_steps(), manager.best_step("loss")) == ((1,), 1)
        found = state(0)
        assert manager.latest_step() == manager.restore(found) == found["step"] == 1
        assert manager.restore(found, 1) == found["step"] == 1
        manager.save(2, state(2))
        assert (manager.latest_step(), manager.all_steps()) == (2, (1, 2))


@pytest.mark.timeout(60)
def test_on_save_in_the_background_may_call_no_method(root: Path) -> None:
    """A method that `on_save` of a background save calls raises ConfigInvalid, as it would wait for its own thread. The
    save is not affected.
    """
    refused: dict[str, str] = {}

    def on_save(report: SaveReport) -> None:
        calls: dict[str, Callable[[], object]] = {
            "delete": lambda: manager.delete(1),
            "wait": manager.wait,
            "notes": lambda: manager.notes(1),
            "close": manager.close,
        }
        for name, call in calls.items() if report.checkpoint_id == "step-2" else ():
            with pytest.raises(
                ConfigInvalid, match=rf"on_save of an asynchronous save called CheckpointManager.{name}"
            ) as raised:
                call()
            refused[name] = raised.value.hint

    with CheckpointManager(root, on_save=on_save) as manager:
        manager.save(1, state(1))
        manager.async_save(2, state(2))
        assert manager.all_steps() == (1, 2)
    assert list(refused) == ["delete", "wait", "notes", "close"]
    assert "training loop" in refused["wait"]


def test_retention_keeps_the_best(root: Path) -> None:
    """With `keep_best` retention keeps the best step and the newest. A better step replaces the best."""
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


def test_a_closed_manager_raises(root: Path) -> None:
    """After `close`, methods that save, look up or load raise ManagerClosed. Attributes, `repr` and a second `close`
    still work.
    """
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
        "reject": (1,),
        "restore": (state(0),),
        "restore_latest": (state(0),),
        "latest_step": (),
        "all_steps": (),
        "notes": (1,),
        "best_step": ("loss",),
        "wait": (),
    }
    public = {name for name in vars(CheckpointManager) if name[0] != "_" and callable(getattr(manager, name))}
    assert public - {"close", "hold_until_copied"} == calls.keys()  # these may be called after close()
    for name, arguments in calls.items():
        with pytest.raises(ManagerClosed, match=r"after close\(\)"):
            getattr(manager, name)(*arguments)
    assert [path.parent.name for path in root.glob("*/.metadata")] == ["step-1"]


@pytest.mark.parametrize("ack", ["local", "peer-memory", "peer"])
def test_copies_ack_and_domain_reach_the_writer(root: Path, ack: Ack) -> None:
    """`copies`, `ack` and `domain` reach the writer, and `repr` shows them. An invalid value is refused by name."""
    manager = CheckpointManager(root, copies=1, ack=ack, domain="rack-1", preempt_on=())
    assert f"copies=1, ack={ack!r}" in repr(manager)
    manager.save(1, state(1))
    assert manager.last_save is not None
    assert manager.last_save.copies_wanted == 1
    for wrong in ({"copies": 0}, {"ack": "soon"}, {"domain": ""}):
        with pytest.raises(ConfigInvalid, match=next(iter(wrong))):
            CheckpointManager(root, preempt_on=(), **wrong)


def test_docstrings_describe_every_argument_and_name() -> None:
    text = CheckpointManager.__doc__ or ""
    arguments = [name for name in CheckpointManager.__init__.__annotations__ if name != "return"]
    assert [name for name in arguments if name not in text] == []
    public = {name: member for name, member in vars(CheckpointManager).items() if name[0] != "_"}
    assert [name for name, member in public.items() if not (member.__doc__ or "").strip()] == []


def test_invalid_notes_fail_the_save_on_all_ranks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks, invalid metrics fail the save on all ranks. Rank 0 does not raise alone while the others
    wait.
    """
    of_two = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 0)
    monkeypatch.setattr("replicated_ckpt.dcp.steps.dist", of_two)
    with CheckpointManager(root, copies=1, preempt_on=()) as manager:
        with pytest.raises(CheckpointException) as raised:
            manager.save(1, {"x": torch.ones(3)}, metrics={"loss": "bad", "huge": 10**400})
        assert isinstance(raised.value.failures[0][0], ConfigInvalid)
        manager.save(2, {"x": torch.ones(3)}, metrics={"loss": 1.0})
        assert manager.all_steps() == (2,)
    assert main(["verify", "--root", str(root)]) == ExitCode.OK


@pytest.mark.parametrize("metrics", [{"huge": 10**400}, {"loss": "bad"}])
def test_a_metric_that_is_no_number_is_refused(tmp_path: Path, metrics: dict[str, Any]) -> None:
    """A metric that is no number, or larger than any float, raises ConfigInvalid."""
    with CheckpointManager(tmp_path, copies=1, preempt_on=()) as manager, pytest.raises(ConfigInvalid):
        manager.save(1, {"x": torch.ones(3)}, metrics=metrics)


@pytest.mark.filterwarnings("ignore:Checkpoints of several runs")
def test_a_restore_that_fails_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """A failed restore searched past another run's newer checkpoint: the next save still belongs to this run."""
    state = {"x": torch.ones(3)}
    with CheckpointManager(tmp_path / "ours", copies=1, preempt_on=()) as manager:
        manager.save(1, state)
        with CheckpointManager(tmp_path / "theirs", copies=1, preempt_on=()) as other:
            other.save(7, state)
        shutil.copytree(tmp_path / "theirs" / "step-7", tmp_path / "ours" / "step-7")
        with pytest.raises((CheckpointException, ReplicatedCkptError)):
            manager.restore(state, 99)
        manager.save(2, state)
    catalog = LocalStore(tmp_path / "ours").catalog
    assert (
        catalog.manifest("step-2").lineage == catalog.manifest("step-1").lineage != catalog.manifest("step-7").lineage
    )
    assert main(["verify", "step-2", "--root", str(tmp_path / "ours")]) == ExitCode.OK


def import_beside(root: Path) -> None:
    """Imports another run's checkpoint, newer than all others, and one into a directory of its own."""
    torch.save({"x": torch.arange(9)}, root.with_name("x.pt"))
    for name in ("pretrained", "others/step-9"):
        import_checkpoint(root.with_name("x.pt"), name, format="torch", root=root, copies=1)


@pytest.mark.parametrize(
    ("change", "newest"),
    [
        (lambda root: shutil.copytree(root / "step-3", root / "best"), 3),
        (lambda root: shutil.move(root / "step-3", root / "step-3-best"), 2),
        (import_beside, 3),
    ],
    ids=["cp", "mv", "import"],
)
@pytest.mark.parametrize("memory", [False, True], ids=["disk", "tiers"])
def test_restore_takes_the_newest_step_of_its_own(
    root: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any], newest: int, memory: bool
) -> None:
    """Checkpoints were copied, renamed or imported in the root: `restore` loads the manager's newest step, and the next
    save is newer than all of them.
    """
    options: dict[str, Any] = {"memory": True, "disk_every": 1} if memory else {}
    with CheckpointManager(root, copies=1, **options) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    if memory:
        tier = find_memory_root(root, True)
        stop_agent(tier)
        shutil.rmtree(tier)
    monkeypatch.setattr(node_post, "_seen", {})  # as in another process
    change(root)
    monkeypatch.setattr(node_post, "_seen", {})
    found = state(0)
    with CheckpointManager(root, copies=1, **options) as manager:
        assert manager.latest_step() == newest
        assert manager.all_steps() == tuple(range(1, newest + 1))
        assert manager.restore(found) == found["step"] == newest
        manager.save(4, state(4))
        assert manager.restore(found) == 4
    catalog = LocalStore(root).catalog
    saved, before = catalog.manifest("step-4"), catalog.manifest("step-1")
    others = [manifest.sequence for name, manifest in catalog.committed() if name not in ("step-4", "others/step-9")]
    assert (saved.lineage, saved.sequence) == (before.lineage, max(others) + 1)
    if memory:
        stop_agent(tier)
        shutil.rmtree(tier)
    assert main(["verify", "--root", str(root)]) == ExitCode.OK
