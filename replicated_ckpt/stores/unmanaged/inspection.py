"""Reads the shards of one checkpoint that stock torch wrote on this node, and holds them against what is in them."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from replicated_ckpt.core.integrity.footer_without_manifest import OwnFooter, check_blocks, find_footer
from replicated_ckpt.core.integrity.zip_crc import ItemDamaged, Verdict, check_item
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.reading.source_order import ByteRange, end_of
from replicated_ckpt.core.upkeep.finding import Finding, Problem
from replicated_ckpt.errors import ObjectMissing
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.plain import closing_fd
from replicated_ckpt.stores.local.directories.committed import Committed, open_directory
from replicated_ckpt.stores.local.store import LocalStore


class UnmanagedInspector:
    """Checks structure, sizes, and the CRC32 that torch.save left in its containers, or a footer of ours. Changes nothing.

    `unchecked` counts afterwards the items that have no CRC32, or are no containers.
    """

    def __init__(self, store: LocalStore, node_id: str) -> None:
        self._store = store
        self._node_id = node_id
        self.bytes_read = 0
        self.unchecked = 0

    def inspect(self, checkpoint_id: str, ranges: Mapping[str, Sequence[ByteRange]]) -> Iterator[Finding]:
        """What is wrong with the shards that lie here, where `.metadata` has items at `ranges`.

        What disappears meanwhile, the checkpoint or a shard, is passed over.
        """
        with contextlib.suppress(ObjectMissing), open_directory(self._store.root, checkpoint_id) as directory:
            if MANIFEST_NAME in directory.names():
                return
            for name in directory.shards():
                with contextlib.suppress(ObjectMissing):
                    yield from self._of_shard(directory, name, ranges.get(name))

    def _of_shard(self, directory: Committed, name: str, items: Sequence[ByteRange] | None) -> Iterator[Finding]:
        if items is None and self._store.catalog.size_of(directory.checkpoint_id, name) == 0:
            return  # stock torch leaves it for a rank that had nothing to save
        if items is None:
            yield self._finding(directory, name, Problem.UNKNOWN, "no such file", "one")
        elif (finding := self.shard_problem(directory, name, items)) is not None:
            yield finding

    def shard_problem(self, directory: Committed, name: str, items: Sequence[ByteRange]) -> Finding | None:
        """What is wrong with one shard; None if every item of it is whole, and as its CRC32 says if it has one."""
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
        """What was expected, and what was found: of the whole shard by its footer, without one of each item."""

        def fetch(offset: int, length: int) -> memoryview:
            return self._read(fd, offset, length)

        footer = OwnFooter()
        try:
            footer = find_footer(fetch, size_bytes, end_of(items))
        except ItemDamaged as exc:
            yield "a file that stays as it is", str(exc)
        if footer.table is not None:
            found = self._twice(partial(check_blocks, fetch, footer.table))
            if found is not None:
                yield "blocks as its footer has them", found
            return
        for item in items:
            found = self._twice(partial(self._check_item, fd, item, must_tell=footer.is_damaged))
            if found is not None:
                yield f"item at bytes {item.offset} to {item.end} as torch.save wrote it", found

    @staticmethod
    def _twice(check: Callable[[], None]) -> str | None:
        """Why what is checked is not believed; it is read a second time before it counts."""
        problem = None
        for _ in range(2):
            try:
                check()
            except ItemDamaged as exc:
                problem = str(exc)
                continue
            return None
        return problem

    def _check_item(self, fd: int, item: ByteRange, *, must_tell: bool) -> None:
        def fetch(offset: int, length: int) -> memoryview:
            return self._read(fd, item.offset + offset, length)

        self.unchecked += check_item(fetch, item.length, must_tell=must_tell) is Verdict.UNCHECKED

    def _read(self, fd: int, offset: int, length: int) -> memoryview:
        target = memoryview(bytearray(length))
        if read_exactly(fd, target, offset) != length:
            raise ItemDamaged("the file ended early")
        self.bytes_read += length
        return target

    def _finding(self, directory: Committed, name: str, problem: Problem, expected: str, found: str) -> Finding:
        path = str(self._store.root / directory.checkpoint_id / name)
        return Finding(self._node_id, directory.checkpoint_id, "", name, path, problem, expected, found)
