"""The system refuses new threads to an agent: submissions are refused at once, and the agent goes on."""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from email.message import Message
from io import BytesIO
from pathlib import Path
from typing import cast
from unittest import mock

import pytest

from replicated_ckpt.agent import launch
from replicated_ckpt.agent.http.greeting import Greeter
from replicated_ckpt.agent.http.object_routes import Prober
from replicated_ckpt.agent.http.request import Heartbeat
from replicated_ckpt.agent.http.routes import Routes
from replicated_ckpt.agent.http.server import AgentServer
from replicated_ckpt.agent.http.unix_socket import UnixSocketServer
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.endpoint import Endpoint
from replicated_ckpt.agent.state.rights import Tokens
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import METADATA_NAME, ShardName
from replicated_ckpt.core.manifest import Manifest, NodeEntry
from replicated_ckpt.core.rank_report import RankReport
from replicated_ckpt.dcp.save.submission import submit
from replicated_ckpt.errors import AgentUnavailable, StoreUnavailable
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.saves.finish import Outline
from replicated_ckpt.node.saves.request_body import Body
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.shard_copies import WantedCopies, write_copies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.stores.bucket_client.url import ObjectTarget
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.reach import limit_time
from replicated_ckpt.stores.tee import Buffers
from replicated_ckpt.stores.threads import FanOut
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]
SAVE = "d" * 32
SHARD = str(ShardName(0, 0))
AT_ONCE_S = 2.0
TOO_LARGE_A_STACK = 1 << 46


@contextmanager
def without_threads() -> Iterator[None]:
    """No new thread can start in this process, because the stack size is too large."""
    threading.stack_size(TOO_LARGE_A_STACK)
    try:
        yield
    finally:
        threading.stack_size(0)


@pytest.fixture
def service(tmp_path: Path) -> NodeService:
    """A node with one open save."""
    store = LocalStore(tmp_path / "root")
    service = NodeService(store)
    service.open_save(Intent(SAVE, "step-1", "session", overwrite=False, coordinator=store.node_id()))
    return service


def shard_of(store: LocalStore) -> tuple[SubmittedShard, int]:
    fd = os.memfd_create("staged")
    os.write(fd, b"0123456789" * 1000)
    return SubmittedShard(WantedCopies(SAVE, SHARD, store.node_id()), [(0, 0, 10_000)]), fd


def test_a_shard_that_gets_no_thread_is_refused(service: NodeService) -> None:
    """The caller gets an error, the descriptor is closed, no work counts as running, and the shard can be submitted
    again.
    """
    shard, fd = shard_of(service.store)
    with without_threads(), pytest.raises(StoreUnavailable, match="cannot start a thread"):
        service.submissions.take_shard(shard, [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert not service.is_saving
    shard, fd = shard_of(service.store)
    assert service.submissions.take_shard(shard, [fd]).result(30).holders == (service.node_id,)


def test_a_submission_without_a_thread_is_refused_at_once(service: NodeService, stopwatch: Stopwatch) -> None:
    """The agent refuses the shard at once, so the rank writes it. The socket takes the next submission."""
    store = service.store
    unix_socket = UnixSocketServer(store.agent_directory(), service, list[RankReport]().append)
    unix_socket.start()
    shard, fd = shard_of(store)
    try:
        with without_threads():
            began = stopwatch.now()
            with pytest.raises(StoreUnavailable):
                submit(store, shard, [fd])
            assert stopwatch.now() - began < AT_ONCE_S
        submitted = submit(store, shard, [fd])
        assert submitted.wait().holders == (store.node_id(),)
        submitted.close()
    finally:
        os.close(fd)
        unix_socket.close()


def test_a_shard_that_gets_no_thread_to_be_written_leaves_no_file(service: NodeService) -> None:
    """The partial file is removed before the error is raised."""
    wanted = WantedCopies(SAVE, SHARD, service.node_id)
    with without_threads(), pytest.raises(StoreUnavailable, match="cannot start a thread"):
        write_copies(service.store, wanted, Buffers(2, 4096), lambda tee: tee.write(b"data"))
    assert not list(service.store.staging(SAVE).glob(f"{SHARD}*"))


def test_a_bucket_is_probed_once_there_are_threads_again(tmp_path: Path) -> None:
    """A probe that could not start is not reported as a probe without an answer."""
    targets, url = UploadBook(tmp_path), f"file://{tmp_path}/bucket"
    targets.learn(ObjectTarget.check_supported(url, {}))
    prober = Prober(targets)
    with without_threads():
        assert "cannot start a thread" in prober.probe(url, "step-1")["error"]
    assert prober.probe(url, "step-1")["is_empty"]


def test_the_hint_for_a_slow_bucket_is_about_the_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint for a slow bucket is about its URL and the network, not about the agent of a node."""
    monkeypatch.setattr(Prober, "_probe", lambda *_: None)
    error = Prober(UploadBook(tmp_path)).probe("s3://bucket/run", "step-1")["error"]
    assert "it has not answered yet" in error
    assert "check the URL and the network" in error
    assert "agent runs" not in error


def test_a_save_that_gets_no_thread_is_not_begun(service: NodeService) -> None:
    """The rank that submits the outline gets an error. The agent does not lock the save, which can be finished later."""
    store = service.store
    node = store.node_id()
    store.put_small(SAVE, METADATA_NAME, b"metadata")
    manifest = Manifest(
        SAVE,
        "step-1",
        1,
        time.time(),
        world_size=1,
        copies=1,
        metadata_bytes=8,
        metadata_crc32c=crc32c(b"metadata"),
        nodes=(NodeEntry(node, "host", None, (0,)),),
        shards={},
        lineage="a" * 16,
    )
    outline = Outline(manifest, {}, 1, must_have_all=False)
    with without_threads(), pytest.raises(StoreUnavailable, match="cannot start a thread"):
        service.finish_save(outline)
    assert not store.is_locked(SAVE)
    assert not service.is_saving
    service.finish_save(outline)
    assert service.finisher.end_of(SAVE).result(30).manifest


def test_many_peers_are_asked_without_a_thread_for_each() -> None:
    """The calling thread asks peers one by one. The error of one peer does not affect the others."""

    def call(key: int) -> int:
        if key == 2:
            raise StoreUnavailable("peer", "ask", str(key), "silent")
        return key * key

    with without_threads():
        outcome = FanOut.run(range(5), call)
    assert outcome.results == {0: 0, 1: 1, 3: 9, 4: 16}
    assert set(outcome.errors) == {2}


def test_an_agent_that_gets_no_thread_to_greet_goes_on(tmp_path: Path) -> None:
    """Without a thread for greetings the agent does not end. It greets its peers later."""
    peers = PeerBook(LocalStore(tmp_path / "root").agent_directory())
    with without_threads():
        thread = Greeter(peers, Endpoint("a" * 12, "127.0.0.1", 1, "token", 1, "0")).start()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "waits", [limit_time(None, 1.0), Heartbeat(BytesIO(), Body(BytesIO(), Message()))], ids=["deadline", "heartbeat"]
)
def test_a_wait_without_a_thread_raises_store_unavailable(waits: AbstractContextManager[object]) -> None:
    """The error is a StoreUnavailable, which callers handle, and not a RuntimeError."""
    with without_threads(), pytest.raises(StoreUnavailable, match="cannot start a thread"), waits:
        pass


def test_an_agent_without_threads_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The agent exits with a hint about the limit, not with a traceback."""
    pid = os.fork()
    if pid == 0:
        with without_threads():
            os._exit(main(["agent", "--root", str(tmp_path / "root")]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == ExitCode.UNREACHABLE
    assert "ulimit -u" in capfd.readouterr().err


def test_a_connection_that_gets_no_thread_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the reason, and does not call the client unauthenticated. The next connection is served."""
    with AgentServer(("127.0.0.1", 0), Tokens("peer", "owner"), cast(Routes, None)) as server:
        where = ("127.0.0.1", server.server_port)
        with without_threads(), socket.create_connection(where) as client:
            server.handle_request()
            assert client.recv(1) == b""
        assert "cannot start a thread" in caplog.text
        assert "no valid token" not in caplog.text
        with socket.create_connection(where) as client:
            client.sendall(b"GET /v1/status HTTP/1.0\r\n\r\n")
            server.handle_request()
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 401")


def test_an_agent_that_gets_no_process_names_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit of processes, the hint is about that limit and not about the rank's Python."""
    refused = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # as fork fails at pids.max
    monkeypatch.setattr(launch, "spawn_agent", mock.Mock(side_effect=refused))
    with pytest.raises(AgentUnavailable, match="cannot be started") as raised:
        ensure_agent(LocalStore(tmp_path / "root"))
    assert "pids.max" in raised.value.hint


@pytest.mark.parametrize("option", ["--progress", "--object-store"])
def test_a_command_that_gets_no_thread_names_the_limit(
    tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that shows progress, or waits for a bucket, needs a thread: without one it exits with a hint about the
    limit.
    """
    options = [option] if option == "--progress" else [option, f"file://{tmp_path}/bucket"]
    LocalStore(tmp_path / "root").node_id()
    with without_threads():
        assert main(["verify", "--root", str(tmp_path / "root"), *options]) == ExitCode.UNREACHABLE
    assert "pids.max" in capsys.readouterr().err
