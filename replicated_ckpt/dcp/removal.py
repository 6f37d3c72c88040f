"""Removing one checkpoint from the nodes of a job and from its bucket, as `rm` does: each node by its own user's word."""

from collections.abc import Iterable

from replicated_ckpt.dcp.find.listing import list_checkpoints
from replicated_ckpt.dcp.node.local_agent import ask_agent
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore


def find_saves(checkpoint_id: str, store: LocalStore, bucket: Bucket | None, lineage: str) -> tuple[str, ...]:
    """The saves of the run under one id, whole or not, replaced ones too."""
    found = list_checkpoints(store, bucket, lineage)
    return tuple(dict.fromkeys(each.save_id for each in found if each.checkpoint_id == checkpoint_id))


def remove_here(store: LocalStore, checkpoint_id: str, save_ids: Iterable[str]) -> None:
    """Has this node's agent remove what lies here, for good: no other node brings it back. May be done again.

    What is being read goes once that is over.

    Raises:
        AgentUnavailable, StoreError: it may still lie here.
    """
    for save_id in save_ids:
        named = {"checkpoint_id": checkpoint_id, "save_id": save_id, "force": True}
        ask_agent(store, "POST", "/v1/remove", named)


def remove_in_bucket(bucket: Bucket | None, checkpoint_id: str, save_ids: Iterable[str]) -> None:
    """Removes it from the bucket, if it is there.

    Raises:
        StoreError: it is still there.
    """
    there = None if bucket is None else bucket.save_of(checkpoint_id)
    if bucket is not None and there is not None and there.save_id in set(save_ids):
        bucket.remove(there)
