"""Many saves in a row, and agents that start, serve and exit meanwhile."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.harness.cluster import call
from tests.harness.node import Node
from tests.harness.processes import processes_of, wait_until_gone
from tests.marks import long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import cycles, saving, state
from tests.steps import memory as memory_steps
from tests.stopwatch import Stopwatch

SAVES = 50
ASYNC_BYTES = 50_000_000
FIRST_LOOK = 50
RSS_GROWTH_KIB_MAX = 16 * 1024


@pytest.mark.long
def test_fifty_saves_leave_only_their_files(cluster_of: ClusterOf) -> None:
    """From the 10th save to the 50th neither rank nor agent gains a thread, descriptor, child process or memory. All
    saves load.
    """
    cluster = cluster_of(2, quick_exit=False)
    ids = [f"step-{index}" for index in range(0, SAVES, 7)]
    calls = [
        call(saving.save_many, count=SAVES, measure_after=[10, SAVES]),
        call(saving.load_values, checkpoint_ids=ids),
    ]
    results = cluster.launch(calls, nodes=[0, 1], timeout_s=200)
    assert results.of(saving.load_values).agreed() == [float(index) for index in range(0, SAVES, 7)]
    for early, late in results.of(saving.save_many):
        for who in ("rank", "agent"):
            growth = {name: late[who][name] - early[who][name] for name in late[who]}
            assert growth.pop("rss_kib") < RSS_GROWTH_KIB_MAX, (who, early, late)
            assert all(value <= 0 for value in growth.values()), (who, growth, early, late)
    agents = sorted(pid for node in cluster.nodes if (pid := node.agent_pid()))
    assert sorted(processes_of(cluster.marker)) == agents, "nothing but one agent for each node is left"
    assert len(agents) == 2


CYCLES, MANY_CYCLES = 18, 500  # two saves and two loads each; every fifth cycle also has a failing save and load
CLOSING_MAX = 2
"""Connections that another thread is closing at the time of a look. A leak of one per save would be dozens."""


def check_flat(footprints: list[dict[str, dict[str, int]]]) -> None:
    """Nothing has grown between the first footprint and the last."""
    early, late = footprints[0], footprints[-1]
    for who, before in early.items():
        growth = {name: late[who][name] - value for name, value in before.items()}
        assert growth.pop("rss_kib") < RSS_GROWTH_KIB_MAX, (who, early, late)
        assert growth.pop("fds") <= CLOSING_MAX, (who, early, late)
        assert all(value <= 0 for value in growth.values()), (who, growth, early, late)


@pytest.mark.parametrize(
    "count",
    [CYCLES, pytest.param(MANY_CYCLES, marks=[pytest.mark.long, pytest.mark.timeout(3000)])],
)
@pytest.mark.parametrize("is_alone", [long(False), True], ids=["2x2 ranks", "alone"])
def test_new_writers_readers_and_managers_leave_nothing_behind(
    cluster_of: ClusterOf, count: int, is_alone: bool
) -> None:
    """New objects for each save and load, some of which fail, leave no descriptor, thread, c10d key or memory behind."""
    cluster, first_look = cluster_of(2, quick_exit=False), count // 3
    cycle = call(cycles.cycle, count=count, measure_after=[first_look, count])
    world = {"nodes": [0], "launcher": "single"} if is_alone else {"nodes": [0, 1], "ranks": 2}
    results = cluster.run(cycle, timeout_s=20 + 6 * count, **world)
    for footprints in results:
        check_flat(footprints)


@pytest.mark.long
@pytest.mark.timeout(50_000)
@pytest.mark.parametrize("is_tiered", [False, True], ids=["disk", "memory tier"])
def test_many_asynchronous_saves_leave_nothing_behind(cluster_of: ClusterOf, is_tiered: bool) -> None:
    """From the 50th save of 50 MB on, ranks and agents gain no memory, descriptor or thread.

    REPLICATED_CKPT_TEST_SAVES sets the number of saves. `pytest -s` prints the footprint after each tenth. More than 15
    minutes need `-o faulthandler_timeout=...`, too.
    """
    count, cluster = int(os.environ.get("REPLICATED_CKPT_TEST_SAVES", "300")), cluster_of(2, quick_exit=False)
    with tempfile.TemporaryDirectory(prefix="rckpt-test-", dir="/dev/shm") as memory:
        cluster.nodes += [Node(Path(memory) / f"memory{index}", Path(memory) / f"memory{index}") for index in range(2)]
        looks = sorted({FIRST_LOOK, *(max(FIRST_LOOK, count * tenth // 10) for tenth in range(1, 11))})
        save = call(
            memory_steps.save_many, count=count, size_bytes=ASYNC_BYTES, measure_after=looks, is_tiered=is_tiered
        )
        results = cluster.run(save, nodes=[0, 1], timeout_s=60 + 5 * count)
        cluster.stop_agents()
    for rank, footprints in enumerate(results):
        for step, found in zip(looks, footprints, strict=True):
            text = "; ".join(f"{who} {footprint}" for who, footprint in found.items())
            print(f"rank {rank}, save {step}: {text}")  # noqa: T201 - with -s
        check_flat(footprints)


@pytest.mark.long
def test_an_agent_serves_one_world_after_another(cluster_of: ClusterOf) -> None:
    """The ranks end, each node's agent stays, and the next world uses the same agents."""
    cluster = cluster_of(2, quick_exit=False)
    first = cluster.run(call(state.save, kinds=["plain"], checkpoint_id="step-1"), nodes=[0, 1], ranks=2)
    agents = [node.agent_pid() for node in cluster.nodes]
    assert None not in agents
    assert agents[0] != agents[1]
    second = cluster.run(call(state.load, kinds=["plain"], checkpoint_id="step-1"), nodes=[1, 0])
    assert [node.agent_pid() for node in cluster.nodes] == agents
    assert second.digests() == first[:2]


def test_an_idle_agent_exits_by_itself(cluster_of: ClusterOf, stopwatch: Stopwatch) -> None:
    """An agent without clients and work exits. The next save starts another, and the older checkpoint still loads."""
    cluster = cluster_of(2, environment={"REPLICATED_CKPT_AGENT_IDLE_S": "2"})
    saved = cluster.run(call(state.save, kinds=["plain"], checkpoint_id="step-1"), nodes=[0, 1])
    agents = [pid for node in cluster.nodes if (pid := node.agent_pid())]
    started = stopwatch.now()
    assert wait_until_gone(agents, timeout_s=20) == [], "idle agents still run after 20 s"
    assert stopwatch.now() - started < 20
    calls = [
        call(state.save, kinds=["plain"], checkpoint_id="step-2", seed=2),
        call(state.load, kinds=["plain"], checkpoint_id="step-1"),
    ]
    assert cluster.launch(calls, nodes=[0, 1]).of(state.load).digests() == saved


@pytest.mark.fault
def test_an_agent_that_was_killed_is_replaced(cluster_of: ClusterOf) -> None:
    """The agents of all nodes are killed: the next save starts new ones, in spite of the old endpoint files."""
    cluster = cluster_of(2, quick_exit=False)
    cluster.launch([call(state.save, kinds=["plain"], checkpoint_id="step-1")], nodes=[0, 1])
    for node in cluster.nodes:
        node.kill_agent()
    calls = [
        call(state.save, kinds=["plain"], checkpoint_id="step-2", seed=2),
        call(state.load, kinds=["plain"], checkpoint_id="latest"),
    ]
    results = cluster.launch(calls, nodes=[1, 0])
    assert results.of(state.load).digests() == results.of(state.save)
