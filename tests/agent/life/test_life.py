"""The start of an agent, in this process."""

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
def restored_signals() -> Iterator[None]:
    """Restores the signal handlers that an agent replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_agent_answers_before_its_endpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent answers `status` before it has written its endpoint file: peers may know its address from before."""
    answers: list[dict[str, Any]] = []

    def asked(directory: Path, identity: Identity) -> None:
        with AgentClient(AgentAddress("0" * 12, "127.0.0.1", identity.port, identity.owner_token)) as client:
            answers.append(client.call("GET", "/v1/status"))
            client.call("POST", "/v1/shutdown")

    monkeypatch.setattr(life, "keep_identity", asked)
    with restored_signals():
        life.Agent(AgentConfig(str(tmp_path))).run()
    (answer,) = answers
    assert answer["node_id"] in (tmp_path / "node.json").read_text()
    assert answer["greeted"] is False


def test_an_idle_agent_removes_stale_saves_before_it_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks were killed while they wrote: an idle agent removes their staging before it exits."""
    monkeypatch.setattr(service, "OPEN_GRACE_S", 0.5)
    monkeypatch.setattr(reprotect, "STALE_SAVE_GRACE_S", 3.0)
    store = LocalStore(tmp_path)
    left = Intent("5" * 32, "step-1", "session", overwrite=False, nodes=(store.node_id(),), coordinator=store.node_id())
    store.begin(left)
    store.path_of_staged(left.save_id, "__0_0.distcp").write_bytes(b"half of it")
    with restored_signals():
        life.Agent(AgentConfig(str(tmp_path), idle_exit_s=0.1, round_every_s=0.2)).run()
    assert list((tmp_path / ".staging").iterdir()) == []


def test_the_temporary_file_of_a_killed_start_is_removed(tmp_path: Path) -> None:
    """A rank was killed before its identity file had its name: the next agent removes the temporary file, and no file
    of the user.
    """
    rank = os.fork()
    if rank == 0:
        os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        LocalStore(tmp_path).node_id()
    os.waitpid(rank, 0)
    (tmp_path / f"mine.{rank}.tmp").touch()
    assert len(list(tmp_path.iterdir())) == 2
    with restored_signals():
        life.Agent(AgentConfig(str(tmp_path), idle_exit_s=0.1, round_every_s=0.2)).run()
    left = {path.name for path in tmp_path.iterdir()} - {"node.json", ".agent"}
    assert [name for name in left if "node.json" in name or name.endswith(".tmp")] == [f"mine.{rank}.tmp"]


def test_a_new_node_id_gets_new_tokens(tmp_path: Path) -> None:
    """`node.json` was restored from a backup or removed: with the old tokens, answers would pass as those of the former
    node.
    """
    before = next_identity(tmp_path, "a" * 12)
    keep_identity(tmp_path, before)
    same, other = next_identity(tmp_path, "a" * 12), next_identity(tmp_path, "b" * 12)
    assert (same.tokens, same.incarnation) == (before.tokens, before.incarnation + 1)
    assert not {other.token, other.owner_token} & {before.token, before.owner_token}
    assert other.incarnation > same.incarnation


def test_drain_s_is_at_most_the_wait_of_ranks() -> None:
    """A rank waits 10 s longer than the default `drain_s`, so a larger value is refused."""
    with pytest.raises(ConfigInvalid, match="at most 120, not 121: a rank that begins a save waits at most"):
        AgentConfig("/x", drain_s=121)
    assert AgentConfig("/x", drain_s=120).drain_s == 120


@pytest.mark.parametrize("name", ["round_every_s", "scrub_every_s"])
@pytest.mark.parametrize("seconds", [float("inf"), 1e12])
def test_no_pause_is_longer_than_a_thread_can_wait(name: str, seconds: float) -> None:
    """A longer wait raises OverflowError in the thread of re-protection or scrub, and would end it."""
    with pytest.raises(ConfigInvalid, match=f"{name} .*must be at most 1e\\+09"):
        AgentConfig("/x", **{name: seconds})  # type: ignore[arg-type]


def test_a_disk_error_at_the_start_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error at the start of an agent is a StoreError, not a traceback."""
    error = OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))
    monkeypatch.setattr(life, "remove_broken_off_writes", mock.Mock(side_effect=error))
    with restored_signals(), pytest.raises(StoreError, match=r"start 'agent'.*Input/output error"):
        life.Agent(AgentConfig(str(tmp_path))).run()
