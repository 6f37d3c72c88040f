"""One of our checkpoints as the bytes that a conversion reads: through ReplicatedReader, from all tiers that survive."""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from replicated_ckpt.dcp.convert.entries.items_source import ItemsSource, Wanted
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo

_NO_SIZE = torch.Size(())


class _RangePlanner(LoadPlanner):
    """Asks a reader for ranges of bytes: each one is an item that is no tensor."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the plan is made by hand."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([_range(number) for number in range(len(self._wanted))])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with value.getbuffer() as raw:
            self._wanted[int(read_item.storage_index.fqn)].take(raw)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise AssertionError(f"{read_item.storage_index} was not asked for as a tensor")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        del tensor
        raise AssertionError(f"{read_item.storage_index} was not asked for as a tensor")


def _range(number: int) -> ReadItem:
    """The item that stands for the range of this number."""
    index = MetadataIndex(str(number))
    return ReadItem(LoadItemType.BYTE_IO, index, _NO_SIZE, index, _NO_SIZE, _NO_SIZE)


class ReaderFetcher:
    """Bytes of shards by the calls that DCP makes to a StorageReader, so each is verified as in a load."""

    def __init__(self, reader: ReplicatedReader) -> None:
        self._reader = reader

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        if wanted:
            plan = self._plan([(w.shard, w.offset, w.length) for w in wanted])
            self._reader.read_data(plan, _RangePlanner(wanted)).wait()

    def check(self, places: Iterable[tuple[str, int, int]]) -> None:
        self._plan(list(places))

    def _plan(self, places: Sequence[tuple[str, int, int]]) -> LoadPlan:
        infos = {MetadataIndex(str(n)): StorageInfo(*place) for n, place in enumerate(places)}
        self._reader.set_up_storage_reader(Metadata({}, storage_data=infos), True)
        return self._reader.prepare_local_plan(LoadPlan([_range(number) for number in range(len(places))]))

    def close(self) -> None:
        """Does nothing: the reader closes what it opens."""


def range_reader(
    root: str | os.PathLike[str] | None,
    object_store: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ReplicatedReader:
    """A reader for `checkpoint_source`, on this process alone: it passes bytes on unchanged, and nothing unpickles them."""
    options: dict[str, Any] = {"object_store": object_store, "storage_options": storage_options}
    return ReplicatedReader(root, no_dist=True, trust_pickles=True, **options)


def checkpoint_source(reader: ReplicatedReader, checkpoint_id: str) -> ItemsSource:
    """The checkpoint that a reader finds under an id, or as "latest".

    Raises:
        ReplicatedCkptError: as in a load.
    """
    reader.reset(checkpoint_id)
    metadata = reader.read_metadata()
    return ItemsSource(metadata, ReaderFetcher(reader), f"checkpoint {reader.checkpoint_id!r}")
