"""The memory tier: every checkpoint is in the memory of its node and of the buddy, and every third one also on the
disks.
"""

import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.dcp.memory.root import measure_memory
from replicated_ckpt.node.peers.watch import SilenceTimeouts
from replicated_ckpt.stores.local.store import LocalStore
from tests.damage import flip
from tests.harness.cluster import Cluster, call
from tests.harness.node import Node
from tests.marks import mark_long
from tests.steps import memory
from tests.steps.memory import UNSAVED

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
DISK_EVERY = 3
RETAINED_WITHIN_S = 60.0
AGENTS_STAY_S = 120.0
LOST_AFTER_S = SilenceTimeouts().lost_after_s


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory in memory, even if the tests' own directory is on a disk."""
    base = Path(tempfile.mkdtemp(prefix="rckpt-test-", dir="/dev/shm"))
    yield base
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def cluster(base: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes with a disk each. Their memory tiers follow as nodes 2 and 3."""
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        tiers = [base / f"memory{index}" for index in range(2)]
        cluster.nodes += [Node(tier, tier) for tier in tiers]
        yield cluster


def tiers_of(cluster: Cluster) -> list[Node]:
    return cluster.nodes[2:]


def disks_of(cluster: Cluster) -> list[Node]:
    return cluster.nodes[:2]


def train_and_die(cluster: Cluster, last: int, first: int = 1, disk_every: int = DISK_EVERY, **options: Any) -> None:
    """Trains until step `last`, and then kills every trainer. Each step is in the buddy's memory before the next one
    begins.
    """
    steps = list(range(first, last + 1))
    train = call(memory.train, steps=steps, disk_every=disk_every, die_after=last, **options)
    attempt = cluster.attempt([train], nodes=[0, 1], grace_s=30.0)
    assert attempt.codes == [-signal.SIGKILL] * 2, attempt


def restore(cluster: Cluster, nodes: tuple[int, ...] = (0, 1), **arguments: Any) -> list[dict[str, Any]]:
    """What each rank of a new job restores."""
    return cluster.run(call(memory.restore, disk_every=DISK_EVERY, **arguments), nodes=nodes)


def lose_node(cluster: Cluster, index: int) -> None:
    """Kills the node's agents, and deletes its disk and its memory."""
    for node in (disks_of(cluster)[index], tiers_of(cluster)[index]):
        node.lose()


def test_killed_trainers_restart_from_their_nodes_memory(cluster: Cluster) -> None:
    """The newest step comes from each node's own memory, although the older step on the disks was deleted."""
    train_and_die(cluster, 5)
    assert [disk.checkpoints() for disk in disks_of(cluster)] == [{"step-3"}] * 2
    for disk in disks_of(cluster):
        disk.kill_agent()
        shutil.rmtree(disk.root / "step-3")
    for found in restore(cluster):
        assert (found["found"], found["values"]) == (5, [5.0])
        assert found["peer"] == 0


@pytest.mark.parametrize("lost", mark_long([0, 1], keep=[0]))
def test_a_lost_node_resumes_from_its_buddys_memory(cluster: Cluster, lost: int) -> None:
    """Whichever node is lost with its disk and its memory: the newest step comes from the other node's memory."""
    train_and_die(cluster, 5)
    lose_node(cluster, lost)
    assert [(each["found"], each["values"]) for each in restore(cluster)] == [(5, [5.0])] * 2


@pytest.mark.long
def test_memory_of_the_only_node_left_does_not_fill(cluster: Cluster) -> None:
    """Its checkpoints have one copy of the two wanted. Retention still removes the older ones, before the lost node
    counts as lost.
    """
    train_and_die(cluster, 2)
    lose_node(cluster, 1)
    cluster.launch([call(memory.train, steps=list(range(3, 9)), disk_every=100)], nodes=[0])
    await_checkpoints(tiers_of(cluster)[:1], {"step-7", "step-8"}, LOST_AFTER_S / 2)


def test_every_nth_step_is_on_disks_also_after_a_restart(cluster: Cluster) -> None:
    """The count of steps continues in the new job: every third step is on both disks, and memory keeps the last two."""
    train_and_die(cluster, 4)
    train_and_die(cluster, 10, first=5)
    for disk in disks_of(cluster):
        assert disk.checkpoints() == {"step-3", "step-6", "step-9"}
        assert disk.files("step-9") == {".metadata", ".manifest.json", "__0_0.distcp", "__1_0.distcp"}
    await_checkpoints(tiers_of(cluster), {"step-9", "step-10"})
    for found in restore(cluster):
        assert (found["steps"], found["latest"]) == ([3, 6, 9, 10], 10)


def await_checkpoints(nodes: list[Node], wanted: set[str], within_s: float = RETAINED_WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while (found := [node.checkpoints() for node in nodes]) != [wanted] * len(nodes):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_the_next_job_makes_a_disk_save_in_which_all_trainers_were_killed(cluster: Cluster) -> None:
    """Step 3 is in memory but not on the disks. The next job saves step 4 to the disks, and does not wait for step 6."""
    train_and_die(cluster, 2)
    for disk in disks_of(cluster):
        disk.environment[failpoints.ENV] = "rank.registered=kill@2"  # hit 2: the save to the disk
    train = call(memory.train, steps=[3], disk_every=DISK_EVERY)
    attempt = cluster.attempt([train], nodes=[0, 1], grace_s=30.0)
    assert -signal.SIGKILL in attempt.codes, attempt  # the other rank may have ended with an error
    for disk in disks_of(cluster):
        disk.environment.clear()
    assert [node.checkpoints() >= {"step-3"} for node in cluster.nodes] == [False, False, True, True]
    train_and_die(cluster, 5, first=4)
    assert [disk.checkpoints() for disk in disks_of(cluster)] == [{"step-4"}] * 2


def test_a_first_save_continues_the_run_that_another_node_holds(cluster: Cluster) -> None:
    """Rank 0's node is blank, all memory is lost, and the other disk has only an incomplete checkpoint: the next save
    still continues the run.
    """
    train_and_die(cluster, 2, disk_every=1, copies=1)
    lose_node(cluster, 0)
    tiers_of(cluster)[1].lose()
    before = LocalStore(disks_of(cluster)[1].root).catalog.manifest("step-2").version
    cluster.launch([call(memory.train_whatever, steps=[3], disk_every=1)], nodes=[0, 1])
    for node in cluster.nodes:
        found = LocalStore(node.root).catalog.manifest("step-3").version
        assert (found.lineage, found.sequence) == (before.lineage, before.sequence + 1)


@pytest.mark.long
def test_when_all_memory_is_lost_the_disks_newest_step_loads(cluster: Cluster) -> None:
    """As after a power loss: the newest step on the disks loads, and the job continues from there with newer saves."""
    train_and_die(cluster, 5)
    for tier in tiers_of(cluster):
        tier.lose()
    for found in restore(cluster):
        assert (found["found"], found["values"], found["steps"]) == (3, [3.0], [3])
    train_and_die(cluster, 5, first=4)
    for found in restore(cluster):
        assert (found["found"], found["values"]) == (5, [5.0])


def test_a_damaged_step_in_memory_falls_back_to_older_steps(cluster: Cluster) -> None:
    """Both copies of the newest step in memory are damaged: the next older step in memory loads. If that one is damaged
    too, the disk's step loads.
    """
    train_and_die(cluster, 5)
    damage(cluster, "step-5")
    for found in restore(cluster):
        assert (found["latest"], found["found"], found["values"]) == (5, 4, [4.0])
    damage(cluster, "step-4")
    for found in restore(cluster):
        assert (found["found"], found["values"]) == (3, [3.0])


def damage(cluster: Cluster, checkpoint_id: str) -> None:
    """Flips a bit in the middle of every copy of every shard in memory."""
    for tier in tiers_of(cluster):
        for path in (tier.root / checkpoint_id).glob("*.distcp"):
            flip(path)


@pytest.mark.long  # tests/dcp/manager/test_memory_tier.py tests the same in one process
def test_a_step_loaded_by_number_falls_back_to_the_disk(cluster: Cluster) -> None:
    """A step that is damaged in memory loads from its copy on the disk."""
    train_and_die(cluster, 4)
    damage(cluster, "step-3")
    for found in restore(cluster, wanted=3):
        assert (found["found"], found["values"]) == (3, [3.0])


def test_deleting_a_step_removes_it_from_both_tiers(cluster: Cluster) -> None:
    """A second call finds no such step."""
    train_and_die(cluster, 4)
    await_checkpoints(tiers_of(cluster), {"step-3", "step-4"})
    deleted = cluster.run(call(memory.delete, disk_every=DISK_EVERY, wanted=3), nodes=[0, 1])
    assert deleted.agreed() == [True, False, 4]
    for node in cluster.nodes:
        assert "step-3" not in node.checkpoints()


def test_a_save_that_does_not_fit_is_refused_before_it_begins(cluster: Cluster) -> None:
    """Every rank gets the error, nothing is written, and the earlier steps stay."""
    train_and_die(cluster, 2)
    numbers = measure_memory(tiers_of(cluster)[0].root) // 4 // 3  # one save fits, three are far too large
    refuse = call(memory.refuse, disk_every=DISK_EVERY, number=3, numbers=numbers)
    results = cluster.run(refuse, nodes=[0, 1])
    for said, *left in results:
        assert "MemoryTierShort" in said
        assert "3 generations" in said
        assert left == ["step-1", "step-2"]
    for tier in tiers_of(cluster):
        assert tier.staging() == []


@pytest.mark.parametrize("seed", mark_long(range(10), keep=[0]))
def test_a_node_lost_at_any_moment_costs_one_step_at_most(cluster: Cluster, seed: int) -> None:
    """A node's trainer and agents are killed during saves: the last step that the survivor saw acknowledged, or the
    next one, loads.
    """
    lost = seed % 2
    delay_s = Random(seed).uniform(0.0, 3.0)
    train = call(memory.train_on, disk_every=DISK_EVERY, node=lost, delay_s=delay_s)
    attempt = cluster.attempt([train], nodes=[0, 1], grace_s=30.0)
    assert -signal.SIGKILL in attempt.codes, attempt
    lose_node(cluster, lost)
    acknowledged = int((tiers_of(cluster)[0].root.parent / f"acknowledged{1 - lost}").read_text())
    found = restore(cluster)
    assert found[0]["found"] in (acknowledged, acknowledged + 1), acknowledged
    assert [each["values"] for each in found] == [[float(found[0]["found"])]] * 2


@pytest.mark.timeout(6000)
@pytest.mark.parametrize("kills", mark_long([3, 100], keep=[3]))
def test_no_acknowledged_step_is_lost_however_often_all_trainers_are_killed(cluster: Cluster, kills: int) -> None:
    """All trainers are killed at random moments of saves that agents complete. Each new job restores the last
    acknowledged step, or a newer one.
    """
    draw = Random(kills)
    for _ in range(kills):
        train = call(memory.train_until_killed, disk_every=DISK_EVERY, delay_s=draw.uniform(0.1, 2.0))
        attempt = cluster.attempt([train], nodes=[0, 1], grace_s=30.0)
        assert -signal.SIGKILL in attempt.codes, attempt  # the other rank may have ended with an error
        assert not any("AssertionError" in failure for failure in attempt.failures), attempt
        acknowledged = await_acknowledged(cluster)
    for found in restore(cluster):
        assert (found["found"] or 0) >= acknowledged  # 0 if every job was killed before its first step
        assert found["values"] == [float(found["found"] or UNSAVED)]


def await_acknowledged(cluster: Cluster) -> int:
    """Waits until each node has the last acknowledged step or a newer one, as agents complete these saves. Returns that
    step, or 0.
    """
    noted = tiers_of(cluster)[0].root.parent.glob("acknowledged?")
    acknowledged = max((int(path.read_text()) for path in noted), default=0)
    deadline = time.monotonic() + RETAINED_WITHIN_S
    while True:
        found = [{int(name.removeprefix("step-")) for name in tier.checkpoints()} for tier in tiers_of(cluster)]
        if all(max(steps, default=0) >= acknowledged for steps in found):
            return acknowledged
        assert time.monotonic() < deadline, (acknowledged, found)
        time.sleep(0.05)
