"""The address book: the peers that this node has met, kept across restarts. Also the nodes with two agents."""

import contextlib
import json
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from replicated_ckpt.errors import ConfigInvalid, ObjectMissing, ReplicatedCkptError, StoreDenied, StoreError
from replicated_ckpt.stores.files.durable import fsync_directory, raise_shortage, translate_errors, write_file
from replicated_ckpt.stores.files.ownership import read_private
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.tls import PLAIN_HINT, is_loopback, is_network_trusted, is_plain_allowed

log = logging.getLogger(__name__)

_PEERS_NAME = "peers.json"
_PEERS_MAX = 8192  # a job that makes up nodes must not grow the file without end
_BOOK, _FROM = "the address book", ", which has it from "
INTRODUCE_HINT = "The next save or load of a job with ranks on both nodes introduces them."
_reported_damaged = set[Path]()


def _is_downgrade(peer: AgentAddress, known: Mapping[str, AgentAddress]) -> bool:
    """Whether an address has no fingerprint although its node must be reached by TLS."""
    if peer.tls_sha256 or is_network_trusted():
        return False
    return not is_plain_allowed(peer.host) or (peer.node_id in known and bool(known[peer.node_id].tls_sha256))


def _as_given(peer: AgentAddress) -> AgentAddress:
    """The address with its first origin, without the address books that passed it on."""
    first = peer.origin.rpartition(_FROM)[2]
    return replace(peer, origin="" if first.startswith(_BOOK) else first)


class _Known(NamedTuple):
    """The content of the book: addresses by node, nodes that announced their exit, and nodes that the user removed."""

    peers: dict[str, AgentAddress]
    away: frozenset[str] = frozenset()
    forgotten: frozenset[str] = frozenset()


class PeerBook:
    """The latest address of each node, and the nodes that announced their exit.

    The file holds tokens, so only this user can read it. Safe to use concurrently. A damaged file counts as empty, with one
    warning per process. If the system lacks descriptors or memory to read it, all methods but `count` raise StoreError.

    `given`: addresses that the user of this process names. They are read like those of the file, and never stored.
    `unanswered`: places that the user names as well, where no agent answered.
    """

    def __init__(
        self,
        directory: Path,
        given: Sequence[AgentAddress] = (),
        unanswered: Mapping[AgentAddress, ReplicatedCkptError] | None = None,
    ) -> None:
        self._given = {peer.node_id: peer for peer in given}
        self.unanswered = {} if unanswered is None else unanswered
        self._path = directory / _PEERS_NAME
        self.duplicate_nodes = DuplicateNodes()
        self._lock = threading.Lock()

    def learn(self, peers: Sequence[AgentAddress]) -> None:
        """Stores current addresses, from ranks or from the nodes themselves, in place of older ones.

        Their nodes no longer count as away.

        Raises:
            StoreDenied: an address has no certificate fingerprint, but its node has one, or must be reached by TLS.
        """
        known = {peer.node_id: peer for peer in self.read_all()}
        for peer in peers:
            # A stolen token must not lead this node to send data in the clear where TLS was known.
            if _is_downgrade(peer, known):
                detail = "this address has no certificate fingerprint, so it is not used"
                raise StoreDenied(peer.label, "store the address of", "", detail, PLAIN_HINT)
        self._merge({peer.node_id: _as_given(peer) for peer in peers}, returned={peer.node_id for peer in peers})

    def leave(self, node_id: str) -> None:
        """Records that a node's agent has announced its exit: the node's disk is intact."""
        self._merge({}, returned=(), left={node_id})

    def forget(self, node_id: str) -> bool:
        """Durably removes a node; returns whether it was known. A job with ranks on that node introduces it again."""
        with self._lock:
            known = self._read()
            if known.peers.pop(node_id, None) is None:
                return False
            self._write(known._replace(away=known.away - {node_id}, forgotten=known.forgotten | {node_id}))
        return True

    def count(self) -> int:
        """How many nodes are known; 0 where the book cannot be read now."""
        with contextlib.suppress(StoreError):
            return len(self._read().peers)
        return 0

    def is_away(self, node_id: str) -> bool:
        return node_id in self._read().away

    def read_forgotten(self) -> frozenset[str]:
        """The nodes that the user has removed and that no job has introduced again."""
        return self._read().forgotten

    def address_of(self, node_id: str) -> AgentAddress:
        """The address of a node's agent.

        Raises:
            ObjectMissing: it was never introduced here.
        """
        if node_id in self._given:
            return self._given[node_id]
        found = self._read().peers.get(node_id)
        if found is None:
            raise ObjectMissing(
                "this agent's address book", "find", node_id[:80], "it was not introduced", INTRODUCE_HINT
            )
        return self._with_origin(found)

    def read_all(self) -> tuple[AgentAddress, ...]:
        """The peers met so far. A damaged file counts as none: jobs introduce the nodes again.

        Raises:
            StoreDenied: another user of the host can have written it.
        """
        stored = (peer for peer in self._read().peers.values() if peer.node_id not in self._given)
        return (*map(self._with_origin, stored), *self._given.values())

    def _with_origin(self, peer: AgentAddress) -> AgentAddress:
        """The address with its origin for error messages: this book, and where the book has it from."""
        source = f"{_FROM}{peer.origin}" if peer.origin else ""
        return replace(peer, origin=f"{_BOOK} {self._path}{source}")

    def _merge(self, news: Mapping[str, AgentAddress], returned: Collection[str], left: Collection[str] = ()) -> None:
        with self._lock:
            known = self._read()
            met_before = {node: peer for node, peer in known.peers.items() if node not in news}
            still_away = (known.away | set(left)) - set(returned)
            # peers that were met last come last: a full book drops the first ones
            after = _Known({**met_before, **news}, still_away, known.forgotten - news.keys())
            # Each save and load comes here: without news the disk is not touched.
            if after != known:
                self._write(after)

    def _write(self, known: _Known) -> None:
        entries: list[dict[str, Any]] = [{"node_id": node, "forgotten": True} for node in sorted(known.forgotten)]
        entries += [{**peer.to_json(), "away": peer.node_id in known.away} for peer in known.peers.values()]
        with translate_errors(str(self._path.parent), "write", _PEERS_NAME):
            write_file(self._path, json.dumps(entries[-_PEERS_MAX:]).encode(), mode=0o600)
            fsync_directory(self._path.parent.parent)  # the directory may be as new as the file

    def _read(self) -> _Known:
        known = _Known({})
        try:
            entries: list[Mapping[str, Any]] = json.loads(read_private(self._path))
        except (ValueError, RecursionError) as exc:
            # Damaged: jobs introduce their nodes again, and no peer is made up from half a file.
            self._report_damage(exc)
            return known
        except OSError as exc:
            raise_shortage(exc, self._path)  # otherwise the next write would drop all other nodes
            return known
        away, forgotten = set[str](), set[str]()
        for entry in entries if isinstance(entries, list) else []:
            # an invalid entry must not hide the valid ones
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                if entry.get("forgotten"):
                    forgotten.add(str(entry["node_id"]))
                    continue
                peer = AgentAddress.from_json(entry)
                known.peers[peer.node_id] = peer
                if entry.get("away"):
                    away.add(peer.node_id)
        _reported_damaged.discard(self._path)
        return known._replace(away=frozenset(away), forgotten=frozenset(forgotten))

    def _report_damage(self, exc: Exception) -> None:
        if self._path in _reported_damaged:
            return
        _reported_damaged.add(self._path)
        log.warning(
            "the address book %s is damaged and counts as empty: %s. All checkpoints are safe, but this node reaches no "
            "other one. %s Until then, commands reach them by `--nodes HOST:PORT,...`.",
            self._path,
            exc,
            INTRODUCE_HINT,
        )


def listening_host(directory: Path) -> str:
    """The default of `--host`: loopback, unless this node has met a node on another host."""
    hosts = [peer.host for peer in PeerBook(directory).read_all()]
    if all(map(is_loopback, hosts)):
        return "127.0.0.1"
    return "::" if any(":" in host for host in hosts) else "0.0.0.0"  # noqa: S104 - a token guards it


CALL_BACK_STEP_S = 0.6
"""For each of three steps: connect, handshake, answer. The sender of the greeting waits for all of them."""


@dataclass(frozen=True)
class AgentIdentity:
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
    def from_json(cls, fields: Mapping[str, Any]) -> "AgentIdentity":
        """Raises KeyError, TypeError: a field is missing or wrong."""
        is_leaving, tls_sha256 = fields["is_leaving"] is True, str(fields["tls_sha256"])
        start_id = str(fields.get("start_id", ""))
        return cls(str(fields["node_id"]), index(fields["incarnation"]), is_leaving, tls_sha256, start_id)

    def is_duplicate_of(self, other: "AgentIdentity") -> bool:
        """Whether these are two agents of one node. One agent that answers at two addresses is not a duplicate."""
        if self.node_id != other.node_id:
            return False
        # A cloned disk also counts the same starts: only the start id distinguishes the two agents.
        if self.start_id and other.start_id:
            return self.start_id != other.start_id
        return self.incarnation != other.incarnation


def ask_identity(address: AgentAddress) -> AgentIdentity:
    """The identity of the agent at an address. Over TLS, it has proved to have the key of the address's certificate.

    Raises:
        StoreUnavailable: no answer. StoreDenied: another agent answers. PeerProtocolError: an invalid answer.
    """
    # A deadline as well as a time-out: a byte now and then would keep the call going.
    with AgentClient(address, CALL_BACK_STEP_S) as client, client.within(CALL_BACK_STEP_S):
        answer = client.call("GET", "/v1/status?brief=1")
    with parsing(f"{address.label} does not report its node"):
        return AgentIdentity.from_json(answer)


_HINT = (
    "One of the disks is a clone of the other. On the clone, stop the agent, and run `rm -r ROOT/node.json ROOT/.agent` "
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
        return ask_identity(one).is_duplicate_of(ask_identity(other))
    except ReplicatedCkptError:
        return False
