"""One save on all nodes: where each file was seen intact, where it is damaged, and where it is assumed."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from replicated_ckpt.core.inventory import Holding, SaveFound
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.parts import is_optimizer_of

NodesByShard = Mapping[str, set[str]]


@dataclass(frozen=True)
class SeenSave:
    """The state of one save. A node is assumed to have a file if it does not answer, or cannot list its files.

    Assumed copies only prevent new copies, and count for nothing else (I2). All other sets have only nodes that answer.
    In `footer_damaged` copies only the footer is bad. `holders` have any file of the save.
    """

    found: SaveFound
    manifest: Manifest
    intact: NodesByShard
    damaged: NodesByShard
    footer_damaged: NodesByShard
    assumed: NodesByShard
    holders: frozenset[str]
    with_manifest: frozenset[str]
    with_metadata: frozenset[str]
    assumed_metadata: frozenset[str]

    @property
    def version(self) -> Version:
        return self.found.version

    @cached_property
    def is_whole(self) -> bool:
        """Whether every shard and the metadata were seen intact. Only such a save may replace another one (I2).

        False for a save without shards: only its manifest could have been seen.
        """
        shards = self.manifest.shards
        return bool(self.with_metadata and shards) and all(self.intact[shard] for shard in shards)

    @cached_property
    def may_be_whole(self) -> bool:
        """Whether the save can become whole by repair, and by the return of nodes that do not answer."""
        has_metadata = bool(self.with_metadata or self.assumed_metadata)
        return has_metadata and all(self.can_give(shard) or self.assumed[shard] for shard in self.manifest.shards)

    @property
    def sources(self) -> tuple[str, ...]:
        """Nodes with the manifest or the metadata, those with both first."""
        either = self.with_manifest | self.with_metadata
        return tuple(sorted(either, key=lambda node: (node not in self.with_manifest & self.with_metadata, node)))

    def can_give(self, shard: str) -> bool:
        """Whether an intact copy can be made: from an intact one, one with a bad footer, or several damaged ones."""
        return bool(self.intact[shard] or self.footer_damaged[shard]) or len(self.damaged[shard]) > 1

    def is_overwritten(self, name: str, taken: Collection[str]) -> bool:
        """Whether an intended holder of a file is in `taken`, where another run's save was published over this one."""
        entry = self.manifest.shards.get(name)
        meant = {node.node_id for node in self.manifest.nodes} if entry is None else {*entry.holders}
        return not meant.isdisjoint(taken)

    def is_blocked_by(self, held: Holding) -> bool:
        """Whether a holding prevents a copy of this save on its node: another run is published, or file names collide."""
        if held.checkpoint_id != self.found.checkpoint_id or held.save_id == self.found.save_id:
            return False
        is_conflicting = held.lineage != self.version.lineage and not held.is_replaced
        return is_conflicting or not self.manifest.shards.keys().isdisjoint(held.sizes)

    def strays(self, node_id: str) -> list[str]:
        """Shards in the node's directory that the manifest does not name.

        The optimizer's are left out if only other nodes have dropped it: this node drops its own later.
        """
        held = [holding for holding in self.found.holdings if holding.node_id == node_id]
        names = {name: holding for holding in held for name in holding.sizes if name not in self.manifest.shards}
        return sorted(name for name, holding in names.items() if not self._is_dropped_elsewhere(name, holding))

    def _is_dropped_elsewhere(self, name: str, holding: Holding) -> bool:
        is_mixed = self.manifest.is_slim and not holding.is_slim
        return is_mixed and is_optimizer_of(name, self.manifest.shards)


def see_save(
    found: SaveFound, manifest: Manifest, up: Collection[str], unsure: Iterable[str], unclaimed: Collection[str]
) -> SeenSave:
    """The state of a save from its holdings. Nodes that are not `up` are only assumed to have their last holdings.

    `unsure` nodes have not reported any holdings: they are assumed to have their intended shards. Holdings of nodes in
    `unclaimed` were recognized by the files' checksums; these nodes have no manifest.
    """
    by_kind: dict[str, dict[str, set[str]]] = {
        kind: {shard: set() for shard in manifest.shards} for kind in ("intact", "damaged", "footer_damaged", "assumed")
    }
    for holding in found.holdings:
        _sort_shards(holding, manifest, by_kind, is_up=holding.node_id in up)
    # Assumed copies only: an unsure node must not make a save look whole.
    unsure = set(unsure)
    for shard, entry in manifest.shards.items():
        by_kind["assumed"][shard] |= unsure & set(entry.holders)
    members = {node.node_id for node in manifest.nodes}
    with_metadata = {holding.node_id for holding in found.holdings if holding.has_metadata}
    holders = {holding.node_id for holding in found.holdings} & set(up)
    return SeenSave(
        found,
        manifest,
        **by_kind,
        holders=frozenset(holders),
        with_manifest=frozenset(holders - set(unclaimed)),
        with_metadata=frozenset(with_metadata & holders),
        assumed_metadata=frozenset(with_metadata - holders | unsure & members),
    )


def _sort_shards(
    holding: Holding, manifest: Manifest, by_kind: Mapping[str, Mapping[str, set[str]]], *, is_up: bool
) -> None:
    damaged, footer_damaged = set(holding.damaged), set(holding.footer_damaged)
    for shard, size in holding.sizes.items():
        entry = manifest.shards.get(shard)
        if entry is None:
            continue
        is_intact = size == entry.size_bytes and shard not in damaged
        # A bad file on a silent node is neither a source nor a copy: the node reports it when it is back.
        if is_intact or is_up:
            kind = "intact" if is_intact and is_up else "assumed" if is_intact else "damaged"
            by_kind[kind][shard].add(holding.node_id)
        if is_up and not is_intact and shard in footer_damaged:
            by_kind["footer_damaged"][shard].add(holding.node_id)
