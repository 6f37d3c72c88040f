"""The holdings of all known nodes: this node's from its agent or disk, the others' from their agents."""

import contextlib
import ipaddress
import logging
import re
import ssl
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from shlex import quote
from typing import Any

from replicated_ckpt.agent.launch import running_agent
from replicated_ckpt.agent.repair.audit import read_node_report
from replicated_ckpt.agent.state.endpoint import listening_endpoint
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest, find_domains
from replicated_ckpt.core.upkeep.marks import Marks, merge_marks
from replicated_ckpt.core.upkeep.retention import find_retired
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.environment import PLAIN_ENV
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError, StoreDenied
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.peers.manifests import ManifestBook
from replicated_ckpt.node.peers.watch import NodeHoldings, describe_silence, parse_node_holdings, runs_no_agent
from replicated_ckpt.node.state.damage import DamageBook
from replicated_ckpt.stores.local.store import NO_NODE, EmptyStore, LocalStore
from replicated_ckpt.stores.local.unclaimed import UnclaimedFilesReader
from replicated_ckpt.stores.local.versions.full_disk import measure_room
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import one_line, plural

log = logging.getLogger(__name__)

_HOST_CHARS_MAX = 255
_HOST = re.compile(r"[0-9A-Za-z][0-9A-Za-z.:%_-]*")


@dataclass(frozen=True)
class NodesSeen:
    """The holdings of the nodes that answered, and the errors of those that did not."""

    own_node: str
    holdings_by_node: Mapping[str, NodeHoldings]
    addresses: Mapping[str, AgentAddress]
    unreached: Mapping[str, ReplicatedCkptError]
    manifests: Mapping[str, Manifest]
    """By save id, the manifests of the saves on the nodes that answered."""
    forgotten: frozenset[str] = frozenset()
    """The nodes that a user has removed by `forget`. Their files count as lost, and no advice waits for them."""

    @property
    def has_own(self) -> bool:
        """Whether the command has a node's own store. False: it asks other nodes alone."""
        return self.own_node in self.holdings_by_node

    @property
    def holdings(self) -> list[Holding]:
        return [holding for held in self.holdings_by_node.values() for holding in held.holdings]

    @property
    def unclaimed(self) -> list[UnclaimedFiles]:
        return [unclaimed for held in self.holdings_by_node.values() for unclaimed in held.unclaimed]

    @property
    def reached(self) -> tuple[AgentAddress, ...]:
        return tuple(address for node, address in self.addresses.items() if node not in self.unreached)

    @cached_property
    def hosts(self) -> Mapping[str, str]:
        """The host of each node: its name in the address book, else its name in a manifest, else its IP address.

        The address book comes first, because any peer can have written a manifest.
        """
        said = {address.node_id: address.host for address in self.addresses.values()}
        hosts = dict(said)
        for manifest in sorted(self.manifests.values(), key=lambda manifest: manifest.created_unix_s):
            # A peer may have written the name: control characters could fake lines of the output.
            hosts |= {node.node_id: one_line(node.host, _HOST_CHARS_MAX) for node in manifest.nodes if node.host}
        return hosts | {node: host for node, host in said.items() if not _is_ip(host)}

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The label of each node for output: its host. If several nodes share a host, also the id."""
        # Without the ids, several nodes on one host, as in a test or a pod, would look like one.
        shared = [host for host in self.hosts.values() if host]
        return {node: host if shared.count(host) == 1 else f"{host}/{node}" for node, host in self.hosts.items()}

    @cached_property
    def _domains(self) -> Mapping[str, tuple[str, ...]]:
        return find_domains(self.manifests.values())

    def domain(self, node: str) -> str:
        """The failure domain of the node: the one that its job names, else its host."""
        return self._domains.get(node, (node,))[0]

    @property
    def nodes_known(self) -> int:
        """The number of nodes that can hold copies, including those that did not answer."""
        return len(self.holdings_by_node) + len(self.unreached)

    @property
    def newer(self) -> list[str]:
        """The checkpoints, on the nodes that answered, that only a newer version of this package reads."""
        return sorted({checkpoint_id for held in self.holdings_by_node.values() for checkpoint_id in held.newer})

    @cached_property
    def marks(self) -> Marks:
        """The saves that users have rejected, merged from the marks of the nodes that answered."""
        return merge_marks(held.node_report.marks for held in self.holdings_by_node.values())

    @cached_property
    def retired(self) -> frozenset[str]:
        """The saves that their runs' policies retire. Each node removes its part in its next round."""
        return find_retired(self.manifests, [found.view_of(node) for node, found in self.holdings_by_node.items()])

    def renamed_from(self, checkpoint_id: str, save_id: str) -> str | None:
        """The id under which a save was made, if a user has renamed its directory. None: not renamed, or unknown."""
        manifest = self.manifests.get(save_id)
        return None if manifest is None or manifest.checkpoint_id == checkpoint_id else manifest.checkpoint_id

    def removed_on(self, checkpoint_id: str, save_id: str) -> tuple[str, ...]:
        """The nodes where a user has removed the save. Empty if the directory was renamed or copied by hand."""
        if self.renamed_from(checkpoint_id, save_id) is not None:
            return ()
        return tuple(
            sorted(node for node, held in self.holdings_by_node.items() if save_id in held.node_report.removed)
        )

    def taken_on(self, checkpoint_id: str, lineage: str) -> frozenset[str]:
        """The nodes where a save of another run has this name."""
        return frozenset(
            held.node_id
            for held in self.holdings
            if held.checkpoint_id == checkpoint_id and held.lineage != lineage and not held.is_replaced
        )

    def name(self, node: str) -> str:
        return "this node" if node == NO_NODE else self.names.get(node, node)

    def list_names(self, nodes: Iterable[str]) -> str:
        return ", ".join(sorted(self.name(node) for node in nodes))

    def label(self, node: str) -> str:
        """The label of a node, with the id that options take."""
        name = self.name(node)
        return name if node in name or node == NO_NODE else f"{name} (node {node})"

    def label_all(self, text: object) -> str:
        """A line of a plan or audit, with the label of each node in place of its id."""
        ids = "|".join(map(re.escape, sorted(self.names)))
        # A node without a name stays as it is.
        return re.sub(rf"\bnode ({ids})\b|(?<=[ ,])({ids})\b", self._label_found, str(text)) if ids else str(text)

    def _label_found(self, found: re.Match[str]) -> str:
        label = self.label(found[1] or found[2])
        return found[0] if label in found[0] else label

    def describe_unreached(self, nodes: Iterable[str] | None = None) -> list[str]:
        """A line for each of these nodes that did not answer, for all of them if None."""
        return [
            f"{self.label(node)}: not reached: {describe_silence(self.unreached[node])}{self._place(node)}"
            for node in sorted(self.unreached if nodes is None else nodes)
        ]

    def _place(self, node: str) -> str:
        address = self.addresses.get(node)
        return f" (asked at {address.host}:{address.port})" if address is not None else ""


NO_NODES = NodesSeen("", {}, {}, {}, {})
"""For a command that asks only a bucket."""


def _is_ip(host: str) -> bool:
    """Whether it is an IP address, "localhost" or empty, which cannot serve as a label."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return True
    return host in ("", "localhost")


def look_at_nodes(store: LocalStore, peers: PeerBook | None = None, *, asks_own: bool = True) -> NodesSeen:
    """Asks every node of the address book, all at once. Starts no agent and writes nothing.

    `peers`: this node's address book, with the agents that the user has named. `asks_own`: False if this node's agent has
    just been silent, because another request to it would cost another time-out.

    Raises:
        StoreError: the node's own store cannot be read.
    """
    own = store.read_node_id()
    peers = PeerBook(store.root_agent_directory()) if peers is None else peers
    addresses = {peer.node_id: peer for peer in peers.read_all() if peer.node_id != own}

    def look(node: str) -> NodeHoldings:
        return _look_at_own(store, own, asks=asks_own) if node == own else _ask(addresses[node])

    outcome = FanOut.run([*([] if isinstance(store, EmptyStore) else [own]), *addresses], look)
    if own in outcome.errors:
        raise outcome.errors[own]
    held, book = dict(outcome.results), ManifestBook(store, own, peers)
    manifests = book.of([found.view_of(node) for node, found in held.items()])
    if any(holding.save_id not in manifests for found in held.values() for holding in found.holdings):
        # Retention may have removed the save while the first look waited for a silent node.
        held |= FanOut.run(outcome.results, look).results
        manifests = book.of([found.view_of(node) for node, found in held.items()])
    unanswered = {address.node_id: error for address, error in peers.unanswered.items()}
    addresses |= {address.node_id: address for address in peers.unanswered}
    unreached, forgotten = {**outcome.errors, **unanswered}, peers.read_forgotten() - addresses.keys()
    return NodesSeen(own, held, addresses, unreached, manifests, forgotten)


def ask_own_status(store: LocalStore) -> dict[str, Any] | None:
    """The answer of this node's agent to `GET /v1/status`. None: no agent runs.

    Raises:
        ReplicatedCkptError: the agent runs and does not answer.
    """
    endpoint = running_agent(store)
    if endpoint is None:
        return None
    with AgentClient(endpoint.local_address()) as client:
        return client.call("GET", "/v1/status")


def _look_at_own(store: LocalStore, own: str, *, asks: bool) -> NodeHoldings:
    """This node's holdings: from its agent, which has the state of uploads, else from the disk and the state files."""
    endpoint = listening_endpoint(store.root_agent_directory())
    # After disks were swapped, the endpoint file may be another node's, whose agent would answer for that node.
    if asks and endpoint is not None and endpoint.node_id == own:
        try:
            return _ask(endpoint.local_address())
        except ReplicatedCkptError as exc:
            log.info("this process reads the store itself: %s", exc)
    holdings = DamageBook.mark_recorded(store, store.catalog.holdings(own))
    unclaimed, newer = UnclaimedFilesReader(store, own).find_files(), tuple(store.catalog.of_newer_format())
    return NodeHoldings(holdings, unclaimed, read_node_report(store), measure_room(store.root), newer)


def _ask(address: AgentAddress) -> NodeHoldings:
    with AgentClient(address) as client:
        return parse_node_holdings(client.call("GET", "/v1/holdings"), address)


def on_each_host(seen: NodesSeen, nodes: Iterable[str], command: str) -> str:
    """A line for a shell that runs a command on the hosts of these nodes, without those that seem to be down."""
    nodes = set(nodes)
    # A refused connection shows a host that is up, where the command starts the agent.
    down = {node for node in nodes & seen.unreached.keys() if not runs_no_agent(seen.unreached[node])}
    named = {seen.hosts.get(node, "") for node in nodes - down or nodes}
    # A peer may have written the name: one that begins with "-" would be an option of ssh.
    hosts = sorted(host if _HOST.fullmatch(host) else "HOST" for host in named)
    if len(hosts) == 1:
        return f"`ssh {hosts[0]} {quote(command)}`"
    return f"`for host in {' '.join(hosts)}; do ssh $host {quote(command)}; done`"


def advise_on_silence(seen: NodesSeen, nodes: Collection[str], root: object) -> list[str]:
    """The next steps that bring back these nodes, which did not answer."""
    silent = {node: seen.unreached[node] for node in nodes}
    down = {node for node, error in silent.items() if runs_no_agent(error)}
    others = {node: error for node, error in silent.items() if isinstance(error, StoreDenied | ConfigInvalid)}
    mixed = {node for node, error in silent.items() if isinstance(error.__cause__, ssl.SSLError)}
    hung = silent.keys() - down - others.keys() - mixed
    wake = f"replicated-ckpt status --own-agent --start-agents --root {quote(str(root))}"
    start = (
        f"next step: start an agent on {seen.list_names(down)}, for example with {on_each_host(seen, down, wake)}, and "
        "repeat this command within a minute; `ls --start-agents --rsh ssh` does both. A job starts agents, too. If an "
        "agent already runs there, this node has an old address of it: `ls --nodes HOST:PORT` asks it, and the next save "
        "or load with ranks on both nodes updates the address"
    )
    look = (
        f"next step: on {seen.list_names(hung)}, if the host is up, run "
        f"`replicated-ckpt status --root {quote(str(root))}`, "
        "which shows whether the agent is stopped. If the agent runs, a firewall may block its port"
    )
    plain = (
        f"next step: set {PLAIN_ENV} (or `--plain`) on all nodes or on none. It is set here but not on "
        f"{seen.list_names(mixed)}, or there but not here"
    )
    refused = [f"next step for {seen.name(node)}: {error.hint}" for node, error in sorted(others.items())]
    return [*([start] if down else []), *([look] if hung else []), *([plain] if mixed else []), *refused]


def advise_on_lost(
    seen: NodesSeen, root: object, nodes: Collection[str], copies_wanted: int, *, is_unseen: bool = False
) -> list[str]:
    """The next step if these nodes never come back. Each of them may have a missing file of a checkpoint.

    `is_unseen`: no node that answered has that file. If one node alone counts as lost, `repair` waits for the others.
    """
    groups = [sorted(nodes)] if is_unseen else [[node] for node in sorted(nodes)]
    repair = f"replicated-ckpt repair --root {quote(str(root))}"
    # With too few nodes left, `repair --lost` could make no copies.
    if nodes and len(seen.holdings_by_node) < copies_wanted:
        new = "as many new nodes, which receive" if len(nodes) > 1 else "a new node in its place, which receives"
        room = f"{plural(len(seen.holdings_by_node), 'node')} cannot hold {copies_wanted} copies"
        step = f"run the job with {new} the copies of what other nodes still have, as {room}"
        return [f"{_if_lost(seen, nodes)}: {step}"]
    return [
        f"{_if_lost(seen, group)}: `{repair} {' '.join(f'--lost {node}' for node in group)}` makes new copies of what "
        "other nodes still have"
        for group in groups
        if group
    ]


def _if_lost(seen: NodesSeen, nodes: Collection[str]) -> str:
    return f"if {seen.list_names(nodes)} never {'come' if len(nodes) > 1 else 'comes'} back"


def describe_spare(seen: NodesSeen, root: object, nodes: Iterable[str]) -> list[str]:
    """A note for each of these nodes. They did not answer, but all their copies are also on other nodes."""
    forget = f"replicated-ckpt forget {{}} --root {quote(str(root))}"
    return [
        f"{seen.label(node)}: not reached: {describe_silence(seen.unreached[node])}. All copies exist without it. "
        f"If it never comes back: `{forget.format(node)}`, and the same on each other node"
        for node in sorted(nodes)
    ]


def advise_on_unknown_nodes(nodes: Iterable[str], seen: NodesSeen) -> list[str]:
    """The next step for nodes that a manifest names, but for which this node has no address."""
    unknown = sorted(set(nodes) - seen.holdings_by_node.keys() - seen.addresses.keys())
    if not unknown:
        return []
    names = seen.list_names(unknown)
    if not seen.has_own:
        was, agents = ("was", "its agent") if len(unknown) == 1 else ("were", "their agents")
        return [f"next step: {names} {was} not asked: name {agents} with --nodes, too"]
    return [f"next step: this node has no address of {names}: a save or load with ranks on both nodes adds it"]
