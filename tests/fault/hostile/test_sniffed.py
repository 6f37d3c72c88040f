"""An attacker reads the network between the nodes: the traffic reveals no token and no byte of a checkpoint."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster, call
from tests.harness.namespaces import enter_network
from tests.harness.network import AGENTS, network_of, why_no_network
from tests.steps import state

pytestmark = [pytest.mark.fault, pytest.mark.multiprocess, pytest.mark.timeout(240)]
_ALL_FRAMES = 3  # ETH_P_ALL
_SAID = b"Content-Type: application/json"


class Sniffer:
    """Records every frame at the switch port of a node's agents, from inside the switch's network namespace."""

    def __init__(self, netns: str, link: str) -> None:
        self.frames: list[bytes] = []
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(netns, link), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _listen(self, netns: str, link: str) -> None:
        enter_network(netns)  # applies to this thread only
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES)) as wire:
            wire.bind((link, 0))
            wire.settimeout(0.2)
            self._ready.set()
            while not self._stopping.is_set():
                with contextlib.suppress(TimeoutError):
                    self.frames.append(wire.recv(1 << 16))

    def heard(self) -> bytes:
        self._stopping.set()
        self._thread.join()
        return b"".join(self.frames)


@pytest.fixture(params=["", "1"], ids=["by default", "plain"])
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[bool, bytes, list[str]]]:
    """Whether the traffic is encrypted, its bytes while two nodes save, lose a disk and load, and the tokens of the
    nodes.
    """
    if why := why_no_network():
        pytest.skip(why)
    bare = Cluster(tmp_path / "cluster", 2, environment={"REPLICATED_CKPT_PLAIN": request.param}, quick_exit=True)
    with network_of(bare) as network, bare as cluster:
        sniffer = Sniffer(network.name, f"{AGENTS}-0")
        saved = cluster.run(call(state.save, kinds=["plain"], checkpoint_id="step-1"), nodes=[0, 1])
        endpoints = [json.loads((node.disk / ".agent" / "endpoint.json").read_text()) for node in cluster.nodes]
        assert [bool(endpoint["tls_sha256"]) for endpoint in endpoints] == [not request.param] * 2
        cluster.nodes[0].lose()
        loaded = cluster.run(call(state.load, kinds=["plain"], checkpoint_id="latest"), nodes=[0, 1])
        assert loaded.digests() == saved
        tokens = [endpoint["token"] for endpoint in endpoints]
        assert not any(endpoint["owner_token"].encode() in sniffer.heard() for endpoint in endpoints)
        yield not request.param, sniffer.heard(), tokens


def test_the_traffic_reveals_nothing(heard: tuple[bool, bytes, list[str]]) -> None:
    """By default tokens, requests and shards are unreadable. With REPLICATED_CKPT_PLAIN=1 the same sniffer reads them."""
    is_encrypted, bytes_heard, tokens = heard
    readable = [text in bytes_heard for text in (*(token.encode() for token in tokens), _SAID, b"PK\x03\x04")]
    assert len(bytes_heard) > 100_000
    assert readable == [not is_encrypted] * 4
