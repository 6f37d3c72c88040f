"""The port of a job's c10d store is still free when rank 0 binds it."""

import socket
from pathlib import Path

import pytest

from replicated_ckpt.drill import cluster


def test_the_port_is_not_an_ephemeral_one() -> None:
    """The port lies below the ephemeral ports, and can be bound."""
    port = cluster.find_free_port()
    assert port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_without_other_ports_an_ephemeral_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all ports are ephemeral, any free port is used."""
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(cluster, "_GIVEN_PORTS", tmp_path / "range")
    with socket.create_server(("127.0.0.1", cluster.find_free_port())):
        pass
