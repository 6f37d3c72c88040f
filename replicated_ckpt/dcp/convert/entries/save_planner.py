"""A SavePlanner whose state dict lies in a source: each item is read when it is about to be written."""

import io
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.dcp.convert.entries.source import (
    WINDOW_BYTES,
    Contents,
    Part,
    Source,
    TensorEntry,
    check_covered,
    windows,
)

_Place = tuple[str, tuple[int, ...]]


class SourcePlanner(SavePlanner):
    """Saves what is in a source, chunk by chunk as it lies there; chunks of more than a window are cut.

    Parts are read ahead, up to a window, in the order of the plan. `progress` is told how many bytes more were read.
    """

    def __init__(self, source: Source, contents: Contents, progress: Callable[[int], None]) -> None:
        self._source = source
        self._contents = contents
        self._progress = progress
        self._part_by_place = {
            (p.entry.name, p.chunk.offsets): p for entry in contents.tensors for p in parts_of(entry)
        }
        self._object_by_name = {entry.name: entry for entry in contents.objects}
        self._ahead = deque(windows(list(self._part_by_place.values())))
        self._read: dict[_Place, torch.Tensor] = {}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """The state dict that DCP was given says nothing; the source does."""

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._object_by_name]
        items += [_write_item(part) for part in self._part_by_place.values()]
        paths = {entry.name: entry.path for entry in self._contents.entries}
        return SavePlan(items, planner_data=paths)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=all_plans[0].planner_data)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            entry = self._object_by_name[name]
            raw = self._source.read_objects([entry])[entry.key]
            self._progress(entry.size_bytes)
            return io.BytesIO(raw)
        place = (name, tuple(write_item.index.offset or ()))
        if place not in self._read:
            self._look_ahead(place)
        return self._read.pop(place)

    def _look_ahead(self, place: _Place) -> None:
        """Reads the next parts of the plan. Parts that were read and not asked for, against the order, are let go."""
        part = self._part_by_place[place]
        group = self._ahead.popleft() if self._ahead and part in self._ahead[0] else [part]
        self._read = {
            (read.entry.name, read.chunk.offsets): tensor
            for read, tensor in zip(group, self._source.read(group), strict=True)
        }
        self._progress(sum(read.size_bytes for read in group))


def parts_of(entry: TensorEntry) -> list[Part]:
    """The parts of a tensor that are saved as an item each: its chunks, or what is left of them when they are cut."""
    check_covered(entry)
    found = []
    for chunk in entry.chunks:
        found += [Part(entry, run) for run in chunk.runs(chunk, WINDOW_BYTES // entry.dtype.itemsize)]
    return found or [Part(entry, Chunk.whole(entry.shape))]  # one without elements is an item all the same


def _write_item(part: Part) -> WriteItem:
    entry, chunk = part.entry, part.chunk
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
        TensorProperties(dtype=entry.dtype),
        torch.Size(entry.shape),
    )
    index = MetadataIndex(entry.name, torch.Size(chunk.offsets))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
