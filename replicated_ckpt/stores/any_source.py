"""One shard at several sources: every range from the first that has it intact, block by block if none has all of it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from replicated_ckpt.errors import ObjectCorrupt, ReplicatedCkptError
from replicated_ckpt.stores.verified import VerifiedShard

OnBad = Callable[[str, ReplicatedCkptError], None]


@dataclass
class Source:
    """A node that may hold the shard, and how to open it there."""

    node_id: str
    open: Callable[[], VerifiedShard]


class AnySource:
    """Reads one shard from whichever source has the bytes intact. One thread; `close` gives the connections back.

    A source that cannot be opened or breaks is dropped. One with a bad block keeps its place for the other blocks: two
    copies damaged in different places are together still whole. `on_bad` is told each failure once for each source. A
    source whose node `is_silent`, as somebody has found out meanwhile, comes after all others, opened or not: it would
    cost a time-out.
    """

    def __init__(
        self, sources: Sequence[Source], on_bad: OnBad, is_silent: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._sources = list(sources)
        self._on_bad = on_bad
        self._is_silent = is_silent
        self._opened: dict[str, VerifiedShard] = {}
        self._reported: set[str] = set()
        self._memory: memoryview | None = None
        self._bytes_by_node: Counter[str] = Counter()
        self.last_node = ""

    def read(self, offset: int, length: int, memory: memoryview | None = None) -> memoryview | None:
        """Bytes [offset, offset + length) of the data, verified; None if no source has them all intact.

        They lie in `memory`, if it has room for the whole blocks that they touch and one source has them all; else in
        memory that may be reused by the next read of this shard.
        """
        self._memory = memory
        found = self._whole(offset, length)
        if found is not None or not self._sources:
            return found
        return self._assembled(offset, length)

    def _whole(self, offset: int, length: int) -> memoryview | None:
        for source in self._in_order():
            try:
                opened = self._of(source)
                if self._memory is not None:
                    opened.lend(self._memory)
                before = opened.bytes_read
                try:
                    found = opened.read(offset, length)
                finally:
                    self._bytes_by_node[source.node_id] += opened.bytes_read - before
            except ReplicatedCkptError as exc:
                self._failed(source, exc)
                continue
            self.last_node = source.node_id
            return found
        return None

    def _in_order(self) -> Iterator[Source]:
        """The sources as they are listed, but for those that are silent by the time that their turn comes."""
        left = list(self._sources)
        while left:
            source = next((one for one in left if not self._is_silent(one.node_id)), left[0])
            left.remove(source)
            yield source

    def _assembled(self, offset: int, length: int) -> memoryview | None:
        """Every block from any source."""
        block_bytes = next(iter(self._opened.values())).table.block_bytes if self._opened else 0
        if block_bytes == 0 or offset // block_bytes == (offset + length - 1) // block_bytes:
            return None
        whole, self._memory = memoryview(bytearray(length)), None
        position = 0
        while position < length:
            step = min(block_bytes - (offset + position) % block_bytes, length - position)
            piece = self._whole(offset + position, step)
            if piece is None:
                return None
            whole[position : position + step] = piece
            position += step
        return whole

    def _of(self, source: Source) -> VerifiedShard:
        if source.node_id not in self._opened:
            self._opened[source.node_id] = source.open()
        return self._opened[source.node_id]

    def _failed(self, source: Source, error: ReplicatedCkptError) -> None:
        if not isinstance(error, ObjectCorrupt) or source.node_id not in self._opened:
            self._sources.remove(source)
            self._close(source.node_id)
        if source.node_id not in self._reported:
            self._reported.add(source.node_id)
            self._on_bad(source.node_id, error)

    def counted(self) -> Mapping[str, int]:
        """Bytes read since this was last asked, by node; those that turned out to be bad and the rest of blocks, too."""
        counted, self._bytes_by_node = self._bytes_by_node, Counter()
        return counted

    def any_opened(self) -> VerifiedShard | None:
        """A source that could be opened: its footer has been held against the manifest."""
        for source in self._in_order():
            try:
                return self._of(source)
            except ReplicatedCkptError as exc:
                self._failed(source, exc)
        return None

    def _close(self, node_id: str) -> None:
        opened = self._opened.pop(node_id, None)
        if opened is not None:
            opened.close()

    def close(self) -> None:
        for node_id in list(self._opened):
            self._close(node_id)
