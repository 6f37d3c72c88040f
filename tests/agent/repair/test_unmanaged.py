"""Checkpoints that stock torch scattered, by the agents and the command line: listed, read, checked, adopted."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.agent.unmanaged.look import unmanaged_verify_path
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
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient
from replicated_ckpt.stores.peer.paths import unmanaged_path
from tests.agent.agents import RunningAgent, running_agent, wait_for
from tests.agent.checkpoints import findings, held, introduced, quarantined
from tests.agent.repair.test_reprotect import agents, protected, stores
from tests.agent.repair.test_verify_repair import tree
from tests.agent.scattered import ID, Interrupted, loads, loads_by_stock_torch, scattered, state
from tests.damage import flip
from tests.fault.hostile.test_door_limits import peak_kib

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


class Told(NamedTuple):
    """What a command has said."""

    code: int
    out: str


Tell = Callable[..., Told]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Runs a verb on a root in this process; agents serve the roots already."""

    def tell(verb: str, store: LocalStore, *options: str) -> Told:
        capsys.readouterr()
        code = main([verb, "--root", str(store.root), *options])
        out, err = capsys.readouterr()
        assert "replicated-ckpt" not in err, err
        return Told(code, out)

    return tell


def test_three_nodes_become_one_checkpoint_of_ours(tmp_path: Path, tell: Tell) -> None:
    """ls shows it, verify reads it, repair's plan is what it does: checksums, copies and metadata, and one node is lost."""
    nodes = stores(tmp_path, 3)
    contents = scattered(nodes, tmp_path)
    (nodes[1].root / ID / "meta.pt").write_bytes(b"Lightning's")
    (nodes[2].root / ID / "__9_0.distcp").write_bytes(b"of another world")
    with agents(nodes) as running:
        assert "stock, unprotected" in tell("ls", nodes[2]).out
        (nodes[2].root / ID / "__9_0.distcp").rename(nodes[2].root / "aside")
        before = [tree(store.root) for store in nodes]
        code, out = tell("verify", nodes[1], "--json")
        found = json.loads(out)
        (stock,) = found["unmanaged"]
        assert (code, stock["checkpoint_id"], stock["is_sound"], stock["items_without_crc32"]) == (0, ID, True, 0)
        assert stock["bytes_read"] > 4 * 8 * 40_000
        code, out = tell("repair", nodes[1], "--json", "--dry-run")
        plan = json.loads(out)
        assert (code, [entry["checkpoint_id"] for entry in plan["adopt_unmanaged"]]) == (ExitCode.OK, [ID])
        assert [tree(store.root) for store in nodes] == before
        (nodes[2].root / "aside").rename(nodes[2].root / ID / "__9_0.distcp")
        done = tell("repair", nodes[1])
        assert done.code == ExitCode.OK, done.out
        wait_for(protected(*running), 30, "copies")
        assert " 2 of 2 " in tell("ls", nodes[2]).out
        assert tell("verify", nodes[0]).code == ExitCode.OK
        assert [findings(store) for store in nodes] == [[], [], []]
        _is_adopted(nodes, contents)
        running[0].process.kill()
        running[0].process.wait()
        shutil.rmtree(nodes[0].root)
        assert [loads(store) for store in nodes[1:]] == [True, True]


def _is_adopted(nodes: list[LocalStore], contents: Mapping[str, bytes]) -> None:
    """Every file begins with what stock torch wrote; what else lay there is still there; stock torch reads it."""
    for store in nodes:
        assert (store.root / ID / ".metadata").read_bytes() == contents[".metadata"]
        for name in held(store, ID):
            assert (store.root / ID / name).read_bytes().startswith(contents[name])
    copies = Counter(name for store in nodes for name in held(store, ID))
    assert set(copies) == set(contents) - {".metadata"}
    assert min(copies.values()) == 2
    assert (nodes[1].root / ID / "meta.pt").read_bytes() == b"Lightning's"
    assert quarantined(nodes[2]) == ["__9_0.distcp"]
    gathered = nodes[0].root.parent / "gathered"
    for store in nodes:
        shutil.copytree(store.root / ID, gathered, dirs_exist_ok=True)
    assert loads_by_stock_torch(gathered)


def test_what_cannot_be_adopted_stays_as_it_is(tmp_path: Path, tell: Tell) -> None:
    """A damaged item, a directory among the files, contradicting metadata: repair says which, and changes nothing."""
    nodes = stores(tmp_path, 2)
    scattered(nodes, tmp_path)
    scattered(nodes, tmp_path, checkpoint_id="with-directory")
    scattered(nodes, tmp_path, checkpoint_id="contradicting")
    scattered(nodes, tmp_path, checkpoint_id="without-metadata")
    (damaged,) = sorted((nodes[1].root / ID).iterdir())[:1]
    flip(damaged, 100_000)
    (nodes[0].root / "with-directory" / "logs").mkdir()
    (nodes[1].root / "contradicting" / ".metadata").write_bytes(b"another run's")
    (nodes[0].root / "without-metadata" / ".metadata").unlink()
    with agents(nodes):
        before = [tree(store.root) for store in nodes]
        code, out = tell("verify", nodes[0], "--json")
        found = json.loads(out)
        problems = {stock["checkpoint_id"]: stock for stock in found["unmanaged"]}
        assert code == ExitCode.FAILED
        assert [finding["path"] for finding in problems[ID]["findings"]] == [str(damaged)]
        assert "different .metadata" in problems["contradicting"]["problem"]
        assert "no node" in problems["without-metadata"]["problem"]
        done = tell("repair", nodes[0])
        assert done.code == ExitCode.FAILED
        assert f"no intact {damaged.name}" in done.out
        assert "with-directory/logs is no plain file" in done.out
        assert [tree(store.root) for store in nodes] == before


def test_a_node_that_missed_the_end_of_an_adoption_still_gives_its_shards(tmp_path: Path, tell: Tell) -> None:
    """Decided elsewhere, given up here: the original files are what the manifest means, and get their footers in place."""
    nodes = stores(tmp_path, 2)
    contents = scattered(nodes, tmp_path)
    originals = {path.name: path.read_bytes() for path in (nodes[1].root / ID).iterdir()}
    with agents(nodes):
        assert tell("repair", nodes[0], "--copies", "1").code == ExitCode.OK
    shutil.rmtree(nodes[1].root / ID)
    (nodes[1].root / ID).mkdir()
    for name, raw in originals.items():
        (nodes[1].root / ID / name).write_bytes(raw)
    with agents(nodes) as running:
        wait_for(protected(*running), 30, "the missing shards")
        assert held(nodes[1], ID) == set(originals)
        assert loads(nodes[0])
    assert set(originals) | held(nodes[0], ID) == set(contents) - {".metadata"}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningAgent, LocalStore]]:
    """An agent whose root has a checkpoint of stock torch, and things that are none of its business."""
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
    """Its listing and its bytes are what lies there."""
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
    """Other names, links, directories, other sizes and whatever lies outside the root are refused."""
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
def test_items_that_are_none_are_not_checked(serving: tuple[RunningAgent, LocalStore], document: object) -> None:
    """A request to check shards names places in shards, or it is refused."""
    agent, _ = serving
    body = document.encode() if isinstance(document, str) else json.dumps(document).encode()
    with agent.peer() as client, pytest.raises(PeerProtocolError, match="cannot be checked"):
        client.put("POST", unmanaged_verify_path(ID), body)


def test_no_large_body_is_kept_in_memory(serving: tuple[RunningAgent, LocalStore]) -> None:
    """However large a request to check shards is: what comes beyond the places of many items is not kept."""
    agent, _ = serving
    before = peak_kib(agent)
    for _ in range(3):
        with agent.peer() as client, pytest.raises((PeerProtocolError, StoreUnavailable)):
            client.put("POST", unmanaged_verify_path(ID), b" " * (256 << 20))
    assert peak_kib(agent) - before < 100 << 10


def test_strangers_get_nothing(serving: tuple[RunningAgent, LocalStore]) -> None:
    """Without the token neither listing nor files."""
    agent, _ = serving
    known = agent.endpoint.address()
    with AgentClient(AgentAddress(known.node_id, known.host, known.port, "wrong")) as client:
        for path in ("/v1/unmanaged", unmanaged_path(ID, ".metadata", 1)):
            with pytest.raises(StoreDenied):
                client.fetch("GET", path)


def test_a_load_goes_on_while_the_checkpoint_is_adopted(tmp_path: Path, tell: Tell) -> None:
    """It found the files of stock torch; when it opens them they lie in other directories and have footers."""
    nodes = stores(tmp_path, 2)
    scattered(nodes, tmp_path)
    codes: list[int] = []
    with agents(nodes):
        planner = Interrupted(lambda: codes.append(tell("repair", nodes[1]).code))
        assert loads(nodes[0], planner=planner)
        assert codes == [ExitCode.OK]


def test_a_checkpoint_of_ours_is_not_served_as_stock(tmp_path: Path, tell: Tell) -> None:
    """Once adopted, it is not listed as stock, and what was there before goes out as such; of a later save nothing does."""
    (store,) = stores(tmp_path, 1)
    contents = scattered([store], tmp_path)
    with running_agent(store.root) as agent:
        introduced(store, [])
        assert tell("repair", store).code == ExitCode.OK
        with agent.client() as client:
            assert client.call("GET", "/v1/unmanaged")["unmanaged"] == []
            for name, raw in contents.items():
                assert client.fetch("GET", unmanaged_path(ID, name, len(raw))).startswith(raw)
                with pytest.raises(ObjectMissing, match="manifest by now"):
                    client.fetch("GET", unmanaged_path(ID, name, len(raw) + 1))
            dcp.save(
                state(2), checkpoint_id=ID, storage_writer=ReplicatedWriter(store.root, overwrite=True), no_dist=True
            )
            size_bytes = (store.root / ID / ".metadata").stat().st_size
            with pytest.raises(ObjectMissing, match="manifest by now"):
                client.fetch("GET", unmanaged_path(ID, ".metadata", size_bytes))
