"""Steps: save and restore each rank's own state."""

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from replicated_ckpt import CheckpointManager, RankState, ReplayedLoader, WorldSizeChanged
from tests.steps.context import Context


def _loader() -> ReplayedLoader:
    return ReplayedLoader(DataLoader(TensorDataset(torch.arange(64)), batch_size=2, shuffle=True))


def save_own(context: Context, batches: int) -> dict[str, Any]:
    """Seeds and reads by rank, and saves. Returns the random numbers and batches after the save."""
    torch.manual_seed(context.rank)
    loader = _loader()
    reading = iter(loader)
    for _ in range(batches + context.rank):
        next(reading)
    with CheckpointManager(context.root) as manager:
        manager.save(1, {"rank": RankState(data=loader), "x": torch.ones(4)})
    return {"drawn": torch.rand(1).item(), "read": next(reading)[0].tolist()}


def restore_own(context: Context, /, **rule: Any) -> dict[str, Any]:
    """Returns the same after a restore, or the rank numbers in the error."""
    torch.manual_seed(99)
    loader, x = _loader(), torch.zeros(4)
    with CheckpointManager(context.root) as manager:
        try:
            manager.restore({"rank": RankState(data=loader, **rule), "x": x})
        except WorldSizeChanged as exc:
            return {"saved": exc.saved, "now": exc.now, "x": x.tolist()}
    drawn = torch.rand(1).item()
    return {"drawn": drawn, "read": next(iter(loader))[0].tolist()}
