"""A shard that stock torch wrote, read item by item: nothing of an item is given out that its own CRC32 contradicts."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unmanaged import (
    UncheckedItems,
    UnmanagedDirectory,
    UnmanagedFileShard,
    UnmanagedInspector,
)
from replicated_ckpt.stores.verified import Expected
from replicated_ckpt.testing.shards import table_of

NAME = "__0_0.distcp"


def container(value: torch.Tensor, *, with_crc: bool = True) -> bytes:
    torch.serialization.set_crc32_options(with_crc)
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
    finally:
        torch.serialization.set_crc32_options(True)
    return buffer.getvalue()


TENSOR = torch.arange(300_000, dtype=torch.int32)
ITEMS = [container(torch.ones(3)), container(TENSOR), b"a planner's own bytes", container(TENSOR + 7, with_crc=False)]
RANGES = [ByteRange(sum(map(len, ITEMS[:index])), len(item)) for index, item in enumerate(ITEMS)]
WHOLE = b"".join(ITEMS)
IN_TENSOR = RANGES[1].offset + ITEMS[1].index(TENSOR.numpy().tobytes())
OURS = WHOLE + table_of([WHOLE]).encode()
"""The same with a footer of ours, as a shard has whose manifest was lost."""
Opened = Callable[..., UnmanagedFileShard]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    def opened(raw: bytes, size_bytes: int = len(WHOLE)) -> UnmanagedFileShard:
        (tmp_path / "step-1").mkdir(exist_ok=True)
        (tmp_path / "step-1" / NAME).write_bytes(raw)
        directory, expected = UnmanagedDirectory(tmp_path), Expected(size_bytes, 0)
        return UnmanagedFileShard(directory, "step-1", NAME, expected, UncheckedItems(RANGES)).open()

    return opened


def damaged(position: int, whole: bytes = WHOLE) -> bytes:
    raw = bytearray(whole)
    raw[position] ^= 1
    return bytes(raw)


def test_any_range_of_an_intact_shard_is_read(opened: Opened) -> None:
    """Whole items, several at once, parts of one, nothing: the bytes as they lie there."""
    shard = opened(WHOLE)
    spans = [
        (0, len(WHOLE)),
        (IN_TENSOR + 5, 1000),
        (RANGES[2].offset, 3),
        (7, 0),
        *((r.offset, r.length) for r in RANGES),
    ]
    for offset, length in spans:
        assert shard.read(offset, length) == WHOLE[offset : offset + length]
    with pytest.raises(ObjectCorrupt, match="outside"):
        shard.read(1, len(WHOLE))
    shard.close()


@pytest.mark.parametrize("span", [(RANGES[1].offset, RANGES[1].length), (0, len(WHOLE)), (IN_TENSOR + 100_000, 16)])
def test_a_flipped_bit_is_found_before_a_byte_is_given_out(opened: Opened, span: tuple[int, int]) -> None:
    """Also where only another part of the item is asked for, and every time; the other items are still read."""
    shard = opened(damaged(IN_TENSOR + 500_000))
    for _ in range(2):
        with pytest.raises(ObjectCorrupt, match="expected CRC32"):
            shard.read(*span)
    assert shard.read(0, RANGES[0].length) == ITEMS[0]
    shard.close()


def test_what_has_no_crc_is_given_out_as_it_is(opened: Opened) -> None:
    """Bytes that no container protects, and a container without CRC32, cannot be checked."""
    for item in RANGES[2:]:
        raw = damaged(item.offset + item.length // 2)
        shard = opened(raw)
        assert shard.read(item.offset, item.length) == raw[item.offset : item.end]
        shard.close()


def test_a_file_of_another_size_is_not_the_shard(opened: Opened) -> None:
    """It is not opened, be it longer or shorter."""
    for raw in (WHOLE + b"x", WHOLE[:-1], b""):
        with pytest.raises(ObjectMissing, match="expected a file of"):
            opened(raw)


# Shards of ours whose manifest is lost ---------------------------------------------------------------------------


@pytest.mark.parametrize("item", RANGES, ids=["small", "tensor", "bytes", "no crc"])
def test_a_footer_of_ours_tells_what_items_do_not(opened: Opened, tmp_path: Path, item: ByteRange) -> None:
    """A flipped bit in an item without a checksum of its own is found, by a load and by `verify`."""
    for offset, length in [(0, len(WHOLE)), (RANGES[2].offset, 3), (7, 0)]:
        shard = opened(OURS, len(OURS))
        assert shard.read(offset, length) == WHOLE[offset : offset + length]
        shard.close()
    assert problems(tmp_path) == []
    shard = opened(damaged(item.offset + item.length // 2, OURS), len(OURS))
    for _ in range(2):
        with pytest.raises(ObjectCorrupt, match="expected CRC32C"):
            shard.read(item.offset, item.length)
    shard.close()
    ((expected, found),) = problems(tmp_path)
    assert (expected, found[:5]) == ("blocks as its footer has them", "bytes")


@pytest.mark.parametrize("from_end", [1, 10, 14, 20, 24, 30])
def test_a_damaged_footer_leaves_items_with_checksums(opened: Opened, tmp_path: Path, from_end: int) -> None:
    """What has none could be anything: it is refused, where stock torch's is given out as it is."""
    shard = opened(damaged(len(OURS) - from_end, OURS), len(OURS))
    assert shard.read(RANGES[1].offset, RANGES[1].length) == ITEMS[1]
    for item in RANGES[2:]:
        with pytest.raises(ObjectCorrupt, match="footer of checksums is damaged"):
            shard.read(item.offset, item.length)
    shard.close()
    assert "footer of checksums is damaged" in problems(tmp_path)[0][1]


def test_the_empty_shard_of_a_rank_that_had_nothing_to_save_is_no_problem(opened: Opened, tmp_path: Path) -> None:
    """Stock torch leaves one, and `.metadata` does not name it. Any other file that it does not name is pointed out."""
    opened(WHOLE).close()
    (tmp_path / "step-1" / "__1_0.distcp").touch()
    assert problems(tmp_path) == []
    (tmp_path / "step-1" / "__2_0.distcp").write_bytes(b"x")
    assert problems(tmp_path) == [("no such file", "one")]


def test_a_shard_that_has_gone_hides_no_other(opened: Opened, tmp_path: Path) -> None:
    """What was listed and cannot be opened, as its job removes it at that moment, leaves the others to be read."""
    opened(damaged(IN_TENSOR)).close()
    gone = NAME.replace("0_0", "0_1")
    (tmp_path / "step-1" / NAME).rename(tmp_path / "step-1" / gone.replace("_1", "_2"))
    os.mkfifo(tmp_path / "step-1" / gone)
    assert len(problems(tmp_path, gone, gone.replace("_1", "_2"))) == 1


def problems(root: Path, *names: str) -> list[tuple[str, str]]:
    inspector, ranges = UnmanagedInspector(LocalStore(root), "node"), dict.fromkeys(names or [NAME], RANGES)
    return [(finding.expected, finding.found) for finding in inspector.inspect("step-1", ranges)]
