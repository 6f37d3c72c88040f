"""One request and its answer on their way through the proxy, with the injected faults."""

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from io import BufferedReader
from typing import NoReturn, Protocol

from tests.buckets.faults import Armed, Fault, Request
from tests.buckets.wire import Head, blocks, flipped, framed, read_head, until

IDLE_S = 300  # more than any test waits for one byte


class Broken(Exception):
    """Ends the exchange, and closes the client's connection."""


class Faults(Protocol):
    """The part of the proxy that an exchange uses."""

    def note(self, request: Request) -> Armed | None: ...

    def upstream(self) -> AbstractContextManager[tuple[socket.socket, BufferedReader]]: ...

    def pass_when_here(self) -> None: ...


class Exchange:
    """Begins with the head of a request. On Broken, OSError or ValueError the caller resets the client's connection."""

    def __init__(self, faulty: Faults, client: socket.socket, head: Head) -> None:
        self._faults, self._client, self._head = faulty, client, head
        self._request = Request.of(*head.first[:2])
        self._armed = faulty.note(self._request)
        self._fault = self._armed.fault if self._armed else None
        self._kind = self._fault.kind if self._fault else "none"

    def run(self, incoming: BufferedReader) -> bool:
        """Passes the request and its answer. Returns whether the client may send another request."""
        breaks = self._kind in {"reset", "hang"}
        if breaks and not self._at(0):
            self._break()  # the server gets nothing
        if "100-continue" in self._head.value("Expect"):
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._fault and self._kind == "status":
            self._refuse(self._fault, incoming)
            return not self._head.ends_connection
        with self._faults.upstream() as (server, answers):
            self._pass_request(incoming, server, cut_at=self._at(0) if breaks else None)
            if breaks:
                self._break()
            return self._pass_answer(answers) and not self._head.ends_connection

    def _at(self, default: int) -> int:
        return default if self._fault is None or self._fault.at is None else self._fault.at

    def _break(self) -> NoReturn:
        if self._armed and self._kind == "hang":
            self._armed.over.wait(IDLE_S)
        raise Broken

    def _refuse(self, fault: Fault, incoming: BufferedReader) -> None:
        """Reads the whole request, and answers in place of the server."""
        for _ in blocks(incoming, self._head):
            pass
        body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>A fault.</Message></Error>".encode()
        answer = Head((f"HTTP/1.1 {fault.status} {fault.code}".encode(), b"Content-Type: application/xml"))
        head = answer.with_length(len(body)).encode()
        self._client.sendall(head if self._request.method == "HEAD" else head + body)

    def _pass_request(self, incoming: BufferedReader, server: socket.socket, *, cut_at: int | None) -> None:
        head = self._head.without("Expect")
        body = self._at_speed(blocks(incoming, head))
        if cut_at is not None:
            body = until(body, cut_at)
        elif self._kind == "flip_request":
            whole = b"".join(body)
            body = iter((flipped(whole, self._at(len(whole) // 2)),) if whole else ())
        server.sendall(head.encode())
        is_listening = True
        for block in body:
            if is_listening:
                try:
                    server.sendall(framed(block, head))
                except OSError:  # the server answered early and closed, or died: the answer shows which
                    is_listening = False
            self._request.bytes_up += len(block)
        if is_listening and cut_at is None:
            server.sendall(framed(b"", head))

    def _pass_answer(self, answers: BufferedReader) -> bool:
        """Returns whether the connection can be used for another request."""
        head = read_head(answers)
        while head is not None and head.first[1] == "100":
            head = read_head(answers)
        if head is None:
            raise Broken
        self._request.status = int(head.first[1])
        is_bare = self._request.method == "HEAD" or self._request.status in {204, 304}
        body = iter(()) if is_bare else blocks(answers, head, to_the_end=True)
        if self._kind in {"lost_answer", "flip_answer", "short_answer", "cut_answer"}:
            head, body = self._bent(head, b"".join(body))
        self._client.sendall(head.encode())
        for block in self._at_speed(body):
            self._request.bytes_down += len(block)  # counted before the client gets them
            self._client.sendall(framed(block, head))
        if not is_bare:
            self._client.sendall(framed(b"", head))
        is_whole = is_bare or head.is_chunked or head.value("Content-Length") == str(self._request.bytes_down)
        return is_whole and not head.ends_connection

    def _bent(self, head: Head, body: bytes) -> tuple[Head, Iterator[bytes]]:
        """The answer after the fault was applied."""
        at = self._at(len(body) // 2)
        if self._kind == "lost_answer":
            raise Broken
        if not body:
            return head, iter(())
        if self._kind == "flip_answer":
            return head.with_length(len(body)), iter((flipped(body, at),))
        kept = body[:at]
        return head.with_length(len(kept if self._kind == "short_answer" else body)), iter((kept,))

    def _at_speed(self, body: Iterator[bytes]) -> Iterator[bytes]:
        """Yields the blocks at the speed of the link. Breaks the exchange when the server is away."""
        for block in body:
            for piece in self._armed.paced(block) if self._armed else (block,):
                self._faults.pass_when_here()
                yield piece
