"""The memory that the memory tier takes on each node, checked before a save takes it."""

import logging
from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.agreement.decision import SaveDecision, SavePost, tensor_bytes
from replicated_ckpt.dcp.agreement.node_post import find_seen_lineage
from replicated_ckpt.dcp.memory.root import measure_memory, measure_used
from replicated_ckpt.errors import ReplicatedCkptError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.wording import describe_bytes

log = logging.getLogger(__name__)

_SHARD_BYTES = 1 << 20
"""For each shard besides its tensors: containers, small objects, metadata."""
_TOLD_AGAIN = 1.1
"""A need that has grown by this factor is logged again."""


class MemoryTierShort(ReplicatedCkptError):
    """The memory tier of a node would need more memory than the node has for it; nothing was written."""

    default_hint = (
        "Give the tier more memory (`--shm-size` of a container, `mount -o remount,size=...`, a higher memory "
        "limit). Or save less per node, remove other runs' checkpoints from the tier, or omit memory=. Docker's "
        "/dev/shm has 64 MB by default."
    )


class MemoryLimit:
    """One writer's memory tier. `generations`: the checkpoints in it at the same time, the one being written included."""

    def __init__(self, store: LocalStore, generations: int) -> None:
        self._store, self._root, self._generations = store, store.root, generations
        self._told_bytes = 0.0

    def measure(self, checkpoint_id: str | None) -> int:
        """Bytes that the checkpoints of this run may take on this node. Raises StoreError."""
        with translate_errors(str(self._root), "measure", "memory tier"):
            return measure_memory(self._root) - self._measure_others(checkpoint_id)

    def _measure_others(self, checkpoint_id: str | None) -> int:
        """Bytes of checkpoints that this run's retention will not remove: of other lineages or directories of ids."""
        scope = scope_of(checkpoint_id or "")
        seen = find_seen_lineage(self._store, scope)
        if seen is None:  # the first save continues the run that it finds: nothing is foreign
            return 0
        others = [
            name
            for name, manifest in self._store.catalog.committed()
            if manifest.lineage != seen[0] or scope_of(name) != scope
        ]
        return sum(measure_used(self._root / name) for name in others)

    def check_limit(self, decision: SaveDecision, posts: Sequence[SavePost], plans: Sequence[SavePlan]) -> None:
        """Coordinator: checks that each node has room for the save, and logs the need if it has grown.

        Raises:
            MemoryTierShort: a node has too little room. Nothing was opened.
        """
        need = {node: self._generations * size for node, size in bytes_by_node(decision, plans).items()}
        room = {post.node.node_id: post.memory_bytes for post in posts if post.memory_bytes is not None}
        short = [
            f"node {node} ({self._describe(size)}) may take {describe_bytes(room[node])}"
            for node, size in need.items()
            # A node without a figure has its store on a disk, or an older release: its own write finds a full one.
            if size > room.get(node, size)
        ]
        if short:
            raise MemoryTierShort(f"The memory tier at {self._root} does not fit: {'; '.join(short)}.")
        most = max(need.values(), default=0)
        # Once per growth: a line at every save would drown the log.
        if most > _TOLD_AGAIN * self._told_bytes:
            self._told_bytes = most
            log.info("memory tier at %s: a node takes up to %s", self._root, self._describe(most))

    def _describe(self, size: int) -> str:
        one = describe_bytes(size // self._generations)
        return f"{describe_bytes(size)}: {self._generations} generations of {one}, own shards and other nodes' copies"


def bytes_by_node(decision: SaveDecision, plans: Sequence[SavePlan]) -> Mapping[str, int]:
    """Bytes that one save of these plans adds to each node: its own shards, and copies of others'. Empty: unknown."""
    sizes = [tensor_bytes(plan) for plan in plans]
    found = {node.node_id: 0 for node in decision.nodes}
    for rank, size in enumerate(sizes):
        # Plan caching left this rank's plan out: a partial sum would let a save begin that does not fit.
        if size is None:
            return {}
        owner = decision.node_of(rank).node_id
        for node in (owner, *decision.buddies_of(owner)):
            found[node] += size + _SHARD_BYTES
    return found
