"""Agents without a job copy the shards of lost nodes again, and replace damaged files."""

import logging
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.agent.repair import reprotect
from replicated_ckpt.agent.repair.reprotect import IDLE_PAUSE_S, STALE_ROUNDS_MAX, Reprotector
from replicated_ckpt.core.upkeep.policy import NODES, NodeReport, Policy
from replicated_ckpt.core.upkeep.repair import NodeView, Presence
from replicated_ckpt.core.upkeep.repair_plan import RepairPlan, RestoreManifest
from replicated_ckpt.errors import StoreError
from replicated_ckpt.node.peers.address_book import PeerBook
from replicated_ckpt.node.peers.watch import SilenceTimeouts, ask_holdings
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress
from replicated_ckpt.stores.throttle import Pace
from tests.agent.agents import RunningAgent, peers_of, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, held, introduced, quarantined, replaced_saves, shard
from tests.damage import flip
from tests.marks import mark_long

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
QUICK = ("--lost-after-s", "1.5", "--away-after-s", "3600", "--round-every-s", "1")
RING = {shard(0): (0, 1), shard(1): (1, 2), shard(2): (2, 0)}
PAIR = {shard(0): (0, 1), shard(1): (1, 0)}


def stores(folder: Path, count: int) -> list[LocalStore]:
    return [LocalStore(folder / f"node{index}") for index in range(count)]


@contextmanager
def agents(of: Sequence[LocalStore], *options: str) -> Iterator[list[RunningAgent]]:
    with ExitStack() as stack:
        running = [stack.enter_context(running_agent(store.root, *QUICK, *options)) for store in of]
        meet(*running)
        yield running


def meet(*running: RunningAgent) -> None:
    for agent in running:
        with agent.client() as client:
            client.call("POST", "/v1/peers", {"peers": peers_of(*running), "session": "meeting"})


def status(agent: RunningAgent) -> dict[str, Any]:
    with agent.client() as client:
        return client.call("GET", "/v1/status")


def protected(*running: RunningAgent) -> Callable[[], bool]:
    """Returns a check: all these agents report that every checkpoint has its copies, and none restores."""
    return lambda: all(found["protection"]["is_complete"] and not found["restoring"] for found in map(status, running))


def test_the_copies_of_a_lost_node_are_made_again(tmp_path: Path) -> None:
    """One of three nodes is lost with its disk: the other two copy its shards again, and report completion."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    checkpointed(nodes, 2, RING, checkpoint_id="step-2")
    with agents(nodes) as running:
        running[2].signal(signal.SIGKILL)
        running[2].process.wait()
        shutil.rmtree(nodes[2].root)
        wait_for(
            lambda: all(held(store, i) == set(RING) for store in nodes[:2] for i in ("step-1", "step-2")), 30, "copies"
        )
        wait_for(protected(*running[:2]), 30, "all copies")
        assert "re-protection is done" in (nodes[0].root / "agent.out").read_text()
    assert [findings(store) for store in nodes[:2]] == [[], []]
    assert not list((nodes[0].root / ".incoming").glob("*"))
    assert not any((store.root / ".quarantine").exists() for store in nodes[:2]), "nothing was damaged"


def test_a_blank_node_is_filled(tmp_path: Path) -> None:
    """A node with an empty disk gets the metadata of every checkpoint, and the copies of the lost node."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes[:2], 1, PAIR)
    with agents([nodes[0], nodes[2]]) as running:
        wait_for(lambda: held(nodes[2]) == set(PAIR), 30, "the copies of the blank node")
        wait_for(protected(*running), 30, "all copies")
    assert findings(nodes[2]) == []


def test_a_node_whose_agent_was_stopped_is_not_replaced(tmp_path: Path) -> None:
    """A stopped agent leaves its disk intact: nothing is copied, however long the node is silent."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    with agents(nodes) as running:
        running[2].signal(signal.SIGTERM)
        assert running[2].process.wait(10) == 0
        for _ in range(2):  # much longer than the time after which a silent node counts as lost
            rounds = wait_for(lambda: status(running[0])["uptime_s"], 5, "an answer")
            with pytest.raises(AssertionError, match="a copy"):
                wait_for(lambda: held(nodes[0]) == set(RING), 2.0, f"a copy, after {rounds} s")
        assert status(running[0])["protection"]["bytes_copied"] == 0
    assert [findings(store) for store in nodes] == [[], [], []]


def test_a_node_that_falls_silent_after_a_save_is_assumed_to_hold_it(tmp_path: Path) -> None:
    """Copies that a silent node may hold are made only once the node counts as lost. Copies that it lacked before are
    made at once.
    """
    nodes, now, stopping = stores(tmp_path, 3), [0.0], threading.Event()
    checkpointed(nodes, 1, RING, on=[0, 1])
    service = NodeService(nodes[0])
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping, clock=lambda: now[0])
    with running_agent(nodes[1].root) as other, running_agent(nodes[2].root) as silent:
        introduced(nodes[0], [other.endpoint.address(), silent.endpoint.address()])
        for _ in range(2):
            reprotector.round()
        checkpointed(nodes, 2, RING, checkpoint_id="step-2")
        silent.signal(signal.SIGKILL)
        silent.process.wait(10)
        assert reprotector.round().in_doubt
        assert [held(nodes[0], save) for save in ("step-1", "step-2")] == [set(RING), {shard(0), shard(2)}]
        now[0] += SilenceTimeouts().lost_after_s
        reprotector.round()
        assert held(nodes[0], "step-2") == set(RING)
    assert [findings(store) for store in nodes] == [[], [], []]


def test_an_agent_that_ranks_started_copies_to_the_end(tmp_path: Path) -> None:
    """An agent without clients does not exit on idle while it copies."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)}, size_bytes=6_000_000, on=[0])
    with running_agent(nodes[0].root, *QUICK) as there:
        introduced(nodes[1], [there.endpoint.address()])
        with running_agent(nodes[1].root, *QUICK, "--idle-exit-s", "2", "--copy-mib-per-s", "1") as idle:
            wait_for(
                lambda: ask_holdings(idle.endpoint.address()).node_report.is_busy,
                10,
                "the report that the agent is busy",
            )
            assert idle.process.wait(60) == 0
    assert held(nodes[1]) == {shard(0)}


def test_shards_of_nodes_without_an_address_are_not_lost(tmp_path: Path) -> None:
    """A node that was never introduced may have its shards. Once the user has forgotten it, they count as lost."""
    nodes, stopping = stores(tmp_path, 3), threading.Event()
    checkpointed(nodes, 1, RING)
    service = NodeService(nodes[0])
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    found = reprotector.round()
    assert (found.short, found.lost) == (1, 0)
    introduced(nodes[0], [AgentAddress(node.node_id(), "127.0.0.1", 1, "token") for node in nodes[1:]])
    for node in nodes[1:]:
        service.peers.forget(node.node_id())
    assert reprotector.round().lost == 1


def test_missing_copies_are_logged_only_in_the_second_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The round after a commit may come before other nodes have published. Missing copies are logged only if the next
    round finds them too.
    """
    nodes, stopping = stores(tmp_path, 2), threading.Event()
    service, other = NodeService(nodes[0]), NodeService(nodes[1])
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    monkeypatch.setattr(reprotector.watch, "look", lambda _: (NodeView(other.node_id, Presence.UP, other.holdings()),))
    caplog.set_level(logging.INFO, "replicated_ckpt.agent.repair.reprotect")
    checkpointed(nodes, 1, {shard(0): (0, 1)}, on=[0])
    assert reprotector.round().planned
    assert caplog.messages == []
    checkpointed(nodes, 1, {shard(0): (0, 1)}, on=[1])
    assert reprotector.round().is_complete
    assert caplog.messages == []
    checkpointed(nodes, 2, {shard(0): (0, 1)}, checkpoint_id="step-2", on=[0])
    for _ in range(2):
        reprotector.round()
    assert len(caplog.messages) == 1
    assert "copies or checkpoints are missing" in caplog.messages[0]


def test_a_name_that_retention_frees_is_restored_for_another_run(tmp_path: Path) -> None:
    """A round that retires a checkpoint is complete only after the other run's checkpoint of that name has its copies."""
    nodes, stopping, run, another = stores(tmp_path, 2), threading.Event(), "a" * 16, "b" * 16
    checkpointed(nodes, 1, {shard(0): (0,)}, copies=1, on=[0], lineage=run)
    checkpointed(nodes, 2, {shard(0): (0,)}, copies=1, checkpoint_id="step-2", lineage=run)
    theirs = checkpointed(nodes, 3, {shard(0): (1,)}, copies=1, on=[1], lineage=another)
    service = NodeService(nodes[0])
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    service.policies.learn([Policy("", NODES, 2, Retention(keep_last=1), run)])
    with running_agent(nodes[1].root) as other:
        introduced(nodes[0], [other.endpoint.address()])
        wait_for(lambda: reprotector.round().is_complete, 20, "a complete round")
    assert dict(nodes[0].catalog.committed())["step-1"].save_id == theirs.save_id
    assert [findings(store) for store in nodes] == [[], []]


def test_an_older_version_stays_while_another_node_is_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy node may still find its source damaged: rounds do not count towards the removal of the older version
    meanwhile.
    """
    nodes, stopping, halves = stores(tmp_path, 2), threading.Event(), {shard(0): (0,), shard(1): (1,)}
    service, other = NodeService(nodes[0]), NodeService(nodes[1])
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    view = NodeView(other.node_id, Presence.UP, (), node_report=NodeReport(is_busy=True))
    monkeypatch.setattr(reprotector.watch, "look", lambda _: (replace(view, holdings=other.holdings()),))
    for number in (1, 2):
        checkpointed(nodes, number, halves)
    for _ in range(STALE_ROUNDS_MAX + 2):
        assert reprotector.round().planned == 2
    assert replaced_saves(nodes[0])
    view = replace(view, node_report=NodeReport())
    reprotector.round()
    assert not replaced_saves(nodes[0])


def test_replaced_checkpoints_are_removed_during_a_long_copy(tmp_path: Path) -> None:
    """A job saves during a long copy: replaced and retired checkpoints are removed before the copy ends."""
    nodes, now, stopping = stores(tmp_path, 2), [0.0], threading.Event()
    service, numbers = NodeService(nodes[0]), iter(range(2, 100))
    here: list[tuple[int, int]] = []

    class WhileOthersSave(Pace):
        def take(self, size_bytes: int) -> None:
            here.append((len(replaced_saves(nodes[0])), len(list(nodes[0].root.glob("step-*")))))
            for name in ("last", f"step-{len(here)}"):
                halves = {shard(0): (0,), shard(1): (1,)}
                checkpointed(nodes, next(numbers), halves, copies=1, checkpoint_id=name, size_bytes=1000)
            now[0] += IDLE_PAUSE_S

    reprotector = Reprotector(service, SilenceTimeouts(), WhileOthersSave(1, stopping), stopping, clock=lambda: now[0])
    service.policies.learn([Policy("", NODES, 2, Retention(keep_last=2))])
    checkpointed(nodes, 1, {shard(0): (1, 0)}, checkpoint_id="other/large", size_bytes=26_000_000, on=[1])
    with running_agent(nodes[1].root) as other:
        introduced(nodes[0], [other.endpoint.address()])
        for _ in range(2):
            reprotector.round()
    assert held(nodes[0], "other/large") == {shard(0)}
    assert len(here) == 7, "pieces"
    assert max(here) <= (1, 3), here
    assert max(kept for _, kept in here) <= 3, here


def test_the_newest_save_does_not_wait_for_all_copies_of_older_ones(tmp_path: Path) -> None:
    """A save that is made during re-protection is copied next, before the remaining older checkpoints."""
    nodes, now, stopping = stores(tmp_path, 2), [0.0], threading.Event()

    class WhileOneIsSaved(Pace):
        def take(self, size_bytes: int) -> None:
            if not now[0]:
                checkpointed(nodes, 9, {shard(0): (1, 0)}, checkpoint_id="step-9", on=[1])
            now[0] += size_bytes and IDLE_PAUSE_S

    service = NodeService(nodes[0])
    reprotector = Reprotector(service, SilenceTimeouts(), WhileOneIsSaved(1, stopping), stopping, clock=lambda: now[0])
    for number in (1, 2, 3):
        checkpointed(nodes, number, {shard(0): (1, 0)}, checkpoint_id=f"step-{number}", on=[1])
    with running_agent(nodes[1].root) as other:
        introduced(nodes[0], [other.endpoint.address()])
        for _ in range(2):
            reprotector.round()
        assert [len(held(nodes[0], f"step-{number}")) for number in (3, 9, 2, 1)] == [1, 1, 0, 0]
        assert reprotector.is_busy
        wait_for(lambda: reprotector.round().is_complete, 20, "all copies")
    assert [findings(store) for store in nodes] == [[], []]


def test_records_of_removed_saves_are_dropped(tmp_path: Path) -> None:
    """The record of a removed save is dropped after a while, so memory does not grow."""
    (store,), now, stopping = stores(tmp_path, 1), [0.0], threading.Event()
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    reprotector = Reprotector(
        NodeService(store), SilenceTimeouts(), Pace(1e12, stopping), stopping, clock=lambda: now[0]
    )
    reprotector.round()
    shutil.rmtree(store.final("step-1"))
    reprotector.round()
    assert len(reprotector._deferred._gone_since) == 1, "the removed save is recorded"
    now[0] += SilenceTimeouts().lost_after_s
    reprotector.round()
    assert not reprotector._deferred._gone_since


@pytest.mark.parametrize(
    "problem", [StoreError("here", "list", "holdings", "EIO"), KeyError("a defect"), TimeoutError()]
)
def test_a_repair_that_cannot_begin_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    """The caller gets the error, and the thread goes on with the next repair."""
    (store,), stopping = stores(tmp_path, 1), threading.Event()
    made = checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    service = NodeService(store)
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    part = RepairPlan(restore=(RestoreManifest(store.node_id(), "step-2", "2" * 32, ("elsewhere",)),))

    def fail() -> NoReturn:
        raise problem

    with monkeypatch.context() as broken:
        broken.setattr(service, "holdings", fail)
        reprotector.start()
        with pytest.raises(type(problem)):
            reprotector.carry_out(part, may_replace=False)
    assert [error for _, error in reprotector.carry_out(part, may_replace=False)] != [""]
    assert [error for _, error in reprotector.carry_out(RepairPlan(), may_replace=False)] == []
    stopping.set()
    reprotector.wake()
    reprotector.join()
    assert not reprotector._thread.is_alive()
    assert [holding.save_id for holding in service.holdings()] == [made.save_id]


def test_re_protection_pauses_for_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-protection pauses for a moment when a load begins, unless something else wakes it."""
    (store,), stopping = stores(tmp_path, 1), threading.Event()
    reprotector = Reprotector(NodeService(store), SilenceTimeouts(), Pace(1e12, stopping), stopping)
    monkeypatch.setattr(reprotect, "LOAD_FIRST_S", 60.0)
    waits = mock.Mock(wraps=reprotector._woken.wait)
    monkeypatch.setattr(reprotector._woken, "wait", waits)

    def rounds() -> object:
        return reprotector.status()["rounds"]

    try:
        reprotector.start()
        wait_for(lambda: rounds() == 1, 10, "the first round")
        reprotector.wake_for_load()
        wait_for(lambda: mock.call(60.0) in waits.mock_calls, 10, "the pause for the load")
        assert rounds() == 1
        assert reprotector.is_busy, "the agent does not exit during the pause"
        reprotector.wake()
        wait_for(lambda: rounds() == 2, 10, "the next round")
    finally:
        stopping.set()
        reprotector.join()


def test_no_repair_waits_for_a_load_that_began_before_the_last_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second load ends the pause of the first: a repair after that round starts at once."""
    (store,), stopping = stores(tmp_path, 1), threading.Event()
    reprotector = Reprotector(NodeService(store), SilenceTimeouts(), Pace(1e12, stopping), stopping)
    monkeypatch.setattr(reprotect, "LOAD_FIRST_S", 60.0)
    waits = mock.Mock(wraps=reprotector._woken.wait)
    monkeypatch.setattr(reprotector._woken, "wait", waits)
    done = threading.Event()

    def repair() -> None:
        reprotector.carry_out(RepairPlan(), may_replace=False)
        done.set()

    try:
        reprotector.start()
        reprotector.wake_for_load()
        wait_for(lambda: mock.call(60.0) in waits.mock_calls, 10, "the pause for the load")
        before = reprotector.status()["rounds"]
        reprotector.wake_for_load()
        wait_for(lambda: reprotector.status()["rounds"] != before, 10, "the next round")
        threading.Thread(target=repair, daemon=True).start()
        assert done.wait(10)
    finally:
        stopping.set()
        reprotector.join()


DAMAGES: dict[str, Callable[[bytearray], bytes]] = {
    "flipped": lambda raw: bytes(raw[:200]) + bytes([raw[200] ^ 1]) + bytes(raw[201:]),
    "truncated": lambda raw: bytes(raw[:-9]),
    "empty": lambda _: b"",
    "footer": lambda raw: bytes(raw[:-40]) + bytes([raw[-40] ^ 1]) + bytes(raw[-39:]),
}


@pytest.mark.parametrize("name", mark_long([shard(0), ".metadata", ".manifest.json"], keep=[shard(0), ".metadata"]))
def test_damaged_files_are_quarantined_and_restored(tmp_path: Path, name: str) -> None:
    """The scrub finds each kind of damage. The damaged file goes to the quarantine, and an intact copy replaces it."""
    nodes = stores(tmp_path, 2)
    kinds = [kind for kind in DAMAGES if not (name != shard(0) and kind == "footer")]
    for number, kind in enumerate(kinds, 1):
        checkpointed(nodes, number, PAIR, checkpoint_id=kind)
        path = nodes[0].root / kind / name
        path.write_bytes(DAMAGES[kind](bytearray(path.read_bytes())))
    checkpointed(nodes, 9, PAIR, checkpoint_id="removed")
    (nodes[0].root / "removed" / name).unlink()
    with agents(nodes, "--scrub-every-s", "0.5", "--scrub-mib-per-s", "500") as running:
        wait_for(lambda: not findings(nodes[0]), 120, "the end of all findings")
        wait_for(protected(*running), 30, "all copies")
        wait_for(lambda: status(running[0])["scrub"]["passes"] > 0, 30, "a pass of the scrub")
    assert findings(nodes[0]) == findings(nodes[1]) == []
    assert quarantined(nodes[0]) == [name] * len(kinds)
    assert quarantined(nodes[1]) == []
    assert (nodes[0].root / "flipped" / name).read_bytes() == (nodes[1].root / "flipped" / name).read_bytes()


def test_swapped_shards_are_found(tmp_path: Path) -> None:
    """Two shards with exchanged names are both replaced."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    first, second = (nodes[0].root / "step-1" / shard(rank) for rank in (0, 1))
    spare = first.with_name("spare")
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    with agents(nodes, "--scrub-every-s", "0.5"):
        wait_for(lambda: held(nodes[0]) == set(PAIR), 40, "both shards")
    assert quarantined(nodes[0]) == [shard(0), shard(1)]


def test_an_intact_file_that_is_suspected_stays(tmp_path: Path) -> None:
    """A reported file is read by the agent itself before it counts as damaged: the network may have been at fault."""
    nodes = stores(tmp_path, 2)
    manifest = checkpointed(nodes, 1, PAIR)
    with agents(nodes) as running:
        with running[0].client() as client:
            client.call(
                "POST", "/v1/suspects", {"checkpoint_id": "step-1", "save_id": manifest.save_id, "name": shard(0)}
            )
        wait_for(protected(*running), 30, "all copies")
    assert quarantined(nodes[0]) == []
    assert held(nodes[0]) == set(PAIR)


def test_two_copies_damaged_in_different_blocks_make_an_intact_one(tmp_path: Path) -> None:
    """No source is intact, but each block is intact in one of them: a third node gets an intact copy."""
    nodes = stores(tmp_path, 3)
    manifest = checkpointed(nodes, 1, {shard(0): (0, 1, 2)}, copies=3, on=(0, 1))
    for store, position in ((nodes[0], 1000), (nodes[1], 600_000)):
        path = store.root / "step-1" / shard(0)
        flip(path, position)
    with agents(nodes) as running:
        wait_for(lambda: held(nodes[2]) == {shard(0)}, 30, "the third copy")
        wait_for(lambda: all(held(store) == {shard(0)} for store in nodes), 30, "all three")
        wait_for(protected(*running), 30, "all copies")
    assert [quarantined(store) for store in nodes] == [[shard(0)], [shard(0)], []]
    assert manifest.copies == 3


def test_an_agent_that_restarts_on_another_port_is_found(tmp_path: Path) -> None:
    """A restarted agent has another port: it announces the port to its peers with the token that they have."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes) as running:
        running[1].signal(signal.SIGKILL)
        running[1].process.wait()
        (nodes[1].root / "step-1" / shard(0)).unlink()
        with running_agent(nodes[1].root, *QUICK, "--port", str(_free_port())) as back:
            assert back.endpoint.port != running[1].endpoint.port
            assert back.endpoint.incarnation == running[1].endpoint.incarnation + 1
            wait_for(lambda: held(nodes[1]) == set(PAIR), 30, "its copy")
            wait_for(protected(running[0], back), 30, "all copies")
            (known,) = PeerBook(running[0].root / ".agent").read_all()
            assert known.port == back.endpoint.port


def test_a_checkpoint_removed_on_every_node_stays_removed(tmp_path: Path) -> None:
    """A user removes a checkpoint node by node: re-protection does not restore it."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    checkpointed(nodes, 2, PAIR, checkpoint_id="step-2")
    with agents(nodes, "--lost-after-s", "20") as running:
        wait_for(protected(*running), 30, "all copies")
        shutil.rmtree(nodes[0].root / "step-1")
        meet(*running)  # starts a round
        wait_for(lambda: status(running[0])["protection"]["planned"] > 0, 10, "a deferred plan")
        shutil.rmtree(nodes[1].root / "step-1")
        meet(*running)
        wait_for(protected(*running), 30, "all copies")
        assert not (nodes[0].root / "step-1").exists()
        assert not (nodes[1].root / "step-1").exists()
    assert [findings(store) for store in nodes] == [[], []]


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
