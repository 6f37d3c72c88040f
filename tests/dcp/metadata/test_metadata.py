"""`.metadata` is a pickle from a disk: it is read without running any code that it names."""

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata, register_safe_class
from replicated_ckpt.dcp.runtime.torch_private import OldTensorProperties
from replicated_ckpt.errors import MetadataUnsafe
from tests.gloo import group_of_one

STATES: list[dict[str, Any]] = [
    {"a": torch.ones(3, dtype=torch.bfloat16)},
    {"nested": {"list": [torch.ones(1), 2, "x"], "none": None}, "float": 1.5, "bytes": b"x"},
    {"complex": torch.ones(2, dtype=torch.complex64), "bool": torch.ones(2, dtype=torch.bool), "int": torch.ones(0)},
]


class Planted:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


class OwnPlannerData:
    """A class that a user's planner stores in `planner_data`."""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.filterwarnings("ignore")
def test_metadata_of_stock_torch_is_read(tmp_path: Path, state: dict[str, Any]) -> None:
    """Metadata of stock torch's default planner decodes equal to stock's own result, and can be encoded again."""
    metadata = dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    stock = pickle.loads((tmp_path / ".metadata").read_bytes())
    ours = decode_metadata((tmp_path / ".metadata").read_bytes(), "here")
    assert ours.state_dict_metadata == stock.state_dict_metadata == metadata.state_dict_metadata
    assert ours.storage_data == stock.storage_data
    assert decode_metadata(encode_metadata(ours), "here").storage_data == stock.storage_data


def test_chunks_may_have_plain_tuples_for_sizes() -> None:
    """Chunks may have plain tuples as offsets and sizes, as Megatron-FSDP writes them for uneven DTensors. Other tuples
    are refused.
    """
    chunk = ChunkStorageMetadata(offsets=(2, 0), sizes=(1, 3))  # type: ignore[arg-type]
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size((3, 3)), [chunk])
    place = {MetadataIndex("a", (2, 0)): _StorageInfo("__0_0.distcp", 0, 12)}
    read = decode_metadata(encode_metadata(Metadata({"a": tensor}, None, place)), "here")
    assert read.state_dict_metadata == {"a": tensor}
    assert read.storage_data == place
    hostile = Metadata({"a": replace(tensor, chunks=[replace(chunk, sizes=(1, "x"))])}, None, place)  # type: ignore[arg-type]
    with pytest.raises(MetadataUnsafe, match="not made of numbers"):
        decode_metadata(encode_metadata(hostile), "here")


@pytest.mark.filterwarnings("ignore")
def test_metadata_of_older_versions_of_torch_is_read(tmp_path: Path) -> None:
    """Older versions of torch named another class for the properties of a tensor: such metadata is read."""
    dcp.save({"a": torch.ones(3)}, checkpoint_id=str(tmp_path), no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    entry = metadata.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    old: Any = OldTensorProperties(dtype=torch.float32, requires_grad=True)
    entry.properties = old
    found = decode_metadata(encode_metadata(metadata), "here").state_dict_metadata["a"]
    assert isinstance(found, TensorStorageMetadata)
    assert found == entry
    assert type(found.properties) is type(old)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh on a process group of one, for DTensors."""
    with group_of_one():
        yield DeviceMesh("cpu", [0])


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("is_one_file", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_metadata_of_every_planner_is_read(
    tmp_path: Path, mesh: DeviceMesh, *, is_flat: bool, is_cached: bool, is_one_file: bool
) -> None:
    """Metadata of sharded tensors, replicas and objects, flattened or not, and of a save with a cached plan, decodes
    equal to stock's.
    """
    state: dict[str, Any] = {
        "sharded": distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]),
        "replica": distribute_tensor(torch.ones(3), mesh, [Replicate()]),
        "scalar": torch.tensor(1),
    }
    if is_flat:
        state["nested"] = {"path": Path("x"), "ordered": OrderedDict(a=torch.ones(2)), "set": {1}, "list": [1, 2]}
    for number in range(2):
        folder = tmp_path / str(number)
        planner = DefaultSavePlanner(flatten_state_dict=is_flat, enable_plan_caching=is_cached)
        dcp.save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=is_one_file), planner=planner)
        raw = (folder / ".metadata").read_bytes()
        assert decode_metadata(raw, "here") == pickle.loads(raw)


@pytest.mark.parametrize("place", ["top", "planner_data", "storage_data"])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, place: str) -> None:
    """A planted call at any place raises MetadataUnsafe and does not run."""
    target = tmp_path / "planted"
    hostile: Any = Planted(str(target))
    if place == "planner_data":
        hostile = Metadata({}, planner_data=hostile, storage_data={})
    elif place == "storage_data":
        hostile = Metadata({}, storage_data={MetadataIndex("x"): hostile})
    with pytest.raises(MetadataUnsafe, match=r"posix\.mkdir"):
        decode_metadata(pickle.dumps(hostile), "node n")
    assert not target.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("os", "system"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.serialization", "load"),
        ("functools", "partial"),
    ],
)
def test_names_beyond_dcp_metadata_are_refused(module: str, name: str) -> None:
    """Only the listed names are accepted, and nothing that can be reached through them."""
    raw = (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(name)])
        + name.encode()
        + b"\x93."
    )
    with pytest.raises(MetadataUnsafe):
        decode_metadata(raw, "node n")


def test_a_registered_class_is_read() -> None:
    """A user's planner data is refused with a hint, and is read after `register_safe_class`."""
    raw = pickle.dumps(Metadata({}, planner_data=OwnPlannerData(), storage_data={}))
    with pytest.raises(MetadataUnsafe, match="register_safe_class"):
        decode_metadata(raw, "node n")
    register_safe_class(OwnPlannerData)
    assert isinstance(decode_metadata(raw, "node n").planner_data, OwnPlannerData)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_unsafe(raw: bytes) -> None:
    with pytest.raises(MetadataUnsafe):
        decode_metadata(b"\x80\x04" + raw, "node n")
