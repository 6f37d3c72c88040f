"""Which rank writes copies of another's shard from its own memory, and which of these copies count. No processes are
started.
"""

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from replicated_ckpt.core.divergence import Divergence, Turn
from replicated_ckpt.core.protocol.placement import Placement
from replicated_ckpt.dcp.agreement.decision import Receipt, SaveDecision, SavePost, ShardReceipt
from replicated_ckpt.dcp.agreement.node_post import NodePost
from replicated_ckpt.dcp.planning.cached_plan import CachedSavePlanner
from replicated_ckpt.dcp.save.replicas import (
    HelpPlan,
    HelpPlans,
    ReplicaCheck,
    count_copies,
    digest_of_items,
    find_helped,
)
from replicated_ckpt.stores.peer.client import AgentAddress


def plan_of(*names: str) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: torch.zeros(3) for name in names}, is_coordinator=True)
    return planner.create_local_plan()


def node(name: str) -> NodePost:
    return replace(NODE, node_id=name, host=name, address=AgentAddress(name, "h", 1, "token"))


NODE = NodePost("", "", "", "", "", AgentAddress("n", "h", 1, "token"))


def decision(node_by_rank: tuple[int, ...], copies: int = 2) -> SaveDecision:
    count = max(node_by_rank) + 1
    names = tuple(f"n{index}" for index in range(count))
    return SaveDecision("s", "c", 1, tuple(map(node, names)), node_by_rank, Placement(copies, (names,), ()))


def posts(one: SaveDecision, digests: str, tokens: dict[int, str] | None = None) -> list[SavePost]:
    return [
        SavePost("c", one.node_of(rank), plan_digest=digest.strip(), help_token=(tokens or {}).get(rank, ""))
        for rank, digest in enumerate(digests)
    ]


def test_a_tensor_that_was_equal_in_between_is_named_again() -> None:
    """A difference is named once while it lasts. A comparison of everything shows that it has ended."""
    check, everything = ReplicaCheck(16), Turn(0, 1)
    tensor, thing = (Divergence("w", (0,), 0, is_object, 0, ((0,), (1,))) for is_object in (False, True))
    thing = replace(thing, fqn="position")
    assert check.without_named([tensor, thing]) == [tensor, thing]
    check.note_committed(everything, [tensor, thing])
    check.note_committed(Turn(1, 16), [])  # this part did not have the tensor
    assert check.without_named([tensor, thing]) == []
    assert check.without_named_objects([tensor, thing]) == [tensor]
    check.note_committed(everything, [])
    assert check.without_named([tensor, thing]) == [tensor]


def test_a_rank_with_a_file_of_unchanged_entries_helps_but_is_not_helped() -> None:
    """A rank with a file of unchanged entries has no helpers, as they do not know its content. The rank still helps
    others.
    """
    one = decision((0, 0, 1, 1))
    given = posts(one, "aaaa")
    given[0] = replace(given[0], takes_copies=False)
    assert SavePost.from_json(given[0].to_json()) == given[0]
    chosen = HelpPlans().choose(one, given, [plan_of(f"w{rank}") for rank in range(4)])
    assert chosen.helpers[0] == ()
    assert all(chosen.helpers[1:])
    assert {rank for helpers in chosen.helpers for rank in helpers} >= {0}


def test_a_digest_is_of_names_places_and_sizes() -> None:
    """The digest of a plan is equal for equal items on any rank, and "" for no items."""
    assert digest_of_items(plan_of("a", "b").items) == digest_of_items(plan_of("a", "b").items)
    assert digest_of_items(plan_of("a", "b").items) != digest_of_items(plan_of("a").items)
    assert digest_of_items([]) == ""
    other = DefaultSavePlanner()
    other.set_up_planner({"a": torch.zeros(4)}, is_coordinator=True)
    assert digest_of_items(other.create_local_plan().items) != digest_of_items(plan_of("a").items)


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ("aaaa", ((2,), (3,), (0,), (1,))),  # one helper each
        ("abab", ((2,), (3,), (0,), (1,))),
        ("abba", ((3,), (2,), (1,), (0,))),
        ("ab a", ((3,), (), (), (0,))),
        ("abcd", ()),
        ("    ", ()),
    ],
)
def test_helpers_have_equal_plans_and_share_the_work(digests: str, expected: tuple[tuple[int, ...], ...]) -> None:
    """A helper has the same plan digest and is on the buddy node. A rank without a digest neither helps nor is helped."""
    one = decision((0, 0, 1, 1))
    chosen = HelpPlans().choose(one, posts(one, digests), [plan_of("a")] * 4)
    assert chosen.helpers == expected
    assert SaveDecision.from_json({**chosen.to_json(), "nodes": [], "upload": None}).helpers == expected
    assert find_helped(chosen, 0) == (frozenset({"n1"}) if expected else frozenset())


def test_plans_that_cannot_be_sent_get_no_help() -> None:
    """A rank with an empty plan is not helped, and a plan that torch's caching omits rules out all help. A planner with
    its own `finish_plan` has no digest.
    """
    one, full, none = decision((0, 1)), plan_of("a"), SavePlan([])
    assert HelpPlans().choose(one, posts(one, "aa"), [full, none]).helpers == ((1,), ())
    assert HelpPlans().choose(one, posts(one, "aa"), [full, SavePlan([], usable=False)]).helpers == ()

    class Remaking(DefaultSavePlanner):
        def finish_plan(self, new_plan: SavePlan) -> SavePlan:
            return SavePlan(new_plan.items)

    plans = HelpPlans()
    assert plans.digest_of(full.items) == "", "no planner was seen yet"
    plans.note_planner(Remaking())
    assert plans.digest_of(full.items) == ""
    plans.note_planner(CachedSavePlanner())
    assert plans.digest_of(full.items) == digest_of_items(full.items)


def test_pairs_that_differ_are_not_tried_again() -> None:
    """A pair whose values differed is not chosen again, and another rank of the node helps. An owner whose file
    differed gets no helper.
    """
    one, plans, finals = decision((0, 0, 1, 1)), HelpPlans(), [plan_of("a")] * 4
    plans.exclude([Divergence("w", (), 0, True, 0, ((0, 1, 3), (2,)))])
    assert plans.choose(one, posts(one, "aaaa"), finals).helpers == ((3,), (2,), (0,), (1,))
    plans.exclude_owners([0])
    assert plans.choose(one, posts(one, "aaaa"), finals).helpers == ((), (2,), (0,), (1,))


def test_unchanged_items_are_sent_once() -> None:
    """A helper gets the owner's items once, and again after a restart or when the items change."""
    one, coordinator, rank = decision((0, 1)), HelpPlans(), HelpPlans()
    finals = [plan_of("a"), plan_of("b")]
    chosen = coordinator.choose(one, posts(one, "xx"), finals)
    first = coordinator.add_to_plans(finals, chosen, posts(one, "xx"))[1].storage_data
    assert isinstance(first, HelpPlan)
    assert first.items_by_owner == {0: finals[0].items}
    assert rank.take(replace(finals[1], storage_data=first)) == {0: finals[0].items}
    again = coordinator.add_to_plans(finals, chosen, posts(one, "xx", {1: rank.token}))[1]
    assert again.storage_data == HelpPlan(first.token, None)
    assert rank.take(again) == {0: finals[0].items}
    assert HelpPlans().take(again) == {}, "better no items than those of another save"
    assert rank.take(finals[1]) == {}
    changed = coordinator.add_to_plans([plan_of("a"), finals[1]], chosen, posts(one, "xx", {1: rank.token}))[1]
    assert changed.storage_data.items_by_owner is not None


@pytest.mark.parametrize(
    ("copy", "missed"),
    [((10, 5), ""), ((10, 6), "other bytes than rank 0 saved"), ((9, 5), "other bytes"), (None, "could not write it")],
)
def test_a_copy_counts_if_it_is_the_same_file(copy: tuple[int, int] | None, missed: str) -> None:
    """A copy counts only if its size and checksum equal those in the owner's receipt."""
    one = replace(decision((0, 1)), helpers=((1,), ()))
    made = () if copy is None else (ShardReceipt("__0_0.distcp", *copy, ("n1",)),)
    receipts = [Receipt((ShardReceipt("__0_0.distcp", 10, 5, ("n0",)),)), Receipt(copies=made)]
    counted = count_copies(receipts, one)
    assert counted.receipts[0].shards[0].holders == (("n0",) if missed else ("n0", "n1"))
    assert counted.receipts[1] == receipts[1]
    assert counted.differing == ({0} if missed else set())
    assert [missed in text for text in counted.missed] == ([True] if missed else [])
    assert Receipt.from_json(receipts[1].to_json()) == receipts[1]
