"""`.metadata`: written as stock DCP writes it, read without an unpickler."""

import pickle
import threading

from torch.distributed.checkpoint.metadata import Metadata

from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import PickleUnsafe
from replicated_ckpt.dcp.metadata.build import build_metadata
from replicated_ckpt.dcp.objects.values import Key, UnknownName
from replicated_ckpt.dcp.runtime.gc_pause import put_off
from replicated_ckpt.errors import MetadataUnsafe

_registered: dict[Key, type] = {}
_lock = threading.Lock()


def register_safe_class(cls: type) -> None:
    """Lets `.metadata` name one more class, such as one that your own planner puts into `planner_data`.

    Whoever can write a checkpoint can then make its instances with any state: register only what is harmless. Holds for
    this process. Safe to call concurrently.
    """
    with _lock:
        _registered[cls.__module__, cls.__qualname__] = cls


def encode_metadata(metadata: Metadata) -> bytes:
    """The bytes of a `.metadata` file, as stock torch reads it."""
    return pickle.dumps(metadata)


def decode_metadata(raw: bytes, source: str) -> Metadata:
    """The metadata in `raw`: its opcodes are followed, and DCP's own classes are filled with what they say.

    Nothing that the pickle names is imported or called but what this process registered. Time and memory go with the
    size of `raw`.

    Raises:
        MetadataUnsafe: it names anything beyond DCP's metadata and the registered classes, or is no metadata at all.
    """
    try:
        with put_off():
            return build_metadata(follow(raw), len(raw), dict(_registered))
    except UnknownName as exc:
        raise MetadataUnsafe(
            f"The .metadata from {source} {exc}, which is no part of DCP metadata.", _REGISTER
        ) from exc
    except PickleUnsafe as exc:
        raise MetadataUnsafe(f"The .metadata from {source} {exc}.") from exc


_REGISTER = (
    "If you trust the checkpoint and the class is your own planner's, register it: "
    "replicated_ckpt.dcp.metadata.metadata.register_safe_class(cls)."
)
