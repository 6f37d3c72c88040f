"""Hostile `.metadata` that an allow-list of names alone would accept is refused before anything is created."""

import contextlib
import dataclasses
import pickle
import resource
import struct
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.dcp.metadata.metadata import decode_metadata
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
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
FROZENSET = name("builtins", "frozenset")
SIZE = name("torch", "Size")
LONG = b"\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20)
PATH = name("pathlib", "PosixPath")


def whole(planner_data: bytes = b"N", places: bytes = b"}", described: bytes = b"}") -> bytes:
    """DCP's metadata with these parts."""
    state = text("state_dict_metadata") + described + text("storage_data") + places
    return pickled(METADATA + b")\x81}(" + text("planner_data") + planner_data + state + b"ub")


def smuggled(hidden: bytes) -> bytes:
    """C's unpickler drops the rest of a frame at an argument that crosses its end, and executes bytes that other
    parsers read as text.
    """
    frame = b"\x80\x04\x95" + struct.pack("<Q", 4) + b"J\0\0\0"
    return frame + b"\0" + b"\x8c" + bytes([len(hidden) + 1]) + b"x" + hidden + b"."


NOT_AS_PICKLED: dict[str, bytes] = {
    "a state for a class": pickled(METADATA + SLOT_STATE + b"b"),
    "a state for a function": pickled(name("torch.serialization", "_get_layout") + SLOT_STATE + b"b"),
    "a state for a class from the memo": pickled(METADATA + b"\x94h\x00" + SLOT_STATE + b"b"),
    "two states": pickled(METADATA + b")\x81}b}b"),
    "a state after it was shared": pickled(METADATA + b")\x81\x94h\x00\x85\x94h\x00}b"),
    "a large memo index": pickled(b"Nr" + struct.pack("<I", 1 << 31)),
    "a memo index out of order": pickled(b"Nq\x05"),
    "a frame that is too long": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
    "an argument that crosses a frame's end": smuggled(b"Nr" + struct.pack("<I", 1 << 31) + b"."),
    "a class's attribute behind a frame's end": smuggled(
        b"\x8c" + bytes([len(MODULE)]) + MODULE.encode() + b"\x8c\x0dMetadataIndex\x93N}"
        b"\x8c\x08__hash__\x8c\x08builtins\x8c\x07complex\x93s\x86b."
    ),
    "tuples of tuples behind a frame's end": smuggled(b"\x8f()" + b"2\x86" * 60 + b"\x90."),
    "a frame inside a frame": b"\x80\x04\x95" + struct.pack("<Q", 11) + b"\x95" + struct.pack("<Q", 1) + b"N.",
    "a text that is too long": pickled(b"\x8d" + struct.pack("<Q", 1 << 60)),
    "bytes that are too long": pickled(b"\x8e" + struct.pack("<Q", 1 << 62)),
    "a number that is too long": pickled(b"\x8b" + struct.pack("<I", 0x7FFFFFFF)),
    "a registered extension": pickled(b"\x82\x01"),
    "a persistent id as a line": pickled(b"Pid\n"),
    "an instance in protocol 0": pickled(b"(ios\nsystem\n"),
    "an object in protocol 1": pickled(b"(" + METADATA + b"o"),
    "an out-of-band buffer": pickled(b"\x97"),
    "keyword arguments": pickled(METADATA + b")}\x92"),
    "a name made of a number": pickled(b"K\x01K\x02\x93"),
    "a call of an unnamed value": pickled(b"N)R"),
    "a call without a tuple": pickled(FROZENSET + b"]R"),
    "nothing on the stack": pickled(b"R"),
    "two values at the end": pickled(b"NN"),
    "a mark at the end": pickled(b"(N"),
    "an empty file": b"",
    "no end": b"\x80\x04N",
    "an unknown protocol": b"\x80\x06N.",
}
NO_METADATA: dict[str, bytes] = {
    "a persistent id": whole(b"NQ"),
    "a state for an enum member": whole(name(MODULE, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R}" + text("x") + b"K\x01sb"),
    "a dotted name": whole(name(MODULE, "Metadata.__init__.__globals__")),
    "a name with a dot in an old opcode": whole(b"c" + MODULE.encode() + b"\nMetadata.__class__\n"),
    "a module's attribute": whole(name("torch", "serialization")),
    "an attribute of torch that is loaded when asked for": whole(name("torch", "_dynamo")),
    "os.system": whole(name("os", "system") + text("true") + b"\x85R"),
    "getattr": whole(name("builtins", "getattr") + METADATA + text("__init__") + b"\x86R"),
    "a class of an instance": whole(METADATA + b")\x81N}" + text("__class__") + METADATA + b"s\x86b"),
    "a pair for a state": pickled(METADATA + b")\x81N}\x86b"),
    "a class among the values": whole(b"}" + text("x") + name(MODULE, "StorageMeta") + b"s"),
    "a method of a dictionary": whole(
        b"N", name("collections", "OrderedDict") + b")R}" + text("values") + name("builtins", "set") + b"sb"
    ),
    "items for an instance": pickled(METADATA + b")\x81(Ne"),
    "a size of texts": whole(SIZE + text("1") + b"\x85\x85R"),
    "a dtype that is called": whole(name("torch", "float32") + b")R"),
    "a class that is called": pickled(METADATA + b"}\x85R"),
    "an instance with arguments": pickled(METADATA + b"}\x85\x81"),
    "a set of two arguments": whole(FROZENSET + b"]]\x86R"),
    "an unhashable key": whole(b"}]Ns"),
    "no state dict": whole(described=b"]"),
    "no places": whole(places=b"N"),
    "an entry without a name": whole(described=b"}K\x01" + name(MODULE, "BytesStorageMetadata") + b")\x81s"),
    "a tensor that is a number": whole(described=b"}" + text("w") + b"K\x01s"),
    "a tensor without a size": whole(described=b"}" + text("w") + name(MODULE, "TensorStorageMetadata") + b")\x81}bs"),
    "a place without a name": whole(places=b"}K\x01Ns"),
}
HOSTILE = NOT_AS_PICKLED | NO_METADATA


# Bombs: small files whose objects would take forever to hash, print or traverse.


def fetched(index: int) -> bytes:
    return b"j" + struct.pack("<I", index)


def tuples(count: int) -> bytes:
    """Tuples that each contain the previous one twice. The last one stays on the stack."""
    return b")\x94" + b"".join(fetched(at) + b"\x86\x94" for at in range(count))


def lists(count: int) -> bytes:
    """Lists that each contain the previous one twice."""
    return b"](" * count + b"NNe" + b"".join(b"\x94" + fetched(at) + b"e" for at in range(count - 1))


def colliding_sizes(count: int) -> list[torch.Size]:
    """Different sizes with the same hash. Source: `tuplehash` in CPython's Objects/tupleobject.c."""
    first, second, start, word = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    unmixed = (123456789 * pow(first, -1, 1 << 64)) & word
    target = (unmixed >> 31 | unmixed << 33) & word
    found: list[torch.Size] = []
    number = 0
    while len(found) < count:
        number += 1
        mixed = (start + number * second) & word
        mixed = ((mixed << 31 | mixed >> 33) & word) * first & word
        other = (target - mixed) * pow(second, -1, 1 << 64) & word
        if other < (1 << 61) - 1:
            found.append(torch.Size([number, other]))
    assert len(set(map(hash, found))) == 1
    return found


def numbered(at: int) -> bytes:
    """A key, and None as its value. Numbers that differ by a multiple of this prime have the same hash."""
    return b"\x8a\x14" + (at * ((1 << 61) - 1)).to_bytes(20, "little") + b"N"


def shared_chunks(tensors: int, chunks: int, padding: int) -> bytes:
    """Tensors that share one list of chunks."""
    shared = [ChunkStorageMetadata(torch.Size([at]), torch.Size([1])) for at in range(chunks)]
    tensor = TensorProperties(torch.float32), torch.Size([chunks])
    described = {f"t{at}": TensorStorageMetadata(*tensor, shared) for at in range(tensors)}
    return pickle.dumps(Metadata(described, b"\0" * padding, {}))  # type: ignore[arg-type]


def with_paths(paths: dict[str, tuple[str | int, ...]]) -> bytes:
    return pickle.dumps(Metadata({}, paths, {}))


def bombs() -> dict[str, bytes]:
    return {
        "a tuple in a tuple, very deep": whole(b")" + b"\x85" * 200_000),
        "a list in a list, very deep": whole(b"]" * 200_000 + b"a" * 199_999),
        "a deep key": whole(b"})" + b"\x85" * 5_000 + b"Ns"),
        "a deep element": whole(FROZENSET + b"](" + b")" + b"\x85" * 200_000 + b"e\x85R"),
        "tuples of shared tuples": whole(tuples(60)),
        "tuples of shared tuples, sixty thousand times": whole(tuples(60_000)),
        "lists of shared lists": whole(lists(60)),
        "lists of shared lists, in a large file": whole(
            b"}("
            + text("pad")
            + b"B"
            + struct.pack("<I", 17_000_000)
            + bytes(17_000_000)
            + text("x")
            + lists(60)
            + b"u"
        ),
        "a key of shared tuples": whole(b"}" + tuples(60) + b"Ns"),
        "an element of shared tuples": whole(b"\x8f(" + tuples(60) + b"\x90"),
        "elements of shared tuples": whole(FROZENSET + b"](" + tuples(60) + b"e\x85R"),
        "an enum of shared tuples": whole(name(MODULE, "_MEM_FORMAT_ENCODING") + tuples(60) + b"\x85R"),
        "a place of shared tuples": whole(places=b"}K\x01" + tuples(60) + b"s"),
        "one long number, many times": whole(LONG + b"\x94" + FROZENSET + b"](" + b"h\x00" * 100_000 + b"e\x85R"),
        "one long text, many times": whole(PATH + b"(" + text("x" * (1 << 20)) + b"\x94" + b"h\x00" * 100_000 + b"tR"),
        "numbers that hash alike": whole(b"}(" + b"".join(map(numbered, range(20_000))) + b"u"),
        "sizes that hash alike": pickle.dumps(
            Metadata(
                {},
                None,
                {
                    MetadataIndex(f"w{at}", size): StorageInfo("__0_0.distcp", 0, 1)
                    for at, size in enumerate(colliding_sizes(20_000))
                },
            )
        ),
        "chunks that tensors share": shared_chunks(10_000, 10_000, 0),
        "chunks that tensors share, in a large file": shared_chunks(10_000, 10_000, 4_000_000),
        "a list of half a billion places": with_paths({f"o.{1 << 29}": ("o", 1 << 29)}),
        "many long lists": with_paths({f"o{at}.{1 << 20}": (f"o{at}", 1 << 20) for at in range(5_000)}),
    }


def snapshot() -> list[dict[str, object]]:
    classes = (Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata, ChunkStorageMetadata)
    members = [vars(member) for member in dcp_metadata._MEM_FORMAT_ENCODING]
    return [dict(vars(cls)) for cls in (*classes, dcp_metadata._MEM_FORMAT_ENCODING)] + [dict(one) for one in members]


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_refused_and_torch_is_unchanged(raw: bytes) -> None:
    """Hostile bytes raise MetadataUnsafe, and torch's classes keep their attributes."""
    before = snapshot()
    with pytest.raises(MetadataUnsafe):
        decode_metadata(raw, "here")
    assert snapshot() == before


def read_each(folder: Path, said: Path) -> None:
    """Runs in a process of its own. Writes for each refused file by how many KiB the process has grown."""
    taken = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    )  # torch alone takes 1 to 5 GiB
    resource.setrlimit(resource.RLIMIT_AS, (taken + (3 << 30),) * 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with said.open("a", buffering=1) as lines:
        for path in sorted(folder.iterdir()):
            raw = path.read_bytes()
            with contextlib.suppress(MetadataUnsafe):
                decode_metadata(raw, "here")
                continue
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            lines.write(f"{path.name}|{grown}\n")


def test_greedy_bytes_take_neither_memory_nor_time(tmp_path: Path) -> None:
    """Bytes that ask for gigabytes, years of CPU or a deep recursion are refused within 100 s in all and 512 MiB."""
    greedy = {name_of: raw for name_of, raw in HOSTILE.items() if " long" in name_of or "large" in name_of} | bombs()
    folder, said = tmp_path / "greedy", tmp_path / "said"
    folder.mkdir()
    for name_of, raw in greedy.items():
        (folder / name_of).write_bytes(raw)
    reading = get_context("fork").Process(target=read_each, args=(folder, said))
    reading.start()
    reading.join(100)
    reading.kill()
    reading.join()
    refused = [line.split("|") for line in said.read_text().splitlines()]
    assert [line[0] for line in refused] == sorted(greedy), reading.exitcode
    assert {name_of: int(grown_kib) for name_of, grown_kib in refused if int(grown_kib) > 512 << 10} == {}


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
def test_an_item_outside_the_shards_is_refused(path: str) -> None:
    """A place outside the checkpoint's shards, or at a negative offset, raises MetadataUnsafe."""
    metadata = pickle.loads(example())
    (index,) = metadata.storage_data
    metadata.storage_data[index] = StorageInfo(path, 0, 64)
    with pytest.raises(MetadataUnsafe, match="is not a shard"):
        decode_metadata(pickle.dumps(metadata), "here")
    metadata.storage_data[index] = StorageInfo("__0_0.distcp", -1, 64)
    with pytest.raises(MetadataUnsafe, match="no shard"):
        decode_metadata(pickle.dumps(metadata), "here")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_a_pickler_writes_is_read(protocol: int) -> None:
    """Metadata in pickle protocols 2 to 5 is read and compares equal."""
    wanted = pickle.loads(example())
    assert decode_metadata(pickle.dumps(wanted, protocol), "here") == wanted


def test_fields_of_a_newer_torch_are_kept() -> None:
    """Fields that this version does not know are kept, as with stock torch."""
    wanted: Any = pickle.loads(example())
    (info,), (index,) = wanted.storage_data.values(), wanted.storage_data
    info.transform_descriptors = ["zstd"]
    wanted.compression = {"level": 3}
    object.__setattr__(index, "generation", (1, "a"))
    found: Any = decode_metadata(pickle.dumps(wanted), "here")
    assert vars(found.storage_data[index]) == vars(info)
    assert found.compression == {"level": 3}
    assert next(iter(found.storage_data)).generation == (1, "a")


def test_a_long_list_of_entries_is_read() -> None:
    """A state dict with a long list that has gaps is accepted."""
    paths: dict[str, tuple[str | int, ...]] = {f"o.{at}": ("o", at) for at in range(0, 30_000, 3)}
    assert decode_metadata(with_paths(paths), "here").planner_data == paths


def test_shared_parts_stay_shared() -> None:
    """An object that a pickle contains once is decoded to one object, so that memory grows with the file only."""
    shared = dataclasses.asdict(MetadataIndex("x")) | {"list": [1, 2]}
    found = decode_metadata(pickle.dumps(Metadata({}, {"a": shared, "b": shared}, {})), "here").planner_data
    assert found["a"] == shared
    assert found["a"] is found["b"]
