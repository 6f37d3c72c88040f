"""A process is stopped (SIGSTOP) in the middle of a commit and continues later: other processes do not wait for it, and
no newer save is lost.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.files import locks
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from tests.agent.agents import HOME, wait_for
from tests.agent.checkpoints import checkpointed, findings, shard
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]

SAVE_IN_A_PROCESS = """
import sys
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.checkpoints import checkpointed, shard
checkpointed([LocalStore(sys.argv[1])], int(sys.argv[2]), {shard(0): [0]}, copies=1)
"""


@contextmanager
def stopped_at(point: str, root: Path, number: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that saves `step-1` for the `number`-th time and is stopped at a failpoint."""
    environment = {**os.environ, "PYTHONPATH": str(HOME), failpoints.ENV: f"{point}=stop"}
    process = subprocess.Popen([sys.executable, "-c", SAVE_IN_A_PROCESS, str(root), str(number)], env=environment)
    try:
        wait_for(lambda: process.poll() is not None or locks.is_stopped(process.pid), 30.0, f"a stop at {point}")
        assert process.poll() is None
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(10)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store with a first version of `step-1`."""
    monkeypatch.setattr(locks, "LOCK_STOPPED_S", 0.2)
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): [0]}, copies=1)
    return store


def sequence(store: LocalStore) -> int:
    return store.catalog.manifest("step-1").sequence


@pytest.mark.parametrize("point", ["commit.checked", "commit.described", "commit.prepared", "commit.named"])
def test_another_save_does_not_wait_for_a_stopped_one(store: LocalStore, point: str, stopwatch: Stopwatch) -> None:
    """The other save fails within seconds, with an error that names the stopped process. After that process has
    continued, a newer save replaces its version.
    """
    with stopped_at(point, store.root, 2) as stopped:
        began = stopwatch.now()
        with pytest.raises(StoreUnavailable, match=f"process {stopped.pid} holds it and is stopped"):
            checkpointed([store], 3, {shard(0): [0]}, copies=1)
        assert stopwatch.now() - began < 10.0
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(20) == 0
    assert sequence(store) == 2
    checkpointed([store], 4, {shard(0): [0]}, copies=1)
    assert sequence(store) == 4
    assert findings(store) == []


def test_a_load_does_not_wait_for_a_stopped_commit(store: LocalStore, stopwatch: Stopwatch) -> None:
    """The load locks the version that the commit is about to replace, and this version stays after the commit has
    continued.
    """
    manifest = store.catalog.manifest("step-1")
    with stopped_at("commit.prepared", store.root, 2) as stopped:
        began = stopwatch.now()
        lock = lock_version(store.catalog, "step-1", manifest.save_id)
        assert stopwatch.now() - began < 10.0
        assert lock is not None
        with lock:
            assert findings(store) == []
            stopped.send_signal(signal.SIGCONT)
            assert stopped.wait(20) == 0
            assert sequence(store) == 2
            assert store.catalog.is_here("step-1", manifest.save_id)
            assert findings(store) == []


def test_a_save_that_opens_later_is_the_newer_one(store: LocalStore) -> None:
    """A coordinator is stopped after it opened its save, and before any node recorded the sequence. Another save that
    opens meanwhile gets a larger sequence.
    """
    service = NodeService(store)
    stopped, later, latest = (
        Intent(f"{number:032x}", f"step-{number}", f"session {number}", overwrite=False) for number in (2, 3, 4)
    )
    known = service.histories("")[""].sequence
    told = [service.open_save(intent)[0][""].sequence for intent in (stopped, later)]
    assert told == [known, known + 1], "the later save got a sequence that the stopped save may use"
    for intent in (stopped, later):
        service.abort(intent.save_id, "by hand")
    assert service.open_save(latest)[0][""].sequence == known, "an aborted save still occupies a sequence"
