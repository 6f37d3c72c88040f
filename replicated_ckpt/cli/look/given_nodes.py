"""`--nodes HOST[:PORT],...`: further nodes that a command asks, and how it proves its right to ask them."""

import argparse
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.agent.state.listeners import listeners_on
from replicated_ckpt.agent.state.rights import prove, read_owner_key, show_key
from replicated_ckpt.config import parse_ports
from replicated_ckpt.environment import OWNER_KEY_ENV, PORT_ENV
from replicated_ckpt.errors import AgentUnavailable, ConfigInvalid, StoreDenied, StoreUnavailable
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.store import EmptyStore, LocalStore
from replicated_ckpt.stores.peer.answer import parsing
from replicated_ckpt.stores.peer.client import HOST_PATTERN, PROGRESS_TIMEOUT_S, AgentAddress, AgentClient
from replicated_ckpt.stores.peer.reach import reach_hint
from replicated_ckpt.stores.peer.tls import is_loopback, is_network_trusted, is_plain_allowed, pin_name
from replicated_ckpt.stores.threads import FanOut
from replicated_ckpt.wording import one_line

_ORIGIN = "--nodes"
_Place = tuple[str, int | None]
_KEY_HINT = f"Set {OWNER_KEY_ENV} to the key file with which that agent was started (see docs/security.md)."


def add_nodes_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        type=_parse_places,
        default=(),
        metavar="HOSTS",
        help="also ask the agents at HOST[:PORT],...; without --root, only those. An agent that this node has no address "
        f"of needs {OWNER_KEY_ENV}",
    )


def _parse_places(text: str) -> tuple[_Place, ...]:
    return tuple(map(_parse_place, filter(None, text.split(","))))


def _parse_place(text: str) -> _Place:
    """A host with a port or without. An IPv6 address with a port is in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = text, ""
    host = host.removeprefix("[").removesuffix("]")
    if (
        not host
        or not HOST_PATTERN.fullmatch(host)
        or not (port == "" or (port.isdecimal() and 0 < int(port) < 1 << 16))
    ):
        raise argparse.ArgumentTypeError(f"must be HOST or HOST:PORT, not {text!r}")
    return host, int(port) if port else None


def open_book(store: LocalStore, places: Sequence[_Place]) -> PeerBook:
    """The address book of the node, with the agents at `places`. An agent that does not answer is in it, without its id.

    Raises:
        ConfigInvalid: the address book lacks one of them, and the user has no key. StoreDenied: an agent does not have the
            same key. StoreUnavailable, AgentUnavailable: no agent answers, and the command has no other node to ask.
    """
    directory, own = store.root_agent_directory(), store.read_node_id()
    known = PeerBook(directory).read_all()
    has_own = not isinstance(store, EmptyStore)
    unknown = [
        place for place in places if not (_has_address(known, *place) or (has_own and _is_own(directory, *place)))
    ]
    met = FanOut.run([_locate(*place) for place in unknown], _introduce)
    for error in met.errors.values():
        if not isinstance(error, StoreUnavailable | AgentUnavailable) or not (has_own or met.results):
            raise error
    return PeerBook(directory, [peer for peer in met.results.values() if peer.node_id != own], met.errors)


def _has_address(known: Sequence[AgentAddress], host: str, port: int | None) -> bool:
    there = {host, *_resolve(host)}
    return any((peer.node_id == host or peer.host in there) and port in (None, peer.port) for peer in known)


def _is_own(directory: Path, host: str, port: int | None) -> bool:
    """Whether the place is this node itself, whose store is read from its disk."""
    endpoint = read_endpoint(directory)
    is_port = port is None or (endpoint is not None and endpoint.port == port)
    return is_port and any(map(_is_local, _resolve(host)))


def _is_local(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((ip, 0))  # only an address of this host can be bound
        except OSError:
            return False
    return True


def _resolve(host: str) -> Collection[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return ()  # a node's id, or a name that only the address book has


def _locate(host: str, port: int | None) -> AgentAddress:
    """An unknown agent's address, with host and port in place of its id. Raises ConfigInvalid: its port is unknown."""
    ports = parse_ports(os.environ.get(PORT_ENV, ""))
    if port is None and len(ports) != 1:
        hint = (
            f"Name it, as {host}:29600: the log of the agent, ROOT/.agent/log, has it. Or set {PORT_ENV} here as there."
        )
        raise ConfigInvalid(f"The port of the agent on {host} is unknown.", hint)
    there = port or ports[0]
    return AgentAddress(f"{host}:{there}", host, there, "", origin=_ORIGIN)


def _introduce(unknown: AgentAddress) -> AgentAddress:
    """Asks an unknown agent for its identity. Both sides prove that they have the user's key, and neither sends it."""
    key, where = read_owner_key(), unknown.node_id
    if not key:
        raise ConfigInvalid(
            f"No address book here has a node at {where}, so there is no token for its agent.", _KEY_HINT
        )
    address = replace(unknown, tls_sha256=_find_certificate(unknown))
    address = as_owner(address, key)
    challenge = secrets.token_hex(16)
    try:
        with AgentClient(address) as client:
            told = client.call("GET", f"/v1/status?brief=1&challenge={challenge}")
    except StoreDenied as exc:
        raise StoreDenied(where, "ask", "its agent", "it was not started with this user's key file", _KEY_HINT) from exc
    with parsing(f"{address.label} did not return its node's id"):
        found = AgentAddress.from_json(
            {**address.to_json(), **{name: told[name] for name in ("node_id", "incarnation")}}
        )
        proof = str(told["proof"])
    # Without the proof, any process that answers there could make up the output of this command.
    if not hmac.compare_digest(proof.encode(), prove(key, pin_name(address.tls_sha256), challenge).encode()):
        detail = "it does not prove that it has this user's key file, so its answers are not used"
        raise StoreDenied(where, "ask", "its agent", detail, _KEY_HINT)
    return found


def as_owner(address: AgentAddress, key: str) -> AgentAddress:
    """The address with a token that gives the right of the node's own user, if its agent has this key.

    Raises:
        AgentUnavailable: another user may listen at this address, on this host, and would get the token by plain HTTP.
    """
    if not address.tls_sha256 and is_loopback(address.host):
        users = {listener.uid for listener in listeners_on(address.port)}
        if users != {os.geteuid()}:
            raise AgentUnavailable(
                f"Nothing, or a process of another user, listens at {address.host}:{address.port}: no token was sent.",
                f"Start the agent of node {address.node_id}. A save or load then updates its address.",
            )
    return replace(address, token=show_key(key, address.tls_sha256, time.time()))


def _find_certificate(address: AgentAddress) -> str:
    """The fingerprint of the certificate that the agent shows. "": the agent uses plain HTTP, which is allowed there."""
    if is_network_trusted():
        return ""
    try:
        pem = ssl.get_server_certificate((address.host, address.port), timeout=PROGRESS_TIMEOUT_S)
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
    except ssl.SSLError as exc:
        if is_plain_allowed(address.host):
            return ""
        detail = one_line(f"no TLS: {exc}")
        raise StoreUnavailable(address.label, "connect", "TLS", detail, reach_hint(address, exc)) from exc
    except (OSError, UnicodeError) as exc:
        detail = one_line(f"{type(exc).__name__}: {exc}")
        raise StoreUnavailable(address.label, "connect", "/", detail, reach_hint(address, exc)) from exc
