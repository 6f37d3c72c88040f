"""Values of any shape as one item of bytes: DCP would make an entry of each leaf, and want the same leaves at a load."""

import io
from typing import Any

import torch

from replicated_ckpt.dcp.objects.unloadable import warn_if_unloadable
from replicated_ckpt.dcp.objects.weights_only import load_object


def pack(value: Any, name: str) -> bytes:
    """What `torch.save` makes of it. Warns of classes that `unpack` would refuse by default."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    raw = buffer.getvalue()
    warn_if_unloadable(memoryview(raw), name)
    return raw


def unpack(raw: bytes, name: str, *, trust_pickles: bool = False) -> Any:
    """The value again. With `trust_pickles` its pickle may run code.

    Raises:
        ObjectUnsafe: it names a class that nothing allows.
    """
    if trust_pickles:
        return torch.load(io.BytesIO(raw), weights_only=False)
    return load_object(memoryview(raw), name, "this checkpoint")
