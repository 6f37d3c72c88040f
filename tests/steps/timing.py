"""Steps: saves and loads at bad moments, and with wrong clocks."""

import shutil
import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from replicated_ckpt.errors import ReplicatedCkptError
from tests.steps.async_saves import start
from tests.steps.context import Context
from tests.steps.peers import pieces
from tests.steps.state import OTHER_SEED, build_all, digests_of, failure, save

HOURS = 3600.0


class WaitingPlanner(DefaultSavePlanner):
    """Provides its data only once it may continue."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        assert self.may_go_on.wait(40)
        return super().resolve_data(write_item)


def load_while_saving(context: Context, kinds: list[str], old: str, new: str) -> dict[str, Any]:
    """Begins a save in the background, loads another checkpoint meanwhile, then ends the save."""
    states, loaded = build_all(context, kinds, 5), build_all(context, kinds, OTHER_SEED)
    saving = digests_of(states)
    group = dist.new_group()  # Two DCP calls at once need two groups.
    planner = WaitingPlanner()
    future = start(context, states, new, planner)
    reader = context.reader(process_group=group)
    dcp.load(dict(loaded), checkpoint_id=old, storage_reader=reader, process_group=group)
    was_in_flight = not future.done()
    planner.may_go_on.set()
    future.result(timeout=60)
    return {"saving": saving, "loaded": digests_of(loaded), "was_in_flight": was_in_flight}


class RemovingPlanner(DefaultLoadPlanner):
    """Removes this node's copy of the checkpoint after the first item was read."""

    def __init__(self, context: Context, checkpoint_id: str) -> None:
        super().__init__()
        self._path = context.root / checkpoint_id

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        super().commit_tensor(read_item, tensor)


def load_while_removed(context: Context, checkpoint_id: str, count: int, ranks: int) -> bool:
    """Loads all pieces. On rank 0's node the checkpoint is removed after the first one. Returns whether all bits are
    right.
    """
    wanted = {name: tensor for rank in range(ranks) for name, tensor in pieces(rank, count, 1).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    planner = RemovingPlanner(context, checkpoint_id) if context.rank == 0 else DefaultLoadPlanner()
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=context.reader(), planner=planner)
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def save_with_wrong_clocks(context: Context, kinds: list[str], checkpoint_id: str, seed: int, shift_h: float) -> Any:
    """A save on nodes whose clocks are hours apart. Rank 0's clock is shifted by `shift_h`."""
    now = time.time()
    with mock.patch("time.time", return_value=now + (shift_h - 5 * context.rank) * HOURS):
        return save(context, kinds, checkpoint_id, seed)


def save_many(context: Context, /, kinds: list[str], checkpoint_ids: list[str], seed: int, **writer: Any) -> list[Any]:
    """Saves under each id. Returns the names of the errors of refused or overtaken saves."""
    outcomes: list[Any] = []
    for checkpoint_id in checkpoint_ids:
        dist.barrier()
        try:
            outcomes.append(save(context, kinds, checkpoint_id, seed, **writer))
        except (CheckpointException, ReplicatedCkptError) as exc:
            outcomes.append(failure(exc)["types"])
    return outcomes
