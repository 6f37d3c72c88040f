"""One shard at several sources.

Each range is read from the first source that has it intact, or block by block if no source has all of it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.errors import ObjectCorrupt, ReplicatedCkptError
from replicated_ckpt.stores.files.direct import address_of
from replicated_ckpt.stores.verified import Expected, TooSlow, VerifiedShard

OnBad = Callable[[str, ReplicatedCkptError], None]
Tables = MutableMapping[Expected, BlockTable]
"""Block checksums recomputed from a shard's data. That costs a read of the whole shard, so readers share them."""
BAD_READS_MAX = 2
"""A source with so many more bad reads than good ones is tried last, since each bad read costs two reads for nothing.

A source whose disk returns an error is tried last at once.
"""


@dataclass
class Source:
    """A node that may hold the shard, the shard's expected size and checksum, and a function that makes its reader."""

    node_id: str
    expected: Expected
    shard_for: Callable[[Expected], VerifiedShard]


class AnySource:
    """Reads one shard from any source that has the bytes intact. For one thread; `close` closes the connections.

    `on_bad` is called once for each source that fails. The use of a source depends on its state:

    - cannot be opened, or breaks: it is dropped;
    - bad block: it serves its other blocks, so two copies damaged in different places are still whole together;
    - mostly bad blocks: it is tried last;
    - damaged footer: it is used if the others lack a block, with another source's footer or one recomputed from its data;
    - its node `is_silent`: it is tried after all others, opened or not, since it would cost a time-out;
    - too slow: it is tried once more after all others, if none of them has the bytes.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        on_bad: OnBad,
        is_silent: Callable[[str], bool] = lambda _: False,
        rebuilt: Tables | None = None,
    ) -> None:
        self._sources = list(sources)
        self._footer_damaged: list[Source] = []
        self._rebuilt: Tables = {} if rebuilt is None else rebuilt
        self._table: BlockTable | None = None
        self._on_bad = on_bad
        self._is_silent = is_silent
        self._opened: dict[str, VerifiedShard] = {}
        self._reported: set[str] = set()
        self._too_slow: set[str] = set()
        self._good_reads: Counter[str] = Counter()
        self._bytes_by_node: Counter[str] = Counter()
        self._seconds_by_node: dict[str, float] = {}
        self.last_node = ""

    def read(self, offset: int, length: int, memory: memoryview | None = None) -> memoryview | None:
        """Bytes [offset, offset + length) of the data, verified; None if one of their blocks is intact nowhere.

        If one source has them all, they lie in `memory`, which must have room for them. Without `memory` they lie in a
        buffer that the next read of this shard may reuse. `memory` never keeps unverified bytes: they become zeros.
        """
        for source in self._in_order():
            shard, found, began = self._opened.get(source.node_id), None, time.monotonic()
            try:
                shard = shard or self._add(source, source.shard_for(source.expected).open())
                found = shard.read(offset, length, memory)
            except ReplicatedCkptError as exc:
                self._note_failure(source, exc)
                continue
            finally:
                if found is None and memory is not None:
                    memory[:] = bytes(len(memory))  # it may hold unverified bytes
                self._count(source, shard)
                spent = time.monotonic() - began
                self._seconds_by_node[source.node_id] = self._seconds_by_node.get(source.node_id, 0.0) + spent
            self.last_node = source.node_id
            self._good_reads[source.node_id] += 1
            return found if memory is None else _lay_into(memory, found)
        # Shards with damaged footers may have intact data. They come last: recomputing a footer reads the whole shard.
        if self._open_footer_damaged():
            return self.read(offset, length, memory)
        return self._assemble(offset, length) if self._sources else None

    def _add(self, source: Source, opened: VerifiedShard) -> VerifiedShard:
        self._opened[source.node_id] = opened
        self._table = opened.table
        return opened

    def _count(self, source: Source, shard: VerifiedShard | None) -> None:
        if shard is not None:
            self._bytes_by_node[source.node_id] += shard.take_bytes_read()

    def _in_order(self) -> Iterator[Source]:
        """The sources as listed. Those that are silent when their turn comes, or often bad, come last."""
        left = list(self._sources)
        while left:
            source = min(left, key=self._lateness)  # looked at anew: another thread may have met a time-out since
            left.remove(source)
            was_too_slow = source.node_id in self._too_slow
            yield source
            # A slow source beats no source: it comes back once, behind all others.
            if source.node_id in self._too_slow and not was_too_slow:
                left.append(source)

    def _lateness(self, source: Source) -> tuple[bool, bool]:
        return self._is_silent(source.node_id), self._good_reads[source.node_id] <= -BAD_READS_MAX

    def _assemble(self, offset: int, length: int) -> memoryview | None:
        """The range, assembled from blocks of several sources; None if one of its blocks is intact nowhere."""
        block_bytes = next(iter(self._opened.values())).table.block_bytes if self._opened else 0
        # Within one block there is nothing to combine: every source has failed to deliver it.
        if block_bytes == 0 or offset // block_bytes == (offset + length - 1) // block_bytes:
            return None
        whole = memoryview(bytearray(length))
        position = 0
        while position < length:
            step = min(block_bytes - (offset + position) % block_bytes, length - position)
            piece = self.read(offset + position, step)
            if piece is None:
                return None
            whole[position : position + step] = piece
            position += step
        return whole

    def _open_footer_damaged(self) -> bool:
        """Opens the sources with damaged footers; True if at least one could be opened."""
        is_any = False
        while self._footer_damaged:
            source = self._footer_damaged.pop(0)
            table = self._table or self._rebuilt.get(source.expected)
            try:
                expected = replace(source.expected, table=table, has_damaged_footer=table is None)
                opened = self._add(source, source.shard_for(expected).open())
            except ReplicatedCkptError as exc:
                self._report_once(source, exc)
                continue
            self._count(source, opened)
            if table is None:
                self._rebuilt[source.expected] = opened.table
            self._sources.append(source)
            is_any = True
        return is_any

    def _note_failure(self, source: Source, error: ReplicatedCkptError) -> None:
        is_corrupt = isinstance(error, ObjectCorrupt)
        if is_corrupt and isinstance(error.__cause__, OSError):  # a failing disk may retry for seconds at each read
            self._good_reads[source.node_id] = -BAD_READS_MAX
        self._good_reads[source.node_id] -= is_corrupt
        if isinstance(error.__cause__, TooSlow) and source.node_id not in self._too_slow:
            self._too_slow.add(source.node_id)
        # An open source with a bad block stays, since its other blocks may be intact.
        elif not is_corrupt or source.node_id not in self._opened:
            self._sources.remove(source)
            self._footer_damaged += [source] if is_corrupt else []
            self._close(source.node_id)
        self._report_once(source, error)

    def _report_once(self, source: Source, error: ReplicatedCkptError) -> None:
        if source.node_id not in self._reported:
            self._reported.add(source.node_id)
            self._on_bad(source.node_id, error)

    def take_counts(self) -> Mapping[str, int]:
        """Bytes read from each node since the last call, including bad ones and the unused rest of blocks."""
        counted, self._bytes_by_node = self._bytes_by_node, Counter()
        return counted

    def take_seconds(self) -> Mapping[str, float]:
        """Seconds spent on reads from each node since the last call, including waits for a node that did not answer."""
        spent, self._seconds_by_node = self._seconds_by_node, {}
        return spent

    def any_opened(self) -> VerifiedShard | None:
        """An opened source, whose block checksums match the manifest; None if no source can be opened."""
        for source in self._in_order():
            try:
                return self._opened.get(source.node_id) or self._add(source, source.shard_for(source.expected).open())
            except ReplicatedCkptError as exc:
                self._note_failure(source, exc)
        return next(iter(self._opened.values())) if self._open_footer_damaged() else None

    def _close(self, node_id: str) -> None:
        opened = self._opened.pop(node_id, None)
        if opened is not None:
            opened.close()

    def close(self) -> None:
        for node_id in list(self._opened):
            self._close(node_id)


def _lay_into(memory: memoryview, found: memoryview) -> memoryview:
    """Copies `found` into `memory`, unless it lies there: the next read would overwrite it in the source's own buffer."""
    if not found or 0 <= address_of(found) - address_of(memory) <= len(memory) - len(found):
        return found
    memory[: len(found)] = found
    return memory[: len(found)]
