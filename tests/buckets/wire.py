"""HTTP/1.1 messages as they pass: heads that keep every byte they came with, bodies as a stream of blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader

BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True)
class Head:
    """First line and header lines, unchanged and in order, each without its line end."""

    lines: tuple[bytes, ...]

    @property
    def first(self) -> list[str]:
        """The three words of the first line: method, target, version of a request; version, status, reason of an answer."""
        return [*self.lines[0].decode("latin-1").split(" ", 2), "", ""][:3]

    def value(self, name: str) -> str:
        """The header's value in lower case; empty if it is absent."""
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
        """Says that a body of `size_bytes` follows as it is, whatever it said before."""
        bare = self.without("Content-Length", "Transfer-Encoding")
        return Head((*bare.lines, f"Content-Length: {size_bytes}".encode()))

    def encode(self) -> bytes:
        return b"\r\n".join(self.lines) + b"\r\n\r\n"

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.value("Transfer-Encoding")

    @property
    def ends_connection(self) -> bool:
        """The sender closes after this message."""
        return self.value("Connection") == "close" or self.lines[0].startswith(b"HTTP/1.0")


def read_head(source: BufferedReader) -> Head | None:
    """The next head; None if the connection ended before one was complete."""
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
            raise ConnectionError(f"the sender left with {left} of {size_bytes} bytes unsent")
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
        raise ConnectionError("the sender left within a chunked body")
    while source.readline().strip():
        pass  # trailers of the transfer; those of S3 stand inside the body


def blocks(source: BufferedReader, head: Head, *, to_the_end: bool = False) -> Iterator[bytes]:
    """The payload that follows `head`, free of chunk framing.

    With `to_the_end` a message that states no length lasts until its sender closes; otherwise it has no body.

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
    """The block as it goes over the wire under `head`; an empty block ends a chunked body."""
    return b"%x\r\n%b\r\n" % (len(block), block) if head.is_chunked else block


def until(body: Iterator[bytes], size_bytes: int) -> Iterator[bytes]:
    """The first `size_bytes` of the body; asks for no more than that."""
    left = size_bytes
    while left and (block := next(body, b"")):
        yield block[:left]
        left -= len(block[:left])


def flipped(body: bytes, at: int) -> bytes:
    """The body with one bit of byte `at` turned; as it is where it has no such byte."""
    return body[:at] + bytes(byte ^ 0x10 for byte in body[at : at + 1]) + body[at + 1 :]
