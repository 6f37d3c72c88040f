"""Parts of a decision that stay the same are sent once: a rank that lacks them makes the coordinator send them again."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.planning_world import World, posts
from replicated_ckpt.dcp.agreement.decision import STAYS, SaveDecision, decide
from replicated_ckpt.dcp.c10d.blackboard import PACKED_FROM_BYTES, Blackboard, CachedDecisions
from replicated_ckpt.errors import PeerProtocolError

RANKS = 3
LARGE = [f"node-{random.Random(number).random()}" for number in range(1000)]


class Ranks:
    """Ranks on one store. Each call creates new blackboards, as DCP's calls do. The caches belong to the process group."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.store = dist.HashStore()
        self.kept = [CachedDecisions() for _ in range(ranks)]

    def boards(self) -> list[Blackboard]:
        count = len(self.kept)
        return [Blackboard(self.store, rank, count, kept=kept) for rank, kept in enumerate(self.kept)]

    def call(self, fields: Mapping[str, Any], stays: Sequence[str] = ("nodes",)) -> int:
        """One save: all ranks post, the coordinator decides, and all ranks get that decision. Returns the bytes that
        each rank read.
        """
        boards = self.boards()
        nonces = [board.post("save", {"rank": rank}) for rank, board in enumerate(boards)]
        boards[0].decide("save", boards[0].posts("save", 5.0), fields, stays=stays)
        for board, nonce in list(zip(boards, nonces, strict=True))[1:]:
            assert board.decision("save", nonce, 5.0) == fields
        return len(self.store.get("save/decision"))


def test_an_unchanged_part_is_sent_once() -> None:
    """A part of the decision that is the same in the next save is sent as a digest."""
    ranks = Ranks()
    whole = ranks.call({"nodes": LARGE, "id": "a"})
    assert whole > PACKED_FROM_BYTES
    assert [ranks.call({"nodes": LARGE, "id": name}) < 100 for name in "bcd"] == [True] * 3


def test_a_changed_part_is_sent_again() -> None:
    """A part that has changed is sent completely, also when it changes back."""
    ranks = Ranks()
    ranks.call({"nodes": LARGE, "id": "a"})
    assert ranks.call({"nodes": LARGE[1:], "id": "b"}) > PACKED_FROM_BYTES
    assert ranks.call({"nodes": LARGE[1:], "id": "c"}) < 100
    assert ranks.call({"nodes": LARGE, "id": "d"}) > PACKED_FROM_BYTES


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_with_an_empty_cache_gets_a_complete_decision(rank: int) -> None:
    """A rank, or the coordinator, with an empty cache makes the next decision complete."""
    ranks = Ranks()
    ranks.call({"nodes": LARGE, "id": "a"})
    ranks.kept[rank] = CachedDecisions()
    assert ranks.call({"nodes": LARGE, "id": "b"}) > PACKED_FROM_BYTES
    assert ranks.call({"nodes": LARGE, "id": "c"}) < 100


def test_a_rank_that_missed_a_decision_gets_a_complete_one() -> None:
    """A rank with an older decision than the others makes the next decision complete, and does not reuse its old
    fields.
    """
    ranks = Ranks()
    ranks.call({"nodes": LARGE, "id": "a"})
    missed, ranks.kept[1] = ranks.kept[1], CachedDecisions()
    ranks.call({"nodes": LARGE[1:], "id": "b"})
    ranks.kept[1] = missed
    assert ranks.call({"nodes": LARGE[1:], "id": "c"}) > PACKED_FROM_BYTES


def test_a_small_decision_is_not_cached() -> None:
    """A small decision is not cached, and the posts mention no cache."""
    ranks = Ranks()
    assert ranks.call({"nodes": LARGE[:9], "id": "a"}) == ranks.call({"nodes": LARGE[:9], "id": "b"})
    assert [dict(kept.describe_known("save")) for kept in ranks.kept] == [{}] * RANKS


def test_topics_do_not_mix() -> None:
    """The decision of a load does not replace the cached one of saves."""
    ranks = Ranks()
    ranks.call({"nodes": LARGE, "id": "a"})
    boards = ranks.boards()
    nonces = [board.post("load", {}) for board in boards]
    found = boards[0].posts("load", 5.0)
    assert [post.keys() for post in found] == [{"nonce", "release"}] * RANKS
    boards[0].decide("load", found, {"nodes": LARGE, "id": "b"})
    assert boards[1].decision("load", nonces[1], 5.0) == {"nodes": LARGE, "id": "b"}
    assert ranks.call({"nodes": LARGE, "id": "c"}) < 100


@pytest.mark.parametrize("fields", [{"as": "0" * 32}, {"as": 7}, {"stays": ["gone"]}, {"stays": "id"}, {"stays": [[]]}])
def test_a_decision_that_cannot_be_completed_is_refused(fields: Mapping[str, Any]) -> None:
    """A decision that refers to a cached one that this rank lacks raises PeerProtocolError."""
    boards = Ranks().boards()
    nonces = [board.post("save", {}) for board in boards]
    boards[0].decide("save", boards[0].posts("save", 5.0), {"id": "a", **fields})
    with pytest.raises(PeerProtocolError, match="decision about this save"):
        boards[1].decision("save", nonces[1], 5.0)


def test_decisions_of_a_job() -> None:
    """1,024 ranks on 128 nodes: the second decision is equal to the original and takes under 1 KiB."""
    world = World(1024, 1024, 8)
    ranks, told = Ranks(2), decide(posts(world), 2, "0" * 32)
    sizes = []
    for save_id in ("1" * 32, "2" * 32):
        boards = ranks.boards()
        nonces = [board.post("save", {}) for board in boards]
        decision = SaveDecision(**{**vars(told), "save_id": save_id})
        boards[0].decide("save", boards[0].posts("save", 5.0), decision.to_json(), stays=STAYS)
        learnt = SaveDecision.from_json(boards[1].decision("save", nonces[1], 5.0))
        assert learnt.to_json() == decision.to_json()
        sizes.append(len(ranks.store.get("save/decision")))
    assert sizes[0] > 10_000
    assert sizes[1] < 1024
