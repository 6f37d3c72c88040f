"""The copies of one shard, in the node's own store and at the buddies.

They are written in one pass, or linked to existing files. Failed copies are sent once more.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Self

from replicated_ckpt.core.integrity.checksum import BlockTable
from replicated_ckpt.core.layout import ShardName, is_save_id
from replicated_ckpt.core.rank_report import Span
from replicated_ckpt.errors import ReplicatedCkptError, SaveAborted
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.files.durable import read_exactly, translate_errors
from replicated_ckpt.stores.files.existence import closing_fd
from replicated_ckpt.stores.local.shard_file import CommittedShard, FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.recycled import RecycledFiles, RoomOfRecycled
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import PeerSink
from replicated_ckpt.stores.peer.reach import is_time_out
from replicated_ckpt.stores.tee import BUFFER_BYTES, Buffers, Outcome, Sink, Tee
from replicated_ckpt.stores.threads import FanOut

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WantedCopies:
    """A shard of an open save, and the places of its copies: the store of node `own`, and `buddies`.

    `spares`: replacements for failed buddies, in order. `durable`: a buddy acknowledges after its fsync. `own_durable`: the
    node's own file is fsynced; else the caller has it fsynced afterwards.
    """

    save_id: str
    name: str
    own: str
    buddies: tuple[AgentAddress, ...] = ()
    spares: tuple[AgentAddress, ...] = ()
    durable: bool = True
    direct_io: str = "off"
    own_durable: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError, TypeError: the fields are invalid."""
        save_id, name = str(fields["save_id"]), str(fields["name"])
        # Both become parts of a path.
        if not is_save_id(save_id) or ShardName.parse(name) is None:
            raise ValueError(f"{save_id[:80]!r} and {name[:80]!r} are not a save id and the name of a shard")
        buddies, spares = (tuple(map(AgentAddress.from_json, fields[part])) for part in ("buddies", "spares"))
        durable, own_durable = bool(fields["durable"]), bool(fields["own_durable"])
        return cls(save_id, name, str(fields["own"]), buddies, spares, durable, str(fields["direct_io"]), own_durable)


@dataclass(frozen=True)
class WrittenCopies:
    """The copies of one shard. `holders`: nodes that acknowledged one, this one first. `missed`: failed copies, in words.

    `phases`: seconds by phase. `spans`: the times of the phases, by this host's monotonic clock.
    """

    name: str
    size_bytes: int
    crc32c: int
    holders: tuple[str, ...]
    missed: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(replace(self, spans=())), "spans": [span.to_json() for span in self.spans]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError, TypeError: the fields are invalid."""
        return cls(
            str(fields["name"]),
            int(fields["size_bytes"]),
            int(fields["crc32c"]),
            tuple(map(str, fields["holders"])),
            tuple(map(str, fields["missed"])),
            {str(name): float(spent) for name, spent in fields["phases"].items()},
            tuple(map(Span.from_json, fields.get("spans", ()))),
        )


def write_copies(
    store: LocalStore,
    wanted: WantedCopies,
    buffers: Buffers,
    fill: Callable[[Tee], object],
    *,
    is_behind: bool = False,
) -> WrittenCopies:
    """Writes the output of `fill` as one shard. It is durable in the node's own store when this returns.

    `is_behind`: no training waits for the shard, so the buddies' agents may give other work precedence. A buddy that
    fails is replaced by a spare, or, if no node can take the copy, listed in `missed`.

    Raises:
        SaveAborted: the save was aborted elsewhere. StoreError: the node's own store failed. And any error of `fill`.
    """
    return begin_copies(store, wanted, buffers, fill, is_behind=is_behind).end()


def begin_copies(
    store: LocalStore,
    wanted: WantedCopies,
    buffers: Buffers,
    fill: Callable[[Tee], object],
    *,
    is_behind: bool = False,
) -> "CopiesUnderWay":
    """As `write_copies`, but returns once `fill` has returned: the next shard is filled while this one becomes durable."""
    path, is_durable = store.path_of_staged(wanted.save_id, wanted.name), wanted.own_durable
    # Without an fsync a power loss could leave the old bytes of a recycled file. Direct I/O would wait for the disk.
    pool = (RecycledFiles if is_durable else RoomOfRecycled)(store.root)
    own_file = FileSink.create(path, wanted.direct_io if is_durable else "off", pool)
    own_file.is_durable = is_durable
    sinks: list[Sink] = [own_file]
    sinks += [_sink_at(address, wanted, is_behind=is_behind) for address in wanted.buddies]
    tee = Tee(sinks, buffers, copies=own_file.is_direct)
    began = time.monotonic()
    try:
        fill(tee)
        filled = time.monotonic()
        serialise = Span("serialise", began, filled, filled - began - tee.waited_s)
        table = tee.end()
    except BaseException:
        tee.discard()
        raise
    return CopiesUnderWay(store, wanted, table, tee, serialise)


@dataclass(frozen=True)
class CopiesUnderWay:
    """The copies of a shard that are being written and sent. One thread must call `end` or `wait`, once."""

    store: LocalStore
    wanted: WantedCopies
    table: BlockTable
    tee: Tee
    serialise: Span

    def wait(self) -> None:
        """Waits until the shard's source is no longer read, whether or not the copies were made."""
        self.tee.join()

    def end(self) -> WrittenCopies:
        """Waits for the copies, and replaces those that failed. Raises as `write_copies`."""
        wanted, table, outcomes = self.wanted, self.table, self.tee.join()
        # Failed copies are made again from this node's own file: without it there is nothing to send.
        if outcomes[0].error is not None:
            raise outcomes[0].error
        began = time.monotonic()
        holders, missed = _make_up(self.store, wanted, table, outcomes[1:])
        own, made_up = outcomes[0], time.monotonic() - began
        phases = {"serialise": self.serialise.busy_s, "write": own.write_s, "fsync": own.finish_s}
        phases["send"] = max((sent.write_s + sent.finish_s for sent in outcomes[1:]), default=0.0)
        if wanted.buddies:
            phases["send"] += made_up
        spans = (
            self.serialise,
            Span("write", own.began_s, own.written_s, own.write_s),
            Span("fsync", own.written_s, own.ended_s, own.finish_s),
            *(
                Span("send", sent.began_s, sent.ended_s, sent.write_s + sent.finish_s, buddy.node_id)
                for buddy, sent in zip(wanted.buddies, outcomes[1:], strict=True)
            ),
        )
        all_holders, size, crc = (wanted.own, *holders), table.file_bytes, table.file_crc()
        return WrittenCopies(wanted.name, size, crc, all_holders, tuple(missed), phases, spans)


def _make_up(
    store: LocalStore, wanted: WantedCopies, table: BlockTable, outcomes: Sequence[Outcome]
) -> tuple[list[str], list[str]]:
    """Sends each failed copy once more, then to spares. Returns the nodes that hold a copy, and the copies that failed.

    A node that timed out is not tried again for this shard.
    """
    ended = list(zip(wanted.buddies, outcomes, strict=True))
    holders = [buddy.node_id for buddy, outcome in ended if outcome.error is None]
    failed = [(buddy, outcome.error) for buddy, outcome in ended if outcome.error]
    missed, spares = [], list(wanted.spares)
    # Each further try would hold the save up by one more time-out.
    silent = {buddy.node_id for buddy, error in failed if is_time_out(error)}
    for buddy, error in failed:
        if isinstance(error, SaveAborted) or not isinstance(error, ReplicatedCkptError):  # a defect
            raise error
        log.warning("copy of %s to node %s failed: %s", wanted.name, buddy.node_id, error)
        for candidate in (other for other in (buddy, *spares) if other.node_id not in silent):
            again = _copy(store, wanted, table, candidate)
            if again is None:
                holders.append(candidate.node_id)
                # Two failed copies on one spare would be one copy.
                spares = [other for other in spares if other != candidate]
                break
            log.warning("copy of %s to node %s failed: %s", wanted.name, candidate.node_id, again)
            if is_time_out(again):
                silent.add(candidate.node_id)
        else:
            missed.append(f"no copy of {wanted.name} was made on node {buddy.node_id}: {error}")
    return holders, missed


def _copy(
    store: LocalStore, wanted: WantedCopies, table: BlockTable, address: AgentAddress
) -> ReplicatedCkptError | None:
    """Copies a shard from the node's own store to one more node; returns the error, if any."""
    path = store.path_of_staged(wanted.save_id, wanted.name)
    sink = _sink_at(address, wanted)
    piece = memoryview(bytearray(BUFFER_BYTES))
    try:
        with translate_errors(str(path.parent), "read", wanted.name):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with closing_fd(fd):
            for offset in range(0, table.file_bytes, len(piece)):
                count = read_exactly(fd, piece, offset)
                sink.write(piece[:count])
            sink.finish(table)
    except ReplicatedCkptError as exc:
        sink.discard()
        return exc
    return None


def _sink_at(address: AgentAddress, wanted: WantedCopies, *, is_behind: bool = False) -> PeerSink:
    return PeerSink(address, wanted.save_id, wanted.name, durable=wanted.durable, is_behind=is_behind)


def link_copies(store: LocalStore, wanted: WantedCopies, source: CommittedShard) -> WrittenCopies | None:
    """Links a committed shard as the wanted one, in the node's own store and at all its buddies.

    None: some node cannot link it. Then the shard must be written, with the same bytes, on every node. Links that were
    already made count as written files, or are replaced by them.

    Raises:
        SaveAborted: the save was aborted elsewhere.
    """
    began = time.monotonic()
    try:
        is_bad = DamageBook(store).has_file
        store.link_staged(wanted.save_id, wanted.name, source, is_bad, durable=True)
        FanOut.run(wanted.buddies, partial(_link_at, wanted=wanted, source=source)).raise_first()
    except SaveAborted:
        raise
    except ReplicatedCkptError as exc:
        log.info("%s is written anew, as it cannot be linked everywhere: %s", wanted.name, exc)
        return None
    ended = time.monotonic()
    written = Span("write", began, ended, ended - began)
    holders = (wanted.own, *(buddy.node_id for buddy in wanted.buddies))
    phases = {"write": written.busy_s}
    return WrittenCopies(wanted.name, source.size_bytes, source.crc32c, holders, phases=phases, spans=(written,))


def _link_at(buddy: AgentAddress, *, wanted: WantedCopies, source: CommittedShard) -> None:
    with AgentClient(buddy) as client:
        body = {"source": source.to_json(), "durable": wanted.durable}
        client.call("POST", f"/v1/saves/{wanted.save_id}/{wanted.name}/link", body)
