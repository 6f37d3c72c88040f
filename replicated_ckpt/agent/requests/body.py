"""The body of one HTTP request, read piece by piece with a bound on everything."""

import re
from email.message import Message
from http.client import LineTooLong
from io import BufferedIOBase

from replicated_ckpt.errors import PeerProtocolError

_CHUNK_LINE_MAX = 64
_CHUNK_BYTES_MAX = 1 << 30
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(;.*)?", re.DOTALL)


class Head:
    """The lines before the body, so many bytes of them in all."""

    def __init__(self, stream: BufferedIOBase, limit_bytes: int) -> None:
        self._stream = stream
        self._left = limit_bytes

    def readline(self, limit: int = -1) -> bytes:
        """The next line.

        Raises:
            LineTooLong: there are too many bytes; http.server answers with 431.
        """
        line = self._stream.readline(limit)
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("header")
        return line


class Body:
    """Reads a request's body, sized or chunked. One thread.

    Raises:
        PeerProtocolError: its framing is wrong. ConnectionResetError: it ended in the middle.
    """

    def __init__(self, stream: BufferedIOBase, headers: Message) -> None:
        self._stream = stream
        encodings, lengths = headers.get_all("Transfer-Encoding", []), headers.get_all("Content-Length", [])
        if len(encodings) + len(lengths) > 1 or any(encoding.lower() != "chunked" for encoding in encodings):
            raise PeerProtocolError(
                f"Transfer-Encoding {encodings} with Content-Length {lengths} is not allowed."[:300]
            )
        length = lengths[0] if lengths else None
        self._chunked = bool(encodings)
        self._left = 0 if self._chunked else _parse_length(length)
        self.size_bytes = None if self._chunked else self._left
        """As it was said beforehand."""
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
        line = self._line()
        size = _CHUNK_SIZE.fullmatch(line)
        if size is None:
            raise PeerProtocolError(f"{line[:20]!r} is no chunk size.")
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
    if not length.isascii() or not length.isdigit() or len(length) > 18:
        raise PeerProtocolError(f"Content-Length {length[:20]!r} is no size.")
    return int(length)
