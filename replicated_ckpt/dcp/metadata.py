"""`.metadata`: written as stock DCP writes it, read only by an unpickler that knows what DCP metadata consists of."""

import io
import pickle
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

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
        if (module, name) in _ALLOWED or (module, name) in _registered:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise MetadataUnsafe(f".metadata names {module}.{name}, which DCP metadata does not consist of.")


def encoded_metadata(metadata: Metadata) -> bytes:
    """The bytes of a `.metadata` file, as stock torch reads it."""
    return pickle.dumps(metadata)


def decoded_metadata(raw: bytes, source: str) -> Metadata:
    """The metadata in `raw`. No code of the pickle's choosing runs.

    Raises:
        MetadataUnsafe: it names anything beyond DCP's metadata and the registered classes, or is no metadata at all.
    """
    try:
        metadata = _Unpickler(io.BytesIO(raw)).load()
    except MetadataUnsafe:
        raise
    except Exception as exc:
        raise MetadataUnsafe(f"The .metadata from {source} does not unpickle: {type(exc).__name__}: {exc}.") from exc
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise MetadataUnsafe(f"The .metadata from {source} holds a {type(metadata).__name__}, no DCP metadata.")
    return metadata
