"""The watch: asks the other nodes for their holdings in each round, and caches their last answers."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest
from replicated_ckpt.core.upkeep.policy import NOTHING_REPORTED, NodeReport
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError, StoreError
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.files.room import Room
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import one_line

HOLDINGS_TIMEOUT_S = 3.0  # every round waits this long for a node that is down
HOLDINGS_DEADLINE_S = 30.0
"""For a whole answer: a peer that sends without end cannot stop the round."""

HOLDINGS_MAX = 1 << 16
"""Checkpoints that one node may list: each costs time in every plan."""


@dataclass(frozen=True)
class SilenceTimeouts:
    """How long a silent node counts as holding its copies.

    `lost_after_s`: a node that fell silent. `away_after_s`: a node whose agent announced its exit.
    """

    lost_after_s: float = 30.0
    away_after_s: float = 3600.0


@dataclass(frozen=True)
class NodeHoldings:
    """A node's answer: its holdings, its files without a valid manifest, its report, and its free space.

    `newer`: checkpoints that only a newer version of the package can read; a node with that version lists them as held.
    `beside`: if the question was about one checkpoint, the newest of each run in the same directory of ids.
    """

    holdings: tuple[Holding, ...]
    unclaimed: tuple[UnclaimedFiles, ...] = ()
    node_report: NodeReport = NOTHING_REPORTED
    room: Room | None = None
    newer: tuple[str, ...] = ()
    beside: tuple[Holding, ...] = ()

    def view_of(self, node: str) -> NodeView:
        """The node as repair and retention see it: it is up, and has these holdings."""
        writable_bytes = None if self.room is None else self.room.writable_bytes
        return NodeView(
            node, Presence.UP, self.holdings, self.unclaimed, self.node_report, writable_bytes=writable_bytes
        )


class PeerWatch:
    """Asks every known peer for its holdings, and records since when a peer is silent. One thread."""

    def __init__(self, peers: PeerBook, timeouts: SilenceTimeouts, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._timeouts = timeouts
        self._clock = clock
        self._silent_since: dict[str, float] = {}
        self._held: dict[str, NodeHoldings] = {}
        self._known_then: dict[str, frozenset[str]] = {}

    def look(self, known: Collection[str] = ()) -> tuple[NodeView, ...]:
        """Asks all other nodes. `known`: the saves that are known before this look, for `with_newer`."""
        addresses = {peer.node_id: peer for peer in self._peers.read_all()}
        for node in self._silent_since.keys() - addresses.keys():  # the user has removed it
            self._silent_since.pop(node)
            self._held.pop(node, None)
            self._known_then.pop(node, None)
        outcome = FanOut.run(addresses, lambda node: ask_holdings(addresses[node]))
        self._known_then |= dict.fromkeys(outcome.results, frozenset(known))
        return tuple(self._view(addresses[node], outcome.results) for node in sorted(addresses))

    def with_newer(self, views: Sequence[NodeView], manifests: Mapping[str, Manifest]) -> tuple[NodeView, ...]:
        """The views, in which a silent node also holds its intended part of saves that are newer than its last answer.

        Otherwise, if a node falls silent right after a save, its part of that save would be copied at once.
        """
        return tuple(self._with_newer(view, manifests) for view in views)

    def _with_newer(self, view: NodeView, manifests: Mapping[str, Manifest]) -> NodeView:
        node = view.node_id
        if view.presence is not Presence.ASSUMED or view.holdings is None:
            return view
        told = self._known_then[node].union(holding.save_id for holding in view.holdings)
        newer = [manifest for save_id, manifest in manifests.items() if save_id not in told]
        meant = [holding for manifest in newer if (holding := _find_intended(node, manifest)) is not None]
        holdings = (*view.holdings, *meant)
        # Cached: in the next round the save is known, and would no longer count as newer.
        self._held[node] = replace(self._held[node], holdings=holdings)
        return replace(view, holdings=holdings)

    def _view(self, address: AgentAddress, answers: Mapping[str, NodeHoldings]) -> NodeView:
        node = address.node_id
        if node in answers:
            self._silent_since.pop(node, None)
            # Cached for the time when the node is silent: plans then use its last holdings.
            held = self._held[node] = answers[node]
            return held.view_of(node)
        silent_s = self._clock() - self._silent_since.setdefault(node, self._clock())
        timeout_s = self._timeouts.away_after_s if self._peers.is_away(node) else self._timeouts.lost_after_s
        # A reboot must not cause copies of a node's shards: a silent node counts as a holder for a while.
        presence = Presence.ASSUMED if silent_s < timeout_s else Presence.GONE
        last = self._held.get(node)
        return NodeView(node, presence, None if last is None else last.holdings)

    def silent_holdings(self) -> tuple[Holding, ...]:
        """The last known holdings of the nodes that did not answer the last look."""
        silent = [self._held[node] for node in sorted(self._silent_since) if node in self._held]
        return tuple(holding for held in silent for holding in held.holdings)

    def is_in_doubt(self, views: Sequence[NodeView]) -> bool:
        """Whether a silent node still counts as a holder, and did not announce its exit: it may soon count as lost."""
        return any(view.presence is Presence.ASSUMED and not self._peers.is_away(view.node_id) for view in views)


def _find_intended(node: str, manifest: Manifest) -> Holding | None:
    """The intended holding of a node for a save; None if the node had no part in the save."""
    sizes = {name: entry.size_bytes for name, entry in manifest.shards.items() if node in entry.holders}
    if not sizes and node not in {member.node_id for member in manifest.nodes}:
        return None
    return Holding.of_save(manifest, node, manifest.checkpoint_id, has_metadata=True, sizes=sizes)


def ask_holdings(address: AgentAddress) -> NodeHoldings:
    """Asks a node for its holdings.

    Raises:
        StoreUnavailable: no answer. PeerProtocolError: an invalid answer.
    """
    with AgentClient(address, HOLDINGS_TIMEOUT_S) as client, client.within(HOLDINGS_DEADLINE_S):
        return parse_node_holdings(client.call("GET", "/v1/holdings?upkeep=1"), address)


def parse_node_holdings(answer: Mapping[str, Any], address: AgentAddress) -> NodeHoldings:
    """Parses a node's answer about its holdings. Entries about other nodes are dropped.

    Raises:
        PeerProtocolError: the answer is not valid.
    """
    with parsing(f"{address.label} sent an invalid list of its checkpoints", ConfigInvalid):
        # Before they are parsed: a hostile list would cost memory on every node that asks.
        if len(answer["holdings"]) > HOLDINGS_MAX:
            raise ValueError(f"more than {HOLDINGS_MAX} checkpoints")
        found = tuple(Holding.from_json(fields) for fields in answer["holdings"])
        unclaimed = tuple(UnclaimedFiles.from_json(fields) for fields in answer.get("unclaimed", ()))
        node_report = NodeReport.from_json(answer.get("node_report", {}))
        room = Room.from_json(answer["room"]) if "room" in answer else None
        newer = tuple(one_line(checkpoint_id) for checkpoint_id in answer.get("newer", ()))
        beside = tuple(Holding.from_json(fields) for fields in answer.get("beside", ()))
    # A node may report only itself: false reports of copies on other nodes would let real copies be deleted.
    holdings, beside = (tuple(one for one in told if one.node_id == address.node_id) for told in (found, beside))
    unclaimed = tuple(one for one in unclaimed if one.node_id == address.node_id)
    return NodeHoldings(holdings, unclaimed, node_report, room, newer, beside)


def runs_no_agent(error: ReplicatedCkptError) -> bool:
    """Whether the host of a node refused the connection: no agent runs there."""
    return isinstance(error.__cause__, ConnectionRefusedError)


def describe_silence(error: ReplicatedCkptError) -> str:
    """Why a node did not answer, in a few words, without address and request."""
    if runs_no_agent(error):
        return "no agent runs there"
    if isinstance(error.__cause__, TimeoutError):
        return "no answer in time"
    return error.detail if isinstance(error, StoreError) else error.message
