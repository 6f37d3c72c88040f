"""An adoption that is killed at any step leaves what stock torch wrote, or the adopted checkpoint, whole and loadable."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.agent.saves.adoption_locks import HELD_S, AdoptionLocks
from replicated_ckpt.agent.saves.drain import Draining
from replicated_ckpt.agent.saves.service import OPEN_GRACE_S, NodeService
from replicated_ckpt.agent.settling.outlived import drop_outlived
from replicated_ckpt.agent.settling.settle import settle
from replicated_ckpt.agent.unmanaged import adopter
from replicated_ckpt.agent.unmanaged.adopter import Adopter
from replicated_ckpt.agent.unmanaged.audit import UnmanagedAuditor
from replicated_ckpt.agent.unmanaged.look import UnmanagedFound
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, NodeEntry
from replicated_ckpt.core.unmanaged.adopting import AdoptUnmanaged
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.errors import CheckpointExists, ReplicatedCkptError, SaveAborted, SaveSuperseded
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import HOME, wait_for
from tests.agent.checkpoints import findings, quarantined
from tests.agent.repair.test_reprotect import agents, stores
from tests.agent.scattered import ID, loads, loads_by_stock_torch, scattered
from tests.fault.killed import adopting

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]

STAGING = ["store.intent-written", "store.opened", "adopt.shard-staged", "adopt.staged"]
COMMITTING = [
    "commit.checked",
    "adopt.carried",
    "commit.staging-fsynced",
    "commit.named",
    "commit.durable",
    "commit.done",
]
EXTRA = {"meta.pt": b"Lightning's"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """A store with a checkpoint of stock torch, a file that is none of DCP's, and a shard of another world."""
    folder = tmp_path_factory.mktemp("written")
    store = LocalStore(folder / "node0")
    scattered([store], folder)
    (store.root / ID / "meta.pt").write_bytes(EXTRA["meta.pt"])
    (store.root / ID / "__9_0.distcp").write_bytes(b"of another world")
    return store


@pytest.fixture
def store(written: LocalStore, tmp_path: Path) -> LocalStore:
    shutil.copytree(written.root, tmp_path / "node0")
    return LocalStore(tmp_path / "node0")


def files(directory: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


Adopt = Callable[..., int]


@pytest.fixture(scope="module")
def adopt() -> Iterator[Adopt]:
    """Does an adoption in a process of its own; returns that one's exit code."""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-m", "tests.fault.killed.adopting"]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answered = process.stdin, process.stdout

        def adopt(store: LocalStore, failpoint: str = "") -> int:
            asked.write(json.dumps([str(store.root), ID, uuid.uuid4().hex, failpoint]) + "\n")
            asked.flush()
            return int(answered.readline())

        yield adopt
        asked.close()


def is_adopted(store: LocalStore) -> bool:
    return (store.root / ID / ".manifest.json").exists()


@pytest.mark.parametrize("point", [*STAGING, *COMMITTING, "commit.replaced"])
def test_killed_at_any_step(store: LocalStore, adopt: Adopt, point: str) -> None:
    """Right after the kill and after the restart every original byte is there and stock torch reads the directory."""
    before = files(store.root / ID)
    assert adopt(store, f"{point}=kill") == -signal.SIGKILL
    now = files(store.root / ID)
    wanted = before if not is_adopted(store) else {name: raw for name, raw in before.items() if name != "__9_0.distcp"}
    assert all(now[name].startswith(raw) for name, raw in wanted.items())
    assert loads_by_stock_torch(store.root / ID)
    service = NodeService(store)
    service.recover()
    store.empty_trash()
    assert is_adopted(store) == (point not in STAGING)
    assert loads(store)
    if point in STAGING:
        settle(service, service.leftovers(), ())
        assert files(store.root / ID) == before
        assert not store.list_staged()
        assert adopt(store) == 0
    assert findings(store) == []
    now = files(store.root / ID)
    assert now.keys() == before.keys() - {"__9_0.distcp"} | {".manifest.json"}
    assert all(now[name].startswith(raw) for name, raw in before.items() if name != "__9_0.distcp")
    kept = list((store.root / ".quarantine").rglob("__9_0.distcp.*"))
    assert before["__9_0.distcp"] in [path.read_bytes() for path in kept]
    assert loads(store)
    assert loads_by_stock_torch(store.root / ID)


@pytest.mark.parametrize("changed", ["__0_1.distcp", ".metadata"])
def test_what_was_changed_meanwhile_is_not_replaced(store: LocalStore, adopt: Adopt, changed: str) -> None:
    """A shard or metadata that is written again after it was staged keeps the adoption from being published."""
    path = store.root / ID / changed
    adopt(store, "commit.checked=kill")
    again = path.with_name("again")
    again.write_bytes(path.read_bytes() + b"more")
    again.rename(path)
    before = files(store.root / ID)
    assert NodeService(store).recover() == ()
    assert files(store.root / ID) == before
    with pytest.raises(SaveAborted, match="changed"):
        store.commit(store.list_staged()[0].save_id)


def test_what_was_added_meanwhile_goes_along(store: LocalStore, adopt: Adopt) -> None:
    """Files that are none of DCP's are taken over as they are when the directory is replaced, not as they were before."""
    adopt(store, "commit.checked=kill")
    (store.root / ID / "added").write_bytes(b"later")
    newer = store.root / ID / "newer"
    newer.write_bytes(b"replaced")
    newer.rename(store.root / ID / "meta.pt")
    assert len(NodeService(store).recover()) == 1
    now = files(store.root / ID)
    assert (now["added"], now["meta.pt"]) == (b"later", b"replaced")
    assert is_adopted(store)


def test_nothing_of_ours_is_adopted(store: LocalStore, adopt: Adopt) -> None:
    """A directory with a manifest is none of stock torch's, and stays."""
    assert adopt(store) == 0
    with pytest.raises(CheckpointExists, match="manifest"):
        store.begin(Intent(uuid.uuid4().hex, ID, "adoption", overwrite=True, adopts=True))


def planned(store: LocalStore) -> tuple[AdoptUnmanaged, UnmanagedFound]:
    """The adoption of the one checkpoint, with two copies, by all nodes that this one has met."""
    auditor = UnmanagedAuditor(store)
    (audit,) = auditor.audit(ID)
    plan = audit.adoption(auditor.node_ids, 2)
    assert isinstance(plan, AdoptUnmanaged)
    assert audit.found is not None
    return plan, audit.found


class Died(RuntimeError):
    """Stands for the end of the command's process."""


def test_the_command_dies_when_all_have_staged(tmp_path: Path) -> None:
    """No node has the decision: the checkpoint loads as it lies, on each; the next try adopts it on all."""
    nodes = stores(tmp_path, 2)
    scattered(nodes, tmp_path)
    before = [files(node.root / ID) for node in nodes]

    def die(name: str) -> None:
        raise Died(name)

    with agents(nodes) as running:
        auditor = UnmanagedAuditor(nodes[0])
        (audit,) = auditor.audit(ID)
        plan = audit.adoption(auditor.node_ids, 2)
        assert isinstance(plan, AdoptUnmanaged)
        addresses = {agent.endpoint.node_id: agent.endpoint.address() for agent in running}
        command = Adopter(addresses, list(addresses.values()))
        assert audit.found is not None
        with failpoints.arm("adopt.accounted", die), pytest.raises(Died):
            command.adopt(plan, audit.found)
        assert [files(node.root / ID) for node in nodes] == before
        assert [len(node.list_staged()) for node in nodes] == [1, 1]
        assert [loads(node) for node in nodes] == [True, True]
        assert command.adopt(plan, audit.found) == {}
        assert [is_adopted(node) for node in nodes] == [True, True]
        assert [node.list_staged() for node in nodes] == [(), ()]
        assert [loads(node) for node in nodes] == [True, True]
    assert auditor.node_ids == tuple(sorted(addresses))


@pytest.mark.parametrize("ahead_s", [3 * 86400, 12 * 365 * 86400], ids=["days", "years"])
def test_clocks_of_nodes_may_differ(tmp_path: Path, ahead_s: int) -> None:
    """By its file's time `.metadata` is of a later day than all that other nodes have, or of the future: it is adopted."""
    nodes = stores(tmp_path, 2)
    scattered(nodes, tmp_path)
    written_s = time.time() - 2 * 86400
    for path in (path for node in nodes for path in (node.root / ID).iterdir()):
        moment = written_s + ahead_s * (path.name == ".metadata")
        os.utime(path, (moment, moment))
    with agents(nodes) as running:
        addresses = {agent.endpoint.node_id: agent.endpoint.address() for agent in running}
        plan, found = planned(nodes[0])
        assert Adopter(addresses, list(addresses.values())).adopt(plan, found) == {}
        assert [is_adopted(node) for node in nodes] == [True, True]
        assert [loads(node) for node in nodes] == [True, True]


def test_nodes_hear_while_the_command_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging may take minutes on one node: all are told meanwhile that the command lives, and none once it is over."""
    nodes = stores(tmp_path, 2)
    scattered(nodes, tmp_path)
    heard: list[str] = []

    class Telling(AgentClient):
        def call(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> dict[str, Any]:
            answer = super().call(method, path, document)
            if path.endswith("/keep"):
                heard.append(self.address.node_id)
            return answer

    monkeypatch.setattr(adopter, "AgentClient", Telling)
    monkeypatch.setattr(adopter, "KEEP_EVERY_S", 0.02)
    with agents(nodes) as running:
        addresses = {agent.endpoint.node_id: agent.endpoint.address() for agent in running}
        plan, found = planned(nodes[0])

        def wait(name: str) -> None:
            wait_for(lambda: set(heard) == set(addresses) or None, 30.0, f"a word to each node at {name}")

        with failpoints.arm("adopt.accounted", wait):
            assert Adopter(addresses, list(addresses.values())).adopt(plan, found) == {}
        assert [is_adopted(node) for node in nodes] == [True, True]
        assert [loads(node) for node in nodes] == [True, True]
    wait_for(lambda: "rckpt-keep" not in {thread.name for thread in threading.enumerate()} or None, 30.0, "its end")


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_agent_does_not_stay_for_a_command_that_was_killed(
    store: LocalStore, caplog: pytest.LogCaptureFixture, *, is_kept: bool
) -> None:
    """It leaves if it has not heard of it for HELD_S. What was staged is given up; what stock torch wrote stays."""
    before = files(store.root / ID)
    service, now, save_id = NodeService(store), [0.0], uuid.uuid4().hex
    service.adoption_locks = AdoptionLocks(lambda: now[0])
    service.begin(Intent(save_id, ID, "adoption", overwrite=True, adopts=True))
    store.put_small(save_id, ".metadata", before[".metadata"])
    assert set(service.adopt(save_id, ["__0_0.distcp"])) == {"__0_0.distcp"}
    now[0] = HELD_S - 1
    service.adoption_locks.keep(save_id if is_kept else uuid.uuid4().hex)
    now[0] = HELD_S + 1
    service._opened_at[save_id] -= OPEN_GRACE_S
    with caplog.at_level(logging.ERROR):
        Draining(service, threading.Event()).run(0.5, time.monotonic())
    assert ("leaves undone" in caplog.text) == is_kept
    assert service.is_held(save_id) == is_kept
    now[0] = 2 * HELD_S
    settle(service, service.leftovers(), ())
    assert not store.list_staged()
    assert files(store.root / ID) == before
    assert loads(store)


class Overtaken(Adopter):
    """Each node has the decision, and is asked what became of the adoption before it is told to publish it."""

    def _publish(self, plan: AdoptUnmanaged, save_id: str, raw: bytes) -> Mapping[str, ReplicatedCkptError]:
        for node in plan.shards_by_node:
            with AgentClient(self._addresses[node]) as client:
                client.put("PUT", f"/v1/saves/{save_id}/{MANIFEST_NAME}", raw)
                assert client.call("GET", f"/v1/saves/{save_id}")["state"] == "committed"
        return super()._publish(plan, save_id, raw)


def test_an_adoption_that_a_load_publishes_first_has_not_failed(tmp_path: Path) -> None:
    """It is over then, and a peer's word is refused for a save that is open: the command says that it is adopted."""
    nodes = stores(tmp_path, 2)
    scattered(nodes, tmp_path)
    with agents(nodes) as running:
        addresses = {agent.endpoint.node_id: agent.endpoint.address() for agent in running}
        plan, found = planned(nodes[0])
        assert Overtaken(addresses, list(addresses.values())).adopt(plan, found) == {}
        assert [is_adopted(node) for node in nodes] == [True, True]


class PublishedOnOne(Adopter):
    """The node that lacks `.metadata` has the decision, and dies before it is told to publish it."""

    def _publish(self, plan: AdoptUnmanaged, save_id: str, raw: bytes) -> Mapping[str, ReplicatedCkptError]:
        for node in plan.shards_by_node:
            with AgentClient(self._addresses[node]) as client:
                client.put("PUT", f"/v1/saves/{save_id}/{MANIFEST_NAME}", raw)
        with AgentClient(next(iter(self._addresses.values()))) as client:
            client.call("POST", f"/v1/saves/{save_id}/commit")
        return {}


def test_a_shard_that_was_damaged_meanwhile_is_completed_from_what_is_staged(tmp_path: Path) -> None:
    """Another node has published it, and the staged copy is the only intact one: the damaged file is set aside."""
    nodes = stores(tmp_path, 2)
    scattered(nodes, tmp_path)
    with agents(nodes) as running:
        addresses = {agent.endpoint.node_id: agent.endpoint.address() for agent in running}
        plan, found = planned(nodes[0])
        assert PublishedOnOne(addresses, list(addresses.values())).adopt(plan, found) == {}
    assert [is_adopted(node) for node in nodes] == [True, False]
    damaged = next((nodes[1].root / ID).glob("*.distcp"))
    damaged.write_bytes(b"damaged")
    service = NodeService(nodes[1])
    settle(service, service.leftovers(), ())
    assert is_adopted(nodes[1])
    assert nodes[1].list_staged() == ()
    kept = list((nodes[1].root / ".quarantine").rglob(f"{damaged.name}.*"))
    assert b"damaged" in [path.read_bytes() for path in kept]
    with agents(nodes):
        assert findings(nodes[0]) == []
        assert [loads(node) for node in nodes] == [True, True]


def test_of_two_adoptions_at_once_the_slower_one_takes_nothing_from_the_other(store: LocalStore) -> None:
    """It was decided, had no name, and stayed: each look set the shards that the other had published aside, as changed."""
    service = NodeService(store)
    save, raw = adopting.found(store, ID)
    other = NodeEntry("other", "host1", None, ())
    decided: list[Manifest] = []
    for save_id in ("a" * 32, "b" * 32):  # neither has begun when the other one looks for what it overtakes
        store.begin(Intent(save_id, ID, "adoption", overwrite=True, adopts=True, nodes=(service.node_id,)))
        store.put_small(save_id, METADATA_NAME, raw)
    for intent in store.list_staged():
        tables = service.adopt(intent.save_id, list(save.holders))
        found = adopting.manifest(save, intent.save_id, dict(tables), service.node_id)
        decided.append(replace(found, nodes=(*found.nodes, other)))
    for manifest in decided:
        store.put_small(manifest.save_id, MANIFEST_NAME, manifest.encode())
    service.commit(decided[0].save_id)
    with pytest.raises(SaveSuperseded):
        service.commit(decided[1].save_id)
    service.adoption_locks.release(decided[1].save_id)  # as HELD_S after the last word of the command
    before = quarantined(store)
    settle(service, service.leftovers(), ())
    assert [doubt.intent.save_id for doubt in service.doubts.read_all()] == [decided[1].save_id]
    assert quarantined(store) == before
    assert findings(store) == []
    own = NodeView(service.node_id, Presence.UP, store.catalog.holdings(service.node_id))
    for presence, is_left in ((Presence.ASSUMED, True), (Presence.UP, False)):
        drop_outlived(service, {decided[0].save_id: decided[0]}, [own, NodeView("other", presence, ())])
        assert bool(store.list_staged()) is is_left, "a node that does not answer may have published it"
    assert findings(store) == []
    assert loads(store)
