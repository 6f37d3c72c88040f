"""`.metadata` as columns: names once, numbers as int64, to be read in place of its pickle.

What is less regular than the chunks of a tensor stays a pickle, followed as `.metadata` is. docs/format.md has the bytes.
"""

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import is_shard_path
from replicated_ckpt.dcp.metadata.build import COLLISIONS_MAX, DIMENSIONS_MAX
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.runtime.gc_pause import put_off
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.errors import MetadataUnsafe

_MAGIC = b"RCKCOL1\n"
_HEAD = struct.Struct("<8sI4xQQQQQQQ")
"""Magic; CRC32C of all after it; size and CRC32C of the pickle, sizes of the rest, of paths; tensors, items, dimensions."""
_CRC_END = 16
_WORD = 8
_flatten = chain.from_iterable
Numbers = npt.NDArray[np.int64]


class ColumnsInvalid(ValueError):
    """These bytes are no columns of that pickle. Nothing is lost: the pickle says the same."""


class Places(MutableMapping[MetadataIndex, StorageInfo]):
    """Where each item lies: made when it is asked for. Copied or pickled, it is a dictionary; changed, it is one inside.

    The hint of an index is the number of its chunk, as DCP's global plan gives it.
    """

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
            _check_hashes(self._chunks[name])
            self._numbers[name] = {chunk.offsets: number for number, chunk in enumerate(self._chunks[name])}
        return self._numbers[name]

    def __iter__(self) -> Iterator[MetadataIndex]:
        for name, chunks in self._chunks.items():
            _check_hashes(chunks)
            for number, chunk in enumerate(chunks):
                yield MetadataIndex(name, chunk.offsets, number)
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


def _check_hashes(chunks: Sequence[ChunkStorageMetadata]) -> None:
    """So few may hash alike that no dictionary of them gets slow. Called wherever one may be made of them."""
    if max(Counter(hash(chunk.offsets) for chunk in chunks).values(), default=0) > COLLISIONS_MAX:
        raise MetadataUnsafe("The .metadata has offsets that were chosen to hash alike.")


class _Located:
    """Where each item lies, looked at once and in order: there may be more of them than any cache holds."""

    def __init__(self, places: Mapping[MetadataIndex, StorageInfo]) -> None:
        self.number_by_path: dict[str, int] = {}
        self._by_offset: dict[str, dict[torch.Size | None, int]] = {}
        self._columns: tuple[list[int], list[int], list[int]] = [], [], []
        self._odd: set[str] = set()
        paths, offsets, lengths = self._columns
        for number, (index, info) in enumerate(places.items()):
            self._by_offset.setdefault(index.fqn, {})[index.offset] = number
            paths.append(self.number_by_path.setdefault(str(info.relative_path), len(self.number_by_path)))
            offsets.append(info.offset)
            lengths.append(info.length)
            if getattr(info, "transform_descriptors", None):
                self._odd.add(index.fqn)

    def order(self, name: str, chunks: Sequence[ChunkStorageMetadata]) -> list[int]:
        """The numbers of a tensor's items in the order of its chunks; empty: columns cannot say where they lie."""
        numbers = self._by_offset.get(name, {})
        if len(numbers) != len(chunks) or name in self._odd:
            return []
        offsets, sizes = [one.offsets for one in chunks], [one.sizes for one in chunks]
        if len({*map(len, offsets), *map(len, sizes)}) != 1 or numbers.keys() != set(offsets):
            return []
        return [numbers[offset] for offset in offsets]

    def columns(self) -> Numbers:
        """Of each item, by its number: the number of its path, offset and length. Raises OverflowError."""
        return np.array(self._columns, np.int64)


def encode_columns(metadata: Metadata, size_bytes: int, crc: int) -> bytes | None:
    """The columns of the metadata that a pickle of this size and CRC32C says; None: it is not regular enough."""
    with put_off():
        tensors, there = _tensors(metadata), _Located(metadata.storage_data)
        regular = {name: found for name, entry in tensors.items() if (found := there.order(name, entry.chunks))}
        if not regular:
            return None
        rest = copy(metadata)
        rest.state_dict_metadata = {
            name: _without_chunks(tensors[name]) if name in regular else entry
            for name, entry in metadata.state_dict_metadata.items()
        }
        rest.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn not in regular}
        chunks = [entry.chunks if name in regular else [] for name, entry in tensors.items()]
        try:
            numbers = [
                np.array([len(ones) for ones in chunks], np.int64),
                np.array([len(ones[0].offsets) if ones else 0 for ones in chunks], np.int64),
                *there.columns()[:, list(_flatten(regular.values()))],
                np.array(list(_flatten(one.offsets for ones in chunks for one in ones)), np.int64),
                np.array(list(_flatten(one.sizes for ones in chunks for one in ones)), np.int64),
            ]
        except OverflowError:
            return None
        pickled, paths = encode_metadata(rest), json.dumps(list(there.number_by_path)).encode()
    sizes = size_bytes, crc, len(pickled), len(paths), len(chunks), numbers[2].size, numbers[-1].size
    padding = bytes(-(len(pickled) + len(paths)) % _WORD)
    body = b"".join((pickled, paths, padding, *(column.tobytes() for column in numbers)))
    raw = _HEAD.pack(_MAGIC, 0, *sizes)[_CRC_END:] + body
    return _MAGIC + struct.pack("<I4x", crc32c(raw)) + raw


def decode_columns(raw: bytes | memoryview, size_bytes: int, crc: int, source: str) -> Metadata:
    """The metadata that a pickle of this size and CRC32C says.

    Raises:
        ColumnsInvalid: these are damaged, or of another one. MetadataUnsafe: of the pickle in them; or later, of its
        places, if their offsets were chosen to make looking them up slow.
    """
    if len(raw) < _HEAD.size:
        raise ColumnsInvalid("they are torn")
    magic, own_crc, of_bytes, of_crc, pickle_bytes, path_bytes, tensors, items, dimensions = _HEAD.unpack_from(raw)
    if magic != _MAGIC or crc32c(memoryview(raw)[_CRC_END:]) != own_crc:
        raise ColumnsInvalid("their checksum does not match")
    if (of_bytes, of_crc) != (size_bytes, crc):
        raise ColumnsInvalid("they are of another pickle")
    begin = _HEAD.size + pickle_bytes + path_bytes
    begin += -(pickle_bytes + path_bytes) % _WORD
    counts = tensors, tensors, items, items, items, dimensions, dimensions
    if not items or len(raw) != begin + _WORD * sum(counts):
        raise ColumnsInvalid("their sizes contradict each other")
    numbers = np.frombuffer(raw, np.int64, offset=begin)
    if numbers.min() < 0:
        raise ColumnsInvalid("a number is negative")
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    paths = _paths(bytes(raw[_HEAD.size + pickle_bytes : _HEAD.size + pickle_bytes + path_bytes]))
    if parts[2].max() >= len(paths):
        raise ColumnsInvalid("an item lies in no shard")
    metadata = decode_metadata(bytes(raw[_HEAD.size : _HEAD.size + pickle_bytes]), source)
    with put_off():
        chunks = _chunks(_tensors(metadata), parts)
    located = numbers[2 * tensors : 2 * tensors + 3 * items].reshape(3, items).copy()  # a view would keep all of `raw`
    places = Places(chunks, paths, located)
    places.others = dict(metadata.storage_data)
    metadata.storage_data = places
    return metadata


def _tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    described = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in described if isinstance(entry, TensorStorageMetadata)}


def _without_chunks(entry: TensorStorageMetadata) -> TensorStorageMetadata:
    found = copy(entry)
    found.chunks = []
    return found


def _paths(raw: bytes) -> list[str]:
    try:
        paths = json.loads(raw.decode())
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
    if len(tensors) != len(counts) or sum(counts) != parts[2].size or max(shapes, default=0) > DIMENSIONS_MAX:
        raise ColumnsInvalid("they do not have as many tensors or items as they say")
    if sum(count * shape for count, shape in zip(counts, shapes, strict=True)) != parts[5].size:
        raise ColumnsInvalid("they do not have as many offsets as they say")
    made, at = {}, 0
    for (name, entry), count, shape in zip(tensors.items(), counts, shapes, strict=True):
        if not count:
            continue
        if entry.chunks:
            raise ColumnsInvalid("they describe a tensor twice")
        if shape != len(entry.size):
            raise ColumnsInvalid("they have a chunk of other dimensions than its tensor")
        offsets, sizes = (part[at : at + count * shape].reshape(count, shape).tolist() for part in parts[5:])
        entry.chunks = made[name] = [
            ChunkStorageMetadata(torch.Size(offset), torch.Size(size))
            for offset, size in zip(offsets, sizes, strict=True)
        ]
        at += count * shape
    return made
