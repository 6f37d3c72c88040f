"""The overview of a cluster after one look at all nodes: missing copies, and the newest protected saves."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence


@dataclass(frozen=True)
class Look:
    """One look at all nodes, this node first: the manifests by save, and the views.

    `going`: saves that are being removed. `forgotten`: nodes that a user has removed from the address book.
    """

    manifests: Mapping[str, Manifest]
    views: Sequence[NodeView]
    going: Collection[str] = ()
    forgotten: Collection[str] = ()

    def has_unknown_holder(self, save_id: str, shard: str) -> bool:
        """Whether a node that should have the file was never introduced here: its copy may exist."""
        manifest = self.manifests.get(save_id)
        if manifest is None:
            return False
        entry = manifest.shards.get(shard)  # the metadata has no entry, and each node has a copy
        holders = [node.node_id for node in manifest.nodes] if entry is None else entry.holders
        return not self._known.issuperset(holders)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.forgotten).union(view.node_id for view in self.views)


@dataclass(frozen=True)
class Overview:
    """Figures of all saves together.

    `copies_missing`: missing copies of all shards. A save with fewer nodes than copies needs one copy on each node.
    `shards_lost`: shards without a copy, also on nodes that this node has no address of.

    Each time is that of the newest such save, by its coordinator's clock; 0: there is none. `whole_unix_s`: a save of
    which each shard has a copy. `protected_unix_s`: each shard has all its copies. `uploaded_unix_s`: the save is in the
    bucket. `uploaded_bytes`: the size of all saves that lie both on nodes and in the bucket.
    """

    copies_missing: int
    shards_lost: int
    whole_unix_s: float
    protected_unix_s: float
    uploaded_unix_s: float
    uploaded_bytes: int


def make_overview(look: Look) -> Overview:
    """The overview from one look. A node that fell silent a moment ago counts with its last holdings."""
    have, described = _count_copies(look)
    missing, lost, whole, protected = 0, 0, list[Manifest](), list[Manifest]()
    for manifest in _newest_of_names(look):
        wanted = min(manifest.copies, len(manifest.nodes))
        counts = [have[manifest.save_id, shard] for shard in manifest.shards]
        short = sum(max(0, wanted - count) for count in counts)
        missing += short
        gone = [shard for shard, count in zip(manifest.shards, counts, strict=True) if not count]
        lost += sum(not look.has_unknown_holder(manifest.save_id, shard) for shard in gone)
        if manifest.save_id in described and all(counts):
            whole.append(manifest)
            protected += [] if short else [manifest]
    reports = [view.node_report for view in look.views]
    uploaded = frozenset[str]().union(*(one.uploaded for one in reports))
    uploaded -= frozenset[str]().union(*(one.absent for one in reports))
    there = [manifest for save_id, manifest in look.manifests.items() if save_id in uploaded]
    size = sum(entry.size_bytes for manifest in there for entry in manifest.shards.values())
    return Overview(missing, lost, _newest(whole), _newest(protected), _newest(there), size)


def _newest(saves: Iterable[Manifest]) -> float:
    return max((manifest.created_unix_s for manifest in saves), default=0.0)


def _newest_of_names(look: Look) -> list[Manifest]:
    """The newest save of each name and run: it replaces the others. Saves that are being removed are left out."""
    newest: dict[tuple[str, str], Manifest] = {}
    for manifest in look.manifests.values():
        key = manifest.checkpoint_id, manifest.lineage
        if manifest.save_id not in look.going and (key not in newest or newest[key].sequence < manifest.sequence):
            newest[key] = manifest
    return list(newest.values())


def _count_copies(look: Look) -> tuple[Counter[tuple[str, str]], set[str]]:
    """The intact copies by save and shard, and the saves whose metadata a node has."""
    have, described = Counter[tuple[str, str]](), set[str]()
    for view in look.views:
        if view.presence is Presence.GONE:
            continue
        if view.holdings is None:  # it never answered: it is assumed to have its intended shards
            for save_id, manifest in look.manifests.items():
                have.update((save_id, name) for name, entry in manifest.shards.items() if view.node_id in entry.holders)
            continue
        for holding in view.holdings:
            if holding.save_id not in look.manifests:
                continue
            shards = look.manifests[holding.save_id].shards
            if holding.has_metadata:
                described.add(holding.save_id)
            for name, size in holding.sizes.items():
                is_intact = name in shards and name not in holding.damaged and shards[name].size_bytes == size
                have[holding.save_id, name] += is_intact
    return have, described
