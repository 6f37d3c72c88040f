"""One committed checkpoint on this node's disk, held by its directory: what is put into it or set aside stays with it.

An overwrite exchanges whole directories by name. What changes a committed checkpoint therefore works relative to the
opened directory, and only after its manifest was seen to be of the save that is meant.
"""

import contextlib
import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import (
    INCOMING_DIR,
    MANIFEST_NAME,
    METADATA_NAME,
    QUARANTINE_DIR,
    REPLACED_DIR,
    ShardName,
    check_checkpoint_id,
    is_checkpoint_file,
    is_save_id,
)
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, Manifest, decode_manifest
from replicated_ckpt.errors import ConfigInvalid, ManifestInvalid, ObjectCorrupt, ObjectMissing, StoreError
from replicated_ckpt.stores.files.durable import fsync_directory, make_directories, translate_errors, write_file
from replicated_ckpt.stores.files.existence import is_directory, leads_out, list_prefixed
from replicated_ckpt.stores.files.plain import closing_fd, open_plain
from replicated_ckpt.stores.local.directories.catalog import manifest_readable


class Committed:
    """A checkpoint directory that is held open. One thread."""

    def __init__(self, root: Path, checkpoint_id: str, fd: int) -> None:
        self._root = root
        self._fd = fd
        self.checkpoint_id = checkpoint_id

    def manifest(self) -> Manifest:
        """The manifest in the directory.

        Raises:
            ObjectMissing, ManifestInvalid
        """
        path = self._root / self.checkpoint_id / MANIFEST_NAME
        with manifest_readable(path):
            return decode_manifest(self.raw_manifest(), str(path))

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
            ObjectMissing: it is not there, or a pipe or a device. StoreError: it is a directory.
        """
        if not is_checkpoint_file(name):
            raise ConfigInvalid(f"{name[:200]!r} is no file of a checkpoint.")
        with self._translate("open", name):
            try:
                return open_plain(name, os.O_NOFOLLOW, dir_fd=self._fd)
            except FileNotFoundError as exc:
                raise ObjectMissing(str(self._root), "open", f"{self.checkpoint_id}/{name}") from exc

    def raw_manifest(self) -> bytes:
        return self._read(MANIFEST_NAME, MANIFEST_BYTES_MAX)

    def raw_metadata(self, manifest: Manifest) -> bytes:
        """The metadata, as this manifest describes it.

        Raises:
            ObjectCorrupt: it is another. ObjectMissing, StoreError
        """
        size_bytes, crc = manifest.metadata_bytes, manifest.metadata_crc32c
        raw = self._read(METADATA_NAME, size_bytes)
        if len(raw) != size_bytes or crc32c(raw) != crc:
            detail = f"expected {size_bytes} bytes of CRC32C {crc:08x}, found {len(raw)} of {crc32c(raw):08x}"
            raise ObjectCorrupt(str(self._root), "read", f"{self.checkpoint_id}/{METADATA_NAME}", detail)
        return raw

    def _read(self, name: str, bytes_max: int) -> bytes:
        """One byte more of it, if there is more."""
        with self._translate("read", name), os.fdopen(self.open(name), "rb") as file:
            return file.read(bytes_max + 1)

    def has(self, name: str) -> bool:
        """Whether anything has this name.

        Raises:
            StoreError: the disk does not say. Nothing can get the name then.
        """
        with self._translate("look at", name), contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            return True
        return False

    def check_writable(self) -> None:
        """Before a file is brought for this directory: whether it can get a name here, which its user may have forbidden.

        Raises:
            StoreDenied: it cannot.
        """
        with self._translate("place", ""):
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=self._fd, effective_ids=True):
                path = os.readlink(f"/proc/self/fd/{self._fd}")  # noqa: PTH115 - of a descriptor
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def set_aside(self, name: str, why: str, *, stays: bool = False) -> Path | None:
        """Moves a file to the quarantine, with a note of why; returns where it is now, None if it was not there.

        `stays`: it stays where it is, too.
        """
        if not self.has(name):  # no manifest is read and no folder made for nothing
            return None
        with self._translate("set aside", name):
            save = self._save_id_or_unknown()
            folder = self._root / QUARANTINE_DIR / save
            make_directories(folder, self._root)
            target = folder / f"{name}.{uuid.uuid4().hex[:8]}"
            note = {"checkpoint_id": self.checkpoint_id, "save_id": save, "name": name, "why": why}
            (self._link if stays else self._move)(name, target)
            write_file(target.with_name(f"{target.name}.json"), json.dumps(note).encode())
        return target

    def _move(self, name: str, target: Path) -> None:
        os.rename(name, target, src_dir_fd=self._fd)
        fsync_directory(target.parent)
        os.fsync(self._fd)

    def _link(self, name: str, target: Path) -> None:
        """Gives the file a second name, so that the first is never without a file; moves it where that cannot be."""
        try:
            os.link(name, target, src_dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            self._move(name, target)

    def _save_id_or_unknown(self) -> str:
        try:
            save_id = str(json.loads(self.raw_manifest())["manifest"]["save_id"])
        except (StoreError, ValueError, KeyError, TypeError, RecursionError):
            return "unknown"
        return save_id if is_save_id(save_id) else "unknown"

    def place(self, incoming: Path, name: str) -> None:
        """Gives a file that is complete and durable its name in the checkpoint, durably. What was there is set aside."""
        self.check_writable()  # else each try would leave one more name in the quarantine
        self.set_aside(name, "a verified copy replaces it", stays=True)
        with self._translate("place", name):
            os.rename(incoming, name, dst_dir_fd=self._fd)
            os.fsync(self._fd)
            fsync_directory(incoming.parent)

    def put_small(self, name: str, data: bytes) -> None:
        """Writes a small file into the checkpoint, durably. What was there is set aside."""
        with incoming_file(self._root) as path:
            with self._translate("write", name):
                write_file(path, data)
            self.place(path, name)

    @contextmanager
    def _translate(self, op: str, name: str) -> Iterator[None]:
        with translate_errors(str(self._root), op, f"{self.checkpoint_id}/{name}"):
            yield


@contextmanager
def open_directory(root: Path, checkpoint_id: str) -> Iterator[Committed]:
    """Holds the directory of a checkpoint, whatever is in it.

    Raises:
        ObjectMissing: there is none.
    """
    check_checkpoint_id(checkpoint_id)
    with translate_errors(str(root), "open", checkpoint_id):
        if leads_out(root, checkpoint_id):
            raise ObjectMissing(str(root), "open", checkpoint_id, "a symbolic link leads out of the root")
        try:
            fd = os.open(root / checkpoint_id, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise ObjectMissing(str(root), "open", checkpoint_id) from exc
    with closing_fd(fd):
        yield Committed(root, checkpoint_id, fd)


@contextmanager
def open_committed_save(root: Path, checkpoint_id: str, save_id: str) -> Iterator[tuple[Committed, Manifest]]:
    """Holds the directory of one committed save, with its manifest: published, or replaced, whatever has its name now.

    Raises:
        ObjectMissing: the checkpoint is not here, or is of another save. ManifestInvalid
    """
    with contextlib.ExitStack() as held:
        problem: ManifestInvalid | ObjectMissing | None = None
        try:
            directory = held.enter_context(open_directory(root, checkpoint_id))
            manifest = directory.manifest()
        except (ManifestInvalid, ObjectMissing) as exc:
            problem = exc
        if problem is not None or manifest.save_id != save_id:
            try:
                directory = held.enter_context(open_replaced(root, checkpoint_id, save_id))
            except ObjectMissing as exc:
                raise problem or exc from exc
            manifest = directory.manifest()
            if (manifest.save_id, manifest.checkpoint_id) != (save_id, checkpoint_id):
                raise ObjectMissing(str(root), "open", checkpoint_id, f"not of save {save_id}")
        yield directory, manifest


@contextmanager
def open_replaced(root: Path, checkpoint_id: str, save_id: str) -> Iterator[Committed]:
    """Holds the directory in which a version of a checkpoint is kept that a newer save has replaced, whatever is in it.

    Raises:
        ObjectMissing: there is none.
    """
    if not is_save_id(save_id):
        raise ObjectMissing(str(root), "open", checkpoint_id, f"{save_id[:80]!r} is no save id")
    path = root / REPLACED_DIR / save_id
    with translate_errors(str(root), "open", f"{REPLACED_DIR}/{save_id}"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise ObjectMissing(str(root), "open", checkpoint_id, f"not of save {save_id}") from exc
    with closing_fd(fd):
        yield Committed(root, checkpoint_id, fd)


def descriptions(directory: Committed, manifest: Manifest) -> tuple[bytes, bytes]:
    """The bytes of manifest and metadata as they go to the bucket, from a directory that is still this save's.

    Raises:
        ObjectMissing: it is another's by now. ObjectCorrupt: they are not what was saved.
    """
    raw_manifest = directory.raw_manifest()
    if directory.manifest().save_id != manifest.save_id or manifest.upload is None:
        raise ManifestInvalid(
            f"{manifest.checkpoint_id} was replaced meanwhile.", "Nothing is to be done: the newer one loads."
        )
    raw_metadata = directory.raw_metadata(manifest)
    return raw_manifest, manifest.bucket_metadata(raw_metadata)


@contextmanager
def incoming_file(root: Path) -> Iterator[Path]:
    """A new name for a file on its way into a committed checkpoint; one that did not get there is gone afterwards.

    What a crash leaves there is worth nothing.
    """
    folder = root / INCOMING_DIR
    with translate_errors(str(root), "create", INCOMING_DIR):
        if not is_directory(folder):
            make_directories(folder, root)
            fsync_directory(root)
    path = folder / uuid.uuid4().hex
    try:
        yield path
    except BaseException:
        for left in list_prefixed(folder, path.name):
            left.unlink(missing_ok=True)
        raise
