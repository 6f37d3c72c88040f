"""Ways to save and load a state: stock torch and ours, in directories and in buckets."""

import ctypes
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from benchmarks.rank.state import State
from replicated_ckpt import CachedSavePlanner, ReplicatedReader, ReplicatedWriter, Retention
from tests.steps.context import Context

_SETTLE_TIMEOUT_S = 90.0
_POLL_S = 0.01
_libc = ctypes.CDLL(None, use_errno=True)


class Way(Protocol):
    """How one contender saves and loads. Each rank creates it once and uses it in all rounds."""

    def save(self, state: State, name: str) -> None: ...

    def settle(self, name: str) -> None:
        """Waits for the work that the save has left."""

    def load(self, state: State, name: str) -> None: ...

    def cool(self, name: str) -> None:
        """Drops the checkpoint's files from the page cache of this machine."""

    def remove(self, name: str) -> None:
        """Called on every rank, before a barrier."""


class Stock:
    """Torch's FileSystemWriter and FileSystemReader with all defaults, on a directory that all ranks share."""

    def __init__(self, context: Context) -> None:
        self._base = shared_directory(context)

    def save(self, state: State, name: str) -> None:
        dcp.save(state.values, storage_writer=dcp.FileSystemWriter(self._base / name))

    def settle(self, name: str) -> None:
        """Nothing to wait for: the files are fsynced when `save` returns."""

    def load(self, state: State, name: str) -> None:
        dcp.load(state.values, storage_reader=dcp.FileSystemReader(self._base / name))

    def cool(self, name: str) -> None:
        cool_files(self._base / name)

    def remove(self, name: str) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(self._base / name)


class Ours:
    """ReplicatedWriter and ReplicatedReader. `options` are the writer's. Without `planner` torch's is used."""

    def __init__(self, context: Context, options: Mapping[str, Any], planner: CachedSavePlanner | None = None) -> None:
        self._context = context
        self._planner = planner
        self._copies = min(int(options.get("copies", 2)), context_nodes(context))
        self._writer = ReplicatedWriter(context.root, **options)
        self.remote_bytes = 0  # bytes from peers in this rank's last load

    def save(self, state: State, name: str) -> None:
        dcp.save(state.values, checkpoint_id=name, storage_writer=self._writer, planner=self._planner)

    def settle(self, name: str) -> None:
        """Waits until enough nodes hold every shard. With `ack="local"` the agents make the copies after the save."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while self._fewest_copies(name) < self._copies:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} has not {self._copies} copies after {_SETTLE_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def _fewest_copies(self, name: str) -> int:
        held = [{path.name for path in (root / name).glob("*.distcp")} for root in self._context.roots]
        return min(sum(shard in names for names in held) for shard in set.union(*held))

    def load(self, state: State, name: str) -> None:
        reader = ReplicatedReader(self._context.root)
        dcp.load(state.values, checkpoint_id=name, storage_reader=reader)
        assert reader.last_load is not None
        self.remote_bytes = reader.last_load.bytes_peer

    def cool(self, name: str) -> None:
        cool_files(self._context.root / name)

    def remove(self, name: str) -> None:
        if is_first_of_node():
            shutil.rmtree(self._context.root / name)


class OursKeepingOne(Ours):
    """A job with `keep_last=1`, as CheckpointManager saves: with cached plans and recycled files."""

    def __init__(self, context: Context, options: Mapping[str, Any]) -> None:
        super().__init__(context, {**options, "retention": Retention(keep_last=1)}, CachedSavePlanner())

    def settle(self, name: str) -> None:
        """Also waits until the previous checkpoint is removed."""
        super().settle(name)
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while len(list(self._context.root.glob("*/.metadata"))) > 1 or any(self._context.root.glob(".trash/*")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._context.root} has another than {name} after {_SETTLE_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    def remove(self, name: str) -> None:
        """Not needed: the next save retires the checkpoint."""


class StockBucket:
    """Torch's FsspecWriter and FsspecReader."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url, self._options = url, dict(storage_options)

    def save(self, state: State, name: str) -> None:
        dcp.save(state.values, storage_writer=FsspecWriter(f"{self._url}/{name}", **self._options))

    def settle(self, name: str) -> None:
        """Nothing to wait for: the checkpoint is in the bucket when `save` returns."""

    def load(self, state: State, name: str) -> None:
        dcp.load(state.values, storage_reader=FsspecReader(f"{self._url}/{name}", **self._options))

    def cool(self, name: str) -> None:
        """Not possible: the cache is the server's."""

    def remove(self, name: str) -> None:
        if dist.get_rank() == 0:
            import fsspec

            fsspec.filesystem("s3", **self._options).rm(f"{self._url}/{name}", recursive=True)


class OursBucket(Ours):
    """Ours with a bucket: saves to the nodes and the bucket, loads from the bucket alone."""

    def __init__(
        self, context: Context, url: str, storage_options: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        super().__init__(context, {"object_store": url, "storage_options": storage_options, **options})
        self._there = StockBucket(url, storage_options)
        self._where: dict[str, Any] = {"object_store": url, "storage_options": storage_options}

    def load(self, state: State, name: str) -> None:
        reader = ReplicatedReader(process_group=dist.group.WORLD, **self._where)
        dcp.load(state.values, checkpoint_id=name, storage_reader=reader)

    def remove(self, name: str) -> None:
        super().remove(name)
        self._there.remove(name)


def shared_directory(context: Context) -> Path:
    """A directory beside the nodes' stores, and so on the same medium."""
    return context.roots[0].parent / "shared"


def context_nodes(context: Context) -> int:
    """The number of nodes in this world."""
    return context.world_size // int(os.environ["LOCAL_WORLD_SIZE"])


def is_first_of_node() -> bool:
    return os.environ["LOCAL_RANK"] == "0"


def agent_root(context: Context) -> Path | None:
    """The store whose agent this rank measures, or None."""
    return context.root if is_first_of_node() else None


def write_back(folder: Path) -> None:
    """Waits until the file system of this folder has written all its data."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if _libc.syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), f"syncfs {folder}")
    finally:
        os.close(fd)


def cool_files(folder: Path) -> None:
    """Drops these files from the page cache, after they are written. Needs no privilege and affects no other files."""
    for path in folder.rglob("*.distcp"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
