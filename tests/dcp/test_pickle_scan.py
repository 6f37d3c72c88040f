"""Hostile `.metadata`: what an allow-list of names alone would let through is refused before anything is made."""

import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.dcp.metadata import decoded_metadata
from replicated_ckpt.dcp.torch_private import StorageInfo
from replicated_ckpt.errors import MetadataUnsafe

MODULE = dcp_metadata.__name__


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def pickled(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


METADATA = name(MODULE, "Metadata")
SLOT_STATE = b"N}" + text("__setstate__") + name("builtins", "set") + b"s\x86"  # (None, {"__setstate__": set})
DOUBLED = b"\x94" + b"0h\x00h\x00\x86"

HOSTILE: dict[str, bytes] = {
    "a state for a class": pickled(METADATA + SLOT_STATE + b"b"),
    "a state for a function": pickled(name("torch.serialization", "_get_layout") + SLOT_STATE + b"b"),
    "a state for an enum member": pickled(name(MODULE, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R" + SLOT_STATE + b"b"),
    "a state for a class from the memo": pickled(METADATA + b"\x94h\x00" + SLOT_STATE + b"b"),
    "two states": pickled(METADATA + b")\x81}b}b"),
    "a state after it was shared": pickled(METADATA + b")\x81\x94h\x00\x85\x94h\x00}b"),
    "a large memo index": pickled(b"Nr" + struct.pack("<I", 1 << 31) + b"0N"),
    "a memo index out of order": pickled(b"Nq\x05"),
    "a frame that is too long": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "a text that is too long": pickled(b"\x8d" + struct.pack("<Q", 1 << 60)),
    "bytes that are too long": pickled(b"\x8e" + struct.pack("<Q", 1 << 62)),
    "a number that is too long": pickled(b"\x8b" + struct.pack("<I", 0x7FFFFFFF)),
    "a registered extension": pickled(b"\x82\x01"),
    "a persistent id": pickled(b"Pid\n"),
    "an old instance": pickled(b"(i" + b"os\nsystem\n"),
    "an old object": pickled(b"(" + METADATA + b"o"),
    "a buffer out of band": pickled(b"\x97"),
    "keyword arguments": pickled(METADATA + b")}\x92"),
    "a dotted name": pickled(name(MODULE, "Metadata.__init__.__globals__")),
    "a name with a dot in an old opcode": pickled(b"c" + MODULE.encode() + b"\nMetadata.__class__\n"),
    "a module's attribute": pickled(name("torch", "serialization")),
    "os.system": pickled(name("os", "system") + text("true") + b"\x85R"),
    "getattr": pickled(name("builtins", "getattr") + METADATA + text("__init__") + b"\x86R"),
    "a name made of a number": pickled(b"K\x01K\x02\x93"),
    "a call of what was not named": pickled(b"N)R"),
    "nothing on the stack": pickled(b"R"),
    "an empty file": b"",
    "no end": b"\x80\x04N",
    "keys of shared tuples": pickled(
        b"}K\x01\x85\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60)) + b"Ns"
    ),
}


def snapshot() -> list[dict[str, object]]:
    classes = (Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, ChunkStorageMetadata)
    return [dict(vars(cls)) for cls in (*classes, dcp_metadata._MEM_FORMAT_ENCODING)]


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_it_is_refused_and_torch_is_as_it_was(raw: bytes) -> None:
    """MetadataUnsafe, and no class of torch has another attribute than before."""
    before = snapshot()
    with pytest.raises(MetadataUnsafe):
        decoded_metadata(raw, "here")
    assert snapshot() == before


@pytest.mark.parametrize("name_of", ["a large memo index", "a text that is too long", "a number that is too long"])
def test_it_takes_no_memory(tmp_path: Path, name_of: str) -> None:
    """A few bytes that ask for gigabytes are refused in a process that could not have them."""
    (tmp_path / "raw").write_bytes(HOSTILE[name_of])
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from replicated_ckpt.dcp.pickle_scan import scan\n"
        "from replicated_ckpt.errors import MetadataUnsafe\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try:\n    scan(Path(sys.argv[1]).read_bytes(), None)\n"
        "except MetadataUnsafe:\n    print('refused', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    home = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", code, str(tmp_path / "raw")]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=60, check=True)
    said, peak_kib = done.stdout.split()
    assert said == "refused"
    assert int(peak_kib) < 1 << 20


def example() -> bytes:
    offset = torch.Size([0, 128])
    properties = TensorProperties(dtype=torch.bfloat16)
    chunk = ChunkStorageMetadata(offset, torch.Size([2, 2]))
    index = MetadataIndex("layer.weight", offset, 0)
    return pickle.dumps(
        Metadata(
            {"layer.weight": TensorStorageMetadata(properties, torch.Size([2, 2]), [chunk])},
            planner_data={"layer.weight": ("layer", "weight", 1)},
            storage_data={index: StorageInfo("__0_0.distcp", 0, 64)},
            storage_meta=StorageMeta(checkpoint_id="step-1", save_id="x"),
        )
    )


@pytest.mark.parametrize(
    "path", ["../__0_0.distcp", "/etc/passwd", "a/__0_0.distcp", "", "__0_0.distcp\0", ".metadata"]
)
def test_an_item_lies_in_a_shard_or_nowhere(path: str) -> None:
    """A place outside the checkpoint's own shards is refused, and so is one at a negative offset."""
    metadata = pickle.loads(example())
    (index,) = metadata.storage_data
    metadata.storage_data[index] = StorageInfo(path, 0, 64)
    with pytest.raises(MetadataUnsafe, match="no shard"):
        decoded_metadata(pickle.dumps(metadata), "here")
    metadata.storage_data[index] = StorageInfo("__0_0.distcp", -1, 64)
    with pytest.raises(MetadataUnsafe, match="no shard"):
        decoded_metadata(pickle.dumps(metadata), "here")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_a_pickler_writes_is_read(protocol: int) -> None:
    """What torch writes comes back equal, whichever pickle protocol it chose."""
    wanted = pickle.loads(example())
    assert decoded_metadata(pickle.dumps(wanted, protocol), "here") == wanted


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_the_bytes_are_nothing_else_comes_out(data: st.DataObject) -> None:
    """Random changes of a valid pickle give metadata of DCP's own classes, or MetadataUnsafe."""
    raw = bytearray(example())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    before = snapshot()
    try:
        found = decoded_metadata(bytes(raw), "here")
    except MetadataUnsafe:
        pass
    else:
        assert type(found) is Metadata
    assert snapshot() == before
