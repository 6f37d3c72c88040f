"""A peer sends its bytes slowly: a load switches to another node that has them."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.reading.windows import CELL_BYTES, source_orders
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer import copy
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import RunningAgent, running_agent, wait_for
from tests.agent.checkpoints import introduced, shard
from tests.agent.repair.test_reprotect import meet

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
QUICK_BYTES = 1 << 16  # the first bytes of each connection pass quickly, the rest slowly
LINK_BYTES_PER_S = 1 << 20
SLOW_READ_S = 0.5
STATE = {f"w{number}": torch.full((1 << 20,), float(number)) for number in range(2)}  # 4 MiB each


def pass_on(source: socket.socket, target: socket.socket, bytes_per_s: float) -> None:
    passed = 0
    with suppress(OSError):
        while piece := source.recv(1 << 14):
            target.sendall(piece)
            passed += len(piece)
            time.sleep(len(piece) / bytes_per_s if passed > QUICK_BYTES else 0.0)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def slow_link_to(address: AgentAddress) -> Iterator[AgentAddress]:
    """A proxy in front of the agent: its answers arrive slowly."""
    listener = socket.create_server((address.host, 0))
    open_sockets: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):
            while True:
                here = listener.accept()[0]
                there = socket.create_connection((address.host, address.port))
                open_sockets.extend((here, there))
                for pair in ((here, there, 1e12), (there, here, LINK_BYTES_PER_S)):
                    threading.Thread(target=pass_on, args=pair, daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield replace(address, port=listener.getsockname()[1])
    finally:
        for each in (listener, *open_sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[RunningAgent]]:
    """Two agents that both have the checkpoint. A load on a third node asks the first of the list first."""
    roots = [tmp_path / "a", tmp_path / "b"]
    with running_agent(roots[0]) as one, running_agent(roots[1]) as other:
        dcp.save(dict(STATE), checkpoint_id="step-1", storage_writer=ReplicatedWriter(roots[0], copies=2))
        meet(one, other)
        wait_for((roots[1] / "step-1" / shard(0)).exists, 30, "the copy")
        by_node = {agent.endpoint.node_id: agent for agent in (one, other)}
        order = source_orders({shard(0): 1}, {shard(0): tuple(by_node)}, "", "rank 0")
        yield [by_node[node] for node in order[shard(0)]]


def load(root: Path, addresses: list[AgentAddress]) -> ReplicatedReader:
    """Loads on a blank node that has these addresses in its address book, and compares every byte."""
    store, found = LocalStore(root), {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    introduced(store, addresses)
    reader = ReplicatedReader(root)
    dcp.load(found, checkpoint_id="step-1", storage_reader=reader)
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)
    return reader


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the throughput check so that a range over the slow link counts as too slow."""
    monkeypatch.setattr(copy, "SLOW_READ_S", SLOW_READ_S)
    monkeypatch.setattr(copy, "SLOW_BYTES_PER_S", 2 * CELL_BYTES / SLOW_READ_S)


def test_a_load_leaves_a_slow_peer_when_another_node_has_the_bytes(tmp_path: Path, agents: list[RunningAgent]) -> None:
    """No read of the slow peer times out, but the load reads the remaining bytes from the other node."""
    slow, quick = agents
    with slow_link_to(slow.endpoint.local_address()) as far:
        reader = load(tmp_path / "blank", [far, quick.endpoint.local_address()])
    assert reader.last_load is not None
    (text,) = reader.last_load.bad_copies
    assert f"node {slow.endpoint.node_id}" in text
    assert "too slow" in text


def test_a_load_waits_for_a_slow_peer_that_has_the_only_intact_copy(tmp_path: Path, agents: list[RunningAgent]) -> None:
    """The other node's copy is damaged: the load reads all bytes from the slow peer."""
    slow, other = agents
    shard_there = other.root / "step-1" / shard(0)
    with slow_link_to(slow.endpoint.local_address()) as far:
        data = bytearray(shard_there.read_bytes())
        data[::4096] = bytes(len(data[::4096]))  # the size stays, every block is damaged
        shard_there.write_bytes(data)
        assert load(tmp_path / "blank", [far, other.endpoint.local_address()]).last_load is not None
