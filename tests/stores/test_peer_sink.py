"""Copies to a slow, hanging or corrupting peer are aborted like copies to an unreachable one."""

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
    """A sink to a peer on this host, which runs `behave` on its one connection. `ended` is set at the end."""
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


def receives_slowly(connection: socket.socket, ended: threading.Event) -> None:
    """Receives 64 KiB every 0.1 s: steady progress below the floor."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    while connection.recv(1 << 16):
        ended.wait(0.1)


def sends_heartbeats_only(connection: socket.socket, ended: threading.Event) -> None:
    """Receives everything, then only sends heartbeats."""
    while b"0\r\n\r\n" not in connection.recv(1 << 16):
        pass
    while not ended.wait(0.1):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def receives_other_bytes(connection: socket.socket, _: threading.Event) -> None:
    """Receives everything, and answers with another size and checksum."""
    while b"0\r\n\r\n" not in connection.recv(1 << 16):
        pass
    answer = b'{"size_bytes": 4, "crc32c": 7}'
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))


def send(sink: PeerSink, times: int) -> None:
    for _ in range(times):
        sink.write(PIECE)


def test_a_copy_to_a_slow_peer_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer with progress below the floor delays the save by `SLOW_WINDOW_S`, then the copy is aborted."""
    monkeypatch.setattr(peer, "SLOW_WINDOW_S", 1.0)
    with listening(receives_slowly) as sink, pytest.raises(StoreUnavailable, match="too slow"):
        send(sink, 100)


def test_a_copy_to_a_peer_with_a_hanging_disk_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats without an acknowledgement end in StoreUnavailable after `ACK_TIMEOUT_S`."""
    monkeypatch.setattr(agent_client, "ACK_TIMEOUT_S", 1.0)
    with listening(sends_heartbeats_only) as sink:
        sink.write(memoryview(b"data"))
        with pytest.raises(StoreUnavailable):
            sink.finish(table_of([b"data"]))


def test_bytes_that_changed_in_transit_are_reported_with_both_checksums() -> None:
    """The error has the sent and the received size and checksum, and the next step."""
    with listening(receives_other_bytes) as sink:
        sink.write(memoryview(b"data"))
        with pytest.raises(ObjectCorrupt, match=r"received 4 bytes of CRC32C 00000007\. Hint: The save sends it again"):
            sink.finish(table_of([b"data"]))
