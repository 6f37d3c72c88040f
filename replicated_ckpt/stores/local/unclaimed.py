"""Directories with a damaged or missing manifest: their files, and the checksums that these contain themselves."""

import os
from collections.abc import Callable, Collection, Iterable

from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, is_checkpoint_id
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.errors import ManifestVersionUnknown, ObjectMissing, StoreError
from replicated_ckpt.stores.files.durable import hash_open_file, is_unreadable
from replicated_ckpt.stores.local.directories.committed import Committed, open_directory
from replicated_ckpt.stores.local.directories.looked import crc_of_footer
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import FILE_BYTES_MAX

_KEPT_MAX = 4096
FindCrc = Callable[[str, int], int | None]
"""Finds the CRC32C of a file, given its name and descriptor, in its own contents; None: it is not there."""
Holds = Callable[[int, int], bool]


class UnclaimedFilesReader:
    """Reads the footers of shards, and `.metadata` in full. Results are cached until the file changes.

    Changes nothing. Safe for concurrent use.
    """

    def __init__(self, store: LocalStore, node_id: str) -> None:
        self._store = store
        self._node_id = node_id
        self._crcs: dict[tuple[int, int, int, int], int | None] = {}

    def find_files(self, checkpoint_id: str | None = None) -> tuple[UnclaimedFiles, ...]:
        """The files without a valid manifest, in the directory of one checkpoint or in all.

        Raises:
            StoreError: the disk cannot be read.
        """
        return tuple(unclaimed for name in self._ids(checkpoint_id) if (unclaimed := self._of(name)) is not None)

    def _ids(self, checkpoint_id: str | None) -> Iterable[str]:
        if checkpoint_id is not None:
            return [checkpoint_id]
        return sorted({*self._store.catalog.with_invalid_manifest(), *self._store.catalog.without_manifest()})

    def _of(self, checkpoint_id: str) -> UnclaimedFiles | None:
        try:
            if not is_checkpoint_id(checkpoint_id) or self._store.catalog.save_id_of(checkpoint_id):
                return None
            with open_directory(self._store.root, checkpoint_id) as directory:
                claimed = self._store.catalog.list_claimed(checkpoint_id)
                return read_unclaimed_files(directory, self._node_id, self._crc, claimed=claimed)
        except (ManifestVersionUnknown, ObjectMissing):
            return None
        except StoreError as exc:
            if not is_unreadable(exc):
                raise
            # The disk has lost the directory: it counts as a damaged checkpoint of this package.
            return UnclaimedFiles(self._node_id, checkpoint_id, is_ours=True)

    def _crc(self, name: str, fd: int) -> int | None:
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        if key not in self._crcs:
            # Bounded: a user's directory may hold any number of files.
            if len(self._crcs) >= _KEPT_MAX:
                self._crcs.clear()
            self._crcs[key] = find_crc(name, fd)
        return self._crcs[key]


def read_unclaimed_files(
    directory: Committed,
    node_id: str,
    find: FindCrc,
    holds: Holds = lambda _, __: True,
    claimed: Collection[str] = (),
) -> UnclaimedFiles | None:
    """The unclaimed files in a directory; None: no files of a checkpoint. A file that cannot be opened is left out.

    `holds` checks that the bytes behind a descriptor have the CRC32C that `find` returned. `claimed` are files of versions
    with valid manifests.
    """
    names = [name for name in directory.names() if name not in claimed]
    sizes: dict[str, int] = {}
    crcs: dict[str, int] = {}
    is_ours = MANIFEST_NAME in names
    for name in (name for name in names if name != MANIFEST_NAME):
        try:
            fd = directory.open(name)
        except StoreError:
            continue
        try:
            sizes[name] = os.fstat(fd).st_size
            told = find(name, fd)
            is_ours = is_ours or (name != METADATA_NAME and told is not None)
            crcs |= {name: told} if told is not None and holds(fd, told) else {}
        except OSError:
            continue  # unreadable: listed by its size, without a checksum
        finally:
            os.close(fd)
    return UnclaimedFiles(node_id, directory.checkpoint_id, is_ours, sizes, crcs) if names else None


def find_crc(name: str, fd: int) -> int | None:
    """The CRC32C of a file: of `.metadata` from all its bytes, of a shard from its footer.

    None: the shard's footer is damaged, or `.metadata` exceeds the size limit.
    """
    if name != METADATA_NAME:
        return crc_of_footer(fd)
    return hash_open_file(fd)[1] if os.fstat(fd).st_size <= FILE_BYTES_MAX else None
