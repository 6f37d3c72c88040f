"""Finds and audits checkpoints that FileSystemWriter wrote on any node. Changes nothing."""

import logging
import urllib.parse
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.core.reading.unmanaged_files import (
    UnmanagedCheckpoint,
    UnmanagedHolding,
    UnmanagedSave,
    item_ranges,
    needed_bytes,
    ranges_to_json,
    unmanaged_checkpoints,
)
from replicated_ckpt.core.reading.windows import ByteRange
from replicated_ckpt.core.upkeep.repair_plan import Finding
from replicated_ckpt.errors import (
    CheckpointAmbiguous,
    MetadataUnsafe,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    StoreError,
)
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unmanaged import UnmanagedDirectory, UnmanagedInspector
from replicated_ckpt.stores.peer.answer import parsing, unmanaged_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut

log = logging.getLogger(__name__)

LOOK_TIMEOUT_S = 10.0
"""Longer than for other holdings: the first look reads the beginning and the end of every file."""


@dataclass(frozen=True)
class UnmanagedFound:
    """A checkpoint whose `.metadata` was read: its shards, and the places of its items."""

    save: UnmanagedSave
    metadata: bytes = field(repr=False)
    ranges: Mapping[str, tuple[ByteRange, ...]] = field(repr=False)


class UnmanagedLook:
    """Reads this node's store directly, and the others through their agents. `unreached`: the nodes that did not answer."""

    def __init__(self, store: LocalStore, own_node: str, peers: Iterable[AgentAddress]) -> None:
        self._unmanaged = UnmanagedDirectory(store.root)
        self._own_node = own_node
        self._by_node = {peer.node_id: peer for peer in peers if peer.node_id != own_node}
        self.unreached: dict[str, ReplicatedCkptError] = {}

    def checkpoints(
        self, checkpoint_id: str | None = None, without: Iterable[str] = ()
    ) -> tuple[UnmanagedCheckpoint, ...]:
        """One checkpoint, or all, newest first. `without`: ids to leave out, because a node has a manifest of them."""
        path = unmanaged_listing_path(checkpoint_id)

        def ask(node: str) -> list[UnmanagedHolding]:
            with AgentClient(self._by_node[node], LOOK_TIMEOUT_S) as client:
                answer = client.call("GET", path)
            with parsing(f"{self._by_node[node].label} sent an invalid list of its files"):
                found = [UnmanagedHolding.from_json(fields) for fields in answer["unmanaged"]]
            # A node may report only its own files.
            return [holding for holding in found if holding.node_id == node]

        outcome = FanOut.run(self._by_node, ask)
        self.unreached = dict(outcome.errors)
        own = list(self._unmanaged.holdings(self._own_node, checkpoint_id))
        there = [holding for node in sorted(outcome.results) for holding in outcome.results[node]]
        return unmanaged_checkpoints([*own, *there], without)

    def examine(self, checkpoint: UnmanagedCheckpoint) -> UnmanagedFound:
        """Reads the `.metadata` of a checkpoint from a node that has it.

        Raises:
            CheckpointAmbiguous: nodes contradict each other. MetadataUnsafe: `.metadata` is not as DCP writes it.
            ObjectMissing: no node returned it.
        """
        metadata = self.metadata(checkpoint)
        ranges = item_ranges(metadata)
        return UnmanagedFound(checkpoint.save(needed_bytes(ranges)), metadata, ranges)

    def metadata(self, checkpoint: UnmanagedCheckpoint) -> bytes:
        """The bytes of `.metadata`, from the first node that returns it. Raises as `examine`."""
        file = checkpoint.metadata()
        last: ReplicatedCkptError = ObjectMissing("the nodes", "read", f"{checkpoint.checkpoint_id}/{METADATA_NAME}")
        # This node's own copy first: it costs no request.
        for node in sorted(checkpoint.nodes_with_metadata, key=lambda each: each != self._own_node):
            try:
                return self._metadata_at(node, checkpoint.checkpoint_id, file.size_bytes)
            except ReplicatedCkptError as exc:
                log.warning("metadata of %s on node %s: %s", checkpoint.checkpoint_id, node, exc)
                last = exc
        raise last

    def _metadata_at(self, node: str, checkpoint_id: str, size_bytes: int) -> bytes:
        if node == self._own_node:
            return self._unmanaged.read_raw(checkpoint_id, METADATA_NAME, size_bytes)
        with AgentClient(self._by_node[node], LOOK_TIMEOUT_S) as client:
            return client.fetch_file(unmanaged_path(checkpoint_id, METADATA_NAME, size_bytes), size_bytes)


def unmanaged_listing_path(checkpoint_id: str | None) -> str:
    return "/v1/unmanaged" if checkpoint_id is None else f"/v1/unmanaged?{_query(checkpoint_id)}"


def unmanaged_verify_path(checkpoint_id: str) -> str:
    return f"/v1/unmanaged/verify?{_query(checkpoint_id)}"


def _query(checkpoint_id: str) -> str:
    return urllib.parse.urlencode({"checkpoint_id": checkpoint_id})


@dataclass(frozen=True)
class _Reading:
    """One node's result for the shards of one checkpoint."""

    findings: tuple[Finding, ...]
    bytes_read: int
    unchecked: int


@dataclass(frozen=True)
class UnmanagedAudit:
    """The audit of one checkpoint of stock torch. `problem` is the reason why it cannot be audited, and "" if it was.

    `unchecked` counts items without a CRC32 of their own.
    """

    checkpoint_id: str
    node_ids: tuple[str, ...]
    problem: str = ""
    found: UnmanagedFound | None = field(default=None, repr=False)
    findings: tuple[Finding, ...] = ()
    bytes_read: int = 0
    unchecked: int = 0

    @property
    def missing(self) -> tuple[str, ...]:
        return () if self.found is None else self.found.save.missing

    @property
    def is_sound(self) -> bool:
        return not (self.problem or self.missing or self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint_id": self.checkpoint_id,
            "nodes": list(self.node_ids),
            "is_sound": self.is_sound,
            "problem": self.problem,
            "missing": list(self.missing),
            "findings": [finding.to_json() for finding in self.findings],
            "bytes_read": self.bytes_read,
            "items_without_crc32": self.unchecked,
        }


class UnmanagedAuditor:
    """Reads this node's store in this process, and lets the other nodes' agents read theirs. Changes nothing.

    `node_ids`: after an audit, the nodes that answered.
    """

    def __init__(self, store: LocalStore, not_asked: Collection[str] = (), peers: PeerBook | None = None) -> None:
        """`not_asked`: nodes that are lost, or did not answer a moment ago. `peers`: None: those of this node."""
        self._store = store
        self._node_id = store.read_node_id()
        known = (PeerBook(store.root_agent_directory()) if peers is None else peers).read_all()
        self._addresses = {peer.node_id: peer for peer in known if peer.node_id not in not_asked}
        self.node_ids: tuple[str, ...] = ()

    def audit(self, checkpoint_id: str | None = None, without: Iterable[str] = ()) -> tuple[UnmanagedAudit, ...]:
        """Audits one checkpoint, or all, newest first. `without`: as for `UnmanagedLook.checkpoints`."""
        look = UnmanagedLook(self._store, self._node_id, self._addresses.values())
        checkpoints = look.checkpoints(checkpoint_id, without)
        reached = {self._node_id, *self._addresses} - set(look.unreached)
        self.node_ids = tuple(sorted(reached))
        return tuple(self._of(look, checkpoint) for checkpoint in checkpoints)

    def _of(self, look: UnmanagedLook, checkpoint: UnmanagedCheckpoint) -> UnmanagedAudit:
        nodes = tuple(holding.node_id for holding in checkpoint.holdings)
        # Only `.metadata` lists the items of a shard: without it there is nothing to check.
        if not checkpoint.nodes_with_metadata:
            problem = "no node that was reached has its .metadata, which stock torch writes at the end on rank 0's node"
            return UnmanagedAudit(checkpoint.checkpoint_id, nodes, problem)
        try:
            found = look.examine(checkpoint)
        except (CheckpointAmbiguous, MetadataUnsafe, StoreError, PeerProtocolError) as exc:
            return UnmanagedAudit(checkpoint.checkpoint_id, nodes, exc.message)
        outcome = FanOut.run(nodes, lambda node: self._read(node, found))
        failed = "; ".join(f"node {node}: {error.message}" for node, error in sorted(outcome.errors.items()))
        readings = [outcome.results[node] for node in sorted(outcome.results)]
        return UnmanagedAudit(
            checkpoint.checkpoint_id,
            nodes,
            failed,
            # If a node could not be read, its shards must not count as missing.
            None if failed else found,
            tuple(finding for reading in readings for finding in reading.findings),
            sum(reading.bytes_read for reading in readings),
            sum(reading.unchecked for reading in readings),
        )

    def _read(self, node: str, found: UnmanagedFound) -> _Reading:
        if node == self._node_id:
            inspector = UnmanagedInspector(self._store, node)
            findings = tuple(inspector.inspect(found.save.checkpoint_id, found.ranges))
            return _Reading(findings, inspector.bytes_read, inspector.unchecked)
        shards = [shard for held in found.save.checkpoint.holdings if held.node_id == node for shard in held.shards]
        document = {"items": ranges_to_json(found.ranges, shards)}
        with AgentClient(self._addresses[node]) as client:
            answer = client.call("POST", unmanaged_verify_path(found.save.checkpoint_id), document)
        return _parse_reading(answer, self._addresses[node].label)


def _parse_reading(answer: Mapping[str, Any], label: str) -> _Reading:
    with parsing(f"{label} sent an invalid answer to verify"):
        findings = tuple(Finding.from_json(finding) for finding in answer["findings"])
        return _Reading(findings, index(answer["bytes_read"]), index(answer["unchecked"]))
