"""The local store: one directory on one node's disk, its identity, staged saves and committed checkpoints."""

import contextlib
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import (
    AGENT_DIR,
    MANIFEST_NAME,
    METADATA_NAME,
    NODE_NAME,
    PART_SUFFIX,
    QUARANTINE_DIR,
    STAGING_DIR,
    ShardName,
    check_checkpoint_id,
    is_checkpoint_file,
    is_save_id,
    version_metadata_name,
)
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.protocol.settlement import may_be_dropped
from replicated_ckpt.environment import make_absolute
from replicated_ckpt.errors import (
    ConfigInvalid,
    ManifestInvalid,
    ManifestVersionUnknown,
    ObjectMissing,
    SaveAborted,
    StoreError,
)
from replicated_ckpt.stores.files.durable import (
    fsync_directory,
    make_directories,
    make_directory,
    remove_tree,
    translate_errors,
)
from replicated_ckpt.stores.files.existence import is_directory, is_there, list_prefixed, open_plain
from replicated_ckpt.stores.files.locks import DescriptorLock, exclusive
from replicated_ckpt.stores.files.ownership import check_claimable, make_private
from replicated_ckpt.stores.local.directories.catalog import Catalog
from replicated_ckpt.stores.local.directories.committed import open_directory
from replicated_ckpt.stores.local.directories.intent import Intent, note_place
from replicated_ckpt.stores.local.directories.journal import End, Journal
from replicated_ckpt.stores.local.identity import check_place, ensure_identity, find_identity
from replicated_ckpt.stores.local.shard_file import CommittedShard, link_shard
from replicated_ckpt.stores.local.versions.full_disk import try_with_room, write_with_room
from replicated_ckpt.stores.local.versions.publish import (
    check_order,
    check_replaceable,
    has_damaged_decision,
    has_decision,
    holds_all_shards,
    is_link_of_staged,
    list_differing,
    make_names_free,
    publish,
    read_decision,
    remove_unmanaged,
)
from replicated_ckpt.stores.local.versions.remove import (
    finish_removals,
    finish_slimming,
    remove_replaced,
    remove_unread,
)

log = logging.getLogger(__name__)

NO_NODE = "none"
"""Stands for the identity of a store that has none yet."""


class LocalStore:
    """One node's store under `root`.

    Methods may be called from several threads and processes at once; the methods that end a save (`commit`, `abort`)
    are idempotent. Every OSError is translated to a StoreError.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(make_absolute(root))
        self.catalog = Catalog(self.root)
        self.journal = Journal(self.root)
        self._private: os.stat_result | None = None
        self._decided = ""
        """The save whose decision this object made durable last."""

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def node_id(self) -> str:
        """This store's identity, made once; racing callers get the same one.

        Raises:
            ConfigInvalid: node.json has no identity; or the root is a checkpoint, or lies inside or above a store.
            StoreError: the root cannot be created or written.
        """
        return ensure_identity(self.root)

    def read_node_id(self) -> str:
        """This store's identity as `node_id` returns it, or NO_NODE if none was made. Never writes."""
        return find_identity(self.root) or NO_NODE

    def agent_directory(self) -> Path:
        """The agent's directory, private to this user. If it is missing, it is made.

        Raises:
            StoreDenied: another user of the host can have made it, or a file in it.
            ConfigInvalid: the root may not become a store, as it is a checkpoint, or lies in or above a store.
            StoreError
        """
        path = self.root_agent_directory()
        with translate_errors(str(self.root), "create", AGENT_DIR):
            if self._private is None:
                check_place(self.root)
            self._private = make_private(self.root, path, self._private)
        return path

    def check_claimable(self) -> None:
        """Raises StoreDenied if `agent_directory` would, because another user can write the root. Creates nothing."""
        with translate_errors(str(self.root), "look at", NODE_NAME):
            check_claimable(self.root)

    def root_agent_directory(self) -> Path:
        """Where the agent's directory is or would be."""
        return self.root / AGENT_DIR

    def staging(self, save_id: str) -> Path:
        if not is_save_id(save_id):
            raise ConfigInvalid(f"{save_id!r} is not a save id.")
        return self.root / STAGING_DIR / save_id

    def is_staged(self, save_id: str) -> bool:
        """Whether a save has a staging directory. Raises: StoreError"""
        with translate_errors(str(self.root), "look at", f"{STAGING_DIR}/{save_id}"):
            return is_directory(self.staging(save_id))

    def final(self, checkpoint_id: str) -> Path:
        return self.root / check_checkpoint_id(checkpoint_id)

    def path_of_staged(self, save_id: str, name: str) -> Path:
        """Path of a file of a staged save, always inside its staging directory. Raises ConfigInvalid for other names."""
        if not is_checkpoint_file(name):
            raise ConfigInvalid(f"{name!r} is not a file of a checkpoint.")
        return self.staging(save_id) / name

    def begin(self, intent: Intent, *, replaces_other_runs: bool = True) -> None:
        """Opens a save: afterwards its staging directory exists. Until `commit` no reader finds the save.

        `replaces_other_runs`: the save may replace a checkpoint of another lineage that has the id now. Only a user may ask
        for that.

        Raises:
            CheckpointExists: the checkpoint is committed here and the save may not overwrite it.
            StoreError
        """
        self.final(intent.checkpoint_id)  # refuses what is not an id
        staging = self.staging(intent.save_id)
        with translate_errors(str(self.root), "begin", intent.checkpoint_id):
            if (looked := self.catalog.look(intent.checkpoint_id)).gone:
                with exclusive(staging.parent):
                    finish_removals(self.catalog, looked)
            replaces = self.catalog.find_manifest(intent.checkpoint_id)
            # After the read: refuses a version that was published in between.
            check_replaceable(self.root, intent.checkpoint_id, intent)
            if not is_directory(staging.parent):
                self.node_id()  # a staging area implies a durable identity
            make_directories(staging.parent, self.root)
            asked = "" if replaces is None or not replaces_other_runs else replaces.save_id
            intent = replace(intent, replaces=asked)
            # Otherwise this opens the save again, and the old intent has the nodes.
            if intent.nodes or not self.intent_of(intent.save_id).nodes:
                write_with_room(self.root, self.intent_path(intent.save_id), intent.encode(), is_name_flushed=False)
            failpoints.reach("store.intent-written")
            make_directory(staging)
            # One fsync for intent and directory: after a power loss either one alone is an empty save, and is removed.
            fsync_directory(staging.parent)
        failpoints.reach("store.opened")

    def find_taken_numbers(self, checkpoint_id: str, save_id: str = "") -> frozenset[int] | None:
        """The numbers in this checkpoint's file names, in all versions here and in staged saves.

        None: another save than `save_id` is open and has no file here yet, so its number is unknown.
        """
        with translate_errors(str(self.root), "list", checkpoint_id):
            names = list(self.catalog.look(checkpoint_id).shards)
            for intent in self.list_staged():
                if intent.checkpoint_id == checkpoint_id and intent.save_id != save_id:
                    staged = [path.name for path in list_prefixed(self.staging(intent.save_id), "__")]
                    if not staged:
                        return None
                    names += staged
        shards = (ShardName.parse(name.removesuffix(PART_SUFFIX)) for name in names)
        return frozenset(shard.index for shard in shards if shard is not None)

    def note_place(self, save_id: str, lineage: str, sequence: int) -> None:
        """Records the place of an open save in its lineage. Does nothing if the save has ended. Raises: StoreError"""
        path = self.intent_path(save_id)
        with translate_errors(str(self.root), "write", path.name), contextlib.suppress(FileNotFoundError):
            try_with_room(self.root, partial(note_place, path, lineage, sequence))

    def read_places(self) -> dict[str, Version]:
        """The known places of staged saves, by save id. Raises: StoreError"""
        return {intent.save_id: intent.place for intent in self.list_staged() if intent.place is not None}

    def lock_save(self, save_id: str) -> DescriptorLock:
        """Marks an open save as being worked on, until the lock is released or this process ends.

        Raises:
            SaveAborted: the save is not open. StoreUnavailable: a stopped process holds the exclusive lock.
        """
        path = self.intent_path(save_id)
        try:
            fd = open_plain(path)
        except FileNotFoundError as exc:
            raise SaveAborted(f"Save {save_id} is no longer open in {self.root}.") from exc
        lock = DescriptorLock(fd)
        lock.wait(path, shared=True)
        return lock

    def is_locked(self, save_id: str) -> bool:
        """Whether a process has marked a staged save with `lock_save`."""
        try:
            fd = open_plain(self.intent_path(save_id))
        except FileNotFoundError:
            return False
        with DescriptorLock(fd) as lock:
            return not lock.try_take()

    def put_small(self, save_id: str, name: str, data: bytes) -> None:
        """Durably writes a small file into a staged save. Raises SaveAborted if the save was published or removed."""
        path = self.path_of_staged(save_id, name)
        with translate_errors(str(self.root), "write", name), exclusive(self.root / STAGING_DIR):
            if not is_directory(path.parent):
                raise SaveAborted(f"Save {save_id} is not open in {self.root}.")
            write_with_room(self.root, path, data)
            if name == MANIFEST_NAME:
                self._decided = save_id

    def link_staged(
        self,
        save_id: str,
        name: str,
        source: CommittedShard,
        is_bad: Callable[[os.stat_result], bool],
        *,
        durable: bool = True,
    ) -> None:
        """Stages a shard of a committed save as the shard `name` of an open one, without writing it. See `link_shard`."""
        link_shard(self.catalog, self.path_of_staged(save_id, name), source, is_bad, durable=durable)

    def commit(self, save_id: str) -> tuple[str, ...]:
        """Durably publishes a staged save under its checkpoint id; returns its shards on this node.

        A shard whose footer differs from the manifest is set aside: this node lacks that copy. All staged files must be
        fsynced before. A second call changes nothing.

        Raises:
            SaveAborted: the save is neither staged nor committed here.
            SaveSuperseded: a newer save has the id, or another version has its file names.
            ManifestInvalid, ObjectCorrupt: the staged decision is damaged; nothing changed.
        """
        staging, catalog = self.staging(save_id), self.catalog
        with translate_errors(str(self.root), "commit", save_id), exclusive(self.root / STAGING_DIR):
            intent = self.intent_of(save_id)
            if not is_directory(staging) or (not intent.checkpoint_id and catalog.checkpoint_of(save_id)):
                return self._already_committed(save_id)
            if catalog.is_published(intent.checkpoint_id, save_id):  # a crash interrupted the publication
                name, manifest = intent.checkpoint_id, catalog.manifest(intent.checkpoint_id)
            else:
                manifest = read_decision(staging, save_id)
                if self._decided != save_id:  # its writer may have been killed before its fsync
                    fsync_directory(staging)
                name = intent.checkpoint_id or manifest.checkpoint_id  # the new name, if a user renamed the checkpoint
                self._prepare(name, manifest, intent)
            failpoints.reach("commit.checked")
            publish(self.final(name), staging, manifest)
            self._drop_what_it_replaced(name, manifest, intent)
            # After `publish`: until here a crash leaves the save staged, and a restart repeats all of it.
            remove_tree(staging)
            self._forget(save_id)
            held = tuple(sorted(catalog.sizes_of(name, manifest)))
        failpoints.reach("commit.done")
        return held

    def _prepare(self, name: str, manifest: Manifest, intent: Intent) -> None:
        """Checks order and names before a publication, and frees the names that this save may take."""
        final, before, staging = self.final(name), self.catalog.find_manifest(name), self.staging(manifest.save_id)
        check_order(manifest, before, intent)
        # Once decided, only the order counts: other nodes may have published it.
        check_replaceable(self.root, name, intent, may_replace=True)
        for shard in list_differing(staging, manifest):
            self._set_aside_staged(manifest.save_id, shard)
        finish_removals(self.catalog, self.catalog.look(name))
        finish_slimming(self.catalog, self.catalog.look(name))
        make_names_free(self.catalog, name, manifest, staging)
        make_directories(final, self.root)

    def _drop_what_it_replaced(self, name: str, manifest: Manifest, intent: Intent) -> None:
        """Removes replaced versions that no load reads, if every shard of the new save is here: it is seen whole (I1)."""
        if intent.overwrite:
            remove_unmanaged(self.catalog, name)
        if holds_all_shards(self.final(name), manifest):
            whole = [manifest.version]
            replaced = self.catalog.replaced_in(self.catalog.look(name))
            over = [old.save_id for old in replaced if may_be_dropped(old.version, whole=whole, published=whole[0])]
            remove_replaced(self.catalog, name, over)

    def _set_aside_staged(self, save_id: str, shard: str) -> None:
        folder = self.root / QUARANTINE_DIR / save_id
        make_directories(folder, self.root)
        (self.staging(save_id) / shard).rename(folder / f"{shard}.{uuid.uuid4().hex[:8]}")
        fsync_directory(folder)
        log.warning(
            "%s of save %s was staged with bytes that differ from the save's: moved aside to %s", shard, save_id, folder
        )

    def is_published(self, save_id: str) -> bool:
        """Whether a staged save is already published: a crash interrupted the end of its publication."""
        checkpoint_id = self.intent_of(save_id).checkpoint_id
        if not checkpoint_id:  # its commit removed the intent while another thread opened it again
            return self.catalog.checkpoint_of(save_id) is not None
        return self.catalog.is_published(checkpoint_id, save_id)

    def path_of(self, checkpoint_id: str, save_id: str, name: str) -> Path:
        """Path of a file of a save under this id, published or replaced. The file may be missing."""
        directory = self.root / checkpoint_id
        if name == MANIFEST_NAME:
            return self.catalog.manifest_path(checkpoint_id, save_id)
        own = directory / version_metadata_name(save_id)
        if name != METADATA_NAME or not is_there(own):
            return directory / name
        is_left = bool(self.catalog.find_left_by_slimming(self.catalog.look(checkpoint_id))[0])
        return directory / name if is_left else own

    def drop_replaced(self, checkpoint_id: str, save_id: str) -> bool:
        """Removes a replaced version; False if a load reads it, or it is no longer replaced.

        The caller must have seen the newer save whole.
        """
        with translate_errors(str(self.root), "remove", checkpoint_id), exclusive(self.root / STAGING_DIR):
            if self.catalog.is_published(checkpoint_id, save_id) or self.is_staged(save_id):
                return False  # it was published again, or a crash interrupted its publication
            return remove_unread(self.catalog, checkpoint_id, save_id)

    def tidy(self, *, is_alone: bool) -> None:
        """Completes removals and slimmings that a crash interrupted. If `is_alone`, it also removes half-written files.

        `is_alone`: no other thread of this process receives files.

        Raises:
            StoreError
        """
        with translate_errors(str(self.root), "remove", "files left by a crash"):
            for looked in self.catalog.look_at_all():
                unfinished = looked.unfinished if is_alone else ()
                if looked.gone or unfinished or self.catalog.find_left_by_slimming(looked)[0]:
                    with exclusive(self.catalog.staging):  # so that no publication runs meanwhile
                        finish_removals(self.catalog, self.catalog.look(looked.checkpoint_id))
                        finish_slimming(self.catalog, self.catalog.look(looked.checkpoint_id))
                        for name in unfinished:
                            (self.root / looked.checkpoint_id / name).unlink(missing_ok=True)

    def compact_journal(self) -> None:
        """Bounds the size of the journal's file. Raises: StoreError"""
        with exclusive(self.root / STAGING_DIR):  # ranks append under this lock: a rewrite would lose their lines
            self.journal.compact()

    def _forget(self, save_id: str) -> None:
        """Removes the intent, and temporary files of a process that was killed while it wrote one."""
        for path in list_prefixed(self.root / STAGING_DIR, f"{save_id}."):
            path.unlink(missing_ok=True)

    def _already_committed(self, save_id: str) -> tuple[str, ...]:
        checkpoint_id = self.catalog.checkpoint_of(save_id)
        if checkpoint_id is None:
            raise SaveAborted(f"Save {save_id} is not open in {self.root}.")
        manifest = self.catalog.manifest_of(checkpoint_id, save_id)  # a newer save may be published by now
        self._discard(save_id)
        return tuple(sorted(self.catalog.sizes_of(checkpoint_id, manifest)))

    def is_decided(self, save_id: str) -> bool:
        """Whether a staged save has the coordinator's decision. It must be committed then, not removed.

        Raises:
            StoreError: the decision cannot be read now.
        """
        with translate_errors(str(self.root), "read the decision of", save_id):
            return has_decision(self.staging(save_id), save_id)

    def is_decision_damaged(self, save_id: str) -> bool:
        """Whether a staged save was decided here, and its manifest or metadata is damaged."""
        with translate_errors(str(self.root), "read the decision of", save_id):
            return has_damaged_decision(self.staging(save_id), save_id)

    def abort(self, save_id: str, why: str = "", *, unless_decided: bool = False) -> None:
        """Removes a staged save, and records the reason. A committed or missing save is not changed.

        If this node coordinated the save and has not decided it, its end is recorded as aborted: no node has decided
        it. `unless_decided`: a save that a rank has decided meanwhile is not changed, either.
        """
        with translate_errors(str(self.root), "abort", save_id), exclusive(self.root / STAGING_DIR):
            if not (unless_decided and self.is_decided(save_id)):
                self._discard(save_id, why)

    def note_end(self, save_id: str, end: End, why: str) -> None:
        """Records in the journal that a save has ended here. An error is only logged: other nodes then wait longer."""
        try:
            self.agent_directory()
            self.journal.append_end(save_id, end, why, is_flushed=end is not End.DROPPED)
        except StoreError as exc:
            log.warning(
                "a part of save %s stays on other nodes until all answer, or until you delete it: %s", save_id, exc
            )

    def _discard(self, save_id: str, why: str = "") -> None:
        staging, intent, was_staged = self.staging(save_id), self.intent_of(save_id), self.is_staged(save_id)
        # A crash interrupted the publication: complete it.
        if was_staged and self.catalog.is_published(intent.checkpoint_id, save_id):
            publish(self.final(intent.checkpoint_id), staging, self.catalog.manifest(intent.checkpoint_id))
        is_broken_off = (
            was_staged and bool(intent.checkpoint_id) and is_link_of_staged(self.final(intent.checkpoint_id), staging)
        )
        is_own = intent.coordinator == self.read_node_id() and not is_there(staging / MANIFEST_NAME)
        if is_there(staging / MANIFEST_NAME):  # first, and durably: else a crash could leave it without its shards
            (staging / MANIFEST_NAME).unlink()
            fsync_directory(staging)
        failpoints.reach("abort.undecided")
        remove_tree(staging)
        if is_broken_off:
            remove_unread(self.catalog, intent.checkpoint_id, save_id)
        if (was_staged or is_own) and self._is_nowhere(save_id, was_staged=was_staged):
            # Before the intent is removed: after a crash in between, the next start finds the intent, and records the end.
            self.note_end(save_id, End.ABORTED if is_own else End.DROPPED, why)
        self._forget(save_id)

    def _is_nowhere(self, save_id: str, *, was_staged: bool) -> bool:
        """Whether the save is certainly not published here. A damaged manifest may be of a save that is not staged."""
        is_sure = was_staged or not any(self.catalog.with_invalid_manifest())
        return is_sure and self.catalog.checkpoint_of(save_id) is None

    def list_staged(self) -> tuple[Intent, ...]:
        """The saves that are not committed. A damaged intent has no checkpoint id."""
        directory = self.root / STAGING_DIR
        with translate_errors(str(self.root), "list", STAGING_DIR):
            names = {path.name.partition(".")[0] for path in directory.iterdir()} if is_directory(directory) else set()
        return tuple(self.intent_of(save_id) for save_id in sorted(names) if is_save_id(save_id))

    def has_intent(self, save_id: str) -> bool:
        """Whether the intent of a staged save lies here. Raises: StoreError"""
        with translate_errors(str(self.root), "look at", f"{STAGING_DIR}/{save_id}.json"):
            return is_there(self.intent_path(save_id))

    def intent_of(self, save_id: str) -> Intent:
        """The intent of a staged save; without a checkpoint id if the file is missing or damaged."""
        return Intent.read_intent(save_id, self.intent_path(save_id))

    def intent_path(self, save_id: str) -> Path:
        """The intent's file. Each rank that works on the save holds a shared flock on it."""
        return self.root / STAGING_DIR / f"{save_id}.json"

    def open_file(self, checkpoint_id: str, save_id: str, name: str) -> int:
        """File descriptor for reading one file of one save; the caller closes it, and verifies the bytes.

        Without a valid manifest here, only checksums can identify the file's save.

        Raises:
            ObjectMissing: the file is not here, or only other saves are. ManifestVersionUnknown
        """
        if not is_checkpoint_file(name):
            raise ObjectMissing(str(self.root), "open", name, "this is not a file of a checkpoint")
        self.final(checkpoint_id)  # refuses what is not an id
        manifest: Manifest | None = None
        try:
            manifest = self.catalog.manifest_of(checkpoint_id, save_id)
        except ManifestVersionUnknown:
            raise
        except (ManifestInvalid, ObjectMissing):
            if self.catalog.save_id_of(checkpoint_id):
                raise
        with translate_errors(str(self.root), "open", f"{checkpoint_id}/{name}"):
            try:
                with open_directory(self.root, checkpoint_id) as directory:
                    version = directory.of_save(save_id) if manifest is None else directory.of_manifest(manifest)
                    return version.open(name)
            except FileNotFoundError as exc:
                raise ObjectMissing(str(self.root), "open", f"{checkpoint_id}/{name}") from exc


class EmptyStore(LocalStore):
    """The store of a reader or command without a root: it is empty, and no directory can be made in it."""

    def __init__(self) -> None:
        super().__init__("/proc/self/replicated-ckpt-nowhere")
