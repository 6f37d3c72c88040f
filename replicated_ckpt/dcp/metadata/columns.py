"""`.metadata` as columns: each name once, and numbers as int64. A load reads them in place of the pickle.

Objects, and tensors whose chunks do not have one place each, stay in a smaller pickle, "the rest". Layout, little endian:

    the pickle, then zeros up to a multiple of 8
    8s   magic              b"RCKCOL1\\n"
    u32  columns_crc        CRC32C of all bytes of the columns from the 16th on
    u32  zero
    u64  7 numbers          size and CRC32C of the pickle; bytes of the rest, and of the paths; T tensors, I items, and D
                            dimensions of all items
    the rest                a pickle of `.metadata` without the chunks and places that the columns have
    the shards' paths       a JSON list, then zeros up to a multiple of 8
    u64  T, T               for each tensor in the rest: number of its chunks in the columns, and of their dimensions
    u64  I, I, I            for each item: index of its path; its offset and length in that shard
    u64  D, D               for each item: offsets of its chunk, then sizes
    u64, u64, 8s            the end: bytes of the pickle, bytes of the columns, magic b"RCKCOLS\\n"
"""

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields
from itertools import chain
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import is_shard_path
from replicated_ckpt.dcp.metadata.build import COLLISIONS_MAX, DIMENSIONS_MAX
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.runtime.gc_pause import pause_collections
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.errors import MetadataUnsafe

_MAGIC = b"RCKCOL1\n"
_HEAD = struct.Struct("<8sI4xQQQQQQQ")
"""Magic; CRC32C of all after it; size and CRC32C of the pickle, sizes of the rest, of paths; tensors, items, dimensions."""
_CRC_END = 16
_WORD = 8
_CHUNK_FIELDS, _INFO_FIELDS = len(fields(ChunkStorageMetadata)), len(fields(StorageInfo))
"""An instance with further attributes, which a planner has given it, is pickled."""
_flatten = chain.from_iterable
Numbers = npt.NDArray[np.int64]


class ColumnsInvalid(ValueError):
    """The bytes are not the columns of this pickle. Nothing is lost, because the pickle has the same contents."""


class Places(MutableMapping[MetadataIndex, StorageInfo]):
    """The place of each item. A look-up makes one place; the first iteration or change makes all.

    A program may use this object like the dictionary that stock DCP has here: changes to its values stay, and changes to
    the tensors' chunks do not affect it. A copy or pickle is a dictionary. The hint of an index is the number of its
    chunk, as DCP's global plan sets it. Several threads may look up at once.
    """

    def __init__(
        self,
        offsets: Mapping[str, Sequence[torch.Size]],
        paths: Sequence[str],
        columns: Numbers,
        others: Mapping[MetadataIndex, StorageInfo],
    ) -> None:
        """`columns`: of the tensors' items, in order, number of the path, offset and length. `others`: the rest."""
        self._offsets = offsets
        self._paths = paths
        self._columns = columns
        self._first: dict[str, int] = {}
        self._numbers: dict[str, dict[torch.Size, int]] = {}
        self._made: dict[int, StorageInfo] = {}
        self._count = 0
        for name, ones in offsets.items():
            self._first[name] = self._count
            self._count += len(ones)
        self._others = dict(others)

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        offsets = self._offsets.get(index.fqn)
        if offsets is None or index.offset is None:
            return self._others[index]
        number = index.index
        # The hint may be missing or stale, as a planner may change chunks: the offset decides.
        if number is None or not 0 <= number < len(offsets) or offsets[number] != index.offset:
            number = self._numbers_of(index.fqn, offsets)[index.offset]
        number += self._first[index.fqn]
        if number not in self._made:
            path, offset, length = self._columns[:, number].tolist()
            # setdefault: two threads may make the same one, and callers may change what they get.
            self._made.setdefault(number, StorageInfo(self._paths[path], offset, length))
        return self._made[number]

    def _numbers_of(self, name: str, offsets: Sequence[torch.Size]) -> dict[torch.Size, int]:
        if name not in self._numbers:
            _check_hashes(offsets)
            self._numbers[name] = {offset: number for number, offset in enumerate(offsets)}
        return self._numbers[name]

    def __iter__(self) -> Iterator[MetadataIndex]:
        return iter(self._all())

    def __len__(self) -> int:
        return self._count + len(self._others)

    def __setitem__(self, index: MetadataIndex, info: StorageInfo) -> None:
        self._all()[index] = info

    def __delitem__(self, index: MetadataIndex) -> None:
        del self._all()[index]

    def __or__(self, other: Mapping[MetadataIndex, StorageInfo]) -> dict[MetadataIndex, StorageInfo]:
        return {**self._all(), **other}

    def __ror__(self, other: Mapping[MetadataIndex, StorageInfo]) -> dict[MetadataIndex, StorageInfo]:
        return {**other, **self._all()}

    def __ior__(self, other: Mapping[MetadataIndex, StorageInfo]) -> Self:
        self.update(other)
        return self

    def copy(self) -> dict[MetadataIndex, StorageInfo]:
        return dict(self._all())

    def popitem(self) -> tuple[MetadataIndex, StorageInfo]:
        return self._all().popitem()

    def _all(self) -> dict[MetadataIndex, StorageInfo]:
        """A dictionary of all places."""
        # An earlier call made the dictionary.
        if not self._offsets:
            return self._others
        made: dict[MetadataIndex, StorageInfo] = {}
        rows = enumerate(zip(*self._columns.tolist(), strict=True))
        for name, offsets in self._offsets.items():
            _check_hashes(offsets)
            for hint, (at, (number, (path, offset, length))) in enumerate(zip(offsets, rows, strict=False)):
                info = self._made.get(number) or StorageInfo(self._paths[path], offset, length)
                made[MetadataIndex(name, at, hint)] = info
        self._others, self._offsets, self._count = made | self._others, {}, 0
        return self._others

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self._all().items()),)


def _check_hashes(offsets: Sequence[torch.Size]) -> None:
    """Bounds how many offsets hash alike, so that no dictionary of them gets slow. Called before one is made."""
    if max(Counter(map(hash, offsets)).values(), default=0) > COLLISIONS_MAX:
        raise MetadataUnsafe("The .metadata has too many offsets that hash alike.")


class _Located:
    """The place of each item, for columns. Reads the places in one pass, because there may be millions."""

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
            # Columns have three numbers for an item: anything more would be lost.
            if getattr(info, "transform_descriptors", None) or len(vars(info)) > _INFO_FIELDS:
                self._odd.add(index.fqn)

    def order(self, name: str, chunks: Sequence[ChunkStorageMetadata]) -> list[int]:
        """The numbers of a tensor's items in the order of its chunks; empty: columns cannot express their places."""
        numbers = self._by_offset.get(name, {})
        # A foreign planner may make places and chunks that do not match one to one.
        if len(numbers) != len(chunks) or name in self._odd:
            return []
        if any(len(vars(one)) != _CHUNK_FIELDS for one in chunks):
            return []
        offsets, sizes = [one.offsets for one in chunks], [one.sizes for one in chunks]
        if len({*map(len, offsets), *map(len, sizes)}) != 1 or numbers.keys() != set(offsets):
            return []
        return [numbers[offset] for offset in offsets]

    def columns(self) -> Numbers:
        """Of each item, by its number: the number of its path, offset and length. Raises OverflowError."""
        return np.array(self._columns, np.int64)


def encode_columns(metadata: Metadata, size_bytes: int, crc: int) -> bytes | None:
    """The columns of the metadata whose pickle has this size and CRC32C; None: it is not regular enough."""
    with pause_collections():
        tensors, there = _tensors(metadata), _Located(metadata.storage_data)
        regular = {name: found for name, entry in tensors.items() if (found := there.order(name, entry.chunks))}
        # The state has only scalars and objects: reading the pickle is as fast.
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
        # A planner may use a number beyond int64, which only the pickle can hold.
        except OverflowError:
            return None
        pickled, paths = encode_metadata(rest), json.dumps(list(there.number_by_path)).encode()
    sizes = size_bytes, crc, len(pickled), len(paths), len(chunks), numbers[2].size, numbers[-1].size
    padding = bytes(-(len(pickled) + len(paths)) % _WORD)
    body = b"".join((pickled, paths, padding, *(column.tobytes() for column in numbers)))
    raw = _HEAD.pack(_MAGIC, 0, *sizes)[_CRC_END:] + body
    return _MAGIC + struct.pack("<I4x", crc32c(raw)) + raw


def decode_columns(raw: bytes | memoryview, size_bytes: int, crc: int, source: str) -> Metadata:
    """The metadata of the pickle with this size and CRC32C.

    Raises:
        ColumnsInvalid: they are damaged, or belong to another pickle. MetadataUnsafe: the pickle in them is unsafe. A later
        look-up in the places raises it, too, if their offsets were chosen to make look-ups slow.
    """
    if len(raw) < _HEAD.size:
        raise ColumnsInvalid("they are torn")
    magic, own_crc, of_bytes, of_crc, pickle_bytes, path_bytes, tensors, items, dimensions = _HEAD.unpack_from(raw)
    # Checked before anything is parsed: a flipped bit must not look like another layout.
    if magic != _MAGIC or crc32c(memoryview(raw)[_CRC_END:]) != own_crc:
        raise ColumnsInvalid("their checksum does not match")
    # Columns that belong to another file must not describe this pickle's tensors.
    if (of_bytes, of_crc) != (size_bytes, crc):
        raise ColumnsInvalid("they are of another pickle")
    begin = _HEAD.size + pickle_bytes + path_bytes
    begin += -(pickle_bytes + path_bytes) % _WORD
    counts = tensors, tensors, items, items, items, dimensions, dimensions
    # The sizes come from the file: they decide how much memory is taken, so they must add up first.
    if not items or len(raw) != begin + _WORD * sum(counts):
        raise ColumnsInvalid("their sizes contradict each other")
    numbers = np.frombuffer(raw, np.int64, offset=begin)
    if numbers.min() < 0:
        raise ColumnsInvalid("a number is negative")
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    paths = _paths(bytes(raw[_HEAD.size + pickle_bytes : _HEAD.size + pickle_bytes + path_bytes]))
    # Each number is an index into the paths, and must not lie beyond their end.
    if parts[2].max() >= len(paths):
        raise ColumnsInvalid("an item lies in no shard")
    metadata = decode_metadata(bytes(raw[_HEAD.size : _HEAD.size + pickle_bytes]), source)
    with pause_collections():
        chunk_offsets = _give_chunks(_tensors(metadata), parts)
    located = numbers[2 * tensors : 2 * tensors + 3 * items].reshape(3, items).copy()  # a view would keep all of `raw`
    metadata.storage_data = Places(chunk_offsets, paths, located, metadata.storage_data)
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
        raise ColumnsInvalid("they name a file that is not a shard")
    return paths


def _give_chunks(
    tensors: Mapping[str, TensorStorageMetadata], parts: Sequence[Numbers]
) -> dict[str, tuple[torch.Size, ...]]:
    """Gives the tensors their chunks. Returns the chunks' offsets by name, as copies: a planner may change chunks."""
    counts, shapes = parts[0].tolist(), parts[1].tolist()
    # The pickle and the columns are two parts of one file: each may claim other numbers.
    if len(tensors) != len(counts) or sum(counts) != parts[2].size or max(shapes, default=0) > DIMENSIONS_MAX:
        raise ColumnsInvalid("their count of tensors or items is wrong")
    if sum(count * shape for count, shape in zip(counts, shapes, strict=True)) != parts[5].size:
        raise ColumnsInvalid("their count of offsets is wrong")
    made, at = {}, 0
    for (name, entry), count, shape in zip(tensors.items(), counts, shapes, strict=True):
        if not count:
            continue
        if entry.chunks:
            raise ColumnsInvalid("they describe a tensor twice")
        if shape != len(entry.size):
            raise ColumnsInvalid("they have a chunk of other dimensions than its tensor")
        offsets, sizes = (part[at : at + count * shape].reshape(count, shape).tolist() for part in parts[5:])
        made[name] = tuple(map(torch.Size, offsets))
        entry.chunks = [
            ChunkStorageMetadata(offset, torch.Size(size)) for offset, size in zip(made[name], sizes, strict=True)
        ]
        at += count * shape
    return made
