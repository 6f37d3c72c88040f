"""The body of one HTTP request, read piece by piece with a bound on everything."""

from email.message import Message
from typing import Protocol

from replicated_ckpt.errors import PeerProtocolError

_CHUNK_LINE_MAX = 64
_CHUNK_BYTES_MAX = 1 << 30


class Readable(Protocol):
    def readline(self, limit: int, /) -> bytes: ...

    def readinto(self, target: memoryview, /) -> int | None: ...


class Body:
    """Reads a request's body, sized or chunked. One thread.

    Raises:
        PeerProtocolError: its framing is wrong. ConnectionResetError: it ended in the middle.
    """

    def __init__(self, stream: Readable, headers: Message) -> None:
        self._stream = stream
        encoding = headers.get("Transfer-Encoding", "").lower()
        length = headers.get("Content-Length")
        if encoding not in ("", "chunked") or (encoding and length is not None):
            raise PeerProtocolError(f"Transfer-Encoding {encoding!r} with Content-Length {length!r} is not allowed.")
        self._chunked = encoding == "chunked"
        self._left = 0 if self._chunked else _sized(length)
        self.done = not self._chunked and self._left == 0
        self._first_chunk = True

    def readinto(self, target: memoryview) -> int:
        """Fills `target` with the next bytes; returns how many, fewer than its size only at the end of the body."""
        filled = 0
        while filled < len(target) and not self.done:
            if self._chunked and self._left == 0:
                self._next_chunk()
                continue
            count = self._stream.readinto(target[filled : filled + self._left])
            if not count:
                raise ConnectionResetError("the request's body ended in the middle")
            filled += count
            self._left -= count
            self.done = not self._chunked and self._left == 0
        return filled

    def read_all(self, limit_bytes: int) -> bytes:
        """The whole body, if it is no larger than the limit."""
        collected = bytearray()
        piece = memoryview(bytearray(1 << 16))
        while not self.done:
            collected += piece[: self.readinto(piece)]
            if len(collected) > limit_bytes:
                raise PeerProtocolError(f"The request's body is larger than {limit_bytes} bytes.")
        return bytes(collected)

    def _next_chunk(self) -> None:
        if not self._first_chunk and self._line() != b"":
            raise PeerProtocolError("A chunk does not end where it should.")
        self._first_chunk = False
        size = self._line().partition(b";")[0].strip()
        try:
            self._left = int(size, 16)
        except ValueError as exc:
            raise PeerProtocolError(f"{size[:20]!r} is no chunk size.") from exc
        if not 0 <= self._left <= _CHUNK_BYTES_MAX:
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


def _sized(length: str | None) -> int:
    if length is None:
        return 0
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise PeerProtocolError(f"Content-Length {length[:20]!r} is no size.")
    return int(length)
