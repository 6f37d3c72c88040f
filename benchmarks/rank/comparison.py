"""A step of the ranks that compares peers: save, load, and load after a node loss, all in one world."""

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from benchmarks.rank.choice import way_of
from benchmarks.rank.cost import measured
from benchmarks.rank.losing import Losing
from benchmarks.rank.probes import Probes
from benchmarks.rank.rounds import Case, Taken, all_agree, built, loaded, shuffled, slug, take, total
from benchmarks.rank.state import State
from benchmarks.rank.ways import Way, agent_root
from tests.steps.context import Context


def compare(
    context: Context, size_bytes: int, cases: Sequence[Case], rounds: int, deadline_s: float
) -> dict[str, Any] | None:
    """Runs one round that is not counted, then up to `rounds`, but at least one. Rank 0 returns the samples."""
    ways = {case["name"]: way_of(context, case["way"], case["options"]) for case in cases}
    loses = {case["name"]: bool(case["loses"]) for case in cases}
    state = built(context, "plain", size_bytes)
    probes = Probes(context, state, is_disk=False)
    taken: dict[str, Taken] = {}
    start = time.monotonic()
    for number in range(-1, rounds):
        if number > 0 and not all_agree(time.monotonic() - start < deadline_s):
            break
        if number <= 0:
            taken = {"save": {}, "load": {}, "recover": {}, "probe": {}}
        for name, sample in probes.run().items():
            take(taken["probe"], name, sample)
        for name in shuffled(list(ways), number):
            _one(context, state, ways[name], name, f"step-{number + 1}-{slug(name)}", taken, loses=loses[name])
    state_bytes = total(state)
    return {**taken, "state_bytes": state_bytes} if context.rank == 0 else None


def _one(
    context: Context, state: State, way: Way, case: str, name: str, taken: dict[str, Taken], *, loses: bool
) -> None:
    state.train()
    take(taken["save"], case, measured(lambda: way.save(state, name), lambda: way.settle(name), agent_root(context)))
    take(taken["load"], case, loaded(context, state, way, name, is_disk=False))
    if loses:
        assert isinstance(way, Losing)
        dist.barrier()
        way.lose()
        dist.barrier()
        take(taken["recover"], case, loaded(context, state, way, name, is_disk=False, settles=True))
    dist.barrier()
    way.remove(name)
    dist.barrier()
