"""An agent that gets no memory for a moment stays, and says of what that kept it, in an error that can be sent."""

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
    """Of a node on which a save is open."""
    service = NodeService(LocalStore(tmp_path / "root"))
    service.open_save(Intent(SAVE, "step-1", "session", overwrite=False, coordinator=service.node_id))
    return service


def test_a_shard_that_is_not_written_ends_its_save_at_once(
    service: NodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever way it is asked for. Of an error of another kind the connection broke, and was tried again for 20 s."""
    monkeypatch.setattr(submissions, "write_copies", refuse)
    shard = SubmittedShard(WantedCopies(SAVE, NAME, service.node_id), [])
    future = service.submissions.take_shard(shard, [os.memfd_create("shard")])
    for ask in (lambda: future.result(20), lambda: service.submissions.wait_for_shards(SAVE, [NAME])):
        with pytest.raises(StoreError, match=f"write '{NAME}' at this node's agent: MemoryError"):
            ask()


@pytest.mark.parametrize("place", ["_collect", "_note_nodes"])
def test_a_save_that_is_not_finished_says_why(
    service: NodeService, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Before it is decided it is aborted; after that it stays, and the next who asks has it published."""
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


def test_what_is_not_removed_hides_no_reason(service: NodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk that took no shard removes nothing, either: ranks were told of that, and not of the shard."""
    monkeypatch.setattr(finish.Finisher, "_collect", refuse)
    monkeypatch.setattr(service.finisher, "_abort", mock.Mock(side_effect=StoreError("the disk", "abort", SAVE, "EIO")))
    error = service.finisher.begin_finish(outline_of([service.node_id, "b" * 12])).exception(20)
    assert isinstance(error, StoreError), error
    assert "MemoryError" in error.message


def test_an_agent_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot look at its root and its clients for once; the next look tells."""
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
