"""The files into which a rank writes its items: one for each part of the state, and one for unchanged entries.

Unchanged entries have the bytes of the last committed save. They lie in a file of their own, which a save links instead
of writing it. Samples of the bytes only choose the entries of that file. A save links it only if the 128-bit hash of
each entry, as it would be written now, equals that of the save that wrote the file. An entry that changes at each save
therefore costs only its samples, and no hash.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from xxhash import xxh3_128

from replicated_ckpt.core.divergence import may_entry_differ
from replicated_ckpt.core.parts import Part, part_of_entry, part_of_shard, prefixes_of
from replicated_ckpt.dcp.agreement.decision import ShardReceipt
from replicated_ckpt.dcp.planning.cached_layouts import holds_paths_only
from replicated_ckpt.dcp.planning.cached_plan import planned_bytes
from replicated_ckpt.dcp.rank_state.rank_state import find_own
from replicated_ckpt.dcp.tensors.item_writer import ItemWriter, Stream, align
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.local.shard_file import CommittedShard

OWN_FILE_BYTES_MIN = 256 << 10
"""A part with fewer bytes of tensors goes into the file of the weights: its own file would cost an fsync and a message."""

PartName: TypeAlias = Literal["weights", "optimizer", "rest"]
PartOf: TypeAlias = Callable[[str], PartName]
"""The part of an entry, by its FQN."""

_PARTS: Mapping[str, Part] = {"weights": Part.WEIGHTS, "optimizer": Part.OPTIMIZER, "rest": Part.REST}


_PLANS_KEPT = 8
"""Cached divisions: of a rank's own plan, and of those of the ranks whose shards it copies."""


@dataclass
class Parts:
    """Divides the entries of a state into parts, by the user's function or by their names. One thread.

    It caches the result for each list of items: a plan that is cached from save to save has the same list. `may_differ`:
    patterns of names of entries that may differ between replicas.
    """

    part_of: PartOf | None = None
    may_differ: Sequence[str] = ()
    _divided: dict[int, tuple[Sequence[WriteItem], bool, Mapping[Part, Sequence[WriteItem]]]] = field(
        default_factory=dict
    )

    def part_of_entry(self, fqn: str) -> Part:
        """The part of an entry. Raises ConfigInvalid: the user's function did not return the name of a part."""
        if self.part_of is None:
            return part_of_entry(fqn)
        name = self.part_of(fqn)
        if name not in _PARTS:
            raise ConfigInvalid(
                f"part_of({fqn!r}) returned {name!r}.", f"It must return one of {', '.join(map(repr, _PARTS))}."
            )
        return _PARTS[name]

    def divide(self, items: Sequence[WriteItem], *, own_apart: bool = False) -> Mapping[Part, Sequence[WriteItem]]:
        """The items of each file that a rank writes, in the order of the parts.

        A small part goes into the file of the weights, and so does the rest of a state without weights. With
        `own_apart`, the rest consists of items that no other rank can copy: those that only this rank has, and those that
        may differ.
        """
        known = self._divided.get(id(items))
        if known is None or known[0] is not items or known[1] is not own_apart:
            if len(self._divided) >= _PLANS_KEPT:
                self._divided.clear()
            self._divided[id(items)] = known = items, own_apart, self._divide(items, own_apart=own_apart)
        return known[2]

    def _divide(self, items: Sequence[WriteItem], *, own_apart: bool) -> Mapping[Part, Sequence[WriteItem]]:
        own = frozenset[str]()
        if own_apart:
            names = {item.index.fqn for item in items}
            own = find_own(names) | {name for name in names if may_entry_differ(name, self.may_differ)}
        found: dict[Part, list[WriteItem]] = {part: [] for part in (Part.WEIGHTS, Part.OPTIMIZER, Part.REST)}
        apart: list[WriteItem] = []
        for item in items:
            fqn = item.index.fqn
            (apart if fqn in own else found[self.part_of_entry(fqn)]).append(item)
        weights = found[Part.WEIGHTS]
        for part in (Part.REST, Part.OPTIMIZER):
            is_small = sum(map(planned_bytes, found[part])) < OWN_FILE_BYTES_MIN
            if (weights and is_small) or (part is Part.REST and (own or not weights)):
                weights += found[part]
                found[part] = []
        found[Part.REST] += apart
        return {part: members for part, members in found.items() if members}


def without_optimizer(metadata: Metadata, parts: Parts) -> tuple[Metadata, tuple[str, ...]] | None:
    """The metadata of the checkpoint without its optimizer, and the prefixes of the dropped names.

    None: the checkpoint has no optimizer, or no file would be left.
    """
    gone = {fqn for fqn in metadata.state_dict_metadata if parts.part_of_entry(fqn) is Part.OPTIMIZER}
    places = {index: info for index, info in metadata.storage_data.items() if index.fqn not in gone}
    left = {info.relative_path for info in places.values()}
    if not gone or all(part_of_shard(path.rpartition("/")[2]) is Part.OPTIMIZER for path in left):
        return None
    entries = {fqn: entry for fqn, entry in metadata.state_dict_metadata.items() if fqn not in gone}
    paths = metadata.planner_data
    if holds_paths_only(paths):
        paths = {fqn: path for fqn, path in paths.items() if fqn not in gone}
    kept = replace(metadata, state_dict_metadata=entries, planner_data=paths, storage_data=places)
    return kept, prefixes_of(gone, entries)


Items = Sequence[WriteItem]

_SAMPLES, _SAMPLE_BYTES = 4, 64
"""Few samples suffice: a trained entry differs in nearly all of them, and for the others the hash decides."""
_SAMPLED_BYTES_MIN = 64 << 10
ENTRY_BYTES_MIN = 1 << 20
"""The samples of smaller entries would cost more than 2 % of a fast save."""


class HashedStream:
    """Hashes bytes on their way to another stream, or only hashes them.

    `is_sampled`: hashes only samples of large pieces, and nothing of small ones.
    """

    def __init__(self, stream: Stream | None = None, *, is_sampled: bool = False) -> None:
        self._stream = stream
        self._is_sampled = is_sampled
        self._hash = xxh3_128()
        self.position = 0 if stream is None else stream.position

    def write(self, data: memoryview) -> int:
        self._update(data)
        if self._stream is not None:
            self._stream.write(data)
        return len(data)

    def refer(self, data: memoryview) -> None:
        self._update(data)
        if self._stream is not None:
            self._stream.refer(data)

    def _update(self, data: memoryview) -> None:
        self.position += len(data)
        if not self._is_sampled:
            self._hash.update(data)
            return
        last = len(data) - _SAMPLE_BYTES
        if last < _SAMPLED_BYTES_MIN:
            return
        for number in range(_SAMPLES):
            start = last * number // (_SAMPLES - 1)
            self._hash.update(data[start : start + _SAMPLE_BYTES])

    def digest(self) -> bytes:
        return self._hash.digest()


@dataclass(frozen=True)
class UnchangedFile:
    """The file of unchanged entries of a save: its entries in order, each with the 128-bit hash of its bytes."""

    shard: ShardReceipt
    results: Sequence[WriteResult]
    hashes: Sequence[bytes]
    checkpoint_id: str = ""
    save_id: str = ""

    @property
    def source(self) -> CommittedShard:
        shard = self.shard
        return CommittedShard(self.checkpoint_id, self.save_id, shard.name, shard.size_bytes, shard.crc32c)

    @property
    def hash_by_entry(self) -> Mapping[MetadataIndex, bytes]:
        return {one.index: found for one, found in zip(self.results, self.hashes, strict=True)}

    def has(self, items: Items, hashes: Sequence[bytes]) -> bool:
        """Whether the file has exactly these items, in this order, with these bytes."""
        ours, given = [one.index for one in self.results], [item.index for item in items]
        return given == ours and list(hashes) == list(self.hashes)

    def results_in(self, name: str) -> list[WriteResult]:
        """The results of a save that has linked the file under this name."""
        if name == self.shard.name:
            return list(self.results)
        return [replace(one, storage_data=replace(one.storage_data, relative_path=name)) for one in self.results]


class UnchangedEntries:
    """The unchanged entries of one rank, from save to save. Call `begin_save` before each save, `commit` after each
    committed one.

    An entry that leaves the file because it has changed never comes back, because each change costs a new file.
    """

    def __init__(self) -> None:
        self.chosen: Mapping[MetadataIndex, int] = {}
        """The entries that go into the file of unchanged entries from the next save on, with their sizes in bytes."""
        self.file: UnchangedFile | None = None
        """The file of the last committed save."""
        self._samples: Mapping[MetadataIndex, bytes] = {}
        self._excluded: set[MetadataIndex] = set()
        self._rewritten_bytes = 0
        self._divided: tuple[Items, Mapping[MetadataIndex, int], tuple[Items, Items]] | None = None
        self._forget()

    def _forget(self) -> None:
        self._seen: dict[MetadataIndex, tuple[bytes, int]] = {}
        self._written: UnchangedFile | None = None
        self._changed: Collection[MetadataIndex] = ()

    def begin_save(self, items: Items) -> tuple[Items, Items]:
        """Divides items into those of the usual files and those of the file of unchanged entries.

        For the same list of items it returns the same lists. Forgets the results of a failed save.
        """
        self._forget()
        if not self.chosen:
            return items, ()
        known = self._divided
        if known is None or known[0] is not items or known[1] is not self.chosen:
            chosen = [item for item in items if item.index in self.chosen]
            others = [item for item in items if item.index not in self.chosen]
            self._divided = known = items, self.chosen, (others, chosen)
        return known[2]

    def write_sampled(
        self, writer: ItemWriter, stream: Stream, item: WriteItem, planner: SavePlanner
    ) -> tuple[int, int]:
        """As `writer.write_item`. Also hashes samples of the item's bytes, if the item may go into the file later."""
        if not self._is_candidate(item):
            return writer.write_item(stream, item, planner)
        align(stream)
        sampled = HashedStream(stream, is_sampled=True)
        offset, length = writer.write_item(sampled, item, planner)
        self._seen[item.index] = sampled.digest(), length
        return offset, length

    def _is_candidate(self, item: WriteItem) -> bool:
        return item.index not in self._excluded and planned_bytes(item) >= ENTRY_BYTES_MIN

    def hash_items(self, writer: ItemWriter, items: Items, planner: SavePlanner) -> list[bytes]:
        """The hash of the bytes of each item, as they would be written now."""
        hashes = []
        for item in items:
            stream = HashedStream()
            writer.write_item(stream, item, planner)
            hashes.append(stream.digest())
        before = {} if self.file is None else self.file.hash_by_entry
        found = {item.index: each for item, each in zip(items, hashes, strict=True)}
        self._changed = [index for index, each in found.items() if before.get(index, each) != each]
        return hashes

    def note_written(self, file: UnchangedFile) -> None:
        """The save under way has this file, written or linked."""
        self._written = file

    def commit(self, checkpoint_id: str, save_id: str, *, is_helped: bool = False) -> None:
        """The save under way is committed: the next save compares with it, and may link its file.

        `is_helped`: other ranks copied this rank's shards. They cannot do that once there is such a file.
        """
        written = self._written
        self.file = None if written is None else replace(written, checkpoint_id=checkpoint_id, save_id=save_id)
        self._excluded.update(self._changed)
        chosen = {index: size for index, size in self.chosen.items() if index not in self._excluded}
        alike = {index: size for index, (sample, size) in self._seen.items() if self._samples.get(index) == sample}
        more, before = sum(alike.values()), sum(chosen.values())
        # More entries need a new file: only once writing it costs no more than they have cost in the usual files.
        self._rewritten_bytes += more
        total = before + sum(size for _, size in self._seen.values())
        is_worth_it = not is_helped or 2 * (before + more) >= total
        if is_worth_it and self._rewritten_bytes >= before:
            chosen, self._rewritten_bytes = chosen | alike, 0
        if chosen != self.chosen:  # otherwise the cached division of the items stays valid
            self.chosen = chosen
        self._samples = {index: sample for index, (sample, _) in self._seen.items()}
        self._forget()
