"""Steps: stock torch without this package."""

import torch.distributed.checkpoint as dcp

from tests.harness.cluster import Digests
from tests.steps.context import Context
from tests.steps.state import build_all, digests_of


def save(context: Context, kinds: list[str], folder: str, seed: int = 0) -> Digests:
    """Saves with torch's own FileSystemWriter into one directory, with two threads: two files for each rank."""
    states = build_all(context, kinds, seed)
    dcp.save(dict(states), storage_writer=dcp.FileSystemWriter(folder, thread_count=2))
    return digests_of(states)
