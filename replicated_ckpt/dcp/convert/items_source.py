"""A DCP checkpoint as a source of a conversion. A Fetcher reads the bytes of its items from one place."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.core.integrity.archive import find_records
from replicated_ckpt.core.key_rules import Path
from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import tensor_of
from replicated_ckpt.dcp.convert.source import Contents, ObjectEntry, Part, TensorEntry, check_plain
from replicated_ckpt.dcp.objects.storages import dtype_of, record_of
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.tensors.container import TensorReader
from replicated_ckpt.dcp.tensors.tensor_memory import tensor_over, window_tensor
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt

PIECE_BYTES = 4 << 20
"""Larger items are read in pieces of this size, because memory may hold three copies of what is read at once."""
_END_BYTES = 4096
"""Bytes that are read at each end of a large tensor's container; around the elements there is about 1 KiB."""
_HINT_DAMAGED = "The checkpoint is damaged, or its save never ended: convert another checkpoint."
_HINT_ITEM = "Convert another checkpoint, or leave this entry out with --exclude."
_HINT_TRANSFORMED = (
    "Load the checkpoint with the reader that applies the transforms. Save it without them, and convert the new one."
)


@dataclass(frozen=True)
class Wanted:
    """A range of bytes of a shard, and its receiver. The bytes are valid only during the call."""

    shard: str
    offset: int
    length: int
    take: Callable[[memoryview], None]


class Fetcher(Protocol):
    """Reads the bytes of shards from one place."""

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Passes each range to its receiver once, in any order. Raises ReplicatedCkptError."""

    def check(self, places: Iterable[tuple[str, int, int]]) -> None:
        """Raises ReplicatedCkptError if some of these ranges (shard, offset, length) cannot be read."""

    def close(self) -> None:
        """Closes all open files and connections."""


class ItemsSource:
    """A DCP checkpoint, known by its metadata. `label` names it in errors."""

    def __init__(self, metadata: Metadata, fetcher: Fetcher, label: str) -> None:
        self._fetcher = fetcher
        self._label = label
        self._info_by_place: dict[tuple[str, tuple[int, ...]], StorageInfo] = {}
        for index, info in metadata.storage_data.items():
            self._info_by_place[index.fqn, tuple(index.offset or ())] = info
        self._tensors = TensorReader()
        self._data_starts: dict[tuple[str, int], int | None] = {}
        self.contents = self._contents(metadata)

    def _contents(self, metadata: Metadata) -> Contents:
        paths: Mapping[str, Any] = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        tensors, objects = [], []
        for key, described in metadata.state_dict_metadata.items():
            path = _check_path(paths.get(key), key)
            if isinstance(described, TensorStorageMetadata):
                chunks = tuple(Chunk(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described.chunks)
                dtype, shape = described.properties.dtype, tuple(described.size)
                tensors.append(TensorEntry(key, key, path, dtype, shape, chunks))
            else:
                objects.append(ObjectEntry(key, key, path, self._info(key, ()).length))
        return Contents(tuple(tensors), tuple(objects), tuple(metadata.state_dict_metadata))

    def _info(self, key: str, offsets: tuple[int, ...]) -> StorageInfo:
        info = self._info_by_place.get((key, offsets))
        # Scalars and objects are saved without offsets.
        if info is None and not any(offsets):
            info = self._info_by_place.get((key, ()))
        if info is None:
            raise ConfigInvalid(f"The .metadata of {self._label} has no place for {key!r}.", _HINT_DAMAGED)
        return info

    def check(self, contents: Contents) -> None:
        infos = [self._info(entry.key, ()) for entry in contents.objects]
        least_bytes = [0] * len(infos)
        for entry in contents.tensors:
            infos += [self._info(entry.key, chunk.offsets) for chunk in entry.chunks]
            least_bytes += [chunk.elements * entry.dtype.itemsize for chunk in entry.chunks]
        for info, least in zip(infos, least_bytes, strict=True):
            if getattr(info, "transform_descriptors", None):
                raise ConfigInvalid(
                    f"{self._label} was saved through stream transforms, which this package does not read.",
                    _HINT_TRANSFORMED,
                )
            # A hostile .metadata may describe a huge tensor in a small file, and memory is taken before the read.
            if info.length < least:
                detail = f"its .metadata describes a tensor of {least} bytes in an item of {info.length}"
                raise ObjectCorrupt(self._label, "convert", info.relative_path, detail, _HINT_ITEM)
        self._fetcher.check([(info.relative_path, info.offset, info.length) for info in infos])

    def read(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        self._probe(parts)
        targets = [window_tensor(part.chunk.sizes, part.entry.dtype) for part in parts]
        wanted: list[Wanted] = []
        for part, target in zip(parts, targets, strict=True):
            for chunk in part.entry.chunks:
                common = chunk.common(part.chunk)
                if common is not None and common.elements:
                    wanted += self._find_wanted(part, chunk, common, target)
        self._fetcher.fetch(wanted)
        return targets

    def _find_wanted(self, part: Part, chunk: Chunk, common: Chunk, target: torch.Tensor) -> list[Wanted]:
        """The ranges that must be read to fill `common` into its place in `target`."""
        info, entry = self._info(part.entry.key, chunk.offsets), part.entry
        start = self._data_starts.get((info.relative_path, info.offset))
        # The item is small, or its elements are not in rows: it is read whole.
        if start is None:
            inside, place = common.relative_to(chunk), _view(target, common.relative_to(part.chunk))

            def take_item(raw: memoryview) -> None:
                place.copy_(_view(self._tensor(raw, entry, chunk), inside))

            return [Wanted(info.relative_path, info.offset, info.length, take_item)]
        itemsize = entry.dtype.itemsize
        found = []
        for run in common.runs(chunk, PIECE_BYTES // itemsize):
            offset = info.offset + start + run.start_in(chunk) * itemsize
            take = _taker(_view(target, run.relative_to(part.chunk)))
            found.append(Wanted(info.relative_path, offset, run.elements * itemsize, take))
        return found

    def _tensor(self, raw: memoryview, entry: TensorEntry, chunk: Chunk) -> torch.Tensor:
        """The tensor in an item.

        Raises:
            ObjectCorrupt: it is not the one that the metadata describes. ConfigInvalid: it is sparse or quantized.
        """
        try:
            tensor = self._tensors.read_tensor(raw)
        except (ValueError, RuntimeError) as exc:
            raise ObjectCorrupt(
                self._label, "convert", entry.key, f"its bytes are not a tensor: {exc}", _HINT_ITEM
            ) from exc
        # The bytes of another tensor would silently be copied as wrong numbers.
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != entry.dtype:
            raise ObjectCorrupt(
                self._label, "convert", entry.key, "it is a different tensor than .metadata describes", _HINT_ITEM
            )
        check_plain(entry.key, tensor)
        return tensor

    def _probe(self, parts: Sequence[Part]) -> None:
        """Finds where the elements begin in each large item that is read for the first time."""
        wanted: list[Wanted] = []
        ends: list[tuple[StorageInfo, TensorEntry, Chunk, list[bytes]]] = []
        for part in parts:
            for chunk in part.entry.chunks:
                if chunk.common(part.chunk) is None:
                    continue
                info = self._info(part.entry.key, chunk.offsets)
                if info.length <= PIECE_BYTES or (info.relative_path, info.offset) in self._data_starts:
                    continue
                # Set before the probe: if that fails, the item is read whole, and not probed again.
                self._data_starts[info.relative_path, info.offset] = None
                pair = [b"", b""]
                ends.append((info, part.entry, chunk, pair))
                for index, offset in enumerate((info.offset, info.offset + info.length - _END_BYTES)):
                    wanted.append(Wanted(info.relative_path, offset, _END_BYTES, _keeper(pair, index)))
        self._fetcher.fetch(wanted)
        for info, entry, chunk, (head, tail) in ends:
            start = _find_data(head, tail, info.length, chunk.sizes, entry.dtype)
            self._data_starts[info.relative_path, info.offset] = start

    def read_objects(self, entries: Sequence[ObjectEntry]) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        wanted = []
        for entry in entries:
            info = self._info(entry.key, ())
            take = _keeper(found, entry.key)
            wanted.append(Wanted(info.relative_path, info.offset, info.length, take))
        self._fetcher.fetch(wanted)
        return found

    def close(self) -> None:
        self._fetcher.close()


def _check_path(path: Any, key: str) -> Path:
    """The path that a planner stored for a key. If a foreign planner stored anything else: the key alone."""
    if isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path) and type(path[0]) is str:
        return path
    return (key,)


def _view(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))]


def _taker(place: torch.Tensor) -> Callable[[memoryview], None]:
    def take(raw: memoryview) -> None:
        place.copy_(tensor_over(raw, place.dtype).view(place.shape))

    return take


def _keeper(kept: Any, key: Any) -> Callable[[memoryview], None]:
    def take(raw: memoryview) -> None:
        kept[key] = bytes(raw)

    return take


def _find_data(head: bytes, tail: bytes, size_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Position of the first element in a container of `size_bytes`, if elements of this type lie there row by row.

    None: they do not, or torch.save did not write the container. This reads only the two ends.
    """

    def fetch(offset: int, length: int) -> memoryview:
        if offset + length <= len(head):
            return memoryview(head)[offset : offset + length]
        start = offset - (size_bytes - len(tail))
        # The pickle lies elsewhere, so `torch.save` did not write this container of one tensor.
        if start < 0:
            raise ValueError(f"bytes {offset} to {offset + length} are not at the ends")
        return memoryview(tail)[start : start + length]

    try:
        records = find_records(fetch, size_bytes)
        outline = tensor_of(follow(bytes(fetch(records["data.pkl"].start, records["data.pkl"].size))))
        if outline is None or outline.shape != shape or dtype_of(outline) != dtype or not outline.is_row_by_row():
            return None
        return record_of(outline.storage, records).start
    except (ValueError, KeyError):
        return None
