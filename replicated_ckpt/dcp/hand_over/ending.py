"""The end of a save that was acknowledged before it: agents complete it, and a thread of this rank follows them."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait

from replicated_ckpt.dcp.hand_over.finishing import AgentSilent
from replicated_ckpt.dcp.runtime.failures import describe_failure
from replicated_ckpt.stores.kept_error import forget_locals
from replicated_ckpt.stores.thread_start import start_worker

log = logging.getLogger(__name__)


_GOES_ON = (
    "It goes on in a thread of this process, and agents may commit it. "
    'writer.wait(ack="peer") returns once they have, or raises why not; a load finds the checkpoint or the one before.'
)


class Ending:
    """What a rank does for a save in the background. `end` is done when the save is over, and has its error."""

    def __init__(self, work: Callable[["Ending"], object]) -> None:
        """`work` calls `acknowledge` once the save needs this rank no more. Raises StoreUnavailable: there is no thread."""
        self.end: Future[None] = Future()
        self._runs_in: int | None = None
        self._is_acknowledged = threading.Event()
        _all.add(self)
        start_worker(self._run, work, name="rckpt-ending")

    def acknowledge(self) -> None:
        """From here on agents complete the save without this rank."""
        self._is_acknowledged.set()

    def wait_for_acknowledgement(self, save_id: str) -> None:
        """Raises what the save has failed with by then. AgentSilent: this thread was interrupted, and the save goes on."""
        try:
            self._is_acknowledged.wait()
        except (KeyboardInterrupt, SystemExit) as exc:
            what = f"waiting for it was interrupted by {type(exc).__name__}"
            raise AgentSilent("this node's agent", "finish", save_id, what, _GOES_ON) from exc
        if self.end.done():
            self.end.result()

    def wait(self) -> None:
        """Returns once the save is over. What it calls itself, such as `on_save`, does not wait for itself."""
        if threading.get_ident() != self._runs_in:
            wait([self.end])

    def result(self, timeout_s: float | None = None) -> None:
        """As `wait`, and raises what the save has failed with, or TimeoutError."""
        if threading.get_ident() != self._runs_in:
            self.end.result(timeout_s)

    def _run(self, work: Callable[["Ending"], object]) -> None:
        self._runs_in = threading.get_ident()
        _here.is_ending = True
        try:
            work(self)
        except BaseException as exc:  # noqa: BLE001 - top of a thread; who asks for the end gets the error
            if self._is_acknowledged.is_set():
                log.warning("a save that was acknowledged as staged has failed: %s", describe_failure(exc))
            self.end.set_exception(forget_locals(exc))
        else:
            self.end.set_result(None)
        finally:
            del work  # else the error's traceback would hold it
            self._runs_in = None
            self._is_acknowledged.set()


_here = threading.local()


def is_ending_here() -> bool:
    """Whether this thread ends a save, as what `on_save` calls does: later saves wait for it, so it waits for none."""
    return hasattr(_here, "is_ending")


_all: weakref.WeakSet[Ending] = weakref.WeakSet()
_last_by_session: "weakref.WeakValueDictionary[str, Ending]" = weakref.WeakValueDictionary()
"""One that is not over is held by its thread."""


def keep_last(session: str, ending: Ending) -> None:
    """The save of this session that the next one waits for: the coordinator's rank opens it then, others report it then."""
    _last_by_session[session] = ending


def find_last(session: str) -> Ending | None:
    """The save of this session that was kept last, if it is not over."""
    last = _last_by_session.get(session)
    return None if last is None or last.end.done() else last


def await_last(session: str) -> None:
    """Returns once this session's save before is over. A save that was opened earlier would end it: a session has one."""
    last = _last_by_session.get(session)
    if last is not None:
        last.wait()
        _last_by_session.pop(session, None)  # not before: a wait that is interrupted has to be made again


def _forget_all() -> None:
    """In a forked child: the threads that follow these saves are the parent's, so none would ever be over here."""
    _last_by_session.clear()
    for ending in list(_all):
        ending.end = Future()
        ending.end.set_result(None)


os.register_at_fork(after_in_child=_forget_all)
