"""Bad timing: concurrent saves, a removal during a load, wrong clocks, and an agent that is replaced."""

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent
from tests.agent.checkpoints import findings
from tests.harness.cluster import ByRank, Cluster, call
from tests.harness.launch import T
from tests.harness.processes import end
from tests.steps import peers, state, timing

pytestmark = [pytest.mark.fault, pytest.mark.multiprocess, pytest.mark.timeout(240)]
KINDS = ["plain"]
COUNT = 6  # MiB of each rank


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        yield cluster


def at_once(*launches: Callable[[], ByRank[T]]) -> list[ByRank[T]]:
    """Runs the launches concurrently, and returns their results in order."""
    found: list[ByRank[T] | BaseException] = [AssertionError("the launch did not run")] * len(launches)

    def run(index: int) -> None:
        try:
            found[index] = launches[index]()
        except BaseException as exc:  # noqa: BLE001 - raised below, in the test's own thread
            found[index] = exc

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(launches))]
    for thread in threads:
        thread.start()
        thread.join(0.3)
    for thread in threads:
        thread.join(180)
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in found if isinstance(outcome, ByRank)]


def assert_whole(cluster: Cluster) -> None:
    assert [finding for node in cluster.nodes for finding in findings(LocalStore(node.disk))] == []


@pytest.mark.long
def test_a_load_leaves_the_save_in_the_background_alone(cluster: Cluster) -> None:
    """A trainer loads while its own save is in flight: it gets the older checkpoint that it asked for, and the save is
    committed.
    """
    calls = [
        call(state.save, kinds=KINDS, checkpoint_id="step-1"),
        call(timing.load_while_saving, kinds=KINDS, old="step-1", new="step-2"),
        call(state.load, kinds=KINDS, checkpoint_id="step-2"),
    ]
    results = cluster.launch(calls, nodes=[0, 1])
    first = results.of(state.save).agreed()
    for during, after in zip(results.of(timing.load_while_saving), results.of(state.load).digests(), strict=True):
        assert during["was_in_flight"]
        assert during["loaded"] == first
        assert after == during["saving"]
    assert_whole(cluster)


def test_a_checkpoint_that_is_removed_during_a_load_is_still_loaded(cluster: Cluster) -> None:
    """One node's copy is removed after the first item: the rest comes from files that are open already, or from the
    peer.
    """
    calls = [
        call(peers.save_pieces, checkpoint_id="step-1", count=COUNT),
        call(timing.load_while_removed, checkpoint_id="step-1", count=COUNT, ranks=2),
    ]
    assert cluster.launch(calls, nodes=[0, 1]).of(timing.load_while_removed) == [True, True]
    assert not (cluster.nodes[0].disk / "step-1").exists()


def test_clocks_decide_nothing(cluster: Cluster) -> None:
    """The nodes' clocks differ by five hours, and the coordinator's clock goes back a day between two saves: "latest"
    is the later save.
    """
    earlier = call(timing.save_with_wrong_clocks, kinds=KINDS, checkpoint_id="b", seed=1, shift_h=20.0)
    later = call(timing.save_with_wrong_clocks, kinds=KINDS, checkpoint_id="a", seed=2, shift_h=-4.0)
    load = call(state.load, kinds=KINDS, checkpoint_id="latest")
    results = cluster.launch([earlier, later, load], nodes=[0, 1])
    assert results.of(load).digests() == results.of(later)
    assert_whole(cluster)


@pytest.mark.long
def test_two_jobs_on_the_same_stores(cluster: Cluster) -> None:
    """Two jobs save different checkpoints to the same nodes at the same time: all of them load bit for bit."""
    ids = [["a-1", "a-2", "a-3"], ["b-1", "b-2", "b-3"]]
    saves = [call(timing.save_many, kinds=KINDS, checkpoint_ids=own, seed=seed) for seed, own in enumerate(ids)]
    saved = at_once(*(partial(cluster.run, save, nodes=[0, 1]) for save in saves))
    loads = [call(state.load, kinds=KINDS, checkpoint_id=name) for own in ids for name in own]
    results = cluster.launch(loads, nodes=[0, 1])
    outcomes = [outcome for by_rank in saved for outcome in by_rank[0]]
    for load, outcome in zip(loads, outcomes, strict=True):
        assert isinstance(outcome, dict), outcome
        assert results.of(load).digests() == [outcome, outcome]
    assert_whole(cluster)


def test_two_saves_of_the_same_checkpoint_at_once(cluster: Cluster) -> None:
    """The checkpoint that loads is exactly one of the saves that succeeded. The others raised an error."""
    cluster.launch([call(state.save, kinds=KINDS, checkpoint_id="x", seed=9)], nodes=[0, 1])
    ids = ["x"] * 4
    saves = [call(timing.save_many, kinds=KINDS, checkpoint_ids=ids, seed=seed, overwrite=True) for seed in (1, 2)]
    saved = at_once(*(partial(cluster.run, save, nodes=[0, 1]) for save in saves))
    outcomes = [outcome for by_rank in saved for outcome in by_rank[0]]
    won = [outcome for outcome in outcomes if isinstance(outcome, dict)]
    lost = [outcome for outcome in outcomes if not isinstance(outcome, dict)]
    assert won
    assert all(set(types) <= {"SaveAborted", "AckNotReached", "StoreError"} for types in lost), lost
    results = cluster.run(call(state.load, kinds=KINDS, checkpoint_id="x"), nodes=[0, 1])
    first, second = results.digests()
    assert first == second
    assert first in won
    assert_whole(cluster)


def test_an_older_agent_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a newer version replaces the running agent. The new agent takes over the address and the token."""
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_IDLE_S", "1")
    with running_agent(tmp_path / "a", "--idle-exit-s", "60") as old:  # the options with which ranks start an agent
        path = old.root / ".agent" / "endpoint.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "version": "0.0.9"}))
        new = ensure_agent(LocalStore(old.root), "127.0.0.1")
        assert old.process.wait(10) == 0
        assert new.pid != old.process.pid
        assert (new.port, new.token) == (old.endpoint.port, old.endpoint.token)
        assert new.incarnation == old.endpoint.incarnation + 1
        assert ensure_agent(LocalStore(old.root), "127.0.0.1") == new == read_endpoint(old.root / ".agent")
        end([new.pid])
