"""The harness starts ranks in the requested layout, and detects and ends ranks that hang or fail."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.agents import wait_for
from tests.harness.cluster import ByRank, Launcher, Results, call
from tests.harness.forked import Forked
from tests.harness.launch import base_environment
from tests.harness.node import Node
from tests.harness.processes import is_ending, is_running, open_files, processes_of, wait_until_gone
from tests.harness.zygote import the_light_zygote
from tests.marks import mark_long
from tests.multiprocess.conftest import ClusterOf
from tests.steps import harness as harness_steps
from tests.steps import loss

AGENT = [sys.executable, "-m", "replicated_ckpt.agent"]
HARNESS_THAT_IS_KILLED = """
import json, pathlib, sys, time
from tests.harness.zygote import Zygote, the_light_zygote
folder = pathlib.Path(sys.argv[1])
sleep = {"module": "tests.steps.harness", "function": "sleep", "arguments": {}}
spec = {"calls": [sleep], "roots": [str(folder)], "quick_exit": False}
(folder / "spec.json").write_text(json.dumps(spec))
zygote = Zygote()
rank = zygote.fork({"REPLICATED_CKPT_TEST_NODE": "0"}, folder, folder / "log")
print(zygote._process.pid, the_light_zygote()._process.pid, rank.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("launcher", mark_long(["direct", "torchrun"], keep=["direct"]))
def test_a_world_has_the_shape_that_was_asked_for(cluster_of: ClusterOf, launcher: Launcher) -> None:
    """Ranks are numbered in the order of the listed nodes, with and without torchrun, and end with their launch."""
    cluster = cluster_of(2, quick_exit=False)
    ranks = [1, 2] if launcher == "direct" else [1, 1]  # torchrun starts equally many ranks on all nodes
    found = cluster.run(call(harness_steps.where), nodes=[1, 0], ranks=ranks, launcher=launcher)
    assert [(value["rank"], value["node"]) for value in found] == [(0, 1), (1, 0), (2, 0)][: sum(ranks)]
    assert not any(is_running(value["pid"]) for value in found)


def test_a_hanging_rank_fails_with_its_stack(cluster_of: ClusterOf) -> None:
    """A hang ends at the timeout. The error has each rank's stack, and no process is left."""
    cluster = cluster_of(2, quick_exit=False)
    with pytest.raises(AssertionError, match="hung") as failure:
        cluster.launch([call(harness_steps.hang)], nodes=[0, 1], timeout_s=5)
    assert "a_place_to_hang" in str(failure.value)
    assert processes_of(cluster.marker) == []


def test_results_are_read_by_their_call() -> None:
    """Results are read by call, or by function if one call has it. A function of several calls, or of none, raises."""
    first, again, where = call(harness_steps.sleep), call(harness_steps.sleep), call(harness_steps.where)
    results = Results((first, again, where), [{"values": [None, None, {"rank": 0}], "warnings": [[], ["slow"], []]}])
    assert results.of(where) == results.of(harness_steps.where) == [{"rank": 0}]
    assert (results.warnings_of(first), results.warnings_of(again)) == ([[]], [["slow"]])
    for unclear in (harness_steps.sleep, harness_steps.hang, call(harness_steps.sleep)):
        with pytest.raises(AssertionError, match="of the calls"):
            results.of(unclear)
    with pytest.raises(AssertionError, match="ranks disagree"):
        ByRank([1, 2]).agreed()


def test_a_killed_process_is_ending_until_its_status_is_collected() -> None:
    """`is_ending` is true from the kill until the parent has waited for the process."""
    process = subprocess.Popen(["sleep", "60"])
    assert not is_ending(process.pid)
    process.kill()
    wait_for(lambda: is_ending(process.pid), 10, "its end")
    assert process.wait(10) == -signal.SIGKILL
    assert not is_ending(process.pid)


def test_a_failing_rank_fails_with_its_traceback(cluster_of: ClusterOf) -> None:
    """One rank's error fails the launch, although the other ranks wait for that rank."""
    cluster = cluster_of(2, quick_exit=False)
    calls = [call(harness_steps.raise_on, rank=1), call(loss.lose, nodes=[])]
    with pytest.raises(AssertionError, match="rank 1 raises on purpose"):
        cluster.launch(calls, nodes=[0, 1])
    assert processes_of(cluster.marker) == []


def test_a_rank_has_nothing_of_the_process_that_forked_it(cluster_of: ClusterOf) -> None:
    """Ranks share only imported modules. Environment, session, working directory and connections are their own."""
    cluster = cluster_of(2, environment={"ONLY_HERE": "yes"})
    cluster.nodes[1].environment["ONLY_THERE"] = "too"
    (single,) = cluster.run(call(harness_steps.process), nodes=[0], launcher="single")
    both = cluster.run(call(harness_steps.process), nodes=[0, 1])
    assert not single["has_group"]
    assert single["sockets"] == []
    assert single["cwd"] == str(cluster.base / "launch1")
    own = {"ONLY_HERE", "REPLICATED_CKPT_DOMAIN", "REPLICATED_CKPT_TEST_LAUNCH", "REPLICATED_CKPT_TEST_NODE"}
    assert single["environment"].keys() - base_environment().keys() == {"TMPDIR", *own}
    assert [found["environment"].get("ONLY_THERE") for found in both] == [None, "too"]
    assert all("ONLY_HERE=yes" in found["shown"] for found in both)
    assert len({found["session"] for found in [single, *both]}) == 3


def process_state(pid: int) -> dict[str, object]:
    """What /proc shows of a process. Directories and the agent's own files are left out, because they come and go."""
    proc = Path(f"/proc/{pid}")
    texts = {name: (proc / name).read_bytes().rstrip(b"\0").split(b"\0") for name in ("cmdline", "environ")}
    kept = [path for path in open_files(pid) if path.startswith("/") and not path.endswith(" (deleted)")]
    return {
        "command": texts["cmdline"],
        "environment": sorted(texts["environ"]),
        "folder": (proc / "cwd").readlink(),
        "umask": next(line for line in (proc / "status").read_text().splitlines() if line.startswith("Umask:")),
        "files": {path for path in kept if "/.agent" not in path and not Path(path).is_dir()},
        "leads a session": os.getsid(pid) == pid,
        "has torch": "libtorch" in (proc / "maps").read_text(),
    }


def start_agent(arguments: list[str], environment: dict[str, str], log: int) -> "subprocess.Popen[bytes]":
    """Starts the agent in a new interpreter."""
    return subprocess.Popen(
        [*AGENT, *arguments],
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def fork_agent(arguments: list[str], environment: dict[str, str], log: int) -> Forked:
    forker = the_light_zygote().path
    return Forked(forker, "agent", arguments, command=AGENT, environment=environment, output=log)


def test_a_forked_agent_has_the_same_process_state_as_a_started_one(tmp_path: Path) -> None:
    """Command line, environment, folder, umask, files and session equal those of an agent in a new interpreter."""
    arguments, environment = ["--root", str(tmp_path / "root")], {**base_environment(), "ONLY_HERE": "yes"}
    node, shown = Node(tmp_path / "root", tmp_path / "root"), []
    with (tmp_path / "log").open("wb") as log:
        for start in (start_agent, fork_agent):
            process = start(arguments, environment, log.fileno())
            try:
                wait_for(lambda pid=process.pid: node.agent_pid() == pid, 60, "the agent")  # type: ignore[misc]
                shown.append(process_state(process.pid))
            finally:
                process.kill()
                process.wait()
    started, forked = shown
    assert forked == started
    assert "ONLY_HERE=yes" in str(started["environment"])


@pytest.mark.long
def test_no_rank_outlives_the_harness(tmp_path: Path) -> None:
    """After SIGKILL of the harness, both zygotes and the ranks that they forked end."""
    command = [sys.executable, "-c", HARNESS_THAT_IS_KILLED, str(tmp_path)]
    with subprocess.Popen(command, env=base_environment(), stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        pids = [int(pid) for pid in harness.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(is_running, pids))
        harness.send_signal(signal.SIGKILL)
    assert wait_until_gone(pids, timeout_s=20) == []
