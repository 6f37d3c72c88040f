"""Tensors are filled piece by piece from verified bytes, and only the needed blocks are read."""

import os
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.integrity.checksum import BLOCK_BYTES
from replicated_ckpt.core.reading.windows import LOCAL_WINDOW_BYTES
from replicated_ckpt.stores.files.direct import address_of
from tests.damage import flip

ROWS, COLUMNS = 3000, 501  # 6 MB: several windows, and rows that end within blocks


def saved(root: Path, tensor: torch.Tensor) -> None:
    dcp.save({"t": tensor}, checkpoint_id="step-1", storage_writer=ReplicatedWriter(root, copies=1))


def numbered() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


class PartPlanner(DefaultLoadPlanner):
    """Loads a rectangle of the stored tensor into a target of the same size."""

    def __init__(self, offsets: tuple[int, int], sizes: tuple[int, int]) -> None:
        super().__init__()
        self._offsets, self._sizes = torch.Size(offsets), torch.Size(sizes)
        self.found = torch.zeros(sizes)

    def create_local_plan(self) -> LoadPlan:
        (item,) = super().create_local_plan().items
        return LoadPlan([replace(item, storage_offsets=self._offsets, lengths=self._sizes)])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.found


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0, 0), (7, COLUMNS)), ((1111, 0), (900, COLUMNS)), ((2990, 3), (10, 40)), ((0, 5), (ROWS, 1))],
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_part_is_read_alone(
    tmp_path: Path, offsets: tuple[int, int], sizes: tuple[int, int], is_transposed: bool
) -> None:
    """Rows of a contiguous tensor are read with at most their own blocks. Any rectangle gets its values."""
    saved(tmp_path, numbered().t().contiguous().t() if is_transposed else numbered())
    planner, reader = PartPlanner(offsets, sizes), ReplicatedReader(tmp_path)
    dcp.load({"t": torch.zeros(ROWS, COLUMNS)}, checkpoint_id="step-1", storage_reader=reader, planner=planner)
    (first, left), (rows, columns) = offsets, sizes
    assert torch.equal(planner.found, numbered()[first : first + rows, left : left + columns])
    assert reader.last_load is not None
    needed = rows * COLUMNS * 4
    assert is_transposed or reader.last_load.bytes_local <= needed + 4 * BLOCK_BYTES


@pytest.mark.parametrize("rows", [80, 400])
def test_a_small_part_of_a_tensor_is_read_alone(tmp_path: Path, rows: int) -> None:
    """The position of the data follows from the predicted container head, so that two rows are read without the rest."""
    tensor = torch.arange(rows * 3001, dtype=torch.float32).reshape(rows, 3001)  # 0.96 MB or 4.8 MB
    saved(tmp_path, tensor)
    planner, reader = PartPlanner((70, 0), (2, 3001)), ReplicatedReader(tmp_path)
    dcp.load({"t": torch.zeros(tensor.shape)}, checkpoint_id="step-1", storage_reader=reader, planner=planner)
    assert torch.equal(planner.found, tensor[70:72])
    assert reader.last_load is not None
    assert reader.last_load.bytes_local <= 3 * BLOCK_BYTES


def test_a_target_may_have_any_dtype_and_strides(tmp_path: Path) -> None:
    """Targets of another dtype or stride get the values that torch's copy would give."""
    saved(tmp_path, numbered())
    targets = {
        "plain": torch.zeros(ROWS, COLUMNS),
        "double": torch.zeros(ROWS, COLUMNS, dtype=torch.float64),
        "transposed": torch.zeros(COLUMNS, ROWS).t(),
        "strided": torch.zeros(ROWS, 2 * COLUMNS)[:, ::2],
    }
    for name, target in targets.items():
        dcp.load({"t": target}, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
        assert torch.equal(target, numbered().to(target.dtype)), name


class Tagged(torch.Tensor):
    """A user's subclass."""


TARGETS: dict[str, Callable[[torch.dtype, int], torch.Tensor]] = {
    "leaf": lambda dtype, rows: torch.zeros(rows, 2, dtype=dtype, requires_grad=True),
    "part of a leaf": lambda dtype, rows: torch.zeros(2, rows, 2, dtype=dtype, requires_grad=True).unbind()[1],
    "with gaps": lambda dtype, rows: torch.zeros(rows, 2, 2, dtype=dtype)[:, 0],
    "transposed": lambda dtype, rows: torch.zeros(2, rows, dtype=dtype).t(),
    "class of its own": lambda dtype, rows: torch.zeros(rows, 2, dtype=dtype).as_subclass(Tagged),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_is_written_in_place_as_stock_does(tmp_path: Path, kind: str, is_inference: bool) -> None:
    """Leaf tensors, inference tensors, subclasses and tensors with gaps are written in place, at any size and dtype."""
    sizes = {"small": 5, "window": 3000, "large": 600_000}
    stored = {
        name: torch.arange(rows * 2, dtype=torch.float32).remainder(100).view(-1, 2) for name, rows in sizes.items()
    }
    dcp.save(stored, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.inference_mode(is_inference):
            targets = {name: TARGETS[kind](dtype, rows) for name, rows in sizes.items()}
        dcp.load(targets, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
        assert all(torch.equal(targets[name].detach(), stored[name].to(dtype)) for name in sizes)


@pytest.mark.parametrize("rows", [5, 600_000])
def test_a_target_with_several_elements_at_one_place_is_refused(tmp_path: Path, rows: int) -> None:
    """An expanded target is refused at any size: its rows share memory."""
    stored = torch.arange(3 * rows, dtype=torch.float32).view(3, rows)
    saved(tmp_path, stored)
    with pytest.raises(CheckpointException, match=r"expand.*: nothing can be loaded into it"):
        dcp.load(
            {"t": torch.zeros(1, rows).expand(3, rows)},
            checkpoint_id="step-1",
            storage_reader=ReplicatedReader(tmp_path),
        )


def test_a_transposed_tensor_loads_into_a_contiguous_target(tmp_path: Path) -> None:
    saved(tmp_path, numbered().t())
    target = torch.zeros(COLUMNS, ROWS)
    dcp.load({"t": target}, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert torch.equal(target, numbered().t())


@pytest.mark.parametrize("at", [0.1, 0.5, 0.9])
def test_no_wrong_byte_reaches_a_tensor(tmp_path: Path, at: float) -> None:
    """With a flipped bit and no other copy the load raises. The tensor contains a prefix of saved values, at most one
    window of zeros, then its earlier values.
    """
    saved(tmp_path, numbered() + 1)
    path = tmp_path / "step-1" / "__0_0.distcp"
    flip(path, int(path.stat().st_size * at))
    target = torch.full((ROWS, COLUMNS), -7.0)
    with pytest.raises(CheckpointException, match="ShardLost"):
        dcp.load({"t": target}, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    values = target.reshape(-1)
    kept, cleared = int((values == -7.0).sum()), int((values == 0).sum())
    read = ROWS * COLUMNS - kept - cleared
    assert read <= at * ROWS * COLUMNS
    assert cleared * 4 <= LOCAL_WINDOW_BYTES
    assert torch.equal(values[:read], (numbered() + 1).reshape(-1)[:read])
    assert torch.equal(values[read:], torch.tensor([0.0, -7.0]).repeat_interleave(torch.tensor([cleared, kept])))


def test_large_tensors_are_read_directly_into_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor is read directly into its memory. At most three blocks are read elsewhere and copied."""
    saved(tmp_path, numbered())
    target = torch.zeros(ROWS, COLUMNS)
    start, end = target.data_ptr(), target.data_ptr() + target.nbytes
    elsewhere, preadv = list[int](), os.preadv

    def note_place(fd: int, pieces: list[memoryview], offset: int) -> int:
        elsewhere.extend(len(piece) for piece in pieces if not start <= address_of(piece) < end)
        return preadv(fd, pieces, offset)

    monkeypatch.setattr(os, "preadv", note_place)
    dcp.load({"t": target}, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert torch.equal(target, numbered())
    assert 0 < sum(elsewhere) <= 3 * BLOCK_BYTES


def test_the_disk_is_few_frames_below_dcp_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From DCP's hook to `preadv` there are at most nine functions of this package."""
    saved(tmp_path, numbered())
    depths, preadv = list[int](), os.preadv

    def count_frames(*args: Any) -> int:
        names = [frame.name for frame in traceback.extract_stack() if "/replicated_ckpt/" in frame.filename]
        depths.append(len(names) - names.index("read_data"))
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", count_frames)
    target = {"t": torch.zeros(ROWS, COLUMNS)}
    dcp.load(target, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path))
    assert torch.equal(target["t"], numbered())
    assert 1 <= max(depths) <= 9
