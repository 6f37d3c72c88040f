"""The body of one HTTP request, read piece by piece with a bound on everything."""

import math
import re
import socket
import time
from email.message import Message
from http.client import LineTooLong
from io import BufferedIOBase, BufferedReader
from typing import cast

from replicated_ckpt.errors import PeerProtocolError

HEAD_WITHIN_S = 10.0  # a client that sends a byte a minute would keep its thread for days
DOCUMENT_WITHIN_S = 30.0
DOCUMENT_BYTES_PER_S = 1 << 20
_CHUNK_LINE_MAX = 64  # chunk extensions are legal and unused: long ones would only cost memory
_CHUNK_BYTES_MAX = 1 << 30  # no sender of ours makes larger ones
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(;.*)?", re.DOTALL)


class Head:
    """The lines before the body, bounded in bytes, and in time by HEAD_WITHIN_S after the first byte."""

    def __init__(self, stream: BufferedIOBase, connection: socket.socket, limit_bytes: int) -> None:
        self.stream = stream
        self._connection = connection
        self._left = limit_bytes
        self._deadline = math.inf
        self._is_first = True

    def readline(self, limit: int) -> bytes:
        """The next line.

        Raises:
            LineTooLong: there are too many bytes; http.server answers with 431. TimeoutError: they came too slowly.
        """
        line = bytearray()
        while len(line) < limit and not line.endswith(b"\n"):
            if self._deadline < math.inf:
                # The time that is left for the whole head: a new time-out for each byte would never end.
                self._connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
            buffered = cast(BufferedReader, self.stream).peek(1)  # one receive at most
            if not buffered:
                break
            self._deadline = min(self._deadline, time.monotonic() + HEAD_WITHIN_S)
            line += self.stream.read(min(limit - len(line), buffered.find(b"\n") + 1 or len(buffered)))
        is_first, self._is_first = self._is_first, False
        self._left -= len(line)
        if self._left < 0 and not is_first:  # http.server itself bounds the first one
            raise LineTooLong("header")
        return bytes(line)


class Body:
    """Reads a request's body, sized or chunked. One thread.

    Raises:
        PeerProtocolError: the framing is wrong. ConnectionResetError: the body ended in the middle. TimeoutError: it
            came too slowly.
    """

    def __init__(self, stream: BufferedIOBase, headers: Message) -> None:
        self._stream = stream
        encodings, lengths = headers.get_all("Transfer-Encoding", []), headers.get_all("Content-Length", [])
        # Two lengths are how requests are smuggled: a proxy may believe the other one (RFC 9112, 6.3).
        if len(encodings) + len(lengths) > 1 or any(encoding.lower() != "chunked" for encoding in encodings):
            raise PeerProtocolError(
                f"Transfer-Encoding {encodings} with Content-Length {lengths} is not allowed."[:300]
            )
        length = lengths[0] if lengths else None
        self._chunked = bool(encodings)
        self._left = 0 if self._chunked else _parse_length(length)
        self.size_bytes = None if self._chunked else self._left
        """The announced size; None for a chunked body."""
        self.done = not self._chunked and self._left == 0
        self._first_chunk = True
        self._deadline = math.inf

    def end_within(self, seconds: float) -> None:
        """Sets a deadline for all further reads. Otherwise single bytes, sent slowly, would keep the body open forever."""
        self._deadline = time.monotonic() + seconds

    def readinto(self, target: memoryview) -> int:
        """Fills `target` with the next bytes; returns how many, fewer than its size only at the end of the body."""
        filled = 0
        while filled < len(target) and not self.done:
            if self._chunked and self._left == 0:
                self._next_chunk()
                continue
            # One receive at a time, so that the deadline below is checked in between.
            count = self._stream.readinto1(target[filled : filled + self._left])
            if time.monotonic() > self._deadline:
                raise TimeoutError("the request's body arrived too slowly")
            if not count:
                raise ConnectionResetError("the request's body ended in the middle")
            filled += count
            self._left -= count
            self.done = not self._chunked and self._left == 0
        return filled

    def read_all(self, limit_bytes: int) -> bytes:
        """The whole body, within the limit in bytes and at DOCUMENT_BYTES_PER_S or faster. Raises the errors of
        the class."""
        self.end_within(DOCUMENT_WITHIN_S + limit_bytes / DOCUMENT_BYTES_PER_S)
        collected = bytearray()
        piece = memoryview(bytearray(1 << 16))
        while not self.done:
            collected += piece[: self.readinto(piece)]
            # Checked while the body arrives: a chunked one announces no size.
            if len(collected) > limit_bytes:
                raise PeerProtocolError(f"The request's body is larger than {limit_bytes} bytes.")
        return bytes(collected)

    def _next_chunk(self) -> None:
        if not self._first_chunk and self._line() != b"":
            raise PeerProtocolError("A chunk does not end in the right place.")
        self._first_chunk = False
        line = self._line()
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None:
            raise PeerProtocolError(f"{line[:20]!r} is not a chunk size.")
        self._left = int(size[1], 16)
        if self._left > _CHUNK_BYTES_MAX:
            raise PeerProtocolError(f"A chunk of {self._left} bytes is not allowed.")
        if self._left == 0:
            if self._line() != b"":
                raise PeerProtocolError("Trailers are not allowed.")
            self.done = True

    def _line(self) -> bytes:
        line = self._stream.readline(_CHUNK_LINE_MAX)
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("the request's body ended in the middle")
        return line[:-2]


def _parse_length(length: str | None) -> int:
    if length is None:
        return 0
    # int() also takes signs, "1_0" and other scripts' digits; a proxy in between reads them otherwise.
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise PeerProtocolError(f"Content-Length {length[:20]!r} is not a size.")
    return int(length)
