"""`.metadata`: written as stock DCP writes it, read only by an unpickler that knows what DCP metadata consists of."""

import io
import pickle
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt.dcp.collection import put_off
from replicated_ckpt.dcp.metadata_check import checked_metadata
from replicated_ckpt.dcp.pickle_items import Making, Named
from replicated_ckpt.dcp.pickle_scan import scan
from replicated_ckpt.errors import MetadataUnsafe

_DCP_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_TENSOR_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
"""Where older versions of torch had TensorProperties, the same in all but the name; their checkpoints still say so."""
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_STATEFUL = (
    *((_DCP_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_DCP_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_OLD_TENSOR_METADATA, "TensorProperties"),
    *((_FILESYSTEM, name) for name in ("_StorageInfo", "_StoragePrefix")),
)
_CALLED = (
    ("builtins", "complex"),
    ("torch.serialization", "_get_layout"),
    (_DCP_METADATA, "_MEM_FORMAT_ENCODING"),
    (_OLD_TENSOR_METADATA, "MEM_FORMAT_ENCODING"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
)
_ALLOWED: dict[tuple[str, str], Making] = {
    **dict.fromkeys(_STATEFUL, Making.STATE),
    **dict.fromkeys(_CALLED, Making.PLAIN),
    ("builtins", "set"): Making.ITEMS,
    ("builtins", "frozenset"): Making.ITEMS,
    ("collections", "OrderedDict"): Making.MAPPING,
    ("torch", "Size"): Making.SIZE,
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
    """What a pickle may name, and what it may do with it.

    Raises:
        MetadataUnsafe: anything else.
    """
    making = Making.ANY if (module, name) in _registered else _ALLOWED.get((module, name))
    if making is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        making = Making.VALUE
    if making is None:
        raise MetadataUnsafe(f".metadata names {module[:200]}.{name[:200]}, which DCP metadata does not consist of.")
    return Named(module, name, making)


def scan_metadata(raw: bytes) -> None:
    """Follows what unpickling `raw` would do, and does nothing of it.

    Raises:
        MetadataUnsafe: it would do what DCP's metadata has no need of.
    """
    with put_off():
        scan(raw, _known)


def encoded_metadata(metadata: Metadata) -> bytes:
    """The bytes of a `.metadata` file, as stock torch reads it."""
    return pickle.dumps(metadata)


def decoded_metadata(raw: bytes, source: str, *, is_scanned: bool = False) -> Metadata:
    """The metadata in `raw`. No code of the pickle's choosing runs.

    `is_scanned`: these very bytes have been through `scan_metadata`, here or on another rank.

    Raises:
        MetadataUnsafe: it names anything beyond DCP's metadata and the registered classes, or is no metadata at all.
    """
    if not is_scanned:
        scan_metadata(raw)
    try:
        with put_off():
            metadata = _Unpickler(io.BytesIO(raw), fix_imports=False).load()
    except MetadataUnsafe:
        raise
    except Exception as exc:
        problem = f"{type(exc).__name__}: {exc}"[:500]
        raise MetadataUnsafe(f"The .metadata from {source} does not unpickle: {problem}.") from exc
    return checked_metadata(metadata, source)
