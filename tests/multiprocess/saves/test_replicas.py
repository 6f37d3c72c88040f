"""Saves name replicas that have diverged, and no others."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import wait_for
from tests.cli.commands import as_json, command
from tests.harness.cluster import Cluster, call
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import replicas

PARTS = 4
STATES = ["ddp", "hsdp", "hsdp1", "unwrapped"]


def _check_named(results: Sequence[dict[str, Any]]) -> int:
    """Each flip is named with its rank, and nothing else is. Returns the number of flips."""
    count = 0
    for number, named in enumerate(results[0]["named"]):
        flips = {name: rank for rank, one in enumerate(results) for name in one["flipped"][number]}
        by_name = {name: groups for name, _, groups in named}
        assert by_name.keys() == flips.keys(), f"round {number}"
        for name, groups in by_name.items():
            assert len(groups) == 2
            assert [flips[name]] in [list(group) for group in groups], (name, groups)
        count += len(flips)
    return count


def metrics_of(root: Path) -> str:
    """The /metrics of the node's agent, which a command has started."""
    endpoint = read_endpoint(LocalStore(root).agent_directory())
    assert endpoint is not None
    request = urllib.request.Request(
        f"http://127.0.0.1:{endpoint.port}/metrics", headers={"Authorization": f"Bearer {endpoint.token}"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(answer.read().decode())


def verified(cluster: Cluster) -> None:
    """The newest checkpoint passes `verify`, whatever its values are."""
    assert main(["verify", "--root", str(cluster.nodes[0].disk), "latest"]) in (ExitCode.OK, ExitCode.UNREACHABLE)


def _flip(cluster: Cluster, kind: str, rounds: int, *, is_async: bool) -> int:
    count, seed = 0, 100 if is_async else 0
    results = cluster.run(
        call(replicas.flip_and_save, kind=kind, seed=seed, rounds=rounds, parts=PARTS, is_async=is_async),
        nodes=[0, 1],
        ranks=2,
        timeout_s=3000,
    )
    count += _check_named(results)
    return count


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", STATES)
def test_each_flipped_bit_is_named_within_one_round_of_saves(cluster_of: ClusterOf, kind: str, is_async: bool) -> None:
    """For DDP, HSDP of FSDP1 and FSDP2, and plain tensors: the save names value and rank.

    Values that change after staging are not named.
    """
    cluster = cluster_of(2)
    assert _flip(cluster, kind, rounds=2, is_async=is_async) >= 4
    verified(cluster)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", STATES)
def test_a_thousand_flips_are_named(cluster_of: ClusterOf, kind: str, is_async: bool) -> None:
    """A thousand flips over the eight cases."""
    cluster = cluster_of(2)
    assert _flip(cluster, kind, rounds=28, is_async=is_async) >= 125


@pytest.mark.parametrize(("kind", "saves"), mark_long([("ddp", 12), ("hsdp", 500), ("ddp", 500)], keep=[("ddp", 12)]))
@pytest.mark.timeout(3600)
def test_equal_replicas_raise_no_warning(cluster_of: ClusterOf, kind: str, saves: int) -> None:
    """Each rank trains on other data."""
    cluster = cluster_of(2)
    found = cluster.run(
        call(replicas.train_and_save, kind=kind, saves=saves, parts=2), nodes=[0, 1], ranks=2, timeout_s=3000
    )
    assert found == [[], [], [], []]
    verified(cluster)


def test_objects_of_ranks_are_named_once(cluster_of: ClusterOf) -> None:
    """Objects that differ are named once. Equal ones are not, even if pickle makes other bytes of them.

    Names in `may_differ`, and a RankState, may differ.
    """
    cluster = cluster_of(2)
    first, second = cluster.run(call(replicas.save_objects), nodes=[0, 1])
    assert [[list(one) for one in found] for found in first["found"]] == [[["loader.position", True]], []]
    ((warning,), again) = first["warned"]
    assert "loader.position: saved from rank " in warning
    assert "RankState" in warning
    assert again == []
    assert second["warned"] == [[], []]
    # Pickle makes other bytes of equal sets: the buddy's file is no copy, and an agent makes one after the save.
    args = ["verify", "--root", str(cluster.nodes[0].disk), "latest"]
    wait_for(lambda: main(args) in (ExitCode.OK, ExitCode.UNREACHABLE) or None, 30, "each copy")


def test_a_finding_is_kept_with_the_checkpoint(cluster_of: ClusterOf) -> None:
    """Rank 0 warns, `show` and `status` print a line, and the agents count it in a metric."""
    cluster = cluster_of(3)
    results = cluster.run(
        call(replicas.save_diverged, checkpoint_id="run/step-1", compare_replicas="all"), nodes=[0, 1, 2]
    )
    (warning,) = results[0]["warned"]
    assert [one["warned"] for one in results[1:]] == [[], []]
    assert "weight: saved from rank " in warning
    assert "other bytes on " in warning
    root = cluster.nodes[0].disk
    shown = command("show", "run/step-1", "--root", root, "--start-agents").stdout
    assert "replicas: differed in weight: saved from rank " in shown
    _, document = as_json("show", "run/step-1", "--root", root)
    (kept,) = document["saves"][0]["divergences"]
    assert kept["fqn"] == "weight"
    metrics = metrics_of(cluster.nodes[0].disk)
    assert "replicated_ckpt_diverged_checkpoints 1" in metrics.splitlines()
    status = command("status", "--root", root, "--start-agents")
    assert status.returncode == ExitCode.OK
    assert "note: run/step-1: the save found replicas that differ: weight" in status.stdout
    verified(cluster)


def test_a_divergence_can_fail_the_save(cluster_of: ClusterOf) -> None:
    """With on_divergence="raise" every rank raises before the commit. A name in `may_differ` fails nothing."""
    cluster = cluster_of(2)
    options: dict[str, Any] = {"compare_replicas": "all", "on_divergence": "raise"}
    calls = [
        call(replicas.save_diverged, checkpoint_id="run/step-1", apart=False, **options),
        call(replicas.save_diverged, checkpoint_id="run/step-2", **options),
        call(replicas.save_diverged, checkpoint_id="run/step-3", may_differ=["weig*"], **options),
    ]
    results = cluster.launch(calls, nodes=[0, 1])
    alike, apart, allowed = (list(results.of(step)) for step in calls)
    assert alike == allowed == [{"warned": []}] * 2
    for outcome in apart:
        assert "ReplicasDiverged" in json.dumps(outcome)
        assert "weight" in json.dumps(outcome)
    _, listed = as_json("ls", "--root", cluster.nodes[0].disk, "--start-agents")
    assert sorted(one["checkpoint_id"] for one in listed["checkpoints"]) == ["run/step-1", "run/step-3"]
    verified(cluster)
