"""TLS: traffic between hosts is encrypted, and nothing is sent to an agent with another certificate or none."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.environment import PLAIN_ENV
from replicated_ckpt.errors import ConfigInvalid, SaveAborted, StoreDenied, StoreUnavailable
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer import tls
from replicated_ckpt.stores.peer.answer import file_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient, Upload
from replicated_ckpt.stores.peer.tls import fingerprint, is_loopback, server_context
from tests.agent.agents import HOME, running_agent, stop_agent
from tests.agent.test_agent import begin, committed, send_shard
from tests.harness.cluster import Cluster, call
from tests.steps import state

DATA = os.urandom(3 << 20)
EVERYWHERE = ("--host", "0.0.0.0")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A new self-signed certificate and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*command, "-out", cert, "-keyout", key], check=True, capture_output=True, timeout=60)
    return str(cert), str(key)


@needs_openssl
def test_shards_are_written_and_read_over_tls(tmp_path: Path) -> None:
    """A shard is sent, committed and read by range over TLS, and the endpoint has the fingerprint of the certificate."""
    cert, key = certificate(tmp_path, "node")
    with running_agent(tmp_path / "a", "--tls-cert", cert, "--tls-key", key) as agent:
        assert agent.endpoint.tls_sha256 == fingerprint(cert)
        name = begin(agent, 2, checkpoint_id="step-2")
        send_shard(agent, name, DATA)
        expected = committed(agent, 1, DATA)
        with agent.client() as client:
            raw = bytearray(1000)
            path = file_path("step-1", "1" * 32, "__0_0.distcp")
            client.read_range(path, 5000, memoryview(raw))
            assert raw == DATA[5000:6000]
            assert expected.size_bytes > len(DATA)


@needs_openssl
def test_nothing_is_sent_to_another_certificate(tmp_path: Path) -> None:
    """The connection ends before the request, and so the token, is sent."""
    cert, key = certificate(tmp_path, "node")
    other, _ = certificate(tmp_path, "other")
    with running_agent(tmp_path / "a", "--tls-cert", cert, "--tls-key", key) as agent:
        address = replace(agent.endpoint.address(), tls_sha256=fingerprint(other))
        with AgentClient(address) as client, pytest.raises(StoreDenied, match="certificate"):
            client.call("GET", "/v1/status")


@needs_openssl
def test_plain_http_is_not_answered(tmp_path: Path) -> None:
    """An agent with a certificate does not answer plain HTTP. A client that never finishes its handshake does not block
    others.
    """
    cert, key = certificate(tmp_path, "node")
    with (
        running_agent(tmp_path / "a", "--tls-cert", cert, "--tls-key", key) as agent,
        socket.create_connection((agent.endpoint.host, agent.endpoint.port)),  # never sends a handshake
    ):
        plain = replace(agent.endpoint.address(), tls_sha256="")
        with AgentClient(plain) as client, pytest.raises(StoreUnavailable):
            client.call("GET", "/v1/status")
        with agent.client() as client:
            assert client.call("GET", "/v1/status")["node_id"] == agent.endpoint.node_id


@needs_openssl
def test_an_invalid_certificate_file_is_refused(tmp_path: Path) -> None:
    """A wrong file raises an error with its name before the agent listens."""
    cert, key = certificate(tmp_path, "node")
    _, other = certificate(tmp_path, "other")
    for pair in ((key, cert), (cert, other), (str(tmp_path / "none"), key)):
        with pytest.raises(ConfigInvalid, match="certificate"):
            server_context(*pair)


@needs_openssl
@pytest.mark.multiprocess
def test_ranks_save_and_load_over_tls(tmp_path: Path) -> None:
    """The environment alone makes the agents that ranks start use TLS. After a node is lost, the load returns the same
    bytes.
    """
    cert, key = certificate(tmp_path, "node")
    environment = {"REPLICATED_CKPT_TLS_CERT": cert, "REPLICATED_CKPT_TLS_KEY": key}
    with Cluster(tmp_path / "cluster", 2, environment=environment, quick_exit=True) as cluster:
        saved = cluster.run(call(state.save, kinds=["plain"], checkpoint_id="step-1"), nodes=[0, 1])
        endpoint = (cluster.nodes[0].disk / ".agent" / "endpoint.json").read_text()
        assert fingerprint(cert) in endpoint
        cluster.nodes[0].lose()
        loaded = cluster.run(call(state.load, kinds=["plain"], checkpoint_id="latest"), nodes=[0, 1])
        assert loaded.digests() == saved


# Without configuration -----------------------------------------------------------------------------------------------


def test_an_agent_that_others_reach_has_a_certificate_of_its_own(tmp_path: Path) -> None:
    """An agent on all addresses makes a private certificate at its first start, and keeps it, later also on loopback."""
    found = []
    for arguments in (EVERYWHERE, EVERYWHERE, ()):
        with running_agent(tmp_path / "a", *arguments) as agent:
            found.append(agent.endpoint.tls_sha256)
            with AgentClient(agent.endpoint.local_address()) as client:
                assert client.call("GET", "/v1/status")["node_id"] == agent.endpoint.node_id
            plain = replace(agent.endpoint.local_address(), tls_sha256="")
            with AgentClient(plain) as client, pytest.raises(StoreUnavailable):
                client.call("GET", "/v1/status")
    path = tmp_path / "a" / ".agent" / "tls.pem"
    assert found == [fingerprint(str(path))] * 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_takes_the_agents_certificate(tmp_path: Path) -> None:
    """The curl command of the runbook gets an answer."""
    with running_agent(tmp_path / "a", *EVERYWHERE) as agent:
        certificate = tmp_path / "a" / ".agent" / "tls.pem"
        url = f"https://localhost:{agent.endpoint.port}/v1/status"
        head = f"Authorization: Bearer {agent.endpoint.owner_token}"
        command = ["curl", "-sS", "-m", "5", "--cacert", str(certificate), "-H", "@-", url]
        shown = subprocess.run(command, input=head.encode(), capture_output=True, check=True)
        assert json.loads(shown.stdout)["node_id"] == agent.endpoint.node_id


def test_an_agent_on_loopback_makes_no_certificate(tmp_path: Path) -> None:
    """An agent that listens only on loopback makes no certificate."""
    with running_agent(tmp_path / "a") as agent:
        assert agent.endpoint.tls_sha256 == ""
        assert not (tmp_path / "a" / ".agent" / "tls.pem").exists()


def test_plain_http_must_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--plain`, or the variable, an agent on all addresses serves HTTP. Only clients with the variable connect to
    it.
    """
    with running_agent(tmp_path / "a", *EVERYWHERE, "--plain") as agent:
        assert agent.endpoint.tls_sha256 == ""
        beyond = replace(
            agent.endpoint.local_address(), host="0.0.0.0"
        )  # connects to this host, but is not a loopback address
        with AgentClient(beyond) as client, pytest.raises(StoreDenied, match="no fingerprint"):
            client.call("GET", "/v1/status")
        monkeypatch.setenv(PLAIN_ENV, "1")
        with AgentClient(beyond) as client:
            assert client.call("GET", "/v1/status")["node_id"] == agent.endpoint.node_id
    with running_agent(tmp_path / "b", *EVERYWHERE) as agent:  # the agent inherits the variable
        assert agent.endpoint.tls_sha256 == ""


def test_a_damaged_certificate_is_an_error_with_a_hint(tmp_path: Path) -> None:
    """The agent does not replace a damaged certificate by itself, because other nodes would not trust the new one."""
    (tmp_path / "a" / ".agent").mkdir(parents=True)
    path = tmp_path / "a" / ".agent" / "tls.pem"
    path.write_text("damaged")
    path.chmod(0o600)
    command = [sys.executable, "-m", "replicated_ckpt.agent", "--root", str(tmp_path / "a"), *EVERYWHERE]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5
    assert f"Remove {path}" in done.stderr


WITHOUT_CRYPTOGRAPHY = """
import sys
sys.modules["cryptography"] = None
sys.argv[1:] = ["--root", sys.argv[1], "--host", "0.0.0.0", "--idle-exit-s", "60"]
from replicated_ckpt.agent.__main__ import main
sys.exit(main())
"""
RANK_WITHOUT = """
import os, sys, warnings
sys.modules["cryptography"] = None
os.environ["REPLICATED_CKPT_HOST"] = "192.0.2.7"
from replicated_ckpt.dcp.agreement.node_post import register_node
from replicated_ckpt.stores.local.store import LocalStore
with warnings.catch_warnings(record=True) as caught:
    for _ in range(3):
        post = register_node(LocalStore(sys.argv[1]), None)
print([str(warning.message) for warning in caught])
"""


def test_without_the_package_for_certificates_a_warning_says_what_to_install(tmp_path: Path) -> None:
    """Without `cryptography`, the agent and (once) the rank warn, and continue unencrypted."""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_CRYPTOGRAPHY, tmp_path / "a"], env=environment, stderr=subprocess.PIPE, text=True
    ) as agent:
        rank = [sys.executable, "-W", "default", "-c", RANK_WITHOUT, str(tmp_path / "a")]
        warning_line = agent.stderr.readline() if agent.stderr else ""  # logged before the agent serves
        done = subprocess.run(rank, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "pip install cryptography" in warning_line
        assert done.stdout.count("pip install cryptography") == 1
        agent.terminate()


def test_ranks_replace_a_plain_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `--plain` agent of an earlier job stays for a job on one host. Ranks that need encryption replace it."""
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_IDLE_S", "30")
    store = LocalStore(tmp_path / "a")
    with running_agent(tmp_path / "a", *EVERYWHERE, "--plain") as plain:
        assert ensure_agent(store, "127.0.0.1") == plain.endpoint
        try:
            new = ensure_agent(store, "0.0.0.0")
            assert new.tls_sha256
            assert new.port == plain.endpoint.port
            assert read_endpoint(tmp_path / "a" / ".agent") == new
        finally:
            stop_agent(tmp_path / "a")


# No downgrade ----------------------------------------------------------------------------------------------------------


@contextmanager
def listener() -> Iterator[tuple[int, list[bytes]]]:
    """A server without TLS. Yields its port and the list of requests it received."""
    got: list[bytes] = []
    with socket.create_server(("0.0.0.0", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(2)
                    got.append(connection.recv(1000))
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1]), got
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1.", "0", "0x7f.1", "::ffff:127.0.0.1", socket.gethostname()])
def test_no_token_goes_out_without_a_certificate(host: str) -> None:
    """A client refuses an address of another host without a fingerprint, however the host is spelled."""
    with listener() as (port, got):
        address = AgentAddress("n", host, port, "SECRETTOKEN")
        with AgentClient(address, 3) as client, pytest.raises(StoreDenied, match="no fingerprint") as caught:
            client.call("GET", "/v1/status")
        upload = AgentClient(address, 3)
        with pytest.raises(StoreDenied):
            upload.start_upload("/v1/saves/x/y", {})
        assert PLAIN_ENV in caught.value.hint
        assert got == []
        with AgentClient(replace(address, host="127.0.0.1"), 3) as client:  # shows that the test can fail
            client.call("GET", "/v1/status")
        assert b"SECRETTOKEN" in got[0]


def test_without_the_package_an_unencrypted_peer_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for each peer names the package to install. There is none for this host or for a trusted network."""
    monkeypatch.setattr(tls, "can_encrypt", lambda: False)
    with listener() as (port, got):
        far = AgentAddress("n", "0.0.0.0", port, "TOKEN")
        for address in (far, far, replace(far, host="127.0.0.1")):
            with AgentClient(address, 3) as client:
                client.call("GET", "/v1/status")
        monkeypatch.setenv(PLAIN_ENV, "1")
        with AgentClient(replace(far, node_id="trusted"), 3) as client:
            client.call("GET", "/v1/status")
        assert len(got) == 4
    (warning_line,) = [record.getMessage() for record in caplog.records]
    assert far.label in warning_line
    assert "pip install cryptography" in warning_line


def test_without_the_package_a_known_certificate_stays_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node with a known certificate is reached by TLS, which needs no package, or not at all."""
    monkeypatch.setattr(tls, "can_encrypt", lambda: False)
    pinned = AgentAddress("b" * 12, "10.0.0.1", 7, "token", 3, "a" * 64)
    book = PeerBook(tmp_path)
    book.learn([pinned])
    with pytest.raises(StoreDenied, match="is not used"):
        book.learn([replace(pinned, tls_sha256="", incarnation=9)])
    assert book.read_all() == (pinned,)
    with listener() as (port, got), AgentClient(replace(pinned, host="0.0.0.0", port=port), 3) as client:
        with pytest.raises(StoreUnavailable):
            client.call("GET", "/v1/status")
        assert b"token" not in b"".join(got)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    """Loopback addresses need no TLS."""
    assert is_loopback(host)


def test_a_known_certificate_stays_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A book refuses an address without a fingerprint for a node that has one, unless the network is trusted."""
    book = PeerBook(tmp_path)
    pinned = AgentAddress("b" * 12, "127.0.0.1", 7, "token", 3, "a" * 64)
    plain = replace(pinned, tls_sha256="", port=8, incarnation=9)
    far = AgentAddress("c" * 12, "10.0.0.1", 7, "token")
    book.learn([pinned])
    for peer in (plain, far):
        with pytest.raises(StoreDenied, match="is not used"):
            book.learn([peer])
        assert book.read_all() == (pinned,)
    other = replace(pinned, tls_sha256="b" * 64, incarnation=4)
    book.learn([other])  # a node whose disk was replaced has another one
    assert book.read_all() == (other,)
    monkeypatch.setenv(PLAIN_ENV, "1")
    book.learn([plain, far])
    assert book.read_all() == (plain, far)


@pytest.mark.parametrize("verb", ["peers", "hello", "saves"])
def test_an_agent_refuses_a_downgrade(tmp_path: Path, verb: str) -> None:
    """Every verb refuses an unencrypted address for a node with a known certificate, even with the agent's token."""
    with running_agent(tmp_path / "a") as agent, agent.client() as client:
        pinned = AgentAddress("b" * 12, "127.0.0.1", 7, "token", 3, "a" * 64)
        plain = replace(pinned, tls_sha256="", incarnation=9).to_json()
        client.call("POST", "/v1/peers", {"peers": [pinned.to_json()], "session": "s"})
        requests: dict[str, tuple[str, dict[str, object]]] = {
            "peers": ("/v1/peers", {"peers": [plain], "session": "s"}),
            "hello": ("/v1/hello", {"peer": plain}),
            "saves": (
                f"/v1/saves/{'7' * 32}",
                {"checkpoint_id": "step-7", "session": "s", "overwrite": False, "peers": [plain]},
            ),
        }
        with pytest.raises(StoreDenied, match=r"is not used|another|certificate changed"):
            client.call("POST", *requests[verb])
        assert PeerBook(tmp_path / "a" / ".agent").read_all() == (pinned,)


def test_a_refusal_in_the_middle_of_an_upload_reaches_the_sender(tmp_path: Path) -> None:
    """The sender of a large upload over TLS gets the error of the agent, not a broken connection."""
    with running_agent(tmp_path / "a", *EVERYWHERE) as agent:
        name = begin(agent, 2, checkpoint_id="step-2")
        with AgentClient(agent.endpoint.local_address()) as client:
            client.call("POST", f"/v1/saves/{name}/abort", {"why": "test"})
            with pytest.raises(SaveAborted):
                send_all(client.start_upload(f"/v1/saves/{name}/__0_0.distcp", {}))


def send_all(upload: Upload) -> None:
    for _ in range(6):
        upload.send(memoryview(DATA))
    upload.finish_upload()
