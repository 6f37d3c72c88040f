"""`.metadata` as columns: names once, numbers as int64. Derived from a `.metadata` that was read, and read in its place.

What is less regular than the chunks of a tensor stays a pickle, followed as `.metadata` is. docs/format.md has the bytes.
"""

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import is_shard_path
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.runtime.gc_pause import put_off
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo

_MAGIC = b"RCKCOL1\n"
_HEAD = struct.Struct("<8sI4xQQQQQQQ")
"""Magic; CRC32C of all after it; size and CRC32C of `.metadata`, sizes of pickle and paths; tensors, items, dimensions."""
_CRC_END = 16
_WORD = 8
_DIMENSIONS_MAX = 64
Numbers = npt.NDArray[np.int64]


class ColumnsInvalid(ValueError):
    """These bytes are no columns of that `.metadata`. Nothing is lost: `.metadata` says the same."""


class Places(MutableMapping[MetadataIndex, StorageInfo]):
    """Where each item lies: made when it is asked for. Copied or pickled, it is a dictionary; changed, it is one inside."""

    def __init__(
        self, chunks: Mapping[str, Sequence[ChunkStorageMetadata]], paths: Sequence[str], columns: Numbers
    ) -> None:
        """`columns`: of the items of all tensors, in order, number of the path, offset and length."""
        self._chunks = chunks
        self._paths = paths
        self._columns = columns
        self._first: dict[str, int] = {}
        self._numbers: dict[str, dict[torch.Size, int]] = {}
        self._count = 0
        for name, ones in chunks.items():
            self._first[name] = self._count
            self._count += len(ones)
        self.others: dict[MetadataIndex, StorageInfo] = {}

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        chunks = self._chunks.get(index.fqn)
        if chunks is None or index.offset is None:
            return self.others[index]
        number = index.index
        if number is None or not 0 <= number < len(chunks) or chunks[number].offsets != index.offset:
            number = self._numbers_of(index.fqn)[index.offset]
        path, offset, length = self._columns[:, self._first[index.fqn] + number].tolist()
        return StorageInfo(self._paths[path], offset, length)

    def _numbers_of(self, name: str) -> dict[torch.Size, int]:
        if name not in self._numbers:
            self._numbers[name] = {chunk.offsets: number for number, chunk in enumerate(self._chunks[name])}
        return self._numbers[name]

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name, chunks in self._chunks.items():
            for chunk in chunks:
                yield MetadataIndex(name, chunk.offsets)
        yield from self.others

    def __len__(self) -> int:
        return self._count + len(self.others)

    def __setitem__(self, index: MetadataIndex, info: StorageInfo) -> None:
        self._spread()[index] = info

    def __delitem__(self, index: MetadataIndex) -> None:
        del self._spread()[index]

    def _spread(self) -> dict[MetadataIndex, StorageInfo]:
        """All of them, made."""
        self.others, self._chunks, self._count = dict(self.items()), {}, 0
        return self.others

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)


def encode_columns(metadata: Metadata, size_bytes: int, crc: int) -> bytes | None:
    """The columns of the metadata that a `.metadata` of this size and CRC32C says; None: it is not regular enough."""
    with put_off():
        tensors, counts = _tensors(metadata), Counter(index.fqn for index in metadata.storage_data)
        places = {name: _places(metadata, name, entry, counts[name]) for name, entry in tensors.items()}
        regular = {name for name, found in places.items() if found}
        if not regular:
            return None
        rest = copy(metadata)
        rest.state_dict_metadata = {
            name: _without_chunks(tensors[name]) if name in regular else entry
            for name, entry in metadata.state_dict_metadata.items()
        }
        rest.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn not in regular}
        chunks = [entry.chunks if name in regular else [] for name, entry in tensors.items()]
        infos = [info for found in places.values() for info in found]
        number_by_path = {path: number for number, path in enumerate(sorted({str(one.relative_path) for one in infos}))}
        columns = [
            [len(ones) for ones in chunks],
            [len(ones[0].offsets) if ones else 0 for ones in chunks],
            [number_by_path[str(one.relative_path)] for one in infos],
            [one.offset for one in infos],
            [one.length for one in infos],
            [number for ones in chunks for one in ones for number in one.offsets],
            [number for ones in chunks for one in ones for number in one.sizes],
        ]
        try:
            numbers = b"".join(np.array(column, np.int64).tobytes() for column in columns)
        except OverflowError:
            return None
        pickled, paths = encode_metadata(rest), json.dumps(list(number_by_path)).encode()
    sizes = size_bytes, crc, len(pickled), len(paths), len(chunks), len(infos), len(columns[-1])
    body = b"".join((pickled, paths, bytes(-(len(pickled) + len(paths)) % _WORD), numbers))
    raw = _HEAD.pack(_MAGIC, 0, *sizes)[_CRC_END:] + body
    return _MAGIC + struct.pack("<I4x", crc32c(raw)) + raw


def decode_columns(raw: bytes, size_bytes: int, crc: int, source: str) -> Metadata:
    """The metadata that a `.metadata` of this size and CRC32C says.

    Raises:
        ColumnsInvalid: these are damaged, or of another one. MetadataUnsafe: of the pickle in them.
    """
    if len(raw) < _HEAD.size:
        raise ColumnsInvalid("they are torn")
    magic, own_crc, of_bytes, of_crc, pickle_bytes, path_bytes, tensors, items, dimensions = _HEAD.unpack_from(raw)
    if magic != _MAGIC or crc32c(memoryview(raw)[_CRC_END:]) != own_crc:
        raise ColumnsInvalid("their checksum does not match")
    if (of_bytes, of_crc) != (size_bytes, crc):
        raise ColumnsInvalid("they are of another .metadata")
    begin = _HEAD.size + pickle_bytes + path_bytes
    begin += -(pickle_bytes + path_bytes) % _WORD
    counts = tensors, tensors, items, items, items, dimensions, dimensions
    if not items or len(raw) != begin + _WORD * sum(counts):
        raise ColumnsInvalid("their sizes contradict each other")
    numbers = np.frombuffer(raw, np.int64, offset=begin)
    if numbers.min() < 0:
        raise ColumnsInvalid("a number is negative")
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    paths = _paths(raw[_HEAD.size + pickle_bytes : _HEAD.size + pickle_bytes + path_bytes])
    if parts[2].max() >= len(paths):
        raise ColumnsInvalid("an item lies in no shard")
    metadata = decode_metadata(raw[_HEAD.size : _HEAD.size + pickle_bytes], source)
    with put_off():
        chunks = _chunks(_tensors(metadata), parts)
    places = Places(chunks, paths, numbers[2 * tensors : 2 * tensors + 3 * items].reshape(3, items))
    places.others = dict(metadata.storage_data)
    metadata.storage_data = places
    return metadata


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    described = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in described if isinstance(entry, TensorStorageMetadata)}


def _places(metadata: Metadata, name: str, entry: TensorStorageMetadata, count: int) -> list[StorageInfo]:
    """Where the chunks of a tensor that has so many places lie, in their order; empty: columns cannot say it."""
    if count != len(entry.chunks):
        return []
    places = metadata.storage_data
    found = [places.get(MetadataIndex(name, chunk.offsets)) for chunk in entry.chunks]
    shapes = {len(size) for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes)}
    if len(shapes) != 1 or len({chunk.offsets for chunk in entry.chunks}) != len(found):
        return []
    infos = [one for one in found if one is not None and not getattr(one, "transform_descriptors", None)]
    return infos if len(infos) == len(found) else []


def _without_chunks(entry: TensorStorageMetadata) -> TensorStorageMetadata:
    found = copy(entry)
    found.chunks = []
    return found


def _paths(raw: bytes) -> list[str]:
    try:
        paths = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ColumnsInvalid("their names of shards are unreadable") from exc
    if type(paths) is not list or not all(type(path) is str and is_shard_path(path) for path in paths):
        raise ColumnsInvalid("they name what is no shard")
    return paths


def _chunks(
    tensors: Mapping[str, TensorStorageMetadata], parts: Sequence[Numbers]
) -> dict[str, list[ChunkStorageMetadata]]:
    """Gives the tensors their chunks; returns them by name."""
    counts, shapes = parts[0].tolist(), parts[1].tolist()
    if len(tensors) != len(counts) or sum(counts) != parts[2].size or max(shapes, default=0) > _DIMENSIONS_MAX:
        raise ColumnsInvalid("they do not have as many tensors or items as they say")
    if sum(count * shape for count, shape in zip(counts, shapes, strict=True)) != parts[5].size:
        raise ColumnsInvalid("they do not have as many offsets as they say")
    made, at = {}, 0
    for (name, entry), count, shape in zip(tensors.items(), counts, shapes, strict=True):
        if not count:
            continue
        if entry.chunks:
            raise ColumnsInvalid("they describe a tensor twice")
        offsets, sizes = (part[at : at + count * shape].reshape(count, shape).tolist() for part in parts[5:])
        entry.chunks = made[name] = [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            for offset, size in zip(offsets, sizes, strict=True)
        ]
        at += count * shape
    return made
