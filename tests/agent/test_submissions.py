"""Asynchronous saves that agents finish after ranks have submitted memory and outline, and may have ended. Real agents,
no torch.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt import failpoints
from replicated_ckpt.agent.launch import ensure_agent
from replicated_ckpt.core.integrity.checksum import crc32c
from replicated_ckpt.core.layout import METADATA_NAME, ShardName
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.dcp.save.submission import Follower, ShardLayout, Submission, submit
from replicated_ckpt.dcp.staging.segment import descriptor_of, lease_segment
from replicated_ckpt.errors import ObjectCorrupt, SaveAborted, StoreDenied
from replicated_ckpt.node.saves import finish
from replicated_ckpt.node.saves.finish import Finished, Outline
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.files.locks import DescriptorLock
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.threads import AUTOGROUP, lower_priority, lower_session_priority
from replicated_ckpt.stores.throttle import SUBMITTED_MIB_PER_S_MIN, Pace
from tests.agent.agents import RunningAgent, peers_of, running_agent, stop_agent, wait_for
from tests.marks import long

SAVE, TICKET = "b" * 32, "c" * 32
METADATA = b"what torch pickles"
FILES = {".metadata", ".manifest.json", str(ShardName(0, 0)), str(ShardName(1, 0))}
WITHIN_S = 40.0
NICE, NICE_OF_A_THREAD = 11, 16


def outline_of(nodes: Sequence[str]) -> Outline:
    """The outline of a save with one rank on each of two nodes. The first node coordinates."""
    shards = {str(ShardName(rank, 0)): ShardEntry(0, 0, rank, node, ()) for rank, node in enumerate(nodes)}
    manifest = Manifest(
        SAVE,
        "step-1",
        1,
        time.time(),
        world_size=2,
        copies=2,
        metadata_bytes=len(METADATA),
        metadata_crc32c=crc32c(METADATA),
        nodes=tuple(NodeEntry(node, "host", None, (rank,)) for rank, node in enumerate(nodes)),
        shards=shards,
        lineage="a" * 16,
    )
    buddies = {str(ShardName(rank, 0)): [nodes[1 - rank]] for rank in (0, 1)}
    return Outline(manifest, buddies, 2, must_have_all=True)


@dataclass
class Job:
    """Two ranks, one on each node: their save locks and their connections to the agents."""

    agents: list[RunningAgent]
    held: list[DescriptorLock] = field(default_factory=list)
    submitted: list[Submission] = field(default_factory=list)

    @property
    def stores(self) -> list[LocalStore]:
        return [LocalStore(agent.root) for agent in self.agents]

    @property
    def nodes(self) -> list[str]:
        return [agent.endpoint.node_id for agent in self.agents]

    def open(self) -> None:
        document = {
            "checkpoint_id": "step-1",
            "session": "s",
            "overwrite": False,
            "coordinator": self.nodes[0],
            "ticket": TICKET,
            "peers": peers_of(*self.agents),
        }
        for agent, store in zip(self.agents, self.stores, strict=True):
            with agent.client() as client:
                client.call("POST", f"/v1/saves/{SAVE}", document)
            self.held.append(store.lock_save(SAVE))

    def submit(self, rank: int, says_bytes: int = 500_000, has_bytes: int = 500_000) -> Submission:
        content = b"0123456789" * (has_bytes // 10)
        buddy = self.agents[1 - rank].endpoint.address()
        copies = WantedCopies(SAVE, str(ShardName(rank, 0)), self.nodes[rank], (buddy,))
        fd = os.memfd_create("staged")
        try:
            os.write(fd, content)
            submitted = submit(self.stores[rank], SubmittedShard(copies, [(0, 0, says_bytes)]), [fd])
        finally:
            os.close(fd)
        self.submitted.append(submitted)
        return submitted

    def finish(self) -> None:
        self.stores[0].put_small(SAVE, METADATA_NAME, METADATA)
        self.ask("finish", outline_of(self.nodes).to_json())

    def ask(self, verb: str, document: Any = None) -> dict[str, Any]:
        with self.agents[0].client() as client:
            return client.call("POST", f"/v1/saves/{SAVE}/{verb}", document)

    def die(self) -> None:
        """Releases all ranks' locks and closes their connections, as if the ranks were killed."""
        while self.held:
            self.held.pop().release()
        while self.submitted:
            self.submitted.pop().close()

    def files(self) -> list[set[str]]:
        places = [store.final("step-1") for store in self.stores]
        return [{path.name for path in place.iterdir()} if place.is_dir() else set() for place in places]

    def is_gone(self) -> bool:
        return self.files() == [set(), set()] and all(store.list_staged() == () for store in self.stores)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Two nodes and an open save. The parameter: failpoints of each agent, and optionally the agents' idle time."""
    first, second, *idle = getattr(request, "param", ("", ""))
    idle_exit = ("--idle-exit-s", idle[0] if idle else "300")
    with ExitStack() as stack:
        agents = []
        for rank, points in enumerate((first, second)):
            monkeypatch.setenv(failpoints.ENV, points)
            agents.append(stack.enter_context(running_agent(tmp_path / f"node{rank}", *idle_exit)))
        monkeypatch.delenv(failpoints.ENV)
        job = Job(agents)
        job.open()
        stack.callback(job.die)
        yield job


@pytest.mark.parametrize(
    "job",
    [("", ""), long(("agent.submitted=sleep:2", "")), ("", "agent.writing=sleep:2"), ("agent.decided=sleep:2", "")],
    indirect=True,
)
def test_a_submitted_save_needs_no_rank(job: Job) -> None:
    """All ranks die after the outline was submitted, and agents are slow: both nodes publish the same complete save."""
    for rank in (0, 1):
        job.submit(rank)
    job.finish()
    job.die()
    wait_for(lambda: job.files() == [FILES, FILES], WITHIN_S, "the save on both nodes")
    first, second = (store.catalog.manifest("step-1") for store in job.stores)
    assert first == second
    for name, entry in first.shards.items():
        assert set(entry.holders) == set(job.nodes)
        for store in job.stores:
            raw = (store.final("step-1") / name).read_bytes()
            assert (len(raw), crc32c(raw)) == (entry.size_bytes, entry.crc32c)


@pytest.mark.parametrize("job", [("agent.finishing=sleep:6", "", "1.5")], indirect=True)
def test_an_agent_that_has_written_its_shards_waits_for_the_decision(job: Job) -> None:
    """An agent without clients does not exit on idle before a slow coordinator has decided: all nodes publish."""
    for rank in (0, 1):
        job.submit(rank).wait()
    job.finish()
    job.die()
    for agent in job.agents:
        assert agent.process.wait(WITHIN_S) == 0
    assert job.files() == [FILES, FILES]


@pytest.mark.parametrize("job", [("", ""), long(("", "agent.writing=sleep:2"))], indirect=True)
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)], ids=str)
def test_a_save_without_an_outline_is_removed(job: Job, ranks: tuple[int, ...]) -> None:
    """All ranks die after they submitted shards, before the outline is submitted: the nodes with a shard remove the
    save.
    """
    for rank in ranks:
        job.submit(rank)
    job.die()
    with_part = [job.stores[rank] for rank in ranks]
    wait_for(lambda: all(store.list_staged() == () for store in with_part), WITHIN_S, "the removal of the save")
    assert job.files() == [set(), set()]


def test_forked_workers_of_a_killed_rank_do_not_keep_its_save(job: Job) -> None:
    """A forked data loader worker outlives its killed rank: the worker holds neither lock nor connection, and the save
    is removed.
    """
    reading, writing = os.pipe()
    rank = os.fork()
    if rank == 0:
        job.held.append(job.stores[0].lock_save(SAVE))
        job.submit(0)
        if (worker := os.fork()) > 0:
            os.write(writing, worker.to_bytes(4, "little"))
        signal.pause()
        os._exit(1)
    worker = int.from_bytes(os.read(reading, 4), "little")
    job.die()
    try:
        assert job.stores[0].is_locked(SAVE)
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
        wait_for(lambda: job.stores[0].list_staged() == (), WITHIN_S, "the removal of the save")
        assert job.files() == [set(), set()]
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


@pytest.fixture
def niced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that start after this fixture write asynchronous saves at this niceness."""
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_NICE", str(NICE))


@pytest.mark.usefixtures("niced")
@pytest.mark.parametrize("job", [("", "agent.receiving=sleep:600")], indirect=True)
def test_threads_of_an_asynchronous_save_are_niced(job: Job) -> None:
    """The threads that write and receive a shard run at the niceness of --nice. The main thread keeps its own."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    job.submit(0)
    for agent in job.agents:
        threads = Path(f"/proc/{agent.process.pid}/task")
        wait_for(partial(has_niced_thread, threads), WITHIN_S, "a thread at the wanted niceness")
        assert niceness(threads)[str(agent.process.pid)] == usual
    assert list(niceness(Path(f"/proc/{job.agents[1].process.pid}/task")).values()).count(NICE_OF_A_THREAD) == 1


def has_niceness(autogroup: Path) -> bool:
    return autogroup.read_text().split()[-1] == str(NICE)


@pytest.mark.usefixtures("niced")
@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not share processors out by session")
def test_an_agents_session_is_niced_where_threads_cannot_be(job: Job) -> None:
    """With autogroups, niceness counts only among the agent's threads, so the agent lowers its session. It leaves the
    session of another leader alone.
    """
    for agent in job.agents:
        autogroup = Path(f"/proc/{agent.process.pid}/autogroup")
        wait_for(partial(has_niceness, autogroup), WITHIN_S, "the niceness of the session")
    before = AUTOGROUP.read_text()
    module = lower_session_priority.__module__
    call = f"import threading, {module} as m; m.lower_session_priority({NICE}); print(threading.active_count())"
    threads = subprocess.run([sys.executable, "-c", call], check=True, capture_output=True, text=True).stdout
    assert threads == "1\n", "a process that does not lead its session starts no thread"
    assert AUTOGROUP.read_text() == before


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that start after this fixture copy at a limited rate."""
    monkeypatch.setenv("REPLICATED_CKPT_AGENT_COPY_MIB_PER_S", str(SUBMITTED_MIB_PER_S_MIN))


@pytest.mark.usefixtures("paced")
def test_an_asynchronous_save_keeps_the_copy_rate(job: Job) -> None:
    """An asynchronous save takes at least the time that the limited copy rate allows."""
    size_bytes = 12_000_000
    began = time.monotonic()
    assert len(job.submit(0, size_bytes, size_bytes).wait().holders) == 2
    assert time.monotonic() - began > size_bytes / (SUBMITTED_MIB_PER_S_MIN << 20) - Pace.BURST_S


def test_a_higher_niceness_is_kept() -> None:
    """A thread that already has a higher niceness keeps it."""
    found = []

    def work(own: int, asked: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        lower_priority(asked)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    for own, asked in ((19, NICE), (19, 0), (19, 19)):
        thread = threading.Thread(target=work, args=(own, asked))
        thread.start()
        thread.join()
    assert found == [19, 19, 19]


def has_niced_thread(threads: Path) -> bool:
    return NICE_OF_A_THREAD in niceness(threads).values()


def niceness(threads: Path) -> dict[str, int]:
    """Niceness by thread id, for the threads that still run."""
    found = {}
    for path in threads.glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[path.parent.name] = int(path.read_text().rpartition(")")[2].split()[16])
    return found


def test_finish_returns_the_published_manifest(job: Job) -> None:
    """`finish` returns the published manifest and the holders of each shard."""
    for rank in (0, 1):
        job.submit(rank)
    job.finish()
    finished = Finished.from_json(job.ask("finish"))
    assert finished.manifest == job.stores[0].catalog.manifest("step-1").encode().decode()
    assert [len(copies.holders) for copies in finished.written] == [2, 2]
    assert [submitted.wait().size_bytes for submitted in job.submitted] == [
        copies.size_bytes for copies in finished.written
    ]


def test_a_shard_that_cannot_be_written_aborts_the_save(job: Job) -> None:
    """A rank's memory is shorter than announced: the save is aborted, the waiting rank gets the reason, and no file
    remains.
    """
    job.submit(0)
    job.submit(1, says_bytes=1 << 20)
    job.finish()
    with pytest.raises(ObjectCorrupt, match="shorter than the rank announced"):
        job.ask("finish")
    job.die()
    wait_for(job.is_gone, WITHIN_S, "the removal of the save")


@pytest.mark.long  # AGAIN_WITHIN_S; the next test does the same with a shorter timeout
@pytest.mark.parametrize("job", [("", "agent.writing=sleep:600")], indirect=True)
def test_an_agent_and_all_ranks_die(job: Job) -> None:
    """An agent is killed with its shard: the coordinator aborts the save and removes it."""
    job.submit(0)
    job.submit(1)
    job.agents[1].process.kill()
    job.finish()
    with pytest.raises(SaveAborted, match="was aborted"):
        job.ask("finish")
    job.die()
    wait_for(lambda: job.stores[0].list_staged() == (), WITHIN_S, "the removal of the save")


def test_a_save_that_waits_for_a_dead_agent_is_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator, in this process, aborts a save when another agent has not answered for `AGAIN_WITHIN_S`."""
    monkeypatch.setattr(finish, "AGAIN_WITHIN_S", 1.0)
    service = NodeService(LocalStore(tmp_path / "own"))
    with running_agent(tmp_path / "other") as other:
        nodes = (service.node_id, other.endpoint.node_id)
        service.learn_peers(peers_of(other))
    service.open_save(Intent(SAVE, "step-1", "s", overwrite=False, nodes=nodes, coordinator=nodes[0], ticket=TICKET))
    shard, fd = (
        SubmittedShard(WantedCopies(SAVE, str(ShardName(0, 0)), nodes[0]), [(0, 0, 7)]),
        os.memfd_create("staged"),
    )
    os.write(fd, b"content")
    service.submissions.take_shard(shard, [fd]).result(WITHIN_S)
    service.store.put_small(SAVE, METADATA_NAME, METADATA)
    began = time.monotonic()
    service.finish_save(outline_of(nodes))
    with pytest.raises(SaveAborted, match="was aborted"):
        service.finisher.end_of(SAVE).result(WITHIN_S)
    assert time.monotonic() - began > finish.AGAIN_WITHIN_S
    assert service.store.list_staged() == ()


@pytest.mark.parametrize("job", [("agent.writing=sleep:600", "")], indirect=True)
def test_a_shard_is_submitted_again_to_a_new_agent(job: Job) -> None:
    """An agent dies with a shard: the rank starts another agent and submits the same memory again."""
    store, size = job.stores[0], 1 << 20
    staged = lease_segment(size, lambda: 1 << 30)
    staged[:size] = bytes(range(256)) * (size // 256)
    layout = ShardLayout(staged)
    layout.write(memoryview(b"head"))
    layout.refer(staged[:size])
    layout.finish_layout()
    shard = SubmittedShard(WantedCopies(SAVE, str(ShardName(0, 0)), job.nodes[0]), layout.pieces)
    submitted = submit(store, shard, [descriptor_of(staged), layout.between])
    job.agents[0].process.kill()
    follower = Follower(store, shard, layout, staged, lambda: ensure_agent(store, "127.0.0.1"), submitted)
    try:
        written = follower.end.result(WITHIN_S)
        raw = store.path_of_staged(SAVE, str(ShardName(0, 0))).read_bytes()
        assert raw[: size + 4] == b"head" + bytes(staged[:size])
        assert (len(raw), crc32c(raw)) == (written.size_bytes, written.crc32c)
    finally:
        follower.leave()
        job.die()  # otherwise the agent stays for its save
        stop_agent(store.root)


def test_an_aborted_save_is_not_finished(job: Job) -> None:
    """A rank has aborted the save: an outline that arrives later is refused."""
    job.submit(0)
    with job.agents[0].client() as client:
        client.call("POST", f"/v1/saves/{SAVE}/abort", {"why": "a rank failed", "ticket": TICKET})
    with pytest.raises(SaveAborted, match="a rank failed"):
        job.ask("finish", outline_of(job.nodes).to_json())


def test_the_written_shards_are_readable_with_the_ticket(job: Job) -> None:
    """A peer needs the save's ticket to read the written shards, and only the node's own user can finish a save."""
    job.submit(0).wait()
    names = {"shards": [str(ShardName(0, 0))]}
    with job.agents[0].peer() as peer:
        with pytest.raises(StoreDenied):
            peer.call("POST", f"/v1/saves/{SAVE}/written", names)
        answer = peer.call("POST", f"/v1/saves/{SAVE}/written", {**names, "ticket": TICKET})
        with pytest.raises(StoreDenied):
            peer.call("POST", f"/v1/saves/{SAVE}/finish", outline_of(job.nodes).to_json())
    assert answer["written"][0]["holders"] == job.nodes
