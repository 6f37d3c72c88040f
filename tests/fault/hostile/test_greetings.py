"""Greetings: a node moves, comes and goes in the address books of others by its own word alone."""

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
from tests.fault.hostile.test_hostile_peers import answering
from tests.fault.hostile.test_peers_token import QUIET, book, said_of, spoken
from tests.stopwatch import Stopwatch

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with"),
]


@dataclass
class Pair:
    """Two agents. The first one knows the second, which has a certificate, as a job has introduced it."""

    first: RunningAgent
    second: RunningAgent

    @property
    def known(self) -> AgentAddress:
        return self.second.endpoint.address()

    def introduce(self, address: AgentAddress) -> None:
        with self.first.client() as owner:
            owner.call("POST", "/v1/peers", {"peers": [address.to_json()]})

    def hear(self, address: AgentAddress, *, is_leaving: bool = False) -> None:
        """Has the first one hear a greeting in the name of this node, from a peer of it that has both tokens."""
        with self.first.peer(10) as peer:
            peer.call("POST", "/v1/hello", spoken(address, is_leaving=is_leaving))

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
def listening(to: int | None, tls: tuple[str, str] | None) -> Iterator[int]:
    """The port of a thief: passes what comes on to port `to`, else takes it with a certificate of its own, or silently."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    taken = listener.accept()[0]
                except OSError:
                    return
                if to is not None:
                    with contextlib.suppress(OSError):  # the node is gone: the test is over
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
def test_no_node_moves_another(pair: Pair, tmp_path: Path, there: str, start: int, stopwatch: Stopwatch) -> None:
    """With all tokens and fingerprints of the job: the address book names the node where it answers, after 2 s at most."""
    with contextlib.ExitStack() as stack:
        if there == "nobody":
            port = free_port()
        else:
            tls = certificate(tmp_path, "thief") if there == "another certificate" else None
            to = pair.known.port if "relay" in there else None
            port = stack.enter_context(listening(to, tls))
        thief = replace(pair.known, port=port, incarnation=pair.known.incarnation + start)
        began = stopwatch.now()
        with contextlib.suppress(StoreDenied):
            pair.hear(thief)
        assert stopwatch.now() - began < 4
        assert len(said_of(pair.first, "hello")) == start
        assert book(pair.first) == {pair.known.node_id: pair.known}


def test_a_node_is_believed_where_it_answers(pair: Pair) -> None:
    """Its port and host change once its agent has said so itself."""
    old = replace(pair.known, host="127.0.0.2", port=free_port(), incarnation=0)
    pair.introduce(old)
    pair.hear(pair.known)
    assert book(pair.first) == {pair.known.node_id: replace(pair.known, host="127.0.0.1")}
    with pytest.raises(StoreDenied, match="does not confirm it"):
        pair.hear(replace(pair.known, incarnation=0))
    with pytest.raises(StoreDenied, match="its certificate changed"):
        pair.hear(replace(pair.known, tls_sha256="b" * 64))
    with pytest.raises(StoreDenied):
        pair.hear(replace(pair.known, tls_sha256=""))
    assert book(pair.first)[pair.known.node_id].port == pair.known.port


def test_a_node_whose_disk_was_put_back_is_found_again(pair: Pair) -> None:
    """Its agent counts fewer starts than its peer knows: it is believed where it listens now, and when it leaves."""
    pair.introduce(replace(pair.known, port=free_port(), incarnation=pair.known.incarnation + 3))
    pair.hear(pair.known)
    assert book(pair.first) == {pair.known.node_id: pair.known}
    with pair.second.client() as owner:
        owner.call("POST", "/v1/peers", {"peers": [pair.first.endpoint.address().to_json()]})
    pair.second.signal(signal.SIGTERM)
    assert pair.second.process.wait(20) == 0
    assert pair.is_away()


def test_without_tls_a_node_moves_on_its_own_host_alone(tmp_path: Path) -> None:
    """The port changes once the agent has said so there; the host that a job has named stays."""
    with running_agent(tmp_path / "a", *QUIET) as first, running_agent(tmp_path / "b", *QUIET) as second:
        pair = Pair(first, second)
        pair.introduce(replace(pair.known, port=free_port(), incarnation=0))
        with pytest.raises(StoreDenied, match="does not confirm"):
            pair.hear(replace(pair.known, port=free_port()))
        pair.hear(pair.known)
        assert book(first) == {pair.known.node_id: pair.known}


@pytest.mark.parametrize("state", ["up", "stopped", "killed"])
def test_no_node_says_goodbye_for_another(pair: Pair, state: str) -> None:
    """A goodbye keeps copies from being made for an hour: it is the agent's own word, which is asked for, or none."""
    if state != "up":
        pair.second.signal(signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    with pytest.raises(StoreDenied, match="does not confirm"):
        pair.hear(pair.known, is_leaving=True)
    assert not pair.is_away()
    (line,) = said_of(pair.first, "hello")
    assert pair.known.node_id in line


def test_an_agent_that_leaves_is_believed(pair: Pair) -> None:
    """And when it is back at another port, it is not away any more."""
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
    """With a token of a known node: a few connections to the address that it names, and other nodes are heard meanwhile."""
    met: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, running_agent(tmp_path / "c", *QUIET) as third:
        listener.settimeout(0.5)
        pair.introduce(third.endpoint.address())
        thief = replace(pair.known, port=int(listener.getsockname()[1]), incarnation=pair.known.incarnation)
        began = time.monotonic()
        with pair.first.peer(10) as peer:
            for at in range(40):
                kind = StoreUnavailable if at >= IN_A_ROW_MAX else StoreDenied
                with pytest.raises(kind) if at >= IN_A_ROW_MAX else contextlib.suppress(kind):
                    peer.call("POST", "/v1/hello", spoken(thief))
        made = IN_A_ROW_MAX + (time.monotonic() - began) // INTERVAL_S
        with contextlib.suppress(TimeoutError):
            while len(met) <= made:
                met.append(listener.accept()[0])
        pair.hear(third.endpoint.address())
    assert len(met) <= made
    for taken in met:
        taken.close()
    with pytest.raises(StoreUnavailable, match="more often than"):
        pair.hear(pair.known, is_leaving=True)


def beat_forever(connection: socket.socket) -> None:
    """Gives signs of life and nothing else."""
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.3)


def test_a_peer_that_only_gives_signs_of_life_keeps_no_agent_from_leaving(tmp_path: Path) -> None:
    """The goodbye has an end, and so has a round of re-protection that is under way."""
    with running_agent(tmp_path / "a", *QUIET) as agent, answering(beat_forever) as liar:
        with agent.client() as owner:
            owner.call("POST", "/v1/peers", {"peers": [replace(liar, node_id="b" * 12).to_json()]})
        agent.signal(signal.SIGTERM)
        assert agent.process.wait(25) == 0


def test_a_peer_that_only_gives_signs_of_life_holds_up_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Re-protection looks at the others, and at this one again in the next round."""
    monkeypatch.setattr(watch, "HOLDINGS_DEADLINE_S", 5.0)  # the agent answers within it on a busy machine, too
    peers = PeerBook(tmp_path)
    with running_agent(tmp_path / "a", *QUIET) as agent, answering(beat_forever) as liar:
        peers.learn([agent.endpoint.address(), liar])
        seen = {view.node_id: view.presence for view in watch.PeerWatch(peers, watch.SilenceTimeouts()).look()}
    assert seen == {agent.endpoint.node_id: Presence.UP, liar.node_id: Presence.ASSUMED}
