"""A checkpoint of torch's own writer whose files are spread over several stores."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader
from replicated_ckpt.stores.local.store import LocalStore

ID = "run/step-10"


def state(seed: int = 1) -> dict[str, Any]:
    return {f"t{n}": torch.arange(40_000, dtype=torch.int64) * (seed + n) for n in range(4)} | {"step": seed}


def scattered(
    stores: Sequence[LocalStore], folder: Path, *, metadata_on: int = 0, checkpoint_id: str = ID, seed: int = 1
) -> Mapping[str, bytes]:
    """Saves with torch's own writer and spreads the shards over the stores, `.metadata` into one. Returns every file."""
    source = folder / "by-stock-torch"
    dcp.save(state(seed), storage_writer=dcp.FileSystemWriter(source, thread_count=4), no_dist=True)
    contents = {path.name: path.read_bytes() for path in source.iterdir()}
    assert len(contents) == 5
    for index, path in enumerate(sorted(source.iterdir())):
        store = stores[metadata_on if path.name == ".metadata" else index % len(stores)]
        (store.root / checkpoint_id).mkdir(parents=True, exist_ok=True)
        shutil.move(path, store.root / checkpoint_id / path.name)
    return contents


def loads(store: LocalStore, checkpoint_id: str = ID, seed: int = 1) -> bool:
    """Whether one process with this store loads every value of `state(seed)`."""
    return _gives(ReplicatedReader(store.root), checkpoint_id, seed)


def _gives(reader: dcp.StorageReader, checkpoint_id: str | None, seed: int) -> bool:
    found, expected = state(99), state(seed)
    dcp.load(found, checkpoint_id=checkpoint_id, storage_reader=reader, no_dist=True)
    tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    return found["step"] == seed and all(bool((found[name] == expected[name]).all()) for name in tensors)
