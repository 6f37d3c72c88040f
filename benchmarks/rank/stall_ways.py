"""Ways to save in a training loop: stock torch's and ours, with saves that continue in the background."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from benchmarks.rank.state import State
from benchmarks.rank.ways import Ours, Stock, shared_directory
from replicated_ckpt import CachedSavePlanner, Retention
from tests.steps.context import Context

_STAGERS_LAST = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""The DefaultStager of torch 2.11 raises KeyError at its second save; that of 2.13 works for many saves."""


class NoSaves:
    """Training without saves."""

    def finish(self, name: str) -> None:
        """Nothing to wait for."""
        del name

    def allow_change(self) -> None:
        """Nothing to wait for: no copy is being made."""

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        del state, name
        return None


class StockSync(Stock):
    """FileSystemWriter. Training waits for the whole save."""

    def finish(self, name: str) -> None:
        """Nothing to wait for: a save ends with its future."""

    def allow_change(self) -> None:
        """Nothing to wait for: `begin` returns after the state is copied."""

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        self.save(state, name)
        return None


class StockAsync(StockSync):
    """FileSystemWriter in `dcp.async_save`'s thread. The writer stages by itself, into new memory for each copy."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._folder = shared_directory(context)

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        return future_of(dcp.async_save(state.values, storage_writer=dcp.FileSystemWriter(self._folder / name)))


class StockStaged(StockAsync):
    """With torch's DefaultStager, which reuses its copies' memory. Changes wait for the stager's thread."""

    def __init__(self, context: Context, options: StagingOptions) -> None:
        super().__init__(context)
        self._options = options
        self._stager = DefaultStager(options)
        self._copied: Future[Any] | None = None

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        writer = dcp.FileSystemWriter(self._folder / name)
        answer = dcp.async_save(state.values, storage_writer=writer, async_stager=self._stager)
        if not _STAGERS_LAST:
            self._stager = DefaultStager(self._options)
        if not isinstance(answer, AsyncSaveResponse):
            return answer
        self._copied = answer.staging_completion
        return answer.upload_completion

    def allow_change(self) -> None:
        """Waits for the copy before training changes the state."""
        if self._copied is not None:
            self._copied.result()


class OursSync(Ours):
    """ReplicatedWriter. Training waits for the whole save."""

    def finish(self, name: str) -> None:
        """Waits for the work that agents have left, such as the copies of `ack="local"`."""
        self._writer.wait(ack="local")
        self.settle(name)

    def allow_change(self) -> None:
        """Lets the GPU wait for the copy, if necessary."""
        self._writer.hold_until_copied()

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        self.save(state, name)
        return None


class OursAsync(OursSync):
    """ReplicatedWriter in `dcp.async_save`'s thread, with no other argument."""

    def begin(self, state: State, name: str) -> "Future[Any] | None":
        return future_of(
            dcp.async_save(state.values, checkpoint_id=name, storage_writer=self._writer, planner=self._planner)
        )


class OursAsManaged(OursAsync):
    """As CheckpointManager saves with `keep_last=1`: with cached plans and recycled files."""

    def __init__(self, context: Context, options: Mapping[str, Any]) -> None:
        super().__init__(context, {**options, "retention": Retention(keep_last=1)}, CachedSavePlanner())

    def remove(self, name: str) -> None:
        """Not needed: a later save retires the checkpoint."""


Contender = NoSaves | StockSync | OursSync


def future_of(answer: Any) -> "Future[Any]":
    assert isinstance(answer, Future)
    return answer


_STOCK: Mapping[str, Callable[[Context], Contender]] = {
    "none": lambda _: NoSaves(),
    "stock sync": StockSync,
    "stock async": StockAsync,
    "stock staged": lambda context: StockStaged(context, StagingOptions(False, False, False, False)),
    "stock shared": lambda context: StockStaged(context, StagingOptions(False, True, False, False)),
    "stock pinned": lambda context: StockStaged(context, StagingOptions(True, True, False, True)),
    "stock overlapped": lambda context: StockStaged(context, StagingOptions()),
}
_OURS = {"ours sync": OursSync, "ours async": OursAsync, "ours as managed": OursAsManaged}


def contender_of(context: Context, kind: str, options: Mapping[str, Any]) -> Contender:
    return _OURS[kind](context, options) if kind in _OURS else _STOCK[kind](context)
