"""The audit of checkpoints by FileSystemWriter: every node reads its shards and holds them against what is in them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

from replicated_ckpt.agent.peers.address_book import PeerBook
from replicated_ckpt.agent.unmanaged.look import UnmanagedFound, UnmanagedLook, unmanaged_verify_path
from replicated_ckpt.core.unmanaged.metadata_places import ranges_to_json
from replicated_ckpt.core.unmanaged.survey import UnmanagedCheckpoint
from replicated_ckpt.core.upkeep.finding import Finding
from replicated_ckpt.errors import CheckpointAmbiguous, MetadataUnsafe, PeerProtocolError, StoreError
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentClient
from replicated_ckpt.stores.peer.fan_out import FanOut
from replicated_ckpt.stores.unmanaged.inspection import UnmanagedInspector


@dataclass(frozen=True)
class _Reading:
    """What one node found in the shards of one checkpoint."""

    findings: tuple[Finding, ...]
    bytes_read: int
    unchecked: int


@dataclass(frozen=True)
class UnmanagedAudit:
    """One checkpoint of stock torch. `problem` says in words why nothing can be made of it; empty: something can.

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
    """Reads this node's store in this process and has the agents of the others read theirs. Changes nothing.

    `node_ids` are afterwards the nodes that answered.
    """

    def __init__(self, store: LocalStore, unasked: Collection[str] = ()) -> None:
        """`unasked`: nodes that are lost, or did not answer a moment ago."""
        self._store = store
        self._node_id = store.read_node_id()
        known = PeerBook(store.root_agent_directory()).read_all()
        self._addresses = {peer.node_id: peer for peer in known if peer.node_id not in unasked}
        self.node_ids: tuple[str, ...] = ()

    def audit(self, checkpoint_id: str | None = None, without: Iterable[str] = ()) -> tuple[UnmanagedAudit, ...]:
        """Audit of one checkpoint, or of all, newest first; ids `without` have a manifest somewhere."""
        look = UnmanagedLook(self._store, self._node_id, self._addresses.values())
        checkpoints = look.checkpoints(checkpoint_id, without)
        reached = {self._node_id, *self._addresses} - set(look.unreached)
        self.node_ids = tuple(sorted(reached))
        return tuple(self._of(look, checkpoint) for checkpoint in checkpoints)

    def _of(self, look: UnmanagedLook, checkpoint: UnmanagedCheckpoint) -> UnmanagedAudit:
        nodes = tuple(holding.node_id for holding in checkpoint.holdings)
        if not checkpoint.nodes_with_metadata:
            problem = "no node that was reached has its .metadata: stock torch writes it on rank 0's node, at the end"
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
        return _reading(answer, self._addresses[node].label)


def _reading(answer: Mapping[str, Any], label: str) -> _Reading:
    with parsing(f"{label} answered verify wrongly"):
        findings = tuple(Finding.from_json(finding) for finding in answer["findings"])
        return _Reading(findings, index(answer["bytes_read"]), index(answer["unchecked"]))
