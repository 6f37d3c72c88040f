"""During a long load, agents keep what the rank has not read yet."""

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.agent.http.server import CONNECTIONS_MAX
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.load import load_attempt
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import is_read
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import PeerShard
from replicated_ckpt.stores.verified import Expected
from tests.agent.agents import RunningAgent, running_agent
from tests.agent.checkpoints import checkpointed, introduced, shard
from tests.agent.http.test_tls import certificate
from tests.marks import long

pytestmark = pytest.mark.timeout(100)


class ForgettingPlanner(dcp.DefaultLoadPlanner):
    """At its first item, makes the agent stop keeping the checkpoint for this reader, as after 300 s without a request."""

    def __init__(self, agent: RunningAgent) -> None:
        super().__init__()
        self._agent = agent
        self.was_kept: list[bool] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = self._agent.root / "step-1"
        self.was_kept.append(is_read(place / ".manifest.json"))
        reader = f"{World(0, 1, None).session}/{threading.get_ident()}"
        document = {"lineage": "a" * 16, "sequence": 1, "save_id": "0" * 32, "reader": reader}
        with self._agent.client() as client:
            client.call("POST", "/v1/sequence", document)
        self.was_kept.append(is_read(place / ".manifest.json"))
        found: torch.Tensor = super().resolve_tensor(read_item)
        return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_long_load_keeps_its_checkpoint_on_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading rank repeatedly asks the agents to keep the checkpoint, so that an agent that has stopped keeps it
    again.
    """
    monkeypatch.setattr(load_attempt, "REMIND_S", 0.0)
    here, there = LocalStore(tmp_path / "here"), LocalStore(tmp_path / "there")
    dcp.save({"a": torch.arange(9)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(there.root, copies=1))
    with running_agent(there.root) as agent:
        introduced(here, [agent.endpoint.local_address()])
        planner, found = ForgettingPlanner(agent), {"a": torch.zeros(9, dtype=torch.int64)}
        reader = ReplicatedReader(here.root)
        dcp.load(found, checkpoint_id="step-1", storage_reader=reader, planner=planner, no_dist=True)
        assert planner.was_kept == [True, False]
        assert is_read(there.root / "step-1" / ".manifest.json")
    assert torch.equal(found["a"], torch.arange(9))


def opened_shard(store: LocalStore, address: AgentAddress) -> PeerShard:
    """A shard that this process has begun to read from the agent of `store`."""
    manifest = checkpointed([store], 1, {shard(0): [0]}, copies=1)
    entry = manifest.shards[shard(0)]
    expected = Expected(entry.size_bytes, entry.crc32c)
    return PeerShard(AgentClient(address), "step-1", manifest.save_id, shard(0), expected).open()


@pytest.mark.fault
@pytest.mark.parametrize("is_encrypted", [False, long(True)])
def test_a_connection_that_the_agent_closed_is_opened_again(tmp_path: Path, is_encrypted: bool) -> None:
    """The agent closes an idle connection, because it has too many: the next read opens a new one."""
    root = tmp_path / "there"
    arguments: tuple[str, ...] = ()
    if is_encrypted:
        cert, key = certificate(tmp_path, "there")
        arguments = ("--tls-cert", cert, "--tls-key", key)
    with running_agent(root, *arguments) as agent, ExitStack() as others:
        source = opened_shard(LocalStore(root), agent.endpoint.address())
        before = bytes(source.read(0, 300_000))
        for _ in range(CONNECTIONS_MAX):
            others.enter_context(agent.client()).call("GET", "/v1/status?brief=1")
        assert bytes(source.read(0, 300_000)) == before
        source.close()


@pytest.mark.fault
def test_a_load_continues_with_a_restarted_agent(tmp_path: Path) -> None:
    """The agent restarts with the same port and token: the load continues."""
    root = tmp_path / "there"
    with running_agent(root) as agent:
        source = opened_shard(LocalStore(root), agent.endpoint.address())
        before = bytes(source.read(0, 300_000))
    with running_agent(root):
        assert bytes(source.read(0, 300_000)) == before
        source.close()
