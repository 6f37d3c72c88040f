"""The world of one save or load: which ranks take part, and where they find each other."""

import os
import uuid
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from replicated_ckpt.dcp.c10d.blackboard import COORDINATOR, Blackboard
from replicated_ckpt.dcp.c10d.job_secret import Seal
from replicated_ckpt.dcp.c10d.kept_decisions import KeptDecisions
from replicated_ckpt.dcp.c10d.presence import announce
from replicated_ckpt.dcp.c10d.waiting import reaching_store
from replicated_ckpt.dcp.runtime.torch_private import calling, default_store

_PREFIX = "replicated_ckpt"
ALONE = "alone"
_kept_by_group: dict[str, KeptDecisions] = {}


class _Session:
    """Names this process. A process that is forked from it is another one and draws a name of its own."""

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
    """The ranks of one DCP call. `blackboard` is None for a call on one process alone.

    `is_load`: what is found is read then, and is kept for it; a mere look keeps nothing.
    """

    rank: int
    size: int
    blackboard: Blackboard | None
    group_name: str = ALONE
    is_load: bool = True

    @property
    def session(self) -> str:
        """Names the saves that this process coordinates on this group: one that is not committed is over with the next."""
        return session_of(self.group_name)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == COORDINATOR


def world_of_call(process_group: Any, no_dist: bool | None) -> World:
    """The world of the DCP call under way; arguments given to the writer or reader win over what the call says."""
    call = calling()
    if no_dist is None:
        no_dist = call.no_dist if call is not None else False
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return World(0, 1, None)
    group: Any = process_group or (call.process_group if call is not None else None) or dist.group.WORLD
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = str(group.group_name)
    store = dist.PrefixStore(f"{_PREFIX}/{name}", default_store())
    presence, members = announce(), dist.get_process_group_ranks(group)

    def find_lost() -> list[int]:
        with reaching_store():
            lost = presence.find_lost() if presence is not None else {}
        return [rank for rank, member in enumerate(members) if member in lost]

    kept = _kept_by_group.setdefault(name, KeptDecisions())
    return World(rank, size, Blackboard(store, rank, size, find_lost, Seal.of_job(name), kept), name)
