"""Checkpoints under the caller's own names: all ranks of a job save, load, reject and remove them, over one group."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner

from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.reading.newest import Newest, is_newest
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.agreement.node_post import ask_agent, forgotten_on_error
from replicated_ckpt.dcp.c10d.group_pool import PooledGroup, acquire_group, agree_on_all, agree_on_first
from replicated_ckpt.dcp.c10d.world import ALONE, session_of
from replicated_ckpt.dcp.find.listing import Listed, list_checkpoints, name_saves
from replicated_ckpt.dcp.load.load_report import LoadReport
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.dcp.memory.tiers import join_left_tier
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner
from replicated_ckpt.dcp.rank_state.rank_state import RankStatePlanner
from replicated_ckpt.dcp.save.agent_tasks import WAIT_TIMEOUT_S
from replicated_ckpt.dcp.save.save_report import SaveReport
from replicated_ckpt.dcp.save.writer import ReplicatedWriter
from replicated_ckpt.errors import (
    CheckpointNotFound,
    CheckpointRejected,
    RankFailed,
    RendezvousFailed,
    ReplicatedCkptError,
    StoreUnavailable,
)
from replicated_ckpt.stores.bucket.bucket import Bucket
from replicated_ckpt.stores.bucket.bucket_removal import remove_save
from replicated_ckpt.stores.local.store import LocalStore

log = logging.getLogger(__name__)

_OF_READER_TOO = ("object_store", "storage_options")


def see_newest(look: Callable[[], object]) -> None:
    """Finds the newest checkpoint by `look` before an older one is loaded: the next save must be newer than all existing
    ones, also those in the bucket.

    Raises RendezvousFailed, RankFailed: the ranks do not meet. Other errors are only logged, and do not stop the load.
    """
    try:
        look()
    except (RendezvousFailed, RankFailed):
        raise
    except ReplicatedCkptError as exc:  # alike on all ranks
        log.info("could not find the newest checkpoint before loading an older one: %s", exc)


class NamedCheckpoints:
    """One store of a job, with a gloo group of its own. All ranks call its methods in the same order.

    Args:
        root: this node's store.
        options: arguments of ReplicatedWriter; the reader gets the bucket, too.
        reader_options: other arguments of ReplicatedReader.
        newest: the name that stands for "latest" here, as str(Newest(...)), which may allow only names of one form.
        is_tier: whether this is one of two tiers. Their owner looks for the memory tier of an earlier job.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        options: Mapping[str, Any] | None = None,
        reader_options: Mapping[str, Any] | None = None,
        *,
        newest: str = LATEST,
        is_tier: bool = False,
    ) -> None:
        self.newest = newest
        given = options or {}
        shared = {name: given[name] for name in _OF_READER_TOO if name in given}
        loading = {"expect_partial": True, **shared, **(reader_options or {})}
        self.writer = ReplicatedWriter(root, **given)
        self._is_tier = self._has_asked_of_tier = is_tier
        self._planner = CachedSavePlanner()
        self._lent: PooledGroup | None = acquire_group()
        self.reader = ReplicatedReader(root, process_group=self._group, **loading)

    @property
    def _group(self) -> Any:
        return None if self._lent is None else self._lent.group

    @property
    def is_cut_off(self) -> bool:
        """Whether the program has destroyed the process groups of this object: its ranks can no longer communicate."""
        return self._lent is not None and self._lent.is_gone

    @contextlib.contextmanager
    def use_group(self) -> Iterator[Any]:
        """The group, for a block of collectives; None: this process alone."""
        with contextlib.nullcontext() if self._lent is None else self._lent.use():
            yield self._group

    def save(self, checkpoint_id: str, state: Mapping[str, Any], notes: Mapping[str, Any] | None = None) -> None:
        """Returns when the checkpoint is committed. An earlier checkpoint of that name stays loadable until then."""
        self._look_for_left_tier(checkpoint_id)
        self.writer.note({} if notes is None else notes)
        with self.use_group() as group:
            dcp.save(
                dict(state),
                checkpoint_id=checkpoint_id,
                storage_writer=self.writer,
                planner=self._planner,
                process_group=group,
                no_dist=group is None,
            )

    def save_later(
        self, checkpoint_id: str, state: Mapping[str, Any], notes: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        """Copies the state and returns; the future is done when the checkpoint is committed. One at a time."""
        self._look_for_left_tier(checkpoint_id)
        self.writer.note({} if notes is None else notes)
        # No stager is given, so this is a future and no AsyncSaveResponse.
        return dcp.async_save(  # type: ignore[return-value]
            dict(state),
            checkpoint_id=checkpoint_id,
            storage_writer=self.writer,
            planner=self._planner,
            process_group=self._group,
        )

    def load(
        self,
        checkpoint_id: str,
        state: dict[str, Any],
        planner: LoadPlanner | None = None,
        *,
        max_tries: int | None = None,
    ) -> str:
        """Fills `state`. Returns the name of the loaded checkpoint, which differs from `checkpoint_id` if that is `newest`.

        `max_tries`: `newest` skips a checkpoint that was restored so often without a later save.
        """
        with self.use_group() as group, contextlib.ExitStack() as stack:
            # A load that fails must not turn the next save into a continuation of that run.
            stack.enter_context(forgotten_on_error(self.writer.store))
            # Also on an error: a lock that stays would keep the checkpoint from being removed.
            stack.callback(self.reader.release_files)
            self.reader.max_tries = max_tries
            # Without this, a save after a rollback would get a sequence below the newest, and "latest" would skip it.
            if not (is_newest(checkpoint_id) or self._is_tier):  # the owner of two tiers has looked at both
                beside = str(Newest(scope_of(checkpoint_id))) if self.newest == LATEST else self.newest
                see_newest(lambda: self.reader.find(beside))
            dcp.load(
                state,
                checkpoint_id=checkpoint_id,
                storage_reader=self.reader,
                planner=planner or RankStatePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        assert self.reader.last_load is not None
        return self.reader.last_load.checkpoint_id

    def load_newest(
        self, state: dict[str, Any], planner: LoadPlanner | None = None, *, max_tries: int | None = None
    ) -> str | None:
        """Loads the newest complete checkpoint and returns its name; None if there is none. `max_tries`: as of `load`."""
        if self.find(self.newest) is None:
            return None
        # With the found name, `load` might choose another run's checkpoint of that name.
        return self.load(self.newest, state, planner, max_tries=max_tries)

    def find(self, name: str) -> str | None:
        """The checkpoint of this name, or the newest whole one for `newest`; None: there is none.

        The caller waits for the future of an asynchronous save.
        """
        save = self.reader.find(name)
        found = None if save is None else save.checkpoint_id if is_newest(name) else name
        self._look_for_left_tier(found or name.removeprefix("./"))
        return found

    def _look_for_left_tier(self, checkpoint_id: str) -> None:
        """Looks for the memory tier of an earlier job, in the first call that saves or finds. This job may have none."""
        if not self._has_asked_of_tier:
            self._has_asked_of_tier = True
            with self.use_group() as group:
                join_left_tier(group, [self.writer.store], checkpoint_id)

    def list_whole(self) -> tuple[Listed, ...]:
        """The checkpoints of this run that can be loaded, newest first. Rank 0 finds them once all ranks have called this.

        Raises:
            ShardLost: there are checkpoints, and none is whole. StoreUnavailable: nothing was found, but not all answered.
        """
        with contextlib.suppress(CheckpointRejected):  # all are rejected, and each can be loaded by its name
            if self.reader.find(self.newest) is None:
                return ()
        with self.use_group() as group:
            listed = agree_on_first(group, lambda: self.reader.look_alone(partial(list_checkpoints, self.newest)))
        return tuple(each for each in listed if each.is_whole)

    def reject(self, checkpoint_id: str, *, is_rejected: bool) -> tuple[str, ...]:
        """As `reject_everywhere`."""
        with self.use_group() as group:
            return reject_everywhere(self.reader, group, checkpoint_id, is_rejected=is_rejected)

    def delete(self, checkpoint_id: str) -> bool:
        """Removes a checkpoint from every node and the bucket. Returns False if there is none."""
        with self.use_group() as group:
            return delete_everywhere(self.reader, self.writer.store, group, checkpoint_id)

    @property
    def last_save(self) -> SaveReport | None:
        """The report of this rank's last save; None before the first."""
        return self.writer.last_save

    @property
    def last_load(self) -> LoadReport | None:
        """The report of this rank's last load; None before the first."""
        return self.reader.last_load

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> tuple[str, ...]:
        """As ReplicatedWriter.wait."""
        return self.writer.wait(timeout_s)

    def close(self) -> None:
        """Frees the memory for copies of states, and returns the group to the pool."""
        try:
            self.writer.close()
        finally:
            # Also after a failed save: the group must be free for its next user.
            self.reader.leave_group()
            if self._lent is not None:
                self._lent.close()


T = TypeVar("T")


@dataclass(frozen=True)
class Named:
    """The saves to remove: those that rank 0 found under one id, and their lineage. `session`: rank 0's."""

    checkpoint_id: str
    save_ids: tuple[str, ...]
    lineage: str
    session: str


Manifests = dict[str, Manifest | None]
"""By save id: the manifests that rank 0 found. They are still needed once the nodes have removed theirs."""


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
    """Marks a checkpoint on all nodes that answer and in the bucket, so that "latest" skips it. With `is_rejected=False`,
    removes the mark.

    All ranks call this, and rank 0 does it. Returns the nodes that were not reached, with the reasons. Each gets the mark
    once it is back.

    Raises:
        CheckpointNotFound: no node that answered has the id, nor has the bucket. AgentUnavailable, StoreError: the mark is
        not everywhere yet; repeat the call.
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
