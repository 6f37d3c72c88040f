"""Directories and shards without a manifest: each item is checked by the CRC32 in its own container.

If only the manifest was lost, a shard has a footer of ours, and its blocks are checked by that.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from replicated_ckpt.core.integrity.archive import (
    ItemDamaged,
    OwnFooter,
    Verdict,
    check_blocks,
    check_range,
    find_footer,
)
from replicated_ckpt.core.integrity.checksum import BlockTable, crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.reading.unmanaged_files import UnmanagedFile, UnmanagedHolding
from replicated_ckpt.core.reading.windows import ByteRange, end_of
from replicated_ckpt.core.upkeep.repair_plan import Finding, Problem
from replicated_ckpt.errors import ObjectMissing, StoreError
from replicated_ckpt.stores.files.durable import hash_open_file, read_exactly, translate_errors
from replicated_ckpt.stores.files.existence import closing_fd
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.committed import Committed, open_directory
from replicated_ckpt.stores.local.shard_file import OpenFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import unmanaged_path
from replicated_ckpt.stores.peer.client import FILE_BYTES_MAX, AgentClient
from replicated_ckpt.stores.verified import Expected, VerifiedShard

_PRINT_BYTES = 64 << 10
_Signature = tuple[int, int, int]


class UnmanagedDirectory:
    """Lists and opens files in directories without a manifest. Fingerprints are cached until a file changes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prints: dict[tuple[str, str], tuple[_Signature, int]] = {}

    def holdings(self, node_id: str, checkpoint_id: str | None = None) -> tuple[UnmanagedHolding, ...]:
        """The files of checkpoints without a manifest: of one or all. A file that vanishes meanwhile is left out."""
        names = [checkpoint_id] if checkpoint_id else list(Catalog(self.root).without_manifest())
        return tuple(holding for name in names for holding in self._holding(node_id, name))

    def _holding(self, node_id: str, checkpoint_id: str) -> Iterator[UnmanagedHolding]:
        try:
            with open_directory(self.root, checkpoint_id) as directory:
                names = directory.names()
                if MANIFEST_NAME in names:
                    return
                found = {name: file for name in names if (file := self._file(directory, name)) is not None}
        except ObjectMissing:
            return
        metadata = found.pop(METADATA_NAME, None)
        if found or metadata is not None:
            yield UnmanagedHolding(node_id, checkpoint_id, metadata, found)

    def _file(self, directory: Committed, name: str) -> UnmanagedFile | None:
        key = directory.checkpoint_id, name
        try:
            fd = directory.open(name)
        except StoreError:
            return None
        with closing_fd(fd), translate_errors(str(self.root), "read", "/".join(key)):
            status = os.fstat(fd)
            is_metadata = name == METADATA_NAME
            # `.metadata` is hashed in full: a huge file of that name would keep the agent busy.
            if is_metadata and status.st_size > FILE_BYTES_MAX:
                return None
            signature = status.st_ino, status.st_mtime_ns, status.st_size
            known = self._prints.get(key)
            if known is None or known[0] != signature:
                known = self._prints[key] = signature, _print_of(fd, status.st_size, is_whole=is_metadata)
        return UnmanagedFile(status.st_size, known[1], max(0.0, status.st_mtime))

    def open(self, checkpoint_id: str, name: str, size_bytes: int) -> int:
        """File descriptor for reading one file of a checkpoint without a manifest; the caller closes it.

        Raises:
            ObjectMissing: it is missing, has another size, or its directory has a manifest by now.
        """
        with open_directory(self.root, checkpoint_id) as directory:
            if MANIFEST_NAME in directory.names():
                raise ObjectMissing(str(self.root), "open", f"{checkpoint_id}/{name}", "it has a manifest by now")
            fd = directory.open(name)
        # Another job may have written a new file under this name since the survey.
        found_bytes = os.fstat(fd).st_size
        if found_bytes != size_bytes:
            os.close(fd)
            detail = f"expected a file of {size_bytes} bytes, found {found_bytes}"
            raise ObjectMissing(str(self.root), "open", f"{checkpoint_id}/{name}", detail)
        return fd

    def read_raw(self, checkpoint_id: str, name: str, size_bytes: int) -> bytes:
        """Reads a small file of this size. Raises as `open`."""
        with os.fdopen(self.open(checkpoint_id, name, size_bytes), "rb") as file:
            return file.read(size_bytes)


def _print_of(fd: int, size_bytes: int, *, is_whole: bool) -> int:
    """CRC32C of a file, or of its beginning and end: there the containers of items have the CRC32 of their data."""
    if is_whole or size_bytes <= 2 * _PRINT_BYTES:
        return hash_open_file(fd)[1]
    crc, piece = 0, memoryview(bytearray(_PRINT_BYTES))
    for offset in (0, size_bytes - _PRINT_BYTES):
        crc = crc32c(piece[: read_exactly(fd, piece, offset)], crc)
    return crc


class UncheckedItems:
    """The unchecked items of a shard at one source, shared by all threads that read it there.

    Each item is checked once. Threads that need it meanwhile wait for the result, instead of reading it again.
    """

    def __init__(self, items: Sequence[ByteRange]) -> None:
        self.end = end_of(items)
        self._items = sorted(items, key=lambda item: item.offset)
        self._lock = threading.Lock()

    def check_range(self, there: ByteRange, check: Callable[[ByteRange], None]) -> None:
        """Calls `check` for each unchecked item with bytes in this range. It counts as checked unless `check` raises."""
        with self._lock:
            for item in [item for item in self._items if item.offset < there.end and item.end > there.offset]:
                check(item)
                self._items.remove(item)


class UnmanagedShard(VerifiedShard):
    """Reads a shard without a manifest. An item with checksums is checked before its first byte is returned.

    `items` are the places of the items that may be read. For one thread.
    """

    def __init__(self, store: str, name: str, expected: Expected, items: UncheckedItems) -> None:
        self._unchecked = items
        self._footer = OwnFooter()
        super().__init__(store, name, expected)

    def _read_table(self, expected: Expected) -> BlockTable:
        """The table in its footer. Without a footer: one block of unknown checksum."""
        size = expected.size_bytes
        self._footer = find_footer(
            lambda offset, length: self._fetch(offset, offset + length), size, self._unchecked.end
        )
        return self._footer.table or BlockTable(size or 1, size, (0,))

    def read(self, offset: int, length: int, lent: memoryview | None = None) -> memoryview:
        """Bytes [offset, offset + length) of the file; otherwise as VerifiedShard.read."""
        if self._footer.table is not None:
            return super().read(offset, length, lent)
        if length < 0 or offset < 0 or offset + length > self.table.data_bytes:
            raise self._corrupt(f"bytes {offset} to {offset + length} lie outside its {self.table.data_bytes} bytes")
        span = self._reuse(length, lent)
        if span:
            self._fill(span, offset)
        there = ByteRange(offset, length)
        self._unchecked.check_range(there, partial(self._check, span, there))
        return span

    def _check(self, span: memoryview, there: ByteRange, item: ByteRange) -> None:
        """Checks one item, in `span` if it contains the whole item. It is read again before it counts as damaged."""
        is_inside = there.offset <= item.offset and item.end <= there.end

        def in_span(offset: int, length: int) -> memoryview:
            start = item.offset - there.offset + offset
            return span[start : start + length]

        def at_source(offset: int, length: int) -> memoryview:
            return self._fetch(item.offset + offset, item.offset + offset + length)

        fetch, must_check = in_span if is_inside else at_source, self._footer.is_damaged
        try:
            check_range(fetch, item.length, must_check=must_check)
        except ItemDamaged:
            # A flip in memory or on the wire is gone at the second read.
            if is_inside:
                self._fill(span, there.offset)
            try:
                check_range(fetch, item.length, must_check=must_check)
            except ItemDamaged as exc:
                raise self._corrupt(f"item at bytes {item.offset} to {item.end}: {exc}") from exc


class UnmanagedFileShard(OpenFile, UnmanagedShard):
    """An unmanaged shard on this node's disk."""

    def __init__(
        self,
        directory: UnmanagedDirectory,
        checkpoint_id: str,
        name: str,
        expected: Expected,
        items: UncheckedItems,
    ) -> None:
        super().__init__(str(directory.root), f"{checkpoint_id}/{name}", expected, items)
        self._open_file = partial(directory.open, checkpoint_id, name, expected.size_bytes)


class UnmanagedPeerShard(UnmanagedShard):
    """An unmanaged shard on a peer's disk. The peer's agent refuses a file of another size. `close` closes the client."""

    def __init__(
        self, client: AgentClient, checkpoint_id: str, name: str, expected: Expected, items: UncheckedItems
    ) -> None:
        self._client = client
        self._path = unmanaged_path(checkpoint_id, name, expected.size_bytes)
        super().__init__(client.address.label, f"{checkpoint_id}/{name}", expected, items)

    def _fill(self, target: memoryview, offset: int) -> None:
        self._client.read_range(self._path, offset, target)

    def close(self) -> None:
        self._client.close()


class UnmanagedInspector:
    """Checks structure, sizes, and the CRC32 that torch.save left in its containers, or a footer of ours. Changes nothing.

    Afterwards `unchecked` is the number of items without a CRC32, or that are no containers.
    """

    def __init__(self, store: LocalStore, node_id: str) -> None:
        self._store = store
        self._node_id = node_id
        self.bytes_read = 0
        self.unchecked = 0

    def inspect(self, checkpoint_id: str, ranges: Mapping[str, Sequence[ByteRange]]) -> Iterator[Finding]:
        """Findings of the shards here. `ranges`: the places of their items, from `.metadata`.

        A checkpoint or shard that disappears meanwhile is skipped.
        """
        with contextlib.suppress(ObjectMissing), open_directory(self._store.root, checkpoint_id) as directory:
            if MANIFEST_NAME in directory.names():
                return
            for name in directory.shards():
                with contextlib.suppress(ObjectMissing):
                    yield from self._of_shard(directory, name, ranges.get(name))

    def _of_shard(self, directory: Committed, name: str, items: Sequence[ByteRange] | None) -> Iterator[Finding]:
        if items is None and self._store.catalog.size_of(directory.checkpoint_id, name) == 0:
            return  # stock torch writes an empty file for a rank without items
        if items is None:
            yield self._finding(directory, name, Problem.UNKNOWN, "no such file", "one")
        elif (finding := self.shard_problem(directory, name, items)) is not None:
            yield finding

    def shard_problem(self, directory: Committed, name: str, items: Sequence[ByteRange]) -> Finding | None:
        """The finding of one shard; None if every item is whole, and matches its CRC32 if it has one."""
        where = f"{directory.checkpoint_id}/{name}"
        with closing_fd(directory.open(name)) as fd, translate_errors(str(self._store.root), "read", where):
            size, needed = os.fstat(fd).st_size, end_of(items)
            if size < needed:
                expected = f"at least {needed} bytes"
                return self._finding(directory, name, Problem.CORRUPT, expected, f"{size} bytes")
            for expected, found in self._problems(fd, size, items):
                return self._finding(directory, name, Problem.CORRUPT, expected, found)
        return None

    def _problems(self, fd: int, size_bytes: int, items: Sequence[ByteRange]) -> Iterator[tuple[str, str]]:
        """Pairs of expected and found text: for the whole shard by its footer, else for each item."""

        def fetch(offset: int, length: int) -> memoryview:
            return self._read(fd, offset, length)

        footer = OwnFooter()
        try:
            footer = find_footer(fetch, size_bytes, end_of(items))
        except ItemDamaged as exc:
            yield "a file that does not change", str(exc)
        if footer.table is not None:
            found = self._twice(partial(check_blocks, fetch, footer.table))
            if found is not None:
                yield "blocks as its footer has them", found
            return
        for item in items:
            found = self._twice(partial(self._check_item, fd, item, must_check=footer.is_damaged))
            if found is not None:
                yield f"item at bytes {item.offset} to {item.end} as torch.save wrote it", found

    @staticmethod
    def _twice(check: Callable[[], None]) -> str | None:
        """Runs a check up to twice; returns the text of its second failure, or None."""
        problem = None
        for _ in range(2):
            try:
                check()
            except ItemDamaged as exc:
                problem = str(exc)
                continue
            return None
        return problem

    def _check_item(self, fd: int, item: ByteRange, *, must_check: bool) -> None:
        def fetch(offset: int, length: int) -> memoryview:
            return self._read(fd, item.offset + offset, length)

        self.unchecked += check_range(fetch, item.length, must_check=must_check) is Verdict.UNCHECKED

    def _read(self, fd: int, offset: int, length: int) -> memoryview:
        target = memoryview(bytearray(length))
        if read_exactly(fd, target, offset) != length:
            raise ItemDamaged("the file ended early")
        self.bytes_read += length
        return target

    def _finding(self, directory: Committed, name: str, problem: Problem, expected: str, found: str) -> Finding:
        path = str(self._store.root / directory.checkpoint_id / name)
        return Finding(self._node_id, directory.checkpoint_id, "", name, path, problem, expected, found)
