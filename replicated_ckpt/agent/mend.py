"""Mending: carries out this node's part of a repair plan. Nothing is overwritten, nothing unverified put in place."""

import logging
import os
from functools import partial

from replicated_ckpt import failpoints
from replicated_ckpt.agent.pace import Pace
from replicated_ckpt.agent.service import NodeService
from replicated_ckpt.core.checksum import BlockTable, crc32c, footed_bytes
from replicated_ckpt.core.finding import Finding
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME
from replicated_ckpt.core.manifest import Manifest, ShardEntry, decoded_manifest
from replicated_ckpt.core.repair import Adopt, CopyShard
from replicated_ckpt.errors import (
    ManifestInvalid,
    ManifestVersionUnknown,
    ObjectCorrupt,
    ObjectMissing,
    ReplicatedCkptError,
    StoreUnavailable,
)
from replicated_ckpt.stores.adoption import footed
from replicated_ckpt.stores.agent_client import AgentAddress, AgentClient, file_path
from replicated_ckpt.stores.any_source import AnySource, Source
from replicated_ckpt.stores.committed import Committed, committed_directory, committed_save, incoming_path
from replicated_ckpt.stores.inspection import Inspector, Paced
from replicated_ckpt.stores.intent import Intent
from replicated_ckpt.stores.peer import PeerShard
from replicated_ckpt.stores.shard_file import FileSink, ShardFile
from replicated_ckpt.stores.verified import Expected, VerifiedShard

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
_SESSION = "repair"


class Mender:
    """Examines, takes over and copies, on this node. One action at a time, from one thread.

    Each action looks at the disk again before it changes it, so a plan that is out of date does no harm.
    """

    def __init__(self, service: NodeService, pace: Pace) -> None:
        self._service = service
        self._store = service.store
        self._pace = pace
        self.bytes_copied = 0

    def carry_out(self, action: Adopt | CopyShard) -> None:
        """Does one action of a plan.

        Raises:
            ReplicatedCkptError: it could not be done; what was there is as it was. Stopped: the agent is leaving.
        """
        if isinstance(action, Adopt):
            self._adopt(action)
        else:
            self._copy(action)

    def examine(self, checkpoint_id: str, save_id: str, name: str) -> Finding | None:
        """Reads a file that is said to be bad; if it is, that is noted, and the finding returned. Nothing is changed.

        Raises:
            ObjectMissing: the checkpoint is not here any more, or is of another save. StoreError. Stopped
        """
        inspector = Inspector(self._store, self._service.node_id, self._pace.take)
        with committed_save(self._store.root, checkpoint_id, save_id) as (directory, manifest):
            if name == METADATA_NAME:
                finding = inspector.metadata_problem(directory, manifest)
            elif name in manifest.shards:
                finding = inspector.shard_problem(directory, manifest, name)
            else:
                return None
        if finding is not None:
            log.warning("%s", finding)
            self._service.damage.mark(checkpoint_id, save_id, name)
        return finding

    def _adopt(self, action: Adopt) -> None:
        manifest, raw_manifest, metadata = self._decision_of(action)
        try:
            with committed_directory(self._store.root, action.checkpoint_id) as directory:
                if self._mended_in_place(directory, manifest, raw_manifest, metadata):
                    return
        except ObjectMissing:
            pass  # the node holds nothing of this checkpoint: it is put there anew
        with self._service.completing:
            self._store.begin(Intent(action.save_id, action.checkpoint_id, _SESSION, overwrite=True))
            self._store.put_small(action.save_id, METADATA_NAME, metadata)
            self._store.put_small(action.save_id, MANIFEST_NAME, raw_manifest)
            self._service.complete(action.save_id)
        log.info("took over %s (save %s)", action.checkpoint_id, action.save_id)

    def _decision_of(self, action: Adopt) -> tuple[Manifest, bytes, bytes]:
        """Manifest, its bytes, and metadata of the save, from the first source where both are believed."""
        last: ReplicatedCkptError = ObjectMissing("the peers", "take over", action.checkpoint_id, "no source is known")
        for address in self._addresses(action.sources):
            try:
                with AgentClient(address) as client:
                    raw = client.fetch("GET", file_path(action.checkpoint_id, action.save_id, MANIFEST_NAME))
                    manifest = decoded_manifest(raw, address.label)
                    path = file_path(action.checkpoint_id, action.save_id, METADATA_NAME)
                    metadata = client.fetch_file(path, manifest.metadata_bytes)
                if manifest.save_id != action.save_id or crc32c(metadata) != manifest.metadata_crc32c:
                    raise ObjectCorrupt(address.label, "take over", METADATA_NAME, "it does not match its manifest")
            except ReplicatedCkptError as exc:
                last = exc
                continue
            return manifest, raw, metadata
        raise last

    def _mended_in_place(self, directory: Committed, manifest: Manifest, raw_manifest: bytes, metadata: bytes) -> bool:
        """Gives a directory that is of this save already what it lacks; False if it is of an older save.

        A directory whose own manifest is damaged or gone is taken for one of this save: files that do not match it are
        set aside. The manifest comes last, so a crash leaves what was there before.
        """
        try:
            own = directory.manifest()
        except ManifestVersionUnknown:
            return True  # a newer version's: hands off
        except (ManifestInvalid, ObjectMissing) as exc:
            self._set_aside_what_differs(directory, manifest, str(exc))
            self._restore_metadata(directory, manifest, metadata)
            directory.put_small(MANIFEST_NAME, raw_manifest)
            log.warning("%s: manifest restored: %s", directory.checkpoint_id, exc.message)
            return True
        if own.save_id != manifest.save_id:
            return (own.sequence, own.save_id) > (manifest.sequence, manifest.save_id)
        self._restore_metadata(directory, own, metadata)
        return True

    def _restore_metadata(self, directory: Committed, manifest: Manifest, metadata: bytes) -> None:
        if Inspector(self._store, self._service.node_id).metadata_problem(directory, manifest) is not None:
            directory.put_small(METADATA_NAME, metadata)
            log.info("restored %s/%s", directory.checkpoint_id, METADATA_NAME)

    def _set_aside_what_differs(self, directory: Committed, manifest: Manifest, why: str) -> None:
        inspector = Inspector(self._store, self._service.node_id, self._pace.take)
        for shard in directory.shards():
            if shard not in manifest.shards:
                directory.set_aside(shard, f"save {manifest.save_id} has no such shard; {why}")
                continue
            finding = inspector.shard_problem(directory, manifest, shard)
            if finding is not None and not self._given_its_footer(directory, shard, manifest.shards[shard]):
                directory.set_aside(shard, str(finding))

    def _given_its_footer(self, directory: Committed, shard: str, entry: ShardEntry) -> bool:
        """Whether a file was the data of the shard as stock torch wrote it, and has its footer now: it may be the only one.

        So it is where an adoption was decided on other nodes, and this one has lost what it had staged.
        """
        path = incoming_path(self._store.root)
        fd = directory.open(shard)
        try:
            if footed_bytes(os.fstat(fd).st_size) != entry.size_bytes:
                return False
            table = footed(fd, FileSink(path), f"{directory.checkpoint_id}/{shard}", self._pace.take)
        finally:
            os.close(fd)
        if table.file_crc() != entry.crc32c:
            path.unlink()
            return False
        directory.place(path, shard)
        log.info("adopted %s/%s", directory.checkpoint_id, shard)
        return True

    def _copy(self, action: CopyShard) -> None:
        path = incoming_path(self._store.root)
        with committed_save(self._store.root, action.checkpoint_id, action.save_id) as (directory, manifest):
            entry = manifest.shards.get(action.shard)
            if entry is None:
                raise ObjectMissing(str(self._store.root), "copy", action.shard, "the manifest does not name it")
            if self._is_intact(directory, manifest, action.shard):
                return
            sources = AnySource(self._sources(action, entry), partial(self._tell, action))
            try:
                pulled(sources, action.shard, FileSink(path), self._pace.take)
            finally:
                sources.close()
            directory.place(path, action.shard)
        failpoints.reach("restore.copied")
        self.bytes_copied += action.size_bytes
        log.info("restored %s/%s from node %s", action.checkpoint_id, action.shard, sources.last_node)

    def _is_intact(self, directory: Committed, manifest: Manifest, shard: str) -> bool:
        if shard not in directory.shards():
            return False
        inspector = Inspector(self._store, self._service.node_id, self._pace.take)
        return inspector.shard_problem(directory, manifest, shard) is None

    def _sources(self, action: CopyShard, entry: ShardEntry) -> list[Source]:
        """The peers, and last the damaged file of this node itself: some of its blocks may be nowhere else."""
        sources = [
            Source(address.node_id, partial(self._at_peer, action, entry, address))
            for address in self._addresses(action.sources)
        ]
        if self._service.node_id in action.sources:
            sources.append(Source(self._service.node_id, partial(self._at_home, action, entry)))
        return sources

    def _at_peer(self, action: CopyShard, entry: ShardEntry, address: AgentAddress) -> VerifiedShard:
        expected = Expected(entry.size_bytes, entry.crc32c)
        return PeerShard(AgentClient(address), action.checkpoint_id, action.save_id, action.shard, expected)

    def _at_home(self, action: CopyShard, entry: ShardEntry) -> VerifiedShard:
        fd = self._store.open_file(action.checkpoint_id, action.save_id, action.shard)
        expected = Expected(entry.size_bytes, entry.crc32c)
        return ShardFile(fd, f"node {self._service.node_id}", f"{action.checkpoint_id}/{action.shard}", expected)

    def _tell(self, action: CopyShard, node_id: str, error: ReplicatedCkptError) -> None:
        """Tells a source that its copy seems to be bad."""
        log.warning("copy of %s/%s on node %s: %s", action.checkpoint_id, action.shard, node_id, error)
        if isinstance(error, ObjectCorrupt):
            for address in self._addresses((node_id,)):
                tell_suspect(address, action.checkpoint_id, action.save_id, action.shard, error.message)

    def _addresses(self, nodes: tuple[str, ...]) -> list[AgentAddress]:
        known = {peer.node_id: peer for peer in self._service.peers.known()}
        return [known[node] for node in nodes if node in known]


def pulled(sources: AnySource, shard: str, sink: FileSink, paced: Paced) -> None:
    """Copies a shard into a file, every block verified. The file is whole and durable afterwards, or not there.

    Raises:
        StoreUnavailable: no source could be opened. ObjectCorrupt: some bytes are intact nowhere. StoreFull, StoreError
    """
    try:
        table = _table(sources, shard)
        for offset in range(0, table.data_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, table.data_bytes - offset)
            paced(length)
            sink.write(_intact(sources, shard, offset, length))
        sink.write(memoryview(table.encoded()))
        sink.finish(table)
    except BaseException:
        sink.discard()
        raise


def _table(sources: AnySource, shard: str) -> BlockTable:
    opened = sources.any_opened()
    if opened is None:
        raise StoreUnavailable("the peers", "copy", shard, "none of them could give its checksums")
    return opened.table


def _intact(sources: AnySource, shard: str, offset: int, length: int) -> memoryview:
    piece = sources.read(offset, length)
    if piece is None:
        raise ObjectCorrupt("the peers", "copy", shard, f"no intact bytes {offset} to {offset + length}")
    return piece


def tell_suspect(address: AgentAddress, checkpoint_id: str, save_id: str, name: str, why: str) -> None:
    """Tells a node that one of its files was found bad; its agent reads it again and mends it. Failing to is logged."""
    document = {"checkpoint_id": checkpoint_id, "save_id": save_id, "name": name, "why": why[:500]}
    try:
        with AgentClient(address) as client:
            client.call("POST", "/v1/suspects", document)
    except ReplicatedCkptError as exc:
        log.warning("could not tell %s that its %s/%s seems bad: %s", address.label, checkpoint_id, name, exc)
