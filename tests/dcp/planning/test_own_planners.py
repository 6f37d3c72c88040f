"""User-defined planners and writers: a change in one save applies to that save only, as with stock's planner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt import CachedSavePlanner, ReplicatedWriter
from tests.agent.checkpoints import findings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed")]


class Skips(CachedSavePlanner):
    """Omits an item from every local plan."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if item.index.fqn != "skipped"])


class Tags(CachedSavePlanner):
    """Adds a new value to every local plan's `planner_data`."""

    step = 0

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.step += 1
        return replace(plan, planner_data={**plan.planner_data, "tag": ("tag", str(self.step))})


class SkipsLater(CachedSavePlanner):
    """Omits an item from the global plan."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        del metadata.state_dict_metadata["skipped"]
        return [replace(p, items=[i for i in p.items if i.index.fqn != "skipped"]) for p in plans], metadata


class Marks(DefaultSavePlanner):
    """Sets attributes on DCP's metadata objects."""

    step = 0

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.step += 1
        for marked in (metadata, metadata.state_dict_metadata["kept"]):
            vars(marked)["mark"] = self.step
        return plans, metadata


class ChangesOne(ReplicatedWriter):
    """Removes an entry from one checkpoint's metadata, and adds a note."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        if self.checkpoint_id == "step-2":
            del metadata.state_dict_metadata["skipped"]
            metadata.planner_data["note"] = ("note",)
        super().finish(metadata, results)


def saved(writer: ReplicatedWriter, planner: DefaultSavePlanner) -> list[Metadata]:
    """The `.metadata` of four saves with the same layout, as stock torch reads it."""
    found = []
    for step in range(1, 5):
        state = {"kept": torch.full((3,), float(step)), "skipped": torch.ones(2)}
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner, no_dist=True)
        found.append(FileSystemReader(writer.store.final(f"step-{step}")).read_metadata())
    assert findings(writer.store) == []
    return found


@pytest.mark.parametrize("planner", [Skips, SkipsLater])
def test_an_item_that_a_subclass_omits_is_in_no_save(tmp_path: Path, planner: type[CachedSavePlanner]) -> None:
    """An item that a planner's subclass omits is missing from every save: cached plans do not restore it."""
    for metadata in saved(ReplicatedWriter(tmp_path, copies=1), planner()):
        assert list(metadata.state_dict_metadata) == ["kept"]


def test_planner_data_of_a_subclass_is_that_of_the_save(tmp_path: Path) -> None:
    """`planner_data` of a planner's subclass is that of the current save, not a cached one."""
    found = saved(ReplicatedWriter(tmp_path, copies=1), Tags())
    assert [metadata.planner_data["tag"] for metadata in found] == [("tag", str(step)) for step in range(1, 5)]


@pytest.mark.parametrize("planner", [CachedSavePlanner, DefaultSavePlanner])
def test_a_writers_change_of_one_save_is_not_in_the_next(tmp_path: Path, planner: type[DefaultSavePlanner]) -> None:
    """A writer's subclass changes one save's metadata: the next saves have the original entries."""
    found = saved(ChangesOne(tmp_path, copies=1), planner())
    assert [sorted(metadata.state_dict_metadata) for metadata in found] == [
        ["kept"] if step == 2 else ["kept", "skipped"] for step in range(1, 5)
    ]
    assert ["note" in metadata.planner_data for metadata in found] == [step == 2 for step in range(1, 5)]


def test_attributes_that_a_planner_sets_are_those_of_the_save(tmp_path: Path) -> None:
    """Attributes that a planner sets on the metadata are those of the current save, although `==` ignores them."""
    found = saved(ReplicatedWriter(tmp_path, copies=1), Marks())
    assert [vars(metadata)["mark"] for metadata in found] == [1, 2, 3, 4]
    assert [vars(metadata.state_dict_metadata["kept"])["mark"] for metadata in found] == [1, 2, 3, 4]
