"""Commands where an agent is stopped: they wait for one timeout in all, and print a fitting next step."""

import signal
from pathlib import Path

import pytest

from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.stores.peer.client import PROGRESS_TIMEOUT_S
from tests.agent.agents import running_agent
from tests.agent.checkpoints import checkpointed, introduced, shard
from tests.agent.repair.test_reprotect import stores
from tests.cli.commands import command
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("verb", ["verify", "repair"])
def test_a_stopped_node_costs_one_timeout(tmp_path: Path, verb: str) -> None:
    """A node that did not answer the first request gets no further one."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})
    with running_agent(nodes[0].root), running_agent(nodes[1].root) as other:
        introduced(nodes[0], [other.endpoint.address()])
        other.signal(signal.SIGSTOP)
        stopwatch = Stopwatch()
        done = command(verb, "--root", nodes[0].root)
        assert stopwatch.stop() < 2 * PROGRESS_TIMEOUT_S
    assert done.returncode == ExitCode.UNREACHABLE
    assert "not reached: " in done.stdout
    assert "no answer in time" in done.stdout
    assert f"if the host is up, run `replicated-ckpt status --root {nodes[0].root}`" in done.stdout
    assert "--start-agents" not in done.stdout, "it starts no agent where a stopped one runs"


def test_status_waits_once_for_a_stopped_own_agent(tmp_path: Path) -> None:
    """The own agent is asked only for its state. Its holdings are read from the disk."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, {shard(0): (0,)}, copies=1)
    with running_agent(node.root) as own:
        own.signal(signal.SIGSTOP)
        stopwatch = Stopwatch()
        done = command("status", "--root", node.root)
        assert stopwatch.stop() < 2 * PROGRESS_TIMEOUT_S
    assert done.returncode == ExitCode.UNREACHABLE
    assert done.stdout.startswith("down: ")
    assert " no answer " in done.stdout.partition("\nNODE ")[2]
    assert "kill -CONT" in done.stdout
    assert "--start-agents" not in done.stdout


@pytest.mark.long
def test_two_stopped_agents_cost_one_timeout(tmp_path: Path) -> None:
    """Both are asked at the same time."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, {shard(0): (0, 1)})
    with running_agent(nodes[0].root) as own, running_agent(nodes[1].root) as other:
        introduced(nodes[0], [other.endpoint.address()])
        own.signal(signal.SIGSTOP)
        other.signal(signal.SIGSTOP)
        stopwatch = Stopwatch()
        done = command("ls", "--root", nodes[0].root)
        assert stopwatch.stop() < 2 * PROGRESS_TIMEOUT_S
    assert "1 of 2 nodes answered" in done.stdout


def test_repair_and_ls_agree_on_a_save_in_doubt(tmp_path: Path) -> None:
    """All nodes of the save answer: neither command advises `--lost`."""
    (node,) = stores(tmp_path, 1)
    checkpointed([node], 1, {shard(0): (0,)}, copies=1)
    staged = node.root / ".staging" / f"{2:032x}"
    staged.mkdir(parents=True)
    staged.with_suffix(".json").write_text("{}")
    line = "all its nodes answer: the next save, load or round of re-protection completes or aborts it"
    assert line in command("ls", "--root", node.root).stdout
    repaired = command("repair", "--dry-run", "--root", node.root).stdout
    assert line in repaired
    assert "--lost" not in repaired
