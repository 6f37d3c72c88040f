"""The world of one save or load: the ranks that take part, and the place where they exchange messages."""

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from replicated_ckpt.dcp.c10d.blackboard import COORDINATOR, Blackboard, CachedDecisions
from replicated_ckpt.dcp.c10d.waiting import (
    AnsweringStore,
    Presence,
    announce,
    check_is_rank,
    describe_ended,
    reaching_store,
)
from replicated_ckpt.dcp.c10d.watched_group import WatchedGroup
from replicated_ckpt.dcp.runtime.torch_private import default_store, find_async_call, find_call, use_collectives
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.stores.local.directories.intent import WRITER

_PREFIX = "replicated_ckpt"
ALONE = "alone"
_cached_by_group: dict[str, CachedDecisions] = {}


class _Session:
    """A random name of this process. A forked child draws its own."""

    def __init__(self) -> None:
        self._draw()
        os.register_at_fork(after_in_child=self._draw)

    def _draw(self) -> None:
        self.name = uuid.uuid4().hex


_SESSION = _Session()


def session_of(group_name: str) -> str:
    return f"{_SESSION.name}/{group_name}"


@dataclass(frozen=True)
class World:
    """The ranks of one DCP call. `blackboard` is None for a call in a single process.

    `is_load`: the nodes pin the found save, because it is read next. A mere search pins nothing. `is_restore`: they also
    count the load, because a call of DCP fills a state. An export pins the save, but is not counted. `watched`: the
    collectives of its group. None if they cannot be watched.
    """

    rank: int
    size: int
    blackboard: Blackboard | None
    group_name: str = ALONE
    is_load: bool = True
    is_restore: bool = False
    watched: WatchedGroup | None = None

    @property
    def session(self) -> str:
        """The session of all saves that this process coordinates on this group. They follow each other: when one begins, an
        earlier uncommitted one has ended.
        """
        return session_of(self.group_name)

    def session_of_writer(self, name: str) -> str:
        """As `session`. In a job of one process several writers may save at once, so each has a session of its own."""
        return self.session if self.blackboard is not None else f"{self.session}{WRITER}{name}"

    def watch_call(self, on_break: Callable[[], object] = lambda: None) -> None:
        """Has the DCP call under way use collectives that notice a rank that has ended. Call it in DCP's first step.

        `on_break` is called on a rank before such a collective raises there.
        """
        if self.watched is not None:
            self.watched.on_break = on_break
            use_collectives(self.watched)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == COORDINATOR


def world_of_call(process_group: Any, no_dist: bool | None) -> World:
    """The world of the DCP call under way. Arguments of the writer or reader take precedence over the call's.

    Raises:
        ConfigInvalid: this rank is not in the group, or this process was forked from a rank.
    """
    call = find_call()
    if no_dist is None:
        no_dist = call.no_dist if call is not None else False
    # With no_dist the other ranks take no part: a message to them would hang.
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return World(0, 1, None)
    check_is_rank()
    group: Any = process_group or (call.process_group if call is not None else None) or dist.group.WORLD
    # Outside the group this rank would have the number -1, and the others would wait for a post that never comes.
    if not hasattr(group, "group_name"):  # GroupMember.NON_GROUP_MEMBER has none
        raise ConfigInvalid(
            f"process_group is {str(group)[:80]!r} on this rank, which is not in that group.",
            "Call it only on the ranks of the group. The group of a DeviceMesh is its get_group().",
        )
    name = str(group.group_name)
    board, watched = _set_up_rendezvous(group, name)
    return World(dist.get_rank(group), dist.get_world_size(group), board, name, watched=watched)


def watch_first_step(process_group: Any) -> None:
    """Has the DCP call under way notice a rank that has ended, even if the planner raises before any hook of ours.

    Call it in DCP's first step, before the planner gets anything. Raises ConfigInvalid: as `world_of_call`.
    """
    if find_call() is not None:
        world_of_call(process_group, None).watch_call()


@contextmanager
def posting_if_left(process_group: Any) -> Iterator[None]:
    """For the block that stages an asynchronous save. If an exception ends the block, posts that to the other ranks.

    They may have begun the save, and would otherwise wait until their group's time-out.
    """
    try:
        yield
    except BaseException as exc:
        call = find_async_call()
        if call is not None and not call.in_process:
            watched = world_of_call(process_group or call.process_group, call.no_dist).watched
            if watched is not None:
                watched.leave("an asynchronous save before it began", exc)
        raise


def watch_group(group: Any) -> WatchedGroup:
    """The collectives of a gloo group of some or all ranks."""
    found = _set_up_rendezvous(group, str(group.group_name))[1]
    assert found is not None, "it is a gloo group"
    return found


def await_ranks(group: Any, name: str, deadline_s: float, what: str) -> None:
    """Returns once all ranks of a group have called this with this name, or after `deadline_s`. No other call has the name.

    Raises RankFailed: a rank's process has ended. RendezvousFailed: the c10d store does not answer.
    """
    lost = _set_up_rendezvous(group, str(group.group_name))[0].await_all(name, deadline_s, what)
    if lost:
        raise describe_ended(lost)


def _set_up_rendezvous(group: Any, name: str) -> tuple[Blackboard, WatchedGroup | None]:
    presence, members = announce(), dist.get_process_group_ranks(group)
    # By group: a World lives for one call, and the ranks' caches must outlive it.
    kept = _cached_by_group.setdefault(name, CachedDecisions())
    store = AnsweringStore(f"{_PREFIX}/{name}", default_store())
    board = Blackboard(
        store,
        dist.get_rank(group),
        dist.get_world_size(group),
        partial(_find_lost, presence, members),
        kept,
        partial(_find_stopped, presence, members),
    )
    return board, WatchedGroup(group, board) if WatchedGroup.can_watch(group) else None


def _find_lost(presence: Presence | None, members: Sequence[int]) -> list[int]:
    """The ranks of a group whose processes are known to have ended, in order of their ends. `members`: its global ranks."""
    with reaching_store():
        lost = presence.find_lost() if presence is not None else {}
    rank_by_member = {member: rank for rank, member in enumerate(members)}
    return [rank_by_member[member] for member in lost if member in rank_by_member]


def _find_stopped(presence: Presence | None, members: Sequence[int]) -> Mapping[int, int]:
    """The ranks of a group that are stopped on this host, with their process ids. `members`: its global ranks."""
    stopped = presence.find_stopped() if presence is not None else {}
    return {rank: stopped[member] for rank, member in enumerate(members) if member in stopped}
