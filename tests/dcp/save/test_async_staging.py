"""`dcp.async_save` with the writer alone: what it copies, into which memory, and what happens without enough memory."""

import gc
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Self

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Split

from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter
from replicated_ckpt.cli.exit_codes import ExitCode
from replicated_ckpt.cli.main import main
from replicated_ckpt.dcp.staging import segment, stager
from replicated_ckpt.dcp.staging.segment import StagingRefused
from replicated_ckpt.dcp.staging.state_copy import StateCopy
from tests.gloo import group_of_one
from tests.harness.processes import open_files
from tests.stopwatch import Stopwatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
TIMEOUT_S = 60.0


class Point(NamedTuple):
    """A named tuple, as optimizers use."""

    x: int
    y: tuple[int, ...]


class Gated(DefaultSavePlanner):
    """Returns no data before `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.reached = threading.Event(), threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.reached.set()
        assert self.gate.wait(TIMEOUT_S)
        return super().resolve_data(write_item)


class Failing(DefaultSavePlanner):
    """Fails before DCP calls the storage writer."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(*args, **kwargs)
        raise ValueError("it fails on purpose")


@pytest.fixture(autouse=True)
def _without_idle_segments() -> Iterator[None]:
    segment.drop_idle_segments()
    yield
    gc.collect()
    segment.drop_idle_segments()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the created segments."""
    sizes: list[int] = []

    class Counted(segment.Segment):
        def __init__(self, size_bytes: int) -> None:
            sizes.append(size_bytes)
            super().__init__(size_bytes)

    monkeypatch.setattr(segment, "Segment", Counted)
    return sizes


def various() -> dict[str, Any]:
    """A state of many kinds of values, including those that are hard to copy."""
    base = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    learned = torch.nn.Parameter(torch.randn(7, 5))
    numbers = {
        str(dtype): torch.arange(24).to(dtype) for dtype in (torch.bool, torch.int8, torch.float64, torch.bfloat16)
    }
    ordered = OrderedDict(weight=base * 2, bias=torch.ones(3))
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as nn.Module.state_dict sets it
    complex_numbers = torch.randn(6, dtype=torch.complex64)
    return {
        "whole": base,
        "tied": base,
        "seen_as_integers": base.view(torch.int32),
        "row": base[3],
        "columns": base[:, ::7],
        "turned": base.t(),
        "expanded": torch.tensor([1.0, 2.0]).expand(4, 2),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4, dtype=torch.float16),
        "parameter": learned,
        "computed": learned * 2,
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "conjugated": complex_numbers.conj(),
        "negated": complex_numbers.conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.randn(9), 0.1, 2, torch.qint8),
        "numbers": numbers,
        "module": ordered,
        "list": [base + 1, {"deep": [torch.ones(2), "text"]}],
        "point": Point(1, (2, 3)),
        "objects": {"set": {1, 2}, "raw": b"x" * 999, "none": None, "pair": (torch.ones(3), base)},
    }


def spoil(value: Any) -> None:
    """Changes everything in place that a training step could change."""
    if isinstance(value, torch.Tensor):
        if not value.is_quantized and value.layout is torch.strided and value._base is None:
            value.detach().zero_()
    elif isinstance(value, dict):
        for inner in value.values():
            spoil(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            spoil(inner)
    elif isinstance(value, set):
        value.add("spoilt")


def start(state: dict[str, Any], writer: ReplicatedWriter, name: str, planner: Any = None) -> "Future[Any]":
    future = dcp.async_save(state, checkpoint_id=name, storage_writer=writer, planner=planner)
    assert isinstance(future, Future)
    return future


def count_descriptors() -> int:
    """The number of open descriptors of segments. Other descriptors of the process may be closed at any time."""
    return sum("replicated-ckpt-staging" in name for name in open_files(os.getpid()))


def verified(root: Path, name: str) -> None:
    assert main(["verify", "--root", str(root), name]) == ExitCode.OK


def described(root: Path, name: str) -> dict[str, Any]:
    reader = ReplicatedReader(root)
    reader.reset(name)
    return dict(reader.read_metadata().state_dict_metadata)


def loaded(root: Path, name: str, like: torch.Tensor) -> torch.Tensor:
    into = {"t": torch.full_like(like, -7)}
    dcp.load(into, checkpoint_id=name, storage_reader=ReplicatedReader(root))
    return into["t"]


def test_the_checkpoint_is_that_of_a_synchronous_save(tmp_path: Path) -> None:
    """The state changes right after the call: the checkpoint equals that of a synchronous save, byte for byte."""
    torch.manual_seed(1)
    state = various()
    dcp.save(state, checkpoint_id="a", storage_writer=ReplicatedWriter(tmp_path / "sync"))
    planner = Gated()
    future = start(state, ReplicatedWriter(tmp_path / "async"), "a", planner)
    spoil(state)
    planner.gate.set()
    future.result(TIMEOUT_S)
    shards = [(tmp_path / kind / "a" / "__0_0.distcp").read_bytes() for kind in ("sync", "async")]
    assert shards[0] == shards[1]
    here, there = (described(tmp_path / kind, "a") for kind in ("sync", "async"))
    assert here == there
    learned = there["parameter"]
    assert isinstance(learned, TensorStorageMetadata)
    assert learned.properties.requires_grad
    verified(tmp_path / "async", "a")


def test_every_dtype_is_copied() -> None:
    """A copy has the bits, dtype and shape of the original, in other memory."""
    for dtype in {found for found in vars(torch).values() if isinstance(found, torch.dtype)}:
        raw = torch.randint(0, 2, (48,), dtype=torch.uint8)
        original = raw.clone().view(dtype)
        copied = StateCopy({"t": original}).make(memoryview(bytearray(4096)))["t"]
        assert (copied.dtype, copied.shape) == (original.dtype, original.shape)
        assert torch.equal(copied.view(torch.uint8), raw), dtype
        assert copied.untyped_storage().data_ptr() != original.untyped_storage().data_ptr(), dtype


def test_shared_storages_are_copied_once_and_stay_shared() -> None:
    """Tied tensors and views are copied once, and their copies share storage."""
    base = torch.arange(1000.0)
    state = {
        "base": base,
        "tied": base,
        "view": base[10:20],
        "deep": [base.view(torch.int32)],
        "other": torch.ones(1000),
    }
    state_copy = StateCopy(state)
    assert state_copy.size_bytes < 2 * 4096 + 512
    copied = state_copy.make(memoryview(bytearray(state_copy.size_bytes)))
    assert copied["base"] is copied["tied"]
    copied["base"][10] = -1
    assert copied["view"][0] == -1
    assert base[10] == 10
    assert copied["deep"][0].untyped_storage().data_ptr() == copied["base"].untyped_storage().data_ptr()
    starts = [copied[name].untyped_storage().data_ptr() for name in ("base", "other")]
    assert (starts[1] - starts[0]) % 512 == 0


def test_meta_tensors_and_cycles_are_copied() -> None:
    """The copy of a meta tensor is a meta tensor. A dict that contains itself is copied to one that contains itself."""
    state: dict[str, Any] = {"meta": torch.empty(3, device="meta"), "w": torch.ones(2)}
    state["self"] = state
    copied = StateCopy(state).make(memoryview(bytearray(4096)))
    assert copied["meta"].is_meta
    assert copied["self"] is copied is not state


def test_the_memory_is_used_again(tmp_path: Path, made: list[int]) -> None:
    """Repeated saves, also of new writers, use one segment, which grows for a larger state. `close` frees it."""
    for index in range(6):
        state = {"t": torch.full((5000,), float(index))}
        writer = ReplicatedWriter(tmp_path)
        future = start(state, writer, f"step-{index}")
        state["t"].zero_()
        future.result(TIMEOUT_S)
        verified(tmp_path, f"step-{index}")
        assert bool((loaded(tmp_path, f"step-{index}", state["t"]) == index).all())
    large = {"t": torch.arange(500_000.0)}
    start(large, writer, "large").result(TIMEOUT_S)
    assert torch.equal(loaded(tmp_path, "large", large["t"]), large["t"])
    verified(tmp_path, "large")
    assert made == [20_480]
    descriptors = count_descriptors()
    writer.close()
    assert count_descriptors() == descriptors - 2  # the agent's descriptor and the mapping's


def test_a_planner_that_outlives_its_save_keeps_no_copy(tmp_path: Path, made: list[int]) -> None:
    """Repeated saves of one CheckpointManager use one segment, although the planner outlives each save."""
    with CheckpointManager(tmp_path, preempt_on=()) as manager:
        for step in range(3):
            manager.async_save(step, {"t": torch.full((5000,), float(step))})
            manager.wait()
            until = time.monotonic() + 5
            while segment._leased and time.monotonic() < until:  # until the saving thread ends
                time.sleep(0.01)
    assert made == [20_480]


def test_a_second_save_waits_for_the_first(tmp_path: Path, made: list[int]) -> None:
    """Two saves of one writer: the second one copies after the first has ended, and both contain their own state."""
    writer, state, planner = ReplicatedWriter(tmp_path), {"t": torch.full((1000,), 1.0)}, Gated()
    first = start(state, writer, "step-1", planner)
    assert planner.reached.wait(TIMEOUT_S)
    state["t"].fill_(2.0)
    second: list[Future[Any]] = []
    thread = threading.Thread(target=lambda: second.append(start(state, writer, "step-2")))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert not second
    planner.gate.set()
    thread.join(TIMEOUT_S)
    first.result(TIMEOUT_S)
    second[0].result(TIMEOUT_S)
    for step in (1, 2):
        assert bool((loaded(tmp_path, f"step-{step}", state["t"]) == step).all())
        verified(tmp_path, f"step-{step}")


def test_a_copy_that_is_still_in_use_is_not_overwritten(tmp_path: Path, made: list[int]) -> None:
    """A planner still holds the copy of its last save: the next save copies to another segment. Both are reused later."""
    writer, planner = ReplicatedWriter(tmp_path), DefaultSavePlanner()
    for step in (1, 2, 3, 4):
        start({"t": torch.full((1000,), float(step))}, writer, f"step-{step}", planner).result(TIMEOUT_S)
        kept = planner.state_dict["t"]
        start({"t": torch.zeros(1000)}, writer, f"zeros-{step}").result(TIMEOUT_S)
        assert bool((kept == step).all())
        del kept
        verified(tmp_path, f"step-{step}")
    assert len(made) <= 3


def test_a_failed_save_does_not_block_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopwatch: Stopwatch
) -> None:
    """A save failed before it reached the writer, and its error, which refers to the copy, is kept: the next save does
    not wait.
    """
    monkeypatch.setattr(stager, "BEGIN_TIMEOUT_S", 0.5)
    writer = ReplicatedWriter(tmp_path)
    failed = start({"t": torch.ones(10)}, writer, "a", Failing())
    assert isinstance(failed.exception(TIMEOUT_S), CheckpointException | ValueError)
    began = stopwatch.now()
    start({"t": torch.ones(10)}, writer, "b").result(TIMEOUT_S)
    assert stopwatch.now() - began < TIMEOUT_S / 2
    assert failed.exception() is not None
    verified(tmp_path, "b")


def test_a_state_that_does_not_fit_is_saved_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, made: list[int]
) -> None:
    """Without memory for a copy, `async_save` returns after this rank has written, and logs the reason. The checkpoint
    is right.
    """
    monkeypatch.setattr(stager, "share_of_rank", lambda: 1000)
    state = {"t": torch.arange(5000.0)}
    wanted, planner = state["t"].clone(), Gated()
    writer, futures = ReplicatedWriter(tmp_path), list[Future[Any]]()
    thread = threading.Thread(target=lambda: futures.append(start(state, writer, "a", planner)))
    with caplog.at_level(logging.WARNING):
        thread.start()
        assert planner.reached.wait(TIMEOUT_S)
        thread.join(0.3)
        assert thread.is_alive()
        planner.gate.set()
        thread.join(TIMEOUT_S)
    state["t"].zero_()
    futures[0].result(TIMEOUT_S)
    assert "20,480 more bytes of memory, but this rank may take 1,000" in caplog.text
    assert torch.equal(loaded(tmp_path, "a", wanted), wanted)
    assert made == []
    verified(tmp_path, "a")
    with pytest.raises(StagingRefused):
        writer.stage(state)


def test_a_save_without_a_copy_that_fails_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save without a copy fails: `async_save` returns, and the future has the error."""
    monkeypatch.setattr(stager, "share_of_rank", lambda: 1000)
    failed = start({"t": torch.ones(5000)}, ReplicatedWriter(tmp_path), "a", Failing())
    assert failed.exception(TIMEOUT_S) is not None


def test_a_value_that_cannot_be_copied_fails_in_the_background(tmp_path: Path) -> None:
    """A value that cannot be copied or pickled: `async_save` returns, and the save fails on all ranks."""
    failed = start({"lock": threading.Lock(), "t": torch.ones(3)}, ReplicatedWriter(tmp_path), "a")
    assert isinstance(failed.exception(TIMEOUT_S), CheckpointException)
    assert not (tmp_path / "a").exists()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["nested tensor", "deep list"])
def test_a_state_whose_copying_fails_fails_in_the_background(tmp_path: Path, kind: str) -> None:
    """Copying the state raises: `async_save` returns and the future fails. An error in the call would leave the other
    ranks waiting.
    """
    if kind == "nested tensor":
        odd: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    else:
        odd = []
        for _ in range(2 * sys.getrecursionlimit()):
            odd = [odd]
    failed = start({"odd": odd, "t": torch.ones(3)}, ReplicatedWriter(tmp_path), "a")
    assert isinstance(failed.exception(TIMEOUT_S), CheckpointException)
    assert not (tmp_path / "a").exists()


class OneWay:
    """Can be pickled, but not unpickled while `is_closed`."""

    is_closed = True

    def __init__(self, value: int) -> None:
        self.value = value

    def __setstate__(self, values: dict[str, int]) -> None:
        if self.is_closed:
            raise RuntimeError("it is made anew")
        self.__dict__.update(values)


class Kept(NamedTuple):
    """A tuple with a tensor, which DCP treats as one value."""

    average: torch.Tensor
    error: OneWay


def test_values_that_can_only_be_pickled_are_saved_as_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that can be pickled but not copied: the checkpoint has the values as of the call."""
    state: dict[str, Any] = {"odd": OneWay(1), "kept": Kept(torch.ones(3), OneWay(1)), "t": torch.ones(5)}
    writer = ReplicatedWriter(tmp_path)
    dcp.save(state, checkpoint_id="sync", storage_writer=writer)
    future = start(state, writer, "async")
    state["odd"].value = state["kept"].error.value = 7
    state["kept"].average.fill_(7)
    state["t"].fill_(7)
    future.result(TIMEOUT_S)
    assert described(tmp_path, "async").keys() == described(tmp_path, "sync").keys()
    monkeypatch.setattr(OneWay, "is_closed", False)
    into: dict[str, Any] = {"odd": OneWay(0), "kept": Kept(torch.zeros(3), OneWay(0)), "t": torch.zeros(5)}
    dcp.load(into, checkpoint_id="async", storage_reader=ReplicatedReader(tmp_path, trust_pickles=True))
    assert (into["odd"].value, into["kept"].error.value) == (1, 1)
    assert bool((into["kept"].average == 1).all())
    assert bool((into["t"] == 1).all())
    verified(tmp_path, "async")


def test_a_tensor_that_is_freed_at_the_call_is_refused(tmp_path: Path) -> None:
    """A tensor without storage at the call fails the save, although FSDP's next step fills it before the saving thread
    reads it.
    """
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    failed = start({"freed": freed, "t": torch.ones(3)}, ReplicatedWriter(tmp_path), "a")
    freed.untyped_storage().resize_(4000)
    freed.fill_(7)
    assert isinstance(failed.exception(TIMEOUT_S), CheckpointException)
    assert not (tmp_path / "a").exists()


class Pair(torch.Tensor):
    """A tensor subclass made of two tensors."""

    one: torch.Tensor
    other: torch.Tensor

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)
        made.one, made.other = one, other
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> NoReturn:
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "other"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> "Pair":
        return Pair(parts["one"], parts["other"])


def test_copies_need_a_gradient_where_the_originals_do() -> None:
    """Copies have the `requires_grad` of the originals, which `.metadata` records."""
    pair, sparse = Pair(torch.ones(3), torch.zeros(3)), torch.eye(3).to_sparse()
    state = {
        "pair": pair.requires_grad_(),
        "sparse": sparse.requires_grad_(),
        "frozen": Pair(torch.ones(3), torch.ones(3)),
    }
    copied = StateCopy(state).make(memoryview(bytearray(4096)))
    assert [each.requires_grad for each in copied.values()] == [True, True, False]


def test_values_that_deepcopy_refuses_are_pickled(tmp_path: Path) -> None:
    """A tensor with autograd history inside an object is pickled, as torch cannot deep-copy it."""
    learned = torch.ones(3, requires_grad=True)
    state = {"pair": (learned * 2, 1), "t": torch.ones(2)}

    class Holder(dict[str, Any]):
        """DCP treats this dict as an object if it is inside a tuple."""

    state["held"] = (Holder(inner=learned * 3),)
    copied = StateCopy(state).make(memoryview(bytearray(4096)))
    assert copied["pair"][0].tolist() == [2.0, 2.0, 2.0]
    assert copied["held"][0]["inner"].tolist() == [3.0, 3.0, 3.0]


class Guarded(Mapping[str, Any]):
    """A mapping that can neither be copied nor pickled."""

    def __init__(self, inner: dict[str, Any]) -> None:
        self._inner, self._lock = inner, threading.Lock()

    def __getitem__(self, key: str) -> Any:
        return self._inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)


class GuardedList(list[Any]):
    """A list that can neither be copied nor pickled."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("it is guarded")


@pytest.mark.parametrize("wrap", [MappingProxyType, Guarded, lambda inner: GuardedList(inner.values())])
def test_the_content_of_a_container_that_cannot_be_copied_is_copied(
    tmp_path: Path, wrap: Callable[[dict[str, Any]], Any]
) -> None:
    """The content of a container that cannot be copied is copied: later changes are not in the checkpoint."""
    weights = torch.ones(1000)
    future = start({"held": wrap({"w": weights, "lr": 0.5})}, ReplicatedWriter(tmp_path), "a")
    weights.fill_(-7)
    future.result(TIMEOUT_S)
    (name,) = [name for name, entry in described(tmp_path, "a").items() if isinstance(entry, TensorStorageMetadata)]
    into = {name: torch.zeros(1000)}
    dcp.load(into, checkpoint_id="a", storage_reader=ReplicatedReader(tmp_path))
    assert bool((into[name] == 1).all())
    verified(tmp_path, "a")


def test_a_lazy_parameter_fails_in_the_background(tmp_path: Path) -> None:
    """A lazy parameter has no elements yet: the save fails in the background, so that all ranks learn of it."""
    failed = start({"lazy": torch.nn.LazyLinear(3).weight, "t": torch.ones(3)}, ReplicatedWriter(tmp_path), "a")
    assert isinstance(failed.exception(TIMEOUT_S), CheckpointException)


def test_a_forked_child_has_memory_of_its_own() -> None:
    """A forked child that drops a segment does not reuse it, as the parent's save may still read that memory."""
    held = segment.lease_segment(4096, lambda: 1 << 30)
    held[:4] = b"keep"
    child = os.fork()
    if child == 0:
        del held
        gc.collect()
        for _ in range(2):
            segment.lease_segment(4096, lambda: 1 << 30)[:4] = b"lost"
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(held[:4]) == b"keep"


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    with group_of_one():
        yield


@pytest.mark.usefixtures("_group_of_one")
def test_sharded_tensors_are_made_of_copies() -> None:
    """The copies of a DTensor and a ShardedTensor have the layout of the originals, with the local part in other
    memory.
    """
    part = torch.arange(12.0).reshape(3, 4)
    old = init_from_local_shards([Shard.from_tensor_and_offsets(part, [0, 0], 0)], 3, 4)
    new = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [Split(0)])
    state_copy = StateCopy({"old": old, "new": new})
    assert state_copy.size_bytes == 2 * 512
    copied = state_copy.make(memoryview(bytearray(1024)))
    assert type(copied["old"]) is type(old)
    assert copied["old"].metadata() == old.metadata()
    assert (copied["new"].placements, copied["new"].shape) == (new.placements, new.shape)
    part.zero_()
    new.to_local().zero_()
    assert copied["old"].local_shards()[0].tensor.sum() == 66
    assert copied["new"].to_local().sum() == 15


@pytest.mark.usefixtures("_group_of_one")
def test_a_dtensor_may_be_a_part_of_a_storage() -> None:
    """A DTensor that is a slice of a flat buffer is copied to a storage of its own. Torch 2.15 needs that to send it to
    another process.
    """
    flat = torch.arange(40.0)
    mesh = init_device_mesh("cpu", (1,))
    state = {str(at): DTensor.from_local(flat[at : at + 8], mesh, [Split(0)]) for at in (0, 24)}
    state["none"] = DTensor.from_local(flat[7:7], mesh, [Split(0)])
    copied = StateCopy(state).make(None)
    assert all(one.to_local().storage_offset() == 0 for one in copied.values())
    sent = ForkingPickler.loads(ForkingPickler.dumps(copied))
    flat.zero_()
    for at in (0, 24):
        assert sent[str(at)].to_local().tolist() == [*range(at, at + 8)]
    assert sent["none"].shape == (0,)
