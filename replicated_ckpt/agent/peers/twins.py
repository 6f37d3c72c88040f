"""Nodes of which two agents run: one root was made as a copy of another, as a cloned disk is, with the identity in it."""

import logging
import threading

from replicated_ckpt.agent.peers.who import ask_who
from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError
from replicated_ckpt.stores.peer.client import AgentAddress

log = logging.getLogger(__name__)

_HINT = (
    "One was made as a copy of the other (a cloned disk): stop the agent of the copy, and `rm -r ROOT/node.json "
    "ROOT/.agent` there, with its root for ROOT."
)


def _two_agents(*addresses: AgentAddress) -> ConfigInvalid:
    """The error that says so."""
    places = sorted(f"{address.host}:{address.port}" for address in addresses)
    return ConfigInvalid(f"Two agents are node {addresses[0].node_id}: at {' and at '.join(places)}.", _HINT)


class Twins:
    """What this agent has found since it started. Safe to use concurrently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[AgentAddress, AgentAddress]] = {}

    def note(self, one: AgentAddress, other: AgentAddress) -> ConfigInvalid:
        """Both have answered as one node. Returns the error, which is logged once."""
        error = _two_agents(one, other)
        with self._lock:
            is_new = one.node_id not in self._found
            self._found[one.node_id] = one, other
        if is_new:
            log.warning("%s", error)
        return error

    def look_again(self) -> None:
        """Forgets those of which one agent is left. For each round of re-protection."""
        with self._lock:
            found = dict(self._found)
        for node_id, pair in found.items():
            if not _are_two(*pair):
                with self._lock:
                    self._found.pop(node_id, None)

    def describe(self) -> list[str]:
        """Each in words, with the next step."""
        with self._lock:
            return [str(_two_agents(*pair)) for pair in self._found.values()]


def _are_two(one: AgentAddress, other: AgentAddress) -> bool:
    try:
        return ask_who(one).is_twin_of(ask_who(other))
    except ReplicatedCkptError:
        return False
