"""The audit: every node reads everything that it holds; what is wrong, and the plan that would mend it. Changes nothing."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from replicated_ckpt.agent.manifests import ManifestBook
from replicated_ckpt.agent.peers import PeerBook
from replicated_ckpt.core.finding import Finding
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.repair import NodeView, Presence, RepairPlan, planned
from replicated_ckpt.errors import PeerProtocolError
from replicated_ckpt.stores.agent_client import AgentAddress, AgentClient
from replicated_ckpt.stores.fanout import FanOut
from replicated_ckpt.stores.inspection import Inspector
from replicated_ckpt.stores.local import LocalStore


@dataclass(frozen=True)
class NodeReading:
    """What one node found when it read its store in full."""

    node_id: str
    findings: tuple[Finding, ...]
    holdings: tuple[Holding, ...]
    bytes_read: int

    @property
    def unbelieved(self) -> tuple[str, ...]:
        """Checkpoints without a manifest that is believed."""
        return tuple(finding.checkpoint_id for finding in self.findings if not finding.save_id)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], label: str) -> "NodeReading":
        """What an agent answered.

        Raises:
            PeerProtocolError: it is no such answer.
        """
        try:
            findings = tuple(Finding.from_json(finding) for finding in fields["findings"])
            holdings = tuple(Holding.from_json(holding) for holding in fields["holdings"])
            return cls(str(fields["node_id"]), findings, holdings, index(fields["bytes_read"]))
        except (KeyError, TypeError, ValueError) as exc:
            raise PeerProtocolError(f"{label} answered verify wrongly: {type(exc).__name__}: {exc}.") from exc


@dataclass(frozen=True)
class Audit:
    """What all nodes found. `unreachable` says in words who was not reached: their copies are neither counted nor lost."""

    readings: tuple[NodeReading, ...]
    unreachable: tuple[str, ...]
    plan: RepairPlan

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for reading in self.readings for finding in reading.findings)

    @property
    def checkpoint_ids(self) -> tuple[str, ...]:
        held = {holding.checkpoint_id for reading in self.readings for holding in reading.holdings}
        return tuple(sorted(held | {finding.checkpoint_id for finding in self.findings}))

    @property
    def is_intact(self) -> bool:
        """Whether every file is as it was saved and every shard has its number of copies."""
        return not self.findings and not self.plan.copy and not self.plan.short


class Auditor:
    """Reads this node's store in this process and has the agents of the others read theirs, all at once."""

    def __init__(self, store: LocalStore, lost: Collection[str] = ()) -> None:
        self._store = store
        self._node_id = store.known_node_id()
        self._lost = frozenset(lost)
        self._peers = PeerBook(store.root_agent_directory())

    def audited(self, checkpoint_id: str | None = None) -> Audit:
        """Audit of one checkpoint, or of all. `lost` nodes count for nothing, other silent ones hold what they should.

        Raises:
            StoreError: the own store cannot be read.
        """
        addresses = {peer.node_id: peer for peer in self._peers.known() if peer.node_id not in self._lost}

        def read(node: str) -> NodeReading:
            if node == self._node_id:
                return self._own_reading(checkpoint_id)
            return _asked(addresses[node], checkpoint_id)

        outcome = FanOut[str, NodeReading]().run([self._node_id, *addresses], read)
        if self._node_id in outcome.errors:
            raise outcome.errors[self._node_id]
        readings = tuple(outcome.results[node] for node in sorted(outcome.results))
        silent = tuple(f"{addresses[node].label}: {error.message}" for node, error in sorted(outcome.errors.items()))
        return Audit(readings, silent, self._plan(readings, [addresses[node] for node in sorted(outcome.errors)]))

    def _own_reading(self, checkpoint_id: str | None) -> NodeReading:
        inspector = Inspector(self._store, self._node_id)
        findings = tuple(inspector.inspected(checkpoint_id))
        return NodeReading(self._node_id, findings, tuple(inspector.holdings), inspector.bytes_read)

    def _plan(self, readings: Sequence[NodeReading], silent: Sequence[AgentAddress]) -> RepairPlan:
        domains = {peer.node_id: peer.domain for peer in self._peers.known()}
        views = [
            NodeView(found.node_id, Presence.UP, found.holdings, domains.get(found.node_id), found.unbelieved)
            for found in readings
        ]
        views += [NodeView(peer.node_id, Presence.ASSUMED, None, peer.domain) for peer in silent]
        manifests = ManifestBook(self._store, self._node_id, self._peers).of(views)
        return planned(manifests, views)


def _asked(address: AgentAddress, checkpoint_id: str | None) -> NodeReading:
    document = {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id}
    with AgentClient(address) as client:
        return NodeReading.from_json(client.call("POST", "/v1/verify", document), address.label)
