"""Waits for other ranks: how long, on a c10d store that may not answer, and whether their processes still exist.

A killed rank cannot post that it failed, and the c10d store does not report a closed connection. The other ranks of its
host find its end in /proc, and post it on the store for the ranks of other hosts. A process that is stopped or slow
counts as alive.
"""

import contextlib
import json
import logging
import os
import socket
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from replicated_ckpt.dcp.runtime.torch_private import default_store
from replicated_ckpt.errors import ConfigInvalid, RankFailed, RendezvousFailed
from replicated_ckpt.stores.files.locks import is_stopped, state_and_start
from replicated_ckpt.wording import list_some

LOOK_AFTER_S = 1.5
"""A wait looks for failed ranks from this time on. Until then it reads only the values that it waits for."""
LOOK_EVERY_S = 1.0
LOG_AFTER_S = 30.0
"""After this time a wait logs, once, the ranks that it waits for."""
LINGER_S = 5.0
"""How long the coordinator of a load waits for the other ranks once one has failed."""
_STORE_HINT = (
    "Rank 0 serves it or, under torchrun, torchrun's agent on the rendezvous host. Find what has ended or is "
    "stopped there; then start the job again."
)
POLL_S = 0.005


@contextlib.contextmanager
def reaching_store() -> Iterator[None]:
    """Translates the block's errors of the c10d store: the process that serves it may have ended."""
    try:
        yield
    except dist.DistError as exc:
        raise RendezvousFailed(f"The c10d store of this job does not answer: {exc}", _STORE_HINT) from exc


_unanswered: "weakref.WeakKeyDictionary[dist.Store, tuple[Future[Any], float]]" = weakref.WeakKeyDictionary()
"""By store: its call without an answer so far, and the time until which threads wait for that answer."""


class AnsweringStore:
    """The c10d store of a job, under a prefix. A call raises if it gets no answer within the store's own time-out.

    torch's own store waits forever if the process that serves it is stopped, or its host has no power. After an
    interrupted call, the next one first waits for that call's answer. Once a call has got no answer in time, each later
    one raises at once.
    """

    def __init__(self, prefix: str, store: "dist.Store") -> None:
        self._job: Any = store  # its stub has no time-out
        self._store = dist.PrefixStore(prefix, store)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, getattr(self._store, name))

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        # The store's client holds a mutex during a call: a second call would wait forever behind one that hangs.
        before = _unanswered.get(self._job)
        if before is not None:
            self._await(*before)
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(call(*arguments))
            except RuntimeError as exc:  # raised in the thread that asked
                answer.set_exception(exc)

        try:
            start_new_thread(ask, ())  # a Thread takes three times as long to begin
        except RuntimeError:  # the system has no more threads
            ask()
        self._await(answer, time.monotonic() + self._job.timeout.total_seconds())
        return answer.result()

    def _await(self, answer: Future[Any], until: float) -> None:
        try:
            answer.exception(max(0.0, until - time.monotonic()))
        except TimeoutError:
            limit_s = self._job.timeout.total_seconds()
            raise dist.DistStoreError(f"no answer within its time-out of {limit_s:.0f} s") from None
        finally:
            # Also after Ctrl-C: the call goes on in its thread, and the next one must not overtake it.
            if not answer.done():
                _unanswered[self._job] = answer, until


class Wait:
    """One wait for other ranks: its deadline, its growing pauses, and when the next look for failed ranks is due.

    `is_noted`: this rank has marked on the store that it waits. `is_logged`: a rank has logged which ranks are missing.
    """

    def __init__(self, deadline_s: float, pause_max_s: float) -> None:
        # Monotonic: a clock that is set must neither end nor prolong a wait.
        self._began = time.monotonic()
        self._until = self._began + deadline_s
        self._next_look = self._began + LOOK_AFTER_S
        self._pause_s, self._pause_max_s = POLL_S, pause_max_s
        self.is_noted = self.is_logged = False

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._until

    @property
    def is_long(self) -> bool:
        """Whether a coordinator would have stopped waiting by now if a rank had failed at the beginning."""
        return self.waited_s > LOOK_AFTER_S + LOOK_EVERY_S + LINGER_S

    def is_look_due(self) -> bool:
        is_due = time.monotonic() > self._next_look
        if is_due:
            self._next_look = time.monotonic() + LOOK_EVERY_S
        return is_due

    def end_within(self, seconds: float) -> None:
        self._until = min(self._until, time.monotonic() + seconds)

    def pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._pause_max_s)


log = logging.getLogger(__name__)

_PREFIX = "replicated_ckpt/presence"
_NAMED_MAX = 8
_ITS_LOG = "Read the log of {}. Then start the job again, or the remaining ranks as a new world."
_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Process:
    """The process of one rank of the job. `started` distinguishes it from a later process with its number."""

    rank: int
    pid: int
    started: str

    def is_alive(self) -> bool:
        """Whether the process runs or is stopped. A zombie counts as ended. True if /proc cannot be read."""
        try:
            state, started = state_and_start(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:
            return True  # /proc may be unreadable, as under hidepid: unknown is not dead
        # Another start time: the number belongs to a new process. Z: a zombie, whose parent has not waited for it.
        return started == self.started and state not in "ZX"

    def is_stopped(self) -> bool:
        """Whether /proc shows the process as stopped, by a signal or a debugger."""
        return self.is_alive() and is_stopped(self.pid)


class Presence:
    """The processes of the job, as one of them sees them. The store has a key for each process and for each death.

    Safe for concurrent use: an asynchronous save and a load may look at the same time.
    """

    def __init__(self, store: "dist.Store", rank: int) -> None:
        self._store = AnsweringStore(_PREFIX, store)
        self._rank = rank
        self._host: str | None = None
        self._mates: dict[int, Process] = {}
        self._mates_read = 0
        self._lost: dict[int, Process] = {}
        self._lost_read = 0

    def announce(self) -> None:
        """Announces this process to the ranks in the same boot and pid namespace. Without /proc no other rank sees it."""
        try:
            # Process ids compare only within one boot and one pid namespace: containers of a host each have their own.
            host = f"{_BOOT_ID.read_text().strip()}/{(_PROC / 'self/ns/pid').readlink()}"
            this = Process(self._rank, os.getpid(), state_and_start(os.getpid())[1])
        except OSError as exc:
            log.warning("other ranks cannot notice when this process ends: %s", exc)
            return
        self._host = host
        self._append(host, this)

    def find_lost(self) -> Mapping[int, Process]:
        """The processes of the job that have ended, by rank of the job, as far as ranks on their hosts have noticed."""
        self._lost_read = self._read("lost", self._lost_read, self._lost)
        if self._host is not None:
            self._mates_read = self._read(self._host, self._mates_read, self._mates)
        for mate in list(self._mates.values()):  # another thread's call may add one
            # Compared as a whole: a restarted rank is another process under the same rank.
            if self._lost.get(mate.rank) != mate and not mate.is_alive():
                self._append("lost", mate)
                self._lost[mate.rank] = mate
        return self._lost

    def find_stopped(self) -> Mapping[int, int]:
        """The ids of stopped processes, by rank of the job, among those of this host that `find_lost` has read before."""
        return {mate.rank: mate.pid for mate in list(self._mates.values()) if mate.is_stopped()}

    def _append(self, name: str, process: Process) -> None:
        # The count grows before the entry exists: a reader stops at such a gap, and continues there at its next look.
        self._store.set(f"{name}/{self._store.add(name, 1)}", json.dumps(asdict(process)).encode())

    def _read(self, name: str, done: int, found: dict[int, Process]) -> int:
        """Adds the entries after the first `done` to `found`. Returns the number of entries read so far."""
        count = self._store.add(name, 0)
        while done < count and self._store.check([f"{name}/{done + 1}"]):
            done += 1
            key = f"{name}/{done}"
            try:
                process = Process(**json.loads(self._store.get(key)))
                found[process.rank] = process
            except (ValueError, TypeError, RecursionError) as exc:
                log.warning("the value of %r on the c10d store is not a valid process description: %s", key, exc)
        return done


def describe_ended(ranks: Sequence[int]) -> RankFailed:
    """The error for the remaining ranks. It names the rank that ended first, which may be why the others ended."""
    first, *others = (f"rank {rank}" for rank in ranks)
    since = f", and by now that of {list_some(others, _NAMED_MAX)}" if others else ""
    return RankFailed(f"The process of {first} has ended{since}.", _ITS_LOG.format(first))


def describe_stopped(stopped: Mapping[int, int]) -> tuple[str, str]:
    """A message and a hint about the stopped ranks of this host; both empty if there are none."""
    if not stopped:
        return "", ""
    pids = " ".join(map(str, stopped.values()))
    what = " ".join(f"Rank {rank} is stopped, as process {pid}." for rank, pid in stopped.items())
    return what, f"`kill -CONT {pids}` on host {socket.gethostname()} resumes it."


class _Known:
    """This process's own announcement. A process that joins another job announces itself again."""

    def __init__(self) -> None:
        self._group: Callable[[], Any] = lambda: None
        self._presence: Presence | None = None
        self._inherited: Callable[[], Any] = lambda: None
        # A forked worker, such as a data loader's, inherits the groups, but is not a rank in them.
        os.register_at_fork(after_in_child=self._inherit)

    def _inherit(self) -> None:
        """In a forked child: records the parent's default group. In that group this process is not a rank."""
        group = dist.group.WORLD if dist.is_available() else None
        self._inherited = (lambda: None) if group is None else weakref.ref(group)

    def is_inherited(self) -> bool:
        return self._inherited() is dist.group.WORLD

    def presence(self) -> Presence:
        group = dist.group.WORLD
        # After a new init_process_group the earlier announcement lies in the store of the old job.
        if self._presence is None or self._group() is not group:
            self._presence = Presence(default_store(), dist.get_rank())
            self._presence.announce()
            self._group = weakref.ref(group)
        return self._presence


_KNOWN = _Known()


def announce() -> Presence | None:
    """Announces this process, once in a job. Returns None if it is not a rank of a job of several processes."""
    if not dist.is_available() or not dist.is_initialized() or _KNOWN.is_inherited():
        return None
    return _KNOWN.presence()


def check_is_rank() -> None:
    """Raises ConfigInvalid: this process was forked from a rank. Call it only in a job of several processes."""
    if _KNOWN.is_inherited():
        raise ConfigInvalid(
            "This process was forked from a rank. Its process groups belong to that rank, so it cannot exchange messages "
            "with other ranks.",
            "Let it load and save alone: pass no_dist=True to dcp.load, dcp.save and ReplicatedReader.",
        )
