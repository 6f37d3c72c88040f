"""Checkpoints in two stores of each node, one in memory and one on a disk, with one lineage. Every save goes to memory."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful

from replicated_ckpt.core.inventory import SaveFound
from replicated_ckpt.core.lineage import Version, merge_histories, newest_lineage, newest_version
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.dcp.agreement.node_post import forgotten_on_error, join_lineages, remember
from replicated_ckpt.dcp.c10d.group_pool import agree_on_all
from replicated_ckpt.dcp.find.listing import Listed
from replicated_ckpt.dcp.load.load_report import LoadReport
from replicated_ckpt.dcp.memory.root import claim_memory_root, find_memory_root
from replicated_ckpt.dcp.memory.tiers import (
    GENERATIONS,
    DiskSaveCount,
    is_of_tier,
    is_older,
    join_left_tier,
    options_of_disk,
    options_of_memory,
    version_of,
)
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints, see_newest
from replicated_ckpt.dcp.runtime.user_code import describe_failure
from replicated_ckpt.dcp.save.agent_tasks import WAIT_TIMEOUT_S, check_timeout
from replicated_ckpt.dcp.save.save_report import SaveReport
from replicated_ckpt.dcp.save.writer import ReplicatedWriter
from replicated_ckpt.dcp.staging.segment import StagingRefused
from replicated_ckpt.dcp.staging.stager import Stager, await_device
from replicated_ckpt.errors import (
    CheckpointNotFound,
    CheckpointRejected,
    ConfigInvalid,
    ReplicatedCkptError,
    ShardLost,
    StoreUnavailable,
)
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_BEGINS_ANEW = (
    "%s begins a new lineage: no node that answered has an earlier checkpoint, but another node may have one: %s To "
    "continue that run, end this job, bring back what is missing, and restore before the first save."
)


class TieredCheckpoints:
    """As NamedCheckpoints, in two stores: every checkpoint goes to memory, and every `disk_every`-th also to the disk.

    Each tier is a store with its own agent, and keeps the same promises. Both tiers use one sequence, and a checkpoint
    has the same number in both. The state is copied once for both. A load takes the newer checkpoint; of two equal
    ones, that in memory. If it cannot be loaded, the load takes the next one, and logs that.

    Args:
        memory: True, or a directory in memory.
        must_write_disk: called at each save. Returns whether the save goes to the disk, whatever its sequence is; the same
            on all ranks.
        others: as of NamedCheckpoints. `object_every` and `keep_every` of Retention count the saves on the disk.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        memory: object,
        disk_every: int,
        options: Mapping[str, Any],
        reader_options: Mapping[str, Any],
        newest: str,
        must_write_disk: Callable[[], bool] = lambda: False,
    ) -> None:
        memory_root = find_memory_root(root, memory)
        self._disk_saves, self._must_write_disk, self.newest = DiskSaveCount(disk_every), must_write_disk, newest
        self.disk = NamedCheckpoints(
            root, options_of_disk(options, disk_every), reader_options, newest=newest, is_tier=True
        )
        try:
            in_memory = options_of_memory(options)
            self.memory = NamedCheckpoints(memory_root, in_memory, reader_options, newest=newest, is_tier=True)
        except ReplicatedCkptError:
            # The caller gets no object that it could close: the disk's group would stay in use.
            self.disk.close()
            raise
        self.memory.writer.limit_memory(GENERATIONS + 1)
        self._stager = Stager(overlaps=self.writer.config.overlap)
        for tier in self._tiers:
            tier.writer.use_stager(self._stager)
        self._saver = ThreadPoolExecutor(max_workers=1)
        self._is_joined, self._is_counted = False, False
        self._loaded_from = self.disk

    @property
    def _tiers(self) -> tuple[NamedCheckpoints, NamedCheckpoints]:
        return self.memory, self.disk

    @property
    def writer(self) -> ReplicatedWriter:
        """The disk's writer, which has the user's settings."""
        return self.disk.writer

    @property
    def last_save(self) -> SaveReport | None:
        """The report of this rank's last save to the memory tier; None before the first."""
        return self.memory.last_save

    @property
    def last_load(self) -> LoadReport | None:
        """The report of this rank's last load; None before the first."""
        return self._loaded_from.last_load

    @property
    def is_cut_off(self) -> bool:
        """As NamedCheckpoints."""
        return self.disk.is_cut_off

    @contextlib.contextmanager
    def use_group(self) -> Iterator[Any]:
        """As NamedCheckpoints; both tiers' groups are used."""
        with self.memory.use_group(), self.disk.use_group() as group:
            yield group

    # Saving ------------------------------------------------------------------------------------------------------

    def save(self, checkpoint_id: str, state: Mapping[str, Any], notes: Mapping[str, Any] | None = None) -> None:
        """Returns when the checkpoint is committed in memory and, if a save to the disk is due, on the disk.

        It stays due if this or an earlier process has missed it. If `must_write_disk` returns True, the checkpoint goes
        to the disk even if the memory tier fails, which is logged.
        """
        must_write_disk = self._prepare(checkpoint_id)
        self._save(checkpoint_id, state, notes, must_write_disk)

    def save_later(
        self, checkpoint_id: str, state: Mapping[str, Any], notes: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        """Copies the state once and returns; the future is done when `save` would return. One at a time."""
        must_write_disk = self._prepare(checkpoint_id)
        # On the caller's thread: in another one, `state_dict` of a Stateful would run while training changes it.
        given = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
        try:
            staged = self._stager.stage(given)
        except StagingRefused as exc:
            log.warning("%s Training waits in async_save until the state is saved.", exc.message)
            await_device()
            future = self._begin(checkpoint_id, given, notes, must_write_disk)
            wait([future])
            return future
        future = self._begin(checkpoint_id, staged, notes, must_write_disk)
        self._stager.follow(future)
        return future

    def _begin(self, *save: Any) -> Future[Any]:
        """Saves in a thread of its own, once the save before has ended."""
        # A new executor for each save: in a forked process the old one has no thread.
        self._saver.shutdown()
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rckpt-tiers")
        return self._saver.submit(self._save, *save)

    def _prepare(self, checkpoint_id: str) -> bool:
        """Whether the next save must go to the disk. If this process has not looked at the tiers, this looks: both then
        continue the newer lineage.
        """
        if not self._is_joined:
            try:
                self._look(self.newest)
            except (
                CheckpointRejected,
                ShardLost,
                StoreUnavailable,
            ) as exc:  # nothing to load, but stores have the lineage
                if not self._join_stored_lineage(checkpoint_id):
                    log.warning(_BEGINS_ANEW, checkpoint_id, one_line(exc))
            self._is_joined = True
        if not self._is_counted:
            self._count_disk_saves(checkpoint_id)
        return self._must_write_disk()

    def _join_stored_lineage(self, checkpoint_id: str) -> bool:
        """Has both tiers continue the lineage that was saved last on the ranks' nodes. False: there is none."""
        stores = [tier.writer.store for tier in self._tiers]
        scope = scope_of(checkpoint_id)
        with self.disk.use_group() as group:
            held = agree_on_all(group, lambda: [store.catalog.histories(scope) for store in stores])
        found = merge_histories(histories for each in held for histories in each)
        lineage = newest_lineage(found)
        if lineage is not None:
            self._join(checkpoint_id, newest_version(found, lineage))
        return lineage is not None

    def _count_disk_saves(self, checkpoint_id: str) -> None:
        """Reads the count of saves to the disk from the ranks' nodes. Both tiers number their saves after those of an
        earlier memory tier.
        """
        in_memory, on_disk = self.memory.writer.store, self.disk.writer.store
        with self.disk.use_group() as group:
            held = join_left_tier(group, [on_disk, in_memory], checkpoint_id, in_use=in_memory.root)
            agree_on_all(group, lambda: claim_memory_root(in_memory, on_disk))
            self._disk_saves.learn(held[0])
        self._is_counted = True

    def _save(
        self, checkpoint_id: str, state: Mapping[str, Any], notes: Mapping[str, Any] | None, must_write_disk: bool
    ) -> None:
        version: Version | None = None
        try:
            self.memory.save(checkpoint_id, state, notes)
            version = self.memory.writer.last_version
            assert version is not None, "it was saved"
        # The memory tier may be full or refuse: the last save before a preemption must still reach the disk.
        except CheckpointException as exc:  # raised on all ranks
            if not must_write_disk:
                raise
            root = self.memory.writer.config.root
            log.warning(
                "%s goes only to the disk: the memory tier at %s: %s", checkpoint_id, root, describe_failure(exc)
            )
        if version is None or must_write_disk or self._disk_saves.is_due(version):
            self._save_to_disk(checkpoint_id, state, notes, version)
            version = self.disk.writer.last_version
        self._join(checkpoint_id, version)

    def _save_to_disk(
        self, checkpoint_id: str, state: Mapping[str, Any], notes: Mapping[str, Any] | None, in_memory: Version | None
    ) -> None:
        """Saves to the disk, with the same sequence as in memory if memory has the save."""
        if in_memory is not None:
            # The disk's own count may differ. The save gets the number after the one that is remembered here.
            before = replace(in_memory, sequence=in_memory.sequence - 1)
            remember(self.disk.writer.store, checkpoint_id, before)
        self.disk.save(checkpoint_id, state, notes)
        assert self.disk.writer.last_version is not None, "it was saved"
        self._disk_saves.record_disk_save(self.disk.writer.last_version)

    def _join(self, checkpoint_id: str, newest: Version | None) -> None:
        if newest is not None:
            join_lineages([tier.writer.store for tier in self._tiers], checkpoint_id, newest)

    # Looking and loading -----------------------------------------------------------------------------------------

    def find(self, name: str) -> str | None:
        """The checkpoint of this name, or the newest whole one for `newest`, in either tier; None: there is none.

        Raises:
            CheckpointRejected, ShardLost, StoreUnavailable: no tier found one, and a tier raised this error.
        """
        found = self._look(name)
        return found[0][1].checkpoint_id if found else None

    def _look(self, name: str) -> list[tuple[NamedCheckpoints, SaveFound]]:
        """The saves of this name in each tier, the newer one first. The next save continues the lineage of that one."""
        found, problems = self._ask_each(lambda tier: tier.reader.find(name))
        for problem in problems:
            log.warning("one tier failed, and %s is looked up in the other: %s", name, one_line(problem))
        versions = [save.version for _, save in found]
        found.sort(key=lambda each: is_older(each[1].version, versions))
        if found:
            newest = found[0][1]
            self._is_joined = True
            self._join(newest.checkpoint_id, newest.version)
        return found

    def _ask_each(
        self, ask: Callable[[NamedCheckpoints], Answer | None]
    ) -> tuple[list[tuple[NamedCheckpoints, Answer]], list[ReplicatedCkptError]]:
        """The non-empty answers of the tiers, memory first; and the errors of tiers that raised.

        Raises:
            CheckpointRejected, ShardLost, StoreUnavailable: a tier raised this, and no tier has an answer.
        """
        found: list[tuple[NamedCheckpoints, Answer]] = []
        problems: list[ReplicatedCkptError] = []
        for tier in self._tiers:
            # One tier that fails must not hide the other: a disk is slow to come back, and memory may have everything.
            try:
                answer = ask(tier)
            except (CheckpointRejected, ShardLost, StoreUnavailable) as exc:
                problems.append(exc)
                continue
            if answer:
                found.append((tier, answer))
        if problems and not found:
            raise problems[-1]
        return found, problems

    def load(self, checkpoint_id: str, state: dict[str, Any], planner: LoadPlanner | None = None) -> str:
        """As NamedCheckpoints, from the tier with the newer checkpoint. If memory's cannot be loaded, the next one is."""
        with forgotten_on_error(*(tier.writer.store for tier in self._tiers)):
            # The named checkpoint may be an older one: the next save must still be newer than all in both tiers.
            if checkpoint_id != self.newest:
                see_newest(lambda: self._look(self.newest))
            return self._load_first(checkpoint_id, self._look(checkpoint_id), state, planner)

    def load_newest(
        self, state: dict[str, Any], planner: LoadPlanner | None = None, *, max_tries: int | None = None
    ) -> str | None:
        """As NamedCheckpoints, of both tiers. Raises ConfigInvalid: `max_tries` was passed, but each tier counts its own
        restores.
        """
        if max_tries is not None:
            raise ConfigInvalid(
                "max_tries does not work with a memory tier, whose restores are counted apart from the disk's.",
                "Restore without max_tries, and reject a bad step: `manager.reject(step)`.",
            )
        found = self._look(self.newest)
        return self._load_first(self.newest, found, state, planner) if found else None

    def _load_first(
        self,
        checkpoint_id: str,
        found: list[tuple[NamedCheckpoints, SaveFound]],
        state: dict[str, Any],
        planner: LoadPlanner | None,
    ) -> str:
        """Loads the first of the found checkpoints. If it is memory's and cannot be loaded, loads the next one.

        If the checkpoint does not fit the state, or a part of the state refuses it, this raises: the tier is not at fault.
        """
        if not found or found[0][0] is self.disk:
            return self._load(self.disk, checkpoint_id, state, planner)
        others = iter(self._others(checkpoint_id, found))
        tier, name, sequence = self.memory, checkpoint_id, found[0][1].sequence
        while True:
            try:
                return self._load(tier, name, state, planner)
            except CheckpointException as exc:  # the same on all ranks, unlike other errors
                after = next(others, None) if is_of_tier(exc) else None
                if after is None:
                    raise
                what = f"{name} (sequence {sequence}) in the memory tier at {self.memory.writer.config.root}"
                tier, name, sequence = after
                place = tier.writer.config.root
                why = describe_failure(exc)
                log.warning(
                    "%s failed to load, so %s (sequence %d) at %s is loaded: %s", what, name, sequence, place, why
                )

    def _others(
        self, checkpoint_id: str, found: list[tuple[NamedCheckpoints, SaveFound]]
    ) -> Iterator[tuple[NamedCheckpoints, str, int]]:
        """The checkpoints to load if memory's cannot be: memory's others that are newer than the disk's, then the disk's.

        Each has its sequence, because under one name the disk may have an older save than memory.
        """
        on_disk = next((save for tier, save in found if tier is self.disk), None)
        if checkpoint_id == self.newest:
            first = found[0][1]
            oldest = next((save.sequence for _, save in found[1:] if save.version.lineage == first.version.lineage), -1)
            listed: tuple[Listed, ...] = ()
            with contextlib.suppress(ShardLost, StoreUnavailable):  # memory has no complete checkpoint
                listed = self.memory.list_whole()
            for each in listed:
                if oldest < each.sequence < first.sequence and not each.is_rejected:
                    yield self.memory, each.checkpoint_id, each.sequence
        if on_disk is not None:
            yield self.disk, checkpoint_id, on_disk.sequence

    def _load(self, tier: NamedCheckpoints, name: str, state: dict[str, Any], planner: LoadPlanner | None) -> str:
        loaded = tier.load(name, state, planner)
        self._loaded_from = tier
        return loaded

    def list_whole(self) -> tuple[Listed, ...]:
        """As NamedCheckpoints, of both tiers. If both have a checkpoint, the newer save counts, else memory's.

        Raises:
            ShardLost, StoreUnavailable: no tier found one, and a tier raised this error.
        """
        answered, _ = self._ask_each(NamedCheckpoints.list_whole)
        listed: dict[str, Listed] = {}
        for each in (each for _, whole in answered for each in whole):
            known = listed.setdefault(each.checkpoint_id, each)
            if version_of(each).is_newer_than(version_of(known)):
                listed[each.checkpoint_id] = each
        if not listed:
            return ()
        lineage = max(listed.values(), key=lambda each: each.created_unix_s).lineage
        ours = [each for each in listed.values() if each.lineage in ("", lineage)]
        return tuple(sorted(ours, key=lambda each: each.sequence, reverse=True))

    def reject(self, checkpoint_id: str, *, is_rejected: bool) -> tuple[str, ...]:
        """As NamedCheckpoints, in each tier that has the checkpoint. Raises CheckpointNotFound: no tier has it."""
        not_reached: dict[str, None] = {}
        missing: list[CheckpointNotFound] = []
        for tier in self._tiers:
            try:
                not_reached |= dict.fromkeys(tier.reject(checkpoint_id, is_rejected=is_rejected))
            except CheckpointNotFound as exc:  # raised on all ranks
                missing.append(exc)
        if len(missing) == len(self._tiers):
            raise missing[0]
        return tuple(not_reached)

    def delete(self, checkpoint_id: str) -> bool:
        """Removes a checkpoint from both tiers of every node and from the bucket. Returns False if there is none."""
        # Both, even if the first has none: `any` over a generator would stop at the first True.
        removed = [tier.delete(checkpoint_id) for tier in self._tiers]
        return any(removed)

    # The end -----------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> tuple[str, ...]:
        """As ReplicatedWriter.wait, of both tiers together."""
        deadline = time.monotonic() + check_timeout(timeout_s)
        in_memory = self.memory.wait(timeout_s)
        return (*in_memory, *self.disk.wait(max(0.0, deadline - time.monotonic())))

    def close(self) -> None:
        """As NamedCheckpoints. The memory tier's files stay: a job that starts again finds them."""
        self._saver.shutdown()
        with contextlib.closing(self.disk), contextlib.closing(self.memory):
            pass
