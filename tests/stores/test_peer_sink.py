"""A copy that is sent to a peer: one that takes it too slowly, or never ends, is aborted like one that is gone."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from replicated_ckpt.errors import ObjectCorrupt, StoreUnavailable
from replicated_ckpt.stores.peer import client as agent_client
from replicated_ckpt.stores.peer import copy as peer
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.stores.peer.copy import PeerSink
from replicated_ckpt.testing.shards import table_of

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]
PIECE = memoryview(bytes(1 << 20))


@contextmanager
def listening(behave: Callable[[socket.socket, threading.Event], None]) -> Iterator[PeerSink]:
    """A sink to a peer on this host that does with its one connection what it likes, until it is told the end."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                behave(connection, ended)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = AgentAddress("slow", "127.0.0.1", server.getsockname()[1], "token")
        sink = PeerSink(address, "1" * 32, "__0_0.distcp", durable=True)
        try:
            yield sink
        finally:
            sink.discard()
            ended.set()
            thread.join(10)
    assert not thread.is_alive()


def dawdles(connection: socket.socket, ended: threading.Event) -> None:
    """Takes 64 KiB every tenth of a second: there is always progress, and never enough."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    while connection.recv(1 << 16):
        ended.wait(0.1)


def lives_and_never_answers(connection: socket.socket, ended: threading.Event) -> None:
    """Reads everything, then says once a moment that it is at work."""
    while b"0\r\n\r\n" not in connection.recv(1 << 16):
        pass
    while not ended.wait(0.1):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def receives_other_bytes(connection: socket.socket, _: threading.Event) -> None:
    """Reads everything, and answers with the size and the checksum of something else."""
    while b"0\r\n\r\n" not in connection.recv(1 << 16):
        pass
    answer = b'{"size_bytes": 4, "crc32c": 7}'
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))


def send(sink: PeerSink, times: int) -> None:
    for _ in range(times):
        sink.write(PIECE)


def test_a_slow_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that makes progress, but below the floor, holds the save up for the window and no longer."""
    monkeypatch.setattr(peer, "SLOW_WINDOW_S", 1.0)
    with listening(dawdles) as sink, pytest.raises(StoreUnavailable, match="too slow"):
        send(sink, 100)


def test_a_peer_whose_disk_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats without end are no acknowledgement: the copy is made elsewhere."""
    monkeypatch.setattr(agent_client, "ACK_TIMEOUT_S", 1.0)
    with listening(lives_and_never_answers) as sink:
        sink.write(memoryview(b"data"))
        with pytest.raises(StoreUnavailable):
            sink.finish(table_of([b"data"]))


def test_bytes_that_changed_on_the_way_are_told_by_both_checksums() -> None:
    """The error has what was hashed here and what came, as checksums are written elsewhere, and the next step."""
    with listening(receives_other_bytes) as sink:
        sink.write(memoryview(b"data"))
        with pytest.raises(ObjectCorrupt, match=r"received 4 bytes of CRC32C 00000007\. Hint: The save sends it again"):
            sink.finish(table_of([b"data"]))
