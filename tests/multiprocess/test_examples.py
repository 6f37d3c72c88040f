"""Each example does what its README says: it runs on real ranks, a node is lost in between, and the results agree."""

from pathlib import Path

import pytest
import torch

from tests.multiprocess.cluster import Call, call
from tests.multiprocess.conftest import ClusterOf
from tests.multiprocess.states import digests


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


@pytest.mark.parametrize("sharded", [False, True])
def test_fsdp1_goes_on_after_a_node_was_lost(cluster_of: ClusterOf, *, sharded: bool) -> None:
    """Full or sharded state dict: each loss after a loss of node 0 is that of the run before; one whole model per node."""
    cluster = cluster_of(2, quick_exit=True)
    kind = ["--sharded"] if sharded else []
    first = cluster.launch([example("fsdp1_fashion_mnist", "--epochs", "7", *kind)], nodes=[0, 1], ranks=2).of(0)[0]
    cluster.nodes[0].lose()
    again = example("fsdp1_fashion_mnist", "--epochs", "7", "--model-file", *kind)
    second = cluster.launch([again], nodes=[0, 1], ranks=2).of(0)[0]
    assert second[0] == "resuming from epoch-5 at epoch 5"
    assert second[1:] == [*first[5:], "model.pth: 8 tensors, the same when loaded back"]
    files = [torch.load(f"{node.root}-model.pth", weights_only=True) for node in cluster.nodes]
    assert digests(files[0]) == digests(files[1])
