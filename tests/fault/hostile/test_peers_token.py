"""The rights of an agent's peer token that was sniffed or leaked, or belongs to another node: its holder can run,
remove and redirect nothing.
"""

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
from replicated_ckpt.core.lineage import ACCEPTED_AHEAD_MAX
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


def logged_refusals(agent: RunningAgent, verb: str) -> list[str]:
    """The lines in the agent's log about refused requests of a verb. Requests without a valid token are left out, as
    they may come from an earlier user of this port.
    """
    log = (agent.root / "agent.out").read_text().splitlines()
    ours = [line for line in log if "no valid token from" not in line]
    return [line for line in ours if "refused " in line and f"/v1/{verb}'" in line]


# Commands ----------------------------------------------------------------------------------------------------------


def test_a_token_runs_no_command(agent: RunningAgent, tmp_path: Path) -> None:
    """An uploaded file does not become a configuration of botocore, neither for a peer nor for the owner."""
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
            assert len(logged_refusals(agent, f"object/{verb}")) == 1
        with pytest.raises(ConfigInvalid, match="environment"):
            owner.call("POST", "/v1/object/target", target)
        for bucket in ({**options, "profile": "evil"}, options):
            owner.call("POST", "/v1/object/target", {**target, "options": bucket, "environment": {}})
            owner.call("POST", "/v1/object/probe", {"url": "s3://bucket/x", "checkpoint_id": "x"})
    assert not flag.exists()


@pytest.mark.parametrize("where", ["outside", "root/inside"])
def test_an_object_store_that_only_a_peer_names_is_not_written(tmp_path: Path, where: str) -> None:
    """Neither a peer's order nor a manifest selects an object store. Only the node's own user can name one, even if the
    store is a directory.
    """
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

            assert "No rank of this node has named" in wait_for(why, 20, "a failed upload")
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
        wait_for((tmp_path / where / "step-1" / ".metadata").exists, 20, "the upload to the named object store")


# Addresses -----------------------------------------------------------------------------------------------------------


def greeting_of(of: AgentAddress, *, is_leaving: bool = False, **changes: Any) -> dict[str, Any]:
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
    ids=["another token", "no token", "an unknown node", "an unknown node with a token"],
)
def test_no_node_can_greet_for_another(
    agent: RunningAgent, known: AgentAddress, changes: Mapping[str, Any], *, is_leaving: bool
) -> None:
    """The greeting is refused with one line in the log that names the node, and the address book does not change."""
    before = (agent.root / ".agent" / "peers.json").read_bytes()
    with agent.peer() as client, pytest.raises(StoreDenied):
        client.call("POST", "/v1/hello", greeting_of(known, is_leaving=is_leaving, port=9, incarnation=9, **changes))
    assert (agent.root / ".agent" / "peers.json").read_bytes() == before
    (line,) = logged_refusals(agent, "hello")
    assert str(changes.get("node_id", known.node_id)) in line


def test_no_answer_has_tokens(agent: RunningAgent, known: AgentAddress) -> None:
    """No answer to a peer or to the owner contains a token."""
    with agent.client() as owner, agent.peer() as peer:
        answers = [owner.fetch("GET", path) for path in ("/v1/status", "/v1/holdings", "/metrics")]
        with pytest.raises(StoreDenied) as raised:
            peer.call("POST", "/v1/hello", greeting_of(known, incarnation=6))
        answers.append(str(raised.value).encode())
        answers += [peer.fetch("GET", path) for path in ("/v1/status", "/v1/holdings")]
    for token in (known.token, agent.endpoint.token, agent.endpoint.owner_token):
        assert all(token.encode() not in answer for answer in answers)


def test_a_peer_introduces_nobody(agent: RunningAgent, known: AgentAddress) -> None:
    """A peer cannot add addresses, neither when it opens a save nor when it loads. The agent does not connect to them."""
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


def test_a_node_that_was_away_gets_a_greeting_from_a_moved_one(tmp_path: Path) -> None:
    """A node was down while another one moved, and no third node exists: the moved node greets it once it answers
    again.
    """
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


def test_a_peers_plan_replaces_no_complete_checkpoint(tmp_path: Path) -> None:
    """The agent refuses a plan that would replace a complete checkpoint by a newer save of which a shard is lost."""
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


def test_a_peers_plan_that_agrees_with_the_nodes_own_is_done(tmp_path: Path) -> None:
    """A peer sends a plan, as `repair` on its node does: this node adopts a checkpoint that is complete on the other
    one.
    """
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
    """A fake heartbeat of a request."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_checks_run_one_at_a_time() -> None:
    """Up to CHECKS_MAX checks wait, further ones are refused, and a check that ends makes room."""
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
        wait_for(lambda: checks._places._value == 0, 10, "all checks to be queued")
        with pytest.raises(StoreUnavailable, match="wait"), checks.in_turn(request):
            pass
        proceed.set()
        for future in under_way:
            future.result(20)
    assert most == 1
    check()


def test_a_peers_text_makes_one_log_line(agent: RunningAgent) -> None:
    """Line ends in a peer's reasons and names do not start new lines in the log."""
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


def test_a_peer_cannot_abort_a_decided_save(tmp_path: Path) -> None:
    """Once one node has published the save, every peer may learn its id, and other nodes may hold the only copies of a
    shard.
    """
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
            for rank in ("a rank", "another rank"):  # each rank aborts on every node, and no abort is refused
                peer.call("POST", f"/v1/saves/{8:032x}/abort", {"why": f"{rank} has failed", **TICKET})
            owner.put("PUT", f"/v1/saves/{SAVE}/.metadata", raw)
            owner.put("PUT", f"/v1/saves/{SAVE}/.manifest.json", manifest.encode())
            with pytest.raises(StoreDenied, match="JOB"):
                peer.call("POST", f"/v1/saves/{SAVE}/abort", {"why": "no reason", **TICKET})
            owner.call("POST", f"/v1/saves/{SAVE}/commit")
    assert (store.root / "step-7" / ".metadata").read_bytes() == raw


@pytest.mark.parametrize("by", ["rank", "peer"])
def test_a_peer_cannot_replace_a_staged_shard(agent: RunningAgent, by: str) -> None:
    """The staged bytes of this node's rank, or those that arrived first, stay, and the answer has their checksum. The
    same bytes may be sent again. A damaged staged shard is replaced.
    """
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


@pytest.mark.parametrize("query", ["", "?ticket=", "?ticket=" + "0" * 32])
def test_a_peer_cannot_end_a_save_of_a_job(agent: RunningAgent, query: str) -> None:
    """A peer that knows only the save's id may send shards. Without the save's ticket, it cannot decide, finish or
    abort the save.
    """
    ticket = {"ticket": query.partition("=")[2]} if query else {}
    with agent.client() as owner, agent.peer() as peer:
        owner.call("POST", f"/v1/saves/{SAVE}", {**OPENING, **TICKET, "coordinator": agent.endpoint.node_id})
        for verb in ("abort", "commit", "pull"):
            with pytest.raises(StoreDenied, match="JOB"):
                peer.call("POST", f"/v1/saves/{SAVE}/{verb}", {"why": "no reason", **ticket})
        for how in ("left", "over", "working"):
            with pytest.raises(StoreDenied, match="JOB"):
                peer.call("GET", f"/v1/saves/{SAVE}{query or '?'}&settle={how}")
        for name in (".metadata", ".manifest.json", "%2emetadata"):
            with pytest.raises(StoreDenied, match="JOB"):
                peer.put("PUT", f"/v1/saves/{SAVE}/{name}", b"x")
        for rest in ("", "/", "/x/y"):
            with pytest.raises((StoreDenied, ObjectMissing)):
                peer.put("PUT", f"/v1/saves/{SAVE}{rest}", b"x")
        assert peer.call("GET", f"/v1/saves/{SAVE}") == {"state": "staged"}
        assert TICKET["ticket"] not in str(owner.call("GET", "/v1/status"))
        assert peer.call("GET", f"/v1/saves/{SAVE}?settle=left&ticket={TICKET['ticket']}") == {"state": "aborted"}


def test_no_answer_to_a_peer_has_the_id_of_an_open_save(agent: RunningAgent) -> None:
    """The save id shows that a peer takes part in the save, so no answer to other peers contains it."""
    with agent.client() as owner, agent.peer() as peer:
        owner.call("POST", f"/v1/saves/{SAVE}", OPENING)
        assert SAVE in str(owner.call("GET", "/v1/status"))
        for path in ("/v1/holdings", "/v1/unmanaged", "/metrics"):
            assert SAVE.encode() not in peer.fetch("GET", path)


def test_invented_readers_do_not_displace_pins() -> None:
    """A sender invents any number of readers: existing pins stay, and other senders can still pin."""
    pins = Pins()
    pins.pin(SAVE, "real/0", sender="10.0.0.1")
    for number in range(2 * PINS_MAX):
        pins.pin("0" * 32, f"evil/{number}", sender="10.0.0.1")
    pins.pin("1" * 32, "real/1", sender="10.0.0.2")
    assert pins.is_pinned(SAVE)
    assert pins.is_pinned("1" * 32)
    pins.pin("2" * 32, "real/0", sender="10.0.0.1")
    assert not pins.is_pinned(SAVE), "a reader pins one save at a time"
    pins.drop("0" * 32)
    pins.pin(SAVE, "real/2", sender="10.0.0.1")
    assert pins.is_pinned(SAVE)


RUN = "a" * 16


def test_a_reported_sequence_is_limited(tmp_path: Path) -> None:
    """However often a peer reports a sequence, it counts only up to a limit above the newest save on this node."""
    store = LocalStore(tmp_path)
    checkpointed([store], 4, {shard(0): (0,)}, copies=1, size_bytes=3000, checkpoint_id="step-4", lineage=RUN)
    service = NodeService(store)
    for told in (SEQUENCE_FLOOR_MAX, SEQUENCE_FLOOR_MAX, 4 + ACCEPTED_AHEAD_MAX, 4 + ACCEPTED_AHEAD_MAX + 1):
        service.learn_sequences({RUN: told}, "10.0.0.1")
        assert service.histories("")[RUN].sequence == 4 + ACCEPTED_AHEAD_MAX
        service = NodeService(store)
    assert ACCEPTED_AHEAD_MAX << 20 < SEQUENCE_FLOOR_MAX
    assert findings(store) == []


def test_a_new_node_accepts_a_much_larger_sequence(tmp_path: Path) -> None:
    """A node without saves of the run, 100,000 saves behind, accepts the peer's sequence: its next save is the newest."""
    service = NodeService(LocalStore(tmp_path))
    service.learn_sequences({RUN: 100_000}, "10.0.0.2")
    assert service.histories("")[RUN].sequence == 100_000


def test_invented_runs_do_not_displace_real_ones(tmp_path: Path) -> None:
    """A sender invents any number of runs: known runs stay, and new runs of other senders are accepted. A run with
    saves on this node is always accepted.
    """
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


def test_a_peers_claims_take_limited_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests of saves that this node lacks are read up to a limit, and the rest once this node has the first ones. A
    command reads all of them.
    """
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


def test_a_list_of_too_many_checkpoints_is_refused(agent: RunningAgent) -> None:
    """Every node's plan considers each listed checkpoint, so the number is limited."""
    address = agent.endpoint.address()
    one = Holding(address.node_id, "step-1", SAVE, 1, has_metadata=True).to_json()
    assert len(parse_node_holdings({"holdings": [one] * 10}, address).holdings) == 10
    with pytest.raises(PeerProtocolError, match="sent an invalid list of its checkpoints"):
        parse_node_holdings({"holdings": [one] * (HOLDINGS_MAX + 1)}, address)
