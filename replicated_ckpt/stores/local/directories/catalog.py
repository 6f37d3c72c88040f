"""The catalog: the committed checkpoints under a root, in their present state on the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import (
    MANIFEST_NAME,
    METADATA_NAME,
    NODE_NAME,
    PARTS_MAX,
    STAGING_DIR,
    is_checkpoint_id,
    is_save_id,
    replaced_name,
    version_metadata_name,
)
from replicated_ckpt.core.lineage import History, histories_of
from replicated_ckpt.core.manifest import MANIFEST_BYTES_MAX, Manifest, decode_manifest
from replicated_ckpt.core.parts import is_optimizer_of
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.errors import ManifestInvalid, ManifestVersionUnknown, ObjectMissing, StoreError
from replicated_ckpt.stores.files.durable import find_unreadable, is_unreadable, translate_errors
from replicated_ckpt.stores.files.existence import is_directory, leads_out, read_plain
from replicated_ckpt.stores.local.directories.looked import Looked, is_without_footer
from replicated_ckpt.stores.local.directories.roots import is_store


class Catalog:
    """Looks up committed checkpoints. Parsed manifests are cached until their file changes. Safe to use concurrently.

    Paths are strings: each round of an agent makes thousands, and a Path costs more than the system call behind it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parsed: dict[str, tuple[tuple[int, int, int], Manifest]] = {}

    @property
    def staging(self) -> Path:
        """The directory of unpublished saves. Publishing and removing a version hold the lock on it."""
        return self.root / STAGING_DIR

    def _path_of(self, *parts: str) -> str:
        return "/".join((str(self.root), *parts))

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Manifest of the version that is published under this id.

        Raises:
            ObjectMissing, ManifestInvalid
        """
        return self._read(checkpoint_id, MANIFEST_NAME)

    def _read(self, checkpoint_id: str, name: str) -> Manifest:
        path = self._path_of(checkpoint_id, name)
        key = f"{checkpoint_id}/{name}"
        with translate_errors(str(self.root), "read", key), manifest_readable(path):
            # Before any read: an agent reads for other users, who may have put a link there.
            if leads_out(self.root, checkpoint_id):
                raise ObjectMissing(str(self.root), "read", key, "a symbolic link points outside the root")
            try:
                stat = os.stat(path)  # noqa: PTH116 - see the class
                # A damaged or hostile size must not be read into memory.
                if stat.st_size > MANIFEST_BYTES_MAX:
                    raise ManifestInvalid(f"{path} has {stat.st_size} bytes, too many for a manifest.")
                # The inode, too: a rename over the file may keep time and size.
                signature = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                known = self._parsed.get(path)
                if known is None or known[0] != signature:
                    known = (signature, decode_manifest(read_plain(path), path))
                    self._parsed[path] = known
            except (FileNotFoundError, NotADirectoryError) as exc:
                raise ObjectMissing(str(self.root), "read", key) from exc
        return known[1]

    def find_manifest(self, checkpoint_id: str) -> Manifest | None:
        """The manifest that is published under this id; None if there is none, or only an invalid one."""
        try:
            return self.manifest(checkpoint_id)
        except (ObjectMissing, ManifestInvalid):
            return None

    def manifest_of(self, checkpoint_id: str, save_id: str) -> Manifest:
        """Manifest of a save of this checkpoint on this node, published or replaced.

        Raises:
            ObjectMissing: the save is not here. ManifestInvalid: the published manifest is invalid, and no replaced version
                is this save.
        """
        problem: ManifestInvalid | None = None
        try:
            if (found := self.manifest(checkpoint_id)).save_id == save_id:
                return found
        except ManifestInvalid as exc:
            problem = exc
        except ObjectMissing as exc:
            if exc.detail:  # only for a link out of the root, which does not count as missing
                raise
        replaced = self._read_replaced(checkpoint_id, save_id)
        if replaced is not None:
            return replaced
        raise problem or ObjectMissing(str(self.root), "open", checkpoint_id, f"it is not of save {save_id}")

    def manifest_path(self, checkpoint_id: str, save_id: str) -> Path:
        """The path of a save's manifest: the published one, or the name of a replaced version. It may be missing."""
        name = MANIFEST_NAME if self.is_published(checkpoint_id, save_id) else replaced_name(save_id)
        return self.root / checkpoint_id / name

    def is_published(self, checkpoint_id: str, save_id: str) -> bool:
        """Whether the save is published under this id here; False for the id ""."""
        published = self.find_manifest(checkpoint_id) if checkpoint_id else None
        return published is not None and published.save_id == save_id

    def is_here(self, checkpoint_id: str, save_id: str) -> bool:
        """Whether the save lies here under this id, published or replaced.

        Raises:
            ManifestInvalid: the published manifest is invalid, and no replaced version is this save.
        """
        try:
            return bool(self.manifest_of(checkpoint_id, save_id))
        except ObjectMissing:
            return False

    def save_id_of(self, checkpoint_id: str) -> str:
        """The id of the published save; "" if its manifest is damaged or missing.

        Raises:
            ManifestVersionUnknown: only a newer version reads it. ObjectMissing: a symbolic link leads out of the root.
        """
        try:
            return self.manifest(checkpoint_id).save_id
        except ManifestVersionUnknown:
            raise
        except ObjectMissing as exc:
            if exc.detail:  # only for a link out of the root, which does not count as missing
                raise
        except ManifestInvalid:
            pass
        return ""

    def _read_replaced(self, checkpoint_id: str, save_id: str) -> Manifest | None:
        if not is_save_id(save_id):
            return None
        try:
            manifest = self._read(checkpoint_id, replaced_name(save_id))
        except (ObjectMissing, ManifestInvalid):
            return None
        return manifest if manifest.save_id == save_id else None

    def committed(self) -> Iterator[tuple[str, Manifest]]:
        """Checkpoint id and manifest of every checkpoint with a valid manifest. `verify` reports the others."""
        yield from ((looked.checkpoint_id, each) for looked in self.look_at_all() for each in self._published(looked))

    def read_replaced(self) -> Iterator[tuple[str, Manifest]]:
        """Checkpoint id and manifest of each replaced version, kept until the newer save was seen whole."""
        yield from ((looked.checkpoint_id, each) for looked in self.look_at_all() for each in self.replaced_in(looked))

    def versions(self) -> Iterator[tuple[str, Manifest]]:
        """Checkpoint id and manifest of each version, published or replaced, with a valid manifest."""
        yield from ((looked.checkpoint_id, each) for looked in self.look_at_all() for each in self.versions_in(looked))

    def _published(self, looked: Looked) -> list[Manifest]:
        found = self.find_manifest(looked.checkpoint_id) if looked.has_manifest else None
        return [] if found is None else [found]

    def replaced_in(self, looked: Looked) -> list[Manifest]:
        """Valid manifests of the replaced versions in one directory, without the published one."""
        if not looked.replaced:
            return []
        # After a crash in `publish`, or while it runs, the published version has both names.
        published = {found.save_id for found in self._published(looked)}
        found = (self._read_replaced(looked.checkpoint_id, save_id) for save_id in looked.replaced)
        return [manifest for manifest in found if manifest is not None and manifest.save_id not in published]

    def versions_in(self, looked: Looked) -> list[Manifest]:
        """Valid manifests of all versions in one directory, the published one first."""
        return [*self._published(looked), *self.replaced_in(looked)]

    def list_damaged_manifests(self, looked: Looked) -> list[str]:
        """Names of the damaged or missing manifests in a directory. The files of their versions are unknown.

        Manifests that only a newer version of the package reads are not among them.
        """
        damaged = [name for name in looked.manifest_names if self._is_damaged(looked, name)]
        missing = set(looked.version_metadata) - {
            *looked.replaced,
            *(found.save_id for found in self._published(looked)),
        }
        # `publish` links metadata before the manifest: the manifest of a staged save is about to come.
        gone = [save_id for save_id in sorted(missing) if not is_directory(self.staging / save_id)]
        return [*damaged, *map(replaced_name, gone)]

    def _is_damaged(self, looked: Looked, name: str) -> bool:
        try:
            return name not in (MANIFEST_NAME, replaced_name(self._read(looked.checkpoint_id, name).save_id))
        except (ManifestVersionUnknown, ObjectMissing):
            return False
        except ManifestInvalid:
            return True

    def list_unclaimed(self, looked: Looked) -> list[str]:
        """Shard files in a directory that no manifest there names; empty if any manifest there cannot be read."""
        # An unreadable manifest may name any of the files: none of them may be removed as unclaimed.
        if self.list_damaged_manifests(looked) or any(self.of_newer_format(looked.checkpoint_id)):
            return []
        return sorted(set(looked.shards).difference(*(manifest.shards for manifest in self.versions_in(looked))))

    def list_strays(self, looked: Looked) -> list[str]:
        """Unclaimed shard files in a directory, without those that are about to be removed."""
        going = self.find_left_by_slimming(looked)[1]
        return [name for name in self.list_unclaimed(looked) if name not in going]

    def list_only_of(self, looked: Looked, gone: Manifest) -> list[str]:
        """Shard files in a directory that the removed version `gone` names, and no manifest there."""
        there = gone.shards.keys() & set(looked.shards)
        return sorted(there.difference(*(manifest.shards for manifest in self.versions_in(looked))))

    def find_left_by_slimming(self, looked: Looked) -> tuple[str, list[str]]:
        """If the published save's slimming is not complete: its id, and the files of its optimizer. Else "", []."""
        for manifest in self._published(looked):
            full = looked.size_of(version_metadata_name(manifest.save_id))
            # The full metadata has this second name until the files are removed. Other metadata there has the usual size.
            if (
                manifest.is_slim
                and full not in (None, manifest.metadata_bytes)
                and not self.list_damaged_manifests(looked)
            ):
                unclaimed = self.list_unclaimed(looked)
                return manifest.save_id, [name for name in unclaimed if is_optimizer_of(name, manifest.shards)]
        return "", []

    def list_claimed(self, checkpoint_id: str) -> frozenset[str]:
        """Shard files that the replaced versions in a directory name, whether they exist or not."""
        replaced = self.replaced_in(self.look(checkpoint_id))
        return frozenset[str]().union(*(manifest.shards for manifest in replaced))

    def checkpoint_of(self, save_id: str) -> str | None:
        """The id under which a save lies here, published or replaced; None if it does not."""
        return next((name for name, found in self.versions() if found.save_id == save_id), None)

    def holdings(self, node_id: str, checkpoint_id: str | None = None) -> tuple[Holding, ...]:
        """The store's holdings of one checkpoint, or of all. A renamed checkpoint has its new name."""
        found = self.look_at_all() if checkpoint_id is None else [self.look(checkpoint_id)]
        with translate_errors(str(self.root), "list", checkpoint_id or ""):
            return tuple(holding for looked in found for holding in self._holdings_in(node_id, looked))

    def _holdings_in(self, node_id: str, looked: Looked) -> Iterator[Holding]:
        for manifest in self._published(looked):
            yield self._holding(node_id, looked, manifest, {*manifest.shards, *self.list_strays(looked)}, METADATA_NAME)
        for manifest in self.replaced_in(looked):
            name = version_metadata_name(manifest.save_id)
            yield replace(self._holding(node_id, looked, manifest, set(manifest.shards), name), is_replaced=True)

    def _holding(
        self, node_id: str, looked: Looked, manifest: Manifest, names: set[str], metadata_name: str
    ) -> Holding:
        sizes = {name: size for name, size in looked.sizes.items() if name in names}
        own = looked.size_of(version_metadata_name(manifest.save_id))  # between the two renames of `publish`
        has_metadata = manifest.metadata_bytes in (looked.size_of(metadata_name), own)
        return Holding.of_save(manifest, node_id, looked.checkpoint_id, has_metadata, sizes)

    def sizes_of(self, checkpoint_id: str, manifest: Manifest) -> dict[str, int]:
        """Bytes of each shard file of a save in the directory of a checkpoint."""
        with translate_errors(str(self.root), "list", checkpoint_id):
            sizes = self.look(checkpoint_id).sizes
        return {name: size for name, size in sizes.items() if name in manifest.shards}

    def newest_of_runs(self, node_id: str, scope: str) -> tuple[Holding, ...]:
        """The newest published save of each lineage in a directory of ids. Their files are not looked at."""
        newest: dict[str, Holding] = {}
        for name, manifest in self.committed():
            known = newest.get(manifest.lineage)
            if scope_of(name) == scope and (known is None or manifest.version.is_newer_than(known.version)):
                newest[manifest.lineage] = Holding.of_save(manifest, node_id, name, False, {})
        return tuple(newest.values())

    def histories(self, scope: str) -> dict[str, History]:
        """The histories of the lineages that have a version, published or replaced, in this directory of ids."""
        found = (
            manifest
            for looked in self.look_at_all()
            if scope_of(looked.checkpoint_id) == scope
            for manifest in self.versions_in(looked)
        )
        return histories_of(manifest.version for manifest in found)

    def size_of(self, checkpoint_id: str, name: str) -> int | None:
        """Bytes of one plain file of a checkpoint; None if it is missing or cannot be looked at."""
        try:
            status = os.lstat(self._path_of(checkpoint_id, name))
        except OSError:
            return None
        return status.st_size if S_ISREG(status.st_mode) else None

    def directories(self) -> Iterator[str]:
        """Every directory with files of a checkpoint, whether its manifest is valid, damaged or missing."""
        for looked in self.look_at_all():
            if looked.is_described or self._has_loose_shards(looked):
                yield looked.checkpoint_id

    def _has_loose_shards(self, looked: Looked) -> bool:
        """Whether the directory has a shard of this package that no manifest names."""
        return any(_has_footer(self._path_of(looked.checkpoint_id, name)) for name in self.list_unclaimed(looked))

    def with_invalid_manifest(self) -> Iterator[str]:
        """Directories with shards of this package and a damaged or missing manifest, except those being removed."""
        for looked in self.look_at_all():
            # Where a removal has begun, a missing manifest is no damage.
            is_missing = not (looked.has_manifest or looked.gone) and self._has_loose_shards(looked)
            if is_missing or self.list_damaged_manifests(looked):
                yield looked.checkpoint_id

    def of_newer_format(self, checkpoint_id: str | None = None) -> Iterator[str]:
        """The ids, of all or just this one, with a manifest that only a newer version of the package reads."""
        for looked in self.look_at_all() if checkpoint_id is None else [self.look(checkpoint_id)]:
            if any(self._is_of_newer_format(looked.checkpoint_id, name) for name in looked.manifest_names):
                yield looked.checkpoint_id

    def _is_of_newer_format(self, checkpoint_id: str, name: str) -> bool:
        try:
            self._read(checkpoint_id, name)
        except ManifestVersionUnknown:
            return True
        except (ObjectMissing, ManifestInvalid):
            pass
        return False

    def without_manifest(self) -> Iterator[str]:
        """Directories with DCP's metadata or shards and without a manifest, whatever wrote them."""
        for looked in self.look_at_all():
            if looked.is_described or looked.gone or not is_checkpoint_id(looked.checkpoint_id):
                continue
            if looked.has(METADATA_NAME) or self.list_unclaimed(looked):
                yield looked.checkpoint_id

    def look(self, checkpoint_id: str) -> Looked:
        """The entries of one directory; empty if there is none. Raises: StoreError"""
        with translate_errors(str(self.root), "list", checkpoint_id):
            try:
                return Looked(checkpoint_id, list(os.scandir(self._path_of(checkpoint_id))))
            except (FileNotFoundError, NotADirectoryError):
                return Looked(checkpoint_id, ())
            except OSError as exc:
                # One directory that the disk has lost must not hide the node's other checkpoints.
                if checkpoint_id and is_unreadable(exc):
                    return Looked(checkpoint_id, None)
                raise

    def look_at_all(self) -> list[Looked]:
        """Each directory under the root that may be a checkpoint's, at any depth. Raises: StoreError"""
        found = list(self._walk("", 0))
        there = {self._path_of(looked.checkpoint_id) for looked in found if looked.is_described}
        for path in list(self._parsed):
            if path.rpartition("/")[0] not in there:  # removed: without this the cache would grow for ever
                self._parsed.pop(path, None)
        return found

    def _walk(self, parent: str, depth: int) -> Iterator[Looked]:
        """The directory `parent` and those below it. "" is the root. Skips other stores inside this root."""
        looked = self.look(parent)
        if parent:
            with translate_errors(str(self.root), "look at", parent):
                if not looked.is_described and looked.has(NODE_NAME) and is_store(self._path_of(parent)):
                    return
            yield looked
        if depth >= PARTS_MAX:
            return
        for entry in looked.directories:
            with translate_errors(str(self.root), "look at", entry.name):
                is_closed = _is_closed_to_us(entry)
            if not is_closed:
                yield from self._walk(f"{parent}/{entry.name}" if parent else entry.name, depth + 1)


def _is_closed_to_us(entry: "os.DirEntry[str]") -> bool:
    """Whether a directory was removed meanwhile, or is another user's and unreadable, such as `lost+found`."""
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


@contextmanager
def manifest_readable(path: str | Path) -> Iterator[None]:
    """Turns an unreadable place on the disk into ManifestInvalid: only this checkpoint is damaged, not the node."""
    try:
        yield
    except (OSError, StoreError) as exc:
        if (cause := find_unreadable(exc)) is not None:
            raise ManifestInvalid(f"{path} cannot be read: {cause.strerror}.") from exc
        raise


def _has_footer(path: str) -> bool:
    try:
        return not is_without_footer(path)
    except OSError:
        return False
