"""Threads that cannot be started: the hint fits the cause."""

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
    """The hint names the limit of threads, or the end of the interpreter. Only the latter is also logged."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable, match="cannot start a thread") as raised:
        start_thread(threading.Thread(name="rckpt-sink"))
    assert advice in raised.value.hint
    assert bool(caplog.records) == is_logged


def test_at_exit_a_thread_runs_or_the_log_has_the_reason() -> None:
    """At interpreter exit a save's error is read by no caller, so the log has it. Only Python 3.12.0 to 3.12.2 start no
    thread then.
    """
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    if (3, 12, 0) <= sys.version_info < (3, 12, 3):
        assert "has failed" in ended.stderr
        assert "wait for the save first" in ended.stderr
    else:
        assert ended.stdout == "it runs\n", ended.stderr
