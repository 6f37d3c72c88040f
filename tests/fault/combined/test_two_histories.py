"""Combined faults: the nodes split into two halves that disagree about the newest version, two runs share a name, a
planner is slow.

The agents are real processes, killed with SIGKILL. The test itself sends the requests of the coordinator and its ranks,
in their order, so that a save can end at any step.
"""

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.cli.main import main
from replicated_ckpt.config import Retention
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.inventory import Holding, saves_found
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.core.upkeep.policy import NODES, Policy
from replicated_ckpt.stores.files.locks import DescriptorLock
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.testing.shards import table_of
from tests.agent.agents import RunningAgent, peers_of, running_agent, wait_for
from tests.agent.checkpoints import METADATA, findings, next_file_number, renumbered, replaced_saves, shard
from tests.marks import mark_long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
QUICK = ("--lost-after-s", "2", "--copy-mib-per-s", "1000")
AGAIN = (*QUICK, "--round-every-s", "1")
"""Options of restarted agents. The first agents make fewer rounds, as the test's own saves are slower than a rank's."""
PAIRS = {0: (0, 1), 1: (1, 0), 2: (2, 3), 3: (3, 2)}
RING = {0: (0, 1), 1: (1, 2), 2: (2, 0)}
RUN, OTHER = "a" * 16, "b" * 16


@dataclass
class Nodes:
    """Several nodes whose agents start and stop. `up` has the running agents by node."""

    folder: Path
    stack: ExitStack
    count: int
    up: dict[int, RunningAgent] = field(default_factory=dict)

    def start(self, *indices: int) -> None:
        for index in indices:
            root = self.folder / f"node{index}"
            self.up[index] = self.stack.enter_context(running_agent(root, *(AGAIN if root.exists() else QUICK)))

    def kill(self, *indices: int, how: int = signal.SIGKILL) -> None:
        for index in indices:
            agent = self.up.pop(index)
            agent.signal(how)
            agent.process.wait(20)

    def store(self, index: int) -> LocalStore:
        return LocalStore(self.folder / f"node{index}")

    def call(self, index: int, method: str, path: str, document: Any = None) -> dict[str, Any]:
        with self.up[index].client() as client:
            return client.call(method, path, document)

    def meet(self) -> None:
        """Introduces all running agents to each other, as the begin of a load does: they settle their staged saves."""
        document = {"peers": peers_of(*self.up.values()), "session": "a load"}
        for index in list(self.up):
            self.call(index, "POST", "/v1/peers", document)

    def wait_in_rounds(self, is_so: Callable[[], bool], what: str, within_s: float = 30.0) -> None:
        """Triggers rounds of re-protection until the condition holds. An idle agent starts one only every 15 s."""
        deadline = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: not within {within_s} s"
            self.meet()
            time.sleep(0.3)

    def status(self, index: int) -> dict[str, Any]:
        return self.call(index, "GET", "/v1/status")

    def versions(self, checkpoint_id: str = "last") -> dict[str, set[str]]:
        """The save id and the shards of each version on the running nodes."""
        told = [self.call(index, "GET", f"/v1/holdings?checkpoint_id={checkpoint_id}") for index in self.up]
        holdings = [Holding.from_json(fields) for answer in told for fields in answer["holdings"]]
        return {save.save_id: {name for h in save.holdings for name in h.sizes} for save in saves_found(holdings)}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack, 4)


class Save:
    """One save whose steps the test makes one by one."""

    def __init__(
        self,
        nodes: Nodes,
        number: int,
        holders: Mapping[int, Sequence[int]],
        checkpoint_id: str = "last",
        lineage: str = RUN,
    ) -> None:
        self.nodes, self.holders, self.checkpoint_id = nodes, holders, checkpoint_id
        self.save_id = f"{number:032x}"
        self.path = f"/v1/saves/{self.save_id}"
        self.members = sorted({node for held in holders.values() for node in held})
        self.lock: DescriptorLock | None = None
        stores = [nodes.store(index) for index in self.members]
        self.number = next_file_number(stores, checkpoint_id)
        contents = {self.shard(rank): os.urandom(300_000) for rank in holders}
        tables = {name: table_of([data]) for name, data in contents.items()}
        self.files = {name: contents[name] + tables[name].encode() for name in contents}
        ids = {index: store.node_id() for index, store in zip(self.members, stores, strict=True)}
        self.manifest = Manifest(
            save_id=self.save_id,
            checkpoint_id=checkpoint_id,
            sequence=number,
            created_unix_s=1000.0 + number,
            world_size=len(holders),
            copies=2,
            metadata_bytes=len(METADATA),
            metadata_crc32c=crc32c(METADATA),
            nodes=tuple(NodeEntry(ids[index], f"host{index}", None, (index,)) for index in self.members),
            shards={
                self.shard(rank): ShardEntry(
                    tables[self.shard(rank)].file_bytes,
                    tables[self.shard(rank)].file_crc(),
                    rank,
                    ids[held[0]],
                    tuple(ids[index] for index in held),
                )
                for rank, held in holders.items()
            },
            lineage=lineage,
        )

    def shard(self, rank: int) -> str:
        """The name of this rank's shard. No other version on these nodes uses it."""
        return renumbered(shard(rank), self.number)

    def opening(self) -> dict[str, Any]:
        return {
            "checkpoint_id": self.checkpoint_id,
            "session": self.save_id,
            "overwrite": True,
            "coordinator": self.nodes.store(self.members[0]).node_id(),
            "peers": peers_of(*(self.nodes.up[index] for index in self.members)),
        }

    def open(self) -> None:
        for index in self.members:
            self.nodes.call(index, "POST", self.path, self.opening())

    def acquire_lock(self) -> None:
        """Locks the save, as the coordinator's rank does while it works."""
        self.lock = self.nodes.store(self.members[0]).lock_save(self.save_id)

    def release_lock(self) -> None:
        if self.lock is not None:
            self.lock.release()

    def write(self) -> None:
        for rank, held in self.holders.items():
            for index in held:
                self._put(index, self.shard(rank), self.files[self.shard(rank)])
        for index in self.members:
            self.nodes.store(index).note_place(self.save_id, self.manifest.lineage, self.manifest.sequence)

    def decide(self) -> None:
        """Writes the decision on the coordinator's node."""
        store = self.nodes.store(self.members[0])
        store.put_small(self.save_id, ".metadata", METADATA)
        store.put_small(self.save_id, ".manifest.json", self.manifest.encode())

    def publish(self, *indices: int) -> None:
        for index in indices:
            if index != self.members[0]:
                self._put(index, ".metadata", METADATA)
                self._put(index, ".manifest.json", self.manifest.encode())
            self.nodes.call(index, "POST", f"{self.path}/commit")

    def _put(self, index: int, name: str, data: bytes) -> None:
        with self.nodes.up[index].client() as client:
            client.put("PUT", f"{self.path}/{name}", data)

    def acknowledged(self) -> "Save":
        self.open()
        self.write()
        self.decide()
        self.publish(*self.members)
        return self

    def decided_only(self) -> "Save":
        self.open()
        self.write()
        self.decide()
        return self

    @property
    def shards(self) -> set[str]:
        return set(self.files)


def is_whole_everywhere(nodes: Nodes, save: Save) -> bool:
    """Whether every running node has published the save, holds no other version of the checkpoint, and has intact
    files.
    """
    stores = [nodes.store(index) for index in nodes.up]
    named = [store.catalog.find_manifest(save.checkpoint_id) for store in stores]
    return (
        all(manifest is not None and manifest.save_id == save.save_id for manifest in named)
        and all(store.list_staged() == () and replaced_saves(store) == [] for store in stores)
        and nodes.versions(save.checkpoint_id) == {save.save_id: save.shards}
        and all(findings(store) == [] for store in stores)
    )


@pytest.mark.parametrize("first", mark_long(["load", "agents"], keep=["load"]))
def test_half_of_the_nodes_come_back_first(nodes: Nodes, first: str) -> None:
    """A replacement was published on one pair of nodes only. The other pair completes it once the first pair is back,
    even after it ran alone.
    """
    nodes.start(0, 1, 2, 3)
    old = Save(nodes, 1, PAIRS).acknowledged()
    new = Save(nodes, 2, PAIRS).decided_only()
    nodes.kill(2, 3)
    new.publish(0, 1)
    nodes.kill(0, 1)
    nodes.start(2, 3)
    nodes.meet()
    if first == "load":
        nodes.meet()
    else:  # re-protection settles saves that are a minute old; `meet` had the agents settle at once
        time.sleep(3)
    for index in (2, 3):
        assert [intent.save_id for intent in nodes.store(index).list_staged()] == [new.save_id]
        (doubt,) = nodes.status(index)["in_doubt"]
        assert set(doubt["waits_for"]) >= {nodes.store(0).node_id(), nodes.store(1).node_id()}
    assert nodes.versions()[old.save_id] == {shard(2), shard(3)}
    nodes.start(0, 1)
    nodes.meet()
    wait_for(lambda: is_whole_everywhere(nodes, new), 30, "the new version on all nodes")


def test_the_old_version_is_kept_until_the_new_one_is_complete(nodes: Nodes) -> None:
    """The pair that published the new version keeps the old one: without the other pair's shards the new version cannot
    be loaded.
    """
    nodes.start(0, 1, 2, 3)
    old = Save(nodes, 1, PAIRS).acknowledged()
    new = Save(nodes, 2, PAIRS).decided_only()
    nodes.kill(2, 3)
    new.publish(0, 1)
    wait_for(
        lambda: all(nodes.status(index)["protection"]["lost"] == 4 for index in (0, 1)),
        30,
        "lost shards of the other pair",
    )
    assert nodes.versions() == {save.save_id: {save.shard(0), save.shard(1)} for save in (old, new)}
    nodes.start(2, 3)
    assert nodes.versions()[old.save_id] == old.shards
    nodes.wait_in_rounds(lambda: is_whole_everywhere(nodes, new), "the new version on all nodes")


def test_a_goodbye_does_not_abort_the_new_version(nodes: Nodes) -> None:
    """Two of three nodes continue with the old version and then leave with a goodbye. The new version is completed when
    all nodes are back.
    """
    nodes.start(0, 1, 2)
    old = Save(nodes, 1, RING).acknowledged()
    new = Save(nodes, 2, RING).decided_only()
    nodes.kill(1, 2)
    new.publish(0)
    nodes.kill(0)
    nodes.start(1, 2)
    nodes.meet()
    assert nodes.versions() == {old.save_id: old.shards}
    nodes.kill(1, 2, how=signal.SIGTERM)
    nodes.start(2, 0)
    nodes.meet()
    time.sleep(3)
    assert nodes.versions()[new.save_id] == new.shards
    nodes.start(1)
    nodes.meet()
    wait_for(lambda: is_whole_everywhere(nodes, new), 30, "the new version on all nodes")


def test_an_undecided_save_is_dropped_once_its_coordinator_is_back(nodes: Nodes) -> None:
    """Nodes that come back without the coordinator keep their staged part. Once the coordinator's node is back, all
    nodes drop it.
    """
    nodes.start(0, 1, 2, 3)
    old = Save(nodes, 1, PAIRS).acknowledged()
    new = Save(nodes, 2, PAIRS)
    new.open()
    new.write()
    nodes.kill(0, 1, 2, 3)
    nodes.start(2, 3)
    nodes.meet()
    assert [len(nodes.store(index).list_staged()) for index in (2, 3)] == [1, 1]
    nodes.start(0)
    nodes.meet()
    nodes.meet()
    assert [len(nodes.store(index).list_staged()) for index in (0, 2, 3)] == [0, 0, 0]
    nodes.start(1)
    nodes.meet()
    wait_for(lambda: is_whole_everywhere(nodes, old), 30, "the old version on all nodes")


@pytest.mark.long
def test_the_operator_declares_a_node_lost(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    """`ls` and `repair` print the save that is in doubt. `repair --lost` aborts it, and prints the version that
    remains.
    """
    nodes.start(0, 1, 2)
    old = Save(nodes, 1, RING).acknowledged()
    new = Save(nodes, 2, RING)
    new.open()
    new.write()
    nodes.kill(0)
    nodes.meet()
    root, lost = str(nodes.store(1).root), nodes.store(0).node_id()
    main(["ls", "--root", root])
    assert f"in doubt: save {new.save_id} of last" in capsys.readouterr().out
    assert main(["repair", "--root", root]) != 0
    shown = capsys.readouterr().out
    assert f"in doubt: save {new.save_id}" in shown
    assert "--lost" in shown
    time.sleep(5)  # for so long the save's other node reports that ranks may still connect
    main(["repair", "--root", root, "--lost", lost])
    shown = capsys.readouterr().out
    assert f"abort save {new.save_id}" in shown
    assert old.save_id in shown
    assert nodes.store(1).list_staged() == ()
    assert nodes.versions()[old.save_id] == old.shards


@pytest.mark.long
def test_a_slow_planner_does_not_count_as_dead(nodes: Nodes) -> None:
    """While the coordinator's rank lives, no load touches the save on any node, however long ago it was opened."""
    nodes.start(0, 1)
    old = Save(nodes, 1, {0: (0, 1), 1: (1, 0)}).acknowledged()
    new = Save(nodes, 2, {0: (0, 1), 1: (1, 0)})
    new.open()
    new.acquire_lock()
    time.sleep(5.5)
    nodes.meet()
    new.write()
    new.decide()
    new.publish(0, 1)
    new.release_lock()
    wait_for(lambda: is_whole_everywhere(nodes, new), 30, "the new version on both nodes")
    assert old.save_id not in nodes.versions()


def test_a_late_publication_of_an_older_version_replaces_nothing(nodes: Nodes) -> None:
    """Re-protection has opened the old version again and publishes late: the node refuses it, and keeps the new
    version.
    """
    nodes.start(0, 1)
    old = Save(nodes, 1, {0: (0, 1), 1: (1, 0)}).acknowledged()
    new = Save(nodes, 2, {0: (0, 1), 1: (1, 0)}).acknowledged()
    store = nodes.store(1)
    nodes.call(1, "POST", old.path, {"checkpoint_id": "last", "session": "repair", "overwrite": True, "peers": []})
    store.put_small(old.save_id, ".metadata", METADATA)
    store.put_small(old.save_id, ".manifest.json", old.manifest.encode())
    assert nodes.call(1, "GET", old.path)["state"] == "decided"
    named = store.catalog.find_manifest("last")
    assert named is not None
    assert named.save_id == new.save_id


@pytest.mark.long
def test_another_runs_checkpoints_neither_count_nor_are_removed(nodes: Nodes) -> None:
    """A node joins that holds another run's checkpoints with larger sequences. This run's policy keeps its own newest
    two checkpoints, and does not touch the other run's.
    """
    nodes.start(2)
    foreign = [Save(nodes, 20 + n, {0: (2,)}, f"debug-{n}", OTHER).acknowledged() for n in range(3)]
    nodes.start(0, 1)
    ours = [Save(nodes, n, {0: (0, 1), 1: (1, 0)}, f"step-{n}").acknowledged() for n in (1, 2, 3)]
    nodes.meet()
    policy = Policy("", NODES, 3, Retention(keep_last=2), RUN)
    for index in (0, 1):
        nodes.call(index, "POST", "/v1/retention", {"policies": [policy.to_json()], "is_committed": True})
    wait_for(lambda: nodes.versions("step-1") == {}, 30, "the removal of the oldest checkpoint of this run")
    time.sleep(3)
    for save in (*ours[1:], *foreign):
        assert nodes.versions(save.checkpoint_id) == {save.save_id: save.shards}


@pytest.mark.long
def test_a_checkpoint_that_a_load_reads_is_not_retired(nodes: Nodes) -> None:
    """Retention keeps a checkpoint while a load reads it, and removes it once that reader reads another one. It removes
    at once what no load reads.
    """
    nodes.start(0, 1)
    saves = [Save(nodes, n, {0: (0, 1), 1: (1, 0)}, f"step-{n}").acknowledged() for n in (1, 2, 3)]
    for index in (0, 1):
        document = {"lineage": RUN, "sequence": 3, "save_id": saves[0].save_id, "reader": "a load"}
        nodes.call(index, "POST", "/v1/sequence", document)
        policy = Policy("", NODES, 3, Retention(keep_last=1), RUN)
        nodes.call(index, "POST", "/v1/retention", {"policies": [policy.to_json()], "is_committed": True})
    wait_for(lambda: nodes.versions("step-2") == {}, 30, "the removal of a checkpoint that nobody reads")
    assert nodes.versions("step-1") == {saves[0].save_id: saves[0].shards}
    for index in (0, 1):
        nodes.call(index, "POST", "/v1/sequence", {**document, "save_id": saves[2].save_id})
    wait_for(lambda: nodes.versions("step-1") == {}, 30, "the removal of the checkpoint that the reader has left")


def test_the_lock_of_a_dead_coordinator_is_free(nodes: Nodes) -> None:
    """The lock belongs to the process: once its descriptor is closed, as after SIGKILL, the save is not locked any
    more.
    """
    nodes.start(0)
    save = Save(nodes, 1, {0: (0,)})
    save.open()
    save.acquire_lock()
    assert nodes.store(0).is_locked(save.save_id)
    save.release_lock()
    assert not nodes.store(0).is_locked(save.save_id)
    with nodes.store(0).intent_path(save.save_id).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert json.loads(nodes.store(0).intent_path(save.save_id).read_text())["coordinator"]
