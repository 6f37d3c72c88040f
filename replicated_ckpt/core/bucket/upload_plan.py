"""Uploads as values: that a save is to be uploaded, how far it has come, and which node brings which shard."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence


@dataclass(frozen=True)
class UploadPlan:
    """That a save goes to the bucket, as the coordinator decides it for all ranks. `replaces`: as in its manifest."""

    url: str
    has_own_prefix: bool
    replaces: str = ""


@dataclass
class UploadState:
    """How far one save has come, as this node knows. `state`: "pending", "committed" or "superseded".

    `kind` is the class of the last error, `is_denied` one that trying again does not help, also where it is superseded by
    another run's save, `failing_s` since when every try has failed. `shards_there`: how many the last look found in the
    bucket, `missing` the names of some others.
    """

    checkpoint_id: str
    url: str
    state: str = "pending"
    attempts: int = 0
    error: str = ""
    kind: str = ""
    is_denied: bool = False
    failing_s: float = 0.0
    bytes_sent: int = 0
    shards_there: int = 0
    missing: list[str] = field(default_factory=list)


def choose_uploader(
    manifest: Manifest, shard: str, views: Sequence[NodeView], own_node: str, *, is_ordered: bool = False
) -> str | None:
    """The node that is to bring `shard` to the bucket, as `own_node`, which holds it, sees the others.

    In order: the owner, the other intended holders, then any holder by name. None: an earlier one in this order is silent
    and not counted as lost yet, or no node holds it. A node that never answered is taken to hold what it was meant to.
    Skipped are nodes that report that they cannot upload, and nodes where a newer save has the name: they upload that one.
    `is_ordered`: the user ordered the upload here by hand. A node without such an order uploads nothing then.
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
        node_report = view.node_report
        if manifest.save_id in node_report.unable or (is_ordered and manifest.save_id not in node_report.ordered):
            continue
        return node if view.presence is Presence.UP else None
    return None


def _holds(view: NodeView, manifest: Manifest, shard: str) -> bool:
    if view.holdings is None:
        entry = manifest.shards[shard]
        return view.node_id in (entry.owner_node, *entry.holders)
    return any(
        holding.save_id == manifest.save_id
        and holding.checkpoint_id == manifest.checkpoint_id  # else it was renamed, and is brought by no agent
        and not holding.is_replaced
        and holding.sizes.get(shard) == manifest.shards[shard].size_bytes
        and shard not in holding.damaged
        for holding in view.holdings
    )
