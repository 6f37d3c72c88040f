"""Objects in shards: common objects load equal, a load runs no code from a shard, and a refusal explains how to allow
the class.
"""

import argparse
import collections
import dataclasses
import datetime as dt
import enum
import io
import os
import pathlib
import pickle
import random
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from replicated_ckpt import CheckpointManager, ReplicatedReader, ReplicatedWriter
from replicated_ckpt.cli.main import main
from replicated_ckpt.dcp.objects import weights_only
from replicated_ckpt.dcp.objects.weights_only import load_object, save_again
from replicated_ckpt.errors import ConfigInvalid, ObjectUnsafe, ReplicatedCkptWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*will not be loaded by default"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float = 0.5


def scheduler(kind: Any, *arguments: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    return kind(torch.optim.AdamW(model.parameters()), *arguments).state_dict()


LR = torch.optim.lr_scheduler
LOADED: dict[str, Any] = {
    "plain": {"a": [1, (2.0, "x", None, True)]},
    "bytes": b"x",
    "empty bytes": b"",
    "a large number": 1 << 100,
    "a cosine schedule": scheduler(LR.CosineAnnealingLR, 3),
    "milestones": scheduler(LR.MultiStepLR, [2, 4]),
    "a function in a schedule": scheduler(LR.LambdaLR, lambda _: 1),
    "a gradient scaler": torch.amp.GradScaler("cpu").state_dict(),
    "torch's random state": torch.get_rng_state(),
    "Python's random state": random.getstate(),
    "numpy's random state": np.random.get_state(),
    "a generator's state": np.random.default_rng(1).bit_generator.state,
    "another generator's state": np.random.SFC64(1).state,
    "a numpy scalar": np.float64(1.5),
    "a numpy bool": np.bool_(1),
    "a numpy datetime": np.datetime64("2020-01-01T00:00:01", "ns"),
    "an array": np.arange(6, dtype=">i4").reshape(2, 3),
    "an array in columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "an array without elements": np.empty((0, 4), np.float16),
    "an array of texts": np.array(["ab", "c"]),
    "an array of days": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "torch's values": [torch.float32, torch.Size([1]), torch.device("cpu"), torch.strided],
    "a set": {1, "a"},
    "an ordered dictionary": collections.OrderedDict(a=1),
    "a counter": collections.Counter("abca"),
    "a complex number": 1j,
    "an array of bytes": bytearray(b"x\xff"),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "views": [torch.arange(4.0)[:2], torch.arange(4.0)[2:]],
    "tensors of rare types": [torch.arange(3).to(torch.uint16), torch.ones(2).to(torch.float8_e4m3fn)],
    "a sparse tensor": torch.eye(3).to_sparse(),
    "a compressed tensor": torch.eye(3).to_sparse_csr(),
    "a quantized tensor": torch.quantize_per_tensor(torch.ones(3), 0.1, 1, torch.quint8),
    "a lazy conjugate": torch.ones(2, dtype=torch.complex64).conj(),
}
PATHS_HOME = pathlib.PosixPath.__module__
"""`pathlib._local` in Python 3.13, `pathlib` in others."""

ALLOWED: dict[str, tuple[Any, str]] = {
    "defaultdict": (collections.defaultdict(int, a=1), "import collections; {}([int, collections.defaultdict])"),
    "deque": (collections.deque([1, 2], 5), "import collections; {}([collections.deque])"),
    "datetime": (dt.datetime(2020, 1, 1), "import datetime; {}([datetime.datetime])"),  # noqa: DTZ001
    "Path": (pathlib.PosixPath("/x/y"), f"import {PATHS_HOME}; {{}}([{PATHS_HOME}.PosixPath])"),
    "Namespace": (argparse.Namespace(a=1), "import argparse; {}([argparse.Namespace])"),
    "Enum": ([Color.RED, Color.RED], "import tests.dcp.items.test_objects; {}([tests.dcp.items.test_objects.Color])"),
    "dataclass": (Settings(0.1), "import tests.dcp.items.test_objects; {}([tests.dcp.items.test_objects.Settings])"),
    "slice": (slice(1), "{}([slice])"),
    "range": (range(3), "{}([range])"),
    "frozenset": (frozenset({1}), "{}([frozenset])"),
    "Ellipsis": ([..., 1], "{}([(Ellipsis, 'builtins.Ellipsis')])"),
}


def saved(value: Any) -> memoryview:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return memoryview(buffer.getvalue())


def container(pickled: bytes, **records: bytes) -> memoryview:
    """A container as `torch.save` writes it, with this pickle and these records."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **records}.items():
            archive.writestr(f"archive/{name}", data)
    return memoryview(buffer.getvalue())


def saved_and_loaded(value: Any) -> Any:
    """The object after a save and a load, as DCP's planner loads it."""
    return torch.load(save_again(saved(value), "key", "shard"), weights_only=False)


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.layout, found.requires_grad) == (wanted.dtype, wanted.layout, wanted.requires_grad)
        plain = [one.dequantize() if one.is_quantized else one.to_dense() for one in (found.detach(), wanted.detach())]
        assert torch.equal(*(one.resolve_conj().view(torch.uint8) if one.dim() else one for one in plain))
    elif isinstance(wanted, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize("value", LOADED.values(), ids=LOADED)
def test_common_objects_load(value: Any) -> None:
    """Common objects load by default with the same type and value as by `torch.load`."""
    assert_same(saved_and_loaded(value), torch.load(io.BytesIO(saved(value)), weights_only=False))


def test_shared_objects_stay_shared() -> None:
    """Two views of one storage, and one list at two keys, stay shared."""
    storage, items = torch.arange(8.0), [1]
    found = saved_and_loaded({"whole": storage, "part": storage[2:4], "one": items, "other": items})
    found["whole"][2] = 9
    assert found["part"][0] == 9
    assert found["one"] is found["other"]


@pytest.fixture
def safe_globals() -> Iterator[None]:
    """Restores torch's safe globals after the test."""
    before = torch.serialization.get_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize(("value", "line"), ALLOWED.values(), ids=ALLOWED)
def test_other_classes_are_allowed_by_one_line(value: Any, line: str, safe_globals: None) -> None:
    """The error names the entry, the class and the shard, and its hint is a line of code. After that line the object
    loads.
    """
    line = line.format("torch.serialization.add_safe_globals")
    with pytest.raises(ObjectUnsafe) as raised:
        save_again(saved(value), "app.state", "shard __0_0.distcp")
    assert "'app.state' in shard __0_0.distcp" in raised.value.message
    assert f"`{line}`" in raised.value.hint
    assert pickle.loads(pickle.dumps(raised.value)).args == raised.value.args
    exec(line, {"torch": torch})
    assert saved_and_loaded(value) == value


class Planted:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def load(root: Path, **options: Any) -> dict[str, Any]:
    state = {"w": torch.zeros(8), "sched": None}
    dcp.load(
        state, checkpoint_id="step-1", storage_reader=ReplicatedReader(root, no_dist=True, **options), no_dist=True
    )
    return state


@pytest.fixture
def planted(tmp_path: Path) -> tuple[Path, Path]:
    """A store with a checkpoint whose object runs code, and the path that this code would create."""
    flag = tmp_path / "executed"
    state = {"w": torch.arange(8.0), "sched": Planted(flag)}
    dcp.save(state, checkpoint_id="step-1", storage_writer=ReplicatedWriter(tmp_path / "root", copies=1), no_dist=True)
    return tmp_path / "root", flag


def test_a_load_runs_nothing_that_a_shard_holds(planted: tuple[Path, Path]) -> None:
    """`dcp.load` raises ObjectUnsafe with the entry, the function and the shard, and runs nothing. With `trust_pickles`
    the code runs.
    """
    root, flag = planted
    with pytest.raises(CheckpointException) as raised:
        load(root)
    ((error, _),) = raised.value.failures.values()
    assert isinstance(error, ObjectUnsafe)
    assert re.search(r"'sched' in shard __0_0\.distcp .* names posix\.mkdir", error.message)
    assert not flag.exists()
    load(root, trust_pickles=True)
    assert flag.exists()


def test_a_manager_trusts_no_pickles_by_default(planted: tuple[Path, Path]) -> None:
    """`restore_latest` runs no code from a pickle, unless the manager has `trust_pickles`."""
    root, flag = planted
    with CheckpointManager(root, writer_options={"copies": 1}) as manager, pytest.raises(CheckpointException):
        manager.restore_latest({"w": torch.zeros(8), "sched": None})
    assert not flag.exists()
    with CheckpointManager(root, trust_pickles=True, writer_options={"copies": 1}) as manager:
        assert manager.restore_latest({"w": torch.zeros(8), "sched": None}) == 1
    assert flag.exists()


def test_no_command_runs_what_a_shard_holds(planted: tuple[Path, Path], tmp_path: Path) -> None:
    """No command that reads the checkpoint runs code from a shard, unless the operator passes `--trust-pickles`."""
    root, flag = planted
    out = tmp_path / "out"
    out.mkdir()
    assert main(["ls", "--root", str(root)]) == 0
    assert main(["verify", "--root", str(root)]) == 0
    assert main(["export", "step-1", str(out / "a.pt"), "--to", "torch", "--root", str(root)]) == 1
    assert main(["export", "step-1", str(out / "hf"), "--to", "safetensors", "--root", str(root)]) == 0
    assert main(["export", "step-1", str(out / "dcp"), "--to", "dcp", "--root", str(root)]) == 0
    assert main(["import", str(out / "dcp"), "step-2", "--from", "dcp", "--root", str(tmp_path / "other")]) == 0
    assert not flag.exists()
    command = ["export", "step-1", str(out / "a.pt"), "--to", "torch", "--root", str(root), "--trust-pickles"]
    assert main(command) == 0
    assert flag.exists()


def test_a_save_warns_once_of_what_a_load_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save warns once per class and process, with the line that allows the class. It does not warn about objects that
    load.
    """
    for name in ("_seen", "_warned"):
        monkeypatch.setattr(weights_only, name, set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, path in enumerate("ab"):
            refused = {"path": pathlib.PosixPath(path), "deep": {"deque": collections.deque([1])}}
            state = {**refused, "text": "cposix\nsystem\n", "values": tuple(LOADED.values())}
            writer = ReplicatedWriter(tmp_path, copies=1)
            dcp.save(state, checkpoint_id=f"step-{number}", storage_writer=writer, no_dist=True)
    said = sorted(str(one.message) for one in caught if one.category is ReplicatedCkptWarning)
    assert len(said) == 2
    assert "names collections.deque" in said[0]
    assert f"names {PATHS_HOME}.PosixPath" in said[1]
    assert f"`import {PATHS_HOME}; torch.serialization.add_safe_globals([{PATHS_HOME}.PosixPath])`" in said[1]


def test_a_save_warns_of_what_is_nested_too_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save warns about an object that is nested more than 100 levels deep."""
    monkeypatch.setattr(weights_only, "_seen", set())
    monkeypatch.setattr(weights_only, "_warned", set())
    for depth, is_refused in ((90, False), (120, True)):
        value: Any = 1
        for _ in range(depth):
            value = (value, [])
        raw = memoryview(saved(value))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weights_only.warn_if_unloadable(raw, f"tree of {depth}")
        assert ["nested more than 100 levels deep" in str(each.message) for each in caught] == [True] * is_refused


def test_a_save_warns_of_arrays_that_a_load_would_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save warns about numpy arrays of objects, although their pickles name the same classes as arrays of numbers,
    which load.
    """
    for name in ("_seen", "_warned"):
        monkeypatch.setattr(weights_only, name, set())
    state = {
        "numbers": np.arange(3),
        "names": np.array(["a", None], dtype=object),
        "more": np.array([{}], dtype=object),
    }
    writer = ReplicatedWriter(tmp_path, copies=1)
    with pytest.warns(ReplicatedCkptWarning, match="by default: it holds a value of numpy's type 'O8'") as caught:
        dcp.save(state, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    assert len([one for one in caught if one.category is ReplicatedCkptWarning]) == 1
    found: dict[str, Any] = {"numbers": None}
    dcp.load(
        found, checkpoint_id="step-1", storage_reader=ReplicatedReader(tmp_path, expect_partial=True), no_dist=True
    )
    assert np.array_equal(found["numbers"], state["numbers"])


def test_an_entry_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    """The pickling error is raised as with stock, with a note that names the entry. The earlier checkpoint still loads."""
    writer = ReplicatedWriter(tmp_path, copies=1)
    dcp.save({"a": torch.ones(2)}, checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException, match=r"The entry 'sampler.key' of the state dict raised it"):
        dcp.save({"sampler": {"key": lambda: 0}}, checkpoint_id="step-2", storage_writer=writer, no_dist=True)
    found = {"a": torch.zeros(2)}
    dcp.load(found, checkpoint_id="latest", storage_reader=ReplicatedReader(tmp_path), no_dist=True)
    assert torch.equal(found["a"], torch.ones(2))


def test_a_name_may_contain_a_lone_surrogate(tmp_path: Path) -> None:
    """An entry's name may contain a lone surrogate, as a file name that is not UTF-8 does. Stock saves and loads such a
    name, too.
    """
    name, value, found = "name \udcff", b"x" * (1 << 20), {"name \udcff": None}
    dcp.save({name: value}, checkpoint_id="a", storage_writer=ReplicatedWriter(tmp_path, copies=1))
    dcp.load(found, checkpoint_id="a", storage_reader=ReplicatedReader(tmp_path))
    assert found == {name: value}


def test_an_entry_nested_too_deep_for_a_load_is_not_saved(tmp_path: Path) -> None:
    """An entry nested deeper than a load accepts fails the save, which names the entry. The earlier checkpoint stays
    the latest.
    """

    def nested(levels: int) -> dict[str, Any]:
        state: dict[str, Any] = {"w": torch.ones(2)}
        for _ in range(levels - 1):
            state = {"k": state}
        return state

    writer, reader = ReplicatedWriter(tmp_path, copies=1), ReplicatedReader(tmp_path)
    dcp.save(nested(100), checkpoint_id="step-1", storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException, match=r"k\.w' is nested 101 deep") as raised:
        dcp.save(nested(101), checkpoint_id="step-2", storage_writer=writer, no_dist=True)
    assert isinstance(raised.value.failures[0][0], ConfigInvalid)
    dcp.load(nested(100), checkpoint_id="latest", storage_reader=reader, no_dist=True)
    assert reader.last_load is not None
    assert reader.last_load.checkpoint_id == "step-1"


def test_a_nameless_safe_global_breaks_no_load(safe_globals: None) -> None:
    """An object without a name, such as Ellipsis, in torch's safe globals does not break the loads of other objects."""
    nameless: Any = ...
    torch.serialization.add_safe_globals([nameless])
    assert saved_and_loaded({"a": 1}) == {"a": 1}


# Bytes that only an attacker writes ------------------------------------------------------------------------------------


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def fetched(at: int) -> bytes:
    return b"h" + bytes([at])


def stored(kind: str, key: str, elements: int) -> bytes:
    return b"(" + text("storage") + named("torch", kind) + text(key) + text("cpu") + number(elements) + b"tQ"


def number(value: int) -> bytes:
    raw = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def rebuilt(storage: bytes, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    sizes, strides = (b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (shape, stride))
    hooks = named("collections", "OrderedDict") + b")R"
    return (
        named("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage
        + number(offset)
        + sizes
        + strides
        + b"\x89"
        + hooks
        + b"tR"
    )


DTYPE = named("numpy", "dtype")
DOUBLED = b")q\x00" + b"".join(fetched(at) + b"\x86q" + bytes([at + 1]) for at in range(60))
HOSTILE: dict[str, bytes] = {
    "os.system": named("os", "system") + text("true") + b"\x85R",
    "a builtin by its Python 2 name": named("__builtin__", "eval") + text("1") + b"\x85R",
    "torch.load": named("torch", "load") + text("x") + b"\x85R",
    "memory of any size": named("__builtin__", "bytearray") + number(1 << 40) + b"\x85R",
    "a tensor of any size": named("torch", "FloatTensor") + number(1 << 40) + b"\x85R",
    "a storage of any size": named("torch.storage", "UntypedStorage") + number(1 << 40) + b"\x85R",
    "a tensor of any size by an indirect call": named("torch._tensor", "_rebuild_from_type_v2")
    + b"("
    + named("torch", "FloatTensor")
    + named("torch", "Tensor")
    + number(1 << 40)
    + b"\x85}tR",
    "a text encoded for hours": named("_codecs", "encode") + text("x") + text("punycode") + b"\x86R",
    "a storage that is not there": rebuilt(stored("FloatStorage", "1", 4), 0, (4,), (1,)),
    "a storage beyond its record": rebuilt(stored("FloatStorage", "0", 1 << 20), 0, (4,), (1,)),
    "a tensor beyond its storage": rebuilt(stored("FloatStorage", "0", 4), 0, (1 << 20,), (1,)),
    "a tensor before its storage": rebuilt(stored("FloatStorage", "0", 4), -1, (1,), (1,)),
    "a storage of two kinds": b"(" + stored("FloatStorage", "0", 4) + stored("IntStorage", "0", 4) + b"t",
    "a persistent id that is no storage": b"K\x01Q",
    "a key of shared tuples": b"}" + DOUBLED + b"Ns",
    "an element of shared tuples": named("__builtin__", "set") + b"](" + DOUBLED + b"e\x85R",
    "a tuple in a tuple, without end": b")" + b"\x85" * 200_000,
    "a list in itself": b"]q\x00h\x00a",
    "a state that overrides a method of pickle": named("collections", "OrderedDict")
    + b")R}"
    + text("__reduce_ex__")
    + named("torch", "Size")
    + b"sb",
    "a state for a value of torch's": named("torch", "Size") + b")\x85R}b",
    "addresses as Python objects": named("numpy._core.multiarray", "_reconstruct")
    + (named("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R(K\x01K\x01\x85")
    + (DTYPE + text("V8") + b"\x89\x88\x87R(K\x03" + text("|") + b"N" + text("a") + b"\x85}" + text("a"))
    + (DTYPE + text("O8") + b"\x89\x88\x87RK\x00\x86sK\x08K\x01K\x00tb\x89C\x08AAAAAAAAtb"),
    "an array of Python objects": pickle.dumps(np.array([1, "a"], object), 2)[2:-1],
    "an array beyond its bytes": pickle.dumps(np.arange(4, dtype="i8"), 2)[2:-1].replace(b"K\x04\x85", b"K\x09\x85"),
    "a sparse tensor with an index outside": b"",
    "a frame": b"\x95" + struct.pack("<Q", 1) + b"N",
    "no pickle": b"R",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_refused(body: bytes, request: pytest.FixtureRequest) -> None:
    """Hostile bytes raise ObjectUnsafe. They call nothing, allocate no memory and do not hang."""
    raw = container(b"\x80\x02" + body + b".", **{"data/0": bytes(16)})
    if "index outside" in request.node.name:
        outside = torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.ones(2), (3,), check_invariants=False)
        raw = saved(outside)
    if request.node.name.endswith("[a frame]"):
        assert load_object(raw, "key", "shard") is None, "a pickle frame alone is harmless"
        return
    with pytest.raises(ObjectUnsafe, match="'key' in shard"):
        load_object(raw, "key", "shard")


def deflated(raw: memoryview) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as to:
        for entry in source.infolist():
            to.writestr(entry.filename, source.read(entry))
    return buffer.getvalue()


def twice(raw: memoryview) -> bytes:
    """Adds another pickle under a name that torch's zip reader treats as the same."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(buffer, "w") as to:
        for entry in source.infolist():
            to.writestr(entry.filename, source.read(entry))
        to.writestr("archive/DATA.PKL", b"N.")
    return buffer.getvalue()


CONTAINERS: dict[str, Callable[[memoryview], bytes]] = {
    "compressed records": deflated,
    "two records of the same name": twice,
    "truncated": lambda raw: bytes(raw[:-1]),
    "trailing bytes": lambda raw: bytes(raw) + b"\0",
    "no container": lambda raw: b"some planner's own bytes",
    "empty": lambda raw: b"",
    "big-endian": lambda raw: bytes(raw).replace(b"little", b"bigbig"),
}


@pytest.mark.parametrize("change", CONTAINERS.values(), ids=CONTAINERS)
def test_only_containers_of_torch_save_are_read(change: Callable[[memoryview], bytes]) -> None:
    """A container that other readers would decompress, or read differently, is refused."""
    with pytest.raises(ObjectUnsafe):
        load_object(memoryview(change(saved({"a": torch.ones(100)}))), "key", "shard")
