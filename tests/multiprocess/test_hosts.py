"""Two hosts with their own addresses, names, /tmp and disks: a lost host, a firewall and wrong addresses."""

from collections.abc import Iterator

import pytest

from replicated_ckpt.environment import HOST_ENV, PORT_ENV
from tests.harness.cluster import Results, call
from tests.harness.hosts import Hosts, hosts_of, why_no_hosts
from tests.harness.network import ranks_address
from tests.marks import mark_long
from tests.steps import state

PORT = 29600
SAVE = call(state.save, kinds=["plain"], checkpoint_id="step-1")
LOAD = call(state.load, kinds=["plain"], checkpoint_id="latest")
NO_HOST, NO_ROUTE = "10.77.0.99", "192.0.2.7"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if why := why_no_hosts():
        pytest.skip(why)
    with hosts_of(2, {PORT_ENV: str(PORT)}) as found:
        yield found


def absence_warning(results: Results) -> str:
    """The save's one warning that a node did not answer when the save began."""
    (warning,) = [text for text in results.all_warnings if "did not answer when the save began" in text]
    return warning


def test_a_blank_host_replaces_a_lost_one(hosts: Hosts) -> None:
    """Hosts that share only a network save without a warning. After rank 0's host lost its disk, every rank loads the
    same values.
    """
    cluster = hosts.cluster
    saved = cluster.launch([SAVE], nodes=[0, 1])
    assert saved.all_warnings == []
    cluster.nodes[0].lose()
    assert cluster.run(LOAD, nodes=[0, 1]).digests() == saved.of(SAVE)


def test_a_firewall_that_drops_the_port_is_named(hosts: Hosts) -> None:
    """The save succeeds. Its warning names the address, the port, the firewall and how the address was found: no user
    set it.
    """
    hosts.network.drop_port(1, PORT)
    warning = absence_warning(hosts.cluster.launch([SAVE], nodes=[0, 1]))
    assert f"a firewall drops port {PORT}" in warning
    assert f"{ranks_address(1)}:{PORT} comes from the route of host-1 to MASTER_ADDR={ranks_address(0)}." in warning
    assert f"set {HOST_ENV} to that address there" in warning


@pytest.mark.parametrize("address", mark_long([NO_HOST, NO_ROUTE], keep=[NO_ROUTE]))
def test_an_address_that_leads_nowhere_is_named(hosts: Hosts, address: str) -> None:
    """The save succeeds. Its warning names the address, says that there is no route to it, and names the host to
    correct.
    """
    hosts.cluster.nodes[1].environment[HOST_ENV] = address
    warning = absence_warning(hosts.cluster.launch([SAVE], nodes=[0, 1]))
    assert f"This host has no route to {address}." in warning
    assert f"{address}:{PORT} comes from {HOST_ENV} on host-1." in warning
    assert f"set {HOST_ENV} to that address there" in warning


def test_a_loopback_address_is_named(hosts: Hosts) -> None:
    """The warning says that with a loopback address each host reaches itself, and does not report a dead agent."""
    hosts.cluster.nodes[1].environment[HOST_ENV] = "127.0.0.1"
    warning = absence_warning(hosts.cluster.launch([SAVE], nodes=[0, 1]))
    assert "With 127.0.0.1 each host reaches itself" in warning
    assert f"127.0.0.1:{PORT} comes from {HOST_ENV} on host-1." in warning


@pytest.mark.parametrize(
    ("first", "second"),
    mark_long([("localhost", "localhost"), (None, ranks_address(0))], keep=[(None, ranks_address(0))]),
)
def test_an_address_of_another_node_is_named(hosts: Hosts, first: str | None, second: str) -> None:
    """Another node's agent answers: the save fails. The error names that agent, the setting of the address, and the
    correction.
    """
    if first:
        hosts.cluster.nodes[0].environment[HOST_ENV] = first
    hosts.cluster.nodes[1].environment[HOST_ENV] = second
    attempt = hosts.cluster.attempt([SAVE], nodes=[0, 1], grace_s=30.0)
    for failure in attempt.failures:
        assert "An agent of another node than " in failure
        assert f"{second}:{PORT} comes from {HOST_ENV} on host-1." in failure
        assert f"set {HOST_ENV} on the node to the one under which others reach it" in failure
        assert ("each host reaches itself" in failure) == (second == "localhost")
