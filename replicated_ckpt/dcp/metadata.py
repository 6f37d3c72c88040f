"""`.metadata`: written as stock DCP writes it, read only by an unpickler that knows what DCP metadata consists of."""

import io
import pickle
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt.core.layout import ShardName
from replicated_ckpt.dcp.pickle_scan import Named, scan
from replicated_ckpt.dcp.torch_private import StorageInfo
from replicated_ckpt.errors import MetadataUnsafe

_DCP_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "complex"),
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    *((_DCP_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_DCP_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_DCP_METADATA, "_MEM_FORMAT_ENCODING"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}
_registered: set[tuple[str, str]] = set()
_lock = threading.Lock()


def register_safe_class(cls: type) -> None:
    """Lets `.metadata` name one more class, such as one that your own planner puts into `planner_data`.

    Whoever can write a checkpoint can then make its instances with any state: register only what is harmless. Holds for
    this process. Safe to call concurrently.
    """
    with _lock:
        _registered.add((cls.__module__, cls.__qualname__))


class _Unpickler(pickle.Unpickler):
    """Finds the classes of DCP metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        known = _known(module, name)
        return super().find_class(known.module, known.name)


def _known(module: str, name: str) -> Named:
    """What a pickle may name.

    Raises:
        MetadataUnsafe: anything else.
    """
    is_registered = (module, name) in _registered
    is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    if is_registered or is_dtype or (module, name) in _ALLOWED:
        return Named(module, name, may_build=is_registered)
    raise MetadataUnsafe(f".metadata names {module[:200]}.{name[:200]}, which DCP metadata does not consist of.")


def encoded_metadata(metadata: Metadata) -> bytes:
    """The bytes of a `.metadata` file, as stock torch reads it."""
    return pickle.dumps(metadata)


def decoded_metadata(raw: bytes, source: str) -> Metadata:
    """The metadata in `raw`. No code of the pickle's choosing runs.

    Raises:
        MetadataUnsafe: it names anything beyond DCP's metadata and the registered classes, or is no metadata at all.
    """
    try:
        scan(raw, _known)
        metadata = _Unpickler(io.BytesIO(raw)).load()
    except MetadataUnsafe:
        raise
    except Exception as exc:
        raise MetadataUnsafe(f"The .metadata from {source} does not unpickle: {type(exc).__name__}: {exc}.") from exc
    if not isinstance(metadata, Metadata) or not isinstance(getattr(metadata, "storage_data", None), dict):
        raise MetadataUnsafe(f"The .metadata from {source} holds a {type(metadata).__name__}, no DCP metadata.")
    if not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise MetadataUnsafe(f"The .metadata from {source} describes no state dict.")
    bad = next((info for info in metadata.storage_data.values() if not _is_place(info)), None)
    if bad is not None:
        raise MetadataUnsafe(
            f"The .metadata from {source} says that an item lies in {str(bad)[:200]}, which is no shard."
        )
    return metadata


def _is_place(info: object) -> bool:
    """Whether an item can lie there: in a shard, at an offset and with a length in bytes. Old ones carry no `__dict__`."""
    if type(info) is not StorageInfo:
        return False
    name, offset, length = (info.__dict__.get(field) for field in ("relative_path", "offset", "length"))
    is_shard = isinstance(name, str) and ShardName.parse(name) is not None
    return is_shard and type(offset) is int and type(length) is int and offset >= 0 and length >= 0
