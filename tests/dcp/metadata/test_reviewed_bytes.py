"""Hostile bytes found in code review, each of which once took unbounded memory or time: all are refused."""

import io
import struct
import time
import zipfile
from collections.abc import Mapping

import pytest

from replicated_ckpt.core.reading.unmanaged_files import item_ranges
from replicated_ckpt.dcp.metadata.metadata import decode_metadata
from replicated_ckpt.dcp.objects.weights_only import load_object
from replicated_ckpt.errors import MetadataUnsafe, ObjectUnsafe

DCP = "torch.distributed.checkpoint.metadata"
SOON_S = 5.0


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, qualified: str) -> bytes:
    return f"c{module}\n{qualified}\n".encode()


def container(pickled: bytes, records: Mapping[str, bytes]) -> memoryview:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for record, raw in records.items():
            archive.writestr(f"archive/{record}", raw)
    return memoryview(buffer.getvalue())


def test_an_empty_storage_does_not_grow() -> None:
    """A tensor of 2^28 numbers over an empty record is refused."""
    storage = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x00tQ"
    shape = b"\x8a\x09" + (1 << 28).to_bytes(9, "little") + b"\x85K\x01\x85"
    pickled = b"\x80\x02" + name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + b"K\x00" + shape
    pickled += b"\x89" + name("collections", "OrderedDict") + b")RtR."
    with pytest.raises(ObjectUnsafe):
        load_object(container(pickled, {"data/0": b""}), "key", "shard")


@pytest.mark.parametrize("parts", [b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00", b""], ids=["some", "none"])
def test_a_type_of_numpy_without_its_parts_is_refused(parts: bytes) -> None:
    """A numpy dtype whose state is incomplete raises ObjectUnsafe."""
    pickled = b"\x80\x02" + name("numpy", "dtype") + b")R(K\x03" + text("<") + parts + b"tb."
    with pytest.raises(ObjectUnsafe):
        load_object(container(pickled, {}), "key", "shard")


def test_a_path_of_thousands_of_parts_is_refused() -> None:
    """A path of 20,000 parts is refused in time: its prefixes together have quadratic length."""
    raw = b"\x80\x02" + name(DCP, "Metadata") + b")\x81}(" + text("state_dict_metadata") + b"}"
    raw += text("planner_data") + b"}" + text("a") + b"(" + b"K\x00" * 20_000 + b"ts" + text("storage_data") + b"}ub."
    began = time.monotonic()
    with pytest.raises(MetadataUnsafe):
        decode_metadata(raw, "here")
    assert time.monotonic() - began < SOON_S


def test_a_size_has_few_dimensions() -> None:
    """A `torch.Size` of 100,000 dimensions is refused."""
    info = name("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81}(" + text("relative_path")
    info += text("__0_0.distcp") + text("offset") + b"K\x00" + text("length") + b"K\x01ub"
    raw = (
        b"\x80\x02"
        + name(DCP, "Metadata")
        + b")\x81}("
        + text("state_dict_metadata")
        + b"}"
        + text("storage_data")
        + b"}("
    )
    raw += name(DCP, "MetadataIndex") + b")\x81}(" + text("fqn") + text("k") + text("offset")
    raw += name("torch", "Size") + b"(" + b"K\x01" * 100_000 + b"t\x85Rub" + info + b"uub."
    with pytest.raises(MetadataUnsafe):
        decode_metadata(raw, "here")
    assert item_ranges(raw), "an agent reads only the places, which are valid"
