"""Torch's own converters in `torch.distributed.checkpoint.format_utils` with checkpoints of this package."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import (
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from replicated_ckpt import ReplicatedReader, import_checkpoint
from tests.convert.states import assert_equal, blank, contents

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Saved = tuple[Path, dict[str, Any]]


def test_dcp_to_torch_save_reads_a_nodes_directory(saved: Saved, tmp_path: Path) -> None:
    """It reads the checkpoint directory of any node that has all shards."""
    dcp_to_torch_save(saved[0] / "step-1", tmp_path / "m.pth")
    assert_equal(torch.load(tmp_path / "m.pth"), saved[1])


def test_everything_is_read_by_one_process(saved: Saved) -> None:
    """`_load_state_dict` with the planner that builds the state dict from the metadata."""
    state: dict[str, Any] = {}
    reader = ReplicatedReader(saved[0])
    reader.reset("step-1")
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(state, reader, planner=planner, no_dist=True)
    assert_equal(state, saved[1])


def test_the_output_of_torch_save_to_dcp_is_imported(tmp_path: Path) -> None:
    """The directory becomes a checkpoint with manifest and checksums."""
    torch.save(contents(), tmp_path / "m.pth")
    torch_save_to_dcp(tmp_path / "m.pth", tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", "step-1", format="dcp", root=tmp_path / "root", copies=1)
    state = blank(contents())
    dcp.load(state, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path / "root"))
    assert_equal(state, contents())
