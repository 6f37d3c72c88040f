"""Two threads use one reader or writer at once: neither gets or saves the data of the other."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.errors import ConfigInvalid

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class InterruptedSave(DefaultSavePlanner):
    """Another thread saves step-2 with the same writer while this save plans."""

    def __init__(self, writer: ReplicatedWriter) -> None:
        super().__init__()
        self.writer = writer

    def create_local_plan(self) -> SavePlan:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(save, self.writer, 2).result()
        return super().create_local_plan()


def save(writer: ReplicatedWriter, step: int, planner: DefaultSavePlanner | None = None) -> None:
    state = {"w": torch.full((4,), float(step))}
    dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner, no_dist=True)


def test_two_saves_with_one_writer_are_not_mixed(tmp_path: Path) -> None:
    """The save that was overtaken raises ConfigInvalid. The other save's checkpoint stays intact."""
    writer = ReplicatedWriter(tmp_path, copies=1, overwrite=True)
    with pytest.raises(CheckpointException) as raised:
        save(writer, 1, InterruptedSave(writer))
    assert isinstance(raised.value.failures[0][0], ConfigInvalid)
    save(writer, 3)
    for step in (2, 3):
        load(ReplicatedReader(tmp_path), f"step-{step}", target := torch.zeros(4))
        assert target.tolist() == [float(step)] * 4


class Interrupted(DefaultLoadPlanner):
    """Another thread loads step-2 with the same reader while this load plans."""

    def __init__(self, reader: ReplicatedReader) -> None:
        super().__init__()
        self.reader, self.other = reader, torch.zeros(4)

    def create_local_plan(self) -> LoadPlan:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(load, self.reader, "step-2", self.other).result()
        return super().create_local_plan()


def load(reader: ReplicatedReader, name: str, target: torch.Tensor, planner: DefaultLoadPlanner | None = None) -> None:
    dcp.load({"w": target}, checkpoint_id=name, storage_reader=reader, planner=planner, no_dist=True)


def test_two_loads_with_one_reader_are_not_mixed(tmp_path: Path) -> None:
    """The load that was overtaken raises ConfigInvalid with a hint, and leaves its tensor unchanged. The reader can
    load again.
    """
    for step in (1, 2):
        save(ReplicatedWriter(tmp_path, copies=1), step)
    reader = ReplicatedReader(tmp_path)
    planner, target = Interrupted(reader), torch.zeros(4)
    with pytest.raises(CheckpointException) as raised:
        load(reader, "step-1", target, planner)
    error = raised.value.failures[0][0]
    assert isinstance(error, ConfigInvalid)
    assert "its own ReplicatedReader" in str(error.hint)
    assert (target.tolist(), planner.other.tolist()) == ([0.0] * 4, [2.0] * 4)
    load(reader, "step-1", target)
    assert target.tolist() == [1.0] * 4
