"""`.metadata` between versions of torch: each version reads what another writes. `make compat` uses real versions."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt import ReplicatedReader, ReplicatedWriter
from replicated_ckpt.core.chunk import is_contiguous
from replicated_ckpt.dcp.metadata.build import COMMON_FIELDS, known_fields
from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata
from replicated_ckpt.errors import MetadataUnsafe

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::replicated_ckpt.errors.ReplicatedCkptWarning"),
]
GET: Any = TensorProperties.__getstate__
SET: Any = TensorProperties.__setstate__
newer = pytest.mark.skipif(
    known_fields(TensorProperties) == COMMON_FIELDS, reason="this torch writes no more than the others"
)


class Unheard:
    """A class that no version of torch has."""


def write_as_newer(monkeypatch: pytest.MonkeyPatch, *more: object) -> None:
    """Makes `pickle` write tensor properties as torch 2.15 does, with a sixth field, or with more."""
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*GET(self)[:COMMON_FIELDS], *more))


def be_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tensor properties have five fields, as in torch 2.13, and refuse a state with more."""

    def take(self: TensorProperties, state: tuple[Any, ...]) -> None:
        dtype, layout, requires_grad, memory_format, pin_memory = state
        SET(self, (dtype, layout, requires_grad, memory_format, pin_memory))

    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: GET(self)[:COMMON_FIELDS])
    monkeypatch.setattr(TensorProperties, "__setstate__", take)


def described(tensor: torch.Tensor, *chunks: tuple[int, ...], size: tuple[int, ...] = ()) -> Metadata:
    whole = torch.Size(size or tuple(tensor.shape))
    parts = [ChunkStorageMetadata(torch.Size([0] * len(whole)), torch.Size(sizes)) for sizes in chunks or (whole,)]
    return Metadata({"a": TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), whole, parts)}, {}, {})


def entry_of(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


@pytest.mark.parametrize("more", [((2, 1),), (None, "a seventh"), (None, Unheard())])
def test_tensor_properties_of_a_newer_torch_are_read(monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...]) -> None:
    """Fields that this torch does not know are dropped, whatever class they name. The dtype, size and chunks are kept."""
    metadata = described(torch.ones(3, 2, dtype=torch.float16))
    with monkeypatch.context() as elsewhere:
        write_as_newer(elsewhere, *more)
        raw = pickle.dumps(metadata)
    be_older(monkeypatch)
    found = entry_of(decode_metadata(raw, "here"))
    assert found.properties.dtype is torch.float16
    assert (found.size, found.chunks) == (entry_of(metadata).size, entry_of(metadata).chunks)
    assert not found.properties.pin_memory


def test_tensor_properties_of_an_older_torch_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor properties with five fields are read. This torch's further fields are empty."""
    metadata = described(torch.ones(3, 2))
    with monkeypatch.context() as elsewhere:
        be_older(elsewhere)
        raw = pickle.dumps(metadata)
    found = entry_of(decode_metadata(raw, "here")).properties
    assert found == TensorProperties(dtype=torch.float32)
    assert getattr(found, "strides", None) is None


def test_storage_metadata_of_torch_2_6_is_read() -> None:
    """Storage metadata of torch 2.6, without `modules`, is read."""
    metadata = described(torch.ones(3, 2))
    metadata.storage_meta = StorageMeta("step-1", "save")
    vars(metadata.storage_meta).pop("modules", None)
    found = decode_metadata(pickle.dumps(metadata), "here").storage_meta
    assert found == StorageMeta("step-1", "save")


def test_unknown_fields_of_metadata_are_dropped() -> None:
    """An unknown field of Metadata is dropped, whatever class it names. An unknown class in a known field raises
    MetadataUnsafe.
    """
    metadata = described(torch.ones(2))
    metadata.planner_info = Unheard()  # type: ignore[attr-defined]
    assert not hasattr(decode_metadata(pickle.dumps(metadata), "here"), "planner_info")
    metadata.planner_data = Unheard()
    with pytest.raises(MetadataUnsafe, match="Unheard"):
        decode_metadata(pickle.dumps(metadata), "here")


def test_the_hint_for_an_unknown_dtype_names_the_version() -> None:
    """For an unknown dtype the hint is to load with the version of torch that saved."""
    raw = pickle.dumps(described(torch.ones(2))).replace(b"float32", b"float_9")
    with pytest.raises(MetadataUnsafe, match=r"torch\.float_9.*load with the version that saved"):
        decode_metadata(raw, "here")


@newer
@pytest.mark.parametrize(
    "metadata",
    [
        described(torch.ones(3, 2)),
        described(torch.ones(())),
        described(torch.ones(0, 4)),
        described(torch.ones(4, 1)[:, :1]),
        described(torch.ones(4, 2), (4, 2), (4, 2), size=(4, 4)),
    ],
    ids=["plain", "scalar", "empty", "one column", "shard of columns"],
)
def test_older_torch_reads_what_is_written_here(monkeypatch: pytest.MonkeyPatch, metadata: Metadata) -> None:
    """Older torch reads the metadata of contiguous tensors and shards that this package encodes, also with plain
    `pickle`.
    """
    before = pickle.dumps(metadata)
    raw = encode_metadata(metadata)
    assert pickle.dumps(metadata) == before
    be_older(monkeypatch)
    assert entry_of(pickle.loads(raw)).properties.dtype is torch.float32
    with pytest.raises(ValueError, match="too many values"):
        pickle.loads(before)


@newer
def test_strides_of_a_transposed_tensor_are_kept() -> None:
    """The strides of a transposed tensor are kept, also where another entry shares its properties and does not need
    them.
    """
    metadata = described(torch.ones(3, 2).t())
    entry = entry_of(metadata)
    metadata.state_dict_metadata["b"] = dataclasses.replace(entry, size=torch.Size([2, 1]), chunks=[])
    found: Any = entry_of(pickle.loads(encode_metadata(metadata))).properties
    assert found.strides == (1, 2)


@newer
def test_a_shard_of_a_checkpointable_tensor_is_read_by_older_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A saved CheckpointableTensor's shard is loaded by this package and unpickled by stock on older torch."""
    shard: Any = torch.arange(8.0).reshape(4, 2)
    shard.global_shape, shard.local_sizes = (4, 2), ((4, 2),)
    shard.global_offsets, shard.local_offsets = ((0, 0),), ((0, 0),)
    dcp.save({"shard": shard, "step": 3}, checkpoint_id="one", storage_writer=ReplicatedWriter(tmp_path))
    be_older(monkeypatch)
    pickle.loads((tmp_path / "one" / ".metadata").read_bytes())
    state = {"shard": torch.zeros(4, 2), "step": 0}
    dcp.load(state, checkpoint_id="one", storage_reader=ReplicatedReader(tmp_path))
    assert torch.equal(state["shard"], torch.arange(8.0).reshape(4, 2))  # type: ignore[arg-type]
    assert state["step"] == 3


@pytest.mark.parametrize(
    ("sizes", "strides", "is_one"),
    [((), (), True), ((3, 2), (2, 1), True), ((3, 2), (1, 3), False), ((1, 2), (9, 1), True), ((3,), (2, 1), False)],
)
def test_contiguous_memory_is_known_by_its_strides(
    sizes: tuple[int, ...], strides: tuple[int, ...], is_one: bool
) -> None:
    """Strides of dimensions with one element do not count."""
    assert is_contiguous(sizes, strides) is is_one
