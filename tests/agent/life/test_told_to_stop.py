"""Agents get SIGTERM while a save is open: they complete their shards, answer their peers, and then exit."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from replicated_ckpt.agent import launch
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.agent.state.endpoint import read_endpoint
from replicated_ckpt.config import DRAIN_S
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.dcp.agreement.node_post import NodePost, register_for_save
from replicated_ckpt.dcp.save.submission import submit
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.peer.client import AgentClient
from tests.agent.agents import HOME, peers_of, running_agent, stop_agent, wait_for
from tests.agent.test_submissions import FILES, SAVE, TICKET, WITHIN_S, Job, job
from tests.marks import long

__all__ = ["job"]
SLOW = "agent.writing=sleep:3"
LONG = "agent.writing=sleep:600"
NEXT = "d" * 32


def stop(job: Job, *which: int) -> None:
    for index in which or range(len(job.agents)):
        job.agents[index].signal(signal.SIGTERM)


def log_of(job: Job, index: int) -> str:
    return "".join(path.read_text() for path in job.agents[index].root.glob(".agent/log*")) + (
        job.agents[index].root / "agent.out"
    ).read_text(errors="replace")


@pytest.mark.parametrize("job", [long((SLOW, "")), long(("", SLOW)), (SLOW, SLOW)], indirect=True)
def test_agents_that_are_stopped_together_finish_the_save(job: Job) -> None:
    """All ranks have ended and all agents get SIGTERM while shards are written: the agents publish the complete save
    with its copies.
    """
    for rank in (0, 1):
        job.submit(rank)
    job.finish()
    job.die()
    assert job.files() == [set(), set()], "the save was over before the agents were stopped"
    stop(job)
    assert [agent.process.wait(WITHIN_S) for agent in job.agents] == [0, 0]
    assert job.files() == [FILES, FILES]
    first, second = (store.catalog.manifest("step-1") for store in job.stores)
    assert first == second
    for name, entry in first.shards.items():
        assert set(entry.holders) == set(job.nodes)
        for store in job.stores:
            raw = (store.final("step-1") / name).read_bytes()
            assert (len(raw), crc32c(raw)) == (entry.size_bytes, entry.crc32c)
    assert not any("exits with this unfinished" in log_of(job, index) for index in (0, 1))


@pytest.mark.parametrize("job", [("", SLOW)], indirect=True)
def test_the_stopped_coordinator_finishes_the_save(job: Job) -> None:
    """The coordinator's agent is stopped: it waits until the other node has written its shard and published the save."""
    for rank in (0, 1):
        job.submit(rank)
    job.finish()
    job.die()
    stop(job, 0)
    assert job.agents[0].process.wait(WITHIN_S) == 0
    assert job.files() == [FILES, FILES]


@pytest.mark.parametrize("job", [(SLOW, "")], indirect=True)
def test_a_stopping_agent_opens_no_save(job: Job) -> None:
    """A stopping agent refuses a new save with a hint, completes the open one, and answers its peers until then."""
    for rank in (0, 1):
        job.submit(rank)
    stop(job, 0)
    wait_for(lambda: "completes its open saves, for" in log_of(job, 0), WITHIN_S, "the log line of the stopping agent")
    document = {"checkpoint_id": "step-2", "session": "t", "overwrite": False, "coordinator": job.nodes[0]}
    with job.agents[0].client() as client, pytest.raises(StoreUnavailable, match="it is stopping") as refused:
        client.call("POST", f"/v1/saves/{NEXT}", {**document, "ticket": "", "peers": peers_of(*job.agents)})
    assert "Save again" in refused.value.hint
    job.finish()
    job.die()
    assert job.agents[0].process.wait(WITHIN_S) == 0
    assert job.files() == [FILES, FILES]
    assert [intent.save_id for intent in job.stores[0].list_staged()] == []


@pytest.mark.parametrize("job", [(SLOW, "")], indirect=True)
def test_a_save_that_begins_meanwhile_is_opened_by_the_next_agent(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that begins a save waits until the stopping agent has ended, and starts another agent."""
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_IDLE_S", "30")
    for rank in (0, 1):
        job.submit(rank)
    job.finish()
    job.die()
    stop(job, 0)
    wait_for(lambda: "completes its open saves, for" in log_of(job, 0), WITHIN_S, "the log line of the stopping agent")
    store = job.stores[0]
    try:
        post = register_for_save(store, None)
        assert not post.silence
        assert job.files() == [FILES, FILES]
        now = read_endpoint(store.agent_directory())
        assert now is not None
        assert now.pid != job.agents[0].endpoint.pid
        document = {"checkpoint_id": "step-2", "session": "t", "overwrite": False, "coordinator": job.nodes[0]}
        with AgentClient(now.local_address()) as client:
            client.call("POST", f"/v1/saves/{NEXT}", {**document, "ticket": "", "peers": [now.address().to_json()]})
    finally:
        stop_agent(store.root)


@pytest.mark.parametrize("job", [(SLOW, "")], indirect=True)
def test_a_supervised_agent_replaces_the_agent_of_ranks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervised agent, of systemd or kubelet, replaces the agent that ranks have started, after the open save is
    finished.

    The ranks still run, so their agent would not exit on idle. A rank that begins a save waits for the end of their
    agent, and then uses the supervised one. A second supervised agent is refused.
    """
    monkeypatch.setattr(launch, "_POLL_S", 0.5)  # the supervised agent polls more often
    monkeypatch.setattr(launch, "DRAIN_S", WITHIN_S / 2)
    for rank in (0, 1):
        job.submit(rank)
    job.finish()
    store = job.stores[0]
    ensure_agent(store, "127.0.0.1")

    def begin_save() -> NodePost:
        wait_for(
            lambda: "completes its open saves, for" in log_of(job, 0), WITHIN_S, "the log line of the stopping agent"
        )
        return register_for_save(store, None)

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(begin_save)
        with running_agent(job.agents[0].root) as kept:
            assert job.agents[0].process.wait(WITHIN_S) == 0
            assert job.files()[0] == FILES
            assert kept.endpoint.port == job.agents[0].endpoint.port
            post = saving.result(WITHIN_S)
            assert not post.silence
            assert post.address.incarnation == kept.endpoint.incarnation
            assert ensure_agent(store, "127.0.0.1").pid == kept.endpoint.pid
            with pytest.raises(AssertionError, match="Another agent already serves"), running_agent(kept.root):
                pass
            assert kept.process.poll() is None
    wait_for(lambda: job.files() == [FILES, FILES], WITHIN_S, "the save on both nodes")


@pytest.mark.parametrize("job", [(SLOW, "")], indirect=True)
def test_a_stopping_agent_writes_the_shards_that_it_takes(job: Job) -> None:
    """Ranks submit a shard of a save that they opened themselves to a stopping agent: the agent writes it before it
    exits.
    """
    stop(job, 0)
    wait_for(lambda: "completes its open saves, for" in log_of(job, 0), WITHIN_S, "the log line of the stopping agent")
    store, name = job.stores[0], str(ShardName(0, 0))
    store.begin(Intent(NEXT, "step-2", "t", overwrite=False, nodes=tuple(job.nodes), coordinator=job.nodes[1]))
    job.held.append(store.lock_save(NEXT))
    fd = os.memfd_create("staged")
    os.write(fd, b"content")
    submitted = submit(store, SubmittedShard(WantedCopies(NEXT, name, job.nodes[0], ()), [(0, 0, 7)]), [fd])
    os.close(fd)
    job.submitted.append(submitted)
    with job.agents[0].client() as client:
        client.call("POST", f"/v1/saves/{SAVE}/abort", {"why": "a rank failed", "ticket": TICKET})
    assert submitted.wait().name == name
    job.die()
    assert job.agents[0].process.wait(WITHIN_S) == 0


@pytest.mark.parametrize("job", [(LONG, "")], indirect=True)
def test_a_second_sigterm_ends_the_agent_at_once(job: Job) -> None:
    """The log lists the unfinished work by save and shard."""
    job.submit(0)
    job.submit(1)
    job.finish()
    stop(job, 0)
    wait_for(lambda: "completes its open saves, for" in log_of(job, 0), WITHIN_S, "the log line of the stopping agent")
    stop(job, 0)
    assert job.agents[0].process.wait(DRAIN_S / 2) == 0
    assert (
        f"received another signal to stop; exits with this unfinished: save {SAVE}: __0_0.distcp is not written"
        in log_of(job, 0)
    )


@pytest.fixture
def short_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_DRAIN_S", "1")


@pytest.mark.usefixtures("short_stay")
@pytest.mark.parametrize("job", [(LONG, "")], indirect=True)
def test_a_stopping_agent_exits_after_drain_s(job: Job) -> None:
    """A shard that is never written keeps the agent for `--drain-s`. The log lists the unfinished work."""
    job.submit(0)
    stop(job, 0)
    assert job.agents[0].process.wait(DRAIN_S / 2) == 0
    assert (
        f"received the signal to stop 1 s ago; exits with this unfinished: save {SAVE}: __0_0.distcp is not written"
        in log_of(job, 0)
    )


@pytest.mark.long
@pytest.mark.parametrize("job", [("", "commit.checked=kill")], indirect=True)
def test_a_stopping_agent_does_not_wait_for_a_dead_node(job: Job) -> None:
    """The other node's agent is killed before it has published the save: the stopping agent publishes and exits."""
    job.submit(0)
    job.submit(1)
    job.finish()
    job.die()
    assert job.agents[1].process.wait(WITHIN_S) == -signal.SIGKILL
    stop(job, 0)
    assert job.agents[0].process.wait(DRAIN_S / 2) == 0
    assert job.files()[0] == FILES


UNLUCKY = """
import signal, sys, threading
from replicated_ckpt.agent.__main__ import main

class Unlucky(threading.Event):
    def wait(self, timeout=None):
        if timeout is not None and threading.current_thread() is threading.main_thread():
            with self._cond:  # as every wait does for a moment
                signal.raise_signal(signal.SIGTERM)
        return super().wait(timeout)

threading.Event = Unlucky
sys.exit(main())
"""


def test_sigterm_in_the_middle_of_a_wait_ends_the_agent(tmp_path: Path) -> None:
    """SIGTERM arrives while the main thread holds the lock of the event that the handler sets: the agent does not
    deadlock.
    """
    command = [sys.executable, "-c", UNLUCKY, "--root", str(tmp_path / "root")]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(command, env=environment, timeout=30, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "stopping on SIGTERM" in done.stderr
    assert "stopped serving" in done.stderr
