"""The overview of a cluster: the copies that one look at all nodes has shown, and the newest save of each level."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence


@dataclass(frozen=True)
class Look:
    """One look at all nodes, the own one first: the manifests by save, and the saves that are being removed."""

    manifests: Mapping[str, Manifest]
    views: Sequence[NodeView]
    going: Collection[str] = ()


@dataclass(frozen=True)
class Overview:
    """`copies_missing`: of all shards together, as many as each save had nodes for. `shards_lost`: shards without a copy.

    The times are those of the newest saves by their coordinators' clocks, and 0 without one. `whole_unix_s`: each shard has
    a copy. `protected_unix_s`: each has all its copies. `uploaded_unix_s`: the save is in the bucket. `uploaded_bytes`: the
    shards of all saves that nodes hold and that are in the bucket, too.
    """

    copies_missing: int
    shards_lost: int
    whole_unix_s: float
    protected_unix_s: float
    uploaded_unix_s: float
    uploaded_bytes: int


def make_overview(look: Look) -> Overview:
    """The overview from one look. A node that fell silent a moment ago counts with what it held last."""
    have, described = _count_copies(look)
    missing, lost, whole, protected = 0, 0, list[Manifest](), list[Manifest]()
    for manifest in _newest_of_names(look):
        wanted = min(manifest.copies, len(manifest.nodes))
        counts = [have[manifest.save_id, shard] for shard in manifest.shards]
        short = sum(max(0, wanted - count) for count in counts)
        missing, lost = missing + short, lost + counts.count(0)
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
    """The saves that stay: of each name and run the newest, as it replaces the others."""
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
        if view.holdings is None:  # it was never seen: it has what the saves meant for it
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
