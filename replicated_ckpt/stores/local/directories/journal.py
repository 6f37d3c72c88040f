"""The journal of a node: the saves that have ended here, one line each, in the order of their ends."""

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
from replicated_ckpt.stores.files.existence import closing_fd, open_plain
from replicated_ckpt.wording import one_line

NAME = "journal"
ENTRIES_MAX = 4096
"""The oldest entries are dropped. A node that asks about a dropped one waits for the save's other nodes instead."""
REMOVALS_MAX = 1024
"""How many removals by hand are sent to other nodes, the newest ones. No node has files of older ones any more."""
COMPACT_BYTES = 1 << 20
_WHY_CHARS_MAX = 500


class End(Enum):
    """How a save ended on this node. The last line of a save counts."""

    ABORTED = "aborted"
    """This node coordinated it and will never decide it, or has seen that no node published it."""
    DROPPED = "dropped"
    """Its staged files were removed here. Another node coordinated it, so other nodes may have published it."""
    RETIRED = "retired"
    """Retention removed it."""
    REMOVING = "removing"
    """This node's user removed it by hand; it still lies here, or is still staged."""
    REMOVED = "removed"
    """As REMOVING, but no file of it is left here."""
    RESTORED = "restored"
    """The user has restored a save that was removed by hand: it has not ended."""


@dataclass(frozen=True)
class Entry:
    """How one save ended on this node, and why, for ranks that ask too late."""

    end: End
    why: str = ""


class Journal:
    """The journal under one root. Safe for concurrent use, also by several processes: each appends its lines.

    A line is `<save id> <end> <why>`. A torn line is ignored. A line stays true in every later state of the store. A
    missing line proves nothing: the store may have decided the save, and have been restored to an earlier state since.
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
        """Durably records how a save ended. The caller has made the agent's directory.

        `after`: records it only if the last recorded end of the save is this one.
        """
        with self._lock:
            before = self._read_on().get(save_id)
            if after is not None and (before is None or before.end is not after):
                return
            # DROPPED is the weakest: it must not hide an end that other nodes can rely on.
            if before is not None and end in (before.end, End.DROPPED):
                return
            try:
                self._append(save_id, end, why, is_flushed=is_flushed)
            except StoreError:
                # The line may be on the disk although its fsync failed: the next line revokes it.
                with suppress(StoreError):
                    self._append(save_id, End.RESTORED if before is None else before.end, is_flushed=False)
                raise

    def find_end(self, save_id: str) -> Entry | None:
        """How a save ended here; None: no end is recorded.

        Raises:
            StoreError: the process is out of descriptors or memory.
        """
        with self._lock:
            entry = self._read_on().get(save_id)
        return None if entry is None or entry.end is End.RESTORED else entry

    def read_removed(self) -> frozenset[str]:
        """The saves that this node's user removed by hand, with or without files here. Raises: as `find_end`."""
        removing, removed = self.read_removals()
        return removing | removed

    def read_removals(self) -> tuple[frozenset[str], frozenset[str]]:
        """The newest removals by hand, at one moment: saves still to be removed here, and removed saves.

        Raises:
            StoreError: as `find_end`.
        """
        with self._lock:
            found = [(save_id, entry.end) for save_id, entry in self._read_on().items()]
        newest = [each for each in found if each[1] in (End.REMOVING, End.REMOVED)][-REMOVALS_MAX:]
        removing = frozenset(save_id for save_id, end in newest if end is End.REMOVING)
        return removing, frozenset(save_id for save_id, _ in newest) - removing

    def compact(self) -> None:
        """Rewrites a large file without outdated lines. The caller ensures that no other process appends meanwhile.

        Raises:
            StoreError: the file is unchanged.
        """
        with self._lock, translate_errors(str(self._root), "write", f"{AGENT_DIR}/{NAME}"):
            entries = self._read_on().items()
            if self._read_bytes >= COMPACT_BYTES:
                lines = (_encode(save_id, one.end, one.why) for save_id, one in entries if one.end is not End.RESTORED)
                write_file(self._path, b"".join(lines), 0o600)

    def _append(self, save_id: str, end: End, why: str = "", *, is_flushed: bool) -> None:
        """Appends one line. The caller holds the lock."""
        with translate_errors(str(self._root), "write", f"{AGENT_DIR}/{NAME}"):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with closing_fd(os.open(self._path, flags, 0o600)) as fd:
                is_new = os.fstat(fd).st_size == 0
                write_all(fd, _encode(save_id, end, why))
                if is_flushed or is_new:
                    # Before any answer: a node that answers `aborted` must never decide the save after a power loss.
                    os.fsync(fd)
            # Else a power loss could take the whole file, with lines that were fsynced.
            if is_new:
                fsync_directory(self._path.parent)

    def _read_on(self) -> Mapping[str, Entry]:
        """All entries, the oldest first: reads the lines appended since the last call. The caller holds the lock.

        A replaced file is read from its start. An unreadable file counts as empty: then nodes wait for more answers.

        Raises:
            StoreError: the process is out of descriptors or memory.
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
        # Another process may be in the middle of its line: it is read next time.
        whole = raw[: raw.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for save_id, entry in _decode(whole):
            # Moves it to the end: the oldest entries are dropped first.
            self._entries.pop(save_id, None)
            self._entries[save_id] = entry
        while len(self._entries) > ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]
        return self._entries


def _encode(save_id: str, end: End, why: str) -> bytes:
    """One line, with a line break before it as well: the previous write may have been torn."""
    return f"\n{save_id} {end.value} {one_line(why)[:_WHY_CHARS_MAX]}\n".encode()


def _decode(raw: bytes) -> Iterator[tuple[str, Entry]]:
    for line in raw.decode(errors="replace").split("\n"):
        save_id, _, rest = line.partition(" ")
        end, _, why = rest.partition(" ")
        if is_save_id(save_id):
            with suppress(ValueError):
                yield save_id, Entry(End(end), why)
