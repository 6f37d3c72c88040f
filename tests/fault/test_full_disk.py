"""Full disks. A buddy without space passes its copy on to another node. A rank's own full disk fails the save on every
rank and loses nothing.
"""

import collections
import itertools
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from replicated_ckpt import Retention, failpoints
from replicated_ckpt.agent.repair.mender import Mender
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.layout import AGENT_DIR
from replicated_ckpt.core.upkeep.policy import NODES, Policy
from replicated_ckpt.core.upkeep.repair_plan import CopyShard, Problem
from replicated_ckpt.errors import StoreFull
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.throttle import Pace
from tests.agent.agents import running_agent, stop_agent, wait_for
from tests.agent.checkpoints import checkpointed, findings, held, shard
from tests.agent.repair.test_reprotect import PAIR, agents, protected
from tests.cli.commands import command
from tests.harness.cluster import Cluster, call
from tests.steps import fault

pytestmark = [
    pytest.mark.fault,
    pytest.mark.multiprocess,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is a tmpfs, and mounting one needs root"),
]
SMALL_DISK_MIB = 20
LINEAGE = "a" * 16


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes; the second one has a small disk."""
    with Cluster(tmp_path / "cluster", 3, quick_exit=True) as cluster:
        disk = cluster.nodes[1].disk
        mounted = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m,nr_inodes=2000,mode=0700", "tmpfs", str(disk)]
        if subprocess.run(mounted, check=False, capture_output=True).returncode:
            pytest.skip("no tmpfs can be mounted here")
        try:
            yield cluster
            cluster.stop_agents()
        finally:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_buddy_without_space_passes_its_copy_on(cluster: Cluster) -> None:
    """The buddy has room for its own small shard, but not for the copy of a large one. A third node takes that copy, so
    each shard has two copies.
    """
    # Rank 1's own shard is there first: its write would fail while the part of a large copy fills the disk.
    cluster.start_agents({1: {failpoints.ENV: "agent.receiving=sleep:3"}})
    counts = [24, 2, 2]
    calls = [
        call(fault.save_uneven, checkpoint_id="step-1", counts=counts),
        call(fault.load_uneven, checkpoint_id="latest", counts=counts),
    ]
    results = cluster.launch(calls, nodes=[0, 1, 2])
    outcomes = results.of(fault.save_uneven)
    assert [outcome.get("copies_made") for outcome in outcomes] == [2, 2, 2], outcomes
    assert results.of(fault.load_uneven) == [True, True, True]
    assert {"__0_0.distcp"} <= cluster.nodes[2].files("step-1")
    assert [f for node in cluster.nodes for f in findings(LocalStore(node.disk)) if f.problem.value == "corrupt"] == []


def test_a_ranks_own_full_disk_fails_the_save_on_every_rank(cluster: Cluster) -> None:
    """Every rank gets StoreFull with the path and the host. The previous checkpoint still loads. The next save that
    fits succeeds.
    """
    small, large = [2, 2, 2], [2, 30, 2]
    before = call(fault.save_uneven, checkpoint_id="step-1", counts=small)
    too_large = call(fault.save_uneven, checkpoint_id="step-2", counts=large)
    load_before = call(fault.load_uneven, checkpoint_id="latest", counts=small)
    after = call(fault.save_uneven, checkpoint_id="step-3", counts=small)
    load_after = call(fault.load_uneven, checkpoint_id="step-3", counts=small)
    litter = call(fault.litter, within_s=10.0)
    results = cluster.launch([before, too_large, load_before, after, load_after, litter], nodes=[0, 1, 2])
    for outcome in results.of(too_large):
        assert outcome["types"] == ["StoreFull"]
        assert str(cluster.nodes[1].disk) in outcome["message"]
        assert outcome["notes"] == [f"Raised on host {socket.gethostname()}."]
    assert results.of(load_before) == results.of(load_after) == [True, True, True]
    assert results.of(litter) == [[], [], []]


def test_a_lost_copy_is_made_where_there_is_room(cluster: Cluster) -> None:
    """The node that should hold the copy has a full disk: re-protection makes the copy on a third node."""
    stores = [LocalStore(node.disk) for node in cluster.nodes]
    checkpointed(stores, 1, {shard(0): [0, 1]}, on=[0], size_bytes=SMALL_DISK_MIB << 19)
    (stores[1].root / "filler").write_bytes(bytes(SMALL_DISK_MIB << 19))
    with agents(stores):
        wait_for(lambda: held(stores[2]) == {shard(0)}, 30, "the copy of the third node")
    (stores[1].root / "filler").unlink()
    assert [finding.problem for store in stores for finding in findings(store)] == [Problem.MISSING]


@pytest.mark.parametrize("left", range(4))
def test_a_copy_that_finds_no_room_leaves_no_files(cluster: Cluster, left: int) -> None:
    """Wherever the copy runs out of space, the space that it used is freed at once, without a restart of the agent."""
    disk = cluster.nodes[1].disk
    service = NodeService(LocalStore(disk))
    manifest = checkpointed([service.store], 1, {shard(0): [0]}, copies=1)
    path = disk / "step-1" / shard(0)
    with path.open("r+b") as file:  # the footer is bad: the node copies its own data, and sets the bad file aside
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    mender = Mender(service, Pace(1e15, threading.Event()))
    mender.examine("step-1", manifest.save_id, shard(0))
    before = sorted(path.parent.iterdir())
    filler = disk / "filler"
    filler.mkdir()
    numbered = (filler / str(number) for number in itertools.count())
    with pytest.raises(OSError, match="No space left"):  # tmpfs sometimes has more free inodes than it reports
        collections.deque(map(Path.touch, numbered), maxlen=0)
    for number in range(left):
        (filler / str(number)).unlink()
    action = CopyShard(
        service.node_id, "step-1", manifest.save_id, shard(0), path.stat().st_size, (service.node_id,), True
    )
    with pytest.raises(StoreFull):
        mender.carry_out(action)
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("is_running", [False, True])
def test_a_disk_that_is_full_to_the_last_byte_can_be_pruned(cluster: Cluster, *, is_running: bool) -> None:
    """`prune` and `rm` work on the full disk, whether an agent runs already or the command starts one: the agent has
    reserved space.
    """
    store = LocalStore(cluster.nodes[1].disk)
    store.node_id()
    for number in (1, 2, 3):
        checkpointed([store], number, {shard(0): [0]}, copies=1, checkpoint_id=f"step-{number}", size_bytes=50_000)
    with running_agent(store.root) if is_running else nullcontext():
        check_pruning(store)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_disk_without_inodes_can_be_pruned(cluster: Cluster, *, is_running: bool) -> None:
    """`prune` and `rm` work without free inodes, although the file system reports free bytes, as with an exhausted user
    quota.
    """
    store = LocalStore(cluster.nodes[1].disk)
    for number in (1, 2, 3):
        checkpointed([store], number, {shard(0): [0]}, copies=1, checkpoint_id=f"step-{number}", size_bytes=50_000)
    assert command("prune", "--keep-last", "3", "--root", store.root).returncode == ExitCode.OK
    assert read_endpoint(store.root / AGENT_DIR) is not None, "the command did not start an agent"
    stop_agent(store.root)
    with running_agent(store.root) if is_running else nullcontext():
        check_pruning(store, fill_inodes)


def test_retention_frees_a_disk_that_is_full_to_the_last_byte(cluster: Cluster) -> None:
    """On a full disk, retention still removes the old checkpoint, and a load still pins the one that it reads: the
    agent writes its records of both later.
    """
    stores = [LocalStore(node.disk) for node in cluster.nodes[:2]]
    for number in (1, 2):
        saved(stores, number)
    policy = Policy("", NODES, 3, Retention(keep_last=2), LINEAGE)
    with agents(stores) as (other, full):
        for agent in (other, full):
            with agent.client() as client:
                client.call("POST", "/v1/retention", {"policies": [policy.to_json()]})
        wait_for(protected(other, full), 30, "re-protection of the first two checkpoints")
        full.signal(signal.SIGSTOP)
        saved(stores, 3)
        fill(stores[1])
        full.signal(signal.SIGCONT)
        with full.peer() as client:
            load = {"lineage": LINEAGE, "sequence": 4, "save_id": f"{2:032x}", "reader": "session/1"}
            assert client.call("POST", "/v1/sequence", load) == {"is_here": True, "is_slim": False}
        wait_for(lambda: not (stores[1].root / "step-1").exists(), 30, "the removal of step-1")
        wait_for(protected(other, full), 30, "re-protection of the checkpoints that are left")
    (stores[1].root / "filler").unlink()
    assert [name for name, _ in stores[1].catalog.committed()] == ["step-2", "step-3"]
    assert [finding for store in stores for finding in findings(store)] == []


def saved(stores: list[LocalStore], number: int) -> None:
    checkpointed(stores, number, PAIR, checkpoint_id=f"step-{number}", size_bytes=50_000, lineage=LINEAGE)


def fill(store: LocalStore) -> None:
    with (store.root / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        collections.deque(map(filler.write, itertools.repeat(bytes(512))), maxlen=0)


def fill_inodes(store: LocalStore) -> None:
    filler = store.root / "filler"
    filler.mkdir()
    with pytest.raises(OSError, match="No space left"):
        collections.deque(map(Path.touch, (filler / str(number) for number in itertools.count())), maxlen=0)


def check_pruning(store: LocalStore, fill: Callable[[LocalStore], None] = fill) -> None:
    fill(store)
    done = command("prune", "--keep-last", "2", "--root", store.root)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert command("rm", "step-2", "--root", store.root).returncode == ExitCode.OK
    assert [name for name, _ in store.catalog.committed()] == ["step-3"]
    assert findings(store) == []
