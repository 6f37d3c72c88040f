"""Greetings between agents. One that starts sends its address to its peers; one that exits, that its disk is intact.

An agent greets for its own node alone. The peers of a node have its token, so the token does not prove who sent a greeting.
The greeted agent therefore calls the named node back, and accepts the answer of the agent that has the node's certificate.
"""

import hmac
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from replicated_ckpt.agent.state.endpoint import Endpoint
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError, StoreDenied, StoreError, StoreUnavailable
from replicated_ckpt.node.peers.address_book import INTRODUCE_HINT, AgentIdentity, PeerBook, ask_identity
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.threads import FanOut

log = logging.getLogger(__name__)

IN_A_ROW_MAX = 4  # enough for an agent that is restarted a few times
INTERVAL_S = 10.0
"""For one node and sender's address: IN_A_ROW_MAX greetings are checked at once, then one in each interval."""
PER_SENDER_MAX = 16
PARALLEL_MAX = 64
"""Calls back in progress, for one sender's address and in total."""
WAIT_MAX_S = 2.0  # shorter than GREETING_DEADLINE_S, for which the greeter waits
PAIRS_MAX = 16_384
"""Bound on the remembered pairs of a node's name and a sender's address: twice the size of an address book."""
_HINT = "The greeting agent tries again in its next round. No action is needed."


class CallBacks:
    """Limits how often greetings are checked by a call back, for each pair of node and sender's address.

    Safe for concurrent use.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._paid_until: dict[tuple[str, str], float] = {}
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def take_turn(self, node_id: str, sender: str) -> Iterator[None]:
        """Runs the block, which calls `node_id` back after a greeting from `sender`, once there is a free place.

        Raises:
            StoreUnavailable: too many calls back are in progress, or `sender` greets too often. The block was not run.
        """
        with self._changed:
            self._charge(node_id, sender)
            if not self._changed.wait_for(lambda: self._has_room(sender), WAIT_MAX_S):
                raise _refusal(node_id, f"{self._under_way.total()} greetings are already being checked")
            self._under_way[sender] += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= Counter([sender])  # removes a sender whose count is 0
                self._changed.notify_all()

    def _charge(self, node_id: str, sender: str) -> None:
        """Charges INTERVAL_S for a call back. A debt of at most IN_A_ROW_MAX intervals is allowed."""
        now, pair = self._clock(), (node_id, sender)
        # Entries whose debt is paid are removed when the table is full.
        for old, paid_until in list(self._paid_until.items()) if len(self._paid_until) >= PAIRS_MAX else ():
            if paid_until <= now:
                del self._paid_until[old]
        due = max(self._paid_until.get(pair, now), now) + INTERVAL_S
        if due > now + IN_A_ROW_MAX * INTERVAL_S:
            raise _refusal(
                node_id, f"{sender} sends greetings in this node's name more often than every {INTERVAL_S:.0f} s"
            )
        # A new pair is refused, so that made-up senders do not push out the debts of real ones.
        if pair not in self._paid_until and len(self._paid_until) >= PAIRS_MAX:
            raise _refusal(node_id, f"more than {PAIRS_MAX} pairs of node and sender have sent greetings")
        self._paid_until[pair] = due

    def _has_room(self, sender: str) -> bool:
        return self._under_way[sender] < PER_SENDER_MAX and self._under_way.total() < PARALLEL_MAX


def _refusal(node_id: str, why: str) -> StoreUnavailable:
    return StoreUnavailable("this agent", "check the greeting of", f"node {node_id[:80]}", why, _HINT)


GREETING_TIMEOUT_S = 2.0
GREETING_DEADLINE_S = 5.0
"""For a whole greeting. Heartbeats do not extend it: no peer can delay an agent's exit, or a round of re-protection."""


class Greeter:
    """Greets each peer in the address book once after the start. A silent peer is greeted as soon as it answers.

    A peer may have an old address of this agent. Peers that are introduced later get the address from the ranks.
    """

    def __init__(self, peers: PeerBook, endpoint: Endpoint) -> None:
        self._peers = peers
        self._lock = threading.Lock()
        self._refusals: dict[str, str] = {}
        self._register(endpoint)

    def _register(self, endpoint: Endpoint) -> None:
        """Marks all peers as not greeted yet at this endpoint."""
        with self._lock:
            # No host: other nodes may reach this node under another name. The peer takes the address of the connection.
            self._document = {"peer": {**endpoint.address().to_json(), "host": ""}}
            self._ungreeted = {peer.node_id for peer in self._peers.read_all()}

    def announce(self, endpoint: Endpoint) -> threading.Thread:
        """As `start`, once this agent has another certificate."""
        self._register(endpoint)
        return self.start()

    def start(self) -> threading.Thread:
        """Greets every known peer in the background; returns the thread."""
        thread = threading.Thread(target=self.greet_all, name="rckpt-hello", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as exc:  # no reason to exit: re-protection greets each peer that answers
            log.warning("greets its peers later, because it cannot start a thread: %s", exc)
        return thread

    def greet_all(self) -> None:
        try:
            self.greet(tuple(self._ungreeted))
        except StoreError as exc:  # of the address book; re-protection greets each peer that answers
            log.warning("greets its peers later: %s", exc)

    def greet(self, nodes: Collection[str]) -> None:
        """Greets those of these nodes that this agent has not greeted at its present endpoint."""
        with self._lock:
            # This very set: `announce` may replace it meanwhile, and these greetings do not count for the new endpoint.
            ungreeted = self._ungreeted
            chosen = ungreeted & set(nodes)
        if not chosen:
            return
        peers = [peer for peer in self._peers.read_all() if peer.node_id in chosen]
        outcome = FanOut.run(peers, self._send_hello)
        with self._lock:
            ungreeted.difference_update(address.node_id for address in outcome.results)
        for address in outcome.results:
            self._note(address, None)
        for address, error in outcome.errors.items():
            self._note(address, error)

    def _note(self, address: AgentAddress, error: ReplicatedCkptError | None) -> None:
        """Records the result of a greeting. A refusal as a duplicate of this node is logged once as a warning.

        A peer that is silent, or that refuses because of too many greetings, changes no earlier result.
        """
        is_duplicate, node_id = isinstance(error, ConfigInvalid), address.node_id
        with self._lock:
            was_duplicate = node_id in self._refusals
            if is_duplicate:
                self._refusals[node_id] = str(error)
            elif not isinstance(error, StoreUnavailable):
                self._refusals.pop(node_id, None)
        if error is not None:
            level = logging.WARNING if is_duplicate and not was_duplicate else logging.INFO
            log.log(level, "could not greet %s: %s", address.label, error.message)

    def describe_refusals(self) -> list[str]:
        """The errors of peers that refuse this agent as a duplicate of its node."""
        with self._lock:
            return sorted(self._refusals.values())

    def announce_exit(self) -> None:
        """Announces to every known peer that this agent exits with its disk intact.

        The agent must answer until this returns, because each peer calls back. A peer that is not reached later finds a
        silent node.
        """
        try:
            FanOut.run(self._peers.read_all(), lambda address: self._send_hello(address, is_leaving=True))
        except StoreError as exc:  # of the address book
            log.warning("exits, and could not announce that to its peers: %s", exc)

    def _send_hello(self, address: AgentAddress, *, is_leaving: bool = False) -> None:
        with AgentClient(address, GREETING_TIMEOUT_S) as client, client.within(GREETING_DEADLINE_S):
            client.call("POST", "/v1/hello", {**self._document, "is_leaving": is_leaving})


def confirm_hello(book: PeerBook, said: AgentAddress, from_host: str, call_backs: CallBacks) -> None:
    """Calls a known node back after a greeting, and stores its new address if the agent there confirms it.

    A node that answers at its known address has not moved, whatever was announced. The host changes only if the node's
    certificate is pinned: over plain HTTP, a thief of the token could redirect every peer to another host. The announced
    number of starts may be smaller than the known one, if the node's disk was restored from a backup.

    Raises:
        StoreDenied: the sender is not that node, or is an earlier agent of it; nothing has changed. ConfigInvalid: two
            agents of that node run; nothing has changed. StoreUnavailable: too many nodes are being called back.
    """
    known = _find_known(book, said)
    # A renewed certificate: only the agent that still shows the known certificate can confirm the new one.
    if known.tls_sha256 not in ("", said.tls_sha256):
        with call_backs.take_turn(known.node_id, from_host):
            book.learn([_renew(known, said)])
        return
    host, origin = (from_host, "its own greeting") if known.tls_sha256 else (known.host, "the job that introduced it")
    announced = replace(said, host=host, origin=origin)
    before = replace(known, incarnation=said.incarnation)
    with call_backs.take_turn(known.node_id, from_host):
        asked = FanOut.run({before, announced}, ask_identity)
    expected = AgentIdentity(known.node_id, said.incarnation, is_leaving=False, tls_sha256=said.tls_sha256)
    there, here = asked.results.get(before), asked.results.get(announced)
    # Both addresses answer as this node: its disk was cloned with its identity, and its files would be split.
    if there is not None and here is not None and known.node_id == here.node_id and there.is_duplicate_of(here):
        raise book.duplicate_nodes.record_duplicate(known, announced)
    # The node still answers at the known address: the greeting is a thief's, or of an earlier start.
    if there is not None and there != expected and there.node_id == known.node_id and before != announced:
        raise _denial(said, "the agent at its known address still answers, and denies the change")
    found = [address for address in (before, announced) if asked.results.get(address) == expected]
    if not found:
        log.info("called back at %s:%d: %s", announced.host, announced.port, asked.errors.get(announced) or there)
        raise _denial(said, f"the agent at {announced.host}:{announced.port} does not confirm it")
    book.learn(found[:1])


def _renew(known: AgentAddress, said: AgentAddress) -> AgentAddress:
    """A node's address with its new certificate, if the agent that has the known certificate confirms the new one.

    Raises:
        StoreDenied: that agent does not answer, or does not confirm it.
    """
    try:
        found = ask_identity(known)
    except ReplicatedCkptError as exc:
        raise _denial(
            said, f"its certificate changed, and no agent shows the known certificate: {exc.message}"
        ) from exc
    if found != AgentIdentity(known.node_id, said.incarnation, is_leaving=False, tls_sha256=said.tls_sha256):
        raise _denial(said, "its certificate changed, and the agent with the known certificate does not confirm that")
    return replace(known, incarnation=said.incarnation, tls_sha256=said.tls_sha256)


def confirm_goodbye(book: PeerBook, said: AgentAddress, from_host: str, call_backs: CallBacks) -> None:
    """Calls a known node back after a goodbye. If its agent confirms that it exits, records that the node is away.

    Raises:
        StoreDenied: the agent does not confirm it; nothing has changed. If the agent then stops answering, its node counts
            as silent. StoreUnavailable: too many nodes are being called back.
    """
    known = _find_known(book, said)
    with call_backs.take_turn(known.node_id, from_host):
        try:
            found = ask_identity(known)
        except ReplicatedCkptError as exc:
            raise _denial(said, f"its agent does not confirm that it exits: {exc.message}") from exc
    is_leaving = (found.node_id, found.incarnation, found.is_leaving) == (known.node_id, known.incarnation, True)
    if not is_leaving:
        raise _denial(said, "its agent does not confirm that it exits")
    book.leave(known.node_id)


def _find_known(book: PeerBook, said: AgentAddress) -> AgentAddress:
    """The known address of the node that a greeting names. Raises StoreDenied: the node or its token is unknown."""
    known = next((peer for peer in book.read_all() if peer.node_id == said.node_id), None)
    # In constant time: a peer must not find the token byte by byte.
    if known is None or not hmac.compare_digest(known.token.encode(), said.token.encode()):
        raise _denial(said, "no job introduced this node here" if known is None else "the token is not that node's")
    return known


def _denial(said: AgentAddress, why: str) -> StoreDenied:
    return StoreDenied("this agent", "check the greeting of", f"node {said.node_id}", why, INTRODUCE_HINT)
