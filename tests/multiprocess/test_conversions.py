"""Checkpoints of many ranks, some of whose nodes are gone, as one file; and a file as the state of many ranks."""

import pytest

from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import convert, state

KINDS = ["plain", "meshes", "fsdp2"]


@pytest.mark.fault
def test_one_file_of_what_survives_and_back_onto_ranks(cluster_of: ClusterOf) -> None:
    """Of three nodes one is lost: one process exports the whole state, shards by rows and columns included.

    Imported on a blank node, the file loads into sharded models on another number of ranks.
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
def test_torchs_own_reader_of_torch_files_feeds_a_save(cluster_of: ClusterOf) -> None:
    """`BroadcastingTorchSaveReader` and `DynamicMetaLoadPlanner` bring an exported file onto ranks, which save it.

    One rank alone reads that whole, without knowing what is in it, while the process group is alive.
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
