"""Pauses between rounds of re-protection: short after a change, long at rest, and longer for shards without an intact
copy.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.agent.repair.mender import Mender
from replicated_ckpt.agent.repair.reprotect import IDLE_PAUSE_S, RETRY_S, Pauses, Reprotector
from replicated_ckpt.core.upkeep.repair_plan import CopyShard
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.throttle import Pace
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, findings, introduced, shard
from tests.agent.repair.test_reprotect import stores
from tests.damage import flip

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
NAME = shard(0)
Damaged = tuple[LocalStore, str, bytes]


def after(pauses: Pauses, rounds: int, nodes: int = 2) -> list[float]:
    """The next pauses of `rounds` active rounds."""
    return [pauses.after(nodes, is_active=True) for _ in range(rounds)]


def test_pauses_grow_after_a_change() -> None:
    """After a change the pauses grow from 0.1 s: peers may publish their part of a save a moment later."""
    pauses = Pauses(IDLE_PAUSE_S)
    assert after(pauses, 2) == [2.0, 2.0]
    pauses.begin_round(2)
    assert after(pauses, 7) == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    pauses.begin_round(2)
    assert after(pauses, 1) == [0.1]


@pytest.mark.parametrize(("nodes", "first_s"), [(50, 0.1), (500, 1.0), (5000, 2.0)])
def test_many_nodes_ask_each_other_less_often(nodes: int, first_s: float) -> None:
    """The pause grows with the number of nodes, so the load of each agent stays constant."""
    pauses = Pauses(IDLE_PAUSE_S)
    pauses.begin_round(nodes)
    assert after(pauses, 1, nodes) == [first_s]
    assert pauses.after(nodes, is_active=False) == max(IDLE_PAUSE_S, 0.05 * nodes)


def test_no_pause_is_longer_than_the_one_at_rest() -> None:
    """`--round-every-s 1` limits every pause to 1 s."""
    assert after(Pauses(1.0), 1) == [1.0]
    assert Pauses(1.0).after(2, is_active=False) == 1.0


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Damaged]:
    """A node and its only peer, whose copies of a shard are damaged at the same place. Yields store, save id and intact
    bytes.
    """
    nodes = stores(tmp_path, 2)
    save_id = checkpointed(nodes, 1, {NAME: (0, 1)}).save_id
    intact = (nodes[0].root / "step-1" / NAME).read_bytes()
    for store in nodes:
        flip(store.root / "step-1" / NAME, 1000)
    with running_agent(nodes[1].root) as agent:
        introduced(nodes[0], [agent.endpoint.address()])
        with agent.client() as client:
            client.call("POST", "/v1/verify", {})
        yield nodes[0], save_id, intact


def test_a_copy_that_no_node_has_intact_is_tried_again_after_a_while(
    damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed copy is reported in each round, but tried again only after RETRY_S or after a copy has changed."""
    store, save_id, intact = damaged
    service, stopping, now, copies = NodeService(store), threading.Event(), [0.0], list[str]()
    copy = Mender._copy

    def counted(self: Mender, action: CopyShard) -> None:
        copies.append(action.shard)
        copy(self, action)

    monkeypatch.setattr(Mender, "_copy", counted)
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping, clock=lambda: now[0])
    reprotector.suspect("step-1", save_id, NAME, "a load says so")
    for _ in range(3):
        (failed,) = reprotector.round().failed
        assert f"copy '{NAME}' at the peers: no intact bytes" in failed
    assert len(copies) == 1
    now[0] += RETRY_S
    assert len(reprotector.round().failed) == 1
    assert len(copies) == 2
    (store.root / "step-1" / NAME).write_bytes(intact)
    assert reprotector.round().failed == ()
    assert findings(store) == []


def test_a_known_damaged_file_is_not_read_again_for_each_report(damaged: Damaged) -> None:
    """Otherwise two nodes that copy from each other would report and wake each other without end."""
    store, save_id, intact = damaged
    service, stopping = NodeService(store), threading.Event()
    reprotector = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    reprotector.suspect("step-1", save_id, NAME, "a load says so")
    reprotector.round()
    again = Reprotector(service, SilenceTimeouts(), Pace(1e12, stopping), stopping)
    again.suspect("step-1", save_id, NAME, "another load says so")
    is_read_again = again.is_busy
    assert not is_read_again
    with (store.root / "step-1" / NAME).open("r+b") as file:  # a user restores the file
        file.write(intact)
    again.suspect("step-1", save_id, NAME, "a third load says so")
    assert again.is_busy
    again.round()
    assert findings(store) == []
