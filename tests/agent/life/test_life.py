"""The beginning of an agent's life, in this process."""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicated_ckpt.agent import process as life
from replicated_ckpt.agent.repair import reprotect
from replicated_ckpt.agent.state.endpoint import Identity, keep_identity, next_identity
from replicated_ckpt.config import AgentConfig
from replicated_ckpt.errors import ConfigInvalid, StoreError
from replicated_ckpt.node.saves import service
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from replicated_ckpt.stores.peer.client import AgentAddress, AgentClient


@contextmanager
def signals_given_back() -> Iterator[None]:
    """An agent takes over what its process does on signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_agent_that_listens_says_how_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at its first instant, when it has told nobody where it is: its last address is known to others, too."""
    answers: list[dict[str, Any]] = []

    def asked(directory: Path, identity: Identity) -> None:
        with AgentClient(AgentAddress("0" * 12, "127.0.0.1", identity.port, identity.owner_token)) as client:
            answers.append(client.call("GET", "/v1/status"))
            client.call("POST", "/v1/shutdown")

    monkeypatch.setattr(life, "keep_identity", asked)
    with signals_given_back():
        life.Agent(AgentConfig(str(tmp_path))).run()
    (answer,) = answers
    assert answer["node_id"] in (tmp_path / "node.json").read_text()
    assert answer["greeted"] is False


def test_an_idle_agent_first_settles_what_ranks_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were killed while they wrote: else their files lie there until the next job, in a memory tier as memory."""
    monkeypatch.setattr(service, "OPEN_GRACE_S", 0.5)
    monkeypatch.setattr(reprotect, "STALE_SAVE_GRACE_S", 3.0)
    store = LocalStore(tmp_path)
    left = Intent("5" * 32, "step-1", "session", overwrite=False, nodes=(store.node_id(),), coordinator=store.node_id())
    store.begin(left)
    store.path_of_staged(left.save_id, "__0_0.distcp").write_bytes(b"half of it")
    with signals_given_back():
        life.Agent(AgentConfig(str(tmp_path), idle_exit_s=0.1, round_every_s=0.2)).run()
    assert list((tmp_path / ".staging").iterdir()) == []


def test_what_a_killed_first_start_has_left_is_removed(tmp_path: Path) -> None:
    """Killed before its identity had its name: the next agent removes the file, and none of the user's."""
    rank = os.fork()
    if rank == 0:
        os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        LocalStore(tmp_path).node_id()
    os.waitpid(rank, 0)
    (tmp_path / f"mine.{rank}.tmp").touch()
    assert len(list(tmp_path.iterdir())) == 2
    with signals_given_back():
        life.Agent(AgentConfig(str(tmp_path), idle_exit_s=0.1, round_every_s=0.2)).run()
    left = {path.name for path in tmp_path.iterdir()} - {"node.json", ".agent"}
    assert [name for name in left if "node.json" in name or name.endswith(".tmp")] == [f"mine.{rank}.tmp"]


def test_a_store_that_is_another_node_has_other_tokens(tmp_path: Path) -> None:
    """`node.json` came back from a backup, or was removed alone: else each answer would be taken for the former node's."""
    before = next_identity(tmp_path, "a" * 12)
    keep_identity(tmp_path, before)
    same, other = next_identity(tmp_path, "a" * 12), next_identity(tmp_path, "b" * 12)
    assert (same.tokens, same.incarnation) == (before.tokens, before.incarnation + 1)
    assert not {other.token, other.owner_token} & {before.token, before.owner_token}
    assert other.incarnation > same.incarnation


def test_no_agent_outlasts_the_ranks_that_wait_for_its_end() -> None:
    """A rank waits 10 s longer than the usual `drain_s`: a longer one would fail its save, and is refused."""
    with pytest.raises(ConfigInvalid, match="at most 120, not 121: a rank that begins a save waits at most"):
        AgentConfig("/x", drain_s=121)
    assert AgentConfig("/x", drain_s=120).drain_s == 120


@pytest.mark.parametrize("name", ["round_every_s", "scrub_every_s"])
@pytest.mark.parametrize("seconds", [float("inf"), 1e12])
def test_no_pause_is_longer_than_a_thread_can_wait(name: str, seconds: float) -> None:
    """Its thread ended with an OverflowError, and the agent served on without re-protection, or without a scrub."""
    with pytest.raises(ConfigInvalid, match=f"{name} .*must be at most 1e\\+09"):
        AgentConfig("/x", **{name: seconds})  # type: ignore[arg-type]


def test_a_start_that_the_disk_refuses_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exit code of an agent that cannot run; a traceback and that of a defect came of its first look."""
    error = OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))
    monkeypatch.setattr(life, "remove_broken_off_writes", mock.Mock(side_effect=error))
    with signals_given_back(), pytest.raises(StoreError, match=r"start 'agent'.*Input/output error"):
        life.Agent(AgentConfig(str(tmp_path))).run()
