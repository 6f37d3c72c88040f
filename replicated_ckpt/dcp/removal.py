"""Removing one checkpoint from the nodes of a job and from its bucket, as `rm` does: each node by its own user's word."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from replicated_ckpt.dcp.c10d.lent_group import agree_on_all, agree_on_first
from replicated_ckpt.dcp.c10d.world import ALONE, session_of
from replicated_ckpt.dcp.find.listing import name_saves
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.dcp.node.local_agent import ask_agent
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.local.store import LocalStore

T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """What is to go: the saves under one id, as rank 0 found them, and their lineage. `session`: rank 0's."""

    checkpoint_id: str
    save_ids: tuple[str, ...]
    lineage: str
    session: str


def find_saves(checkpoint_id: str, session: str, store: LocalStore, bucket: Bucket | None, lineage: str) -> Named:
    """The saves under an id that exists, whole or not, replaced ones too, of the run that a load of it would read.

    Raises:
        StoreUnavailable: none was found now. LineagesMet: as for a load.
    """
    save_ids, chosen = name_saves(checkpoint_id, store, bucket, lineage)
    if not save_ids:
        raise StoreUnavailable(
            str(store.root),
            "delete",
            checkpoint_id,
            "it exists, and no place that answered now has a save of it",
            "Call delete again once all nodes answer; what stock torch wrote there is yours to remove on each node.",
        )
    return Named(checkpoint_id, save_ids, chosen, session)


def remove_here(store: LocalStore, named: Named) -> None:
    """Has this node's agent remove what lies here, for good: no other node brings it back. May be done again.

    What lies here of the run under that id goes, too, if rank 0 has not seen it. What another job or process reads goes
    once that is over; what this job has loaded is read.

    Raises:
        AgentUnavailable, StoreError: it may still lie here.
    """
    own = store.catalog.holdings(store.read_node_id(), named.checkpoint_id)
    save_ids = dict.fromkeys((*named.save_ids, *(held.save_id for held in own if held.lineage == named.lineage)))
    for save_id in save_ids:
        asked = {"checkpoint_id": named.checkpoint_id, "save_id": save_id, "is_patient": True, "session": named.session}
        ask_agent(store, "POST", "/v1/remove", asked)


def remove_in_bucket(bucket: Bucket | None, named: Named) -> None:
    """Removes it from the bucket, if it is there.

    Raises:
        StoreError: it is still there.
    """
    there = None if bucket is None else bucket.save_of(named.checkpoint_id)
    if bucket is not None and there is not None and there.save_id in named.save_ids:
        bucket.remove(there)


def delete_everywhere(reader: ReplicatedReader, store: LocalStore, group: Any, checkpoint_id: str) -> bool:
    """Removes a checkpoint from every node of this job and from the bucket; False: there is none. All ranks call it.

    Raises:
        StoreUnavailable, AgentUnavailable, StoreError: as of what it does; on every rank alike.
    """
    if not reader.exists(checkpoint_id):
        return False
    session = session_of(ALONE if group is None else str(group.group_name))
    named = agree(group, lambda: reader.look_alone(partial(find_saves, checkpoint_id, session)))
    agree_on_all(group, lambda: remove_here(store, named))
    agree(group, lambda: reader.look_alone(lambda _, bucket, __: remove_in_bucket(bucket, named)))
    return True


def agree(group: Any, look: Callable[[], T]) -> T:
    """What rank 0 finds, or raises, on every rank of the group; None: this process alone."""
    return look() if group is None else agree_on_first(group, look)
