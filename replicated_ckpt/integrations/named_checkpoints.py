"""Checkpoints under names that a framework chooses: saved, loaded and removed by all ranks of a job, over one group."""

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlanner

from replicated_ckpt.core.layout import LATEST
from replicated_ckpt.dcp.c10d.lent_group import LentGroup, borrow_group
from replicated_ckpt.dcp.load.reader import ReplicatedReader
from replicated_ckpt.dcp.planning.cached_planner import CachedSavePlanner
from replicated_ckpt.dcp.rank.planner import RankStatePlanner
from replicated_ckpt.dcp.removal import delete_everywhere
from replicated_ckpt.dcp.save.writer import ReplicatedWriter
from replicated_ckpt.errors import ManifestInvalid

_OF_READER_TOO = ("object_store", "storage_options")


class NamedCheckpoints:
    """One store of a job. Every method is called by all ranks, in the same order, once there is a process group if any.

    Args:
        root: this node's store.
        options: what ReplicatedWriter takes; of them, the bucket is the reader's, too.
    """

    def __init__(self, root: str | Path, options: Mapping[str, Any] | None = None) -> None:
        given = {"overwrite": True, **(options or {})}
        self._writer = ReplicatedWriter(root, **given)
        self._planner = CachedSavePlanner()
        self._lent: LentGroup | None = borrow_group()
        shared = {name: given[name] for name in _OF_READER_TOO if name in given}
        self._reader = ReplicatedReader(root, process_group=self._group, expect_partial=True, **shared)

    @property
    def _group(self) -> Any:
        return None if self._lent is None else self._lent.group

    @contextlib.contextmanager
    def _use_group(self) -> Iterator[Any]:
        with contextlib.nullcontext() if self._lent is None else self._lent.use():
            yield self._group

    def save(self, checkpoint_id: str, state: dict[str, Any], notes: Mapping[str, Any] | None = None) -> None:
        """Returns when the checkpoint is committed. One of that name stays loadable until then."""
        self._writer.note(notes or {})
        with self._use_group() as group:
            dcp.save(
                state,
                checkpoint_id=checkpoint_id,
                storage_writer=self._writer,
                planner=self._planner,
                process_group=group,
                no_dist=group is None,
            )

    def save_later(self, checkpoint_id: str, state: dict[str, Any]) -> Future[Any]:
        """Copies the state and returns; the future is done when the checkpoint is committed. One at a time."""
        # No stager is given, so this is a future and no AsyncSaveResponse.
        return dcp.async_save(  # type: ignore[return-value]
            state,
            checkpoint_id=checkpoint_id,
            storage_writer=self._writer,
            planner=self._planner,
            process_group=self._group,
        )

    def load(self, checkpoint_id: str, state: dict[str, Any], planner: LoadPlanner | None = None) -> str:
        """Fills `state`; the name of what was loaded, where "latest" was asked for."""
        with self._use_group() as group:
            dcp.load(
                state,
                checkpoint_id=checkpoint_id,
                storage_reader=self._reader,
                planner=planner or RankStatePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        assert self._reader.last_load is not None
        return self._reader.last_load.checkpoint_id

    def find(self, name: str) -> str | None:
        """The checkpoint of this name, or the newest whole one for "latest"; None: there is none."""
        if name == LATEST:
            return self._reader.latest()
        return name if self._reader.exists(name) else None

    def delete(self, checkpoint_id: str) -> bool:
        """Removes it from every node and the bucket; False: there is none."""
        with self._use_group() as group:
            return delete_everywhere(self._reader, self._writer.store, group, checkpoint_id)

    def close(self) -> None:
        """Gives the group to the next who needs one."""
        if self._lent is not None:
            self._lent.close()


def collect_files(directory: Path) -> dict[str, bytes]:
    """What lies in a directory and below it, by path from there."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): file.read_bytes() for file in files}


def put_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes what `collect_files` has read, as a checkpoint has it.

    Raises:
        ManifestInvalid: a path leads out of the directory; nothing was written.
    """
    for path in files:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ManifestInvalid(
                f"The checkpoint has a file {path!r}, which would lie outside of the directory of its files.",
                "No save makes such a checkpoint: find out who can write to it, and load another one.",
            )
    for path, content in files.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
