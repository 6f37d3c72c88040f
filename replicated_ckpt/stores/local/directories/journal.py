"""The journal of a node: the saves that are over here, one line for each end, in the order in which they ended."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from replicated_ckpt.core.layout import AGENT_DIR, is_save_id
from replicated_ckpt.errors import StoreError
from replicated_ckpt.stores.files.durable import (
    fsync_directory,
    raise_shortage,
    translate_errors,
    write_all,
    write_file,
)
from replicated_ckpt.stores.files.plain import closing_fd, open_plain
from replicated_ckpt.wording import one_line

NAME = "journal"
ENTRIES_MAX = 4096
"""The oldest are forgotten. A node that asks for one of those waits for the other nodes of that save instead."""
REMOVALS_MAX = 1024
"""So many removals by hand are told to other nodes, the newest. No node holds older ones any more."""
COMPACT_BYTES = 1 << 20
_WHY_CHARS_MAX = 500


class End(Enum):
    """How a save ended on this node. Of one save the last line counts."""

    ABORTED = "aborted"
    """This node coordinated it, and never decides it; or it has seen that no node published it."""
    DROPPED = "dropped"
    """What was staged here was removed. Another node coordinated it, so this says nothing of other nodes."""
    RETIRED = "retired"
    """A policy of retention has removed it."""
    REMOVING = "removing"
    """This node's user has removed it by hand, and it still lies here, or is still staged."""
    REMOVED = "removed"
    """As before, and nothing of it lies here any more."""
    RESTORED = "restored"
    """The user has put back what was removed by hand: it is not over."""


@dataclass(frozen=True)
class Entry:
    """One save that is over here, and why, for the ranks that come too late."""

    end: End
    why: str = ""


class Journal:
    """The journal under one root. Safe for concurrent use, also by several processes: each appends its lines.

    A line is `<save id> <end> <why>`. One that a crash has torn counts for nothing. What is noted stays true, whatever
    becomes of the store. A store without the note has forgotten the save: it may have decided it, and been put back to an
    earlier state since.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / AGENT_DIR / NAME
        self._lock = threading.Lock()
        self._file: tuple[int, int] | None = None
        self._read_bytes = 0
        self._entries: dict[str, Entry] = {}

    def append_end(
        self, save_id: str, end: End, why: str = "", *, after: End | None = None, is_flushed: bool = True
    ) -> None:
        """Notes durably how a save ended. The caller has made the agent's directory.

        `after`: only if the last end that is noted of it is this one.

        Raises:
            StoreError: it is not noted, as far as the disk lets this node take it back.
        """
        with self._lock:
            before = self._read_on().get(save_id)
            if after is not None and (before is None or before.end is not after):
                return
            if before is not None and end in (before.end, End.DROPPED):
                return
            try:
                self._append(save_id, end, why, is_flushed=is_flushed)
            except StoreError:
                with suppress(StoreError):
                    self._append(save_id, End.RESTORED if before is None else before.end, is_flushed=False)
                raise

    def find_end(self, save_id: str) -> Entry | None:
        """How a save ended here; None: it is not over, as far as is noted.

        Raises:
            StoreError: no file can be read now, for want of descriptors or memory.
        """
        with self._lock:
            entry = self._read_on().get(save_id)
        return None if entry is None or entry.end is End.RESTORED else entry

    def read_removed(self) -> frozenset[str]:
        """The saves that this node's user has removed by hand, gone from here or not. Raises StoreError: as `find` does."""
        removing, removed = self.read_removals()
        return removing | removed

    def read_removals(self) -> tuple[frozenset[str], frozenset[str]]:
        """Of the newest of these, at one moment, those that are still to be removed here, and those that are gone.

        Raises:
            StoreError: as `find` does.
        """
        with self._lock:
            found = [(save_id, entry.end) for save_id, entry in self._read_on().items()]
        newest = [each for each in found if each[1] in (End.REMOVING, End.REMOVED)][-REMOVALS_MAX:]
        removing = frozenset(save_id for save_id, end in newest if end is End.REMOVING)
        return removing, frozenset(save_id for save_id, _ in newest) - removing

    def compact(self) -> None:
        """Writes the file anew, without the lines that count no more, if it has grown large. No other process appends
        meanwhile.

        Raises:
            StoreError: the file is as it was.
        """
        with self._lock, translate_errors(str(self._root), "write", f"{AGENT_DIR}/{NAME}"):
            entries = self._read_on().items()
            if self._read_bytes >= COMPACT_BYTES:
                lines = (_encode(save_id, one.end, one.why) for save_id, one in entries if one.end is not End.RESTORED)
                write_file(self._path, b"".join(lines), 0o600)

    def _append(self, save_id: str, end: End, why: str = "", *, is_flushed: bool) -> None:
        """With the lock held."""
        with translate_errors(str(self._root), "write", f"{AGENT_DIR}/{NAME}"):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with closing_fd(os.open(self._path, flags, 0o600)) as fd:
                is_new = os.fstat(fd).st_size == 0
                write_all(fd, _encode(save_id, end, why))
                if is_flushed or is_new:
                    os.fsync(fd)
            if is_new:
                fsync_directory(self._path.parent)

    def _read_on(self) -> Mapping[str, Entry]:
        """All entries, the oldest first: reads what was appended since the last look. With the lock held.

        Where another file lies there it reads all of that. One that cannot be read counts as none: that only has nodes
        wait for more answers.

        Raises:
            StoreError: no file can be read now, for want of descriptors or memory.
        """
        try:
            fd = open_plain(self._path, os.O_NOFOLLOW)
        except OSError as exc:
            raise_shortage(exc, self._path)
            self._file, self._read_bytes, self._entries = None, 0, {}
            return self._entries
        with closing_fd(fd), translate_errors(str(self._root), "read", f"{AGENT_DIR}/{NAME}"):
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._read_bytes:
                self._file, self._read_bytes, self._entries = (status.st_dev, status.st_ino), 0, {}
            raw = os.pread(fd, status.st_size - self._read_bytes, self._read_bytes)
        whole = raw[: raw.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for save_id, entry in _decode(whole):
            self._entries.pop(save_id, None)
            self._entries[save_id] = entry
        while len(self._entries) > ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]
        return self._entries


def _encode(save_id: str, end: End, why: str) -> bytes:
    """One line, which begins anew: the write before it may have been broken off."""
    return f"\n{save_id} {end.value} {one_line(why)[:_WHY_CHARS_MAX]}\n".encode()


def _decode(raw: bytes) -> Iterator[tuple[str, Entry]]:
    for line in raw.decode(errors="replace").split("\n"):
        save_id, _, rest = line.partition(" ")
        end, _, why = rest.partition(" ")
        if is_save_id(save_id):
            with suppress(ValueError):
                yield save_id, Entry(End(end), why)
