"""A look at unpickled `.metadata`: is everything of the type that DCP and the reader take for granted."""

from collections.abc import Iterator
from itertools import chain
from typing import TypeGuard

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.core.layout import is_shard_path
from replicated_ckpt.dcp.torch_private import OldTensorProperties, StorageInfo
from replicated_ckpt.errors import MetadataUnsafe


def checked_metadata(metadata: object, source: str) -> Metadata:
    """`metadata`, if it is what it should be. Nothing of it is printed, compared or hashed: it may be anything.

    Raises:
        MetadataUnsafe: some part is of another type, or an item lies elsewhere than in a shard.
    """
    if type(metadata) is not Metadata:
        raise MetadataUnsafe(f"The .metadata from {source} holds a {type(metadata).__name__}, no DCP metadata.")
    described, places = (vars(metadata).get(name) for name in ("state_dict_metadata", "storage_data"))
    if type(described) is not dict or type(places) is not dict:
        raise MetadataUnsafe(f"The .metadata from {source} describes no state dict, or no place of its items.")
    problem = next(chain(_state_dict_problems(described), _place_problems(places)), None)
    if problem is not None:
        raise MetadataUnsafe(f"The .metadata from {source} is not as DCP writes it: {problem}.")
    return metadata


def _state_dict_problems(described: dict[object, object]) -> Iterator[str]:
    for name, entry in described.items():
        if type(name) is not str:
            yield "an entry of the state dict has no name"
        elif type(entry) is TensorStorageMetadata:
            if not _is_tensor(vars(entry)):
                yield f"the tensor {name[:200]!r} is described wrongly"
        elif type(entry) is not BytesStorageMetadata:
            yield f"{name[:200]!r} is neither tensor nor object"


def _is_tensor(fields: dict[str, object]) -> bool:
    properties, size, chunks = fields.get("properties"), fields.get("size"), fields.get("chunks")
    if (
        type(properties) not in (TensorProperties, OldTensorProperties)
        or not _is_size(size)
        or type(chunks) is not list
    ):
        return False
    if type(vars(properties).get("dtype")) is not torch.dtype:
        return False
    dimensions = len(size)
    for chunk in chunks:
        if type(chunk) is not ChunkStorageMetadata:
            return False
        offsets, sizes = chunk.__dict__.get("offsets"), chunk.__dict__.get("sizes")
        if not _is_size(offsets) or not _is_size(sizes) or not len(offsets) == len(sizes) == dimensions:
            return False
    return True


def _place_problems(places: dict[object, object]) -> Iterator[str]:
    """Entries of an older torch lack attributes that are None; so it is read from `__dict__` what is there."""
    for index, info in places.items():
        if type(index) is not MetadataIndex or type(index.__dict__.get("fqn")) is not str:
            yield "the place of an item has no name"
        elif type(info) is not StorageInfo or not _is_place(info.__dict__):
            yield f"{index.fqn[:200]!r} lies in no shard"


def _is_place(fields: dict[str, object]) -> bool:
    name, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    is_range = type(offset) is int and type(length) is int and offset >= 0 and length >= 0
    return is_range and type(name) is str and is_shard_path(name)


def _is_size(size: object) -> TypeGuard[torch.Size]:
    """Whether it is a size. Its items are integers: torch.Size takes nothing else."""
    return type(size) is torch.Size and (not size or min(size) >= 0)
