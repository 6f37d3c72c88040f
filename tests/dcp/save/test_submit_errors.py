"""Errors when a shard or a save cannot be submitted to this node's agent."""

import errno
import os
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedWriter
from replicated_ckpt.agent.state.log_file import LOG_NAME
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.core.manifest import Manifest, NodeEntry
from replicated_ckpt.dcp.save import submission
from replicated_ckpt.dcp.save.submission import AgentSilent, ShardLayout, TooMuchElsewhere, finish_by_agent
from replicated_ckpt.errors import StoreUnavailable
from replicated_ckpt.node.saves.finish import Outline
from replicated_ckpt.stores.local.store import LocalStore
from tests.agent.agents import running_agent
from tests.gloo import group_of_one

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


def test_an_agent_that_does_not_answer_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent agent is asked three times and restarted twice. Then AgentSilent names the save, and the hint names the
    agent's log.
    """
    monkeypatch.setattr(submission, "_PAUSE_S", 0.01)
    store = LocalStore(tmp_path)
    started: list[None] = []
    with pytest.raises(AgentSilent, match=SAVE) as raised:
        finish_by_agent(store, outline(store.node_id()), lambda: started.append(None))
    assert len(started) == 2
    assert f"ROOT/{store.root_agent_directory().name}/{LOG_NAME} " in raised.value.hint


def test_a_shard_outside_the_staged_memory_is_not_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard with too many bytes outside the staged memory is not submitted. The hint states that no action is needed,
    as the rank writes it.
    """
    monkeypatch.setattr(submission, "BETWEEN_BYTES_MAX", 8)
    shard = ShardLayout(memoryview(bytearray(16)))
    try:
        shard.write(memoryview(b"12345678"))
        with pytest.raises(TooMuchElsewhere, match="More than 8 bytes") as raised:
            shard.write(memoryview(b"9"))
    finally:
        shard.close()
    assert "No action is needed" in raised.value.hint


def test_a_shard_without_memory_is_not_submitted() -> None:
    """There is no memory for the bytes between the tensors: StoreUnavailable is raised, and the descriptor is closed."""
    before, shard = resource.getrlimit(resource.RLIMIT_FSIZE), ShardLayout(memoryview(bytearray(16)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
    try:
        shard.write(memoryview(b"12345678"))
        with pytest.raises(StoreUnavailable, match="File too large"):
            shard.finish_layout()
        shard.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(shard.between)


@pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning")
def test_a_rank_without_a_descriptor_to_submit_writes_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that cannot get a descriptor for the submission writes its shard itself, and the checkpoint is complete."""
    make = os.memfd_create

    def refuse(name: str, *flags: int) -> int:
        if name == "replicated-ckpt-between":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make(name, *flags)

    monkeypatch.setattr(os, "memfd_create", refuse)
    with running_agent(tmp_path, "--idle-exit-s", "60"), group_of_one():
        state, writer = {"t": torch.ones(1 << 16)}, ReplicatedWriter(tmp_path)
        dcp.async_save(state, checkpoint_id="step-1", storage_writer=writer).result(60.0)  # type: ignore[union-attr]
    assert "this rank writes its shards itself" in caplog.text
    assert main(["verify", "step-1", "--root", str(tmp_path)]) == ExitCode.OK
