"""Loads to a GPU go through pinned memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.dcp.tensors.tensor_memory import BUFFER_BYTES, PinnedCopies, memory_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_targets_on_a_gpu_get_every_byte(tmp_path: Path, dtype: torch.dtype, is_inference: bool) -> None:
    """Tensors larger than the pinned buffers, small ones, and targets of another dtype get all values."""
    stored = {"large": torch.rand(3 * BUFFER_BYTES // 4 + 5).to(dtype), "small": torch.rand(7, 3).to(dtype)}
    dcp.save(stored, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    with torch.inference_mode(is_inference):
        targets = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in stored.items()}
    dcp.load(targets, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert all(torch.equal(targets[name].cpu(), tensor) for name, tensor in stored.items())
    wider = {name: torch.zeros_like(tensor, device="cuda", dtype=torch.float64) for name, tensor in stored.items()}
    dcp.load(wider, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert all(torch.equal(wider[name].cpu(), tensor.double()) for name, tensor in stored.items())


@pytest.mark.parametrize("piece_bytes", [1 << 10, (1 << 20) + 7, 3 << 20, 5 << 20])
def test_targets_that_are_filled_in_turns_get_their_own_bytes(piece_bytes: int) -> None:
    """Two tensors are filled in turns, in pieces of any size, through a buffer or from elsewhere: each gets its own
    bytes.
    """
    wanted = [torch.randint(0, 255, (11 << 20,), dtype=torch.uint8) for _ in range(2)]
    found = [torch.zeros(one.shape, dtype=torch.uint8, device="cuda") for one in wanted]
    copies = [PinnedCopies(target) for target in found]
    for start in range(0, len(wanted[0]), piece_bytes):
        for number, (source, copy) in enumerate(zip(wanted, copies, strict=True)):
            piece = memory_of(source[start : start + piece_bytes])
            place = copy.place(start, len(piece)) if (start // piece_bytes + number) % 3 else None
            if place is not None:
                place[:] = piece
            copy.put(piece if place is None else place)
    for copy in copies:
        copy.close()
    for target, source in zip(found, wanted, strict=True):
        assert torch.equal(target.cpu(), source)


def test_two_threads_load_at_once(tmp_path: Path) -> None:
    """Two threads load to the GPU at once, each through its own pinned buffers."""
    stored = [{"weights": torch.rand(20 * BUFFER_BYTES // 4 + seed)} for seed in range(2)]
    for seed, state in enumerate(stored):
        dcp.save(state, checkpoint_id=f"step-{seed}", storage_writer=ReplicatedWriter(tmp_path, copies=1))

    def load(seed: int) -> bool:
        target = {"weights": torch.zeros_like(stored[seed]["weights"], device="cuda")}
        for _ in range(3):
            target["weights"].zero_()
            dcp.load(target, checkpoint_id=f"step-{seed}", storage_reader=ReplicatedReader(tmp_path), no_dist=True)
            if not torch.equal(target["weights"].cpu(), stored[seed]["weights"]):
                return False
        return True

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(load, range(2))) == [True, True]
