"""Ranks that have the same values: they compare them, and copy each other's shards from their own memory.

DCP saves one replica of each value, so a checkpoint alone cannot show that another replica has diverged. At each save,
each rank hashes another part of its state, and sends the hashes with its receipt. That takes no further message or
collective.

In DDP and HSDP every byte lies on several nodes. The coordinator finds ranks whose plans were equal before DCP dropped
the duplicates. It sends the items of one rank's shard to a rank of its buddy node, the helper. Both write the same
file, and report its checksum in their receipts. In an asynchronous save their agents write, and the agent that finishes
the save asks for the checksums. If the checksums differ, the copy does not count, and agents copy the owner's file.
"""

import hashlib
import logging
import math
import pickle
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, SavePost
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner, find_whole, planned_bytes
from replicated_ckpt.dcp.rank_state.rank_state import find_own
from replicated_ckpt.dcp.runtime.torch_private import DTensor
from replicated_ckpt.dcp.tensors.container import is_freed, is_plain
from replicated_ckpt.dcp.tensors.tensor_memory import copy_to_host, memory_of
from replicated_ckpt.node.saves.finish import HelperCopy

log = logging.getLogger(__name__)

UNIT_BYTES = 64 << 20
"""The largest unit of comparison. A larger tensor has several units, so that one save need not hash all of it."""


@dataclass(frozen=True)
class _Unit:
    """A unit of comparison: an item, or a range of a large item."""

    item: WriteItem
    number: int


class ReplicaCheck:
    """This rank's part in the comparison. The coordinator's also chooses what is compared next. One save at a time."""

    def __init__(self, parts: int | None) -> None:
        """`parts`: the number of saves that together compare everything. None: nothing is compared."""
        self._parts = parts
        # Random: a job that often restarts would otherwise compare only the first parts.
        self._next_part = randbelow(parts) if parts else 0
        self.is_all_known = False
        """Coordinator: a save has compared everything, so all differences are known."""
        self._of: tuple[Sequence[WriteItem], int] | None = None
        self._units: list[list[_Unit]] = []
        self._named_tensors: set[str] = set()
        self._named_objects: set[str] = set()

    def next_turn(self, local_items: int, plans: Sequence[SavePlan]) -> Turn | None:
        """Coordinator: the part that the ranks compare in this save. None: nothing, because each item lies on one rank
        only.

        `local_items`: the items of all ranks before DCP drops the duplicates. `plans`: the plans after that.
        """
        whole = [find_whole(plan) for plan in plans]
        # If torch's own `enable_plan_caching` has left out a plan, its items are unknown.
        if not self._parts or not all(plan.usable for plan in whole):
            return None
        if local_items <= sum(len(plan.items) for plan in whole):
            return None
        # Everything at first: no helper may copy from a replica that was never compared (`HelpPlans.choose`).
        return Turn(self._next_part, self._parts) if self.is_all_known else Turn(0, 1)

    def suspect(self) -> None:
        """Replicas differ somewhere, so the next save compares everything."""
        self.is_all_known = False

    def note_committed(self, turn: Turn | None, found: Sequence[Divergence]) -> None:
        """The next save compares the next part. After a failed save, the same part is compared again.

        `found`: all divergences of this save.
        """
        if turn is not None and self._parts:
            self.is_all_known |= turn.parts == 1
            self._next_part = (self._next_part + 1) % self._parts
            # Tensors that are equal again: if they diverge once more, that is news.
            if turn.parts == 1:
                self._named_tensors.clear()
        self._named_tensors.update(one.fqn for one in found if not one.is_object)
        self._named_objects.update(one.fqn for one in found if one.is_object)

    def hash_units(self, plan: SavePlan, planner: SavePlanner, turn: Turn) -> bytes:
        """This rank's report: the hashes of the units in this turn. `plan`: the plan before DCP drops duplicates.

        Values that cannot be hashed, such as an object that pickle refuses, are left out. Another rank may save them.
        """
        units = self._units_of(plan.items, planner, turn.parts)[turn.part]
        found = {key_of_unit(unit.item.index, unit.number): _hash_unit(unit, planner) for unit in units}
        return pack_units({key: value for key, value in found.items() if value is not None})

    def _units_of(self, items: Sequence[WriteItem], planner: SavePlanner, parts: int) -> list[list[_Unit]]:
        # A cached plan has the same list of items at each save: its units are found once.
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
        return [one for one in self.without_named_objects(found) if one.is_object or one.fqn not in self._named_tensors]

    def without_named_objects(self, found: Iterable[Divergence]) -> list[Divergence]:
        """As `without_named`, but only for objects. A differing tensor is reported for each checkpoint."""
        return [one for one in found if not one.is_object or one.fqn not in self._named_objects]


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
        # Once for each entry: an entry that is sharded over a thousand ranks has a thousand pieces in this loop.
        if index.fqn not in sizes_by_fqn:
            sizes_by_fqn[index.fqn] = _sizes_by_offset(described)
        offset = tuple(index.offset or ())
        for number in range(_count_of(sizes_by_fqn[index.fqn].get(offset, 0))):
            groups = differing.get(key_of_unit(index, number))
            shard = ShardName.parse(place.relative_path) if groups else None
            # Without the report of the rank that saved the value, it is unknown whether the checkpoint's value differs.
            if groups is None or shard is None or not any(shard.rank in ranks for ranks in groups):
                continue
            # The group of the rank that saved the value comes first: a load will get that value.
            ordered = tuple(sorted(groups, key=lambda ranks: shard.rank not in ranks))
            is_object = not hasattr(described, "properties")
            found.append(Divergence(index.fqn, offset, number * UNIT_BYTES, is_object, shard.rank, ordered))
    return sorted(found, key=lambda one: (one.is_object, one.fqn, one.offset, one.first_byte))


def _sizes_by_offset(described: Any) -> Mapping[Any, int]:
    """Bytes of each piece of a tensor entry, by offset. Empty for an object."""
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
    """The hash; None if this rank cannot hash it. Errors are only logged: the rank that writes the item raises them."""
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
        data = planner.resolve_data(item)  # the planner's own serialisation
        return crc32c(data.getbuffer()) if isinstance(data, BytesIO) else None
    crc = 0
    for piece in canonical_bytes(planner.lookup_object(item.index)):
        crc = crc32c(piece, crc)
    return crc


_SCALARS = (int, float, bool, type(None))


class _CanonicalPickler(pickle.Pickler):
    """Pickles an object with the canonical bytes of dictionaries, sets and tensors inside of it."""

    def persistent_id(self, value: Any) -> bytes | None:
        if type(value) in (dict, set, frozenset) or isinstance(value, torch.Tensor):
            return b"".join(canonical_bytes(value))
        return None


def canonical_bytes(value: Any) -> Iterator[bytes]:
    """Bytes that are equal for equal values. Pickle's bytes are not: they depend on identities, and on the order of
    sets.
    """
    kind = type(value)
    if kind in (dict, set, frozenset):
        pairs = value.items() if kind is dict else ((one, None) for one in value)
        # Sorted by key: ranks may have filled it in another order.
        joined = sorted((b"".join(canonical_bytes(key)), b"".join(canonical_bytes(held))) for key, held in pairs)
        yield f"{kind.__name__}{len(joined)}".encode()
        for key, held in joined:
            yield key
            yield held
    elif kind in (list, tuple) and all(type(one) in _SCALARS for one in value):
        yield repr(value).encode()  # fast: a sampler's permutation has millions of elements
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
        pickler = _CanonicalPickler(file, protocol=4)
        pickler.fast = True  # no memo: pickle would write a reference for an identical object, but not for an equal one
        pickler.dump(value)
        yield file.getvalue()


Items = Sequence[WriteItem]


def digest_of_items(items: Items) -> str:
    """A digest that is equal on two ranks with the same items: names, kinds, places and sizes. "" without items.

    Items that only one rank has, such as a RankState, do not count: they lie in a file of their own.
    """
    own = find_own(item.index.fqn for item in items)
    items = [item for item in items if item.index.fqn not in own]
    if not items:
        return ""
    kinds = [None if item.tensor_data is None else item.tensor_data.properties.dtype for item in items]
    names = "\0".join([f"{item.index.fqn}\0{kind}" for item, kind in zip(items, kinds, strict=True)])
    # Only whole numbers: their hashes are the same in every process, unlike those of text.
    places = hash(tuple([tuple(item.index.offset or ()) for item in items]))
    sizes = hash(tuple([() if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes) for item in items]))
    return hashlib.blake2b(f"{places} {sizes} {names}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class HelpPlan:
    """Sent with a rank's plan: by owner, the items of the shards that the rank copies. `items_by_owner` None: the items
    that were sent before with the same token.
    """

    token: str
    items_by_owner: Mapping[int, Items] | None


@dataclass
class HelpPlans:
    """The help plans that a writer caches between saves: those that the coordinator sent, and the one that a rank got."""

    token: str = ""
    """The token of the items that this rank got. It posts the token before a save, so that they are not sent again."""
    _got: Mapping[int, Items] = field(default_factory=dict)
    _sent: dict[int, tuple[str, Mapping[int, Items]]] = field(default_factory=dict)
    _digested: tuple[Items, str] = ((), "")
    _is_able: bool = False
    _differing: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of owner and helper that have other values."""
    _alone: set[int] = field(default_factory=set)
    """Owners whose file has differed from a helper's. They get no helper again, because each try costs a copy."""

    def digest_of(self, items: Items) -> str:
        """As `digest_of_items`, computed once for items that stay the same from save to save. "": this rank cannot
        help.
        """
        if not self._is_able:
            return ""
        if self._digested[0] is not items:
            self._digested = items, digest_of_items(items)
        return self._digested[1]

    def note_planner(self, planner: SavePlanner) -> None:
        """On a rank that has written: records whether its planner keeps what the coordinator adds to a plan."""
        self._is_able = type(planner).finish_plan in (DefaultSavePlanner.finish_plan, CachedSavePlanner.finish_plan)

    def choose(self, decision: SaveDecision, posts: Sequence[SavePost], plans: Sequence[SavePlan]) -> SaveDecision:
        """Coordinator: the decision with the helpers of each rank, at most one on each buddy node of its own node."""
        whole = [find_whole(plan) for plan in plans]
        # If torch's own plan caching has left out a plan, neither its items nor added ones would arrive.
        if not all(plan.usable for plan in whole):
            return decision
        load = [0] * len(posts)
        chosen: list[tuple[int, ...]] = []
        for owner, post in enumerate(posts):
            helpers: list[int] = []
            is_helped = post.plan_digest and post.takes_copies and whole[owner].items and owner not in self._alone
            for buddy in decision.buddies_of(decision.node_of(owner).node_id) if is_helped else ():
                able = [
                    rank
                    for rank in decision.ranks_of(buddy)
                    if posts[rank].plan_digest == post.plan_digest and (owner, rank) not in self._differing
                ]
                if able:
                    helpers.append(min(able, key=load.__getitem__))
                    load[helpers[-1]] += 1
            chosen.append(tuple(helpers))
        return replace(decision, helpers=tuple(chosen)) if any(chosen) else decision

    def add_to_plans(
        self, plans: Sequence[SavePlan], decision: SaveDecision, posts: Sequence[SavePost]
    ) -> list[SavePlan]:
        """Coordinator: the plans of the ranks, with the items of the shards that each of them copies for others."""
        whole = [find_whole(plan) for plan in plans]
        added = list(plans)
        for helper, owners in decision.owners_by_helper.items():
            items = {owner: whole[owner].items for owner in owners}
            token, before = self._sent.get(helper, ("", {}))
            is_known = token == posts[helper].help_token and _are_same(items, before)
            if not is_known:
                token = uuid.uuid4().hex
                self._sent[helper] = token, items
            added[helper] = replace(added[helper], storage_data=HelpPlan(token, None if is_known else items))
        return added

    def take(self, plan: SavePlan) -> Mapping[int, Items]:
        """A rank: the items of the shards that it copies, by owner."""
        sent = plan.storage_data
        if not isinstance(sent, HelpPlan):
            return {}
        if sent.items_by_owner is not None:
            self.token, self._got = sent.token, sent.items_by_owner
        # Items of another save may be of another state: no copy is better than a wrong one.
        return self._got if sent.token == self.token else {}

    def exclude(self, found: Iterable[Divergence]) -> None:
        """Coordinator: ranks whose values differ from those of a shard's owner no longer copy that shard."""
        for one in found:
            self._differing.update((one.saved_by, rank) for group in one.groups[1:] for rank in group)

    def exclude_owners(self, owners: Iterable[int]) -> None:
        """Coordinator: the shards of these ranks are sent from now on."""
        self._alone.update(owners)


def _are_same(items: Mapping[int, Items], before: Mapping[int, Items]) -> bool:
    """Whether the items are the same objects, as those of cached plans are. Equal items in other objects do not count."""
    return items.keys() == before.keys() and all(items[owner] is before[owner] for owner in items)


@dataclass(frozen=True)
class CountedCopies:
    """The receipts with the copies that helpers made. `missed`: descriptions of the copies that do not count.

    `differing`: the owners of those copies. `pending`: by shard, copies that cannot be compared yet, because an agent
    still writes the copy or the shard.
    """

    receipts: Sequence[Receipt]
    missed: Sequence[str]
    differing: frozenset[int]
    pending: Mapping[str, Sequence[HelperCopy]]


def count_copies(receipts: Sequence[Receipt], decision: SaveDecision) -> CountedCopies:
    """Coordinator: adds to each shard's holders the nodes where a helper wrote the same file."""
    made = {(rank, copy.name): copy for rank, receipt in enumerate(receipts) for copy in receipt.copies}
    counted, differing, missed = list(receipts), set[int](), list[str]()
    pending: dict[str, list[HelperCopy]] = {}
    for owner, helpers in enumerate(decision.helpers):
        shards = []
        for shard in receipts[owner].shards:
            holders = list(shard.holders)
            for helper in helpers if is_copied(shard.name) else ():
                node, copy = decision.node_of(helper), made.get((helper, shard.name))
                if copy is not None and (shard.is_submitted or copy.is_submitted):
                    found = HelperCopy(node.node_id, copy.size_bytes, copy.crc32c)
                    pending.setdefault(shard.name, []).append(found)
                    continue
                if copy is not None and (copy.size_bytes, copy.crc32c) == (shard.size_bytes, shard.crc32c):
                    holders.append(node.node_id)
                    continue
                differing.add(owner)
                where = f"no copy of {shard.name} was made on node {node.node_id} ({node.host})"
                why = (
                    f"rank {helper} there could not write it"
                    if copy is None
                    else f"its replica on rank {helper} there has other bytes than rank {owner} saved"
                )
                missed.append(f"{where}: {why}")
            shards.append(replace(shard, holders=tuple(holders)))
        counted[owner] = replace(receipts[owner], shards=tuple(shards))
    return CountedCopies(counted, missed, frozenset(differing), pending)


def find_owners(differing: Iterable[tuple[str, str]]) -> set[int]:
    """The owners of the copies that an agent has found to differ; the agent names them by shard and node."""
    shards = (ShardName.parse(name) for name, _ in differing)
    return {shard.rank for shard in shards if shard is not None}


def is_copied(shard: str) -> bool:
    """Whether helpers copy this file of a shard's owner. They do not copy the rest, which only the owner has, nor
    unchanged entries, which are linked.
    """
    return part_of_shard(shard) not in (Part.REST, Part.UNCHANGED)


def find_helped(decision: SaveDecision, rank: int) -> frozenset[str]:
    """The buddy nodes to which this rank need not send its shard."""
    helpers = decision.helpers[rank] if decision.helpers else ()
    return frozenset(decision.node_of(helper).node_id for helper in helpers)
