"""The fuzz targets. Each one draws an input, or takes one from its corpus, and reads it."""

import contextlib
import encodings.unicode_escape  # noqa: F401 - else the first error text would open its file in a watched block
import io
import json
import pickle
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.core.integrity.archive import ArchiveDamaged, find_records, within
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import is_shard_path
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import Fields
from replicated_ckpt.core.reading.unmanaged_files import item_ranges
from replicated_ckpt.dcp.convert.safetensors import decode_header
from replicated_ckpt.dcp.metadata.columns import ColumnsInvalid, decode_columns, encode_columns
from replicated_ckpt.dcp.metadata.metadata import decode_metadata
from replicated_ckpt.dcp.objects.weights_only import load_object
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.tensors.container import TensorReader
from replicated_ckpt.errors import ConfigInvalid, MetadataUnsafe, ObjectUnsafe
from tests.fuzz.differences import Difference, flattened, refusal_of
from tests.fuzz.mutate import changed, flipped, spliced
from tests.fuzz.values import Maker, pickled

METADATA_FIELDS = {one.name for one in fields(Metadata)}
_FORBIDDEN = ("os.", "subprocess.", "shutil.", "socket.", "ctypes.dlopen", "exec", "compile", "open")


@dataclass(frozen=True)
class Target:
    """`make` draws an input. `attempt` reads it and returns the outcome as a word; it raises an error for a defect."""

    make: Callable[[Random], bytes]
    attempt: Callable[[bytes], str]


def _pickle(random: Random) -> bytes:
    """A part of them is unchanged."""
    raw = pickled(Maker(random).value(), random)
    return raw if random.random() < 0.3 else changed(raw, random)


def _compared(raw: bytes) -> str:
    return "refused" if refusal_of(raw) else "alike"


def _valid_pickle(random: Random) -> bytes:
    return pickled(Maker(random).value(), random)


def _must_be_taken(raw: bytes) -> str:
    if (why := refusal_of(raw)) is not None:
        raise Difference(f"a valid pickle is refused: {why}")
    return "alike"


def _metadata(random: Random) -> bytes:
    raw = pickle.dumps(_any_metadata(random), random.choice((2, 3, 4, 4, 5)))
    return raw if random.random() < 0.2 else changed(raw, random)


def _any_metadata(random: Random) -> Metadata:
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    paths: dict[str, Any] = {}
    for at in range(random.randrange(6)):
        name = random.choice((f"layer.{at}.weight", f"o.{at}", "é", ""))
        shape = torch.Size([random.randrange(1 << 20) for _ in range(random.randrange(4))])
        chunks = [ChunkStorageMetadata(shape, shape) for _ in range(random.randrange(4))]
        is_tensor = random.random() < 0.7
        tensor = TensorStorageMetadata(TensorProperties(random.choice((torch.float32, torch.bool))), shape, chunks)
        described[name] = tensor if is_tensor else BytesStorageMetadata()
        info = StorageInfo(f"__{at}_0.distcp", random.randrange(1 << 40), random.randrange(1 << 20))
        places[MetadataIndex(name, shape if is_tensor else None, random.choice((None, at)))] = info
        paths[name] = random.choice((tuple(name.split(".")), ("o", at), at, [at], {"a": {1, 2}}))
    return Metadata(described, paths, places, random.choice((None, StorageMeta("x", "y"))))


def _read_metadata(raw: bytes) -> str:
    """The result equals that of C's unpickler, with the same names. The places that the agent reads are the same, too."""
    try:
        with _nothing_runs():
            found = decode_metadata(raw, "here")
    except MetadataUnsafe:
        with contextlib.suppress(MetadataUnsafe), _nothing_runs():
            item_ranges(raw)
        return "refused"
    try:
        stock = pickle.loads(raw)
    except ValueError as exc:
        if "too many values to unpack" in str(exc):  # properties of a newer torch, which decode_metadata leaves out
            return "read of a newer torch"
        raise
    except (ModuleNotFoundError, AttributeError):  # an attribute of a newer torch, which decode_metadata leaves out
        if attributes_of(follow(raw)) - METADATA_FIELDS:
            return "read of a newer torch"
        raise
    described = getattr(stock, "storage_meta", None)
    if type(described) is StorageMeta and not hasattr(described, "modules"):
        described.modules = []  # decode_metadata sets what an older torch did not have
    if flattened(found) != flattened(stock):
        raise Difference("C's unpickler makes different metadata")
    ranges = {(shard, item.offset, item.length) for shard, items in item_ranges(raw).items() for item in items}
    if ranges != {(info.relative_path, info.offset, info.length) for info in (found.storage_data or {}).values()}:
        raise Difference("the agent reads different places")
    return "read"


def attributes_of(tree: Any) -> set[str]:
    state = tree.state
    return set(state if isinstance(state, Fields) else state[::2])


_OF = 1000, 0xC0FFEE
"""Size and CRC32C of the pickle that the columns belong to."""


def _columns(random: Random) -> bytes:
    """Columns of regular tensors, most of them with changed numbers or bytes, and the matching checksum."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for at in range(random.randrange(1, 5)):
        dimensions, name = random.randrange(4), f"layer.{at}"
        size = torch.Size([1 << 20] * dimensions)
        offsets = {torch.Size([random.randrange(1 << 20) for _ in size]) for _ in range(random.randrange(1, 5))}
        chunks = [ChunkStorageMetadata(offset, size) for offset in offsets]
        described[name] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
        for number, offset in enumerate(offsets):
            places[MetadataIndex(name, offset)] = StorageInfo(f"__{number}_0.distcp", random.randrange(1 << 40), 64)
    raw = encode_columns(Metadata(described, {}, places), *_OF)
    assert raw is not None
    if random.random() < 0.2:
        return raw
    if random.random() < 0.3:
        raw = raw[:16] + random.choice((flipped, spliced))(raw[16:], random)
    else:
        at = random.randrange(2, len(raw) // 8) * 8
        raw = raw[:at] + struct.pack("<q", random.choice((-1, 0, 1, 7, 65, 1 << 40, (1 << 63) - 1))) + raw[at + 8 :]
    return raw[:8] + struct.pack("<I", crc32c(raw[16:])) + raw[12:]


def _read_columns(raw: bytes) -> str:
    """An error of the package, or one item of a shard for each chunk with a place."""
    try:
        with _nothing_runs():
            places = decode_columns(raw, *_OF, "here").storage_data
    except (ColumnsInvalid, MetadataUnsafe):
        return "refused"
    if len(list(places)) != len(places) or not all(is_shard_path(info.relative_path) for info in places.values()):
        raise Difference("columns have places that no pickle may have")
    return "read"


def _container(random: Random) -> bytes:
    """An object or a tensor in torch's container, changed in the pickle or anywhere."""
    buffer = io.BytesIO()
    tensor = torch.arange(random.randrange(50)).to(random.choice((torch.float32, torch.int8)))
    plain = [tensor, tensor[1:], {"step": 1, "lr": 0.1}, [(1, 2.0), {"a"}, b"x"], torch.get_rng_state()[:9]]
    torch.save(random.choice(plain), buffer)
    raw = buffer.getvalue()
    if random.random() < 0.5:
        record = find_records(within(memoryview(raw)), len(raw))["data.pkl"]
        inner = changed(raw[record.start : record.start + record.size], random)[: record.size].ljust(record.size, b".")
        return raw[: record.start] + inner + raw[record.start + record.size :]
    return random.choice((flipped, spliced))(raw, random)


def _read_container(raw: bytes) -> str:
    outcome = "refused"
    with _nothing_runs():
        with contextlib.suppress(ObjectUnsafe):
            load_object(memoryview(raw), "key", "shard")
            outcome = "read"
        with contextlib.suppress(ValueError, RuntimeError):
            TensorReader().read_tensor(memoryview(bytearray(raw)))
            outcome = "read"
    return outcome


def _header(random: Random) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}} if random.random() < 0.5 else {}
    end = 0
    for at in range(random.randrange(5)):
        size = random.randrange(9)
        fields[f"t{at}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(fields, indent=random.choice((None, 1))).encode()
    return struct.pack("<I", end) + (raw if random.random() < 0.2 else random.choice((flipped, spliced))(raw, random))


def _read_header(raw: bytes) -> str:
    """ConfigInvalid, or tensors that together are exactly the bytes after the header."""
    if len(raw) < 4:
        return "refused"
    (data_bytes,) = struct.unpack("<I", raw[:4])
    try:
        tensors = decode_header(raw[4:], data_bytes, "file")
    except ConfigInvalid:
        return "refused"
    if sum(tensor.end - tensor.start for tensor in tensors) != data_bytes:
        raise Difference("tensors overlap, or leave gaps")
    return "read"


def _read_archive(raw: bytes) -> str:
    def fetch(offset: int, length: int) -> memoryview:
        if not 0 <= offset <= offset + length <= len(raw):
            raise Difference("a read outside of the item")
        return memoryview(raw)[offset : offset + length]

    try:
        records = find_records(fetch, len(raw))
    except ArchiveDamaged:
        return "refused"
    if sum(record.size for record in records.values()) > len(raw):
        raise Difference("records are larger than their container")
    return "read"


TARGETS: Mapping[str, Target] = {
    "pickle": Target(_pickle, _compared),
    "valid": Target(_valid_pickle, _must_be_taken),
    "metadata": Target(_metadata, _read_metadata),
    "columns": Target(_columns, _read_columns),
    "container": Target(_container, _read_container),
    "archive": Target(_container, _read_archive),
    "safetensors": Target(_header, _read_header),
}


# Reading any bytes opens no file and runs nothing ----------------------------------------------------------------------

_is_watched = False


@contextlib.contextmanager
def _nothing_runs() -> Any:
    global _is_watched  # noqa: PLW0603 - an audit hook cannot be removed, so it has a switch
    _is_watched = True
    try:
        yield
    finally:
        _is_watched = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_watched and event.startswith(_FORBIDDEN):
        raise Difference(f"reading bytes led to {event} {arguments!r}"[:500])


sys.addaudithook(_audit)
