"""Versions and staged saves that a node may delete, because a newer version was seen whole.

Only files seen at nodes that answer count, never assumed ones (I2).
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
    """Whether nodes have different saves of a checkpoint in `own`. Otherwise no version can be superseded."""
    save_by_id = {held.checkpoint_id: held.save_id for held in own}
    seen = (held for node in nodes for held in node.holdings or ())
    return any(save_by_id.get(held.checkpoint_id, held.save_id) != held.save_id for held in (*own, *seen))


def find_replaced(own: Sequence[Holding], whole: WholeVersions) -> tuple[Removal, ...]:
    """The replaced versions that a node may delete, because the published version was seen whole."""
    published = {held.checkpoint_id: held.version for held in own if not held.is_replaced}
    return tuple(
        Removal(held.node_id, held.checkpoint_id, held.save_id, "a newer complete save has replaced it")
        for held in own
        if held.is_replaced
        and (named := published.get(held.checkpoint_id)) is not None
        and may_be_dropped(held.version, whole=whole.get(held.checkpoint_id, ()), published=named)
    )


def find_blocking(
    own: Sequence[Holding], manifest_by_save: Mapping[str, Manifest], whole: WholeVersions
) -> tuple[Removal, ...]:
    """The published versions of a node that block a newer version of their run, because files have the same names.

    This happens on a node that was away when the id was saved again. Afterwards the newer one is copied there.
    """
    found = []
    for held in own:
        versions = () if held.is_replaced else whole.get(held.checkpoint_id, ())
        newer = (manifest_by_save[version.save_id] for version in versions if version.is_newer_than(held.version))
        if any(not manifest.shards.keys().isdisjoint(held.sizes) for manifest in newer):
            rule = "a newer complete save of it has files of the same names"
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
    """The reason why a staged save in doubt has ended; "" if it has not.

    `place`: the version of the save, if its lineage and sequence are known. `published`: the version that is published on
    this node. `replaces`: the save that was published when this one was opened. `members`: the nodes of the save if it is
    decided and this node coordinates it; else empty.
    """
    versions = whole.get(checkpoint_id, ())
    # Without a place in the order no version is known to be newer.
    if place is None:
        return ""
    # `published` is not passed: a version of another lineage may be the one that this save is to replace.
    if may_be_dropped(place, whole=versions, published=None):
        return "a newer save of the same checkpoint is complete"
    up = {node.node_id: node.holdings or () for node in nodes if node.presence is Presence.UP}
    is_published = any(holding.save_id == place.save_id for holdings in up.values() for holding in holdings)
    is_seen_nowhere = bool(members) and up.keys() >= set(members) and not is_published
    if is_without_a_name(
        place, published=published, replaces=replaces, whole=versions, is_seen_nowhere=is_seen_nowhere
    ):
        return "no node has published it, and another complete save has its name"
    return ""


def find_whole_versions(
    manifest_by_save: Mapping[str, Manifest], nodes: Sequence[NodeView], *, may_be_short: bool = False
) -> Mapping[str, tuple[Version, ...]]:
    """By checkpoint, the versions that may replace others, as seen at nodes that answer. In a lineage the oldest is first.

    Every shard and the metadata were seen intact. The newest of a lineage must also have all copies that these nodes can
    have: making a copy reads the shard, and so detects a flipped bit in the only one. `may_be_short`: one copy is enough,
    because no more can be made.
    """
    up = {node.node_id: node for node in nodes if node.presence is Presence.UP}
    whole: dict[str, list[Version]] = {}
    met: set[tuple[str, str]] = set()
    for save in saves_found(holding for node in up.values() for holding in node.holdings or ()):
        manifest = manifest_by_save.get(save.save_id)
        if manifest is None or manifest.checkpoint_id != save.checkpoint_id:
            continue
        seen = see_save(save, manifest, up, unsure=(), unclaimed=())
        # Only whole versions replace others: an incomplete one may be all that a new save left.
        if not seen.is_whole:
            continue
        is_newest = (manifest.checkpoint_id, manifest.lineage) not in met
        met.add((manifest.checkpoint_id, manifest.lineage))
        if may_be_short or not is_newest or _has_all_copies(seen, up.values()):
            whole.setdefault(manifest.checkpoint_id, []).insert(0, manifest.version)
    return {checkpoint_id: tuple(versions) for checkpoint_id, versions in whole.items()}


def _has_all_copies(save: SeenSave, up: Collection[NodeView]) -> bool:
    """Whether no node can take a further copy. Leaving nodes take none, nor do nodes whose own version blocks the save."""
    leaving = {node.node_id for node in up if node.is_leaving}
    places = save.holders | {node.node_id for node in up if not any(map(save.is_blocked_by, node.holdings or ()))}
    wanted = min(save.manifest.copies, len(places - leaving))
    return all(len(save.intact[shard] - leaving) >= wanted for shard in save.manifest.shards)
