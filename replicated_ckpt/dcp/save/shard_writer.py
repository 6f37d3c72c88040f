"""Writes a rank's shards to its node's store and the buddies, or submits them to the node's agent."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from replicated_ckpt import failpoints
from replicated_ckpt.config import Ack
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.parts import Part
from replicated_ckpt.core.rank_report import Span
from replicated_ckpt.dcp.agreement.decision import SaveDecision, ShardReceipt
from replicated_ckpt.dcp.planning.cached_plan import planned_bytes
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.save.replicas import Items, find_helped, is_copied
from replicated_ckpt.dcp.save.shard_files import UnchangedEntries, UnchangedFile
from replicated_ckpt.dcp.save.submission import Follower, ShardLayout, TooMuchElsewhere, submit
from replicated_ckpt.dcp.staging.segment import descriptor_of
from replicated_ckpt.dcp.tensors.item_writer import ItemWriter, Stream
from replicated_ckpt.errors import StoreDenied, StoreUnavailable
from replicated_ckpt.node.saves.shard_copies import (
    CopiesUnderWay,
    WantedCopies,
    begin_copies,
    link_copies,
)
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.files.durable import flush_later
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.tee import Buffers
from replicated_ckpt.stores.threads import start_worker

log = logging.getLogger(__name__)

_LARGE_BYTES = 64 << 10


@dataclass
class WrittenShard:
    """One shard: its receipt, DCP's results for its items, the copies that could not be made, seconds by phase and spans.

    With a `follower`, the agent writes the shard, and the receipt has only the name.
    """

    receipt: ShardReceipt
    results: list[WriteResult]
    missed: list[str] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    follower: Follower | None = None

    def wait(self) -> None:
        """As in `ShardUnderWay`."""

    def end(self) -> "WrittenShard":
        """As in `ShardUnderWay`."""
        return self


@dataclass(frozen=True)
class ShardUnderWay:
    """A shard that is being written and sent, and DCP's results for its items."""

    copies: CopiesUnderWay
    results: list[WriteResult]

    def wait(self) -> None:
        """When this returns, the state is no longer read, whether or not the shard was written."""
        self.copies.wait()

    def end(self) -> WrittenShard:
        """Waits until the shard is durable in the node's own store. Raises as `begin_shard`."""
        found = self.copies.end()
        receipt = ShardReceipt(found.name, found.size_bytes, found.crc32c, found.holders)
        return WrittenShard(receipt, self.results, list(found.missed), dict(found.phases), list(found.spans))


class ShardWriter:
    """Writes shards of one rank. Reuses its buffers from save to save. One save at a time."""

    def __init__(self, store: LocalStore, direct_io: str, ack: Ack = "peer", *, links: bool = False) -> None:
        """`links`: put unchanged entries into a file of their own, which is linked from save to save."""
        self._store = store
        self._direct_io = direct_io
        self._ack = ack
        self._buffers: Buffers | None = None
        self._items = ItemWriter()
        self._has_warned = False
        self.unchanged = UnchangedEntries() if links else None

    def write_unchanged(self, items: Items, planner: SavePlanner, decision: SaveDecision, rank: int) -> WrittenShard:
        """Links the last save's file of these items here and at the buddies, or writes them as `begin_shard`.

        Raises as `begin_shard`.
        """
        unchanged, began = self.unchanged, time.monotonic()
        assert unchanged is not None, "without it no item counts as unchanged"
        hashes = unchanged.hash_items(self._items, items, planner)
        hashed_s, file, found = time.monotonic() - began, unchanged.file, None
        wanted = self._choose_places(decision, rank, Part.UNCHANGED)
        if file is not None and file.has(items, hashes):
            found = link_copies(self._store, wanted, file.source)
        if file is None or found is None:
            written = self._begin(items, planner, wanted).end()
        else:
            receipt = ShardReceipt(found.name, found.size_bytes, found.crc32c, found.holders, is_linked=True)
            phases, spans = dict(found.phases), list(found.spans)
            written = WrittenShard(receipt, file.results_in(found.name), phases=phases, spans=spans)
        written.spans.append(Span("serialise", began, began + hashed_s, hashed_s))
        written.phases["serialise"] = written.phases.get("serialise", 0.0) + hashed_s
        unchanged.note_written(UnchangedFile(written.receipt, written.results, hashes))
        return written

    def begin_shard(
        self, items: Items, part: Part, planner: SavePlanner, decision: SaveDecision, rank: int
    ) -> ShardUnderWay:
        """Writes the items of one part as one shard. It does not wait for disks and buddies: `end` of the result does.

        A buddy that fails is replaced by another node, or listed in `missed` if no node can take the copy.

        Raises:
            SaveAborted: the save was aborted elsewhere. StoreError: this node's store failed. And any error of the
                planner.
        """
        return self._begin(items, planner, self._choose_places(decision, rank, part), self.unchanged)

    def _begin(
        self, items: Items, planner: SavePlanner, wanted: WantedCopies, unchanged: UnchangedEntries | None = None
    ) -> ShardUnderWay:
        results: list[WriteResult] = []
        self._buffers = self._buffers or Buffers()
        lay_out = partial(self._lay_out, items, planner, wanted.name, results, unchanged=unchanged)
        return ShardUnderWay(begin_copies(self._store, wanted, self._buffers, lay_out), results)

    def write_copy(
        self, items: Items, part: Part, planner: SavePlanner, decision: SaveDecision, owner: int, rank: int
    ) -> ShardReceipt:
        """Writes a copy of a shard of the rank `owner` into this node's own store, from this rank's own values.

        With ack="peer-memory" the fsync follows later. Raises as `begin_shard`.
        """
        wanted = self._choose_place_of_copy(decision, owner, rank, part)
        wanted = replace(wanted, own_durable=self._ack != "peer-memory")
        written = self._begin(items, planner, wanted).end()
        if not wanted.own_durable:
            flush = flush_later(self._store.path_of_staged(wanted.save_id, wanted.name))
            start_worker(_flush, flush, wanted.name, name="replicated-ckpt-flush")
        failpoints.reach("rank.helped")
        return written.receipt

    def submit_copy(
        self,
        items: Items,
        part: Part,
        planner: SavePlanner,
        decision: SaveDecision,
        owner: int,
        rank: int,
        staged: memoryview,
        start_agent: Callable[[], object],
    ) -> WrittenShard | None:
        """As `write_copy`, but this node's agent writes, from the memory `staged`. None: this rank must write the copy."""
        wanted = self._choose_place_of_copy(decision, owner, rank, part)
        return self._submit(items, planner, wanted, staged, start_agent)

    def submit(
        self,
        items: Items,
        part: Part,
        planner: SavePlanner,
        decision: SaveDecision,
        rank: int,
        staged: memoryview,
        start_agent: Callable[[], object],
    ) -> WrittenShard | None:
        """Submits the shard of one part, whose items lie in the memory `staged`, to this node's agent.

        When this returns, the agent has accepted the shard. Returns None if this rank must write the shard itself: no agent
        accepts it, the node's agent is another user's, or too much of the shard lies outside `staged`.

        Raises:
            SaveAborted: the save was aborted elsewhere. And any error of the planner.
        """
        wanted = self._choose_places(decision, rank, part)
        return self._submit(items, planner, wanted, staged, start_agent, self.unchanged)

    def _submit(
        self,
        items: Items,
        planner: SavePlanner,
        wanted: WantedCopies,
        staged: memoryview,
        start_agent: Callable[[], object],
        unchanged: UnchangedEntries | None = None,
    ) -> WrittenShard | None:
        results: list[WriteResult] = []
        try:
            layout = ShardLayout(staged)
            try:
                self._lay_out(items, planner, wanted.name, results, layout, unchanged=unchanged)
                layout.finish_layout()
                failpoints.reach("rank.handing-over")
                shard = SubmittedShard(wanted, layout.pieces)
                submitted = submit(self._store, shard, [descriptor_of(staged), layout.between], staged)
            # The layout owns a memfd: without this each refused submission would leak its memory.
            except BaseException:
                layout.close()
                raise
        # Submitting only saves time: without an agent the save must still succeed.
        except (StoreUnavailable, StoreDenied, TooMuchElsewhere) as exc:
            if not self._has_warned:
                log.warning("this rank writes its shards itself: %s", exc.message)
            self._has_warned = True
            return None
        follower = Follower(self._store, shard, layout, staged, start_agent, submitted)
        failpoints.reach("rank.submitted")
        return WrittenShard(ShardReceipt(wanted.name, 0, 0, ()), results, follower=follower)

    def _choose_places(self, decision: SaveDecision, rank: int, part: Part) -> WantedCopies:
        """The places of this rank's shard. With "local", only its own node: buddies fetch their copies afterwards."""
        own, name = decision.node_of(rank).node_id, _name_of(decision, rank, part)
        placed = decision.buddies_of(own) if self._ack != "local" else ()
        # Nothing is sent to a buddy where a helper writes the copy.
        helped = find_helped(decision, rank) if is_copied(name) else ()
        buddies = [node for node in placed if node not in helped]
        spares = [node for node in decision.holders_for(own) if node not in placed]
        return WantedCopies(
            decision.save_id,
            name,
            own,
            tuple(map(decision.address_of, buddies)),
            tuple(map(decision.address_of, spares)),
            durable=self._ack != "peer-memory",
            direct_io=self._direct_io,
        )

    def _choose_place_of_copy(self, decision: SaveDecision, owner: int, rank: int, part: Part) -> WantedCopies:
        """The place of a helper's copy of a shard of the rank `owner`: only this node's store."""
        name = _name_of(decision, owner, part)
        return WantedCopies(decision.save_id, name, decision.node_of(rank).node_id, direct_io=self._direct_io)

    def _lay_out(
        self,
        items: Items,
        planner: SavePlanner,
        name: str,
        results: list[WriteResult],
        stream: Stream,
        *,
        unchanged: UnchangedEntries | None = None,
    ) -> None:
        """Writes the items to the stream. `unchanged` compares samples of the large items with those of the last save."""
        write_item = self._items.write_item
        write_large = write_item if unchanged is None else partial(unchanged.write_sampled, self._items)
        for group, write in zip(_split_by_size(items), (write_item, write_large), strict=True):
            for item in group:
                offset, length = write(stream, item, planner)
                failpoints.reach("rank.writing")
                info = StorageInfo(name, offset, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))


def _flush(flush: Callable[[], None], shard: str) -> None:
    try:
        flush()
    except OSError as exc:
        log.warning("the copy of %s may not be durable on this node, as its fsync failed: %s", shard, exc)


def _name_of(decision: SaveDecision, rank: int, part: Part) -> str:
    return str(ShardName(rank, decision.file_number + part))


def sort_for_shard(items: Items) -> list[WriteItem]:
    """Puts small items first, so that scalars and objects, which all ranks read, lie in few blocks.

    Otherwise each rank would read a whole block for the step count that an optimizer has for each parameter.
    """
    small, large = _split_by_size(items)
    return small + large


def _split_by_size(items: Items) -> tuple[list[WriteItem], list[WriteItem]]:
    small: list[WriteItem] = []
    large: list[WriteItem] = []
    for item in items:
        (large if planned_bytes(item) >= _LARGE_BYTES else small).append(item)
    return small, large
