"""Starts real agents for tests, and ends them."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from replicated_ckpt.agent.http.object_routes import ObjectRoutes
from replicated_ckpt.agent.http.routes import Routes
from replicated_ckpt.agent.http.server import AgentServer
from replicated_ckpt.agent.repair.reprotect import Reprotector
from replicated_ckpt.agent.state.endpoint import Endpoint, read_endpoint
from replicated_ckpt.agent.state.rights import Tokens
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.node.uploads.uploader import Uploader
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.throttle import Pace
from tests.harness.forked import Forked
from tests.harness.processes import is_running, stop_process
from tests.harness.zygote import the_light_zygote

T = TypeVar("T")
HOME = Path(__file__).resolve().parents[2]
START_S = 60.0
ANSWER_S = 30.0
"""An agent answers within this time even on a machine that stalls for seconds."""


@dataclass
class RunningAgent:
    """An agent process of this test."""

    root: Path
    process: Forked
    endpoint: Endpoint

    def client(self, timeout_s: float = ANSWER_S) -> AgentClient:
        """A client with the owner token, which may call every verb."""
        return AgentClient(self.endpoint.local_address(), timeout_s)

    def peer(self, timeout_s: float = ANSWER_S) -> AgentClient:
        """A client with the peer token, as another node has."""
        return AgentClient(self.endpoint.address(), timeout_s)

    def signal(self, number: int) -> None:
        """Sends a signal. For SIGSTOP, returns once the process is stopped."""
        if number == signal.SIGSTOP:
            stop_process(self.process.pid)
        else:
            os.kill(self.process.pid, number)


def object_routes(service: NodeService, stopping: threading.Event) -> ObjectRoutes:
    """The verbs of the object tier, with an uploader that does not run."""
    targets = UploadBook(service.store.agent_directory())
    uploader = Uploader(service, targets, Pace(1e12, stopping), SilenceTimeouts(), stopping, lambda *_: None)
    return ObjectRoutes(service, uploader)


@contextmanager
def opened_server(store: LocalStore) -> Iterator[AgentAddress]:
    """Serves a store over HTTP in this process. Yields the address with the owner token."""
    service, stopping, owner = NodeService(store), threading.Event(), "b" * 32
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e9, stopping), stopping)
    routes = Routes(service, reprotector, object_routes(service, stopping), lambda **_: {}, lambda: None)
    server = AgentServer(("127.0.0.1", 0), Tokens("c" * 32, owner), routes)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield AgentAddress(store.node_id(), "127.0.0.1", int(server.server_address[1]), owner)
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def running_agent(root: Path, *arguments: str) -> Iterator[RunningAgent]:
    command = [sys.executable, "-m", "replicated_ckpt.agent"]
    arguments = ("--root", str(root), *arguments)
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    root.mkdir(parents=True, exist_ok=True)
    with (root / "agent.out").open("ab") as log:
        forker = the_light_zygote().path
        process = Forked(forker, "agent", arguments, command=command, environment=environment, output=log.fileno())
    try:
        endpoint = wait_for(lambda: _endpoint(root, process), START_S, f"agent of {root}")
        yield RunningAgent(root, process, endpoint)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(10)


def _endpoint(root: Path, process: Forked) -> Endpoint | None:
    assert process.poll() is None, (root / "agent.out").read_text()
    endpoint = read_endpoint(root / ".agent")
    return endpoint if endpoint is not None and endpoint.pid == process.pid else None


def exchanged(port: int, raw: bytes) -> bytes:
    """Sends raw bytes to a port and returns all bytes of the answer, until the server closes the connection.

    The server may close before it has read all bytes.

    Raises:
        TimeoutError: the server neither reads, answers nor closes.
    """
    answer = b""
    with socket.create_connection(("127.0.0.1", port), ANSWER_S) as connection:
        with _closed_early():
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
        with _closed_early():
            while piece := connection.recv(1 << 16):
                answer += piece
    return answer


@contextmanager
def _closed_early() -> Iterator[None]:
    """Ignores the errors of a connection that the server has closed, but not a timeout."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        return


def wait_for(look: Callable[[], T | None], timeout_s: float, what: str) -> T:
    """Calls `look` until it returns something true, and returns that. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout_s} s")


def peers_of(*agents: RunningAgent) -> list[dict[str, object]]:
    document: list[dict[str, object]] = json.loads(json.dumps([agent.endpoint.address().to_json() for agent in agents]))
    return document


def stop_agent(root: Path) -> None:
    """Ends the agent of a root, if one runs."""
    endpoint = read_endpoint(root / ".agent") if (root / ".agent").is_dir() else None
    if endpoint is not None:
        with AgentClient(endpoint.local_address()) as client:
            client.call("POST", "/v1/shutdown")
        wait_for(lambda: not is_running(endpoint.pid), START_S, "the end of the agent")
