"""Steps: a state with large parts is saved, and one part is loaded."""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import RankState
from tests.steps.context import Context
from tests.steps.state import failure

WORDS = 200_000
_SEED = 7


def _values(context: Context, save: int) -> dict[str, Any]:
    """Each rank's own tensors, with different values in each save. The optimizer has twice as many bytes as the model."""
    random = torch.Generator().manual_seed(_SEED + 100 * save + context.rank)
    weight, moment = torch.rand(WORDS, generator=random), torch.rand(2 * WORDS, generator=random)
    return {
        "model": {f"weight{context.rank}": weight},
        "optim": {f"moment{context.rank}": moment, "groups": [{"lr": 0.1}]},
        "step": save,
    }


def save(context: Context, /, name: str, number: int, *, is_async: bool = False, **writer: Any) -> list[str]:
    """The files of this rank."""
    used = context.writer(**writer)
    state = {**_values(context, number), "own": RankState()}
    if is_async:
        dcp.async_save(state, checkpoint_id=name, storage_writer=used).result(timeout=60)  # type: ignore[union-attr]
    else:
        dcp.save(state, checkpoint_id=name, storage_writer=used)
    assert used.last_save is not None
    assert used.last_save.bytes_written > 12 * WORDS
    assert used.last_save.copies_made == 2
    return list(used.last_save.shards)


def load(context: Context, /, name: str, number: int, parts: tuple[str, ...], *, is_stock: bool = False) -> Any:
    """Loads some parts of the states of all ranks. Returns the differences from the saved values, or the error.

    `is_stock`: stock torch loads from this node's directory.
    """
    wanted = {part: _values(context, number)[part] for part in parts}
    found = {part: _values(context, number + 1)[part] for part in parts}
    reader: Any = dcp.FileSystemReader(context.root / name) if is_stock else context.reader()
    try:
        dcp.load(found, checkpoint_id=str(context.root / name) if is_stock else name, storage_reader=reader)
    except CheckpointException as exc:
        return failure(exc)
    return [part for part in parts if not _is_same(found[part], wanted[part])]


def _is_same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, dict):
        return bool(found == wanted)
    return all(
        torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        for key, value in wanted.items()
    )
