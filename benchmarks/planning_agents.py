"""Fake agents: one process that answers every request after 10 ms, and a port that never answers."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from benchmarks.planning_world import address
from replicated_ckpt.dcp.agreement.nodes import AgentCluster
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.local.directories.intent import Intent

ANSWER_AFTER_S = 0.01
_ANSWER = b'{"histories": {}, "replaces": false, "held": [], "state": "staged"}\n'
_SERVER = f"""
import asyncio
async def serve(reader, writer):
    while True:
        try:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            sizes = [line.split(b":")[1] for line in head.split(b"\\r\\n") if line.lower().startswith(b"content-length:")]
            left = int(sizes[0]) if sizes else 0
            while left:
                left -= len(await reader.read(min(left, 1 << 20)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return writer.close()
        await asyncio.sleep({ANSWER_AFTER_S})
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: {len(_ANSWER)}\\r\\n\\r\\n" + {_ANSWER!r})
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextlib.contextmanager
def answering_agents() -> Iterator[int]:
    """The port of all agents that answer."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def hanging_agents() -> Iterator[int]:
    """A port that accepts connections and never answers, like a stopped process."""
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as server:
        yield server.getsockname()[1]


def published(nodes: int, hung: int, metadata_bytes: int) -> tuple[float, float, float]:
    """Opens and publishes a save. Returns the seconds for each, and the MB that the coordinator sent."""
    with answering_agents() as port, hanging_agents() as silent:
        addresses = [address(f"{at:012x}", silent if 0 < at <= hung else port) for at in range(nodes)]
        cluster = AgentCluster(addresses, addresses[0].node_id)
        with _counted() as sent:
            began = time.perf_counter()
            opened = cluster.begin(Intent("0" * 32, "run/step-1000", "session", overwrite=False))
            opened_at = time.perf_counter()
            cluster.commit("0" * 32, bytes(metadata_bytes), b"{}")
            ended = time.perf_counter()
        if len(opened.error_by_node) != hung:
            raise ReplicatedCkptError(f"{len(opened.error_by_node)} of {nodes} nodes were not reached, not {hung}.")
        return opened_at - began, ended - opened_at, sum(sent) / 1e6


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """The sizes of all data that any thread of this process sends during the block."""
    sent: list[int] = []
    lock, original = threading.Lock(), socket.socket.sendall

    def sendall(self: socket.socket, data: bytes, *flags: int) -> None:
        with lock:
            sent.append(len(data))
        original(self, data, *flags)

    socket.socket.sendall = sendall  # type: ignore[method-assign, assignment]
    try:
        yield sent
    finally:
        socket.socket.sendall = original  # type: ignore[method-assign]
