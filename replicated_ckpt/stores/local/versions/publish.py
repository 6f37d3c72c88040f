"""Publishing: a decided save gets its checkpoint's name, if its order and the files of that name allow it.

`.manifest.json` shows which version is published; stock torch reads only `.metadata`. No directory is renamed. The shards
of a save have unique names, so they are linked beside those of the published version. Two renames of small files complete
the publication. After an interruption it starts again from the beginning.
"""

import contextlib
import os
import uuid
from collections.abc import Collection
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import (
    MANIFEST_NAME,
    METADATA_NAME,
    replaced_name,
    version_metadata_name,
)
from replicated_ckpt.core.manifest import Manifest, ShardEntry, decode_manifest, find_save_id
from replicated_ckpt.core.protocol.settlement import may_be_dropped, may_publish
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ManifestInvalid,
    ManifestVersionUnknown,
    ObjectCorrupt,
    SaveSuperseded,
)
from replicated_ckpt.stores.files.durable import (
    fsync_directory,
    hash_file,
    link_file,
    name_small_file,
    translate_errors,
)
from replicated_ckpt.stores.files.existence import (
    closing_fd,
    is_directory,
    is_link,
    is_there,
    leads_out,
    list_prefixed,
    open_plain,
    read_plain,
)
from replicated_ckpt.stores.local.directories.catalog import Catalog, manifest_readable
from replicated_ckpt.stores.local.directories.committed import open_directory
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.directories.looked import Looked, crc_of_footer, is_without_footer
from replicated_ckpt.stores.local.versions.remove import remove_unread


def check_order(manifest: Manifest, before: Manifest | None, intent: Intent) -> None:
    """Checks that a save may replace the published one: within a lineage only a newer save may (I4).

    Raises:
        SaveSuperseded: the published save is newer, or is another run's that this save may not replace.
    """
    if before is None:
        return
    if not may_publish(manifest.version, before.version, intent.replaces):
        raise SaveSuperseded(
            f"Save {manifest.save_id} of {manifest.checkpoint_id!r} (lineage {manifest.lineage or 'none'}, sequence "
            f"{manifest.sequence}) is not published: save {before.save_id} (lineage {before.lineage or 'none'}, sequence "
            f"{before.sequence}) has the name."
        )


def make_names_free(catalog: Catalog, checkpoint_id: str, manifest: Manifest, staging: Path) -> None:
    """Frees the file names of a save that is about to be published, if another version has them.

    The coordinator chooses names that no answering node has, so only a node that did not answer can have one of them. A
    replaced version that blocks a name is removed first, if all of the save lies here. For an instant neither version
    is there.

    Raises:
        SaveSuperseded: another version has one of the names, and stays.
    """
    looked = catalog.look(checkpoint_id)
    taken = {name for name in manifest.shards if name in looked.sizes}
    if not taken:
        return
    for other in catalog.versions_in(looked):
        if not taken.isdisjoint(other.shards) and other.save_id != manifest.save_id:
            # Only if no shard is missing here: else the removed version could be the last whole one.
            is_whole = holds_all_shards(staging, manifest)
            if not is_whole or not may_be_dropped(other.version, whole=[manifest.version], published=manifest.version):
                raise _names_taken(manifest, taken, f"save {other.save_id}")
            if not remove_unread(catalog, checkpoint_id, other.save_id):
                raise _names_taken(manifest, taken, f"save {other.save_id}, which a load reads")
    place = catalog.root / checkpoint_id
    left = [name for name in taken if is_there(staging / name) and not _is_of(place / name, manifest.shards[name])]
    if not left:
        return
    # The files may belong to the version of the damaged manifest: they must not be set aside.
    if catalog.list_damaged_manifests(looked):
        raise _names_taken(manifest, left, "a version with a damaged manifest")
    with open_directory(catalog.root, checkpoint_id) as directory:
        for name in left:
            directory.set_aside(name, f"save {manifest.save_id} has a file of this name")


def _names_taken(manifest: Manifest, taken: Collection[str], by: str) -> SaveSuperseded:
    return SaveSuperseded(
        f"Save {manifest.save_id} of {manifest.checkpoint_id!r} is not published on this node: {', '.join(sorted(taken))} "
        f"is a file of {by}."
    )


def publish(directory: Path, staging: Path, manifest: Manifest) -> None:
    """Durably publishes a save from its staging directory. The version published before becomes a replaced one.

    All files of the save first get names in the directory, as those of an unpublished version. Two renames then publish
    it. At every instant, and after a crash at any instant, readers find the complete old version or the complete new
    one (I7). Staged files stay: after a crash all of this is repeated. The caller holds `exclusive`.
    """
    own, own_metadata = replaced_name(manifest.save_id), version_metadata_name(manifest.save_id)
    before = _save_id_in(directory)
    if before != manifest.save_id:
        name_small_file(staging / METADATA_NAME, directory / own_metadata)
        name_small_file(staging / MANIFEST_NAME, directory / own)
        failpoints.reach("commit.described")
        # After the manifest, which shows after a crash which save these shards belong to.
        for shard in manifest.shards:
            _link_or_move(staging / shard, directory / shard)
        if before:
            _keep_published(directory, before)
        # Before the rename: else a power loss can keep the new manifest and lose names of its shards.
        fsync_directory(directory)
        failpoints.reach("commit.prepared")
        (directory / own).rename(directory / MANIFEST_NAME)
    failpoints.reach("commit.named")
    # The manifest first: readers of this package find metadata by the save id, stock torch reads only `.metadata`.
    with contextlib.suppress(FileNotFoundError):  # it was done before
        (directory / own_metadata).rename(directory / METADATA_NAME)
    (directory / own).unlink(missing_ok=True)
    fsync_directory(directory)
    failpoints.reach("commit.durable")


def is_link_of_staged(directory: Path, staging: Path) -> bool:
    """Whether a crash interrupted the publication of a staged save: `directory` has a hard link of its manifest."""
    own, manifest = directory / replaced_name(staging.name), staging / MANIFEST_NAME
    return is_there(own) and is_there(manifest) and os.path.samestat(own.lstat(), manifest.lstat())


def _is_of(path: Path, entry: ShardEntry) -> bool:
    """Whether a file is this shard, by its size and its footer."""
    if _size_of(path) != entry.size_bytes:
        return False
    with closing_fd(open_plain(path, os.O_NOFOLLOW)) as fd:
        return crc_of_footer(fd) == entry.crc32c


def holds_all_shards(directory: Path, manifest: Manifest) -> bool:
    """Whether every shard of a save lies in the directory with the right size. Then replaced versions need not wait for
    other nodes.
    """
    return all(_size_of(directory / name) == entry.size_bytes for name, entry in manifest.shards.items())


def remove_unmanaged(catalog: Catalog, checkpoint_id: str) -> None:
    """Removes stock torch's shards from the directory of a save that was just published.

    They have no copies and no manifest. Files with this package's footer stay.
    """
    for name in catalog.list_unclaimed(catalog.look(checkpoint_id)):
        path = catalog.root / checkpoint_id / name
        if is_without_footer(path):
            path.unlink(missing_ok=True)


def _keep_published(directory: Path, save_id: str) -> None:
    """Gives manifest and metadata of the published version the names of a replaced version."""
    kept = directory / version_metadata_name(save_id)
    if not is_there(kept):  # if it exists after a power loss, `.metadata` may be the new version's already
        with contextlib.suppress(FileNotFoundError):  # its metadata was lost before
            name_small_file(directory / METADATA_NAME, kept)
    # A link, no copy: readers lock this very file. Without hard links no version is published for an instant.
    _link_or_move(directory / MANIFEST_NAME, directory / replaced_name(save_id))


def _link_or_move(path: Path, target: Path) -> None:
    """Gives a file, if it exists, a second name. Without hard links it is durably renamed."""
    with contextlib.suppress(FileNotFoundError):  # other nodes have it, or it was renamed before a crash
        if not link_file(path, target):
            path.rename(target)
            fsync_directory(target.parent)
            fsync_directory(path.parent)


def _save_id_in(directory: Path) -> str:
    """The published save's id; "" without a manifest, and a random id for a damaged one, to keep that file apart."""
    try:
        raw = read_plain(directory / MANIFEST_NAME)
    except FileNotFoundError:
        return ""
    except OSError:
        raw = b""
    return find_save_id(raw) or uuid.uuid4().hex


def _size_of(path: Path) -> int | None:
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return None


def read_decision(staging: Path, save_id: str) -> Manifest:
    """The staged manifest. It must be this save's, and the staged metadata must match it.

    Raises:
        ManifestInvalid, ObjectCorrupt: one of them is damaged, or of another save. OSError: one of them is missing, or
        cannot be read now.
    """
    path = staging / MANIFEST_NAME
    with manifest_readable(path):
        manifest = decode_manifest(read_plain(path), str(path))
    if manifest.save_id != save_id:
        raise ManifestInvalid(f"The manifest in {staging} is of save {manifest.save_id}.")
    path = staging / METADATA_NAME
    with manifest_readable(path):
        found = hash_file(path, manifest.metadata_bytes)
    if found != (manifest.metadata_bytes, manifest.metadata_crc32c):
        expected = f"{manifest.metadata_bytes} bytes of CRC32C {manifest.metadata_crc32c:08x}"
        crc = f" of {found[1]:08x}" if found[0] == manifest.metadata_bytes else ""
        detail = f"expected {expected}, found {found[0]} bytes{crc}"
        raise ObjectCorrupt(str(staging), "commit", METADATA_NAME, detail)
    return manifest


def list_differing(staging: Path, manifest: Manifest) -> list[str]:
    """The staged shards whose footers differ from the manifest's checksums.

    Shards with a damaged footer are not among them: their data may be intact, and the only copy.
    """
    differing = []
    for name, entry in manifest.shards.items():
        try:
            with closing_fd(open_plain(staging / name, os.O_NOFOLLOW)) as fd:
                found = crc_of_footer(fd)
        except FileNotFoundError:
            continue
        if found not in (None, entry.crc32c):
            differing.append(name)
    return differing


def has_decision(staging: Path, save_id: str) -> bool:
    """Whether there is a valid decision, including one that only a newer version of the package can publish."""
    try:
        read_decision(staging, save_id)
    except ManifestVersionUnknown:
        return True
    except (FileNotFoundError, NotADirectoryError, ManifestInvalid, ObjectCorrupt):
        return False
    return True


def has_damaged_decision(staging: Path, save_id: str) -> bool:
    """Whether there was a decision, and its manifest or metadata is damaged, or its metadata is missing.

    Metadata is written first, so a manifest without metadata was a decision.
    """
    path = staging / MANIFEST_NAME
    return path in list_prefixed(staging, MANIFEST_NAME) and not has_decision(staging, save_id)


_USE_ANOTHER = "Use another id; overwrite=True does not help."
_MOVE_AWAY = "Use another id, or move that directory away on every node."


def check_decidable(root: Path, intent: Intent) -> None:
    """Checks, right before the decision, that the id of a save without overwrite is still free.

    After the decision only the order of saves counts, because other nodes may have published this one.

    Raises:
        CheckpointExists: another save was faster. ConfigInvalid, StoreError
    """
    if intent.checkpoint_id:
        with translate_errors(str(root), "decide", intent.save_id):
            check_replaceable(root, intent.checkpoint_id, intent)


def check_replaceable(root: Path, checkpoint_id: str, intent: Intent, *, may_replace: bool = False) -> None:
    """Refuses to replace a checkpoint without overwrite, and an id that cannot be a directory of the root.

    A directory without files of a checkpoint may be used; other files in it stay. `may_replace`: an existing checkpoint
    may be replaced, as `check_order` decides.

    Raises:
        CheckpointExists, ConfigInvalid
    """
    final = root / checkpoint_id
    if leads_out(root, checkpoint_id):
        raise ConfigInvalid(f"{checkpoint_id!r} leads outside {root} by a symbolic link.", _USE_ANOTHER)
    if is_link(final):
        raise ConfigInvalid(f"{final} is a symbolic link; it is not replaced.", _MOVE_AWAY)
    if not is_there(final):
        return
    if not is_directory(final):
        raise ConfigInvalid(f"{final} is not a directory; it is not replaced.", _MOVE_AWAY)
    if holds_checkpoint(final) and not (intent.overwrite or may_replace):
        raise CheckpointExists(f"Checkpoint already exists: {checkpoint_id!r} in {root}.")


def holds_checkpoint(directory: Path) -> bool:
    """Whether any file of a checkpoint lies there, of this package or of stock torch, complete or not."""
    try:
        return Looked("", os.scandir(directory)).holds_checkpoint
    except (FileNotFoundError, NotADirectoryError):
        return False


def find_named(catalog: Catalog, checkpoint_id: str) -> str | None:
    """The lineage of the published save; "" without a valid manifest, None without any file of a checkpoint."""
    manifest = catalog.find_manifest(checkpoint_id)
    if manifest is not None:
        return manifest.lineage
    return "" if holds_checkpoint(catalog.root / checkpoint_id) else None


def is_checkpoint(directory: Path) -> bool:
    return is_there(directory / METADATA_NAME) or is_there(directory / MANIFEST_NAME)
