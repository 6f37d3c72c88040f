"""The memory tier of one process: which store a save goes to, which one a load takes, and what cannot be a tier."""

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
from replicated_ckpt.stores.local.versions.recycled import lacks_room_to_start
from tests.agent.agents import stop_agent, wait_for

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, also where the tests' own directory is on a disk."""
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
    """Every second spilled checkpoint is in the bucket; the disk keeps the last one and every third that was spilled."""
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
    """What the first tier has used of the time, the second one has no more."""
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
    """The best step may lie on the disk alone, while memory has only the newest two."""
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
def test_what_is_saved_after_an_older_step_was_restored_is_the_newest(
    root: Path, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, newest: int
) -> None:
    """What the run left behind lies in another tier, to which the saves that follow do not go: they are newer."""
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


def test_what_the_disk_has_newer_is_loaded(root: Path, memory: Path) -> None:
    """A job that ran without its memory tier went further: its checkpoint goes before memory's, and so do its sequences."""
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
def test_what_was_saved_without_the_tier_is_newer_than_what_the_tier_has(
    root: Path, memory: Path, between: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that left the tier out goes on from an older step, and says so; with the tier again its checkpoints load."""
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
def test_a_tier_of_before_that_is_no_store_any_more_is_passed_over(root: Path, memory: Path, what: str) -> None:
    """After a reboot anything may lie where it was; a job without the tier restores and saves all the same."""
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


def test_a_first_save_without_a_look_continues_the_run_of_the_disk(root: Path, memory: Path) -> None:
    """Memory is empty after a reboot, and the program restores nothing: its saves are newer than the disk's."""
    with opened(root, memory, disk_every=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    shutil.rmtree(memory)
    with opened(root, memory, disk_every=100) as manager:
        manager.save(2, state(20))
        assert manager.latest_step() == 2
    assert steps_in(root) == {1, 2, 3}


def test_the_state_is_copied_once_and_may_change_at_once(root: Path, memory: Path) -> None:
    """Both tiers hold the state as it was at the call, though it was changed before either was written."""
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


def test_a_load_that_memory_cannot_give_warns_once(root: Path, memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning names the step, both stores and what was wrong; and the disk's bytes are in the state."""
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
    """Neither memory's nor the disk's: what could not be opened is intact, and loads once it can."""

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
    """Zeroes half of the shard of a step."""
    shard = next((memory / f"step-{step}").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    shard.write_bytes(content)


def test_an_older_save_of_the_step_is_told_by_its_sequence(
    root: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step was saved again, in memory alone, which is damaged: the disk's is loaded, and the warning tells them apart."""
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
    """They count by themselves: in place of memory's newest step its one before is loaded, not the other run's fifth."""
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
    """A part of a state that says no to what it is given."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        return {"part": torch.zeros(1)}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        del found
        self.asked += 1
        raise WorldSizeChanged([4], 2)


def test_what_a_part_of_the_state_refuses_is_raised_at_once(root: Path, memory: Path) -> None:
    """Other ranks may not meet it, and would not load another step; the rest of the state is the newest step's."""
    part = Refusing()
    with opened(root, memory, disk_every=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, {**state(step), "part": part})
        found = {**state(-1), "part": part}
        with pytest.raises(WorldSizeChanged):
            manager.restore(found)
    assert part.asked == 1


def test_a_state_that_does_not_fit_gets_no_older_step(root: Path, memory: Path) -> None:
    """The error of the newest step is raised, as without a memory tier: an older one that fits would hide it."""
    with opened(root, memory, disk_every=100) as manager:
        manager.save(1, {**state(1), "gone": torch.ones(1)})
        manager.save(2, state(2))
        with pytest.raises(CheckpointException, match="gone"):
            manager.restore({**state(-1), "gone": torch.zeros(1)})


def test_on_save_is_known_where_both_tiers_call_it_at_once() -> None:
    """A call that would wait for its own save is refused, also after the other tier's `on_save` has returned meanwhile."""
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


def _go_on(manager: CheckpointManager) -> None:
    manager.async_save(2, state(2))
    manager.close()


def test_a_child_that_is_forked_saves_in_a_thread_of_its_own(root: Path, memory: Path) -> None:
    """The threads of the parent's saves are not in it: it makes its own, and both processes' checkpoints are whole."""
    with opened(root, memory, disk_every=1) as manager:
        manager.async_save(1, state(1))
        manager.wait()
        child = get_context("fork").Process(target=_go_on, args=(manager,))
        child.start()
        child.join(30)
        child.kill()
        assert child.exitcode == 0
        manager.async_save(3, state(3))
    assert steps_in(root) == {1, 2, 3}
    assert main(["verify", "--root", str(root)]) == ExitCode.OK


def test_what_is_saved_after_a_signal_goes_to_the_disk(root: Path, memory: Path) -> None:
    """The nodes may be taken away all at once, and their memory with them."""
    with CheckpointManager(root, memory=memory, disk_every=100, copies=1, preempt_on=("SIGUSR1",)) as manager:
        manager.save(1, state(1))
        assert steps_in(root) == set()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_save(2)
        manager.save(2, state(2))
    assert steps_in(root) == {2}


def test_what_is_saved_after_a_signal_goes_to_the_bucket(root: Path, tmp_path: Path, memory: Path) -> None:
    """Out of its turn on the disk, it is there in the bucket and in a policy that keeps every one, as any other there."""
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


def test_a_smaller_spill_every_counts_at_once(root: Path, memory: Path) -> None:
    """A job that goes on with a smaller `disk_every` has what is due on the disk at once, and counts on from there."""
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
    """The last save before the nodes go is not lost because their memory is full; before the signal it is refused."""
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


def test_a_spill_that_failed_is_made_with_the_next_save(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full for a moment costs one step there, not ten."""
    with opened(root, memory, disk_every=2) as manager:
        manager.save(1, state(1))
        with monkeypatch.context() as patch:
            patch.setattr(FileSink, "sync", full_disk_at(root, FileSink.sync))
            with pytest.raises(CheckpointException, match="No space left"):
                manager.save(2, state(2))
        manager.save(3, state(3))
        assert steps_in(root) == {3}
        wait_for(lambda: steps_in(memory) == {2, 3}, 30.0, "the end of step 1, which an agent may be reading")
        manager.save(4, state(4))
        manager.save(5, state(5))
    assert steps_in(root) == {3, 4}


def full_disk_at(root: Path, sync: Callable[[FileSink], None]) -> Callable[[FileSink], None]:
    """A sync that finds no room under this root."""

    def fail(sink: FileSink) -> None:
        if root in sink._path.parents:
            raise StoreFull(str(root), "fsync", "shard", "No space left on device")
        sync(sink)

    return fail


def test_a_first_save_continues_a_run_of_which_nothing_is_whole(root: Path, memory: Path) -> None:
    """After a reboot that damaged the disk's only checkpoint: its retention would not know what a new lineage leaves."""
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


def test_a_first_save_after_a_look_that_failed_says_what_it_does(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No node has anything, and the bucket does not answer: that is no proof that there is nothing."""

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


def test_what_another_run_left_is_no_room_for_this_one(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention does not remove it, so a save that counts on its memory would fill the node's."""
    room = 1 << 40
    # What this machine has changes with what else it does.
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
    """In both tiers, before `async_save` returns, with a warning; what changes afterwards is not saved."""
    drop_idle_segments()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(1 << 60))  # so each rank's share of the memory is nothing
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
def test_what_is_no_place_in_memory_is_refused(tmp_path: Path, wrong: object) -> None:
    """Before anything is written."""
    with pytest.raises(ConfigInvalid, match="memory"):
        find_memory_root(tmp_path, wrong)


def test_the_root_itself_is_no_tier(tmp_path: Path) -> None:
    """One store cannot be both."""
    with pytest.raises(ConfigInvalid, match="memory and root are the same directory"):
        find_memory_root(tmp_path, tmp_path)


def test_the_tier_of_another_root_is_refused(tmp_path: Path, memory: Path) -> None:
    """Two jobs with one directory would load what the other one has saved. It is free once the other root is gone."""
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
    """Both jobs began before either saved: the one loaded what the other had saved, and removed what the one had."""
    with opened(tmp_path / "a", memory) as first, opened(tmp_path / "b", memory) as second:
        first.save(1, state(1.0))
        with pytest.raises(ConfigInvalid, match=f"is the memory tier of another store, at {tmp_path / 'a'}\\. "):
            second.save(1, state(2.0))
        found = state(0.0)
        assert first.restore(found) == 1
    assert torch.equal(found["w"], state(1.0)["w"])
    assert main(["verify", "--root", str(memory)]) == ExitCode.OK


def test_each_store_and_user_has_a_tier_of_its_own(tmp_path: Path) -> None:
    """The same one each time; another root has another."""
    one, again, other = (find_memory_root(root, True) for root in (tmp_path, tmp_path, tmp_path / "other"))
    assert one == again != other
    assert one.parent == SHARED_MEMORY / f"replicated_ckpt-{os.geteuid()}"


def test_names_on_this_host_may_be_of_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's, and those of all mounts, which were read as UTF-8: one in Latin-1 made the tier end in its error."""
    mounts = b"1 1 0:99 / /m\xfcnchen rw - ext4 /dev/sda rw\n2 1 0:98 / /a\xe2\x80\xa8b rw - ext4 /dev/sdb rw\n"
    (tmp_path / "mounts").write_bytes(mounts + Path("/proc/self/mountinfo").read_bytes())
    monkeypatch.setattr(place, "_MOUNTS", tmp_path / "mounts")
    assert find_memory_root(tmp_path / os.fsdecode(b"m\xfcnchen"), True).parent.parent == SHARED_MEMORY


def test_the_usual_place_is_believed_whatever_the_umask(
    root: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others can write is not: so the directory above the tier is made so that they cannot."""
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


def test_a_place_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    """Another user's directory, say: the error is ours, and says which."""
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        find_memory_root(tmp_path, SHARED_MEMORY / ("x" * 300))


def test_true_is_a_place_in_shared_memory(root: Path) -> None:
    """Made for this user alone, and found again by the next process."""
    tier = find_memory_root(root, True)
    try:
        with CheckpointManager(root, memory=True, copies=1, preempt_on=()) as manager:
            manager.save(1, state(1))
        assert (steps_in(tier), steps_in(root)) == ({1}, set())
        assert not stat.S_IMODE(tier.stat().st_mode) & 0o077
    finally:
        stop_agent(tier)
        shutil.rmtree(tier)


def test_what_the_tier_has_already_is_room_for_it(memory: Path) -> None:
    """A restarted job is not refused because of its own earlier checkpoints."""
    memory.mkdir(parents=True)
    size = 8 << 20
    (memory / "file").write_bytes(bytes(size))
    os.link(memory / "file", memory / "link")  # as of a recycled file: it takes its memory once
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
    """Such a file system says zeros of its size; what the machine has is the limit."""
    with opened(root, unlimited / "tier", disk_every=100) as manager:
        manager.save(1, state(1))
    assert main(["verify", "--root", str(unlimited / "tier"), "step-1"]) == ExitCode.OK
    assert not lacks_room_to_start(unlimited)


def test_a_relative_root_in_a_working_directory_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is without a memory tier, whose path follows from the root's."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigInvalid, match="the working directory of this process no longer exists"):
        find_memory_root("ckpt", memory=True)
