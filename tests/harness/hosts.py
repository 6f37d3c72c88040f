"""Hosts as users have them: each with its own address, name, /tmp and disk, and its store at the same path."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from replicated_ckpt.environment import HOST_ENV
from tests.harness.cluster import Cluster
from tests.harness.network import Network, network_of, why_no_network
from tests.harness.zygote import REPOSITORY

_TMP = Path("/tmp")
_BASE = "/var/tmp"


@dataclass(frozen=True)
class Hosts:
    """A cluster and its network. Its nodes determine their own addresses, as on a user's hosts."""

    cluster: Cluster
    network: Network


def why_no_hosts() -> str | None:
    """The reason why this machine cannot have hosts. None: it can."""
    if any(Path(path).is_relative_to(_TMP) for path in (REPOSITORY, sys.executable, sys.prefix)):
        return "a /tmp of its own would hide this repository, or its Python, from a host"
    return why_no_network()


@contextmanager
def hosts_of(count: int, environment: dict[str, str]) -> Iterator[Hosts]:
    """Creates `count` hosts. Afterwards nothing of them is left."""
    base = Path(tempfile.mkdtemp(prefix="rckpt-hosts-", dir=_BASE))
    try:
        bare = Cluster(base / "cluster", count, private_mounts=True, environment=environment, quick_exit=True)
        with network_of(bare) as network, bare as cluster:
            names = [f"{node.address} host-{index}" for index, node in enumerate(cluster.nodes)]
            (base / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            for index, node in enumerate(cluster.nodes):
                tmp = base / f"tmp-{index}"
                tmp.mkdir(mode=0o1777)
                node.hostname, node.own = f"host-{index}", {str(_TMP): tmp, "/etc/hosts": base / "hosts"}
                node.environment["TMPDIR"] = str(_TMP)
                del node.environment[HOST_ENV]
            yield Hosts(cluster, network)
    finally:
        shutil.rmtree(base)
