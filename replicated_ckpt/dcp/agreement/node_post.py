"""This process's node: its store, its agent, its lineage, and the fields that it posts for other ranks."""

import ipaddress
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from replicated_ckpt.agent.launch import await_departure, can_hold_agent, ensure_agent, is_only_read, running_agent
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import NODE_NAME, SEQUENCE_FLOOR_MAX, checkpoint_id_under
from replicated_ckpt.core.lineage import Version
from replicated_ckpt.core.manifest import list_domains
from replicated_ckpt.core.upkeep.marks import NO_MARKS, Marks
from replicated_ckpt.core.upkeep.policy import scope_of
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.dcp.runtime.user_code import warn
from replicated_ckpt.environment import HOST_ENV, PLAIN_ENV, check_encodable
from replicated_ckpt.errors import AgentUnavailable, ConfigInvalid, StoreUnavailable
from replicated_ckpt.stores.files.durable import translate_errors
from replicated_ckpt.stores.files.existence import is_there
from replicated_ckpt.stores.local.store import NO_NODE, LocalStore
from replicated_ckpt.stores.peer.client import HOST_PATTERN, AgentAddress, AgentClient
from replicated_ckpt.stores.peer.tls import can_encrypt, is_loopback, is_network_trusted

log = logging.getLogger(__name__)

_DOCUMENTATION_ADDRESSES = ("192.0.2.1", "2001:db8::1")
"""Addresses that no network has: the route to them is the default route. Source: RFC 5737, RFC 3849."""
_PLAIN_WARNING = (
    "Nodes talk to each other without encryption: this Python lacks the package `cryptography`, which makes "
    f"certificates. Run `pip install cryptography` on all nodes. On a trusted network, set {PLAIN_ENV}=1 "
    "instead."
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class NodePost:
    """A node as one of its ranks registers it. `store_inode` distinguishes two stores that one host sees.

    `silence` is the reason why the node's agent is not asked, and "" if the agent answers.
    `invitation` lets the coordinator open saves at its agent and introduce the job's nodes: see `Right.JOB`.
    """

    node_id: str
    host: str
    boot_id: str
    store_inode: str
    domain: str | None
    address: AgentAddress
    silence: str = ""
    invitation: str = ""
    root: str = ""

    @property
    def domains(self) -> tuple[str, ...]:
        return list_domains(self.domain, self.boot_id, self.host)

    def opener(self) -> AgentAddress:
        """The address with the coordinator's rights."""
        return replace(self.address, token=self.invitation) if self.invitation else self.address

    # The generated repr would put the agent's token into logs.
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
            str(fields.get("silence", "")),
            str(fields.get("invitation", "")),
            str(fields.get("root", "")),
        )


@dataclass(frozen=True)
class SeenStore:
    """The store of a node whose agent cannot be asked, as its own ranks see it; `why` is the agent's problem."""

    why: str
    holdings: tuple[Holding, ...]
    unclaimed: tuple[UnclaimedFiles, ...] = ()
    marks: Marks = NO_MARKS


def register_node(store: LocalStore, domain: str | None, *, is_opening: bool = False) -> NodePost:
    """Registers this node, after starting its agent if none runs.

    A node whose agent hangs is registered, too: its `silence` gives the reason. Pass `is_opening` for a save that opens
    now; `ensure_agent` explains it.

    Raises:
        AgentUnavailable, StoreError, ConfigInvalid
    """
    host, origin = find_host()
    try:
        # A job on one host listens on loopback only: no other host can reach its agent.
        bind_host = host if is_loopback(host) else _any_address(host)
        endpoint, silence = ensure_agent(store, bind_host, is_opening=is_opening), ""
    # The agent hangs, but its address is known: it may answer other nodes later, and this rank can still write.
    except AgentUnavailable as exc:
        known = read_endpoint(store.agent_directory())
        if known is None:
            raise
        log.warning("this node's agent does not answer, and the other nodes continue without it: %s", exc)
        endpoint, silence = known, str(exc)
    if not (endpoint.tls_sha256 or can_encrypt() or is_loopback(host) or is_network_trusted()):
        warn(_PLAIN_WARNING)
    address = replace(endpoint.address(host), origin=origin)
    return _post(store, address, silence, endpoint.invitation(), domain)


def register_for_save(store: LocalStore, domain: str | None) -> NodePost:
    """As `register_node`, for a save that is to be opened. Waits until an agent that was told to stop has ended.

    Raises:
        AgentUnavailable, StoreError, ConfigInvalid
    """
    post = register_node(store, domain, is_opening=True)
    # An agent that was told to stop is about to end: the save goes to its successor.
    try:
        is_next = not post.silence and await_departure(store.agent_directory())
    except AgentUnavailable as exc:
        return replace(post, silence=str(exc))
    return register_node(store, domain, is_opening=True) if is_next else post


def register_again(store: LocalStore, before: NodePost) -> NodePost:
    """Registers this node once more in the same save. Meanwhile its agent may have been started again, or may hang."""
    try:
        return register_node(store, before.domain)
    except AgentUnavailable as exc:
        log.warning("this node will publish the checkpoint later: %s", exc)
        return replace(before, silence=str(exc))


def register_for_load(store: LocalStore) -> NodePost | None:
    """Registers this node for a load. Only other nodes need its agent, to read from it. None: there is no store.

    Raises:
        StoreError, ConfigInvalid
    """
    try:
        if can_hold_agent(store):
            post = register_node(store, None)
            if post.silence:
                warn(post.silence)
            return post
        # Another user's agent is never started or asked: the load needs only to read.
        endpoint, silence = (
            None,
            f"{store.root} belongs to another user: this process reads it without asking its agent.",
        )
        if not is_only_read(store):
            endpoint, silence = running_agent(store), f"{store.root} cannot be written, and no agent runs there."
        if endpoint is not None:
            host, origin = find_host()
            return _post(store, replace(endpoint.address(host), origin=origin), "", endpoint.invitation())
    except AgentUnavailable as exc:
        silence = str(exc)
        warn(silence)
    # No node has claimed this root: nothing of ours lies here.
    node_id = store.read_node_id()
    if node_id == NO_NODE:
        return None
    log.warning("only the ranks of this node read its store: %s", silence)
    return _post(store, AgentAddress(node_id, "", 0, ""), silence)


def _post(
    store: LocalStore, address: AgentAddress, silence: str, invitation: str = "", domain: str | None = None
) -> NodePost:
    name, root = socket.gethostname(), str(store.root)
    with translate_errors(root, "present", NODE_NAME):
        return NodePost(
            address.node_id, name, _read_boot_id(), _inode(store), domain, address, silence, invitation, root
        )


def register_alone(store: LocalStore, domain: str | None) -> NodePost:
    """Registers this node for a job of one process, without starting an agent."""
    node_id = store.node_id()
    address = AgentAddress(node_id, "", 0, "")
    return NodePost(node_id, socket.gethostname(), _read_boot_id(), _inode(store), domain, address)


def _read_boot_id() -> str:
    """The id that all containers of one machine share; the host's name where there is none."""
    return _BOOT_ID.read_text().strip() if is_there(_BOOT_ID) else socket.gethostname()


def _inode(store: LocalStore) -> str:
    status = store.root.stat()
    return f"{status.st_dev}:{status.st_ino}"


def find_host() -> tuple[str, str]:
    """The address under which the other nodes reach this one, and its origin.

    It is REPLICATED_CKPT_HOST if that is set, else the address from which this host reaches MASTER_ADDR. That may be a
    loopback address, if MASTER_ADDR is the name of this host, or a link-local one, which works only with the name of an
    interface. Other hosts can use neither, so this returns the address of the default route then. If MASTER_ADDR itself
    is loopback, all nodes are on this host.

    Raises:
        ConfigInvalid: REPLICATED_CKPT_HOST is not a host, or this host has only link-local addresses.
    """
    override, name = os.environ.get(HOST_ENV), socket.gethostname()
    if override:
        return _host_in(override), f"{HOST_ENV} on {name}"
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if master == "localhost" or is_loopback(master):
        return "127.0.0.1", f"MASTER_ADDR={master} on {name}: all nodes are on one host"
    address = _source_address(master)
    is_bound = address is not None and _is_link_local(address)
    # Debian's /etc/hosts maps a host's own name to 127.0.1.1, which other hosts cannot use.
    if address is not None and not is_loopback(address) and not is_bound:
        return address, f"the route of {name} to MASTER_ADDR={master}"
    routes = [found for found in map(_source_address, _DOCUMENTATION_ADDRESSES) if found and not _is_link_local(found)]
    if is_bound and not routes:
        hint = f"On each node, set {HOST_ENV} to an address under which the others reach it, or change MASTER_ADDR."
        raise ConfigInvalid(
            f"{name} reaches MASTER_ADDR={master} only from {address}, which is a link-local address.", hint
        )
    why = "is link-local" if is_bound else "is itself"
    return next(iter(routes), "127.0.0.1"), f"the default route of {name}, as MASTER_ADDR={master} {why}"


def _host_in(text: str) -> str:
    """The host name or address in the user's setting. An IPv6 address may have brackets there."""
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not HOST_PATTERN.fullmatch(host):
        raise ConfigInvalid(f"{HOST_ENV} is neither a host name nor an address: {text!r}.", "Give one, without a port.")
    return host


def _is_link_local(address: str) -> bool:
    # IPv4 link-local addresses need no interface name to be reached.
    return ":" in address and ipaddress.ip_address(address).is_link_local


def _source_address(destination: str) -> str | None:
    """Local address of a route to `destination`. Nothing is sent: connecting a UDP socket only picks the route."""
    try:
        family, kind, _, _, peer = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    # No such name, or no route: the next way to an address is tried.
    except OSError:
        return None


def _any_address(host: str) -> str:
    return "::" if ":" in host else "0.0.0.0"  # noqa: S104 - peers on other hosts must reach the agent; a token guards it


def id_under(root: str, given: str | os.PathLike[str]) -> str:
    """As `checkpoint_id_under`, for a name that this process can give to a directory.

    Programs written for stock storage pass a path. If it leads below the root, the id is the rest of it: `step-5` for
    `ckpt/step-5` with the root `ckpt`. The path may be relative to the working directory, or contain symbolic links.

    Raises:
        ConfigInvalid: the name is invalid.
    """
    text = os.fspath(given)
    check_encodable("checkpoint_id", text)
    path = PurePath(text)
    above = _root_from_here(root)
    if path.is_absolute():
        # An unprintable path is refused below: it must not reach the file system first.
        above = _find_root(root, path) if text.isprintable() else None
    if above is not None and above in path.parents:
        text = str(path.relative_to(above))
    return checkpoint_id_under(root, text)


def _root_from_here(root: str) -> PurePath | None:
    """The root as a relative path; None: it does not lie below the working directory."""
    with suppress(FileNotFoundError):  # the working directory was removed
        path = PurePath(os.path.relpath(root))
        return path if path.parts and path.parts[0] != ".." else None
    return None


def _find_root(root: str, path: PurePath) -> PurePath | None:
    """The directory above `path` that is the root, symbolic links resolved."""
    real = os.path.realpath(root)
    return next((above for above in path.parents if os.path.realpath(above) == real), None)


ANSWER_WITHIN_S = 30.0
_TRIES = 2
_PAUSE_S = 0.2


def ask_agent(
    store: LocalStore, method: str, path: str, document: Any = None, within_s: float = ANSWER_WITHIN_S
) -> dict[str, Any]:
    """Returns the answer of this node's agent, within `within_s`. If the agent has died, starts it again.

    Raises:
        AgentUnavailable, StoreError: the agent does not answer. Others: the agent has refused.
    """
    deadline = time.monotonic() + within_s
    for tries_left in reversed(range(_TRIES)):
        try:
            endpoint = ensure_agent(store)
            with AgentClient(endpoint.local_address()) as client, client.within(within_s):
                return client.call(method, path, document)
        # The agent may have ended between its endpoint file and the request, as an idle one does.
        except StoreUnavailable:
            if tries_left == 0 or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("the last try returns or raises")


_seen: dict[tuple[Path, str], tuple[str, int]] = {}
"""By root and directory of checkpoints: the lineage that this process continues, and the largest sequence it has seen."""


def remember(store: LocalStore, checkpoint_id: str, newest: Version) -> None:
    """Records the lineage of a load or save of this process. `newest` is the newest save of the lineage seen so far."""
    key = store.root, scope_of(checkpoint_id)
    known = _seen.get(key)
    # A huge number that a damaged store claims must not use up all later ones.
    sequence = min(newest.sequence, SEQUENCE_FLOOR_MAX)
    # Never smaller: after a rollback to an older checkpoint the next save must still be newer than those seen before.
    if known is not None and known[0] == newest.lineage:
        sequence = max(sequence, known[1])
    _seen[key] = newest.lineage, sequence


@contextmanager
def forgotten_on_error(*stores: LocalStore) -> Iterator[None]:
    """If the block raises, this process's next save in these stores continues the same lineage as before the block."""
    roots = {store.root for store in stores}
    before = {key: seen for key, seen in _seen.items() if key[0] in roots}
    try:
        yield
    except BaseException:
        for key in [key for key in _seen if key[0] in roots]:
            del _seen[key]
        _seen.update(before)
        raise


def find_seen_lineage(store: LocalStore, scope: str) -> tuple[str, int] | None:
    """The lineage that this process continues in a directory of checkpoints, and the largest sequence it has seen of it."""
    return _seen.get((store.root, scope))


def join_lineages(stores: Sequence[LocalStore], checkpoint_id: str, newest: Version) -> None:
    """Makes this process's next save continue the lineage of `newest` in each store, newer than all saves in any."""
    seen = [find_seen_lineage(store, scope_of(checkpoint_id)) for store in stores]
    known = [sequence for lineage, sequence in filter(None, seen) if lineage == newest.lineage]
    joined = replace(newest, sequence=max([newest.sequence, *known]))
    for store in stores if newest.lineage else ():
        remember(store, checkpoint_id, joined)
