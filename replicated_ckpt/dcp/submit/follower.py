"""Following a shard that was submitted: its memory is kept until it is written, and a new agent gets it again."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from replicated_ckpt.agent.saves.shard_copies import WrittenCopies
from replicated_ckpt.agent.saves.submissions import SubmittedShard
from replicated_ckpt.dcp.staging.segment import descriptor_of
from replicated_ckpt.dcp.submit.layout import ShardLayout
from replicated_ckpt.dcp.submit.submission import Submission, submit
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.detached_error import forget_locals
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.thread_start import start_worker

log = logging.getLogger(__name__)

_TRIES = 3
_PAUSE_S = 0.3  # an agent that starts again needs a moment until its socket is there


class Follower:
    """One shard in the agent's hands. `end` is its outcome; `leave` ends this rank's part in the save."""

    def __init__(
        self,
        store: LocalStore,
        shard: SubmittedShard,
        layout: ShardLayout,
        staged: memoryview,
        start_agent: Callable[[], object],
        submitted: Submission,
    ) -> None:
        """The layout is closed once it is not needed. Raises StoreUnavailable: there is no thread; the agent is left."""
        self._store, self._shard, self._layout, self._start_agent = store, shard, layout, start_agent
        self._staged: memoryview | None = staged
        self._submitted = submitted
        self._left = threading.Event()
        self.end: Future[WrittenCopies] = Future()
        try:
            start_worker(self._follow, name="rckpt-submitted")
        except StoreUnavailable:
            layout.close()
            submitted.close()
            raise

    def leave(self) -> None:
        """Ends this rank's part; the agent notices once it no longer needs the memory."""
        self._left.set()
        if self.end.done():
            self._submitted.close()

    def _follow(self) -> None:
        try:
            found, error = self._wait(), None
        except BaseException as exc:  # noqa: BLE001 - top of a thread; who asks for the end gets the error
            # The future keeps the error, and its frames would keep the staged memory.
            found, error = None, forget_locals(exc)
        self._layout.close()
        # Before the future is done: its waiters may use the memory again.
        self._staged = None
        if found is not None:
            self.end.set_result(found)
        else:
            self.end.set_exception(error)
        if self._left.is_set():
            self._submitted.close()

    def _wait(self) -> WrittenCopies:
        first: StoreUnavailable | None = None  # later ones may come from a connection that is closed by then
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._submitted.wait()
            except StoreUnavailable as exc:
                assert self._staged is not None, "it is dropped when the shard has ended"
                self._submitted.detach(self._staged)
                first = first or exc
                if tries_left == 0:
                    raise first from exc
                log.warning("%s; it is submitted again", exc)
                self._again()
        raise AssertionError("the last try returns or raises")

    def _again(self) -> None:
        time.sleep(_PAUSE_S)
        try:
            self._start_agent()
            assert self._staged is not None, "it is dropped when the shard has ended"
            descriptors = [descriptor_of(self._staged), self._layout.between]
            self._submitted = submit(self._store, self._shard, descriptors, self._staged)
        except StoreUnavailable as exc:  # the next wait on the closed connection raises again
            log.warning("not submitted again yet: %s", exc)
