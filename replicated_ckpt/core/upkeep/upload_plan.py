"""Uploads as values: the plan for a save, its progress, and the node that uploads each shard."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.repair import NodeView, Presence


@dataclass(frozen=True)
class UploadPlan:
    """The upload of a save, as the coordinator decides it for all ranks. `replaces`: as in its manifest."""

    url: str
    has_own_prefix: bool
    replaces: str = ""


@dataclass
class UploadState:
    """The progress of one upload, as far as this node has seen it. `state`: "pending", "committed" or "superseded".

    `kind` is the class of the last error. `is_denied`: a retry does not help; also set if another run's save supersedes it.
    `failing_s`: the time since the first of the failed tries, if none has succeeded since. `shards_there`: the number of
    shards that the last look found in the bucket. `missing`: the names of some other shards.
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
    """The node that uploads `shard`, from the views of `own_node`, which holds it.

    The candidates in order: the owner, the other intended holders, then all other holders by node id. The first one that
    can upload is chosen. None: that node is silent, but not lost yet. A node that never answered is assumed to hold its
    intended shards. Nodes that report that they cannot upload are skipped, and so are nodes that have published a newer
    save of the id. `is_ordered`: the user ordered the upload here by hand. Then only nodes with such an order upload.
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
        # A lost node never comes: the next one in the order takes over.
        if view is None or view.presence is Presence.GONE or node not in holders:
            continue
        node_report = view.node_report
        if manifest.save_id in node_report.unable or (is_ordered and manifest.save_id not in node_report.ordered):
            continue
        # While a node is silent, the next one waits: otherwise both could upload the same bytes.
        return node if view.presence is Presence.UP else None
    return None


def _holds(view: NodeView, manifest: Manifest, shard: str) -> bool:
    if view.holdings is None:
        entry = manifest.shards[shard]
        return view.node_id in (entry.owner_node, *entry.holders)
    return any(
        holding.save_id == manifest.save_id
        and holding.checkpoint_id == manifest.checkpoint_id  # a renamed directory: no agent uploads it
        and not holding.is_replaced
        and holding.sizes.get(shard) == manifest.shards[shard].size_bytes
        and shard not in holding.damaged
        for holding in view.holdings
    )
