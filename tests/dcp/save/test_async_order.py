"""Saves of one or several writers never mix, whatever their states contain and whichever call of DCP makes them."""

import gc
import math
import queue
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.checkpoint import DefaultSavePlanner, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, ReplicatedWriter
from replicated_ckpt.dcp.c10d.world import watch_group
from replicated_ckpt.dcp.runtime.user_code import describe_failure
from replicated_ckpt.dcp.staging import segment, stager
from replicated_ckpt.dcp.staging.segment import StagingRefused, lease_segment
from replicated_ckpt.dcp.staging.state_copy import StateCopy
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError, StoreUnavailable
from tests.dcp.save.test_async_staging import TIMEOUT_S, Gated, count_descriptors, loaded, start, verified
from tests.gloo import group_of_one

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


@pytest.fixture(autouse=True)
def _without_idle_segments() -> Iterator[None]:
    segment.drop_idle_segments()
    yield
    segment.drop_idle_segments()


@pytest.mark.parametrize("has_tensors", [True, False], ids=["no memory for a copy", "no tensors to copy"])
def test_a_second_save_waits_although_the_first_has_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tensors: bool
) -> None:
    """The first save has no copy of its state and has not ended: a second save of the same writer waits."""
    monkeypatch.setattr(stager, "share_of_rank", lambda: 1000 if has_tensors else 1 << 30)
    gate, saved = threading.Event(), list[str]()

    def on_save(report: Any) -> None:
        saved.append(report.checkpoint_id)
        assert gate.wait(TIMEOUT_S)

    writer, futures = ReplicatedWriter(tmp_path, on_save=on_save), list[Future[Any]]()
    state: dict[str, Any] = {"t": torch.full((5000,), 1.0)} if has_tensors else {"step": 1}
    futures.append(start(state, writer, "step-1"))
    thread = threading.Thread(target=lambda: futures.append(start(state, writer, "step-2")))
    thread.start()
    thread.join(1.0)
    assert thread.is_alive()
    assert saved == ["step-1"]
    gate.set()
    thread.join(TIMEOUT_S)
    for future in futures:
        future.result(TIMEOUT_S)
    assert saved == ["step-1", "step-2"]
    for step in saved:
        verified(tmp_path, step)


def test_a_synchronous_save_waits_for_the_asynchronous_one(tmp_path: Path) -> None:
    """A synchronous save waits for the writer's asynchronous one. Each checkpoint has its own state."""
    writer, state, planner = ReplicatedWriter(tmp_path), {"t": torch.full((1000,), 1.0)}, Gated()
    first = start(state, writer, "step-1", planner)
    state["t"].fill_(2.0)
    threading.Timer(0.5, planner.gate.set).start()
    dcp.save(state, checkpoint_id="last", storage_writer=writer)
    assert first.done()
    first.result()
    for name, value in (("step-1", 1), ("last", 2)):
        assert bool((loaded(tmp_path, name, state["t"]) == value).all())
        verified(tmp_path, name)
    start(state, writer, "step-3").result(TIMEOUT_S)


def test_writers_of_one_process_save_at_once(tmp_path: Path) -> None:
    """A second writer of the process opens and commits a save while the first one writes."""
    planner = Gated()
    first = start({"t": torch.full((1000,), 1.0)}, ReplicatedWriter(tmp_path), "model", planner)
    assert planner.reached.wait(TIMEOUT_S)
    start({"t": torch.full((1000,), 2.0)}, ReplicatedWriter(tmp_path), "averaged").result(TIMEOUT_S)
    planner.gate.set()
    first.result(TIMEOUT_S)
    for name, value in (("model", 1), ("averaged", 2)):
        assert bool((loaded(tmp_path, name, torch.zeros(1000)) == value).all())
        verified(tmp_path, name)


class Slow(ReplicatedWriter):
    """Records when the saving thread begins. `synchronize_staging`, the last hook of `dcp.async_save`, waits until the
    thread could have begun.
    """

    order: list[str]

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        self.order.append("saves")

    def synchronize_staging(self) -> None:
        threading.Event().wait(0.2)
        self.order.append("returns")
        super().synchronize_staging()


def test_the_saving_thread_lets_async_save_return_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dcp.async_save` returns before the saving thread takes the interpreter, so that training does not wait."""
    monkeypatch.setattr(stager, "RETURN_WAIT_S", TIMEOUT_S)
    writer = Slow(tmp_path)
    for step in ("step-1", "step-2"):
        writer.order = []
        start({"t": torch.ones(9)}, writer, step).result(TIMEOUT_S)
        assert writer.order[-2:] == ["returns", "saves"]  # torch 2.7 calls reset before it stages, too
        verified(tmp_path, step)
    dcp.save({"t": torch.ones(9)}, checkpoint_id="step-3", storage_writer=writer)
    verified(tmp_path, "step-3")


def test_wait_concerns_the_last_save(tmp_path: Path) -> None:
    """`wait` succeeds after a successful save, although an earlier asynchronous save failed."""
    writer, state = ReplicatedWriter(tmp_path), {"t": torch.ones(10)}
    failed = start({"lock": threading.Lock()}, writer, "step-1")
    assert isinstance(failed.exception(TIMEOUT_S), CheckpointException)
    dcp.save(state, checkpoint_id="step-2", storage_writer=writer)
    writer.wait(ack="peer")
    del failed
    writer.wait(ack="peer")
    verified(tmp_path, "step-2")


def test_a_wait_for_the_bucket_includes_a_running_save(tmp_path: Path) -> None:
    """`wait` for the bucket also waits for a save that has not reached its agent yet."""
    writer, planner = ReplicatedWriter(tmp_path), Gated()
    saving = start({"t": torch.ones(10)}, writer, "step-1", planner)
    assert planner.reached.wait(TIMEOUT_S)
    with pytest.raises(StoreUnavailable, match="not finished after"):
        writer.wait(0.1)
    planner.gate.set()
    writer.wait()
    assert saving.done()
    verified(tmp_path, "step-1")


def test_wait_takes_a_number_of_seconds_or_infinity(tmp_path: Path) -> None:
    """`wait` accepts infinity. None, text and NaN raise ConfigInvalid at once."""
    writer, planner = ReplicatedWriter(tmp_path), Gated()
    saving = start({"t": torch.ones(10)}, writer, "step-1", planner)
    for wrong in (None, "9", math.nan):
        with pytest.raises(ConfigInvalid, match=f"a number of seconds, not {wrong!r}"):
            writer.wait(wrong, ack="peer")  # type: ignore[arg-type]
    threading.Timer(0.1, planner.gate.set).start()
    writer.wait(math.inf, ack="peer")
    assert saving.done()
    verified(tmp_path, "step-1")


def test_a_failure_recorded_late_is_not_the_next_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is recorded only after the next save has succeeded, as a future's callbacks run late: `wait` does not
    attribute it to that save.
    """
    writer, is_saved = ReplicatedWriter(tmp_path), threading.Event()
    noting: queue.Queue[threading.Thread] = queue.Queue()

    def note_late(error: BaseException) -> str:
        noting.put(threading.current_thread())
        assert is_saved.wait(TIMEOUT_S)
        return describe_failure(error)

    monkeypatch.setattr(stager, "describe_failure", note_late)
    failed = start({"lock": threading.Lock()}, writer, "step-1")
    assert isinstance(failed.exception(TIMEOUT_S), CheckpointException)
    dcp.save({"t": torch.ones(10)}, checkpoint_id="step-2", storage_writer=writer)
    is_saved.set()
    noting.get(timeout=TIMEOUT_S).join(TIMEOUT_S)
    writer.wait(ack="peer")
    verified(tmp_path, "step-2")


def test_a_save_whose_group_was_destroyed_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The job destroys its groups before the background save begins: the save fails, rather than commit one rank's part
    as a whole.

    The failure is logged, too, for a job that never reads the future.
    """
    save, may_begin = state_dict_saver.save, threading.Event()

    def save_later(*arguments: Any, **named: Any) -> Any:
        assert may_begin.wait(TIMEOUT_S)
        return save(*arguments, **named)

    monkeypatch.setattr(state_dict_saver, "save", save_later)
    writer, state = ReplicatedWriter(tmp_path), {"w": torch.arange(8.0)}
    with group_of_one():
        future = start(state, writer, "step-1")
    may_begin.set()
    with pytest.raises(CheckpointException, match="were destroyed before it had begun"):
        future.result(TIMEOUT_S)
    assert not (tmp_path / "step-1").exists()
    start(state, writer, "step-2").result(TIMEOUT_S)
    dcp.save(state, checkpoint_id="step-3", storage_writer=writer)
    verified(tmp_path, "step-2")
    verified(tmp_path, "step-3")
    (said,) = (text for text in caplog.messages if "an asynchronous save of this rank failed" in text)
    assert "rank 0: ConfigInvalid: The asynchronous save of 'step-1' is lost" in said, "the cause, and no traceback"


def test_a_group_that_is_destroyed_within_a_save_is_named() -> None:
    """A group is destroyed during a save: the next collective raises ConfigInvalid, and the save is aborted."""
    given_up = list[bool]()
    with group_of_one():
        watched = watch_group(dist.group.WORLD)
    watched.on_break = lambda: given_up.append(True)
    with pytest.raises(ConfigInvalid, match="was destroyed during a save"):
        watched.gather_object("a plan")
    assert given_up == [True]


def test_memory_that_the_system_refuses_is_staging_refused() -> None:
    """The system refuses memory for a segment, or the look-up of the available memory: StagingRefused is raised, and
    the next lease succeeds.
    """
    lease_segment(4096, lambda: 1 << 30).release()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for _ in range(2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
        try:
            with pytest.raises(StagingRefused, match="the system gives none"):
                lease_segment(1 << 20, lambda: 1 << 30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(StagingRefused, match="the system gives none"):
        lease_segment(1 << 20, lambda: Path("/proc/no such file").stat().st_size)
    assert len(lease_segment(1 << 20, lambda: 1 << 30)) == 1 << 20


def test_on_save_may_wait_for_its_own_save(tmp_path: Path) -> None:
    """`on_save` may call `wait`: the save is already committed, so the call returns at once."""
    writer = ReplicatedWriter(tmp_path, on_save=lambda _: told.append(writer.wait(0.1, ack="peer")))
    told = list[tuple[str, ...]]()
    start({"t": torch.ones(10)}, writer, "step-1").result(TIMEOUT_S)
    assert told == [()]
    verified(tmp_path, "step-1")


def test_wait_raises_a_failure_whose_future_was_not_kept(tmp_path: Path) -> None:
    """`wait(ack=...)` raises the failure of the last asynchronous save, also if its future was dropped."""
    writer = ReplicatedWriter(tmp_path)
    saving = dcp.async_save({"lock": threading.Lock()}, checkpoint_id="step-1", storage_writer=writer)
    writer._stager.wait_for_last()
    del saving
    gc.collect()
    with pytest.raises(ReplicatedCkptError, match="The last asynchronous save failed"):
        writer.wait(TIMEOUT_S, ack="peer")
    dcp.async_save({"t": torch.ones(3)}, checkpoint_id="step-2", storage_writer=writer)
    assert writer.wait(TIMEOUT_S, ack="peer") == ()


@pytest.mark.parametrize("has_memory", [True, False])
def test_copies_do_not_use_the_default_device(has_memory: bool) -> None:
    """Copies are on the CPU, whatever the default device."""
    state = {"t": torch.arange(10.0), "empty": torch.empty(0, 3), "sparse": torch.eye(3).to_sparse()}
    with torch.device("meta"):
        copied = StateCopy(state).make(memoryview(bytearray(4096)) if has_memory else None)
    assert copied["t"].tolist() == state["t"].tolist()
    assert torch.equal(copied["sparse"].to_dense(), torch.eye(3))
    assert copied["empty"].device.type == "cpu"


def test_a_manager_whose_save_failed_frees_its_memory(tmp_path: Path) -> None:
    """`close` raises the save's error and frees the idle segments."""
    manager = CheckpointManager(tmp_path, preempt_on=())
    manager.async_save(1, {"t": torch.ones(10)})
    manager.wait()
    lease_segment(4096, lambda: 1 << 30).release()
    manager.async_save(2, {"lock": threading.Lock()})
    with pytest.raises(CheckpointException):
        manager.close()
    assert segment._idle == []


def test_a_copy_that_outlives_its_writer_frees_its_memory(tmp_path: Path) -> None:
    """A planner still holds the state after `close`: its memory is freed with the planner."""
    writer, planner = ReplicatedWriter(tmp_path), DefaultSavePlanner()
    start({"t": torch.ones(5000)}, writer, "step-1", planner).result(TIMEOUT_S)
    writer.close()
    assert count_descriptors() > 0
    del planner
    gc.collect()
    assert count_descriptors() == 0
    verified(tmp_path, "step-1")


def test_a_running_collective_is_waited_for() -> None:
    """A tensor of a running collective is copied after the collective has completed."""
    with group_of_one():
        reduced: Any = all_reduce(torch.ones(1000), "sum", [0])
        assert not reduced.completed
        copied = StateCopy({"t": reduced}).make(memoryview(bytearray(8192)))["t"]
        assert reduced.completed
        assert copied.sum().item() == 1000


def freed() -> torch.Tensor:
    """A tensor whose storage is freed, as FSDP frees whole parameters."""
    tensor = torch.ones(5000)
    tensor.untyped_storage().resize_(0)
    return tensor


def zeros_of_autograd() -> torch.Tensor:
    """A tensor that claims to have bytes at address 0."""
    return torch._efficientzerotensor(5000)


@pytest.mark.parametrize("made", [freed, zeros_of_autograd])
@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["dcp.save", "dcp.async_save"])
def test_a_tensor_without_memory_is_refused(
    tmp_path: Path, is_asynchronous: bool, made: Callable[[], torch.Tensor]
) -> None:
    """A tensor without memory fails the save, which names the entry. Otherwise foreign bytes would be saved, or the
    process would crash.
    """
    writer = ReplicatedWriter(tmp_path)
    state = {"w": made(), "empty": torch.ones(0)}

    def save() -> None:
        if is_asynchronous:
            start(state, writer, "step-1").result(TIMEOUT_S)
        else:
            dcp.save(state, checkpoint_id="step-1", storage_writer=writer)

    with pytest.raises(CheckpointException, match="'w' has no memory"):
        save()
    start({"empty": torch.ones(0)}, writer, "step-2").result(TIMEOUT_S)
    verified(tmp_path, "step-2")
