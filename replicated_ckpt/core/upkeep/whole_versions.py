"""Which versions of a checkpoint were seen whole, so that others may give way to them."""

from collections.abc import Collection, Mapping, Sequence

from replicated_ckpt.core.inventory import Holding, saves_found
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.seen_save import SeenSave, see_save
from replicated_ckpt.core.upkeep.repair import NodeView, Presence


def find_whole_versions(
    manifest_by_save: Mapping[str, Manifest], nodes: Sequence[NodeView], *, may_be_short: bool = False
) -> Mapping[str, tuple[Version, ...]]:
    """Of each checkpoint the versions that others may give way to, as they were seen at nodes that answer.

    Every shard was seen intact there, and the metadata. The newest of a lineage has as many copies of each, too, as those
    nodes can have, as a copy that is made is read: else a bit that flips in the only one is not known of. It needs only
    one with `may_be_short`: no more can be made. Of a lineage the oldest comes first.
    """
    up = {node.node_id: node for node in nodes if node.presence is Presence.UP}
    whole: dict[str, list[Version]] = {}
    met: set[tuple[str, str]] = set()
    for save in saves_found(holding for node in up.values() for holding in node.holdings or ()):
        manifest = manifest_by_save.get(save.save_id)
        if manifest is None or manifest.checkpoint_id != save.checkpoint_id:
            continue
        seen = see_save(save, manifest, up, unsure=(), remains=())
        if not seen.is_whole:
            continue
        is_newest = (manifest.checkpoint_id, manifest.lineage) not in met
        met.add((manifest.checkpoint_id, manifest.lineage))
        if may_be_short or not is_newest or _has_all_copies(seen, up.values()):
            whole.setdefault(manifest.checkpoint_id, []).insert(0, manifest.version)
    return {checkpoint_id: tuple(versions) for checkpoint_id, versions in whole.items()}


def _has_all_copies(save: SeenSave, up: Collection[NodeView]) -> bool:
    """Whether no node can have one more: one that is leaving takes none, nor one where another run's save has the name."""
    leaving = {node.node_id for node in up if node.is_leaving}
    places = save.holders | {
        node.node_id for node in up if not any(_has_its_name(held, save) for held in node.holdings or ())
    }
    wanted = min(save.manifest.copies, len(places - leaving))
    return all(len(save.intact[shard] - leaving) >= wanted for shard in save.manifest.shards)


def _has_its_name(held: Holding, save: SeenSave) -> bool:
    """Whether another version keeps this one from a node: another run's has the name, or its files have the same names."""
    if held.checkpoint_id != save.found.checkpoint_id or held.save_id == save.found.save_id:
        return False
    is_rival = held.lineage != save.version.lineage and not held.is_replaced
    return is_rival or not save.manifest.shards.keys().isdisjoint(held.sizes)
