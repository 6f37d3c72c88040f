"""A shard as a local file: written through a sink, linked from a committed save, read by verified ranges."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.core.layout import PART_SUFFIX, STAGING_DIR, ShardName, is_checkpoint_id, is_save_id
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, SaveAborted
from replicated_ckpt.stores.files.direct import is_worthwhile, switch_direct_io, write_direct
from replicated_ckpt.stores.files.durable import (
    fsync_directory,
    is_full,
    read_exactly,
    set_mode,
    translate_errors,
    translate_read_errors,
    write_vector,
)
from replicated_ckpt.stores.files.existence import closing_fd
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.committed import open_directory
from replicated_ckpt.stores.local.directories.looked import crc_of_footer
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.verified import Expected, VerifiedShard

log = logging.getLogger(__name__)


def _part_of(path: Path) -> Path:
    """The temporary path of a shard file, before it gets its name."""
    return path.with_name(path.name + PART_SUFFIX)


class FileSink:
    """Writes one shard file into a staging directory. The file has its name only once it is complete and durable.

    `direct_io`: "auto", "on" or "off", see `replicated_ckpt.stores.files.direct`. While `is_direct` is True, single pieces
    of whole pages in page-aligned memory bypass the page cache. The first other piece ends that.
    `recycled`: the store's pool. Its file of the shard's name is overwritten, and cut to size before the fsync. On a full
    disk the pool's other files are removed. `shard`: the shard's name, if `path` has another one for now.
    `is_durable`: whether `finish` fsyncs the bytes.
    """

    def __init__(
        self, path: Path, fd: int, recycled: RecycledFiles | None = None, *, is_recycled: bool = False
    ) -> None:
        """`fd`: the open temporary file that `create` made. The sink owns it."""
        self._path = path
        self._part = _part_of(path)
        self._fd = fd
        self._recycled = recycled
        self._is_recycled = is_recycled
        self.is_direct = False
        self.is_durable = True

    @classmethod
    def create(
        cls, path: Path, direct_io: str = "off", recycled: RecycledFiles | None = None, *, shard: str = ""
    ) -> Self:
        """A sink for the file `path`, with its temporary file. For the arguments see the class."""
        part = _part_of(path)
        with translate_errors(str(path.parent), "create", path.name):
            try:
                wants_direct = is_worthwhile(path.parent, direct_io)
                # Another process may still write to this file. It continues in the unlinked file, which `publish` refuses.
                part.unlink(missing_ok=True)
                taken = None if recycled is None else recycled.take_file(part, shard or path.name)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(part, flags, 0o640) if taken is None else taken
            except FileNotFoundError as exc:  # the staging directory was removed: the save has ended
                raise SaveAborted(f"The save that {path} belongs to has ended.") from exc
            sink = cls(path, fd, recycled, is_recycled=taken is not None)
            try:
                set_mode(fd, 0o640)  # whatever the umask: the directories decide who may read it
                sink.is_direct = wants_direct and switch_direct_io(fd, on=True)
            except OSError:
                sink.discard()
                raise
        return sink

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Discards it if the block has failed."""
        if kind is not None:
            self.discard()

    @property
    def label(self) -> str:
        return "own store"

    def write(self, *pieces: memoryview) -> None:
        with translate_errors(str(self._path.parent), "write", self._path.name):
            start = os.lseek(self._fd, 0, os.SEEK_CUR)
            try:
                self._write(pieces)
            except OSError as exc:
                if not is_full(exc) or self._recycled is None:
                    raise
                self._recycled.drop()  # even if this frees nothing, another rank may just have made room
                # A part of the pieces may be written: begin again at their start.
                os.lseek(self._fd, start, os.SEEK_SET)
                self._write(pieces)

    def _write(self, pieces: tuple[memoryview, ...]) -> None:
        if self.is_direct:
            pieces = self._rest_of(pieces)
        write_vector(self._fd, pieces)

    def _rest_of(self, pieces: tuple[memoryview, ...]) -> tuple[memoryview, ...]:
        """Writes whole pages by direct I/O, and returns the rest. An unaligned rest ends direct I/O for this file."""
        done = write_direct(self._fd, pieces[0]) if len(pieces) == 1 else 0
        if len(pieces) == 1 and done == len(pieces[0]):
            return ()
        # For good: after an unaligned write the file's position is not a multiple of a page.
        self.is_direct = switch_direct_io(self._fd, on=False)
        return (pieces[0][done:], *pieces[1:])

    def finish(self, table: BlockTable) -> None:  # noqa: ARG002 - the file carries the table as its footer already
        if self.is_durable:
            self.finish_durably()
        else:
            self.publish()

    def finish_durably(self) -> None:
        """Fsyncs the file, then gives it its name, durably."""
        self.sync()
        self.publish()

    def sync(self) -> None:
        with translate_errors(str(self._path.parent), "fsync", self._path.name):
            self._cut()
            os.fsync(self._fd)

    def _cut(self) -> None:
        """Cuts a recycled file to the written bytes: the bytes after them belong to another checkpoint."""
        if self._is_recycled:
            os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR))

    def read_back(self, size_bytes: int) -> memoryview:
        """The last `size_bytes` of the file. Ends direct I/O."""
        if self.is_direct:
            self.is_direct = switch_direct_io(self._fd, on=False)
        self._cut()
        target = memoryview(bytearray(size_bytes))
        read_exactly(self._fd, target, os.fstat(self._fd).st_size - size_bytes)
        return target

    def publish(self) -> None:
        with translate_errors(str(self._path.parent), "rename", self._path.name):
            is_own = self._is_own()
            failpoints.reach("store.shard-fsynced")
            # If another process writes this shard anew, this file must not get the name: its bytes may be old.
            if not is_own:
                raise SaveAborted(f"{self._path} was aborted, or another process writes it anew.")
            if self._is_recycled and self._recycled is not None:
                # Before the rename: after a power loss the same file must not have a name in the pool, too.
                self._recycled.sync()
            try:
                self._part.rename(self._path)
                fsync_directory(self._path.parent)
                failpoints.reach("store.shard-named")
            except FileNotFoundError as exc:
                raise SaveAborted(f"The save that {self._path} belongs to was aborted.") from exc
            os.close(self._fd)  # only now: after an error `discard` compares this file with the one of that name
            self._fd = -1

    def _is_own(self) -> bool:
        """Whether the temporary name still belongs to this file. Another process that writes the shard takes the name."""
        try:
            return os.path.samestat(self._part.lstat(), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def discard(self) -> None:
        """As for every sink. A file that cannot be removed now is removed with its save."""
        if self._fd < 0:
            return
        try:
            if self._is_own():
                self._part.unlink(missing_ok=True)
        except OSError as exc:  # must not hide the error that led to the discard
            log.warning("%s is not removed now: %s", self._part, exc)
        os.close(self._fd)
        self._fd = -1


class OpenFile(VerifiedShard):
    """A shard behind a file descriptor of its own, opened by `_open_file`."""

    _fd = -1
    _open_file: Callable[[], int]

    def _connect(self) -> None:
        self._fd = self._open_file()

    def _fill(self, target: memoryview, offset: int) -> None:
        with translate_read_errors(self._store, "read", self._name):
            if read_exactly(self._fd, target, offset) != len(target):
                raise self._corrupt("the file ended early")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ShardFile(OpenFile):
    """Reads a shard file by verified ranges. For one thread. It closes the file descriptor that `open_file` returns."""

    def __init__(self, open_file: Callable[[], int], store: str, name: str, expected: Expected) -> None:
        super().__init__(store, name, expected)
        self._open_file = open_file

    def _connect(self) -> None:
        super()._connect()
        with translate_errors(self._store, "look at", self._name):
            found, expected = os.fstat(self._fd).st_size, self._expected
        if expected.needs_footer and found != expected.size_bytes:
            raise self._corrupt(f"expected {expected.size_bytes} bytes, found {found}")


@dataclass(frozen=True)
class CommittedShard:
    """A shard of a committed save, with its size and the CRC32C of its file."""

    checkpoint_id: str
    save_id: str
    name: str
    size_bytes: int
    crc32c: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError, TypeError: the fields are no such shard."""
        checkpoint_id, save_id, name = fields["checkpoint_id"], str(fields["save_id"]), str(fields["name"])
        # All three become parts of a path.
        if not isinstance(checkpoint_id, str) or not is_checkpoint_id(checkpoint_id):
            raise ValueError(f"{str(checkpoint_id)[:80]!r} is not a checkpoint id")
        if not is_save_id(save_id) or ShardName.parse(name) is None:
            raise ValueError(f"{save_id[:80]!r} and {name[:80]!r} are not a save id and the name of a shard")
        return cls(checkpoint_id, save_id, name, int(fields["size_bytes"]), int(fields["crc32c"]))


def link_shard(
    catalog: Catalog, path: Path, source: CommittedShard, is_bad: Callable[[os.stat_result], bool], *, durable: bool
) -> None:
    """Makes the staged `path` a hard link to the file of a committed shard. If `durable`, it survives a power loss.

    If either save is removed, the other keeps its bytes: no committed file is written in place, and no file with two names
    is recycled. `is_bad`: whether damage was found in this file.

    Raises:
        ObjectMissing: the shard is not here, or was removed. ObjectCorrupt: it is damaged, or has other bytes.
            StoreError: the file system has no hard links, or `path` exists.
    """
    root, label = str(catalog.root), f"{source.checkpoint_id}/{source.name}"
    with translate_errors(root, "link", label):
        # Under this lock no version is removed: its file could be recycled, and overwritten.
        with exclusive(catalog.root / STAGING_DIR):
            entry = catalog.manifest_of(source.checkpoint_id, source.save_id).shards.get(source.name)
            if entry is None or (entry.size_bytes, entry.crc32c) != (source.size_bytes, source.crc32c):
                raise ObjectMissing(root, "link", label, f"it is not of save {source.save_id}")
            with (
                open_directory(catalog.root, source.checkpoint_id) as directory,
                closing_fd(directory.open(source.name)) as fd,
            ):
                status = os.fstat(fd)
                if status.st_size != source.size_bytes or is_bad(status) or crc_of_footer(fd) != source.crc32c:
                    raise ObjectCorrupt(root, "link", label, "the file is damaged")
                directory.link(source.name, path)
                if not os.path.samestat(path.lstat(), status):  # a user has put another file there meanwhile
                    path.unlink()
                    raise ObjectCorrupt(root, "link", label, "the file was replaced")
                if durable:
                    os.fsync(fd)  # with ack="peer-memory" it was committed before it was durable
        if durable:
            fsync_directory(path.parent)
    failpoints.reach("store.linked")
