"""Greetings: only a node's own agent can change the node's address, or report it as leaving, in other nodes' address
books.
"""

import contextlib
import select
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from replicated_ckpt.agent.http.greeting import IN_A_ROW_MAX, INTERVAL_S
from replicated_ckpt.core.upkeep.repair import Presence
from replicated_ckpt.errors import StoreDenied, StoreUnavailable
from replicated_ckpt.node.peers import watch
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.peer.client import AgentAddress
from tests.agent.agents import RunningAgent, running_agent, wait_for
from tests.agent.http.test_tls import certificate
from tests.fault.hostile.test_hostile_peers import fake_agent
from tests.fault.hostile.test_peers_token import QUIET, book, greeting_of, logged_refusals
from tests.stopwatch import Stopwatch

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with"),
]


@dataclass
class Pair:
    """Two agents. The second one has a certificate, and a job has introduced it to the first one."""

    first: RunningAgent
    second: RunningAgent

    @property
    def known(self) -> AgentAddress:
        return self.second.endpoint.address()

    def introduce(self, address: AgentAddress) -> None:
        with self.first.client() as owner:
            owner.call("POST", "/v1/peers", {"peers": [address.to_json()]})

    def greet(self, address: AgentAddress, *, is_leaving: bool = False) -> None:
        """Sends the first agent a greeting in the name of this node. The sender has both tokens."""
        with self.first.peer(10) as peer:
            peer.call("POST", "/v1/hello", greeting_of(address, is_leaving=is_leaving))

    def is_away(self) -> bool:
        return PeerBook(self.first.root / ".agent").is_away(self.known.node_id)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    tls = certificate(tmp_path, "second")
    with (
        running_agent(tmp_path / "a", *QUIET) as first,
        running_agent(tmp_path / "b", *QUIET, "--tls-cert", tls[0], "--tls-key", tls[1]) as second,
    ):
        pair = Pair(first, second)
        pair.introduce(pair.known)
        yield pair


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def copy_bytes(one: socket.socket, other: socket.socket) -> None:
    with one, other, contextlib.suppress(OSError):
        while True:
            for ready in select.select([one, other], [], [])[0]:
                piece = ready.recv(1 << 16)
                if not piece:
                    return
                (other if ready is one else one).sendall(piece)


@contextmanager
def impostor_port(to: int | None, tls: tuple[str, str] | None) -> Iterator[int]:
    """The port of an impostor. It relays connections to port `to`, or answers with its own certificate, or stays
    silent.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    taken = listener.accept()[0]
                except OSError:
                    return
                if to is not None:
                    with contextlib.suppress(OSError):  # the node has ended, as the test is over
                        other = socket.create_connection(("127.0.0.1", to))
                        threading.Thread(target=copy_bytes, args=(taken, other), daemon=True).start()
                elif tls is not None:
                    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                    context.load_cert_chain(*tls)
                    with contextlib.suppress(OSError):
                        context.wrap_socket(taken, server_side=True)
                else:
                    waiting.append(taken)

        waiting: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        for taken in waiting:
            taken.close()


@pytest.mark.parametrize("there", ["nobody", "another certificate", "silence", "a relay to the node itself"])
@pytest.mark.parametrize("start", [0, 1], ids=["this start", "a later start"])
def test_no_node_can_move_another(pair: Pair, tmp_path: Path, there: str, start: int, stopwatch: Stopwatch) -> None:
    """The sender has all tokens and fingerprints of the job. The address book keeps the address where the node answers,
    and the check takes 2 s at most.
    """
    with contextlib.ExitStack() as stack:
        if there == "nobody":
            port = free_port()
        else:
            tls = certificate(tmp_path, "impostor") if there == "another certificate" else None
            to = pair.known.port if "relay" in there else None
            port = stack.enter_context(impostor_port(to, tls))
        impostor = replace(pair.known, port=port, incarnation=pair.known.incarnation + start)
        began = stopwatch.now()
        with contextlib.suppress(StoreDenied):
            pair.greet(impostor)
        assert stopwatch.now() - began < 4
        assert len(logged_refusals(pair.first, "hello")) == start
        assert book(pair.first) == {pair.known.node_id: pair.known}


def test_a_confirmed_address_is_accepted(pair: Pair) -> None:
    """The node's port and host change in the address book once its own agent has confirmed them."""
    old = replace(pair.known, host="127.0.0.2", port=free_port(), incarnation=0)
    pair.introduce(old)
    pair.greet(pair.known)
    assert book(pair.first) == {pair.known.node_id: replace(pair.known, host="127.0.0.1")}
    with pytest.raises(StoreDenied, match="does not confirm it"):
        pair.greet(replace(pair.known, incarnation=0))
    with pytest.raises(StoreDenied, match="its certificate changed"):
        pair.greet(replace(pair.known, tls_sha256="b" * 64))
    with pytest.raises(StoreDenied):
        pair.greet(replace(pair.known, tls_sha256=""))
    assert book(pair.first)[pair.known.node_id].port == pair.known.port


def test_a_node_with_a_restored_disk_is_found_again(pair: Pair) -> None:
    """A restored disk has a lower start counter than the peer's record: the peer accepts the node's current address,
    and its goodbye.
    """
    pair.introduce(replace(pair.known, port=free_port(), incarnation=pair.known.incarnation + 3))
    pair.greet(pair.known)
    assert book(pair.first) == {pair.known.node_id: pair.known}
    with pair.second.client() as owner:
        owner.call("POST", "/v1/peers", {"peers": [pair.first.endpoint.address().to_json()]})
    pair.second.signal(signal.SIGTERM)
    assert pair.second.process.wait(20) == 0
    assert pair.is_away()


def test_without_tls_only_the_port_of_a_node_can_change(tmp_path: Path) -> None:
    """The port changes once the agent has confirmed it there. The host that a job named stays."""
    with running_agent(tmp_path / "a", *QUIET) as first, running_agent(tmp_path / "b", *QUIET) as second:
        pair = Pair(first, second)
        pair.introduce(replace(pair.known, port=free_port(), incarnation=0))
        with pytest.raises(StoreDenied, match="does not confirm"):
            pair.greet(replace(pair.known, port=free_port()))
        pair.greet(pair.known)
        assert book(first) == {pair.known.node_id: pair.known}


@pytest.mark.parametrize("state", ["up", "stopped", "killed"])
def test_no_node_can_say_goodbye_for_another(pair: Pair, state: str) -> None:
    """A goodbye delays new copies for an hour, so the receiver asks the node's own agent to confirm it."""
    if state != "up":
        pair.second.signal(signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    with pytest.raises(StoreDenied, match="does not confirm"):
        pair.greet(pair.known, is_leaving=True)
    assert not pair.is_away()
    (line,) = logged_refusals(pair.first, "hello")
    assert pair.known.node_id in line


def test_the_goodbye_of_an_agent_is_accepted(pair: Pair) -> None:
    """When the agent is back at another port, the node no longer counts as away."""
    with pair.second.client() as owner:
        owner.call("POST", "/v1/peers", {"peers": [pair.first.endpoint.address().to_json()]})
    pair.second.signal(signal.SIGTERM)
    assert pair.second.process.wait(20) == 0
    assert pair.is_away()
    tls = [str(pair.second.root.parent / f"second.{kind}") for kind in ("pem", "key")]
    port = str(free_port())
    with running_agent(pair.second.root, *QUIET, "--port", port, "--tls-cert", tls[0], "--tls-key", tls[1]) as back:
        wait_for(lambda: not pair.is_away(), 20, "the greeting")
        assert book(pair.first)[pair.known.node_id] == replace(
            pair.known, port=back.endpoint.port, incarnation=back.endpoint.incarnation
        )


def test_a_flood_of_greetings_makes_few_connections(pair: Pair, tmp_path: Path) -> None:
    """The sender has the token of a known node. Few connections go to the address in its greetings, and greetings of
    other nodes are still accepted.
    """
    met: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, running_agent(tmp_path / "c", *QUIET) as third:
        listener.settimeout(0.5)
        pair.introduce(third.endpoint.address())
        impostor = replace(pair.known, port=int(listener.getsockname()[1]), incarnation=pair.known.incarnation)
        began = time.monotonic()
        with pair.first.peer(10) as peer:
            for at in range(40):
                kind = StoreUnavailable if at >= IN_A_ROW_MAX else StoreDenied
                with pytest.raises(kind) if at >= IN_A_ROW_MAX else contextlib.suppress(kind):
                    peer.call("POST", "/v1/hello", greeting_of(impostor))
        made = IN_A_ROW_MAX + (time.monotonic() - began) // INTERVAL_S
        with contextlib.suppress(TimeoutError):
            while len(met) <= made:
                met.append(listener.accept()[0])
        pair.greet(third.endpoint.address())
    assert len(met) <= made
    for taken in met:
        taken.close()
    with pytest.raises(StoreUnavailable, match="more often than"):
        pair.greet(pair.known, is_leaving=True)


def beat_forever(connection: socket.socket) -> None:
    """Sends heartbeats, and never an answer."""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.3)


def test_a_peer_that_only_sends_heartbeats_does_not_keep_an_agent_from_leaving(tmp_path: Path) -> None:
    """Both the goodbye and the current round of re-protection have a deadline."""
    with running_agent(tmp_path / "a", *QUIET) as agent, fake_agent(beat_forever) as liar:
        with agent.client() as owner:
            owner.call("POST", "/v1/peers", {"peers": [replace(liar, node_id="b" * 12).to_json()]})
        agent.signal(signal.SIGTERM)
        assert agent.process.wait(25) == 0


def test_a_peer_that_only_sends_heartbeats_delays_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-protection continues with the other nodes, and asks this peer again in the next round."""
    monkeypatch.setattr(watch, "HOLDINGS_DEADLINE_S", 5.0)  # enough for the agent to answer on a busy machine
    peers = PeerBook(tmp_path)
    with running_agent(tmp_path / "a", *QUIET) as agent, fake_agent(beat_forever) as liar:
        peers.learn([agent.endpoint.address(), liar])
        seen = {view.node_id: view.presence for view in watch.PeerWatch(peers, watch.SilenceTimeouts()).look()}
    assert seen == {agent.endpoint.node_id: Presence.UP, liar.node_id: Presence.ASSUMED}
