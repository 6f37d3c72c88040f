"""This process's node: its store, its agent, and what the others must know of it."""

import logging
import os
import socket
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from replicated_ckpt.agent.endpoint import read_endpoint
from replicated_ckpt.agent.launch import ensured_agent
from replicated_ckpt.config import PLAIN_ENV
from replicated_ckpt.errors import AgentUnavailable, ReplicatedCkptWarning
from replicated_ckpt.stores.agent_client import AgentAddress
from replicated_ckpt.stores.local import LocalStore
from replicated_ckpt.stores.tls import can_encrypt, is_loopback, is_network_trusted

log = logging.getLogger(__name__)

HOST_ENV = "REPLICATED_CKPT_HOST"
_DOCUMENTATION_ADDRESS = "192.0.2.1"
_PLAIN_WARNING = (
    "Nodes talk to each other without encryption, as this Python has no package `cryptography` to make a certificate with. "
    f"`pip install cryptography` on all nodes; or, where the network is trusted, set {PLAIN_ENV}=1."
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class NodePost:
    """A node as one of its ranks presents it. `store_inode` tells apart two stores that one host sees.

    `invitation` lets the coordinator open saves at its agent and introduce the job's nodes: see `Right.JOB`.
    """

    node_id: str
    host: str
    boot_id: str
    store_inode: str
    domain: str | None
    address: AgentAddress
    invitation: str = ""

    def opener(self) -> AgentAddress:
        """The address as the coordinator of the job has it."""
        return replace(self.address, token=self.invitation) if self.invitation else self.address

    def __repr__(self) -> str:
        return f"NodePost(node {self.node_id} on {self.host})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "NodePost":
        return cls(
            fields["node_id"],
            fields["host"],
            fields["boot_id"],
            fields["store_inode"],
            fields["domain"],
            AgentAddress.from_json(fields["address"]),
            str(fields["invitation"]),
        )


def current_address(store: LocalStore, domain: str | None, known: AgentAddress) -> AgentAddress:
    """Where this node's agent is now; it may have died and been started again. `known` if it does not answer."""
    try:
        return node_post(store, domain).address
    except AgentUnavailable as exc:
        log.warning("this node will publish the checkpoint later: %s", exc)
        return known


def node_post(store: LocalStore, domain: str | None) -> NodePost:
    """Presents this node; its agent runs when this returns, or hangs: then it is presented where it should answer.

    Raises:
        AgentUnavailable, StoreError, ConfigInvalid
    """
    host = advertised_host()
    try:
        endpoint = ensured_agent(store, host if is_loopback(host) else _any_address(host))
    except AgentUnavailable as exc:
        known = read_endpoint(store.agent_directory())
        if known is None:
            raise
        log.warning("this node's agent does not answer, and the others go on without it: %s", exc)
        endpoint = known
    if not (endpoint.tls_sha256 or can_encrypt() or is_loopback(host) or is_network_trusted()):
        warnings.warn(_PLAIN_WARNING, ReplicatedCkptWarning, stacklevel=2)
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    address = endpoint.address(host, domain)
    name = socket.gethostname()
    return NodePost(endpoint.node_id, name, boot_id, _inode(store), domain, address, endpoint.invitation())


def lone_post(store: LocalStore, domain: str | None) -> NodePost:
    """Presents this node to nobody but this process: no agent is started."""
    node_id = store.node_id()
    return NodePost(node_id, socket.gethostname(), "", _inode(store), domain, AgentAddress(node_id, "", 0, ""))


def _inode(store: LocalStore) -> str:
    status = store.root.stat()
    return f"{status.st_dev}:{status.st_ino}"


def advertised_host() -> str:
    """The address under which the other nodes reach this one.

    REPLICATED_CKPT_HOST if set; else the address from which this host reaches MASTER_ADDR. Where MASTER_ADDR is this
    host under a real name, that may be a loopback address, which means nothing to the others: then the address of the
    default route. Where MASTER_ADDR itself says loopback, all nodes are on this host.
    """
    override = os.environ.get(HOST_ENV)
    if override:
        return override
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if master == "localhost" or is_loopback(master):
        return "127.0.0.1"
    address = _source_address(master)
    if address is None or is_loopback(address):
        address = _source_address(_DOCUMENTATION_ADDRESS)
    return address or "127.0.0.1"


def _source_address(destination: str) -> str | None:
    """Local address of a route to `destination`. Nothing is sent: connecting a UDP socket only picks the route."""
    try:
        family, kind, _, _, peer = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _any_address(host: str) -> str:
    return "::" if ":" in host else "0.0.0.0"  # noqa: S104 - peers on other hosts must reach the agent; a token guards it
