"""What one agent's peer token allows, sniffed, leaked or another node's: it runs, removes and redirects nothing."""

import re
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.http.request import CHECKS_MAX, Checks, Request
from replicated_ckpt.core.integrity.checksum import BlockTable, crc32c
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import SEQUENCE_FLOOR_MAX
from replicated_ckpt.core.lineage import BELIEVED_AHEAD
from replicated_ckpt.core.manifest import Manifest, NodeEntry
from replicated_ckpt.core.upkeep.repair_plan import RepairPlan, RestoreManifest
from replicated_ckpt.errors import (
    ConfigInvalid,
    ObjectMissing,
    PeerProtocolError,
    ReplicatedCkptError,
    StoreDenied,
    StoreUnavailable,
)
from replicated_ckpt.node.peers import manifests
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.peers.manifests import ManifestBook
from replicated_ckpt.node.peers.watch import HOLDINGS_MAX, ask_holdings, parse_node_holdings
from replicated_ckpt.node.saves.pins import PINS_MAX, Pins
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.state.sequence_floor import LINEAGES_MAX, SequenceFloor
from replicated_ckpt.node.state.upload_book import UploadBook
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.testing.shards import table_of
from tests.agent.agents import RunningAgent, peers_of, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, held, shard
from tests.agent.repair.test_verify_repair import tree

REFUSED = (ConfigInvalid, PeerProtocolError)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
SAVE = f"{7:032x}"
QUIET = ("--lost-after-s", "600")
OPENING = {"checkpoint_id": "step-7", "session": "s", "overwrite": True, "peers": []}
TICKET = {"ticket": "7" * 32}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[RunningAgent]:
    with running_agent(tmp_path / "a", *QUIET) as running:
        yield running


def said_of(agent: RunningAgent, verb: str) -> list[str]:
    """The lines of the agent's log that are refusals of a verb; not to a stranger, whose own peer had this port before."""
    log = (agent.root / "agent.out").read_text().splitlines()
    ours = [line for line in log if "no valid token from" not in line]
    return [line for line in ours if "refused " in line and f"/v1/{verb}'" in line]


# Running something ---------------------------------------------------------------------------------------------------


def test_a_token_runs_no_command(agent: RunningAgent, tmp_path: Path) -> None:
    """A file that arrives through the agent is no configuration of botocore's, neither for a peer nor for the owner."""
    flag, where = tmp_path / "EXECUTED", agent.root / ".staging" / SAVE / ".metadata"
    config = f'[profile evil]\ncredential_process = /bin/sh -c "id > {flag}"\nregion = us-east-1\n'
    environment = {"AWS_CONFIG_FILE": str(where), "AWS_PROFILE": "evil", "AWS_EC2_METADATA_DISABLED": "true"}
    options = {"endpoint_url": "http://127.0.0.1:9"}
    target = {"url": "s3://bucket/x", "options": options, "environment": environment}
    with agent.client() as owner, agent.peer() as peer:
        with pytest.raises(StoreDenied):
            peer.call("POST", f"/v1/saves/{SAVE}", OPENING)
        owner.call("POST", f"/v1/saves/{SAVE}", OPENING)
        owner.put("PUT", f"/v1/saves/{SAVE}/.metadata", config.encode())
        assert where.read_text() == config
        for verb, document in (("target", target), ("probe", {"url": "s3://bucket/x", "checkpoint_id": "x"})):
            with pytest.raises(StoreDenied):
                peer.call("POST", f"/v1/object/{verb}", document)
            assert len(said_of(agent, f"object/{verb}")) == 1
        with pytest.raises(ConfigInvalid, match="environment"):
            owner.call("POST", "/v1/object/target", target)
        for bucket in ({**options, "profile": "evil"}, options):
            owner.call("POST", "/v1/object/target", {**target, "options": bucket, "environment": {}})
            owner.call("POST", "/v1/object/probe", {"url": "s3://bucket/x", "checkpoint_id": "x"})
    assert not flag.exists()


@pytest.mark.parametrize("where", ["outside", "root/inside"])
def test_a_place_that_only_a_peer_names_is_not_written(tmp_path: Path, where: str) -> None:
    """Neither by an order nor by a manifest: the node's own user has to name a bucket, a directory too."""
    url, store = f"file://{tmp_path}/{where}", LocalStore(tmp_path / "root")
    manifest = checkpointed([store], 1, {shard(0): (0,)}, copies=1, size_bytes=1000, url=url)
    with running_agent(store.root, *QUIET) as agent:
        with agent.peer() as peer:
            with pytest.raises(StoreDenied):
                peer.call("POST", "/v1/object/target", {"url": url, "options": {}, "environment": {}})
            with pytest.raises(ConfigInvalid, match="has named the object store"):
                peer.call("POST", "/v1/object/upload", {"save_id": manifest.save_id, "url": url})
        with agent.client() as owner:

            def why() -> str:
                pending = owner.call("GET", "/v1/status")["object_store"]["pending"]
                return str(pending.get(manifest.save_id, {}).get("error", ""))

            assert "No rank of this node has named" in wait_for(why, 20, "a try")
        assert not (tmp_path / where).exists()
        with agent.client() as owner, agent.peer() as peer:
            if where == "root/inside":
                with pytest.raises(ConfigInvalid, match="lie one inside the other"):
                    owner.call("POST", "/v1/object/target", {"url": url, "options": {}})
                return
            owner.call("POST", "/v1/object/target", {"url": url, "options": {}})
            with pytest.raises(ObjectMissing, match="committed here"):
                peer.call("POST", "/v1/object/upload", {"save_id": SAVE, "url": url})
            assert not UploadBook(agent.root / ".agent").is_ordered(SAVE)
        wait_for((tmp_path / where / "step-1" / ".metadata").exists, 20, "the upload that its user wants")


# Addresses -----------------------------------------------------------------------------------------------------------


def spoken(of: AgentAddress, *, is_leaving: bool = False, **changes: Any) -> dict[str, Any]:
    return {"peer": {**replace(of, **changes).to_json(), "host": ""}, "is_leaving": is_leaving}


@pytest.fixture
def known(agent: RunningAgent) -> AgentAddress:
    """A node that a job has introduced to the agent."""
    address = AgentAddress("b" * 12, "127.0.0.2", 4242, "t" * 32, incarnation=5)
    with agent.client() as client:
        client.call("POST", "/v1/peers", {"peers": [address.to_json()]})
    return address


def book(agent: RunningAgent) -> Mapping[str, AgentAddress]:
    return {peer.node_id: peer for peer in PeerBook(agent.root / ".agent").read_all()}


@pytest.mark.parametrize("is_leaving", [False, True], ids=["hello", "goodbye"])
@pytest.mark.parametrize(
    "changes",
    [{"token": "x" * 32}, {"token": ""}, {"node_id": "c" * 12}, {"node_id": "c" * 12, "token": "x" * 32}],
    ids=["another token", "no token", "a stranger", "a stranger with a token"],
)
def test_no_node_speaks_for_another(
    agent: RunningAgent, known: AgentAddress, changes: Mapping[str, Any], *, is_leaving: bool
) -> None:
    """Refused, with one line in the log that names the node; the address book is as it was."""
    before = (agent.root / ".agent" / "peers.json").read_bytes()
    with agent.peer() as client, pytest.raises(StoreDenied):
        client.call("POST", "/v1/hello", spoken(known, is_leaving=is_leaving, port=9, incarnation=9, **changes))
    assert (agent.root / ".agent" / "peers.json").read_bytes() == before
    (line,) = said_of(agent, "hello")
    assert str(changes.get("node_id", known.node_id)) in line


def test_no_list_has_tokens(agent: RunningAgent, known: AgentAddress) -> None:
    """Neither the status, nor the answer to a greeting, nor anything else that is answered to a peer or the owner."""
    with agent.client() as owner, agent.peer() as peer:
        answers = [owner.fetch("GET", path) for path in ("/v1/status", "/v1/holdings", "/metrics")]
        with pytest.raises(StoreDenied) as raised:
            peer.call("POST", "/v1/hello", spoken(known, incarnation=6))
        answers.append(str(raised.value).encode())
        answers += [peer.fetch("GET", path) for path in ("/v1/status", "/v1/holdings")]
    for token in (known.token, agent.endpoint.token, agent.endpoint.owner_token):
        assert all(token.encode() not in answer for answer in answers)


def test_a_peer_introduces_nobody(agent: RunningAgent, known: AgentAddress) -> None:
    """Not with an opening, nor as a load; and nothing that it names is connected to."""
    evil = replace(known, token="x" * 32, host="127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listener, agent.peer() as client:
        listener.settimeout(1)
        peers = [replace(evil, port=listener.getsockname()[1]).to_json()]
        for path, fields in ((f"/v1/saves/{SAVE}", OPENING), ("/v1/peers", {})):
            with pytest.raises(StoreDenied):
                client.call("POST", path, {**fields, "peers": peers})
        with agent.client() as owner:
            owner.call("POST", f"/v1/saves/{SAVE}", OPENING)
            pull = {"from": peers[0], "size_bytes": 1, "crc32c": 1}
            with pytest.raises(ObjectMissing, match="not introduced"):
                owner.call("POST", f"/v1/saves/{SAVE}/pull", pull)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert book(agent) == {known.node_id: known}


def test_one_that_was_away_hears_where_a_node_is_now(tmp_path: Path) -> None:
    """It was down when the other one moved, and nobody else tells it: the other one greets it when it answers again."""
    with running_agent(tmp_path / "a", *QUIET) as first, running_agent(tmp_path / "b", *QUIET) as second:
        for agent in (first, second):
            with agent.client() as client:
                client.call("POST", "/v1/peers", {"peers": peers_of(first, second)})
        for agent in (first, second):
            agent.process.kill()
            agent.process.wait()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    with (
        running_agent(tmp_path / "b", *QUIET, "--port", str(port)) as moved,
        running_agent(tmp_path / "a", *QUIET) as back,
    ):
        assert moved.endpoint.port != second.endpoint.port
        wait_for(lambda: book(back)[moved.endpoint.node_id].port == port, 30, "the greeting")


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_peer_has_nothing_replaced(tmp_path: Path) -> None:
    """A plan that would put a newer save, of which a shard is nowhere, in the place of a whole one is not carried out."""
    nodes = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    pair = {shard(0): (0, 1), shard(1): (1, 0)}
    checkpointed(nodes[:1], 1, {shard(0): (0,), shard(1): (0,)}, copies=1, size_bytes=1000)
    newer = checkpointed(nodes, 2, pair, on=(1,), size_bytes=1000)
    (nodes[1].root / "step-1" / min(newer.shards)).unlink()
    plan = RepairPlan((RestoreManifest(nodes[0].node_id(), "step-1", newer.save_id, (nodes[1].node_id(),)),))
    with running_agent(nodes[1].root, *QUIET) as other, running_agent(nodes[0].root, *QUIET) as agent:
        with agent.client() as client:
            client.call("POST", "/v1/peers", {"peers": peers_of(other)})
        before = tree(nodes[0].root)
        with agent.peer() as client:
            (result,) = client.call("POST", "/v1/repair", {"plan": plan.to_json()})["results"]
        assert "own plan" in result["error"]
        assert tree(nodes[0].root) == before
        assert held(nodes[0]) == {shard(0), shard(1)}


def test_a_peer_has_a_node_take_over_what_it_would_itself(tmp_path: Path) -> None:
    """`repair` of another node works: a checkpoint that is whole elsewhere is taken over, and its shards are copied."""
    nodes = [LocalStore(tmp_path / f"node{index}") for index in range(2)]
    with running_agent(nodes[1].root, *QUIET) as other, running_agent(nodes[0].root, *QUIET) as agent:
        with agent.client() as client:
            client.call("POST", "/v1/peers", {"peers": peers_of(other)})
        manifest = checkpointed(nodes, 2, {shard(0): (1, 0)}, on=(1,), size_bytes=1000)
        plan = RepairPlan((RestoreManifest(nodes[0].node_id(), "step-1", manifest.save_id, (nodes[1].node_id(),)),))
        with agent.peer() as client:
            (result,) = client.call("POST", "/v1/repair", {"plan": plan.to_json()})["results"]
        assert result["error"] == ""
        assert (nodes[0].root / "step-1" / ".metadata").exists()


# Work ----------------------------------------------------------------------------------------------------------------


class Beating:
    """Stands for the heartbeat of a request."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_checks_go_one_at_a_time() -> None:
    """However many are asked for; beyond a number that waits they are refused, and room is made when one has ended."""
    checks, request = Checks(), Request.__new__(Request)
    object.__setattr__(request, "heartbeat", Beating())
    going, at_once, most, proceed = threading.Lock(), 0, 0, threading.Event()

    def check() -> None:
        nonlocal at_once, most
        with checks.in_turn(request):
            with going:
                at_once += 1
                most = max(most, at_once)
            proceed.wait(20)
            with going:
                at_once -= 1

    with ThreadPoolExecutor(CHECKS_MAX) as threads:
        under_way = [threads.submit(check) for _ in range(CHECKS_MAX)]
        wait_for(lambda: checks._places._value == 0, 10, "all of them")
        with pytest.raises(StoreUnavailable, match="wait"), checks.in_turn(request):
            pass
        proceed.set()
        for future in under_way:
            future.result(20)
    assert most == 1
    check()


def test_what_a_peer_says_makes_one_line(agent: RunningAgent) -> None:
    """Reasons and names with line ends in them forge no line of the log."""
    forged = "\n2026-01-01 00:00:00,000 INFO replicated_ckpt.agent.process: stopping\r\n\x1b[2J"
    with agent.client() as owner, agent.peer() as peer:
        owner.call("POST", f"/v1/saves/{SAVE}", OPENING)
        owner.call("POST", f"/v1/saves/{SAVE}/abort", {"why": forged})
        names = {"checkpoint_id": "step-1", "save_id": SAVE, "name": shard(0)}
        peer.call("POST", "/v1/suspects", {**names, "why": forged})
        for verb in ("hello", "repair", "verify", f"saves/{SAVE}/commit", f"saves/{SAVE}/pull"):
            fields = dict.fromkeys(("peer", "plan", "checkpoint_id", "from", "size_bytes"), forged)
            with pytest.raises(ReplicatedCkptError):
                peer.call("POST", f"/v1/{verb}", fields)
    lines = (agent.root / "agent.out").read_text().splitlines()
    assert not [line for line in lines if re.match(r"2026-01-01 00:00:00,000 |^\x1b", line)]
    assert any("stopping" in line for line in lines)


def test_a_peer_gives_up_no_save_that_is_decided(tmp_path: Path) -> None:
    """Its id is known to all once one node has published it, and another may hold what lies nowhere else."""
    store = LocalStore(tmp_path / "root")
    raw = b"metadata"
    with running_agent(store.root, *QUIET) as agent:
        node = NodeEntry(store.node_id(), "host", None, (0,))
        manifest = Manifest(SAVE, "step-7", 1, 1.0, 1, 1, len(raw), crc32c(raw), (node,), {}, None, "a" * 16)
        with agent.client() as owner, agent.peer() as peer:
            for number in (8, 7):
                owner.call(
                    "POST",
                    f"/v1/saves/{number:032x}",
                    {**OPENING, **TICKET, "session": str(number), "checkpoint_id": f"step-{number}"},
                )
            for rank in ("a rank", "another rank"):  # each tells each node, and none is told that it may not
                peer.call("POST", f"/v1/saves/{8:032x}/abort", {"why": f"{rank} has failed", **TICKET})
            owner.put("PUT", f"/v1/saves/{SAVE}/.metadata", raw)
            owner.put("PUT", f"/v1/saves/{SAVE}/.manifest.json", manifest.encode())
            with pytest.raises(StoreDenied, match="JOB"):
                peer.call("POST", f"/v1/saves/{SAVE}/abort", {"why": "no reason", **TICKET})
            owner.call("POST", f"/v1/saves/{SAVE}/commit")
    assert (store.root / "step-7" / ".metadata").read_bytes() == raw


@pytest.mark.parametrize("by", ["rank", "peer"])
def test_a_peer_brings_no_other_bytes_for_a_staged_shard(agent: RunningAgent, by: str) -> None:
    """Those of this node's rank, or that came first, stay; the answer names them. The same may come again; a damaged one
    is written anew."""
    name, path = shard(0), agent.root / ".staging" / SAVE / shard(0)
    (good, good_table), (evil, _) = (as_file(data * 50_000) for data in (b"good", b"evil"))
    with agent.client() as owner, agent.peer() as peer:
        owner.call("POST", f"/v1/saves/{SAVE}", {**OPENING, **TICKET})
        if by == "rank":
            sink = FileSink.create(path)
            sink.write(memoryview(good))
            sink.finish(good_table)
        for brought in (good, evil, good):
            answer = peer.put("PUT", f"/v1/saves/{SAVE}/{name}", brought)
            assert answer["crc32c"] == good_table.file_crc()
            assert path.read_bytes() == good
        assert [entry.name for entry in path.parent.iterdir()] == [name]
        path.write_bytes(b"E" + good[1:])
        peer.put("PUT", f"/v1/saves/{SAVE}/{name}", good)
        assert path.read_bytes() == good


def as_file(data: bytes) -> tuple[bytes, BlockTable]:
    table = table_of([data])
    return data + table.encode(), table


@pytest.mark.parametrize("told", ["", "?ticket=", "?ticket=" + "0" * 32])
def test_a_peer_ends_no_save_of_a_job(agent: RunningAgent, told: str) -> None:
    """It knows the id, by a question of another node, say: it brings shards, and does not decide, finish or end it."""
    ticket = {"ticket": told.partition("=")[2]} if told else {}
    with agent.client() as owner, agent.peer() as peer:
        owner.call("POST", f"/v1/saves/{SAVE}", {**OPENING, **TICKET, "coordinator": agent.endpoint.node_id})
        for verb in ("abort", "commit", "pull"):
            with pytest.raises(StoreDenied, match="JOB"):
                peer.call("POST", f"/v1/saves/{SAVE}/{verb}", {"why": "no reason", **ticket})
        for how in ("left", "over", "working"):
            with pytest.raises(StoreDenied, match="JOB"):
                peer.call("GET", f"/v1/saves/{SAVE}{told or '?'}&settle={how}")
        for name in (".metadata", ".manifest.json", "%2emetadata"):
            with pytest.raises(StoreDenied, match="JOB"):
                peer.put("PUT", f"/v1/saves/{SAVE}/{name}", b"x")
        for rest in ("", "/", "/x/y"):
            with pytest.raises((StoreDenied, ObjectMissing)):
                peer.put("PUT", f"/v1/saves/{SAVE}{rest}", b"x")
        assert peer.call("GET", f"/v1/saves/{SAVE}") == {"state": "staged"}
        assert TICKET["ticket"] not in str(owner.call("GET", "/v1/status"))
        assert peer.call("GET", f"/v1/saves/{SAVE}?settle=left&ticket={TICKET['ticket']}") == {"state": "aborted"}


def test_no_peer_is_told_of_a_save_under_way(agent: RunningAgent) -> None:
    """Its id is what shows that a peer takes part in it: no answer to others has it."""
    with agent.client() as owner, agent.peer() as peer:
        owner.call("POST", f"/v1/saves/{SAVE}", OPENING)
        assert SAVE in str(owner.call("GET", "/v1/status"))
        for path in ("/v1/holdings", "/v1/unmanaged", "/metrics"):
            assert SAVE.encode() not in peer.fetch("GET", path)


def test_made_up_readers_push_no_pin_out() -> None:
    """A peer's token names any number of them: what a load reads stays, and loads of other nodes are heard."""
    pins = Pins()
    pins.pin(SAVE, "real/0", sender="10.0.0.1")
    for number in range(2 * PINS_MAX):
        pins.pin("0" * 32, f"evil/{number}", sender="10.0.0.1")
    pins.pin("1" * 32, "real/1", sender="10.0.0.2")
    assert pins.is_pinned(SAVE)
    assert pins.is_pinned("1" * 32)
    pins.pin("2" * 32, "real/0", sender="10.0.0.1")
    assert not pins.is_pinned(SAVE), "a reader reads one save at a time"
    pins.drop("0" * 32)
    pins.pin(SAVE, "real/2", sender="10.0.0.1")
    assert pins.is_pinned(SAVE)


RUN = "a" * 16


def test_a_sequence_that_is_only_told_is_believed_within_bounds(tmp_path: Path) -> None:
    """However often it is told: it is measured by what was saved here, so that retention can count on."""
    store = LocalStore(tmp_path)
    checkpointed([store], 4, {shard(0): (0,)}, copies=1, size_bytes=3000, checkpoint_id="step-4", lineage=RUN)
    service = NodeService(store)
    for told in (SEQUENCE_FLOOR_MAX, SEQUENCE_FLOOR_MAX, 4 + BELIEVED_AHEAD, 4 + BELIEVED_AHEAD + 1):
        service.learn_sequences({RUN: told}, "10.0.0.1")
        assert service.histories("")[RUN].sequence == 4 + BELIEVED_AHEAD
        service = NodeService(store)
    assert BELIEVED_AHEAD << 20 < SEQUENCE_FLOOR_MAX
    assert findings(store) == []


def test_a_new_node_believes_what_an_honest_one_tells(tmp_path: Path) -> None:
    """It has nothing of the run, and was away for 100,000 saves: what it saves next is newer."""
    service = NodeService(LocalStore(tmp_path))
    service.learn_sequences({RUN: 100_000}, "10.0.0.2")
    assert service.histories("")[RUN].sequence == 100_000


def test_made_up_runs_push_out_no_real_one(tmp_path: Path) -> None:
    """What was heard of a run stays, other senders are heard, and a run of which something lies here is always."""
    floor = SequenceFloor(tmp_path)
    floor.raise_to({RUN: 777}, {}, "10.0.0.1")
    for number in range(2 * LINEAGES_MAX):
        floor.raise_to({f"{number:016x}": 1}, {}, "10.0.0.1")
    floor = SequenceFloor(tmp_path)
    floor.raise_to({"f" * 16: 1}, {}, "10.0.0.1")
    assert len(floor.read_all()) == LINEAGES_MAX
    floor.raise_to({"b" * 16: 5}, {}, "10.0.0.2")
    floor.raise_to({"c" * 16: 6}, {"c" * 16: 1}, "10.0.0.1")
    floor.raise_to({RUN: 778}, {}, "10.0.0.1")
    known = SequenceFloor(tmp_path).read_all()
    assert {known[RUN], known["b" * 16], known["c" * 16]} == {778, 5, 6}


def test_what_a_peer_claims_to_hold_costs_no_memory_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests of saves that this node lacks are read up to a bound, the rest as it gets these; a command reads all."""
    stores = [LocalStore(tmp_path / name) for name in ("own", "peer")]
    own, claimed = stores[0].node_id(), 12
    for number in range(claimed):
        checkpointed([stores[1]], number + 1, {shard(0): (0,)}, copies=1, size_bytes=99, checkpoint_id=f"step-{number}")
    monkeypatch.setattr(manifests, "UNPROVEN_BYTES_MAX", 8 << 10)
    with running_agent(stores[1].root, *QUIET) as peer:
        service = NodeService(stores[0])
        service.peers.learn([peer.endpoint.address()])
        view = ask_holdings(peer.endpoint.address()).view_of(peer.endpoint.node_id)
        book = ManifestBook(stores[0], own, service.peers)
        first = book.of([view])
        assert 0 < len(first) < claimed
        assert book.over_bound == [peer.endpoint.node_id]
        assert book.of([view]).keys() == first.keys()
        held_here = [Holding.of_save(one, own, one.checkpoint_id, True, {}) for one in first.values()]
        mine = replace(view, node_id=own, holdings=tuple(held_here))
        assert len(book.of([mine, view])) > len(first)
        everything = ManifestBook(stores[0], own, service.peers, is_bounded=False)
        assert len(everything.of([view])) == claimed
        assert everything.over_bound == []
    assert findings(stores[1]) == []


def test_a_node_that_lists_too_many_checkpoints_is_not_believed(agent: RunningAgent) -> None:
    """A plan weighs each of them, on every node."""
    address = agent.endpoint.address()
    one = Holding(address.node_id, "step-1", SAVE, 1, has_metadata=True).to_json()
    assert len(parse_node_holdings({"holdings": [one] * 10}, address).holdings) == 10
    with pytest.raises(PeerProtocolError, match="sent an invalid list of its checkpoints"):
        parse_node_holdings({"holdings": [one] * (HOLDINGS_MAX + 1)}, address)
