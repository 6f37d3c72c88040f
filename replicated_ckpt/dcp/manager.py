"""The code that every training script would otherwise write around `dcp.save` and `dcp.load`."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Self, SupportsIndex

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner

from replicated_ckpt.config import Ack, BestIs, ManagerConfig, Retention, check_callable, check_number
from replicated_ckpt.core.upkeep.retention import Candidate, find_best
from replicated_ckpt.dcp.c10d.group_pool import check_ranks_alike
from replicated_ckpt.dcp.find.listing import Listed
from replicated_ckpt.dcp.load.load_report import LoadReport
from replicated_ckpt.dcp.named_checkpoints import NamedCheckpoints
from replicated_ckpt.dcp.preemption import Preemption
from replicated_ckpt.dcp.runtime.user_code import describe_failure, is_interrupting
from replicated_ckpt.dcp.save.agent_tasks import WAIT_TIMEOUT_S
from replicated_ckpt.dcp.save.save_report import SaveReport
from replicated_ckpt.dcp.steps import (
    NEWEST_STEP,
    StepNotes,
    check_step,
    find_step,
    id_of,
    notes_of,
    notes_of_rank,
    step_of,
)
from replicated_ckpt.dcp.tiered_checkpoints import TieredCheckpoints
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid, ManagerClosed, ReplicatedCkptError


class SaveCallback:
    """Calls `on_save`, and refuses calls from it that would wait for the asynchronous save under way."""

    def __init__(self, on_save: Callable[[SaveReport], object] | None) -> None:
        check_callable("on_save", on_save)
        self._on_save = on_save
        self._called_in: set[int] = set()
        self._saved_from: int | None = None

    def __call__(self, report: SaveReport) -> None:
        self._called_in.add(threading.get_ident())  # two tiers' saves may end at the same time
        try:
            if self._on_save is not None:
                self._on_save(report)
        finally:
            self._called_in.discard(threading.get_ident())

    def begin(self) -> None:
        """Marks this thread, the manager's own, as the one that saves."""
        self._saved_from = threading.get_ident()

    def check_not_inside(self, call: str) -> None:
        """Raises ConfigInvalid: `on_save` of an asynchronous save makes this call."""
        caller = threading.get_ident()
        # A synchronous save has nothing in flight to wait for: there the call is harmless.
        if caller in self._called_in and caller != self._saved_from:
            raise ConfigInvalid(
                f"on_save of an asynchronous save called CheckpointManager.{call}, which would wait for that save.",
                "Let on_save only record what to do, and do it in the training loop, on every rank.",
            )


_DISK_EVERY = 10


class CheckpointManager:
    """Saves a job's state under `step-<step>`, and restores it. Each method returns the same on every rank.

    Make one on every rank, after `init_process_group`, and call the same methods in the same order. Without a process
    group it works on one process. One asynchronous save is in flight at a time: the next call that saves, restores, lists
    or closes waits for it, and raises its error. Saves and loads have a gloo group of their own, so a save in the
    background does not mix with the collectives of the training.

        with CheckpointManager("/nvme/ckpt", every=100, retention=Retention(keep_last=3)) as manager:
            step = manager.restore(state) or 0
            while step < steps and not manager.preempted:
                step = train_step(...)
                if manager.should_save(step):
                    manager.async_save(step, state, metrics={"loss": loss})

    Args:
        root: this node's store. Give each job its own: `restore` takes the newest `step-<step>` in it.
        every: `should_save` is true at each multiple of it.
        retention: which checkpoints the nodes keep, such as Retention(keep_last=3). None: all of them.
        copies: copies of every shard, the local one included. With fewer nodes there are as many copies as nodes.
        ack: the level, as of ReplicatedWriter, that a checkpoint has when `save` returns, or `wait` after `async_save`.
        domain: failure domain of this node (rack, switch, zone). Copies go to other domains where possible.
            None: REPLICATED_CKPT_DOMAIN, else its host.
        object_store: a bucket to which the checkpoints are uploaded. `storage_options`: its credentials and endpoint.
        object_every: upload only every n-th checkpoint. With a memory tier, only saves to the disk count.
        memory: a second store in memory, for every checkpoint and its copies: True (in /dev/shm), or a directory in a
            tmpfs. It keeps two checkpoints. If a node lacks the memory for three, the save raises MemoryTierShort.
        disk_every: with a memory tier, every n-th save also goes to the disk at `root`, and so does each after a signal.
        preempt_on: names of signals. After any rank gets one, `should_save` is true once more, and `preempted` stays true.
        trust_pickles, expect_partial: as of ReplicatedReader.
        on_save, on_load: called on every rank with its SaveReport or LoadReport. After `async_save`, `on_save` runs in the
            thread of that save. If it calls this manager there, that raises ConfigInvalid.
        writer_options: other arguments of ReplicatedWriter: on_degraded, object_retention, direct_io, ...
            {"overwrite": False} refuses a step that was saved before. Otherwise the step is replaced.

    Not thread-safe. After `close` its process groups serve the next manager, until the default group is destroyed.

    Raises:
        ConfigInvalid: an argument is invalid. ManagerClosed: raised after `close` by every method that saves, loads or
            lists.
    """

    def __init__(  # noqa: PLR0913 - what a job decides once, each by its name
        self,
        root: str | os.PathLike[str],
        *,
        every: int = 1,
        retention: Retention | None = None,
        copies: int = 2,
        ack: Ack = "peer",
        domain: str | None = None,
        object_store: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        object_every: int = 1,
        memory: bool | str | os.PathLike[str] | None = None,
        disk_every: int = _DISK_EVERY,
        preempt_on: tuple[str, ...] = ("SIGTERM",),
        trust_pickles: bool = False,
        expect_partial: bool = False,
        on_save: Callable[[SaveReport], object] | None = None,
        on_load: Callable[[LoadReport], object] | None = None,
        writer_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = ManagerConfig(every=every, preempt_on=preempt_on, disk_every=disk_every)
        how: dict[str, Any] = {"retention": retention, "copies": copies, "ack": ack}
        how |= {"object_store": object_store, "storage_options": storage_options, "object_every": object_every}
        how |= {"on_save": on_save, "domain": domain, **(writer_options or {})}
        how["on_save"] = self._save_callback = SaveCallback(how["on_save"])
        load: dict[str, Any] = {"trust_pickles": trust_pickles, "expect_partial": expect_partial, "on_load": on_load}
        self._checkpoints: NamedCheckpoints | TieredCheckpoints
        has_tier = memory is not None and memory is not False
        # Before anything is made: a rank with another `every` would save alone, and wait for the others.
        check_ranks_alike({name: repr(value) for name, value in {**vars(self.config), "memory": has_tier}.items()})
        if not has_tier:
            if disk_every != _DISK_EVERY:
                raise ConfigInvalid("disk_every needs memory=True, or a directory in a tmpfs.")
            self._checkpoints = NamedCheckpoints(root, how, load, newest=NEWEST_STEP)
        else:
            self._checkpoints = TieredCheckpoints(
                root, memory, disk_every, how, load, NEWEST_STEP, lambda: self.preempted
            )
        try:
            self._preemption = Preemption(self.config.preempt_on)
        except ConfigInvalid:
            # The caller gets no manager that it could close.
            self._checkpoints.close()
            raise
        self._announced, self._is_closed = False, False
        self._in_flight: tuple[str, Future[Any]] | None = None
        self._saved_by = os.getpid()

    def __repr__(self) -> str:
        used, state = self._checkpoints.writer.config, "closed" if self._is_closed else "open"
        bucket = "" if used.object_store is None else f", object_store={used.object_store!r}"
        return (
            f"<CheckpointManager({used.root!r}, every={self.config.every}, copies={used.copies}, ack={used.ack!r}, "
            f"retention={used.retention!r}{bucket}): {state}{', saving' if self._in_flight is not None else ''}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def preempted(self) -> bool:
        """Whether `should_save` has found a signal on any rank. If so, save, leave the loop, and close."""
        return self._preemption.is_agreed

    @property
    def last_save(self) -> SaveReport | None:
        """The report of this rank's last save; None before the first."""
        return self._checkpoints.last_save

    @property
    def last_load(self) -> LoadReport | None:
        """The report of this rank's last load; None before the first."""
        return self._checkpoints.last_load

    # Saving ------------------------------------------------------------------------------------------------------

    def should_save(self, step: SupportsIndex) -> bool:
        """Whether to save after this step: at each multiple of `every`, and once after any rank got a signal.

        Call it on all ranks, once at the end of each step: the ranks exchange signals in this call.

        Raises:
            ConfigInvalid: the step is not a whole number from 0.
        """
        self._check_open("should_save")
        # `agree` first: it is a collective, which all ranks must call at every step.
        is_news = self._preemption.agree() and not self._announced
        self._announced = self._announced or is_news
        return is_news or check_step(step) % self.config.every == 0

    def save(
        self,
        step: SupportsIndex,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves, and returns when the checkpoint is committed.

        `metrics` (numbers by name) and `metadata` (JSON values) may have 64 KiB together. Rank 0's are stored with the
        checkpoint, and `notes` returns them.

        Raises:
            CheckpointException, ReplicatedCkptError: this save failed. Or the asynchronous save before it failed, and
                nothing was saved now. Earlier checkpoints are unchanged.
            ConfigInvalid: the step is not a whole number from 0, or metrics or metadata cannot be stored. Nothing was
                saved. With several ranks, the error about metrics or metadata is in a CheckpointException.
        """
        checkpoint_id, notes = self._prepare("save", step, metrics, metadata)
        self._checkpoints.save(checkpoint_id, state, notes)

    def async_save(
        self,
        step: SupportsIndex,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Waits for the previous asynchronous save, copies the state, and returns. The copy is saved in the background.

        Arguments as of `save`. The next call that waits for the save raises its error; `should_save` does not
        wait.

        Raises:
            CheckpointException, ReplicatedCkptError: the previous asynchronous save failed, and nothing was saved now.
            ConfigInvalid: as `save`.
        """
        checkpoint_id, notes = self._prepare("async_save", step, metrics, metadata)
        self._in_flight = checkpoint_id, self._checkpoints.save_later(checkpoint_id, state, notes)
        self._saved_by = os.getpid()

    def hold_until_copied(self) -> None:
        """With writer_options={"overlap": True}: call it before work on the GPUs' current streams changes the state."""
        self._checkpoints.writer.hold_until_copied()

    def _prepare(
        self, call: str, step: SupportsIndex, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
    ) -> tuple[str, Mapping[str, Any]]:
        """The id and the notes of the next save, once the one before has ended. Rank 0's notes count."""
        self._check_open(call)
        checkpoint_id, notes = id_of(step), notes_of_rank(metrics, metadata)
        # First: an error of the asynchronous save before must not get lost behind this one.
        self._settle()
        self._save_callback.begin()
        return checkpoint_id, notes

    def keep_best(self, metric: str, *, best_is: BestIs = "min") -> None:
        """From the next save on, retention also keeps the checkpoint with the smallest (or largest) `metric`.

        The same as Retention(..., keep_best=metric, best_is=best_is).

        Raises:
            ConfigInvalid: the manager has no retention, so every checkpoint is kept. Or an argument is invalid.
        """
        self._check_open("keep_best")
        used = self._checkpoints.writer.config
        if used.retention is None and used.object_retention is None:
            raise ConfigInvalid(
                "keep_best needs retention, and this manager has none: every checkpoint is kept.",
                "For example, pass retention=Retention(keep_last=3).",
            )
        self._checkpoints.writer.keep_best(metric, best_is)

    # Restoring ---------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: dict[str, Any],
        step: SupportsIndex | None = None,
        *,
        max_tries: SupportsIndex | None = None,
        planner: LoadPlanner | None = None,
    ) -> int | None:
        """Loads a checkpoint into `state`, as `dcp.load` does. Returns its step, or None if there is no `step-<step>`.

        `step` None: the newest complete one that is not rejected. Tensors are filled in place. Other values are replaced in
        `state`.

        Nodes count restores without a step until the next save. Rank 0 warns from the third restore of one checkpoint on.
        `max_tries` skips a checkpoint that was restored so often, and loads the next older complete one. If all were
        restored so often, the newest one is loaded. Rank 0's `max_tries` counts.

        Raises:
            ConfigInvalid: `max_tries` with a step or a memory tier. CheckpointRejected: without `step`, all are rejected.
            CheckpointNotFound: that step was not saved, or was removed.
            ShardLost: that step is not complete. Without `step`: there are checkpoints, but none is complete.
            StoreUnavailable: no checkpoint was found, and a node or the bucket did not answer.
            CheckpointException, ReplicatedCkptError: the load failed, or an asynchronous save before it.
        """
        self._check_open("restore")
        checkpoint_id = None if step is None else id_of(step)
        tries = None if max_tries is None else check_number("max_tries", max_tries)
        if tries is not None and checkpoint_id is not None:
            raise ConfigInvalid(
                "max_tries is for the newest checkpoint, and a step was passed.", "Pass one of the two."
            )
        self._settle()
        if checkpoint_id is not None:
            return step_of(self._checkpoints.load(checkpoint_id, state, planner))
        loaded = self._checkpoints.load_newest(state, planner, max_tries=tries)
        return None if loaded is None else step_of(loaded)

    def restore_latest(self, state: dict[str, Any], *, planner: LoadPlanner | None = None) -> int | None:
        """The former name of `restore` without a step."""
        return self.restore(state, planner=planner)

    def latest_step(self) -> int | None:
        """The step that `restore` would load now, or None if there is no `step-<step>`.

        Raises:
            ShardLost, StoreUnavailable: as `restore`.
        """
        self._check_open("latest_step")
        self._settle()
        found = self._checkpoints.find(NEWEST_STEP)
        return None if found is None else step_of(found)

    def all_steps(self) -> tuple[int, ...]:
        """The steps that can be restored from the bucket and the nodes that answer, smallest first.

        Raises:
            ShardLost: there are checkpoints, but none is complete.
            StoreUnavailable: no checkpoint was found, and a node or the bucket did not answer.
        """
        self._check_open("all_steps")
        return tuple(sorted(self._list_steps()))

    def notes(self, step: SupportsIndex) -> StepNotes:
        """The notes of a step that can be restored: the time of its save, `metrics` and `metadata`.

        Raises:
            CheckpointNotFound: there is no such step. ShardLost, StoreUnavailable: as `all_steps`.
        """
        self._check_open("notes")
        step = check_step(step)
        found = self._list_steps().get(step)
        if found is None:
            raise CheckpointNotFound(
                f"There is no step {step} to restore.", "all_steps() lists the steps that can be restored."
            )
        return notes_of(step, found)

    def best_step(self, metric: str, *, best_is: BestIs = "min") -> int | None:
        """The step with the smallest (or largest) `metric` among those that can be restored, or None if none has it.

        Rejected steps do not count.

        Raises:
            ShardLost, StoreUnavailable: as `all_steps`. ConfigInvalid: an argument is invalid.
        """
        self._check_open("best_step")
        policy = Retention(keep_last=1, keep_best=metric, best_is=best_is)
        saves = [notes_of(step, listed) for step, listed in self._list_steps().items() if not listed.is_rejected]
        ranked = [Candidate(id_of(notes.step), "", notes.step, metrics=notes.metrics) for notes in saves]
        best = find_best(ranked, policy)
        return None if best is None else find_step(best.checkpoint_id)

    def reject(self, step: SupportsIndex, *, undo: bool = False) -> tuple[str, ...]:
        """Marks this step, so that `restore` without a step, and every other load of "latest", skip it. `undo` removes the
        mark.

        The mark lies on all nodes that answer, and in the bucket. A load by step still loads it, with a warning. A later
        save of the step is not rejected. Returns the nodes that were not reached, with the reasons. Each gets the mark once
        it is back.

        Raises:
            CheckpointNotFound: no node that answered has the step. AgentUnavailable, StoreError: the mark is missing on a
                node that answers, or in the bucket. Call `reject` again.
        """
        self._check_open("reject")
        checkpoint_id = id_of(step)
        self._settle()
        return self._checkpoints.reject(checkpoint_id, is_rejected=not undo)

    def delete(self, step: SupportsIndex) -> bool:
        """Removes a step from every node of this job and from the bucket. Returns False if there is none.

        Re-protection does not restore the step, and it may be saved again. A node without a rank of this job keeps its copy
        until you run `replicated-ckpt rm` there. If another job reads the step, it is removed afterwards.

        Raises:
            StoreUnavailable: no save of the step was found, and not all nodes answered. Or stock torch wrote it.
            AgentUnavailable, StoreError: the step is still on a node or in the bucket, and removed elsewhere. Call
                `delete` again.
        """
        self._check_open("delete")
        checkpoint_id = id_of(step)
        self._settle()
        return self._checkpoints.delete(checkpoint_id)

    def _list_steps(self) -> dict[int, Listed]:
        """The manager's complete checkpoints of this run, newest first, by step. Rank 0 finds them once all ranks have
        called this.
        """
        self._settle()
        # Reversed: of two saves of one step the newer one counts.
        whole = {find_step(each.checkpoint_id): each for each in reversed(self._checkpoints.list_whole())}
        return {step: whole[step] for step in reversed(whole) if step is not None}

    # The end -----------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> tuple[str, ...]:
        """Waits until all saves are committed, in the bucket, too. Returns the ids that were uploaded.

        Raises:
            CheckpointException, ReplicatedCkptError: the last asynchronous save failed. Each call raises that, until the
                next save.
            UploadFailed: as of ReplicatedWriter.
        """
        self._check_open("wait")
        self._settle()
        return self._checkpoints.wait(timeout_s)

    def close(self) -> None:
        """Waits for the asynchronous save in flight, and restores signal handlers. Agents continue uploads: see `wait`.

        The end of a `with` block calls it. A second call changes nothing.

        Raises:
            CheckpointException, ReplicatedCkptError: the asynchronous save failed.
            ConfigInvalid: the process groups were destroyed before that save had ended, and it is lost.
        """
        self._check_caller("close")
        # First: it raises in any thread but the main one, and then nothing is closed.
        self._preemption.close()
        self._is_closed = True
        with contextlib.closing(self._checkpoints):
            self._settle()

    def _check_open(self, call: str) -> None:
        if self._is_closed:
            raise ManagerClosed(f"CheckpointManager.{call} was called after close().")
        self._check_caller(call)

    def _check_caller(self, call: str) -> None:
        self._save_callback.check_not_inside(call)
        if is_interrupting():
            raise ConfigInvalid(
                f"CheckpointManager.{call} was called inside another call, for example by a signal handler.",
                "Let the handler only record the signal, and save in the training loop; preempt_on does that.",
            )

    def _settle(self) -> None:
        """Waits for the asynchronous save in flight, and raises its error."""
        if self._saved_by != os.getpid():  # a forked child: none of its threads ends that save
            self._in_flight = None
        if self._in_flight is None:
            return
        checkpoint_id, future = self._in_flight
        try:
            with contextlib.nullcontext() if self._checkpoints.is_cut_off else self._checkpoints.use_group():
                future.result()
        except (CheckpointException, ReplicatedCkptError, RuntimeError, ValueError) as exc:
            # Without its process groups the save cannot have ended well, and torch's own error does not show why.
            if not self._checkpoints.is_cut_off:
                raise
            raise ConfigInvalid(
                f"The asynchronous save of {checkpoint_id!r} is lost: its process groups were destroyed before its end "
                f"({describe_failure(exc)}). Earlier committed checkpoints are safe.",
                "Call wait() or close() on every rank before destroy_process_group.",
            ) from exc
        finally:
            if future.done():  # otherwise the wait was interrupted, and the next call waits again
                self._in_flight = None
