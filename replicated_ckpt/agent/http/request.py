"""One request to the agent and its answer: the values that the HTTP server and the routes exchange."""

import json
import os
import re
import select
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from io import BufferedIOBase
from typing import Any, Self

from replicated_ckpt.agent.state.rights import Right
from replicated_ckpt.errors import ObjectCorrupt, PeerProtocolError, StoreDenied, StoreUnavailable
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.stores.peer.answer import document_in
from replicated_ckpt.stores.threads import start_worker

INTERVAL_S = 1.0
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class Heartbeat:
    """Sends an interim HTTP response every second inside its `with` block, and none after it.

    It sends nothing while the request's body comes in. The peer does not wait for an answer then, and two threads must not
    read and write one TLS connection at once.

    Source: RFC 9110 section 15.2: a client reads any number of 1xx responses before the final one.
    """

    def __init__(self, stream: BufferedIOBase, body: Body) -> None:
        self._stream = stream
        self._body = body
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._ended.clear()
        self._thread = start_worker(self._beat, name="rckpt-heartbeat")
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            # The peer is still sending and reads nothing: heartbeats would fill the socket.
            if not self._body.done:
                continue
            try:
                self._stream.write(_INTERIM)
            except OSError:
                return  # the peer is gone; the final answer will meet the same error


DOCUMENT_BYTES_MAX = 4 << 20
"""A bound, because parsed JSON takes many times its size in memory. The addresses of 10,000 nodes fit."""

_HINT_BY_RIGHT = {
    Right.PEER: "The token of metrics.token reads metrics alone.",
    Right.JOB: "Only a job with a rank on each node can introduce nodes, and open and end saves.",
    Right.OWNER: "Run the command on the agent's own host, as its user: it reads the token in ROOT/.agent there.",
}


@dataclass(frozen=True)
class Request:
    """One authenticated request, from `peer_host` over `connection`. Its token gives it the `right`."""

    method: str
    target: str
    body: Body
    headers: Message
    heartbeat: Heartbeat
    right: Right
    peer_host: str = ""
    connection: socket.socket | None = None

    def require(self, right: Right) -> None:
        """Checks that the sender has this right.

        Raises:
            StoreDenied: the request's token does not show the right.
        """
        if self.right < right:
            asked = urllib.parse.urlsplit(self.target[:200]).path
            detail = f"it needs the right {right.name}, but the token has {self.right.name}"
            raise StoreDenied("this agent", self.method, asked, detail, _HINT_BY_RIGHT[right])

    def document(self) -> Mapping[str, Any]:
        """The JSON object in the body.

        Raises:
            PeerProtocolError: the body is not a JSON object, or too large.
        """
        return document_in(self.body.read_all(DOCUMENT_BYTES_MAX) or b"{}", "The request came")


@dataclass(frozen=True)
class Answer:
    """A small answer. `after` is called once the answer is sent."""

    body: bytes
    content_type: str = "application/json"
    after: Callable[[], object] | None = None


def json_answer(after: Callable[[], object] | None = None, /, **fields: Any) -> Answer:
    return Answer((json.dumps(fields) + "\n").encode(), after=after)


def require_asker(connection: socket.socket) -> None:
    """Checks that the client still waits for an answer.

    Raises:
        ConnectionAbortedError: the client has closed the connection, or its sending side, even if it sent a whole request.
    """
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    # An agent that was stopped or hung finds requests whose clients have long gone on without it.
    if poll.poll(0):
        raise ConnectionAbortedError("the client no longer waits for an answer")


CHECKS_MAX = 16
"""Bound on full reads that run or wait. Several nodes may run `verify` at the same hour."""


class Checks:
    """Full reads of this node, one at a time. Safe for concurrent use."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(CHECKS_MAX)
        self._turn = threading.Lock()

    @contextmanager
    def in_turn(self, request: Request, body_bytes_max: int = 0) -> Iterator[bytes]:
        """Runs the block with the request's body once no other check runs. Heartbeats go out meanwhile.

        Raises:
            StoreUnavailable: too many wait already, and the body was not read. PeerProtocolError: the body is too large.
        """
        # Refused before the body is read: each place in the queue holds a body and a thread.
        if not self._places.acquire(blocking=False):
            detail = f"{CHECKS_MAX} checks already run on this node, or wait there"
            raise StoreUnavailable("this node", "verify", "", detail, "Ask again when they have ended.")
        try:
            with request.heartbeat, self._turn:  # also for the body: one is in memory at a time
                yield request.body.read_all(body_bytes_max) if body_bytes_max else b""
        finally:
            self._places.release()


_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")


@dataclass(frozen=True)
class FileAnswer(Answer):
    """An answer that is a range of a file. The server closes `fd` when it has sent the answer."""

    fd: int = -1
    offset: int = 0
    length: int = 0
    size_bytes: int = 0
    is_partial: bool = False


def file_answer(request: Request, fd: int) -> FileAnswer:
    """The file, or the range of it that the request names. The answer owns `fd`. On failure `fd` is closed.

    Raises:
        ObjectCorrupt: the file ends before the range. PeerProtocolError: the header is not a range.
    """
    try:
        size = os.fstat(fd).st_size
        offset, end = _range(request.headers.get("Range"), size)
    except BaseException:
        os.close(fd)
        raise
    is_partial = request.headers.get("Range") is not None
    return FileAnswer(b"", fd=fd, offset=offset, length=end - offset, size_bytes=size, is_partial=is_partial)


def _range(header: str | None, size_bytes: int) -> tuple[int, int]:
    if header is None:
        return 0, size_bytes
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        raise PeerProtocolError(f"Range {header[:60]!r} is not supported.")
    first = int(match[1])
    end = min(int(match[2]) + 1 if match[2] else size_bytes, size_bytes)
    # The file is shorter than in its manifest. An error, because an empty answer would look like a valid range.
    if first >= end:
        raise ObjectCorrupt("this agent", "GET", f"bytes from {first} on", f"the file has {size_bytes} bytes")
    return first, end
