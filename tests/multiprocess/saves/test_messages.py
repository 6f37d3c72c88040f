"""What a save says to the agents, and to its ranks, when nothing disturbs it: every save of every node pays for it."""

from collections import Counter

import pytest

from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import planning, saving, sharing, state


@pytest.mark.parametrize("compare_replicas", [16, None])
def test_an_undisturbed_save_says_no_more_than_it_has_to(cluster_of: ClusterOf, compare_replicas: int | None) -> None:
    """Three nodes, one rank each: open, the copies, the decision, commit; as many as before there were saves in doubt.

    Of a layout that the nodes have, `.metadata` is not sent again: they take their own. Nor are copies of a state that
    all ranks have, unless it is not compared.
    """
    cluster = cluster_of(3)
    calls = [
        call(
            saving.count_messages,
            kinds=["plain"],
            checkpoint_id="step-{}",
            times=3,
            compare_replicas=compare_replicas,
        ),
        call(state.load, kinds=["plain"], checkpoint_id="step-2"),
    ]
    results = cluster.launch(calls, nodes=[0, 1, 2])
    counted = sum((Counter(found) for found in results.of(saving.count_messages)), Counter[str]())
    assert counted == {
        "GET /v1/status?brief=1": 3,
        "GET /v1/status?brief=1&opening=1": 3,
        "POST /v1/saves/SAVE": 3,
        **({} if compare_replicas else {f"PUT /v1/saves/SAVE/__{rank}_0.distcp": 1 for rank in range(3)}),
        "POST /v1/saves/SAVE/pull": 2,
        "PUT /v1/saves/SAVE/.manifest.json": 2,
        "POST /v1/saves/SAVE/commit": 3,
    }
    first, second, third = results.of(state.load).digests()
    assert first == second == third


def test_a_repeated_save_gathers_and_sends_next_to_nothing(cluster_of: ClusterOf) -> None:
    """Of 1,000 items, from the second save on: under 512 bytes of each rank after planning, and no collective more.

    What `dcp.save` returns is the whole metadata on every rank all the same, and what a stranger's reader finds is right.
    """
    cluster = cluster_of(2)
    counted = cluster.run(call(planning.count_exchanged, times=4, items=1000), nodes=[0, 1])
    for rank in counted:
        assert len({tuple(save["calls"]) for save in rank["saves"]}) == 1
        assert rank["saves"][0]["sent"] > 10_000
        assert all(save["sent"] < 512 for save in rank["saves"][1:])
        assert rank["returned"] == [rank["wanted"]] * 4
    assert counted[0]["wanted"] == counted[1]["wanted"]
    lying = {(node.root / f"step-{n}" / ".metadata").read_bytes() for node in cluster.nodes for n in range(4)}
    assert len(lying) == 1


def test_a_node_with_damaged_metadata_is_sent_it(cluster_of: ClusterOf) -> None:
    """A node whose copy of the last `.metadata` is damaged gets the bytes; the save holds on every node."""
    cluster = cluster_of(2)
    counted = cluster.run(call(planning.save_with_metadata_damaged, kinds=["plain"]), nodes=[0, 1])[0]
    assert counted == {"damaged": [1, 1], "intact": [1, 0]}
    for name in ("step-damaged", "step-intact"):
        assert len({(node.root / name / ".metadata").read_bytes() for node in cluster.nodes}) == 1


def test_a_load_reads_its_metadata_once(cluster_of: ClusterOf) -> None:
    """Every rank, the coordinator among them, opens `.metadata` once in a load, by its id and by "latest"."""
    cluster = cluster_of(2)
    calls = [
        call(state.save, kinds=["plain"], checkpoint_id="step-1"),
        call(planning.count_metadata_opened, kinds=["plain"], checkpoint_ids=["step-1", "latest"]),
    ]
    assert cluster.launch(calls, nodes=[0, 0, 1]).of(planning.count_metadata_opened) == [[1, 1]] * 3


def test_nodes_that_stay_are_told_once(cluster_of: ClusterOf) -> None:
    """In a job whose decisions are large: once more only after a rank has lost them. Every checkpoint loads."""
    save = call(sharing.save_as_in_a_large_job, kinds=["plain"], times=5, forgets_at=3)
    loads = [call(state.load, kinds=["plain"], checkpoint_id=f"step-{number}") for number in range(5)]
    results = cluster_of(2).launch([save, *loads], nodes=[0, 0, 1])
    for sizes in results.of(save)[1:]:
        assert [size * 3 < sizes[0] * 2 for size in sizes] == [False, True, True, False, True]
    for load in loads:
        first, _, third = results.of(load).digests()
        assert first == third
