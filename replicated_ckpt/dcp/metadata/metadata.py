"""`.metadata`: written as stock DCP writes it, with equal parts as one object, and read without an unpickler."""

import copyreg
import io
import pickle
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import PickleUnsafe
from replicated_ckpt.dcp.metadata.build import build_metadata, reduction_for_all
from replicated_ckpt.dcp.objects.values import Key, UnknownName
from replicated_ckpt.dcp.runtime.gc_pause import pause_collections
from replicated_ckpt.dcp.runtime.torch_private import StorageInfo
from replicated_ckpt.errors import MetadataUnsafe

_registered: dict[Key, type] = {}


def register_safe_class(cls: type) -> None:
    """Lets `.metadata` name one more class, such as one that your own planner puts into `planner_data`.

    A user who can write a checkpoint can then make instances of the class with any state: register only harmless classes.
    The registration lasts until this process ends. Safe to call concurrently.
    """
    _registered[cls.__module__, cls.__qualname__] = cls


def encode_metadata(metadata: Metadata) -> bytes:
    """The bytes of a `.metadata` file, as stock torch reads it.

    An older torch can read it, too, unless that would lose a property of some tensor.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: reduction_for_all(metadata)}
    pickler.dump(metadata)
    return file.getvalue()


def decode_metadata(raw: bytes, source: str) -> Metadata:
    """The metadata in `raw`: its opcodes are followed, and DCP's own classes are filled with the result.

    Nothing that the pickle names is imported or called, except classes that this process registered. Time and memory
    are proportional to the size of `raw`.

    Raises:
        MetadataUnsafe: it names anything beyond DCP's metadata and the registered classes, or is not metadata at all.
    """
    try:
        with pause_collections():
            # A copy: another thread may register a class meanwhile.
            return build_metadata(follow(raw), len(raw), dict(_registered))
    except UnknownName as exc:
        hint = _NEWER_TORCH if all(module == "torch" for module, _ in exc.keys) else _REGISTER
        raise MetadataUnsafe(f"The .metadata from {source} {exc}, which DCP metadata does not use.", hint) from exc
    except PickleUnsafe as exc:
        raise MetadataUnsafe(f"The .metadata from {source} {exc}.") from exc


_NEWER_TORCH = (
    f"If that is a dtype, this torch ({torch.__version__}) does not have it: load with the version that "
    "saved, or export there without it (`replicated-ckpt export ... --exclude`)."
)
_REGISTER = (
    "If you trust the checkpoint and the class is your own planner's, register it: "
    "replicated_ckpt.dcp.metadata.metadata.register_safe_class(cls)."
)


Part = TypeVar("Part")


def share_parts(metadata: Metadata) -> None:
    """Makes equal names, sizes, properties and paths in `metadata` the same object. The metadata stays equal to the
    original.

    Its plans and results came from every rank, each with its own texts and sizes. Without this, the pickle has the name
    of a tensor once for each rank that holds it, and every load would read all of them.
    """
    shared: dict[object, Any] = {}

    def one(part: Part) -> Part:
        # By type, too: a torch.Size equals a plain tuple, and 1 equals True.
        found: Part = shared.setdefault((type(part), part), part)
        return found

    for name, entry in metadata.state_dict_metadata.items():
        one(name)
        if isinstance(entry, TensorStorageMetadata):
            with suppress(TypeError):  # a planner has put an unhashable value into the properties
                entry.properties = shared.setdefault(tuple(vars(entry.properties).items()), entry.properties)
            entry.size = one(entry.size)
            entry.chunks = [ChunkStorageMetadata(one(chunk.offsets), one(chunk.sizes)) for chunk in entry.chunks]
    places: dict[MetadataIndex, StorageInfo] = {}
    for index, info in metadata.storage_data.items():
        info.relative_path = one(info.relative_path)
        places[MetadataIndex(one(index.fqn), one(index.offset), index.index)] = info
    metadata.storage_data = places
