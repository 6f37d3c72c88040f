"""Layouts cached between saves: `.metadata` equals that of a save without a cache, whatever saves came before."""

import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks import planning_world as synthetic
from benchmarks.planning_world import World
from replicated_ckpt import CachedSavePlanner, PlansUnknown, ReplicatedWriter
from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.core.manifest import ShardEntry
from replicated_ckpt.dcp.agreement.decision import decide
from replicated_ckpt.dcp.metadata.metadata import decode_metadata
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayout, CachedLayouts, ShardResults
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.dcp.save.commit import lay_out
from replicated_ckpt.dcp.save.shard_files import Parts
from replicated_ckpt.dcp.tensors.item_writer import ItemWriter
from replicated_ckpt.errors import SaveAborted
from tests.marks import mark_long

State = dict[str, Any]


class Counting:
    """A stream that discards data and counts its bytes."""

    position = 0

    def write(self, data: memoryview, /) -> int:
        self.position += len(data)
        return len(data)

    def refer(self, data: memoryview, /) -> None:
        self.position += len(data)


class Broken(Exception):
    """Raised where a save is to fail."""


class Job:
    """Ranks that save repeatedly: planners, item writers and the coordinator's accounting, without nodes."""

    def __init__(self, ranks: int, make_planner: Callable[[], SavePlanner] = CachedSavePlanner) -> None:
        self.make_planner = make_planner
        self.planners = [make_planner() for _ in range(ranks)]
        self.layouts = [CachedLayouts() for _ in range(ranks)]
        self.saves = 0
        self.bytes_gathered: list[int] = []
        self.was_known = False

    def save(self, states: list[State], fails: str = "") -> bytes:
        """The bytes of `.metadata` for the results and plans of all ranks. `fails`: where the save fails."""
        self.saves += 1
        save_id = f"{random.getrandbits(128):032x}"
        known = self.layouts[0].save_id
        plans, metadata = self._plan(states)
        results = [self.layouts[rank].refer(self._write(rank, plan), save_id, known) for rank, plan in enumerate(plans)]
        sent = [pickle.dumps(one) for one in results]
        self.bytes_gathered = [len(one) for one in sent]
        if fails == "while writing":
            raise Broken
        gathered = [pickle.loads(one) for one in sent]
        if fails == "before the accounting":
            raise Broken
        if fails == "only in a wrapper":
            gathered = [list(one) for one in gathered]
        return self._commit(save_id, metadata, gathered, len(states), fails)

    def _commit(
        self, save_id: str, metadata: Metadata, results: list[list[WriteResult]], ranks: int, fails: str
    ) -> bytes:
        posts = [replace(post, checkpoint_id=f"step-{self.saves}") for post in synthetic.posts(World(ranks, 0))]
        decision = decide(posts, 1, save_id)
        node = decision.nodes[0].node_id
        names = [str(ShardName(rank, 0)) for rank in range(ranks)]
        shards = {name: ShardEntry(1, 1, rank, node, (node,)) for rank, name in enumerate(names)}
        if fails == "unwritten":
            shards = {}
        same, layout = lay_out(decision, shards, metadata, results, self.layouts[0], Parts())
        self.was_known = same is not None
        assert same is None or same.save_id == self.layouts[0].save_id
        self.layouts[0].keep(layout)
        return layout.raw

    def _plan(self, states: list[State]) -> tuple[list[Any], Metadata]:
        local = []
        for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True)):
            planner.set_up_planner(state, None, rank == 0)
            local.append(pickle.loads(pickle.dumps(planner.create_local_plan())))
        plans, metadata = self.planners[0].create_global_plan(local)
        plans = [pickle.loads(pickle.dumps(plan)) for plan in plans]
        return [planner.finish_plan(plan) for planner, plan in zip(self.planners, plans, strict=True)], metadata

    def _write(self, rank: int, plan: Any) -> list[WriteResult]:
        items, stream, name = ItemWriter(), Counting(), str(ShardName(rank, 0))
        results = []
        for item in plan.items:
            offset, length = items.write_item(stream, item, self.planners[rank])
            results.append(WriteResult(item.index, length, StorageInfo(name, offset, length)))
        return results


def make_states(count: int, width: int = 4, step: int = 7) -> list[State]:
    """Replicated weights, which one rank saves, a tensor of each rank's own, and nested objects."""
    return [
        {
            "model": {f"layer {n}": torch.zeros(width, 3) for n in range(3)},
            f"own {rank}": torch.zeros(rank + 1),
            "optimizer": {"step": step, "groups": [{"lr": 0.1}, {"lr": 0.2}]},
        }
        for rank in range(count)
    ]


def check_as_fresh(job: Job, states: list[State]) -> None:
    """Saves, and checks that `.metadata`, or DCP's error, equals that of a new job, bit for bit."""
    try:
        wanted = Job(len(states), DefaultSavePlanner).save(states)
    except (AssertionError, ValueError) as refusal:  # an entry is a tensor on one rank and an object on another
        with pytest.raises(type(refusal)):
            job.save(states)
        return
    found = job.save(states)
    assert found == wanted, describe_difference(found, wanted)


def describe_difference(found: bytes, wanted: bytes) -> str:
    one, other = decode_metadata(found, "found"), decode_metadata(wanted, "wanted")
    return f"equal as metadata: {one == other}; {one} is not {other}"


@pytest.mark.parametrize("make_planner", [CachedSavePlanner, DefaultSavePlanner])
def test_unchanged_results_are_not_sent(make_planner: Callable[[], SavePlanner]) -> None:
    """From the second save on, a rank's results are a digest of under 256 bytes, and the layout is taken from the
    cache.
    """
    job, states = Job(3, make_planner), make_states(3)
    for state in states:
        state["many"] = {f"parameter {n}": torch.zeros(2) for n in range(100)}
    for number in range(4):
        for state in states:
            state["many"]["parameter 3"] += number  # a layout contains no values
        check_as_fresh(job, states)
        assert job.was_known == (number > 0)
        assert (max(job.bytes_gathered) < 256) == (number > 0)


CHANGES: dict[str, Callable[[State], object]] = {
    "shape": lambda state: state["model"].update({"layer 1": torch.zeros(5, 3)}),
    "dtype": lambda state: state["model"].update({"layer 1": torch.zeros(4, 3, dtype=torch.bfloat16)}),
    "dtype of the same size": lambda state: state["model"].update({"layer 1": torch.zeros(4, 3, dtype=torch.int32)}),
    "requires grad": lambda state: state["model"].update({"layer 1": torch.zeros(4, 3, requires_grad=True)}),
    "strides": lambda state: state["model"].update({"layer 1": torch.zeros(3, 4).t()}),
    "object for tensor": lambda state: state["model"].update({"layer 1": "text"}),
    "name": lambda state: state["model"].update({"layer x": state["model"].pop("layer 1")}),
    "more": lambda state: state.update({"more": torch.zeros(2)}),
    "less": lambda state: state["model"].pop("layer 1"),
    "order": lambda state: state["model"].update({"layer 0": state["model"].pop("layer 0")}),
    "nesting": lambda state: state.update({"optimizer.step": state["optimizer"].pop("step")}),
    "longer object": lambda state: state["optimizer"].update({"step": "x" * 500}),
    "digits of an object": lambda state: state["optimizer"].update({"step": 1 << 80}),
    "empty group": lambda state: state["optimizer"]["groups"].pop(),
    "bool for int": lambda state: state["optimizer"].update({"step": True}),
}


PLACES = {"coordinator": [0], "another rank": [1], "all ranks": [0, 1, 2]}


@pytest.mark.parametrize("make_planner", [CachedSavePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("where", mark_long(PLACES, keep=["another rank"]))
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_is_missed(change: str, where: str, make_planner: Callable[[], SavePlanner]) -> None:
    """After any change on any rank, and after the change is undone, `.metadata` equals that of a first save."""
    job, changed = Job(3, make_planner), make_states(3)
    for rank in PLACES[where]:
        CHANGES[change](changed[rank])
    for states in (make_states(3), make_states(3), changed, changed, make_states(3)):
        check_as_fresh(job, states)


def test_an_object_that_grows_costs_its_own_rank_alone() -> None:
    """A rank whose object has grown sends its results. The other ranks send digests, and the offsets equal those of a
    first save.
    """
    job, states = Job(3), make_states(3)
    check_as_fresh(job, states)
    for state in states:
        state["optimizer"]["step"] = "x" * 500
    check_as_fresh(job, states)
    assert sorted(size < 256 for size in job.bytes_gathered) == [False, True, True]
    assert not job.was_known
    check_as_fresh(job, states)
    assert job.was_known


def test_a_step_count_has_room() -> None:
    """A step count up to 2**31 takes the same room in a shard, so that training does not change the layout."""
    job = Job(2)
    for number, step in enumerate([9, 10, 255, 256, 65_535, 65_536, 2_000_000_000]):
        check_as_fresh(job, make_states(2, step=step))
        assert job.was_known == (number > 0)


@pytest.mark.parametrize("fails", ["while writing", "before the accounting", "unwritten"])
def test_a_save_that_fails_leaves_no_stale_layout(fails: str) -> None:
    """A save with a changed state fails: the next save, of either state, equals a first save."""
    for after in ("before the change", "changed"):
        job, changed = Job(3), make_states(3)
        CHANGES["longer object"](changed[0])
        CHANGES["shape"](changed[2])
        check_as_fresh(job, make_states(3))
        with pytest.raises((Broken, SaveAborted)):
            job.save(changed, fails)
        check_as_fresh(job, changed if after == "changed" else make_states(3))
        check_as_fresh(job, make_states(3))


@pytest.mark.parametrize("who", [0, 1])
def test_a_new_writer_on_one_rank(who: int) -> None:
    """A coordinator with an empty cache gets all results, and a rank with an empty cache sends its results. No save
    fails.
    """
    job, states = Job(3), make_states(3)
    check_as_fresh(job, states)
    job.layouts[who] = CachedLayouts()
    check_as_fresh(job, states)
    assert [size < 256 for size in job.bytes_gathered] == [who == 1, False, who == 1]
    check_as_fresh(job, states)
    assert job.was_known


def test_a_wrapper_that_copies_results_into_new_lists() -> None:
    """A wrapping storage writer passes new lists of results: no layout is cached, and no save fails."""
    job, states = Job(3), make_states(3)
    wanted = Job(3).save(states)
    for _ in range(3):
        assert job.save(states, "only in a wrapper") == wanted
        assert not job.was_known
    assert job.save(states) == job.save(states) == wanted
    assert job.was_known


@pytest.mark.parametrize("which", ["another coordinator", "another layout"])
def test_a_digest_of_another_save_is_refused(which: str) -> None:
    """A digest for another coordinator or another layout raises SaveAborted. The next save succeeds."""
    job, states = Job(2), make_states(2)
    job.save(states)
    known = job.layouts[0].save_id
    digest = job.layouts[1].refer([], "f" * 32, "").digest if which == "another layout" else ""
    plans, metadata = job._plan(states)
    results = [
        job.layouts[0].refer(job._write(0, plans[0]), "f" * 32, known),
        ShardResults([], digest or "0" * 64, known),
    ]
    sent = pickle.dumps(results)
    if which == "another coordinator":
        job.layouts[0] = CachedLayouts()
    lost = pickle.loads(sent)
    with pytest.raises(SaveAborted, match="does not have"):
        job.layouts[0].find_layout(metadata, lost)
    job.layouts[1:] = [CachedLayouts()]
    check_as_fresh(job, states)


def test_results_that_a_wrapper_adds_are_kept() -> None:
    """Results that a wrapping storage writer adds reach the coordinator on every save."""
    layouts, more = CachedLayouts(), WriteResult(None, 1, StorageInfo("__0_0.distcp", 0, 1))  # type: ignore[arg-type]
    first = layouts.refer([], "1" * 32, "")
    assert first.digest
    layouts.keep(CachedLayout.of("1" * 32, "step-1", Metadata({}, storage_data={}), [first], b""))
    for _ in range(2):
        again = layouts.refer([], "2" * 32, "1" * 32)
        assert len(pickle.dumps(again)) < 256
        again.append(more)
        assert list(pickle.loads(pickle.dumps(again))) == [more]
        assert layouts.find_layout(Metadata({}, storage_data={}), [again]) is None


@pytest.mark.parametrize("seed", mark_long(range(20), keep=[0, 1]))
def test_any_order_of_changes_and_failures(seed: int) -> None:
    """1,000 random saves: each that succeeds has the `.metadata` of a first save, bit for bit."""
    draw, known = random.Random(seed), 0
    job, states = Job(3, draw.choice([CachedSavePlanner, DefaultSavePlanner])), make_states(3)
    for _ in range(50):
        for rank in range(3):
            if draw.random() < 0.1:
                states[rank] = make_states(3, draw.choice([4, 4, 6]), draw.choice([7, 70_000, 1 << 70]))[rank]
            if draw.random() < 0.1:
                states[rank] = make_states(3)[rank]
                CHANGES[draw.choice(list(CHANGES))](states[rank])
        if draw.random() < 0.1:
            job.layouts[draw.randrange(3)] = CachedLayouts()
        if draw.random() < 0.05:
            job.planners = [job.make_planner() for _ in range(3)]
        if draw.random() < 0.05:
            with suppress(PlansUnknown, AssertionError, ValueError):
                job.save(states, "only in a wrapper")
        if draw.random() < 0.15:
            with suppress(Broken, SaveAborted, PlansUnknown, AssertionError, ValueError):
                job.save(states, draw.choice(["while writing", "before the accounting", "unwritten"]))
            continue
        try:
            check_as_fresh(job, states)
        except PlansUnknown:
            job.planners = [job.make_planner() for _ in range(3)]
        known += job.was_known
    assert known


def test_a_planners_own_data_is_compared_by_its_pickle() -> None:
    """Planner data with arrays, which `==` cannot compare, is compared by its pickle."""
    layout = CachedLayout.of("1" * 32, "step-1", Metadata({}, {"a": np.arange(3)}, {}), [], b"")
    assert layout.planner_data.is_same({"a": np.arange(3)})
    assert not layout.planner_data.is_same({"a": np.arange(4)})
    assert not layout.planner_data.is_same({"a": ("a",)})
    paths = CachedLayout.of("1" * 32, "step-1", Metadata({}, {"a": ("a",)}, {}), [], b"")
    assert paths.planner_data.is_same({"a": ("a",)})
    assert not paths.planner_data.is_same({"a": np.arange(3)})


def test_one_process_alone(tmp_path: Path) -> None:
    """Saves of one process with two alternating states: each loads, and its `.metadata` equals that of a new writer."""
    writer, planner = ReplicatedWriter(tmp_path / "own", copies=1), CachedSavePlanner()
    for number in range(8):
        state = make_states(1, 4 if number % 4 < 3 else 6, number * 100)[0]
        state["model"]["layer 0"] += number
        dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer, planner=planner, no_dist=True)
        fresh = ReplicatedWriter(tmp_path / "fresh", copies=1)
        dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=fresh, no_dist=True)
        raw = [(tmp_path / root / f"step-{number}" / ".metadata").read_bytes() for root in ("own", "fresh")]
        assert raw[0] == raw[1]
        loaded = make_states(1, 4 if number % 4 < 3 else 6)[0]
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "own" / f"step-{number}"), no_dist=True)
        assert float(loaded["model"]["layer 0"][0, 0]) == number
        assert loaded["optimizer"]["step"] == number * 100
