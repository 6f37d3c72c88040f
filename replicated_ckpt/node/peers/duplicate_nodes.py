"""Nodes with two running agents: one root is a copy of another, such as a cloned disk, with the same identity."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

from replicated_ckpt.errors import ConfigInvalid, ReplicatedCkptError
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient

log = logging.getLogger(__name__)

CALL_BACK_STEP_S = 0.6
"""For each of three steps: connect, handshake, answer. The sender of the greeting waits for all of them."""


@dataclass(frozen=True)
class Who:
    """The identity of an agent: its node, the number of its start, and whether it is about to leave.

    `tls_sha256`: its current certificate, which may be newer than the one it was reached under. `start_id`: drawn by each
    process, to distinguish two agents of one node; "" from an older release.
    """

    node_id: str
    incarnation: int
    is_leaving: bool
    tls_sha256: str
    start_id: str = field(default="", compare=False)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Who":
        """Raises KeyError, TypeError: a field is missing or wrong."""
        is_leaving, tls_sha256 = fields["is_leaving"] is True, str(fields["tls_sha256"])
        start_id = str(fields.get("start_id", ""))
        return cls(str(fields["node_id"]), index(fields["incarnation"]), is_leaving, tls_sha256, start_id)

    def is_duplicate_of(self, other: "Who") -> bool:
        """Whether these are two agents of one node. One agent that answers at two addresses is not a duplicate."""
        if self.node_id != other.node_id:
            return False
        # A cloned disk also counts the same starts: only the start id tells the two agents apart.
        if self.start_id and other.start_id:
            return self.start_id != other.start_id
        return self.incarnation != other.incarnation


def ask_who(address: AgentAddress) -> Who:
    """The identity of the agent at an address. Over TLS it has the key of the certificate that the address names.

    Raises:
        StoreUnavailable: no answer. StoreDenied: another agent answers. PeerProtocolError: an invalid answer.
    """
    # A deadline as well as a time-out: a byte now and then would keep the call going.
    with AgentClient(address, CALL_BACK_STEP_S) as client, client.within(CALL_BACK_STEP_S):
        answer = client.call("GET", "/v1/status?brief=1")
    with parsing(f"{address.label} does not report its node"):
        return Who.from_json(answer)


_HINT = (
    "One of their disks is a clone of the other. On the clone, stop the agent, and run `rm -r ROOT/node.json ROOT/.agent` "
    "with its root for ROOT."
)


def _two_agents(*addresses: AgentAddress) -> ConfigInvalid:
    """The error for two agents of one node."""
    places = sorted(f"{address.host}:{address.port}" for address in addresses)
    return ConfigInvalid(f"Two agents are node {addresses[0].node_id}: at {' and at '.join(places)}.", _HINT)


class DuplicateNodes:
    """The duplicate nodes found since this agent started. Safe to use concurrently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[AgentAddress, AgentAddress]] = {}

    def record_duplicate(self, one: AgentAddress, other: AgentAddress) -> ConfigInvalid:
        """Records that both addresses answered as one node. Returns the error, which is logged once."""
        error = _two_agents(one, other)
        with self._lock:
            is_new = one.node_id not in self._found
            self._found[one.node_id] = one, other
        if is_new:
            log.warning("%s", error)
        return error

    def look_again(self) -> None:
        """Forgets nodes that have one agent left. Called in each round of re-protection."""
        with self._lock:
            found = dict(self._found)
        # Without the lock: each look may take seconds.
        for node_id, pair in found.items():
            if not _are_two(*pair):
                with self._lock:
                    self._found.pop(node_id, None)

    def describe(self) -> list[str]:
        """A description of each duplicate node, with the next step."""
        with self._lock:
            return [str(_two_agents(*pair)) for pair in self._found.values()]


def _are_two(one: AgentAddress, other: AgentAddress) -> bool:
    try:
        return ask_who(one).is_duplicate_of(ask_who(other))
    except ReplicatedCkptError:
        return False
