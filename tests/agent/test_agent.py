"""The agent as a process: requests, shards, start and end, and failures of a peer."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.endpoint import ALREADY_SERVED, client_lock, read_endpoint
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import (
    CheckpointExists,
    ConfigInvalid,
    ObjectCorrupt,
    ObjectMissing,
    PeerProtocolError,
    SaveAborted,
    StoreDenied,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.watch import ask_holdings
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import file_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import PeerShard, PeerSink
from replicated_ckpt.stores.verified import Expected
from replicated_ckpt.testing.shards import table_of
from tests.agent.agents import RunningAgent, exchanged, peers_of, running_agent, wait_for
from tests.harness.processes import wait_until_gone
from tests.stopwatch import Stopwatch
from tests.stores.local.test_local import METADATA, SHARD, save_id, staged

DATA = os.urandom(3 << 20)


def begin(
    agent: RunningAgent,
    number: int,
    *others: RunningAgent,
    session: str = "s",
    checkpoint_id: str = "step-1",
    overwrite: bool = False,
) -> str:
    """Opens a save at `agent`, with this agent's node and those of `others`."""
    name, peers = save_id(number), peers_of(agent, *others)
    document = {"checkpoint_id": checkpoint_id, "session": session, "overwrite": overwrite, "peers": peers}
    with agent.client() as client:
        client.call("POST", f"/v1/saves/{name}", document)
    return name


def send_shard(agent: RunningAgent, name: str, data: bytes, shard: str = SHARD) -> None:
    sink = PeerSink(agent.endpoint.address(), name, shard, durable=True)
    table = table_of([data])
    sink.write(memoryview(data))
    sink.write(memoryview(table.encode()))
    sink.finish(table)


def committed(agent: RunningAgent, number: int, data: bytes) -> Expected:
    """A checkpoint of one shard, staged on disk and committed through the agent."""
    store = LocalStore(agent.root)
    name = staged(store, number, data)
    with agent.client() as client:
        assert client.call("POST", f"/v1/saves/{name}/commit") == {"held": [SHARD]}
    entry = store.catalog.manifest("step-1").shards[SHARD]
    return Expected(entry.size_bytes, entry.crc32c)


# Requests ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_needs_the_token(tmp_path: Path) -> None:
    """The agent serves HTTP/1.1, and refuses a request without the token, or with a wrong one, on every path."""
    with running_agent(tmp_path / "a") as agent:
        base = f"http://127.0.0.1:{agent.endpoint.port}"
        shown = subprocess.run(
            [
                "curl",
                "-sS",
                "-m",
                "5",
                "-H",
                f"Authorization: Bearer {agent.endpoint.owner_token}",
                f"{base}/v1/status",
            ],
            capture_output=True,
            check=True,
        )
        assert json.loads(shown.stdout)["node_id"] == agent.endpoint.node_id
        for token in ("", "x" * 32, agent.endpoint.token + "x", agent.endpoint.owner_token + "x"):
            address = AgentAddress("n", "127.0.0.1", agent.endpoint.port, token)
            for method, path in [("GET", "/v1/status"), ("POST", "/v1/peers"), ("POST", "/v1/shutdown"), ("GET", "/")]:
                with AgentClient(address) as client, pytest.raises(StoreDenied):
                    client.call(method, path)


def test_the_tokens_are_in_private_files_and_nowhere_else(tmp_path: Path) -> None:
    """Only the agent's user can read the file with the tokens. Log, `repr` and command line do not contain them."""
    with running_agent(tmp_path / "a", "--verbose") as agent:
        with agent.client() as client:
            client.call("GET", "/v1/status")
        endpoint = tmp_path / "a" / ".agent" / "endpoint.json"
        assert stat.S_IMODE(endpoint.stat().st_mode) == 0o600
        command = Path(f"/proc/{agent.process.pid}/cmdline").read_text()
        for token in (agent.endpoint.token, agent.endpoint.owner_token):
            assert token not in (tmp_path / "a" / "agent.out").read_text()
            assert token not in repr(agent.endpoint) + repr(agent.endpoint.address())
            assert token not in command


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningAgent, str]]:
    """An agent with one checkpoint and one open save."""
    with running_agent(tmp_path_factory.mktemp("busy") / "a") as agent:
        committed(agent, 1, b"data")
        yield agent, begin(agent, 2, checkpoint_id="step-2")


@pytest.mark.parametrize(
    "name",
    ["../../../../etc/passwd", "..%2f..%2fnode.json", "node.json", "%2e%2e", "__0_0.distcp%00", ".agent/endpoint.json"],
)
def test_no_path_leads_out_of_a_checkpoint(busy: tuple[RunningAgent, str], name: str) -> None:
    """A path in a file name or in a checkpoint id reaches no other file, neither to read nor to write."""
    agent, opened = busy
    for path in (
        f"/v1/files/{name}?checkpoint_id=step-1&save_id={save_id(1)}",
        f"/v1/files/{name}?save_id={save_id(1)}",
        f"/v1/files/{SHARD}?save_id={save_id(1)}",
        f"/v1/files/{SHARD}?save_id={save_id(1)}&checkpoint_id={name}",
        file_path("../a/step-1", save_id(1), SHARD),
    ):
        with agent.client() as client, pytest.raises(ObjectMissing):
            client.fetch("GET", path)
    with agent.client() as client, pytest.raises((ObjectMissing, ConfigInvalid, PeerProtocolError)):
        client.put("PUT", f"/v1/saves/{opened}/{name}", b"x")
    for checkpoint_id in ("../x", "/etc", "latest", "", 7):
        document: dict[str, object] = {"checkpoint_id": checkpoint_id, "session": "s", "overwrite": True, "peers": []}
        with agent.client() as client, pytest.raises((ConfigInvalid, PeerProtocolError)):
            client.call("POST", f"/v1/saves/{save_id(3)}", document)
    assert sorted(path.name for path in agent.root.parent.iterdir()) == ["a"]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/status HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"PUT /v1/saves/TOKEN HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/peers HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/peers HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /v1/peers HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: 3\r\n\r\n[1]",
        b'POST /v1/peers HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: 13\r\n\r\n{"peers":[7]}',
        b"POST /v1/peers HTTP/1.1\r\nAuthorization: Bearer TOKEN\r\nContent-Length: 8\r\n\r\n" + b"[" * 8,
    ],
)
def test_malformed_requests_do_not_stop_the_agent(busy: tuple[RunningAgent, str], raw: bytes) -> None:
    """The agent answers a malformed request or closes the connection, and goes on serving. With a token the answer is
    400.
    """
    agent, _ = busy
    answer = exchanged(agent.endpoint.port, raw.replace(b"TOKEN", agent.endpoint.owner_token.encode()))
    assert answer.startswith(b"HTTP/1.1 400 ") or b"TOKEN" not in raw
    with agent.client() as client:
        assert client.call("GET", "/v1/status")["pid"] == agent.process.pid


def test_temporary_files_of_a_killed_agent_are_removed(tmp_path: Path) -> None:
    """An agent removes temporary files of dead processes when it starts, and leaves those of living processes."""
    directory = tmp_path / "a" / ".agent"
    directory.mkdir(parents=True, mode=0o700)
    dead = subprocess.Popen(["true"])
    dead.wait()
    left, begun = (directory / f"peers.json.{pid}.tmp" for pid in (dead.pid, os.getpid()))
    left.touch()
    begun.touch()
    with running_agent(tmp_path / "a"):
        assert begun.exists()
        assert not left.exists()


# Shards --------------------------------------------------------------------------------------------------------------


def test_a_committed_shard_can_be_read(tmp_path: Path) -> None:
    """After the commit, reads of any range return the bytes that were sent, verified."""
    with running_agent(tmp_path / "a") as agent:
        expected = committed(agent, 1, DATA)
        shard = PeerShard(agent.client(), "step-1", save_id(1), SHARD, expected).open()
        assert bytes(shard.read(0, len(DATA))) == DATA
        assert bytes(shard.read(1_000_001, 777_777)) == DATA[1_000_001:1_777_778]
        shard.close()
        with agent.client() as client:
            assert crc32c(client.fetch("GET", file_path("step-1", save_id(1), ".metadata"))) == crc32c(METADATA)


def test_a_copy_that_arrives_damaged_is_refused(tmp_path: Path) -> None:
    """The receiving node keeps no file if the bytes do not match their footer."""
    with running_agent(tmp_path / "a") as agent:
        name = begin(agent, 1)
        table = table_of([DATA])
        damaged = bytearray(DATA)
        damaged[70_000] ^= 1
        sink = PeerSink(agent.endpoint.address(), name, SHARD, durable=True)
        sink.write(memoryview(damaged))
        sink.write(memoryview(table.encode()))
        with pytest.raises(ObjectCorrupt, match="expected CRC32C"):
            sink.finish(table)
        assert list(LocalStore(agent.root).staging(name).iterdir()) == []


def test_a_copy_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    """A sender closes the connection in the middle of a copy: the receiver removes the partial file."""
    with running_agent(tmp_path / "a") as agent:
        name = begin(agent, 1)
        sink = PeerSink(agent.endpoint.address(), name, SHARD, durable=True)
        sink.write(memoryview(DATA))
        staging = LocalStore(agent.root).staging(name)
        wait_for(lambda: any(staging.iterdir()), 10, "the first bytes of the copy")
        sink.discard()
        wait_for(lambda: not list(staging.iterdir()), 10, "the broken copy to be removed")


def test_bytes_of_another_attempt_are_fenced(tmp_path: Path) -> None:
    """Once a newer save of the same checkpoint has begun, an agent refuses the bytes and the commit of the older one."""
    with running_agent(tmp_path / "a") as agent:
        old = begin(agent, 1, session="one")
        new = begin(agent, 2, session="two")
        with pytest.raises(SaveAborted, match="overtook"):
            send_shard(agent, old, DATA)
        with agent.client() as client, pytest.raises(SaveAborted):
            client.call("POST", f"/v1/saves/{old}/commit")
        send_shard(agent, new, DATA)
        with pytest.raises(SaveAborted):
            send_shard(agent, save_id(9), DATA)


def test_an_existing_checkpoint_is_refused_before_a_byte_is_sent(tmp_path: Path) -> None:
    """An agent refuses to open a save over an existing checkpoint."""
    with running_agent(tmp_path / "a") as agent:
        committed(agent, 1, DATA)
        with pytest.raises(CheckpointExists):
            begin(agent, 2)


def test_a_locked_save_is_not_removed_as_stale(tmp_path: Path) -> None:
    """While a rank holds a save's lock, an agent does not remove the staging of that save. It removes a save without a
    lock.
    """
    with running_agent(tmp_path / "a") as agent:
        store = LocalStore(agent.root)
        alive, dead = begin(agent, 1, session="one"), begin(agent, 2, session="two", checkpoint_id="step-2")
        with store.intent_path(alive).open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            time.sleep(5.5)  # longer than the grace before ranks must hold their locks
            with agent.client() as client:
                client.call("POST", "/v1/peers", {"peers": []})
            assert store.staging(alive).is_dir()
            assert not store.staging(dead).exists()


@pytest.mark.fault
def test_a_node_that_missed_the_commit_completes_the_save(tmp_path: Path) -> None:
    """A node completes from staging a save that a peer has committed, with the manifest and metadata of the peer."""
    with running_agent(tmp_path / "a") as first, running_agent(tmp_path / "b") as second:
        name = begin(second, 1, first, session="job")
        send_shard(second, name, DATA)
        committed(first, 1, DATA)
        begin_document = {
            "checkpoint_id": "step-2",
            "session": "job",
            "overwrite": False,
            "peers": peers_of(first, second),
        }
        with second.client() as client:
            client.call("POST", f"/v1/saves/{save_id(2)}", begin_document)
            (found,) = client.call("GET", "/v1/holdings?checkpoint_id=step-1")["holdings"]
        assert found["save_id"] == name
        assert list(found["sizes"]) == [SHARD]


def write_pieces(sink: PeerSink, piece: memoryview, times: int) -> None:
    for _ in range(times):
        sink.write(piece)


@pytest.mark.fault
def test_a_decided_save_is_completed_not_aborted(tmp_path: Path) -> None:
    """The decision of a save lies on one node, and no node has published the save. Another node asks that node: both
    then publish.
    """
    with running_agent(tmp_path / "a") as decider, running_agent(tmp_path / "b") as other:
        name = begin(other, 1, decider, session="job")
        send_shard(other, name, DATA)
        staged(LocalStore(decider.root), 1, DATA)
        with other.client() as client:
            document = {"checkpoint_id": "step-2", "session": "job", "overwrite": False}
            client.call("POST", f"/v1/saves/{save_id(2)}", {**document, "peers": peers_of(decider, other)})
        for agent in (decider, other):
            with agent.client() as client:
                assert client.call("GET", f"/v1/saves/{name}") == {"state": "committed", "checkpoint_id": "step-1"}


# Life ----------------------------------------------------------------------------------------------------------------


def test_only_one_agent_serves_a_root(tmp_path: Path) -> None:
    """A second agent for the same root exits at once, with an error message and an exit code of its own."""
    with running_agent(tmp_path / "a") as agent:
        command = [*agent.process.args]
        second = subprocess.run(command, capture_output=True, timeout=20, check=False, cwd=Path.cwd())
        assert second.returncode == ALREADY_SERVED
        assert b"Another agent already serves" in second.stderr
        assert agent.process.poll() is None


def test_an_agent_stops_cleanly_on_sigterm(tmp_path: Path) -> None:
    """On SIGTERM an agent exits with code 0 and removes its endpoint file."""
    with running_agent(tmp_path / "a") as agent:
        agent.signal(signal.SIGTERM)
        assert agent.process.wait(5) == 0
        assert read_endpoint(agent.root / ".agent") is None


def test_a_stopping_agent_refuses_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopping agent whose time for open saves is over refuses new connections at once, and answers the running
    request.

    The root is in memory: on a busy disk the request may take longer than the agent waits.
    """
    monkeypatch.setenv(failpoints.ENV, "store.opened=sleep:2")
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_DRAIN_S", "0.1")
    with (
        tempfile.TemporaryDirectory(prefix="rckpt-test-", dir="/dev/shm") as memory,
        running_agent(Path(memory) / "a") as agent,
        ThreadPoolExecutor(1) as threads,
    ):
        under_way = threads.submit(begin, agent, 1)
        wait_for(lambda: list((agent.root / ".staging").glob("*.json")), 10, "the request")
        agent.signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", agent.endpoint.port), timeout=1).close()
            except (ConnectionRefusedError, ConnectionResetError):  # a reset if the agent closed meanwhile
                return True
            return False

        wait_for(refused, 1.5, "the refusal")
        assert agent.process.poll() is None
        assert under_way.result(timeout=10) == save_id(1)
        assert agent.process.wait(5) == 0


def test_an_idle_agent_exits(tmp_path: Path) -> None:
    """Without a client, an agent exits after the idle time. With a client, the agent stays."""
    with running_agent(tmp_path / "a", "--idle-exit-s", "0.5") as agent:
        assert agent.process.wait(10) == 0
    lock = client_lock(LocalStore(tmp_path / "b").agent_directory(), 0.0)
    assert lock is not None
    with running_agent(tmp_path / "b", "--idle-exit-s", "0.5") as agent:
        time.sleep(2)
        assert agent.process.poll() is None
        lock.release()
        assert agent.process.wait(10) == 0


def test_scrapers_and_other_agents_do_not_keep_an_agent_running(tmp_path: Path) -> None:
    """Questions of other agents and of a scraper do not reset the idle time. A reader's question does."""
    with running_agent(tmp_path / "a", "--idle-exit-s", "1") as agent:
        until = time.monotonic() + 3
        with agent.client() as client:
            while time.monotonic() < until:
                client.call("GET", "/v1/holdings")
                time.sleep(0.1)
        assert agent.process.poll() is None
        with contextlib.suppress(StoreUnavailable):
            while time.monotonic() < until + 10:
                ask_holdings(agent.endpoint.address())
                with agent.client() as client:
                    client.call("GET", "/v1/status")
                    client.fetch("GET", "/metrics")
                time.sleep(0.1)
        assert agent.process.wait(5) == 0


def test_an_agent_exits_when_its_root_is_replaced(tmp_path: Path) -> None:
    """An agent exits when another directory has taken the place of its root."""
    with running_agent(tmp_path / "a") as agent:
        (tmp_path / "a").rename(tmp_path / "old")
        with running_agent(tmp_path / "a") as other:
            assert agent.process.wait(10) == 0
            assert read_endpoint(tmp_path / "a" / ".agent") == other.endpoint


def test_racing_ranks_start_one_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start an agent at the same time all get the same one. After a SIGKILL the next caller starts another."""
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_IDLE_S", "2")
    store = LocalStore(tmp_path / "a")
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_agent(store, "127.0.0.1").pid)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 6
    assert len(set(found)) == 1
    os.kill(found[0], signal.SIGKILL)
    again = ensure_agent(store, "127.0.0.1")
    assert again.pid != found[0]
    os.kill(again.pid, signal.SIGTERM)
    assert not wait_until_gone([again.pid], timeout_s=20)


@pytest.mark.fault
def test_a_stopped_peer_is_noticed_within_seconds(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """A peer is stopped in the middle of a transfer: the sender raises StoreUnavailable after the progress timeout."""
    with running_agent(tmp_path / "a") as agent:
        name = begin(agent, 1)
        sink = PeerSink(agent.endpoint.address(), name, SHARD, durable=True)
        piece = memoryview(bytearray(4 << 20))
        sink.write(piece)
        agent.signal(signal.SIGSTOP)
        started = stopwatch.now()
        with pytest.raises(StoreUnavailable):
            write_pieces(sink, piece, 64)
        assert stopwatch.now() - started < 9
        with agent.client(1.0) as client, pytest.raises(StoreUnavailable):
            client.call("GET", "/v1/status")


@pytest.mark.fault
def test_a_killed_peer_is_noticed_at_once(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """A peer is killed in the middle of a transfer: the sender raises StoreUnavailable once the connection is reset."""
    with running_agent(tmp_path / "a") as agent:
        name = begin(agent, 1)
        sink = PeerSink(agent.endpoint.address(), name, SHARD, durable=True)
        piece = memoryview(bytearray(4 << 20))
        sink.write(piece)
        agent.signal(signal.SIGKILL)
        started = stopwatch.now()
        with pytest.raises(StoreUnavailable):
            write_pieces(sink, piece, 64)
        assert stopwatch.now() - started < 4
