"""A certificate from files is renewed while agents and jobs run: nothing is restarted, and no connection fails."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.http.greeting import Greeter
from replicated_ckpt.agent.state.endpoint import Endpoint, read_endpoint
from replicated_ckpt.errors import StoreDenied
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.tls import fingerprint
from tests.agent.agents import RunningAgent, peers_of, running_agent, wait_for
from tests.agent.http.test_tls import certificate, needs_openssl
from tests.harness.cluster import Cluster, call
from tests.steps import renewal, state

pytestmark = needs_openssl

WITHIN_S = 20.0


class Secret:
    """A directory like a mounted Kubernetes Secret: files are links through `..data`, which is replaced by a rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        folder.mkdir()
        self.renew()
        for name in ("tls.crt", "tls.key"):
            (folder / name).symlink_to(f"..data/{name}")

    @property
    def arguments(self) -> tuple[str, ...]:
        return "--tls-cert", str(self.folder / "tls.crt"), "--tls-key", str(self.folder / "tls.key")

    def renew(self) -> str:
        """Installs another certificate and key. Returns the fingerprint."""
        found = self.prepare()
        (self.folder / "..new").rename(self.folder / "..data")
        return found

    def prepare(self) -> str:
        """Writes another pair into `..new`, without the rename. Returns the fingerprint."""
        self._count += 1
        version = self.folder / f"..{self._count}"
        version.mkdir()
        cert, key = certificate(version, "node")
        Path(cert).rename(version / "tls.crt")
        Path(key).rename(version / "tls.key")
        (self.folder / "..new").symlink_to(version.name)
        return fingerprint(str(version / "tls.crt"))


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return Secret(tmp_path / "secret")


@pytest.fixture
def pair(tmp_path: Path, secret: Secret) -> Iterator[tuple[RunningAgent, RunningAgent]]:
    """Two agents that know each other. The first one uses the secret's certificate."""
    with ExitStack() as stack:
        first = stack.enter_context(running_agent(tmp_path / "a", *secret.arguments))
        second = stack.enter_context(running_agent(tmp_path / "b"))
        for agent in (first, second):
            with agent.client() as client:
                client.call("POST", "/v1/peers", {"peers": peers_of(first, second), "session": "s"})
        yield first, second


def shown(root: Path) -> str:
    endpoint = read_endpoint(root / ".agent")
    return "" if endpoint is None else endpoint.tls_sha256


def address_in_book(agent: RunningAgent, to: RunningAgent) -> AgentAddress:
    """The address of the agent in the book of `to`."""
    return PeerBook(to.root / ".agent").address_of(agent.endpoint.node_id)


def answers(address: AgentAddress) -> bool:
    with AgentClient(address) as client:
        return bool(client.call("GET", "/v1/status?brief=1")["node_id"] == address.node_id)


def test_a_renewed_certificate_is_used(secret: Secret, pair: tuple[RunningAgent, RunningAgent]) -> None:
    """Clients that pin the previous certificate still connect. Peers learn the new one, and accept it after a restart."""
    first, second = pair
    new = secret.renew()
    wait_for(lambda: shown(first.root) == new, WITHIN_S, "the new certificate")
    assert answers(first.endpoint.address())
    assert answers(replace(first.endpoint.address(), tls_sha256=new))
    wait_for(lambda: address_in_book(first, second).tls_sha256 == new, WITHIN_S, "the certificate in the peer's book")
    first.process.kill()
    first.process.wait()
    with running_agent(first.root, *secret.arguments) as again:
        incarnation = again.endpoint.incarnation
        wait_for(
            lambda: address_in_book(again, second).incarnation == incarnation, WITHIN_S, "the hello of the next agent"
        )


def test_a_certificate_without_its_key_is_not_used(tmp_path: Path) -> None:
    """A certificate without its key is not used until the key is there."""
    cert, key = certificate(tmp_path, "node")
    new_cert, new_key = certificate(tmp_path, "new")
    new = fingerprint(new_cert)
    with running_agent(tmp_path / "a", "--tls-cert", cert, "--tls-key", key) as agent:
        Path(new_cert).replace(cert)
        log = tmp_path / "a" / "agent.out"
        wait_for(lambda: "keeps the previous certificate" in log.read_text(), WITHIN_S, "the failed renewal")
        assert shown(agent.root) == agent.endpoint.tls_sha256
        assert answers(agent.endpoint.address())
        Path(new_key).replace(key)
        wait_for(lambda: shown(agent.root) == new, WITHIN_S, "the new certificate")
        assert answers(replace(agent.endpoint.address(), tls_sha256=new))


def test_only_the_agent_can_change_its_certificate(tmp_path: Path, pair: tuple[RunningAgent, RunningAgent]) -> None:
    """A client with the token of a node cannot change its certificate: the agent with the known certificate must
    confirm.
    """
    first, second = pair
    other = fingerprint(certificate(tmp_path, "thief")[0])
    forged = replace(first.endpoint.address(), tls_sha256=other, host="")
    with second.peer() as client, pytest.raises(StoreDenied, match="does not confirm that"):
        client.call("POST", "/v1/hello", {"peer": forged.to_json()})
    assert address_in_book(first, second).tls_sha256 == first.endpoint.tls_sha256


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_certificate_that_changes_during_greetings_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate changes during a round of greetings: the peers are greeted once more."""
    peers, shown = PeerBook(tmp_path), Endpoint("a" * 12, "127.0.0.1", 1, "t" * 32, 1, "0", tls_sha256="1" * 64)
    peers.learn([AgentAddress("b" * 12, "127.0.0.1", 2, "t" * 32)])
    greeter, greetings = Greeter(peers, shown), []

    def tell(*_: Any) -> None:
        greetings.append("hello")
        if len(greetings) == 1:
            greeter._register(replace(shown, tls_sha256="2" * 64))

    monkeypatch.setattr(greeter, "_send_hello", tell)
    greeter.greet_all()
    greeter.greet_all()
    greeter.greet_all()
    assert greetings == ["hello", "hello"]


def test_a_running_job_is_not_disturbed(tmp_path: Path, secret: Secret) -> None:
    """All nodes get a new certificate between two saves of a running job: there is no warning, and a lost node's shards
    load.
    """
    _, cert, _, key = secret.arguments
    environment = {"REPLICATED_CKPT_TLS_CERT": cert, "REPLICATED_CKPT_TLS_KEY": key}
    before = fingerprint(cert)
    secret.prepare()
    with Cluster(tmp_path / "cluster", 2, environment=environment, quick_exit=True) as cluster:
        older, newer = (call(state.save, kinds=["plain"], checkpoint_id=name) for name in ("step-1", "step-2"))
        renew = call(renewal.renew, secret=str(secret.folder), before=before, within_s=WITHIN_S)
        saved = cluster.launch([older, renew, newer], nodes=[0, 1])
        assert saved.of(renew).agreed() == fingerprint(cert) != before
        assert saved.all_warnings == []
        cluster.nodes[0].lose()
        loaded = cluster.run(call(state.load, kinds=["plain"], checkpoint_id="latest"), nodes=[0, 1])
        assert loaded.digests() == saved.of(newer)
