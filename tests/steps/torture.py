"""Steps of the torture with real processes: one save, one load, and the result."""

import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import Retention
from replicated_ckpt.errors import ReplicatedCkptError, ReplicatedCkptWarning
from tests.fault.torture.contents import contents, part_of
from tests.steps.context import Context
from tests.steps.state import failure


def save(
    context: Context,
    checkpoint_id: str,
    attempt: int,
    *,
    overwrite: bool,
    copies: int,
    keep_last: int | None,
    object_store: str | None,
    hands_over: bool = False,
) -> dict[str, Any]:
    """Saves the state of this attempt, every second time in the background. Returns the number of copies made, or the
    error.

    `hands_over`: always in the background.
    """
    state = part_of(contents(attempt, context.world_size), context.rank)
    retention = None if keep_last is None else Retention(keep_last=keep_last)
    writer = context.writer(overwrite=overwrite, copies=copies, retention=retention, object_store=object_store)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ReplicatedCkptWarning)
        try:
            if attempt % 2 and not hands_over:
                dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
            else:
                future: Any = dcp.async_save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
                future.result()
        except (CheckpointException, ReplicatedCkptError) as exc:
            return failure(exc)
    assert writer.last_save is not None
    said = [str(entry.message) for entry in caught if issubclass(entry.category, ReplicatedCkptWarning)]
    return {"copies_made": writer.last_save.copies_made, "warnings": said}


def save_with_stock_torch(context: Context, checkpoint_id: str, attempt: int) -> None:
    """Saves with torch's own writer, with a disk for each node."""
    state = part_of(contents(attempt, context.world_size), context.rank)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(context.root / checkpoint_id))


def load(context: Context, checkpoint_id: str, *, object_store: str | None) -> dict[str, Any]:
    """Loads the attempt's number, then its state. Returns whether every bit belongs to that attempt, or the error."""
    reader = context.reader(object_store=object_store)
    which = {"attempt": torch.zeros(2, dtype=torch.int64)}
    try:
        dcp.load(which, checkpoint_id=checkpoint_id, storage_reader=reader)
        attempt, ranks = which["attempt"].tolist()
        wanted = contents(attempt, ranks)
        found = {name: torch.full_like(value, -1) for name, value in wanted.items()}
        assert reader.last_load is not None
        dcp.load(found, checkpoint_id=reader.last_load.checkpoint_id, storage_reader=reader)
    except (CheckpointException, ReplicatedCkptError) as exc:
        return failure(exc)
    again = int(found["attempt"][0])
    wanted = wanted if again == attempt else contents(again, int(found["attempt"][1]))
    same = all(torch.equal(found[name], wanted[name]) for name in wanted)
    return {"attempt": again, "ranks": int(found["attempt"][1]), "same": same}
