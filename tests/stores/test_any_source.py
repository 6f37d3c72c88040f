"""One shard at several nodes: whoever fell silent is not asked again while another has the bytes."""

from replicated_ckpt.core.checksum import crc32c, table_of
from replicated_ckpt.errors import ReplicatedCkptError, StoreUnavailable
from replicated_ckpt.stores.any_source import AnySource, Source
from replicated_ckpt.stores.verified import Expected, VerifiedShard

DATA = bytes(range(256)) * 40
RAW = DATA + table_of([DATA], 1024).encoded()
EXPECTED = Expected(len(RAW), crc32c(RAW))


class Copy(VerifiedShard):
    """A copy in memory that counts how often it is read, and does not answer once it is cut off."""

    def __init__(self, node: str) -> None:
        self.reads = 0
        self.is_cut_off = False
        super().__init__(node, "shard", EXPECTED)

    def _fill(self, target: memoryview, offset: int) -> None:
        self.reads += 1
        if self.is_cut_off:
            raise StoreUnavailable(self._store, "read", "shard", "timed out")
        target[:] = RAW[offset : offset + len(target)]

    def close(self) -> None:
        """Nothing is open."""


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
    """Another shard met the time-out: this one goes on at the next node at once, and loses no source by it."""
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


def test_a_silent_node_is_asked_where_nobody_else_is_left() -> None:
    """It may answer again, and it is better waited for than given up."""
    copies, silent, failures = {"a": Copy("a"), "b": Copy("b")}, {"a"}, list[str]()
    source = sources_of(copies, silent, failures)
    assert read(source, 0, 10) == DATA[0:10]
    copies["b"].is_cut_off = True
    assert read(source, 4096, 10) == DATA[4096:4106]
    assert source.last_node == "a"
    assert failures == ["b"]
