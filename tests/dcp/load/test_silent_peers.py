"""A peer accepts connections and never answers, as a stopped or partitioned one does. It costs a load or save one
time-out.
"""

import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.layout import MANIFEST_NAME
from replicated_ckpt.core.parts import Part
from replicated_ckpt.core.protocol.placement import Placement
from replicated_ckpt.dcp.agreement.decision import SaveDecision
from replicated_ckpt.dcp.agreement.node_post import NodePost, SeenStore
from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.c10d.world import World
from replicated_ckpt.dcp.find.rendezvous import meet
from replicated_ckpt.dcp.find.survey import SURVEY_TIMEOUT_S, Survey, Surveyor
from replicated_ckpt.dcp.load.metadata_copies import read_verified_metadata
from replicated_ckpt.dcp.load.shard_reader import ShardReader
from replicated_ckpt.dcp.save.shard_writer import ShardWriter
from replicated_ckpt.errors import ObjectCorrupt
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.unclaimed import UnclaimedFilesReader
from replicated_ckpt.stores.peer import client
from replicated_ckpt.stores.peer.client import PROGRESS_TIMEOUT_S, AgentAddress, open_connection
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, introduced, shard
from tests.stopwatch import Stopwatch

pytestmark = [pytest.mark.fault, pytest.mark.timeout(100)]
SILENT, ABSENT = "0" * 11 + "5", "0" * 11 + "6"
SAVE = "a" * 32


class SilentPeer:
    """Accepts connections and never answers. `asked`: the requests that arrived."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._open: list[socket.socket] = []
        self.asked: list[str] = []
        self.address = AgentAddress(SILENT, "127.0.0.1", server.getsockname()[1], "token")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self._open.append(self._server.accept()[0])
                self.asked.append(self._open[-1].recv(1 << 16).decode(errors="replace").partition(" HTTP")[0])
            except OSError:  # the test is over
                return


@pytest.fixture
def silent() -> Iterator[SilentPeer]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield SilentPeer(server)
        server.shutdown(socket.SHUT_RDWR)


def post_of(address: AgentAddress) -> NodePost:
    return NodePost(address.node_id, "host", "boot", address.node_id, None, address)


def decision_of(*addresses: AgentAddress) -> SaveDecision:
    nodes = tuple(map(post_of, addresses))
    placement = Placement(2, (tuple(node.node_id for node in nodes),), ())
    return SaveDecision(SAVE, "step-1", 1, nodes, tuple(range(len(nodes))), placement, lineage="a" * 16)


def test_a_buddy_that_let_a_time_out_pass_is_not_asked_again(
    tmp_path: Path, silent: SilentPeer, stopwatch: Stopwatch
) -> None:
    """The buddy does not answer: the save contacts it once, reports its copy as missing, and keeps the local one."""
    store = LocalStore(tmp_path / "root")
    own = AgentAddress(store.node_id(), "127.0.0.1", 1, "token")
    decision = decision_of(own, silent.address)
    store.begin(decision.intent)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(100_000)}, None, True)
    started = stopwatch.now()
    shards = ShardWriter(store, "off")
    written = shards.begin_shard(planner.create_local_plan().items, Part.WEIGHTS, planner, decision, 0).end()
    assert silent.asked == [f"PUT /v1/saves/{SAVE}/{shard(0)}"]
    assert stopwatch.now() - started < 2 * PROGRESS_TIMEOUT_S
    assert written.receipt.holders == (own.node_id,)
    assert SILENT in written.missed[0]


def test_a_peer_that_is_silent_when_a_load_begins_is_not_asked_again(tmp_path: Path, silent: SilentPeer) -> None:
    """A peer that did not answer the introduction is not asked again in the survey."""
    store = LocalStore(tmp_path / "root")
    checkpointed([store], 1, {shard(0): [0]}, copies=1)
    board = dist.HashStore()
    with running_agent(store.root):
        Blackboard(board, 1, 2).post("load", {"checkpoint_id": "step-1", "node": post_of(silent.address).to_json()})
        survey = meet(store, World(0, 2, Blackboard(board, 0, 2), "test"), "step-1")
    assert [asked for asked in silent.asked if "upkeep" not in asked] == ["POST /v1/peers"]
    assert [held.node_id for held in survey.holdings] == [store.node_id()]
    assert any(SILENT in place and "not reached" in place for place in survey.searched)


def test_silent_nodes_of_the_load_and_of_the_book_cost_one_time_out(
    tmp_path: Path, silent: SilentPeer, stopwatch: Stopwatch
) -> None:
    """A participant and a node from the peer book are both silent: the load waits for one time-out, and lists both."""
    store = LocalStore(tmp_path / "root")
    checkpointed([store], 1, {shard(0): [0]}, copies=1)
    board = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server, running_agent(store.root):
        absent = replace(SilentPeer(server).address, node_id=ABSENT)
        PeerBook(store.root_agent_directory()).learn([absent])
        Blackboard(board, 1, 2).post("load", {"checkpoint_id": "step-1", "node": post_of(silent.address).to_json()})
        started = stopwatch.now()
        survey = meet(store, World(0, 2, Blackboard(board, 0, 2), "test"), "step-1")
        assert stopwatch.now() - started < PROGRESS_TIMEOUT_S + SURVEY_TIMEOUT_S - 0.5
        server.shutdown(socket.SHUT_RDWR)
    assert [held.node_id for held in survey.holdings] == [store.node_id()]
    assert {
        node for node in (SILENT, ABSENT) for place in survey.searched if node in place and "not reached" in place
    } == {
        SILENT,
        ABSENT,
    }


def test_an_absent_node_that_answers_is_surveyed_after_the_introduction(tmp_path: Path) -> None:
    """A node that does not take part, but is in the peer book, is surveyed: the load finds its shard."""
    here, there = LocalStore(tmp_path / "here"), LocalStore(tmp_path / "there")
    checkpointed([here, there], 1, {shard(0): [0], shard(1): [1]}, copies=1)
    board = dist.HashStore()
    with running_agent(here.root), running_agent(there.root) as known:
        PeerBook(here.root_agent_directory()).learn([known.endpoint.address("127.0.0.1")])
        survey = meet(here, World(0, 1, Blackboard(board, 0, 1), "test"), "step-1")
    assert survey.is_whole


def test_files_that_ranks_see_without_a_manifest_count(tmp_path: Path) -> None:
    """A node has a damaged manifest and no agent: the files that its own ranks post complete the checkpoint."""
    here, there = LocalStore(tmp_path / "here"), LocalStore(tmp_path / "there")
    checkpointed([here, there], 1, {shard(0): [0], shard(1): [1]}, copies=1)
    (there.root / "step-1" / MANIFEST_NAME).write_text("damaged")
    unclaimed = UnclaimedFilesReader(there, there.node_id()).find_files("step-1")
    seen = {there.node_id(): SeenStore("its agent is silent", (), unclaimed)}
    survey = Surveyor(here, here.node_id(), [], seen=seen).survey("step-1")
    assert survey.is_whole
    assert survey.found.holders_of(shard(1), survey.manifest.shards[shard(1)].size_bytes) == (there.node_id(),)


def test_metadata_is_asked_for_where_it_was_seen(tmp_path: Path, silent: SilentPeer) -> None:
    """Metadata is read only from nodes that have the checkpoint. A silent node without it is never asked, whatever the
    rank.
    """
    here, there = LocalStore(tmp_path / "here"), LocalStore(tmp_path / "there")
    dcp.save({"a": torch.ones(3)}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(there.root, copies=1))
    with running_agent(there.root) as holder:
        survey = Surveyor(here, here.node_id(), [holder.endpoint.address("127.0.0.1")]).survey("step-1")
        survey = replace(survey, addresses=(silent.address, *survey.addresses))
        for rank in range(8):
            met = set[str]()
            assert "a" in read_verified_metadata(here, survey, None, f"rank {rank}", met).state_dict_metadata
            assert (met, silent.asked) == (set(), [])


def test_a_node_that_does_not_answer_gets_one_report_of_bad_copies(tmp_path: Path, silent: SilentPeer) -> None:
    """A node gave bad bytes for several shards and then stopped: reporting them costs one request in all."""
    store = LocalStore(tmp_path / "root")
    shards = [shard(rank) for rank in range(3)]
    manifest = checkpointed([store], 1, {name: [0] for name in shards}, copies=1, size_bytes=1000)
    holdings = store.catalog.holdings(store.node_id(), "step-1")
    survey = Survey(manifest.encode().decode(), holdings, (silent.address,), ())
    for known in ((SILENT,), ()):
        reader = ShardReader(store, store.node_id(), replace(survey, silent=known), shards, "rank 0")
        for name in shards:
            reader.findings.record_finding(
                name, SILENT, ObjectCorrupt("peer", "read", name, "a bad block"), is_suspect=True
            )
        reader.report_suspects()
    assert silent.asked == ["POST /v1/suspects"]


def test_a_node_that_stops_after_the_survey_is_contacted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node stops after the survey: the load contacts it once, then asks all other nodes first."""
    state, root = {"a": torch.ones(3)}, tmp_path / "a"
    dcp.save(state, checkpoint_id="step-1", storage_writer=ReplicatedWriter(root, copies=1))
    shutil.copytree(root / "step-1", tmp_path / "b" / "step-1")
    here, met, look = LocalStore(tmp_path / "here"), list[str](), Surveyor._holdings
    with running_agent(root) as stopped, running_agent(tmp_path / "b") as other:
        here.node_id()
        introduced(here, [agent.endpoint.address("127.0.0.1") for agent in (stopped, other)])

        def look_and_stop(surveyor: Surveyor, wanted: str | None) -> list[Holding]:
            found = look(surveyor, wanted)
            stopped.signal(signal.SIGSTOP)
            monkeypatch.setattr(client, "open_connection", note)
            return found

        def note(address: AgentAddress, timeout_s: float) -> HTTPConnection:
            met.append(address.node_id)
            return open_connection(address, timeout_s)

        monkeypatch.setattr(Surveyor, "_holdings", look_and_stop)
        target = {"a": torch.zeros(3)}
        dcp.load(target, checkpoint_id="step-1", storage_reader=ReplicatedReader(here.root))
        assert met.count(stopped.endpoint.node_id) == 1
    assert torch.equal(target["a"], state["a"])


def test_a_node_silent_for_one_ranks_metadata_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node stops after the survey, and one rank times out on its metadata: the rank of another node does not contact
    it for its shard.
    """
    state = {"a": torch.ones(3)}
    dcp.save(state, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path / "a", copies=1))
    for copy in "bc":
        shutil.copytree(tmp_path / "a" / "step-1", tmp_path / copy / "step-1")
    (tmp_path / "c" / "step-1" / shard(0)).unlink()
    with running_agent(tmp_path / "a") as one, running_agent(tmp_path / "b") as other:
        holders = [agent.endpoint.address("127.0.0.1") for agent in (one, other)]
        # Rank 0 asks the nodes for the metadata in this order, so that it contacts the stopped one.
        stopped = min(holders, key=lambda peer: crc32c(f"rank 0/{peer.node_id}".encode()))
        agent = one if stopped.node_id == one.endpoint.node_id else other
        stores = [LocalStore(tmp_path / name) for name in ("blank", "c")]
        surveys = [Surveyor(store, store.node_id(), holders).survey("step-1") for store in stores]
        board = dist.HashStore()
        agent.signal(signal.SIGSTOP)
        met = list[str]()

        def note(address: AgentAddress, timeout_s: float) -> HTTPConnection:
            met.append(address.node_id)
            return open_connection(address, timeout_s)

        monkeypatch.setattr(client, "open_connection", note)
        attempts, plans, planners = [], [], []
        for rank, store in enumerate(stores):
            reader = ReplicatedReader(store.root)
            attempt = reader._begin("step-1")
            attempt._world, attempt._found = World(rank, 2, Blackboard(board, rank, 2), "test"), surveys[rank]
            metadata = attempt.read_metadata()
            attempt.prepare(metadata)
            planner = DefaultLoadPlanner()
            planner.set_up_planner({"a": torch.zeros(3)}, metadata, rank == 0)
            plans.append(attempt.plan(planner.create_local_plan(), keeps_items=False))
            attempts.append(attempt)
            planners.append(planner)
        for attempt, planner, plan in zip(attempts, planners, attempts[0].share(plans), strict=True):
            attempt.read_items(plan, planner)
            assert torch.equal(planner.state_dict["a"], state["a"])
        assert met.count(stopped.node_id) == 1
