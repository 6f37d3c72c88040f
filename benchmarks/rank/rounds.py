"""The steps of the benchmark's ranks: rounds of cases, each round in another order. Every loaded state is verified."""

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from benchmarks.rank.choice import way_of
from benchmarks.rank.cost import Sample, as_json, measured
from benchmarks.rank.probes import Probes, is_one_medium
from benchmarks.rank.state import BUILDERS, State
from benchmarks.rank.ways import Ours, Way, agent_root, is_first_of_node, write_back
from tests.steps.context import Context

_WARM_BYTES = 1 << 20
Case = Mapping[str, Any]  # name, way, options
Taken = dict[str, list[dict[str, float]]]


def save_and_load(
    context: Context,
    kind: str,
    size_bytes: int,
    cases: Sequence[Case],
    rounds: int,
    *,
    is_disk: bool,
    is_probed: bool,
    deadline_s: float,
    rounds_before: int = 0,
) -> dict[str, Any] | None:
    """In each round every case saves, loads into wiped memory, and compares every byte.

    Rank 0 returns the samples by case, the others None. The first round always runs. Further rounds begin within
    `deadline_s`. The `rounds_before` rounds before them are not counted.
    """
    ways = {case["name"]: way_of(context, case["way"], case["options"]) for case in cases}
    _warm_up(context, kind, ways)
    state = built(context, kind, size_bytes)
    taken: dict[str, Taken] = {"save": {}, "load": {}, "probe": {}}
    probes = Probes(context, state, is_disk=is_disk)
    start = time.monotonic()
    for number in range(-rounds_before, rounds):
        if number > 0 and not all_agree(time.monotonic() - start < deadline_s):
            break
        if number == 0:
            taken = {"save": {}, "load": {}, "probe": {}}
        if is_probed:
            for name, sample in probes.run().items():
                take(taken["probe"], name, sample)
        for name in shuffled(list(ways), number):
            _one(context, state, ways[name], name, f"step-{number}-{slug(name)}", taken, is_disk)
    state_bytes = total(state)
    return {**taken, "state_bytes": state_bytes} if context.rank == 0 else None


def save_once(context: Context, kind: str, size_bytes: int, cases: Sequence[Case]) -> int:
    """Every case saves under its own name, for loads of later worlds. Returns the bytes of the state."""
    _warm_stock(context, kind)
    state = built(context, kind, size_bytes)
    for case in cases:
        way = way_of(context, case["way"], case["options"])
        way.save(state, slug(case["name"]))
        dist.barrier()
        way.settle(slug(case["name"]))
    return total(state)


def load_saved(
    context: Context,
    kind: str,
    size_bytes: int,
    cases: Sequence[Case],
    order: int,
    *,
    is_disk: bool,
    is_probed: bool = False,
) -> dict[str, Any]:
    """Every case loads the checkpoint of `save_once` into wiped memory and compares every byte.

    Every rank returns the bytes that it read from peers, by case. Rank 0 also returns the samples.
    """
    _warm_stock(context, kind)
    state = built(context, kind, size_bytes)
    taken: dict[str, Taken] = {"load": {}, "probe": {}}
    if is_probed:
        for name, sample in Probes(context, state, is_disk=is_disk).run().items():
            take(taken["probe"], name, sample)
    by_name, remote_bytes = {case["name"]: case for case in cases}, {}
    for name in shuffled(list(by_name), order):
        case = by_name[name]
        way = way_of(context, case["way"], case["options"])
        take(taken["load"], name, loaded(context, state, way, slug(case["saved_by"]), is_disk))
        remote_bytes[name] = way.remote_bytes if isinstance(way, Ours) else 0
    return {**taken, "remote_bytes": remote_bytes}


def _one(
    context: Context, state: State, way: Way, case: str, name: str, taken: dict[str, Taken], is_disk: bool
) -> None:
    state.train()
    _written_back(context, is_disk)
    saved = measured(lambda: way.save(state, name), lambda: way.settle(name), agent_root(context))
    take(taken["save"], case, saved)
    take(taken["load"], case, loaded(context, state, way, name, is_disk))
    dist.barrier()
    way.remove(name)
    dist.barrier()


def _written_back(context: Context, is_disk: bool) -> None:
    """Flushes the page cache, so that an earlier case, such as one with `ack="peer-memory"`, delays no later one."""
    if is_first_of_node() and (is_disk or not is_one_medium(context)):
        write_back(context.root)


def loaded(
    context: Context, state: State, way: Way, name: str, is_disk: bool, *, settles: bool = False
) -> Sample | None:
    """Loads from the page cache or, if `is_disk`, after the files were dropped from it.

    With `settles` the sample includes the time until all wanted copies exist again.
    """
    state.spoil()
    if is_disk and is_first_of_node():
        way.cool(name)
    settle = (lambda: way.settle(name)) if settles else (lambda: None)
    sample = measured(lambda: way.load(state, name), settle, agent_root(context))
    wrong = state.wrong()
    if not all_agree(not wrong):
        raise AssertionError(f"{name} was not loaded as it was saved: {wrong[:5]} on rank {context.rank}")
    return sample


def _warm_up(context: Context, kind: str, ways: Mapping[str, Way]) -> None:
    """Starts agents, opens connections and imports modules before the measurement, as in a running job."""
    small = built(context, kind, _WARM_BYTES)
    for name, way in ways.items():
        _one(context, small, way, name, f"warm-{slug(name)}", {"save": {}, "load": {}}, is_disk=False)


def _warm_stock(context: Context, kind: str) -> None:
    """Warms up DCP and gloo, but nothing of ours, as in a world that has just begun."""
    small = built(context, kind, _WARM_BYTES)
    _one(context, small, way_of(context, "stock", {}), "", "warm-stock", {"save": {}, "load": {}}, is_disk=False)


def built(context: Context, kind: str, size_bytes: int) -> State:
    return BUILDERS[kind](size_bytes, context.rank, context.world_size)


def take(taken: Taken, name: str, sample: Sample | None) -> None:
    if sample is not None:
        taken.setdefault(name, []).append(as_json(sample))


def total(state: State) -> int:
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, state.size_bytes)
    return sum(totals)


def all_agree(is_so: bool) -> bool:
    votes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(votes, is_so)
    return all(votes)


def shuffled(names: list[str], number: int) -> list[str]:
    """The names in an order that is the same on every rank and differs by round."""
    return random.Random(number).sample(names, len(names))


def slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
