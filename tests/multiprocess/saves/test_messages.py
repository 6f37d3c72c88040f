"""The requests of an undisturbed save to the agents, and the bytes that its ranks exchange."""

from collections import Counter

import pytest

from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import planning, saving, sharing, state


@pytest.mark.parametrize("compare_replicas", [16, None])
def test_an_undisturbed_save_sends_only_the_necessary_requests(
    cluster_of: ClusterOf, compare_replicas: int | None
) -> None:
    """Three nodes with one rank each: status, open, copies, decision and commit.

    `.metadata` of an unchanged layout is not sent: nodes use their own. Copies of a state that all ranks have are sent
    only if it is not compared.
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
    """Of 1,000 items each rank sends under 512 bytes after planning from the second save on, in as many collectives.

    `dcp.save` returns the whole metadata on every rank, and `.metadata` is the same on all nodes.
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


def test_a_node_with_damaged_metadata_gets_it_again(cluster_of: ClusterOf) -> None:
    """A node whose copy of the last `.metadata` is damaged gets the bytes. Afterwards all nodes have the same file."""
    cluster = cluster_of(2)
    counted = cluster.run(call(planning.save_with_metadata_damaged, kinds=["plain"]), nodes=[0, 1])[0]
    assert counted == {"damaged": [1, 1], "intact": [1, 0]}
    for name in ("step-damaged", "step-intact"):
        assert len({(node.root / name / ".metadata").read_bytes() for node in cluster.nodes}) == 1


def test_a_load_reads_its_metadata_once(cluster_of: ClusterOf) -> None:
    """Every rank, also the coordinator, opens `.metadata` once per load, by id and by "latest"."""
    cluster = cluster_of(2)
    calls = [
        call(state.save, kinds=["plain"], checkpoint_id="step-1"),
        call(planning.count_metadata_opened, kinds=["plain"], checkpoint_ids=["step-1", "latest"]),
    ]
    assert cluster.launch(calls, nodes=[0, 0, 1]).of(planning.count_metadata_opened) == [[1, 1]] * 3


def test_unchanged_nodes_of_a_decision_are_sent_once(cluster_of: ClusterOf) -> None:
    """In a job with large decisions a rank that has lost the last one gets it once more. Every checkpoint loads."""
    save = call(sharing.save_as_in_a_large_job, kinds=["plain"], times=5, forgets_at=3)
    loads = [call(state.load, kinds=["plain"], checkpoint_id=f"step-{number}") for number in range(5)]
    results = cluster_of(2).launch([save, *loads], nodes=[0, 0, 1])
    for sizes in results.of(save)[1:]:
        assert [size * 3 < sizes[0] * 2 for size in sizes] == [False, True, True, False, True]
    for load in loads:
        first, _, third = results.of(load).digests()
        assert first == third
