"""CheckpointManager on one process, without a process group."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, ReplicatedWriter
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.errors import ConfigInvalid, ShardLost
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent, stop_agent, wait_for
from tests.damage import flip

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def state(value: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(value)), "step": value}


def test_the_last_step_is_restored(tmp_path: Path) -> None:
    """`restore_latest` returns None at first, then the last step with its values, saved synchronously or in the
    background.
    """
    with CheckpointManager(tmp_path) as manager:
        found = state(0)
        assert manager.restore_latest(found) is None
        assert found["step"] == 0
        manager.save(1, state(1))
        saved = state(2)
        manager.async_save(2, saved)
        saved["weights"].zero_()  # training may change the state again
        assert manager.restore_latest(found) == 2
        assert (found["step"], float(found["weights"].mean())) == (2, 2.0)
        manager.async_save(10, state(10))
        assert manager.wait() == ()
    again = state(0)
    assert CheckpointManager(tmp_path, preempt_on=()).restore_latest(again) == 10
    assert again["step"] == 10


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    """A step is replaced when the job saves the same step again. overwrite=False refuses that."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.save(1, state(3))
        found = state(0)
        assert manager.restore_latest(found) == 1
        assert found["step"] == 3
    with (
        CheckpointManager(tmp_path, writer_options={"overwrite": False}) as manager,
        pytest.raises(CheckpointException, match="exists"),
    ):
        manager.save(1, state(1))


@pytest.mark.parametrize("call", ["save", "async_save", "restore", "latest_step", "all_steps", "wait", "close"])
def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path: Path, call: str) -> None:
    """The next call raises the background save's error, once. The save after that succeeds."""
    manager = CheckpointManager(tmp_path)
    (tmp_path / "step-1").touch()  # a plain file is never replaced
    manager.async_save(1, state(1))
    arguments = {"save": (2, state(2)), "async_save": (2, state(2)), "restore": (state(0),)}
    with pytest.raises(CheckpointException, match="step-1"):
        getattr(manager, call)(*arguments.get(call, ()))
    assert [path.parent.name for path in tmp_path.glob("*/.metadata")] == []
    with CheckpointManager(tmp_path) if call == "close" else manager as after:
        after.save(3, state(3))
    assert [path.parent.name for path in tmp_path.glob("*/.metadata")] == ["step-3"]


def test_steps_are_saved_as_often_as_asked_for(tmp_path: Path) -> None:
    """`should_save` is true for every 5th step with every=5."""
    with CheckpointManager(tmp_path, every=5) as manager:
        assert [step for step in range(1, 12) if manager.should_save(step)] == [5, 10]
        assert not manager.preempted


def test_a_signal_asks_for_one_more_save(tmp_path: Path) -> None:
    """After SIGTERM `should_save` is true for the next step. An earlier handler is called, too, and `close` restores
    it.
    """
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with CheckpointManager(tmp_path, every=100) as manager:
            assert not manager.should_save(1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert [manager.should_save(step) for step in (2, 3, 100)] == [True, False, True]
            assert manager.preempted
            assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_on(runs: Any) -> None:
    runs.set()
    for _ in range(600):  # in short pieces: Python handles a signal from just before a sleep only at its end
        time.sleep(0.1)


def test_a_child_that_is_forked_can_be_ended(tmp_path: Path) -> None:
    """In a forked child SIGTERM has the handler from before the manager, as the child calls no `should_save`."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with CheckpointManager(tmp_path) as manager:
            context = get_context("fork")
            runs = context.Event()
            child = context.Process(target=_run_on, args=(runs,))
            child.start()
            assert runs.wait(20)  # Python drops a signal that arrives while it forks the child
            child.terminate()
            child.join(20)
            assert child.exitcode == -signal.SIGTERM
            assert not manager.preempted
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupting(Future[Any]):
    """A running save. The first wait for it raises KeyboardInterrupt."""

    waits = 0

    def result(self, timeout: float | None = None) -> Any:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        self.set_result(None)
        return super().result(timeout)


@pytest.mark.parametrize("call", ["restore", "latest_step", "save", "close"])
def test_after_an_interrupted_wait_the_next_call_waits(tmp_path: Path, call: str) -> None:
    """After an interrupted wait the save goes on, and the next call waits for it. Otherwise two threads would use one
    group.
    """
    manager = CheckpointManager(tmp_path, preempt_on=())
    manager.save(1, state(1))
    manager._in_flight = "step-2", (future := Interrupting())
    with pytest.raises(KeyboardInterrupt):
        manager.wait()
    getattr(manager, call)(*{"restore": (state(0),), "save": (3, state(3))}.get(call, ()))
    assert future.waits == 2
    manager.close()
    assert main(["verify", "--root", str(tmp_path)]) == ExitCode.OK


def test_every_so_many_checkpoints_go_to_the_bucket(tmp_path: Path) -> None:
    """With object_every=2 every second checkpoint is uploaded. `wait` returns its id, and a blank node restores it from
    the bucket.
    """
    bucket = f"memory://{tmp_path.name}/run"
    with CheckpointManager(tmp_path / "lost", object_store=bucket, object_every=2) as manager:
        for step in (10, 20, 30):
            manager.async_save(step, state(step))
        assert manager.wait() == ("step-20",)
    found = state(0)
    with CheckpointManager(tmp_path / "blank", object_store=bucket) as manager:
        assert manager.restore_latest(found) == 20
    assert found["step"] == 20


def test_lost_checkpoints_are_errors_and_other_names_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If all checkpoints are incomplete, `restore_latest` raises ShardLost. If only checkpoints with other names exist,
    it returns None and a warning lists them.
    """
    with CheckpointManager(tmp_path / "lost") as manager:
        manager.save(1, state(1))
        (tmp_path / "lost" / "step-1" / "__0_0.distcp").unlink()
        with pytest.raises(ShardLost):
            manager.restore_latest(state(0))
    dcp.save(state(1), checkpoint_id="epoch-1", storage_writer=ReplicatedWriter(tmp_path / "theirs"))
    with CheckpointManager(tmp_path / "theirs") as manager:
        assert (manager.restore_latest(state(0)), manager.latest_step(), manager.all_steps()) == (None, None, ())
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "No checkpoint named step-N was found. There are others: 'epoch-1'." in told


@pytest.mark.parametrize("has_agent", [True, False])
def test_damage_that_a_restore_finds_is_skipped_by_the_next_one(tmp_path: Path, has_agent: bool) -> None:
    """Without a process group, too, a job that is started again gets past a damaged newest checkpoint."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    stop_agent(tmp_path)
    flip(tmp_path / "step-2" / "__0_0.distcp")
    with running_agent(tmp_path) if has_agent else nullcontext(), CheckpointManager(tmp_path) as manager:
        with pytest.raises(CheckpointException, match='"latest" takes the newest one without known damage'):
            manager.restore(state(0))
        wait_for(lambda: DamageBook(LocalStore(tmp_path)).read_all(), 20, "the agent's own read")
        found = state(0)
        assert manager.restore(found) == 1
        assert found["step"] == 1
        assert main(["verify", "step-1", "--root", str(tmp_path)]) == ExitCode.OK


@pytest.mark.parametrize(
    "arguments",
    [
        {"every": 0},
        {"preempt_on": "SIGTERM"},
        {"preempt_on": ("SIGKILL",)},
        {"preempt_on": ("TERM",)},
        {"disk_every": 2},
        {"on_save": 3},
    ],
)
def test_arguments_that_cannot_work_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """The constructor raises ConfigInvalid that names the argument, and installs no signal handler."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigInvalid, match=next(iter(arguments))):
        CheckpointManager(tmp_path, **arguments)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("step", [np.int64(2), torch.tensor(2), torch.tensor(2, dtype=torch.int32)])
def test_a_step_may_be_an_integer_of_numpy_or_torch(tmp_path: Path, step: Any) -> None:
    """A step may be an integer of numpy or torch. The manager returns it as an int."""
    found = state(0)
    with CheckpointManager(tmp_path, every=2) as manager:
        assert manager.should_save(step)
        manager.save(step, state(2), metrics={"loss": 1.0})
        assert manager.restore(found, step) == 2
        assert (type(manager.all_steps()[0]), manager.notes(step).step) == (int, 2)
        assert manager.best_step("loss") == 2
    assert found["step"] == 2


@pytest.mark.parametrize("step", [-1, True, 1.0, np.float64(1.0), torch.tensor([1, 2]), torch.tensor(1.0)])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    """`save` refuses a step that is not a non-negative integer."""
    with CheckpointManager(tmp_path) as manager, pytest.raises(ConfigInvalid, match="step"):
        manager.save(step, state(1))


def test_should_save_needs_a_step(tmp_path: Path) -> None:
    """`should_save` refuses what is no step, as `save` does."""
    with CheckpointManager(tmp_path) as manager, pytest.raises(ConfigInvalid, match="step must be"):
        manager.should_save("x")  # type: ignore[arg-type]


def test_signals_need_the_main_thread(tmp_path: Path) -> None:
    """Outside the main thread the constructor raises, unless preempt_on=() is given."""
    raised: list[BaseException] = []

    def made() -> None:
        try:
            CheckpointManager(tmp_path)
        except ConfigInvalid as exc:
            raised.append(exc)
        CheckpointManager(tmp_path, preempt_on=()).save(1, state(1))

    thread = threading.Thread(target=made)
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert (tmp_path / "step-1" / ".metadata").exists()
