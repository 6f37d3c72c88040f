"""Compares the replicas of a state at each save: what several ranks have under one name should be the same bytes.

DCP saves one replica of each value, so a checkpoint alone cannot show that another one has diverged. Each rank hashes a
part of its state, another one at each save, and sends the hashes with its receipt: no message and no collective more.
"""

import hashlib
import logging
import math
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from secrets import randbelow
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from replicated_ckpt.core.divergence import Divergence, Turn, find_differing, pack_units
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlan
from replicated_ckpt.dcp.tensors.container import is_freed, is_plain
from replicated_ckpt.dcp.tensors.device_copy import copy_to_host
from replicated_ckpt.dcp.tensors.tensor_memory import memory_of
from replicated_ckpt.dcp.tensors.torch_save import save_without_crc32

log = logging.getLogger(__name__)

UNIT_BYTES = 64 << 20
"""Compared at once at most: a larger tensor is so many units, which take turns. Else one save would hash all of it."""
_UNCOMPARABLE = -1


@dataclass(frozen=True)
class _Unit:
    """What is compared as one: an item, or a range of a large one. `key` names it on all ranks."""

    item: WriteItem
    number: int
    key: int


class ReplicaCheck:
    """This rank's part in the comparison, and the coordinator's turns. One save at a time."""

    def __init__(self, parts: int | None) -> None:
        """`parts`: everything is compared within so many saves; None: nothing is."""
        self._parts = parts
        # At random: a job that is restarted again and again would compare the first parts only.
        self._next_part = randbelow(parts) if parts else 0
        self.are_objects_known = False
        """Coordinator: all objects were compared in a save, so those that differ are known."""
        self._is_suspicious = False
        self._of: tuple[Sequence[WriteItem], int] | None = None
        self._units: list[list[_Unit]] = []
        self._named_objects: set[str] = set()

    def next_turn(self, local_items: int, plans: Sequence[SavePlan]) -> Turn | None:
        """Coordinator: what the ranks compare in this save; None: nothing, as each item lies on one rank only.

        `local_items`: the items of all ranks before DCP has dropped the duplicates; `plans`: the plans after that.
        """
        whole = [(plan.whole or plan) if isinstance(plan, CachedSavePlan) else plan for plan in plans]
        # A plan that torch's own `enable_plan_caching` has left out says nothing of its items.
        if not self._parts or not all(plan.usable for plan in whole):
            return None
        if local_items <= sum(len(plan.items) for plan in whole):
            return None
        if self._is_suspicious:
            return Turn(0, 1)
        return Turn(self._next_part, self._parts, has_objects=not self.are_objects_known)

    def suspect(self) -> None:
        """Replicas differ somewhere: the next save compares everything."""
        self._is_suspicious = True

    def note_committed(self, turn: Turn | None, found: Iterable[Divergence]) -> None:
        """The next save compares the next part; after a failed one the same part has its turn again."""
        if turn is not None:
            self._is_suspicious &= turn.parts > 1
            self._next_part = (turn.part + 1) % (self._parts or 1)
            self.are_objects_known |= turn.has_objects or turn.parts == 1
        self._named_objects.update(one.fqn for one in found if one.is_object)

    def hash_units(self, plan: SavePlan, planner: SavePlanner, turn: Turn) -> bytes:
        """This rank's report: the hashes of the units whose turn it is. `plan`: before DCP has dropped duplicates.

        What cannot be hashed, as an object that pickle refuses, is left out: another rank may be the one that saves it.
        """
        by_part = self._units_of(plan.items, turn.parts)
        units = list(by_part[turn.part])
        if turn.has_objects:
            others = (unit for part, units in enumerate(by_part) if part != turn.part for unit in units)
            units += [unit for unit in others if unit.item.type == WriteItemType.BYTE_IO]
        found = {unit.key: _hash_unit(unit, planner) for unit in units}
        return pack_units({key: value for key, value in found.items() if value != _UNCOMPARABLE})

    def _units_of(self, items: Sequence[WriteItem], parts: int) -> list[list[_Unit]]:
        # A plan that is kept from save to save is the same object: its units are found once.
        if self._of is None or self._of[0] is not items or self._of[1] != parts:
            self._units = [[] for _ in range(parts)]
            for item in items:
                for number in range(_count_units(item)):
                    index = item.index
                    turn = zlib.crc32(index.fqn.encode()) + sum(index.offset or ()) + number
                    self._units[turn % parts].append(_Unit(item, number, 0))
            for part, units in enumerate(self._units):
                self._units[part] = [
                    _Unit(unit.item, unit.number, key_of_unit(unit.item.index, unit.number)) for unit in units
                ]
            self._of = items, parts
        return self._units

    def without_named(self, found: Iterable[Divergence]) -> list[Divergence]:
        """Without the objects that were found in a committed save before: they differ at every save."""
        return [one for one in found if not (one.is_object and one.fqn in self._named_objects)]


def whole_plan(plan: SavePlan) -> SavePlan:
    """The plan itself, or the one that it stands for."""
    return (plan.whole or SavePlan([])) if isinstance(plan, CachedSavePlan) else plan


def key_of_unit(index: MetadataIndex, number: int) -> int:
    name = f"{index.fqn}\0{tuple(index.offset or ())}\0{number}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def name_divergences(reports: Mapping[int, bytes], metadata: Metadata) -> list[Divergence]:
    """Coordinator: the values that differ, by name. `metadata` has the places of all items by then.

    Raises ValueError: a rank's report is none.
    """
    differing = find_differing(reports)
    if not differing:
        return []
    found = []
    for index, place in metadata.storage_data.items():
        described = metadata.state_dict_metadata[index.fqn]
        for number in range(_count_in_metadata(described, index)):
            groups = differing.get(key_of_unit(index, number), ())
            shard = ShardName.parse(place.relative_path)
            # Without the report of the rank that saved it nothing can be said of the checkpoint.
            if shard is None or not any(shard.rank in ranks for ranks in groups):
                continue
            # Its group first: it is what a load will get.
            ordered = tuple(sorted(groups, key=lambda ranks: shard.rank not in ranks))
            is_object = not hasattr(described, "properties")
            offset = tuple(index.offset or ())
            found.append(Divergence(index.fqn, offset, number * UNIT_BYTES, is_object, shard.rank, ordered))
    return sorted(found, key=lambda one: (one.is_object, one.fqn, one.offset, one.first_byte))


def _count_in_metadata(described: Any, index: MetadataIndex) -> int:
    sizes = [
        chunk.sizes for chunk in getattr(described, "chunks", ()) if chunk.offsets == (index.offset or chunk.offsets)
    ]
    return _count_of(math.prod(sizes[0]) * described.properties.dtype.itemsize) if sizes else 1


def _count_units(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 1
    return _count_of(math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize)


def _count_of(size_bytes: int) -> int:
    return max(1, -(-size_bytes // UNIT_BYTES))


def _hash_unit(unit: _Unit, planner: SavePlanner) -> int:
    if unit.item.type == WriteItemType.BYTE_IO:
        return _hash_object(unit.item, planner)
    value = planner.resolve_data(unit.item)
    if not isinstance(value, torch.Tensor) or is_freed(value) or (value.is_meta and value.numel()):
        return _UNCOMPARABLE  # the rank that writes it raises the error
    planned = unit.item.tensor_data
    elements = UNIT_BYTES // (planned.properties.dtype if planned is not None else value.dtype).itemsize
    return hash_tensor(value.detach(), unit.number * elements, elements)


def hash_tensor(tensor: torch.Tensor, begin: int = 0, elements: int | None = None) -> int:
    """CRC32C of `elements` values from the one at `begin`, in the order of the indices, whatever the strides are.

    None: of all from there. A tensor that is more than its elements is hashed as it would be saved, as a whole.
    """
    head = crc32c(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if not is_plain(tensor):
        file = BytesIO()
        save_without_crc32(tensor.cpu(), file)
        return crc32c(file.getbuffer(), head)
    flat = tensor.reshape(-1)[begin : None if elements is None else begin + elements]
    if flat.device.type == "cpu":
        return crc32c(memory_of(flat.contiguous()), head)
    for piece in copy_to_host(flat.contiguous()):
        head = crc32c(memory_of(piece), head)
    return head


def _hash_object(item: WriteItem, planner: SavePlanner) -> int:
    if not isinstance(planner, DefaultSavePlanner):
        data = planner.resolve_data(item)  # its own way from a value to bytes
        return crc32c(data.getbuffer()) if isinstance(data, BytesIO) else _UNCOMPARABLE
    try:
        value, crc = planner.lookup_object(item.index), 0
        for piece in canonical_bytes(value):
            crc = crc32c(piece, crc)
    # A class's own `__reduce__` may raise anything; the rank that saves this value raises it.
    except Exception as exc:  # noqa: BLE001
        log.debug("%s is not compared: %s", item.index.fqn, exc)
        return _UNCOMPARABLE
    return crc


def canonical_bytes(value: Any) -> Iterator[bytes]:
    """Bytes that are equal for equal values. Pickled ones are not: they depend on identities and the order of sets."""
    kind = type(value)
    if kind in (dict, set, frozenset):
        pairs = value.items() if kind is dict else ((one, None) for one in value)
        # By key: ranks may have filled it in another order.
        joined = sorted((b"".join(canonical_bytes(key)), b"".join(canonical_bytes(held))) for key, held in pairs)
        yield f"{kind.__name__}{len(joined)}".encode()
        for key, held in joined:
            yield key
            yield held
    elif kind in (list, tuple):
        yield f"{kind.__name__}{len(value)}".encode()
        for one in value:
            yield from canonical_bytes(one)
    elif isinstance(value, torch.Tensor):
        yield f"tensor{hash_tensor(value.detach())}".encode()
    elif kind in (str, bytes):
        raw = value.encode(errors="surrogatepass") if kind is str else value
        yield f"{kind.__name__}{len(raw)}".encode()
        yield raw
    else:
        file = BytesIO()
        pickler = pickle.Pickler(file, protocol=4)
        pickler.fast = True  # without a memo: it has an entry for each object that is met twice, equal or not
        pickler.dump(value)
        yield file.getvalue()
