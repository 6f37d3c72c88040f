"""Removes one checkpoint from a job's nodes and from its bucket, as `rm` does, or has "latest" skip it, as `reject` does.

Each node is asked to remove by a rank of its own. Rank 0 marks a rejected checkpoint for all.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.dcp.agreement.node_post import ask_agent
from replicated_ckpt.dcp.c10d.group_pool import agree_on_all, agree_on_first
from replicated_ckpt.dcp.c10d.world import ALONE, session_of
from replicated_ckpt.dcp.find.listing import name_saves
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.errors import CheckpointNotFound, StoreUnavailable
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.bucket_removal import remove_save
from replicated_ckpt.stores.local.store import LocalStore

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """The saves to remove: those under one id, as rank 0 found them, and their lineage. `session`: rank 0's."""

    checkpoint_id: str
    save_ids: tuple[str, ...]
    lineage: str
    session: str


Manifests = dict[str, Manifest | None]
"""By save id, as rank 0 found them before they were removed from the nodes."""


def find_saves(
    checkpoint_id: str, session: str, manifests: Manifests, store: LocalStore, bucket: Bucket | None, lineage: str
) -> Named:
    """The saves under an existing id, in the run that a load of this id would read. Incomplete and replaced saves count.

    Their manifests are added to `manifests`: the removal from the bucket needs them once the nodes have none.

    Raises:
        StoreUnavailable: no node that answered has a save of the id. LineagesMet: as for a load.
    """
    found, chosen = name_saves(checkpoint_id, store, bucket, lineage)
    manifests.update(found)
    if not found:
        raise StoreUnavailable(
            str(store.root),
            "delete",
            checkpoint_id,
            "it exists, but no node that answered now has a save of it",
            "Call delete again once all nodes answer. Remove checkpoints of stock torch by hand, on each node.",
        )
    return Named(checkpoint_id, tuple(found), chosen, session)


def remove_here(store: LocalStore, named: Named) -> None:
    """Has this node's agent remove the saves from this node, for good: no other node copies them back. May be repeated.

    Saves of the same run under that id that rank 0 has not seen are removed, too. A save that another job or process reads
    is removed when that job or process has ended. A load of this job does not prevent the removal.

    Raises:
        AgentUnavailable, StoreError: a save may still lie on this node.
    """
    own = store.catalog.holdings(store.read_node_id(), named.checkpoint_id)
    save_ids = dict.fromkeys((*named.save_ids, *(held.save_id for held in own if held.lineage == named.lineage)))
    for save_id in save_ids:
        asked = {"checkpoint_id": named.checkpoint_id, "save_id": save_id, "is_patient": True, "session": named.session}
        ask_agent(store, "POST", "/v1/remove", asked)


def remove_in_bucket(bucket: Bucket | None, named: Named, manifests: Manifests) -> None:
    """Removes the saves from the bucket, and the files of an upload that had not ended.

    Raises:
        StoreError: a save could not be removed.
    """
    if bucket is None:
        return
    for save_id in named.save_ids:
        remove_save(bucket, named.checkpoint_id, save_id, manifests.get(save_id))


def delete_everywhere(reader: ReplicatedReader, store: LocalStore, group: Any, checkpoint_id: str) -> bool:
    """Removes a checkpoint from every node of this job and from the bucket. All ranks call it. False: none has the id.

    Raises:
        StoreUnavailable, AgentUnavailable, StoreError: a step failed. Every rank raises the same.
    """
    if not reader.exists(checkpoint_id):
        return False
    session = session_of(ALONE if group is None else str(group.group_name))
    manifests: Manifests = {}
    named = agree_on_first(group, lambda: reader.look_alone(partial(find_saves, checkpoint_id, session, manifests)))
    # Nodes before the bucket: an agent that still has the save would upload it again.
    agree_on_all(group, lambda: remove_here(store, named))
    agree_on_first(group, lambda: reader.look_alone(lambda _, bucket, __: remove_in_bucket(bucket, named, manifests)))
    return True


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
