"""A connection that breaks in the middle of a range does not lose the peer: the range is requested once more."""

import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.errors import ObjectCorrupt, StoreUnavailable
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import PeerShard
from replicated_ckpt.stores.verified import Expected
from tests.agent.agents import opened_server
from tests.agent.checkpoints import checkpointed, findings, shard

pytestmark = pytest.mark.timeout(60)
SHARD = shard(0)
DATA_BYTES = 700_000
PASSED_BYTES = 300_000
"""Bytes from the agent before the connection is cut."""


class CuttingProxy:
    """A proxy to an agent, for one connection at a time. It cuts `cuts_left` answers, by a reset or a close."""

    def __init__(self, agent: AgentAddress, *, is_reset: bool) -> None:
        self._agent = agent
        self._is_reset = is_reset
        self.cuts_left = 0
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = replace(agent, port=self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections."""
        with suppress(OSError):  # already closed
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                with client, socket.create_connection((self._agent.host, self._agent.port)) as agent:
                    self._pass_on(client, agent)

    def _pass_on(self, client: socket.socket, agent: socket.socket) -> None:
        """Forwards both directions in one thread, because a socket is not closed while another thread waits in it."""
        sent = 0
        while True:
            for source in select.select([client, agent], [], [])[0]:
                piece = source.recv(1 << 16)
                if not piece:
                    return
                (agent if source is client else client).sendall(piece)
                sent += len(piece) if source is agent else 0
            if self.cuts_left and sent > PASSED_BYTES:
                self.cuts_left -= 1
                if self._is_reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return


@contextmanager
def opened(store: LocalStore, *, is_reset: bool) -> Iterator[tuple[CuttingProxy, PeerShard]]:
    manifest = checkpointed([store], 1, {SHARD: (0,)}, size_bytes=DATA_BYTES, copies=1)
    entry = manifest.shards[SHARD]
    with opened_server(store) as unix_socket, closing(CuttingProxy(unix_socket, is_reset=is_reset)) as line:
        found = PeerShard(
            AgentClient(line.address), "step-1", manifest.save_id, SHARD, Expected(entry.size_bytes, entry.crc32c)
        )
        with closing(found):
            yield line, found.open()
    assert findings(store) == []


@pytest.mark.parametrize("is_reset", [False, True], ids=["ended", "reset"])
def test_a_connection_that_is_cut_once_is_opened_again(tmp_path: Path, is_reset: bool) -> None:
    """After one broken connection, the read succeeds over a second one."""
    store = LocalStore(tmp_path / "node0")
    with opened(store, is_reset=is_reset) as (line, there):
        line.cuts_left = 1
        wanted = (store.root / "step-1" / SHARD).read_bytes()[:DATA_BYTES]
        assert bytes(there.read(0, DATA_BYTES)) == wanted
        assert (line.cuts_left, line.connections) == (0, 2)


@pytest.mark.parametrize("is_reset", [False, True], ids=["ended", "reset"])
def test_a_range_that_is_cut_twice_counts_as_damaged(tmp_path: Path, is_reset: bool) -> None:
    """A range whose connection breaks twice counts as damaged, as if the peer's disk could not read it. The next read
    uses a new connection.
    """
    store = LocalStore(tmp_path / "node0")
    with opened(store, is_reset=is_reset) as (line, there):
        line.cuts_left = 2
        with pytest.raises(ObjectCorrupt, match="closed the connection twice in the middle of bytes 0 to"):
            there.read(0, DATA_BYTES)
        wanted = (store.root / "step-1" / SHARD).read_bytes()[:DATA_BYTES]
        assert bytes(there.read(0, DATA_BYTES)) == wanted


def test_an_unreachable_peer_is_not_taken_for_damaged(tmp_path: Path) -> None:
    """A connection breaks and the peer cannot be reached again: the read raises StoreUnavailable."""
    with opened(LocalStore(tmp_path / "node0"), is_reset=True) as (line, there):
        line.cuts_left = 1
        line.close()
        with pytest.raises(StoreUnavailable):
            there.read(0, DATA_BYTES)
