"""Garbage collection is paused while DCP plans, and resumes however the save or load ends."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.runtime import gc_pause
from replicated_ckpt.dcp.runtime.gc_pause import Pause, pause_collections
from tests.agent.agents import wait_for
from tests.gloo import group_of_one

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]

MANY = 4000
"""Number of tensors. DCP's plan of them creates enough objects for several full collections."""


def is_collecting() -> bool:
    """Whether automatic collection is on, as far as pauses control it."""
    return gc.get_threshold()[0] > 0


@pytest.fixture(autouse=True)
def no_earlier_pause() -> None:
    """Ends pauses that failed saves or loads of earlier tests have left."""
    for pause in list(gc_pause._ends):
        pause.end_pause()


@contextmanager
def full_collections() -> Iterator[list[int]]:
    """Records each collection of the oldest generation."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def many_tensors() -> dict[str, Any]:
    return {f"weight.{number}": torch.full((2,), float(number)) for number in range(MANY)}


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == gc_pause.WATCHER]


class FailingPlanner(DefaultSavePlanner):
    """Fails in its local plan."""

    def create_local_plan(self) -> SavePlan:
        raise ArithmeticError("no plan")


class FailingLoadPlanner(DefaultLoadPlanner):
    """Fails in its local plan."""

    def create_local_plan(self) -> LoadPlan:
        raise ArithmeticError("no plan")


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pause, "LONGEST_S", 0.2)


@pytest.mark.usefixtures("short_pauses")
def test_a_planner_that_fails_leaves_collections_on(tmp_path: Path) -> None:
    """After a save or load that failed in planning, garbage collection is on again."""
    writer, reader = ReplicatedWriter(tmp_path), ReplicatedReader(tmp_path)
    dcp.save({"a": torch.ones(2)}, checkpoint_id="whole", storage_writer=writer)
    with pytest.raises(CheckpointException, match="no plan"):
        dcp.save({"a": torch.ones(2)}, checkpoint_id="b", storage_writer=writer, planner=FailingPlanner())
    wait_for(is_collecting, 30, "collections are on")
    with pytest.raises(CheckpointException, match="no plan"):
        dcp.load({"a": torch.ones(2)}, checkpoint_id="whole", storage_reader=reader, planner=FailingLoadPlanner())
    wait_for(is_collecting, 30, "collections are on")


def test_a_save_and_a_load_of_many_tensors_bring_no_full_collection_about(tmp_path: Path) -> None:
    """A save and a load of 4,000 tensors cause no full collection."""
    writer, reader = ReplicatedWriter(tmp_path), ReplicatedReader(tmp_path)
    state = many_tensors()
    with full_collections() as seen:
        dcp.save(state, checkpoint_id="a", storage_writer=writer)
        found = {name: torch.zeros(2) for name in state}
        dcp.load(found, checkpoint_id="a", storage_reader=reader)
    assert not seen
    assert is_collecting()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_an_asynchronous_save_of_many_tensors_brings_no_full_collection_about(root: Path) -> None:
    """An asynchronous save copies and plans 4,000 tensors without a full collection."""
    with group_of_one():
        state = many_tensors()
        with full_collections() as seen, closing(ReplicatedWriter(root)) as writer:
            future: Any = dcp.async_save(state, checkpoint_id="a", storage_writer=writer)
            future.result(60)
        assert not seen
        assert is_collecting()
        found = {name: torch.zeros(2) for name in state}
        dcp.load(found, checkpoint_id="a", storage_reader=ReplicatedReader(root))
        assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("threshold", [0, 700])
def test_collections_that_a_user_disabled_stay_off(tmp_path: Path, threshold: int) -> None:
    """Where the user has disabled garbage collection, saves and loads leave it disabled and keep its threshold."""
    thresholds = gc.get_threshold()
    gc.disable()
    gc.set_threshold(threshold)
    try:
        dcp.save({"a": torch.ones(2)}, checkpoint_id="a", storage_writer=ReplicatedWriter(tmp_path))
        dcp.load({"a": torch.ones(2)}, checkpoint_id="a", storage_reader=ReplicatedReader(tmp_path))
        assert not gc.isenabled()
        assert gc.get_threshold()[0] == threshold
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


def test_settings_of_a_user_during_a_pause_stay() -> None:
    """The end of a pause keeps the settings that the user changed during the pause."""
    thresholds = gc.get_threshold()
    try:
        with pause_collections():
            gc.disable()
            gc.set_threshold(70, 7, 7)
        assert not gc.isenabled()
        assert gc.get_threshold() == (70, 7, 7)
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)


def test_collections_are_on_when_the_last_pause_ends() -> None:
    """Overlapping pauses: collection resumes when the last one ends. Ending a pause twice has no effect."""
    one, other = Pause(), Pause()
    one.begin_pause()
    other.begin_pause()
    one.begin_pause()  # extends the same pause
    with pause_collections():
        one.end_pause()
        one.end_pause()
        other.end_pause()
        assert not is_collecting()
    assert is_collecting()


def holds_in_child(check: Callable[[], object]) -> bool:
    """Whether the check passes in a forked process, which has no watcher thread yet."""
    child = os.fork()
    if not child:
        try:
            check()
        except BaseException:  # noqa: BLE001 - the exit code tells the parent
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("short_pauses")
def test_a_pause_that_is_not_ended_is_over_in_time_and_leaves_no_thread() -> None:
    """A pause that nobody ends is ended by its time limit, and the watcher thread ends."""

    def check() -> None:
        pause = Pause()
        for _ in range(2):
            pause.begin_pause()
            assert not is_collecting()
            wait_for(is_collecting, 30, "collections are on")
            pause.end_pause()
            assert is_collecting()
            wait_for(lambda: not watchers(), 30, "no thread is left")

    assert holds_in_child(check)


def test_many_pauses_cost_one_thread() -> None:
    """One watcher thread serves all pauses."""
    pauses = [Pause() for _ in range(20)]
    for pause in pauses:
        pause.begin_pause()
    assert len(watchers()) == 1
    for pause in pauses:
        pause.end_pause()
    assert is_collecting()


def test_a_child_that_was_forked_during_a_pause_collects() -> None:
    """A process that is forked during a pause has garbage collection on, and can pause it."""
    pause = Pause()

    def check() -> None:
        assert is_collecting()
        pause.end_pause()  # the pause that the parent began
        pause.begin_pause()
        assert not is_collecting()
        pause.end_pause()
        assert is_collecting()

    pause.begin_pause()
    with pause_collections():
        assert holds_in_child(check)
    assert not is_collecting()
    pause.end_pause()
    assert is_collecting()


def test_without_a_watcher_thread_there_is_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the watcher thread cannot start, there is no pause and no error."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def check() -> None:
        pause = Pause()
        pause.begin_pause()
        assert is_collecting()
        pause.end_pause()
        assert is_collecting()

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert holds_in_child(check)
