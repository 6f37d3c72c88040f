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
SLOT_STATE = b"N}" + text("planner_data") + b"K\x01s\x86"  # (None, {"planner_data": 1})
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


# Bombs: little to read, and endless to hash, print or walk through for whoever makes it or reports it.


def fetched(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def listed(count: int) -> bytes:
    """Lists on the stack, each of which is put twice into the one before it, after it was made."""
    pairs = (fetched(i) + (fetched(i + 1) + b"a") * 2 for i in range(count - 1))
    return b"]\x94" * count + b"".join(pairs)


def whole(places: bytes, described: bytes = b"}") -> bytes:
    """Metadata with these places of items and this state dict."""
    state = text("state_dict_metadata") + described + text("storage_data") + places
    return pickled(METADATA + b")\x81}(" + state + b"ub")


FROZENSET = name("builtins", "frozenset")
SIZE = name("torch", "Size")
LONG = b"\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20)
PATH = name("pathlib", "PosixPath")

BOMBS: dict[str, bytes] = {
    "a tuple in a tuple, a million deep": pickled(FROZENSET + b"](" + b")" + b"\x85" * 1_000_000 + b"e\x85R"),
    "a deep key": pickled(b"})" + b"\x85" * 5_000 + b"Ns"),
    "tuples of shared tuples, sixty thousand times": pickled(
        b")\x94" + b"".join(fetched(i) * 2 + b"\x86\x94" for i in range(60_000))
    ),
    "an enum of shared lists": pickled(listed(40) + name(MODULE, "_MEM_FORMAT_ENCODING") + fetched(0) + b"\x85R"),
    "a place of shared lists": pickled(
        listed(40)
        + METADATA
        + b")\x81}("
        + text("state_dict_metadata")
        + b"}"
        + text("storage_data")
        + b"}K\x01"
        + fetched(0)
        + b"sub"
    ),
    "values of shared lists": pickled(
        b"".join((fetched(i - 1) * 2 if i else b"NN").join((b"](", b"e\x94")) for i in range(60))
    ),
    "one long number, many times": pickled(LONG + b"\x94" + FROZENSET + b"](" + b"h\x00" * 100_000 + b"e\x85R"),
    "numbers that hash alike": pickled(
        b"}("
        + b"".join(
            b"\x8a\x14" + (i * ((1 << 61) - 1)).to_bytes(20, "little") + b"N" for i in range(1 << 90, (1 << 90) + 9)
        )
        + b"u"
    ),
    "a path of many long parts": pickled(
        b"}" + text("x" * (1 << 20)) + b"\x94" + PATH + b"(" + b"h\x00" * 100_000 + b"tRNs"
    ),
    "one long key, many times": pickled(text("x" * (1 << 18)) + b"\x85\x94" + b"}(" + b"h\x00N" * 500_000 + b"u"),
}

PLANTED: dict[str, bytes] = {
    "a class of an instance": pickled(METADATA + b")\x81N}" + text("__class__") + METADATA + b"s\x86b"),
    "a pair for a state": pickled(METADATA + b")\x81N}\x86b"),
    "a class among the values": whole(b"}" + text("x") + name(MODULE, "StorageMeta") + b"s"),
    "a method of a dictionary": whole(
        name("collections", "OrderedDict") + b")R}" + text("values") + name("builtins", "set") + b"sb"
    ),
    "items for an instance": pickled(METADATA + b")\x81(N" + b"e"),
    "elements for a tuple": pickled(b")(N\x90"),
    "a size of a size": pickled(SIZE + SIZE + b"K\x01\x85\x85R\x85R"),
    "a size of lists": pickled(SIZE + b"]\x85R"),
    "an instance of a number": pickled(b"K\x01)\x81"),
    "a dtype that is called": pickled(name("torch", "float32") + b")R"),
    "a class that is called": pickled(METADATA + b"}\x85R"),
    "an instance with arguments": pickled(METADATA + b"}\x85\x81"),
    "a set of two arguments": pickled(FROZENSET + b"]]\x86R"),
    "an attribute of torch that is loaded when asked for": pickled(name("torch", "_dynamo")),
    "no state dict": whole(b"}", b"]"),
    "no places": whole(b"N"),
    "an entry without a name": whole(b"}", b"}K\x01" + name(MODULE, "BytesStorageMetadata") + b")\x81s"),
    "a tensor that is a number": whole(b"}", b"}" + text("w") + b"K\x01s"),
    "a tensor without a size": whole(b"}", b"}" + text("w") + name(MODULE, "TensorStorageMetadata") + b")\x81}bs"),
    "a place without a name": whole(b"}K\x01Ns"),
}
HOSTILE |= PLANTED


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


READS_EACH = """
import resource, sys
from pathlib import Path
from replicated_ckpt.dcp.metadata import decoded_metadata
from replicated_ckpt.errors import MetadataUnsafe
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        decoded_metadata(path.read_bytes(), "here")
    except MetadataUnsafe as exc:
        print(path.name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, exc.message, sep="|", flush=True)
"""


def test_it_takes_neither_memory_nor_time(tmp_path: Path) -> None:
    """Bytes that ask for gigabytes, for years or for the end of the process are refused where they would be felt."""
    greedy = {name_of: raw for name_of, raw in HOSTILE.items() if " long" in name_of or "large" in name_of} | BOMBS
    for name_of, raw in greedy.items():
        (tmp_path / name_of).write_bytes(raw)
    home = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", READS_EACH, str(tmp_path)]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=60, check=False)
    refused = [line.split("|") for line in done.stdout.splitlines()]
    assert [line[0] for line in refused] == sorted(greedy), done.stderr
    assert {name_of: int(grown_kib) for name_of, grown_kib, _ in refused if int(grown_kib) > 128 << 10} == {}


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
