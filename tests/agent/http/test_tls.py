"""TLS: what leaves the host is encrypted; nothing is said to an agent that has another certificate, or none."""

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
from tests.agent.test_agent import begin, committed, sent
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
            path = file_path("step-1", "1" * 32, "__0_0.distcp")
            client.read_range(path, 5000, memoryview(raw))
            assert raw == DATA[5000:6000]
            assert expected.size_bytes > len(DATA)


@needs_openssl
def test_nothing_is_said_to_another_certificate(tmp_path: Path) -> None:
    """Who has the address but not the key gets no token: the connection ends before a byte of the request is sent."""
    cert, key = certificate(tmp_path, "node")
    other, _ = certificate(tmp_path, "other")
    with running_agent(tmp_path / "a", "--tls-cert", cert, "--tls-key", key) as agent:
        address = replace(agent.endpoint.address(), tls_sha256=fingerprint(other))
        with AgentClient(address) as client, pytest.raises(StoreDenied, match="certificate"):
            client.call("GET", "/v1/status")


@needs_openssl
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


@needs_openssl
def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    """A wrong file is an error that names it, before the agent listens."""
    cert, key = certificate(tmp_path, "node")
    _, other = certificate(tmp_path, "other")
    for pair in ((key, cert), (cert, other), (str(tmp_path / "none"), key)):
        with pytest.raises(ConfigInvalid, match="certificate"):
            server_context(*pair)


@needs_openssl
@pytest.mark.multiprocess
def test_ranks_save_and_load_over_it(tmp_path: Path) -> None:
    """With the environment set nothing else is needed: the agents that ranks start speak TLS, and a node can be lost."""
    cert, key = certificate(tmp_path, "node")
    environment = {"REPLICATED_CKPT_TLS_CERT": cert, "REPLICATED_CKPT_TLS_KEY": key}
    with Cluster(tmp_path / "cluster", 2, environment=environment, quick_exit=True) as cluster:
        saved = cluster.run(call(state.save, kinds=["plain"], checkpoint_id="step-1"), nodes=[0, 1])
        endpoint = (cluster.nodes[0].disk / ".agent" / "endpoint.json").read_text()
        assert fingerprint(cert) in endpoint
        cluster.nodes[0].lose()
        loaded = cluster.run(call(state.load, kinds=["plain"], checkpoint_id="latest"), nodes=[0, 1])
        assert loaded.digests() == saved


# Without a word of the user -------------------------------------------------------------------------------------------


def test_an_agent_that_others_reach_has_a_certificate_of_its_own(tmp_path: Path) -> None:
    """Made at its first start, private, and the same ever after, on loopback too: its peers know it by that one."""
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
    """What the runbook says to ask an agent with is answered."""
    with running_agent(tmp_path / "a", *EVERYWHERE) as agent:
        certificate = tmp_path / "a" / ".agent" / "tls.pem"
        url = f"https://localhost:{agent.endpoint.port}/v1/status"
        head = f"Authorization: Bearer {agent.endpoint.owner_token}"
        command = ["curl", "-sS", "-m", "5", "--cacert", str(certificate), "-H", "@-", url]
        shown = subprocess.run(command, input=head.encode(), capture_output=True, check=True)
        assert json.loads(shown.stdout)["node_id"] == agent.endpoint.node_id


def test_an_agent_on_loopback_makes_none(tmp_path: Path) -> None:
    """What stays on the host is not encrypted."""
    with running_agent(tmp_path / "a") as agent:
        assert agent.endpoint.tls_sha256 == ""
        assert not (tmp_path / "a" / ".agent" / "tls.pem").exists()


def test_plain_is_what_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--plain`, or the variable, an agent that others reach speaks HTTP, and is talked to where that is set."""
    with running_agent(tmp_path / "a", *EVERYWHERE, "--plain") as agent:
        assert agent.endpoint.tls_sha256 == ""
        beyond = replace(
            agent.endpoint.local_address(), host="0.0.0.0"
        )  # reaches this host, and is no loopback address
        with AgentClient(beyond) as client, pytest.raises(StoreDenied, match="no fingerprint"):
            client.call("GET", "/v1/status")
        monkeypatch.setenv(PLAIN_ENV, "1")
        with AgentClient(beyond) as client:
            assert client.call("GET", "/v1/status")["node_id"] == agent.endpoint.node_id
    with running_agent(tmp_path / "b", *EVERYWHERE) as agent:  # it has the variable
        assert agent.endpoint.tls_sha256 == ""


def test_a_certificate_that_is_damaged_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    """Nobody is served with another one without a word: other nodes would not know it."""
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
    """Agent and rank warn, the rank once, and go on in the clear."""
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_CRYPTOGRAPHY, tmp_path / "a"], env=environment, stderr=subprocess.PIPE, text=True
    ) as agent:
        rank = [sys.executable, "-W", "default", "-c", RANK_WITHOUT, str(tmp_path / "a")]
        said = agent.stderr.readline() if agent.stderr else ""  # before it serves
        done = subprocess.run(rank, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "pip install cryptography" in said
        assert done.stdout.count("pip install cryptography") == 1
        agent.terminate()


def test_ranks_replace_an_agent_that_speaks_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that an earlier job left, `--plain`, gives way to one that encrypts; one on loopback may stay."""
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
    """A server that speaks no TLS, and what it was sent."""
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
    """Who writes an address without a fingerprint gets no connection, however the host is spelled."""
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


def test_without_the_package_what_is_sent_in_the_clear_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line for each peer, which names what to install; nothing is said of this host, or of a trusted network."""
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
    (said,) = [record.getMessage() for record in caplog.records]
    assert far.label in said
    assert "pip install cryptography" in said


def test_without_the_package_no_known_certificate_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is known to encrypt is talked to by TLS, which needs no package, or not at all."""
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
def test_what_stays_on_this_host_needs_none(host: str) -> None:
    """An agent that listens on loopback only is talked to without TLS."""
    assert is_loopback(host)


def test_a_known_certificate_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address without a fingerprint for a node that has one is not learnt, unless the network is trusted."""
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
def test_an_agent_takes_no_downgrade(tmp_path: Path, verb: str) -> None:
    """Whoever has its token and posts an address in the clear for a node that encrypts is refused, by every verb."""
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


def test_a_refusal_in_the_middle_of_an_upload_is_heard(tmp_path: Path) -> None:
    """Over TLS as without: who still sends learns why, instead of meeting a broken connection."""
    with running_agent(tmp_path / "a", *EVERYWHERE) as agent:
        name = begin(agent, 2, checkpoint_id="step-2")
        with AgentClient(agent.endpoint.local_address()) as client:
            client.call("POST", f"/v1/saves/{name}/abort", {"why": "test"})
            with pytest.raises(SaveAborted):
                sent_whole(client.start_upload(f"/v1/saves/{name}/__0_0.distcp", {}))


def sent_whole(upload: Upload) -> None:
    for _ in range(6):
        upload.send(memoryview(DATA))
    upload.finish_upload()
