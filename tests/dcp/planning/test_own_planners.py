"""Programs with planners and writers of their own: what they change in one save is in that one, as with stock's planner."""

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
    """Leaves an item out of every plan."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if item.index.fqn != "skipped"])


class Tags(CachedSavePlanner):
    """Puts something new into every plan."""

    step = 0

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.step += 1
        return replace(plan, planner_data={**plan.planner_data, "tag": ("tag", str(self.step))})


class SkipsLater(CachedSavePlanner):
    """Leaves an item out of the global plan."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        del metadata.state_dict_metadata["skipped"]
        return [replace(p, items=[i for i in p.items if i.index.fqn != "skipped"]) for p in plans], metadata


class Marks(DefaultSavePlanner):
    """Gives DCP's objects attributes of its own."""

    step = 0

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        self.step += 1
        for marked in (metadata, metadata.state_dict_metadata["kept"]):
            vars(marked)["mark"] = self.step
        return plans, metadata


class ChangesOne(ReplicatedWriter):
    """Takes an entry out of one checkpoint's metadata, and adds a note to it."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        if self.checkpoint_id == "step-2":
            del metadata.state_dict_metadata["skipped"]
            metadata.planner_data["note"] = ("note",)
        super().finish(metadata, results)


def saved(writer: ReplicatedWriter, planner: DefaultSavePlanner) -> list[Metadata]:
    """The `.metadata` of four saves of the same state, as stock torch reads it."""
    found = []
    for step in range(1, 5):
        state = {"kept": torch.full((3,), float(step)), "skipped": torch.ones(2)}
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner, no_dist=True)
        found.append(FileSystemReader(writer.store.final(f"step-{step}")).read_metadata())
    assert findings(writer.store) == []
    return found


@pytest.mark.parametrize("planner", [Skips, SkipsLater])
def test_what_a_subclass_leaves_out_is_left_out_of_every_save(tmp_path: Path, planner: type[CachedSavePlanner]) -> None:
    """Plans that are kept bring nothing back that a planner of the user's leaves out."""
    for metadata in saved(ReplicatedWriter(tmp_path, copies=1), planner()):
        assert list(metadata.state_dict_metadata) == ["kept"]


def test_what_a_subclass_puts_into_a_plan_is_that_of_the_save(tmp_path: Path) -> None:
    """`planner_data` of a planner of the user's is that of the save under way, and none that was kept."""
    found = saved(ReplicatedWriter(tmp_path, copies=1), Tags())
    assert [metadata.planner_data["tag"] for metadata in found] == [("tag", str(step)) for step in range(1, 5)]


@pytest.mark.parametrize("planner", [CachedSavePlanner, DefaultSavePlanner])
def test_what_a_writer_changes_in_one_save_is_not_in_the_next(
    tmp_path: Path, planner: type[DefaultSavePlanner]
) -> None:
    """A writer of the user's that changes one save's plan has not changed the plan that is kept."""
    found = saved(ChangesOne(tmp_path, copies=1), planner())
    assert [sorted(metadata.state_dict_metadata) for metadata in found] == [
        ["kept"] if step == 2 else ["kept", "skipped"] for step in range(1, 5)
    ]
    assert ["note" in metadata.planner_data for metadata in found] == [step == 2 for step in range(1, 5)]


def test_attributes_of_a_planners_own_are_those_of_the_save(tmp_path: Path) -> None:
    """They are no fields, so `==` does not see that they have changed."""
    found = saved(ReplicatedWriter(tmp_path, copies=1), Marks())
    assert [vars(metadata)["mark"] for metadata in found] == [1, 2, 3, 4]
    assert [vars(metadata.state_dict_metadata["kept"])["mark"] for metadata in found] == [1, 2, 3, 4]
