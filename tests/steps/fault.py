"""Steps: what remains of a killed save, and whether training continues from it."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt.core.layout import STAGING_DIR
from replicated_ckpt.errors import ReplicatedCkptError
from tests.steps.context import Context
from tests.steps.peers import pieces
from tests.steps.state import OTHER_SEED, build_all, digests_of, failure

NEXT_SEED = 3
_POLL_S = 0.05


def seed_of(context: Context, kinds: list[str], checkpoint_id: str, seeds: list[int]) -> Any:
    """Loads. Returns the one of `seeds` from which every value comes bit for bit, or "no seed", or the error."""
    states = build_all(context, kinds, OTHER_SEED)
    try:
        dcp.load(dict(states), checkpoint_id=checkpoint_id, storage_reader=context.reader())
    except (CheckpointException, ReplicatedCkptError) as exc:
        context.kept[checkpoint_id] = None
        return failure(exc)["types"]
    found = digests_of(states)
    context.kept[checkpoint_id] = found
    return next((seed for seed in seeds if digests_of(build_all(context, kinds, seed)) == found), "no seed")


def save_next(context: Context, /, kinds: list[str], attempted: str, otherwise: str, **writer: Any) -> str:
    """Continues like a trainer: saves under the id of the killed save if that could not be loaded, else under
    `otherwise`.
    """
    checkpoint_id = attempted if context.kept[attempted] is None else otherwise
    states = build_all(context, kinds, NEXT_SEED)
    dcp.save(dict(states), checkpoint_id=checkpoint_id, storage_writer=context.writer(**writer))
    context.kept["next"] = checkpoint_id
    return checkpoint_id


def seed_of_next(context: Context, kinds: list[str], seeds: list[int]) -> Any:
    """Like `seed_of`, for the checkpoint of `save_next`."""
    return seed_of(context, kinds, context.kept["next"], seeds)


def litter(context: Context, within_s: float) -> list[str]:
    """The contents of this node's `.staging`, `.trash` and `.incoming`, and all partial files. Waits until there are
    none.
    """
    deadline = time.monotonic() + within_s
    while (left := _litter_of(context.root)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _litter_of(root: Path) -> list[str]:
    found = [*(root / STAGING_DIR).rglob("*"), *root.rglob(".gone.*")]
    found += [path for path in root.rglob("*") if path.suffix in {".part", ".tmp"}]
    return sorted({str(path.relative_to(root)) for path in found})


def save_uneven(context: Context, checkpoint_id: str, counts: list[int]) -> dict[str, Any]:
    """Each rank saves its number of pieces of one MiB. Returns the number of copies made, or the error."""
    writer = context.writer()
    state = pieces(context.rank, counts[context.rank], 1)
    try:
        dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=writer)
    except (CheckpointException, ReplicatedCkptError) as exc:
        return failure(exc)
    assert writer.last_save is not None
    return {"copies_made": writer.last_save.copies_made}


def load_uneven(context: Context, checkpoint_id: str, counts: list[int]) -> bool:
    """Whether all pieces of all ranks load bit for bit."""
    wanted = {name: tensor for rank, count in enumerate(counts) for name, tensor in pieces(rank, count, 1).items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=context.reader())
    return all(torch.equal(found[name], wanted[name]) for name in wanted)
