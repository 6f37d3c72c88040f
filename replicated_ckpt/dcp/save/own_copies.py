"""Copies that are not sent: a rank of the buddy node that has all values of a shard writes the copy from its own
memory.

In DDP and HSDP every byte lies on several nodes. The coordinator finds ranks whose plans were equal before DCP dropped
the duplicates. It sends the items of one rank's shard to a rank of its buddy node, the helper. Both write the same
file, and report its checksum in their receipts. In an asynchronous save their agents write, and the agent that finishes
the save asks for the checksums. If the checksums differ, the copy does not count, and agents copy the owner's file.
"""

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from replicated_ckpt.core.divergence import Divergence
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.parts import Part, part_of_shard
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, SavePost
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner, find_whole
from replicated_ckpt.dcp.rank_state.rank_state import find_own
from replicated_ckpt.node.saves.finish import HelperCopy

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
    # Of whole numbers alone, whose hashes are the same in every process.
    places = hash(tuple([tuple(item.index.offset or ()) for item in items]))
    sizes = hash(tuple([() if item.tensor_data is None else tuple(item.tensor_data.chunk.sizes) for item in items]))
    return hashlib.blake2b(f"{places} {sizes} {names}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class HelpPlan:
    """Sent with a rank's plan: by owner, the items of the shards that the rank copies. None: those of an earlier plan
    with `token`.
    """

    token: str
    items_by_owner: Mapping[int, Items] | None


@dataclass
class HelpPlans:
    """What a writer remembers between saves: on the coordinator what it sent to each rank, on a rank what it received."""

    token: str = ""
    """Of what this rank got. It posts it before a save, so that the same items are not sent again."""
    _got: Mapping[int, Items] = field(default_factory=dict)
    _sent: dict[int, tuple[str, Mapping[int, Items]]] = field(default_factory=dict)
    _digested: tuple[Items, str] = ((), "")
    _is_able: bool = False
    _differing: set[tuple[int, int]] = field(default_factory=set)
    """Pairs of owner and helper that have other values."""
    _alone: set[int] = field(default_factory=set)
    """Owners whose file has differed from a helper's. None is tried again for them: each try costs a copy."""

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
        """On a rank that has written: records whether its planner passes on what was sent with a plan."""
        self._is_able = type(planner).finish_plan in (DefaultSavePlanner.finish_plan, CachedSavePlanner.finish_plan)

    def choose(self, decision: SaveDecision, posts: Sequence[SavePost], plans: Sequence[SavePlan]) -> SaveDecision:
        """Coordinator: the decision with the helpers of each rank, at most one on each buddy node of its own node."""
        whole = [find_whole(plan) for plan in plans]
        # torch's own plan caching has left a plan out: neither its items nor what is added would arrive.
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
        # Of another save the items may be of another state: no copy is better than a wrong one.
        return self._got if sent.token == self.token else {}

    def exclude(self, found: Iterable[Divergence]) -> None:
        """Coordinator: ranks whose values differ from those of a shard's owner no longer copy that shard."""
        for one in found:
            self._differing.update((one.saved_by, rank) for group in one.groups[1:] for rank in group)

    def exclude_owners(self, owners: Iterable[int]) -> None:
        """Coordinator: the shards of these ranks are sent from now on."""
        self._alone.update(owners)


def _are_same(items: Mapping[int, Items], before: Mapping[int, Items]) -> bool:
    """The coordinator's cached plans are the same objects from save to save. Other plans never count as the same."""
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
    """Whether helpers copy this file of a rank that has helpers. All other files have what only the rank itself has.

    Unchanged entries are linked, and not copied.
    """
    return part_of_shard(shard) not in (Part.REST, Part.UNCHANGED)


def find_helped(decision: SaveDecision, rank: int) -> frozenset[str]:
    """The buddy nodes to which this rank need not send its shard."""
    helpers = decision.helpers[rank] if decision.helpers else ()
    return frozenset(decision.node_of(helper).node_id for helper in helpers)
