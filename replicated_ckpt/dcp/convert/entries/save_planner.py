"""A SavePlanner for the state dict of a source: each item is read when it is about to be written."""

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
    ObjectEntry,
    Part,
    Source,
    TensorEntry,
    check_covered,
    windows,
)
from replicated_ckpt.dcp.save.shard_writer import sort_for_shard

_Place = tuple[str, tuple[int, ...]]


class SourcePlanner(SavePlanner):
    """Saves the contents of a source, in its own chunks. A chunk that is larger than a window is cut.

    The plan has the order in which items are written. Up to a window of them is read ahead in that order. `progress` is
    called with the number of bytes that were read since its last call.
    """

    def __init__(self, source: Source, contents: Contents, progress: Callable[[int], None]) -> None:
        self._source = source
        self._contents = contents
        self._progress = progress
        self._unit_by_place: dict[_Place, Part | ObjectEntry] = {(e.name, ()): e for e in contents.objects}
        for part in (part for entry in contents.tensors for part in parts_of(entry)):
            self._unit_by_place[part.entry.name, part.chunk.offsets] = part
        self._items = sort_for_shard([_write_item(unit) for unit in self._unit_by_place.values()])
        self._ahead = deque(windows(self._unit_by_place[_place_of(item)] for item in self._items))
        self._read: dict[_Place, torch.Tensor | io.BytesIO] = {}

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Ignores DCP's state dict, which is empty: the source has the state."""

    def create_local_plan(self) -> SavePlan:
        paths = {entry.name: entry.path for entry in self._contents.entries}
        return SavePlan(self._items, planner_data=paths)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=all_plans[0].planner_data)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        place = _place_of(write_item)
        if place not in self._read:
            self._look_ahead(place)
        return self._read.pop(place)

    def _look_ahead(self, place: _Place) -> None:
        """Reads the next units of the plan. Units that were read and not asked for, against the order, are dropped."""
        unit = self._unit_by_place[place]
        group = self._ahead.popleft() if self._ahead and unit in self._ahead[0] else [unit]
        parts = [unit for unit in group if isinstance(unit, Part)]
        objects = [unit for unit in group if isinstance(unit, ObjectEntry)]
        self._read = {}  # before the next window is read
        raw_by_key = self._source.read_objects(objects)
        self._read |= {(entry.name, ()): io.BytesIO(raw_by_key[entry.key]) for entry in objects}
        for part, tensor in zip(parts, self._source.read(parts), strict=True):
            self._read[part.entry.name, part.chunk.offsets] = tensor
        self._progress(sum(unit.size_bytes for unit in group))


def _place_of(item: WriteItem) -> _Place:
    return item.index.fqn, tuple(item.index.offset or ())


def parts_of(entry: TensorEntry) -> list[Part]:
    """The parts of a tensor, each of which becomes an item: its chunks, or pieces of the chunks that are cut."""
    check_covered(entry)
    found = []
    for chunk in entry.chunks:
        found += [Part(entry, run) for run in chunk.runs(chunk, WINDOW_BYTES // entry.dtype.itemsize)]
    return found or [Part(entry, Chunk.whole(entry.shape))]  # one without elements is an item all the same


def _write_item(unit: Part | ObjectEntry) -> WriteItem:
    if isinstance(unit, ObjectEntry):
        return WriteItem(MetadataIndex(unit.name), WriteItemType.BYTE_IO)
    entry, chunk = unit.entry, unit.chunk
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)),
        TensorProperties(dtype=entry.dtype),
        torch.Size(entry.shape),
    )
    index = MetadataIndex(entry.name, torch.Size(chunk.offsets))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
