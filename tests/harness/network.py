"""A network for simulated nodes: each is a network namespace with two links to a switch. Each link can be cut alone.

Ranks communicate over `eth0`, and agents over `eth1`. So a node's store can be cut off while its ranks continue, as on
hosts with a separate storage network.
"""

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.harness.cluster import Cluster

RANKS, AGENTS = "eth0", "eth1"
NOBODY = "02:00:00:00:00:ff"  # a hardware address that no node has, so that frames to it are lost


def ranks_address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def agents_address(node: int) -> str:
    return f"10.78.0.{node + 1}"


@dataclass(frozen=True)
class Network:
    """Links are cut at the switch, so that neither end is notified. Any process of the harness may cut them."""

    name: str

    def cut(self, node: int) -> None:
        """Cuts this node off from all others."""
        self._set(node, "down", RANKS, AGENTS)

    def cut_store(self, node: int) -> None:
        """Cuts the node's agent off, and its ranks from all other agents. The ranks still reach each other."""
        self._set(node, "down", AGENTS)

    def heal(self, node: int) -> None:
        self._set(node, "up", RANKS, AGENTS)

    def cut_between(self, one: int, other: int) -> None:
        """Cuts the agents of these two nodes off from each other. They still reach all others."""
        for here, there in ((one, other), (other, one)):
            target = [agents_address(there), "dev", AGENTS]
            _ip("-n", f"{self.name}-{here}", "neighbour", "replace", *target, "lladdr", NOBODY, "nud", "permanent")

    def heal_between(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            _ip("-n", f"{self.name}-{here}", "neighbour", "del", agents_address(there), "dev", AGENTS)

    def drop_port(self, node: int, port: int) -> None:
        """A firewall on this node drops packets to a TCP port: connections to it get no answer."""
        _ip("-n", f"{self.name}-{node}", "rule", "add", "ipproto", "tcp", "sport", str(port), "blackhole")

    def sent_bytes(self, node: int, link: str) -> int:
        """Bytes that this node has sent over one of its links."""
        told: list[dict[str, Any]] = json.loads(_ip("-n", f"{self.name}-{node}", "-s", "-j", "link", "show", link))
        return int(told[0]["stats64"]["tx"]["bytes"])

    def _set(self, node: int, state: str, *links: str) -> None:
        for link in links:
            _ip("-n", self.name, "link", "set", f"{link}-{node}", state)


def why_no_network() -> str | None:
    """The reason why this machine cannot have such a network. None: it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2's `ip`"
    probe = _new_name()
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None if made.returncode == 0 else f"network namespaces cannot be made here: {made.stderr.strip()}"


@contextmanager
def network_of(cluster: Cluster) -> Iterator[Network]:
    """Connects the cluster's nodes by a network of their own, which is removed afterwards. Close the cluster first."""
    network = Network(_new_name())
    with ExitStack() as made:
        _namespace(network.name, made)
        for link in (RANKS, AGENTS):
            _ip("-n", network.name, "link", "add", f"{link}-all", "type", "bridge")
            _ip("-n", network.name, "link", "set", f"{link}-all", "up")
        for index, node in enumerate(cluster.nodes):
            node.netns = f"{network.name}-{index}"
            node.address = ranks_address(index)
            node.environment |= {"GLOO_SOCKET_IFNAME": RANKS, "REPLICATED_CKPT_HOST": agents_address(index)}
            _namespace(node.netns, made)
            _plug(network.name, index, RANKS, ranks_address(index))
            _plug(network.name, index, AGENTS, agents_address(index))
        yield network


def _new_name() -> str:
    """A name with the id of this process, which identifies the remains of a killed one."""
    return f"rckpt-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _namespace(name: str, made: ExitStack) -> None:
    _ip("netns", "add", name)
    made.callback(_ip, "netns", "del", name)
    _ip("-n", name, "link", "set", "lo", "up")


def _plug(switch: str, node: int, link: str, address: str) -> None:
    netns, port = f"{switch}-{node}", f"{link}-{node}"
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", link, "netns", netns)
    _ip("-n", switch, "link", "set", port, "master", f"{link}-all", "up")
    _ip("-n", netns, "address", "add", f"{address}/24", "dev", link)
    _ip("-n", netns, "link", "set", link, "up")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
