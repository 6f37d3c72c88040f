"""Output of the command line: tables, the progress of long work, and a line about a slow bucket."""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from replicated_ckpt.agent.repair.audit import Audit, Auditor
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.threads import start_thread
from replicated_ckpt.wording import align, describe_bytes

_MINUTE_S = 60


def format_moment(unix_s: float) -> str:
    """Local time, or a dash if it is unknown."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if unix_s > 0 else "-"


def format_duration(seconds: float) -> str:
    whole = round(seconds)
    minutes, rest = divmod(whole, _MINUTE_S)
    hours, minutes = divmod(minutes, _MINUTE_S)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The rows below the header, with all columns aligned to the left."""
    return align([header, *rows], left=range(len(header)))


def parse_seconds(text: str) -> float:
    """Parses seconds. Raises ArgumentTypeError: a thread cannot wait for that time."""
    with contextlib.suppress(ValueError):
        # "nan" and "inf" are floats, too; beyond TIMEOUT_MAX a wait raises OverflowError.
        if 0 < float(text) <= threading.TIMEOUT_MAX:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")


_FIRST_S, _EVERY_S = 0.2, 1.0
_CLEAR = "\r\x1b[K"
Look = Callable[[], Mapping[str, tuple[int, int]]]
"""By node that is at work: the bytes done, and their total."""


def read_all(
    store: LocalStore, checkpoint_id: str | None = None, peers: PeerBook | None = None, *, shows_progress: bool = False
) -> Audit:
    """Has every node that answers check every byte, of one checkpoint or of all. On a terminal the progress is shown.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    auditor = Auditor(store, peers=peers)
    with show_progress("verify", "read", auditor.look_how_far, always=shows_progress):
        return auditor.audit(checkpoint_id)


@contextmanager
def show_progress(verb: str, done: str, look: Look, *, always: bool = False) -> Iterator[None]:
    """While the block runs, prints the progress that `look` returns once a second, to a terminal or `always`.

    `look` is called in another thread. `done`: the word after the bytes, such as "read".
    """
    # Without a terminal, a log would fill with lines of progress.
    if not (always or sys.stderr.isatty()):
        yield
        return
    with _Progress(verb, done, look):
        yield


class ProgressLine:
    """A line on standard error. On a terminal each line replaces the last one, and `clear` removes it."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self.every_s = _EVERY_S if self._is_terminal else None
        """Seconds between two lines on a terminal. None: it is not a terminal."""

    def show(self, line: str) -> None:
        shown = (f"{_CLEAR}{line}", "") if self._is_terminal else (line, "\n")
        print(shown[0], end=shown[1], file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_terminal:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


class _Progress:
    """Prints the progress while the block runs. A thread of its own calls `look` once a second."""

    def __init__(self, verb: str, done: str, look: Look) -> None:
        self._verb, self._done = verb, done
        self._look = look
        self._line = ProgressLine()
        self._over = threading.Event()
        self._began_at = time.monotonic()
        self._seen: dict[str, tuple[int, int]] = {}
        self._thread = threading.Thread(target=self._run, name="rckpt-progress", daemon=True)

    def __enter__(self) -> Self:
        start_thread(self._thread)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        self._line.clear()

    def _run(self) -> None:
        wait_s = _FIRST_S
        while not self._over.wait(wait_s):
            wait_s = _EVERY_S
            line = self._describe(self._look(), time.monotonic() - self._began_at)
            # The result may be printed by now: no line of progress may follow it.
            if line and not self._over.is_set():
                self._line.show(f"{self._verb}: {line}")

    def _describe(self, now: Mapping[str, tuple[int, int]], seconds: float) -> str:
        """Counts a node that has stopped working as done."""
        done = {node: (size, size) for node, (_, size) in self._seen.items()}
        self._seen = {**done, **{node: found for node, found in now.items() if found[1]}}
        did, size = (sum(found[place] for found in self._seen.values()) for place in (0, 1))
        return describe_progress(did, size, seconds, self._done)


def describe_progress(done_bytes: int, size_bytes: int, seconds: float, done: str) -> str:
    """The bytes done, the rate, and the remaining time at that rate. Empty if nothing was done yet."""
    if not done_bytes or not size_bytes or seconds <= 0:
        return ""
    rate = done_bytes / seconds
    share = min(1.0, done_bytes / size_bytes)
    left = format_duration(max(0, size_bytes - done_bytes) / rate)
    amount = f"{describe_bytes(min(done_bytes, size_bytes))} of {describe_bytes(size_bytes)} ({share:.0%})"
    return f"{amount} {done}, {describe_bytes(rate)}/s, {left} left"


SAID_AFTER_S = 3.0


@contextmanager
def print_if_slow(url: str) -> Iterator[None]:
    """If the block takes longer than SAID_AFTER_S, prints that the command waits for `url`."""
    timer = threading.Timer(SAID_AFTER_S, _print_slow, [url])
    timer.daemon = True
    start_thread(timer)
    try:
        yield
    finally:
        timer.cancel()


def _print_slow(url: str) -> None:
    print(
        f"waiting for {url} since {SAID_AFTER_S:g} s; the command stops waiting for a silent endpoint after a minute",
        file=sys.stderr,
        flush=True,
    )
