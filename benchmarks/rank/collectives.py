"""The bytes that one rank sends and receives in a save and in a load, for many simulated ranks.

    python -m benchmarks.rank.collectives [--ranks 64,1024,10240] [--items-per-rank 100] [--ranks-per-node 8]

DCP's collectives carry pickles, padded to the longest of all ranks. The last rank's are measured. Messages in the c10d
store are JSON, compressed from 4 KiB on. Nothing is sent, but the classes of a real job make the messages.
"""

import argparse
import pickle
import sys
import time
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, SavePlan

from benchmarks import planning_world as synthetic
from benchmarks.planning_world import World
from replicated_ckpt.core.inventory import saves_found
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry
from replicated_ckpt.dcp.agreement.decision import STAYS, SaveDecision, decide
from replicated_ckpt.dcp.c10d.blackboard import PACKED_FROM_BYTES, Blackboard, CachedDecisions, encode
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.dcp.load.load_attempt import describe_not_loaded
from replicated_ckpt.dcp.load.load_report import LoadReport
from replicated_ckpt.dcp.load.sharing import plan_sharing
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayouts
from replicated_ckpt.dcp.planning.cached_plan import (
    CachedSavePlan,
    CachedWriteItems,
    Place,
    without_items,
    without_names,
)

SAVE_ID, LAST_ID = "0123456789abcdef" * 2, "f" * 32


def main() -> int:
    parser = argparse.ArgumentParser(prog="collectives", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="64,1024,10240", help="numbers of ranks")
    parser.add_argument("--items-per-rank", type=int, default=100)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # placement warns that there are no domains
    counts = [int(count) for count in options.ranks.split(",")]
    worlds = [World(count, count * options.items_per_rank, options.ranks_per_node) for count in counts]
    columns = [messages_of(world) for world in worlds]
    seconds = [_seconds_of_load_plans(world) for world in worlds]
    print(f"{'bytes of one rank':52}" + "".join(f"{f'{count} ranks':>14}" for count in counts))
    for name in columns[0]:
        print(f"{name:52}" + "".join(f"{column[name]:>14,}" for column in columns))
    print("\nseconds of CPU at rank 0")
    for name in seconds[0]:
        print(f"{name:52}" + "".join(f"{column[name]:>14.3f}" for column in seconds))
    return 0


def _seconds_of_load_plans(world: World) -> Mapping[str, float]:
    """Rank 0's work on a load's plans, with all bytes local: unpickles, checks and pickles each plan."""
    plans = [_load_plan(world, rank) for rank in range(world.ranks)]
    names = {item.storage_index.fqn for plan in plans for item in plan.items}
    saved: dict[str, Any] = dict.fromkeys(names, BytesStorageMetadata())
    found = {}
    for how, sent in (("plans", plans), ("plans that are held", list(map(without_items, plans)))):
        raw = list(map(pickle.dumps, sent))
        began = time.process_time()
        gathered = list(map(pickle.loads, raw))
        assert describe_not_loaded("step-1000", saved, gathered) is None
        for plan in plan_sharing(list(map(without_names, gathered)), []):
            pickle.dumps(plan)
        found[f"load, all {how}"] = time.process_time() - began
    return found


def messages_of(world: World) -> Mapping[str, int]:
    """The bytes of each message of the world's last rank, by the message's name."""
    return {**_of_planning(world), **_of_results(world), **_of_load(world), **_of_store(world)}


def _of_planning(world: World) -> Mapping[str, int]:
    rank = world.ranks - 1
    plan, was = synthetic.plan_of(world, rank), Place("0123456789abcdef", rank)
    kept = CachedSavePlan(CachedWriteItems(), was=was)
    return {
        "save, gather: plan": _pickled(plan),
        "save, gather: plan that is kept": _pickled(kept),
        "save, scatter: plan": _pickled(plan),
        "save, scatter: plan that is kept": _pickled(replace(kept, now=was, whole=plan)),
    }


def _of_results(world: World) -> Mapping[str, int]:
    plans: list[SavePlan] = [SavePlan([])] * (world.ranks - 1)
    results = synthetic.results([*plans, synthetic.plan_of(world, world.ranks - 1)])[-1]
    layouts = CachedLayouts()
    first = layouts.refer(results, SAVE_ID, "")
    return {
        "save, gather: results": _pickled(first),
        "save, gather: results, layout kept": _pickled(layouts.refer(results, LAST_ID, SAVE_ID)),
    }


def _load_plan(world: World, rank: int) -> LoadPlan:
    """The plan of a rank that loads what it saved."""
    items = [
        ReadItem(
            LoadItemType.TENSOR,
            item.index,
            item.tensor_data.chunk.offsets,
            item.index,
            item.tensor_data.chunk.offsets,
            item.tensor_data.chunk.sizes,
        )
        for item in synthetic.plan_of(world, rank).items
        if item.tensor_data is not None
    ]
    return LoadPlan(items)


def _of_load(world: World) -> Mapping[str, int]:
    rank = world.ranks - 1
    whole = _load_plan(world, rank)
    held, items = without_items(whole), whole.items
    plan = _pickled(whole)
    spent = {"plan": 0.5123456, "read": 0.5123456}
    report = LoadReport(
        "step-1000", SAVE_ID, 1 << 30, 0, 0, len(items), 1.0246912, (), 0, rank, "gpu-0123.cluster", spent
    )
    sent, ended = _pickled(report.as_dict()), _pickled(({}, []))
    lengths = 8 * world.ranks
    return {
        "load, gather: plan, all bytes local": plan,
        "load, gather: plan that is held": _pickled(held),
        "load, scatter: plan, all bytes local": plan,
        "load, scatter: plan that is held": _pickled(without_names(held)),
        "load, end: report, sent": sent,
        "load, end: who failed, taken in": ended,
        "each gather, scatter apart: lengths, taken in": lengths,
    }


def _of_store(world: World) -> Mapping[str, int]:
    posts = synthetic.posts(world)
    decision = decide(posts, 2, SAVE_ID)
    (receipt,) = synthetic.receipts(world, decision)[-1:]
    sizes = {
        "save, store: post": _stored(posts[-1].to_json()),
        "save, store: receipt": _stored(receipt.to_json()),
        "save, store: decision, read": _stored(decision.to_json()),
        "save, store: decision, nodes as before, read": _decided_again(decision),
        "load, store: survey, read": _stored({"survey": _survey(world).to_json()}),
    }
    readers = {name: _nodes(world) if sizes[name] >= PACKED_FROM_BYTES else world.ranks for name in sizes}
    total = {
        name.replace("read", "read once a node, if large, or by all"): size * readers[name]
        for name, size in sizes.items()
        if "read" in name
    }
    return sizes | total


def _decided_again(decision: SaveDecision) -> int:
    """The bytes in the store of a decision that follows one with the same nodes."""
    store, kept = dist.HashStore(), CachedDecisions()
    for _ in range(2):
        board = Blackboard(store, 0, 1, kept=kept)
        board.post("save", {})
        board.decide("save", board.posts("save", 1.0), decision.to_json(), stays=STAYS)
    return len(store.get("save/decision"))


def _nodes(world: World) -> int:
    return len({world.node_of(rank) for rank in range(world.ranks)})


def _survey(world: World) -> Survey:
    """What a load finds if every node has all its shards."""
    decision = decide(synthetic.posts(world), 2, SAVE_ID)
    ranks_by_node: dict[str, list[int]] = {}
    for rank in range(world.ranks):
        ranks_by_node.setdefault(world.node_of(rank), []).append(rank)
    shards = {
        shard.name: ShardEntry(
            shard.size_bytes, zlib.crc32(shard.name.encode()), rank, world.node_of(rank), shard.holders
        )
        for rank, receipt in enumerate(synthetic.receipts(world, decision))
        for shard in receipt.shards
    }
    nodes = tuple(
        NodeEntry(node, f"gpu-{node}.cluster.internal", None, tuple(ranks)) for node, ranks in ranks_by_node.items()
    )
    manifest = Manifest(
        SAVE_ID, "run/step-1000", 1000, 1.7e9, world.ranks, 2, 1 << 20, zlib.crc32(b""), nodes, shards, lineage="0" * 16
    )
    (save,) = saves_found(synthetic.holdings(manifest))
    addresses = tuple(map(synthetic.address, ranks_by_node))
    return Survey(manifest.encode().decode(), save.holdings, addresses, ())


def _pickled(message: object) -> int:
    return len(pickle.dumps(message))


def _stored(message: Mapping[Any, Any]) -> int:
    return len(encode(message))


if __name__ == "__main__":
    sys.exit(main())
