"""The agent of one node hangs: saves and loads wait one timeout for that node, whatever its ranks, and name the next
step.
"""

import os
import shutil
import signal

import pytest

from replicated_ckpt.core.layout import MANIFEST_NAME
from tests.harness.cluster import call
from tests.harness.processes import stop_process
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import errors, state
from tests.steps.errors import timed

pytestmark = pytest.mark.fault

LOAD_S, SAVE_S = 10.0, 15.0
KINDS = ["plain", "own"]


@pytest.mark.parametrize("ranks", mark_long([1, 4, 8], keep=[4]))
def test_a_stopped_agent_costs_its_node_one_timeout(cluster_of: ClusterOf, ranks: int) -> None:
    """All ranks of the node ask at once and none asks again: a load takes less than 10 s, a save less than 15 s."""
    cluster, counts = cluster_of(2), [1, ranks]
    saved = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1"), nodes=[0, 1], ranks=counts)
    pid = cluster.nodes[1].agent_pid()
    assert pid is not None
    stop_process(pid)
    try:
        load = timed(call(state.load, kinds=KINDS, checkpoint_id="step-1"))
        save = timed(call(state.save, kinds=KINDS, checkpoint_id="step-2", seed=7))
        results = cluster.launch([load, save], nodes=[0, 1], ranks=counts)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [found["value"]["digests"] for found in results.of(load)] == saved
    assert max(found["seconds"] for found in results.of(load)) < LOAD_S
    assert max(found["seconds"] for found in results.of(save)) < SAVE_S
    for rank in range(1, 1 + ranks):
        for texts in (results.warnings_of(load)[rank], results.warnings_of(save)[rank]):
            assert any(f"(pid {pid}) does not answer; it may be stopped" in text for text in texts), texts
            assert any(f"kill -CONT {pid}" in text for text in texts), texts
    assert not any("could not be started" in text for text in results.all_warnings)
    loaded = cluster.run(call(state.load, kinds=KINDS, checkpoint_id="step-2"), nodes=[0, 1], ranks=counts)
    assert loaded.digests() == [found["value"] for found in results.of(save)]


def test_a_save_that_ranks_elsewhere_cannot_read_is_not_chosen(cluster_of: ClusterOf) -> None:
    """Only one node has the newest checkpoint, and its agent hangs: all ranks load the checkpoint before it."""
    cluster = cluster_of(2)
    older = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1", seed=1), nodes=[0, 1])
    cluster.launch([call(state.save, kinds=KINDS, checkpoint_id="step-2", seed=2)], nodes=[0, 1])
    pid = cluster.nodes[0].agent_pid()
    assert pid is not None
    stop_process(pid)
    try:
        shutil.rmtree(cluster.nodes[1].disk / "step-2")
        results = cluster.run(timed(call(state.load, kinds=KINDS, checkpoint_id="latest")), nodes=[0, 1])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [found["value"]["digests"] for found in results] == older
    assert max(found["seconds"] for found in results) < LOAD_S


@pytest.mark.long
def test_files_without_a_manifest_count_where_no_agent_answers(cluster_of: ClusterOf) -> None:
    """The agent hangs and its manifest is damaged: the node's own ranks list and read its shards."""
    cluster = cluster_of(2)
    saved = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1", copies=1), nodes=[0, 1])
    pid = cluster.nodes[1].agent_pid()
    assert pid is not None
    stop_process(pid)
    try:
        (cluster.nodes[1].disk / "step-1" / MANIFEST_NAME).write_text("damaged")
        results = cluster.run(call(state.load, kinds=["own"], checkpoint_id="step-1"), nodes=[0, 1])
    finally:
        os.kill(pid, signal.SIGCONT)
    for loaded, before in zip(results.digests(), saved, strict=True):
        assert loaded == {name: digest for name, digest in before.items() if name.startswith("own/")}


@pytest.mark.long
def test_an_agent_that_goes_on_is_asked_again(cluster_of: ClusterOf) -> None:
    """An agent that hung for one save takes part in the same ranks' next save, without a warning."""
    cluster = cluster_of(2)
    cluster.launch([call(state.save, kinds=KINDS, checkpoint_id="step-1")], nodes=[0, 1])
    pid = cluster.nodes[1].agent_pid()
    assert pid is not None
    stop_process(pid)
    without, with_agent = (call(state.save, kinds=KINDS, checkpoint_id=name) for name in ("step-2", "step-3"))
    goes_on = call(errors.signal_agent, node=1, number=int(signal.SIGCONT))
    results = cluster.launch([without, goes_on, with_agent], nodes=[0, 1])
    assert results.warnings_of(without)[1]
    assert results.warnings_of(with_agent) == [[], []]


@pytest.mark.long
def test_a_starter_that_hangs_costs_one_timeout(cluster_of: ClusterOf) -> None:
    """A starting agent hangs: the ranks that wait for the start lock reuse the first rank's finding."""
    cluster = cluster_of(1, environment={"REPLICATED_CKPT_AGENT_IDLE_S": "60"})
    cluster.launch([call(state.save, kinds=KINDS, checkpoint_id="step-1")], nodes=[0], ranks=2)
    cluster.stop_agents()
    results = cluster.run(call(errors.save_with_lock_held, ranks=[0, 1, 2, 3]), nodes=[0], ranks=4)
    for found in results:
        assert found["types"] == ["AgentUnavailable"]
        assert "may be stopped" in found["message"]
        assert found["seconds"] < SAVE_S
