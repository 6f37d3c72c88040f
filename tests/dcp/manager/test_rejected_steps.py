"""Rejected steps, and steps restored too often: on the node, in a bucket, in a memory tier, and by command."""

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import (
    CheckpointManager,
    CheckpointRejected,
    ReplicatedReader,
    ReplicatedWriter,
    export_checkpoint,
)
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.dcp.memory.root import SHARED_MEMORY
from replicated_ckpt.errors import CheckpointNotFound, ConfigInvalid, ReplicatedCkptWarning
from tests.agent.agents import stop_agent
from tests.dcp.manager.test_manager_steps import state

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]


def saved(root: Path, *steps: int) -> None:
    with CheckpointManager(root, copies=1) as manager:
        for step in steps:
            manager.save(step, state(step), metrics={"loss": 1.0 / step})


def test_a_rejected_step_is_loaded_only_by_its_number(root: Path) -> None:
    """ "latest" and `best_step` skip a rejected step. By number it loads with a warning. A new save of the step ends the
    rejection.
    """
    saved(root, 1, 2, 3)
    with CheckpointManager(root, copies=1) as manager:
        assert manager.reject(3) == ()
        assert (manager.restore(state(0)), manager.latest_step(), manager.best_step("loss")) == (2, 2, 2)
        with pytest.warns(
            ReplicatedCkptWarning, match="'step-3' is loaded by its name, although a user has rejected it"
        ):
            assert manager.restore(state(0), 3) == 3
        for step in (1, 2):
            manager.reject(step)
        with pytest.raises(CheckpointRejected) as raised:
            manager.restore(state(0))
        assert raised.value.checkpoint_ids == ("step-3", "step-2", "step-1")
        assert "`manager.reject(step, undo=True)`" in raised.value.hint
        assert manager.all_steps() == (1, 2, 3)
        manager.save(3, state(3))
        assert manager.restore(state(0)) == 3
        with pytest.raises(CheckpointNotFound, match="step-9"):
            manager.reject(9)


def test_a_rejected_step_is_marked_in_the_bucket(root: Path, tmp_path: Path) -> None:
    """A rejection is recorded in the bucket, before or after the upload ends. A blank node skips the step, and stock
    torch reads it. Undo and `delete` remove the mark.
    """
    bucket = tmp_path / "bucket" / "run"
    blank = tmp_path / "blank"
    with CheckpointManager(root, copies=1, object_store=f"file://{bucket}") as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            if step > 1:
                manager.reject(step)
        manager.wait()
        assert len(list(bucket.glob("step-*/.rejected.*"))) == 2
        with CheckpointManager(blank, copies=1, object_store=f"file://{bucket}") as other:
            assert other.latest_step() == 1
        found = {"weights": torch.zeros(100)}
        dcp.load(found, storage_reader=dcp.FileSystemReader(bucket / "step-3"), no_dist=True)
        assert float(found["weights"].mean()) == 3.0
        manager.reject(2, undo=True)
        assert manager.delete(3)
        assert not list(bucket.glob("step-*/.rejected.*"))
        assert manager.latest_step() == 2
    stop_agent(blank)


def test_max_tries_counts_only_loads_of_the_newest(root: Path) -> None:
    """`max_tries` counts restores without a step number, not those by number, look-ups or exports. Once all steps are
    used up, the newest loads again.
    """
    saved(root, 1, 2)
    with CheckpointManager(root, copies=1) as manager:
        for _ in range(3):
            manager.restore(state(0), 2)
            manager.latest_step()
            manager.all_steps()
            export_checkpoint("latest", root.parent / "out.pt", format="torch", root=root, overwrite=True)
        assert [manager.restore(state(0), max_tries=1) for _ in range(3)] == [2, 1, 2]
        manager.save(3, state(3))
        assert [manager.restore(state(0), max_tries=1) for _ in range(2)] == [3, 2]
        for wrong in (0, -1, True, "3", 1.5):
            with pytest.raises(ConfigInvalid, match="max_tries"):
                manager.restore(state(0), max_tries=wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigInvalid, match="a step was passed"):
            manager.restore(state(0), 1, max_tries=3)


def test_restores_are_counted_without_an_agent(root: Path) -> None:
    """Restores are counted without an agent, and a plain reader warns from the third one on."""
    dcp.save(state(1), checkpoint_id="a", storage_writer=ReplicatedWriter(root, copies=1), no_dist=True)
    stop_agent(root)
    for number in range(1, 4):
        reader = ReplicatedReader(root, expect_partial=True)
        with warnings.catch_warnings(record=True, action="always") as told:
            dcp.load(state(0), checkpoint_id="latest", storage_reader=reader, no_dist=True)
        warned = [str(one.message) for one in told if one.category is ReplicatedCkptWarning]
        assert ["restored 3 times" in text for text in warned] == [True] * (number == 3)


@pytest.fixture
def memory() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="rckpt-test-", dir=SHARED_MEMORY))
    yield base / "tier"
    stop_agent(base / "tier")
    shutil.rmtree(base)


def test_a_step_is_rejected_in_both_tiers(root: Path, memory: Path) -> None:
    """A rejection applies to the copies in memory and on the disk."""
    with CheckpointManager(root, memory=memory, disk_every=1, copies=1) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.reject(2)
        assert manager.restore(state(0)) == 1
        manager.reject(1)
        with pytest.raises(CheckpointRejected):
            manager.restore(state(0))
        manager.reject(2, undo=True)
        assert manager.restore(state(0)) == 2
        with pytest.raises(CheckpointNotFound):
            manager.reject(9)
        with pytest.raises(ConfigInvalid, match="memory tier"):
            manager.restore(state(0), max_tries=3)


def test_the_command_rejects_and_the_others_show_the_rejection(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`reject` marks a step on the node and in the bucket. `ls`, `show` and `status` report it, `show latest` skips it,
    and --undo ends it.
    """
    bucket = f"file://{tmp_path}/bucket/run"
    with CheckpointManager(root, copies=1, object_store=bucket) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        manager.wait()

    def run(*words: str) -> tuple[int, str]:
        code = main([*words, "--root", str(root)])
        return code, capsys.readouterr().out

    code, told = run("reject", "step-2")
    assert (code, told.startswith("step-2: rejected, on: "), told.endswith(f", {bucket}\n")) == (
        ExitCode.OK,
        True,
        True,
    )
    assert "1 of 1, rejected" in run("ls")[1]
    assert run("show", "step-2")[1].startswith("step-2: 1 of 1, rejected\n")
    assert run("show", "latest")[1].startswith("step-1: ")
    code, told = run("status")
    assert code == ExitCode.OK
    undo = f"`replicated-ckpt reject step-2 --undo --root {root}`"
    assert f'note: "latest" skips rejected checkpoints: step-2. To end a rejection: {undo}' in told
    code, told = run("reject", "step-2", "--undo", "-o", "json")
    assert (json.loads(told)["buckets"], json.loads(told)["next_steps"]) == ([bucket], [])
    assert "rejected" not in run("ls", "--object-store", bucket)[1]
    assert run("reject", "step-9")[0] == ExitCode.NOT_FOUND
    shutil.rmtree(root / "step-1")
    assert run("reject", "step-1", "--object-store", bucket)[0] == ExitCode.OK
    assert [path.parent.name for path in (tmp_path / "bucket" / "run").glob("*/.rejected.*")] == ["step-1"]
