"""Checkpoints of many ranks are exported to one file after a node loss, and one file is loaded on many ranks."""

import pytest

from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import convert, state

KINDS = ["plain", "meshes", "fsdp2"]


@pytest.mark.fault
def test_survivors_export_one_file_and_ranks_load_it_again(cluster_of: ClusterOf) -> None:
    """One of three nodes is lost: one process exports the whole state, with tensors sharded by rows and by columns.

    The file is imported on a blank node. A different number of ranks then loads it into sharded models.
    """
    cluster = cluster_of(3)
    saved = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1"), nodes=[0, 1, 2])
    cluster.nodes[0].lose()
    to = str(cluster.base / "model.pth")
    export = call(convert.export, checkpoint_id="step-1", to=to)
    exported = cluster.run(export, nodes=[1], launcher="single")
    assert exported == [saved.agreed()]
    cluster.launch([call(convert.bring_in, path=to, checkpoint_id="step-2")], nodes=[0], launcher="single")
    loaded = cluster.run(call(state.load, kinds=KINDS, checkpoint_id="step-2"), nodes=[0, 1], ranks=[1, 2])
    assert loaded.digests() == [saved.agreed()] * 3


@pytest.mark.long
def test_torchs_broadcasting_reader_feeds_a_save(cluster_of: ClusterOf) -> None:
    """`BroadcastingTorchSaveReader` and `DynamicMetaLoadPlanner` load an exported file on all ranks, which then save
    it.

    In the same process group, one rank alone reads the new checkpoint without knowing its contents.
    """
    cluster = cluster_of(2)
    saved = cluster.run(call(state.save, kinds=["large"], checkpoint_id="step-1"), nodes=[0, 1])
    to = str(cluster.base / "model.pth")
    cluster.launch([call(convert.export, checkpoint_id="step-1", to=to)], nodes=[1], launcher="single")
    calls = [
        call(convert.broadcast, path=to, kind="large", checkpoint_id="step-2"),
        call(state.load, kinds=["large"], checkpoint_id="step-2"),
        call(convert.read_alone, checkpoint_id="step-2", rank=1),
    ]
    loaded = cluster.launch(calls, nodes=[0, 1])
    assert loaded.of(convert.broadcast).agreed() == saved.agreed()
    assert loaded.of(state.load).digests() == [saved.agreed()] * 2
    assert loaded.of(convert.read_alone) == [None, saved.agreed()]
