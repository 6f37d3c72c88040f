"""TLS: switched on by a certificate and its key; nothing is said to an agent that has another one."""

import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.errors import ConfigInvalid, StoreDenied, StoreUnavailable
from replicated_ckpt.stores.agent_client import AgentClient
from replicated_ckpt.stores.tls import fingerprint, server_context
from tests.agent.agents import running_agent
from tests.agent.test_agent import begin, committed, sent
from tests.multiprocess.cluster import Cluster, call

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
DATA = os.urandom(3 << 20)


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A new self-signed certificate and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*command, "-out", cert, "-keyout", key], check=True, capture_output=True, timeout=60)
    return str(cert), str(key)


def test_everything_works_over_it(tmp_path: Path) -> None:
    """A shard goes in, is committed and read by range, and the address says which certificate it was."""
    cert, key = certificate(tmp_path, "node")
    with running_agent(tmp_path / "a", "--tls-cert", cert, "--tls-key", key) as agent:
        assert agent.endpoint.tls_sha256 == fingerprint(cert)
        name = begin(agent, 2, checkpoint_id="step-2")
        sent(agent, name, DATA)
        expected = committed(agent, 1, DATA)
        with agent.client() as client:
            raw = bytearray(1000)
            path = f"/v1/files/{'1' * 32}/__0_0.distcp?checkpoint_id=step-1"
            client.read_range(path, 5000, memoryview(raw))
            assert raw == DATA[5000:6000]
            assert expected.size_bytes > len(DATA)


def test_nothing_is_said_to_another_certificate(tmp_path: Path) -> None:
    """Who has the address but not the key gets no token: the connection ends before a byte of the request is sent."""
    cert, key = certificate(tmp_path, "node")
    other, _ = certificate(tmp_path, "other")
    with running_agent(tmp_path / "a", "--tls-cert", cert, "--tls-key", key) as agent:
        address = replace(agent.endpoint.address(), tls_sha256=fingerprint(other))
        with AgentClient(address) as client, pytest.raises(StoreDenied, match="certificate"):
            client.call("GET", "/v1/status")


def test_plain_talk_is_not_answered(tmp_path: Path) -> None:
    """An agent with a certificate never speaks plainly, and one that dawdles over its handshake hurts nobody."""
    cert, key = certificate(tmp_path, "node")
    with (
        running_agent(tmp_path / "a", "--tls-cert", cert, "--tls-key", key) as agent,
        socket.create_connection((agent.endpoint.host, agent.endpoint.port)),  # says nothing
    ):
        plain = replace(agent.endpoint.address(), tls_sha256="")
        with AgentClient(plain) as client, pytest.raises(StoreUnavailable):
            client.call("GET", "/v1/status")
        with agent.client() as client:
            assert client.call("GET", "/v1/status")["node_id"] == agent.endpoint.node_id


def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    """A wrong file is an error that names it, before the agent listens."""
    cert, key = certificate(tmp_path, "node")
    _, other = certificate(tmp_path, "other")
    for pair in ((key, cert), (cert, other), (str(tmp_path / "none"), key)):
        with pytest.raises(ConfigInvalid, match="certificate"):
            server_context(*pair)


@pytest.mark.multiprocess
def test_ranks_save_and_load_over_it(tmp_path: Path) -> None:
    """With the environment set nothing else is needed: the agents that ranks start speak TLS, and a node can be lost."""
    cert, key = certificate(tmp_path, "node")
    environment = {"REPLICATED_CKPT_TLS_CERT": cert, "REPLICATED_CKPT_TLS_KEY": key}
    with Cluster(tmp_path / "cluster", 2, environment=environment) as cluster:
        saved = cluster.launch([call("state.save", kinds=["plain"], checkpoint_id="step-1")], nodes=[0, 1])
        endpoint = (cluster.nodes[0].disk / ".agent" / "endpoint.json").read_text()
        assert fingerprint(cert) in endpoint
        cluster.nodes[0].lose()
        loaded = cluster.launch([call("state.load", kinds=["plain"], checkpoint_id="latest")], nodes=[0, 1])
        assert loaded.digests(0) == saved.of(0)
