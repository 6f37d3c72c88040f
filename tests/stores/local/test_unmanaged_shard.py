"""A shard that stock torch wrote, read by items: an item whose CRC32 does not match is refused."""

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
"""The same with a footer of this package, like a shard whose manifest was lost."""
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
    """Whole items, several items, parts of an item and empty ranges are read."""
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
def test_a_flipped_bit_is_found_before_a_byte_is_returned(opened: Opened, span: tuple[int, int]) -> None:
    """A read of any part of a damaged item raises, every time. Other items are read."""
    shard = opened(damaged(IN_TENSOR + 500_000))
    for _ in range(2):
        with pytest.raises(ObjectCorrupt, match="expected CRC32"):
            shard.read(*span)
    assert shard.read(0, RANGES[0].length) == ITEMS[0]
    shard.close()


def test_an_item_without_a_crc_is_returned_unverified(opened: Opened) -> None:
    """Bytes without a zip container, or in one without CRC32, are returned unverified."""
    for item in RANGES[2:]:
        raw = damaged(item.offset + item.length // 2)
        shard = opened(raw)
        assert shard.read(item.offset, item.length) == raw[item.offset : item.end]
        shard.close()


def test_a_file_of_another_size_is_not_the_shard(opened: Opened) -> None:
    """A longer or shorter file is refused."""
    for raw in (WHOLE + b"x", WHOLE[:-1], b""):
        with pytest.raises(ObjectMissing, match="expected a file of"):
            opened(raw)


# Shards of this package whose manifest is lost -----------------------------------------------------------------


@pytest.mark.parametrize("item", RANGES, ids=["small", "tensor", "bytes", "no crc"])
def test_a_footer_of_ours_protects_items_without_checksums(opened: Opened, tmp_path: Path, item: ByteRange) -> None:
    """The footer of this package detects a flipped bit in an item without a checksum, in a load and in `verify`."""
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
    """With a damaged footer, items with a CRC32 are read, and items without one are refused."""
    shard = opened(damaged(len(OURS) - from_end, OURS), len(OURS))
    assert shard.read(RANGES[1].offset, RANGES[1].length) == ITEMS[1]
    for item in RANGES[2:]:
        with pytest.raises(ObjectCorrupt, match="footer of checksums is damaged"):
            shard.read(item.offset, item.length)
    shard.close()
    assert "footer of checksums is damaged" in problems(tmp_path)[0][1]


def test_the_empty_shard_of_a_rank_that_had_nothing_to_save_is_no_problem(opened: Opened, tmp_path: Path) -> None:
    """`verify` accepts an empty shard that `.metadata` does not name, as stock torch writes for a rank without data. It
    reports other unnamed files.
    """
    opened(WHOLE).close()
    (tmp_path / "step-1" / "__1_0.distcp").touch()
    assert problems(tmp_path) == []
    (tmp_path / "step-1" / "__2_0.distcp").write_bytes(b"x")
    assert problems(tmp_path) == [("no such file", "one")]


def test_a_removed_shard_hides_no_other(opened: Opened, tmp_path: Path) -> None:
    """A listed shard that cannot be opened, as during a removal, does not stop the inspection of others."""
    opened(damaged(IN_TENSOR)).close()
    gone = NAME.replace("0_0", "0_1")
    (tmp_path / "step-1" / NAME).rename(tmp_path / "step-1" / gone.replace("_1", "_2"))
    os.mkfifo(tmp_path / "step-1" / gone)
    assert len(problems(tmp_path, gone, gone.replace("_1", "_2"))) == 1


def problems(root: Path, *names: str) -> list[tuple[str, str]]:
    inspector, ranges = UnmanagedInspector(LocalStore(root), "node"), dict.fromkeys(names or [NAME], RANGES)
    return [(finding.expected, finding.found) for finding in inspector.inspect("step-1", ranges)]
