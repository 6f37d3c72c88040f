"""A checkpoint whose manifest is lost on all nodes loads by the footers of its shards, and never with wrong bytes."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import ReplicatedReader, ReplicatedWriter, ShardLost
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from tests.damage import flip

pytestmark = pytest.mark.filterwarnings("ignore")
STATE = {"large": torch.arange(200_000, dtype=torch.int32), "small": torch.ones(3), "step": 7}


def load(root: Path) -> dict[str, object]:
    state = {"large": torch.zeros(200_000, dtype=torch.int32), "small": torch.zeros(3), "step": 0}
    dcp.load(state, checkpoint_id="step-1", storage_reader=ReplicatedReader(root), no_dist=True)
    return state


def is_as_saved(state: dict[str, object]) -> bool:
    return all(torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)) for name, value in STATE.items())


def loads_as_saved(root: Path) -> bool:
    """Whether the load succeeds. False if it raises ShardLost. Wrong bytes fail the test."""
    try:
        state = load(root)
    except CheckpointException as exc:
        if all(isinstance(failed[0], ShardLost) for failed in exc.failures.values()):
            return False
        raise
    assert is_as_saved(state)
    return True


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with one checkpoint whose damaged manifest was moved away, as the runbook states."""
    root = tmp_path / "node"
    dcp.save(STATE, checkpoint_id="step-1", storage_writer=ReplicatedWriter(root), no_dist=True)
    manifest = root / "step-1" / ".manifest.json"
    flip(manifest)
    with pytest.raises(CheckpointException) as raised:
        load(root)
    assert any(isinstance(failed[0], ShardLost) for failed in raised.value.failures.values())
    manifest.rename(tmp_path / "aside")
    return root


def test_a_checkpoint_without_a_manifest_loads_and_can_be_saved_again(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`repair` cannot restore the manifest and states so. The checkpoint loads, and can be saved under another id."""
    assert main(["repair", "--root", str(root)]) == ExitCode.SHARD_LOST
    assert "its data may still load" in capsys.readouterr().out
    state = load(root)
    assert is_as_saved(state)
    dcp.save(state, checkpoint_id="step-2", storage_writer=ReplicatedWriter(root), no_dist=True)
    assert main(["verify", "--root", str(root), "step-2"]) == ExitCode.OK


def test_no_flipped_byte_is_loaded(root: Path) -> None:
    """A byte is flipped anywhere in the shard: the load returns the saved values or raises ShardLost."""
    (shard,) = (root / "step-1").glob("*.distcp")
    before, chance, lost = shard.read_bytes(), random.Random(5), 0
    for position in [1000, 5000, len(before) - 1, *(chance.randrange(len(before)) for _ in range(25))]:
        flip(shard, position)
        lost += not loads_as_saved(root)
        shard.write_bytes(before)
    assert lost >= 25
    assert is_as_saved(load(root))
