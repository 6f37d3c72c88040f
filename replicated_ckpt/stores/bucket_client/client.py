"""The interface to a bucket, with clients for S3, directories and the back ends of fsspec; and the source of an upload."""

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from replicated_ckpt.core.integrity.checksum import BlockTable, combine_crcs, crc32c
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.files.durable import read_exactly, translate_read_errors
from replicated_ckpt.stores.local.shard_file import ShardFile
from replicated_ckpt.stores.verified import Expected

_PIECE_BYTES = 4 << 20


@dataclass
class BegunUpload:
    """The note with which an upload in parts continues after a restart; None: no such upload. `keep` makes it durable.

    A restart may restore a note that was set to None. Its upload is gone from the bucket, so the shard is uploaded anew.
    """

    note: Mapping[str, Any] | None = None
    keep: Callable[[], None] = lambda: None


class UploadSource:
    """One shard's file during its upload: every byte is compared with the saved checksums before it is sent.

    `with` checks its size and footer, and closes it. Several threads may read pieces at once.

    Raises:
        ObjectCorrupt: the file's size or footer differs from the saved one. StoreError
    """

    def __init__(self, fd: int, store: str, name: str, expected: Expected, begun: BegunUpload | None = None) -> None:
        self.size_bytes = expected.size_bytes
        self.crc32c = expected.crc32c
        self.begun = begun or BegunUpload()
        self._fd = fd
        self._store = store
        self._name = name
        self._file = ShardFile(lambda: fd, store, name, expected)

    def __enter__(self) -> Self:
        self._table: BlockTable = self._file.open().table
        self._footer = self._table.encode()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def path(self) -> str:
        """A path of the open file, valid even if the file is renamed or removed meanwhile."""
        return f"/proc/self/fd/{self._fd}"

    def check_stored(self, url: str, key: str, size_bytes: int) -> None:
        """Compares the object's size in the bucket. Raises ObjectCorrupt: it differs."""
        if size_bytes != self.size_bytes:
            raise ObjectCorrupt(url, "check", key, f"expected {self.size_bytes} bytes, but the store has {size_bytes}")

    def read(self, offset: int, target: memoryview) -> int:
        """Fills `target` from `offset` on, a multiple of the block size; returns the CRC32C of the piece.

        Raises:
            ObjectCorrupt: a block differs from its checksum twice in a row. StoreError
        """
        problem = ""
        # A flip in memory is gone at the second read; damage on the disk stays.
        for _ in range(2):
            with translate_read_errors(self._store, "read", self._name):
                if read_exactly(self._fd, target, offset) != len(target):
                    # As for lost bytes: `translate_read_errors` turns EIO into ObjectCorrupt.
                    raise OSError(errno.EIO, "the file ended early")
            crc, problem = self._check(offset, target)
            if not problem:
                return crc
        raise ObjectCorrupt(self._store, "read", self._name, problem)

    def _check(self, offset: int, piece: memoryview) -> tuple[int, str]:
        table, total, position = self._table, 0, 0
        assert offset % table.block_bytes == 0 or offset >= table.data_bytes, "pieces begin where blocks do"
        while position < len(piece) and offset + position < table.data_bytes:
            index = (offset + position) // table.block_bytes
            block = piece[position : position + table.block_size(index)]
            crc = crc32c(block)
            if crc != table.crcs[index] and len(block) == table.block_size(index):
                return 0, f"block {index}: expected CRC32C {table.crcs[index]:08x}, found {crc:08x}"
            total = combine_crcs(total, crc, len(block))
            position += len(block)
        rest = piece[position:]
        start = offset + position - table.data_bytes
        # The footer is not covered by block checksums: compare it with the footer that `open` checked.
        if rest != self._footer[start : start + len(rest)]:
            return 0, "its footer differs from the one that was read first"
        return combine_crcs(total, crc32c(rest), len(rest)), ""

    def check_all(self) -> None:
        """Reads and checks the whole file once. Raises as `read`."""
        step = max(1, _PIECE_BYTES // self._table.block_bytes) * self._table.block_bytes
        memory = memoryview(bytearray(min(step, self.size_bytes)))
        for offset in range(0, self.size_bytes, step):
            self.read(offset, memory[: min(step, self.size_bytes - offset)])

    def piece_bytes(self, least: int) -> int:
        """The smallest piece size of at least `least` bytes that is a multiple of the block size."""
        block = self._table.block_bytes
        return max(1, -(-least // block)) * block


PART_BYTES = 16 << 20
"""Default of the least part size of an upload, in bytes (`--upload-part-mib` of the agent)."""
PARTS_PARALLEL = 4
AWAY_HINT = "The nodes' copies are safe, and agents retry uploads. If it still fails, check the URL and the network."
ARCHIVED = "InvalidObjectState"
"""Start of a StoreDenied's detail for an archived object, which must be restored before it can be read."""

Paced = Callable[[int], None]
"""Waits until that many bytes may be sent; raises to abort the upload."""


@dataclass(frozen=True)
class Listing:
    """One level of a bucket: its objects with their sizes in bytes, and its common prefixes as directories."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    directories: tuple[str, ...] = ()


class ObjectClient(Protocol):
    """A bucket under one prefix; keys are relative to it. Safe for concurrent use by threads; not to be forked.

    All methods raise StoreDenied (credentials, permission, no such bucket), StoreUnavailable (no answer in time, throttled,
    broken connection) and StoreError, without any secret. Methods that read also raise ObjectMissing.
    """

    target: ObjectTarget
    has_conditions: bool
    """Whether `put_over` asks the store for a conditional write. The store may still ignore the condition."""

    def list_keys(self, directory: str) -> Listing:
        """Objects and directories directly under `directory` ("" or "a/b/"); empty if there are none."""

    def read(self, key: str, offset: int, target: memoryview) -> None:
        """Fills `target` from `offset` on. Also raises ObjectCorrupt: the object is too short."""

    def size_bytes(self, key: str) -> int:
        """Size of an object."""

    def put(self, key: str, data: bytes) -> None:
        """Writes a small object. Replaces an existing one atomically, or not at all."""

    def version(self, key: str) -> str:
        """An identifier of an object's current bytes, for `put_over`; "" if there is none, or the store has no versions."""

    def put_over(self, key: str, data: bytes, version: str) -> bool:
        """As `put`, but only over that version, or, with "", only if the object is missing. True if it was written.

        A store without conditional writes always writes. After a lost answer a retry may meet the client's own first
        write and return False. So the caller must read the object back in either case.
        """

    def put_shard(self, key: str, source: UploadSource, paced: Paced) -> None:
        """Uploads a file in parallel parts. Continues an earlier aborted try if the store supports that.

        Afterwards the store has confirmed the object's size, and its CRC32C if it has checksums.
        Also raises ObjectCorrupt: the store's size or checksum differs, or the file is damaged.
        """

    def copy(self, source: str, key: str) -> None:
        """Copies an object inside the bucket; no byte of it passes through this process. An error may leave a part of
        it.

        A store that ignores the request may have written other bytes, so the caller checks the copy.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; a missing one is not an error."""

    def end_unfinished(self, prefix: str, older_than_s: float) -> int:
        """Aborts multipart uploads of shards under `prefix` that are older than `older_than_s`; returns their number."""

    def close(self) -> None:
        """Closes connections; the client must not be used afterwards."""
