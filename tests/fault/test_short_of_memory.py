"""An agent that runs out of memory for a moment keeps running, and reports the cause in an error that can be sent."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicated_ckpt.agent.process import Agent
from replicated_ckpt.config import AgentConfig
from replicated_ckpt.core.layout import METADATA_NAME
from replicated_ckpt.errors import SaveAborted, StoreError
from replicated_ckpt.node.saves import finish, submissions
from replicated_ckpt.node.saves.service import NodeService
from replicated_ckpt.node.saves.shard_copies import WantedCopies
from replicated_ckpt.node.saves.submissions import SubmittedShard
from replicated_ckpt.stores.local.directories.intent import Intent
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.test_submissions import METADATA, SAVE, outline_of

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]
NAME = "__0_0.distcp"


def refuse(*_: object, **__: object) -> Any:
    raise MemoryError


@pytest.fixture
def service(tmp_path: Path) -> NodeService:
    """A node with one open save."""
    service = NodeService(LocalStore(tmp_path / "root"))
    service.open_save(Intent(SAVE, "step-1", "session", overwrite=False, coordinator=service.node_id))
    return service


def test_a_shard_that_could_not_be_written_fails_at_once(service: NodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of waiting for the shard raise a StoreError. Any other error would break the connection, and the rank
    would retry for 20 s.
    """
    monkeypatch.setattr(submissions, "write_copies", refuse)
    shard = SubmittedShard(WantedCopies(SAVE, NAME, service.node_id), [])
    future = service.submissions.take_shard(shard, [os.memfd_create("shard")])
    for ask in (lambda: future.result(20), lambda: service.submissions.wait_for_shards(SAVE, [NAME])):
        with pytest.raises(StoreError, match=f"write '{NAME}' at this node's agent: MemoryError"):
            ask()


@pytest.mark.parametrize("place", ["_collect", "_note_nodes"])
def test_a_save_that_could_not_be_finished_reports_the_cause(
    service: NodeService, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """An undecided save is aborted. A decided save stays, and the next request for its state publishes it."""
    outline = outline_of([service.node_id, "b" * 12])
    outline = replace(outline, manifest=replace(outline.manifest, shards={}), buddies_by_shard={})
    service.store.put_small(SAVE, METADATA_NAME, METADATA)
    monkeypatch.setattr(finish.Finisher, place, refuse)
    error = service.finisher.begin_finish(outline).exception(20)
    assert isinstance(error, StoreError), error
    assert "MemoryError" in error.message
    is_decided = place == "_note_nodes"
    assert service.state_of(SAVE)["state"] == ("committed" if is_decided else "unknown")
    with pytest.raises(SaveAborted, match="is not open" if is_decided else r"not all written: .*MemoryError"):
        service.check_open(SAVE)


def test_a_failed_abort_does_not_hide_the_first_error(service: NodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The abort fails as well: the error that ranks get is that of the save, not that of the abort."""
    monkeypatch.setattr(finish.Finisher, "_collect", refuse)
    monkeypatch.setattr(service.finisher, "_abort", mock.Mock(side_effect=StoreError("the disk", "abort", SAVE, "EIO")))
    error = service.finisher.begin_finish(outline_of([service.node_id, "b" * 12])).exception(20)
    assert isinstance(error, StoreError), error
    assert "MemoryError" in error.message


def test_an_agent_survives_a_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One check of the agent's root and clients fails with MemoryError: the agent logs it, and checks again."""
    agent, looks = Agent(AgentConfig(str(tmp_path), idle_exit_s=60.0)), [refuse, lambda *_: True]
    monkeypatch.setattr("replicated_ckpt.agent.process._LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(Agent, "_is_over", lambda *_: looks.pop(0)())
    monkeypatch.setattr(Agent, "_is_working", lambda _: True)
    wait: Callable[..., None] = agent._wait
    waiting = threading.Thread(target=wait, args=(tmp_path, None), daemon=True)
    waiting.start()
    waiting.join(20)
    assert (waiting.is_alive(), looks) == (False, [])
    assert "cannot check its root and its clients: MemoryError()" in caplog.text
