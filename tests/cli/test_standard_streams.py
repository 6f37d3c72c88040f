"""Commands work with closed standard streams, as in a daemon, and with a limited encoding."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.cli import main
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.layout import AGENT_DIR
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import HOME, wait_for
from tests.agent.checkpoints import checkpointed, shard
from tests.cli.commands import MAIN

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]


def closed(streams: str, *words: str | Path) -> list[str]:
    """The command line of a new process with these streams closed."""
    return ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", MAIN, *map(str, words)]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=3000)
    return store


@pytest.mark.parametrize("streams", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_change_the_exit_code(store: LocalStore, streams: str) -> None:
    """A cron job that only checks the exit code learns that all is intact."""
    done = subprocess.run(closed(streams, "verify", "--root", store.root), timeout=60, check=False)
    assert done.returncode == ExitCode.OK


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_named(store: LocalStore, unbuffered: str) -> None:
    """The output is on a full disk: the error says so, with exit code 1 and without a traceback."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    words = closed(">/dev/full", "ls", "--root", store.root)
    done = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.startswith("replicated-ckpt: standard output cannot be written: No space left on device. Hint:")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("words", "code"), [(("ls", "--root", "none"), ExitCode.NOT_FOUND), (("ls",), ExitCode.USAGE)])
def test_errors_that_cannot_be_written_leave_the_exit_code(tmp_path: Path, words: Sequence[str], code: int) -> None:
    """Standard error is on a full disk: the exit code is still that of the original error."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "", "PYTHONPATH": str(HOME)}
    done = subprocess.run(closed("2>/dev/full", *words), cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == code


def test_a_closed_pipe_is_no_error(store: LocalStore) -> None:
    """`ls | head` ends without an error message."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    words = closed("", "ls", "--root", store.root)
    with os.fdopen(writing, "wb") as output:
        done = subprocess.run(
            words, env=environment, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (ExitCode.FAILED, "")


def test_an_agent_serves_without_streams(store: LocalStore) -> None:
    """An agent starts without standard streams, and stops on SIGTERM."""
    running = subprocess.Popen(closed("<&- >&- 2>&-", "agent", "--root", store.root))
    try:
        wait_for(lambda: read_endpoint(store.root / AGENT_DIR) or running.poll() is not None, 30, "the agent")
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == ExitCode.OK
    finally:
        running.kill()
        running.wait()


def test_characters_that_the_output_cannot_encode_are_escaped(tmp_path: Path) -> None:
    """A name with an umlaut does not fail a command with ASCII output."""
    store = LocalStore(tmp_path / "node")
    checkpointed([store], 1, {shard(0): (0,)}, checkpoint_id="l\u00e4uf", copies=1, size_bytes=3000)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "replicated_ckpt", "ls", "--root", str(store.root)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.OK, b"")
    assert b"l\\xe4uf" in done.stdout


def test_an_interrupt_during_an_import_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the import of a command exits with 130, without a traceback."""
    monkeypatch.setattr(main, "import_module", mock.Mock(side_effect=KeyboardInterrupt))
    assert main.main(["ls", "--root", "x"]) == ExitCode.INTERRUPTED


def test_a_relative_root_needs_a_working_directory(tmp_path: Path) -> None:
    """The working directory was removed: a relative root is a usage error."""
    gone = tmp_path / "gone"
    gone.mkdir()
    words = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, "-c", MAIN, "ls", "--root", "x"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(words, cwd=gone, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.USAGE
    assert "'x' is relative, and the working directory of this process no longer exists" in done.stderr
