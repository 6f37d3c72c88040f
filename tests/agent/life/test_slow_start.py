"""An agent takes long to start: who waits for it, and for how long."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.agent import launch
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.endpoint import is_free, root_lock
from replicated_ckpt.core.layout import MANIFEST_NAME, STAGING_DIR, gone_name
from replicated_ckpt.errors import AgentUnavailable
from replicated_ckpt.stores.files.locks import exclusive, holder_of, is_stopped
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent, wait_for
from tests.agent.checkpoints import checkpointed, shard
from tests.harness.processes import stop_process

LONG_S = 2.0
SLOW = f"""
import sys, time
from replicated_ckpt.agent.__main__ import main
from replicated_ckpt.node.saves.service import NodeService
recover = NodeService.recover
NodeService.recover = lambda self: (time.sleep({LONG_S}), recover(self))[1]
sys.exit(main())
"""
"""The command of an agent whose start-up takes LONG_S more, as on a slow disk."""
WAITER = """
import sys, time
from pathlib import Path
from replicated_ckpt.stores.files.locks import exclusive
print("waits", flush=True)
with exclusive(Path(sys.argv[1])):
    print("has it", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def starting(store: LocalStore) -> Iterator["subprocess.Popen[bytes]"]:
    """A starting agent that holds the root's lock and does not answer yet."""
    command = [sys.executable, "-c", SLOW, "--root", str(store.root)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: not is_free(store.agent_directory()), 60, "the lock of the root")
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOPPED_TIMEOUT_S", 0.1)


def test_a_rank_waits_for_a_starting_agent(tmp_path: Path) -> None:
    """A rank waits for an agent that systemd started and that is slow on a cold disk."""
    store = LocalStore(tmp_path)
    with starting(store) as process:
        assert ensure_agent(store, "127.0.0.1").pid == process.pid


def test_a_starting_agent_that_is_stopped_is_named(tmp_path: Path) -> None:
    """A starting agent is stopped: ranks raise after the usual timeout, with the command that continues it. Later they
    use that agent.
    """
    store = LocalStore(tmp_path)
    with starting(store) as process:
        stop_process(process.pid)
        with pytest.raises(AgentUnavailable, match="may be stopped") as raised:
            ensure_agent(store, "127.0.0.1")
        assert f"`kill -CONT {process.pid}`" in str(raised.value.hint)
        assert "End of its log: " in raised.value.message
        process.send_signal(signal.SIGCONT)
        assert ensure_agent(store, "127.0.0.1").pid == process.pid


def test_the_holder_of_a_lock_is_its_process(tmp_path: Path) -> None:
    """The holder of a lock is neither a process that had it before nor one that waits for it."""
    with subprocess.Popen([sys.executable, "-c", WAITER, str(tmp_path)], stdout=subprocess.PIPE) as waiter:
        with exclusive(tmp_path):
            assert waiter.stdout is not None
            assert waiter.stdout.readline() == b"waits\n"
            assert holder_of(tmp_path) == os.getpid()
        assert waiter.stdout.readline() == b"has it\n"
        assert holder_of(tmp_path) == waiter.pid
        assert not is_stopped(waiter.pid)
        waiter.kill()
    assert holder_of(tmp_path) is None
    assert holder_of(tmp_path / "none") is None


def test_an_interrupted_removal_does_not_delay_the_agent(tmp_path: Path) -> None:
    """An interrupted removal may take long to complete: the agent answers before."""
    store = LocalStore(tmp_path)
    manifest = checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    left = tmp_path / "step-1" / gone_name(manifest.save_id)
    (tmp_path / "step-1" / MANIFEST_NAME).rename(left)
    with contextlib.ExitStack() as held:
        held.enter_context(exclusive(tmp_path / STAGING_DIR))  # nothing can be removed
        with running_agent(tmp_path) as agent:
            with agent.client() as client:
                assert client.call("GET", "/v1/status?brief=1")["node_id"] == store.node_id()
            assert left.exists()
            held.close()
            wait_for(lambda: not (tmp_path / "step-1").exists(), 10, "the end of the removal")


def test_an_agent_that_was_just_killed_is_followed_by_another(tmp_path: Path) -> None:
    """A killed agent holds the lock of the root until the system has freed its memory: a rank waits, and starts the
    next agent.
    """
    store = LocalStore(tmp_path / "a")
    dying = root_lock(store.agent_directory())
    assert dying is not None
    threading.Timer(1.0, dying.release).start()
    agent = ensure_agent(store, "127.0.0.1")
    os.kill(agent.pid, signal.SIGTERM)
    wait_for(lambda: is_free(store.agent_directory()), 30, "the end of the agent")
