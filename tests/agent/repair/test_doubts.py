"""What a node says is in doubt: no save that was given up while nodes were asked about it."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.saves.doubts import Leftover
from replicated_ckpt.agent.saves.service import NodeService
from replicated_ckpt.agent.settling import settle as settling
from replicated_ckpt.agent.settling.settle import settle
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.protocol.settlement import Answer
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, findings, introduced, shard
from tests.damage import make_newer

SAVE, OTHER = "2" * 32, "0" * 11 + "a"


@pytest.mark.parametrize("was_known", [False, True], ids=["at once", "known before"])
@pytest.mark.parametrize("fails", [False, True], ids=["silent", "fails"])
def test_a_save_that_is_given_up_meanwhile_is_in_no_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, was_known: bool, fails: bool
) -> None:
    """The next save of its name opens while a node of it is asked: `status` would name it until the agent's next start."""
    service = NodeService(LocalStore(tmp_path))
    intent = Intent(SAVE, "step-1", "s", overwrite=True, nodes=(service.node_id, OTHER), coordinator=OTHER)
    service.begin(intent)
    if was_known:
        settle(service, [Leftover(intent, "its processes are gone")], [])
        assert [doubt.intent.save_id for doubt in service.doubts.read_all()] == [SAVE]

    def ask(*_: Any) -> Mapping[str, Answer]:
        service.abort(SAVE, "a newer save overtook it")
        if fails:
            raise StoreUnavailable("node", "ask", SAVE, "on purpose")
        return {}

    monkeypatch.setattr(settling, "_answers", ask)
    settle(service, [Leftover(intent, "its processes are gone")], [])
    assert service.doubts.read_all() == ()
    assert not service.doubts.has(SAVE)


def test_a_decision_of_a_newer_format_is_kept_for_the_newer_version(tmp_path: Path) -> None:
    """An agent of an older version, which cannot carry it out, does not take it for none."""
    service = NodeService(LocalStore(tmp_path))
    manifest = checkpointed([service.store], 1, {shard(0): [0]}, copies=1)
    intent = Intent(
        manifest.save_id, "step-2", "s", overwrite=True, nodes=(service.node_id,), coordinator=service.node_id
    )
    service.begin(intent)
    staged = service.store.staging(manifest.save_id)
    for path in (tmp_path / "step-1").iterdir():
        path.rename(staged / path.name)
    raw = (staged / MANIFEST_NAME).read_bytes()
    make_newer(staged / MANIFEST_NAME)
    assert service.recover() == ()
    settle(service, [Leftover(intent, "its processes are gone")], [])
    assert service.store.is_staged(manifest.save_id)
    (staged / MANIFEST_NAME).write_bytes(raw)
    assert service.recover() == (manifest.save_id,)
    assert findings(service.store) == []


def test_a_save_that_a_node_outside_of_the_job_has_taken_over_is_completed(tmp_path: Path) -> None:
    """Its coordinator's node has lost it since. The shards that are staged here are the last ones: they do not go."""
    own, coordinator, third = (LocalStore(tmp_path / name) for name in ("own", "coordinator", "third"))
    manifest = checkpointed([own, coordinator, third], 1, {shard(0): [0, 1]}, on=[0, 2])
    with running_agent(coordinator.root) as asked, running_agent(third.root) as other:
        introduced(own, [asked.endpoint.address(), other.endpoint.address()])
        service, nodes = NodeService(own), (own.node_id(), coordinator.node_id())
        intent = Intent(manifest.save_id, "step-1", "s", overwrite=True, nodes=nodes, coordinator=nodes[1])
        (own.root / "step-1" / shard(0)).rename(tmp_path / "staged")
        shutil.rmtree(own.root / "step-1")
        service.begin(intent)
        (tmp_path / "staged").rename(own.path_of_staged(manifest.save_id, shard(0)))
        settle(service, [Leftover(intent, "its group has gone on", is_over=True)], [asked.endpoint.address()])
    assert own.catalog.checkpoint_of(manifest.save_id) == "step-1"
    assert findings(own) == []
