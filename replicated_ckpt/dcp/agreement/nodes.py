"""The nodes of one save, as the coordinator commands them: through their agents, or directly in a single process."""

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

from replicated_ckpt.agent.launch import SILENT_TIMEOUT_S
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import MANIFEST_NAME, METADATA_NAME, is_lineage
from replicated_ckpt.core.lineage import Histories, History, accept_sequence, histories_from_json, merge_histories
from replicated_ckpt.core.rank_report import Span
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.dcp.agreement.decision import SaveDecision
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayout
from replicated_ckpt.errors import HINT_MARK, PeerProtocolError, ReplicatedCkptError, SaveAborted, StoreUnavailable
from replicated_ckpt.node.saves.collector import Collector
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores.files.existence import list_prefixed
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.publish import find_named
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import one_line

log = logging.getLogger(__name__)

RELAY_FROM_BYTES = 64 << 20
"""If `.metadata` for all nodes together is larger, nodes relay it. Otherwise the coordinator sends it to every node."""
SENDS_AT_ONCE = 2
"""Parallel sends of the file by one node that has it. The coordinator makes as many."""


class Relay:
    """Chooses which node sends the file to the next one: every node that has the file sends it on. Safe for concurrent
    use.
    """

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self._changed = threading.Condition()
        self._free = [coordinator] * SENDS_AT_ONCE

    def bring(self, node: str, send: Callable[[], object], pull: Callable[[str], object]) -> None:
        """Brings the file to `node`: with `send` from the coordinator, or with `pull(source)` from a node that has it.

        If a pull fails, the coordinator sends the file, and the source sends one file fewer at a time from then on.

        Raises:
            ReplicatedCkptError: the coordinator could not send it either.
        """
        with self._sender() as source:
            if source == self._coordinator:
                send()
                return self._give([node] * SENDS_AT_ONCE)
        try:
            pull(source)
        except ReplicatedCkptError:
            # The source may be dead or hung: this slot stays taken, so that no other node waits for it.
            with self._sender(self._coordinator):
                send()
                return self._give([node] * SENDS_AT_ONCE)
        return self._give([source] + [node] * SENDS_AT_ONCE)

    @contextmanager
    def _sender(self, wanted: str | None = None) -> Iterator[str]:
        """Yields a node that has the file and a free slot, the latest first. Afterwards the coordinator's slot is free."""
        with self._changed:
            while not (wanted in self._free if wanted is not None else self._free):
                self._changed.wait()
            source = self._free.pop(-1 if wanted is None else self._free.index(wanted))
        try:
            yield source
        finally:
            # Also after a failed send: the coordinator is the last source of every node, and must not run out of slots.
            if source == self._coordinator:
                with self._changed:
                    self._free.insert(0, source)
                    self._changed.notify_all()

    def _give(self, nodes: list[str]) -> None:
        with self._changed:
            self._free += nodes
            self._changed.notify_all()


COMMIT_TIMEOUT_S = 10.0
COMMIT_DEADLINE_S = 120.0
Result = TypeVar("Result")


OnOpen = Callable[[], object]


class Cluster(Protocol):
    """All nodes of a save."""

    def begin(self, intent: Intent, on_own_open: OnOpen = lambda: None) -> "Opened":
        """Opens the save on every node that answers. Calls `on_own_open` once it is open here; others may take longer.

        Raises:
            CheckpointExists, StoreError: some node refused, or none answered; the caller aborts.
        """

    def commit(self, save_id: str, metadata: bytes, manifest: bytes, same: CachedLayout | None = None) -> "Committed":
        """Has every node publish the save. Returns the nodes that did."""

    def abort(self, save_id: str, why: str) -> None:
        """Has every node that can be reached abort the save. Never raises a StoreError."""


@dataclass(frozen=True)
class Opened:
    """The result of opening a save: the lineages that nodes reported, and the error of each node that did not answer.

    `named` has the lineages of the saves that have the checkpoint's name on nodes, "" for files without a manifest. It is
    empty if no node has any file of the checkpoint.
    """

    histories: Histories
    error_by_node: Mapping[str, ReplicatedCkptError] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    taken_numbers: frozenset[int] | None = frozenset()
    """The numbers that files of the checkpoint have in their names on the nodes. None: a node could not list them."""


class Committed:
    """The result of a commit: the shards held by each node that committed, and the error of each that did not."""

    def __init__(
        self, held_by_node: Mapping[str, Sequence[str]], error_by_node: Mapping[str, ReplicatedCkptError]
    ) -> None:
        self.held_by_node = held_by_node
        self.error_by_node = error_by_node
        self._holders_by_shard: dict[str, list[str]] = {}
        for node, held in held_by_node.items():
            for shard in held:
                self._holders_by_shard.setdefault(shard, []).append(node)

    def holders_of(self, shard: str) -> tuple[str, ...]:
        return tuple(self._holders_by_shard.get(shard, ()))


class AgentCluster:
    """Nodes with agents. All calls go to all nodes at once, except nodes whose own ranks got no answer from their agent."""

    def __init__(
        self,
        addresses: Sequence[AgentAddress],
        own_node: str,
        openers: Sequence[AgentAddress] = (),
        silence_by_node: Mapping[str, str] = MappingProxyType({}),
        unreached: Collection[str] = (),
        ticket: str = "",
    ) -> None:
        """`openers`: the same addresses with the nodes' invitations, which open a save and end it.

        `ticket`: the save's ticket, with which each rank may abort the save until it is decided.

        `silence_by_node`: by node, the error that its own ranks got from its agent. These agents are not asked.
        `unreached`: nodes that did not answer at the opening; a commit does not spend the full time-out on them again.
        """
        self._unreached = unreached
        self._ticket = ticket
        self._by_node = {address.node_id: address for address in addresses}
        self._opener_by_node = {**self._by_node, **{address.node_id: address for address in openers}}
        self._silent = {
            node: StoreUnavailable(self._by_node[node].label, "query the agent of", "", *why.partition(HINT_MARK)[::2])
            for node, why in silence_by_node.items()
        }
        self._own_node = own_node
        self.spans: list[Span] = []
        """How long each node took to answer."""

    def _run(self, phase: str, call: Callable[[str], Result]) -> FanOut[str, Result]:
        def call_timed(node: str) -> Result:
            began = time.monotonic()
            try:
                return call(node)
            finally:
                ended = time.monotonic()
                self.spans.append(Span(phase, began, ended, ended - began, node))

        outcome = FanOut.run([node for node in self._by_node if node not in self._silent], call_timed)
        outcome.errors.update(self._silent)
        return outcome

    def begin(self, intent: Intent, on_own_open: OnOpen = lambda: None) -> Opened:
        document = {
            "checkpoint_id": intent.checkpoint_id,
            "session": intent.session,
            "overwrite": intent.overwrite,
            "coordinator": intent.coordinator,
            "announced": asdict(intent.announced),
            "ticket": intent.ticket,
            "peers": [address.to_json() for address in self._by_node.values()],
        }
        body = json.dumps(document).encode()  # once, not for each node: it grows with the number of nodes

        def open_on(node: str) -> Opened:
            with AgentClient(self._opener_by_node[node]) as client:
                answer = client.put("POST", f"/v1/saves/{intent.save_id}", body)
            if node == self._own_node:
                on_own_open()
            with parsing(f"{self._by_node[node].label} sent an invalid answer to the opening of a save"):
                named = answer["named"]
                # A peer's answer is untrusted, and a lineage outlives this save: later saves inherit it.
                if named is not None and not is_lineage(named):
                    raise ValueError(f"not a lineage: {named!r}"[:500])
                numbers = answer["taken_numbers"]
                taken = None if numbers is None else frozenset(map(index, numbers))
                return Opened(histories_from_json(answer["histories"]), {}, frozenset({named} - {None}), taken)

        outcome = self._run("open", open_on)
        for node, error in outcome.errors.items():
            # A silent peer only costs copies. A refusal (the checkpoint exists), or an error of the own node, is fatal.
            if node == self._own_node or not isinstance(error, StoreUnavailable):
                raise error
        answers = outcome.results.values()
        own = outcome.results[self._own_node].histories if self._own_node in outcome.results else {}
        # A damaged or hostile peer that answers with a huge sequence must not use up the lineage's numbers.
        histories = merge_histories([own, *(_limit_sequences(opened.histories, own) for opened in answers)])
        named = frozenset[str]().union(*(opened.named for opened in answers))
        numbers = [opened.taken_numbers for opened in answers if opened.taken_numbers is not None]
        # One node without an answer makes every small number unsafe: the caller then draws a large one.
        taken = frozenset[int]().union(*numbers) if len(numbers) == len(answers) else None
        return Opened(histories, outcome.errors, named, taken)

    def commit(self, save_id: str, metadata: bytes, manifest: bytes, same: CachedLayout | None = None) -> Committed:
        path = f"/v1/saves/{save_id}"
        relay = Relay(self._own_node) if len(metadata) * len(self._by_node) > RELAY_FROM_BYTES else None
        whole = {"size_bytes": len(metadata), "crc32c": crc32c(metadata)}

        def bring_by_relay(client: AgentClient, relay: Relay) -> None:
            client.call("GET", path)  # raises for a node that hangs, before that node occupies a sender
            relay.bring(
                client.address.node_id,
                lambda: client.put("PUT", f"{path}/{METADATA_NAME}", metadata),
                lambda source: client.call("POST", f"{path}/pull", {"from": source, **whole}),
            )

        def bring(client: AgentClient) -> None:
            if same is not None and _has_same(client, path, same, whole):
                pass
            elif relay is None:
                client.put("PUT", f"{path}/{METADATA_NAME}", metadata)
            else:
                bring_by_relay(client, relay)
            # The manifest last: a node that has it counts the save as decided, and needs `.metadata` for that.
            client.put("PUT", f"{path}/{MANIFEST_NAME}", manifest)

        def commit_on(node: str) -> tuple[str, ...]:
            # The node was silent at the opening: a short request first, so that a dead node costs no full time-out.
            if node in self._unreached:
                with AgentClient(self._by_node[node], SILENT_TIMEOUT_S) as client:
                    client.call("GET", path)
            with AgentClient(self._opener_by_node[node], COMMIT_TIMEOUT_S) as client, client.within(COMMIT_DEADLINE_S):
                # On its own node the coordinator's rank has staged both files.
                if node != self._own_node:
                    with suppress(SaveAborted):  # another node may have completed the save here: `commit` finds out
                        bring(client)
                return _parse_held(client.call("POST", f"{path}/commit"), node)

        outcome = self._run("publish", commit_on)
        return Committed(outcome.results, outcome.errors)

    def abort(self, save_id: str, why: str) -> None:
        def abort_on(node: str) -> None:
            with AgentClient(self._opener_by_node[node]) as client:
                client.call("POST", f"/v1/saves/{save_id}/abort", {"why": why, "ticket": self._ticket})

        self._run("abort", abort_on)


def _parse_held(answer: Mapping[str, object], node: str) -> tuple[str, ...]:
    held = answer.get("held")
    if not isinstance(held, list):
        raise PeerProtocolError(f"Node {node} answered a commit with {one_line(str(answer), 80)}.")
    return tuple(map(str, held))


def _has_same(client: AgentClient, path: str, same: CachedLayout, whole: Mapping[str, int]) -> bool:
    """Whether the node has taken `.metadata` from its own copy of the save `same`."""
    where = {"checkpoint_id": same.checkpoint_id, "save_id": same.save_id}
    try:
        client.call("POST", f"{path}/pull", {"same_as": where, **whole})
    # The save has ended, or the node is gone: sending the file cannot help.
    except (SaveAborted, StoreUnavailable):
        raise
    except ReplicatedCkptError:  # the node does not have that file, so it is sent
        return False
    return True


def cluster_of(decision: SaveDecision, rank: int) -> AgentCluster:
    """The nodes of a decided save, as a rank of it reaches them."""
    silence = {node.node_id: node.silence for node in decision.nodes if node.silence}
    addresses, openers = zip(*((node.address, node.opener()) for node in decision.nodes), strict=True)
    return AgentCluster(addresses, decision.node_of(rank).node_id, openers, silence, ticket=decision.ticket)


class LoneNode:
    """The store of this process alone, for which no agent is needed. Other processes may use the store at the same time."""

    def __init__(self, store: LocalStore) -> None:
        self._service = LoneService(store)
        self.spans: list[Span] = []

    def begin(self, intent: Intent, on_own_open: OnOpen = lambda: None) -> Opened:
        histories, stale_saves = self._service.open_save(intent)
        named = find_named(self._service.store.catalog, intent.checkpoint_id)
        on_own_open()
        settle(self._service, stale_saves, ())
        taken = self._service.store.find_taken_numbers(intent.checkpoint_id, intent.save_id)
        return Opened(histories, named=frozenset() if named is None else frozenset({named}), taken_numbers=taken)

    def commit(
        self,
        save_id: str,
        metadata: bytes,  # noqa: ARG002 - staged here already, as the manifest is
        manifest: bytes,  # noqa: ARG002
        same: CachedLayout | None = None,  # noqa: ARG002
    ) -> Committed:
        held = self._service.commit(save_id)
        try:
            self._drop_superseded()
        except (ReplicatedCkptError, OSError) as exc:  # the save is published: the next one tries again
            log.warning("versions that earlier saves replaced stay on this node for now: %s", exc)
        return Committed({self._service.node_id: held}, {})

    def _drop_superseded(self) -> None:
        """Removes superseded versions whose readers have finished: without an agent no other process may do it."""
        service = self._service
        if next(service.store.catalog.read_replaced(), None) is not None:
            view = NodeView(service.node_id, Presence.UP, service.holdings(), service.unclaimed.find_files())
            manifests = {each.save_id: each for _, each in service.store.catalog.committed()}
            Collector(service, threading.Event()).drop_superseded(manifests, (view,))

    def abort(self, save_id: str, why: str) -> None:
        try:
            self._service.abort(save_id, why)
        # Only logged: another error is being raised, and the next save removes the files that are left.
        except (ReplicatedCkptError, OSError) as exc:
            log.warning("save %s was aborted (%s), but its files could not be removed: %s", save_id, why, exc)


class LoneService(NodeService):
    """A node's saves in a process that uses no agent. Several processes may do so; each sees only the saves it opened."""

    def open_in_store(self, intent: Intent) -> None:
        """No other process sees the save before this one has locked it. The lock lasts as long as this object."""
        # Opened and locked in one step: else another process takes the unlocked save for a stale one, and removes it.
        with self.looking():
            super().open_in_store(intent)
            weakref.finalize(self, self.store.lock_save(intent.save_id).release)

    def was_opened_within(self, grace_s: float, intent: Intent) -> bool:
        """If this node has an agent, a save also counts as opened if one of its files was changed within `grace_s`."""
        if read_endpoint(self.store.root_agent_directory()) is None:
            return super().was_opened_within(grace_s, intent)
        # The agent opens a save without a lock, and ranks lock it when they write: until then only its files show it.
        staged = list_prefixed(self.store.intent_path(intent.save_id).parent, intent.save_id)
        return any(_was_changed_within(grace_s, path) for path in staged)


def _was_changed_within(grace_s: float, path: Path) -> bool:
    try:
        # abs: after the clock was set back, files from the future must not count as new forever.
        return abs(time.time() - path.stat().st_mtime) < grace_s
    except FileNotFoundError:  # it vanished between two calls, so some process works on the save
        return True


def _limit_sequences(reported: Histories, own: Histories) -> Histories:
    """The lineages that a node reported, with sequence numbers limited to a plausible distance ahead of this node's own."""
    return {
        lineage: History(accept_sequence(one.sequence, own.get(lineage, History(0)).sequence), one.created_unix_s)
        for lineage, one in reported.items()
    }
