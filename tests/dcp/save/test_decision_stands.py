"""A coordinator fails at the moment of its decision: a save that may be decided is aborted on no node, any other on all
nodes.
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, SavePost, ShardReceipt, decide
from replicated_ckpt.dcp.agreement.node_post import NodePost
from replicated_ckpt.dcp.agreement.nodes import cluster_of
from replicated_ckpt.dcp.save.commit import commit_save
from replicated_ckpt.dcp.save.submission import AgentSilent, finish_by_agent
from replicated_ckpt.errors import StoreError, StoreUnavailable
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import RunningAgent, peers_of, running_agent
from tests.dcp.save.test_submit_errors import outline

pytestmark = pytest.mark.fault
SAVE, TICKET = "6" * 32, "c" * 32
SHARDS = ["__0_0.distcp", "__1_0.distcp"]
QUIET = ("--round-every-s", "600")
ERRORS: list[Callable[[], BaseException]] = [KeyboardInterrupt, lambda: StoreError("disk", "fsync", "", "EIO")]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[RunningAgent]]:
    with ExitStack() as running:
        yield [running.enter_context(running_agent(tmp_path / name, *QUIET)) for name in ("a", "b")]


def opened(agents: list[RunningAgent]) -> SaveDecision:
    """A save of two ranks on two nodes with one copy, whose shards are staged."""
    posts = [
        SavePost("step-1", NodePost(ends.node_id, f"host-{ends.node_id}", ends.node_id, ends.node_id, None, address))
        for ends, address in ((agent.endpoint, agent.endpoint.address()) for agent in agents)
    ]
    invited = [
        replace(post, node=replace(post.node, invitation=agent.endpoint.invitation()))
        for post, agent in zip(posts, agents, strict=True)
    ]
    decision = replace(decide(invited, 1, SAVE), ticket=TICKET, session="s", sequence=1, lineage="a" * 16)
    cluster_of(decision, 0).begin(decision.intent)
    for agent, name in zip(agents, SHARDS, strict=True):
        LocalStore(agent.root).path_of_staged(SAVE, name).write_bytes(b"1234")
    return decision


def commit(store: LocalStore, decision: SaveDecision) -> None:
    receipts = [
        Receipt((ShardReceipt(name, 4, 0, (decision.node_of(rank).node_id,)),)) for rank, name in enumerate(SHARDS)
    ]
    config = ReplicatedWriter(store.root, copies=1).config
    commit_save(store, cluster_of(decision, 0), decision, config, receipts, Metadata({}), [[], []])


def fail_after(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Calls `then` after the coordinator has written the manifest."""
    write = LocalStore.put_small

    def write_and_fail(store: LocalStore, save_id: str, name: str, data: bytes) -> None:
        write(store, save_id, name, data)
        if name == MANIFEST_NAME:
            then()

    monkeypatch.setattr(LocalStore, "put_small", write_and_fail)


@pytest.mark.parametrize("make", ERRORS)
def test_a_decided_save_is_aborted_nowhere(
    agents: list[RunningAgent], monkeypatch: pytest.MonkeyPatch, make: Callable[[], BaseException]
) -> None:
    """The coordinator fails after it named the manifest: no node aborts. The second node publishes the save when a load
    begins.
    """
    decision = opened(agents)

    def ask_and_fail() -> None:
        with agents[0].peer() as client:
            assert client.call("GET", f"/v1/saves/{SAVE}")["state"] == "committed"
        raise make()

    fail_after(monkeypatch, ask_and_fail)
    with pytest.raises(type(make())):
        commit(LocalStore(agents[0].root), decision)
    monkeypatch.undo()
    assert LocalStore(agents[1].root).is_staged(SAVE)
    with agents[1].client() as client:  # a load begins there
        client.call("POST", "/v1/peers", {"peers": peers_of(*agents), "session": "another"})
    for agent, name in zip(agents, SHARDS, strict=True):
        assert (agent.root / "step-1" / name).read_bytes() == b"1234"


def test_an_undecided_save_is_aborted_everywhere(agents: list[RunningAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator fails right before it names the manifest: the save is aborted on all nodes."""
    decision = opened(agents)
    write = LocalStore.put_small

    def fail(store: LocalStore, save_id: str, name: str, data: bytes) -> None:
        if name == MANIFEST_NAME:
            raise KeyboardInterrupt
        write(store, save_id, name, data)

    monkeypatch.setattr(LocalStore, "put_small", fail)
    with pytest.raises(KeyboardInterrupt):
        commit(LocalStore(agents[0].root), decision)
    assert [LocalStore(agent.root).is_staged(SAVE) for agent in agents] == [False, False]


def test_a_rank_that_is_interrupted_while_it_submits_aborts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is interrupted while it submits the save to its agent: it raises AgentSilent, as the agent may already
    have decided.
    """

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with running_agent(tmp_path, *QUIET):
        store = LocalStore(tmp_path)
        monkeypatch.setattr(AgentClient, "put", interrupted)
        with pytest.raises(AgentSilent, match="KeyboardInterrupt"):
            finish_by_agent(store, outline(store.node_id()), lambda: None)


def test_an_agent_that_cannot_be_started_again_may_be_finishing_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's answer is lost, and the rank cannot restart it: the rank raises AgentSilent, as the agent may be
    finishing the save.
    """

    def lose(client: AgentClient, *_: Any) -> Any:
        raise StoreUnavailable(client.address.node_id, "finish", SAVE, "the connection is lost")

    def start_again() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with running_agent(tmp_path, *QUIET):
        store = LocalStore(tmp_path)
        monkeypatch.setattr(AgentClient, "put", lambda *_: None)
        monkeypatch.setattr(AgentClient, "call", lose)
        with pytest.raises(AgentSilent, match="Too many open files"):
            finish_by_agent(store, outline(store.node_id()), start_again)
