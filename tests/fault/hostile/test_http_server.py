"""The HTTP server under random and hostile input: each request is answered or refused, no file outside of the root is
touched, and the agent keeps running.
"""

import contextlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicated_ckpt.agent.http.request import DOCUMENT_BYTES_MAX
from replicated_ckpt.agent.http.routes import Routes
from replicated_ckpt.agent.http.server import AgentServer
from replicated_ckpt.agent.repair.reprotect import Reprotector
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.agent.state.rights import Tokens
from replicated_ckpt.core.integrity.checksum import FOOTER_TAIL_BYTES, decode_footer, footer_bytes_of
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.core.upkeep.repair_plan import Finding, RepairPlan
from replicated_ckpt.errors import ManifestInvalid, ObjectCorrupt, ReplicatedCkptError, StoreDenied
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.shard_file import ShardFile
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import file_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.throttle import Pace
from replicated_ckpt.stores.verified import Expected
from replicated_ckpt.testing.shards import table_of
from tests.agent.agents import exchanged, object_routes, running_agent
from tests.agent.checkpoints import checkpointed, held, shard

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
TOKEN, OWNER = "t" * 32, "o" * 32
SAVE = "1" * 32
FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
RSS_MAX_KIB = 300 << 10


@dataclass
class Server:
    """An agent's HTTP server in this process. `outside` is next to the root, and must not change."""

    store: LocalStore
    port: int
    outside: Path

    def client(self, token: str = OWNER) -> AgentClient:
        return AgentClient(AgentAddress("node", "127.0.0.1", self.port, token))

    def tree(self) -> dict[str, bytes]:
        files = (path for path in self.outside.parent.rglob("*") if path.is_file() and ".agent" not in path.parts)
        return {str(path): path.read_bytes() for path in files}

    def assert_well(self) -> None:
        with self.client() as client:
            assert client.call("GET", "/v1/holdings")["holdings"][0]["checkpoint_id"] == "step-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("door")
    (base / "outside").mkdir()
    (base / "outside" / shard(0)).write_bytes(b"secret")
    store = LocalStore(base / "root")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=1000)
    (store.root / "step-2").symlink_to(base / "outside")
    service, stopping = NodeService(store), threading.Event()
    who = {"node_id": store.node_id(), "incarnation": 1, "is_leaving": False}
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e9, stopping), stopping)
    routes = Routes(
        service,
        reprotector,
        object_routes(service, stopping),
        lambda *, is_brief, is_opening=False: {**who, "brief": is_brief, "opening": is_opening},
        lambda: None,
    )
    server = AgentServer(("127.0.0.1", 0), Tokens(TOKEN, OWNER), routes)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    reprotector.start()
    yield Server(store, int(server.server_address[1]), base / "outside")
    stopping.set()
    reprotector.join()
    server.shutdown()
    server.server_close()
    thread.join()


VERBS = [
    ("GET", "/v1/status"), ("GET", "/v1/holdings"), ("POST", "/v1/peers"),
    ("GET", file_path("step-1", SAVE, shard(0))), ("GET", f"/v1/saves/{SAVE}"),
    ("POST", f"/v1/saves/{SAVE}"), ("PUT", f"/v1/saves/{SAVE}/{shard(0)}"), ("POST", f"/v1/saves/{SAVE}/commit"),
    ("POST", f"/v1/saves/{SAVE}/abort"), ("POST", "/v1/shutdown"),
    *(("POST", f"/v1/{verb}") for verb in ("hello", "sequence", "suspects", "verify", "repair")),
]  # fmt: skip


@pytest.mark.parametrize("token", ["", "x" * 32, TOKEN[:-1], TOKEN + "t", "ü" * 16])
def test_no_verb_without_the_token(server: Server, token: str) -> None:
    """Every verb is refused, returns nothing about the store, and changes nothing."""
    before = server.tree()
    for method, path in VERBS:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 2\r\n\r\n{{}}"
        answer = exchanged(server.port, head.encode())
        assert b" 401 " in answer.splitlines()[0], (method, path, answer[:200])
        assert b"step-1" not in answer.partition(b"\r\n\r\n")[2]
    assert server.tree() == before
    server.assert_well()


@FUZZ
@given(st.binary(max_size=400))
def test_random_bytes(server: Server, raw: bytes) -> None:
    """Whatever is sent, the connection ends and the next one is served."""
    exchanged(server.port, raw)
    server.assert_well()


HEAD = st.sampled_from(
    [
        "Content-Length: -1", "Content-Length: 18446744073709551617", "Content-Length: 1e3", "Content-Length: ٣",
        "Transfer-Encoding: chunked", "Transfer-Encoding: chunked, gzip", "Content-Length: 5", "Range: bytes=5-1",
        "Range: bytes=-1", "Range: bytes=0-99999999999999999999", "Expect: 100-continue", "X: " + "y" * 60_000,
    ]
)  # fmt: skip


@FUZZ
@given(st.sampled_from(VERBS), st.lists(HEAD, max_size=4), st.binary(max_size=60))
def test_random_framing(server: Server, verb: tuple[str, str], heads: list[str], body: bytes) -> None:
    """The requests have the right token, but contradicting lengths, encodings and ranges: the server keeps working."""
    method, path = verb
    if path.endswith(("/shutdown", "/commit", "/abort")):
        return
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {OWNER}", *heads, "", ""]
    exchanged(server.port, "\r\n".join(lines).encode() + body)
    server.assert_well()


NAUGHTY = st.sampled_from(
    ["..", "../..", "%2e%2e", "%2f", "..%2foutside", "/etc/passwd", "%00", "a" * 3000, "step-2", "step-1/../step-2",
     ".agent", ".agent/endpoint.json", "node.json", ".staging", "ü", "latest", "", "__0_0.distcp", ".metadata"]
)  # fmt: skip


@FUZZ
@given(st.sampled_from(["GET", "PUT", "POST", "HEAD"]), st.lists(NAUGHTY, min_size=1, max_size=4), NAUGHTY)
def test_no_path_leads_out(server: Server, method: str, parts: list[str], checkpoint_id: str) -> None:
    """No combination of names reads or writes anything but the files of a checkpoint."""
    before = server.tree()
    path = f"/v1/{'/'.join(parts)}?checkpoint_id={checkpoint_id}&save_id={SAVE}".encode().decode("latin-1")
    for prefix in ("", "files/", f"saves/{SAVE}/", "saves/"):
        target = path.replace("/v1/", f"/v1/{prefix}", 1).replace(" ", "%20")
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {OWNER}\r\nContent-Length: 1\r\n\r\nx"
        answer = exchanged(server.port, head.encode("latin-1"))
        assert b"secret" not in answer
        assert b'"token"' not in answer
    assert server.tree() == before
    server.assert_well()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    "checkpoint_id",
    "session",
    "overwrite",
    "peers",
    "peer",
    "is_leaving",
    "node_id",
    "sequence",
    "save_id",
    "name",
    "plan",
    "why",
)


@FUZZ
@given(
    st.sampled_from(
        [path for method, path in VERBS if method == "POST" and not path.endswith(("/shutdown", "/commit"))]
    ),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6),
)
def test_wrong_types_in_documents(server: Server, path: str, document: dict[str, Any]) -> None:
    """Any JSON in any field is accepted or refused with an error of the package. The agent never raises anything else."""
    with server.client() as client, contextlib.suppress(ReplicatedCkptError):
        client.call("POST", path, document)
    server.assert_well()
    assert held(server.store) == {shard(0)}
    with server.client() as client:
        client.call("POST", f"/v1/saves/{SAVE}/abort", {"why": "the next example"})


def test_bombs_take_no_memory(tmp_path: Path) -> None:
    """Deep and wide JSON, oversized bodies, and more connections than the limit: the process stays small and answers."""
    with running_agent(tmp_path / "a") as agent:

        def sent(body: bytes, path: str = "/v1/peers") -> None:
            with contextlib.suppress(ReplicatedCkptError), agent.client() as client:
                client.fetch("POST", path, body)

        sent(b"[" * DOCUMENT_BYTES_MAX)
        sent(b'{"peers":[' + b"{}," * (DOCUMENT_BYTES_MAX // 3 - 10) + b"{}]}")
        sent(b'{"a":' + b"1" * (DOCUMENT_BYTES_MAX - 10) + b"}")
        sent(b"x" * (DOCUMENT_BYTES_MAX * 3))
        idle = [socket.create_connection(("127.0.0.1", agent.endpoint.port), 10) for _ in range(560)]
        for connection in idle:
            connection.close()
        status = Path(f"/proc/{agent.process.pid}/status").read_text()
        peak_kib = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
        assert peak_kib < RSS_MAX_KIB, f"{peak_kib} KiB"
        with agent.client() as client:
            assert client.call("GET", "/v1/status")["node_id"] == agent.endpoint.node_id


def test_a_wrong_token_is_named_in_the_error(server: Server) -> None:
    """The client raises StoreDenied for a wrong token, with a message that names the token."""
    with server.client("wrong") as client, pytest.raises(StoreDenied, match="token"):
        client.call("GET", "/v1/status")


# Parsers -------------------------------------------------------------------------------------------------------------

MANIFEST = b'{"crc32c":%d,\n"manifest":%s}\n'


@FUZZ
@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_random_manifests(raw: bytes) -> None:
    """Random bytes and JSON raise ManifestInvalid."""
    with pytest.raises(ManifestInvalid):
        decode_manifest(raw, "here")


@FUZZ
@given(st.binary(max_size=200), st.integers(0, 1 << 70))
def test_random_footers(raw: bytes, size: int) -> None:
    """Random bytes are never a footer, whatever the size of the file."""
    assert footer_bytes_of(raw[-FOOTER_TAIL_BYTES:], size) is None or len(raw) >= FOOTER_TAIL_BYTES
    assert decode_footer(raw, size) is None


@pytest.mark.parametrize("kind", [Holding, Finding, RepairPlan, AgentAddress])
@FUZZ
@given(
    value=st.dictionaries(
        st.text(max_size=10) | st.sampled_from([*FIELDS, "sizes", "restore", "copy"]), JSON, max_size=9
    )
)
def test_random_documents(kind: Any, value: dict[str, Any]) -> None:
    """A peer's document becomes a value of the package, or raises an error that every caller handles."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        kind.from_json(value)


@FUZZ
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_random_endpoints(raw: bytes) -> None:
    """A damaged endpoint file is treated as missing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "endpoint.json").write_bytes(raw)
        assert read_endpoint(folder) is None


def test_sizes_from_outside_allocate_nothing(tmp_path: Path) -> None:
    """A manifest's size of exabytes is first compared with the size of the file."""
    path = tmp_path / shard(0)
    path.write_bytes(b"data" + table_of([b"data"]).encode())
    for size in (1 << 62, 1 << 40):
        with pytest.raises(ObjectCorrupt, match="expected"):
            ShardFile(partial(os.open, path, os.O_RDONLY), "here", shard(0), Expected(size, 7)).open()
