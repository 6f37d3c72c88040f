"""Two runs use one checkpoint name, and decisions arrive late. The agents are real; the test sends the ranks' requests
itself.
"""

import pytest

from replicated_ckpt.dcp.agreement.nodes import AgentCluster
from tests.agent.checkpoints import METADATA, replaced_saves, shard
from tests.fault.combined.test_two_histories import OTHER, PAIRS, Nodes, Save, is_whole_everywhere, nodes

__all__ = ["nodes"]
pytestmark = [pytest.mark.fault, pytest.mark.timeout(120)]
PAIR = {0: (0, 1), 1: (1, 0)}


def test_a_save_that_a_load_has_completed_first_is_acknowledged(nodes: Nodes) -> None:
    """A load completes the save just before its coordinator publishes: the coordinator's commit still succeeds."""
    nodes.start(0, 1)
    save = Save(nodes, 1, PAIR).decided_only()
    save.acquire_lock()
    nodes.meet()
    nodes.meet()
    assert nodes.store(1).catalog.find_manifest("last") is not None
    openers = [nodes.up[index].endpoint.local_address() for index in (0, 1)]
    cluster = AgentCluster(openers, nodes.store(0).node_id())
    committed = cluster.commit(save.save_id, METADATA, save.manifest.encode())
    save.release_lock()
    assert committed.error_by_node == {}
    assert {len(committed.holders_of(name)) for name in save.shards} == {2}


def test_a_save_replaces_another_runs_checkpoint_only_on_nodes_where_it_was_opened(nodes: Nodes) -> None:
    """Nodes that were away keep the other run's checkpoint, and report none of it as lost. Once it is removed there,
    they get the new save.
    """
    nodes.start(0, 1, 2, 3)
    foreign = Save(nodes, 9, PAIRS, lineage=OTHER).acknowledged()
    nodes.kill(2, 3)
    ours = Save(nodes, 1, PAIR)
    ours.open()
    assert nodes.call(1, "POST", ours.path, ours.opening())["named"] == OTHER
    ours.write()
    ours.decide()
    ours.publish(0, 1)
    nodes.start(2, 3)
    here = [nodes.store(index) for index in (0, 1)]
    nodes.wait_in_rounds(
        lambda: not any(replaced_saves(store) for store in here), "the removal of the replaced version"
    )
    away = {foreign.save_id: {shard(2), shard(3)}, ours.save_id: ours.shards}
    nodes.wait_in_rounds(lambda: nodes.versions() == away, "each version on its own nodes")
    nodes.wait_in_rounds(lambda: nodes.status(2)["protection"]["short"] == 2, "the report of the missing copies")
    assert nodes.status(2)["protection"]["lost"] == 0
    assert [store.catalog.save_id_of("last") for store in map(nodes.store, (2, 3))] == [foreign.save_id] * 2
    for index in (2, 3):
        named = {"checkpoint_id": "last", "save_id": foreign.save_id, "force": True}
        assert nodes.call(index, "POST", "/v1/remove", named)["is_removed"]
    nodes.wait_in_rounds(lambda: is_whole_everywhere(nodes, ours), "the new save on all nodes")


def test_a_directory_that_is_renamed_is_a_checkpoint_of_its_own(nodes: Nodes) -> None:
    """Two runs that never met used the same name. The operator renames one of the directories: it gets its copies under
    the new name, and no node refuses it.
    """
    nodes.start(0)
    foreign = Save(nodes, 9, {0: (0,)}, lineage=OTHER).acknowledged()
    nodes.kill(0)
    nodes.start(1, 2)
    ours = Save(nodes, 1, {0: (1, 2)}).acknowledged()
    nodes.start(0)
    nodes.wait_in_rounds(lambda: nodes.status(0)["protection"]["short"] == 1, "the shard that can have no second copy")
    (nodes.store(0).root / "last").rename(nodes.store(0).root / "other")
    nodes.wait_in_rounds(lambda: count_holders(nodes, "other") == 2, "a second copy under the new name")
    nodes.wait_in_rounds(lambda: nodes.status(0)["protection"]["is_complete"], "re-protection to be done")
    assert nodes.versions("last") == {ours.save_id: ours.shards}
    assert nodes.versions("other") == {foreign.save_id: foreign.shards}


def count_holders(nodes: Nodes, checkpoint_id: str) -> int:
    """The number of nodes that hold a shard of the checkpoint."""
    return sum(bool(nodes.store(index).catalog.look(checkpoint_id).shards) for index in nodes.up)
