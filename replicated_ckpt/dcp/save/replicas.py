"""Compares the replicas of a state at each save: values that several ranks have under one name should have the same
bytes.

DCP saves one replica of each value, so a checkpoint alone cannot show that another replica has diverged. At each save,
each rank hashes another part of its state, and sends the hashes with its receipt. That takes no further message or
collective.
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
from replicated_ckpt.dcp.planning.cached_plan import find_whole, planned_bytes
from replicated_ckpt.dcp.runtime.torch_private import DTensor
from replicated_ckpt.dcp.tensors.container import is_freed, is_plain
from replicated_ckpt.dcp.tensors.tensor_memory import copy_to_host, memory_of

log = logging.getLogger(__name__)

UNIT_BYTES = 64 << 20
"""Compared at once at most: a larger tensor is so many units, which take turns. Else one save would hash all of it."""


@dataclass(frozen=True)
class _Unit:
    """A unit of comparison: an item, or a range of a large item."""

    item: WriteItem
    number: int


class ReplicaCheck:
    """This rank's part in the comparison; on the coordinator also whose turn it is. One save at a time."""

    def __init__(self, parts: int | None) -> None:
        """`parts`: the number of saves that together compare everything. None: nothing is compared."""
        self._parts = parts
        # At random: a job that is restarted again and again would compare the first parts only.
        self._next_part = randbelow(parts) if parts else 0
        self.is_all_known = False
        """Coordinator: a save has compared everything, so what differs is known."""
        self._of: tuple[Sequence[WriteItem], int] | None = None
        self._units: list[list[_Unit]] = []
        self._named: set[str] = set()

    def next_turn(self, local_items: int, plans: Sequence[SavePlan]) -> Turn | None:
        """Coordinator: the part that the ranks compare in this save. None: nothing, because each item lies on one rank
        only.

        `local_items`: the items of all ranks before DCP drops the duplicates. `plans`: the plans after that.
        """
        whole = [find_whole(plan) for plan in plans]
        # A plan that torch's own `enable_plan_caching` has left out says nothing of its items.
        if not self._parts or not all(plan.usable for plan in whole):
            return None
        if local_items <= sum(len(plan.items) for plan in whole):
            return None
        # Everything at first: no copy shall be made from a replica that was never compared (`own_copies`).
        return Turn(self._next_part, self._parts) if self.is_all_known else Turn(0, 1)

    def suspect(self) -> None:
        """Replicas differ somewhere, so the next save compares everything."""
        self.is_all_known = False

    def note_committed(self, turn: Turn | None, found: Iterable[Divergence]) -> None:
        """The next save compares the next part. After a failed save, the same part is compared again."""
        if turn is not None and self._parts:
            self.is_all_known |= turn.parts == 1
            self._next_part = (self._next_part + 1) % self._parts
        self._named.update(one.fqn for one in found)

    def hash_units(self, plan: SavePlan, planner: SavePlanner, turn: Turn) -> bytes:
        """This rank's report: the hashes of the units in this turn. `plan`: the plan before DCP drops duplicates.

        Values that cannot be hashed, such as an object that pickle refuses, are left out: another rank may be the one
        that saves them.
        """
        units = self._units_of(plan.items, planner, turn.parts)[turn.part]
        found = {key_of_unit(unit.item.index, unit.number): _hash_unit(unit, planner) for unit in units}
        return pack_units({key: value for key, value in found.items() if value is not None})

    def _units_of(self, items: Sequence[WriteItem], planner: SavePlanner, parts: int) -> list[list[_Unit]]:
        # A plan that is kept from save to save is the same object: its units are found once.
        if self._of is None or self._of[0] is not items or self._of[1] != parts:
            state = getattr(planner, "state_dict", None)
            values = state if isinstance(state, dict) else {}
            units: list[list[_Unit]] = [[] for _ in range(parts)]
            for item in items:
                index = item.index
                # Parts that no other rank has would be hashed, and copied from the GPU, for nothing.
                if _is_all_sharded(values.get(index.fqn)):
                    continue
                for number in range(_count_units(item)):
                    turn = zlib.crc32(index.fqn.encode()) + sum(index.offset or ()) + number
                    units[turn % parts].append(_Unit(item, number))
            self._of, self._units = (items, parts), units
        return self._units

    def without_named(self, found: Iterable[Divergence]) -> list[Divergence]:
        """The divergences without entries that an earlier committed save has reported: most of them differ at every
        later save.
        """
        return [one for one in found if one.fqn not in self._named]

    def without_named_objects(self, found: Iterable[Divergence]) -> list[Divergence]:
        """As `without_named`, for objects only: a tensor that differs is part of each checkpoint's state."""
        return [one for one in found if not one.is_object or one.fqn not in self._named]


def key_of_unit(index: MetadataIndex, number: int) -> int:
    name = f"{index.fqn}\0{tuple(index.offset or ())}\0{number}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def name_divergences(reports: Mapping[int, bytes], metadata: Metadata) -> list[Divergence]:
    """Coordinator: the values that differ, by name. `metadata` already has the places of all items.

    Raises ValueError: a rank's report has a wrong size.
    """
    differing = find_differing(reports)
    if not differing:
        return []
    found = []
    sizes_by_fqn: dict[str, Mapping[Any, int]] = {}
    for index, place in metadata.storage_data.items():
        described = metadata.state_dict_metadata[index.fqn]
        # Once for each entry: one that is sharded over a thousand ranks has as many pieces here.
        if index.fqn not in sizes_by_fqn:
            sizes_by_fqn[index.fqn] = _sizes_by_offset(described)
        offset = tuple(index.offset or ())
        for number in range(_count_of(sizes_by_fqn[index.fqn].get(offset, 0))):
            groups = differing.get(key_of_unit(index, number))
            shard = ShardName.parse(place.relative_path) if groups else None
            # Without the report of the rank that saved it nothing can be said of the checkpoint.
            if groups is None or shard is None or not any(shard.rank in ranks for ranks in groups):
                continue
            # Its group first: it is what a load will get.
            ordered = tuple(sorted(groups, key=lambda ranks: shard.rank not in ranks))
            is_object = not hasattr(described, "properties")
            found.append(Divergence(index.fqn, offset, number * UNIT_BYTES, is_object, shard.rank, ordered))
    return sorted(found, key=lambda one: (one.is_object, one.fqn, one.offset, one.first_byte))


def _sizes_by_offset(described: Any) -> Mapping[Any, int]:
    """Bytes of each piece of an entry; of an object, nothing."""
    if not hasattr(described, "properties"):
        return {}
    itemsize = described.properties.dtype.itemsize
    return {tuple(chunk.offsets): math.prod(chunk.sizes) * itemsize for chunk in described.chunks}


def _is_all_sharded(value: object) -> bool:
    """Whether each rank of the value's mesh has a different part of it."""
    return isinstance(value, DTensor) and all(placement.is_shard() for placement in value.placements)


def _count_units(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 1
    return _count_of(planned_bytes(item))


def _count_of(size_bytes: int) -> int:
    return max(1, -(-size_bytes // UNIT_BYTES))


def _hash_unit(unit: _Unit, planner: SavePlanner) -> int | None:
    """The hash; None if this rank cannot hash the unit. If that is an error, the rank that writes the item raises it,
    too.
    """
    item = unit.item
    try:
        if item.type == WriteItemType.BYTE_IO:
            return _hash_object(item, planner)
        value = planner.resolve_data(item)
        if not isinstance(value, torch.Tensor) or is_freed(value) or (value.is_meta and value.numel()):
            return None
        planned = item.tensor_data
        elements = UNIT_BYTES // (planned.properties.dtype if planned is not None else value.dtype).itemsize
        return hash_tensor(value.detach(), unit.number * elements, elements)
    # Planners, classes of tensors and `__reduce__` may raise anything for a value that this rank does not write.
    except Exception as exc:  # noqa: BLE001
        log.debug("%s is not compared: %s", item.index.fqn, exc)
        return None


def hash_tensor(tensor: torch.Tensor, begin: int = 0, elements: int | None = None) -> int | None:
    """CRC32C of `elements` values from index `begin` on, in the order of the indices, whatever the strides are.

    `elements` None: all values from there on. Returns None if the tensor consists of more than its elements.
    """
    if not is_plain(tensor):
        return None
    head = crc32c(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    flat = tensor.reshape(-1)[begin : None if elements is None else begin + elements]
    if flat.device.type == "cpu":
        return crc32c(memory_of(flat.contiguous()), head)
    for piece in copy_to_host(flat.contiguous()):
        head = crc32c(memory_of(piece), head)
    return head


def _hash_object(item: WriteItem, planner: SavePlanner) -> int | None:
    if not isinstance(planner, DefaultSavePlanner):
        data = planner.resolve_data(item)  # its own way from a value to bytes
        return crc32c(data.getbuffer()) if isinstance(data, BytesIO) else None
    crc = 0
    for piece in canonical_bytes(planner.lookup_object(item.index)):
        crc = crc32c(piece, crc)
    return crc


_SCALARS = (int, float, bool, type(None))


def canonical_bytes(value: Any) -> Iterator[bytes]:
    """Bytes that are equal for equal values. Pickle's bytes are not: they depend on identities, and on the order of
    sets.
    """
    kind = type(value)
    if kind in (dict, set, frozenset):
        pairs = value.items() if kind is dict else ((one, None) for one in value)
        # By key: ranks may have filled it in another order.
        joined = sorted((b"".join(canonical_bytes(key)), b"".join(canonical_bytes(held))) for key, held in pairs)
        yield f"{kind.__name__}{len(joined)}".encode()
        for key, held in joined:
            yield key
            yield held
    elif kind in (list, tuple) and all(type(one) in _SCALARS for one in value):
        yield repr(value).encode()  # a sampler's permutation has millions
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
