"""A checkpoint loads in worlds of other sizes and with other shardings."""

import tempfile
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.harness.cluster import Launcher, call
from tests.marks import long, mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import state, unused

KINDS = ["plain", "large", "meshes", "ddp", "fsdp1", "fsdp2"]


WORLDS = [(1, 2), (2, 1), (2, 3), (3, 2), (4, 3)]


@pytest.mark.parametrize(("save_nodes", "load_nodes"), mark_long(WORLDS, keep=[(2, 3)]))
def test_every_kind_of_state_moves_to_another_world(cluster_of: ClusterOf, save_nodes: int, load_nodes: int) -> None:
    """M nodes load bit for bit what N nodes saved. If M is smaller, the other nodes are lost; if larger, the new ones
    are blank.
    """
    cluster = cluster_of(max(save_nodes, load_nodes))
    saved = cluster.run(call(state.save, kinds=KINDS, checkpoint_id="step-1"), nodes=range(save_nodes))
    for gone in cluster.nodes[load_nodes:]:
        gone.lose()
    loaded = cluster.launch([call(state.load, kinds=KINDS, checkpoint_id="step-1")], nodes=range(load_nodes))
    assert loaded.of(state.load).digests() == [saved.agreed()] * load_nodes
    assert loaded.all_warnings == []


@pytest.mark.parametrize(("ranks", "launcher"), [(2, "direct"), long(4, "torchrun")])
def test_two_nodes_lose_one_and_go_on_in_any_world(cluster_of: ClusterOf, ranks: int, launcher: Launcher) -> None:
    """FSDP2 with AdamW, several ranks per node, also under torchrun: after node 1 is lost, worlds of any size load the
    same bits.
    """
    kinds = ["fsdp2", "plain", "large"]
    load = call(state.load, kinds=kinds, checkpoint_id="latest")
    alone = call(state.load, kinds=["fsdp2:unwrapped", "plain", "large"], checkpoint_id="step-10")
    cluster = cluster_of(2)
    saved = cluster.run(
        call(state.save, kinds=kinds, checkpoint_id="step-10"), nodes=[0, 1], ranks=ranks, launcher=launcher
    ).agreed()
    cluster.nodes[1].lose()
    assert cluster.run(load, nodes=[0], ranks=ranks, launcher=launcher).digests() == [saved] * ranks
    assert cluster.run(load, nodes=[0], ranks=3).digests() == [saved] * 3
    assert cluster.run(alone, nodes=[0], launcher="single").digests() == [saved]
    assert cluster.run(load, nodes=[0, 1], ranks=ranks).digests() == [saved] * 2 * ranks


@pytest.mark.parametrize("copies", mark_long([1, 2, 3], keep=[2]))
def test_unequal_ranks_per_node(cluster_of: ClusterOf, copies: int) -> None:
    """Nodes of 2 + 1 ranks save and nodes of 1 + 2 ranks load, with any number of copies. Each rank's own data loads
    too.
    """
    cluster = cluster_of(2)
    kinds = ["plain", "fsdp2", "own"]
    saved = cluster.run(
        call(state.save, kinds=kinds, checkpoint_id="step-1", copies=copies), nodes=[0, 1], ranks=[2, 1]
    )
    shared = {name: value for name, value in saved[0].items() if not name.startswith("own/")}
    calls = [
        call(state.load, kinds=kinds[:2], checkpoint_id="step-1"),
        call(state.load_integers, sizes={f"rank{rank}": 1000 for rank in range(3)}, checkpoint_id="step-1", kind="own"),
    ]
    loaded = cluster.launch(calls, nodes=[0, 1], ranks=[1, 2])
    assert loaded.of(state.load).digests() == [shared] * 3
    assert loaded.of(state.load_integers).agreed() == {f"rank{rank}": rank + 1 for rank in range(3)}


def test_models_parallel_in_every_way_survive_a_node(cluster_of: ClusterOf) -> None:
    """HSDP of FSDP1 and FSDP2, tensor parallel and both combined: 2 x 2 ranks save, a node is lost, and the other
    loads.
    """
    kinds = ["hsdp1", "tensor_parallel", "two_dimensional"]
    if torch.__version__ >= TorchVersion("2.13"):  # on CPU with gloo, FSDP2 of torch 2.7 cannot train with HSDP
        kinds.append("hsdp")
    load = call(state.load, kinds=kinds, checkpoint_id="step-1")
    cluster = cluster_of(2)
    saved = cluster.run(call(state.save, kinds=kinds, checkpoint_id="step-1"), nodes=[0, 1], ranks=2).agreed()
    cluster.nodes[0].lose()
    assert cluster.run(load, nodes=[1], ranks=2).digests() == [saved] * 2


@pytest.mark.long
def test_a_part_of_a_checkpoint_goes_into_a_larger_state(cluster_of: ClusterOf) -> None:
    """With `allow_partial_load` entries that are new in the model keep their values. Without it every rank raises."""
    cluster = cluster_of(2)
    saved = cluster.run(call(state.save, kinds=["fsdp2"], checkpoint_id="step-1"), nodes=[0, 1]).agreed()
    allowed, refused = (
        call(state.load_partly, kinds=["fsdp2", "meshes"], checkpoint_id="step-1", is_allowed=is_allowed)
        for is_allowed in (True, False)
    )
    results = cluster.launch([allowed, refused], nodes=[0, 1])
    for result in results.of(allowed):
        assert {name: value for name, value in result["after"].items() if name.startswith("fsdp2/")} == saved
        assert {name: value for name, value in result["after"].items() if name.startswith("meshes/")} == result["new"]
    for result in results.of(refused):
        assert result["message"] == "Missing key in checkpoint state_dict: meshes.rows."


@pytest.mark.long
def test_swapped_ranks_read_their_own_stores(cluster_of: ClusterOf) -> None:
    """With two copies on two nodes, swapped ranks load the same values and read nothing over the network."""
    cluster = cluster_of(2)
    kinds = ["plain", "fsdp2"]
    saved = cluster.run(call(state.save, kinds=kinds, checkpoint_id="step-1"), nodes=[0, 1])
    loaded = cluster.run(call(state.load, kinds=kinds, checkpoint_id="step-1"), nodes=[1, 0])
    assert loaded.digests() == saved
    assert [result["report"]["bytes_peer"] for result in loaded] == [0, 0]
    assert all(result["report"]["bytes_local"] > 0 for result in loaded)


@pytest.mark.long
def test_permuted_nodes_without_copies_fetch_from_each_other(cluster_of: ClusterOf) -> None:
    """With one copy, ranks that moved to other nodes fetch their bytes from the nodes that saved them."""
    cluster = cluster_of(3)
    kinds = ["large", "meshes"]
    saved = cluster.run(call(state.save, kinds=kinds, checkpoint_id="step-1", copies=1), nodes=[0, 1, 2])
    loaded = cluster.run(call(state.load, kinds=kinds, checkpoint_id="step-1"), nodes=[2, 0, 1])
    assert loaded.digests() == saved
    assert sum(result["report"]["bytes_peer"] for result in loaded) > 0


@pytest.mark.long
def test_stores_in_memory(cluster_of: ClusterOf) -> None:
    """With a root on tmpfs, a node that lost its store loads everything from its buddy."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="replicated-ckpt-test-") as folder:
        cluster = cluster_of(2, base=Path(folder))
        saved = cluster.run(call(state.save, kinds=["large"], checkpoint_id="step-1"), nodes=[0, 1])
        cluster.nodes[0].lose()
        loaded = cluster.run(call(state.load, kinds=["large"], checkpoint_id="step-1"), nodes=[0, 1])
        cluster.close()
    assert loaded.digests() == saved


UNUSED = [("fsdp2", 2, "fsdp2", 2), ("fsdp2", 2, "fsdp2", 3), ("fsdp2", 3, "alone", 1), ("alone", 1, "fsdp2", 2)]
UNUSED += [("ddp", 2, "fsdp2", 2), ("fsdp1", 2, "fsdp1", 2), ("fsdp1", 2, "ddp", 3)]


@pytest.mark.parametrize(("kind", "ranks", "other", "others"), mark_long(UNUSED, keep=UNUSED[1:2]))
def test_parameters_without_a_gradient_stay_without_state(
    cluster_of: ClusterOf, kind: str, ranks: int, other: str, others: int
) -> None:
    """An unused head and a frozen one have no optimizer state after a load either. Everything else loads bit for bit."""
    cluster = cluster_of(1)
    saved = cluster.run(call(unused.save_unused, kind=kind), nodes=[0], ranks=ranks).agreed()
    assert not [name for name in saved if "state.heads.used" not in name and ".state." in name]
    restored = cluster.launch([call(unused.restore_unused, kind=other)], nodes=[0], ranks=others)
    assert restored.of(unused.restore_unused).agreed() == {"first": saved, "second": saved}
    assert restored.all_warnings == []


@pytest.mark.parametrize(("kind", "ranks", "other", "others"), mark_long(UNUSED[:5], keep=UNUSED[1:2]))
def test_a_framework_restores_the_state_of_frozen_parameters(
    cluster_of: ClusterOf, kind: str, ranks: int, other: str, others: int
) -> None:
    """A head that is frozen in the loading program gets its saved optimizer state, as with stock `load_state_dict`."""
    cluster = cluster_of(1)
    saved = cluster.run(call(unused.save_as_a_framework, kind=kind), nodes=[0], ranks=ranks).agreed()
    assert [name for name in saved if ".state.heads.unused" in name]
    restored = cluster.run(call(unused.restore_as_a_framework, kind=other), nodes=[0], ranks=others)
    assert restored.agreed() == saved
