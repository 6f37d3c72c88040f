"""Receives one shard from a socket into a file: hashed on the way, and kept only if complete and intact."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, Bytes, crc32c, decode_footer, footer_bytes_of
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.errors import ObjectCorrupt, PeerProtocolError
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.stores.files.direct import page_aligned
from replicated_ckpt.stores.files.durable import fsync_directory, hash_open_file, translate_errors
from replicated_ckpt.stores.files.existence import closing_fd, open_plain
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.directories.looked import crc_of_footer
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.peer.client import FILE_BYTES_MAX

log = logging.getLogger(__name__)

Take = Callable[[int], None]
"""Called with the number of bytes before they are written; raises if they are too many."""
_KEPT = 64
_HINT = "Nothing of this file was kept. Save objects that are too large for a shard as tensors."


class _Taken:
    """The received bytes of one save, by complete shard and by shard in progress. Guarded by the lock of `Intake`."""

    def __init__(self) -> None:
        self.whole: dict[str, int] = {}
        self.coming: dict[object, tuple[str, int]] = {}

    def total(self) -> int:
        """All bytes. A shard that is received again counts once, by its new bytes."""
        again = {name for name, _ in self.coming.values()}
        whole = sum(size for name, size in self.whole.items() if name not in again)
        return whole + sum(size for _, size in self.coming.values())


class Intake:
    """Counts received bytes by save and shard. Safe for concurrent use. An agent that starts counts from zero."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._taken_by_save: dict[str, _Taken] = {}

    @contextmanager
    def taking(self, intent: Intent, name: str, size_bytes: int | None) -> Iterator[Take]:
        """Counts one shard of a save while it is received. `size_bytes`: its size, if announced.

        Raises, as the yielded function does:
            PeerProtocolError: the shard, or the save with it, is larger than announced.
        """
        taken = self._of(intent.save_id)
        this, count = object(), 0

        def take(more: int) -> None:
            nonlocal count
            count += more
            with self._lock:
                taken.coming[this] = name, count
                # In one step with the count: two shards at once could pass the bound of the save together.
                total = taken.total()
            _check(intent, name, count, total)

        try:
            # The announced size is checked first: a file that is too large is refused before it fills the disk.
            take(size_bytes or 0)
            count = 0
            yield take
        except BaseException:
            with self._lock:
                taken.coming.pop(this, None)
            raise
        with self._lock:
            taken.coming.pop(this, None)
            taken.whole[name] = count

    def _of(self, save_id: str) -> _Taken:
        with self._lock:
            if len(self._taken_by_save) >= _KEPT:
                # Only saves that have ended: a fresh count would let an open save take its bytes twice.
                over = [known for known in self._taken_by_save if not self._store.is_staged(known)]
                for known in over:
                    del self._taken_by_save[known]
            return self._taken_by_save.setdefault(save_id, _Taken())


@contextmanager
def taking_metadata(intent: Intent, size_bytes: int | None) -> Iterator[Take]:
    """As `Intake.taking`, for `.metadata`, which is bounded by FILE_BYTES_MAX."""
    count = 0

    def take(more: int) -> None:
        nonlocal count
        count += more
        if count > FILE_BYTES_MAX:
            raise _too_much(intent, f"{METADATA_NAME} has more than {FILE_BYTES_MAX} bytes, the limit")

    take(size_bytes or 0)
    count = 0
    yield take


def _check(intent: Intent, name: str, count: int, total: int) -> None:
    shard, save = intent.announced.shard_bytes_max, intent.announced.save_bytes_max
    if shard and count > shard:
        raise _too_much(intent, f"{name} has more than {shard} bytes, the largest shard that its save announced")
    if save and total > save:
        raise _too_much(intent, f"with {name} it has more than {save} bytes, the total that it announced")


def _too_much(intent: Intent, what: str) -> PeerProtocolError:
    return PeerProtocolError(f"Save {intent.save_id} of {intent.checkpoint_id!r}: {what}.", _HINT)


_PIECE_BYTES = 1 << 20
_DIRECT_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Received:
    """A received file: its size in bytes and its CRC32C."""

    size_bytes: int
    crc32c: int

    @classmethod
    def of(cls, raw: Bytes) -> "Received":
        return cls(len(raw), crc32c(raw))


def receive_file(
    path: Path, body: Body, take: Take, *, durable: bool, direct_io: str, recycled: RecycledFiles | None = None
) -> Received:
    """Writes the body to `path`. Afterwards the file is complete, intact and, if `durable`, fsynced; or it does not exist.

    If an intact shard is staged at `path` already, that shard stays, and this returns its size and checksum. `recycled` is
    the pool of the store.

    Raises:
        PeerProtocolError: the body has more bytes than `take` allows.
        ObjectCorrupt: the bytes do not match the footer at their end.
        StoreFull, StoreError: the disk refused. SaveAborted: the save was aborted, or another process writes the shard.
        ConnectionResetError, TimeoutError: the sender stopped.
    """
    with FileSink.create(path, direct_io, recycled) as sink:
        size, crc = _write(sink, body, take)
        # Before the file gets its name: bytes that changed on the way must not count as a copy.
        _check_against_footer(path, sink, size, crc)
        staged = _find_staged(path, durable=durable)  # no other thread can publish now: each needs the `.part` file
        if staged is not None:
            sink.discard()
            if staged != Received(size, crc):
                log.warning("%s is staged and unchanged: a peer has sent different bytes", path)
            return staged
        if durable:
            sink.sync()
        sink.publish()
    return Received(size, crc)


def receive_plain_file(path: Path, body: Body, take: Take, recycled: RecycledFiles | None = None) -> Received:
    """As `receive_file`, for a file without a footer, which the caller checks against the manifest. Durable afterwards."""
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
    """The intact shard that is staged under the name, fsynced if `durable`. None: no file has the name, or it is damaged.

    The file is read in full, which is rare. New bytes never replace an intact shard: other bytes can be made with the same
    checksum.
    """
    with translate_errors(os.fspath(path.parent), "look at", path.name):
        try:
            fd = open_plain(path, os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        with closing_fd(fd):
            found = Received(*hash_open_file(fd))
            # A damaged file may be overwritten: the sender's bytes are intact.
            if crc_of_footer(fd) != found.crc32c:
                return None
            # An earlier request may have written it with ack="peer-memory", which fsyncs nothing.
            if durable:
                os.fsync(fd)
                fsync_directory(path.parent)
            return found
