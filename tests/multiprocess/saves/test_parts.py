"""Saves in parts: each rank writes one file for the weights and one for the optimizer, and stock torch reads both."""

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.manifest import decode_manifest
from tests.harness.cluster import call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import parts

EVERYTHING = ("model", "optim", "step")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_each_part_has_a_file_and_loads(cluster_of: ClusterOf, is_async: bool) -> None:
    """Two saves under one id use different file numbers. The weights load after the optimizer's files are deleted."""
    cluster = cluster_of(2)
    for number in range(2):
        saved = call(parts.save, name="run/step-1", number=number, is_async=is_async)
        files = cluster.run(saved, nodes=[0, 1])
        # No entry is in the plans of two ranks, so the small RankState stays in the file of the weights.
        assert files == [[f"__{rank}_{4 * number + part}.distcp" for part in (0, 1)] for rank in (0, 1)]
        for node in cluster.nodes:
            sizes = {path.name: path.stat().st_size for path in (node.disk / "run" / "step-1").glob("*.distcp")}
            assert sizes.keys() == {name for names in files for name in names}
            assert all(size > (2 if name[-8] in "15" else 1) * 4 * parts.WORDS for name, size in sizes.items())
    assert cluster.run(call(parts.load, name="run/step-1", number=1, parts=EVERYTHING), nodes=[0, 1]) == [[], []]
    manifest = decode_manifest((cluster.nodes[0].disk / "run/step-1/.manifest.json").read_bytes(), "test")
    assert manifest.weights is not None
    assert manifest.weights.dropped == ("optim",)
    for node in cluster.nodes:
        for path in (node.disk / "run" / "step-1").glob("*_5.distcp"):
            path.unlink()
    weights = call(parts.load, name="run/step-1", number=1, parts=("model", "step"), is_stock=True)
    assert cluster.run(weights, nodes=[0, 1]) == [[], []]
    ours = call(parts.load, name="run/step-1", number=1, parts=("model", "step"))
    assert cluster.run(ours, nodes=[0, 1]) == [[], []]
    target = cluster.base / "weights"
    words = ["export", "run/step-1", str(target), "--root", str(cluster.nodes[0].disk), "--to", "safetensors"]
    assert main([*words, "--include", "model.*"]) == ExitCode.OK, "the export needs no file of the optimizer"
    gone = [main(["verify", "--root", str(node.disk), "run/step-1"]) for node in cluster.nodes]
    assert all(code != ExitCode.OK for code in gone)
