"""A save in parts: the file of each item that a rank writes, and the metadata of the checkpoint without its optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from replicated_ckpt.core.parts import Part, part_of_entry, part_of_shard, prefixes_of
from replicated_ckpt.dcp.planning.cached_layouts import holds_paths_only
from replicated_ckpt.dcp.planning.cached_plan import planned_bytes
from replicated_ckpt.dcp.rank_state.rank_state import find_own
from replicated_ckpt.errors import ConfigInvalid

OWN_FILE_BYTES_MIN = 256 << 10
"""Of tensors in a part: less is written into the file of the weights. A file of its own costs an fsync and a message."""

PartName: TypeAlias = Literal["weights", "optimizer", "rest"]
PartOf: TypeAlias = Callable[[str], PartName]
"""The part of an entry, by its FQN."""

_PARTS: Mapping[str, Part] = {"weights": Part.WEIGHTS, "optimizer": Part.OPTIMIZER, "rest": Part.REST}


_PLANS_KEPT = 8
"""A rank's own plan, and those of the ranks whose shards it copies."""


@dataclass
class Parts:
    """Divides the entries of a state into parts, by the user's function or by their names. One thread.

    Results for a plan are remembered: a plan that is cached from save to save is the same object.
    """

    part_of: PartOf | None = None
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
        `own_apart`, the rest consists of items that only this rank has, which no other rank can copy.
        """
        known = self._divided.get(id(items))
        if known is None or known[0] is not items or known[1] is not own_apart:
            if len(self._divided) >= _PLANS_KEPT:
                self._divided.clear()
            self._divided[id(items)] = known = items, own_apart, self._divide(items, own_apart=own_apart)
        return known[2]

    def _divide(self, items: Sequence[WriteItem], *, own_apart: bool) -> Mapping[Part, Sequence[WriteItem]]:
        own = find_own(item.index.fqn for item in items) if own_apart else frozenset[str]()
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
