"""A pool of gloo groups of all ranks. Each group has one user at a time, and is reused: a new one costs descriptors,
threads and keys.
"""

import contextlib
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.config import WriterConfig
from replicated_ckpt.dcp.c10d.waiting import check_is_rank
from replicated_ckpt.dcp.c10d.watched_group import is_broken
from replicated_ckpt.dcp.c10d.world import await_ranks, watch_group
from replicated_ckpt.errors import ConfigInvalid, RankFailed, ReplicatedCkptError

T = TypeVar("T")
_FIRST_GROUP_S = 300.0
GROUPS_MAX = 512
"""Groups in use at once in one process. torch itself has no limit."""


class PooledGroup:
    """A group for one caller alone until `close`. All ranks acquire groups in the same order.

    It holds no reference to a group. `destroy_process_group` ends gloo's threads only if nothing else holds the group,
    and threads that outlive the interpreter abort the process.
    """

    def __init__(self, pool: "_Pool", number: int) -> None:
        self._pool = weakref.ref(pool)
        self._number = number
        self._is_fit = True

    @property
    def group(self) -> Any:
        """The acquired process group. Raises ConfigInvalid if the job's process groups were destroyed meanwhile."""
        pool = self._pool()
        if pool is None:
            raise ConfigInvalid(
                "The process groups of this object have been destroyed.",
                "Close it before destroy_process_group. After the next init_process_group, make a new one.",
            )
        return pool.groups[self._number]

    @property
    def is_gone(self) -> bool:
        """Whether the job's process groups were destroyed meanwhile."""
        return self._pool() is None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """For a block of collectives. If the block ends in the middle of one, the pool does not reuse the group."""
        try:
            yield
        # Raised by all ranks together, after a collective has ended: the ranks are still in step.
        except (CheckpointException, ReplicatedCkptError):
            self._is_fit = self._is_fit and not self.is_gone and not is_broken(self.group)
            raise
        # An interrupt may hit the middle of a collective: then the ranks are out of step forever.
        except BaseException:
            self._is_fit = False
            raise

    def close(self) -> None:
        """Releases the group, in which no collective may be under way. Any rank may do so alone, and more than once."""
        pool = self._pool()
        if self._is_fit and pool is not None:
            pool.in_use.discard(self._number)
        self._is_fit = False


class _Pool:
    """The groups of one job, the same on all ranks. `in_use` may differ: a rank may not have closed its group yet."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self.in_use: set[int] = set()
        self._agreeing: Any = dist.new_group(backend="gloo")

    def acquire(self) -> PooledGroup:
        taken = torch.zeros(GROUPS_MAX + 1, dtype=torch.uint8, device="cpu")  # one more: the last is always free
        taken[sorted(self.in_use)] = 1
        # A group is free only if it is free on every rank: another rank may not have closed its manager yet.
        watch_group(self._agreeing).reduce_to_max(taken)
        number = taken.tolist().index(0)
        if number == GROUPS_MAX:
            raise ConfigInvalid(
                f"{GROUPS_MAX} process groups are in use.", "Close each CheckpointManager after its use."
            )
        # All ranks see the same number, so all of them make the group together, as torch demands.
        if number == len(self.groups):
            self.groups.append(dist.new_group(backend="gloo"))
        self.in_use.add(number)
        return PooledGroup(self, number)


# Weak: a live reference keeps gloo's threads running after destroy_process_group, and they abort the process at its exit.
_POOLS: "weakref.WeakKeyDictionary[Any, _Pool]" = weakref.WeakKeyDictionary()


def acquire_group() -> PooledGroup | None:
    """A group that is not in use on any rank; None without a job of several processes.

    Raises:
        ConfigInvalid: this process was forked from a rank, or too many groups are in use. RankFailed: a rank has ended.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    check_is_rank()
    world = dist.group.WORLD
    if world not in _POOLS:
        await_ranks(world, "group pool", _FIRST_GROUP_S, "making a CheckpointManager")  # torch's own wait names no rank
        _POOLS[world] = _Pool()
    return _POOLS[world].acquire()


def agree_on_first(group: Any, look: Callable[[], T]) -> T:
    """The result of `look` on rank 0 of a group of all ranks, returned on each of them. If `look` raises, all ranks
    raise its error.

    `group` None: this process alone.
    """
    if group is None:
        return look()
    watched = watch_group(group)
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = look()
        except BaseException as exc:
            # The other ranks wait in this broadcast: they get the error before this rank leaves.
            watched.broadcast_object([None, _make_picklable(exc, 0)])
            raise
    outcome = watched.broadcast_object(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    found: T = outcome[0]
    return found


def agree_on_all(group: Any, act: Callable[[], T]) -> list[T]:
    """The results of `act` on every rank of a group of all ranks, in rank order. If it raises on one rank, all ranks
    raise its error.

    `group` None: this process alone.
    """
    if group is None:
        return [act()]
    watched = watch_group(group)
    found, failure = None, None
    try:
        found = act()
    except ReplicatedCkptError as exc:
        failure = exc
    except BaseException as exc:
        # The other ranks wait in this gather: they get the error before this rank leaves.
        watched.all_gather_object((None, _make_picklable(exc, dist.get_rank(group))))
        raise
    outcomes = watched.all_gather_object((found, failure))
    for _, error in outcomes:
        if error is not None:
            raise error
    return [each for each, _ in outcomes]


def _make_picklable(error: BaseException, rank: int) -> ReplicatedCkptError:
    if isinstance(error, ReplicatedCkptError):
        return error
    return RankFailed(f"Rank {rank} failed with {type(error).__name__}: {error}.")


_MAY_DIFFER = ("root", "domain", "direct_io", "checkpoint_id_from")
"""Arguments of a writer that may differ between ranks. All others apply to the whole save."""


def describe_wanted(config: WriterConfig) -> dict[str, str]:
    """The arguments of a rank's writer that apply to the whole save, as text; those with their default are left out."""
    return {
        name: repr(value)
        for name, value in vars(config).items()
        if name not in _MAY_DIFFER and value != getattr(WriterConfig, name, None)
    }


def check_ranks_alike(wanted: Mapping[str, str]) -> None:
    """Compares the arguments of all ranks, before any rank acts on its own. Every rank calls this.

    Raises:
        ConfigInvalid: as `check_wanted_alike`, on all ranks.
    """
    pooled = acquire_group()
    if pooled is None:
        return
    with contextlib.closing(pooled), pooled.use():
        outcomes = agree_on_all(pooled.group, lambda: (wanted, socket.gethostname()))
    check_wanted_alike([wants for wants, _ in outcomes], [host for _, host in outcomes])


def check_wanted_alike(wants: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> None:
    """Compares the ranks' arguments, each as `describe_wanted` returns them. The error names the ranks' hosts.

    Raises:
        ConfigInvalid: a rank's argument differs from rank 0's.
    """
    # Each rank leaves its defaults out, so one rank's entry is enough to compare all of them.
    for name in dict.fromkeys(name for wanted in wants for name in wanted):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, wanted in enumerate(wants):
            ranks_by_value.setdefault(wanted.get(name, repr(getattr(WriterConfig, name, None))), []).append(rank)
        if len(ranks_by_value) > 1:
            differing = (
                f"{value} on {'ranks' if ranks[1:] else 'rank'} {', '.join(map(str, ranks))} (host {hosts[ranks[0]]})"
                for value, ranks in ranks_by_value.items()
            )
            raise ConfigInvalid(
                f"The ranks ask for different saves: {name} is {'; '.join(differing)}.",
                f"Pass the same {name} to ReplicatedWriter, or CheckpointManager, on every rank.",
            )
