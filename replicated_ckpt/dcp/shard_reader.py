"""Reading shards for one rank: each range from the best source that has it intact, the next one if it has not."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.sources import source_orders
from replicated_ckpt.dcp.survey import Survey
from replicated_ckpt.errors import ReplicatedCkptError, ShardLost
from replicated_ckpt.stores.agent_client import AgentClient
from replicated_ckpt.stores.local import LocalStore
from replicated_ckpt.stores.peer import PeerShard
from replicated_ckpt.stores.shard_file import ShardFile
from replicated_ckpt.stores.verified import Expected, VerifiedShard

log = logging.getLogger(__name__)


@dataclass
class Traffic:
    """Bytes of items by where they came from, and the copies that were found bad on the way."""

    bytes_local: int = 0
    bytes_peer: int = 0
    bad_copies: list[str] = field(default_factory=list)


class ShardReader:
    """Reads verified ranges of a save's shards. Used by one thread; `close` gives every connection back."""

    def __init__(
        self, store: LocalStore, own_node: str, survey: Survey, shards: Sequence[str], reader_key: str
    ) -> None:
        self._store = store
        self._own_node = own_node
        self._survey = survey
        self._manifest: Manifest = survey.manifest
        self._address_by_node = {address.node_id: address for address in survey.addresses}
        self._nodes_by_shard = self._ordered(shards, reader_key)
        self._open: dict[str, VerifiedShard] = {}
        self._failed: dict[str, list[str]] = {}
        self.traffic = Traffic()

    def _ordered(self, shards: Sequence[str], reader_key: str) -> Mapping[str, list[str]]:
        sizes = {shard: self._manifest.shards[shard].size_bytes for shard in shards}
        holders = {shard: self._survey.found.holders_of(shard, sizes[shard]) for shard in shards}
        orders = source_orders(sizes, holders, self._own_node, reader_key)
        return {order.shard: list(order.nodes) for order in orders}

    def read(self, shard: str, offset: int, length: int) -> memoryview:
        """Bytes [offset, offset + length) of a shard, verified.

        Raises:
            ShardLost: no source is left that has them intact; it tells what each one answered.
        """
        while self._nodes_by_shard[shard]:
            node = self._nodes_by_shard[shard][0]
            try:
                raw = self._source(shard, node).read(offset, length)
            except ReplicatedCkptError as exc:
                self._drop(shard, node, exc)
                continue
            if node == self._own_node:
                self.traffic.bytes_local += length
            else:
                self.traffic.bytes_peer += length
            return raw
        searched = [*self._survey.searched, *self._failed.get(shard, ())]
        raise ShardLost(self._manifest.checkpoint_id, {shard: self._manifest.owner_of(shard)}, searched)

    def _source(self, shard: str, node: str) -> VerifiedShard:
        source = self._open.get(shard)
        if source is None:
            source = self._open[shard] = self._opened(shard, node)
        return source

    def _opened(self, shard: str, node: str) -> VerifiedShard:
        entry, save = self._manifest.shards[shard], self._survey.found
        expected = Expected(entry.size_bytes, entry.crc32c)
        if node == self._own_node:
            fd = self._store.open_file(save.checkpoint_id, save.save_id, shard)
            return ShardFile(fd, f"node {node} at {self._store.root}", f"{save.checkpoint_id}/{shard}", expected)
        client = AgentClient(self._address_by_node[node])
        return PeerShard(client, save.checkpoint_id, save.save_id, shard, expected)

    def _drop(self, shard: str, node: str, error: ReplicatedCkptError) -> None:
        self._nodes_by_shard[shard].remove(node)
        self.done_with(shard)
        self._failed.setdefault(shard, []).append(f"node {node}: {error.message}")
        self.traffic.bad_copies.append(f"{shard} on node {node}: {error.message}")
        log.warning("%s of %s on node %s is not used: %s", shard, self._manifest.checkpoint_id, node, error)

    def done_with(self, shard: str) -> None:
        """Closes the source of a shard that nothing more is read from."""
        source = self._open.pop(shard, None)
        if source is not None:
            source.close()

    def close(self) -> None:
        for source in self._open.values():
            source.close()
        self._open.clear()
