"""The output of a conversion: files that get their names only after all of them were written and read back."""

import abc
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import ObjectCorrupt

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
    """A file, or a directory of files, that appears atomically by `publish`. Leaving the block without it removes all.

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
