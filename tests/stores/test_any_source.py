"""One shard on several nodes: each byte comes from any node with an intact copy, without waiting for a silent node."""

import errno
from collections.abc import Callable

import pytest

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.any_source import BAD_READS_MAX, AnySource, Source, Tables
from replicated_ckpt.stores.verified import Expected, VerifiedShard
from replicated_ckpt.testing.shards import table_of

DATA = bytes(range(256)) * 40
RAW = DATA + table_of([DATA], 1024).encode()
EXPECTED = Expected(len(RAW), crc32c(RAW))


class Copy(VerifiedShard):
    """A copy in memory that counts its reads, and raises on reads after it is cut off."""

    def __init__(self, node: str) -> None:
        self.reads = 0
        self.is_cut_off = False
        self.bad_blocks: set[int] = set()
        self.unread_blocks: set[int] = set()
        self.on_cut: Callable[[], object] = lambda: None
        super().__init__(node, "shard", EXPECTED)

    def _fill(self, target: memoryview, offset: int) -> None:
        self.reads += 1
        if self.is_cut_off:
            self.on_cut()
            raise StoreUnavailable(self._store, "read", "shard", "timed out")
        if offset // 1024 in self.unread_blocks:
            raise self._corrupt("Input/output error") from OSError(errno.EIO, "Input/output error")
        target[:] = RAW[offset : offset + len(target)]
        if offset // 1024 in self.bad_blocks:
            target[0] ^= 1

    def close(self) -> None:
        """Does nothing: no file is open."""


def sources_of(copies: dict[str, Copy], silent: set[str], failures: list[str]) -> AnySource:
    def noted(node: str, _: ReplicatedCkptError) -> None:
        failures.append(node)

    sources = [Source(node, EXPECTED, lambda _, node=node: copies[node]) for node in copies]  # type: ignore[misc]
    return AnySource(sources, noted, silent.__contains__)


def read(source: AnySource, offset: int, length: int) -> bytes:
    found = source.read(offset, length)
    assert found is not None
    return bytes(found)


def test_an_opened_source_that_fell_silent_elsewhere_is_not_waited_for() -> None:
    """Another shard's time-out marked node a as silent: this shard continues at node b at once, and keeps a as a
    source.
    """
    copies, silent, failures = {"a": Copy("a"), "b": Copy("b")}, set[str](), list[str]()
    source = sources_of(copies, silent, failures)
    assert read(source, 0, 1024) == DATA[0:1024]
    assert source.last_node == "a"
    silent.add("a")
    before = copies["a"].reads
    assert read(source, 1024, 1024) == DATA[1024:2048]
    assert source.last_node == "b"
    assert copies["a"].reads == before
    assert failures == []


def test_a_silent_node_is_asked_if_no_other_is_left() -> None:
    """If every other source fails, the silent node is asked."""
    copies, silent, failures = {"a": Copy("a"), "b": Copy("b")}, {"a"}, list[str]()
    source = sources_of(copies, silent, failures)
    assert read(source, 0, 10) == DATA[0:10]
    copies["b"].is_cut_off = True
    assert read(source, 4096, 10) == DATA[4096:4106]
    assert source.last_node == "a"
    assert failures == ["b"]


def test_a_node_that_falls_silent_while_another_is_asked_comes_last() -> None:
    """A node that falls silent during a read from another node is not asked next."""
    copies, silent, failures = {node: Copy(node) for node in "abc"}, set[str](), list[str]()
    source = sources_of(copies, silent, failures)
    assert read(source, 0, 10) == DATA[0:10]
    copies["a"].is_cut_off = True
    copies["a"].on_cut = lambda: silent.add("b")
    before = copies["b"].reads
    assert read(source, 4096, 10) == DATA[4096:4106]
    assert source.last_node == "c"
    assert copies["b"].reads == before


class File(VerifiedShard):
    """A file in memory of any length."""

    def __init__(self, node: str, raw: bytes, expected: Expected) -> None:
        self._raw = raw
        super().__init__(node, "shard", expected)

    def _fill(self, target: memoryview, offset: int) -> None:
        if offset + len(target) > len(self._raw):
            raise self._corrupt("the file ended early")
        target[:] = self._raw[offset : offset + len(target)]

    def close(self) -> None:
        """Does nothing: no file is open."""


def files(*raws: bytes, rebuilt: Tables | None = None) -> AnySource:
    sources = [
        Source(f"n{index}", EXPECTED, lambda expected, index=index, raw=raw: File(f"n{index}", raw, expected))  # type: ignore[misc]
        for index, raw in enumerate(raws)
    ]
    return AnySource(sources, lambda *_: None, rebuilt=rebuilt)


def flipped(*positions: int) -> bytes:
    raw = bytearray(RAW)
    for position in positions:
        raw[position] ^= 1
    return bytes(raw)


FOOTER = len(DATA) + 2


@pytest.mark.parametrize("raw", [flipped(FOOTER), RAW + b"more", flipped(*range(FOOTER, len(RAW) - 24))])
def test_intact_data_under_a_damaged_footer_is_read(raw: bytes) -> None:
    """The only copy has a damaged or extended footer: its data is read if it matches the file's checksum."""
    assert read(files(raw), 0, len(DATA)) == DATA


@pytest.mark.parametrize("cut", [1, 5, 24, 28])
def test_intact_data_without_its_footer_is_read(cut: int) -> None:
    """With the usual block size, data is read although its footer is truncated."""
    raw = DATA + table_of([DATA]).encode()
    expected = Expected(len(raw), crc32c(raw))
    source = AnySource([Source("a", expected, lambda asked: File("a", raw[:-cut], asked))], lambda *_: None)
    assert read(source, 0, len(DATA)) == DATA


def test_a_footer_with_a_damaged_block_size_is_rebuilt() -> None:
    """A shard of one block has one footer for every block size from its length on. The rebuilt footer is the original
    one.
    """
    data = DATA[:1000]
    table = table_of([data])
    raw = bytearray(data + table.encode())
    raw[-16] ^= 1  # the lowest bit of the block size; the size of the data and a checksum follow
    rebuilt: Tables = {}
    expected = Expected(len(raw), table.file_crc())
    source = AnySource(
        [Source("a", expected, lambda asked: File("a", bytes(raw), asked))], lambda *_: None, rebuilt=rebuilt
    )
    assert read(source, 0, len(data)) == data
    assert list(rebuilt.values()) == [table]


def test_a_footer_is_rebuilt_once() -> None:
    """Readers of one load share a rebuilt footer, because rebuilding reads the whole shard."""
    rebuilt: Tables = {}
    assert read(files(flipped(FOOTER), rebuilt=rebuilt), 0, 10) == DATA[:10]
    assert list(rebuilt) == [EXPECTED]
    damaged = flipped(FOOTER, 5000)
    assert files(damaged).read(0, 10) is None
    assert read(files(damaged, rebuilt=rebuilt), 0, 10) == DATA[:10]


def test_another_copys_footer_opens_a_file() -> None:
    """One copy has a bad block, the other a bad footer: together they are read completely."""
    assert read(files(flipped(100), flipped(FOOTER, 5000)), 0, len(DATA)) == DATA
    assert read(files(flipped(9000), RAW[:8000]), 0, 8000) == DATA[:8000]
    assert files(flipped(100), flipped(FOOTER, 100)).read(0, 10) is None


def test_damaged_data_is_never_returned() -> None:
    """If footer and data are damaged on every copy, no byte is returned."""
    for raw in (flipped(FOOTER, 100), RAW[:100], b"", bytes(len(RAW))):
        assert files(raw).read(0, 10) is None
        assert files(raw).any_opened() is None


def test_given_memory_is_not_changed_by_the_next_read() -> None:
    """A range read into given memory is not changed by the next read, also if whole blocks do not fit into that memory."""
    source = sources_of({"a": Copy("a")}, set(), [])
    memory = [memoryview(bytearray(100)) for _ in range(2)]
    found = [source.read(start, 100, memory[number]) for number, start in enumerate((0, 1000))]
    assert list(map(bytes, filter(None, found))) == [DATA[0:100], DATA[1000:1100]]
    assert memory == found


def test_a_source_of_only_wrong_bytes_loses_its_place() -> None:
    """A source with `BAD_READS_MAX` more wrong reads than good ones is asked last. A source with some bad blocks keeps
    its place.
    """
    copies = {"a": Copy("a"), "b": Copy("b")}
    source = sources_of(copies, set(), [])
    copies["a"].bad_blocks = set(range(10))
    for block in range(10):
        assert read(source, block * 1024, 1024) == DATA[block * 1024 : (block + 1) * 1024]
    assert copies["a"].reads == Copy("c").open().reads + 2 * BAD_READS_MAX
    copies = {"a": Copy("a"), "b": Copy("b")}
    source = sources_of(copies, set(), [])
    copies["a"].bad_blocks = {2, 5, 8}
    for block in range(10):
        assert read(source, block * 1024, 1024) == DATA[block * 1024 : (block + 1) * 1024]
        assert source.last_node == ("b" if block in copies["a"].bad_blocks else "a")


def test_a_disk_that_fails_is_asked_once_and_then_only_for_what_no_other_has() -> None:
    """After one read error a disk is asked only for blocks that no other source has, because each error may take
    seconds.
    """
    copies, failures = {"a": Copy("a"), "b": Copy("b")}, list[str]()
    source = sources_of(copies, set(), failures)
    copies["a"].unread_blocks = set(range(4, 10))
    copies["b"].unread_blocks = {3}
    for block in range(4):
        assert read(source, 1024 * block, 1024) == DATA[1024 * block : 1024 * (block + 1)]
    before = copies["a"].reads
    for block in range(4, 10):
        assert read(source, 1024 * block, 1024) == DATA[1024 * block : 1024 * (block + 1)]
    assert copies["a"].reads == before + 1
    assert read(source, 1024 * 3, 1024) == DATA[1024 * 3 : 1024 * 4]
    assert (source.last_node, failures) == ("a", ["a", "b"])
