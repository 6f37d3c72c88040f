"""A rank or an agent is killed in a save that makes hard links to unchanged shards."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from tests.harness.cluster import Cluster, call
from tests.steps import unchanged

pytestmark = [pytest.mark.multiprocess, pytest.mark.fault, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", 2, quick_exit=True) as cluster:
        yield cluster


@pytest.mark.parametrize("victim", ["rank1", "agent0"])
def test_a_kill_between_two_links_loses_nothing(cluster: Cluster, victim: str) -> None:
    """All committed checkpoints stay as they were, and the next job saves and links again."""
    number, environment = int(victim[-1]), {failpoints.ENV: "store.linked=kill@2"}
    cluster.start_agents({node: environment if victim == f"agent{node}" else {} for node in (0, 1)})
    if victim.startswith("rank"):
        cluster.nodes[number].environment = environment
    attempt = cluster.attempt([call(unchanged.save_frozen, steps=list(range(6)))], nodes=[0, 1])
    died = attempt.codes[number] if victim.startswith("rank") else cluster.agent_code(number)
    assert died == -signal.SIGKILL, f"store.linked was not reached: {attempt}"
    cluster.nodes[number].environment = {}
    load = call(unchanged.load_frozen, steps=[0, 1, 2, 3], ranks=2)
    again = call(unchanged.save_frozen, steps=[6, 7, 8, 9])
    newer = call(unchanged.load_frozen, steps=[6, 7, 8, 9], ranks=2)
    results = cluster.launch([load, again, newer], nodes=[0, 1])
    assert all(all(found.values()) for found in (*results.of(load), *results.of(newer)))
    assert all(found[-1]["linked"] for found in results.of(again))
    for step in (3, 9):
        code = main(["verify", "--root", str(cluster.nodes[0].disk), f"run/step-{step}"])
        assert code in (ExitCode.OK, ExitCode.UNREACHABLE)
