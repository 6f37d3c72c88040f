"""Mending: carries out this node's part of a repair plan. It overwrites nothing, and puts only verified bytes in place."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from replicated_ckpt import failpoints
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, ShardName, parse_marked
from replicated_ckpt.core.manifest import Manifest, ShardEntry
from replicated_ckpt.core.protocol.settlement import may_publish
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.repair_plan import Action, CopyShard, Finding, RestoreManifest, SetAside
from replicated_ckpt.core.upkeep.retention import Removal
from replicated_ckpt.errors import (
    ManifestInvalid,
    ManifestVersionUnknown,
    ObjectCorrupt,
    ObjectMissing,
    ReplicatedCkptError,
    SaveAborted,
    SaveSuperseded,
    StoreFull,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.manifests import fetch_manifest, fetch_metadata
from replicated_ckpt.node.saves.service import OPEN_GRACE_S, NodeService
from replicated_ckpt.stores.any_source import AnySource, Source
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_directory
from replicated_ckpt.stores.local.directories.committed import Committed, open_committed_save, open_directory
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.inspection import Inspector, Paced
from replicated_ckpt.stores.local.shard_file import FileSink, ShardFile
from replicated_ckpt.stores.local.versions.full_disk import measure_room
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import PeerShard, report_suspect
from replicated_ckpt.stores.throttle import Pace
from replicated_ckpt.stores.verified import Expected, VerifiedShard

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
_SESSION = "repair"  # not a rank's: a rank's next save would abort an open save of its own session


class Mender:
    """Examines files, and restores manifests and shards on this node. One action at a time, from one thread.

    Each action reads the disk again before it changes anything, so an outdated plan does no harm. `meanwhile` is called
    before each piece of a shard that is copied or examined.
    """

    def __init__(self, service: NodeService, pace: Pace, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._service = service
        self._store = service.store
        self._pace = pace
        self._meanwhile = meanwhile
        self.bytes_copied = self.bytes_fetched = 0

    def carry_out(self, action: Action) -> None:
        """Does one action of a plan.

        Raises:
            ReplicatedCkptError: it failed, and no file has changed. Stopped: the agent exits.
        """
        with translate_errors(str(self._store.root), "mend", action.checkpoint_id):
            match action:
                case RestoreManifest():
                    # Files of the save may lie here under a damaged manifest. They stay, and are not copied again.
                    if not self._restore_in_place(action):
                        self._take_over(action)
                case CopyShard():
                    self._copy(action)
                case SetAside():
                    self._set_aside(action)

    def examine(self, checkpoint_id: str, save_id: str, name: str) -> Finding | None:
        """Reads a file that may be bad, records the result, and returns the finding, if any. Changes no file.

        Raises:
            ObjectMissing: the checkpoint was removed, or is of another save now. StoreError: the file cannot be read.
            Stopped: the agent exits.
        """
        with open_committed_save(self._store.root, checkpoint_id, save_id) as (directory, manifest):
            return self._examine(directory, manifest, name)

    def of_wrong_size(self) -> list[tuple[str, str, str]]:
        """The shards of a wrong size that are not known as damaged yet: checkpoint, save, name."""
        catalog = self._store.catalog
        found: list[tuple[str, str, str]] = []
        for holding in catalog.holdings(self._service.node_id):
            # A size costs one stat(): a file that was cut short is found without reading the store.
            place = holding.checkpoint_id, holding.save_id
            with contextlib.suppress(ObjectMissing, ManifestInvalid):  # the save may have been removed meanwhile
                shards = catalog.manifest_of(*place).shards
                sizes = {name: size for name, size in holding.sizes.items() if name in shards}
                found += [(*place, name) for name, size in sizes.items() if size != shards[name].size_bytes]
        return [key for key in found if not self._service.damage.is_known(*key)]

    def _take(self, size_bytes: int) -> None:
        self._meanwhile()
        self._pace.take(size_bytes)

    def _fetch(self, size_bytes: int) -> None:
        """Waits for the pace before a piece of a copy, and counts its bytes. A command that waits prints the sum."""
        self._take(size_bytes)
        self.bytes_fetched += size_bytes

    def _examine(self, directory: Committed, manifest: Manifest, name: str) -> Finding | None:
        inspector = Inspector(self._store, self._service.node_id, self._take)
        has_damaged_footer = False
        if name == METADATA_NAME:
            finding = inspector.metadata_problem(directory, manifest)
        elif name in manifest.shards:
            finding = inspector.shard_problem(directory, manifest, name)
            has_damaged_footer = finding is not None and inspector.has_damaged_footer(directory, manifest, name)
        else:
            return None
        place = directory.checkpoint_id, manifest.save_id, name
        if finding is None:
            self._service.damage.clear(*place)
        else:
            log.warning("%s", finding)
            self._service.damage.mark(*place, has_damaged_footer=has_damaged_footer)
        return finding

    def _refuse_removed(self, checkpoint_id: str, manifest: Manifest) -> None:
        """Raises SaveAborted: this node's user has removed the save, and a copy would look as if the user restored it.

        A directory that a user renamed, or copied under another name, does not count as removed.
        """
        if manifest.checkpoint_id == checkpoint_id and manifest.save_id in self._store.journal.read_removed():
            raise SaveAborted(
                f"This node's user has removed {checkpoint_id!r} (save {manifest.save_id}).",
                "To restore it, move its directory back under the root.",
            )

    def _restore_in_place(self, action: RestoreManifest) -> bool:
        """Restores the manifest and metadata of a save whose files are here. False: no file of this save is here.

        If the manifest is damaged or missing, the plan has identified the save by its files' checksums. No file is moved:
        a damaged file may hold the last copy of a block. The manifest is written last, so a crash changes nothing.

        Raises:
            ManifestVersionUnknown: a newer version of this package wrote the manifest, which stays as it is.
        """
        catalog = self._store.catalog
        if action.save_id in {manifest.save_id for manifest in catalog.replaced_in(catalog.look(action.checkpoint_id))}:
            with open_committed_save(self._store.root, action.checkpoint_id, action.save_id) as (version, manifest):
                if (problem := self._restore_metadata(version, action, manifest)) is not None:
                    raise problem
            return catalog.look(action.checkpoint_id).has_manifest  # if False, the save can get its name back
        if not is_directory(self._store.final(action.checkpoint_id)):
            return False
        with open_directory(self._store.root, action.checkpoint_id) as opened:
            own, why = _manifest_in(opened)
            if own is not None and own.save_id != action.save_id:
                return False
            # Every file here belongs to a version with a manifest, so nothing of the lost save is left.
            if not set(opened.names()) - catalog.list_claimed(action.checkpoint_id):
                return False
            directory = opened.of_save(action.save_id)
            manifest, raw_manifest = (
                fetch_manifest(action.checkpoint_id, action.save_id, self._sources_known(action.sources))
                if own is None
                else (own, b"")
            )
            self._refuse_removed(action.checkpoint_id, manifest)
            # The manifest is written last: after an earlier crash, the next plan makes the same action again.
            problem = self._restore_metadata(directory, action, manifest)
            if own is None:
                if not self._put_manifest(directory, raw_manifest):
                    return False
                log.warning("%s: manifest restored: %s", directory.checkpoint_id, why)
                # Until now there was no checksum for the shards: damaged ones must not count as copies.
                for shard in directory.shards():
                    self._examine(directory, manifest, shard)
        if problem is not None:
            raise problem
        return True

    def _put_manifest(self, directory: Committed, raw_manifest: bytes) -> bool:
        """Writes the manifest; False if another save has the name by now."""
        try:
            directory.put_small(MANIFEST_NAME, raw_manifest)
        except ObjectMissing:
            return False
        return True

    def _restore_metadata(
        self, directory: Committed, action: RestoreManifest, manifest: Manifest
    ) -> ReplicatedCkptError | None:
        """Restores the metadata if it is missing or damaged; returns the error if no source had it."""
        if self._examine(directory, manifest, METADATA_NAME) is None:
            return None
        try:
            metadata = fetch_metadata(action.checkpoint_id, manifest, self._sources_known(action.sources))
        except ReplicatedCkptError as exc:
            return exc
        directory.put_small(METADATA_NAME, metadata)
        log.info("restored %s/%s", directory.checkpoint_id, METADATA_NAME)
        return None

    def _take_over(self, action: RestoreManifest) -> None:
        """Publishes a save here that other nodes have published, unless a newer one is here."""
        sources = self._sources_known(action.sources)
        manifest, raw_manifest = fetch_manifest(action.checkpoint_id, action.save_id, sources)
        metadata = fetch_metadata(action.checkpoint_id, manifest, sources)
        own = self._store.catalog.find_manifest(action.checkpoint_id)
        # A newer save may have been published since the plan was made: it stays (I4).
        if not may_publish(manifest.version, None if own is None else own.version, replaces=""):
            return
        # Under the lock: a thread that settles this save at the same time would remove the files staged here.
        with self._service.completing:
            self._refuse_removed(action.checkpoint_id, manifest)
            self._refuse_while_saved(action)
            self._store.begin(
                Intent(action.save_id, action.checkpoint_id, _SESSION, overwrite=True), replaces_other_runs=False
            )
            # The manifest last: with a manifest, the save counts as decided and must be complete.
            self._store.put_small(action.save_id, METADATA_NAME, metadata)
            self._store.put_small(action.save_id, MANIFEST_NAME, raw_manifest)
            try:
                self._service.commit(action.save_id)
            except SaveSuperseded:  # another node has published meanwhile
                # Shards that ranks staged earlier may be the only copies. A save with such shards stays in doubt.
                if not any(ShardName.parse(path.name) for path in self._store.staging(action.save_id).iterdir()):
                    self._store.abort(action.save_id)
                raise
        log.info("copied %s (save %s): manifest and metadata", action.checkpoint_id, action.save_id)

    def _refuse_while_saved(self, action: RestoreManifest) -> None:
        """Raises StoreUnavailable while ranks of this node save under the same name.

        Their save was opened before the version that would be published here, so it could not replace that version.
        """
        for intent in self._store.list_staged():
            is_other = intent.checkpoint_id == action.checkpoint_id and intent.save_id != action.save_id
            if is_other and (
                self._service.was_opened_within(OPEN_GRACE_S, intent) or self._service.is_locked(intent.save_id)
            ):
                raise StoreUnavailable(
                    f"node {self._service.node_id}",
                    "copy",
                    action.checkpoint_id,
                    f"ranks of this node are writing save {intent.save_id} of that name",
                    f"This node copies save {action.save_id} once save {intent.save_id} has ended, unless "
                    f"{intent.save_id} has then replaced {action.save_id}.",
                )

    def _set_aside(self, action: SetAside) -> None:
        with open_committed_save(self._store.root, action.checkpoint_id, action.save_id) as (directory, manifest):
            # The plan may be out of date: a shard that the manifest names is not moved.
            if action.shard not in manifest.shards:
                directory.set_aside(action.shard, f"the manifest of save {action.save_id} has no such shard")

    def _copy(self, action: CopyShard) -> None:
        with open_committed_save(self._store.root, action.checkpoint_id, action.save_id) as (directory, manifest):
            self._refuse_removed(action.checkpoint_id, manifest)
            entry = manifest.shards.get(action.shard)
            if entry is None:
                raise ObjectMissing(str(self._store.root), "copy", action.shard, "the manifest does not name it")
            self._check_room(action, entry)
            # Checked first: on a read-only disk the copy would fail only after all its bytes were sent.
            directory.check_writable()
            # An earlier round, or the user, may have restored it: an intact file is not replaced.
            if directory.has(action.shard) and self._examine(directory, manifest, action.shard) is None:
                return
            sources = AnySource(self._sources(action, entry), partial(self._report_source_error, action))
            with directory.incoming_file(action.shard) as path:
                with contextlib.closing(sources):
                    hint = _bring_back(manifest, entry, action.sources)
                    sink = FileSink.create(path, recycled=RecycledFiles(self._store.root), shard=action.shard)
                    pull_shard(sources, action.shard, sink, self._fetch, hint)
                # Named only when verified and durable: after a power loss the name must not lead to half a shard.
                directory.place(path, action.shard)
        failpoints.reach("restore.copied")
        self.bytes_copied += entry.size_bytes
        log.info("restored %s/%s from node %s", action.checkpoint_id, action.shard, sources.last_node)

    def _check_room(self, action: CopyShard, entry: ShardEntry) -> None:
        """Raises StoreFull if the shard does not fit: each round would fill the disk and the network for nothing."""
        root = self._store.root
        writable_bytes = measure_room(root).writable_bytes
        if writable_bytes is not None and writable_bytes < entry.size_bytes:
            detail = f"it has {entry.size_bytes} bytes, but only {writable_bytes} are free"
            raise StoreFull(str(root), "copy", f"{action.checkpoint_id}/{action.shard}", detail)

    def _sources(self, action: CopyShard, entry: ShardEntry) -> list[Source]:
        """The peers, and last this node's own damaged file, which may hold the last copy of a block."""
        expected = Expected(entry.size_bytes, entry.crc32c)
        sources = [
            Source(address.node_id, expected, partial(self._at_peer, action, address))
            for address in self._sources_known(action.sources)
        ]
        if self._service.node_id in action.sources:
            sources.append(Source(self._service.node_id, expected, partial(self._at_home, action)))
        return sources

    def _at_peer(self, action: CopyShard, address: AgentAddress, expected: Expected) -> VerifiedShard:
        return PeerShard(AgentClient(address), action.checkpoint_id, action.save_id, action.shard, expected)

    def _at_home(self, action: CopyShard, expected: Expected) -> VerifiedShard:
        open_file = partial(self._store.open_file, action.checkpoint_id, action.save_id, action.shard)
        return ShardFile(open_file, f"node {self._service.node_id}", f"{action.checkpoint_id}/{action.shard}", expected)

    def _report_source_error(self, action: CopyShard, node_id: str, error: ReplicatedCkptError) -> None:
        """Logs an error of a source, and reports a corrupt copy to its node."""
        log.warning("copy of %s/%s on node %s: %s", action.checkpoint_id, action.shard, node_id, error)
        # Other errors, of a slow or silent source, are no sign of a bad copy.
        if isinstance(error, ObjectCorrupt):
            for address in self._addresses((node_id,)):
                report_suspect(address, action.checkpoint_id, action.save_id, action.shard, error.message)

    def _sources_known(self, nodes: tuple[str, ...]) -> list[AgentAddress]:
        """The addresses of those nodes, the sources of an action, that this node's address book has.

        Raises:
            StoreUnavailable: the address book has none of them, and this node is not a source itself.
        """
        known = self._addresses(nodes)
        # Another node has made this plan. Its address book may have nodes that no job has introduced here.
        if nodes and not known and self._service.node_id not in nodes:
            raise StoreUnavailable(
                f"the address book of node {self._service.node_id}",
                "find",
                f"node {' or node '.join(nodes)}",
                "no job has introduced that node here, so this node cannot fetch from it. No local file was changed",
                "Run a job with ranks on both nodes: its first save or load introduces them. Then repair again.",
            )
        return known

    def _addresses(self, nodes: tuple[str, ...]) -> list[AgentAddress]:
        known = {peer.node_id: peer for peer in self._service.peers.read_all()}
        return [known[node] for node in nodes if node in known]


def _bring_back(manifest: Manifest, entry: ShardEntry, sources: Sequence[str]) -> str:
    """The hint if the copies at `sources`, which answer, are not enough. It names the other nodes that should have one."""
    hosts = {node.node_id: node.host for node in manifest.nodes}
    others = [f"{node} ({hosts.get(node, 'host unknown')})" for node in entry.holders if node not in sources]
    if not others:
        return "All nodes that should hold a copy have answered: load an older checkpoint."
    return f"Bring back node {' or node '.join(others)}, then repair again; or load an older checkpoint."


def _manifest_in(directory: Committed) -> tuple[Manifest | None, str]:
    """The manifest in a directory; None, and why, if it is damaged or gone."""
    try:
        return directory.manifest(), ""
    except ManifestVersionUnknown:
        raise
    except (ManifestInvalid, ObjectMissing) as exc:
        return None, exc.message


def pull_shard(sources: AnySource, shard: str, sink: FileSink, paced: Paced, hint: str | None = None) -> None:
    """Copies a shard into a file, every block verified. Afterwards the file is complete and durable, or does not exist.

    `hint`: the next step if no source has the shard.

    Raises:
        StoreUnavailable: no source could be opened. ObjectCorrupt: no source has intact copies of some bytes. StoreFull,
            StoreError: of the node's own disk.
    """
    with sink:
        opened = sources.any_opened()
        if opened is None:
            raise StoreUnavailable("the peers", "copy", shard, "none of them returned its checksums", hint)
        table = opened.table
        for offset in range(0, table.data_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, table.data_bytes - offset)
            # Before each piece: a copy must not take the disk and the network from a running save.
            paced(length)
            piece = sources.read(offset, length)
            if piece is None:
                raise ObjectCorrupt("the peers", "copy", shard, f"no intact bytes {offset} to {offset + length}", hint)
            sink.write(piece)
        sink.write(memoryview(table.encode()))
        sink.finish(table)


def find_damaged(service: NodeService) -> tuple[Removal, ...]:
    """The replaced versions on this node whose manifest is damaged. The manifest's file name has the save id.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    catalog = service.store.catalog
    return tuple(
        Removal(
            service.node_id,
            looked.checkpoint_id,
            marked[1],
            "its manifest is damaged, but all other files have their copies",
        )
        for looked in catalog.look_at_all()
        for name in catalog.list_damaged_manifests(looked)
        if (marked := parse_marked(name)) is not None
    )


def restore_replaced(
    service: NodeService, damaged: Sequence[Removal], manifests: Mapping[str, Manifest], others: Sequence[NodeView]
) -> bool:
    """Restores the manifest of each version in `damaged` from another node; returns whether any was restored."""
    is_any = False
    for one in damaged:
        manifest = manifests.get(one.save_id)
        if manifest is None:
            continue
        try:
            _restore(service, one.checkpoint_id, manifest, others)
            is_any = True
        except ReplicatedCkptError as exc:
            log.warning("the replaced save %s is not restored for now: %s", manifest.save_id, exc)
    return is_any


def _restore(service: NodeService, checkpoint_id: str, manifest: Manifest, others: Sequence[NodeView]) -> None:
    up = [view for view in others if view.presence is Presence.UP]
    holders = {held.node_id for view in up for held in view.holdings or () if held.save_id == manifest.save_id}
    sources = [peer for peer in service.peers.read_all() if peer.node_id in holders]
    _, raw = fetch_manifest(manifest.checkpoint_id, manifest.save_id, sources)
    with open_directory(service.store.root, checkpoint_id) as directory:
        directory.of_save(manifest.save_id, is_replaced=True).put_small(MANIFEST_NAME, raw)
    log.warning("%s: the manifest of the replaced save %s is restored", checkpoint_id, manifest.save_id)
