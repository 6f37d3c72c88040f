"""A proxy in front of an S3 server that injects faults: it loses, delays, cuts and corrupts requests and answers.

Clients sign requests for the proxy's address. The proxy passes Host and every other signed header unchanged, so the
server accepts the signature.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.buckets.exchange import IDLE_S, Broken, Exchange
from tests.buckets.faults import Fault, FaultPlan
from tests.buckets.servers import Server
from tests.buckets.wire import read_head

__all__ = ["Fault", "FaultyBucket", "faulty_bucket"]


class FaultyBucket(FaultPlan):
    """Passes requests unchanged, except for injected faults: `add(Fault(...))`, `clear()`, `away()`, `back()`. Any
    number of connections.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._upstream = urlsplit(server.endpoint_url)
        self._reserved = _bound(0)  # never listens; reserves the port while the server is away
        self._port: int = self._reserved.getsockname()[1]
        self.endpoint_url = f"http://127.0.0.1:{self._port}"
        self.server = server.at(self.endpoint_url)
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        self._here = threading.Event()
        self._listener: socket.socket | None = None
        self.back()

    def storage_options(self) -> dict[str, Any]:
        return self.server.storage_options()

    def uploaded_bytes(self, key: str = "") -> int:
        """Bytes of PUT bodies sent to the server for keys that contain `key`, retries included."""
        return sum(request.bytes_up for request in self.requests("PUT", key=key))

    def downloaded_bytes(self, key: str = "") -> int:
        """Bytes of GET answers sent to clients for keys that contain `key`, retries included."""
        return sum(request.bytes_down for request in self.requests("GET", key=key))

    def away(self, how: Literal["refuse", "hang"] = "refuse") -> None:
        """Makes the server unavailable. "refuse": connections break and new ones are refused; "hang": no request is
        answered.
        """
        self._here.clear()
        if how == "refuse":
            self._stop_listening()
            self._break_all()

    def back(self) -> None:
        """Makes the server available again. Requests that hung meanwhile break."""
        if self._listener is None:
            self._listener = _bound(self._port)
            self._listener.listen(256)
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        self._here.set()

    def close(self) -> None:
        self._stop_listening()
        self.clear()
        self._here.set()
        self._break_all()
        self._reserved.close()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()

    def _break_all(self) -> None:
        with self._open_lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads or writes there

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Serves one client's connection until it ends. A fault ends it with a reset."""
        with self._tracked(client) as incoming:
            try:
                while (head := read_head(incoming)) is not None:
                    self.pass_when_here()
                    if not Exchange(self, client, head).run(incoming):
                        return
            except (OSError, ValueError, Broken):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @contextmanager
    def upstream(self) -> Iterator[tuple[socket.socket, BufferedReader]]:
        """A new connection to the server for one request. On exit, the server gets all bytes that were sent, and then
        EOF.
        """
        address = (self._upstream.hostname, self._upstream.port)
        with socket.create_connection(address, timeout=IDLE_S) as sock, self._tracked(sock) as answers:
            yield sock, answers

    @contextmanager
    def _tracked(self, sock: socket.socket) -> Iterator[BufferedReader]:
        """The socket as a stream to read from. `away` and `close` can break it."""
        sock.settimeout(IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._open_lock:
            self._open.add(sock)
        try:
            with sock, sock.makefile("rb") as source:
                yield source
        finally:
            with self._open_lock:
                self._open.discard(sock)

    def pass_when_here(self) -> None:
        """Returns at once while the server is available. Otherwise waits for it, and breaks the exchange."""
        if not self._here.is_set():
            self._here.wait(IDLE_S)
            raise Broken


@contextmanager
def faulty_bucket(server: Server) -> Iterator[FaultyBucket]:
    """A proxy in front of `server` for the duration of the block."""
    faulty = FaultyBucket(server)
    try:
        yield faulty
    finally:
        faulty.close()


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for the socket that reserves and the one that listens
    sock.bind(("127.0.0.1", port))
    return sock
