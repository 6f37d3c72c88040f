"""Threads that a process does not get: the error tells what to do in this case."""

import logging
import subprocess
import sys
import threading

import pytest

from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.threads import start_thread

AT_EXIT = """
import threading, time
from replicated_ckpt.stores.threads import start_thread
def late():
    threading.main_thread().join()
    time.sleep(0.2)
    start_thread(threading.Thread(target=print, args=("it runs",)))
threading.Thread(target=late).start()
"""


@pytest.mark.parametrize(
    ("said", "advice", "is_logged"),
    [
        ("can't start new thread", "ulimit -u", False),
        ("can't create new thread at interpreter shutdown", "wait for the save first", True),
    ],
)
def test_the_hint_is_for_the_case(
    said: str, advice: str, is_logged: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that cannot be started: the hint is for the limit, or for the end of Python, which the log says, too."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable, match="cannot start a thread") as raised:
        start_thread(threading.Thread(name="rckpt-sink"))
    assert advice in raised.value.hint
    assert bool(caplog.records) == is_logged


def test_at_the_end_of_python_a_thread_runs_or_the_log_says_why_not() -> None:
    """A save is then under way, whose error nothing looks at. Python 3.12.0 to 3.12.2 give no thread."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    if (3, 12, 0) <= sys.version_info < (3, 12, 3):
        assert "has failed" in ended.stderr
        assert "wait for the save first" in ended.stderr
    else:
        assert ended.stdout == "it runs\n", ended.stderr
