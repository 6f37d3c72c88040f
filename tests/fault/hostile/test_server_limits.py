"""Clients without a token cannot block clients that have one, nor use up memory or disk. No request continues beyond
its stated length.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from email.message import Message
from functools import partial
from pathlib import Path

import pytest

from replicated_ckpt.agent.http.connections import Connections
from replicated_ckpt.agent.http.server import CONNECTIONS_MAX, HEAD_BYTES_MAX
from replicated_ckpt.agent.state.rights import Right
from replicated_ckpt.node.saves import request_body
from tests.agent.agents import RunningAgent, exchanged, running_agent

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
GROWTH_MAX_KIB = 150 << 10
HEADERS = 99
ABORT, DOCUMENT = "POST /v1/saves/" + "8" * 32 + "/abort", b'{"why":"test"}'
"""A request with a body of 14 bytes."""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    with running_agent(tmp_path_factory.mktemp("door") / "a") as running:
        yield running


def connected(agent: RunningAgent) -> socket.socket:
    return socket.create_connection(("127.0.0.1", agent.endpoint.port), 10)


def request(agent: RunningAgent, line: str, *heads: str, body: bytes = b"", token: str | None = None) -> bytes:
    lines = [
        f"{line} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {token or agent.endpoint.owner_token}",
        *heads,
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1") + body


def assert_well(agent: RunningAgent) -> None:
    with agent.client() as client:
        assert client.call("GET", "/v1/status")["pid"] == agent.process.pid


def peak_kib(agent: RunningAgent) -> int:
    status = Path(f"/proc/{agent.process.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def test_waiting_connections_block_nobody(agent: RunningAgent) -> None:
    """More connections than the limit are silent or in the middle of a request: a client with a token is answered at
    once.
    """
    with contextlib.ExitStack() as held:
        for number in range(CONNECTIONS_MAX + 60):
            connection = held.enter_context(connected(agent))
            connection.sendall(b"GET /v1/sta" if number % 2 else b"")
        for _ in range(5):
            assert_well(agent)


def test_a_known_connection_outlasts_unknown_ones(agent: RunningAgent) -> None:
    """A peer's idle connection stays open while there are connections that have shown no token."""
    with agent.client() as client, contextlib.ExitStack() as held:
        client.call("GET", "/v1/status")
        known = client._connection.sock
        for _ in range(CONNECTIONS_MAX + 60):
            held.enter_context(connected(agent))
        client.call("GET", "/v1/status")
        assert client._connection.sock is known


def test_a_connection_with_a_request_in_progress_is_never_closed() -> None:
    """While every connection has a request in progress, no further one is admitted. If one is idle, it is closed for
    the new one.
    """
    connections = Connections(2, owner_reserve=0)
    pairs = [socket.socketpair() for _ in range(3)]
    assert connections.admit("a", pairs[0][0])
    assert connections.admit("b", pairs[1][0])
    assert connections.note_working("a", Right.PEER)
    assert connections.note_working("b", Right.OWNER)
    assert not connections.admit("c", pairs[2][0])
    assert connections.has_requests()
    connections.note_answered("a")
    assert connections.has_requests()
    assert connections.admit("c", pairs[2][0])
    assert pairs[0][1].recv(1) == b""
    pairs[1][0].send(b"x")
    assert pairs[1][1].recv(1) == b"x"
    connections.note_answered("b")
    assert not connections.has_requests()
    for one, other in pairs:
        one.close()
        other.close()


def test_slow_requests_of_a_peer_block_no_other_client(agent: RunningAgent) -> None:
    """One address sends more slow requests than the limit: the node's own user and other nodes are answered."""
    head = request(agent, "POST /v1/suspects", "Content-Length: 100000", token=agent.endpoint.token)
    with contextlib.ExitStack() as held:
        trickling = [held.enter_context(connected(agent)) for _ in range(CONNECTIONS_MAX + 30)]
        for piece in (head, *[b" "] * 9):
            for connection in trickling:
                with contextlib.suppress(OSError):  # connections beyond the address's share are refused
                    connection.sendall(piece)
            assert_well(agent)
            time.sleep(0.3)
        other = socket.create_connection(("127.0.0.1", agent.endpoint.port), 10, source_address=("127.0.0.2", 0))
        held.enter_context(other).sendall(request(agent, "GET /v1/status?brief=1", token=agent.endpoint.token))
        assert other.recv(100).startswith(b"HTTP/1.1 200 ")
    assert_well(agent)


def test_places_are_reserved_for_the_nodes_user() -> None:
    """Places stay reserved for the node's own user, from however many addresses peers connect. An answered request
    frees a place in its address's share.
    """
    connections, (stream, other) = Connections(6, owner_reserve=2, of_sender=3), socket.socketpair()
    peers = [("x", 1), ("x", 2), ("x", 3), ("x", 4), ("y", 1), ("y", 2)]
    assert all(connections.admit(peer, stream) for peer in peers)
    worked = [connections.note_working(peer, Right.JOB if peer[1] == 2 else Right.PEER) for peer in peers]
    assert worked == [True, True, True, False, True, False]
    assert connections.note_working(("y", 2), Right.OWNER)
    connections.note_answered(("x", 1))
    assert connections.note_working(("x", 4), Right.PEER)
    stream.close()
    other.close()


@contextlib.contextmanager
def dripping(raw: bytes) -> Iterator[socket.socket]:
    """A connection on which these bytes arrive one by one, over and over."""
    ours, theirs = socket.socketpair()
    ended = threading.Event()

    def drip() -> None:
        for byte in itertools.cycle(raw):
            if ended.wait(0.02):
                return
            theirs.sendall(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        yield ours
    finally:
        ended.set()
        thread.join()
        ours.close()
        theirs.close()


def test_a_slow_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte resets the read time-out, but the whole head and the whole document have deadlines, too."""
    monkeypatch.setattr(request_body, "HEAD_WITHIN_S", 0.3)
    monkeypatch.setattr(request_body, "DOCUMENT_WITHIN_S", 0.3)
    headers = Message()
    headers["Content-Length"] = "1000000"
    with dripping(b"X: y\r\n") as connection, connection.makefile("rb") as stream:
        head = request_body.Head(stream, connection, 1 << 30)
        with pytest.raises(TimeoutError):
            deque(iter(partial(head.readline, 65536), b""), maxlen=0)
    with dripping(b" ") as connection, connection.makefile("rb") as stream:
        connection.settimeout(10)
        with pytest.raises(TimeoutError, match="too slowly"):
            request_body.Body(stream, headers).read_all(1000)


def test_headers_without_a_token_take_no_memory(agent: RunningAgent) -> None:
    """Many connections send as many headers as allowed before they show a token: the process stays small."""
    head = b"GET /v1/status HTTP/1.1\r\n" + (b"X: " + b"y" * 60_000 + b"\r\n") * HEADERS
    before = peak_kib(agent)
    with contextlib.ExitStack() as held:
        for _ in range(100):
            connection = held.enter_context(connected(agent))
            connection.settimeout(0.2)
            with contextlib.suppress(OSError):
                connection.sendall(head)
        assert peak_kib(agent) - before < GROWTH_MAX_KIB
        assert_well(agent)
    too_long = b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * (HEAD_BYTES_MAX // 6 + 1) + b"\r\n"
    # Without a token the server reads nothing beyond the limit, so a reset may arrive before the answer: several attempts.
    assert any(b" 431 " in exchanged(agent.endpoint.port, too_long) for _ in range(10))


def test_requests_without_a_token_write_little_to_the_log(agent: RunningAgent) -> None:
    """A request without a valid token leaves one short line without control characters, whatever its path."""
    log = agent.root / "agent.out"
    before = log.stat().st_size
    for _ in range(10):
        exchanged(agent.endpoint.port, request(agent, "GET /\x1b[2J" + "a" * 50_000, token="wrong"))
    assert log.stat().st_size - before < 20_000
    assert "\x1b" not in log.read_text()


@pytest.mark.parametrize(
    "heads",
    [
        ["Content-Length: 14", "Content-Length: 16"],
        ["Content-Length: 14", "Content-Length: 14"],
        ["Content-Length: 14, 14"],
        ["Content-Length: +14"],
        ["Content-Length: 14", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", "Transfer-Encoding: gzip"],
        ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked, chunked"],
        ["Transfer-Encoding: \x0bchunked"],
    ],
)
def test_a_body_of_ambiguous_length_is_refused(agent: RunningAgent, heads: list[str]) -> None:
    """An ambiguous body is not read, and the bytes after it are not taken for a second request."""
    second = request(agent, "GET /v1/status")
    body = DOCUMENT if "Length" in heads[0] else b"e\r\n" + DOCUMENT + b"\r\n0\r\n\r\n"
    answer = exchanged(agent.endpoint.port, request(agent, ABORT, *heads, body=body + second))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_chunk_is_read(agent: RunningAgent) -> None:
    """A valid chunk is accepted. So the next test's requests are refused only for the sizes of their chunks."""
    body = b"00e;x=y\r\n" + DOCUMENT + b"\r\n0\r\n\r\n"
    raw = request(agent, ABORT, "Transfer-Encoding: chunked", body=body)
    assert exchanged(agent.endpoint.port, raw).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("size", [b"0xe", b"+e", b"0_e", b"-e", b" e", b"", b"fffffffffffffff", b"100000000", b"e e"])
def test_an_invalid_chunk_is_refused(agent: RunningAgent, size: bytes) -> None:
    """A chunk's size consists of hexadecimal digits, and has a maximum."""
    raw = request(agent, ABORT, "Transfer-Encoding: chunked", body=size + b"\r\n" + DOCUMENT + b"\r\n0\r\n\r\n")
    assert exchanged(agent.endpoint.port, raw).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("line", ["GET /v1/status", "POST /v1/saves/" + "9" * 32 + "/commit", "GET /v1/nothing"])
def test_an_unread_body_is_not_a_request(agent: RunningAgent, line: str) -> None:
    """A request inside the body of another one is not answered."""
    inner = request(agent, "GET /v1/holdings")
    answer = exchanged(agent.endpoint.port, request(agent, line, f"Content-Length: {len(inner)}", body=inner))
    assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("target", ["//[", "/v1/holdings?" + "a=1&" * 1000, "http://[x/v1/status"])
def test_an_invalid_target_is_refused(agent: RunningAgent, target: str) -> None:
    """The server answers with an error instead of closing the connection."""
    assert exchanged(agent.endpoint.port, request(agent, f"GET {target}"))[9:12] in (b"400", b"404")
