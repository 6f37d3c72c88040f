"""DCP checkpoints as the source of a conversion (one of ours, or a stock directory), and as its target."""

import errno
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from replicated_ckpt.core.chunk import Chunk
from replicated_ckpt.core.layout import METADATA_NAME, ShardName
from replicated_ckpt.dcp.convert.items_source import ItemsSource, Wanted
from replicated_ckpt.dcp.convert.source import (
    WINDOW_BYTES,
    Contents,
    CountBytes,
    ObjectEntry,
    Part,
    Source,
    TensorEntry,
    check_covered,
    windows,
)
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo, metadata_version
from replicated_ckpt.dcp.save.shard_writer import sort_for_shard
from replicated_ckpt.dcp.tensors.container import save_tensor
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt, ObjectMissing, StoreDenied, StoreError
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.existence import closing_fd, open_plain, read_plain
from replicated_ckpt.stores.output.output import READ_BACK_HINT, Output, Stream
from replicated_ckpt.stores.peer.client import FILE_BYTES_MAX

_Place = tuple[str, tuple[int, ...]]


class SourcePlanner(SavePlanner):
    """Saves the contents of a source, in the source's chunks. A chunk that is larger than a window is cut.

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
        self._items = sort_for_shard([_make_write_item(unit) for unit in self._unit_by_place.values()])
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
        """Reads the next units of the plan. Drops units of the last window that were not asked for in their order."""
        unit = self._unit_by_place[place]
        group = self._ahead.popleft() if self._ahead and unit in self._ahead[0] else [unit]
        parts = [unit for unit in group if isinstance(unit, Part)]
        objects = [unit for unit in group if isinstance(unit, ObjectEntry)]
        self._read = {}  # frees the last window before the next one is read
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
    return found or [Part(entry, Chunk.whole(entry.shape))]  # a tensor without elements is an item, too


def _make_write_item(unit: Part | ObjectEntry) -> WriteItem:
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


_NO_SIZE = torch.Size(())


class _RangePlanner(LoadPlanner):
    """Asks a reader for ranges of bytes. Each range is an item that is not a tensor."""

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
    """Reads bytes of shards through a StorageReader, as DCP does, so each byte is verified as in a load."""

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


class DirectoryFetcher:
    """Reads bytes of files in one directory. There are no checksums of them, so none are compared.

    Links are not followed: in a directory that another user can write, they could lead to any file of this user.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        for shard in {w.shard: None for w in wanted}:
            with closing_fd(self._open(shard)) as fd:
                for want in (w for w in wanted if w.shard == shard):
                    try:
                        want.take(self._read(fd, want))
                    # The length comes from .metadata, which anyone may have written.
                    except MemoryError as exc:
                        detail = f"an item of {want.length} bytes does not fit into memory"
                        raise StoreError(str(self._directory), "read", shard, detail, _HINT_LARGE) from exc

    def _open(self, shard: str) -> int:
        try:
            return open_plain(self._directory / shard, os.O_NOFOLLOW)
        except FileNotFoundError as exc:
            raise ObjectMissing(str(self._directory), "read", shard, "no such file", _HINT) from exc
        except OSError as exc:
            raise _make_read_error(self._directory, shard, exc) from exc

    def _read(self, fd: int, want: Wanted) -> memoryview:
        raw = memoryview(bytearray(want.length))
        with translate_errors(str(self._directory), "read", want.shard):
            count = read_exactly(fd, raw, want.offset)
        # A file that was cut off reads as fewer bytes, not as an error.
        if count != want.length:
            end = want.offset + want.length
            raise StoreError(str(self._directory), "read", want.shard, f"it ends before {end}", _HINT_SHORT)
        return raw

    # Called before anything is written: a conversion might meet the short file only after an hour.
    def check(self, places: Iterable[tuple[str, int, int]]) -> None:
        ends: dict[str, int] = {}
        for shard, offset, length in places:
            ends[shard] = max(ends.get(shard, 0), offset + length)
        for shard, end in ends.items():
            with closing_fd(self._open(shard)) as fd:
                size_bytes = os.fstat(fd).st_size
            if size_bytes < end:
                raise StoreError(str(self._directory), "read", shard, f"it ends before {end}", _HINT_SHORT)

    def close(self) -> None:
        """Does nothing: every file was closed after its use."""


_NAME_DIRECTORY = "Name the directory that contains .metadata: the checkpoint's own, not the one above."
_HINT = "All files of the checkpoint must lie in this directory: gather them from the nodes that wrote them."
_HINT_SHORT = "The file was cut off: copy it again from the node that wrote it."
_HINT_LARGE = "Convert it on a host with more memory, or leave the item out with --exclude."
_HINT_READ = (
    "Let this user read the file (`ls -l` shows the owner). If memory is short, convert on a host with more of it."
)


_HINT_LINK = "Links are not followed: copy the file here in its place, or name the directory that the link points to."


def _make_read_error(directory: Path, name: str, exc: OSError | MemoryError) -> StoreError:
    # O_NOFOLLOW reports a link as a loop.
    if isinstance(exc, OSError) and exc.errno == errno.ELOOP:
        return StoreDenied(str(directory), "read", name, "it is a symbolic link", _HINT_LINK)
    return StoreError(str(directory), "read", name, str(exc) or "it is larger than the memory", _HINT_READ)


def dcp_directory(path: Path) -> ItemsSource:
    """The checkpoint in a directory.

    Raises:
        ConfigInvalid: there is no .metadata. StoreDenied: it is a link. MetadataUnsafe: DCP did not write it.
    """
    try:
        raw = read_plain(path / METADATA_NAME, FILE_BYTES_MAX, os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ConfigInvalid(f"{path} holds no .metadata, so it is not a DCP checkpoint.", _NAME_DIRECTORY) from exc
    except (OSError, MemoryError) as exc:
        raise _make_read_error(path, METADATA_NAME, exc) from exc
    return ItemsSource(decode_metadata(raw, str(path)), DirectoryFetcher(path), str(path))


class DcpSink:
    """Writes `.metadata` and shards `__0_0.distcp`, `__0_1.distcp`, .... Beyond `shard_bytes_max` a new shard begins."""

    is_directory = True

    def __init__(self, *, shard_bytes_max: int) -> None:
        self._shard_bytes_max = shard_bytes_max

    def write(self, source: Source, contents: Contents, output: Output, progress: CountBytes) -> None:
        """Writes all of it. `.metadata` comes last, so an incomplete output is not a checkpoint."""
        planner = SourcePlanner(source, contents, progress)
        (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
        metadata.storage_data = {}
        items = deque(plan.items)
        while items:
            name = str(ShardName(0, len(output.written)))
            with output.create(name) as stream:
                while items and stream.position < self._shard_bytes_max:
                    item = items.popleft()
                    metadata.storage_data[item.index] = _write_item(stream, name, planner.resolve_data(item))
        metadata.storage_meta = StorageMeta()
        version = metadata_version()
        # torch 2.7 has no version to write.
        if version is not None:
            metadata.version = version
        with output.create(METADATA_NAME) as stream:
            stream.write(encode_metadata(metadata))

    def check(self, path: Path, contents: Contents) -> None:
        """Reads the metadata back.

        Raises:
            ObjectCorrupt: it does not describe the state that was written.
        """
        metadata = decode_metadata((path / METADATA_NAME).read_bytes(), str(path))
        wanted = {entry.name for entry in contents.entries}
        if set(metadata.state_dict_metadata) != wanted or {index.fqn for index in metadata.storage_data} != wanted:
            raise ObjectCorrupt(
                str(path), "read back", METADATA_NAME, "it describes another state dict", READ_BACK_HINT
            )

    def may_replace(self, name: str) -> bool:
        return name == METADATA_NAME or name.endswith(".distcp")


def _write_item(stream: Stream, name: str, data: torch.Tensor | io.BytesIO) -> StorageInfo:
    """Appends one item, as FileSystemWriter does."""
    start = stream.position
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
    else:
        save_tensor(data, stream)
    return StorageInfo(name, start, stream.position - start)
