"""CheckpointManager called during another call of the same manager: by a signal handler, a callback or a forked child."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from replicated_ckpt import CheckpointManager
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.errors import ConfigInvalid
from tests.agent.agents import wait_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def state(value: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(value)), "step": value}


def _save_and_close(manager: CheckpointManager) -> None:
    manager.save(2, state(2))
    manager.close()


def test_a_child_that_is_forked_waits_for_no_save_of_its_parent(tmp_path: Path) -> None:
    """A forked child does not have the parent's saving thread. Its own save and `close` do not wait for the parent's
    save.
    """
    parent, gate = os.getpid(), threading.Event()
    with CheckpointManager(tmp_path, on_save=lambda _: os.getpid() != parent or gate.wait(60)) as manager:
        manager.async_save(1, state(1))
        wait_for((tmp_path / "step-1" / ".metadata").exists, 20, "the commit")
        child = get_context("fork").Process(target=_save_and_close, args=(manager,))
        child.start()
        child.join(30)
        child.kill()
        gate.set()
        assert child.exitcode == 0
        manager.async_save(3, state(3))
    assert main(["verify", "--root", str(tmp_path)]) == ExitCode.OK
    assert {path.parent.name for path in tmp_path.glob("*/.metadata")} == {"step-1", "step-2", "step-3"}


@pytest.mark.parametrize("call", ["save", "async_save"])
@pytest.mark.parametrize("inner", ["save", "close"])
def test_a_signal_handler_is_refused_in_the_middle_of_a_call(tmp_path: Path, call: str, inner: str) -> None:
    """A signal handler that calls the manager during a call gets ConfigInvalid, as it would wait for locks of the
    interrupted call. Between calls it may call.
    """
    raised: list[ConfigInvalid] = []

    def handle(*_: object) -> None:
        try:
            getattr(manager, inner)(*{"save": (2, state(2))}.get(inner, ()))
        except ConfigInvalid as exc:
            raised.append(exc)

    class Signalling:
        """Raises a signal while it is pickled or copied."""

        def __reduce__(self) -> Any:
            signal.raise_signal(signal.SIGALRM)
            return str, ("",)

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with CheckpointManager(tmp_path) as manager:
            getattr(manager, call)(1, {**state(1), "signal": Signalling()})
            manager.wait()
            assert [str(exc) for exc in raised if "signal handler" in str(exc)] == [str(exc) for exc in raised] != []
            raised.clear()
            signal.raise_signal(signal.SIGALRM)
            assert not raised
    finally:
        signal.signal(signal.SIGALRM, before)
    assert main(["verify", "--root", str(tmp_path)]) == ExitCode.OK


def test_callbacks_may_call_the_manager(tmp_path: Path) -> None:
    """`on_save` and `on_load` of synchronous calls may call `latest_step`: no lock is held then."""
    told: list[Any] = []
    manager: CheckpointManager
    ask: dict[str, Any] = {key: lambda _: told.append(manager.latest_step()) for key in ("on_save", "on_load")}
    with CheckpointManager(tmp_path, **ask) as manager:
        manager.save(1, state(1))
        manager.restore(state(0))
    assert told == [1, 1]


def test_close_needs_the_main_thread(tmp_path: Path) -> None:
    """`close` outside the main thread raises and changes nothing. `close` in the main thread waits for the save and
    restores the signal handler.
    """
    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(tmp_path)
    manager.async_save(1, state(1))
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigInvalid, match="main thread"):
        pool.submit(manager.close).result()
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert main(["verify", "--root", str(tmp_path)]) == ExitCode.OK
