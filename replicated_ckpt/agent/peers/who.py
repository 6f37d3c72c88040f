"""Which agent answers at an address, as it says itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient

CALL_BACK_STEP_S = 0.6
"""Each of three steps: connecting, the handshake, the answer. The sender of the greeting waits meanwhile."""


@dataclass(frozen=True)
class Who:
    """Its node, which start of the node's agent this is, whether it is about to leave.

    `tls_sha256`: the certificate that it shows now, which may not be the one that it is asked under. `start_id`: drawn by
    each process of an agent, so that two of one node are told apart; "": of an older release.
    """

    node_id: str
    incarnation: int
    is_leaving: bool
    tls_sha256: str
    start_id: str = field(default="", compare=False)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Who":
        """Raises KeyError, TypeError: it says something else."""
        is_leaving, tls_sha256 = fields["is_leaving"] is True, str(fields["tls_sha256"])
        start_id = str(fields.get("start_id", ""))
        return cls(str(fields["node_id"]), index(fields["incarnation"]), is_leaving, tls_sha256, start_id)

    def is_twin_of(self, other: "Who") -> bool:
        """Whether these are two agents of one node: one agent may answer at two addresses of its host."""
        if self.node_id != other.node_id:
            return False
        if self.start_id and other.start_id:
            return self.start_id != other.start_id
        return self.incarnation != other.incarnation


def ask_who(address: AgentAddress) -> Who:
    """Which agent answers at an address. Over TLS it has the key of the certificate that the address names.

    Raises:
        StoreUnavailable, StoreDenied, PeerProtocolError: none, another one, or no sensible answer.
    """
    with AgentClient(address, CALL_BACK_STEP_S) as client, client.within(CALL_BACK_STEP_S):
        answer = client.call("GET", "/v1/status?brief=1")
    with parsing(f"{address.label} does not say who it is"):
        return Who.from_json(answer)
