"""Copies on peers: made as `ack` promises, on another node if a peer fails, and reported if none can take them."""

import os
from typing import Any

import pytest

from tests.agent.agents import wait_for
from tests.damage import flip
from tests.harness.cluster import Call, call
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import loss, peers

COUNT = 24  # MiB for each rank: several buffers


def shards(ranks: int) -> list[str]:
    return [f"__{rank}_0.distcp" for rank in range(ranks)]


def load(checkpoint_id: str, ranks: int) -> Call[Any]:
    return call(peers.load_pieces, checkpoint_id=checkpoint_id, count=COUNT, ranks=ranks)


@pytest.mark.parametrize("ack", mark_long(["local", "peer-memory"], keep=["local"]))
def test_copies_follow_a_save_that_did_not_wait_for_them(cluster_of: ClusterOf, ack: str) -> None:
    """With ack="local" and "peer-memory" the copies are on disk soon after the save. Afterwards one node holds
    everything.
    """
    cluster = cluster_of(2)
    calls = [
        call(peers.save_pieces, checkpoint_id="step-1", count=COUNT, ack=ack),
        call(peers.copies_made, checkpoint_id="step-1", names=shards(2), copies=2, within_s=20.0),
    ]
    assert cluster.launch(calls, nodes=[0, 1]).of(peers.copies_made) == [2, 2]
    cluster.nodes[0].lose()
    (found,) = cluster.run(load("step-1", 2), nodes=[1])
    assert found["same"]
    assert found["report"]["bytes_peer"] == 0
    assert found["report"]["bad_copies"] == []


@pytest.mark.fault
@pytest.mark.parametrize("damage", mark_long(["flip", "truncate", "remove"], keep=["flip"]))
def test_a_peers_copy_replaces_a_damaged_one(cluster_of: ClusterOf, damage: str) -> None:
    """A shard of the own store has a flipped bit, is short or missing: the bytes come from the peer.

    The report names a bad checksum. The agent notices a short or missing file by itself, and may replace it before the
    load.
    """
    cluster = cluster_of(2)
    cluster.launch([call(peers.save_pieces, checkpoint_id="step-1", count=COUNT)], nodes=[0, 1])
    path = cluster.nodes[0].disk / "step-1" / "__0_0.distcp"
    saved = path.read_bytes()
    if damage == "flip":
        flip(path)
    elif damage == "truncate":
        os.truncate(path, len(saved) - 1)
    else:
        path.unlink()
    results = cluster.run(load("step-1", 2), nodes=[0, 1])
    here, there = results
    assert here["same"]
    assert there["same"]
    is_mended = damage != "flip" and path.exists() and path.read_bytes() == saved
    assert here["report"]["bytes_peer"] > 0 or is_mended
    assert there["report"]["bytes_peer"] == 0
    assert bool(here["report"]["bad_copies"]) == (damage == "flip")
    assert all("expected CRC32C" in text for text in here["report"]["bad_copies"])


@pytest.mark.fault
def test_another_node_takes_the_copy_of_a_killed_agent(cluster_of: ClusterOf) -> None:
    """An agent is killed during a transfer: the save still makes every copy, within 30 s, and any node may be lost."""
    cluster = cluster_of(3)
    calls = [
        call(peers.save_while_an_agent_fails, checkpoint_id="step-1", victim=1, how="SIGKILL", count=COUNT),
        load("latest", 3),
        call(peers.copies_made, checkpoint_id="step-1", names=shards(3), copies=2, within_s=20.0),
        call(loss.staging_left, within_s=10.0),
    ]
    results = cluster.launch(calls, nodes=[0, 1, 2])
    assert all(
        outcome["seconds"] < 30 and "report" in outcome for outcome in results.of(peers.save_while_an_agent_fails)
    )
    assert all(outcome["report"]["copies_made"] == 2 for outcome in results.of(peers.save_while_an_agent_fails))
    assert all(found["same"] for found in results.of(peers.load_pieces))
    assert results.of(peers.copies_made) == [2, 2, 2]
    assert results.of(loss.staging_left) == [[], [], []]
    cluster.nodes[0].lose()
    assert all(found["same"] for found in cluster.run(load("step-1", 3), nodes=[0, 1, 2]))


@pytest.mark.fault
def test_a_stopped_agent_degrades_the_save_and_catches_up(cluster_of: ClusterOf) -> None:
    """No other node can take the copy: the save ends in time and names the missing copy, which is made later.

    The save also returns on the rank of the stopped agent, whose node cannot publish it.
    """
    cluster = cluster_of(2)
    calls = [
        call(peers.save_while_an_agent_fails, checkpoint_id="step-1", victim=1, how="SIGSTOP", count=COUNT),
        call(peers.let_go_on, victim=1),
        load("latest", 2),
        call(peers.copies_made, checkpoint_id="step-1", names=shards(2), copies=2, within_s=30.0),
    ]
    results = cluster.launch(calls, nodes=[0, 1])
    outcomes = results.of(peers.save_while_an_agent_fails)
    assert all(outcome["seconds"] < 60 and "report" in outcome for outcome in outcomes)
    assert outcomes[0]["report"]["copies_made"] == 1
    assert any("__0_0.distcp" in text for text in results.all_warnings)
    assert all(found["same"] for found in results.of(peers.load_pieces))
    assert results.of(peers.copies_made) == [2, 2]


@pytest.mark.fault
def test_a_missing_copy_fails_the_save_if_asked_to(cluster_of: ClusterOf) -> None:
    """With on_degraded="raise" every rank raises AckNotReached, and the previous checkpoint loads."""
    cluster = cluster_of(2)
    calls = [
        call(peers.save_pieces, checkpoint_id="step-1", count=COUNT),
        call(
            peers.save_while_an_agent_fails,
            checkpoint_id="step-2", victim=1, how="SIGSTOP", count=COUNT, on_degraded="raise",
        ),
        call(peers.let_go_on, victim=1),
        load("latest", 2),
    ]  # fmt: skip
    results = cluster.launch(calls, nodes=[0, 1])
    for outcome in results.of(peers.save_while_an_agent_fails):
        assert 0 in outcome["ranks"]
        assert "AckNotReached" in outcome["types"]
        assert "__0_0.distcp" in outcome["message"]
    assert all(
        found["same"] and found["report"]["checkpoint_id"] == "step-1" for found in results.of(peers.load_pieces)
    )


@pytest.mark.fault
def test_agents_that_get_sigterm_complete_a_begun_save(cluster_of: ClusterOf) -> None:
    """All agents get SIGTERM after the ranks registered the nodes: the save gets its copies, and then the agents exit."""
    cluster = cluster_of(2)
    calls = [call(peers.save_pieces_told_to_stop, checkpoint_id="step-1", count=COUNT), load("latest", 2)]
    results = cluster.launch(calls, nodes=[0, 1])
    assert [report["copies_made"] for report in results.of(peers.save_pieces_told_to_stop)] == [2, 2]
    assert all(
        found["same"] and found["report"]["checkpoint_id"] == "step-1" for found in results.of(peers.load_pieces)
    )
    logs = [node.root / ".agent" / "log" for node in cluster.nodes]
    wait_for(lambda: all("stopped serving" in log.read_text() for log in logs), 60.0, "the agents leave")
    cluster.nodes[0].lose()
    (found,) = cluster.run(load("step-1", 2), nodes=[1])
    assert found["same"]
