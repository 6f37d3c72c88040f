"""Records every call of this process that changes or syncs a file below one directory, in order, with its bytes.

The recorder replaces the functions of `os` (which `pathlib` and `shutil` call) and `renameat2`, which goes through
ctypes. One lock covers a call and its record, so the log has the order of the calls, also across threads. Calls
that cannot be recorded raise an AssertionError: opening a file for writing through `io.open`, and calls that the store
never makes. `test_recorder.py` compares the log with strace and with the real tree.
"""

import builtins
import contextlib
import fcntl
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from unittest import mock

from replicated_ckpt.stores.files import durable
from tests.fault.power_loss.operations import (
    Entry,
    Log,
    Mark,
    Names,
    Operation,
    Sync,
    Truncate,
    Write,
    disk_of,
    tree_of,
)
from tests.fault.power_loss.places import Places

_REFUSED = ("symlink", "mkfifo", "mknod", "copy_file_range", "posix_fallocate", "splice", "setxattr")


class Recorder(Places):
    """Records below `base` while it is entered. `log`: the earlier operations there, if not all of them are durable.

    `calls` has the same as text, in the form of strace: one line for each call that changes or syncs something.
    """

    def __init__(self, base: Path, log: Log | None = None) -> None:
        self.log = Log(disk_of(tree_of(base))) if log is None else log
        super().__init__(base, self.log.replayed())
        self.calls: list[tuple[str, ...]] = []
        self._next_inode = self.live.unused_inode()
        self._lock = threading.RLock()
        self._patches = contextlib.ExitStack()

    def mark(self, subject: str, *allowed: object) -> None:
        """Records a promise that holds from now on."""
        with self._lock:
            self.log.operations.append(Mark(subject, allowed))

    def __enter__(self) -> Self:
        for name, wrapper in self._wrappers().items():
            self._patches.enter_context(mock.patch.object(os, name, wrapper))
        for module in (io, builtins):
            self._patches.enter_context(mock.patch.object(module, "open", self._reading_only(io.open)))
        renameat2 = self._renameat2(durable._renameat2)
        self._patches.enter_context(mock.patch.object(durable, "_renameat2", renameat2))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _wrappers(self) -> dict[str, Callable[..., Any]]:
        return {
            "open": self._open(os.open),
            "close": self._close(os.close),
            "write": self._write(os.write),
            "pwrite": self._write(os.pwrite),
            "writev": self._writev(os.writev),
            "pwritev": self._writev(os.pwritev),
            "truncate": self._truncate(os.truncate),
            "ftruncate": self._truncate(os.ftruncate),
            "fsync": self._sync("fsync", os.fsync),
            "fdatasync": self._sync("fdatasync", os.fdatasync),
            "mkdir": self._mkdir(os.mkdir),
            "rename": self._rename(os.rename),
            "replace": self._rename(os.replace),
            "link": self._link(os.link),
            "unlink": self._remove("unlink", os.unlink),
            "remove": self._remove("unlink", os.remove),
            "rmdir": self._remove("rmdir", os.rmdir),
            **{name: self._refused(name, getattr(os, name)) for name in _REFUSED},
        }

    # Calls -------------------------------------------------------------------------------------------------------

    def _done(self, operation: Operation, *call: str) -> None:
        self.live.apply(operation)
        self.log.operations.append(operation)
        if call:
            self.calls.append(call)

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            with self._lock:
                entry = self._entry(path, dir_fd)
                fd = real(path, flags, mode, dir_fd=dir_fd)
                inode = self._inode(path, dir_fd)
                if entry is not None and inode is None:
                    inode = self._created("create", entry)
                if inode is None:
                    return fd
                self._opened(fd, inode)
                if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                    self.calls.append(("open", self._path(inode)))
                    if flags & os.O_TRUNC and self.live.contents[inode]:
                        self._done(Truncate(inode, 0))
                return fd

        return opened

    def _created(self, what: str, entry: Entry) -> int:
        inode = self._next_inode
        self._next_inode += 1
        self._done(Names(what, ((entry, inode),)))
        return inode

    def _close(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def closed(fd: int) -> None:
            with self._lock:
                self._closed(fd)
                real(fd)

        return closed

    def _written(self, fd: int, offset: int | None, data: bytes, real: Callable[[], int]) -> int:
        with self._lock:
            inode = self._inode_of_fd(fd)
            if inode is None:
                return real()
            position = offset
            if position is None and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
                position = len(self.live.contents[inode])
            elif position is None:
                position = os.lseek(fd, 0, os.SEEK_CUR)
            count = real()
            self._done(Write(inode, position, data[:count]), "write", self._path(inode), str(count))
            return count

    def _write(self, real: Callable[..., int]) -> Callable[..., int]:
        """For `write` and `pwrite`."""
        return lambda fd, data, *offset: self._written(
            fd, [*offset, None][0], bytes(data), lambda: real(fd, data, *offset)
        )

    def _writev(self, real: Callable[..., int]) -> Callable[..., int]:
        """For `writev` and `pwritev`, whose offset may be followed by flags."""
        return lambda fd, pieces, *rest: self._written(
            fd, [*rest, None][0], b"".join(pieces), lambda: real(fd, pieces, *rest)
        )

    def _truncate(self, real: Callable[..., None]) -> Callable[..., None]:
        def truncated(path: Any, length: int) -> None:
            with self._lock:
                inode = self._inode(path)
                real(path, length)
                if inode is not None:
                    self._done(Truncate(inode, length), "truncate", self._path(inode), str(length))

        return truncated

    def _sync(self, what: str, real: Callable[[int], None]) -> Callable[[int], None]:
        def synced(fd: int) -> None:
            with self._lock:
                inode = self._inode_of_fd(fd)
                real(fd)
                if inode is not None:
                    self._done(Sync(inode), what, self._path(inode))

        return synced

    def _mkdir(self, real: Callable[..., None]) -> Callable[..., None]:
        def made(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            with self._lock:
                entry = self._entry(path, dir_fd)
                real(path, mode, dir_fd=dir_fd)
                if entry is not None:
                    self._created("mkdir", entry)
                    self.calls.append(("mkdir", self._named(entry)))

        return made

    def _rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            with self._lock:
                entries = self._entry(source, src_dir_fd), self._entry(target, dst_dir_fd)
                real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
                self._moved(entries)

        return renamed

    def _moved(self, entries: tuple[Entry | None, Entry | None]) -> None:
        old, new = entries
        if old is None and new is None:
            return
        assert old is not None, f"something was renamed into {self.base} to {new}"
        assert new is not None, f"{old} was renamed out of {self.base}"
        call = "rename", self._named(old), self._named(new)
        self._done(Names("rename", ((old, None), (new, self.live.lookup(old)))), *call)

    def _renameat2(self, real: Callable[[Path, Path, int], bool]) -> Callable[[Path, Path, int], bool]:
        def renamed(first: Path, second: Path, flags: int) -> bool:
            with self._lock:
                one, other = self._entry(first, None), self._entry(second, None)
                if not real(first, second, flags):
                    return False
                if flags == durable._RENAME_NOREPLACE:
                    self._moved((one, other))
                    return True
                assert one is not None, f"{first} is unknown"
                assert other is not None, f"{second} is unknown"
                changes = (one, self.live.lookup(other)), (other, self.live.lookup(one))
                self._done(Names("exchange", changes), "exchange", self._named(one), self._named(other))
                return True

        return renamed

    def _link(self, real: Callable[..., None]) -> Callable[..., None]:
        def linked(source: Any, target: Any, *, src_dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
            with self._lock:
                inode, new = self._inode(source, src_dir_fd), self._entry(target, None)
                old = self._entry(source, src_dir_fd)
                real(source, target, src_dir_fd=src_dir_fd, follow_symlinks=follow_symlinks)
                if inode is not None and new is not None and old is not None:
                    call = "link", self._named(old), self._named(new)
                    self._done(Names("link", ((new, inode),)), *call)

        return linked

    def _remove(self, what: str, real: Callable[..., None]) -> Callable[..., None]:
        def removed(path: Any, *, dir_fd: int | None = None) -> None:
            with self._lock:
                entry = self._entry(path, dir_fd)
                real(path, dir_fd=dir_fd)
                if entry is not None:
                    self._done(Names(what, ((entry, None),)), what, self._named(entry))

        return removed

    def _refused(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def refused(*arguments: Any, **options: Any) -> Any:
            for argument in arguments[:2]:
                if isinstance(argument, str | bytes | os.PathLike | int) and self._reaches(argument):
                    raise AssertionError(f"os.{name} is not recorded")
            return real(*arguments, **options)

        return refused

    def _reaches(self, argument: Any) -> bool:
        return self._inode(argument) is not None or (
            not isinstance(argument, int) and self._entry(argument, None) is not None
        )

    def _reading_only(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if set(mode) & set("wax+") and self._reaches(file):
                raise AssertionError(f"{file} is opened for writing in a way that is not recorded")
            return real(file, mode, *arguments, **options)

        return opened
