"""The simulated network: requests of AgentClient go directly to the other node's routes, unless a fault prevents it."""

import contextlib
import io
import json
import os
import urllib.parse
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import Any, Protocol, Self

from replicated_ckpt.agent.http.request import Answer, FileAnswer, Heartbeat, Request
from replicated_ckpt.agent.http.routes import Routes
from replicated_ckpt.agent.http.server import status_of
from replicated_ckpt.agent.state.rights import Right, Tokens
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.fault.torture.simulated.operations import Operations


class Killed(Exception):
    """The running process was killed. Nothing that it still does has any effect."""


@dataclass(eq=False)
class Actor:
    """A simulated process: a rank or an agent of a node."""

    node: int
    is_agent: bool
    is_dead: bool = False
    undo: Callable[[], None] | None = None
    """What it still did to its disk after it was killed, while it was unwound, is undone by this."""
    release: Callable[[], None] = lambda: None
    """Gives back the locks that it holds, as the kernel does when it is killed."""


class Served(Protocol):
    """A node as the network sees it."""

    index: int
    agent: Actor | None
    tokens: Tokens
    port: int
    routes: Routes


class NoHeartbeat(Heartbeat):
    """A heartbeat that never fails, as nobody waits in a simulation."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Network:
    """The running process, which nodes reach each other, and the fate of a process that is killed while it answers.

    Nodes on the same side of a partition reach each other. `cut`: all nodes that are not on the majority side.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.nodes: list[Served] = []
        self.side_of: dict[int, int] = {}
        self.requests: Counter[str] = Counter()

    @property
    def actor(self) -> Actor:
        """The simulated process that runs now."""
        return self._operations.running.actors[-1]

    @property
    def cut(self) -> set[int]:
        """The nodes that are not on the majority side."""
        return {node for node, side in self.side_of.items() if side}

    @cut.setter
    def cut(self, nodes: Collection[int]) -> None:
        """These nodes reach neither the others nor each other."""
        self.side_of = {node: node + 1 for node in nodes}

    def split(self, nodes: Collection[int]) -> None:
        """Separates these nodes from all others. They still reach each other."""
        self.side_of = dict.fromkeys(nodes, 1)

    def is_reached(self, node: int, by: int) -> bool:
        return node == by or self.side_of.get(node, 0) == self.side_of.get(by, 0)

    @contextmanager
    def acting(self, actor: Actor) -> Iterator[None]:
        """The block runs as this process. If the process was killed meanwhile, its disk stays as it was at that moment."""
        actors = self._operations.running.actors
        actors.append(actor)
        try:
            yield
        finally:
            actors.pop()
            if actor.undo is not None and actor not in actors:
                undo, actor.undo = actor.undo, None
                undo()

    def connection(self, address: AgentAddress, timeout_s: float) -> "SimulatedConnection":
        """Replaces `agent_client.open_connection`."""
        del timeout_s
        return SimulatedConnection(self, address)

    def answered(self, address: AgentAddress, method: str, target: str, headers: Message, body: bytes) -> "Response":
        """The response of the other node, or the error that a socket would raise."""
        caller = self.actor
        if caller.is_dead:
            raise ConnectionAbortedError("the caller is dead")
        node = next((node for node in self.nodes if node.port == address.port), None)
        if node is not None and not self.is_reached(node.index, caller.node):
            raise TimeoutError("cut off")
        if node is None or node.agent is None or node.agent.is_dead:
            raise ConnectionRefusedError("no agent listens")
        with self.acting(node.agent):  # This node's clock decides whether an invitation has expired.
            right = node.tokens.right_of(address.token)
        if right is None:
            return Response(401, b'{"error": "no valid token"}')
        self.requests[method + " " + target.partition("?")[0].rpartition("/")[2]] += 1
        try:
            with self.acting(node.agent):
                response = _served(node.routes, method, target, headers, body, right, f"host{caller.node}")
                is_killed = self.actor.is_dead
        except Killed:
            raise ConnectionResetError("the agent was killed") from None
        if is_killed:
            raise ConnectionResetError("the agent was killed")
        if caller.is_dead:
            raise ConnectionAbortedError("the caller is dead")
        if not self.is_reached(node.index, caller.node):
            raise TimeoutError("cut off")
        return response


def _served(
    routes: Routes, method: str, target: str, headers: Message, body: bytes, right: Right, peer_host: str
) -> "Response":
    content = Body(io.BytesIO(body), headers)
    heartbeat = NoHeartbeat(io.BytesIO(), content)
    request = Request(method, target, content, headers, heartbeat, right, peer_host)
    try:
        answer = routes.answer(request)
    except ReplicatedCkptError as exc:
        return Response(status_of(exc), json.dumps({"error": exc.message, "kind": type(exc).__name__}).encode())
    except OSError as exc:
        raise ConnectionResetError("the agent closed the connection") from exc
    raw = _file_bytes(answer) if isinstance(answer, FileAnswer) else answer.body
    status = 206 if isinstance(answer, FileAnswer) and answer.is_partial else 200
    _run_after(answer)
    return Response(status, raw)


def _file_bytes(answer: FileAnswer) -> bytes:
    try:
        return os.pread(answer.fd, answer.length, answer.offset)
    finally:
        os.close(answer.fd)


def _run_after(answer: Answer) -> None:
    with contextlib.suppress(OSError):  # The response was sent. The error is logged.
        if answer.after is not None:
            answer.after()


class Response:
    """The part of http.client.HTTPResponse that is used."""

    def __init__(self, status: int, raw: bytes) -> None:
        self.status = status
        self.chunked = False
        self._size = len(raw)
        self.fp = self._stream = io.BytesIO(raw)

    @property
    def length(self) -> int:
        """Bytes that are still unread."""
        return self._size - self._stream.tell()

    def read(self, size: int = -1) -> bytes:
        return self._stream.read(size)

    def close(self) -> None:
        """Does nothing: the connection stays open."""

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
        """Does nothing."""

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
        """Does nothing: `getresponse` sends the request."""

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
