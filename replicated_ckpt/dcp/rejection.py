"""Marks one checkpoint as rejected on all nodes that answer and in the bucket, as `reject` does; rank 0 acts for all."""

from functools import partial
from typing import Any

from replicated_ckpt.dcp.agreement.node_post import ask_agent
from replicated_ckpt.dcp.c10d.group_pool import agree_on_first
from replicated_ckpt.dcp.find.listing import name_saves
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.errors import CheckpointNotFound
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore


def reject_everywhere(
    reader: ReplicatedReader, group: Any, checkpoint_id: str, *, is_rejected: bool
) -> tuple[str, ...]:
    """Returns the nodes that were not reached, with the reasons: each learns of it once it is back. All ranks call it.

    Raises:
        CheckpointNotFound: no place that answered has the id. AgentUnavailable, StoreError: it is not done everywhere; it
        may be repeated.
    """
    act = partial(_reject, checkpoint_id, is_rejected)
    return agree_on_first(group, lambda: reader.look_alone(act))


def _reject(
    checkpoint_id: str, is_rejected: bool, store: LocalStore, bucket: Bucket | None, lineage: str
) -> tuple[str, ...]:
    found, _ = name_saves(checkpoint_id, store, bucket, lineage)
    if not found:
        raise CheckpointNotFound(f"No node that answered has a checkpoint {checkpoint_id!r}. Nothing was marked.")
    answer = ask_agent(store, "POST", "/v1/reject", {"save_ids": list(found), "is_rejected": is_rejected})
    if bucket is not None:
        for save_id in found:
            bucket.mark_rejected(checkpoint_id, save_id, is_rejected=is_rejected)
    return tuple(f"node {node}: {why}" for node, why in sorted(answer["not_reached"].items()))
