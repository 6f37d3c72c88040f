"""Checkpoints of torch's own writer on several nodes: agents and commands list, load and check them, and change
nothing.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.errors import (
    ConfigInvalid,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    StoreDenied,
    StoreUnavailable,
)
from replicated_ckpt.node.peers.unmanaged_audit import unmanaged_verify_path
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.answer import unmanaged_path
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from tests.agent.agents import RunningAgent, running_agent
from tests.agent.repair.test_reprotect import agents, stores
from tests.agent.repair.test_verify_repair import tree
from tests.agent.scattered import ID, loads, scattered, state
from tests.damage import flip
from tests.fault.hostile.test_server_limits import peak_kib

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


class CommandResult(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str


RunCommand = Callable[..., CommandResult]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Runs a command on a root in this process. The agents run already."""

    def run(verb: str, store: LocalStore, *options: str) -> CommandResult:
        capsys.readouterr()
        code = main([verb, "--root", str(store.root), *options])
        out, err = capsys.readouterr()
        assert "replicated-ckpt" not in err, err
        return CommandResult(code, out)

    return run


def test_repair_leaves_a_stock_checkpoint_as_it_is(tmp_path: Path, run: RunCommand) -> None:
    """`ls` and `verify` list it. `repair` says how to get copies, and changes no file on any node."""
    nodes = stores(tmp_path, 3)
    scattered(nodes, tmp_path)
    with agents(nodes):
        assert "stock, unprotected" in run("ls", nodes[2]).out
        before = [tree(store.root) for store in nodes]
        code, out = run("verify", nodes[1], "-o", "json")
        (stock,) = json.loads(out)["unmanaged"]
        assert (code, stock["checkpoint_id"], stock["is_sound"], stock["items_without_crc32"]) == (0, ID, True, 0)
        assert stock["bytes_read"] > 4 * 8 * 40_000
        done = run("repair", nodes[0])
        assert (done.code, f"not repaired: {ID}: stock torch wrote it" in done.out) == (ExitCode.OK, True)
        named = run("repair", nodes[0], ID)
        assert (named.code, "save it under a new id" in named.out) == (ExitCode.FAILED, True)
        assert [tree(store.root) for store in nodes] == before
        assert [loads(store) for store in nodes] == [True] * 3


def test_verify_finds_what_is_wrong_with_a_stock_checkpoint(tmp_path: Path, run: RunCommand) -> None:
    """`verify` reports a damaged item, contradicting metadata and missing metadata, and changes nothing."""
    nodes = stores(tmp_path, 2)
    scattered(nodes, tmp_path)
    scattered(nodes, tmp_path, checkpoint_id="contradicting")
    scattered(nodes, tmp_path, checkpoint_id="without-metadata")
    (damaged,) = sorted((nodes[1].root / ID).iterdir())[:1]
    flip(damaged, 100_000)
    (nodes[1].root / "contradicting" / ".metadata").write_bytes(b"another run's")
    (nodes[0].root / "without-metadata" / ".metadata").unlink()
    with agents(nodes):
        before = [tree(store.root) for store in nodes]
        code, out = run("verify", nodes[0], "-o", "json")
        problems = {stock["checkpoint_id"]: stock for stock in json.loads(out)["unmanaged"]}
        assert code == ExitCode.FAILED
        assert [finding["path"] for finding in problems[ID]["findings"]] == [str(damaged)]
        assert "different .metadata" in problems["contradicting"]["problem"]
        assert "no node" in problems["without-metadata"]["problem"]
        assert [tree(store.root) for store in nodes] == before


def test_a_checkpoint_of_ours_is_not_served_as_stock(tmp_path: Path) -> None:
    """Once a save has the id, no file under it is listed or served as stock."""
    (store,) = stores(tmp_path, 1)
    contents = scattered([store], tmp_path)
    with running_agent(store.root) as agent, agent.client() as client:
        assert len(client.call("GET", "/v1/unmanaged")["unmanaged"]) == 1
        writer = ReplicatedWriter(store.root, overwrite=True)
        dcp.save(state(2), checkpoint_id=ID, storage_writer=writer, no_dist=True)
        assert client.call("GET", "/v1/unmanaged")["unmanaged"] == []
        for name in (".metadata", *contents):
            path = store.root / ID / name
            size_bytes = path.stat().st_size if path.exists() else 1
            with pytest.raises(ObjectMissing, match="manifest by now"):
                client.fetch("GET", unmanaged_path(ID, name, size_bytes))
        assert loads(store, seed=2)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningAgent, LocalStore]]:
    """An agent whose root has a stock checkpoint, and links and files that it must not serve."""
    folder = tmp_path_factory.mktemp("serving")
    store = LocalStore(folder / "node0")
    scattered([store], folder)
    (folder / "secret").write_bytes(b"outside")
    (store.root / ID / "__7_0.distcp").symlink_to(folder / "secret")
    (store.root / ID / "__8_0.distcp").mkdir()
    (store.root / ID / "notes.txt").write_bytes(b"not a shard")
    (store.root / "out").symlink_to(folder)
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "__0_0.distcp").write_bytes(b"outside")
    with running_agent(store.root) as agent:
        yield agent, store


def test_an_agent_serves_the_files_of_a_stock_checkpoint(serving: tuple[RunningAgent, LocalStore]) -> None:
    """Its list and its bytes match the files."""
    agent, store = serving
    with agent.client() as client:
        (found,) = client.call("GET", f"/v1/unmanaged?checkpoint_id={ID}")["unmanaged"]
        raw = (store.root / ID / ".metadata").read_bytes()
        assert (found["metadata"]["size_bytes"], found["metadata"]["print_crc32c"]) == (len(raw), crc32c(raw))
        assert set(found["shards"]) == {f"__0_{n}.distcp" for n in range(4)}
        for name, file in found["shards"].items():
            path = store.root / ID / name
            assert (
                client.fetch_file(unmanaged_path(ID, name, file["size_bytes"]), file["size_bytes"]) == path.read_bytes()
            )
        assert client.call("GET", "/v1/unmanaged")["unmanaged"] == [found]


@pytest.mark.parametrize(
    ("checkpoint_id", "name", "size_bytes"),
    [
        (ID, "notes.txt", 11),
        (ID, "__7_0.distcp", 7),
        (ID, "__8_0.distcp", 4096),
        (ID, "__0_0.distcp", 1),
        (ID, "..%2F..%2F..%2Fsecret", 7),
        ("../", "secret", 7),
        ("out/elsewhere", "__0_0.distcp", 7),
        ("run", ".metadata", 0),
    ],
)
def test_an_agent_serves_nothing_else(
    serving: tuple[RunningAgent, LocalStore], checkpoint_id: str, name: str, size_bytes: int
) -> None:
    """Other names and sizes, links, directories and paths outside the root are refused."""
    agent, _ = serving
    with agent.client() as client, pytest.raises((ObjectMissing, ConfigInvalid, ReplicatedCkptError)):
        client.fetch("GET", unmanaged_path(checkpoint_id, name, size_bytes))


ITEMS: dict[str, Any] = {
    "no items": {},
    "a list": {"items": []},
    "another file": {"items": {"../../secret": [[0, 1]]}},
    "no pair": {"items": {"__0_0.distcp": [[0]]}},
    "no number": {"items": {"__0_0.distcp": [[0, "1"]]}},
    "below zero": {"items": {"__0_0.distcp": [[-1, 1]]}},
    "beyond measure": {"items": {"__0_0.distcp": [[0, 1 << 63]]}},
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("document", ITEMS.values(), ids=ITEMS)
def test_invalid_items_are_refused(serving: tuple[RunningAgent, LocalStore], document: object) -> None:
    """A request with invalid items is refused."""
    agent, _ = serving
    body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
    with agent.peer() as client, pytest.raises(PeerProtocolError, match="cannot be checked"):
        client.put("POST", unmanaged_verify_path(ID), body)


def test_no_large_body_is_kept_in_memory(serving: tuple[RunningAgent, LocalStore]) -> None:
    """A request above the size limit is not read into memory."""
    agent, _ = serving
    before = peak_kib(agent)
    for _ in range(3):
        with agent.peer() as client, pytest.raises((PeerProtocolError, StoreUnavailable)):
            client.put("POST", unmanaged_verify_path(ID), b" " * (256 << 20))
    assert peak_kib(agent) - before < 100 << 10


def test_without_the_token_nothing_is_served(serving: tuple[RunningAgent, LocalStore]) -> None:
    """Without the token, neither the list nor a file is served."""
    agent, _ = serving
    known = agent.endpoint.address()
    with AgentClient(AgentAddress(known.node_id, known.host, known.port, "wrong")) as client:
        for path in ("/v1/unmanaged", unmanaged_path(ID, ".metadata", 1)):
            with pytest.raises(StoreDenied):
                client.fetch("GET", path)
