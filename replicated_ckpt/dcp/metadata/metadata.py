"""`.metadata`: written as stock DCP writes it, read without an unpickler."""

import copyreg
import io
import pickle

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from replicated_ckpt.core.pickles.follower import follow
from replicated_ckpt.core.pickles.tree import PickleUnsafe
from replicated_ckpt.dcp.metadata.build import build_metadata
from replicated_ckpt.dcp.metadata.versions import reduction_for_all
from replicated_ckpt.dcp.objects.values import Key, UnknownName
from replicated_ckpt.dcp.runtime.gc_pause import put_off
from replicated_ckpt.errors import MetadataUnsafe

_registered: dict[Key, type] = {}


def register_safe_class(cls: type) -> None:
    """Lets `.metadata` name one more class, such as one that your own planner puts into `planner_data`.

    A user who can write a checkpoint can then make its instances with any state: register only what is harmless. Holds for
    this process. Safe to call concurrently.
    """
    _registered[cls.__module__, cls.__qualname__] = cls


def encode_metadata(metadata: Metadata) -> bytes:
    """The bytes of a `.metadata` file, as stock torch reads it.

    An older torch reads it, too, unless that would lose what the properties of some tensor say.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: reduction_for_all(metadata)}
    pickler.dump(metadata)
    return file.getvalue()


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
        hint = _NEWER_TORCH if all(module == "torch" for module, _ in exc.keys) else _REGISTER
        raise MetadataUnsafe(f"The .metadata from {source} {exc}, which is no part of DCP metadata.", hint) from exc
    except PickleUnsafe as exc:
        raise MetadataUnsafe(f"The .metadata from {source} {exc}.") from exc


_NEWER_TORCH = (
    f"If that is a dtype, it is of another torch than this {torch.__version__}: load with the version that saved, or "
    "export there what is needed here (`replicated-ckpt export ... --exclude`)."
)
_REGISTER = (
    "If you trust the checkpoint and the class is your own planner's, register it: "
    "replicated_ckpt.dcp.metadata.metadata.register_safe_class(cls)."
)
