"""An agent hangs while it is asked, and continues after the caller has given up: the late request undoes nothing newer."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.dcp.save import submission
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.shard_file import FileSink
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import ANSWER_S, RunningAgent, peers_of, running_agent, wait_for

EARLIER, LATER = "a" * 32, "b" * 32
HUNG_S = 0.3
SHARD = str(ShardName(1, 0))


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[RunningAgent]]:
    """Two nodes; the first one coordinates."""
    with running_agent(tmp_path / "first") as first, running_agent(tmp_path / "second") as second:
        yield [first, second]


def open_save(agents: list[RunningAgent], at: RunningAgent, save_id: str, timeout_s: float = ANSWER_S) -> None:
    document = {
        "checkpoint_id": f"step-{save_id[0]}",
        "session": "s",
        "overwrite": False,
        "coordinator": agents[0].endpoint.node_id,
        "peers": peers_of(*agents),
    }
    with at.client(timeout_s) as client:
        client.call("POST", f"/v1/saves/{save_id}", document)


def log_of(agent: RunningAgent) -> str:
    return (agent.root / "agent.out").read_text()


def test_a_late_opening_does_not_abort_a_newer_save(agents: list[RunningAgent]) -> None:
    """The stopped agent continues after the job has opened its next save without that agent: the late request does not
    abort the next save.
    """
    first, second = agents
    stores = [LocalStore(agent.root) for agent in agents]
    second.signal(signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        open_save(agents, second, EARLIER, HUNG_S)
    open_save(agents, first, LATER)
    stores[1].begin(Intent(LATER, "step-b", "s", False, coordinator=first.endpoint.node_id))
    with stores[0].lock_save(LATER), stores[1].lock_save(LATER):
        second.signal(signal.SIGCONT)
        is_seen = lambda: "no longer waits for an answer" in log_of(second) or stores[1].is_staged(EARLIER)  # noqa: E731
        wait_for(is_seen, ANSWER_S, "the late request")
        with second.client() as client:
            assert client.call("GET", f"/v1/saves/{EARLIER}")["state"] == "unknown"
        assert [store.is_staged(LATER) for store in stores] == [True, True]


def test_a_shard_that_its_rank_writes_is_not_taken(agents: list[RunningAgent], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank writes the shard itself after the agent did not take it in time. The agent continues, and does not touch
    the shard.
    """
    second = agents[1]
    open_save(agents, second, LATER)
    store, memory = LocalStore(second.root), os.memfd_create("staged")
    monkeypatch.setattr(submission, "PROGRESS_TIMEOUT_S", HUNG_S)
    second.signal(signal.SIGSTOP)
    with store.lock_save(LATER):
        shard = SubmittedShard(WantedCopies(LATER, SHARD, second.endpoint.node_id), [])
        with pytest.raises(StoreUnavailable):
            submission.submit(store, shard, [memory])
        os.close(memory)
        with FileSink.create(store.path_of_staged(LATER, SHARD)) as sink:
            sink.write(memoryview(b"the rank's"))
            second.signal(signal.SIGCONT)
            line, staged = "no longer waits for an answer", store.path_of_staged(LATER, SHARD)
            is_seen = lambda: line in log_of(second) or staged.exists()  # noqa: E731
            wait_for(is_seen, ANSWER_S, "the late request")
            sink.finish_durably()
        assert store.path_of_staged(LATER, SHARD).read_bytes() == b"the rank's"
