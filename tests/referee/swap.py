"""Our writer and reader under the names and with the arguments of stock torch's classes."""

import importlib
import os
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from tests.referee.verdict import OURS, STOCK

ROOTS_ENV = "REFEREE_ROOTS"
USED_ENV = "REFEREE_USED"
MODE_ENV = "REFEREE_MODE"
SCATTERED = "scattered"
RANKS_PER_NODE = 2

PathLike = str | os.PathLike[str]
TUNING = {"single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict"}


def own_root() -> Path:
    """One store for all ranks or, in scattered mode, one for each pair of ranks, like nodes with their own disks.

    The first node's root is the folder of temporary directories, so that a test finds the checkpoint at its own path.
    """
    is_scattered = os.environ[MODE_ENV] == SCATTERED and dist.is_initialized()
    node = dist.get_rank() // RANKS_PER_NODE if is_scattered else 0
    return Path(os.environ[ROOTS_ENV]) / f"node{node}" if node else Path(tempfile.gettempdir())


def name_of(path: PathLike) -> str:
    """The checkpoint id for a test's path, the same on all ranks."""
    absolute, temporary = Path(path).absolute(), Path(tempfile.gettempdir())
    return str(absolute.relative_to(temporary) if absolute.is_relative_to(temporary) else absolute).strip("/")


def note_use(storage: str = OURS) -> None:
    """Records that the current test used `storage`."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    with Path(os.environ[USED_ENV]).open("a") as file:
        file.write(f"{storage} {test}\n")


def note_stock(owner: Any, name: str) -> None:
    """Makes stock's method record each call: a test that uses it shows nothing about our storage."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_use(STOCK)
        return method(self, *args, **kwargs)

    setattr(owner, name, noted)


class SwappedWriter(ReplicatedWriter):
    """`path` is the checkpoint's name. Replaces an existing checkpoint by default. Ignores options that only tune
    stock's writer.
    """

    def __init__(self, path: PathLike, *args: Any, overwrite: bool = True, **options: Any) -> None:
        unknown = set(options) - TUNING
        if unknown or len(args) > len(TUNING):
            raise NotImplementedError(f"ReplicatedWriter has no {sorted(unknown)}")
        super().__init__(own_root(), overwrite=overwrite)
        self._path = path

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self._path = checkpoint_id
        super().reset(name_of(self._path))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        note_use()
        super().reset(name_of(self._path))
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "path": self._path}

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        path = arguments.pop("path")
        super().__setstate__(arguments)
        self._path = path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)


class SwappedReader(ReplicatedReader):
    """`path` is the checkpoint's name."""

    def __init__(self, path: PathLike, *args: Any, **options: Any) -> None:
        if args or options:
            raise NotImplementedError(f"ReplicatedReader has no {args} {options}")
        super().__init__(own_root(), trust_pickles=True)  # as stock does: torch's tests save objects of any class
        self._path = path
        self._is_named = False

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        if checkpoint_id is not None:
            self._path = checkpoint_id
        self._is_named = True
        super().reset(name_of(self._path))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        note_use()
        if not self._is_named:
            self.reset()
        self._is_named = "rank" in kwargs
        return super().read_metadata(*args, **kwargs)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)


class SwappedFsspecWriter(SwappedWriter):
    """Overrides `validate_checkpoint_id`, because a test patches that of the base class."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)


class SwappedFsspecReader(SwappedReader):
    """As `SwappedFsspecWriter`."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def install() -> None:
    """Replaces the classes in every module that has imported one by now. Stock's own subclasses keep their base."""
    private = "torch.distributed.checkpoint."
    fsspec = importlib.import_module(f"{private}_fsspec_filesystem")
    base_of_writers = filesystem.FileSystemWriter.__mro__[1]  # of the one for fsspec, too
    for stock, calls in (
        (base_of_writers, ("write_data", "finish")),
        (filesystem.FileSystemReader, ("read_metadata", "read_data")),
    ):
        for call in calls:
            note_stock(stock, call)
    for module in (dcp, filesystem, importlib.import_module(f"{private}_storage_utils")):
        setattr(module, "FileSystemWriter", SwappedWriter)  # noqa: B010 - a module's classes are final to mypy
        setattr(module, "FileSystemReader", SwappedReader)  # noqa: B010
    fsspec.FsspecWriter = SwappedFsspecWriter  # type: ignore[attr-defined]
    fsspec.FsspecReader = SwappedFsspecReader  # type: ignore[attr-defined]
