"""The private parts of torch that the package uses exist, and behave as expected, in every supported version."""

import concurrent.futures
import gc
import inspect
import io
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.futures import Future

from replicated_ckpt.dcp.runtime import torch_private
from replicated_ckpt.dcp.runtime.torch_private import (
    AsyncCall,
    Collectives,
    DcpCall,
    StorageInfo,
    find_async_call,
    find_call,
    flatten,
    flattening_holds_tensors,
    follow_step,
    local_part,
    may_omit_items,
    narrow,
    use_collectives,
    with_local_part,
)
from tests.gloo import group_of_one


class Witness(dcp.FileSystemWriter):
    """Stock writer that records what `find_call` returns inside its hook."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.seen: list[DcpCall | None] = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.seen.append(find_call())
        return super().prepare_local_plan(plan)


class WitnessReader(dcp.FileSystemReader):
    """Stock reader that records what `find_call` returns inside its hooks."""

    def reset(self, checkpoint_id: object = None) -> None:
        self.seen = [find_call()]
        super().reset(checkpoint_id)  # type: ignore[arg-type]

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        self.seen.append(find_call())
        return super().read_metadata(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_a_hook_sees_the_dcp_call_it_is_part_of(tmp_path: object) -> None:
    """`find_call` returns the user's arguments in every hook that uses it, and None outside a call."""
    assert find_call() is None
    writer, reader = Witness(str(tmp_path)), WitnessReader(str(tmp_path))
    dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert writer.seen == [DcpCall(None, True)]
    dcp.load({"a": torch.ones(2)}, checkpoint_id=str(tmp_path), storage_reader=reader, no_dist=True)
    assert reader.seen == [DcpCall(None, True)] * 2
    reader.seen = []
    state_dict_loader._load_state_dict({"a": torch.ones(2)}, reader, no_dist=True)
    assert reader.seen == [DcpCall(None, True)]


class Follower(dcp.FileSystemWriter):
    """Stock writer that records the outcome of its save through `follow_step`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.outcomes: list[object] = []

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        def exchange(collectives: Collectives, value: object) -> object:
            self.outcomes.append(collectives.broadcast_object(value))
            return self.outcomes[-1]

        assert follow_step(exchange)
        return super().write_data(plan, planner)


class FailingFollower(Follower):
    """A follower whose commit fails."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        raise OSError("the commit")


class FollowingReader(dcp.FileSystemReader):
    """Stock reader that records the outcome of its load, and sends values of its own in place of None."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.outcomes: list[object] = []

        def exchange(collectives: Collectives, value: object) -> list[object]:
            self.outcomes += [value, collectives.gather_object({"bytes": 1}), collectives.broadcast_object("read")]
            self.outcomes += [collectives.get_rank(), collectives.get_world_size()]
            return [value]

        assert follow_step(exchange)
        return super().prepare_local_plan(plan)


class RecordingCollectives:
    """Collectives for a single process that record which operations are used."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.coordinator = -1

    def gather_object(self, value: object) -> list[object]:
        self.used.append("gather")
        return [value]

    def scatter_object(self, values: list[object] | None) -> object:
        self.used.append("scatter")
        assert values is not None
        return values[0]

    def broadcast_object(self, value: object) -> object:
        self.used.append("broadcast")
        return value


class RecordingWriter(Follower):
    """Stock writer whose steps use `RecordingCollectives`, and which records the outcome of its save."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.recorder = RecordingCollectives()

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        assert use_collectives(self.recorder)
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)


class RecordingReader(dcp.FileSystemReader):
    """Stock reader whose steps use `RecordingCollectives`."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        self.recorder = RecordingCollectives()
        assert use_collectives(self.recorder)
        return super().read_metadata(*args, **kwargs)


class AskingReader(dcp.FileSystemReader):
    """Asks `may_omit_items` about itself, or about the `inner` reader that it wraps."""

    def __init__(self, path: str, inner: dcp.FileSystemReader | None = None) -> None:
        super().__init__(path)
        self._inner = inner or self

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.are_left = may_omit_items(self._inner)
        return super().prepare_local_plan(plan)


class OtherPlanner(dcp.DefaultLoadPlanner):
    """A subclass that changes neither the global plan nor the final plan."""

    def create_local_plan(self) -> LoadPlan:
        return super().create_local_plan()


class FilteringPlanner(dcp.DefaultLoadPlanner):
    """Overrides `create_global_plan`."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return [plan for plan in global_plan if plan.items]


@pytest.mark.filterwarnings("ignore")
def test_leaves_plans_is_true_only_if_nothing_changes_a_plan(tmp_path: Path) -> None:
    """`may_omit_items` is true for the reader that DCP calls if the planner inherits DCP's methods for the global and the
    final plan. These methods return their argument.
    """
    dcp.save({"a": torch.ones(2)}, checkpoint_id=str(tmp_path), no_dist=True)

    def is_told(planner: dcp.LoadPlanner | None, inner: dcp.FileSystemReader | None = None) -> bool:
        reader = AskingReader(str(tmp_path), inner)
        dcp.load({"a": torch.ones(2)}, storage_reader=reader, planner=planner, no_dist=True)
        return reader.are_left

    patched = dcp.DefaultLoadPlanner()
    patched.finish_plan = lambda new_plan: new_plan  # type: ignore[method-assign]
    assert [is_told(one) for one in (None, dcp.DefaultLoadPlanner(), OtherPlanner())] == [True] * 3
    assert [is_told(one) for one in (FinishingPlanner(), FilteringPlanner(), patched)] == [False] * 3
    assert not is_told(None, dcp.FileSystemReader(str(tmp_path)))
    assert not may_omit_items(dcp.FileSystemReader(str(tmp_path)))
    plans, planner = [LoadPlan([])], dcp.DefaultLoadPlanner()
    assert planner.create_global_plan(plans) is plans
    assert planner.finish_plan(plans[0]) is plans[0]


class FinishingPlanner(dcp.DefaultLoadPlanner):
    """Overrides `finish_plan`."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return super().finish_plan(central_plan)


class FailingPlanner(dcp.DefaultLoadPlanner):
    """Fails after the ranks have planned, before any of them reads."""

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise OSError("the plan")


@pytest.mark.filterwarnings("ignore")
def test_follow_step_gets_the_outcome_of_the_step(tmp_path: Path) -> None:
    """`follow_step` passes the metadata of a committed save, None after a load, or the error. Outside a call it returns
    False.
    """
    assert not follow_step(lambda collectives, value: collectives.broadcast_object(value))
    writer = Follower(str(tmp_path / "a"))
    for _ in range(2):
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert [type(outcome) for outcome in writer.outcomes] == [Metadata] * 2
    failing = FailingFollower(str(tmp_path / "b"))
    with pytest.raises(CheckpointException):
        dcp.save({"a": torch.ones(2)}, storage_writer=failing, no_dist=True)
    assert [type(outcome) for outcome in failing.outcomes] == [CheckpointException]
    reader = FollowingReader(str(tmp_path / "a"))
    dcp.load({"a": torch.ones(2)}, storage_reader=reader, no_dist=True)
    assert reader.outcomes == [None, [{"bytes": 1}], "read", 0, 1]
    with pytest.raises(CheckpointException, match="the plan"):
        dcp.load({"a": torch.ones(2)}, storage_reader=reader, no_dist=True, planner=FailingPlanner())
    assert isinstance(reader.outcomes[0], tuple), "a failure as DCP keeps it"
    assert reader.outcomes[1:] == [[{"bytes": 1}], "read", 0, 1]


@pytest.mark.parametrize(
    "function",
    [
        state_dict_saver.save,
        state_dict_saver._save_state_dict,
        state_dict_loader.load,
        state_dict_loader._load_state_dict,
    ],
)
def test_the_entry_points_have_the_parameters_that_are_read(function: object) -> None:
    """DCP's entry points have the parameters that `find_call` reads from their frames."""
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    assert {"process_group", "no_dist"} <= set(parameters)


def test_without_a_process_group_there_is_no_default_store() -> None:
    """Without a process group, torch itself raises an error about the missing default store."""
    with pytest.raises((ValueError, RuntimeError)):
        torch_private.default_store()


def test_storage_info_is_pickled_as_stock_torch_reads_it() -> None:
    """The entries of `.metadata` have the name, fields and module of the stock writer's."""
    info = StorageInfo("__0_0.distcp", 1, 2)
    assert pickle.loads(pickle.dumps(info)) == info
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 1, 2)
    assert b"torch.distributed.checkpoint.filesystem" in pickle.dumps(info)
    assert b"_StorageInfo" in pickle.dumps(info)


def test_narrow_takes_a_part_by_offsets_and_sizes() -> None:
    """`narrow` takes offsets and sizes by dimension, also for a tensor without dimensions."""
    tensor = torch.arange(24).reshape(4, 6)
    assert torch.equal(narrow(tensor, (1, 2), (2, 3)), tensor[1:3, 2:5])
    assert narrow(torch.tensor(5), (), ()).item() == 5


def test_crc_can_be_switched_off_and_the_result_still_loads() -> None:
    """`torch.load` reads what `torch.save` writes without CRC32."""
    was = torch.serialization.get_crc32_options()
    buffer = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.arange(1000), buffer)
    finally:
        torch.serialization.set_crc32_options(was)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), torch.arange(1000))


def test_flattening_names_what_dcps_planners_name() -> None:
    """`flatten` joins dictionary keys and list positions by dots, and returns the same paths as DCP's planner."""
    state = {"a": {"b": torch.ones(2), "c": 3}, "d": [torch.ones(1), {"e": 4}], "f": [1, 2]}
    values, paths = flatten(state)
    assert list(values) == ["a.b", "a.c", "d.0", "d.1.e", "f"]
    assert values["f"] == [1, 2]
    assert paths["d.1.e"] == ("d", 1, "e")
    metadata = dcp.DefaultSavePlanner()
    metadata.set_up_planner(state)
    assert metadata.create_local_plan().planner_data == paths


def test_a_flattened_state_is_freed_by_a_young_collection() -> None:
    """A state that a planner has released is freed at once, or in torch 2.7 by the next young collection."""
    planner, tensor = dcp.DefaultSavePlanner(), torch.ones(3)
    held = weakref.ref(tensor)
    planner.set_up_planner({"nested": [tensor]})
    planner.state_dict = {}
    del tensor
    assert (held() is not None) == flattening_holds_tensors()
    gc.collect(1)
    assert held() is None


class StagingWitness(Witness):
    """Stock writer and stager that records what `find_async_call` returns."""

    def stage(self, state_dict: dict[str, object]) -> dict[str, object]:
        self.staged = find_async_call()
        return state_dict

    @property
    def should_synchronize_after_execute(self) -> bool:
        return True

    def synchronize_staging(self) -> None:
        self.synchronized = find_async_call()


@pytest.mark.filterwarnings("ignore")
def test_a_stager_sees_the_asynchronous_save_it_stages_for(tmp_path: Path) -> None:
    """`find_async_call` returns the arguments of the asynchronous save, and its future once DCP has created it. Outside
    a call it returns None.
    """
    assert find_async_call() is None
    writer = StagingWitness(str(tmp_path))
    future = dcp.async_save({"a": torch.ones(2)}, storage_writer=writer)  # torch 2.7 has no `no_dist` there
    assert isinstance(future, concurrent.futures.Future)
    assert writer.staged == AsyncCall(None, no_dist=False, in_process=False, future=None)
    assert writer.synchronized == AsyncCall(None, no_dist=False, in_process=False, future=future)
    future.result(60)
    kinds = {kind.value for kind in state_dict_saver.AsyncCheckpointerType}
    assert kinds == {"thread", "process"}
    assert "async_checkpointer_type" in inspect.signature(state_dict_saver.async_save).parameters


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.mark.usefixtures("_group_of_one")
def test_a_dtensor_is_made_of_another_local_part() -> None:
    """`with_local_part` keeps the layout, shape, strides, dtype and `requires_grad`. DCP plans the same items for the
    result.
    """
    for placement, needs_grad in ((Split(0), True), (Split(1), False), (Replicate(), False)):
        original = distribute_tensor(torch.arange(24.0).reshape(6, 4), init_device_mesh("cpu", (1,)), [placement])
        original.requires_grad_(needs_grad)
        part = local_part(original).detach() + 1
        made = with_local_part(original, part)
        assert local_part(made) is part
        assert (made.device_mesh, made.placements, made.requires_grad) == (
            original.device_mesh,
            original.placements,
            needs_grad,
        )
        assert (made.shape, made.stride(), made.dtype) == (original.shape, original.stride(), original.dtype)
        assert torch.equal(made.full_tensor(), original.full_tensor() + 1)
        plans = [create_default_local_save_plan({"t": tensor}, is_coordinator=True) for tensor in (original, made)]
        assert plans[0].items == plans[1].items


@pytest.mark.filterwarnings("ignore")
def test_the_steps_of_a_call_use_the_given_collectives(tmp_path: Path) -> None:
    """After `use_collectives`, all steps of a save and the first step of a load use the given collectives, in this
    order. A follower's broadcast uses them too.
    """
    assert not use_collectives(RecordingCollectives())
    writer, reader = RecordingWriter(str(tmp_path)), RecordingReader(str(tmp_path))
    for _ in range(2):
        writer.recorder.used.clear()
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
        assert writer.recorder.used == ["gather", "scatter", "gather", "broadcast"]
        dcp.load({"a": torch.zeros(2)}, storage_reader=reader, no_dist=True)
        assert reader.recorder.used == ["gather", "scatter"]
    assert writer.recorder.coordinator == reader.recorder.coordinator == 0
    assert [type(outcome) for outcome in writer.outcomes] == [Metadata] * 2
