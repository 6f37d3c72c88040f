"""Writing this rank's shard: in one pass to the own store and to the buddies, then once more to whoever missed it."""

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from replicated_ckpt import failpoints
from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.save.decision import SaveDecision, ShardReceipt
from replicated_ckpt.dcp.tensors.item_writer import ItemWriter
from replicated_ckpt.errors import ReplicatedCkptError, SaveAborted
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.copy import PeerSink
from replicated_ckpt.stores.peer.deadline import is_time_out
from replicated_ckpt.stores.tee import BUFFER_BYTES, Buffers, Outcome, Sink, Tee

log = logging.getLogger(__name__)

_LARGE_BYTES = 64 << 10


@dataclass
class WrittenShard:
    """One shard: its receipt, DCP's results for its items, the copies that could not be made, and seconds by phase."""

    receipt: ShardReceipt
    results: list[WriteResult]
    missed: list[str] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)


class ShardWriter:
    """Writes shards of one rank. Reuses its buffers from save to save. One save at a time."""

    def __init__(self, store: LocalStore, direct_io: str) -> None:
        self._store = store
        self._direct_io = direct_io
        self._buffers: Buffers | None = None
        self._items = ItemWriter()

    def write(
        self,
        plan: SavePlan,
        planner: SavePlanner,
        decision: SaveDecision,
        rank: int,
        *,
        stream_to_peers: bool,
        durable: bool,
    ) -> WrittenShard:
        """Writes all items of the plan as one shard. It is durable in the own store when this returns.

        A buddy that fails is replaced by another node, or, if none can take the copy, listed in `missed`.

        Raises:
            SaveAborted: the save was given up elsewhere. StoreError: the own store failed. And whatever the planner raises.
        """
        if self._buffers is None:
            self._buffers = Buffers()
        name = str(ShardName(rank, 0))
        own = decision.node_of(rank).node_id
        buddies = decision.buddies_of(own) if stream_to_peers else ()
        path = self._store.path_of_staged(decision.save_id, name)
        own_file = FileSink(path, self._direct_io)
        sinks: list[Sink] = [own_file]
        sinks += [PeerSink(decision.address_of(node), decision.save_id, name, durable=durable) for node in buddies]
        tee = Tee(sinks, self._buffers, copies=own_file.is_direct)
        began = time.perf_counter()
        try:
            results = self._items_written(tee, plan, planner, name)
            phases = {"serialise": time.perf_counter() - began - tee.waited_s}
            table, outcomes = tee.finish()
        except BaseException:
            tee.discard()
            raise
        _raise_own(outcomes[0])
        began = time.perf_counter()
        holders, missed = self._make_up(name, table, buddies, outcomes[1:], decision, own, durable=durable)
        phases |= {"write": outcomes[0].write_s, "fsync": outcomes[0].finish_s}
        phases["send"] = max((sent.write_s + sent.finish_s for sent in outcomes[1:]), default=0.0)
        phases["send"] += time.perf_counter() - began
        receipt = ShardReceipt(name, table.file_bytes, table.file_crc(), (own, *holders))
        return WrittenShard(receipt, results, missed, phases)

    def _items_written(self, tee: Tee, plan: SavePlan, planner: SavePlanner, name: str) -> list[WriteResult]:
        results = []
        for item in sorted(plan.items, key=_is_large):
            offset, length = self._items.write(tee, item, planner)
            failpoints.reach("rank.writing")
            info = StorageInfo(name, offset, length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
        return results

    def _make_up(
        self,
        name: str,
        table: BlockTable,
        buddies: Sequence[str],
        outcomes: Sequence[Outcome],
        decision: SaveDecision,
        own: str,
        *,
        durable: bool,
    ) -> tuple[list[str], list[str]]:
        """Nodes that hold a copy, after each failed one was tried once more and then replaced; and what stays missed.

        A node that let a time-out pass is not asked again for this shard.
        """
        holders = [node for node, outcome in zip(buddies, outcomes, strict=True) if outcome.error is None]
        failed = [(node, outcome.error) for node, outcome in zip(buddies, outcomes, strict=True) if outcome.error]
        missed = []
        spare = [node for node in decision.holders_for(own) if node not in buddies]
        silent = {node for node, error in failed if is_time_out(error)}
        for node, error in failed:
            _raise_if_aborted_or_bug(error)
            log.warning("copy of %s to node %s failed: %s", name, node, error)
            for candidate in (other for other in (node, *spare) if other not in silent):
                again = self._copy(name, table, decision, candidate, durable=durable)
                if again is None:
                    holders.append(candidate)
                    spare = [other for other in spare if other != candidate]
                    break
                log.warning("copy of %s to node %s failed: %s", name, candidate, again)
                if is_time_out(again):
                    silent.add(candidate)
            else:
                missed.append(f"no copy of {name} was made on node {node}: {error}")
        return holders, missed

    def _copy(
        self, name: str, table: BlockTable, decision: SaveDecision, node: str, *, durable: bool
    ) -> ReplicatedCkptError | None:
        """Copies a shard that is complete in the own store to one more node; the error if that fails."""
        path = self._store.path_of_staged(decision.save_id, name)
        sink = PeerSink(decision.address_of(node), decision.save_id, name, durable=durable)
        piece = memoryview(bytearray(BUFFER_BYTES))
        try:
            with translate_errors(str(path.parent), "read", name):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for offset in range(0, table.file_bytes, len(piece)):
                    count = read_exactly(fd, piece, offset)
                    sink.write(piece[:count])
                sink.finish(table)
            finally:
                os.close(fd)
        except ReplicatedCkptError as exc:
            sink.discard()
            return exc
        return None


def _is_large(item: WriteItem) -> bool:
    """Small items come first, and so lie side by side: scalars and objects, which all ranks read, and whole blocks at that.

    An optimizer's step counts, one for each parameter, would else bring as many blocks of their neighbours along.
    """
    if item.tensor_data is None:
        return False
    elements = math.prod(item.tensor_data.chunk.sizes)
    return elements * item.tensor_data.properties.dtype.itemsize >= _LARGE_BYTES


def _raise_own(outcome: Outcome) -> None:
    if outcome.error is not None:
        raise outcome.error


def _raise_if_aborted_or_bug(error: BaseException | None) -> None:
    if error is not None and (isinstance(error, SaveAborted) or not isinstance(error, ReplicatedCkptError)):
        raise error
