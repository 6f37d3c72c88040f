"""Receiving one shard: from the socket to a file, hashed on the way, kept only if whole and intact."""

import os
from dataclasses import dataclass
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.agent.requests.body import Body
from replicated_ckpt.agent.saves.intake import Take
from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, Bytes, crc32c, decode_footer, footer_bytes_of
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.files.direct import page_aligned
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

_PIECE_BYTES = 1 << 20
_DIRECT_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Received:
    """What arrived: size in bytes and CRC32C of the whole file."""

    size_bytes: int
    crc32c: int

    @classmethod
    def of(cls, raw: Bytes) -> "Received":
        return cls(len(raw), crc32c(raw))


def receive_file(
    path: Path, body: Body, take: Take, *, durable: bool, direct_io: str, recycled: RecycledFiles | None = None
) -> Received:
    """Writes the body to `path`. Afterwards the file is whole, intact and, if asked for, durable; or it is not there.

    `recycled`: the pool of its store.

    Raises:
        PeerProtocolError: it is more than `take` lets through.
        ObjectCorrupt: the bytes do not match the footer that came with them.
        StoreFull, StoreError, SaveAborted: the disk refused. ConnectionResetError, TimeoutError: the sender stopped.
    """
    with FileSink.create(path, direct_io, recycled) as sink:
        size, crc = _write(sink, body, take)
        _check_against_footer(path, sink, size, crc)
        if durable:
            sink.sync()
        sink.publish()
    return Received(size, crc)


def receive_plain_file(path: Path, body: Body, take: Take, recycled: RecycledFiles | None = None) -> Received:
    """As `receive_file`, for a file without a footer: its user holds it against the manifest. Durable afterwards."""
    with FileSink.create(path, recycled=recycled) as sink:
        size, crc = _write(sink, body, take)
        sink.finish_durably()
    return Received(size, crc)


def _write(sink: FileSink, body: Body, take: Take) -> tuple[int, int]:
    piece = page_aligned(_DIRECT_PIECE_BYTES) if sink.is_direct else memoryview(bytearray(_PIECE_BYTES))
    size = crc = 0
    while not body.done:
        count = body.readinto(piece)
        take(count)
        sink.write(piece[:count])
        failpoints.reach("agent.receiving")
        crc = crc32c(piece[:count], crc)
        size += count
    return size, crc


def _check_against_footer(path: Path, sink: FileSink, size: int, crc: int) -> None:
    with translate_errors(str(path.parent), "read back", path.name):
        tail = sink.read_back(min(FOOTER_TAIL_BYTES, size))
        table = decode_footer(sink.read_back(footer_bytes_of(tail, size) or 0), size)
    if table is None or table.file_crc() != crc:
        expected = "a footer" if table is None else f"CRC32C {table.file_crc():08x}"
        raise ObjectCorrupt(os.fspath(path.parent), "receive", path.name, f"expected {expected}, received {crc:08x}")
