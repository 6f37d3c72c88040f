"""Checkpoints under names of the caller's: saved, loaded and removed by all ranks of a job, over one group."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner

from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.core.reading.newest import Newest, is_newest
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.agreement.node_post import forgotten_on_error
from replicated_ckpt.dcp.c10d.group_pool import PooledGroup, acquire_group, agree_on_first
from replicated_ckpt.dcp.find.listing import Listed, list_checkpoints
from replicated_ckpt.dcp.load.load_report import LoadReport
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.dcp.memory.tiers import join_left_tier
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner
from replicated_ckpt.dcp.rank_state.rank_state import RankStatePlanner
from replicated_ckpt.dcp.removal import delete_everywhere, reject_everywhere
from replicated_ckpt.dcp.save.bucket import WAIT_TIMEOUT_S
from replicated_ckpt.dcp.save.save_report import SaveReport
from replicated_ckpt.dcp.save.writer import ReplicatedWriter
from replicated_ckpt.errors import CheckpointRejected, RankFailed, RendezvousFailed, ReplicatedCkptError

log = logging.getLogger(__name__)

_OF_READER_TOO = ("object_store", "storage_options")


def see_newest(look: Callable[[], object]) -> None:
    """Called before an older checkpoint is loaded: the next save must be newer than all there are, in the bucket, too.

    Raises RendezvousFailed, RankFailed: the ranks do not meet. Other errors of the newest checkpoint do not stop this load.
    """
    try:
        look()
    except (RendezvousFailed, RankFailed):
        raise
    except ReplicatedCkptError as exc:  # alike on all ranks
        log.info("could not find the newest checkpoint before loading an older one: %s", exc)


class NamedCheckpoints:
    """One store of a job. Called by all ranks, in the same order, and over a group of its own, as CheckpointManager.

    Args:
        root: this node's store.
        options: arguments of ReplicatedWriter; the reader gets the bucket, too.
        reader_options: other arguments of ReplicatedReader.
        newest: what "latest" means here, as str(Newest(...)): only names of the caller's form, say.
        is_tier: whether this is one of two tiers, whose caller looks for the tier of an earlier job.
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
        """Returns when the checkpoint is committed. One of that name stays loadable until then."""
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
        """Fills `state`; returns the name of the loaded checkpoint, which differs if `newest` was asked for.

        `max_tries`: `newest` skips a checkpoint that was restored so often without a later save.
        """
        with self.use_group() as group, contextlib.ExitStack() as stack:
            # A load that fails must not turn the next save into a continuation of that run.
            stack.enter_context(forgotten_on_error(self.writer.store))
            # Also on an error: a lock that stays would keep the checkpoint from being removed.
            stack.callback(self.reader.let_go)
            self.reader.max_tries = max_tries
            # Without it a save after a rollback would get a sequence below the newest, and "latest" would skip it.
            if not (is_newest(checkpoint_id) or self._is_tier):  # of two tiers the caller has looked at both
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
        # By its name alone, another run's of that name might be chosen.
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
        """Once, in the first call that saves or looks: earlier jobs may have used a memory tier, unlike this one."""
        if not self._has_asked_of_tier:
            self._has_asked_of_tier = True
            with self.use_group() as group:
                join_left_tier(group, [self.writer.store], checkpoint_id)

    def list_whole(self) -> tuple[Listed, ...]:
        """The checkpoints of this run that can be loaded, newest first, as rank 0 finds them, once all have met.

        Raises:
            ShardLost: there are checkpoints, and none is whole. StoreUnavailable: nothing was found, but not all answered.
        """
        with contextlib.suppress(CheckpointRejected):  # there are some, and all can be loaded by their names
            if self.reader.find(self.newest) is None:
                return ()
        with self.use_group() as group:
            listed = agree_on_first(group, lambda: self.reader.look_alone(partial(list_checkpoints, self.newest)))
        return tuple(each for each in listed if each.is_whole)

    def reject(self, checkpoint_id: str, *, is_rejected: bool) -> tuple[str, ...]:
        """Has "latest" skip a checkpoint, or not any more; returns the nodes that were not reached, with the reasons."""
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
