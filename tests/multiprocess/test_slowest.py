"""`replicated-ckpt report` names a slow rank or node, from the reports that ranks keep of real saves and loads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.cli.checkpoints.report import choose_newest
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.core.timing import LATE, Slowest, find_slowest
from replicated_ckpt.node.state.rank_reports import KEPT, RankReports
from replicated_ckpt.stores.local.store import LocalStore
from tests.cli.commands import as_json, command
from tests.harness.cluster import Cluster, call
from tests.marks import long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import reports as reports_steps

HOWS = ("serialise", "fsync", LATE, "agent", "read")


def find(stores: Sequence[LocalStore], checkpoint_id: str, how: str) -> Slowest | None:
    found = [report for store in stores for report in RankReports(store).read(checkpoint_id)]
    return find_slowest(choose_newest(found, "load" if how == "read" else "save"))


def is_named(found: Slowest | None, how: str, slow: int, node: str) -> bool:
    """Whether the report names the node, if its agent is slow, or else the rank with its slow phase."""
    if how == "agent" or found is None:
        return found is not None and found.node_id == node
    return (found.rank, found.phase) == (slow, how)


def launch(cluster: Cluster, slow: int, hows: Sequence[str]) -> list[LocalStore]:
    step = call(reports_steps.save_and_load_slowed, slow=slow, hows=list(hows))
    cluster.launch([step], nodes=[0, 1, 2], timeout_s=300)
    return [LocalStore(node.root) for node in cluster.nodes]


def test_a_slowed_rank_or_agent_is_named_and_drawn(cluster_of: ClusterOf, tmp_path: Path) -> None:
    """`report` names a slow agent or disk of a save from any node, and draws the trace of all ranks.

    After the loss of the other nodes, rank 0's file is enough.
    """
    cluster = cluster_of(3)
    stores = launch(cluster, 1, ["agent", "fsync"])
    node = stores[1].read_node_id()
    assert is_named(find(stores, "step-0", "agent"), "agent", 1, node)
    trace = tmp_path / "trace.json"
    done = command("report", "latest", "--root", stores[2].root, "--trace", trace)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    save, load = done.stdout.split("load of step-1")
    assert "3 ranks on 3 nodes" in save
    assert "3 ranks on 3 nodes" in load
    (line,) = (line for line in save.splitlines() if line.startswith("slowest: "))
    assert line.startswith("slowest: rank 1 on ")
    assert f"{node}, fsync, 1.5" in line
    assert threads_in(trace) == {(f"rank {rank}", name) for rank in range(3) for name in ("save", "load")}
    for lost in cluster.nodes[1:]:
        lost.lose()
    code, document = as_json("report", "step-1", "--root", stores[0].root)
    assert code == ExitCode.OK
    assert (document["save"]["slowest"]["rank"], document["save"]["slowest"]["phase"]) == (1, "fsync")
    assert [one["rank"] for one in document["save"]["ranks"]] == [0, 1, 2]


def threads_in(trace: Path) -> set[tuple[str, str]]:
    """The operations that the trace draws on each rank's main thread."""
    events: list[dict[str, Any]] = json.loads(trace.read_bytes())["traceEvents"]
    threads = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert {one["name"] for one in events if one["ph"] == "X"} >= {"plan", "write", "fsync", "send", "commit", "read"}
    return {(threads[one["tid"]], one["cat"]) for one in events if one["name"] == f"{one.get('cat')} step-1"}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("runs", [long(100)])
def test_the_slow_rank_is_named_in_each_of_100_runs(cluster_of: ClusterOf, runs: int) -> None:
    """Each rank in turn is late, or slow to serialise, fsync or read, or its agent is stopped for a moment."""
    cluster = cluster_of(3)
    named = 0
    for first in range(0, runs, KEPT - 1):
        hows = [HOWS[number % len(HOWS)] for number in range(first, min(runs, first + KEPT - 1))]
        slow = first // (KEPT - 1) % 3
        stores = launch(cluster, slow, hows)
        node = stores[slow].read_node_id()
        for number, how in enumerate(hows):
            found = find(stores, f"step-{number}", how)
            assert is_named(found, how, slow, node), f"run {first + number}: {how} of rank {slow}: {found}"
            named += 1
    assert named == runs
