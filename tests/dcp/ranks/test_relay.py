"""Large metadata reaches every node without being sent by the coordinator to each."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, NodeEntry
from replicated_ckpt.dcp.agreement import nodes as cluster
from replicated_ckpt.dcp.agreement.nodes import SENDS_AT_ONCE, AgentCluster, Relay
from replicated_ckpt.errors import (
    ConfigInvalid,
    ObjectCorrupt,
    ObjectMissing,
    PeerProtocolError,
    SaveAborted,
    StoreUnavailable,
)
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import PARALLEL_MAX, FanOut
from tests.agent.agents import RunningAgent, running_agent

METADATA = bytes(range(256)) * 40_000
SAVE = f"{7:032x}"


class Link:
    """Counts the transfers by sender. A transfer takes 2 ms, so that transfers overlap."""

    def __init__(self, relay: Relay, broken: frozenset[str] = frozenset()) -> None:
        self.sent: Counter[str] = Counter()
        self.at_once_max = 0
        self.got: list[str] = []
        self._relay = relay
        self._broken = broken
        self._now: Counter[str] = Counter()
        self._lock = threading.Lock()

    def bring(self, node: str) -> None:
        self._relay.bring(
            node, lambda: self._transfer("coordinator", node), lambda source: self._transfer(source, node)
        )

    def _transfer(self, source: str, target: str) -> None:
        with self._lock:
            assert source in ("coordinator", *self.got), f"{source} has nothing to send"
            self._now[source] += 1
            self.sent[source] += 1
            self.at_once_max = max(self.at_once_max, self._now[source])
        time.sleep(0.002)
        with self._lock:
            self._now[source] -= 1
        if source in self._broken:
            raise StoreUnavailable(source, "POST", "pull", "it hangs")
        with self._lock:
            self.got.append(target)


@pytest.mark.parametrize("broken", [0, 50])
def test_the_coordinator_sends_to_few_of_a_thousand_nodes(broken: int) -> None:
    """All nodes get the metadata, none sends more than two at once, and a broken sender does not prevent others from
    getting it.
    """
    nodes = [f"node {at}" for at in range(999)]
    link = Link(Relay("coordinator"), frozenset(nodes[:broken]))
    FanOut.run(nodes, link.bring).raise_first()
    assert sorted(link.got) == sorted(nodes)
    assert link.at_once_max <= SENDS_AT_ONCE
    assert link.sent["coordinator"] <= PARALLEL_MAX + SENDS_AT_ONCE * broken
    assert sum(link.sent[node] for node in nodes[:broken]) <= SENDS_AT_ONCE * broken


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningAgent]]:
    home = tmp_path_factory.mktemp("agents")
    with ExitStack() as stack:
        yield [stack.enter_context(running_agent(home / f"{at}")) for at in range(4)]


def manifest_of(addresses: list[AgentAddress], checkpoint_id: str) -> Manifest:
    nodes = tuple(NodeEntry(address.node_id, "here", None, (rank,)) for rank, address in enumerate(addresses))
    size, crc = len(METADATA), crc32c(METADATA)
    return Manifest(SAVE, checkpoint_id, 1, 0.0, len(nodes), 2, size, crc, nodes, {})


def relayed(agents: list[RunningAgent], monkeypatch: pytest.MonkeyPatch) -> tuple[AgentCluster, list[str]]:
    """A cluster of these agents that relays metadata of any size, and the nodes that the coordinator sent it to."""
    addresses = [agent.endpoint.address() for agent in agents]
    sent: list[str] = []
    original: Callable[..., dict[str, object]] = AgentClient.put

    def put(client: AgentClient, method: str, path: str, body: bytes | None) -> dict[str, object]:
        if path.endswith(METADATA_NAME):
            sent.append(client.address.node_id)
        return original(client, method, path, body)

    monkeypatch.setattr(AgentClient, "put", put)
    monkeypatch.setattr(cluster, "RELAY_FROM_BYTES", 0)
    monkeypatch.setattr("replicated_ckpt.dcp.agreement.nodes.SENDS_AT_ONCE", 1)
    return AgentCluster(addresses, addresses[0].node_id, openers(agents)), sent


def openers(agents: list[RunningAgent]) -> list[AgentAddress]:
    """The agents' addresses with invitations, as a job's coordinator has them."""
    return [replace(agent.endpoint.address(), token=agent.endpoint.invitation()) for agent in agents]


def decided(nodes: AgentCluster, agents: list[RunningAgent], checkpoint_id: str) -> bytes:
    """Opens the save on all nodes and writes its decision into the coordinator's store."""
    nodes.begin(Intent(SAVE, checkpoint_id, "s", overwrite=False))
    manifest = manifest_of([agent.endpoint.address() for agent in agents], checkpoint_id).encode()
    store = LocalStore(agents[0].root)
    store.put_small(SAVE, METADATA_NAME, METADATA)
    store.put_small(SAVE, ".manifest.json", manifest)
    return manifest


def test_agents_relay_the_metadata(agents: list[RunningAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node commits the same metadata, although the coordinator sent it to only some. An unreachable node is
    reported.
    """
    nodes, sent = relayed(agents, monkeypatch)
    manifest = decided(nodes, agents, "step-1")
    missing = AgentAddress("f" * 12, "127.0.0.1", 1, "nobody listens")
    others = AgentCluster([*(agent.endpoint.address() for agent in agents), missing], nodes._own_node, openers(agents))
    committed = others.commit(SAVE, METADATA, manifest)
    assert list(committed.error_by_node) == [missing.node_id]
    assert len(committed.held_by_node) == len(agents)
    assert len(set(sent)) < len(agents) - 1
    for agent in agents:
        assert (agent.root / "step-1" / METADATA_NAME).read_bytes() == METADATA


def test_pulled_metadata_is_verified(agents: list[RunningAgent]) -> None:
    """A pull keeps only bytes with the right checksum. Invalid requests, unknown peers and unopened saves are refused."""
    source, target = agents[0].endpoint.address(), agents[1]
    save = f"{8:032x}"
    with agents[0].client() as client:
        client.call(
            "POST",
            f"/v1/saves/{save}",
            {"checkpoint_id": "step-2", "session": "t", "overwrite": False, "peers": []},
        )
        client.put("PUT", f"/v1/saves/{save}/{METADATA_NAME}", METADATA)
    wanted = {"from": source.node_id, "size_bytes": len(METADATA), "crc32c": crc32c(METADATA)}
    with target.client() as client:
        with pytest.raises(SaveAborted):
            client.call("POST", f"/v1/saves/{save}/pull", wanted)  # the save is not open there
        dead = replace(source, node_id="f" * 12, port=1)
        peers = [source.to_json(), dead.to_json()]
        document = {"checkpoint_id": "step-2", "session": "t", "overwrite": False, "peers": peers}
        client.call("POST", f"/v1/saves/{save}", document)
        with pytest.raises(ObjectCorrupt):
            client.call("POST", f"/v1/saves/{save}/pull", {**wanted, "crc32c": 1})
        with pytest.raises(PeerProtocolError):
            client.call("POST", f"/v1/saves/{save}/pull", {**wanted, "size_bytes": 1 << 62})
        with pytest.raises(PeerProtocolError):
            client.call("POST", f"/v1/saves/{save}/pull", {})
        with pytest.raises(StoreUnavailable):
            client.call("POST", f"/v1/saves/{save}/pull", {**wanted, "from": dead.node_id})
        with pytest.raises(ObjectMissing, match="introduced"):
            client.call("POST", f"/v1/saves/{save}/pull", {**wanted, "from": "e" * 12})
        for same in ({"checkpoint_id": "step-1", "save_id": "f" * 32}, {"checkpoint_id": "step-1", "save_id": "../.."}):
            with pytest.raises(ObjectMissing):
                client.call("POST", f"/v1/saves/{save}/pull", {**wanted, "same_as": same})
        for wrong in ({}, "step-1", {"checkpoint_id": "../x", "save_id": "f" * 32}):
            with pytest.raises((PeerProtocolError, ConfigInvalid)):
                client.call("POST", f"/v1/saves/{save}/pull", {**wanted, "same_as": wrong})
        staging = LocalStore(target.root).staging(save)
        assert [path.name for path in staging.iterdir()] == []
        assert client.call("POST", f"/v1/saves/{save}/pull", wanted)["crc32c"] == crc32c(METADATA)
        assert (staging / METADATA_NAME).read_bytes() == METADATA


def test_a_node_with_an_invalid_answer_is_named(agents: list[RunningAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """One node answers a commit with nonsense: it is reported as an error, and the other nodes' commits count."""
    nodes, _ = relayed(agents, monkeypatch)
    manifest = decided(nodes, agents, "strange")
    call, strange = AgentClient.call, agents[1].endpoint.node_id

    def answer(client: AgentClient, method: str, path: str, *arguments: Any) -> dict[str, object]:
        found = call(client, method, path, *arguments)
        return {} if path.endswith("/commit") and client.address.node_id == strange else found

    monkeypatch.setattr(AgentClient, "call", answer)
    committed = nodes.commit(SAVE, METADATA, manifest)
    assert {node: type(error) for node, error in committed.error_by_node.items()} == {strange: PeerProtocolError}
    assert len(committed.held_by_node) == len(agents) - 1
