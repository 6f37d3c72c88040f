"""Ranks of the buddy node write copies from their own replicas: the files are equal, and no bytes of shards are sent."""

from collections.abc import Sequence
from typing import Any

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.parts import Part
from tests.harness.cluster import Cluster, call
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import peers, replicas, state

SAVES = 4
NAMES = [f"__{rank}_0.distcp" for rank in range(2)]


def check_copies(cluster: Cluster, nodes_of_shard: int = 2) -> None:
    """Each shard of the newest checkpoint lies on that many nodes with the same bytes, and the checkpoint is whole."""
    folders = [node.disk / "run" / f"step-{SAVES - 1}" for node in cluster.nodes]
    files: dict[str, list[bytes]] = {}
    for folder in folders:
        for path in folder.glob("*.distcp"):
            files.setdefault(path.name, []).append(path.read_bytes())
    assert files
    for name, copies in files.items():
        assert len(copies) == nodes_of_shard, name
        assert len(set(copies)) == 1, name
    assert main(["verify", "--root", str(cluster.nodes[0].disk), f"run/step-{SAVES - 1}"]) in (
        ExitCode.OK,
        ExitCode.UNREACHABLE,
    )


def check_none_sent(results: Sequence[dict[str, Any]]) -> None:
    """The first save compares the objects and sends each copy. Later saves send none. All have two copies."""
    for one in results:
        assert one["sent"] == [1] + [0] * (SAVES - 1)
        assert one["warned"] == [[]] * SAVES
        assert one["own"] == [2] * SAVES
    assert all(copies == 2 for made in results[0]["made"] for copies in made)


CASES = [
    ("ddp", 2, 2, {"is_kept": True}),
    ("ddp", 2, 2, {"is_kept": False, "retention": 1}),
    ("hsdp", 2, 2, {"is_kept": True, "retention": 1}),
    ("hsdp", 4, 1, {"is_kept": True}),
    ("hsdp1", 4, 1, {"is_kept": False}),
    ("unwrapped", 3, 1, {"is_kept": True}),
    ("unwrapped", 2, 1, {"is_kept": True, "retention": 1, "ack": "peer-memory"}),
]


@pytest.mark.parametrize(("kind", "nodes", "ranks", "how"), mark_long(CASES, keep=[CASES[1], CASES[3], CASES[-1]]))
def test_copies_are_the_owners_files_and_are_not_sent(
    cluster_of: ClusterOf, kind: str, nodes: int, ranks: int, how: dict[str, Any]
) -> None:
    """With kept and new plans, with recycled files, with buddies chosen for their replicas, and without waiting for
    fsync.
    """
    cluster = cluster_of(nodes)
    step = call(replicas.save_repeatedly, kind=kind, saves=SAVES, **how)
    check_none_sent(cluster.run(step, nodes=range(nodes), ranks=ranks))
    check_copies(cluster)


@pytest.mark.parametrize(
    ("kind", "nodes", "ranks", "is_async"),
    mark_long([("ddp", 2, 2, False), ("hsdp", 4, 1, False), ("unwrapped", 2, 1, True)], keep=[("ddp", 2, 2, False)]),
)
def test_only_the_rank_state_is_sent(cluster_of: ClusterOf, kind: str, nodes: int, ranks: int, is_async: bool) -> None:
    """The state that one rank alone has, and entries that may differ, lie in a file of their own. The other files are
    still copied from memory.
    """
    cluster = cluster_of(nodes)
    step = call(replicas.save_repeatedly, kind=kind, saves=SAVES, is_kept=True, is_own=True, is_async=is_async)
    results = cluster.run(step, nodes=range(nodes), ranks=ranks)
    for rank, one in enumerate(results):
        assert one["own"] == [2] * SAVES
        assert one["warned"] == [[]] * SAVES
        if not is_async:
            assert all(names == [f"__{rank}_{Part.REST}.distcp"] for names in one["names"][1:])
    assert all(copies == 2 for made in results[0]["made"] for copies in made)
    if is_async:
        files = [path for node in cluster.nodes for path in (node.disk / "run" / f"step-{SAVES - 1}").glob("*.distcp")]
        assert {path.name for path in files} == {f"__{rank}_{part}.distcp" for rank in range(nodes) for part in (0, 2)}
    check_copies(cluster)


def test_a_lost_node_is_read_from_a_copy_that_its_buddy_wrote(cluster_of: ClusterOf) -> None:
    """After the loss of either node the other one loads everything from its own store."""
    cluster = cluster_of(2)
    save = call(replicas.save_repeatedly, kind="unwrapped", saves=SAVES, is_kept=True)
    check_none_sent(cluster.run(save, nodes=[0, 1]))
    for survivor in (0, 1):
        loaded = call(state.load, kinds=["app:unwrapped"], checkpoint_id=f"run/step-{SAVES - 1}")
        results = cluster.run(loaded, nodes=[survivor])
        assert results[0]["report"]["bytes_peer"] == 0
    check_copies(cluster)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), *mark_long([(2, 2), (4, 1)], keep=[])])
def test_agents_write_own_copies_of_asynchronous_saves(cluster_of: ClusterOf, nodes: int, ranks: int) -> None:
    """Only the copies of the first save are sent."""
    cluster = cluster_of(nodes)
    kind = "hsdp" if nodes == 4 else "unwrapped"
    step = call(replicas.save_repeatedly, kind=kind, saves=SAVES, is_kept=True, is_async=True, retention=1)
    results = cluster.run(step, nodes=range(nodes), ranks=ranks)
    assert all(copies == 2 for made in results[0]["made"] for copies in made)
    assert all(one["warned"] == [[]] * SAVES for one in results)
    assert all(one["own"] == [2] * SAVES for one in results)
    first, *later = results[0]["seconds"]
    assert all(spent > 0 for spent in first)
    assert later == [[0.0] * (nodes * ranks)] * (SAVES - 1)
    check_copies(cluster)


def test_copies_are_sent_if_a_differing_copy_would_fail_the_save(cluster_of: ClusterOf) -> None:
    """With on_degraded="raise" the owner sends every copy."""
    cluster = cluster_of(2)
    step = call(replicas.save_repeatedly, kind="unwrapped", saves=SAVES, is_kept=True, on_degraded="raise")
    for one in cluster.run(step, nodes=[0, 1]):
        assert one["sent"] == [1] * SAVES
    check_copies(cluster)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("how", ["warn", "raise"])
def test_a_diverged_replica_does_not_count_as_a_copy(cluster_of: ClusterOf, how: str, is_async: bool) -> None:
    """The save warns that its file is no copy. The next save sends the copy and names the diverged values.

    With on_degraded="raise" all copies are sent.
    """
    cluster = cluster_of(2)
    step = call(replicas.diverge_and_save, is_async=is_async, on_degraded=how, compare_replicas=1000)
    results = cluster.run(step, nodes=[0, 1])
    assert results[0][:2] == [[], []]
    if how == "warn":
        assert results[0][2:] == [["no copy of"], ["diverged"]]
    else:
        assert not any("no copy of" in one or isinstance(one, dict) for one in results[0])
    check_copies(cluster)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_with_ack_local_buddies_copy_only_asynchronous_saves(cluster_of: ClusterOf, *, is_async: bool) -> None:
    """An asynchronous save has its second copy at the commit. A synchronous save leaves all copies to the agents."""
    cluster = cluster_of(2)
    save = call(replicas.save_repeatedly, kind="unwrapped", saves=SAVES, is_kept=True, is_async=is_async, ack="local")
    made = call(peers.copies_made, checkpoint_id=f"run/step-{SAVES - 1}", names=NAMES, copies=2, within_s=20.0)
    results = cluster.launch([save, made], nodes=[0, 1])
    saved = results.of(replicas.save_repeatedly)
    first, *later = saved[0]["made"]
    assert first == [1, 1]
    assert later == [[2, 2] if is_async else [1, 1]] * (SAVES - 1)
    assert all(one["warned"] == [[]] * SAVES and one["sent"] == [0] * SAVES for one in saved)
    assert results.of(peers.copies_made) == [2, 2]
    check_copies(cluster)
