"""Each example does what its README says: it runs on real ranks, a node is lost in between, and the results agree."""

from pathlib import Path

from tests.multiprocess.cluster import Call, call
from tests.multiprocess.conftest import ClusterOf


def example(script: str, *arguments: str, leave_at: str | None = None) -> Call:
    return call("examples.run", script=f"{script}.py", arguments=arguments, leave_at=leave_at)


def test_a_job_that_is_told_to_leave_goes_on_bit_for_bit(cluster_of: ClusterOf, tmp_path: Path) -> None:
    """SIGTERM at one rank of four: all save that step and leave; a node is lost; then each loss is an undisturbed run's."""
    cluster, undisturbed = cluster_of(2, quick_exit=True), cluster_of(2, base=tmp_path / "undisturbed", quick_exit=True)
    arguments = ("--steps", "9", "--save-every", "100")
    everything = undisturbed.launch([example("checkpoint_manager", *arguments)], nodes=[0, 1], ranks=2).of(0)[0]
    first = cluster.launch([example("checkpoint_manager", *arguments, leave_at="step 4")], nodes=[0, 1], ranks=2).of(0)
    assert first[0] == [*everything[:5], "leaving after step 4"]
    assert first[1:] == [[], [], []]
    cluster.nodes[0].lose()
    second = cluster.launch([example("checkpoint_manager", *arguments)], nodes=[0, 1], ranks=2).of(0)[0]
    assert second[0].startswith("starting at step 4")
    assert second[1:] == everything[5:]
