"""A shard file during its upload: every byte is compared with the saved checksums before it is sent."""

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from replicated_ckpt.core.integrity.checksum import BlockTable, combine_crcs, crc32c
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.stores.files.durable import read_exactly, translate_read_errors
from replicated_ckpt.stores.local.shard_file import ShardFile
from replicated_ckpt.stores.verified import Expected

_PIECE_BYTES = 4 << 20


@dataclass
class BegunUpload:
    """The state that continues an upload in parts. After `keep` returns, it survives a restart. None: no such upload.

    A restart may restore a note that was set to None. Its upload is gone from the bucket, so the upload begins anew.
    """

    note: Mapping[str, Any] | None = None
    keep: Callable[[], None] = lambda: None


class UploadSource:
    """One shard's file, held open and checked by `with`. Pieces may be read by several threads at once.

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
        # The footer is not covered by block checksums: compare it with the one that `open` checked.
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
        """The smallest size of pieces, at least `least` bytes, that begin where blocks do."""
        block = self._table.block_bytes
        return max(1, -(-least // block)) * block
