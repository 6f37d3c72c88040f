"""`status` says how the nodes are, and its exit code tells a probe: 0 good, 1 degraded, 4 lost, 5 down."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.replaced import lock_version
from tests.agent.agents import HOME, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, shard
from tests.agent.repair.test_reprotect import PAIR, agents, stores
from tests.agent.repair.test_retention import tell
from tests.cli.commands import MAIN, as_json, command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
PATIENT = ("--lost-after-s", "600")


def test_a_second_agent_names_the_first(tmp_path: Path) -> None:
    """One agent serves a root; who starts another is told its pid, and how to end it."""
    with running_agent(tmp_path / "store") as first:
        done = command("agent", "--root", tmp_path / "store")
    assert done.returncode == ExitCode.UNREACHABLE
    assert (
        f"already (pid {first.endpoint.pid}). Hint: Use that one, or end it: `kill {first.endpoint.pid}`."
        in done.stderr
    )


def test_good_then_degraded_then_down(tmp_path: Path) -> None:
    """All answer: 0. The other node is killed: 1, named, with the checkpoint that it makes short. The own agent, too: 5."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes, *PATIENT) as running:
        with running[0].client() as client:
            wait_for(lambda: client.call("GET", "/v1/status")["protection"]["is_complete"], 30, "the first round")
        done = command("status", "--root", nodes[0].root)
        assert done.returncode == ExitCode.OK, done.stdout
        assert done.stdout.splitlines()[0].split() == ["NODE", "AGENT", "CHECKPOINTS", "ROOM"]
        assert done.stdout.splitlines()[-1] == "good"
        assert "re-protection: every checkpoint had its copies when it last looked" in done.stdout
        assert done.stdout.count(" free") == 2
        running[1].signal(signal.SIGKILL)
        running[1].process.wait()
        done = command("status", "--root", nodes[0].root)
        assert done.returncode == ExitCode.FAILED
        assert "degraded: step-1: 2 copies, 1 seen: host1 not reached" in done.stdout
        assert f"degraded: host1 (node {nodes[1].node_id()}): not reached: no agent runs there" in done.stdout
        assert "next step: on host1" in done.stdout
        code, found = as_json("status", "--root", nodes[0].root)
        assert (code, found["exit_code"], found["state"]) == (1, 1, "degraded")
        assert found["agent"]["pid"] == running[0].process.pid
        assert [node["is_reached"] for node in found["nodes"]].count(False) == 1
        code, own = as_json("status", "--own-agent", "--root", nodes[0].root)
        assert (code, own["exit_code"], own["state"], own["pid"]) == (0, 0, "good", running[0].process.pid)
        running[0].signal(signal.SIGSTOP)
        with ThreadPoolExecutor(2) as threads:  # each waits for an answer
            asked = [
                threads.submit(command, "status", *which, "--root", nodes[0].root) for which in ((), ("--own-agent",))
            ]
        for done in (each.result() for each in asked):
            assert done.returncode == ExitCode.UNREACHABLE
            assert "kill -CONT" in done.stdout
            assert "next step: --start-agents" not in done.stdout, "one runs: another could not start"
    code, own = as_json("status", "--own-agent", "--root", nodes[0].root)
    assert (code, own["state"], own["reasons"]) == (5, "down", ["this node's agent does not run"])
    done = command("status", "--root", nodes[0].root)
    assert done.returncode == ExitCode.UNREACHABLE
    assert "down: this node's agent gives no answer: none runs" in done.stdout
    assert "--start-agents" in done.stdout


def test_lost_files_and_the_last_errors_are_said(tmp_path: Path) -> None:
    """A shard that no node can hold: 4, before all else; warnings of the agent's log are shown."""
    store = LocalStore(tmp_path / "node0")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    (store.root / "step-1" / shard(0)).unlink()
    (store.agent_directory() / "log").write_text(
        "2026-01-01 00:00:00,000 INFO replicated_ckpt: well\n2026-01-01 00:00:01,000 WARNING replicated_ckpt: not well\n"
    )
    with running_agent(store.root):
        done = command("status", "--root", store.root)
    assert done.returncode == ExitCode.SHARD_LOST
    assert "files are lost: step-1: 1 file lost" in done.stdout
    assert "short for want" not in done.stdout, "what is lost is counted once"
    assert "in the agent's log: 2026-01-01 00:00:01,000 WARNING replicated_ckpt: not well" in done.stdout
    assert "INFO" not in done.stdout


@pytest.mark.parametrize("pause", ["-3", "0", "nan", "inf", "x"])
def test_watch_takes_a_pause(tmp_path: Path, pause: str) -> None:
    """No pause at all would be a busy loop; the argument is named."""
    done = command("status", "--root", tmp_path, f"--watch={pause}")
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert f"argument --watch: must be a number of seconds above 0, not '{pause}'" in done.stderr


def test_an_upload_is_waited_for_a_time(tmp_path: Path) -> None:
    """One below 0 would give the order, and say at once that it has not come."""
    done = command("upload", "step-1", "--root", tmp_path, "--timeout-s", "-1")
    assert done.returncode == ExitCode.USAGE
    assert "argument --timeout-s: must be a number of seconds above 0, not '-1'" in done.stderr


def test_watch_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    """With --json a line each time; Ctrl-C ends it with 130 and no traceback."""
    store = LocalStore(tmp_path / "node0")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    whole = [sys.executable, "-c", MAIN, "status", "--root", str(store.root), "--watch", "0.2", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    watching = subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        moments = [json.loads(watching.stdout.readline())["unix_s"] for _ in range(3)]
        assert moments == sorted(moments)
        assert moments[2] <= round(time.time(), 3)
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate(timeout=30)
    finally:
        watching.kill()
        watching.wait()
    assert (watching.returncode, said) == (ExitCode.INTERRUPTED, "")


def test_repair_agrees_with_status_on_what_a_failed_save_has_left(tmp_path: Path) -> None:
    """All its nodes answer, and the next round settles it: neither waits. With a silent node both do."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    names = tuple(node.node_id() for node in nodes)
    with agents(nodes) as running:
        with running[0].client() as client:
            wait_for(lambda: client.call("GET", "/v1/status")["protection"]["is_complete"], 30, "the first round")
        nodes[0].begin(Intent(f"{2:032x}", "step-2", "gone", overwrite=False, nodes=names, coordinator=names[1]))
        codes = [command(verb, "--root", nodes[0].root).returncode for verb in ("status", "verify", "repair")]
        assert codes == [ExitCode.OK] * 3
        assert (
            "the next save, load or round of re-protection settles it" in command("ls", "--root", nodes[0].root).stdout
        )
        running[1].signal(signal.SIGKILL)
        running[1].process.wait()
        assert command("status", "--root", nodes[0].root).returncode == ExitCode.FAILED
        assert command("repair", "--root", nodes[0].root).returncode == ExitCode.UNREACHABLE


def test_what_a_policy_removes_is_not_said_to_be_lost(tmp_path: Path) -> None:
    """A load keeps a part of it on one node, after the other has removed its own: nothing is wrong, as verify says, too."""
    nodes = stores(tmp_path, 2)
    for number in (1, 2):
        parts = {shard(0): (0,), shard(1): (1,)}
        checkpointed(nodes, number, parts, copies=1, checkpoint_id=f"step-{number}")
    lock = lock_version(nodes[0].catalog, "step-1", nodes[0].catalog.manifest("step-1").save_id)
    assert lock is not None
    with agents(nodes) as running:
        for agent in running:
            tell(agent, Retention(keep_last=1), revision=3)
        wait_for(lambda: not (nodes[1].root / "step-1").exists(), 30, "the end of the other part")
        done = command("status", "--root", nodes[0].root)
        assert done.returncode == ExitCode.OK, done.stdout
        assert "kept no more, still on host0" in command("ls", "--root", nodes[0].root).stdout
        assert command("verify", "--root", nodes[0].root).returncode == ExitCode.OK
        assert (nodes[0].root / "step-1").exists()
        lock.release()
