"""Making up for copies that this node was meant to hold and does not: pulled from the peers, in the background."""

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replicated_ckpt import failpoints
from replicated_ckpt.agent.service import NodeService
from replicated_ckpt.core.manifest import ShardEntry
from replicated_ckpt.errors import ObjectMissing, ReplicatedCkptError
from replicated_ckpt.stores.agent_client import AgentClient
from replicated_ckpt.stores.peer import PeerShard
from replicated_ckpt.stores.shard_file import FileSink
from replicated_ckpt.stores.verified import Expected, VerifiedShard

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
ATTEMPTS = 6
_PAUSE_S = 2.0


@dataclass(frozen=True)
class MissingCopy:
    """A shard of a committed checkpoint that this node should hold, by its manifest, and does not."""

    checkpoint_id: str
    save_id: str
    shard: str
    entry: ShardEntry


def missing_copies(service: NodeService) -> Iterator[MissingCopy]:
    """What this node was meant to hold and does not, as the disk shows it now."""
    for checkpoint_id, manifest in service.store.catalog.committed():
        sizes = service.store.catalog.shard_sizes(checkpoint_id)
        for shard, entry in manifest.shards.items():
            if service.node_id in entry.holders and sizes.get(shard) != entry.size_bytes:
                yield MissingCopy(checkpoint_id, manifest.save_id, shard, entry)


class Restorer:
    """One thread that looks for missing copies whenever it is woken, and tries each ATTEMPTS times at most.

    A copy that no peer can give now is left alone until the next save or load wakes the thread again.
    """

    def __init__(self, service: NodeService) -> None:
        self._service = service
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._busy = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rckpt-restore", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._busy.set()
        self._woken.set()

    def stop(self) -> None:
        self._stopping.set()
        self._woken.set()
        self._thread.join()

    @property
    def is_busy(self) -> bool:
        """Whether copies are being made up, or may have to be."""
        return self._busy.is_set()

    def _run(self) -> None:
        while True:
            self._woken.wait()
            self._woken.clear()
            self._busy.set()
            if self._stopping.is_set():
                return
            for _ in range(ATTEMPTS):
                if self._restored_all() or self._stopping.wait(_PAUSE_S):
                    break
            if not self._woken.is_set():
                self._busy.clear()

    def _restored_all(self) -> bool:
        whole = True
        for copy in missing_copies(self._service):
            if self._stopping.is_set():
                return False
            try:
                self._restore(copy)
            except ReplicatedCkptError as exc:
                log.warning("copy of %s/%s is still missing: %s", copy.checkpoint_id, copy.shard, exc)
                whole = False
        return whole

    def _restore(self, copy: MissingCopy) -> None:
        """Pulls one copy from the first holder that has it intact.

        Raises:
            ReplicatedCkptError: no holder could give it; nothing was changed here.
        """
        address_by_node = {peer.node_id: peer for peer in self._service.peers.known()}
        last: ReplicatedCkptError = ObjectMissing("the peers", "restore", copy.shard, "no holder of it is known")
        for node in copy.entry.holders:
            if node == self._service.node_id or node not in address_by_node:
                continue
            expected = Expected(copy.entry.size_bytes, copy.entry.crc32c)
            client = AgentClient(address_by_node[node])
            try:
                source = PeerShard(client, copy.checkpoint_id, copy.save_id, copy.shard, expected)
                copy_shard(source, self._service.store.final(copy.checkpoint_id) / copy.shard)
            except ReplicatedCkptError as exc:
                last = exc
                continue
            finally:
                client.close()
            failpoints.reach("restore.copied")
            log.info("restored %s/%s from node %s", copy.checkpoint_id, copy.shard, node)
            return
        raise last


def copy_shard(source: VerifiedShard, path: Path) -> None:
    """Copies a shard into a file, every block verified. The file is whole and durable afterwards, or not there."""
    sink = FileSink(path)
    try:
        for offset in range(0, source.table.data_bytes, PIECE_BYTES):
            sink.write(source.read(offset, min(PIECE_BYTES, source.table.data_bytes - offset)))
        sink.write(memoryview(source.table.encoded()))
        sink.finish(source.table)
    except BaseException:
        sink.discard()
        raise
