"""A run whose older checkpoints keep only the model: what loads, what is refused, and how many bytes are left."""

import shutil
from pathlib import Path

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.remove import slim
from tests.agent.checkpoints import findings
from tests.harness.cluster import Cluster, call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import slimmed

SIZE = 200_000
STEPS = list(range(1, 11))


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.distcp"))


def check_directories(cluster: Cluster) -> None:
    for node in cluster.nodes:
        assert findings(LocalStore(node.disk)) == []
    assert main(["verify", "--root", str(cluster.nodes[0].disk)]) in (ExitCode.OK, ExitCode.UNREACHABLE)


def test_older_checkpoints_keep_the_model(cluster_of: ClusterOf) -> None:
    """Of ten checkpoints the newest two stay full. The model of each loads, also with stock torch; the optimizer of
    two.
    """
    cluster = cluster_of(2)
    save = call(slimmed.save_all, steps=STEPS, size=SIZE, keep_last=10, full_last=2)
    full = call(slimmed.await_full, steps=[9, 10], within_s=40.0)
    weights = call(slimmed.load_weights, steps=STEPS, size=SIZE)
    newest, refused = (call(slimmed.load_all, of=step, size=SIZE) for step in (9, 8))
    by_one = call(slimmed.load_all, of=3, size=SIZE, only_on=1)
    results = cluster.launch([save, full, weights, newest, refused, by_one], nodes=[0, 1])
    assert results.of(full).agreed() == [9, 10]
    assert results.of(weights).agreed() == [True] * 10
    assert results.of(newest).agreed() is True
    assert results.of(refused).agreed() == results.of(by_one).agreed() == [["OptimizerDropped", "step-10"]]
    check_directories(cluster)
    for node in cluster.nodes:
        slim_bytes = bytes_on_disk(node.disk)
        full_bytes = bytes_on_disk(node.disk / "step-10")
        assert slim_bytes < full_bytes * (2 + 8 / 3) * 1.01
    for step in (1, 10):
        stock = call(
            slimmed.load_with_stock_torch, folder=str(cluster.nodes[0].disk / f"step-{step}"), of=step, size=SIZE
        )
        assert cluster.run(stock, nodes=[0, 1]).agreed() is True


def test_a_checkpoint_slimmed_on_one_node_loads_from_the_other(cluster_of: ClusterOf) -> None:
    """While the other node has the whole optimizer, everything loads.

    Afterwards only the weights load, from both nodes or from either alone.
    """
    cluster = cluster_of(2)
    save = call(slimmed.save_all, steps=[1, 2], size=SIZE, keep_last=10, full_last=None)
    cluster.launch([save], nodes=[0, 1])
    cluster.stop_agents()
    first, second = (LocalStore(node.disk) for node in cluster.nodes)
    save_id = first.catalog.manifest("step-1").save_id
    assert slim(first.root, "step-1", save_id)
    weights = call(slimmed.load_weights, steps=[1], size=SIZE)
    everything = call(slimmed.load_all, of=1, size=SIZE)
    results = cluster.launch([weights, everything], nodes=[0, 1])
    assert results.of(weights).agreed() == [True]
    assert results.of(everything).agreed() is True
    cluster.stop_agents()
    (second.root / "step-1" / "__0_1.distcp").unlink()  # now no node has the whole optimizer
    results = cluster.launch([weights, everything], nodes=[0, 1])
    assert results.of(weights).agreed() == [True]
    assert results.of(everything).agreed() == [["OptimizerDropped", "step-2"]]
    cluster.stop_agents()
    assert slim(second.root, "step-1", save_id)
    check_directories(cluster)
    shutil.rmtree(second.root / "step-1")
    cluster.nodes[1].lose()
    results = cluster.launch([weights], nodes=[0, 1])
    assert results.of(weights).agreed() == [True]
