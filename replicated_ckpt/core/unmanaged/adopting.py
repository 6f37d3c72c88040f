"""Adoption as a plan: which nodes give which shards of a checkpoint of stock torch, that it becomes one of ours."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from replicated_ckpt.core.unmanaged.survey import UnmanagedSave
from replicated_ckpt.wording import plural


@dataclass(frozen=True)
class AdoptUnmanaged:
    """A checkpoint gets a manifest, and each shard a footer of checksums on every node that holds it intact.

    `node_ids` are all nodes that answer: each gets manifest and metadata. Afterwards it is short of copies like any
    other, and repaired like any other.
    """

    checkpoint_id: str
    shards_by_node: Mapping[str, tuple[str, ...]]
    node_ids: tuple[str, ...]
    size_bytes: int
    copies: int

    def __str__(self) -> str:
        count = len({shard for shards in self.shards_by_node.values() for shard in shards})
        nodes = ", ".join(sorted(self.shards_by_node))
        return (
            f"adopt {self.checkpoint_id} of stock torch: checksums for {plural(count, 'shard')} ({self.size_bytes} bytes) "
            f"on node {nodes}; manifest and metadata for {plural(len(self.node_ids), 'node')}; then up to "
            f"{self.copies} copies of each shard"
        )


def plan_adoption(
    save: UnmanagedSave, bad: Collection[tuple[str, str]], node_ids: Collection[str], copies: int
) -> "AdoptUnmanaged | str":
    """How a checkpoint is adopted, or in words why it cannot be. `bad` are the copies that fail their own checks."""
    if not save.holders:
        return f"{save.checkpoint_id} is not adopted: it is empty, and has no shard to protect"
    givers: dict[str, tuple[str, ...]] = {}
    size_bytes = 0
    for shard, nodes in save.holders.items():
        intact = sorted(node for node in nodes if (node, shard) not in bad)
        if not intact:
            return f"{save.checkpoint_id} is not adopted: there is no intact {shard}"
        size_bytes += save.size_of(shard)
        for node in intact:
            givers[node] = (*givers.get(node, ()), shard)
    return AdoptUnmanaged(save.checkpoint_id, givers, tuple(sorted(node_ids)), size_bytes, copies)
