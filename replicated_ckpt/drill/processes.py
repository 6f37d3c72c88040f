"""Processes found by a mark in their environment, which every descendant inherits, detached ones too. Linux only."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

MARK_VARIABLE = "REPLICATED_CKPT_DRILL_NODE"
POLL_S = 0.02


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Delays Ctrl-C and SIGTERM to the end of the block, which starts a process and records it.

    Interrupted in between, the child would not be recorded, and has no mark until it runs its command. A signal that is
    ignored stays ignored. Does nothing outside the main thread, which alone receives signals.

    Raises:
        KeyboardInterrupt: after the block, if one came.
    """
    # Only the main thread may set handlers, and only it is interrupted.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        heard.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # nohup and background shells ignore SIGINT: that must stay so.
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heeded:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)
        if heard:
            raise KeyboardInterrupt


def find_processes(prefix: str) -> tuple[int, ...]:
    """Ids of the living processes whose mark begins with `prefix`, this one excluded."""
    needle = f"{MARK_VARIABLE}={prefix}".encode()
    running = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return tuple(pid for pid in running if pid != os.getpid() and _has_mark(pid, needle))


def kill(prefix: str, limit_s: float) -> bool:
    """Send SIGKILL to all marked processes until none is left, children born meanwhile included.

    Returns: whether none was left within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    # Again and again: a process may fork between the look and its end.
    while pids := find_processes(prefix):
        for pid in pids:
            send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def stop(prefix: str, limit_s: float) -> bool:
    """Send SIGTERM once to all marked processes and wait.

    Returns: whether all of them left within `limit_s`.
    """
    for pid in find_processes(prefix):
        send(pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_s
    while find_processes(prefix):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def send(pid: int, number: signal.Signals) -> None:
    """Signal one process; one that has left already is not an error."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _has_mark(pid: int, needle: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie
    except OSError:  # it left, or belongs to another user
        return False
    return any(entry.startswith(needle) for entry in environment.split(b"\0"))
