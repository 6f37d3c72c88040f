"""The coordinator's work grows linearly with ranks and nodes, counted in messages and bytecode steps."""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from benchmarks import planning_world as synthetic
from benchmarks.planning_world import FakeNodes, World
from replicated_ckpt.core.inventory import saves_found
from replicated_ckpt.core.manifest import decode_manifest
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, SavePost, decide, list_weaknesses
from replicated_ckpt.dcp.c10d.blackboard import Blackboard
from replicated_ckpt.dcp.save.commit import commit_save
from replicated_ckpt.dcp.save.writer import ReplicatedWriter
from replicated_ckpt.errors import RendezvousFailed
from replicated_ckpt.stores.local.store import LocalStore

SMALL, LARGE = 64, 256
SAVE = f"{5:032x}"


def world_of(ranks: int) -> World:
    """One rank per node, the worst case, with one item each."""
    return World(ranks, ranks, ranks_per_node=1)


def executed(step: Callable[[], object]) -> int:
    """The number of bytecode steps that a call executes."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        del argument
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return counted

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces no opcodes before a frame asks for them
    sys.settrace(counted)
    try:
        step()
    finally:
        sys.settrace(before)
    return count


def decision_of(ranks: int) -> SaveDecision:
    return decide(synthetic.posts(world_of(ranks)), 2, SAVE)


def deciding(ranks: int, tmp_path: Path) -> Callable[[], object]:
    del tmp_path
    posts = [post.to_json() for post in synthetic.posts(world_of(ranks))]

    def step() -> object:
        read = [SavePost.from_json(post) for post in posts]
        decision = decide(read, 2, SAVE)
        return list_weaknesses(decision, 2, read), SaveDecision.from_json(decision.to_json())

    return step


def finishing(ranks: int, tmp_path: Path) -> Callable[[], object]:
    world, decision, store = world_of(ranks), decision_of(ranks), LocalStore(tmp_path / f"{ranks}")
    decision = replace(decision, unreached=(world.node_of(1), world.node_of(2)))
    store.root.mkdir()
    store.node_id()
    store.begin(decision.intent)
    receipts = synthetic.receipts(world, decision)
    nodes = FakeNodes(synthetic.held_by_node(receipts))
    results = synthetic.results(synthetic.plans(world))
    raw = [receipt.to_json() for receipt in receipts]

    def step() -> None:
        read = [Receipt.from_json(receipt) for receipt in raw]
        commit_save(store, nodes, decision, ReplicatedWriter(store.root).config, read, Metadata({}), results)

    return step


def surveying(ranks: int, tmp_path: Path) -> Callable[[], object]:
    world, decision = world_of(ranks), decision_of(ranks)
    nodes = finished(world, decision, tmp_path)
    manifest = decode_manifest(nodes.manifest, "here")
    holdings = synthetic.holdings(manifest)
    sizes = {name: entry.size_bytes for name, entry in manifest.shards.items()}

    def step() -> object:
        decode_manifest(nodes.manifest, "here")
        (save,) = saves_found(holdings)
        assert not save.list_missing(sizes)
        return [save.holders_of(name, size) for name, size in sizes.items()]

    return step


def finished(world: World, decision: SaveDecision, tmp_path: Path) -> FakeNodes:
    store = LocalStore(tmp_path / f"finished {world.ranks}")
    store.root.mkdir()
    store.node_id()
    store.begin(decision.intent)
    receipts = synthetic.receipts(world, decision)
    nodes = FakeNodes(synthetic.held_by_node(receipts))
    results = synthetic.results(synthetic.plans(world))
    commit_save(store, nodes, decision, ReplicatedWriter(store.root).config, receipts, Metadata({}), results)
    return nodes


@pytest.mark.parametrize("step", [deciding, finishing, surveying])
def test_four_times_the_nodes_take_four_times_the_steps(
    step: Callable[[int, Path], Callable[[], object]], tmp_path: Path
) -> None:
    """Four times the nodes take at most 1.3 times four times the steps to decide, finish or survey."""
    few, many = (executed(step(ranks, tmp_path)) for ranks in (SMALL, LARGE))
    assert many < 1.3 * few * LARGE / SMALL


class CountingStore:
    """A c10d store that counts calls by method. Each call is a round trip, whatever the number of keys."""

    def __init__(self, *, is_extended: bool = True) -> None:
        self.calls: Counter[str] = Counter()
        self._store: Any = dist.HashStore()
        self._is_extended = is_extended

    def has_extended_api(self) -> bool:
        return self._is_extended

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls[name] += 1
        method: Callable[..., Any] = getattr(self._store, name)
        return method


def boards(ranks: int, store: CountingStore) -> list[Blackboard]:
    return [Blackboard(store, rank, ranks) for rank in range(ranks)]  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [SMALL, LARGE])
def test_round_trips_do_not_grow_with_ranks(ranks: int) -> None:
    """The coordinator reads all posts and answers all ranks in at most six round trips."""
    store = CountingStore()
    ranked = boards(ranks, store)
    nonces = [board.post("save", {"rank": rank}) for rank, board in enumerate(ranked)]
    store.calls.clear()
    posts = ranked[0].posts("save", 5.0)
    ranked[0].decide("save", posts, {"what": "x" * 10_000})
    assert store.calls.total() <= 6
    assert [post["rank"] for post in posts] == list(range(ranks))
    assert [board.decision("save", nonce, 5.0)["what"] for board, nonce in zip(ranked, nonces, strict=True)] == [
        "x" * 10_000
    ] * ranks


def test_a_waiting_rank_does_not_read_the_earlier_decision() -> None:
    """A waiting rank does not read the earlier decision, which may be large."""
    store = CountingStore()
    first, second = boards(2, store)
    old = [board.post("load", {}) for board in (first, second)]
    first.decide("load", first.posts("load", 5.0), {"call": 1})
    assert second.decision("load", old[1], 5.0) == {"call": 1}
    new = second.post("load", {})
    read: list[Sequence[str]] = []
    store._store = Watched(store._store, read)
    with pytest.raises(RendezvousFailed, match="not decided"):
        second.decision("load", new, 0.2)
    assert "load/decision" not in read


class Watched:
    """Records which keys are read."""

    def __init__(self, store: Any, read: list[Any]) -> None:
        self._store, self._read = store, read

    def get(self, key: str) -> bytes:
        self._read.append(key)
        value: bytes = self._store.get(key)
        return value

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._store, name)
        return method


@pytest.mark.parametrize("is_extended", [True, False])
def test_earlier_posts_are_ignored_and_missing_ranks_are_named(is_extended: bool) -> None:
    """The coordinator ignores posts of an earlier call and names the missing ranks, with and without a store that reads
    many keys at once.
    """
    store = CountingStore(is_extended=is_extended)
    ranked = boards(3, store)
    stale = [board.post("load", {"call": 1}) for board in ranked]
    ranked[0].post("load", {"call": 2})
    with pytest.raises(RendezvousFailed, match=r"ranks \[1, 2\]"):
        ranked[0].posts("load", 0.05, stale)
    new = [board.post("load", {"call": 2}) for board in ranked]
    posts = ranked[0].posts("load", 5.0, stale)
    assert [post["nonce"] for post in posts] == new
    ranked[0].decide("load", posts, {"call": 2})
    assert [board.decision("load", nonce, 5.0)["call"] for board, nonce in zip(ranked, new, strict=True)] == [2, 2, 2]
    with pytest.raises(RendezvousFailed, match=r"ranks \[3\]"):
        Blackboard(store, 0, 4).posts("load", 0.05)  # type: ignore[arg-type]
