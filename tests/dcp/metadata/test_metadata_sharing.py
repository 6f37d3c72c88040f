"""`share_parts` replaces equal parts of the metadata by one object, and the metadata stays equal."""

import pickle
from dataclasses import replace

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.dcp.metadata.metadata import decode_metadata, encode_metadata, share_parts
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo

RANKS = 32
NAME = "layers.0.feed_forward.weight"


def from_a_rank(rank: int) -> tuple[ChunkStorageMetadata, MetadataIndex, StorageInfo]:
    """A rank's parts as the coordinator receives them: no object is shared with another rank's."""
    offset, size = torch.Size([rank, 0]), torch.Size([1, 8])
    parts = ChunkStorageMetadata(offset, size), MetadataIndex(NAME, offset), StorageInfo(f"__{rank}_0.distcp", 0, 64)
    made: tuple[ChunkStorageMetadata, MetadataIndex, StorageInfo] = pickle.loads(pickle.dumps(parts))
    return made


def gathered() -> Metadata:
    ranks = [from_a_rank(rank) for rank in range(RANKS)]
    tensor = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size([RANKS, 8]), [chunk for chunk, _, _ in ranks]
    )
    places = {index: info for _, index, info in ranks}
    places[MetadataIndex("step", None, 0)] = StorageInfo("__0_0.distcp", 64, 8)
    return Metadata({NAME: tensor, "step": BytesStorageMetadata()}, {NAME: ("layers", 0)}, places)


def test_shared_metadata_is_equal() -> None:
    """After `share_parts` all entries are equal and in the same order, also after unpickling by stock torch."""
    metadata, wanted = gathered(), gathered()
    share_parts(metadata)
    assert metadata == wanted
    assert list(metadata.storage_data) == list(wanted.storage_data)
    assert pickle.loads(encode_metadata(metadata)) == wanted


def test_the_file_contains_a_name_once() -> None:
    """The file contains a tensor's name and a shard's path once, not per chunk."""
    metadata = gathered()
    before = len(encode_metadata(replace(metadata)))
    share_parts(metadata)
    raw = encode_metadata(metadata)
    assert raw.count(NAME.encode()) == 1
    assert raw.count(b"__0_0.distcp") == 1
    assert len(raw) < 0.7 * before


def test_equal_properties_are_shared() -> None:
    """Tensors with equal properties share them, also after decoding. Properties that cannot be hashed stay as they are."""
    odd = TensorProperties(torch.float32, requires_grad=[8, 1])  # type: ignore[arg-type]  # as a user's planner may set it
    made = {"a": TensorProperties(torch.float32), "b": TensorProperties(torch.float32), "c": odd}
    metadata = Metadata({name: TensorStorageMetadata(each, torch.Size([8]), []) for name, each in made.items()})
    metadata.storage_data = {}
    wanted = pickle.loads(pickle.dumps(metadata))
    unshared = pickle.dumps(metadata)
    share_parts(metadata)
    raw = encode_metadata(metadata)
    assert len(raw) < len(unshared)
    assert metadata == wanted == pickle.loads(raw)
    assert properties_of(metadata, "a") is properties_of(metadata, "b")
    assert properties_of(metadata, "c") is odd
    found, apart = decode_metadata(raw, "here"), decode_metadata(unshared, "here")
    assert found == apart == wanted
    assert properties_of(found, "a") is properties_of(found, "b")
    assert properties_of(apart, "a") is not properties_of(apart, "b")


def properties_of(metadata: Metadata, name: str) -> TensorProperties:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.properties
