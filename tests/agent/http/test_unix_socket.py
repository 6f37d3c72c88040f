"""The agent's Unix socket: an error of one rank does not close it for the others."""

import contextlib
import errno
import os
import queue
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.http.unix_socket import UnixSocketServer
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.rank_report import RankReport
from replicated_ckpt.dcp.runtime.agent_report import send_report
from replicated_ckpt.dcp.save.submission import submit
from replicated_ckpt.errors import SaveAborted
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.local_messages import listen
from tests.stopwatch import Stopwatch


def test_too_many_open_files_do_not_close_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`accept` fails once with EMFILE. A moment later the agent answers: here, that no such save is open."""
    store = LocalStore(tmp_path / "root")
    unix_socket = UnixSocketServer(store.agent_directory(), NodeService(store), list[RankReport]().append)
    failures, accept = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))], socket.socket.accept

    def accept_later(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    unix_socket.start()
    staged = os.memfd_create("staged")
    try:
        with pytest.raises(SaveAborted, match="is not open"):
            submit(store, SubmittedShard(WantedCopies("b" * 32, str(ShardName(0, 0)), store.node_id()), []), [staged])
    finally:
        os.close(staged)
        unix_socket.close()
    assert not failures


def save_of(rank: int) -> RankReport:
    return RankReport("save", "run/step-1", "b" * 32, rank, "host-a", 1e9, 2.5, {"plan": 0.5}, {"written": 7}, copies=2)


def test_reports_of_ranks_arrive_as_they_were_sent(tmp_path: Path) -> None:
    """A report arrives unchanged. An invalid one is refused in the log, and the next one is taken."""
    store = LocalStore(tmp_path / "root")
    taken: queue.Queue[RankReport] = queue.Queue()
    unix_socket = UnixSocketServer(store.agent_directory(), NodeService(store), taken.put)
    unix_socket.start()
    try:
        send_report(store, replace(save_of(0), error="no class; of an error"))
        send_report(store, save_of(1))
        assert taken.get(timeout=10) == save_of(1)
        assert taken.empty()
    finally:
        unix_socket.close()


def test_sending_a_report_does_not_wait_for_an_agent(tmp_path: Path, stopwatch: Stopwatch) -> None:
    """No agent runs, or a stopped one has a full socket: sending a report takes less than a second."""
    store = LocalStore(tmp_path / "root")
    send_report(store, save_of(0))
    with contextlib.closing(listen(store.agent_directory())) as listener:
        listener.listen(0)
        began = stopwatch.now()
        for rank in range(3):
            send_report(store, save_of(rank))
        assert stopwatch.now() - began < 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "sing"),
        ("rank", -1),
        ("seconds", float("nan")),
        ("seconds", True),
        ("ended_unix_s", "now"),
        ("phases", {'plan"} 1': 1.0}),
        ("phases", {"plan": -1.0}),
        ("phases", {f"p{'a' * n}": 1.0 for n in range(17)}),
        ("sizes", {"written": 1.5}),
        ("sizes", {"written": 1 << 63}),
        ("copies", -1),
        ("error", "a b"),
        ("host", "a\nb"),
        ("checkpoint_id", "x" * 2000),
    ],
)
def test_a_report_with_an_invalid_field_is_refused(field: str, value: object) -> None:
    """Each field becomes a number or a label of a metric."""
    valid = save_of(0).to_json()
    assert RankReport.from_json({**valid, "of_a_later_release": 1}) == save_of(0)
    with pytest.raises((TypeError, ValueError)):
        RankReport.from_json({**valid, field: value})
