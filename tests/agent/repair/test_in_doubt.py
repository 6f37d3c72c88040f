"""Saves in doubt: which ones a node lists, and how they are settled."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves import settle as settling
from replicated_ckpt.node.saves.in_doubt import StaleSave
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions import readers
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import running_agent
from tests.agent.checkpoints import METADATA, checkpointed, findings, introduced, shard
from tests.damage import make_newer

SAVE, OTHER = "2" * 32, "0" * 11 + "a"


@pytest.mark.parametrize("was_known", [False, True], ids=["unknown before", "known before"])
@pytest.mark.parametrize("fails", [False, True], ids=["silent", "fails"])
def test_a_save_that_is_aborted_meanwhile_is_not_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, was_known: bool, fails: bool
) -> None:
    """A newer save aborts the stale one while other nodes are asked: the stale save is no longer listed as in doubt."""
    service = NodeService(LocalStore(tmp_path))
    intent = Intent(SAVE, "step-1", "s", overwrite=True, nodes=(service.node_id, OTHER), coordinator=OTHER)
    service.open_save(intent)
    if was_known:
        settle(service, [StaleSave(intent, "its processes are gone")], [])
        assert [doubt.intent.save_id for doubt in service.in_doubt.read_all()] == [SAVE]

    def ask(*_: Any) -> Mapping[str, Answer]:
        service.abort(SAVE, "a newer save overtook it")
        if fails:
            raise StoreUnavailable("node", "ask", SAVE, "on purpose")
        return {}

    monkeypatch.setattr(settling, "_answers", ask)
    settle(service, [StaleSave(intent, "its processes are gone")], [])
    assert service.in_doubt.read_all() == ()
    assert not service.in_doubt.has(SAVE)


def test_a_decision_of_a_newer_format_is_kept_for_the_newer_version(tmp_path: Path) -> None:
    """An agent that cannot read a decision keeps the staged save. The newer release publishes it."""
    service = NodeService(LocalStore(tmp_path))
    manifest = checkpointed([service.store], 1, {shard(0): [0]}, copies=1)
    intent = Intent(
        manifest.save_id, "step-2", "s", overwrite=True, nodes=(service.node_id,), coordinator=service.node_id
    )
    service.open_save(intent)
    staged = service.store.staging(manifest.save_id)
    for path in (tmp_path / "step-1").iterdir():
        path.rename(staged / path.name)
    raw = (staged / MANIFEST_NAME).read_bytes()
    make_newer(staged / MANIFEST_NAME)
    assert service.recover() == ()
    settle(service, [StaleSave(intent, "its processes are gone")], [])
    assert service.store.is_staged(manifest.save_id)
    (staged / MANIFEST_NAME).write_bytes(raw)
    assert service.recover() == (manifest.save_id,)
    assert findings(service.store) == []


def test_a_save_that_a_node_outside_the_job_has_is_completed(tmp_path: Path) -> None:
    """The coordinator has lost the save, but a node outside the job has it: the staged shards here are published."""
    own, coordinator, third = (LocalStore(tmp_path / name) for name in ("own", "coordinator", "third"))
    manifest = checkpointed([own, coordinator, third], 1, {shard(0): [0, 1]}, on=[0, 2])
    with running_agent(coordinator.root) as asked, running_agent(third.root) as other:
        introduced(own, [asked.endpoint.address(), other.endpoint.address()])
        service, nodes = NodeService(own), (own.node_id(), coordinator.node_id())
        intent = Intent(manifest.save_id, "step-1", "s", overwrite=True, nodes=nodes, coordinator=nodes[1])
        (own.root / "step-1" / shard(0)).rename(tmp_path / "staged")
        shutil.rmtree(own.root / "step-1")
        service.open_save(intent)
        (tmp_path / "staged").rename(own.path_of_staged(manifest.save_id, shard(0)))
        settle(service, [StaleSave(intent, "its group has gone on", is_over=True)], [asked.endpoint.address()])
    assert own.catalog.checkpoint_of(manifest.save_id) == "step-1"
    assert findings(own) == []


@pytest.mark.parametrize("is_killed", [False, True], ids=["meanwhile", "after a crash"])
def test_a_version_that_is_being_replaced_is_not_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    """The coordinator replaces the version while another node asks about it: the answer is not "unknown", and the
    staged copy stays.
    """
    own, coordinator = LocalStore(tmp_path / "own"), LocalStore(tmp_path / "coordinator")
    nodes, stores = (own.node_id(), coordinator.node_id()), [own, coordinator]
    old = checkpointed(stores, 1, {shard(0): [0], shard(1): [1]}, copies=1)
    (own.root / "step-1" / shard(0)).rename(tmp_path / "staged")
    shutil.rmtree(own.root / "step-1")
    service, asked = NodeService(own), NodeService(coordinator)
    intent = Intent(old.save_id, "step-1", "s", overwrite=True, nodes=nodes, coordinator=nodes[1])
    service.open_save(intent)
    (tmp_path / "staged").rename(own.path_of_staged(old.save_id, shard(0)))

    def ask(*_: Any) -> Answer:
        return Answer(asked.answer_to_settle(old.save_id, is_over=False, is_left=False)["state"])

    def settle_meanwhile(name: str) -> None:
        if not is_killed:
            settle(service, [StaleSave(intent, "its processes are gone")], [AgentAddress(nodes[1], "host", 1, "token")])
            assert own.is_staged(old.save_id)
        raise failpoints.FailpointReached(name)

    monkeypatch.setattr(settling, "_ask", ask)
    monkeypatch.setattr(readers, "LOOK_WITHIN_S", 0.1)
    new = checkpointed(stores, 2, {shard(0): [0], shard(1): [1]}, copies=1, on=[])
    coordinator.begin(Intent(new.save_id, "step-1", "s", overwrite=True, coordinator=nodes[1]))
    coordinator.put_small(new.save_id, METADATA_NAME, METADATA)
    coordinator.put_small(new.save_id, MANIFEST_NAME, new.encode())
    with failpoints.arm("commit.named", settle_meanwhile), pytest.raises(failpoints.FailpointReached):
        coordinator.commit(new.save_id)
    settle(service, [StaleSave(intent, "its processes are gone")], [AgentAddress(nodes[1], "host", 1, "token")])
    assert own.is_staged(old.save_id)
    asked.recover()
    monkeypatch.undo()
    with running_agent(coordinator.root) as agent:
        introduced(own, [agent.endpoint.address()])
        settle(service, [StaleSave(intent, "its processes are gone")], [agent.endpoint.address()])
    assert own.catalog.checkpoint_of(old.save_id) == "step-1"
    assert findings(own) == []


def test_a_renamed_save_is_completed_under_its_new_name(tmp_path: Path) -> None:
    """The user renamed the checkpoint while this node was away: the staged save is published here under the new name."""
    own, coordinator = LocalStore(tmp_path / "own"), LocalStore(tmp_path / "coordinator")
    nodes = own.node_id(), coordinator.node_id()
    manifest = checkpointed([own, coordinator], 1, {shard(0): [0], shard(1): [1]}, copies=1)
    (own.root / "step-1" / shard(0)).rename(tmp_path / "staged")
    shutil.rmtree(own.root / "step-1")
    (coordinator.root / "step-1").rename(coordinator.root / "best")
    with running_agent(coordinator.root) as agent:
        introduced(own, [agent.endpoint.address()])
        service = NodeService(own)
        intent = Intent(manifest.save_id, "step-1", "s", overwrite=True, nodes=nodes, coordinator=nodes[1])
        service.open_save(intent)
        (tmp_path / "staged").rename(own.path_of_staged(manifest.save_id, shard(0)))
        settle(service, [StaleSave(intent, "its processes are gone")], [agent.endpoint.address()])
    assert service.in_doubt.read_all() == ()
    assert own.catalog.checkpoint_of(manifest.save_id) == "best"
    assert own.list_staged() == ()
    assert findings(own) == []
