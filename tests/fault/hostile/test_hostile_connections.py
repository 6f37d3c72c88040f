"""Expensive connections: TLS handshakes that stall or resume, and peers that redirect a request."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.errors import PeerProtocolError, StoreDenied, StoreUnavailable
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.reach import is_time_out
from tests.agent.agents import RunningAgent, running_agent
from tests.fault.hostile.test_hostile_peers import fake_agent, reply_with
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """An agent that accepts only TLS."""
    with running_agent(tmp_path_factory.mktemp("tls") / "a", "--host", "0.0.0.0") as running:
        assert running.endpoint.tls_sha256
        yield running


def hello() -> bytes:
    """The first message of a client in a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="agent").do_handshake()
    return outgoing.read()


def seconds_open(connection: socket.socket, *, trickle: bytes) -> float:
    """How long the agent keeps a connection on which the bytes of `trickle` arrive one by one."""
    began, rest = time.monotonic(), iter(trickle)
    connection.settimeout(0.5)
    while time.monotonic() - began < 60:
        try:
            if not connection.recv(1 << 16):
                break
        except TimeoutError:
            with contextlib.suppress(StopIteration, OSError):
                connection.sendall(bytes([next(rest)]))
        except OSError:
            break
    return time.monotonic() - began


def test_a_stalled_handshake_ends_and_blocks_nobody(agent: RunningAgent, stopwatch: Stopwatch) -> None:
    """Many handshakes are incomplete, or arrive byte by byte: the agent answers others meanwhile, and closes these
    after one time-out.
    """
    first, address = hello(), ("127.0.0.1", agent.endpoint.port)
    with contextlib.ExitStack() as held:
        stalled = [held.enter_context(socket.create_connection(address, 10)) for _ in range(50)]
        for connection in stalled:
            connection.sendall(first[:100])
        began = stopwatch.now()
        with agent.client(20) as client:
            client.call("GET", "/v1/status?brief=1")
        assert stopwatch.now() - began < 20
        assert seconds_open(stalled[0], trickle=first[100:]) < 30


def test_no_tls_session_can_be_resumed(agent: RunningAgent) -> None:
    """The agent refuses TLS 1.2, which allows session resumption and renegotiation. A TLS 1.3 client gets no session
    ticket.
    """
    address = ("127.0.0.1", agent.endpoint.port)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(address, 10)) as connection:
        connection.sendall(b"GET /v1/status?brief=1 HTTP/1.1\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")
        assert connection.version() == "TLSv1.3"
        assert connection.session is None or not connection.session.has_ticket
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection(address, 10) as connection,
        pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"),
    ):
        context.wrap_socket(connection)


@contextmanager
def slow_handshake_peer(pieces: Callable[[], Iterator[bytes]]) -> Iterator[AgentAddress]:
    """A peer that answers a handshake with `pieces`, one each half second."""
    stopping = threading.Event()

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    for piece in pieces():
                        connection.sendall(piece)
                        if stopping.wait(0.5):
                            return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield AgentAddress("liar", "127.0.0.1", listener.getsockname()[1], "token", tls_sha256="0" * 64)
        finally:
            stopping.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@pytest.mark.parametrize("first", [b"", b"\x16\x03\x03\x3f\xff\x02"])
def test_a_peer_that_stalls_in_the_handshake_costs_one_time_out(first: bytes, stopwatch: Stopwatch) -> None:
    """The peer is silent, or sends a long message byte by byte: the client times out as with any silent peer."""

    def pieces() -> Iterator[bytes]:
        yield first
        while True:
            yield b"\0" if first else b""

    with slow_handshake_peer(pieces) as address, AgentClient(address, 2) as client:
        began = stopwatch.now()
        with pytest.raises(StoreUnavailable):
            client.call("GET", "/v1/status?brief=1")
        assert stopwatch.now() - began < 10


def test_a_peer_that_works_too_long_does_not_count_as_unreachable() -> None:
    """The peer sends heartbeats: the error names the deadline, and gives no advice about a broken connection."""

    def works(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                time.sleep(0.2)

    with fake_agent(works) as peer, AgentClient(peer, 5) as client:
        with pytest.raises(StoreUnavailable, match="has not ended within 1 s") as raised, client.within(1):
            client.call("GET", "/v1/status")
        assert is_time_out(raised.value)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_client_follows_no_redirect(status: int) -> None:
    """The client treats a redirect as an invalid answer: it sends neither token nor shard to the other address, and
    reads nothing from there.
    """
    asked: list[bytes] = []

    def elsewhere(connection: socket.socket) -> None:
        asked.append(b"a connection")
        reply_with("200 OK\r\nContent-Length: 2", b"{}")(connection)

    with fake_agent(elsewhere) as other:
        head = f"{status} Elsewhere\r\nLocation: http://127.0.0.1:{other.port}/v1/status\r\nContent-Length: 0"
        with fake_agent(reply_with(head)) as liar:
            with AgentClient(liar, 2) as client, pytest.raises(PeerProtocolError, match=str(status)):
                client.call("GET", "/v1/status")
            with AgentClient(liar, 2) as client, pytest.raises(PeerProtocolError, match=str(status)):
                client.read_range("/v1/files/y", 0, memoryview(bytearray(10)))
            with AgentClient(replace(liar, incarnation=2), 2) as client, pytest.raises(PeerProtocolError):
                client.start_upload("/v1/saves/x/y", {}).finish_upload()
    assert asked == []


def test_an_agent_follows_no_redirect_when_it_calls_back(tmp_path: Path) -> None:
    """An agent that checks a node's new address connects to that address only."""
    asked: list[bytes] = []

    def elsewhere(connection: socket.socket) -> None:
        asked.append(b"somebody came")

    with fake_agent(elsewhere) as other, running_agent(tmp_path / "a") as running:
        head = f"307 Elsewhere\r\nLocation: http://127.0.0.1:{other.port}/v1/status\r\nContent-Length: 0"
        with fake_agent(reply_with(head)) as liar:
            known = replace(liar, node_id="b" * 12, incarnation=1)
            with running.client() as owner:
                owner.call("POST", "/v1/peers", {"peers": [known.to_json()], "session": "s"})
            with running.peer(20) as client, pytest.raises(StoreDenied):
                client.call("POST", "/v1/hello", {"peer": replace(known, incarnation=9).to_json()})
    assert asked == []
