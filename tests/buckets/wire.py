"""HTTP/1.1 messages in transit: heads that keep every byte, and bodies as a stream of blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Head:
    """The first line and the header lines, unchanged and in order, each without its line end."""

    lines: tuple[bytes, ...]

    @property
    def first(self) -> list[str]:
        """The three words of the first line: method, target and version of a request; version, status and reason of an
        answer.
        """
        return [*self.lines[0].decode("latin-1").split(" ", 2), "", ""][:3]

    def value(self, name: str) -> str:
        """The header's value in lower case. Empty if the header is absent."""
        wanted = name.lower()
        for line in self.lines[1:]:
            found, _, value = line.decode("latin-1").partition(":")
            if found.lower() == wanted:
                return value.strip().lower()
        return ""

    def without(self, *names: str) -> "Head":
        unwanted = tuple(f"{name.lower()}:" for name in names)
        kept = (line for line in self.lines[1:] if not line.decode("latin-1").lower().startswith(unwanted))
        return Head((self.lines[0], *kept))

    def with_length(self, size_bytes: int) -> "Head":
        """A head for a body of `size_bytes` without chunks, in place of any earlier length."""
        bare = self.without("Content-Length", "Transfer-Encoding")
        return Head((*bare.lines, f"Content-Length: {size_bytes}".encode()))

    def encode(self) -> bytes:
        return b"\r\n".join(self.lines) + b"\r\n\r\n"

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.value("Transfer-Encoding")

    @property
    def ends_connection(self) -> bool:
        """Whether the sender closes the connection after this message."""
        return self.value("Connection") == "close" or self.lines[0].startswith(b"HTTP/1.0")


def read_head(source: BufferedReader) -> Head | None:
    """The next head. None if the connection ends before it is complete."""
    lines: list[bytes] = []
    while line := source.readline(65536):
        if not line.endswith(b"\n"):
            return None
        line = line.rstrip(b"\r\n")
        if line:
            lines.append(line)
        elif lines:
            return Head(tuple(lines))
    return None


def _exactly(source: BufferedReader, size_bytes: int) -> Iterator[bytes]:
    left = size_bytes
    while left:
        block = source.read1(min(left, BLOCK_BYTES))
        if not block:
            raise ConnectionError(f"the sender closed with {left} of {size_bytes} bytes unsent")
        left -= len(block)
        yield block


def _chunks(source: BufferedReader) -> Iterator[bytes]:
    while line := source.readline():
        size_bytes = int(line.partition(b";")[0], 16)
        if not size_bytes:
            break
        yield from _exactly(source, size_bytes)
        source.readline()
    else:
        raise ConnectionError("the sender closed within a chunked body")
    while source.readline().strip():
        pass  # trailers of the transfer coding; S3's own trailers are inside the body


def blocks(source: BufferedReader, head: Head, *, to_the_end: bool = False) -> Iterator[bytes]:
    """The payload that follows `head`, without chunk framing.

    With `to_the_end`, a message without a length lasts until its sender closes. Otherwise such a message has no body.

    Raises: ConnectionError when the sender leaves early.
    """
    if head.is_chunked:
        yield from _chunks(source)
    elif length := head.value("Content-Length"):
        yield from _exactly(source, int(length))
    elif to_the_end:
        while block := source.read1(BLOCK_BYTES):
            yield block


def framed(block: bytes, head: Head) -> bytes:
    """The block in the framing that `head` requires. An empty block ends a chunked body."""
    return b"%x\r\n%b\r\n" % (len(block), block) if head.is_chunked else block


def until(body: Iterator[bytes], size_bytes: int) -> Iterator[bytes]:
    """The first `size_bytes` of the body. Reads no more blocks than that needs."""
    left = size_bytes
    while left and (block := next(body, b"")):
        yield block[:left]
        left -= len(block[:left])


def flipped(body: bytes, at: int) -> bytes:
    """The body with one bit of byte `at` flipped. Unchanged if there is no such byte."""
    return body[:at] + bytes(byte ^ 0x10 for byte in body[at : at + 1]) + body[at + 1 :]
