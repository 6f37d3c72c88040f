"""Output of the command line: tables, the progress of a long read, and the reason of a wait."""

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


def add_output_argument(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds `-o json`. `more`: what else the help says."""
    said = "text for people (the default), or JSON for programs" + (f"; {more}" if more else "")
    parser.add_argument("-o", "--output", dest="json", type=_is_json, default=False, metavar="{text,json}", help=said)


def _is_json(text: str) -> bool:
    if text not in ("text", "json"):
        raise argparse.ArgumentTypeError(f"it is text or json, not {text!r}")
    return text == "json"


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
    """Aligns all columns to the left. The caller aligns numbers to the right."""
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
"""By node that is reading: the bytes that it has read, and their total."""


def read_all(
    store: LocalStore, checkpoint_id: str | None = None, peers: PeerBook | None = None, *, shows_progress: bool = False
) -> Audit:
    """Has every node that answers check every byte, of one checkpoint or of all. On a terminal the progress is shown.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    auditor = Auditor(store, peers=peers)
    # A log would fill with lines of progress.
    if not (shows_progress or sys.stderr.isatty()):
        return auditor.audit(checkpoint_id)
    with ReadingProgress(auditor.look_how_far):
        return auditor.audit(checkpoint_id)


class ReadingProgress:
    """Prints the progress while the block runs. A thread of its own calls `look` once a second."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._is_terminal = sys.stderr.isatty()
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
        if self._is_terminal:
            print(_CLEAR, end="", file=sys.stderr, flush=True)

    def _run(self) -> None:
        wait_s = _FIRST_S
        while not self._over.wait(wait_s):
            wait_s = _EVERY_S
            line = self._describe(self._look(), time.monotonic() - self._began_at)
            # The result may be printed by now: no line of progress may follow it.
            if not line or self._over.is_set():
                continue
            if self._is_terminal:
                print(f"{_CLEAR}{line}", end="", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)

    def _describe(self, now: Mapping[str, tuple[int, int]], seconds: float) -> str:
        """Counts a node that has stopped reading as done."""
        done = {node: (size, size) for node, (_, size) in self._seen.items()}
        self._seen = {**done, **{node: found for node, found in now.items() if found[1]}}
        read, size = (sum(found[place] for found in self._seen.values()) for place in (0, 1))
        return describe_reading(read, size, seconds)


def describe_reading(read_bytes: int, size_bytes: int, seconds: float) -> str:
    """The bytes read, the rate, and the remaining time at that rate. Empty if nothing was read yet."""
    if not read_bytes or not size_bytes or seconds <= 0:
        return ""
    rate = read_bytes / seconds
    share = min(1.0, read_bytes / size_bytes)
    left = format_duration(max(0, size_bytes - read_bytes) / rate)
    amount = f"{describe_bytes(min(read_bytes, size_bytes))} of {describe_bytes(size_bytes)} ({share:.0%})"
    return f"verify: {amount} read, {describe_bytes(rate)}/s, {left} left"


SAID_AFTER_S = 3.0


@contextmanager
def say_if_slow(url: str) -> Iterator[None]:
    """If the block takes longer than a moment, prints that the command waits for `url`."""
    timer = threading.Timer(SAID_AFTER_S, _say, [url])
    timer.daemon = True
    start_thread(timer)
    try:
        yield
    finally:
        timer.cancel()


def _say(url: str) -> None:
    print(
        f"waiting for {url} since {SAID_AFTER_S:g} s; the command stops waiting for a silent endpoint after a minute",
        file=sys.stderr,
        flush=True,
    )
