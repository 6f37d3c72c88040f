"""Where an agent listens, and which address ranks and other nodes get for it, by IPv4 and IPv6."""

import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from replicated_ckpt.agent.http.server import DualStackServer
from replicated_ckpt.dcp.agreement import node_post
from replicated_ckpt.dcp.agreement.node_post import find_host
from replicated_ckpt.environment import HOST_ENV
from replicated_ckpt.errors import ConfigInvalid
from replicated_ckpt.node.peers.address_book import PeerBook, listening_host
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from tests.agent.agents import running_agent

needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")


@needs_ipv6
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_an_agent_on_all_addresses_is_reached_by_ipv4_and_ipv6(tmp_path: Path, everywhere: str, host: str) -> None:
    """An agent that listens on 0.0.0.0, as in the launcher files, also answers on a network with IPv6 only."""
    with running_agent(tmp_path / "node", "--host", everywhere) as agent:
        port, tls = agent.endpoint.port, agent.endpoint.tls_sha256
        address = AgentAddress(agent.endpoint.node_id, host, port, agent.endpoint.owner_token, tls_sha256=tls)
        with AgentClient(address) as client:
            assert client.call("GET", "/v1/status")["node_id"] == agent.endpoint.node_id


@needs_ipv6
@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_client_address_keeps_its_family(everywhere: str, host: str) -> None:
    """A dual-stack server sees an IPv4 client under its IPv4 address. The address book gets that address of a peer."""
    with DualStackServer((everywhere, 0), BaseHTTPRequestHandler) as server:
        assert server.server_address[0] == everywhere
        with socket.create_connection((host, server.server_port)):
            request, found = server.get_request()
            request.close()
    assert found[0] == host


def test_no_name_is_looked_up_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer from DNS, a lookup takes longer than ranks wait for an agent."""
    monkeypatch.setattr(socket, "gethostbyaddr", lambda name: pytest.fail(f"looked up {name}"))
    DualStackServer(("0.0.0.0", 0), BaseHTTPRequestHandler).server_close()


@pytest.mark.parametrize(
    ("peers", "host"),
    [([], "127.0.0.1"), (["127.0.0.1"], "127.0.0.1"), (["127.0.0.1", "10.0.0.2"], "0.0.0.0"), (["fd00::b"], "::")],
)
def test_an_agent_listens_where_the_nodes_that_it_has_met_reach_it(tmp_path: Path, peers: list[str], host: str) -> None:
    """An agent without an address of its own listens on all addresses, by IPv4 or IPv6, if its book has a peer on
    another host.
    """
    directory = LocalStore(tmp_path).agent_directory()
    met = [AgentAddress(f"{number:012x}", peer, 7777, "t", tls_sha256="a" * 64) for number, peer in enumerate(peers)]
    PeerBook(directory).learn(met)
    assert listening_host(directory) == host


@pytest.mark.parametrize(
    ("text", "host"), [("[fd00::a]", "fd00::a"), ("fd00::a", "fd00::a"), ("node-3.cluster", "node-3.cluster")]
)
def test_an_ipv6_address_may_have_brackets(monkeypatch: pytest.MonkeyPatch, text: str, host: str) -> None:
    """An IPv6 address may have the brackets that URLs need."""
    monkeypatch.setenv(HOST_ENV, text)
    assert find_host()[0] == host


@pytest.mark.parametrize("text", ["http://node-3", "node 3", "[fd00::a]:29600"])
def test_an_invalid_host_variable_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The rank with the wrong variable raises an error with the name of the variable."""
    monkeypatch.setenv(HOST_ENV, text)
    with pytest.raises(ConfigInvalid, match=HOST_ENV):
        find_host()


@pytest.mark.parametrize("has_default_route", [True, False])
def test_a_link_local_address_is_given_to_no_other_host(
    monkeypatch: pytest.MonkeyPatch, has_default_route: bool
) -> None:
    """A link-local address is useless on another host: the address of the default route is used, or the user must set
    one.
    """
    routes = {"fe80::b%eth0": "fe80::a", "2001:db8::1": "fd00::a" if has_default_route else None}
    monkeypatch.setattr(node_post, "_source_address", routes.get)
    monkeypatch.delenv(HOST_ENV, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "fe80::b%eth0")
    if has_default_route:
        assert find_host()[0] == "fd00::a"
    else:
        with pytest.raises(ConfigInvalid, match="link-local") as raised:
            find_host()
        assert HOST_ENV in raised.value.hint
