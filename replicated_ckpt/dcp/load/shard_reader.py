"""Reads shards for one rank: each range from the best source, or the next if that one is damaged or silent."""

import copy
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from replicated_ckpt.core.layout import OBJECT_NODE
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.reading.windows import SHARDS_AT_ONCE, ByteRange, source_orders
from replicated_ckpt.dcp.find.absence import describe_answer, describe_move, with_bucket_not_asked
from replicated_ckpt.dcp.find.keeping import note_own_suspect
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.errors import (
    ObjectCorrupt,
    ObjectMissing,
    ReplicatedCkptError,
    ShardLost,
    StoreUnavailable,
)
from replicated_ckpt.stores.any_source import AnySource, Source, Tables
from replicated_ckpt.stores.bucket.bucket import Bucket, ObjectShard, UnmanagedObjectShard
from replicated_ckpt.stores.local.shard_file import ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unmanaged import (
    UncheckedItems,
    UnmanagedDirectory,
    UnmanagedFileShard,
    UnmanagedPeerShard,
)
from replicated_ckpt.stores.node_cache.exchange import Exchange
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.stores.peer.copy import PeerShard, report_suspect
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.stores.verified import Expected, TooSlow, VerifiedShard

log = logging.getLogger(__name__)

_NO_AGENT = (
    "No agent runs for that store, as on a read-only root. Load on that node, or run an agent there: "
    "`replicated-ckpt agent --root ROOT`."
)
OPEN_SHARDS_MAX = 2 * SHARDS_AT_ONCE
"""The most shards that one thread has open. More would keep descriptors and connections of finished shards."""


@dataclass
class Traffic:
    """Bytes read by source, in whole blocks, including bad blocks. `bad_copies`: the copies that failed, with their errors.

    `bytes_shared`: bytes that another rank of this node had fetched. `seconds_by_node`: the time of reading from
    each node, summed over all threads.
    """

    bytes_local: int = 0
    bytes_peer: int = 0
    bytes_object: int = 0
    bytes_shared: int = 0
    bad_copies: list[str] = field(default_factory=list)
    seconds_by_node: dict[str, float] = field(default_factory=dict)


class Findings:
    """The findings that all readers of one load share. Safe for concurrent use."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._failed: dict[str, dict[str, str]] = {}
        self._suspects: set[tuple[str, str]] = set()
        self.silent: set[str] = set()
        """Nodes that did not answer: another request would cost a time-out."""
        self.exchange: Exchange | None = None

    def count(self, node: str, own_node: str, size_bytes: int) -> None:
        with self._lock:
            if node == own_node:
                self.traffic.bytes_local += size_bytes
            elif node == OBJECT_NODE:
                self.traffic.bytes_object += size_bytes
            else:
                self.traffic.bytes_peer += size_bytes

    def count_seconds(self, node: str, spent_s: float) -> None:
        with self._lock:
            self.traffic.seconds_by_node[node] = self.traffic.seconds_by_node.get(node, 0.0) + spent_s

    def record_finding(self, shard: str, node: str, error: ReplicatedCkptError, *, is_suspect: bool) -> bool:
        """Records that a copy failed. Returns whether this is the first time. `is_suspect`: the node's
        agent must read the copy again.
        """
        with self._lock:
            if is_suspect:
                self._suspects.add((node, shard))
            if isinstance(error, StoreUnavailable):
                self.silent.add(node)
                # The other ranks of the node need not wait for the same time-out.
                if self.exchange is not None:
                    self.exchange.mark_silent(node)
            failed = self._failed.setdefault(shard, {})
            if node in failed:
                return False
            failed[node] = describe_answer(node, error)
            self.traffic.bad_copies.append(f"{shard} on node {node}: {error.message}")
            return True

    def is_silent(self, node: str) -> bool:
        """Whether the node did not answer this rank, or another rank of this node."""
        return node in self.silent or (self.exchange is not None and self.exchange.is_silent(node))

    def failures(self, shard: str) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._failed.get(shard, {}).values())

    def suspects(self) -> list[tuple[str, str]]:
        """The (node, shard) pairs of bad copies that were found since the last call."""
        with self._lock:
            found = sorted(self._suspects)
            self._suspects.clear()
            return found


class ShardReader:
    """Reads verified ranges of a save's shards. Used by one thread; `close` closes every connection."""

    def __init__(
        self,
        store: LocalStore,
        own_node: str,
        survey: Survey,
        shards: Sequence[str],
        reader_key: str,
        bucket: Bucket | None = None,
        places: Mapping[str, Sequence[ByteRange]] | None = None,
    ) -> None:
        """`places`: the places of all items of each shard. If no manifest has checksums, the items at these places are
        checked.
        """
        self._store = store
        self._own_node = own_node
        self._survey = survey
        self._bucket = bucket
        self._manifest: Manifest = survey.manifest
        self._address_by_node = {address.node_id: address for address in survey.addresses}
        self._nodes_by_shard = self._order(shards, reader_key)
        self._places = places or {}
        self._unchecked: dict[tuple[str, str], UncheckedItems] = {}
        self._open: dict[str, AnySource] = {}
        self._rebuilt: Tables = {}
        self.findings = Findings()

    def sibling(self) -> "ShardReader":
        """A reader of the same shards for another thread, with connections of its own and the same findings."""
        other = copy.copy(self)
        # Connections are used by one thread at a time; findings are shared, so that a silent node costs one time-out.
        other._open = {}  # noqa: SLF001 - of the same class
        return other

    def _order(self, shards: Sequence[str], reader_key: str) -> Mapping[str, tuple[str, ...]]:
        sizes = {shard: self._manifest.shards[shard].size_bytes for shard in shards}
        holders = {shard: self._survey.found.holders_of(shard, sizes[shard]) for shard in shards}
        orders = source_orders(sizes, holders, self._own_node, reader_key)
        return {shard: (*nodes, *self._with_other_sizes(shard, nodes)) for shard, nodes in orders.items()}

    def _with_other_sizes(self, shard: str, others: Sequence[str]) -> list[str]:
        """Nodes whose file of the shard has another size. They are the last resort: such a file may have the only intact
        copy of a block.
        """
        return [
            found.node_id for found in self._survey.holdings if shard in found.sizes and found.node_id not in others
        ]

    def read_range(self, shard: str, offset: int, length: int, memory: memoryview | None = None) -> memoryview:
        """Verified bytes [offset, offset + length) of a shard; usually in `memory`, if that is passed.

        Otherwise the next read of the shard may reuse the memory.

        Raises:
            ShardLost: no remaining source has these bytes intact. The error has the answer of each source.
        """
        source = self._open.get(shard) or self._open_shard(shard)
        raw = source.read(offset, length, memory)
        for node, size_bytes in source.take_counts().items():
            self.findings.count(node, self._own_node, size_bytes)
        for node, spent_s in source.take_seconds().items():
            self.findings.count_seconds(node, spent_s)
        if raw is None:
            raise self._describe_lost(shard)
        return raw

    def _describe_lost(self, shard: str) -> ShardLost:
        save, searched = self._survey.found, [*self._survey.searched, *self.findings.failures(shard)]
        # Another job may have replaced the save in the bucket. A silent bucket would cost its time-out again.
        if self._bucket is not None and self._survey.in_bucket is not None and not self.findings.is_silent(OBJECT_NODE):
            searched += describe_move(self._bucket, save.checkpoint_id, save.save_id)
        places = with_bucket_not_asked(searched, self._manifest)
        return ShardLost(save.checkpoint_id, {shard: self._manifest.owner_of(shard)}, places)

    def _open_shard(self, shard: str) -> AnySource:
        entry = self._manifest.shards[shard]
        expected = Expected(entry.size_bytes, entry.crc32c)
        sources = [Source(node, expected, partial(self._shard_at, shard, node)) for node in self._nodes_by_shard[shard]]
        # The oldest first: shards are read in one order, so the oldest is not needed again.
        while len(self._open) >= OPEN_SHARDS_MAX:
            self._open.pop(next(iter(self._open))).close()
        self._open[shard] = AnySource(sources, partial(self._note, shard), self.findings.is_silent, self._rebuilt)
        return self._open[shard]

    def _shard_at(self, shard: str, node: str, expected: Expected) -> VerifiedShard:
        survey, save = self._survey, self._survey.found
        if survey.unmanaged_warning:
            return self._stock_shard_at(shard, node, expected)
        if node == self._own_node:
            open_file = partial(self._store.open_file, save.checkpoint_id, save.save_id, shard)
            return ShardFile(open_file, f"node {node} at {self._store.root}", f"{save.checkpoint_id}/{shard}", expected)
        if node == OBJECT_NODE and self._bucket is not None and survey.in_bucket is not None:
            key = f"{save.checkpoint_id}/{survey.in_bucket.prefix}{shard}"
            if survey.in_bucket.is_unmanaged:
                return UnmanagedObjectShard(self._bucket, key, expected, self._unchecked_items(shard, node))
            return ObjectShard(self._bucket, key, expected)
        # The node's agent was silent: the survey has the holdings that its ranks posted, but no address.
        if node not in self._address_by_node:
            raise StoreUnavailable(f"node {node}", "open", shard, "only its own ranks can read its store", _NO_AGENT)
        client = AgentClient(self._address_by_node[node])
        is_preferred = partial(self._is_preferred, shard, node)
        return PeerShard(client, save.checkpoint_id, save.save_id, shard, expected, is_preferred)

    def _is_preferred(self, shard: str, node: str) -> bool:
        """Whether a slow read from the node should end early, because another node has the shard."""
        return len(self._nodes_by_shard[shard]) > 1 and not self.findings.is_silent(node)

    def _stock_shard_at(self, shard: str, node: str, expected: Expected) -> VerifiedShard:
        checkpoint_id, items = self._survey.found.checkpoint_id, self._unchecked_items(shard, node)
        if node == self._own_node:
            return UnmanagedFileShard(UnmanagedDirectory(self._store.root), checkpoint_id, shard, expected, items)
        return UnmanagedPeerShard(AgentClient(self._address_by_node[node]), checkpoint_id, shard, expected, items)

    def _unchecked_items(self, shard: str, node: str) -> UncheckedItems:
        """The items of this copy that were not checked yet. All siblings share them, so each item is checked once."""
        key = shard, node
        if key not in self._unchecked:
            # setdefault: siblings run in threads of their own.
            self._unchecked.setdefault(key, UncheckedItems(self._places.get(shard, ())))
        return self._unchecked[key]

    def _note(self, shard: str, node: str, error: ReplicatedCkptError) -> None:
        is_ours = not self._survey.unmanaged_warning  # a stock shard has no checksum by which to mend it
        if self.findings.record_finding(
            shard, node, error, is_suspect=is_ours and isinstance(error, ObjectCorrupt | ObjectMissing)
        ):
            how = "comes last" if isinstance(error.__cause__, TooSlow) else "is not used"
            log.warning("%s of %s on node %s %s: %s", shard, self._manifest.checkpoint_id, node, how, error)

    def report_suspects(self) -> None:
        """Has the agents of nodes with bad copies read these again, and repair them.

        A node that is silent, or stops answering, is skipped from then on, so all together cost one time-out.
        """
        save, shards_by_node = self._survey.found, dict[str, list[str]]()
        # `findings` omit this node even if its agent is silent, because its disk is read without the agent.
        silent = {*self.findings.silent, *self._survey.silent}

        def find_why(shard: str) -> str:
            return "; ".join(self.findings.failures(shard))

        for node, shard in self.findings.suspects():
            if node in silent:
                continue
            if node in self._address_by_node:
                shards_by_node.setdefault(node, []).append(shard)
            elif node == self._own_node:  # a load without a process group has no own address
                note_own_suspect(self._store, save, shard, find_why(shard))

        def report(node: str) -> bool:
            at, shards = self._address_by_node[node], shards_by_node[node]
            return all(report_suspect(at, save.checkpoint_id, save.save_id, one, find_why(one)) for one in shards)

        FanOut.run(shards_by_node, report)

    def close(self) -> None:
        for source in self._open.values():
            source.close()
        self._open.clear()
