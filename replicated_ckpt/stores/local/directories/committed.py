"""One committed checkpoint on this node's disk, accessed through its open directory.

A user may rename a directory at any time. So changes to a committed checkpoint use names relative to the open directory,
and only after its manifest was seen to be of the right save.
"""

import contextlib
import errno
import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import (
    MANIFEST_NAME,
    METADATA_NAME,
    PART_SUFFIX,
    QUARANTINE_DIR,
    STAGING_DIR,
    ShardName,
    check_checkpoint_id,
    is_checkpoint_file,
    is_save_id,
    replaced_name,
    version_metadata_name,
)
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, Manifest, decode_manifest, find_save_id
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, ObjectCorrupt, ObjectMissing, StoreError
from replicated_ckpt.stores.files.durable import (
    fsync_directory,
    is_full,
    make_directories,
    translate_errors,
    write_file,
)
from replicated_ckpt.stores.files.existence import closing_fd, leads_out, list_prefixed, open_plain
from replicated_ckpt.stores.files.locks import exclusive
from replicated_ckpt.stores.local.directories.catalog import manifest_readable

log = logging.getLogger(__name__)


class Committed:
    """An open checkpoint directory, or the version `save_id` in it. For one thread.

    Files have the names that peers use: `.manifest.json` and `.metadata` are those of the version.
    """

    def __init__(
        self,
        root: Path,
        checkpoint_id: str,
        fd: int,
        save_id: str = "",
        *,
        is_replaced: bool = False,
        slim: Manifest | None = None,
    ) -> None:
        """`is_replaced`: another version is published, so the published files are never this one's.

        `slim`: the version's manifest, if it has no optimizer. While the optimizer is removed, the full metadata lies under
        the version's own name: only its size distinguishes it.
        """
        self._root = root
        self._fd = fd
        self._save_id = save_id
        self._slim = slim
        self.is_replaced = is_replaced
        self.checkpoint_id = checkpoint_id

    def manifest(self) -> Manifest:
        """The version's manifest. Without a save id: the published version's.

        Raises:
            ObjectMissing, ManifestInvalid
        """
        path = self._root / self.checkpoint_id / MANIFEST_NAME
        with manifest_readable(path):
            return decode_manifest(self.raw_manifest(), str(path))

    def of_save(self, save_id: str, *, is_replaced: bool = False) -> "Committed":
        """One version in the same directory. It is valid as long as this object's directory is open."""
        return Committed(self._root, self.checkpoint_id, self._fd, save_id, is_replaced=is_replaced)

    def of_manifest(self, manifest: Manifest) -> "Committed":
        """As `of_save`, for the version of this manifest."""
        slim = manifest if manifest.is_slim else None
        return Committed(self._root, self.checkpoint_id, self._fd, manifest.save_id, slim=slim)

    def is_in_place(self) -> bool:
        """Whether the directory still has the checkpoint's name."""
        with self._translate("look at", ""), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.fstat(self._fd), (self._root / self.checkpoint_id).stat())
        return False

    def names(self) -> list[str]:
        """The files of a checkpoint that lie in the directory."""
        with self._translate("list", ""):
            return sorted(
                name
                for name in os.listdir(self._fd)  # noqa: PTH208 - of an open directory, not of a path
                if is_checkpoint_file(name)
            )

    def shards(self) -> list[str]:
        return [name for name in self.names() if ShardName.parse(name) is not None]

    def open(self, name: str) -> int:
        """File descriptor for reading one file; the caller closes it.

        Raises:
            ObjectMissing: the file is missing, or is a pipe or a device. StoreError: it is a directory.
        """
        if not is_checkpoint_file(name):
            raise ConfigInvalid(f"{name[:200]!r} is not a file of a checkpoint.")
        with self._translate("open", name):
            try:
                return self._open_own(name)
            except FileNotFoundError as exc:
                raise ObjectMissing(str(self._root), "open", f"{self.checkpoint_id}/{name}") from exc

    def _open_own(self, name: str) -> int:
        """Tries the version's own names before and after the published one, as `publish` may rename them meanwhile.

        A version that is being replaced gets its own names before it loses the published ones.
        """
        own = self._own_name(name)
        fd = self._try_open(own) if own else None
        if fd is not None:
            return fd
        if own and self.is_replaced:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), own)
        # O_NOFOLLOW: a link in the directory could make an agent serve any file of the host.
        fd = open_plain(name, os.O_NOFOLLOW, dir_fd=self._fd)
        # If its own name came since the first look, the published file may be the newer version's.
        again = self._try_open(own) if own else None
        if again is None:
            return fd
        os.close(fd)
        return again

    def _own_name(self, name: str) -> str:
        if not self._save_id or ShardName.parse(name) is not None:
            return ""
        return (version_metadata_name if name == METADATA_NAME else replaced_name)(self._save_id)

    def _try_open(self, name: str) -> int | None:
        """Opens a file; None if it is missing, or is the full metadata of a slimmed version."""
        try:
            fd = open_plain(name, os.O_NOFOLLOW, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        if self._slim is None or name != version_metadata_name(self._slim.save_id):
            return fd
        if os.fstat(fd).st_size == self._slim.metadata_bytes:
            return fd
        os.close(fd)
        return None

    def disk_name(self, name: str) -> str:
        """The name that a file of this version has in the directory now."""
        own = self._own_name(name)
        return own if own and (self.is_replaced or self.has(own)) else name

    def raw_manifest(self) -> bytes:
        return self._read(MANIFEST_NAME, MANIFEST_BYTES_MAX)

    def raw_metadata(self, manifest: Manifest) -> bytes:
        """The metadata, if it has the size and checksum in this manifest.

        Raises:
            ObjectCorrupt: it differs. ObjectMissing, StoreError
        """
        size_bytes, crc = manifest.metadata_bytes, manifest.metadata_crc32c
        raw = self._read(METADATA_NAME, size_bytes)
        if len(raw) != size_bytes or crc32c(raw) != crc:
            detail = f"expected {size_bytes} bytes of CRC32C {crc:08x}, found {len(raw)} of {crc32c(raw):08x}"
            raise ObjectCorrupt(str(self._root), "read", f"{self.checkpoint_id}/{METADATA_NAME}", detail)
        return raw

    def _read(self, name: str, bytes_max: int) -> bytes:
        """The file's bytes, at most one more than `bytes_max`, so that the caller detects a larger file."""
        with self._translate("read", name), os.fdopen(self.open(name), "rb") as file:
            return file.read(bytes_max + 1)

    def has(self, name: str) -> bool:
        """Whether anything has this name.

        Raises:
            StoreError: the disk returns an error, which must not count as a free name.
        """
        with self._translate("look at", name), contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            return True
        return False

    def check_writable(self) -> None:
        """Checks, before a file is fetched, that files can be created in the directory: a user may have forbidden it.

        Raises:
            StoreDenied: it is not writable.
        """
        with self._translate("place", ""):
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=self._fd, effective_ids=True):
                path = os.readlink(f"/proc/self/fd/{self._fd}")  # noqa: PTH115 - of a descriptor
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def set_aside(self, name: str, why: str, *, stays: bool = False) -> Path | None:
        """Moves a file to the quarantine, and logs why; returns its new path, None if the file is missing.

        `stays`: the file also keeps its name.
        """
        name = self.disk_name(name)
        if not self.has(name):  # the usual case: read no manifest and make no folder
            return None
        with self._translate("set aside", name):
            save = self._save_id_or_unknown()
            folder = self._root / QUARANTINE_DIR / save
            make_directories(folder, self._root)
            target = folder / f"{name}.{uuid.uuid4().hex[:8]}"
            (self._link if stays else self._move)(name, target)
        log.warning("%s of %s is moved aside as %s: %s", name, self.checkpoint_id, target, why)
        return target

    def link(self, name: str, target: Path) -> None:
        """Gives a file a second name, which must be free. Raises OSError"""
        os.link(name, target, src_dir_fd=self._fd, follow_symlinks=False)

    def _move(self, name: str, target: Path) -> None:
        os.rename(name, target, src_dir_fd=self._fd)
        # The new name first: a power loss between the two must not leave the file without any.
        fsync_directory(target.parent)
        os.fsync(self._fd)

    def _link(self, name: str, target: Path) -> None:
        """Gives the file a second name and keeps the first. Without hard links it moves the file."""
        try:
            self.link(name, target)
        except FileNotFoundError:
            raise
        except OSError as exc:
            if is_full(exc):
                raise
            self._move(name, target)
        else:
            fsync_directory(target.parent)

    def _save_id_or_unknown(self) -> str:
        if self._save_id:
            return self._save_id
        try:
            return find_save_id(self.raw_manifest()) or "unknown"
        except StoreError:
            return "unknown"

    @contextmanager
    def incoming_file(self, name: str) -> Iterator[Path]:
        """The temporary path for a file that will get this name. After an error in the block the file is removed.

        `LocalStore.tidy` removes such files after a crash, by their names.
        """
        path = self._root / self.checkpoint_id / f"{name}.{self._save_id or uuid.uuid4().hex}{PART_SUFFIX}"
        self.check_writable()
        try:
            yield path
        except BaseException:
            for left in list_prefixed(path.parent, path.name):
                left.unlink(missing_ok=True)
            raise

    def place(self, incoming: Path, name: str) -> None:
        """Durably renames a complete and durable file to its name in the checkpoint. An old file is set aside.

        Raises:
            ObjectMissing: the version was removed meanwhile.
        """
        self.check_writable()  # first: otherwise each try would add one more file to the quarantine
        with exclusive(self._root / STAGING_DIR):  # so that no publication or removal runs meanwhile
            self._check_is_there(name)
            self.set_aside(name, "a verified copy replaces it", stays=True)
            with self._translate("place", name):
                os.rename(incoming, self.disk_name(name), dst_dir_fd=self._fd)
                os.fsync(self._fd)

    def _check_is_there(self, name: str) -> None:
        """Raises unless the version is still here. For manifest and metadata, its manifest may be missing."""
        try:
            is_there = not self._save_id or self.manifest().save_id == self._save_id
        except (ManifestInvalid, ObjectMissing):
            # Without a manifest only manifest and metadata may come: a shard could be another version's.
            is_there = ShardName.parse(name) is None
        if not (is_there and self.is_in_place()):
            raise ObjectMissing(
                str(self._root), "place", f"{self.checkpoint_id}/{name}", "it was removed in the meantime"
            )

    def put_small(self, name: str, data: bytes) -> None:
        """Durably writes a small file into the checkpoint. An old file is set aside."""
        with self.incoming_file(name) as path:
            with self._translate("write", name):
                write_file(path, data)
            self.place(path, name)

    @contextmanager
    def _translate(self, op: str, name: str) -> Iterator[None]:
        with translate_errors(str(self._root), op, f"{self.checkpoint_id}/{name}"):
            yield


@contextmanager
def open_directory(root: Path, checkpoint_id: str) -> Iterator[Committed]:
    """Opens the directory of a checkpoint, whatever is in it, for the block.

    Raises:
        ObjectMissing: there is no such directory.
    """
    check_checkpoint_id(checkpoint_id)
    with translate_errors(str(root), "open", checkpoint_id):
        if leads_out(root, checkpoint_id):
            raise ObjectMissing(str(root), "open", checkpoint_id, "a symbolic link points outside the root")
        try:
            fd = os.open(root / checkpoint_id, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise ObjectMissing(str(root), "open", checkpoint_id) from exc
    with closing_fd(fd):
        yield Committed(root, checkpoint_id, fd)


@contextmanager
def open_committed_save(root: Path, checkpoint_id: str, save_id: str) -> Iterator[tuple[Committed, Manifest]]:
    """Opens one committed save, published or replaced, with its manifest, for the block.

    Raises:
        ObjectMissing: the checkpoint is not here, or only other saves of it are. ManifestInvalid
    """
    if not is_save_id(save_id):
        raise ObjectMissing(str(root), "open", checkpoint_id, f"{save_id[:80]!r} is not a save id")
    with open_directory(root, checkpoint_id) as directory:
        version = directory.of_save(save_id)
        manifest = version.manifest()
        if manifest.save_id != save_id:
            raise ObjectMissing(str(root), "open", checkpoint_id, f"it is not of save {save_id}")
        yield directory.of_manifest(manifest), manifest


def descriptions(directory: Committed, manifest: Manifest) -> tuple[bytes, bytes]:
    """The bytes of manifest and metadata for the bucket, from a directory in which this save is still published.

    Raises:
        ManifestInvalid: the save was replaced meanwhile. ObjectCorrupt: the metadata differs from the saved one.
        ObjectMissing
    """
    raw_manifest = directory.raw_manifest()
    if directory.manifest().save_id != manifest.save_id or manifest.upload is None:
        raise ManifestInvalid(
            f"{manifest.checkpoint_id} was replaced in the meantime.", "No action is needed: the newer one loads."
        )
    raw_metadata = directory.raw_metadata(manifest)
    return raw_manifest, manifest.bucket_metadata(raw_metadata)
