"""Steps: bits flip in replicas of a saved state, and the reports of the saves name them."""

import random
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from replicated_ckpt import RankState, ReplicatedWriter, Retention
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner
from replicated_ckpt.node.saves import shard_copies
from replicated_ckpt.stores.peer.copy import PeerSink
from tests.steps.context import Context
from tests.steps.state import failure
from tests.steps.states import Model, build

_FLIPS_AT_ONCE = 6


def local_part(value: Any) -> torch.Tensor | None:
    """The elements of a value on this rank, in the memory that is saved. None: it has none."""
    if isinstance(value, DTensor):
        value = value._local_tensor
    if isinstance(value, ShardedTensor):
        value = value.local_shards()[0].tensor if value.local_shards() else None
    return value.detach() if isinstance(value, torch.Tensor) and value.numel() else None


def flip_bit(part: torch.Tensor, place: random.Random) -> None:
    """Flips one bit of a random element, whatever its strides are."""
    flat = part.as_strided((part.numel(),), (1,)) if not part.is_contiguous() else part.reshape(-1)
    raw = flat.view(torch.uint8)
    raw[place.randrange(raw.numel())] ^= 1 << place.randrange(8)


def _save(context: Context, state: dict[str, Any], name: str, writer: ReplicatedWriter, *, is_async: bool) -> Any:
    """Saves. In an asynchronous save, the state changes once it is staged, and gets its old values back at the end."""
    planner = context.kept.setdefault("planner", CachedSavePlanner())
    if not is_async:
        dcp.save(state, checkpoint_id=name, storage_writer=writer, planner=planner)
        return writer.last_save
    future = dcp.async_save(state, checkpoint_id=name, storage_writer=writer, planner=planner)
    parts = [part for value in flatten_state_dict(state)[0].values() if (part := local_part(value)) is not None]
    before = [part.clone() for part in parts]
    for part in parts:
        part.zero_() if context.rank else part.fill_(1)
    future.result(timeout=60)  # type: ignore[union-attr]
    for part, was in zip(parts, before, strict=True):
        part.copy_(was)
    return writer.last_save


def flip_and_save(context: Context, kind: str, seed: int, rounds: int, parts: int, *, is_async: bool) -> dict[str, Any]:
    """In each round, flips one bit on one rank in each of a few tensors, and saves until all values are compared.

    Returns this rank's flips by round, and on rank 0 the findings by round.
    """
    values = build(kind, seed, context.rank, context.world_size)
    state: dict[str, Any] = {"app": values.state_dict()}
    flat, _ = flatten_state_dict(state)
    names = sorted(name for name, value in flat.items() if isinstance(value, torch.Tensor))
    chosen, writer = random.Random(seed), context.writer(compare_replicas=parts)
    flipped, named = [], []
    for number in range(rounds):
        mine, before = [], {}
        for name in chosen.sample(names, _FLIPS_AT_ONCE):
            rank, bit = chosen.randrange(context.world_size), random.Random(chosen.random())
            part = local_part(flat[name])
            if rank == context.rank and part is not None:
                before[name] = part.clone()
                flip_bit(part, bit)
                mine.append(name)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for save in range(parts):
                report = _save(context, state, f"{kind}-{seed}/step-{number * parts + save}", writer, is_async=is_async)
                found += [
                    (one.fqn, one.offset, one.groups)
                    for one in (report.divergences if context.rank == 0 else ())
                    if not one.is_object
                ]
        for name, was in before.items():
            part = local_part(flat[name])
            assert part is not None
            part.copy_(was)
        flipped.append(mine)
        named.append(found)
    return {"flipped": flipped, "named": named}


def train_and_save(context: Context, kind: str, saves: int, parts: int) -> list[Any]:
    """Trains and saves. Returns the divergences found. There must be none."""
    values = build(kind, 0, context.rank, context.world_size)
    assert isinstance(values, Model)
    writer = context.writer(compare_replicas=parts, overwrite=True)
    found: list[Any] = []
    planner = CachedSavePlanner()
    for number in range(saves):
        values.train_step(number * context.world_size + context.rank)
        dcp.save({"app": values}, checkpoint_id=f"run/step-{number % 2}", storage_writer=writer, planner=planner)
        assert writer.last_save is not None
        found += writer.last_save.divergences
    return found


@dataclass
class Position:
    """An object with parts whose pickle depends on the process: a tensor's address, and the order of a set and a
    dictionary.
    """

    offsets: torch.Tensor
    seen: set[str]
    order: dict[str, int]


def save_objects(context: Context) -> dict[str, Any]:
    """Saves objects that are equal although pickle writes different bytes for them, and two different ones."""
    text = "".join(["a", "b", str(context.world_size)])  # made anew, so that the ranks' objects share other parts
    words = [f"word-{index}" for index in range(50)]
    equal = {
        "set": set(random.Random(context.rank).sample(words, 50)),
        "twice": [text, text if context.rank else text[:]],
    }
    order = {"x": 1, "y": 2} if context.rank else {"y": 2, "x": 1}
    state = {
        "position": Position(torch.arange(3), set(random.Random(context.rank).sample(words, 50)), order),
        "equal": [equal, [(order, 1.5, None, True, b"raw", frozenset(words))]],
        "loader": {"position": 100 + context.rank},
        "step": 7,
        "own": RankState(),
        "rng": torch.tensor([context.rank, 5]),
    }
    writer, warned, found = context.writer(compare_replicas="all", may_differ=["rn?"]), [], []
    for number in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.save(state, checkpoint_id=f"objects/step-{number}", storage_writer=writer)
        warned.append([str(one.message) for one in caught if "different objects" in str(one.message)])
        assert writer.last_save is not None
        found.append([(one.fqn, one.is_object) for one in writer.last_save.divergences])
    return {"warned": warned, "found": found}


def save_diverged(context: Context, /, checkpoint_id: str, *, apart: bool = True, **writer: Any) -> dict[str, Any]:
    """Saves a tensor that differs on the last rank. Returns the error, or the warnings of divergence."""
    is_other = apart and context.rank == context.world_size - 1
    weight = torch.arange(64.0) + (1 if is_other else 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            state = {"weight": weight, "same": torch.ones(3)}
            dcp.save(state, checkpoint_id=checkpoint_id, storage_writer=context.writer(**writer))
        except CheckpointException as exc:
            return failure(exc)
    return {"warned": [str(one.message) for one in caught if "diverged" in str(one.message)]}


def save_repeatedly(
    context: Context,
    /,
    kind: str,
    saves: int,
    *,
    is_kept: bool,
    is_async: bool = False,
    retention: int | None = None,
    is_own: bool = False,
    **writer: Any,
) -> dict[str, Any]:
    """Saves one state again and again. Returns by save the copies that this rank sent, and the report's seconds for
    sending.

    `is_own`: with a RankState, as most jobs have it, and with BatchNorm's statistics, which differ by rank.
    """
    values = build(kind, 0, context.rank, context.world_size)
    state: dict[str, Any] = {"app": values.state_dict(), **({"own": RankState()} if is_own else {})}
    if is_own:
        state["bn"] = {"running_mean": torch.full((64,), float(context.rank))}
    options = {**writer, **({} if retention is None else {"retention": Retention(keep_last=retention)})}
    used, planner = context.writer(**options), CachedSavePlanner() if is_kept else None
    sent, made, warned, seconds, own, names = [], [], [], [], [], []
    for number in range(saves):
        with (
            mock.patch.object(shard_copies, "PeerSink", wraps=PeerSink) as sink,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            how: dict[str, Any] = {"checkpoint_id": f"run/step-{number}", "storage_writer": used, "planner": planner}
            if is_async:
                future = dcp.async_save(state, **how)
                assert isinstance(future, Future)
                future.result(timeout=60)
            else:
                dcp.save(state, **how)
        assert used.last_save is not None
        sent.append(sink.call_count)
        names.append([call.args[2] for call in sink.call_args_list])
        made.append([one.copies_made for one in used.last_save.ranks])
        own.append(used.last_save.copies_made)
        seconds.append([one.phases.get("send") for one in used.last_save.ranks])
        warned.append([str(one.message) for one in caught if "no copy of" in str(one.message)])
    return {"sent": sent, "names": names, "made": made, "warned": warned, "seconds": seconds, "own": own}


def diverge_and_save(context: Context, /, *, is_async: bool = False, **writer: Any) -> list[Any]:
    """Saves twice, changes a tensor on the last rank alone, and saves twice more. Returns rank 0's warnings, or the
    error.
    """
    state = {f"weight{number}": torch.full((1000,), float(number)) for number in range(8)}
    used = context.writer(**writer)
    told: list[Any] = []
    for number in range(4):
        if number == 2 and context.rank == context.world_size - 1:
            for value in state.values():
                value[7] += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                _save(context, dict(state), f"run/step-{number}", used, is_async=is_async)
            except CheckpointException as exc:
                told.append(failure(exc))
                continue
        told.append(sorted({name for name in ("no copy of", "diverged") for one in caught if name in str(one.message)}))
    return told
