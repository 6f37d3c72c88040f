"""A shard that stock torch wrote, read item by item: nothing of an item is given out that its own CRC32 contradicts."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replicated_ckpt.core.reading.source_order import ByteRange
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing
from replicated_ckpt.stores.unmanaged.directory import UnmanagedDirectory
from replicated_ckpt.stores.unmanaged.shard import UnmanagedFileShard
from replicated_ckpt.stores.verified import Expected

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
Opened = Callable[[bytes], UnmanagedFileShard]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    def opened(raw: bytes) -> UnmanagedFileShard:
        (tmp_path / "step-1").mkdir(exist_ok=True)
        (tmp_path / "step-1" / NAME).write_bytes(raw)
        return UnmanagedFileShard(UnmanagedDirectory(tmp_path), "step-1", NAME, Expected(len(WHOLE), 0), RANGES).open()

    return opened


def damaged(position: int) -> bytes:
    raw = bytearray(WHOLE)
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
