"""Hostile peers, files and links: no crash, no memory for announced sizes, no access outside of the root."""

import contextlib
import json
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, MAGIC, crc32c, footer_bytes_of
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import SEQUENCE_MAX
from replicated_ckpt.core.lineage import ACCEPTED_AHEAD_MAX
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.errors import (
    ConfigInvalid,
    ManifestInvalid,
    ObjectCorrupt,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    StoreError,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.directories.committed import open_directory
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink, ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import refusal
from replicated_ckpt.stores.peer.client import ANSWER_BYTES_MAX, AgentAddress, AgentClient
from replicated_ckpt.stores.peer.copy import PeerShard
from replicated_ckpt.stores.verified import FIRST_FOOTER_BYTES, Expected
from tests.agent.agents import RunningAgent, peers_of, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, shard

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
SAVE = f"{1:032x}"

# Peers ---------------------------------------------------------------------------------------------------------------


@contextmanager
def fake_agent(answer: Callable[[socket.socket], None]) -> Iterator[AgentAddress]:
    """A fake agent that accepts any request and answers with `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield AgentAddress("liar", "127.0.0.1", listener.getsockname()[1], "token")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def reply_with(head: str, body: bytes = b"") -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * (1 << 20))


ANSWERS: dict[str, Callable[[socket.socket], None]] = {
    "nothing": lambda connection: None,
    "no HTTP": lambda connection: connection.sendall(b"\x00" * 100),
    "more bytes than announced": reply_with("200 OK\r\nContent-Length: 2", b"[]{}{}"),
    "fewer bytes than announced": reply_with("200 OK\r\nContent-Length: 999", b"{}"),
    "a huge length": reply_with(f"200 OK\r\nContent-Length: {10**30}", b"{}"),
    "a negative length": reply_with("200 OK\r\nContent-Length: -7", b"{}"),
    "no JSON": reply_with("200 OK\r\nContent-Length: 2", b"{{"),
    "deep JSON": reply_with("200 OK\r\nContent-Length: 1000000", b"[" * 1_000_000),
    "a deep refusal": reply_with("500 No\r\nContent-Length: 1000000", b"[" * 1_000_000),
    "a list": reply_with("200 OK\r\nContent-Length: 2", b"[]"),
    "a huge chunk": reply_with("200 OK\r\nTransfer-Encoding: chunked", b"ffffffffffffffffffff\r\n{}"),
    "headers without end": reply_with("200 OK\r\n" + "X: y\r\n" * 10_000),
    "a body without end": endless,
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_any_bad_answer_raises_an_error_of_the_package(answer: Callable[[socket.socket], None]) -> None:
    """Whatever a peer answers to a call, a range read or an upload, the client soon raises an error of the package."""
    with fake_agent(answer) as address:
        with AgentClient(address, 2) as client, pytest.raises((PeerProtocolError, StoreUnavailable)):
            client.call("GET", "/v1/status")
        with AgentClient(address, 2) as client, pytest.raises((PeerProtocolError, StoreUnavailable)):
            client.read_range("/v1/files/y", 0, memoryview(bytearray(10)))
        upload = AgentClient(address, 2)
        with pytest.raises((PeerProtocolError, StoreUnavailable)):
            upload.start_upload("/v1/saves/x/y", {}).finish_upload()
        upload.close()


def test_a_refusal_is_cut_to_a_maximum_length() -> None:
    """The error quotes at most the beginning of a peer's message."""
    body = json.dumps({"error": "x" * 5_000_000}).encode()
    with (
        fake_agent(reply_with(f"503 No\r\nContent-Length: {len(body)}", body)) as address,
        AgentClient(address) as client,
        pytest.raises(StoreUnavailable) as raised,
    ):
        client.call("GET", "/v1/status")
    assert len(str(raised.value)) < 20_000


@pytest.mark.parametrize("body", [b'{"error": "a\\nb\\u001b[2J", "hint": "c\\r\\nd"}', b"a\nb\x1b[2J"])
@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 422, 503, 507])
def test_a_refusal_is_one_line(body: bytes, status: int) -> None:
    """The peer's text goes to logs and terminals: its line ends and control characters are escaped."""
    error = refusal(status, body, "node b", "GET", "/v1/holdings")
    assert r"a\nb\x1b[2J" in error.message
    assert all(text.isprintable() for text in (error.message, error.hint))


def test_a_file_must_have_the_announced_size() -> None:
    """A file with an impossible size is not requested. A file that the peer has shortened raises an error."""
    with fake_agent(endless) as address, AgentClient(address, 2) as client:
        with pytest.raises(ManifestInvalid):
            client.fetch_file("/v1/files/.metadata", 1 << 50)
        with pytest.raises(PeerProtocolError):
            client.fetch_file("/v1/files/.metadata", ANSWER_BYTES_MAX)


ADDRESS = {"node_id": "a" * 12, "host": "127.0.0.1", "port": 1, "token": "t" * 32}
POISON: list[Mapping[str, Any]] = [
    {"port": 10**30}, {"port": -1}, {"port": 65536}, {"host": "a\0b"}, {"host": "ü"}, {"host": "x" * 300},
    {"host": "a\r\nX: y"}, {"token": "t\r\nX: y"}, {"token": "ü"}, {"node_id": "../x"}, {"node_id": ""},
    {"incarnation": -1}, {"incarnation": 1 << 80}, {"tls_sha256": "ü"}, {"tls_sha256": "ab"},
]  # fmt: skip


@pytest.mark.parametrize("poison", POISON, ids=str)
def test_an_invalid_address_is_refused(tmp_path: Path, poison: Mapping[str, Any]) -> None:
    """An invalid address is refused on receipt. In an address book, it does not hide the valid ones."""
    with pytest.raises(ValueError, match="not an address"):
        AgentAddress.from_json({**ADDRESS, **poison})
    good = AgentAddress.from_json(ADDRESS)
    (tmp_path / "peers.json").write_text(json.dumps([{**ADDRESS, **poison}, good.to_json(), 7, None]))
    assert PeerBook(tmp_path).read_all() == (good,)


def test_a_damaged_address_book_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It counts as empty. The warning comes once until the book is written again."""
    book, path = PeerBook(tmp_path), tmp_path / "peers.json"
    for _ in range(2):
        path.write_text("[{")
        path.chmod(0o600)
        caplog.clear()
        assert book.read_all() == PeerBook(tmp_path).read_all() == ()
        (record,) = caplog.records
        assert f"the address book {path} is damaged and counts as empty" in record.getMessage()
        book.learn([AgentAddress.from_json(ADDRESS)])
        assert [peer.node_id for peer in book.read_all()] == [ADDRESS["node_id"]]


@pytest.mark.parametrize("host", ["a" * 100, "..", "a..b", "%", ":"])
def test_a_host_without_an_address_is_unreachable(host: str) -> None:
    """The client raises StoreUnavailable, and no error of the resolver or of TLS."""
    with (
        AgentClient(AgentAddress("n", host, 1, "t", tls_sha256="f" * 64), 2) as client,
        pytest.raises(StoreUnavailable),
    ):
        client.call("GET", "/v1/status")


def test_invalid_addresses_do_not_end_re_protection(tmp_path: Path) -> None:
    """The agent gets greetings with unusable addresses, and its rounds of re-protection continue."""
    with running_agent(tmp_path / "a", "--round-every-s", "1") as agent, fake_agent(ANSWERS["deep JSON"]) as liar:
        book = [
            {**ADDRESS, "node_id": f"{number:012x}", **poison}
            for number, poison in enumerate([*POISON, {"host": "a" * 100}, {"port": liar.port}])
        ]
        for address in book:
            with agent.client() as client, contextlib.suppress(ReplicatedCkptError):
                client.call("POST", "/v1/hello", {"peer": address})
        rounds = status_of(agent)["protection"]["rounds"]
        with agent.client() as client:
            client.call("POST", "/v1/peers", {"peers": peers_of(agent)})
        wait_for(lambda: status_of(agent)["protection"]["rounds"] > rounds + 1, 30, "two more rounds")


def status_of(agent: RunningAgent) -> dict[str, Any]:
    with agent.client() as client:
        return client.call("GET", "/v1/status")


@pytest.mark.parametrize("sequence", [-1, SEQUENCE_MAX + 1, 1 << 100])
def test_a_sequence_out_of_range_is_refused(sequence: int) -> None:
    """Otherwise the next save would get a sequence that no manifest may have."""
    fields = Holding("n", "step-1", SAVE, 1, has_metadata=True, sizes={shard(0): 1}).to_json()
    assert Holding.from_json({**fields, "sequence": SEQUENCE_MAX}).sequence == SEQUENCE_MAX
    with pytest.raises(ValueError, match="not a valid holding"):
        Holding.from_json({**fields, "sequence": sequence})


def test_a_reported_sequence_leaves_room_for_later_saves(tmp_path: Path) -> None:
    """However large a sequence a client reports, the next save gets one that a manifest may have."""
    with running_agent(tmp_path / "a") as agent, agent.client() as client:
        client.call("POST", "/v1/sequence", {"lineage": "a" * 16, "sequence": 1 << 100, "save_id": SAVE, "reader": "r"})
        document = {"checkpoint_id": "step-1", "session": "s", "overwrite": False, "peers": []}
        answer = client.call("POST", f"/v1/saves/{SAVE}", document)
        assert answer["histories"]["a" * 16]["sequence"] == ACCEPTED_AHEAD_MAX < SEQUENCE_MAX


# Sizes ---------------------------------------------------------------------------------------------------------------


def tail_of(data_bytes: int, block_bytes: int) -> bytes:
    body = struct.pack("<8sIQ", MAGIC, block_bytes, data_bytes)
    return body + struct.pack("<I", crc32c(body))


@contextmanager
def memory_at_most(size_bytes: int) -> Iterator[None]:
    """In this block, an allocation of more than `size_bytes` in addition raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("block_bytes", [1, 64, 4096])
def test_a_footer_that_would_fill_the_memory_is_refused(tmp_path: Path, block_bytes: int) -> None:
    """The end of a sparse file of a tebibyte announces gigabytes of checksums: reading it locally or from a peer raises
    ObjectCorrupt.
    """
    data = 1 << 40
    size = data + 4 * (data // block_bytes) + FOOTER_TAIL_BYTES
    tail = tail_of(data, block_bytes)
    assert footer_bytes_of(tail, size) is None
    path = tmp_path / shard(0)
    with path.open("wb") as file:
        file.seek(size - len(tail))
        file.write(tail)
    end = tail.rjust(FIRST_FOOTER_BYTES, b"\0")
    head = f"206 Partial\r\nContent-Length: {len(end)}"

    def twice(connection: socket.socket) -> None:
        """Answers twice: a client reads a bad footer again, on the same connection."""
        reply_with(head, end)(connection)
        connection.recv(1 << 16)
        reply_with(head, end)(connection)

    with fake_agent(twice) as address, memory_at_most(1 << 30):
        with pytest.raises(ObjectCorrupt, match="footer"):
            ShardFile(partial(os.open, path, os.O_RDONLY), "here", shard(0), Expected(size, 7)).open()
        with pytest.raises(ObjectCorrupt, match="footer"):
            PeerShard(AgentClient(address), "step-1", SAVE, shard(0), Expected(size, 7)).open()


def test_files_are_measured_before_they_are_read(tmp_path: Path) -> None:
    """A manifest and a .metadata of 4 GiB, committed and staged, are refused without reading them into memory."""
    store = LocalStore(tmp_path / "a")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=1000)
    staged = LocalStore(tmp_path / "b")
    staged.root.mkdir()
    staged.begin(Intent(SAVE, "step-1", "s", overwrite=False))
    manifest = store.root / "step-1" / ".manifest.json"
    staged.put_small(SAVE, ".manifest.json", manifest.read_bytes())
    for path in (manifest, staged.staging(SAVE) / ".metadata"):
        with path.open("ab") as file:
            file.truncate(4 << 30)
    with memory_at_most(1 << 30):
        with pytest.raises(ManifestInvalid):
            store.catalog.manifest("step-1")
        with open_directory(store.root, "step-1") as directory, pytest.raises(ManifestInvalid):
            directory.manifest()
        assert list(store.catalog.holdings("n")) == []
        assert not staged.is_decided(SAVE)
        with pytest.raises(ManifestInvalid):
            decode_manifest(bytes(100 << 20), "here")


# Links ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def linked(tmp_path: Path) -> LocalStore:
    """A store with a checkpoint, a link to a directory outside, a link that stays inside, and a link to itself."""
    store, other = LocalStore(tmp_path / "root"), LocalStore(tmp_path / "outside")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=1000)
    checkpointed([other], 2, {shard(0): (0,)}, copies=1, size_bytes=1000)
    (store.root / "out").symlink_to(other.root)
    (store.root / "best").symlink_to("step-1")
    (store.root / "loop").symlink_to("loop")
    return store


def test_nothing_is_read_through_a_link_that_leads_out(linked: LocalStore) -> None:
    """This holds even if the link leads to a complete checkpoint. A link inside the root works like its target."""
    other = f"{2:032x}"
    for checkpoint_id in ("out/step-1", "out", "loop", "loop/x"):
        for name in (shard(0), ".metadata", ".manifest.json"):
            with pytest.raises((ObjectMissing, StoreError)):
                linked.open_file(checkpoint_id, other, name)
        with pytest.raises((ObjectMissing, StoreError)), open_directory(linked.root, checkpoint_id):
            pass
        assert linked.catalog.holdings("n", checkpoint_id) == ()
    os.close(linked.open_file("best", SAVE, shard(0)))


def test_nothing_is_written_through_a_link_that_leads_out(linked: LocalStore) -> None:
    """A save with such a name is refused when it opens. If only its manifest has such a name, the save is published
    under the name that it was opened with.
    """
    outside = linked.root.parent / "outside"
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    for checkpoint_id in ("out/step-1", "out/new", "loop/new"):
        with pytest.raises(ConfigInvalid, match="symbolic link"):
            linked.begin(Intent("3" * 32, checkpoint_id, "s", overwrite=True))
    planted = replace(linked.catalog.manifest("step-1"), save_id="4" * 32, checkpoint_id="out/new")
    linked.begin(Intent("4" * 32, "step-2", "s", overwrite=True))
    linked.put_small("4" * 32, ".metadata", (linked.root / "step-1" / ".metadata").read_bytes())
    linked.put_small("4" * 32, ".manifest.json", planted.encode())
    linked.commit("4" * 32)
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before
    assert not (linked.root / "out" / "new").exists()
    assert linked.catalog.manifest("step-2").save_id == "4" * 32


def test_staged_files_are_no_links(linked: LocalStore) -> None:
    """If a link has the name of a file that is about to be received, the link is not followed."""
    victim = linked.root.parent / "victim"
    victim.write_bytes(b"as it was")
    linked.begin(Intent("5" * 32, "step-5", "s", overwrite=False))
    path = linked.path_of_staged("5" * 32, shard(0))
    path.with_name(path.name + ".part").symlink_to(victim)
    sink = FileSink.create(path)
    sink.write(memoryview(b"received bytes"))
    sink.discard()
    assert victim.read_bytes() == b"as it was"
