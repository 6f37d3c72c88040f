"""Equal parts of `.metadata` made one object: a pickle holds a shared object once, however often it is met."""

from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from replicated_ckpt.dcp.runtime.torch_private import StorageInfo

Part = TypeVar("Part")


def share_parts(metadata: Metadata) -> None:
    """Lets equal names, sizes, properties and paths in `metadata` be the same object; it stays equal to what it was.

    The plans and results that it was made from came from every rank, each with texts and sizes of its own: a tensor that
    a thousand ranks hold has its name in the pickle a thousand times, and every load would read it as often.
    """
    shared: dict[object, Any] = {}

    def one(part: Part) -> Part:
        found: Part = shared.setdefault((type(part), part), part)
        return found

    for name, entry in metadata.state_dict_metadata.items():
        one(name)
        if isinstance(entry, TensorStorageMetadata):
            with suppress(TypeError):  # a planner has put something into them that has no hash
                entry.properties = shared.setdefault(tuple(vars(entry.properties).items()), entry.properties)
            entry.size = one(entry.size)
            entry.chunks = [ChunkStorageMetadata(one(chunk.offsets), one(chunk.sizes)) for chunk in entry.chunks]
    places: dict[MetadataIndex, StorageInfo] = {}
    for index, info in metadata.storage_data.items():
        info.relative_path = one(info.relative_path)
        places[MetadataIndex(one(index.fqn), one(index.offset), index.index)] = info
    metadata.storage_data = places
