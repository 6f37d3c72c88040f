"""A run with a frozen encoder: nodes hard-link unchanged entries, and neither write nor send their bytes."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.parts import Part, part_of_shard
from tests.harness.cluster import Cluster, call
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import unchanged

CHANGED = 2 * unchanged.TRAINED * 4
"""Changing bytes of a rank: the head's weights and optimizer."""
FROZEN = unchanged.FROZEN * 4


def files_of(cluster: Cluster, step: int) -> dict[tuple[int, str], os.stat_result]:
    """The files with unchanged entries of a checkpoint, by node and name."""
    return {
        (number, path.name): path.stat()
        for number, node in enumerate(cluster.nodes)
        for path in (node.disk / "run" / f"step-{step}").glob("*.distcp")
        if part_of_shard(path.name) is Part.UNCHANGED
    }


def are_linked(cluster: Cluster, step: int, before: int) -> bool:
    """Whether two checkpoints share the same files of unchanged entries on each node. There must be some."""
    files, old = files_of(cluster, step), files_of(cluster, before)
    assert files
    return files.keys() == old.keys() and all(os.path.samestat(files[key], old[key]) for key in files)


def new_bytes(node: Path, step: int, others: Sequence[int]) -> int:
    """The bytes of a node's inodes that only this checkpoint has."""
    mine = {path.stat().st_ino: path.stat().st_size for path in (node / "run" / f"step-{step}").iterdir()}
    for other in others:
        for path in (node / "run" / f"step-{other}").glob("*"):
            mine.pop(path.stat().st_ino, None)
    return sum(mine.values())


def check(cluster: Cluster, steps: Sequence[int], ranks: int, **how: Any) -> None:
    """Every checkpoint loads bit for bit and passes `verify`."""
    loads = call(unchanged.load_frozen, steps=steps, ranks=ranks, **how)
    for found in cluster.run(loads, nodes=range(len(cluster.nodes))):
        assert found == {str(step): True for step in steps}
    for step in steps:
        code = main(["verify", "--root", str(cluster.nodes[0].disk), f"run/step-{step}"])
        assert code in (ExitCode.OK, ExitCode.UNREACHABLE)


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (1, {"is_async": True}),
    (1, {"state": {"is_replicated": True}}),
    (2, {"state": {"is_replicated": True}, "is_async": True}),
    (1, {"ack": "peer-memory"}),
]


@pytest.mark.parametrize(("ranks", "how"), mark_long(CASES, keep=CASES[:4]))
def test_only_what_changes_is_written_and_sent(cluster_of: ClusterOf, ranks: int, how: dict[str, Any]) -> None:
    """From the fourth save on, owner and buddy write and send only changed bytes, by inodes and by the ranks' counts."""
    cluster, steps = cluster_of(2), list(range(6))
    results = cluster.run(call(unchanged.save_frozen, steps=steps, **how), nodes=[0, 1], ranks=ranks)
    assert [are_linked(cluster, step, step - 1) for step in steps[3:]] == [True, True, True]
    shared = {name: value for name, value in how.items() if name == "state"}
    changed = CHANGED if shared else CHANGED * 2 * ranks
    for node in cluster.nodes:
        assert changed <= new_bytes(node.disk, 5, range(5)) < 1.05 * changed
    assert sum(one[-1]["sent"] for one in results) < 1.05 * changed
    assert sum(one[-1]["linked"] for one in results) >= (FROZEN if shared else FROZEN * 2 * ranks)
    assert all(save["warned"] == [] and save["made"] == 2 for one in results for save in one[1:])
    check(cluster, steps, 2 * ranks, **shared)


def test_replicas_are_copied_from_memory_if_little_stays_unchanged(cluster_of: ClusterOf) -> None:
    """A small unchanged buffer, such as a causal mask, is not linked: buddies keep copying the shards from their own
    memory.
    """
    cluster, steps = cluster_of(2), list(range(6))
    mask = {"is_replicated": True, "frozen": 1 << 18, "trained": 1 << 20}
    results = cluster.run(call(unchanged.save_frozen, steps=steps, state=mask), nodes=[0, 1])
    assert sum(one[-1]["sent"] for one in results) < 1 << 20
    assert files_of(cluster, 5) == {}
    check(cluster, steps, 2, state=mask)


def test_entries_that_change_again_are_written(cluster_of: ClusterOf) -> None:
    """The encoder changes at step 100. From then on it is not linked, because it may change again."""
    cluster, steps = cluster_of(2), [0, 1, 2, 3, 100, 101]
    cluster.run(call(unchanged.save_frozen, steps=steps), nodes=[0, 1])
    assert are_linked(cluster, 3, 2)
    assert not are_linked(cluster, 100, 3)
    assert files_of(cluster, 101) == {}
    check(cluster, steps, 2)


@pytest.mark.parametrize("lost", [[0], [1], [0, 1]])
def test_a_node_that_lost_a_file_gets_all_bytes(cluster_of: ClusterOf, lost: list[int]) -> None:
    """Owner or buddy lost its checkpoints: the next save still makes two copies, and the save after it links again."""
    cluster = cluster_of(2)
    calls = [call(unchanged.save_frozen, steps=steps) for steps in ([0, 1, 2, 3], [4, 5])]
    remove = call(unchanged.lose_checkpoints, nodes=lost)
    results = cluster.launch([calls[0], remove, calls[1]], nodes=[0, 1])
    assert [one[0]["linked"] > 0 for one in results.of(calls[1])] == [False, False]
    assert [one[0]["made"] for one in results.of(calls[1])] == [2, 2]
    assert are_linked(cluster, 5, 4)
    check(cluster, [4, 5], 2)


def test_another_world_links_nothing_at_first(cluster_of: ClusterOf) -> None:
    """New processes on more nodes have no hashes of earlier saves: they link nothing, and every checkpoint loads."""
    cluster = cluster_of(3)
    cluster.run(call(unchanged.save_frozen, steps=[0, 1, 2, 3]), nodes=[0, 1])
    cluster.run(call(unchanged.save_frozen, steps=[4, 5]), nodes=[0, 1, 2])
    assert files_of(cluster, 5) == {}
    check(cluster, [0, 1, 2, 3], 2)
    check(cluster, [4, 5], 3)


def test_a_checkpoint_removed_by_hand_leaves_the_others_whole(cluster_of: ClusterOf) -> None:
    """`rm -r` of any checkpoint's directory on both nodes."""
    cluster, left = cluster_of(2), [0, 1, 2, 3, 4, 5]
    cluster.run(call(unchanged.save_frozen, steps=left), nodes=[0, 1])
    for step in (3, 5, 0):
        for node in cluster.nodes:
            shutil.rmtree(node.disk / "run" / f"step-{step}")
        left.remove(step)
        check(cluster, left, 2)
