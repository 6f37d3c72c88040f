"""Checkpoints without a manifest on this node's disk, as stock torch's FileSystemWriter leaves them there: only read."""

import os
from collections.abc import Iterator
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.unmanaged.survey import UnmanagedFile, UnmanagedHolding
from replicated_ckpt.errors import ObjectMissing, StoreError
from replicated_ckpt.stores.files.durable import hash_open_file, read_exactly, translate_errors
from replicated_ckpt.stores.files.plain import closing_fd
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.committed import Committed, open_directory
from replicated_ckpt.stores.peer.client import FILE_BYTES_MAX

_PRINT_BYTES = 64 << 10
_Signature = tuple[int, int, int]


class UnmanagedDirectory:
    """Lists and opens what lies in directories without a manifest. Prints are kept until a file changes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prints: dict[tuple[str, str], tuple[_Signature, int]] = {}

    def holdings(self, node_id: str, checkpoint_id: str | None = None) -> tuple[UnmanagedHolding, ...]:
        """What lies here of one such checkpoint, or of all. A file that vanishes meanwhile is not there."""
        names = [checkpoint_id] if checkpoint_id else list(Catalog(self.root).without_manifest())
        return tuple(holding for name in names for holding in self._holding(node_id, name))

    def _holding(self, node_id: str, checkpoint_id: str) -> Iterator[UnmanagedHolding]:
        try:
            with open_directory(self.root, checkpoint_id) as directory:
                names = directory.names()
                if MANIFEST_NAME in names:
                    return
                found = {name: file for name in names if (file := self._file(directory, name)) is not None}
        except ObjectMissing:
            return
        metadata = found.pop(METADATA_NAME, None)
        if found or metadata is not None:
            yield UnmanagedHolding(node_id, checkpoint_id, metadata, found)

    def _file(self, directory: Committed, name: str) -> UnmanagedFile | None:
        key = directory.checkpoint_id, name
        try:
            fd = directory.open(name)
        except StoreError:
            return None
        with closing_fd(fd), translate_errors(str(self.root), "read", "/".join(key)):
            status = os.fstat(fd)
            is_metadata = name == METADATA_NAME
            if is_metadata and status.st_size > FILE_BYTES_MAX:
                return None
            signature = status.st_ino, status.st_mtime_ns, status.st_size
            known = self._prints.get(key)
            if known is None or known[0] != signature:
                known = self._prints[key] = signature, _print_of(fd, status.st_size, is_whole=is_metadata)
        return UnmanagedFile(status.st_size, known[1], max(0.0, status.st_mtime))

    def open(self, checkpoint_id: str, name: str, size_bytes: int) -> int:
        """File descriptor for reading one file of a checkpoint without a manifest; the caller closes it.

        Raises:
            ObjectMissing: it is not here, has another size, or is of a checkpoint of ours by now.
        """
        with open_directory(self.root, checkpoint_id) as directory:
            if MANIFEST_NAME in directory.names():
                raise ObjectMissing(str(self.root), "open", f"{checkpoint_id}/{name}", "it has a manifest by now")
            fd = directory.open(name)
        found_bytes = os.fstat(fd).st_size
        if found_bytes != size_bytes:
            os.close(fd)
            detail = f"expected a file of {size_bytes} bytes, found {found_bytes}"
            raise ObjectMissing(str(self.root), "open", f"{checkpoint_id}/{name}", detail)
        return fd

    def read(self, checkpoint_id: str, name: str, size_bytes: int) -> bytes:
        """A small file of this size; otherwise as `open`."""
        with os.fdopen(self.open(checkpoint_id, name, size_bytes), "rb") as file:
            return file.read(size_bytes)


def _print_of(fd: int, size_bytes: int, *, is_whole: bool) -> int:
    """CRC32C of a file, or of its beginning and its end, where the containers of items have the CRC32 of their data."""
    if is_whole or size_bytes <= 2 * _PRINT_BYTES:
        return hash_open_file(fd)[1]
    crc, piece = 0, memoryview(bytearray(_PRINT_BYTES))
    for offset in (0, size_bytes - _PRINT_BYTES):
        crc = crc32c(piece[: read_exactly(fd, piece, offset)], crc)
    return crc
