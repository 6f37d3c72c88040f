"""Loads to a GPU go through pinned memory."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.tensors.pinned import BUFFER_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_on_a_gpu_get_every_byte(tmp_path: Path, dtype: torch.dtype) -> None:
    """Tensors larger than the pinned buffers, small ones, and those of another type arrive before the stream goes on."""
    stored = {"large": torch.rand(3 * BUFFER_BYTES // 4 + 5).to(dtype), "small": torch.rand(7, 3).to(dtype)}
    dcp.save(stored, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    targets = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in stored.items()}
    dcp.load(targets, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert all(torch.equal(targets[name].cpu(), tensor) for name, tensor in stored.items())
    wider = {name: torch.zeros_like(tensor, device="cuda", dtype=torch.float64) for name, tensor in stored.items()}
    dcp.load(wider, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert all(torch.equal(wider[name].cpu(), tensor.double()) for name, tensor in stored.items())
