"""A value that each rank has for itself, as entries of a state dict: each rank's, and rank 0's for other worlds."""

from collections.abc import Mapping
from typing import Any

from replicated_ckpt.dcp.rank_state.items import name_rank_item, pack, unpack
from replicated_ckpt.dcp.rank_state.rank_state import rank_and_world

_OWN, _FIRST = "rank", "first"


def entries_of(value: Any) -> dict[str, Any]:
    """What `dcp.save` is given of it on this rank."""
    rank, world = rank_and_world()
    packed = pack(value, name_rank_item(rank, world))
    return {_OWN: {name_rank_item(rank, world): packed}, **({_FIRST: packed} if rank == 0 else {})}


def wanted_entries() -> dict[str, Any]:
    """What `dcp.load` with a RankStatePlanner is given for it."""
    return {_OWN: {name_rank_item(*rank_and_world()): b""}, _FIRST: b""}


def values_in(state: Mapping[str, Any], *, trust_pickles: bool) -> tuple[Any, Any]:
    """This rank's value after a load, and rank 0's. The first is None if another number of ranks saved it.

    Raises:
        ObjectUnsafe: one names a class that nothing allows.
    """
    name = name_rank_item(*rank_and_world())
    own = state[_OWN][name]
    first = unpack(state[_FIRST], name, trust_pickles=trust_pickles)
    return (unpack(own, name, trust_pickles=trust_pickles) if isinstance(own, bytes) else None), first
