"""Receiving one shard: from the socket to a file, hashed on the way, kept only if whole and intact."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.agent.requests.body import Body
from replicated_ckpt.agent.saves.intake import Take
from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, Bytes, crc32c, decode_footer, footer_bytes_of
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.files.direct import page_aligned
from replicated_ckpt.stores.files.durable import fsync_directory, hash_open_file, translate_errors
from replicated_ckpt.stores.files.plain import closing_fd, open_plain
from replicated_ckpt.stores.local.directories.footer import crc_of_footer
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles

log = logging.getLogger(__name__)

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

    A shard that is staged there already, intact, stays, and is what is returned: the same may be brought again, and no
    other. `recycled`: the pool of its store.

    Raises:
        PeerProtocolError: it is more than `take` lets through.
        ObjectCorrupt: the bytes do not match the footer that came with them.
        StoreFull, StoreError, SaveAborted: the disk refused. ConnectionResetError, TimeoutError: the sender stopped.
    """
    with FileSink.create(path, direct_io, recycled) as sink:
        size, crc = _write(sink, body, take)
        _check_against_footer(path, sink, size, crc)
        staged = _find_staged(path, durable=durable)  # another one gets this name meanwhile only by taking the part
        if staged is not None:
            sink.discard()
            if staged != Received(size, crc):
                log.warning("%s is staged and stays: a peer has brought other bytes", path)
            return staged
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


def _find_staged(path: Path, *, durable: bool) -> Received | None:
    """The shard that has the name already, durable if asked for. None: there is none, or a damaged one.

    It is read in full, which is rare: other bytes can be made to have the same checksum, so they do not take its place.
    """
    with translate_errors(os.fspath(path.parent), "look at", path.name):
        try:
            fd = open_plain(path, os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with closing_fd(fd):
            found = Received(*hash_open_file(fd))
            if crc_of_footer(fd) != found.crc32c:
                return None
            if durable:
                os.fsync(fd)
                fsync_directory(path.parent)
            return found
