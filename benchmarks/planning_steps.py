"""Times the coordinator's steps and traces their memory, ours and stock torch's."""

import gc
import json
import os
import pickle
import shutil
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks import planning_world as synthetic
from benchmarks.planning_world import FakeNodes, World
from replicated_ckpt.config import WriterConfig
from replicated_ckpt.core.inventory import saves_found
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, SavePost, decide
from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.find.survey import Survey
from replicated_ckpt.dcp.metadata.saved_metadata import decode_metadata_file
from replicated_ckpt.dcp.planning.cached_layouts import CachedLayouts
from replicated_ckpt.dcp.save.commit import commit_save
from replicated_ckpt.dcp.save.writer import ReplicatedWriter
from replicated_ckpt.stores.local.store import LocalStore

T = TypeVar("T")
SAVE_ID = "0123456789abcdef" * 2


@dataclass
class Measured:
    """The cost of each step of one world: CPU seconds, peak of traced memory, and sizes of the results in bytes.

    CPU seconds are those of the whole process, because other processes may use the machine. The steps wait only for
    this process.
    """

    world: World
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


class _Steps:
    def __init__(self, world: World, *, with_memory: bool) -> None:
        self.measured = Measured(world)
        self._with_memory = with_memory

    def __call__(self, name: str, step: Callable[[], T]) -> T:
        """Runs a step and returns its result. Runs it a second time to trace memory, because tracing takes time."""
        gc.collect()
        began = time.process_time()
        result = step()
        self.measured.seconds[name] = time.process_time() - began
        if self._with_memory:
            tracemalloc.start()
            step()
            self.measured.peak_bytes[name] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return result


def measured(world: World, *, with_memory: bool) -> Measured:
    """Every step of a save's coordinator, and of a load, in this world."""
    steps = _Steps(world, with_memory=with_memory)
    with warnings.catch_warnings(), _scratch() as scratch:
        warnings.simplefilter("ignore")
        decision = _decide(steps, world)
        _tell(steps, world, decision)
        metadata, results = _plan(steps, world)
        _finish(steps, scratch, world, decision, metadata, results)
    return steps.measured


@contextmanager
def _scratch() -> Iterator[Path]:
    memory = Path("/dev/shm")  # no disk, so that only CPU time matters
    path = Path(tempfile.mkdtemp(prefix=f"rckpt-bench-{os.getpid()}-", dir=memory if memory.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _decide(steps: _Steps, world: World) -> SaveDecision:
    posts = synthetic.posts(world)
    raw = [post.to_json() for post in posts]
    return steps("decide", lambda: decide([SavePost.from_json(post) for post in raw], 2, SAVE_ID))


def _tell(steps: _Steps, world: World, decision: SaveDecision) -> None:
    """Sends the posts of all ranks and the decision over a real TCPStore. One rank's reading of the decision is
    measured.
    """
    timeout = timedelta(seconds=60)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    board = Blackboard(dist.PrefixStore("bench", server), 0, world.ranks)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)
    nonces = []
    for rank, post in enumerate(synthetic.posts(world)):
        nonces.append(Blackboard(dist.PrefixStore("bench", client), rank, world.ranks).post("save", post.to_json()))
    posts = steps("read posts", lambda: board.posts("save", 30.0))
    steps("tell decision", lambda: board.decide("save", posts, decision.to_json()))
    last = Blackboard(dist.PrefixStore("bench", client), world.ranks - 1, world.ranks)
    read = steps("a rank: decision", lambda: SaveDecision.from_json(last.decision("save", nonces[-1], 30.0)))
    steps.measured.sizes["decision"] = len(json.dumps(read.to_json()))


def _plan(steps: _Steps, world: World) -> tuple[Metadata, list[list[WriteResult]]]:
    presented = synthetic.plans(world)

    def planned() -> Any:
        planner = DefaultSavePlanner()
        planner.set_up_planner({}, is_coordinator=True)
        return planner.create_global_plan(presented)

    plans, metadata = steps("DCP: global plan", planned)
    return metadata, synthetic.results(plans)


def _finish(
    steps: _Steps,
    scratch: Path,
    world: World,
    decision: SaveDecision,
    metadata: Metadata,
    results: list[list[WriteResult]],
) -> None:
    stock = scratch / "stock"
    writer = FileSystemWriter(stock)
    writer.reset(stock)
    stock.mkdir()
    steps("stock: finish", lambda: writer.finish(replace(metadata), results))
    steps("stock: read metadata", lambda: FileSystemReader(stock).read_metadata())

    store, config = LocalStore(scratch / "ours"), ReplicatedWriter(scratch / "ours").config
    found = synthetic.receipts(world, decision)
    nodes = FakeNodes(synthetic.held_by_node(found))
    store.node_id()  # creates the store
    store.begin(decision.intent)

    def finished() -> None:
        raw = [receipt.to_json() for receipt in found]
        receipts = [Receipt.from_json(receipt) for receipt in raw]
        commit_save(store, nodes, decision, config, receipts, replace(metadata), results)

    steps("finish", finished)
    steps.measured.sizes |= {"metadata": len(nodes.metadata), "manifest": len(nodes.manifest)}
    _finish_again(steps, store, nodes, decision, config, found, metadata, results)
    _load(steps, nodes)


def _finish_again(
    steps: _Steps,
    store: LocalStore,
    nodes: FakeNodes,
    decision: SaveDecision,
    config: WriterConfig,
    receipts: list[Receipt],
    metadata: Metadata,
    results: list[list[WriteResult]],
) -> None:
    """A save with the previous save's layout: each rank sends a reference instead of its results."""
    layouts, ranks = CachedLayouts(), [CachedLayouts() for _ in results]
    whole = [rank.refer(list(own), SAVE_ID, "") for rank, own in zip(ranks, results, strict=True)]
    commit_save(store, nodes, decision, config, receipts, replace(metadata), whole, layouts=layouts)
    sent = [pickle.dumps(rank.refer(list(own), "f" * 32, SAVE_ID)) for rank, own in zip(ranks, results, strict=True)]
    steps.measured.sizes["a rank: results, layout kept"] = max(map(len, sent))

    def finished() -> None:
        gathered = [pickle.loads(one) for one in sent]
        commit_save(store, nodes, decision, config, receipts, replace(metadata), gathered, layouts=layouts)
        assert nodes.same is not None

    steps("finish, layout kept", finished)


def _load(steps: _Steps, nodes: FakeNodes) -> None:
    steps("read metadata", lambda: decode_metadata_file(nodes.metadata, "here"))
    manifest = decode_manifest(nodes.manifest, "here")
    holdings = synthetic.holdings(manifest)
    addresses = [synthetic.address(node.node_id) for node in manifest.nodes]
    sizes = {name: entry.size_bytes for name, entry in manifest.shards.items()}

    def surveyed() -> Survey:
        (save,) = saves_found(holdings)
        assert not save.list_missing(sizes)
        return Survey(nodes.manifest.decode(), save.holdings, tuple(addresses), ())

    survey = steps("survey", surveyed)
    raw = json.dumps(survey.to_json())
    steps.measured.sizes["survey"] = len(raw)

    def received() -> Sequence[str]:
        read = Survey.from_json(json.loads(raw))
        return read.found.list_missing({name: entry.size_bytes for name, entry in read.manifest.shards.items()})

    steps("a rank: survey", received)
