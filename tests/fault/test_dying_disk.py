"""A disk fails in the middle of a load: the load reads from another node that has copies."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.stores.local.versions.readers import lock_version
from tests.agent.agents import running_agent, wait_for
from tests.agent.repair.test_reprotect import meet
from tests.stores.files.test_existence import refused

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
SHARD = "__0_0.distcp"
Dies = Callable[[Path, ExitStack, pytest.MonkeyPatch], None]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """The root of a node whose checkpoint has copies on another node. Both agents run."""
    roots = [tmp_path / "node0", tmp_path / "node1"]
    with running_agent(roots[0]) as own, running_agent(roots[1]) as other:
        writer = ReplicatedWriter(roots[0], copies=2)
        dcp.save({"w": torch.arange(1000.0)}, checkpoint_id="step-1", storage_writer=writer)
        meet(own, other)
        wait_for((roots[1] / "step-1" / SHARD).exists, 30, "the copy")
        yield roots[0]


def refuse_all(root: Path, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    """Every access to the checkpoint's directory fails with EIO."""
    del patch
    stack.enter_context(refused(root / "step-1", errno.EIO))


def refuse_size(root: Path, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
    """The shard can be opened, but reading its size fails with EIO."""
    del stack
    fstat, shard, asked = os.fstat, str(root / "step-1" / SHARD), []

    def failing(fd: int) -> os.stat_result:
        if os.readlink(f"/proc/self/fd/{fd}") == shard:  # noqa: PTH115
            asked.append(fd)
        if len(asked) > 1 and fd == asked[-1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), shard)
        return fstat(fd)

    patch.setattr(os, "fstat", failing)


@pytest.mark.parametrize("is_locked", [False, True])
@pytest.mark.parametrize("dies", [refuse_all, refuse_size])
def test_the_other_nodes_copy_is_loaded(
    root: Path, monkeypatch: pytest.MonkeyPatch, dies: Dies, is_locked: bool
) -> None:
    """The disk fails before or after the load has locked the version."""
    state = {"w": torch.zeros(1000)}
    with ExitStack() as stack, monkeypatch.context() as patch:

        def lock(*arguments: Any) -> Any:
            lock = lock_version(*arguments) if is_locked else None
            dies(root, stack, patch)
            return lock if is_locked else lock_version(*arguments)

        patch.setattr("replicated_ckpt.dcp.load.load_attempt.lock_version", lock)
        reader = ReplicatedReader(root)
        dcp.load(state, checkpoint_id="step-1", storage_reader=reader)
    assert torch.equal(state["w"], torch.arange(1000.0))
    assert reader.last_load is not None
    assert (reader.last_load.bytes_local, reader.last_load.bytes_peer > 0) == (0, True)
