"""The catalog: which committed checkpoints lie under a root, as the disk shows them now."""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG

from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, footer_bytes_of
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import (
    MANIFEST_NAME,
    METADATA_NAME,
    PARTS_MAX,
    REPLACED_DIR,
    SHARD_SUFFIX,
    ShardName,
    is_checkpoint_file,
    is_checkpoint_id,
    is_save_id,
)
from replicated_ckpt.core.lineage import History, histories_of
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, Manifest, decode_manifest
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import ManifestInvalid, ManifestVersionUnknown, ObjectMissing, StoreError
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_there, leads_out
from replicated_ckpt.stores.files.plain import open_plain_file, read_plain
from replicated_ckpt.stores.files.shortage import find_unreadable, is_unreadable
from replicated_ckpt.stores.local.directories.roots import is_store


class Catalog:
    """Looks up committed checkpoints. Parsed manifests are kept until their file changes. Safe to use concurrently.

    Its paths are strings: each round of an agent makes thousands, and a Path costs more than the system call behind it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed: dict[str, tuple[tuple[int, int, int], Manifest]] = {}

    def _path_of(self, *parts: str) -> str:
        return "/".join((str(self.root), *parts))

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Manifest of a committed checkpoint.

        Raises:
            ObjectMissing, ManifestInvalid
        """
        path = self._path_of(checkpoint_id, MANIFEST_NAME)
        key = f"{checkpoint_id}/{MANIFEST_NAME}"
        with translate_errors(str(self.root), "read", key), manifest_readable(path):
            if leads_out(self.root, checkpoint_id):
                raise ObjectMissing(str(self.root), "read", key, "a symbolic link leads out of the root")
            try:
                stat = os.stat(path)  # noqa: PTH116 - see the class
                if stat.st_size > MANIFEST_BYTES_MAX:
                    raise ManifestInvalid(f"{path} has {stat.st_size} bytes, more than a manifest has.")
                signature = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                known = self._parsed.get(path)
                if known is None or known[0] != signature:
                    known = (signature, decode_manifest(read_plain(path), path))
                    self._parsed[path] = known
            except (FileNotFoundError, NotADirectoryError) as exc:
                raise ObjectMissing(str(self.root), "read", key) from exc
        return known[1]

    def find_manifest(self, checkpoint_id: str) -> Manifest | None:
        """The manifest under that name; None where none lies, or none that is believed."""
        try:
            return self.manifest(checkpoint_id)
        except (ObjectMissing, ManifestInvalid):
            return None

    def save_id_of(self, checkpoint_id: str) -> str:
        """The save that a checkpoint is of; empty where its manifest is damaged or gone.

        Raises:
            ManifestVersionUnknown: only a newer version knows. ObjectMissing: a symbolic link leads out of the root.
        """
        try:
            return self.manifest(checkpoint_id).save_id
        except ManifestVersionUnknown:
            raise
        except ObjectMissing as exc:
            if exc.detail:  # by a link
                raise
        except ManifestInvalid:
            pass
        return ""

    def committed(self) -> Iterator[tuple[str, Manifest]]:
        """Checkpoint id and manifest of every checkpoint whose manifest is believed; a bad one is left to `verify`."""
        found = list(self._checkpoint_ids(_has_manifest))
        there = {self._path_of(checkpoint_id, MANIFEST_NAME) for checkpoint_id in found}
        for path in list(self._parsed):  # first, as a caller that has found its checkpoint stops here
            if path not in there:  # the checkpoint was retired
                self._parsed.pop(path, None)
        for checkpoint_id in found:
            yield from self._one(checkpoint_id)

    def read_replaced(self) -> Iterator[Manifest]:
        """Manifests of the versions that newer saves have replaced here and that are kept until those are seen whole.

        Not of one that a user has put back under its name by hand: what is read of it lies there.
        """
        for name in self.list_replaced():
            manifest = self._read_replaced(name)
            published = None if manifest is None else self.find_manifest(manifest.checkpoint_id)
            if manifest is not None and (published is None or published.save_id != name):
                yield manifest

    def list_replaced(self) -> list[str]:
        """Directories of replaced versions. One whose manifest is not believed goes by the save that replaced it."""
        with translate_errors(str(self.root), "list", REPLACED_DIR):
            try:
                return sorted(entry.name for entry in os.scandir(self._path_of(REPLACED_DIR)) if is_save_id(entry.name))
            except FileNotFoundError:
                return []

    def is_replaced(self, save_id: str) -> bool:
        """Whether the save is kept here although a newer one has its name."""
        return self._read_replaced(save_id) is not None

    def _read_replaced(self, save_id: str) -> Manifest | None:
        manifest = self.find_manifest(f"{REPLACED_DIR}/{save_id}")
        return manifest if manifest is not None and manifest.save_id == save_id else None

    def directory_of(self, checkpoint_id: str, save_id: str) -> str | None:
        """Where under the root a save lies that was committed here under this id: published, or replaced. None: nowhere.

        Raises:
            ManifestInvalid: what is published is not believed, and the save is not among those that were replaced.
        """
        problem: ManifestInvalid | None = None
        try:
            if self.manifest(checkpoint_id).save_id == save_id:
                return checkpoint_id
        except ObjectMissing:
            pass
        except ManifestInvalid as exc:
            problem = exc
        found = self._read_replaced(save_id)
        if found is not None and found.checkpoint_id == checkpoint_id:
            return f"{REPLACED_DIR}/{save_id}"
        if problem is not None:
            raise problem
        return None

    def checkpoint_of(self, save_id: str) -> str | None:
        """Under which id a save is or was committed here; None: it is not, or not any more."""
        named = ((name, manifest.save_id) for name, manifest in self.committed())
        replaced = ((manifest.checkpoint_id, manifest.save_id) for manifest in self.read_replaced())
        return next((name for name, found in itertools.chain(named, replaced) if found == save_id), None)

    def holdings(self, node_id: str, checkpoint_id: str | None = None) -> tuple[Holding, ...]:
        """What the store holds of one checkpoint, or of all. A renamed checkpoint goes by its new name."""
        found = self.committed() if checkpoint_id is None else self._one(checkpoint_id)
        published = [self._holding(node_id, name, name, manifest) for name, manifest in found]
        replaced = [
            self._holding(node_id, manifest.checkpoint_id, f"{REPLACED_DIR}/{manifest.save_id}", manifest)
            for manifest in self.read_replaced()
            if checkpoint_id in (None, manifest.checkpoint_id)
        ]
        return (*published, *replaced)

    def _holding(self, node_id: str, checkpoint_id: str, directory: str, manifest: Manifest) -> Holding:
        has_metadata = self.size_of(directory, METADATA_NAME) == manifest.metadata_bytes
        found = Holding.of_save(manifest, node_id, checkpoint_id, has_metadata, self.shard_sizes(directory))
        return found if directory == checkpoint_id else replace(found, is_replaced=True)

    def _one(self, checkpoint_id: str) -> Iterator[tuple[str, Manifest]]:
        manifest = self.find_manifest(checkpoint_id)
        if manifest is not None:
            yield checkpoint_id, manifest

    def newest_of_runs(self, node_id: str, scope: str) -> tuple[Holding, ...]:
        """Of each lineage in a directory of ids the newest save that has a name here. Its files are not looked at."""
        newest: dict[str, Holding] = {}
        for name, manifest in self.committed():
            known = newest.get(manifest.lineage)
            if scope_of(name) == scope and (known is None or manifest.version.is_newer_than(known.version)):
                newest[manifest.lineage] = Holding.of_save(manifest, node_id, name, False, {})
        return tuple(newest.values())

    def histories(self, scope: str) -> dict[str, History]:
        """The lineages of which checkpoints of this directory of ids are committed here, or kept as replaced."""
        replaced = ((manifest.checkpoint_id, manifest) for manifest in self.read_replaced())
        found = itertools.chain(self.committed(), replaced)
        return histories_of(manifest.version for name, manifest in found if scope_of(name) == scope)

    def size_of(self, checkpoint_id: str, name: str) -> int | None:
        """Bytes of one plain file of a checkpoint; None if it is not there."""
        try:
            status = os.lstat(self._path_of(checkpoint_id, name))
        except OSError:
            return None
        return status.st_size if S_ISREG(status.st_mode) else None

    def shard_sizes(self, checkpoint_id: str) -> Mapping[str, int]:
        """Bytes of each shard file of a checkpoint; none while it is replaced or removed, or where the disk has lost it."""
        with translate_errors(str(self.root), "list", checkpoint_id):
            try:
                return {
                    entry.name: _size_of(entry)
                    for entry in os.scandir(self._path_of(checkpoint_id))
                    if ShardName.parse(entry.name) is not None and entry.is_file(follow_symlinks=False)
                }
            except OSError as exc:
                if isinstance(exc, FileNotFoundError) or is_unreadable(exc):
                    return {}
                raise

    def directories(self) -> Iterator[str]:
        """Every directory that has files of a checkpoint in it, its manifest believed, damaged or missing."""
        yield from self._checkpoint_ids(_looks_like_a_checkpoint)

    def with_invalid_manifest(self) -> Iterator[str]:
        """Directories with shards of this package whose manifest is damaged or missing."""
        for checkpoint_id in self.directories():
            try:
                self.manifest(checkpoint_id)
            except ManifestVersionUnknown:
                continue
            except (ObjectMissing, ManifestInvalid):
                yield checkpoint_id

    def of_newer_format(self, checkpoint_id: str | None = None) -> Iterator[str]:
        """Checkpoints, or this one, whose manifest only a newer version of the package reads."""
        for name in self._checkpoint_ids(_has_manifest) if checkpoint_id is None else [checkpoint_id]:
            try:
                self.manifest(name)
            except ManifestVersionUnknown:
                yield name
            except (ObjectMissing, ManifestInvalid):
                continue

    def is_newer_replaced(self, name: str) -> bool:
        """Whether a replaced version has a manifest that only a newer version of the package can read."""
        return any(self.of_newer_format(f"{REPLACED_DIR}/{name}"))

    def without_manifest(self) -> Iterator[str]:
        """Directories that hold DCP's metadata or shards and no manifest, whatever wrote them."""
        for checkpoint_id in self._checkpoint_ids(_holds_a_checkpoint):
            if is_checkpoint_id(checkpoint_id) and not _has_manifest(self._path_of(checkpoint_id)):
                yield checkpoint_id

    def _checkpoint_ids(self, is_one: Callable[[str], bool], parent: str = "", depth: int = 1) -> Iterator[str]:
        """Directories for which `is_one` is true, given their path. These, and other stores, are not looked into."""
        if depth > PARTS_MAX:
            return
        try:
            with translate_errors(str(self.root), "list", parent):
                entries = sorted(os.scandir(self._path_of(parent)), key=lambda found: found.name)
        except StoreError as exc:
            if isinstance(exc.__cause__, FileNotFoundError) or (parent and is_unreadable(exc)):
                return
            raise
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            with translate_errors(str(self.root), "look at", entry.name):
                if _is_closed_to_us(entry):
                    continue
                is_found = is_one(entry.path)
                is_closed = is_found or is_store(entry.path)
            if is_found:
                yield parent + entry.name
            elif not is_closed:
                yield from self._checkpoint_ids(is_one, f"{parent}{entry.name}/", depth + 1)


def _is_closed_to_us(entry: "os.DirEntry[str]") -> bool:
    """Whether it is gone meanwhile, or another user's that cannot be read, as `lost+found` of a mount: nothing of ours."""
    if os.access(entry.path, os.R_OK | os.X_OK):
        return False
    try:
        return entry.stat(follow_symlinks=False).st_uid != os.geteuid()
    except FileNotFoundError:
        return True
    except OSError as exc:
        if is_unreadable(exc):
            return False
        raise


def _size_of(entry: "os.DirEntry[str]") -> int:
    """Bytes of a shard's file; 0, which no shard has, where the disk cannot tell: it is there, and damaged."""
    try:
        return entry.stat().st_size
    except OSError as exc:
        if is_unreadable(exc):
            return 0
        raise


@contextmanager
def manifest_readable(path: str | Path) -> Iterator[None]:
    """Takes a manifest that the disk cannot give for a damaged one: the node's other checkpoints are as good as before."""
    try:
        yield
    except (OSError, StoreError) as exc:
        if (cause := find_unreadable(exc)) is not None:
            raise ManifestInvalid(f"{path} cannot be read: {cause.strerror}.") from exc
        raise


def _has_manifest(path: str) -> bool:
    """Whether anything lies there under the name of a manifest, or in a directory that the disk has lost.

    Raises OSError: the system does not say.
    """
    try:
        return is_there(f"{path}/{MANIFEST_NAME}")
    except OSError as exc:
        if is_unreadable(exc):
            return True
        raise


def _holds_a_checkpoint(path: str) -> bool:
    """Whether any file of a checkpoint lies there."""
    try:
        with os.scandir(path) as entries:
            return any(is_checkpoint_file(entry.name) for entry in entries)
    except OSError:
        return False


def _looks_like_a_checkpoint(path: str) -> bool:
    """Whether a manifest lies there, or a shard that ends as this package ends its shards; stock DCP writes neither."""
    return _has_manifest(path) or any(_has_footer(file) for file in Path(path).glob(f"*{SHARD_SUFFIX}"))


def _has_footer(path: Path) -> bool:
    try:
        with open_plain_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - FOOTER_TAIL_BYTES))
            return footer_bytes_of(file.read(), size) is not None
    except OSError:
        return False


def read_believed(directory: Path) -> Manifest | None:
    """The manifest that lies in a directory, in the trash or a staging area, too; None where there is none to believe."""
    with suppress(OSError, ManifestInvalid):
        return decode_manifest(read_plain(directory / MANIFEST_NAME), str(directory))
    return None
