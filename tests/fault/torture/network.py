"""The simulated network: what AgentClient sends goes straight to the other node's routes, unless a fault is in the way."""

import io
import json
import os
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import Any, Protocol, Self

from replicated_ckpt.agent.body import Body
from replicated_ckpt.agent.file_answer import FileAnswer
from replicated_ckpt.agent.heartbeat import Heartbeat
from replicated_ckpt.agent.request import Answer, Request
from replicated_ckpt.agent.rights import Right, Tokens
from replicated_ckpt.agent.routes import Routes
from replicated_ckpt.agent.server import status_of
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.agent_client import AgentAddress


class Killed(Exception):
    """The simulated process that runs now was killed: nothing that it still does has any effect."""


@dataclass
class Actor:
    """A simulated process: a rank or an agent of a node."""

    node: int
    is_agent: bool
    is_dead: bool = False


class Served(Protocol):
    """A node as the network sees it."""

    index: int
    agent: Actor | None
    tokens: Tokens
    port: int
    routes: Routes


class NoHeartbeat(Heartbeat):
    """Nobody waits in a simulation."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Network:
    """Who runs now, who can reach whom, and what happens to a process that is killed while it answers."""

    def __init__(self) -> None:
        self.nodes: list[Served] = []
        self.cut: set[int] = set()
        self.actor = Actor(-1, is_agent=False)
        self.requests = 0
        self.after_kill: Callable[[], None] = lambda: None

    @contextmanager
    def acting(self, actor: Actor) -> Iterator[None]:
        previous, self.actor = self.actor, actor
        try:
            yield
        finally:
            self.actor = previous

    def connection(self, address: AgentAddress, timeout_s: float) -> "SimulatedConnection":
        """Stands in for `agent_client.opened_connection`."""
        del timeout_s
        return SimulatedConnection(self, address)

    def answered(self, address: AgentAddress, method: str, target: str, headers: Message, body: bytes) -> "Response":
        """What the other side answers, or the error that a socket would raise."""
        self.requests += 1
        caller = self.actor
        if caller.is_dead:
            raise ConnectionAbortedError("the caller is dead")
        node = next((node for node in self.nodes if node.port == address.port), None)
        if node is not None and node.index != caller.node and {node.index, caller.node} & self.cut:
            raise TimeoutError("cut off")
        if node is None or node.agent is None or node.agent.is_dead:
            raise ConnectionRefusedError("no agent listens")
        right = node.tokens.right_of(address.token)
        if right is None:
            return Response(401, b'{"error": "no valid token"}')
        agent = node.agent
        with self.acting(agent):
            try:
                response = _served(node.routes, method, target, headers, body, right, f"host{caller.node}")
            except Killed:
                self.after_kill()
                raise ConnectionResetError("the agent was killed") from None
        if caller.is_dead:
            raise ConnectionAbortedError("the caller is dead")
        return response


def _served(
    routes: Routes, method: str, target: str, headers: Message, body: bytes, right: Right, peer_host: str
) -> "Response":
    request = Request(method, target, Body(io.BytesIO(body), headers), headers, NoHeartbeat(), right, peer_host)
    try:
        answer = routes.answer(request)
    except ReplicatedCkptError as exc:
        return Response(status_of(exc), json.dumps({"error": exc.message, "kind": type(exc).__name__}).encode())
    raw = _file_bytes(answer) if isinstance(answer, FileAnswer) else answer.body
    status = 206 if isinstance(answer, FileAnswer) and answer.is_partial else int(answer.status)
    _run_after(answer)
    return Response(status, raw)


def _file_bytes(answer: FileAnswer) -> bytes:
    try:
        return os.pread(answer.fd, answer.length, answer.offset)
    finally:
        os.close(answer.fd)


def _run_after(answer: Answer) -> None:
    answer.after()


class Response:
    """The part of http.client.HTTPResponse that is used."""

    def __init__(self, status: int, raw: bytes) -> None:
        self.status = status
        self.chunked = False
        self._size = len(raw)
        self._stream = io.BytesIO(raw)

    @property
    def length(self) -> int:
        """Bytes that are still to be read."""
        return self._size - self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size)

    def readinto(self, target: memoryview) -> int:
        return self._stream.readinto(target)

    def getheader(self, name: str, default: str | None = None) -> str | None:
        return str(self._size) if name.lower() == "content-length" else default


class SimulatedConnection:
    """The part of http.client.HTTPConnection that AgentClient and Upload use."""

    sock = None

    def __init__(self, network: Network, address: AgentAddress) -> None:
        self._network = network
        self._address = address
        self._request: tuple[str, str, Message] | None = None
        self._body = bytearray()

    def connect(self) -> None:
        """There is nothing to connect."""

    def close(self) -> None:
        self._request = None

    def request(self, method: str, url: str, body: Any = None, headers: Any = None) -> None:
        self.putrequest(method, url)
        raw = body or b""
        for name, value in {**(headers or {}), "Content-Length": str(len(raw))}.items():
            self.putheader(name, value)
        self._body += raw

    def putrequest(self, method: str, url: str, **_: Any) -> None:
        self._request = (method, url, Message())
        self._body.clear()

    def putheader(self, name: str, value: str) -> None:
        if self._request is not None:
            self._request[2][name] = value

    def endheaders(self) -> None:
        """The request goes off when its answer is asked for."""

    def send(self, piece: bytes | memoryview) -> None:
        if self._network.actor.is_dead:
            raise ConnectionAbortedError("the caller is dead")
        self._body += piece

    def getresponse(self) -> Response:
        if self._request is None:
            raise ConnectionError("nothing was asked")
        method, url, headers = self._request
        self._request = None
        urllib.parse.urlsplit(url)
        return self._network.answered(self._address, method, url, headers, bytes(self._body))
