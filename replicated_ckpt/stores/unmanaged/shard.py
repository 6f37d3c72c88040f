"""One shard without a manifest, at one source: each item is held against the CRC32 in its own container.

Where the shard has a footer of ours, as its manifest alone is lost, its blocks are held against that.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.core.integrity.footer_without_manifest import OwnFooter, find_footer
from replicated_ckpt.core.integrity.zip_crc import ItemDamaged, check_item
from replicated_ckpt.core.reading.source_order import ByteRange, end_of
from replicated_ckpt.stores.local.shard_file import OpenFile
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.stores.peer.paths import unmanaged_path
from replicated_ckpt.stores.unmanaged.directory import UnmanagedDirectory
from replicated_ckpt.stores.verified import Expected, VerifiedShard


class UncheckedItems:
    """The items of a shard that were not checked yet at one source, for all threads that read it there.

    Each is checked once: the threads that meet it meanwhile wait, as they need the outcome and would all read it again.
    """

    def __init__(self, items: Sequence[ByteRange]) -> None:
        self.end = end_of(items)
        self._items = sorted(items, key=lambda item: item.offset)
        self._lock = threading.Lock()

    def check(self, there: ByteRange, check: Callable[[ByteRange], None]) -> None:
        """Calls `check` for each that has bytes in this range; it counts as checked unless that raises."""
        with self._lock:
            for item in [item for item in self._items if item.offset < there.end and item.end > there.offset]:
                check(item)
                self._items.remove(item)


class UnmanagedShard(VerifiedShard):
    """Reads a shard of no manifest. An item is checked before the first byte of it is given out, if it has checksums.

    `items` are the places of the items that may be read. One thread.
    """

    def __init__(self, store: str, name: str, expected: Expected, items: UncheckedItems) -> None:
        self._unchecked = items
        self._footer = OwnFooter()
        super().__init__(store, name, expected)

    def _read_table(self, expected: Expected) -> BlockTable:
        """That of its footer; of a shard without one a single block, whose checksum is not known."""
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
        self._unchecked.check(there, partial(self._check, span, there))
        return span

    def _check(self, span: memoryview, there: ByteRange, item: ByteRange) -> None:
        """Checks one item, from memory where all of it is there; read a second time before it counts as damaged."""
        is_inside = there.offset <= item.offset and item.end <= there.end

        def in_span(offset: int, length: int) -> memoryview:
            start = item.offset - there.offset + offset
            return span[start : start + length]

        def at_source(offset: int, length: int) -> memoryview:
            return self._fetch(item.offset + offset, item.offset + offset + length)

        fetch, must_tell = in_span if is_inside else at_source, self._footer.is_damaged
        try:
            check_item(fetch, item.length, must_tell=must_tell)
        except ItemDamaged:
            if is_inside:
                self._fill(span, there.offset)
            try:
                check_item(fetch, item.length, must_tell=must_tell)
            except ItemDamaged as exc:
                raise self._corrupt(f"item at bytes {item.offset} to {item.end}: {exc}") from exc


class UnmanagedFileShard(OpenFile, UnmanagedShard):
    """On this node's disk."""

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
    """On a peer's disk, through its agent, which refuses a file of another size. The client is taken over."""

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
