"""What one rank has for itself, as items of a checkpoint: their names, `rank-<rank>-of-<world>`, and their bytes."""

import io
import re
from collections.abc import Iterable
from typing import Any

import torch

from replicated_ckpt.dcp.objects.unloadable import warn_if_unloadable
from replicated_ckpt.dcp.objects.weights_only import load_object

_NAME = re.compile(r"(?:.*\.)?rank-[0-9]+-of-([0-9]+)", re.DOTALL)


def name_rank_item(rank: int, world: int) -> str:
    return f"rank-{rank}-of-{world}"


def find_world(name: str) -> int | None:
    """Ranks of the job that saved this item; None: it is no rank's."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def worlds_under(prefix: str, names: Iterable[str]) -> tuple[int, ...]:
    """The worlds of which there are items under a prefix."""
    found = {find_world(name) for name in names if name.startswith(f"{prefix}.") and "." not in name[len(prefix) + 1 :]}
    return tuple(sorted(world for world in found if world is not None))


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
