"""A rank's memory that was submitted to an agent is not reused while a stopped agent may continue and read it."""

import gc
import os
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.dcp.save import submission
from replicated_ckpt.dcp.save.submission import ShardLayout
from replicated_ckpt.dcp.staging.segment import descriptor_of, lease_segment
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.local_messages import connect, listen, receive_message, send_message
from tests.agent.agents import wait_for

SAVE = "b" * 32
WITHIN_S = 20.0
BYTES = 4096
SILENT_S = 0.2


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


@pytest.fixture
def agent(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The listening socket of a stopped agent. Ranks wait only a moment for an answer."""
    monkeypatch.setattr(submission, "PROGRESS_TIMEOUT_S", SILENT_S)
    monkeypatch.setattr(submission, "_FOLLOW_PAUSE_S", 0.01)
    monkeypatch.setattr(submission.log, "disabled", True)  # pytest keeps logged errors with their frames' variables
    store.node_id()
    with listen(store.agent_directory()) as listener:
        listener.settimeout(WITHIN_S)
        yield listener


def is_free(lease: "weakref.ref[memoryview]") -> bool:
    """Whether the memory of a lease was returned to the pool."""
    gc.collect()
    return lease() is None


def accept_submission(agent: socket.socket) -> socket.socket:
    """Accepts a submission and closes its descriptors. Returns the connection."""
    connection, _ = agent.accept()
    _, descriptors = receive_message(connection)
    for descriptor in descriptors:
        os.close(descriptor)
    return connection


def test_a_submission_without_an_answer(store: LocalStore, agent: socket.socket) -> None:
    """The agent does not answer in time, and may read the message later: the memory is kept until the agent closes the
    connection.
    """
    staged = lease_segment(BYTES, lambda: 1 << 30)
    shard = SubmittedShard(WantedCopies(SAVE, str(ShardName(0, 0)), "node"), [(0, 0, BYTES)])
    with pytest.raises(StoreUnavailable):
        submission.submit(store, shard, [descriptor_of(staged)], staged)
    lease = weakref.ref(staged)
    del staged
    assert not is_free(lease)
    with accept_submission(agent) as connection:
        assert not is_free(lease)
        assert connection.recv(1) == b"", "the rank has closed its end"
    wait_for(lambda: is_free(lease), WITHIN_S, "the release of the memory")


def test_an_agent_that_stops_with_a_shard(store: LocalStore, agent: socket.socket) -> None:
    """The rank gives up after some tries, which ends the save on this node. The memory is kept as long as the agent
    lives.
    """
    staged = lease_segment(BYTES, lambda: 1 << 30)
    layout = ShardLayout(staged)
    layout.finish_layout()
    shard = SubmittedShard(WantedCopies(SAVE, str(ShardName(0, 0)), "node"), [(0, 0, BYTES)])
    taken = connect(store.agent_directory(), SILENT_S)
    connection, _ = agent.accept()
    send_message(connection, {"state": "working"})
    following = submission.Follower(store, shard, layout, staged, lambda: None, submission.Submission(taken))
    lease = weakref.ref(staged)
    del staged
    assert isinstance(following.end.exception(WITHIN_S), StoreUnavailable)
    agent.close()  # a repeated submission is refused
    assert not is_free(lease)
    connection.close()
    wait_for(lambda: is_free(lease), WITHIN_S, "the release of the memory")
