"""A proxy in front of an S3 server that makes the weather: it loses, delays, breaks and bends what tests tell it to.

Clients sign for the proxy's address. Host and every other signed header pass unchanged, so the server accepts that.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

from tests.buckets.faults import Fault, Forecast, Request
from tests.buckets.servers import Server
from tests.buckets.wire import Head, blocks, flipped, framed, read_head, until

__all__ = ["Fault", "Weather", "weather"]

IDLE_S = 300  # no test waits longer for one byte


class _Broken(Exception):
    """The exchange ends here and takes the connections with it."""


class Weather(Forecast):
    """Fair until told otherwise: `add(Fault(...))`, `clear()`; `away()`, `back()`. Serves any number of connections."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._upstream = urlsplit(server.endpoint_url)
        self._reserved = _bound(0)  # never listens; keeps the port while the server is away
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
        """Bytes of PUT bodies that went towards the server for keys that contain `key`, retries included."""
        return sum(request.bytes_up for request in self.requests("PUT", key=key))

    def downloaded_bytes(self, key: str = "") -> int:
        """Bytes of GET answers that went to clients for keys that contain `key`, retries included."""
        return sum(request.bytes_down for request in self.requests("GET", key=key))

    def away(self, how: Literal["refuse", "hang"] = "refuse") -> None:
        """The server leaves: connections break and new ones are refused, or nothing answers any more."""
        self._here.clear()
        if how == "refuse":
            self._stop_listening()
            self._break_all()

    def back(self) -> None:
        """The server is there again. What hung meanwhile breaks."""
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
        """One client's connection, until it ends; by a reset where that is the weather."""
        with self._tracked(client) as incoming:
            try:
                while (head := read_head(incoming)) is not None:
                    self.pass_when_here()
                    if not _Exchange(self, client, head).run(incoming):
                        return
            except (OSError, ValueError, _Broken):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @contextmanager
    def upstream(self) -> Iterator[tuple[socket.socket, BufferedReader]]:
        """A fresh connection to the server for one request; at its end the server sees all that was sent, then EOF."""
        address = (self._upstream.hostname, self._upstream.port)
        with socket.create_connection(address, timeout=IDLE_S) as sock, self._tracked(sock) as answers:
            yield sock, answers

    @contextmanager
    def _tracked(self, sock: socket.socket) -> Iterator[BufferedReader]:
        """The socket to read from; away() and close() know it and can break it."""
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
        """Returns at once when the server is there; otherwise waits for it and breaks the exchange."""
        if not self._here.is_set():
            self._here.wait(IDLE_S)
            raise _Broken


class _Exchange:
    """One request and its answer on their way. _Broken, OSError or ValueError: the client's connection shall break."""

    def __init__(self, sky: Weather, client: socket.socket, head: Head) -> None:
        self._sky, self._client, self._head = sky, client, head
        self._request = Request.of(*head.first[:2])
        self._armed = sky.note(self._request)
        self._fault = self._armed.fault if self._armed else None
        self._kind = self._fault.kind if self._fault else "none"

    def run(self, incoming: BufferedReader) -> bool:
        """Whether the client may send another request."""
        breaks = self._kind in {"reset", "hang"}
        if breaks and not self._at(0):
            self._break()  # the server sees nothing of it
        if "100-continue" in self._head.value("Expect"):
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._fault and self._kind == "status":
            self._refuse(self._fault, incoming)
            return not self._head.ends_connection
        with self._sky.upstream() as (server, answers):
            self._pass_request(incoming, server, cut_at=self._at(0) if breaks else None)
            if breaks:
                self._break()
            return self._pass_answer(answers) and not self._head.ends_connection

    def _at(self, default: int) -> int:
        return default if self._fault is None or self._fault.at is None else self._fault.at

    def _break(self) -> NoReturn:
        if self._armed and self._kind == "hang":
            self._armed.over.wait(IDLE_S)
        raise _Broken

    def _refuse(self, fault: Fault, incoming: BufferedReader) -> None:
        """Takes the whole request and answers it in the server's place."""
        for _ in blocks(incoming, self._head):
            pass
        body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>Bad weather.</Message></Error>".encode()
        answer = Head((f"HTTP/1.1 {fault.status} {fault.code}".encode(), b"Content-Type: application/xml"))
        head = answer.with_length(len(body)).encoded()
        self._client.sendall(head if self._request.method == "HEAD" else head + body)

    def _pass_request(self, incoming: BufferedReader, server: socket.socket, *, cut_at: int | None) -> None:
        head = self._head.without("Expect")
        body = self._at_speed(blocks(incoming, head))
        if cut_at is not None:
            body = until(body, cut_at)
        elif self._kind == "flip_request":
            whole = b"".join(body)
            body = iter((flipped(whole, self._at(len(whole) // 2)),))
        server.sendall(head.encoded())
        is_listening = True
        for block in body:
            if is_listening:
                try:
                    server.sendall(framed(block, head))
                except OSError:  # it answered early and closed, or it died: its answer, or none, tells
                    is_listening = False
            self._request.bytes_up += len(block)
        if is_listening and cut_at is None:
            server.sendall(framed(b"", head))

    def _pass_answer(self, answers: BufferedReader) -> bool:
        """Whether the connection is still good for another."""
        head = read_head(answers)
        while head is not None and head.first[1] == "100":
            head = read_head(answers)
        if head is None:
            raise _Broken
        self._request.status = int(head.first[1])
        is_bare = self._request.method == "HEAD" or self._request.status in {204, 304}
        body = iter(()) if is_bare else blocks(answers, head, to_the_end=True)
        if self._kind in {"lost_answer", "flip_answer", "short_answer", "cut_answer"}:
            head, body = self._bent(head, b"".join(body))
        self._client.sendall(head.encoded())
        for block in self._at_speed(body):
            self._request.bytes_down += len(block)  # before the client can know that it has them
            self._client.sendall(framed(block, head))
        if not is_bare:
            self._client.sendall(framed(b"", head))
        is_whole = is_bare or head.is_chunked or head.value("Content-Length") == str(self._request.bytes_down)
        return is_whole and not head.ends_connection

    def _bent(self, head: Head, body: bytes) -> tuple[Head, Iterator[bytes]]:
        """The answer as the weather leaves it."""
        at = self._at(len(body) // 2)
        if self._kind == "lost_answer":
            raise _Broken
        if not body:
            return head, iter(())
        if self._kind == "flip_answer":
            return head.with_length(len(body)), iter((flipped(body, at),))
        length = at if self._kind == "short_answer" else len(body)
        return head.with_length(length), iter((body[:at],))

    def _at_speed(self, body: Iterator[bytes]) -> Iterator[bytes]:
        """The blocks, each when the server is there and the link has room for it."""
        for block in body:
            for piece in self._armed.paced(block) if self._armed else (block,):
                self._sky.pass_when_here()
                yield piece


@contextmanager
def weather(server: Server) -> Iterator[Weather]:
    """A proxy in front of `server` for the length of the block."""
    sky = Weather(server)
    try:
        yield sky
    finally:
        sky.close()


def _bound(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the one that reserves and the one that listens
    sock.bind(("127.0.0.1", port))
    return sock
