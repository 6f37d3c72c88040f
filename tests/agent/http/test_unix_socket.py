"""The agent's local door: what goes wrong for one rank closes it for none."""

import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from replicated_ckpt.agent.http.unix_socket import UnixSocketServer
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.dcp.save.submission import submit
from replicated_ckpt.errors import SaveAborted
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.local.store import LocalStore


def test_too_many_open_files_for_a_moment_do_not_close_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has no descriptor left for one rank; a moment later it answers: here, that no such save is open."""
    store = LocalStore(tmp_path / "root")
    unix_socket = UnixSocketServer(store.agent_directory(), NodeService(store))
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
