"""The end of a save that was acknowledged as staged, as ranks follow it: nothing is taken for its end that is none."""

import gc
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from replicated_ckpt import CheckpointManager, ReplicatedWriter
from replicated_ckpt.agent.saves.shard_copies import WrittenCopies
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.hand_over import ending, patience
from replicated_ckpt.dcp.hand_over.ending import Ending, await_last, find_last, keep_last
from replicated_ckpt.dcp.hand_over.finishing import AgentSilent
from replicated_ckpt.dcp.hand_over.outcome import telling_end
from replicated_ckpt.dcp.save import attempt
from replicated_ckpt.dcp.save.attempt import SaveAttempt
from replicated_ckpt.errors import ReplicatedCkptError, SaveAborted, StoreUnavailable
from replicated_ckpt.stores.local.directories.intent import Intent
from tests.agent.agents import running_agent, wait_for
from tests.gloo import group_of_one

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
SAVE, TIMEOUT_S = "5" * 32, 20.0


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def held_back(gate: threading.Event) -> Callable[[Ending], object]:
    def work(ending: Ending) -> None:
        ending.acknowledge()
        assert gate.wait(TIMEOUT_S)

    return work


def _await_end(session: str, ended: Ending) -> None:
    await_last(session)
    ended.wait()
    ended.end.result()


def test_a_forked_child_waits_for_no_end(gate: threading.Event) -> None:
    """The thread that follows the save is the parent's; there it goes on."""
    followed = Ending(held_back(gate))
    keep_last("forked", followed)
    child = get_context("fork").Process(target=_await_end, args=("forked", followed))
    child.start()
    child.join(20)
    child.kill()
    assert child.exitcode == 0
    assert not followed.end.done()
    gate.set()
    _await_end("forked", followed)


class Worked:
    """What a save works on."""


def test_a_save_that_has_failed_holds_nothing_of_the_state(gate: threading.Event) -> None:
    """Its error says where it was raised, and why; no frame in it, and nothing of ours, keeps what was worked on."""
    held: list[weakref.ref[Worked]] = []

    def work(worked: Worked, ending: Ending) -> None:
        inner = Worked()
        held.extend([weakref.ref(worked), weakref.ref(inner)])
        ending.acknowledge()
        assert gate.wait(TIMEOUT_S)
        try:
            Path("/no/such/disk").stat()
        except OSError as exc:
            raise StoreUnavailable("this node", "finish", "the save", "it failed") from exc

    gc.collect()
    gc.disable()
    try:
        followed = Ending(partial(work, Worked()))
        keep_last("failed", followed)
        assert find_last("failed") is followed
        gate.set()
        error = followed.end.exception(TIMEOUT_S)
        wait_for(lambda: [ref() for ref in held] == [None, None], TIMEOUT_S, "the end of the thread")
    finally:
        gc.enable()
    assert error is not None
    lines = "".join(traceback.format_exception(error))
    assert "/no/such/disk" in lines
    assert "in work" in lines
    ended = weakref.ref(followed)
    del followed, error
    gc.collect()
    assert ended() is None


def acknowledged(root: Path, reports: list[Any], board: Blackboard | None = None) -> SaveAttempt:
    """A save of a rank that is not the coordinator's, at the moment in which it learns of the acknowledgement."""
    parts = ReplicatedWriter(root, ack="staged")._parts
    made = SaveAttempt(parts, World(1, 2, board), "step-1", {}, reports.append)
    made._decision = SimpleNamespace(save_id=SAVE, checkpoint_id="step-1")  # type: ignore[assignment]
    return made


def test_a_save_that_is_given_up_at_once_is_not_reported(tmp_path: Path) -> None:
    """Nothing of it is staged any more when a rank looks first: that is not the commit, and `wait` raises it."""
    reports: list[Any] = []
    made = acknowledged(tmp_path, reports)
    made._learn_committed()
    assert made.ending is not None
    with pytest.raises(SaveAborted, match="was given up"):
        made.ending.end.result(TIMEOUT_S)
    assert reports == []


def test_a_save_whose_end_cannot_be_read_here_is_not_said_to_be_given_up(tmp_path: Path) -> None:
    """The manifest that has its name is damaged on this node: others say what it is, and `wait` says so."""
    made = acknowledged(tmp_path, [])
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / ".manifest.json").write_bytes(b"{")
    made._learn_committed()
    assert made.ending is not None
    with pytest.raises(StoreUnavailable, match=r"cannot read what has its name.*Other nodes say"):
        made.ending.end.result(TIMEOUT_S)


def test_a_rank_does_not_follow_a_save_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator's node is lost, and the save stays staged: what waits for the end of it goes on."""
    monkeypatch.setattr(patience, "FOLLOWED_STAGED_S", 0.1)
    made = acknowledged(tmp_path, [])
    made._store.begin(Intent(SAVE, "step-1", "session", overwrite=True))
    made._learn_committed()
    assert made.ending is not None
    with pytest.raises(StoreUnavailable, match="it is staged here"):
        made.ending.end.result(TIMEOUT_S)


def test_a_rank_whose_agent_hangs_is_told_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator's agent gives the save up, and cannot tell this node's: what kept it from the shard is raised."""
    monkeypatch.setattr(patience, "FOLLOWED_FAILED_S", 0.1)
    made = acknowledged(tmp_path, [])
    made._store.begin(Intent(SAVE, "step-1", "session", overwrite=True))
    end: Future[WrittenCopies] = Future()
    made._held.follow(SimpleNamespace(end=end, leave=lambda: None))  # type: ignore[arg-type]
    made._learn_committed()
    assert made.ending is not None
    assert not wait([made.ending.end], 0.5).done, "the agent may write it yet"
    end.set_exception(StoreUnavailable("this node's agent", "hand over", "the shard", "it hangs"))
    with pytest.raises(StoreUnavailable, match="it hangs"):
        made.ending.end.result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AgentSilent("this node's agent", "finish", SAVE, "timed out"), "at the agent of rank 0's node: timed out"),
        (OSError("on purpose"), "Rank 0 failed to complete save 5+: OSError: on purpose. It is not given up"),
    ],
)
def test_what_the_coordinator_fails_with_reaches_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    """Its agent hangs with the decision, and the save stays staged on other nodes: their ranks raise the same, soon."""
    monkeypatch.setattr(patience, "TOLD_EVERY_S", 0.1)
    store = dist.HashStore()
    made = acknowledged(tmp_path, [], Blackboard(store, 1, 2))
    made._store.begin(Intent(SAVE, "step-1", "session", overwrite=True))
    made._held.hold(made._store, SAVE)
    made._learn_committed()
    assert made.ending is not None
    for save_id in ("6" * 32, SAVE):
        assert not wait([made.ending.end], 0.5).done, "what is told is of another save, or nothing"
        with pytest.raises(ReplicatedCkptError), telling_end(Blackboard(store, 0, 2), made._store, save_id):
            raise error
    with pytest.raises(ReplicatedCkptError, match=told):
        made.ending.end.result(TIMEOUT_S)
    assert made._store.is_staged(SAVE), "the agent that rank 0 could not reach may have decided"
    assert not made._store.is_held(SAVE), "agents settle it"


@pytest.mark.parametrize("error", [OSError("on purpose"), MemoryError("on purpose")])
def test_what_fails_after_the_commit_says_that_the_save_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It was raised bare by `wait` at rank 0, and told nothing of the save."""

    def fail(*_: Any) -> None:
        raise error

    writer = ReplicatedWriter(tmp_path, ack="staged")
    monkeypatch.setattr(attempt, "remember", fail)
    with running_agent(tmp_path, "--idle-exit-s", "60"), group_of_one():
        dcp.async_save({"t": torch.ones(1 << 16)}, checkpoint_id="step-1", storage_writer=writer)
        with pytest.raises(
            ReplicatedCkptError, match=f"{type(error).__name__}: on purpose. It is committed, as 'step-1'"
        ):
            writer.wait(TIMEOUT_S, ack="peer")
    assert main(["verify", "step-1", "--root", str(tmp_path)]) == ExitCode.OK


def test_a_node_that_cannot_publish_a_committed_save_does_not_hold_its_ranks_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk is full, say: rank 0 says that other nodes have the save, though it has ended newer ones by then."""
    monkeypatch.setattr(patience, "TOLD_EVERY_S", 0.5)
    reports: list[str] = []
    store = dist.HashStore()
    made = acknowledged(tmp_path, [], Blackboard(store, 1, 2))
    monkeypatch.setattr(made, "_report_committed", lambda: reports.append("step-1"))
    made._store.begin(Intent(SAVE, "step-1", "session", overwrite=True))
    made._held.hold(made._store, SAVE)
    made._learn_committed()
    assert made.ending is not None
    for save_id in (SAVE, "6" * 32):
        with telling_end(Blackboard(store, 0, 2), made._store, save_id):
            pass
    made.ending.end.result(TIMEOUT_S)
    assert reports == ["step-1"]
    assert "not published on this node yet" in caplog.text
    assert not made._store.is_held(SAVE), "agents settle it"


def test_saves_are_reported_in_their_order(tmp_path: Path, gate: threading.Event) -> None:
    """The later one is seen published first, as a rank looks for the one before from time to time only."""
    made = acknowledged(tmp_path, [])
    last = Ending(held_back(gate))
    keep_last(made._world.session, last)
    made._learn_committed()
    assert made.ending is not None
    assert not wait([made.ending.end], 0.5).done
    gate.set()
    assert wait([made.ending.end], TIMEOUT_S).done
    assert last.end.done()


def test_an_interrupted_wait_for_the_save_before_is_made_again(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next save is opened too early, and ends one that was acknowledged."""
    last = Ending(held_back(gate))
    keep_last("session", last)

    def interrupted(futures: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ending, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await_last("session")
    threading.Timer(0.2, gate.set).start()
    await_last("session")
    assert last.end.done()


def test_an_interrupted_wait_for_the_acknowledgement_says_that_the_save_goes_on(gate: threading.Event) -> None:
    """Ctrl-C while `dcp.save` waits: the error names the save, that it may be committed, and what tells; and it goes on."""
    waiter = threading.get_ident()

    def is_waiting() -> bool:
        frame, names = sys._current_frames().get(waiter), []
        while frame is not None:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        return "Ending.wait_for_acknowledgement" in names[1:] and "Event.wait" in names

    def work(ending: Ending) -> None:
        while not is_waiting():
            time.sleep(0.01)
        signal.pthread_kill(waiter, signal.SIGINT)
        held_back(gate)(ending)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        last = Ending(work)
        with pytest.raises(AgentSilent, match=f"{SAVE}.*interrupted by KeyboardInterrupt") as raised:
            last.wait_for_acknowledgement(SAVE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "may commit it" in raised.value.hint
    assert "writer.wait(ack=" in raised.value.hint
    gate.set()
    last.end.result(TIMEOUT_S)


def test_what_an_ending_calls_does_not_wait_for_it(tmp_path: Path, gate: threading.Event) -> None:
    """`on_save` may wait, or close the writer: the thread that calls it is the one that would be waited for."""
    writer = ReplicatedWriter(tmp_path, ack="staged")

    def work(ending: Ending) -> None:
        held_back(gate)(ending)
        writer.wait(0.1, ack="peer")
        writer.raise_failure()
        writer.close()

    writer._attempt = acknowledged(tmp_path, [])
    writer._attempt.ending = Ending(work)
    next_save: Future[Any] = Future()  # it waits for this one, before it is opened
    writer._stager.follow(next_save)
    gate.set()
    writer._attempt.ending.end.result(TIMEOUT_S)
    assert not next_save.done()


def test_wait_raises_a_failure_whose_future_was_not_kept(tmp_path: Path) -> None:
    """`wait(ack=...)` returning is the acknowledgement: that of a save that has failed never comes."""
    writer = ReplicatedWriter(tmp_path)
    saving = dcp.async_save({"lock": threading.Lock()}, checkpoint_id="step-1", storage_writer=writer)
    writer._stager.wait_for_last()
    del saving
    gc.collect()
    with pytest.raises(ReplicatedCkptError, match="has failed"):
        writer.wait(TIMEOUT_S, ack="peer")
    dcp.async_save({"t": torch.ones(3)}, checkpoint_id="step-2", storage_writer=writer)
    assert writer.wait(TIMEOUT_S, ack="peer") == ()


def test_the_second_close_of_a_manager_raises_nothing(tmp_path: Path) -> None:
    """What failed after the acknowledgement is raised once: `with` closes what was closed inside it."""

    def fail(ending: Ending) -> None:
        ending.acknowledge()
        raise SaveAborted("It fails late.")

    manager = CheckpointManager(tmp_path, preempt_on=(), ack="staged")
    manager.async_save(1, {"t": torch.ones(3)})
    manager.wait()
    made = manager._checkpoints.writer._attempt
    assert made is not None
    made.ending = Ending(fail)
    with pytest.raises(SaveAborted, match="late"):
        manager.close()
    manager.close()
