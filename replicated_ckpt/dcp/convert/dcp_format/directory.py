"""A directory that stock DCP wrote, all of it on one file system, as a source."""

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.dcp.convert.entries.items_source import ItemsSource, Wanted
from replicated_ckpt.dcp.metadata.metadata import decode_metadata
from replicated_ckpt.errors import ConfigInvalid, ObjectMissing, StoreDenied, StoreError
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.plain import closing_fd, open_plain, read_plain
from replicated_ckpt.stores.peer.client import FILE_BYTES_MAX


class DirectoryFetcher:
    """Bytes of files in one directory. No checksums of them were taken, so none are compared.

    Links are not followed: in a directory that another user can write, they could lead to any file of this one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def fetch(self, wanted: Sequence[Wanted]) -> None:
        for shard in {w.shard: None for w in wanted}:
            with closing_fd(self._open(shard)) as fd:
                for want in (w for w in wanted if w.shard == shard):
                    try:
                        want.take(self._read(fd, want))
                    # The length comes from .metadata, which anyone may have written.
                    except MemoryError as exc:
                        detail = f"an item of {want.length} bytes does not fit into memory"
                        raise StoreError(str(self._directory), "read", shard, detail, _HINT_LARGE) from exc

    def _open(self, shard: str) -> int:
        try:
            return open_plain(self._directory / shard, os.O_NOFOLLOW)
        except FileNotFoundError as exc:
            raise ObjectMissing(str(self._directory), "read", shard, "no such file", _HINT) from exc
        except OSError as exc:
            raise _make_read_error(self._directory, shard, exc) from exc

    def _read(self, fd: int, want: Wanted) -> memoryview:
        raw = memoryview(bytearray(want.length))
        with translate_errors(str(self._directory), "read", want.shard):
            count = read_exactly(fd, raw, want.offset)
        # A file that was cut off reads as fewer bytes, not as an error.
        if count != want.length:
            end = want.offset + want.length
            raise StoreError(str(self._directory), "read", want.shard, f"it ends before {end}", _HINT_SHORT)
        return raw

    # Before anything is written: a conversion may run for an hour until it meets the short file.
    def check(self, places: Iterable[tuple[str, int, int]]) -> None:
        ends: dict[str, int] = {}
        for shard, offset, length in places:
            ends[shard] = max(ends.get(shard, 0), offset + length)
        for shard, end in ends.items():
            with closing_fd(self._open(shard)) as fd:
                size_bytes = os.fstat(fd).st_size
            if size_bytes < end:
                raise StoreError(str(self._directory), "read", shard, f"it ends before {end}", _HINT_SHORT)

    def close(self) -> None:
        """Does nothing: every file was closed after its use."""


_NAME_DIRECTORY = "Name the directory that contains .metadata: the checkpoint's own, not the one above."
_HINT = "All files of the checkpoint must lie in this directory: gather them from the nodes that wrote them."
_HINT_SHORT = "It was cut off: copy it again from the node that wrote it."
_HINT_LARGE = "Convert it on a host with more memory, or leave the item out with --exclude."
_HINT_READ = (
    "Let this user read it (`ls -l` shows the owner). If it is too large, convert it on a host with more memory."
)


_HINT_LINK = "Links are not followed: copy the file here in its place, or name the directory that the link points to."


def _make_read_error(directory: Path, name: str, exc: OSError | MemoryError) -> StoreError:
    # O_NOFOLLOW reports a link as a loop.
    if isinstance(exc, OSError) and exc.errno == errno.ELOOP:
        return StoreDenied(str(directory), "read", name, "it is a symbolic link", _HINT_LINK)
    return StoreError(str(directory), "read", name, str(exc) or "it is larger than the memory", _HINT_READ)


def dcp_directory(path: Path) -> ItemsSource:
    """The checkpoint in a directory.

    Raises:
        ConfigInvalid: there is none. StoreDenied: it is a link. MetadataUnsafe: its .metadata is not what DCP writes.
    """
    try:
        raw = read_plain(path / METADATA_NAME, FILE_BYTES_MAX, os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ConfigInvalid(f"{path} holds no .metadata, so it is not a DCP checkpoint.", _NAME_DIRECTORY) from exc
    except (OSError, MemoryError) as exc:
        raise _make_read_error(path, METADATA_NAME, exc) from exc
    return ItemsSource(decode_metadata(raw, str(path)), DirectoryFetcher(path), str(path))
