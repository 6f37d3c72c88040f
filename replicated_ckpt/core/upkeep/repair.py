"""Repair: the copies that nodes must make, from their holdings, so that every checkpoint has all its copies again."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from replicated_ckpt.core.inventory import Holding, SaveFound, saves_found
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest, find_domains, find_shared
from replicated_ckpt.core.protocol.seen_save import SeenSave, see_save
from replicated_ckpt.core.upkeep.policy import NOTHING_REPORTED, NodeReport
from replicated_ckpt.core.upkeep.repair_plan import CopyShard, RepairPlan, RestoreManifest, SetAside, ShortShard
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles, recognize


class Presence(Enum):
    """The state of a node. An unreachable node counts as gone only after a time-out, or if a user decides so."""

    UP = "up"
    """It answers, and can give and take copies."""
    ASSUMED = "assumed"
    """It does not answer now. Its last holdings prevent new copies, and never let another version be deleted (I2)."""
    GONE = "gone"
    """It counts for nothing."""


@dataclass(frozen=True)
class NodeView:
    """One node for the planner. `holdings` None: they are unknown, and the node is assumed to have its intended shards.

    `unclaimed` are its files without a valid manifest. `is_leaving`: the node is to be taken down. It sends copies, but
    takes none, and its own copies do not count. `writable_bytes` None: its room is unknown.
    """

    node_id: str
    presence: Presence
    holdings: tuple[Holding, ...] | None
    unclaimed: tuple[UnclaimedFiles, ...] = ()
    node_report: NodeReport = NOTHING_REPORTED
    is_leaving: bool = False
    writable_bytes: int | None = None


def plan_repair(
    manifest_by_save: Mapping[str, Manifest],
    nodes: Sequence[NodeView],
    own_node: str | None = None,
    *,
    going: Collection[str] = (),
) -> RepairPlan:
    """The plan that gives every checkpoint its number of intact copies on the existing nodes.

    Every node that is up gets manifest and metadata of every checkpoint. A damaged copy is replaced in place. A missing
    copy goes to a node with room for it: to an intended holder, else to a domain without a copy, else to the node with the
    fewest planned bytes. A node's domain is that of its newest save. The same views give the same plan, so each node plans
    on its own.

    Of several saves of a checkpoint and lineage, the newest one that was seen whole replaces older ones. If none was seen
    whole, each is repaired in place. A published version of another lineage stays, and its node gets no copy.

    `going`: retired or removed saves, which are ignored. A directory with another name than its save's was renamed or
    copied by a user. It is repaired in any case.

    Files of an unknown save, whose manifest no node has, stay. A whole save may replace them only on `own_node`, which
    plans for itself, and only if every known node has answered.
    """
    plan = _Planning(nodes, own_node, find_domains(manifest_by_save.values()))
    for checkpoint in _checkpoints(manifest_by_save, nodes, going):
        plan.add(checkpoint)
    return RepairPlan(tuple(plan.restore), tuple(plan.copy), tuple(plan.set_aside), tuple(plan.short))


@dataclass(frozen=True)
class _Checkpoint:
    """The state of one id: its saves, in the order of `saves_found`, and the nodes with files of no known save.

    `foreign` nodes have such files of this package, `unmanaged` nodes have files that stock torch may have written. The
    files of nodes in `left` are of a save that a user has removed elsewhere, so their manifest need not be found.
    """

    checkpoint_id: str
    saves: tuple[SeenSave, ...]
    foreign: frozenset[str] = frozenset()
    unmanaged: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()

    @cached_property
    def lineages(self) -> Mapping[str, Sequence[SeenSave]]:
        """The saves by lineage, newest first; the lineage that was saved last comes first. Saves that all of their nodes
        delete are left out."""
        by_lineage: dict[str, list[SeenSave]] = {}
        for save in self.saves:
            if self.find_going(save) < {holding.node_id for holding in save.found.holdings}:
                by_lineage.setdefault(save.version.lineage, []).append(save)
        return by_lineage

    def find_going(self, save: SeenSave) -> set[str]:
        """The nodes that delete the save, because a whole save of another lineage has replaced it there."""
        kept = {holding.node_id for holding in save.found.holdings if holding.is_replaced}
        return {node for node in kept if self._whole_named.get(node, save.version.lineage) != save.version.lineage}

    def find_blocked(self) -> dict[str, set[str]]:
        """By save, the nodes that lack the save, and whose own version blocks it."""
        held = [holding for save in self.saves for holding in save.found.holdings]
        return {
            save.found.save_id: {one.node_id for one in held if save.is_blocked_by(one)} - save.holders
            for save in self.saves
        }

    @cached_property
    def _whole_named(self) -> Mapping[str, str]:
        """By node, the lineage of its published save, if that is whole."""
        whole = [(save.version.lineage, save.found.holdings) for save in self.saves if save.is_whole]
        return {held.node_id: lineage for lineage, holdings in whole for held in holdings if not held.is_replaced}

    @property
    def newest_lineage(self) -> str | None:
        """The lineage that nodes without any version of the checkpoint get."""
        return next(iter(self.lineages), None)


def _checkpoints(
    manifest_by_save: Mapping[str, Manifest], nodes: Sequence[NodeView], going: Collection[str]
) -> Iterator[_Checkpoint]:
    there = [node for node in nodes if node.presence is not Presence.GONE]
    found: dict[str, list[SaveFound]] = {}
    for save in saves_found(holding for node in there for holding in node.holdings or ()):
        manifest = manifest_by_save.get(save.save_id)
        if manifest is not None and not (save.save_id in going and save.checkpoint_id == manifest.checkpoint_id):
            found.setdefault(save.checkpoint_id, []).append(save)
    unclaimed: dict[str, list[UnclaimedFiles]] = {}
    for node in there:
        for one in node.unclaimed if node.presence is Presence.UP else ():
            unclaimed.setdefault(one.checkpoint_id, []).append(one)
    look = _Look(manifest_by_save, there, [one for save_id, one in manifest_by_save.items() if save_id in going])
    for checkpoint_id in [*found, *(each for each in unclaimed if each not in found)]:
        yield look.at(checkpoint_id, found.get(checkpoint_id, []), unclaimed.get(checkpoint_id, []))


class _Look:
    """Merges holdings and unclaimed files into the state of each save."""

    def __init__(
        self, manifest_by_save: Mapping[str, Manifest], there: Sequence[NodeView], going: Sequence[Manifest]
    ) -> None:
        self._manifests, self._going = manifest_by_save, going
        self._up = {node.node_id for node in there if node.presence is Presence.UP}
        self._unsure = {node.node_id for node in there if node.presence is Presence.ASSUMED and node.holdings is None}

    def at(self, checkpoint_id: str, found: Sequence[SaveFound], unclaimed: Sequence[UnclaimedFiles]) -> _Checkpoint:
        saves = [self._see(save, ()) for save in found]
        if not unclaimed:
            return _Checkpoint(checkpoint_id, tuple(saves))
        likely = [save.manifest for save in sorted(saves, key=lambda save: not save.is_whole)]
        foreign, unmanaged = set[str](), set[str]()
        recognized: dict[str, list[Holding]] = {save.save_id: [] for save in found}
        for one in unclaimed:
            manifest = recognize(one, likely)
            if manifest is not None and (one.is_ours or one.matching(manifest) or one.may_be_of(manifest)):
                recognized[manifest.save_id].append(one.holding(manifest))
            else:
                (foreign if one.is_ours else unmanaged).add(one.node_id)
        seen = tuple(self._see(save, recognized[save.save_id]) for save in found)
        gone = [manifest for manifest in self._going if manifest.checkpoint_id == checkpoint_id]
        left = frozenset(one.node_id for one in unclaimed if any(map(one.matching, gone)))
        return _Checkpoint(checkpoint_id, seen, frozenset(foreign), frozenset(unmanaged), left)

    def _see(self, save: SaveFound, recognized: Sequence[Holding]) -> SeenSave:
        """The state of the save. `recognized`: its files on nodes without its manifest."""
        with_unclaimed_files = replace(save, holdings=(*save.holdings, *recognized))
        nodes = frozenset(holding.node_id for holding in recognized)
        return see_save(with_unclaimed_files, self._manifests[save.save_id], self._up, self._unsure, nodes)


class _Planning:
    """Collects the actions, and sums the bytes that each node is to take."""

    def __init__(self, nodes: Sequence[NodeView], own_node: str | None, domains: Mapping[str, tuple[str, ...]]) -> None:
        self._own_node = own_node
        self._up = {node.node_id for node in nodes if node.presence is Presence.UP}
        self._silent = {node.node_id for node in nodes} - self._up
        there = {node.node_id for node in nodes if node.presence is not Presence.GONE}
        self._unsure = {node.node_id for node in nodes if node.node_id in there and node.holdings is None}
        self._there = there - self._unsure
        self._domains = domains
        self._leaving = {node.node_id for node in nodes if node.is_leaving}
        self._bytes_by_node = dict.fromkeys(self._up, 0)
        self._writable = {node.node_id: node.writable_bytes for node in nodes if node.writable_bytes is not None}
        self._published = _index_published(nodes)
        self._blocked: dict[str, set[str]] = {}
        """By save of a checkpoint with several saves, the nodes whose own version must be deleted first. Other nodes are
        preferred: their copies let the save be seen whole, which that deletion requires."""
        self.restore: list[RestoreManifest] = []
        self.copy: list[CopyShard] = []
        self.set_aside: list[SetAside] = []
        self.short: list[ShortShard] = []

    def add(self, checkpoint: _Checkpoint) -> None:
        published = self._find_published(checkpoint)
        # Nodes with files of an unknown save are not blank: these files may be its last copies.
        blank = self._up - published.keys() - checkpoint.foreign
        self._blocked = checkpoint.find_blocked() if len(checkpoint.saves) > 1 else {}
        for lineage, saves in checkpoint.lineages.items():
            whole = next((save for save in saves if save.is_whole), None)
            loads = whole or next((save for save in saves if save.may_be_whole), None)
            for save in saves:
                takers = set(save.holders) - checkpoint.find_going(save)
                if lineage == checkpoint.newest_lineage and save is (loads or saves[0]) and save.with_metadata:
                    takers |= blank - checkpoint.unmanaged
                if save is whole:
                    takers |= {node_id for node_id, other in published.items() if save.version.is_newer_than(other)}
                    takers |= self._find_overruled(checkpoint) if lineage == checkpoint.newest_lineage else set()
                known = len(self.short)
                self._add_save(save, takers, blank, is_in_doubt=loads is not None and save is not loads)
                taken = tuple(sorted(node for node, other in published.items() if other.lineage != lineage))
                self.short[known:] = [_where_taken(one, save, taken) for one in self.short[known:]]
                if save is whole:
                    break  # it supersedes older ones of the lineage, which get no copies
        self._add_foreign(checkpoint)

    def _find_published(self, checkpoint: _Checkpoint) -> dict[str, Version]:
        """The published save on each node that answers, as far as it is known."""
        published = dict(self._published.get(checkpoint.checkpoint_id, {}))
        for save in checkpoint.saves:
            published |= dict.fromkeys(save.holders - save.with_manifest, save.version)
        return published

    def _find_overruled(self, checkpoint: _Checkpoint) -> set[str]:
        """This node, if a whole save may replace its files of an unknown save.

        It may not while a node is silent, which may have the manifest of that save, or if the files may be another run's.
        """
        return set() if self._silent or len(checkpoint.lineages) > 1 else {self._own_node or ""} & checkpoint.foreign

    def _add_foreign(self, checkpoint: _Checkpoint) -> None:
        """Adds the files of unknown saves to `short`: their manifests are lost, or on nodes that do not answer."""
        waits_for = tuple(sorted(self._silent))
        for node_id in sorted(checkpoint.foreign - checkpoint.left):
            place = checkpoint.checkpoint_id, "", MANIFEST_NAME, f"node {node_id}"
            self.short.append(ShortShard(*place, wanted=1, have=int(bool(waits_for)), waits_for=waits_for))

    def _add_save(self, save: SeenSave, takers: set[str], blank: set[str], *, is_in_doubt: bool) -> None:
        """Plans one save. `takers` have this save or should have it. On `blank` nodes a replaced version is published
        again, because the newer one was removed.
        """
        found, takers = save.found, takers - self._leaving
        for node_id in sorted(takers):
            lacks_metadata = node_id not in save.with_metadata and bool(save.with_metadata)
            sources = tuple(source for source in save.sources if source != node_id)
            lacks_name = node_id in blank and bool(sources)
            if node_id not in save.with_manifest or lacks_metadata or lacks_name:
                self.restore.append(RestoreManifest(node_id, found.checkpoint_id, found.save_id, sources))
            for shard in save.strays(node_id):
                self.set_aside.append(SetAside(node_id, found.checkpoint_id, found.save_id, shard))
        if not save.with_metadata:
            members = {node.node_id for node in save.manifest.nodes}
            assumed = save.assumed_metadata or self._unsure
            self._add_short(save, METADATA_NAME, len(assumed), members | assumed, is_in_doubt=is_in_doubt)
        for shard in sorted(save.manifest.shards):
            self._add_copies(save, shard, takers, is_in_doubt=is_in_doubt)

    def _add_copies(self, save: SeenSave, shard: str, takers: set[str], *, is_in_doubt: bool) -> None:
        entry, intact, damaged = save.manifest.shards[shard], save.intact[shard], save.damaged[shard]
        # Assumed copies count here: a node that is back in a minute needs no third copy made.
        held = (intact | save.assumed[shard]) - self._leaving
        wanted = min(
            save.manifest.copies, len((self._there | self._unsure.intersection(entry.holders)) - self._leaving)
        )
        here = damaged & takers
        chosen = sorted(here) if save.can_give(shard) else []
        if save.can_give(shard):
            chosen += self._destinations(save, shard, held | here, takers, wanted - len(held | here))
        sources = self._sources(save, shard)
        for node_id in chosen:
            self._bytes_by_node[node_id] += entry.size_bytes
            place = (node_id, save.found.checkpoint_id, save.found.save_id, shard)
            self.copy.append(CopyShard(*place, entry.size_bytes, sources, node_id in damaged))
        if len(held.union(chosen)) < wanted or not (held or chosen) or not here.issubset(chosen):
            # An unsure node may have received a copy since.
            have = len(held) or int(save.can_give(shard) or bool(self._unsure))
            self._add_short(save, shard, have, set(entry.holders) | (held or self._unsure), is_in_doubt=is_in_doubt)

    def _sources(self, save: SeenSave, shard: str) -> tuple[str, ...]:
        """Sources of the shard: intact copies, the owner's first, then copies with a bad footer, then damaged ones."""
        intact, footer_damaged, owner = (
            save.intact[shard],
            save.footer_damaged[shard],
            save.manifest.shards[shard].owner_node,
        )
        whole = sorted(intact, key=lambda node: (node != owner, node))
        return (*whole, *sorted(save.damaged[shard], key=lambda node: (node not in footer_damaged, node)))

    def _add_short(self, save: SeenSave, name: str, have: int, holders: set[str], *, is_in_doubt: bool) -> None:
        hosts = {node.node_id: node.host for node in save.manifest.nodes}
        silent = sorted(holders - self._up)
        waits_for = tuple(f"{node_id} ({hosts[node_id]})" if node_id in hosts else node_id for node_id in silent)
        owner = "every node of the save" if name == METADATA_NAME else save.manifest.owner_of(name)
        place = (save.found.checkpoint_id, save.found.save_id, name)
        self.short.append(ShortShard(*place, owner, save.manifest.copies, have, waits_for, is_in_doubt))

    def _destinations(self, save: SeenSave, shard: str, taken: set[str], able: set[str], count: int) -> list[str]:
        entry = save.manifest.shards[shard]
        domains, taken, chosen = self._domains, set(taken), list[str]()

        # Room first: a full intended holder would refuse the copy in every round.
        def rank(node: str) -> tuple[bool, bool, bool, tuple[bool, ...], int, str]:
            shared = find_shared(domains.get(node, ()), (domains.get(other, ()) for other in taken))
            bytes_then = self._bytes_by_node[node] + entry.size_bytes
            is_full = bytes_then > self._writable.get(node, bytes_then)
            is_blocked = node in self._blocked.get(save.found.save_id, ())
            return (is_full, is_blocked, node not in entry.holders, shared, self._bytes_by_node[node], node)

        while len(chosen) < count:
            candidates = sorted(able - taken)
            if not candidates:
                break
            best = min(candidates, key=rank)
            chosen.append(best)
            taken.add(best)
        return chosen


def _where_taken(short: ShortShard, save: SeenSave, taken: tuple[str, ...]) -> ShortShard:
    """The short file, with the nodes that take no copy of it: on `taken`, other runs' saves are published."""
    is_over = not short.have and save.is_overwritten(short.shard, taken)
    lies_on = tuple(sorted(save.holders)) if taken else ()
    return replace(short, taken_on=taken, is_in_doubt=short.is_in_doubt or is_over, lies_on=lies_on)


def _index_published(nodes: Sequence[NodeView]) -> Mapping[str, Mapping[str, Version]]:
    """By checkpoint, the published save on each node that answers and has its manifest."""
    published: dict[str, dict[str, Version]] = {}
    for node in nodes:
        for held in (node.holdings or ()) if node.presence is Presence.UP else ():
            if not held.is_replaced:
                published.setdefault(held.checkpoint_id, {})[node.node_id] = held.version
    return published
