"""Nodes that lose the network, each in its own network namespace: a save continues without them, and they catch up
later.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.stores.peer.client import PROGRESS_TIMEOUT_S
from tests.harness.cluster import Call, Cluster, call
from tests.harness.launch import COLLECTIVE_TIMEOUT_ENV
from tests.harness.network import AGENTS, RANKS, Network, network_of, why_no_network
from tests.steps import async_saves, fault, peers
from tests.steps import network as network_steps
from tests.steps.errors import timed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

COUNT = 24  # MiB of each rank, more than one buffer
MIDDLE = f"rank.writing@{COUNT // 2}"
LOAD_S = 10.0
MADE_UP_WITHIN_S = 60.0
LITTER_WITHIN_S = 30.0
COPIED_MIB = 8
LITTER = call(fault.litter, within_s=LITTER_WITHIN_S)


@dataclass(frozen=True)
class Site:
    cluster: Cluster
    network: Network

    def change(self, how: str, *nodes: int) -> Call[Any]:
        return call(network_steps.change, network=self.network.name, how=how, nodes=list(nodes))

    def save_while(self, how: str, *nodes: int, point: str) -> Call[Any]:
        """A save of step-2 during which the network changes, at a failpoint of rank 0."""
        return call(
            network_steps.save_while_cut_off,
            checkpoint_id="step-2",
            count=COUNT,
            network=self.network.name,
            how=how,
            nodes=list(nodes),
            point=point,
        )


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A cluster in a network of its own. It has three nodes, or as many as the test's parameter says."""
    if why := why_no_network():
        pytest.skip(why)
    rounds = {"REPLICATED_CKPT_AGENT_ROUND_EVERY_S": "2"}
    bare = Cluster(tmp_path / "cluster", getattr(request, "param", 3), environment=rounds, quick_exit=True)
    with network_of(bare) as network, bare as cluster:
        yield Site(cluster, network)


def save(checkpoint_id: str, **writer: Any) -> Call[Any]:
    return call(peers.save_pieces, checkpoint_id=checkpoint_id, count=COUNT, **writer)


def load(checkpoint_id: str, ranks: int) -> Call[Any]:
    return call(peers.load_pieces, checkpoint_id=checkpoint_id, count=COUNT, ranks=ranks)


def copies_made(checkpoint_id: str, ranks: int, number: int = 0) -> Call[Any]:
    names = [f"__{rank}_{number}.distcp" for rank in range(ranks)]
    return call(peers.copies_made, checkpoint_id=checkpoint_id, names=names, copies=2, within_s=MADE_UP_WITHIN_S)


@pytest.mark.long
@pytest.mark.parametrize("site", [2], indirect=True)
def test_copies_go_over_the_interface_of_the_agents_addresses(site: Site) -> None:
    """Ranks and agents use different networks: the copies of an asynchronous save go over the network of the agents."""
    sent = partial(site.network.sent_bytes, 0)
    before = sent(RANKS), sent(AGENTS)
    save = call(async_saves.footprint_of_saves, saves=1, mebibytes=COPIED_MIB)
    site.cluster.launch([save], nodes=[0, 1])
    assert sent(AGENTS) - before[1] > COPIED_MIB << 20
    assert sent(RANKS) - before[0] < COPIED_MIB << 19


def assert_whole_everywhere(site: Site, checkpoint_id: str, *, number: int = 0) -> None:
    """The checkpoint loads on all nodes, no staged files are left, and it also loads after the coordinator's node is
    lost. `number`: the number in its shards' names.
    """
    nodes = len(site.cluster.nodes)
    made, latest = copies_made(checkpoint_id, nodes, number), load("latest", nodes)
    results = site.cluster.launch([made, latest, LITTER], nodes=range(nodes), timeout_s=150)
    assert min(results.of(made)) >= 2
    assert all(found["same"] and found["report"]["checkpoint_id"] == checkpoint_id for found in results.of(latest))
    assert results.of(LITTER) == [[]] * nodes
    assert all(checkpoint_id in node.checkpoints() for node in site.cluster.nodes)
    site.cluster.nodes[0].lose()
    survivors = site.cluster.run(load(checkpoint_id, nodes), nodes=range(1, nodes))
    assert all(found["same"] for found in survivors)


@pytest.mark.long
@pytest.mark.parametrize("point", ["coordinator.placed", MIDDLE])
def test_another_node_takes_the_copy_of_an_unreachable_buddy(site: Site, point: str) -> None:
    """The link between the coordinator and its buddy is down: the third node takes the copy, and the save succeeds."""
    cut_off = site.save_while("cut_between", 0, 1, point=point)
    calls = [save("step-1"), cut_off, site.change("heal_between", 0, 1)]
    results = site.cluster.launch(calls, nodes=[0, 1, 2], timeout_s=100)
    assert [outcome["report"]["copies_made"] for outcome in results.of(cut_off)] == [2, 2, 2]
    assert any("step-2" in text and "not published" in text for text in results.all_warnings)
    assert_whole_everywhere(site, "step-2")


@pytest.mark.long
def test_a_store_that_is_cut_off_after_the_transfer_publishes_later(site: Site) -> None:
    """The link goes down once every copy is made. The save succeeds with a warning that names the node that has not
    published, and that node publishes later.
    """
    cut_off = site.save_while("cut_store", 1, point="coordinator.accounted")
    results = site.cluster.launch([save("step-1"), cut_off, site.change("heal", 1)], nodes=[0, 1, 2], timeout_s=100)
    for outcome in results.of(cut_off):
        assert "report" in outcome, outcome
    assert any("step-2" in text and "not published" in text for text in results.all_warnings)
    assert_whole_everywhere(site, "step-2")


@pytest.mark.long
@pytest.mark.parametrize("site", [2], indirect=True, ids=["2nodes"])
def test_a_shard_that_only_an_unreachable_store_has_is_not_acknowledged(site: Site) -> None:
    """Only the unreachable node has the shard: every rank gets AckNotReached, and the save is completed once the link
    is back.
    """
    cut_off = site.save_while("cut_store", 1, point=MIDDLE)
    results = site.cluster.launch([save("step-1"), cut_off, site.change("heal", 1)], nodes=[0, 1], timeout_s=100)
    for outcome in results.of(cut_off):
        assert outcome["types"] == ["AckNotReached"]
        assert "__1_0.distcp" in outcome["message"]
        assert "publishes the save once it reaches a node that has" in outcome["message"]
    assert_whole_everywhere(site, "step-2")


@pytest.mark.long
def test_a_store_that_is_cut_off_before_the_save_takes_part_later(site: Site) -> None:
    """No node can publish the shard of the unreachable store: every rank gets AckNotReached. The save is completed once
    the link is back.
    """
    cut_off, latest = site.save_while("cut_store", 1, point="rank.registered"), load("latest", 3)
    calls = [save("step-1"), cut_off, site.change("heal", 1), latest]
    results = site.cluster.launch(calls, nodes=[0, 1, 2], timeout_s=150)
    # All shards have a random number: the save was opened without knowing which numbers this node has used.
    (number,) = {
        int(found) for outcome in results.of(cut_off) for found in re.findall(r"__1_(\d+)\.", outcome["message"])
    }
    for outcome in results.of(cut_off):
        assert outcome["types"] == ["AckNotReached"]
        assert f"__1_{number}.distcp" in outcome["message"]
        assert f"__0_{number}.distcp" not in outcome["message"]
        assert outcome["seconds"] < 60
    assert any("did not answer when the save began" in text for text in results.all_warnings)
    assert all(found["same"] and found["report"]["checkpoint_id"] == "step-2" for found in results.of(latest))
    assert_whole_everywhere(site, "step-2", number=number)


def test_a_node_that_vanishes_during_a_save_costs_that_save_only(site: Site) -> None:
    """The ranks and the store of one node become unreachable together. The other nodes load the old checkpoint, and
    save again without that node.
    """
    site.cluster.launch([save("step-1")], nodes=[0, 1, 2])
    site.cluster.environment[COLLECTIVE_TIMEOUT_ENV] = "6"
    cut_off = site.save_while("cut", 1, point=MIDDLE)
    attempt = site.cluster.attempt([cut_off], nodes=[0, 1, 2], timeout_s=100, grace_s=30.0, awaited=[0, 2])
    del site.cluster.environment[COLLECTIVE_TIMEOUT_ENV]
    assert 0 not in attempt.codes, attempt
    for rank in (0, 2):
        found = attempt.of(cut_off)[rank]
        assert found["types"] == ["RankFailed"], found
        assert "no rank is known to have ended" in found["message"], found
        assert "its host has no power or network" in found["hint"], found
    latest = load("latest", 3)
    results = site.cluster.launch([latest, save("step-2"), LITTER], nodes=[0, 2], timeout_s=100)
    assert all(found["same"] and found["report"]["checkpoint_id"] == "step-1" for found in results.of(latest))
    assert results.of(LITTER) == [[], []]
    site.network.heal(1)
    latest = load("latest", 2)
    results = site.cluster.launch([latest, LITTER], nodes=[0, 1, 2], timeout_s=100)
    assert all(found["same"] and found["report"]["checkpoint_id"] == "step-2" for found in results.of(latest))
    assert results.of(LITTER) == [[], [], []]


def test_a_load_succeeds_without_a_node_that_is_cut_off(site: Site) -> None:
    """The remaining nodes load every byte within the time limit, although the unreachable node does not answer."""
    site.cluster.launch([save("step-1")], nodes=[0, 1, 2])
    site.network.cut(1)
    results = site.cluster.run(load("latest", 3), nodes=[0, 2], timeout_s=60)
    assert all(found["same"] for found in results)


def test_a_store_that_is_cut_off_costs_a_load_one_time_out(site: Site) -> None:
    """The ranks of the unreachable store are alive and read their own disk. The others ask its agent once, so the load
    ends within 10 s.
    """
    loaded = timed(load("step-1", 3))
    calls = [save("step-1", copies=3), site.change("cut_store", 1), loaded, site.change("heal", 1)]
    results = site.cluster.launch(calls, nodes=[0, 1, 2], timeout_s=60)
    assert all(found["value"]["same"] for found in results.of(loaded))
    assert max(found["seconds"] for found in results.of(loaded)) < LOAD_S
    assert [found["value"]["report"]["bytes_peer"] for found in results.of(loaded)] == [0, 0, 0]


def test_a_source_that_is_cut_off_in_the_middle_of_a_load_is_replaced(site: Site) -> None:
    """A blank node reads from two other nodes, and one of them becomes unreachable: the other one provides the
    remaining bytes after one time-out.

    All shards that were being read from the lost source time out in parallel, and each of them once.
    """
    site.cluster.launch([save("step-1", copies=3)], nodes=[0, 1, 2])
    site.cluster.nodes[2].lose()
    load = call(
        network_steps.load_while_cut_off,
        checkpoint_id="step-1",
        count=COUNT,
        ranks=3,
        network=site.network.name,
        node=1,
        by_rank=2,
    )
    results = site.cluster.run(load, nodes=[0, 1, 2], timeout_s=100)
    assert all(found["same"] for found in results)
    assert results[2]["report"]["bytes_peer"] > 0
    given_up = results[2]["given_up"]
    names = [line.split()[0] for line, _ in given_up]
    assert names
    assert len(set(names)) == len(names)
    moments = [unix_s for _, unix_s in given_up]
    assert max(moments) - min(moments) < PROGRESS_TIMEOUT_S
