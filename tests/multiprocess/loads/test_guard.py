"""A job does not load a bad checkpoint for ever: restores are counted, and users can reject a checkpoint."""

import json
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from tests.agent.agents import wait_for
from tests.cli.commands import as_json, command
from tests.harness.cluster import Cluster, call
from tests.multiprocess.conftest import ClusterOf
from tests.steps import guard

pytestmark = pytest.mark.fault


def crash(cluster: Cluster, nodes: list[int], log: Path, **how: int) -> None:
    attempt = cluster.attempt([call(guard.crash_after_restore, told=str(log), **how)], nodes=nodes, grace_s=0.5)
    assert -9 in attempt.codes, attempt.failures


def read(log: Path, rank: int) -> str:
    return Path(f"{log}-{rank}").read_text().strip()


def test_a_job_that_fails_after_each_restore_steps_back(cluster_of: ClusterOf, tmp_path: Path) -> None:
    """With max_tries=3 the fourth restore loads the older checkpoint, also after a node loss. A save resets the count."""
    cluster, log = cluster_of(2), tmp_path / "told"
    cluster.run(call(guard.save, steps=[1, 2]), nodes=[0, 1])
    crash(cluster, [0, 1], log, max_tries=3)
    crash(cluster, [1, 0], log, max_tries=3)
    cluster.nodes[0].lose()
    crash(cluster, [0, 1], log, max_tries=3)  # rank 0 is on the blank node; the other node has the count
    assert read(log, 0) == read(log, 1) == "2 2 2"
    again, save, after = (call(guard.restore, max_tries=3, then_save=step) for step in (None, 3, None))
    results = cluster.launch([again, save, after], nodes=[0, 1])
    assert [results.of(each).agreed() for each in (again, save, after)] == [1, 1, 3]
    [warning], others = results.warnings_of(again)
    assert "'step-1' is loaded, because 'step-2' was restored 3 times without a later save (max_tries=3)" in warning
    assert "`replicated-ckpt reject step-2 --root ROOT`" in warning
    assert (others, results.warnings_of(after)) == ([], [[], []])


def test_rank_0_warns_of_the_third_restore_without_a_save(cluster_of: ClusterOf) -> None:
    """Without max_tries every restore loads the newest checkpoint. The warning names it, the count and the next step."""
    cluster = cluster_of(2)
    loads = [call(guard.restore) for _ in range(4)]
    results = cluster.launch([call(guard.save, steps=[1, 2]), *loads], nodes=[0, 1])
    assert [results.of(load).agreed() for load in loads] == [2] * 4
    assert [results.warnings_of(load)[1] for load in loads] == [[]] * 4
    assert [len(results.warnings_of(load)[0]) for load in loads] == [0, 0, 1, 1]
    [warning] = results.warnings_of(loads[2])[0]
    assert "'step-2' has now been restored 3 times without a later save" in warning
    assert "restore(state, max_tries=3)" in warning


def test_a_rejected_step_is_skipped_on_all_nodes(cluster_of: ClusterOf) -> None:
    """`reject` marks two of three nodes and names the third, which does not answer.

    Once its agent runs again, the third node copies the mark and skips the step, also alone. `reject --undo` on the
    third node reaches the others later.
    """
    cluster = cluster_of(3)
    cluster.run(call(guard.save, steps=[1, 2], copies=3), nodes=[0, 1, 2])
    roots = [node.root for node in cluster.nodes]
    third = json.loads((roots[2] / "node.json").read_text())["node_id"]
    cluster.nodes[2].kill_agent()
    results = cluster.launch([call(guard.reject, number=2, by_name=2)], nodes=[0, 1])
    found = results.of(guard.reject).agreed()
    assert (found["latest"], found["all"]) == (1, [1, 2])
    [silent] = found["not_reached"]
    assert silent.startswith(f"node {third}: ")
    assert ['"latest" skips it' in text for text in results.warnings_of(guard.reject)[0]] == [True]
    code, listed = as_json("ls", "--root", roots[1])
    assert code == ExitCode.OK
    assert {row["checkpoint_id"]: row["is_rejected"] for row in listed["checkpoints"]} == {
        "step-1": False,
        "step-2": True,
    }
    cluster.start_agents({2: {}})
    wait_for(
        lambda: "rejections" in marks(roots[2]) and marks(roots[2])["rejections"], 20, "the mark on the third node"
    )
    for node in cluster.nodes[:2]:
        node.kill_agent()
    assert cluster.run(call(guard.look), nodes=[2]).agreed() == 1
    done = command("reject", "step-2", "--undo", "--root", roots[2])
    assert done.returncode == ExitCode.UNREACHABLE, done.stderr
    assert "step-2: no longer rejected, on: " in done.stdout
    assert done.stdout.count("not reached: ") == 2
    # The other nodes still have the mark and remove it now.
    assert cluster.run(call(guard.look), nodes=[0, 2]).agreed() == 2


def marks(root: Path) -> dict[str, dict[str, int]]:
    path = root / ".agent" / "marks.json"
    found: dict[str, dict[str, int]] = json.loads(path.read_text())["marks"] if path.exists() else {}
    return found
