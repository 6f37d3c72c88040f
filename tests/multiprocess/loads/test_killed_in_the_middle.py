"""A process is killed during a load: all ranks raise within seconds, with the next step."""

import pytest

from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import wait_for
from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import load_faults, peers

pytestmark = pytest.mark.fault

COUNT = 6  # MiB for each rank
LARGE = 16  # MiB for each rank, more than the ranks fetch ahead
SOON_S = 10.0
SLOW_COPIES = {"REPLICATED_CKPT_AGENT_COPY_MIB_PER_S": "0.001"}  # too slow for a copy between the two loads


def test_a_killed_rank_fails_the_load_on_all_other_ranks(cluster_of: ClusterOf) -> None:
    """Ranks far from the killed one in the collective raise too, although their neighbours live on.

    The agent removes what the killed rank had cached for its node.
    """
    cluster = cluster_of(2, environment={"REPLICATED_CKPT_AGENT_ROUND_EVERY_S": "1"})
    ranks, killed = 8, 3
    cluster.launch([call(peers.save_pieces, checkpoint_id="step-1", count=COUNT)], nodes=[0, 1], ranks=4)
    cluster.nodes[0].lose()
    load = call(
        load_faults.load_while_killed,
        checkpoint_id="step-1",
        count=COUNT,
        ranks=ranks,
        victim="rank",
        by_rank=killed,
        left=ranks - 1,
    )
    attempt = cluster.attempt([load], nodes=[0, 1], ranks=4, grace_s=6 * SOON_S)
    assert attempt.codes[killed] == -9
    for rank in set(range(ranks)) - {killed}:
        assert rank in attempt.of(load), attempt.failures[rank]
        outcome = attempt.of(load)[rank]
        assert outcome["seconds"] < SOON_S, outcome
        assert (outcome["types"], outcome["ranks"]) == (["RankFailed"], [killed]), outcome
        assert outcome["is_right"]
    wait_for(lambda: not list(cluster.nodes[0].disk.glob(".agent/cache-*")), 30.0, "a round that removes its cache")


def test_an_agent_that_is_killed_is_named_as_not_reached(cluster_of: ClusterOf) -> None:
    """The killed agent's node has the last copy. Every rank raises with the hint to bring that node back, and the next
    load works.
    """
    cluster = cluster_of(2, environment=SLOW_COPIES)
    cluster.launch([call(peers.save_pieces, checkpoint_id="step-1", count=LARGE)], nodes=[0, 1], ranks=2)
    cluster.nodes[0].lose()
    arguments = {"checkpoint_id": "step-1", "count": LARGE, "ranks": 4, "victim": "agent 1", "by_rank": 0, "left": 4}
    results = cluster.run(call(load_faults.load_twice, arguments=arguments), nodes=[0, 1], ranks=2)
    there = LocalStore(cluster.nodes[1].disk).read_node_id()
    for broken, whole in results:
        assert broken["seconds"] < SOON_S, broken
        assert broken["types"] == ["ShardLost"], broken
        assert broken["is_right"]
        assert f"node {there}: not reached" in broken["message"]
        assert broken["hint"].startswith(f"Bring back node {there}, with the store, and load again")
        assert whole["same"]
