"""The endpoint: where this node's agent listens, and its tokens, in a file that only this user may read."""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from replicated_ckpt.agent.state.listeners import listeners_on
from replicated_ckpt.agent.state.rights import Tokens, invite
from replicated_ckpt.errors import AgentUnavailable
from replicated_ckpt.stores.files.durable import raise_shortage, write_file
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.files.locks import FileLock
from replicated_ckpt.stores.files.ownership import read_private
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.version import PROTOCOL

_ENDPOINT_NAME = "endpoint.json"
_FOR_SCRAPERS_NAME = "metrics.token"
_IDENTITY_NAME = "identity.json"
_CLIENTS_NAME = "clients"
_STAYING_NAME = "staying"
_TEST_S = 0.5
"""A process that tests whether a lock is free holds it for less than this."""
LOCK_NAME = "lock"
ALREADY_SERVED = 6
"""Exit code of an agent that ranks have started, if another agent holds the lock of the root."""


@dataclass(frozen=True)
class Endpoint:
    """One running agent. Peers get `token` with the address; `owner_token` stays on this host: see `Tokens`."""

    node_id: str
    host: str
    port: int
    token: str
    pid: int
    version: str
    incarnation: int = 0
    tls_sha256: str = ""
    owner_token: str = ""
    protocol: int = PROTOCOL

    def __repr__(self) -> str:
        return f"Endpoint(node {self.node_id} at {self.host}:{self.port}, pid {self.pid})"

    def address(self, host: str | None = None) -> AgentAddress:
        """The agent's address, as seen from other nodes under the name `host`."""
        return AgentAddress(self.node_id, host or self.host, self.port, self.token, self.incarnation, self.tls_sha256)

    def local_address(self) -> AgentAddress:
        """The agent's address with the owner's token, for its own user on this host. Never send it to another process."""
        address = self.address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host))  # noqa: S104 - nothing is bound
        return replace(address, token=self.owner_token)

    def invitation(self) -> str:
        """The invitation that a rank of this node posts for the coordinator of its job."""
        return invite(self.owner_token, time.time())


@dataclass(frozen=True)
class Identity:
    """The parts of an agent that survive a restart, so that peers still find it: its tokens and, if free, its port."""

    token: str
    port: int
    incarnation: int
    owner_token: str
    node_id: str

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.token, self.owner_token)

    @classmethod
    def draw(cls, incarnation: int, node_id: str) -> "Identity":
        tokens = Tokens.draw()
        return cls(tokens.peer, 0, incarnation, tokens.owner, node_id)


def write_endpoint(directory: Path, endpoint: Endpoint) -> None:
    write_file(directory / _ENDPOINT_NAME, json.dumps(asdict(endpoint)).encode(), mode=0o600)


def read_endpoint(directory: Path) -> Endpoint | None:
    """The endpoint that the last agent wrote; None if there is none. That agent may be gone.

    Raises:
        StoreDenied: another user may have written it.
    """
    try:
        fields = json.loads(read_private(directory / _ENDPOINT_NAME))
        return Endpoint(
            str(fields["node_id"]),
            str(fields["host"]),
            int(fields["port"]),
            str(fields["token"]),
            int(fields["pid"]),
            str(fields["version"]),
            int(fields.get("incarnation", 0)),
            str(fields.get("tls_sha256", "")),
            str(fields["owner_token"]),
            int(fields.get("protocol", 1)),  # older releases did not write it
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def listening_endpoint(directory: Path) -> Endpoint | None:
    """As `read_endpoint`; None if nothing listens on the endpoint's port, or a process of another user does.

    A killed agent leaves its endpoint file, and another process may listen on its port by now. That process must not get
    the token. If the endpoint has a certificate, the client checks the certificate instead.

    Raises:
        StoreDenied: another user may have written the file.
    """
    endpoint = read_endpoint(directory)
    if endpoint is None or endpoint.tls_sha256:
        return endpoint
    users = {listener.uid for listener in listeners_on(endpoint.port)}
    return endpoint if users == {os.geteuid()} else None


def next_identity(directory: Path, node_id: str) -> Identity:
    """The identity of the agent that starts now. The agent stores it by `keep_identity`, for the next start.

    If `node.json` was replaced or removed, the store now has another node id, and this node gets new tokens. With the old
    tokens, peers would take its answers for those of the earlier node.

    Raises:
        StoreError: the system lacks the descriptors or memory to read the file. No new tokens are drawn: peers have those
            in the file.
    """
    try:
        fields = json.loads(read_private(directory / _IDENTITY_NAME))
        token, owner_token = str(fields["token"]), str(fields["owner_token"])
        if fields.get("node_id", node_id) == node_id:
            port, incarnation = int(fields["port"]), int(fields["incarnation"]) + 1
            if 0 <= port < 1 << 16 and 0 < incarnation < 1 << 62:  # else the file is damaged
                return Identity(token, port, incarnation, owner_token, node_id)
    except FileNotFoundError:
        return Identity.draw(1, node_id)
    except OSError as exc:
        raise_shortage(exc, directory / _IDENTITY_NAME)
    except (ValueError, KeyError, TypeError):
        pass
    return Identity.draw(int(time.time()), node_id)  # any number of starts that is larger than the lost one


def keep_identity(directory: Path, identity: Identity) -> None:
    write_file(directory / _IDENTITY_NAME, json.dumps(asdict(identity)).encode(), mode=0o600)


def write_metrics_token(directory: Path, tokens: Tokens) -> None:
    """Writes the file that an operator copies for a scraper. It stays after the agent's end."""
    write_file(directory / _FOR_SCRAPERS_NAME, tokens.scraper.encode(), mode=0o600)


def remove_endpoint(directory: Path) -> None:
    """Removes the endpoint file. If the disk refuses, the file stays, and clients find that no agent listens."""
    with contextlib.suppress(OSError):
        (directory / _ENDPOINT_NAME).unlink()


def root_lock(directory: Path, within_s: float = 0.0) -> FileLock | None:
    """The lock that the agent of a root holds while it runs. None: another agent still holds the lock after `within_s`."""
    return FileLock.take_within(directory / LOCK_NAME, within_s)


def permanent_lock(directory: Path) -> FileLock | None:
    """The lock of a permanent agent: one without `idle_exit_s`, which no rank started. None: another such agent holds it.

    An agent that ranks started exits once it sees that the lock is held.
    """
    return FileLock.take_within(directory / _STAYING_NAME, _TEST_S)


def has_permanent_agent(directory: Path) -> bool:
    """Whether a permanent agent serves the root, or waits to serve it.

    The two agents may be in different network namespaces, so a lock shows it. No file is created: the disk may be full.
    """
    return is_there(directory / _STAYING_NAME) and FileLock.is_taken(directory / _STAYING_NAME, shared=True)


def is_free(directory: Path) -> bool:
    """Whether no agent holds the root's lock. An agent that serves or starts holds it."""
    return not FileLock.is_taken(directory / LOCK_NAME)


def client_lock(directory: Path, within_s: float) -> FileLock | None:
    """The shared lock of each process that uses the agent. None: an agent that exits still holds it after `within_s`."""
    return FileLock.take_within(directory / _CLIENTS_NAME, within_s, shared=True)


def shut_out_clients(directory: Path) -> bool:
    """Takes the clients' lock until this process ends, so that no rank begins to use an agent that exits.

    False: there is a client already, and the lock was not taken.
    """
    return FileLock.acquire(directory / _CLIENTS_NAME) is not None


def has_clients(directory: Path) -> bool:
    """Whether any process still uses this root's agent; a process that died holds no lock."""
    return is_there(directory / _CLIENTS_NAME) and FileLock.is_taken(directory / _CLIENTS_NAME)


class AlreadyServed(AgentUnavailable):
    """Another agent holds the root's lock. It may have been killed a moment ago."""


def served_already(root: str, directory: Path) -> AlreadyServed:
    """The error of a second agent of one root. Its hint has the command that ends the first agent."""
    endpoint = read_endpoint(directory)
    pid = "its pid" if endpoint is None else endpoint.pid
    shown = "" if endpoint is None else f" (pid {endpoint.pid})"
    return AlreadyServed(f"Another agent already serves {root}{shown}.", f"Use that one, or end it: `kill {pid}`.")
