"""What every training script would write around `dcp.save` and `dcp.load`: when, which one, and what if told to leave."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner

from replicated_ckpt.config import ManagerConfig, Retention
from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.dcp.c10d.lent_group import borrow_group
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.dcp.load.report import LoadReport
from replicated_ckpt.dcp.preemption import Preemption
from replicated_ckpt.dcp.save.bucket import WAIT_TIMEOUT_S
from replicated_ckpt.dcp.save.report import SaveReport
from replicated_ckpt.dcp.save.writer import ReplicatedWriter
from replicated_ckpt.errors import ConfigInvalid


class CheckpointManager:
    """Saves a job's state under `step-<step>` and restores the newest; every answer is the same on every rank.

    All ranks make one, after `init_process_group` if there is a process group, and call the same methods in the same
    order. One asynchronous save is in flight at a time: whatever saves, restores or closes waits for it first, and
    raises what it raised. Saves and loads run over a gloo group of their own, so that one in the background
    does not meet the training's collectives.

    Args:
        root: this node's store. It should be this job's own: `restore_latest` takes the newest checkpoint in it.
        every: `should_save` is true at each multiple of it.
        retention: which checkpoints the nodes keep, Retention(keep_last=3) say. None: all of them.
        object_store: a bucket for the checkpoints besides, and `storage_options` to get there.
        object_every: only every so many-th checkpoint goes there.
        preempt_on: names of signals. After any rank was sent one, `should_save` is true once more, and `preempted` on.
        trust_pickles, expect_partial: as of ReplicatedReader.
        on_save, on_load: called on every rank with its SaveReport or LoadReport; of an asynchronous save in its thread.
        writer_options: whatever else ReplicatedWriter takes: copies, ack, domain, on_degraded, object_retention, ...
            A step that was saved before is replaced, as after a loss beyond repair, unless {"overwrite": False}.

    It belongs to one thread. `close` gives its process groups to the next manager; they end with the default one.

    Raises:
        ConfigInvalid: an argument cannot work.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        every: int = 1,
        retention: Retention | None = None,
        object_store: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        object_every: int = 1,
        preempt_on: tuple[str, ...] = ("SIGTERM",),
        trust_pickles: bool = False,
        expect_partial: bool = False,
        on_save: Callable[[SaveReport], object] | None = None,
        on_load: Callable[[LoadReport], object] | None = None,
        writer_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = ManagerConfig(every=every, preempt_on=preempt_on)
        where: dict[str, Any] = {"object_store": object_store, "storage_options": storage_options}
        how: dict[str, Any] = {
            "overwrite": True,
            "retention": retention,
            "object_every": object_every,
            "on_save": on_save,
        }
        self._writer = ReplicatedWriter(root, **where, **{**how, **(writer_options or {})})
        self._preemption = Preemption(self.config.preempt_on)
        self._lent = borrow_group()
        self._group = None if self._lent is None else self._lent.group
        load: dict[str, Any] = {"trust_pickles": trust_pickles, "expect_partial": expect_partial, "on_load": on_load}
        self._reader = ReplicatedReader(root, process_group=self._group, **load, **where)
        self._announced = False
        self._in_flight: Future[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def preempted(self) -> bool:
        """Whether the last `should_save` knew of a signal at any rank: save, leave the loop, close."""
        return self._preemption.is_agreed

    @property
    def last_save(self) -> SaveReport | None:
        """What this rank's last save wrote."""
        return self._writer.last_save

    @property
    def last_load(self) -> LoadReport | None:
        """Where the bytes of this rank's last load came from."""
        return self._reader.last_load

    def should_save(self, step: int) -> bool:
        """Whether to save after this step. To be asked once at the end of each step, by all ranks: they agree here."""
        is_news = self._preemption.agree() and not self._announced
        self._announced = self._announced or is_news
        return is_news or step % self.config.every == 0

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Saves, and returns when the checkpoint is committed.

        Raises:
            CheckpointException, ReplicatedCkptError: this save failed, or the asynchronous one before it, upon which
                nothing was saved now. The checkpoints before stand.
        """
        checkpoint_id = _id_of(step)
        self._settle()
        with self._used_group() as group:
            dcp.save(
                dict(state),
                checkpoint_id=checkpoint_id,
                storage_writer=self._writer,
                process_group=group,
                no_dist=group is None,
            )

    def async_save(self, step: int, state: Mapping[str, Any]) -> None:
        """Copies the state and returns; the rest is done in the background. Waits for the one before first.

        Raises:
            CheckpointException, ReplicatedCkptError: the asynchronous save before it failed; nothing was saved now.
        """
        checkpoint_id = _id_of(step)
        self._settle()
        # No stager is given, so this is a future and no AsyncSaveResponse.
        self._in_flight = dcp.async_save(  # type: ignore[assignment]
            dict(state), checkpoint_id=checkpoint_id, storage_writer=self._writer, process_group=self._group
        )

    def restore_latest(self, state: dict[str, Any], *, planner: LoadPlanner | None = None) -> int | None:
        """Loads the newest whole checkpoint into `state`, as `dcp.load` does. Returns its step; None: there is none.

        Raises:
            ShardLost: there are checkpoints, and none is whole. StoreUnavailable: nothing was found, but not all
            answered. CheckpointException, ReplicatedCkptError: it could not be loaded, or an asynchronous save failed.
        """
        self._settle()
        if self._reader.latest() is None:
            return None
        with self._used_group() as group:
            dcp.load(
                state,
                checkpoint_id=LATEST,  # by its name alone, another run's of that name might be chosen
                storage_reader=self._reader,
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
        assert self._reader.last_load is not None
        return _step_of(self._reader.last_load.checkpoint_id)

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> tuple[str, ...]:
        """Waits until all that was saved is committed, in the object store too; returns the ids that went there.

        Raises:
            CheckpointException, ReplicatedCkptError: the asynchronous save failed. UploadFailed: as of ReplicatedWriter.
        """
        self._settle()
        return self._writer.wait(timeout_s)

    def close(self) -> None:
        """Waits for the save in flight, and gives the signals back. Uploads go on in the agents; `wait` waits for them.

        Raises:
            CheckpointException, ReplicatedCkptError: the asynchronous save failed.
        """
        self._preemption.close()
        try:
            self._settle()
        finally:
            if self._lent is not None:
                self._lent.close()

    @contextlib.contextmanager
    def _used_group(self) -> Iterator[Any]:
        with contextlib.nullcontext() if self._lent is None else self._lent.used():
            yield self._group

    def _settle(self) -> None:
        future, self._in_flight = self._in_flight, None
        if future is not None:
            with self._used_group():
                future.result()


def _id_of(step: int) -> str:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigInvalid(f"step must be a whole number from 0, not {step!r}.")
    return f"step-{step}"


def _step_of(checkpoint_id: str) -> int:
    match = re.fullmatch(r"step-([0-9]+)", checkpoint_id)
    if match is None:
        raise ConfigInvalid(
            f"The newest checkpoint is {checkpoint_id!r}, which no CheckpointManager has saved.",
            "Give each job a root (and a prefix of the bucket) of its own, or load this one with dcp.load.",
        )
    return int(match[1])
