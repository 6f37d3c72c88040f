"""The zip container of `torch.save`: records are located without unpacking, and ambiguous containers are refused."""

import io
import struct
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt.core.integrity.archive import ArchiveDamaged, find_records, is_archive, within


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rewritten(raw: bytes, compression: int = zipfile.ZIP_STORED, more: tuple[str, ...] = ()) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(buffer, "w", compression) as to:
        for entry in source.infolist():
            to.writestr(entry.filename, source.read(entry))
        for name in more:
            to.writestr(name, b"x")
    return buffer.getvalue()


RAW = saved({"a": torch.arange(100)})


def overlapping() -> bytes:
    """A container whose directory gives two records the same offset."""
    raw = bytearray(RAW)
    first = raw.index(b"PK\x01\x02")
    second = raw.index(b"PK\x01\x02", first + 4)
    raw[second + 42 : second + 46] = raw[first + 42 : first + 46]
    return bytes(raw)


def test_records_are_found() -> None:
    """Records are found by name without the folder, at the right offset and size."""
    records = find_records(within(memoryview(RAW)), len(RAW))
    assert {"data.pkl", "data/0", "version"} <= set(records)
    data = records["data/0"]
    assert RAW[data.start : data.start + data.size] == torch.arange(100).numpy().tobytes()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (rewritten(RAW, zipfile.ZIP_DEFLATED), "store differently"),
        (rewritten(RAW, more=("archive/DATA.PKL",)), "two records of the same name"),
        (overlapping(), "another one|two records"),
        (RAW[:-1], "does not end"),
        (RAW + b"\0", "does not end"),
        (b"", "not a zip container"),
        (RAW[:-22] + b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 9, 9, 10, 1 << 30, 0), "outside"),
    ],
)
def test_other_containers_are_refused(raw: bytes, said: str) -> None:
    """Compressed, duplicate and overlapping records, and other data, are refused."""
    with pytest.raises(ArchiveDamaged, match=said):
        find_records(within(memoryview(raw)), len(raw))


@given(st.integers(0, len(RAW) - 1), st.integers(1, 255), st.integers(0, len(RAW)))
def test_damaged_containers_are_read_only_inside_the_item(position: int, change: int, length: int) -> None:
    """After any changed byte or truncation, the records lie inside the item, or ArchiveDamaged is raised."""
    damaged = bytearray(RAW)
    damaged[position] ^= change
    for raw in (bytes(damaged), RAW[:length]):

        def fetch(offset: int, size: int, raw: bytes = raw) -> memoryview:
            assert 0 <= offset <= offset + size <= len(raw)
            return memoryview(raw)[offset : offset + size]

        is_archive(fetch, len(raw))
        try:
            records = find_records(fetch, len(raw)).values()
        except ArchiveDamaged:
            continue
        assert sum(record.size for record in records) <= len(raw)
