"""CachedSavePlanner plans what DefaultSavePlanner plans, whatever saves came before, and sends little."""

import io
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor.placement_types import _StridedShard as StridedSplit
from torch.testing._internal.distributed.fake_pg import FakeStore

from replicated_ckpt import CachedSavePlanner, PlansUnknown
from replicated_ckpt.dcp.agreement.decision import announce
from replicated_ckpt.dcp.planning.cached_plan import basis_of
from tests.marks import mark_long

State = dict[str, Any]


class Ranks:
    """The ranks of a job, each with its planner. What DCP sends between ranks is pickled and counted here."""

    def __init__(self, planners: list[SavePlanner]) -> None:
        self.planners = planners
        self.bytes_sent = 0
        self.saves = 0

    def plan(self, states: list[State], fails: str = "") -> tuple[list[SavePlan], Metadata]:
        """The plans of one save. `fails`: where the storage writer fails."""
        self.saves += 1
        asked = []
        for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True)):
            planner.set_up_planner(state, None, rank == 0)
            asked.append(self._send(planner.create_local_plan()))
        if fails == "before the global plan":
            raise InterruptedError
        planned, metadata = self.planners[0].create_global_plan(asked)
        if fails == "before the ranks have it":
            raise InterruptedError
        marked = [replace(plan, storage_data=f"of save {self.saves}") for plan in planned]  # as a storage writer does
        self.announced = announce(marked)
        final = [planner.finish_plan(self._send(plan)) for planner, plan in zip(self.planners, marked, strict=True)]
        if fails == "while writing":
            raise InterruptedError
        metadata.storage_data = {"written by": self.saves}  # as a storage writer sets it, too
        return final, metadata

    def _send(self, plan: SavePlan) -> SavePlan:
        raw = pickle.dumps(plan)
        self.bytes_sent += len(raw)
        received: SavePlan = pickle.loads(raw)
        return received


def cached(count: int) -> Ranks:
    return Ranks([CachedSavePlanner() for _ in range(count)])


def check_as_fresh(ranks: Ranks, states: list[State]) -> None:
    """Plans a save, and checks that the final plans, metadata and announced bytes, or the error, equal those of new
    planners.
    """
    fresh = Ranks([DefaultSavePlanner() for _ in states])
    try:
        wanted, wanted_metadata = fresh.plan(states)
    except (
        AssertionError,
        AttributeError,
        ValueError,
    ) as error:  # an entry is a tensor on one rank and an object on another
        with pytest.raises((type(error), PlansUnknown)):
            ranks.plan(states)
        return
    final, metadata = ranks.plan(states)
    assert [(plan.items, plan.planner_data) for plan in final] == [(plan.items, plan.planner_data) for plan in wanted]
    assert {plan.storage_data for plan in final} == {f"of save {ranks.saves}"}
    assert metadata.state_dict_metadata == wanted_metadata.state_dict_metadata
    assert metadata.planner_data == wanted_metadata.planner_data
    assert metadata.storage_data == {"written by": ranks.saves}
    assert ranks.announced == fresh.announced


def make_states(count: int, width: int = 4) -> list[State]:
    """Replicated weights, which one rank saves, a tensor of each rank's own, and nested objects."""
    return [
        {
            "model": {f"layer {n}": torch.zeros(width, 3) for n in range(3)},
            f"own {rank}": torch.zeros(rank + 1),
            "optimizer": {"step": 7, "groups": [{"lr": 0.1}, {"lr": 0.2}]},
        }
        for rank in range(count)
    ]


def test_unchanged_plans_are_not_sent() -> None:
    """A repeated save of the same state sends under 2 KB per rank, and plans the same as the first one."""
    ranks, states = cached(4), make_states(4)
    for state in states:
        state["many"] = {f"parameter {n}": torch.zeros(2) for n in range(1000)}
    check_as_fresh(ranks, states)
    first = ranks.bytes_sent
    for _ in range(2):
        before = ranks.bytes_sent
        check_as_fresh(ranks, states)
        assert ranks.bytes_sent - before < 4 * 2048 < first / 20


def part_of_a_tensor() -> torch.Tensor:
    """Rows 4 to 8 of a tensor with 12 rows, as torch 2.15's CheckpointableTensor. Older versions treat it as a whole
    tensor.
    """
    part = torch.zeros(4, 3)
    vars(part).update(global_shape=(12, 3), global_offsets=((4, 0),), local_offsets=((0, 0),), local_sizes=((4, 3),))
    return part


CHANGES: dict[str, Callable[[State], object]] = {
    "shape": lambda state: state["model"].update({"layer 1": torch.zeros(5, 3)}),
    "dtype": lambda state: state["model"].update({"layer 1": torch.zeros(4, 3, dtype=torch.bfloat16)}),
    "requires grad": lambda state: state["model"].update({"layer 1": torch.zeros(4, 3, requires_grad=True)}),
    "strides": lambda state: state["model"].update({"layer 1": torch.zeros(3, 4).T}),
    "layout": lambda state: state["model"].update({"layer 1": torch.zeros(4, 3).to_sparse()}),
    "a part of a tensor": lambda state: state["model"].update({"layer 1": part_of_a_tensor()}),
    "object for tensor": lambda state: state["model"].update({"layer 1": "text"}),
    "tensor for object": lambda state: state["optimizer"].update({"step": torch.tensor(7)}),
    "name": lambda state: state["model"].update({"layer x": state["model"].pop("layer 1")}),
    "more": lambda state: state.update({"more": torch.zeros(2)}),
    "less": lambda state: state["model"].pop("layer 1"),
    "nesting": lambda state: state.update({"optimizer.step": state["optimizer"].pop("step")}),
    "empty group": lambda state: state["optimizer"]["groups"].pop(),
}


@pytest.mark.parametrize("at", [(0,), (1,), (0, 1, 2)], ids=["coordinator", "another rank", "all ranks"])
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_is_missed(change: str, at: tuple[int, ...]) -> None:
    """After any change on any rank, and after the change is undone, the save is planned like a first one."""
    ranks = cached(3)
    check_as_fresh(ranks, make_states(3))
    check_as_fresh(ranks, make_states(3))
    changed = make_states(3)
    for rank in at:
        CHANGES[change](changed[rank])
    check_as_fresh(ranks, changed)
    check_as_fresh(ranks, changed)
    check_as_fresh(ranks, make_states(3))


def test_a_torch_that_writes_into_the_list_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.7 writes the final plans into the list that it gets. The cached plans stay complete: when one rank drops
    an item, another writes it.
    """
    plan_all = DefaultSavePlanner.create_global_plan

    def plan_in_place(planner: DefaultSavePlanner, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        final, metadata = plan_all(planner, plans)
        plans[:] = final
        return final, metadata

    monkeypatch.setattr(DefaultSavePlanner, "create_global_plan", plan_in_place)
    ranks, states = cached(3), make_states(3)
    check_as_fresh(ranks, states)
    for part in (states[1]["model"], states[2]["optimizer"]):
        part.clear()
        check_as_fresh(ranks, states)


@pytest.mark.parametrize("fails", ["before the global plan", "before the ranks have it", "while writing"])
def test_a_save_that_fails_leaves_no_stale_plan(fails: str) -> None:
    """A save with a changed state fails at any step: the next save, of either state, is planned like a first one."""
    for after in ("before the change", "changed"):
        ranks, changed = cached(3), make_states(3)
        CHANGES["shape"](changed[1])
        check_as_fresh(ranks, make_states(3))
        with pytest.raises(InterruptedError):
            ranks.plan(changed, fails)
        check_as_fresh(ranks, changed if after == "changed" else make_states(3))
        check_as_fresh(ranks, make_states(3))


def test_a_coordinator_with_a_new_planner() -> None:
    """The coordinator has a new planner and gets a digest instead of a plan: it raises PlansUnknown. The next save
    succeeds.
    """
    for make in (CachedSavePlanner, DefaultSavePlanner):
        ranks, states = cached(3), make_states(3)
        check_as_fresh(ranks, states)
        ranks.planners[0] = make()
        with pytest.raises(PlansUnknown, match="did not send its plan"):
            ranks.plan(states)
        check_as_fresh(ranks, states)
        check_as_fresh(ranks, states)


def test_planners_of_ranks_that_exchange_places() -> None:
    """The ranks' planners exchange places: no rank gets another's cached plan. The save is refused, and the next one
    succeeds.
    """
    ranks, states = cached(3), make_states(3)
    check_as_fresh(ranks, states)
    ranks.planners[1:] = ranks.planners[:0:-1]
    states[1:] = states[:0:-1]
    with pytest.raises(PlansUnknown, match="Rank 1 did not send its plan"):
        ranks.plan(states)
    check_as_fresh(ranks, states)
    del ranks.planners[2]
    check_as_fresh(ranks, states[:2])
    check_as_fresh(ranks, states[:2])


@pytest.mark.parametrize("seed", mark_long(range(20), keep=range(4)))
def test_any_order_of_changes_and_failures(seed: int) -> None:
    """1,000 random saves: each is planned like a first one, or is refused and can be repeated."""
    draw = random.Random(seed)
    ranks, states, refused = cached(3), make_states(3), 0
    for _ in range(50):
        for rank in range(3):
            if draw.random() < 0.15:
                states[rank] = make_states(3, draw.choice([4, 4, 6]))[rank]
            if draw.random() < 0.15:
                states[rank] = make_states(3)[rank]
                CHANGES[draw.choice(list(CHANGES))](states[rank])
        if draw.random() < 0.1:
            ranks.planners[draw.randrange(3)] = CachedSavePlanner()
        if draw.random() < 0.2:
            fails = draw.choice(["before the global plan", "before the ranks have it", "while writing"])
            with pytest.raises((InterruptedError, PlansUnknown, AssertionError, AttributeError, ValueError)):
                ranks.plan(states, fails)
            continue
        try:
            check_as_fresh(ranks, states)
        except PlansUnknown:
            refused += 1
            check_as_fresh(ranks, states)
    assert refused < 10


def test_unchanged_states_are_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's local planning does not run for the second save, and each item resolves to the same data as with stock's
    planner.
    """
    ranks, states = cached(3), make_states(3)
    ranks.plan(states)
    monkeypatch.setattr(default_planner, "create_default_local_save_plan", None)
    final, _ = ranks.plan(states)
    monkeypatch.undo()
    fresh = Ranks([DefaultSavePlanner() for _ in states])
    fresh.plan(states)
    for plan, ours, stock in zip(final, ranks.planners, fresh.planners, strict=True):
        for item in plan.items:
            found, wanted = ours.resolve_data(item), stock.resolve_data(item)
            assert found is wanted or written(found) == written(wanted)


def written(found: torch.Tensor | io.BytesIO) -> bytes:
    assert isinstance(found, io.BytesIO)
    return found.getvalue()


def enter_group_of_four(rank: int) -> None:
    """Makes this process one rank of a fake group of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)


@pytest.fixture
def _group_of_four() -> Iterator[None]:
    enter_group_of_four(1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group_of_four")
def test_no_change_of_a_dtensor_is_missed() -> None:
    """Another mesh, placement, shape, dtype, stride or gradient flag of a DTensor changes its basis. An equal DTensor
    has the same basis.
    """
    full, part = torch.zeros(8, 4), torch.zeros(2, 4)
    flat, deep = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    split = distribute_tensor(full, flat, [Split(0)])
    tensors = [
        split,
        distribute_tensor(full, flat, [Split(1)]),
        distribute_tensor(full, flat, [Replicate()]),
        distribute_tensor(full, deep, [Split(0), Split(1)]),
        distribute_tensor(full, deep, [Split(1), Split(0)]),
        DTensor.from_local(part, deep, [Split(0), Split(0)], run_check=False, shape=full.shape, stride=(4, 1)),
        DTensor.from_local(
            part, deep, [StridedSplit(0, split_factor=2), Split(0)], run_check=False, shape=full.shape, stride=(4, 1)
        ),
        distribute_tensor(full, DeviceMesh("cpu", [1, 0, 2, 3]), [Split(0)]),
        distribute_tensor(torch.zeros(6, 4), flat, [Split(0)]),
        DTensor.from_local(torch.zeros(4, 2).T, flat, [Split(0)], run_check=False, shape=full.shape, stride=(4, 1)),
        DTensor.from_local(part.double(), flat, [Split(0)], run_check=False, shape=full.shape, stride=(4, 1)),
        torch.nn.Parameter(split),
    ]
    bases = [basis_of({"t": tensor}, is_coordinator=True) for tensor in tensors]
    for before, tensor in enumerate(tensors):
        assert (
            basis_of({"t": tensor.detach().requires_grad_(tensor.requires_grad)}, is_coordinator=True) == bases[before]
        )
        for after, other in enumerate(tensors):
            plans = [create_default_local_save_plan({"t": each}, True).items for each in (tensor, other)]
            assert bases[before] != bases[after] or plans[0] == plans[1]
            assert (bases[before] == bases[after]) is (before == after)
    assert basis_of({"t": split}, is_coordinator=False) != bases[0]


@pytest.mark.usefixtures("_group_of_four")
def test_another_rank_of_an_equal_mesh() -> None:
    """A process becomes another rank of a new but equal mesh: the planner plans that rank's part."""
    planner, part = CachedSavePlanner(), torch.zeros(2, 4)
    for rank in (1, 2):
        dist.destroy_process_group()
        enter_group_of_four(rank)
        state = {"t": DTensor.from_local(part, init_device_mesh("cpu", (4,)), [Split(0)], run_check=False)}
        planner.set_up_planner(state, None, is_coordinator=False)
        plan = planner.create_local_plan()
        assert plan.items == create_default_local_save_plan(state, False).items
        assert plan.items[0].index.offset == (2 * rank, 0)
        planner.finish_plan(plan)


@pytest.mark.usefixtures("_group_of_four")
def test_a_dtensor_is_planned_alike_under_no_grad() -> None:
    """Under `no_grad` a DTensor's part requires no gradient: the plan equals a new one in either mode."""
    planner = CachedSavePlanner()
    state = {"t": distribute_tensor(torch.zeros(8, 4), init_device_mesh("cpu", (4,)), [Split(0)]).requires_grad_()}
    for is_recorded in (True, False, True):
        with torch.set_grad_enabled(is_recorded):
            planner.set_up_planner(state, None, is_coordinator=False)
            plan = planner.create_local_plan()
            assert plan.items == create_default_local_save_plan(state, False).items
            planner.finish_plan(plan)
