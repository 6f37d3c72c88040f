"""An agent without free file descriptors keeps running, and does not treat a file that it cannot open as missing."""

import errno
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicated_ckpt.agent.http.server import AgentServer
from replicated_ckpt.agent.repair.reprotect import Reprotector
from replicated_ckpt.agent.state.endpoint import keep_identity, next_identity
from replicated_ckpt.agent.state.rights import Tokens
from replicated_ckpt.errors import StoreError
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.in_doubt import StaleSave
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.settle import settle
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.directories.journal import End
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.stores.throttle import Pace
from tests.agent.agents import RunningAgent, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, shard
from tests.damage import flip
from tests.stores.files.test_existence import refused

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
NODE, SAVE, OTHER = "a" * 12, "d" * 32, AgentAddress("b" * 12, "127.0.0.1", 9, "token")
LOOKS_S = 2.5
"""The agent checks its root several times in this time."""


@contextmanager
def without_descriptors(agent: RunningAgent) -> Iterator[None]:
    """In this block, the agent can open no file and accept no connection."""
    pid, limits = agent.process.pid, resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        if agent.process.poll() is None:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_an_agent_keeps_running(tmp_path: Path) -> None:
    """If the agent exited, submitted shards would be lost. Once it has descriptors again, the same process answers."""
    with running_agent(tmp_path / "root", "--idle-exit-s", "60", "--round-every-s", "1") as agent:
        (agent.root / ".agent" / "clients").touch()  # as ranks create it
        with without_descriptors(agent):
            time.sleep(LOOKS_S)
        assert agent.process.poll() is None, (agent.root / "agent.out").read_text()
        with agent.client() as client:
            assert client.call("GET", "/v1/status")["pid"] == agent.process.pid
            wait_for(lambda: client.call("GET", "/v1/status")["protection"]["is_complete"], 30.0, "a round")
    assert "cannot check its root and its clients" in (agent.root / "agent.out").read_text()


def test_a_server_without_descriptors_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server pauses before it accepts again, while the connection waits in the kernel. Otherwise its thread would
    use a whole CPU that a rank needs.
    """
    pauses: list[float] = []
    monkeypatch.setattr("replicated_ckpt.agent.http.server.time.sleep", pauses.append)
    routes: Any = None
    with AgentServer(("127.0.0.1", 0), Tokens.draw(), routes) as server, closing(server.socket) as listener:
        server.socket = mock.Mock(accept=mock.Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many"):
            server.get_request()
        server.socket = listener
    assert pauses


@pytest.fixture
def service(tmp_path: Path) -> NodeService:
    """A node with a staged save whose coordinator, another node, does not answer."""
    service = NodeService(LocalStore(tmp_path / "root"))
    nodes = (service.node_id, OTHER.node_id)
    service.open_save(Intent(SAVE, "step-1", "session", overwrite=False, nodes=nodes, coordinator=OTHER.node_id))
    service.learn_peers([OTHER.to_json()])
    return service


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM], ids=errno.errorcode.get)
def test_a_save_is_not_aborted_for_lack_of_descriptors(service: NodeService, code: int) -> None:
    """Without the list of the save's nodes, the node would conclude that none of them has published the save."""
    intent, book = service.store.intent_path(SAVE), service.store.agent_directory() / "peers.json"
    with refused(intent, code):
        unread = read_or_none(lambda: Intent.read_intent(SAVE, intent))
    with refused(book, code):
        settle(service, [StaleSave(unread or damaged(), "its processes are gone")], [])
    assert service.store.is_staged(SAVE)
    assert unread is None, "an unreadable intent was taken for one without nodes"


def damaged() -> Intent:
    """The intent that an unreadable intent file stands for: any known node may belong to the save."""
    return Intent(SAVE, "", "", overwrite=False)


def read_or_none(read: Callable[[], Intent]) -> Intent | None:
    try:
        return read()
    except StoreError:
        return None


def test_the_address_book_is_not_replaced_for_lack_of_descriptors(service: NodeService) -> None:
    """Otherwise the address book would contain only the node that was introduced meanwhile."""
    with refused(service.store.agent_directory() / "peers.json", errno.EMFILE), pytest.raises(StoreError):
        service.learn_peers([AgentAddress("c" * 12, "127.0.0.1", 9, "token").to_json()])
    assert [peer.node_id for peer in service.peers.read_all()] == [OTHER.node_id]


@contextmanager
def short_of_descriptors() -> Iterator[None]:
    """In this block, this process can open no file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_an_agents_state_files_are_not_replaced_for_lack_of_descriptors(tmp_path: Path) -> None:
    """Otherwise an agent that starts would write new state files: removals by the operator would be forgotten, and
    peers would have the wrong tokens.
    """
    journal = LocalStore(tmp_path / "root").journal
    LocalStore(tmp_path / "root").agent_directory()
    journal.append_end(SAVE, End.REMOVING)
    keep_identity(tmp_path, kept := next_identity(tmp_path, NODE))
    with short_of_descriptors():
        with pytest.raises(StoreError):
            journal.read_removed()
        with pytest.raises(StoreError):
            next_identity(tmp_path, NODE)
    assert journal.read_removed() == {SAVE}
    assert next_identity(tmp_path, NODE).tokens == kept.tokens


def test_a_reported_bad_file_is_read_once_there_are_descriptors(tmp_path: Path) -> None:
    """The load reports the file only once. If the agent forgot the report, the file would count as an intact copy until
    the next scrub.
    """
    store = LocalStore(tmp_path / "root")
    manifest = checkpointed([store], 1, {shard(0): [0]}, copies=1, size_bytes=3000)
    service, stopping = NodeService(store), threading.Event()
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    place = "step-1", manifest.save_id, shard(0)
    flip(store.path_of(*place), 100)
    reprotector.suspect(*place, "a load read bad bytes")
    with refused(store.path_of(*place), errno.EMFILE):
        reprotector.round()
    assert reprotector.round().lost == 1
    assert service.damage.is_known(*place)
