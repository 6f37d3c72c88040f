"""Repair: from what the nodes hold, what must be copied where, so that every checkpoint has its number of copies again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from operator import index
from typing import Any

from replicated_ckpt.core.inventory import Holding, SaveFound, saves_found
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.policy import NOTHING_SAID, Standing


class Presence(Enum):
    """What is known of a node. Unreachable is never taken for missing before somebody decides that it is gone."""

    UP = "up"
    """It answers: it can give and take copies."""
    ASSUMED = "assumed"
    """It does not answer now; what it held last counts, and nobody is asked to replace it."""
    GONE = "gone"
    """It counts for nothing."""


@dataclass(frozen=True)
class NodeView:
    """One node as the planner sees it. `holdings` None: nobody knows; it is taken to hold what it was meant to.

    `unbelieved` are checkpoints of which it has files and no intact manifest: it counts as holding what it was meant to
    of them, and gives none of it to others, until it has taken the manifest over.
    """

    node_id: str
    presence: Presence
    holdings: tuple[Holding, ...] | None
    domain: str | None = None
    unbelieved: tuple[str, ...] = ()
    standing: Standing = NOTHING_SAID


@dataclass(frozen=True)
class Adopt:
    """A node gets manifest and metadata of a save that it does not hold, or holds without intact metadata."""

    node_id: str
    checkpoint_id: str
    save_id: str
    sources: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"node {self.node_id}: take over {self.checkpoint_id} (manifest, metadata) from {', '.join(self.sources)}"
        )


@dataclass(frozen=True)
class CopyShard:
    """A node gets a copy of a shard; a damaged one that it has is set aside when the good one is there.

    `sources` are nodes that answer and hold it, those with an intact copy first; if there is none, each block comes
    from whoever has that one intact.
    """

    node_id: str
    checkpoint_id: str
    save_id: str
    shard: str
    size_bytes: int
    sources: tuple[str, ...]
    replaces_damaged: bool = False

    def __str__(self) -> str:
        what = "replace the damaged" if self.replaces_damaged else "copy"
        return (
            f"node {self.node_id}: {what} {self.checkpoint_id}/{self.shard} ({self.size_bytes} bytes) "
            f"from {', '.join(self.sources)}"
        )


@dataclass(frozen=True)
class ShortShard:
    """A shard with fewer copies than wanted for which nothing can be done now; `have` 0: no copy is known anywhere."""

    checkpoint_id: str
    save_id: str
    shard: str
    owner: str
    wanted: int
    have: int

    def __str__(self) -> str:
        return f"{self.checkpoint_id}/{self.shard} (owner {self.owner}): {self.have} of {self.wanted} copies"


@dataclass(frozen=True)
class RepairPlan:
    """What is to be done, in this order, and what cannot be. An empty plan without `short` means full protection."""

    adopt: tuple[Adopt, ...] = ()
    copy: tuple[CopyShard, ...] = ()
    short: tuple[ShortShard, ...] = ()

    @property
    def actions(self) -> tuple[Adopt | CopyShard, ...]:
        return (*self.adopt, *self.copy)

    @property
    def lost(self) -> tuple[ShortShard, ...]:
        return tuple(shard for shard in self.short if shard.have == 0)

    def of_node(self, node_id: str) -> "RepairPlan":
        """The part that one node has to do."""
        return RepairPlan(
            tuple(action for action in self.adopt if action.node_id == node_id),
            tuple(action for action in self.copy if action.node_id == node_id),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "RepairPlan":
        """The actions of a plan, as `to_json` wrote them; what is short is left out.

        Raises:
            KeyError, TypeError, ValueError: it is none; the caller names who sent it.
        """
        return cls(
            tuple(Adopt(**_texts(entry), sources=_nodes(entry)) for entry in fields["adopt"]),
            tuple(
                CopyShard(
                    **_texts(entry, "shard"),
                    size_bytes=index(entry["size_bytes"]),
                    sources=_nodes(entry),
                    replaces_damaged=bool(entry["replaces_damaged"]),
                )
                for entry in fields["copy"]
            ),
        )


def _texts(entry: Mapping[str, Any], *more: str) -> dict[str, Any]:
    return {name: str(entry[name]) for name in ("node_id", "checkpoint_id", "save_id", *more)}


def _nodes(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(node) for node in entry["sources"])


def planned(manifest_by_save: Mapping[str, Manifest], nodes: Sequence[NodeView]) -> RepairPlan:
    """What brings every checkpoint back to its number of intact copies on the nodes that are there.

    Every node that is up gets manifest and metadata of every checkpoint. A missing copy goes to a node that has a
    damaged one or was meant to hold it, else to one in a domain without a copy, else to the one that gets least. The
    same views give the same plan, so each node can plan for itself.
    """
    plan = _Planning(nodes)
    for save in _present(manifest_by_save, nodes):
        plan.add(save)
    return RepairPlan(tuple(plan.adopt), tuple(plan.copy), tuple(plan.short))


@dataclass(frozen=True)
class _Save:
    """One save and who holds each of its shards intact, as far as is known or assumed, and who a damaged copy."""

    found: SaveFound
    manifest: Manifest
    holders_by_shard: Mapping[str, set[str]]
    damaged_by_shard: Mapping[str, set[str]]
    trusted: set[str]

    @classmethod
    def of(cls, found: SaveFound, manifest: Manifest, unknown: set[str]) -> "_Save":
        """`unknown`: nodes that are assumed to hold what they were meant to."""
        holders = {shard: unknown & set(entry.holders) for shard, entry in manifest.shards.items()}
        damaged: dict[str, set[str]] = {shard: set() for shard in manifest.shards}
        for holding in found.holdings:
            bad = set(holding.damaged)
            for shard, size in holding.sizes.items():
                if shard in holders and size == manifest.shards[shard].size_bytes:
                    (damaged if shard in bad else holders)[shard].add(holding.node_id)
        return cls(found, manifest, holders, damaged, unknown)

    @property
    def is_whole(self) -> bool:
        return all(self.holders_by_shard.values())


def _present(manifest_by_save: Mapping[str, Manifest], nodes: Sequence[NodeView]) -> Iterator[_Save]:
    """Of each checkpoint the newest whole save, or the newest if none is whole."""
    holdings = [holding for node in nodes if node.presence is not Presence.GONE for holding in node.holdings or ()]
    unknown = {node.node_id for node in nodes if node.presence is Presence.ASSUMED and node.holdings is None}
    unbelieved: dict[str, set[str]] = {}
    for node in nodes:
        for checkpoint_id in node.unbelieved if node.presence is not Presence.GONE else ():
            unbelieved.setdefault(checkpoint_id, set()).add(node.node_id)
    by_id: dict[str, list[_Save]] = {}
    for found in saves_found(holdings):
        if found.save_id in manifest_by_save:
            trusted = unknown | unbelieved.get(found.checkpoint_id, set())
            save = _Save.of(found, manifest_by_save[found.save_id], trusted)
            by_id.setdefault(found.checkpoint_id, []).append(save)
    for saves in by_id.values():
        yield next((save for save in saves if save.is_whole), saves[0])


class _Planning:
    """Collects the actions; keeps how many bytes each node is to take."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        self._nodes = nodes
        self._up = [node for node in nodes if node.presence is Presence.UP]
        self._up_ids = {node.node_id for node in self._up}
        self._there = sum(node.presence is not Presence.GONE for node in nodes)
        self._bytes_by_node = {node.node_id: 0 for node in self._up}
        self.adopt: list[Adopt] = []
        self.copy: list[CopyShard] = []
        self.short: list[ShortShard] = []

    def add(self, save: _Save) -> None:
        self._add_adoptions(save)
        for shard in sorted(save.manifest.shards):
            self._add_copies(save, shard)

    def _add_adoptions(self, saved: _Save) -> None:
        save = saved.found
        holders = {h.node_id for h in save.holdings if h.has_metadata} | saved.trusted
        if not holders:
            owner = "every node of the save"
            self.short.append(
                ShortShard(save.checkpoint_id, save.save_id, METADATA_NAME, owner, saved.manifest.copies, 0)
            )
        sources = tuple(h.node_id for h in save.holdings if h.has_metadata and h.node_id in self._up_ids)
        if not sources:
            return
        for node in self._up:
            of_id = [h for h in node.holdings or () if h.checkpoint_id == save.checkpoint_id]
            has_it = any(h.save_id == save.save_id and h.has_metadata for h in of_id)
            has_newer = any((h.sequence, h.save_id) > (save.sequence, save.save_id) for h in of_id)
            if not has_it and not has_newer:
                self.adopt.append(Adopt(node.node_id, save.checkpoint_id, save.save_id, sources))

    def _add_copies(self, save: _Save, shard: str) -> None:
        manifest, checkpoint_id, save_id = save.manifest, save.found.checkpoint_id, save.found.save_id
        entry, holders = manifest.shards[shard], save.holders_by_shard[shard]
        wanted = min(manifest.copies, self._there)
        damaged = save.damaged_by_shard[shard] & self._up_ids
        seen = {holding.node_id for holding in save.found.holdings}
        intact = sorted(holders & self._up_ids & seen, key=lambda node: (node != entry.owner_node, node))
        sources = (*intact, *sorted(damaged))
        can_give = bool(intact) or len(damaged) > 1
        chosen = self._destinations(save, shard, wanted - len(holders)) if can_give else []
        for node_id in chosen:
            self._bytes_by_node[node_id] += entry.size_bytes
            is_damaged = node_id in damaged
            self.copy.append(CopyShard(node_id, checkpoint_id, save_id, shard, entry.size_bytes, sources, is_damaged))
        if len(holders) + len(chosen) < wanted or not (holders or can_give):
            have, owner = len(holders), manifest.owner_of(shard)
            self.short.append(ShortShard(checkpoint_id, save_id, shard, owner, manifest.copies, have))

    def _destinations(self, save: _Save, shard: str, count: int) -> list[str]:
        manifest, holders = save.manifest, save.holders_by_shard[shard]
        first = save.damaged_by_shard[shard] | set(manifest.shards[shard].holders)
        domains = {node.node_id: node.domain for node in manifest.nodes}
        domains.update({node.node_id: node.domain for node in self._nodes if node.domain is not None})
        taken, chosen = set(holders), list[str]()
        seen = {holding.node_id for holding in save.found.holdings}
        can_adopt = any(holding.has_metadata and holding.node_id in self._up_ids for holding in save.found.holdings)
        able = self._up_ids if can_adopt else self._up_ids & seen

        def rank(node: str) -> tuple[bool, bool, int, str]:
            shares_domain = domains.get(node) is not None and any(domains.get(n) == domains[node] for n in taken)
            return (node not in first, shares_domain, self._bytes_by_node[node], node)

        while len(chosen) < count:
            candidates = [node for node in sorted(able) if node not in taken]
            if not candidates:
                break
            best = min(candidates, key=rank)
            chosen.append(best)
            taken.add(best)
        return chosen
