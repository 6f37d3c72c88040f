"""Staging from a GPU: into memory that is pinned once, on a separate stream, and optionally overlapped with training."""

import logging
from concurrent.futures import Future
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.staging.segment import PinnedPages, Segment, drop_idle_segments
from replicated_ckpt.dcp.staging.stager import Stager

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
TIMEOUT_S = 60.0
BUSY_CYCLES = 1_000_000_000
"""About 0.6 s of a GPU."""


def save(state: dict[str, Any], name: str, writer: ReplicatedWriter) -> "Future[Any]":
    future = dcp.async_save(state, checkpoint_id=name, storage_writer=writer)
    assert isinstance(future, Future)
    return future


def loaded(root: Path, name: str, like: torch.Tensor) -> torch.Tensor:
    target = {"weights": torch.empty_like(like)}
    dcp.load(target, checkpoint_id=name, storage_reader=ReplicatedReader(root))
    return target["weights"]


def keep_gpu_busy(cycles: int = BUSY_CYCLES) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def is_gpu_idle() -> bool:
    return bool(torch.cuda.current_stream().query())


def test_a_copy_lies_in_pinned_memory() -> None:
    """Copies are in pinned memory, also after the segment has grown, and in repeated saves."""
    drop_idle_segments()
    stager = Stager()
    for size in (1 << 20, 1 << 20, 1 << 22):
        weights = torch.rand(size, device="cuda")
        staged = stager.stage({"weights": weights})
        assert staged["weights"].is_pinned()
        assert staged["weights"].device.type == "cpu"
        assert torch.equal(staged["weights"], weights.cpu())
        del staged


def test_a_state_on_the_host_is_not_pinned() -> None:
    """A state on the CPU is not staged to pinned memory."""
    drop_idle_segments()
    assert not Stager().stage({"weights": torch.rand(1 << 20)})["weights"].is_pinned()


def test_memory_is_unregistered_before_it_is_pinned_again(caplog: pytest.LogCaptureFixture) -> None:
    """Pinned memory is unregistered before the segment grows and is pinned again. A second registration of pinned
    memory raises MemoryError.
    """
    segment = Segment(1 << 21)
    segment.pin()
    view = memoryview(segment._memory)
    with pytest.raises(MemoryError, match="does not pin 2,097,152 bytes"):
        PinnedPages(view)
    assert float(torch.ones(3, device="cuda").sum()) == 3.0, "a later kernel does not raise the refusal"
    view.release()
    segment.grow(1 << 22)
    with caplog.at_level(logging.WARNING):
        segment.pin()
        segment.pin()
    assert not caplog.records


def test_a_save_waits_for_the_copy(tmp_path: Path) -> None:
    """By default the state may change on any stream once `async_save` has returned."""
    weights = torch.full((1 << 22,), 1.0, device="cuda")
    writer = ReplicatedWriter(tmp_path, copies=1)
    keep_gpu_busy()
    future = save({"weights": weights}, "step-1", writer)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        weights.fill_(2.0)
    future.result(TIMEOUT_S)
    assert bool((loaded(tmp_path, "step-1", weights) == 1.0).all())


def test_an_overlapped_save_waits_for_nothing(tmp_path: Path) -> None:
    """An overlapped save does not wait for the GPU. Changes that were queued before the save are in the copy. Changes
    after `hold_until_copied` are not.
    """
    weights = torch.full((1 << 22,), 1.0, device="cuda")
    writer = ReplicatedWriter(tmp_path, copies=1, overlap=True)
    save({"weights": weights}, "step-1", writer).result(TIMEOUT_S)  # takes and pins the memory
    keep_gpu_busy()
    weights.fill_(3.0)
    future = save({"weights": weights}, "step-2", writer)
    writer.hold_until_copied()
    weights.fill_(4.0)
    assert not is_gpu_idle(), "the save has waited for the GPU"
    future.result(TIMEOUT_S)
    assert bool((loaded(tmp_path, "step-2", weights) == 3.0).all())


def test_a_state_that_is_dropped_in_an_overlapped_save_is_kept_until_copied(tmp_path: Path) -> None:
    writer = ReplicatedWriter(tmp_path, copies=1, overlap=True)
    weights = torch.full((1 << 24,), 5.0, device="cuda")
    save({"weights": weights}, "step-0", writer).result(TIMEOUT_S)  # takes and pins the memory
    place = weights.data_ptr()
    keep_gpu_busy()
    future = save({"weights": weights}, "step-1", writer)
    del weights
    others = [torch.zeros(1 << 24, device="cuda") for _ in range(4)]
    assert place not in [other.data_ptr() for other in others]
    future.result(TIMEOUT_S)
    assert bool((loaded(tmp_path, "step-1", others[0]) == 5.0).all())


def test_a_manager_overlaps_both_tiers(tmp_path: Path) -> None:
    """The memory tier and the disk share one overlapped copy of the state."""
    weights = torch.full((1 << 22,), 1.0, device="cuda")
    state: dict[str, Any] = {"weights": weights, "step": 1}
    options = {"overlap": True}
    with (
        TemporaryDirectory(dir="/dev/shm") as memory,
        CheckpointManager(tmp_path, copies=1, memory=memory, disk_every=1, writer_options=options) as manager,
    ):
        for step in (1, 2):
            keep_gpu_busy(BUSY_CYCLES // 4)
            manager.async_save(step, state)
            manager.hold_until_copied()
            weights.fill_(step + 1.0)
        manager.wait()
        assert manager.restore(state) == 2
    assert bool((weights == 2.0).all())
