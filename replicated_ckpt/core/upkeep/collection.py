"""What is over on a node because a newer version was seen whole: superseded versions, and staged saves in doubt.

Only what was seen at nodes that answer counts, never what a node is assumed to hold.
"""

from collections.abc import Collection, Mapping, Sequence

from replicated_ckpt.core.inventory import Holding, saves_found
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.seen_save import SeenSave, see_save
from replicated_ckpt.core.protocol.settlement import is_without_a_name, may_be_dropped
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.retention import Removal

WholeVersions = Mapping[str, Sequence[Version]]
"""By checkpoint id, as `find_whole_versions` returns them."""


def has_several_versions(own: Sequence[Holding], nodes: Sequence[NodeView]) -> bool:
    """Whether nodes have another save of a checkpoint of which `own` has one: else nothing can be superseded."""
    save_by_id = {held.checkpoint_id: held.save_id for held in own}
    seen = (held for node in nodes for held in node.holdings or ())
    return any(save_by_id.get(held.checkpoint_id, held.save_id) != held.save_id for held in (*own, *seen))


def find_replaced(own: Sequence[Holding], whole: WholeVersions) -> tuple[Removal, ...]:
    """The replaced versions of a node that go, as the version that took their name was seen whole."""
    published = {held.checkpoint_id: held.version for held in own if not held.is_replaced}
    return tuple(
        Removal(held.node_id, held.checkpoint_id, held.save_id, "a newer save has replaced it, and is whole")
        for held in own
        if held.is_replaced
        and (named := published.get(held.checkpoint_id)) is not None
        and may_be_dropped(held.version, whole=whole.get(held.checkpoint_id, ()), published=named)
    )


def find_in_the_way(
    own: Sequence[Holding], manifest_by_save: Mapping[str, Manifest], whole: WholeVersions
) -> tuple[Removal, ...]:
    """The published versions of a node that go for a newer one of their run whose files have the same names.

    As on a node that was away when the id was saved anew. The newer one comes to lie there then, like any copy.
    """
    found = []
    for held in own:
        versions = () if held.is_replaced else whole.get(held.checkpoint_id, ())
        newer = (manifest_by_save[version.save_id] for version in versions if version.is_newer_than(held.version))
        if any(not manifest.shards.keys().isdisjoint(held.sizes) for manifest in newer):
            rule = "a newer save of it is whole, whose files have the same names"
            found.append(Removal(held.node_id, held.checkpoint_id, held.save_id, rule))
    return tuple(found)


def find_end_of_in_doubt(
    checkpoint_id: str,
    place: Version | None,
    whole: WholeVersions,
    nodes: Sequence[NodeView],
    *,
    published: Version | None,
    replaces: str,
    members: Collection[str],
) -> str:
    """Why a staged save that is in doubt is over; "" if it is not.

    `place`: its lineage and sequence, as far as they are known. `members`: the nodes of a save that is decided, and that
    this node coordinates; empty for another one. `published` has its name here, and it was opened over `replaces`.
    """
    versions = whole.get(checkpoint_id, ())
    if place is None:
        return ""
    # of another lineage it is what this save is to replace, as far as this node knows: that lets nothing staged go
    if may_be_dropped(place, whole=versions, published=None):
        return "a newer save of the same checkpoint is whole"
    up = {node.node_id: node.holdings or () for node in nodes if node.presence is Presence.UP}
    is_published = any(holding.save_id == place.save_id for holdings in up.values() for holding in holdings)
    is_seen_nowhere = bool(members) and up.keys() >= set(members) and not is_published
    if is_without_a_name(
        place, published=published, replaces=replaces, whole=versions, is_seen_nowhere=is_seen_nowhere
    ):
        return "no node has published it, and another save that is whole has its name"
    return ""


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
        seen = see_save(save, manifest, up, unsure=(), unclaimed=())
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
    places = save.holders | {node.node_id for node in up if not any(map(save.is_blocked_by, node.holdings or ()))}
    wanted = min(save.manifest.copies, len(places - leaving))
    return all(len(save.intact[shard] - leaving) >= wanted for shard in save.manifest.shards)
