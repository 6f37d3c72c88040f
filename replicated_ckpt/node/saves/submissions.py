"""Shards that ranks submit: the agent reads them from the ranks' memory, hashes, writes and sends them.

The memory is read by `preadv` from descriptors, never mapped: if a rank truncates the memory, that is an error, not
SIGBUS.
"""

import contextlib
import json
import logging
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from replicated_ckpt import failpoints
from replicated_ckpt.errors import ObjectCorrupt, ObjectMissing, StoreError, StoreUnavailable
from replicated_ckpt.node.saves.shard_copies import WantedCopies, WrittenCopies, write_copies
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.existence import read_plain
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.full_disk import write_with_room
from replicated_ckpt.stores.tee import Buffers, Tee
from replicated_ckpt.stores.threads import forget_locals, lower_priority, start_worker, translate_any
from replicated_ckpt.stores.throttle import Pace, Stopped

log = logging.getLogger(__name__)

WRITES_AT_ONCE = 4
"""Further shards wait: each one that is written takes four buffers of 4 MiB."""
_KEPT = 64  # shards whose end an agent may still be asked for


@dataclass(frozen=True)
class SubmittedShard:
    """A shard as a rank submits it. Each of its consecutive `pieces` is (number of a descriptor, offset, bytes).

    The rank must not change this memory until the shard is written, or has failed.
    """

    copies: WantedCopies
    pieces: Sequence[tuple[int, int, int]]

    def to_json(self) -> dict[str, Any]:
        return {"copies": self.copies.to_json(), "pieces": self.pieces}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], sources: int) -> Self:
        """Raises ValueError, KeyError, TypeError: the fields are no shard within `sources` descriptors."""
        pieces = [(int(source), int(offset), int(size)) for source, offset, size in fields["pieces"]]
        # Wrong numbers from a rank would read other bytes than it submitted: -1 is the last descriptor.
        if any(not 0 <= source < sources or offset < 0 or size < 0 for source, offset, size in pieces):
            raise ValueError("a piece lies outside the submitted data")
        return cls(WantedCopies.from_json(fields["copies"]), pieces)


class Submissions:
    """Writes submitted shards, a few at once, in threads of this niceness. Safe for concurrent use.

    `pace`: limits all these writes and sends. None, or an agent that is stopping: no limit.
    """

    def __init__(self, store: LocalStore, niceness: int = 0) -> None:
        self._store = store
        self.niceness = niceness
        self.pace: Pace | None = None
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(WRITES_AT_ONCE)
        self._written: dict[tuple[str, str], Future[WrittenCopies]] = {}
        self._followed = 0

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return self._followed > 0 or any(not future.done() for future in self._written.values())

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """For a thread that follows a save without ranks: meanwhile the agent counts as busy, because the save needs
        it.
        """
        with self._lock:
            self._followed += 1
        try:
            yield
        finally:
            with self._lock:
                self._followed -= 1

    def has(self, save_id: str) -> bool:
        """Whether a shard of this save was submitted to this agent."""
        with self._lock:
            return any(known == save_id for known, _ in self._written)

    def list_unwritten(self, save_id: str) -> list[str]:
        """The shards of a save that are being written."""
        with self._lock:
            return sorted(name for (known, name), end in self._written.items() if known == save_id and not end.done())

    def take_shard(self, shard: SubmittedShard, descriptors: Sequence[int]) -> "Future[WrittenCopies]":
        """Starts to write a shard of an open save, and owns the descriptors. A shard in progress keeps its future.

        The future returns the copies for the rank's receipt. It raises the first error that kept the shard from
        becoming durable in the node's own store.

        Raises:
            StoreUnavailable: no thread can be started to write it. Nothing was begun; the descriptors are closed all
                the same.
        """
        key = shard.copies.save_id, shard.copies.name
        with self._lock:
            known = self._written.get(key)
            # A rank that lost its connection submits the shard again: two writers would share one file.
            if known is not None and not (known.done() and known.exception()):
                _close_all(descriptors)
                return known
            self._forget_old()
            future: Future[WrittenCopies] = Future()
            self._written[key] = future
        try:
            start_worker(self._write, shard, descriptors, future, name=f"rckpt-write-{shard.copies.name}")
        except StoreUnavailable as exc:
            _close_all(descriptors)
            future.set_exception(exc)  # for callers that already have it; the rank may submit again
            raise
        return future

    def wait_for_shards(self, save_id: str, names: Sequence[str]) -> Sequence[WrittenCopies]:
        """Waits until these shards are written, and returns their copies.

        Raises:
            ObjectMissing: a shard was not submitted, or an agent died before it had written it. Others: a shard could
                not be written.
        """
        with self._lock:
            futures = {name: self._written.get((save_id, name)) for name in names}
        return [self._read_note(save_id, name) if each is None else each.result() for name, each in futures.items()]

    def _note(self, save_id: str, found: WrittenCopies) -> None:
        """Records the copies on disk: the rank may be gone when the agent's next process is asked for them."""
        path = self._note_path(save_id, found.name)
        write_with_room(self._store.root, path, json.dumps(found.to_json()).encode(), is_flushed=False)
        if not self._store.is_staged(save_id):  # it was aborted meanwhile, and its notes removed
            path.unlink(missing_ok=True)

    def _read_note(self, save_id: str, name: str) -> WrittenCopies:
        with translate_errors("this agent", "read", name):
            try:
                found = WrittenCopies.from_json(json.loads(read_plain(self._note_path(save_id, name))))
                size = self._store.path_of_staged(save_id, name).stat().st_size
            except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as exc:
                raise _not_submitted(save_id, name) from exc
        # The note is not fsynced: after a power loss it may not match the shard.
        if size != found.size_bytes:
            raise _not_submitted(save_id, name)
        return found

    def _note_path(self, save_id: str, name: str) -> Path:
        """The record lies next to the intent, so the end of the save removes it."""
        return self._store.intent_path(save_id).with_name(f"{save_id}.{name}.json")

    def _forget_old(self) -> None:
        if len(self._written) >= _KEPT:
            with contextlib.suppress(StoreError):  # if the disk cannot be read, none is dropped now
                ended = [key for key, future in self._written.items() if future.done()]
                for key in [key for key in ended if not self._store.is_staged(key[0])]:
                    del self._written[key]

    def _write(self, shard: SubmittedShard, descriptors: Sequence[int], future: "Future[WrittenCopies]") -> None:
        try:
            found = self._write_and_close(shard, descriptors)
        except BaseException as exc:  # noqa: BLE001 - top of a thread; who waits for the shard gets the error
            error = translate_any(forget_locals(exc), "this node's agent", "write", shard.copies.name)
            log.warning("%s of save %s: %s", shard.copies.name, shard.copies.save_id, error)
            future.set_exception(error)
        else:
            future.set_result(found)

    def _write_and_close(self, shard: SubmittedShard, descriptors: Sequence[int]) -> WrittenCopies:
        """Writes a shard. The rank's memory is closed before the future returns, so the rank can then use it again.

        Training continues meanwhile on all nodes, so the threads have the agent's niceness.
        """
        fill = partial(_fill, shard=shard, descriptors=descriptors, pace=self.pace)
        try:
            lower_priority(self.niceness)
            with self._slots:
                failpoints.reach("agent.submitted")
                found = write_copies(self._store, shard.copies, Buffers(), fill, is_behind=True)
                with translate_errors("this agent", "note", shard.copies.name):
                    self._note(shard.copies.save_id, found)
                return found
        finally:
            _close_all(descriptors)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _not_submitted(save_id: str, name: str) -> ObjectMissing:
    return ObjectMissing("this agent", "write", name, f"no rank has submitted it for save {save_id}")


def _fill(tee: Tee, shard: SubmittedShard, descriptors: Sequence[int], pace: Pace | None) -> None:
    name = shard.copies.name
    with translate_errors("the rank's memory", "read", name):
        sizes = [_size_of(descriptor) for descriptor in descriptors]
        for source, offset, size in shard.pieces:
            # A rank that truncates its memory must get an error: beyond the end there is nothing to read.
            if offset + size > sizes[source]:
                raise _truncated_error(name)
            tee.fill(size, _Reader(descriptors[source], offset, name, pace))


class _Reader:
    """Reads consecutive ranges of one descriptor, no faster than the pace."""

    def __init__(self, fd: int, offset: int, name: str, pace: Pace | None) -> None:
        self._fd, self._offset, self._name, self._pace = fd, offset, name, pace

    def __call__(self, room: memoryview) -> None:
        if self._pace is not None:
            with contextlib.suppress(Stopped):  # an agent that stops finishes its work without the limit
                self._pace.take(len(room))
        if read_exactly(self._fd, room, self._offset) != len(room):
            raise _truncated_error(self._name)
        self._offset += len(room)
        failpoints.reach("agent.writing")


def _size_of(descriptor: int) -> int:
    status = os.fstat(descriptor)
    # A pipe or a device has no size to check, and could block the read for ever.
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _truncated_error(name: str) -> ObjectCorrupt:
    return ObjectCorrupt("the rank's memory", "read", name, "it is shorter than the rank announced")
