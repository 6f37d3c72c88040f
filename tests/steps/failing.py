"""Steps: a rank raises in a phase of a save. They return each rank's error."""

import dataclasses
from typing import Any, NoReturn

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from tests.steps.context import Context
from tests.steps.state import build_all, failure
from tests.stopwatch import Stopwatch


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise RuntimeError("this planner data breaks in commit")


class FailingPlanner(DefaultSavePlanner):
    """A planner that raises on one rank in one phase: plan, global_plan, finish_plan, write or commit."""

    def __init__(self, phase: str, *, fails_here: bool) -> None:
        super().__init__()
        self._phase = phase if fails_here else ""
        self._resolved = 0

    def _fail_in(self, phase: str) -> None:
        if phase == self._phase:
            raise RuntimeError(f"this rank breaks in {phase}")

    def create_local_plan(self) -> SavePlan:
        self._fail_in("plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._fail_in("global_plan")
        plans, metadata = super().create_global_plan(all_plans)
        if self._phase == "commit":
            metadata = dataclasses.replace(metadata, planner_data=Unpicklable())
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._fail_in("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._resolved += 1
        if self._resolved == 3:  # some bytes were sent before
            self._fail_in("write")
        return super().resolve_data(write_item)


def save_breaks(
    context: Context, /, kinds: list[str], checkpoint_id: str, phase: str, ranks: list[int], **writer: Any
) -> dict[str, Any]:
    """A save of other values in which `ranks` raise. Returns this rank's error, and after how long."""
    states = build_all(context, kinds, 777)
    planner = FailingPlanner(phase, fails_here=context.rank in ranks)
    stopwatch = Stopwatch()
    try:
        dcp.save(dict(states), checkpoint_id=checkpoint_id, storage_writer=context.writer(**writer), planner=planner)
    except CheckpointException as exc:
        return {"seconds": stopwatch.stop(), **failure(exc)}
    raise AssertionError("the save should have failed")
