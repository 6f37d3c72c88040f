"""The CRC32 in `torch.save`'s containers: which damage it detects, and items without one."""

import io
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.integrity.archive import ItemDamaged, Verdict, check_range


def saved(value: object, *, with_crc: bool = True) -> bytes:
    was = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(with_crc)
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
    finally:
        torch.serialization.set_crc32_options(was)
    return buffer.getvalue()


def verdict(raw: bytes | bytearray) -> Verdict:
    view = memoryview(raw)

    def fetch(offset: int, length: int) -> memoryview:
        assert 0 <= offset <= offset + length <= len(view), "the check reads only inside the item"
        return view[offset : offset + length]

    return check_range(fetch, len(raw))


TENSOR = saved(torch.arange(1000, dtype=torch.int32))
DATA = torch.arange(1000, dtype=torch.int32).numpy().tobytes()


def test_saved_items_are_intact() -> None:
    """Saved tensors and objects are intact. An item without CRC32, or that is no container, is unchecked."""
    assert verdict(TENSOR) is Verdict.INTACT
    assert verdict(saved({"step": 3, "tensors": [torch.ones(3), torch.zeros(0)]})) is Verdict.INTACT
    assert verdict(saved(torch.ones(3), with_crc=False)) is Verdict.UNCHECKED
    assert verdict(b"") is verdict(b"some planner's own bytes, long enough") is Verdict.UNCHECKED


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_every_wrong_byte_of_a_tensor_is_found(position: int, change: int) -> None:
    """A change of any data byte raises ItemDamaged."""
    raw = bytearray(TENSOR)
    raw[TENSOR.index(DATA) + position] ^= change
    with pytest.raises(ItemDamaged, match="expected CRC32"):
        verdict(raw)


@given(st.integers(0, len(TENSOR) - 1), st.integers(1, 255), st.integers(0, len(TENSOR)))
def test_damage_anywhere_is_a_verdict(position: int, change: int, length: int) -> None:
    """After any changed byte or truncation, the check returns or raises ItemDamaged, and reads only inside the item."""
    raw = bytearray(TENSOR)
    raw[position] ^= change
    for damaged in (raw, TENSOR[:length]):
        try:
            verdict(damaged)
        except ItemDamaged:
            continue


def test_sizes_beyond_32_bits_are_understood() -> None:
    """A record with ZIP64 size and offset is found and checked."""
    data, name, wide = b"0123456789" * 10, b"archive/data/0", 0xFFFFFFFF
    head = struct.pack("<4s5H3L2H", b"PK\x03\x04", 45, 0, 0, 0, 0, zlib.crc32(data), wide, wide, len(name), 0) + name
    extra = struct.pack("<2H3Q", 1, 24, len(data), len(data), 0)
    entry = struct.pack(
        "<4s6H3L5H2L",
        b"PK\x01\x02",
        45,
        45,
        0,
        0,
        0,
        0,
        zlib.crc32(data),
        wide,
        wide,
        len(name),
        len(extra),
        0,
        0,
        0,
        0,
        wide,
    )
    start, directory = len(head + data), entry + name + extra
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, len(directory), start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(directory), 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, wide, wide, 0)
    raw = bytearray(head + data + directory + end64 + locator + end)
    assert verdict(raw) is Verdict.INTACT
    raw[len(head) + 5] ^= 1
    with pytest.raises(ItemDamaged, match="expected CRC32"):
        verdict(raw)
