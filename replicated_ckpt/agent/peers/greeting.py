"""Greetings: an agent that starts tells its peers where it is, one that leaves that its disk is intact.

Each speaks for itself alone: a greeting counts only with the token that the peer was introduced with.
"""

import hmac
import logging
import threading
from collections.abc import Collection
from dataclasses import replace

from replicated_ckpt.agent.peers.address_book import PeerBook
from replicated_ckpt.agent.state.endpoint import Endpoint
from replicated_ckpt.errors import StoreDenied
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.fan_out import FanOut

log = logging.getLogger(__name__)

GREETING_TIMEOUT_S = 2.0


class Greeter:
    """Greets each peer that was known at the start, then or as soon as it answers: who was away may look elsewhere for us.

    Peers that are introduced later are told by the ranks where this node is.
    """

    def __init__(self, peers: PeerBook, endpoint: Endpoint) -> None:
        self._peers = peers
        self._document = {"peer": {**endpoint.address().to_json(), "host": ""}}
        self._lock = threading.Lock()
        self._missing = {peer.node_id for peer in peers.known()}

    def start(self) -> threading.Thread:
        """Greets every known peer, in the background; returns the thread that does."""
        thread = threading.Thread(target=self.greet_all, name="rckpt-hello", daemon=True)
        thread.start()
        return thread

    def greet_all(self) -> None:
        self.greet(tuple(self._missing))

    def greet(self, nodes: Collection[str]) -> None:
        """Greets those of these nodes that have not heard this agent since it started."""
        with self._lock:
            missing = self._missing & set(nodes)
        if not missing:
            return
        outcome = FanOut[AgentAddress, None]().run(
            [peer for peer in self._peers.known() if peer.node_id in missing], self._greet
        )
        with self._lock:
            self._missing -= {address.node_id for address in outcome.results}
        for address, error in outcome.errors.items():
            log.info("could not greet %s: %s", address.label, error.message)

    def _greet(self, address: AgentAddress) -> None:
        with AgentClient(address, GREETING_TIMEOUT_S) as client:
            client.call("POST", "/v1/hello", self._document)

    def say_goodbye(self) -> None:
        """Tells every known peer that this agent leaves in good order; one that cannot be told finds out by itself."""

        def told(address: AgentAddress) -> None:
            with AgentClient(address, GREETING_TIMEOUT_S) as client:
                client.call("POST", "/v1/bye", self._document)

        FanOut[AgentAddress, None]().run(self._peers.known(), told)


def heed_hello(book: PeerBook, said: AgentAddress, from_host: str) -> None:
    """Notes that a known node is there, and where its agent listens now, as it says itself.

    Its host changes with it only where its certificate is pinned: over plain HTTP the token alone would lead every peer of
    the node to whoever has seen it.

    Raises:
        StoreDenied: this is not that node, or an earlier agent of it; nothing has changed.
    """
    known = identify_sender(book, said)
    if known.tls_sha256 not in ("", said.tls_sha256) or said.incarnation < known.incarnation:
        raise _denial(said, "its certificate is another one, or it has been started again since")
    host, origin = (from_host, "its own greeting") if known.tls_sha256 else (known.host, "the job that introduced it")
    book.learn([replace(said, host=host, domain=said.domain or known.domain, origin=origin)])


def identify_sender(book: PeerBook, said: AgentAddress) -> AgentAddress:
    """The node that speaks, as it was introduced here.

    Raises:
        StoreDenied: it was not, or who speaks does not have its token.
    """
    known = next((peer for peer in book.known() if peer.node_id == said.node_id), None)
    if known is None or not hmac.compare_digest(known.token.encode(), said.token.encode()):
        raise _denial(said, "no such node was introduced here" if known is None else "the token is not that node's")
    return known


def _denial(said: AgentAddress, why: str) -> StoreDenied:
    hint = "A job that has ranks on both nodes introduces them, with its next save or load."
    return StoreDenied("this agent", "hear", f"node {said.node_id}", why, hint)
