"""The audit: every node reads all its files. Its result lists the damage, and the plan that repairs it. Changes nothing."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from replicated_ckpt.agent.state.endpoint import listening_endpoint
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.policy import NodeReport
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.repair_plan import Finding, Problem, RepairPlan, ShortShard
from replicated_ckpt.core.upkeep.retention import find_removed, find_retired
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.peers.manifests import ManifestBook
from replicated_ckpt.node.peers.watch import HOLDINGS_TIMEOUT_S, NodeHoldings, describe_silence, parse_node_holdings
from replicated_ckpt.node.state.mark_book import MarkBook
from replicated_ckpt.node.state.policies import PolicyBook
from replicated_ckpt.stores.local.inspection import Inspector
from replicated_ckpt.stores.local.store import EmptyStore, LocalStore
from replicated_ckpt.stores.local.versions.full_disk import measure_room
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeReading:
    """The result of one node's full read: what is damaged, and what the node holds.

    `silent`: the last known holdings of nodes that do not answer this node.
    """

    node_id: str
    findings: tuple[Finding, ...]
    held: NodeHoldings
    bytes_read: int
    silent: tuple[Holding, ...] = ()

    @property
    def silent_nodes(self) -> frozenset[str]:
        return frozenset(holding.node_id for holding in self.silent)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], address: AgentAddress) -> "NodeReading":
        """Raises PeerProtocolError: the answer is invalid."""
        held = parse_node_holdings(fields, address)
        with parsing(f"{address.label} sent an invalid answer to verify", ConfigInvalid):
            findings = tuple(Finding.from_json(finding) for finding in fields["findings"])
            silent = tuple(Holding.from_json(holding) for holding in fields["silent"])
            return cls(address.node_id, findings, held, index(fields["bytes_read"]), silent)


@dataclass(frozen=True)
class Audit:
    """The readings of all nodes. Copies on `silent` nodes, which did not answer, count neither as present nor as lost.

    `manifests`: by save id, of the saves that the answering nodes hold. `not_asked`: the other nodes of these saves, for a
    command without a store of its own. They count as silent nodes do.
    """

    readings: tuple[NodeReading, ...]
    silent: Mapping[AgentAddress, ReplicatedCkptError]
    manifests: Mapping[str, Manifest]
    plan: RepairPlan
    not_asked: tuple[str, ...] = ()

    @property
    def unreachable(self) -> tuple[str, ...]:
        """A line for each node that was not reached, with the reason."""
        return tuple(f"{address.label}: {describe_silence(error)}" for address, error in self.silent.items())

    @property
    def silent_nodes(self) -> frozenset[str]:
        """The nodes that did not answer. Another request to one of them would cost a time-out."""
        return frozenset(address.node_id for address in self.silent)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, without missing copies of shards that have enough others."""
        return tuple(
            finding
            for reading in self.readings
            for finding in reading.findings
            if finding.problem is not Problem.MISSING
            or ShardName.parse(finding.name) is None
            or self.plan.concerns(finding.checkpoint_id, finding.name)
        )

    @property
    def checkpoint_ids(self) -> tuple[str, ...]:
        held = {holding.checkpoint_id for reading in self.readings for holding in reading.held.holdings}
        return tuple(sorted(held | {finding.checkpoint_id for finding in self.findings}))

    @property
    def is_intact(self) -> bool:
        """Whether every file is as it was saved and every shard has its number of copies."""
        return self.plan.is_complete


class Auditor:
    """Has the agents of all nodes read their stores at once. If no agent runs on this node, this process reads its store.

    Afterwards each agent repairs the damaged files of its node, as it does after a load has reported a file.
    """

    def __init__(self, store: LocalStore, lost: Collection[str] = (), peers: PeerBook | None = None) -> None:
        self._store = store
        self._node_id = store.read_node_id()
        self._lost = frozenset(lost)
        self._peers = PeerBook(store.root_agent_directory()) if peers is None else peers
        self._inspector: Inspector | None = None
        self._own_bytes = 0

    def audit(self, checkpoint_id: str | None = None) -> Audit:
        """Audits one checkpoint, or all. Nodes in `lost` hold nothing; other silent nodes are assumed to hold their part.

        Raises:
            StoreError: the node's own store cannot be read.
        """
        addresses = {peer.node_id: peer for peer in self._peers.read_all() if peer.node_id not in self._lost}

        def read(node: str) -> NodeReading:
            if node == self._node_id:
                return self._own_reading(checkpoint_id)
            return _ask_agent(addresses[node], checkpoint_id)

        own = [] if isinstance(self._store, EmptyStore) else [self._node_id]
        outcome = FanOut.run([*own, *addresses], read)
        if self._node_id in outcome.errors:
            raise outcome.errors[self._node_id]
        readings = tuple(outcome.results[node] for node in sorted(outcome.results))
        silent = {addresses[node]: error for node, error in sorted(outcome.errors.items())}
        silent |= self._peers.unanswered
        views = self._views(readings, list(silent))
        # Unbounded: a user waits for one complete answer. The bound protects agents, which run for months.
        manifests = ManifestBook(self._store, self._node_id, self._peers, is_bounded=False).of(views)
        not_asked = self._list_not_asked(manifests, views)
        views += [NodeView(node, Presence.ASSUMED, None) for node in not_asked]
        return Audit(readings, silent, manifests, _plan(manifests, views), not_asked)

    def look_how_far(self) -> Mapping[str, tuple[int, int]]:
        """By node that is reading now: bytes read, and bytes in all. Call it from another thread while `audit` runs."""
        addresses = {peer.node_id: peer for peer in self._peers.read_all() if peer.node_id not in self._lost}
        endpoint = listening_endpoint(self._store.root_agent_directory())
        if endpoint is not None:
            addresses[endpoint.node_id] = endpoint.local_address()
        read = {} if self._inspector is None else {self._node_id: (self._inspector.bytes_read, self._own_bytes)}
        return {**FanOut.run(addresses, lambda n: _ask_how_far(addresses[n])).results, **read}

    def _list_not_asked(self, manifests: Mapping[str, Manifest], views: Sequence[NodeView]) -> tuple[str, ...]:
        # Only a node's own address book is complete: a node that it lacks is gone.
        if not isinstance(self._store, EmptyStore):
            return ()
        named = {node.node_id for manifest in manifests.values() for node in manifest.nodes}
        return tuple(sorted(named - {view.node_id for view in views}))

    def _own_reading(self, checkpoint_id: str | None) -> NodeReading:
        endpoint = listening_endpoint(self._store.root_agent_directory())
        # The agent has a record of damaged files. And a second full read of the disk at the same time would slow it down.
        if endpoint is not None and endpoint.node_id == self._node_id:
            try:
                return _ask_agent(endpoint.local_address(), checkpoint_id)
            except ReplicatedCkptError as exc:
                log.info("this process reads the store itself: %s", exc)
        inspector = Inspector(self._store, self._node_id)
        self._own_bytes = inspector.sum_sizes(checkpoint_id)
        self._inspector = inspector
        findings = tuple(inspector.inspect(checkpoint_id))
        node_report = read_node_report(self._store)
        holdings, unclaimed = tuple(inspector.holdings), tuple(inspector.unclaimed)
        newer = tuple(self._store.catalog.of_newer_format(checkpoint_id))
        held = NodeHoldings(holdings, unclaimed, node_report, measure_room(self._store.root), newer)
        return NodeReading(self._node_id, findings, held, inspector.bytes_read)

    def _views(self, readings: Sequence[NodeReading], silent: Sequence[AgentAddress]) -> list[NodeView]:
        views = [found.held.view_of(found.node_id) for found in readings]
        held: dict[str, list[Holding]] = {}
        for found in reversed(readings):
            # Several nodes may report on a silent node. The report of the first is used, so that each audit plans alike.
            held |= {node: [one for one in found.silent if one.node_id == node] for node in found.silent_nodes}
        for peer in silent:
            last = tuple(held[peer.node_id]) if peer.node_id in held else None
            # Its copies are neither counted as intact nor replaced as lost.
            views.append(NodeView(peer.node_id, Presence.ASSUMED, last))
        return views


def read_node_report(store: LocalStore) -> NodeReport:
    """The report from files that this node's last agent wrote, for use when no agent runs. Raises StoreError."""
    policies = PolicyBook(store.root_agent_directory()).read_all()
    marks = MarkBook(store.root_agent_directory()).read()
    return NodeReport(policies, removed=store.journal.read_removed(), marks=marks)


def _plan(manifests: Mapping[str, Manifest], views: Sequence[NodeView]) -> RepairPlan:
    retired, removed = find_retired(manifests, views), find_removed(views)
    plan = plan_repair(manifests, views, going=retired | removed)
    # The common case ends here: the second plan below costs as much as the first.
    if not removed & manifests.keys():
        return plan
    return replace(plan, short=(*plan.short, *_find_lost(manifests, views, retired, removed)))


def _find_lost(
    manifests: Mapping[str, Manifest], views: Sequence[NodeView], retired: Collection[str], removed: Collection[str]
) -> Iterator[ShortShard]:
    """Lost shards of saves that a user has removed on some nodes, without those shards that the removal itself deleted."""
    for short in plan_repair(manifests, views, going=retired).lost:
        manifest = manifests.get(short.save_id)
        if short.save_id in removed and manifest is not None and manifest.checkpoint_id == short.checkpoint_id:
            removed_on = {view.node_id for view in views if short.save_id in view.node_report.removed}
            if not is_removed_everywhere(manifest, short.shard, removed_on):
                yield short


def is_removed_everywhere(manifest: Manifest, name: str, removed_on: Collection[str]) -> bool:
    """Whether a user has removed the save on every node that should have the file."""
    entry = manifest.shards.get(name)
    holders = {node.node_id for node in manifest.nodes} if entry is None else set(entry.holders)
    return holders <= set(removed_on)


def _ask_agent(address: AgentAddress, checkpoint_id: str | None) -> NodeReading:
    document = {} if checkpoint_id is None else {"checkpoint_id": checkpoint_id}
    with AgentClient(address) as client:
        return NodeReading.from_json(client.call("POST", "/v1/verify", document), address)


def _ask_how_far(address: AgentAddress) -> tuple[int, int]:
    with AgentClient(address, HOLDINGS_TIMEOUT_S) as client:
        answer = client.call("GET", "/v1/status?brief=1")
    with parsing(f"{address.label} sent an invalid report of its progress"):
        return index(answer["verify"]["bytes_read"]), index(answer["verify"]["size_bytes"])
