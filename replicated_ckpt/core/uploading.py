"""Who uploads a shard: its owner, or the first other holder once the owner is gone. Every node answers alike."""

from collections.abc import Sequence

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.repair import NodeView, Presence


def chosen_uploader(manifest: Manifest, shard: str, views: Sequence[NodeView], own_node: str) -> str | None:
    """The node that is to bring `shard` to the bucket, as `own_node`, which holds it, sees the others.

    In order: the owner, the other intended holders, then any holder by name. None: one that comes first is silent and not
    given up yet, or nobody holds it.
    """
    entry = manifest.shards[shard]
    view_by_node = {view.node_id: view for view in views}
    holders = {own_node} | {view.node_id for view in views if _holds(view, manifest, shard)}
    for node in (
        *dict.fromkeys((entry.owner_node, *entry.holders)),
        *sorted(holders - {entry.owner_node, *entry.holders}),
    ):
        if node == own_node:
            return node
        view = view_by_node.get(node)
        if view is None or view.presence is Presence.GONE or node not in holders:
            continue
        return node if view.presence is Presence.UP else None
    return None


def _holds(view: NodeView, manifest: Manifest, shard: str) -> bool:
    return any(
        holding.save_id == manifest.save_id
        and holding.sizes.get(shard) == manifest.shards[shard].size_bytes
        and shard not in holding.damaged
        for holding in view.holdings or ()
    )
