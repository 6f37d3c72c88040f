"""The port of a job's c10d store is still free when rank 0 takes it."""

import socket
from pathlib import Path

import pytest

from replicated_ckpt.drill import cluster


def test_no_connection_is_given_it_meanwhile() -> None:
    """It lies below those that Linux gives to whatever asks for any, and can be listened at."""
    port = cluster.find_free_port()
    assert port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_where_all_ports_are_given_out_any_free_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may be set up so that there are none below."""
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(cluster, "_GIVEN_PORTS", tmp_path / "range")
    with socket.create_server(("127.0.0.1", cluster.find_free_port())):
        pass
