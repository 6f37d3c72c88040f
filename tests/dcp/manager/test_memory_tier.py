"""The memory tier of one process: which store a save goes to, which store a load reads, and which directories are
refused.
"""

import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, ReplicatedReader, Retention, WorldSizeChanged
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.dcp import tiered_checkpoints
from replicated_ckpt.dcp.agreement import node_post
from replicated_ckpt.dcp.manager import SaveCallback
from replicated_ckpt.dcp.memory import root as memory_root
from replicated_ckpt.dcp.memory import root as place
from replicated_ckpt.dcp.memory.root import SHARED_MEMORY, find_memory_root, measure_memory
from replicated_ckpt.dcp.staging.segment import drop_idle_segments
from replicated_ckpt.dcp.tiered_checkpoints import TieredCheckpoints
from replicated_ckpt.errors import ConfigInvalid, StoreFull, StoreUnavailable
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.full_disk import lacks_room_to_start
from tests.agent.agents import stop_agent, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, also where `tmp_path` is on a disk."""
    base = Path(tempfile.mkdtemp(prefix="rckpt-test-", dir=SHARED_MEMORY))
    yield base / "tier"
    stop_agent(base / "tier")
    shutil.rmtree(base)


def opened(root: Path, memory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, memory=memory, copies=1, preempt_on=(), **options)


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((100,), value)}


def steps_in(root: Path) -> set[int]:
    return {int(path.name.removeprefix("step-")) for path in root.glob("step-*")}


def test_the_bucket_and_keep_every_count_what_goes_to_the_disk(root: Path, tmp_path: Path, memory: Path) -> None:
    """`object_every` and `keep_every` count the checkpoints on the disk, not those in memory."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    kept = Retention(keep_last=1, keep_every=3)
    options: dict[str, Any] = {"object_store": f"file://{bucket}", "object_every": 2, "retention": kept}
    with opened(root, memory, disk_every=2, **options) as manager:
        for step in range(1, 9):
            manager.save(step, state(step))
        assert manager.wait() == ("step-4", "step-8")
    assert {path.name for path in bucket.glob("step-*")} == {"step-4", "step-8"}
    assert steps_in(root) == {6, 8}


def test_a_wait_for_both_tiers_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tier gets the time-out that the first one has left."""
    now, given = [100.0], []

    def tier() -> Any:
        def wait(timeout_s: float) -> tuple[str, ...]:
            given.append(timeout_s)
            now[0] += 7.0
            return ()

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(tiered_checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]), raising=False)
    both: Any = SimpleNamespace(memory=tier(), disk=tier())
    assert TieredCheckpoints.wait(both, 10.0) == ()
    assert given == [10.0, 3.0]


def test_metrics_and_notes_of_both_tiers_are_seen(root: Path, memory: Path) -> None:
    """`best_step`, `notes` and `restore` cover both tiers. The best step may be on the disk alone."""
    with opened(root, memory, disk_every=2) as manager:
        for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 2.0, 6.0], start=1):
            manager.save(step, state(step), metrics={"loss": loss})
        assert {2, 4, 5, 6} <= set(manager.all_steps())
        assert manager.best_step("loss") == 2
        assert manager.notes(2).metrics == {"loss": 1.0}
        found = state(-1)
        assert manager.restore(found, 2) == 2
    assert torch.equal(found["w"], state(2)["w"])


@pytest.mark.parametrize(("kind", "newest"), [("memory", 5), ("bucket", 3)])
def test_saves_after_a_restore_of_an_older_step_are_the_newest(
    root: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, newest: int
) -> None:
    """A job restores an older step and saves on, while later steps of the earlier job lie in another tier: the new
    saves are newer.
    """
    options: dict[str, Any] = {"memory": memory, "disk_every": 2}
    if kind == "bucket":
        (tmp_path / "bucket").mkdir()
        options = {"object_store": f"file://{tmp_path}/bucket", "object_every": 2}

    def begun() -> CheckpointManager:
        monkeypatch.setattr(node_post, "_seen", {})  # another process
        return CheckpointManager(root, copies=1, preempt_on=(), **options)

    with begun() as manager:
        for step in range(1, 7):
            manager.save(step, state(step))
        manager.wait()
    lost = memory if kind == "memory" else root
    stop_agent(lost)
    shutil.rmtree(lost)
    with begun() as manager:
        assert manager.restore(state(-1), 2) == 2
        for step in range(3, newest + 1):
            manager.save(step, state(10 * step))
    with begun() as manager:
        found = state(-1)
        assert manager.restore(found) == newest
    assert torch.equal(found["w"], state(10 * newest)["w"])
    assert main(["verify", "--root", str(root)]) == ExitCode.OK


def test_a_newer_step_on_the_disk_is_loaded(root: Path, memory: Path) -> None:
    """A job without its memory tier saved newer steps to the disk: the disk's step is restored, and the next save in
    memory is newer.
    """
    with opened(root, memory, disk_every=100) as manager:
        manager.save(1, state(1))
    with CheckpointManager(root, copies=1, preempt_on=()) as manager:
        assert manager.restore(state(-1)) is None
        for step in (2, 3):
            manager.save(step, state(step))
    with opened(root, memory, disk_every=100) as manager:
        found = state(-1)
        assert (manager.restore(found), manager.latest_step()) == (3, 3)
        assert torch.equal(found["w"], state(3)["w"])
        manager.save(4, state(4))
        assert (manager.latest_step(), steps_in(root)) == (4, {2, 3})


@pytest.mark.parametrize("between", ["no tier", "another tier"])
def test_saves_without_the_tier_are_newer_than_the_tiers(
    root: Path, memory: Path, between: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job without the tier restores an older step from the disk and warns. Once the tier is used again, that job's
    later saves load.
    """
    other = memory.parent / "other"
    with opened(root, memory, disk_every=3) as manager:
        for step in range(1, 6):
            manager.save(step, state(step))
    options: dict[str, Any] = {"memory": None if between == "no tier" else other, "copies": 1, "preempt_on": ()}
    with mock.patch.dict(node_post._seen, clear=True), caplog.at_level(logging.WARNING, "replicated_ckpt"):
        with CheckpointManager(root, **options) as manager:
            assert manager.restore(state(-1)) == 3
            manager.save(4, state(40))
        stop_agent(other)
    (said,) = [text for text in caplog.messages if "the unused memory tier" in text]
    assert str(memory) in said
    assert str(root) in said
    found = state(-1)
    with mock.patch.dict(node_post._seen, clear=True), CheckpointManager(root, **options) as manager:
        assert manager.restore(found) == 4
        assert torch.equal(found["w"], state(40)["w"])
        manager.save(5, state(50))
    stop_agent(other)
    if between == "no tier":
        with mock.patch.dict(node_post._seen, clear=True), opened(root, memory) as manager:
            assert manager.restore(found) == 5
        assert torch.equal(found["w"], state(50)["w"])


@pytest.mark.parametrize("what", ["nothing", "a file", "a loop of links"])
def test_an_earlier_tier_that_is_no_store_is_skipped(root: Path, memory: Path, what: str) -> None:
    """The path of an earlier tier is missing or no directory: a job without the tier restores and saves all the same."""
    with opened(root, memory, disk_every=1) as manager:
        manager.save(1, state(1))
    stop_agent(memory)
    shutil.rmtree(memory)
    if what == "a file":
        memory.touch()
    elif what == "a loop of links":
        memory.symlink_to(memory)
    with CheckpointManager(root, copies=1, preempt_on=()) as manager:
        assert manager.restore(state(-1)) == 1
        manager.save(2, state(2))
    assert steps_in(root) == {1, 2}


def test_a_first_save_without_a_restore_continues_the_disks_run(root: Path, memory: Path) -> None:
    """Memory is empty, and the job saves without a restore: its saves are newer than the disk's."""
    with opened(root, memory, disk_every=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    shutil.rmtree(memory)
    with opened(root, memory, disk_every=100) as manager:
        manager.save(2, state(20))
        assert manager.latest_step() == 2
    assert steps_in(root) == {1, 2, 3}


def test_the_state_is_copied_once_and_may_change_at_once(root: Path, memory: Path) -> None:
    """Both tiers contain the state as of the call of `async_save`, although the state changed right after."""
    changing = state(1)
    with opened(root, memory, disk_every=1) as manager:
        manager.async_save(1, changing)
        changing["w"].fill_(2)
        manager.wait()
    for store in (root, memory):
        found = state(-1)
        with CheckpointManager(store, copies=1, preempt_on=()) as manager:
            assert manager.restore(found) == 1
        assert torch.equal(found["w"], state(1)["w"])


def test_a_load_from_the_disk_instead_of_memory_warns_once(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory tier's step is damaged: the disk's loads, and one warning names the step, both stores and the error."""
    with opened(root, memory, disk_every=1) as manager:
        manager.save(1, state(1))
    damage_step(memory, 1)
    found = state(-1)
    with (
        opened(root, memory) as manager,
        caplog.at_level(logging.WARNING, "replicated_ckpt.dcp.tiered_checkpoints"),
    ):
        assert manager.restore(found) == 1
    assert torch.equal(found["w"], state(1)["w"])
    told = [each.getMessage() for each in caplog.records if each.name.endswith("tiered_checkpoints")]
    assert len(told) == 1
    assert str(memory) in told[0]
    assert "ShardLost" in told[0]


@pytest.mark.parametrize("what", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_process_that_can_open_no_file_gets_no_older_step(root: Path, memory: Path, what: str, code: int) -> None:
    """A process without free descriptors or memory raises, and loads no older step from either tier. Later the newest
    loads.
    """

    def refuse(name: Any, *arguments: Any, dir_fd: int | None = None, **named: Any) -> int:
        below = Path("/") if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        if isinstance(name, str | os.PathLike) and below / name == memory / "step-3" / what:
            raise OSError(code, os.strerror(code))
        return real(name, *arguments, dir_fd=dir_fd, **named)

    real = os.open
    with opened(root, memory, disk_every=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    with opened(root, memory, disk_every=2) as manager:
        with mock.patch.object(os, "open", refuse), pytest.raises(CheckpointException, match=os.strerror(code)):
            manager.restore(state(-1))
        assert manager.restore(found := state(-1)) == 3
    assert torch.equal(found["w"], state(3)["w"])


def damage_step(memory: Path, step: int) -> None:
    """Zeroes the first half of the step's shard."""
    shard = next((memory / f"step-{step}").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    shard.write_bytes(content)


def test_the_warning_distinguishes_saves_of_a_step_by_sequence(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step was saved again in memory alone, and is damaged there: the disk's older save loads. The warning
    distinguishes the two by sequence number.
    """
    with opened(root, memory, disk_every=2) as manager:
        manager.save(2, state(2))
        manager.save(1, state(1))
        manager.save(1, state(3))
    damage_step(memory, 1)
    with opened(root, memory) as manager:
        older = manager.restore(found := state(-1), step=1)
    assert older == 1
    assert [torch.equal(found["w"], state(n)["w"]) for n in (1, 3)] == [True, False]
    told = next(each.getMessage() for each in caplog.records if each.name.endswith("tiered_checkpoints"))
    assert told.startswith("step-1 (sequence 3) in the memory tier")
    assert "step-1 (sequence 2) at" in told


def test_another_runs_steps_on_the_disk_are_no_newer_than_memorys(root: Path, memory: Path, tmp_path: Path) -> None:
    """Sequence numbers count per run: in place of memory's damaged step its predecessor loads, not another run's step 5
    on the disk.
    """
    with CheckpointManager(tmp_path / "another", copies=1, preempt_on=()) as manager:
        for step in range(1, 6):
            manager.save(step, state(-step))
    with opened(root, memory, disk_every=100) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    shutil.copytree(tmp_path / "another" / "step-5", root / "step-5")
    damage_step(memory, 2)
    with opened(root, memory, disk_every=100) as manager:
        assert manager.restore(found := state(0)) == 1
    assert torch.equal(found["w"], state(1)["w"])


class Refusing:
    """A part of a state that raises in `load_state_dict`."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        return {"part": torch.zeros(1)}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        del found
        self.asked += 1
        raise WorldSizeChanged([4], 2)


def test_an_error_of_a_part_of_the_state_is_raised_at_once(root: Path, memory: Path) -> None:
    """An error in a part's `load_state_dict` is raised at once. Another step is not tried, as the other ranks would not
    load it.
    """
    part = Refusing()
    with opened(root, memory, disk_every=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, {**state(step), "part": part})
        found = {**state(-1), "part": part}
        with pytest.raises(WorldSizeChanged):
            manager.restore(found)
    assert part.asked == 1


def test_a_state_that_does_not_fit_gets_no_older_step(root: Path, memory: Path) -> None:
    """A state that does not fit the newest step raises that error. An older step that fits is not loaded."""
    with opened(root, memory, disk_every=100) as manager:
        manager.save(1, {**state(1), "gone": torch.ones(1)})
        manager.save(2, state(2))
        with pytest.raises(CheckpointException, match="gone"):
            manager.restore({**state(-1), "gone": torch.zeros(1)})


def test_a_call_within_on_save_is_refused_while_both_tiers_call_it() -> None:
    """Both tiers call `on_save` at once: a call that would wait is refused, also after the other tier's `on_save` has
    returned.
    """
    inside, left, refused = threading.Event(), threading.Event(), []

    def on_save(report: Any) -> None:
        if report == "memory":
            inside.set()
            left.wait(20)
            with pytest.raises(ConfigInvalid):
                told.check_not_inside("wait")
            refused.append(report)

    told: Any = SaveCallback(on_save)
    threads = [threading.Thread(target=told, args=(tier,)) for tier in ("memory", "disk")]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    threads[1].join()
    left.set()
    threads[0].join()
    assert refused == ["memory"]


def _save_and_close(manager: CheckpointManager) -> None:
    manager.async_save(2, state(2))
    manager.close()


def test_a_child_that_is_forked_saves_in_a_thread_of_its_own(root: Path, memory: Path) -> None:
    """A forked child creates its own saving threads. The checkpoints of both processes are complete."""
    with opened(root, memory, disk_every=1) as manager:
        manager.async_save(1, state(1))
        manager.wait()
        child = get_context("fork").Process(target=_save_and_close, args=(manager,))
        child.start()
        child.join(30)
        child.kill()
        assert child.exitcode == 0
        manager.async_save(3, state(3))
    assert steps_in(root) == {1, 2, 3}
    assert main(["verify", "--root", str(root)]) == ExitCode.OK


def test_a_save_after_a_signal_goes_to_the_disk(root: Path, memory: Path) -> None:
    """After a preemption signal the save goes to the disk, too, as the nodes may lose their memory."""
    with CheckpointManager(root, memory=memory, disk_every=100, copies=1, preempt_on=("SIGUSR1",)) as manager:
        manager.save(1, state(1))
        assert steps_in(root) == set()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_save(2)
        manager.save(2, state(2))
    assert steps_in(root) == {2}


def test_a_save_after_a_signal_goes_to_the_bucket(root: Path, tmp_path: Path, memory: Path) -> None:
    """A checkpoint that goes to the disk because of a signal is uploaded and kept like any other on the disk."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    kept = Retention(keep_last=1, keep_every=1)
    options: dict[str, Any] = {"object_store": f"file://{bucket}", "retention": kept, "copies": 1}
    with CheckpointManager(root, memory=memory, disk_every=2, preempt_on=("SIGUSR1",), **options) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_save(3)
        for step in (3, 4, 5):
            manager.save(step, state(step))
        manager.wait()
    assert {path.name for path in bucket.glob("step-*")} == {"step-2", "step-3", "step-4", "step-5"}
    assert steps_in(root) == {2, 3, 4, 5}


def test_a_smaller_disk_every_counts_at_once(root: Path, memory: Path) -> None:
    """A job restarts with a smaller `disk_every`: a checkpoint that is due goes to the disk at once, and counting
    continues from there.
    """
    with opened(root, memory, disk_every=100) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state(step))
    with mock.patch.dict(node_post._seen, clear=True), opened(root, memory, disk_every=3) as manager:
        assert manager.restore(state(-1)) == 4
        for step in (5, 6):
            manager.save(step, state(step))
    assert steps_in(root) == {5, 6}
    with mock.patch.dict(node_post._seen, clear=True), opened(root, memory, disk_every=4) as manager:
        for step in (7, 8, 9):
            manager.save(step, state(step))
    assert steps_in(root) == {5, 6, 8}


def test_after_a_signal_the_disk_gets_what_memory_refuses(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory is full: before the signal the save is refused. After the signal the save goes to the disk alone, with a
    warning.
    """
    with CheckpointManager(root, memory=memory, disk_every=100, copies=1, preempt_on=("SIGUSR1",)) as manager:
        manager.save(1, state(1))
        monkeypatch.setattr(memory_root, "measure_memory", lambda _: 0)
        with pytest.raises(CheckpointException, match="MemoryTierShort"):
            manager.save(2, state(2))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_save(3)
        with caplog.at_level(logging.WARNING, "replicated_ckpt.dcp.tiered_checkpoints"):
            manager.save(3, state(3))
        assert manager.latest_step() == 3
    assert (steps_in(root), steps_in(memory)) == ({3}, {1})
    (said,) = (text for text in caplog.messages if text.startswith("step-3 goes only to the disk"))
    assert "rank 0: MemoryTierShort: " in said, "the cause, and no traceback"


def test_a_failed_save_to_the_disk_is_repeated_with_the_next_save(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save to the disk failed: the very next save goes to the disk, rather than the next one in turn."""
    with opened(root, memory, disk_every=2) as manager:
        manager.save(1, state(1))
        with monkeypatch.context() as patch:
            patch.setattr(FileSink, "sync", full_disk_at(root, FileSink.sync))
            with pytest.raises(CheckpointException, match="No space left"):
                manager.save(2, state(2))
        manager.save(3, state(3))
        assert steps_in(root) == {3}
        wait_for(lambda: steps_in(memory) == {2, 3}, 30.0, "the removal of step 1, which an agent may be reading")
        manager.save(4, state(4))
        manager.save(5, state(5))
    assert steps_in(root) == {3, 4}


def full_disk_at(root: Path, sync: Callable[[FileSink], None]) -> Callable[[FileSink], None]:
    """A `sync` that raises StoreFull under this root."""

    def fail(sink: FileSink) -> None:
        if root in sink._path.parents:
            raise StoreFull(str(root), "fsync", "shard", "No space left on device")
        sync(sink)

    return fail


def test_a_first_save_continues_a_run_without_a_complete_checkpoint(root: Path, memory: Path) -> None:
    """The disk's only checkpoint is damaged: the first save continues its lineage. Retention would not cover the old
    one after a new lineage began.
    """
    with opened(root, memory, disk_every=1) as manager:
        manager.save(1, state(1))
    before = LocalStore(root).catalog.manifest("step-1").version
    shutil.rmtree(memory)
    next((root / "step-1").glob("*.distcp")).unlink()
    stop_agent(root)
    with mock.patch.dict(node_post._seen, clear=True), opened(root, memory, disk_every=1) as manager:
        manager.save(2, state(2))
    for store in (root, memory):
        found = LocalStore(store).catalog.manifest("step-2").version
        assert (found.lineage, found.sequence) == (before.lineage, before.sequence + 1)


def test_a_first_save_after_a_failed_look_up_warns(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bucket does not answer, and no node has a checkpoint: the first save begins a new lineage and warns."""

    def find(reader: ReplicatedReader, checkpoint_id: str) -> None:
        raise StoreUnavailable("bucket", "look for", checkpoint_id, "no answer")

    monkeypatch.setattr(ReplicatedReader, "find", find)
    with opened(root, memory, disk_every=1) as manager, caplog.at_level(logging.WARNING, "replicated_ckpt"):
        manager.save(1, state(1))
        manager.save(2, state(2))
    (said,) = [text for text in caplog.messages if "begins a new lineage" in text]
    assert said.startswith("step-1 begins")
    assert "no answer" in said
    assert steps_in(root) == {1, 2}


def test_memory_of_another_runs_checkpoints_is_not_available(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of another run's checkpoints does not count as available, as retention does not remove them."""
    room = 1 << 40
    # The machine's available memory changes with its load.
    monkeypatch.setattr(memory_root, "measure_memory", lambda _: room)
    large = {"w": torch.zeros(8 << 20, dtype=torch.uint8)}
    with opened(root, memory, disk_every=100) as manager:
        manager.save(1, large)
    store = LocalStore(memory)
    tier = memory_root.MemoryLimit(store, 3)
    assert tier.measure("step-2") == room
    with mock.patch.dict(node_post._seen):
        node_post.remember(store, "step-2", Version("0123456789abcdef", 1, 0.0, ""))
        assert tier.measure("step-2") <= room - (8 << 20)


def test_without_memory_for_a_copy_the_save_is_made_at_once(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without memory for a copy, `async_save` saves to both tiers before it returns, and warns. Later changes of the
    state are not saved.
    """
    drop_idle_segments()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 << 60))  # so that each rank's share of the memory is 0
    changing = state(1)
    with opened(root, memory, disk_every=1) as manager, caplog.at_level(logging.WARNING, "replicated_ckpt"):
        manager.async_save(1, changing)
        changing["w"].fill_(2)
        assert (steps_in(root), steps_in(memory)) == ({1}, {1})
        found = state(-1)
        assert manager.restore(found) == 1
    assert torch.equal(found["w"], state(1)["w"])
    assert "Training waits in async_save" in caplog.text


@pytest.mark.parametrize("wrong", ["relative", 1, "/proc/tier", ""])
def test_a_directory_outside_memory_is_refused(tmp_path: Path, wrong: object) -> None:
    """A directory that is not in memory, or no absolute path, raises ConfigInvalid."""
    with pytest.raises(ConfigInvalid, match="memory"):
        find_memory_root(tmp_path, wrong)


def test_the_root_itself_is_refused_as_a_tier(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="memory and root are the same directory"):
        find_memory_root(tmp_path, tmp_path)


def test_the_tier_of_another_root_is_refused(tmp_path: Path, memory: Path) -> None:
    """A directory that is another root's memory tier is refused. It is accepted again when that root has been moved."""
    with opened(tmp_path / "a", memory) as manager:
        manager.save(1, state(1.0))
    with pytest.raises(ConfigInvalid, match=f"is the memory tier of another store, at {tmp_path / 'a'}\\. ") as caught:
        opened(tmp_path / "b", memory)
    assert f"rm -r {memory}" in caught.value.hint
    assert not (tmp_path / "b").exists()
    with opened(tmp_path / "a", memory) as manager:
        assert manager.restore(state(0.0)) == 1
    shutil.move(tmp_path / "a", tmp_path / "c")
    with opened(tmp_path / "c", memory) as manager:
        assert manager.restore(state(0.0)) == 1


def test_a_tier_that_another_root_has_taken_since_is_refused_at_the_first_save(tmp_path: Path, memory: Path) -> None:
    """Two managers start with one tier before either saves: the second one's first save is refused, and the first one's
    checkpoint stays.
    """
    with opened(tmp_path / "a", memory) as first, opened(tmp_path / "b", memory) as second:
        first.save(1, state(1.0))
        with pytest.raises(ConfigInvalid, match=f"is the memory tier of another store, at {tmp_path / 'a'}\\. "):
            second.save(1, state(2.0))
        found = state(0.0)
        assert first.restore(found) == 1
    assert torch.equal(found["w"], state(1.0)["w"])
    assert main(["verify", "--root", str(memory)]) == ExitCode.OK


def test_each_store_and_user_has_a_tier_of_its_own(tmp_path: Path) -> None:
    """memory=True gives each root and user a tier of its own, and the same one each time."""
    one, again, other = (find_memory_root(root, True) for root in (tmp_path, tmp_path, tmp_path / "other"))
    assert one == again != other
    assert one.parent == SHARED_MEMORY / f"replicated_ckpt-{os.geteuid()}"


def test_paths_on_this_host_may_have_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's path and the mount table may contain bytes that are not UTF-8."""
    mounts = b"1 1 0:99 / /m\xfcnchen rw - ext4 /dev/sda rw\n2 1 0:98 / /a\xe2\x80\xa8b rw - ext4 /dev/sdb rw\n"
    (tmp_path / "mounts").write_bytes(mounts + Path("/proc/self/mountinfo").read_bytes())
    monkeypatch.setattr(place, "_MOUNTS", tmp_path / "mounts")
    assert find_memory_root(tmp_path / os.fsdecode(b"m\xfcnchen"), True).parent.parent == SHARED_MEMORY


def test_the_default_tier_works_with_any_umask(root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default tier works with umask 0: its directory is created without write permission for others."""
    memory.mkdir()
    monkeypatch.setattr(place, "SHARED_MEMORY", memory)
    usual = os.umask(0)
    try:
        tier = find_memory_root(root, True)
        with CheckpointManager(root, memory=True, copies=1, preempt_on=()) as manager:
            manager.save(1, state(1))
    finally:
        os.umask(usual)
        stop_agent(tier)
    assert steps_in(tier) == {1}


def test_a_memory_directory_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        find_memory_root(tmp_path, SHARED_MEMORY / ("x" * 300))


def test_true_creates_a_tier_in_shared_memory(root: Path) -> None:
    """memory=True creates a tier in shared memory for this user alone."""
    tier = find_memory_root(root, True)
    try:
        with CheckpointManager(root, memory=True, copies=1, preempt_on=()) as manager:
            manager.save(1, state(1))
        assert (steps_in(tier), steps_in(root)) == ({1}, set())
        assert not stat.S_IMODE(tier.stat().st_mode) & 0o077
    finally:
        stop_agent(tier)
        shutil.rmtree(tier)


def test_memory_that_the_tier_uses_is_available_to_it(memory: Path) -> None:
    """Memory that the tier already uses counts as available to it: a restarted job is not refused. Hard links count
    once.
    """
    memory.mkdir(parents=True)
    size = 8 << 20
    (memory / "file").write_bytes(bytes(size))
    os.link(memory / "file", memory / "link")  # as of a recycled file, whose memory counts once
    assert size <= place.measure_used(memory) < 2 * size
    assert measure_memory(memory) >= size


@pytest.fixture(params=[["tmpfs", "-o", "size=0"], ["ramfs"]], ids=" ".join)
def unlimited(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    place = tmp_path / "unlimited"
    place.mkdir()
    mounted = ["mount", "-t", *request.param, "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mounted, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    place.chmod(0o700)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_memory_without_a_limit_of_its_own_is_not_full(root: Path, unlimited: Path) -> None:
    """A tmpfs or ramfs without a size limit reports zeros: the machine's memory is the limit."""
    with opened(root, unlimited / "tier", disk_every=100) as manager:
        manager.save(1, state(1))
    assert main(["verify", "--root", str(unlimited / "tier"), "step-1"]) == ExitCode.OK
    assert not lacks_room_to_start(unlimited)


def test_a_relative_root_in_a_working_directory_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working directory was removed: a relative root raises ConfigInvalid, as without a memory tier."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigInvalid, match="the working directory of this process no longer exists"):
        find_memory_root("ckpt", memory=True)
