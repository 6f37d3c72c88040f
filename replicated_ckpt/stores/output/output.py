"""The output of a conversion: files that get their names only after all of them were written and read back.

On a file system they are written into a directory beside their place, and then renamed.
"""

import abc
import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import ConfigInvalid, ObjectCorrupt, StoreFull
from replicated_ckpt.stores.files import durable
from replicated_ckpt.stores.files.durable import fsync_directory, remove_tree, translate_errors, write_all
from replicated_ckpt.stores.files.existence import is_directory, is_link, is_name_taken
from replicated_ckpt.stores.files.locks import DescriptorLock
from replicated_ckpt.stores.files.room import find_free_bytes

READ_BACK_HINT = "Nothing was published. Convert it again. If this happens again, write to another disk."

READ_BYTES = 4 << 20


class Stream(abc.ABC):
    """One file being written, from its start to its end, by one thread."""

    def __init__(self) -> None:
        self.position = 0
        self.crc = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._append(view)
        self.crc = crc32c(view, self.crc)
        self.position += len(view)
        return len(view)

    def flush(self) -> int:
        """Returns the position. Writers of file formats call it; only `close` makes bytes durable."""
        return self.position

    @abc.abstractmethod
    def _append(self, view: memoryview) -> None: ...

    @abc.abstractmethod
    def close(self) -> None:
        """Called after the last byte. When it returns the file is complete, and durable if the store supports it."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Closes an incomplete file. Never raises."""


@dataclass(frozen=True)
class Written:
    size_bytes: int
    crc32c: int


class Output(abc.ABC):
    """A file, or a directory of files, that appears atomically by `publish`. Leaving `with` before that removes all files.

    If the store has no atomic rename, the files appear one by one, in the order of their creation.
    """

    label: str

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}
        self._is_published = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_published:
            self._remove_parts()
        self._close()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Stream]:
        """Writes one file."""
        stream = self._open(name)
        try:
            yield stream
            stream.close()
        except BaseException:
            stream.abort()
            raise
        self.written[name] = Written(stream.position, stream.crc)

    def verify(self) -> None:
        """Reads all files back.

        Raises:
            ObjectCorrupt: a file differs from the written bytes. StoreError
        """
        for name, written in self.written.items():
            crc = size_bytes = 0
            for piece in self._pieces(name):
                crc = crc32c(piece, crc)
                size_bytes += len(piece)
            if (size_bytes, crc) != (written.size_bytes, written.crc32c):
                expected = f"expected {written.size_bytes} bytes of CRC32C {written.crc32c:08x}"
                detail = f"{expected}, found {size_bytes} of {crc:08x}"
                raise ObjectCorrupt(self.label, "read back", name, detail, READ_BACK_HINT)

    def publish(self) -> None:
        """Gives all files their names.

        Raises:
            ConfigInvalid: another file has the name by now. StoreError
        """
        self._give_names()
        self._is_published = True

    @abc.abstractmethod
    def _open(self, name: str) -> Stream: ...

    @abc.abstractmethod
    def _pieces(self, name: str) -> Iterator[memoryview | bytes]: ...

    @abc.abstractmethod
    def _give_names(self) -> None: ...

    @abc.abstractmethod
    def _remove_parts(self) -> None:
        """Removes unpublished files. Never raises a StoreError."""

    @abc.abstractmethod
    def _close(self) -> None: ...


class _FileStream(Stream):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._store, self._name = str(path.parent), path.name
        with translate_errors(self._store, "write", self._name):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def _append(self, view: memoryview) -> None:
        with translate_errors(self._store, "write", self._name):
            write_all(self._fd, view)

    def close(self) -> None:
        with translate_errors(self._store, "write", self._name):
            os.fsync(self._fd)
            # `verify` must read the disk, not the cached pages.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._fd)
        self._fd = -1

    def abort(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class LocalOutput(Output):
    """A file or a directory at `path`.

    Files are written to `.<name>.part/` beside `path`, under a lock. If a conversion is killed, the next one of the same
    name removes its files. Every file is fsynced before it gets its name.

    Args:
        size_bytes: the approximate size of the output. If the disk has less room, nothing is written.
        may_replace: with None, `path` must not exist. Otherwise an existing file is replaced; an existing directory is
            replaced if this function returns True for the names of all its files.

    Raises:
        ConfigInvalid: the place cannot be used. StoreFull, StoreDenied, StoreError
    """

    def __init__(
        self, path: Path, *, is_directory: bool, size_bytes: int, may_replace: Callable[[str], bool] | None = None
    ) -> None:
        super().__init__()
        self.label = str(path)
        self._path = path
        self._is_directory = is_directory
        self._may_replace = may_replace
        self._part = path.parent / f".{path.name}.part"
        self._lock = DescriptorLock(-1)
        self._check()
        self._begin()
        try:
            self._check_room(size_bytes)
        except BaseException:
            self.__exit__()
            raise

    def _check(self) -> None:
        if not is_directory(self._path.parent):
            raise ConfigInvalid(f"{self._path.parent} is not a directory.", "Make it first.")
        if not is_name_taken(self._path):
            return
        if self._may_replace is None:
            raise ConfigInvalid(f"{self._path} exists; nothing was written.", "Name another path, or pass --overwrite.")
        kind = "directory" if self._is_directory else "file"
        if is_link(self._path) or is_directory(self._path) != self._is_directory:
            raise ConfigInvalid(f"{self._path} is not a {kind}.", "Name another path; nothing was written.")
        others = [p.name for p in self._path.iterdir() if not self._may_replace(p.name)] if self._is_directory else []
        if others:
            raise ConfigInvalid(f"{self._path} holds other files, too: {', '.join(sorted(others)[:5])}.", "Move them.")

    def _begin(self) -> None:
        """Locks the directory beside `path`, and removes the files of a killed conversion there."""
        try:
            with translate_errors(str(self._path.parent), "write", self._part.name):
                self._take_part()
                for left in self._part.iterdir():
                    left.unlink()
        except BaseException:
            self._close()
            raise

    def _take_part(self) -> None:
        """Locks the directory beside `path`. Raises ConfigInvalid: another process or user has it, or just published it."""
        try:
            self._part.mkdir(exist_ok=True)
            self._lock = DescriptorLock(
                os.open(self._part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            )
            status = os.fstat(self._lock.fd)
            if status.st_uid != os.geteuid():  # its owner could put other bytes there after the verification
                raise ConfigInvalid(f"{self._part} belongs to another user.", "Remove it, or name another path.")
            # Another process may have renamed or removed the directory between open and lock.
            is_ours = self._lock.try_take() and os.path.samestat(self._part.stat(), status)
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            raise ConfigInvalid(f"Another process is writing {self._path}.", "Wait until it has ended.")

    def _check_room(self, size_bytes: int) -> None:
        free = find_free_bytes(self._part)
        if size_bytes > free:
            detail = f"it needs about {size_bytes} bytes, but only {free} are free"
            raise StoreFull(
                str(self._path.parent), "write", self._path.name, detail, "Free space, or name another path."
            )

    def part(self, name: str) -> Path:
        """The path of a file before it is published."""
        return self._part / name

    def _open(self, name: str) -> Stream:
        return _FileStream(self.part(name))

    def _pieces(self, name: str) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(READ_BYTES))
        with translate_errors(self.label, "read back", name), self.part(name).open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]

    def _give_names(self) -> None:
        # Again: the place was free when the conversion began, which may be hours ago.
        self._check()
        replaced = self._path.with_name(f".{self._path.name}.replaced")
        with translate_errors(self.label, "publish", self._path.name):
            if self._is_directory:
                remove_tree(replaced)  # of an interrupted conversion: rename does not replace a full directory
                self._name_directory(replaced)
            else:
                (name,) = self.written
                self.part(name).replace(self._path)
            fsync_directory(self._path.parent)
        with contextlib.suppress(OSError):  # the output is published: the next conversion removes these files
            remove_tree(replaced if self._is_directory else self._part)

    def _name_directory(self, replaced: Path) -> None:
        """Publishes the directory atomically. Without RENAME_EXCHANGE nothing has the name for an instant."""
        fsync_directory(self._part)
        if not is_name_taken(self._path):
            self._part.rename(self._path)
        elif durable.exchange(self._part, self._path):
            self._part.rename(replaced)
        else:
            self._path.rename(replaced)
            self._part.rename(self._path)

    def _remove_parts(self) -> None:
        with contextlib.suppress(OSError):
            remove_tree(self._part)

    def _close(self) -> None:
        self._lock.release()
