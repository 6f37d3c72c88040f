"""Collectives of a gloo group that raise on every rank once a rank has ended or left. gloo itself raises only on that
rank's neighbours.

Each collective is begun asynchronously, and waited for in steps. Between two steps this rank looks for ranks that have
ended. A collective that ends within the first step costs no further message. The messages are those of torch's object
collectives, so other ranks may call those.
"""

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.c10d.picklable_error import dump, make_sendable
from replicated_ckpt.dcp.c10d.waiting import LOOK_AFTER_S, LOOK_EVERY_S, Wait, describe_ended, describe_stopped
from replicated_ckpt.dcp.runtime.user_code import as_checkpoint_exception
from replicated_ckpt.dcp.tensors.tensor_memory import memory_of
from replicated_ckpt.errors import ConfigInvalid, RankFailed, RendezvousFailed, ReplicatedCkptError

SEEK_S = 3.0
"""How long a rank whose collective has failed looks for the rank that ended, before it reports that none is known."""
_LOOK_PER_RANK_S = 0.0005
"""All waiting ranks together look about 2,000 times a second, however many they are."""
_PAUSE_MAX_S = 0.25
_NEW_GROUP = (
    "The ranks are out of step in this process group, and none of its collectives works any more. Start the "
    "job again, or make a process group of the remaining ranks."
)
_ITS_LOG = f"Read the log of that rank. {_NEW_GROUP}"
_UNKNOWN = (
    "A rank is stopped, or its host has no power or network: find the rank whose log ends first. Or two "
    "threads used this group at once, such as an asynchronous save and a load or barrier. Give that save its "
    f"own group with `process_group=`, or wait for its future first. {_NEW_GROUP}"
)
_DESTROYED = "The process group was destroyed during a save or load in it."
_DESTROYED_HINT = "Wait for the future of an asynchronous save on every rank before destroy_process_group."

_broken: "weakref.WeakKeyDictionary[Any, ReplicatedCkptError]" = weakref.WeakKeyDictionary()
"""The groups in which this process has left a collective, and why. None of them works again."""


def is_broken(group: Any) -> bool:
    """Whether this process has left a collective of the group before its end."""
    return group in _broken


Missed = tuple[int, ReplicatedCkptError]
"""Why a collective does not end: the rank at fault, and the error that all ranks raise."""


class WatchedGroup:
    """The object collectives of one group, as DCP uses them. One thread at a time.

    If a rank has ended or left, a collective raises on every rank that waits: a CheckpointException that is also RankFailed
    or RendezvousFailed. The group is broken then, and each later collective raises the same error at once.

    This object holds no reference to the group, because `destroy_process_group` ends gloo's threads only if nothing else
    holds it. After that call, a collective raises a CheckpointException that is also ConfigInvalid.
    """

    def __init__(self, group: Any, board: Blackboard) -> None:
        self._held, self._board = weakref.ref(group), board
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._look_every_s = max(LOOK_EVERY_S, _LOOK_PER_RANK_S * self._size)
        self.coordinator = 0
        """The coordinator's rank in the group. DCP's deprecated calls may name another one than 0."""
        self.on_break: Callable[[], object] = lambda: None
        """Called before an unfinished collective raises."""

    @property
    def _group(self) -> Any:
        group = self._held()
        assert group is not None, "the block that uses it holds it"
        return group

    @property
    def _source(self) -> int:
        return dist.get_global_rank(self._group, self.coordinator)

    @staticmethod
    def can_watch(group: Any) -> bool:
        """Whether gloo sends the objects of this group."""
        return "cpu:gloo" in dist.get_backend_config(group).split(",")

    def gather_object(self, value: Any) -> list[Any] | None:
        """The values of all ranks, at the coordinator; None elsewhere."""
        with self._leaving():
            own = _as_bytes(value)
            sizes = self._gather_sizes(own)
            # gloo gathers only tensors of one size: all are padded to the longest.
            longest = max(sizes)
            is_here = self._rank == self.coordinator
            found = [_room_for(longest) for _ in range(self._size)] if is_here else None
            self._finish(dist.gather(own.resize_(longest), found, self._source, self._group, async_op=True))
            return None if found is None else list(map(_as_object, found, sizes))

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        with self._leaving():
            own = _as_bytes(value)
            sizes = self._gather_sizes(own)
            found = [_room_for(max(sizes)) for _ in range(self._size)]
            self._finish(dist.all_gather(found, own.resize_(max(sizes)), self._group, async_op=True))
            return list(map(_as_object, found, sizes))

    def _gather_sizes(self, own: torch.Tensor) -> list[int]:
        sizes = [_as_number(0) for _ in range(self._size)]
        self._finish(dist.all_gather(sizes, _as_number(own.numel()), self._group, async_op=True))
        return [int(size) for size in sizes]

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        """The coordinator's value for this rank."""
        with self._leaving():
            given = [_as_bytes(value) for value in values or ()] if self._rank == self.coordinator else None
            sizes = None if given is None else [_as_number(one.numel()) for one in given]
            longest = _as_number(0 if sizes is None else int(torch.cat(sizes).max()))
            self._finish(dist.broadcast(longest, self._source, self._group, async_op=True))
            raw, size = _room_for(int(longest)), _as_number(0)
            padded = None if given is None else [one.resize_(int(longest)) for one in given]
            self._finish(dist.scatter(raw, padded, self._source, self._group, async_op=True))
            self._finish(dist.scatter(size, sizes, self._source, self._group, async_op=True))
            return _as_object(raw, int(size))

    def broadcast_object(self, value: Any) -> Any:
        """The coordinator's value, on every rank."""
        with self._leaving():
            is_source = self._rank == self.coordinator
            raw = _as_bytes(value) if is_source else _room_for(0)
            size = _as_number(raw.numel())
            self._finish(dist.broadcast(size, self._source, self._group, async_op=True))
            raw.resize_(int(size))
            self._finish(dist.broadcast(raw, self._source, self._group, async_op=True))
            return value if is_source else _as_object(raw, int(size))

    def reduce_to_max(self, values: torch.Tensor) -> None:
        """Puts the greatest value of all ranks into the tensor of each."""
        with self._leaving():
            self._finish(dist.all_reduce(values, dist.ReduceOp.MAX, self._group, async_op=True))

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """For the block of one collective. In a broken group it raises at once. If an error ends the block, the ranks that
        wait for this rank get that error.
        """
        group = self._held()  # a strong reference until the end of the block
        if group is None:
            self.on_break()
            raise as_checkpoint_exception(ConfigInvalid(_DESTROYED, _DESTROYED_HINT), self._rank)
        before = _broken.get(group)
        if before is not None:
            raise as_checkpoint_exception(before, self._rank)
        try:
            yield
        except BaseException as exc:
            # A CheckpointException comes from `_finish`, which has posted the reason already.
            if not isinstance(exc, CheckpointException):
                self.leave("a collective", exc)
            self.on_break()
            raise

    def leave(self, what: str, exc: BaseException) -> None:
        """Marks the group as broken, and posts `exc` as the reason. Ranks that wait for this rank raise it, too."""
        why = RankFailed(f"Rank {self._rank} left {what} with {type(exc).__name__}: {exc}", _ITS_LOG)
        _broken[self._group] = why
        self._post_left(why)

    def _finish(self, work: Any) -> None:
        """Returns once the collective has ended on this rank."""
        wait_s = LOOK_AFTER_S
        with self._board.waiting() as wait:
            while True:
                try:
                    if _is_over(work, wait_s):
                        return
                except RuntimeError as exc:
                    raise self._break(*self._seek(exc)) from exc
                wait_s = self._look_every_s
                missed = self._look(wait)
                if missed is not None:
                    raise self._break(*missed)

    def _look(self, wait: Wait | None = None) -> Missed | None:
        try:
            if wait is not None:
                self._board.log_if_long(wait, "a collective of a save or load")
            # A rank that left before its process ended has posted the cause: its end is a consequence.
            lost = [rank for rank in self._board.find_lost() if not self._board.has_left(rank)]
            return (lost[0], describe_ended(lost)) if lost else self._board.find_left()
        except ReplicatedCkptError as exc:  # the c10d store does not answer
            return self._rank, exc

    def _seek(self, failure: RuntimeError) -> Missed:
        """Why a collective failed here: a rank that ended, left or is stopped; else the failure itself."""
        wait = Wait(SEEK_S, _PAUSE_MAX_S)
        while not wait.is_over:
            # The other ranks on an ended rank's host notice its end at their next look, up to a second from now.
            missed = self._look() or (self._find_stopped() if wait.waited_s > LOOK_AFTER_S else None)
            if missed is not None:
                return missed
            wait.pause()
        first_line = str(failure).partition("\n")[0]
        why = RankFailed(
            f"A collective failed at rank {self._rank}, and no rank is known to have ended: {first_line}", _UNKNOWN
        )
        return self._rank, why

    def _find_stopped(self) -> Missed | None:
        """A rank of this host that is stopped: the collective has failed because that rank let the time-out pass."""
        stopped = self._board.find_stopped()
        what, hint = describe_stopped(stopped)
        return (next(iter(stopped)), RankFailed(what, f"{hint} {_NEW_GROUP}")) if stopped else None

    def _post_left(self, why: ReplicatedCkptError) -> None:
        with suppress(RendezvousFailed):  # the c10d store does not answer: the other ranks notice that, too
            self._board.post_left(why)

    def _break(self, rank: int, error: ReplicatedCkptError) -> ReplicatedCkptError:
        _broken[self._group] = error
        self._post_left(error)  # this rank may end now: the others must not take it for the cause
        return as_checkpoint_exception(error, rank)


def _is_over(work: Any, within_s: float) -> bool:
    """Whether a collective has ended. Raises its error."""
    try:
        work.wait(timedelta(seconds=within_s))
    except RuntimeError:  # the collective's failure; or torch's time-out, and the collective goes on
        if not work.is_completed():
            return False
        work.wait()  # raises its failure; returns if it ended at this moment
    return True


def _room_for(count: int) -> torch.Tensor:
    """Memory for this number of bytes on the CPU, whatever torch's default device is."""
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def _as_number(value: int) -> torch.Tensor:
    return torch.tensor([value], device="cpu")


def _as_bytes(value: Any) -> torch.Tensor:
    # clone: the callers resize it, and memory that a bytearray owns cannot be resized.
    return torch.frombuffer(bytearray(dump(make_sendable(value))), dtype=torch.uint8).clone()


def _as_object(raw: torch.Tensor, size: int) -> Any:
    return pickle.loads(memory_of(raw)[:size])  # noqa: S301 - as DCP itself does with what its ranks send
