"""What the hand-over of a shard or a save to this node's agent says when it cannot be done."""

import os
import resource
import time
from pathlib import Path

import pytest

from replicated_ckpt.agent.saves.finish import Outline
from replicated_ckpt.agent.state.log_file import LOG_NAME
from replicated_ckpt.core.manifest import Manifest, NodeEntry
from replicated_ckpt.dcp.hand_over import finishing, layout
from replicated_ckpt.dcp.hand_over.finishing import AgentSilent, Handing, finish_by_agent
from replicated_ckpt.dcp.hand_over.layout import ShardLayout, TooMuchElsewhere
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.stores.local.store import LocalStore

SAVE = "5" * 32


def outline(node: str) -> Outline:
    nodes = (NodeEntry(node, "host", None, (0,)),)
    manifest = Manifest(
        SAVE,
        "step-1",
        1,
        time.time(),
        world_size=1,
        copies=1,
        metadata_bytes=1,
        metadata_crc32c=0,
        nodes=nodes,
        shards={},
        lineage="a" * 16,
    )
    return Outline(manifest, {}, 1, must_have_all=True)


def test_an_agent_that_stays_away_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again and asked three times; then the error names the save, and the log under the name that it has."""
    monkeypatch.setattr(finishing, "_PAUSE_S", 0.01)
    store = LocalStore(tmp_path)
    started: list[None] = []
    with pytest.raises(AgentSilent, match=SAVE) as raised:
        finish_by_agent(store, outline(store.node_id()), Handing(lambda: started.append(None)))
    assert len(started) == 2
    assert f"ROOT/{store.root_agent_directory().name}/{LOG_NAME} " in raised.value.hint


def test_a_shard_that_lies_elsewhere_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank writes it itself then, and the hint says that nothing is to be done."""
    monkeypatch.setattr(layout, "BETWEEN_BYTES_MAX", 8)
    shard = ShardLayout(memoryview(bytearray(16)))
    try:
        shard.write(memoryview(b"12345678"))
        with pytest.raises(TooMuchElsewhere, match="More than 8 bytes") as raised:
            shard.write(memoryview(b"9"))
    finally:
        shard.close()
    assert "nothing is to be done" in raised.value.hint


def test_a_shard_for_which_there_is_no_memory_is_not_handed_over() -> None:
    """The rank writes it itself, too; and the descriptor is closed, though what it was to have cannot be written."""
    before, shard = resource.getrlimit(resource.RLIMIT_FSIZE), ShardLayout(memoryview(bytearray(16)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        shard.write(memoryview(b"12345678"))
        with pytest.raises(StoreUnavailable, match="File too large"):
            shard.finish()
        shard.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(shard.between)
