"""`status` prints the state of the nodes. Its exit code is for probes: 0 good, 1 degraded, 4 lost, 5 down."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from replicated_ckpt import Retention
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.stores.files.locks import FileLock
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.local.versions.readers import lock_version
from tests.agent.agents import HOME, running_agent, wait_for
from tests.agent.checkpoints import checkpointed, introduced, shard
from tests.agent.repair.test_reprotect import PAIR, RING, agents, meet, stores
from tests.agent.repair.test_retention import set_policy
from tests.cli.commands import MAIN, as_json, command

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]
PATIENT = ("--lost-after-s", "600")


def test_a_second_agent_names_the_first(tmp_path: Path) -> None:
    """A second agent for a root exits with the pid of the first, and how to end it."""
    with running_agent(tmp_path / "store") as first:
        done = command("agent", "--root", tmp_path / "store")
    assert done.returncode == ExitCode.UNREACHABLE
    assert f"(pid {first.endpoint.pid}). Hint: Use that one, or end it: `kill {first.endpoint.pid}`." in done.stderr


def test_good_then_degraded_then_down(tmp_path: Path) -> None:
    """All nodes answer: 0. The other node is killed: 1, with the checkpoint that is short. The own agent is stopped or
    killed: 5.
    """
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes, *PATIENT) as running:
        with running[0].client() as client:
            wait_for(lambda: client.call("GET", "/v1/status")["protection"]["is_complete"], 30, "the first round")
        done = command("status", "--root", nodes[0].root)
        assert done.returncode == ExitCode.OK, done.stdout
        assert done.stdout.splitlines()[0] == "good"
        assert done.stdout.splitlines()[1].split() == ["NODE", "AGENT", "CHECKPOINTS", "ROOM"]
        assert "re-protection" not in done.stdout
        assert done.stdout.count(" free") == 2
        running[1].signal(signal.SIGKILL)
        running[1].process.wait()
        done = command("status", "--root", nodes[0].root)
        assert done.returncode == ExitCode.FAILED
        assert done.stdout.startswith("degraded: step-1: 1 of 2 copies seen: host1 not reached\n")
        assert "had its copies" not in done.stdout, "the last round was before the kill"
        assert f"degraded: host1 (node {nodes[1].node_id()}): not reached: no agent runs there" in done.stdout
        assert "next step: start an agent on host1" in done.stdout
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
            assert "next step: --start-agents" not in done.stdout, "an agent runs, so another could not start"
    code, own = as_json("status", "--own-agent", "--root", nodes[0].root)
    assert (code, own["state"], own["reasons"]) == (5, "down", ["this node's agent does not run"])
    done = command("status", "--root", nodes[0].root)
    assert done.returncode == ExitCode.UNREACHABLE
    assert done.stdout.startswith("down: this node's agent does not answer: none runs, and the last one was killed")
    assert "--start-agents" in done.stdout


def test_lost_files_and_the_last_warnings_are_printed(tmp_path: Path) -> None:
    """A shard that no node can hold is printed first, with exit code 4. Warnings of the running agent have one line
    each.
    """
    store = LocalStore(tmp_path / "node0")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    (store.root / "step-1" / shard(0)).unlink()
    (store.agent_directory() / "log").write_text(
        "2026-01-01 00:00:01,000 WARNING replicated_ckpt: of an agent that has ended\n"
        f"2999-01-01 00:00:00,000 INFO replicated_ckpt: well\n2999-01-01 00:00:01,000 WARNING {'not well ' * 100}\n"
    )
    with running_agent(store.root):
        done = command("status", "--root", store.root)
    assert done.returncode == ExitCode.SHARD_LOST
    assert "files are lost: step-1: 1 file lost" in done.stdout
    assert "for lack of nodes or intact copies" not in done.stdout, "what is lost is counted once"
    (logged,) = (line for line in done.stdout.splitlines() if line.startswith("in the agent's log: "))
    assert logged.startswith("in the agent's log: 2999-01-01 00:00:01,000 WARNING not well")
    assert len(logged) <= 200


def test_a_lost_node_that_was_replaced_is_a_note(tmp_path: Path) -> None:
    """Once a new node has the copies of a lost one, the exit code is 0, with a note that advises `forget`.

    Before that, `status` is degraded and advises `repair --lost`, which makes the copies.
    """
    old, lost, new = nodes = stores(tmp_path, 3)
    checkpointed(nodes[:2], 1, PAIR)
    gone = lost.node_id()
    with agents(nodes[:2], *PATIENT) as running:
        running[1].signal(signal.SIGKILL)
        running[1].process.wait()
        shutil.rmtree(lost.root)
        done = command("status", "--root", old.root)
        assert "if host1 never comes back: run the job with a new node in its place" in done.stdout
        with running_agent(new.root, *PATIENT) as replacement:
            meet(running[0], replacement)
            done = command("status", "--root", old.root)
            assert (done.returncode, done.stdout.startswith("degraded: step-1: ")) == (ExitCode.FAILED, True), (
                done.stdout
            )
            advised = f"replicated-ckpt repair --root {old.root} --lost {gone}"
            assert f"if host1 never comes back: `{advised}`" in done.stdout
            command(*advised.split()[1:])
            done = command("status", "--root", old.root)
            assert (done.returncode, done.stdout.splitlines()[0]) == (ExitCode.OK, "good"), done.stdout
            forget = f"replicated-ckpt forget {gone} --root {old.root}"
            (note,) = (line for line in done.stdout.splitlines() if line.startswith("note: "))
            assert note.startswith(
                f"note: host1 (node {gone}): not reached: no agent runs there. All copies exist without it"
            )
            assert f"`{forget}`" in note
            assert "next step" not in done.stdout
            code, found = as_json("status", "--root", old.root)
            assert (code, found["state"], found["reasons"], len(found["notes"])) == (0, "good", [], 1)
            done = command(*forget.split()[1:])
            assert (done.returncode, "all copies exist without it" in done.stdout) == (ExitCode.OK, True), done.stdout
            done = command("status", "--root", old.root)
            assert (done.returncode, "note: " in done.stdout) == (ExitCode.OK, False), done.stdout
            for agent in (running[0], replacement):
                agent.signal(signal.SIGTERM)
                assert agent.process.wait(60) == 0
        done = command("status", "--root", old.root)
        assert (done.returncode, done.stdout.splitlines()[0]) == (ExitCode.OK, "idle"), "the new node is not asked now"


def test_a_job_that_has_ended_is_idle(tmp_path: Path) -> None:
    """Agents exited on idle: the exit code is 0, with the command that starts them. `--own-agent` exits with 5."""
    nodes = stores(tmp_path, 2)
    checkpointed(nodes, 1, PAIR)
    with agents(nodes, "--idle-exit-s", "3") as running:
        for agent in running:
            assert agent.process.wait(60) == 0
    for _ in range(2):  # the first command leaves nothing behind
        done = command("status", "--root", nodes[0].root)
        assert (done.returncode, done.stdout.splitlines()[0]) == (ExitCode.OK, "idle"), done.stdout
    start = (
        f"`replicated-ckpt status --start-agents --rsh ssh --root {nodes[0].root}`, or the same without --rsh on each"
    )
    assert start in done.stdout
    assert "fewer copies" not in done.stdout
    code, found = as_json("status", "--root", nodes[0].root)
    assert (code, found["state"], found["reasons"]) == (0, "idle", [])
    assert command("status", "--own-agent", "--root", nodes[0].root).returncode == ExitCode.UNREACHABLE
    (nodes[0].root / "step-1" / shard(0)).unlink()
    assert command("status", "--root", nodes[0].root).returncode == ExitCode.OK, "node 1 may have it"
    with FileLock.acquire(nodes[0].agent_directory() / "clients", shared=True) or pytest.fail("the lock is taken"):
        done = command("status", "--root", nodes[0].root)
    assert (done.returncode, "ranks use this store" in done.stdout) == (ExitCode.UNREACHABLE, True), "a job runs"


def test_a_lost_node_among_idle_ones_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job has ended, and one host is down: the other nodes may have its copies, but were not asked. The state is idle."""
    nodes = stores(tmp_path, 3)
    checkpointed(nodes, 1, RING)
    with agents(nodes) as running, socket.create_server(("127.0.0.1", 0)) as silent:
        for agent in running:
            agent.signal(signal.SIGTERM)
            assert agent.process.wait(60) == 0
        down = replace(running[2].endpoint.address(), port=silent.getsockname()[1])
        introduced(nodes[0], [running[1].endpoint.address(), down])
        assert main(["status", "--root", str(nodes[0].root)]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert printed.startswith("idle\nnote: no job uses this store, and no agent runs here, nor on host1: copies there")
    (note,) = (line for line in printed.splitlines() if line.startswith("note: host2 "))
    assert "not reached: no answer in time" in note
    assert note.endswith("Whether other nodes have its copies was not checked")
    assert "never come" not in printed


@pytest.mark.parametrize("pause", ["-3", "0", "nan", "inf", "x"])
def test_watch_needs_a_positive_pause(tmp_path: Path, pause: str) -> None:
    """A pause of 0 would be a busy loop. The error names the argument."""
    done = command("status", "--root", tmp_path, f"--watch={pause}")
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert f"argument --watch: must be a number of seconds above 0, not '{pause}'" in done.stderr


def test_an_upload_needs_a_positive_timeout(tmp_path: Path) -> None:
    """A negative timeout is a usage error."""
    done = command("upload", "step-1", "--root", tmp_path, "--timeout-s", "-1")
    assert done.returncode == ExitCode.USAGE
    assert "argument --timeout-s: must be a number of seconds above 0, not '-1'" in done.stderr


def test_watch_marks_what_has_changed(tmp_path: Path) -> None:
    """Each refresh begins with the time. New lines are marked."""
    store = LocalStore(tmp_path / "node0")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    whole = [sys.executable, "-c", MAIN, "status", "--root", str(store.root), "--watch", "0.2"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    watching = subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        lines = iter(watching.stdout.readline, "")
        clock = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}, every 0.2 s until Ctrl-C; \* marks changed lines\n")
        assert clock.fullmatch(next(lines))
        assert next(lines) == "  idle\n"
        (store.root / "step-1" / shard(0)).unlink()
        marked = (line for line in lines if line.startswith("*"))
        assert next(marked) == "* files are lost: step-1: 1 file lost\n"
        assert clock.fullmatch(next(line for line in lines if line.startswith("2")))
        assert next(lines) == "  files are lost: step-1: 1 file lost\n"
    finally:
        watching.kill()
        watching.wait()


def test_watch_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    """With -o json each refresh is one line. Ctrl-C exits with 130, without a traceback."""
    store = LocalStore(tmp_path / "node0")
    checkpointed([store], 1, {shard(0): (0,)}, copies=1)
    whole = [sys.executable, "-c", MAIN, "status", "--root", str(store.root), "--watch", "0.2", "-o", "json"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    watching = subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert watching.stdout is not None
        moments = [json.loads(watching.stdout.readline())["unix_s"] for _ in range(3)]
        assert moments == sorted(moments)
        assert moments[2] <= round(time.time(), 3)
        watching.send_signal(signal.SIGINT)
        _, printed = watching.communicate(timeout=30)
    finally:
        watching.kill()
        watching.wait()
    assert (watching.returncode, printed) == (ExitCode.INTERRUPTED, "")


def test_repair_agrees_with_status_on_a_stale_save(tmp_path: Path) -> None:
    """All nodes of a stale save answer: neither command waits for it. With a silent node both do."""
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
            "the next save, load or round of re-protection completes or aborts it"
            in command("ls", "--root", nodes[0].root).stdout
        )
        running[1].signal(signal.SIGKILL)
        running[1].process.wait()
        assert command("status", "--root", nodes[0].root).returncode == ExitCode.FAILED
        assert command("repair", "--root", nodes[0].root).returncode == ExitCode.UNREACHABLE


def test_an_expired_checkpoint_is_not_lost(tmp_path: Path) -> None:
    """A load keeps one part of an expired checkpoint, and the other node has removed its part: `status` and `verify`
    exit with 0.
    """
    nodes = stores(tmp_path, 2)
    for number in (1, 2):
        parts = {shard(0): (0,), shard(1): (1,)}
        checkpointed(nodes, number, parts, copies=1, checkpoint_id=f"step-{number}")
    lock = lock_version(nodes[0].catalog, "step-1", nodes[0].catalog.manifest("step-1").save_id)
    assert lock is not None
    with agents(nodes) as running:
        for agent in running:
            set_policy(agent, Retention(keep_last=1), revision=3)
        wait_for(lambda: not (nodes[1].root / "step-1").exists(), 30, "the removal of the other part")
        done = command("status", "--root", nodes[0].root)
        assert done.returncode == ExitCode.OK, done.stdout
        assert "expired, still on host0" in command("ls", "--root", nodes[0].root).stdout
        assert command("verify", "--root", nodes[0].root).returncode == ExitCode.OK
        assert (nodes[0].root / "step-1").exists()
        lock.release()
