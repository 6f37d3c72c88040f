"""The endpoint file: a removed or damaged file, or a full disk, does not keep ranks from the agent for long."""

import errno
import json
import signal
import socket
from pathlib import Path

import pytest

from replicated_ckpt.agent import launch
from replicated_ckpt.agent import process as life
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.endpoint import keep_identity, next_identity, read_endpoint
from replicated_ckpt.config import AgentConfig
from replicated_ckpt.errors import StoreFull
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from tests.agent.agents import running_agent, stop_agent, wait_for
from tests.agent.life.test_life import restored_signals
from tests.agent.life.test_listeners import listen

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]


def test_an_endpoint_that_was_removed_or_changed_is_written_again(tmp_path: Path) -> None:
    """Ranks then find the running agent."""
    with running_agent(tmp_path / "root") as agent:
        directory = agent.root / ".agent"
        for change in (Path.unlink, lambda path: path.write_text("{}"), lambda path: path.chmod(0o666)):
            change(directory / "endpoint.json")
            wait_for(lambda: _is_whole(directory) and read_endpoint(directory) == agent.endpoint, 10, "the endpoint")
        assert ensure_agent(LocalStore(agent.root), "127.0.0.1") == agent.endpoint


def _is_whole(directory: Path) -> bool:
    path = directory / "endpoint.json"
    return path.exists() and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("met", "host"), [([], "127.0.0.1"), (["127.0.0.1"], "127.0.0.1"), (["10.1.2.3"], "0.0.0.0")])
def test_an_agent_listens_where_the_nodes_that_it_has_met_reach_it(tmp_path: Path, met: list[str], host: str) -> None:
    """An agent without `--host`, started by hand or by a rank, listens on all addresses if its book has a peer on
    another host.
    """
    store = LocalStore(tmp_path / "root")
    PeerBook(store.agent_directory()).learn(
        [AgentAddress("f" * 12, peer, 9, "token", tls_sha256="0" * 64) for peer in met]
    )
    with running_agent(store.root) as agent:
        assert agent.endpoint.host == host
        agent.signal(signal.SIGKILL)
        agent.process.wait()
    try:
        assert ensure_agent(store).host == host
    finally:
        stop_agent(store.root)


def test_a_port_that_another_program_has_taken_costs_one_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an agent is killed, a silent program listens on its port: ranks wait for the long timeout only once."""
    long_s, asked = 1.5, list[float]()

    class Asking(AgentClient):
        def __init__(self, address: AgentAddress, timeout_s: float) -> None:
            if address.port == old.port:
                asked.append(timeout_s)
            super().__init__(address, timeout_s)

    monkeypatch.setattr(launch, "PROGRESS_TIMEOUT_S", long_s)
    monkeypatch.setattr(launch, "AgentClient", Asking)
    with running_agent(tmp_path / "root") as agent:
        old = agent.endpoint
        agent.signal(signal.SIGKILL)
        agent.process.wait()
    try:
        with listen(socket.AF_INET, "127.0.0.1", old.port):
            assert ensure_agent(LocalStore(tmp_path / "root")).port != old.port
        assert asked.count(long_s) == 1
        assert len(asked) > 1
    finally:
        stop_agent(tmp_path / "root")


def test_a_full_disk_at_the_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent raises StoreFull and leaves no endpoint file."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(life, "keep_identity", refuse)
    with restored_signals(), pytest.raises(StoreFull, match="No space left"):
        life.Agent(AgentConfig(str(tmp_path))).run()
    assert not (tmp_path / ".agent" / "endpoint.json").exists()


@pytest.mark.parametrize("wrong", [{"port": 69600}, {"port": -1}, {"incarnation": 1 << 62}])
def test_an_invalid_identity_is_replaced(tmp_path: Path, wrong: dict[str, int]) -> None:
    """An invalid port in the file would end every start of the agent."""
    keep_identity(tmp_path, kept := next_identity(tmp_path, "node"))
    assert next_identity(tmp_path, "node").token == kept.token
    path = tmp_path / "identity.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **wrong}))
    assert next_identity(tmp_path, "node").token != kept.token
