"""The retention plan: what is removed, what stays and why, compared with a naive model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicated_ckpt import Retention
from replicated_ckpt.core.inventory import Holding
from replicated_ckpt.core.manifest import Manifest, NodeEntry, ShardEntry, WeightsEntry
from replicated_ckpt.core.upkeep.collection import find_whole_versions
from replicated_ckpt.core.upkeep.policy import NODES, NodeReport, Policy, merge_policies, pending, scope_of
from replicated_ckpt.core.upkeep.repair import NodeView, Presence, plan_repair
from replicated_ckpt.core.upkeep.retention import (
    Candidate,
    Removable,
    RetentionPlan,
    judge,
    plan_prune,
    plan_retention,
)
from replicated_ckpt.core.upkeep.unclaimed_files import UnclaimedFiles
from replicated_ckpt.errors import ConfigInvalid

UP, ASSUMED, GONE = Presence.UP, Presence.ASSUMED, Presence.GONE
LAST_TWO = Retention(keep_last=2)
NAMES = ("__0_0.distcp", "__1_0.distcp")


def save_id(number: int) -> str:
    return f"{number:032x}"


def candidate(
    sequence: int, *, of: str | None = None, whole: bool = True, protected: bool = True, held: str = ""
) -> Candidate:
    return Candidate(of or f"step-{sequence}", save_id(sequence), sequence, whole, whole and protected, held)


def scored(sequence: int, **metrics: float) -> Candidate:
    return replace(candidate(sequence), metrics=metrics)


def test_the_best_stays() -> None:
    """`keep_best` keeps the smallest or largest metric, of equals the newest. Incomplete checkpoints, NaN and missing
    metrics do not count.
    """
    saves = [
        scored(1, loss=3.0),
        scored(2, loss=1.0),
        scored(3, loss=1.0),
        scored(4, loss=float("nan")),
        scored(5),
        scored(6),
    ]
    last_one = Retention(keep_last=1)
    assert removed_by(saves, last_one) == {1, 2, 3, 4, 5}
    assert removed_by(saves, replace(last_one, keep_best="loss")) == {1, 2, 4, 5}
    assert removed_by(saves, replace(last_one, keep_best="loss", best_is="max")) == {2, 3, 4, 5}
    assert removed_by(saves, replace(last_one, keep_best="accuracy")) == {1, 2, 3, 4, 5}
    endless = scored(7, loss=float("-inf"))
    assert removed_by([endless, *saves, scored(8)], replace(last_one, keep_best="loss")) == {1, 2, 4, 5, 6, 7}
    lost = [*saves[:2], replace(saves[2], is_whole=False, is_protected=False), *saves[3:]]
    assert removed_by(lost, replace(last_one, keep_best="loss")) == {1, 3, 4, 5}


def test_multiples_of_a_period_of_steps_stay() -> None:
    """`keep_period` uses the number at the end of the id. Of a step saved twice, the newest complete version stays."""
    ids = ["run/step-0500", "run/step-1000", "run/step-1000", "run/step-1000", "run/best", "run/step-1500", "run/2000"]
    saves = [candidate(number, of=name, whole=number != 4) for number, name in enumerate([*ids, "run/step-2001"], 1)]
    last_one = Retention(keep_last=1)
    assert removed_by(saves, last_one) == {1, 2, 3, 4, 5, 6, 7}
    assert removed_by(saves, replace(last_one, keep_period=1000)) == {1, 2, 5, 6}
    assert removed_by(saves, replace(last_one, keep_period=1000, keep_every=6)) == {1, 2, 5}
    why = {one.sequence: one.rule for one in judge(saves, replace(last_one, keep_period=1000))}
    assert why[3] == "its step 1000 is a multiple of 1000"
    assert why[6].endswith("and its step is not a multiple of 1000")


@pytest.mark.parametrize("bad", [0, True, 1.5, "1000"])
def test_an_invalid_period_is_refused(bad: Any) -> None:
    """An invalid `keep_period` of the user or a peer is refused."""
    with pytest.raises(ConfigInvalid, match="keep_period"):
        Retention(keep_last=1, keep_period=bad)
    fields = Policy("", NODES, 3, Retention(keep_last=2, keep_period=100)).to_json()
    assert Policy.from_json(fields).retention == Retention(keep_last=2, keep_period=100)
    fields["retention"]["keep_period"] = bad
    with pytest.raises(ConfigInvalid, match="keep_period"):
        Policy.from_json(fields)


def test_a_policy_with_keep_best_decodes_unchanged() -> None:
    """A policy with `keep_best` decodes from JSON unchanged. A policy of an older agent has no `keep_best`."""
    policy = Policy("", NODES, 3, Retention(keep_last=2, keep_best="loss", best_is="max"))
    assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    fields = policy.to_json()
    fields["retention"] = {"keep_last": 2, "keep_every": None}
    assert Policy.from_json(fields).retention == Retention(keep_last=2)


def with_optimizer(sequence: int, **kinds: Any) -> Candidate:
    return replace(candidate(sequence, **kinds), is_full=True, can_slim=True)


def slimmed_by(candidates: Sequence[Candidate], retention: Retention) -> set[int]:
    verdicts = judge(candidates, retention)
    assert all(verdict.is_kept for verdict in verdicts if verdict.drops_optimizer)
    return {verdict.sequence for verdict in verdicts if verdict.drops_optimizer}


def test_older_checkpoints_keep_their_weights_alone() -> None:
    """With `full_last`, all but the newest complete full checkpoints drop their optimizer, also those that other rules
    keep.
    """
    saves = [with_optimizer(number) for number in range(1, 7)]
    policy = Retention(keep_last=4, keep_every=2, full_last=2)
    assert removed_by(saves, policy) == {1}
    assert slimmed_by(saves, policy) == {2, 3, 4}
    assert slimmed_by(saves, Retention(keep_last=4)) == set()
    best = [replace(saves[0], metrics={"loss": 0.5}), *saves[1:]]
    assert slimmed_by(best, Retention(keep_last=2, keep_best="loss", full_last=1)) == {1, 5}
    (oldest,) = (verdict for verdict in judge(saves, policy) if verdict.sequence == 2)
    assert "it keeps only its weights: its sequence is below 5, the lowest of the newest 2 full checkpoints" in str(
        oldest
    )


def test_what_keeps_its_optimizer() -> None:
    """A checkpoint keeps its optimizer if it is incomplete, held back, already slim or the newest with all copies, or
    if too few are full.
    """
    policy = Retention(keep_last=9, full_last=2)
    assert slimmed_by([with_optimizer(1), with_optimizer(2)], policy) == set()
    assert slimmed_by([with_optimizer(1), with_optimizer(2), with_optimizer(3, whole=False)], policy) == set()
    assert slimmed_by([candidate(5), with_optimizer(1), with_optimizer(2)], policy) == set()
    newer = [with_optimizer(8), with_optimizer(9)]
    assert slimmed_by([with_optimizer(1), *newer], policy) == {1}
    assert slimmed_by([with_optimizer(1, whole=False), *newer], policy) == set()
    assert slimmed_by([with_optimizer(1, held="wait"), *newer], policy) == set()
    assert slimmed_by([candidate(1), *newer], policy) == set()
    single = [with_optimizer(8, protected=False), with_optimizer(9, protected=False)]
    assert slimmed_by([with_optimizer(1), with_optimizer(2), *single], policy) == {1}
    assert slimmed_by([replace(candidate(1), can_slim=True), *newer], policy) == {1}, (
        "some nodes still have the optimizer"
    )


def test_full_last_is_checked_and_decodes_unchanged() -> None:
    """`full_last` must be 1 to `keep_last`, and decodes from JSON unchanged. `prune` to fewer checkpoints accepts such
    a policy.
    """
    for wrong in (0, 3, True, "2"):
        with pytest.raises(ConfigInvalid, match="full_last"):
            Retention(keep_last=2, full_last=wrong)  # type: ignore[arg-type]
    policy = Policy("", NODES, 3, Retention(keep_last=4, full_last=2))
    assert Policy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    saves = [Removable(with_optimizer(number), "a" * 16) for number in range(1, 5)]
    verdicts = plan_prune(saves, Retention(keep_last=1), lambda _: policy.retention)
    assert [verdict.sequence for verdict in verdicts if verdict.is_kept] == [4]


def removed_by(candidates: Sequence[Candidate], retention: Retention) -> set[int]:
    return {verdict.sequence for verdict in judge(candidates, retention) if not verdict.is_kept}


def naive_model(candidates: Sequence[Candidate], retention: Retention) -> set[int]:
    """A naive model of the policy: the sequences of the checkpoints that no rule keeps."""
    gone = set()
    for one in candidates:
        newer_whole = {other.checkpoint_id for other in candidates if other.is_whole and other.sequence > one.sequence}
        is_newest_protected = one.is_protected and not any(
            other.is_protected and other.sequence > one.sequence for other in candidates
        )
        keeping_rules = (
            len(newer_whole) < retention.keep_last,
            retention.keep_every is not None and one.sequence % retention.keep_every == 0,
            bool(one.held_back),
            is_newest_protected,
        )
        if not any(keeping_rules):
            gone.add(one.sequence)
    return gone


def test_every_small_case_is_judged_as_by_the_model() -> None:
    """Up to five saves, complete or not, with all copies or not, held back or not, under every small policy."""
    kinds: list[dict[str, Any]] = [
        {"whole": False},
        {"whole": True, "protected": False},
        {"whole": True, "protected": False, "held": "wait"},
        {"whole": True, "protected": True},
    ]
    for count in range(6):
        for world in product(kinds, repeat=count):
            candidates = [candidate(number, **kind) for number, kind in enumerate(world, 1)]
            for last, every in product((1, 2, 3), (None, 1, 2, 3)):
                retention = Retention(keep_last=last, keep_every=every)
                found = removed_by(candidates, retention)
                assert found == naive_model(candidates, retention), (candidates, retention)
                check_promises(candidates, retention, found)


def check_promises(candidates: Sequence[Candidate], retention: Retention, gone: set[int]) -> None:
    """Guarantees that hold under every policy."""
    assert not candidates or len(gone) < len(candidates)
    whole = sorted({one.sequence for one in candidates if one.is_whole}, reverse=True)
    assert not gone & set(whole[: retention.keep_last])
    assert not gone or all(sequence < whole[0] for sequence in gone)
    assert not any(one.held_back and one.sequence in gone for one in candidates)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abcd"), st.booleans(), st.booleans(), st.booleans())),
    st.integers(1, 4),
    st.none() | st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_overwrites_and_equal_sequences(
    drawn: list[tuple[int, str, bool, bool, bool]], last: int, every: int | None, chance: Random
) -> None:
    """Several saves of one id count once, and the order of the list does not matter."""
    retention = Retention(keep_last=last, keep_every=every)
    candidates = [
        Candidate(name, save_id(number), sequence, whole, whole and protected, "wait" if held else "")
        for number, (sequence, name, whole, protected, held) in enumerate(drawn)
    ]
    verdicts = judge(candidates, retention)
    shuffled = list(candidates)
    chance.shuffle(shuffled)
    assert judge(shuffled, retention) == verdicts
    gone = {verdict.save_id for verdict in verdicts if not verdict.is_kept}
    newest_by_id = {
        name: max((one.sequence for one in candidates if one.is_whole and one.checkpoint_id == name), default=None)
        for name in "abcd"
    }
    for one in candidates:
        if one.save_id in gone:
            newer = [sequence for sequence in newest_by_id.values() if sequence is not None and sequence > one.sequence]
            assert len(newer) >= last
            assert every is None or one.sequence % every
            assert not one.held_back


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_last": True}, {"keep_last": 1, "keep_every": 0}])
def test_a_policy_that_keeps_nothing_is_refused(wrong: dict[str, Any]) -> None:
    """`keep_last` and `keep_every` must be integers from 1."""
    with pytest.raises(ConfigInvalid):
        Retention(**wrong)


# The nodes' plan ---------------------------------------------------------------------------------------------------


def manifest(sequence: int, *, checkpoint_id: str | None = None, copies: int = 2) -> Manifest:
    shards = {name: ShardEntry(100, 7, rank, "ab"[rank], ("a", "b")) for rank, name in enumerate(NAMES)}
    nodes = tuple(NodeEntry(node, node, None, (rank,)) for rank, node in enumerate("ab"))
    name = checkpoint_id or f"step-{sequence}"
    return Manifest(save_id(sequence), name, sequence, 0.0, 2, copies, 8, 9, nodes, shards)


def holding(node: str, of: Manifest, shards: Sequence[str] = NAMES, *, renamed: str = "") -> Holding:
    sizes = dict.fromkeys(shards, 100)
    return Holding(node, renamed or of.checkpoint_id, of.save_id, of.sequence, True, sizes)


def policy(retention: Retention | None, *, scope: str = "", revision: int = 1) -> Policy:
    return Policy(scope, NODES, revision, retention)


FOUR = [manifest(number) for number in (1, 2, 3, 4)]


def by_save(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    return {one.save_id: one for one in manifests}


def view(node: str, manifests: Sequence[Manifest], presence: Presence = UP, **more: Any) -> NodeView:
    return NodeView(node, presence, tuple(holding(node, one) for one in manifests), **more)


def removed(plan: RetentionPlan) -> list[tuple[str, str]]:
    return [(removal.node_id, removal.checkpoint_id) for removal in plan.removals]


def test_each_node_removes_its_part_oldest_first() -> None:
    """Each node removes its own holdings, oldest first. The reason has the rule, and the plan prints."""
    plan = plan_retention(by_save(FOUR), [view("a", FOUR), view("b", FOUR)], [policy(LAST_TWO)])
    assert [removal.checkpoint_id for removal in plan.of_node("a")] == ["step-1", "step-2"]
    assert plan.of_node("a")[0].rule == "its sequence 1 is below 3, the lowest of the newest 2 complete checkpoints"
    assert removed(plan) == [("a", "step-2"), ("b", "step-2"), ("a", "step-1"), ("b", "step-1")]
    assert "node a: remove step-1" in str(plan.of_node("a")[0])
    assert "step-4" in str(plan.verdicts[0])


def full(sequence: int) -> Manifest:
    """A manifest with a file of weights and a file of the optimizer for each rank."""
    found = manifest(sequence)
    both = {name.replace("_0.distcp", f"_{part}.distcp"): one for name, one in found.shards.items() for part in (0, 1)}
    return replace(found, shards=both, weights=WeightsEntry(2, 3, 0, 0, ("optim",)))


def view_of_full(node: str, full_ones: Sequence[Manifest], slim_ones: Sequence[Manifest] = (), **more: Any) -> NodeView:
    """A view of a node with all files of `full_ones`, and without the optimizer of `slim_ones`."""
    held = [holding(node, one, tuple(one.shards)) for one in full_ones]
    held += [replace(holding(node, one), is_slim=True) for one in slim_ones]
    return NodeView(node, more.pop("presence", UP), tuple(held), **more)


def slimmed(plan: RetentionPlan) -> list[tuple[str, str]]:
    return [(one.node_id, one.checkpoint_id) for one in plan.slimmings]


def test_each_node_drops_its_part_of_an_optimizer() -> None:
    """Each node drops its own files, also if others already have, but not of replaced versions. In doubt, only
    checkpoints before a full one with all copies are slimmed.
    """
    saves = [full(number) for number in (1, 2, 3)]
    manifests, kept = by_save(saves), [policy(Retention(keep_last=3, full_last=1))]
    plan = plan_retention(manifests, [view_of_full("a", saves), view_of_full("b", saves)], kept)
    assert slimmed(plan) == [("a", "step-2"), ("b", "step-2"), ("a", "step-1"), ("b", "step-1")]
    assert [one.checkpoint_id for one in plan.of_node("a")] == ["step-1", "step-2"]
    assert "node a: remove the optimizer of step-1" in str(plan.of_node("a")[0])
    assert removed(plan) == []
    assert slimmed(plan.only({saves[0].save_id})) == [("a", "step-1"), ("b", "step-1")]
    mixed = {**manifests, saves[0].save_id: saves[0].slimmed()}
    views = [view_of_full("a", saves[1:], saves[:1]), view_of_full("b", saves)]
    assert slimmed(plan_retention(mixed, views, kept)) == [("a", "step-2"), ("b", "step-2"), ("b", "step-1")]
    assert plan_repair(mixed, views).is_complete
    aside = NodeView("a", UP, tuple(replace(one, is_replaced=True) for one in view_of_full("a", saves).holdings or ()))
    assert slimmed(plan_retention(manifests, [aside, view_of_full("b", saves)], kept)) == [
        ("b", "step-2"),
        ("b", "step-1"),
    ]
    alone = [view_of_full("a", saves), view_of_full("b", saves[:2]), view_of_full("c", (), presence=ASSUMED)]
    assert slimmed(plan_retention(manifests, alone, kept, in_doubt=True)) == [("a", "step-1"), ("b", "step-1")]
    assert plan_retention(manifests, alone, [policy(Retention(keep_last=3))]).slimmings == ()


def test_without_a_policy_nothing_is_removed() -> None:
    """Without a policy nothing is removed, nor with a policy that keeps everything, or a policy of another directory or
    tier.
    """
    elsewhere = Policy("", "s3://bucket/x", 1, LAST_TWO)
    for policies in ([], [policy(None)], [policy(LAST_TWO, scope="run-2")], [elsewhere]):
        plan = plan_retention(by_save(FOUR), [view("a", FOUR)], policies)
        assert plan.removals == ()
        assert plan.retired == frozenset()


def test_runs_in_directories_do_not_count_together() -> None:
    """A policy applies to the checkpoints of one directory, not to those above or below."""
    mine = [manifest(number, checkpoint_id=f"run/step-{number}") for number in (1, 2, 3)]
    below = [manifest(number, checkpoint_id=f"run/deep/step-{number}") for number in (11, 12, 13)]
    above = [manifest(number) for number in (21, 22, 23)]
    saves = [*mine, *below, *above]
    plan = plan_retention(by_save(saves), [view("a", saves)], [policy(LAST_TWO, scope="run")])
    assert removed(plan) == [("a", "run/step-1")]
    assert scope_of("run/deep/step-1") == "run/deep"


def test_while_a_node_is_silent_only_unneeded_checkpoints_are_removed() -> None:
    """While a node is silent, a checkpoint is removed only if the newest two have all copies without that node. A part
    is kept if that node may have the rest.
    """
    silent = NodeView("c", ASSUMED, None)

    def removed_by(*views: NodeView) -> set[str]:
        plan = plan_retention(by_save(FOUR), [*views, silent], [policy(LAST_TWO)], in_doubt=True)
        return {checkpoint_id for _, checkpoint_id in removed(plan)}

    part = replace(
        view("a", FOUR), holdings=(holding("a", FOUR[0], NAMES[:1]), *(holding("a", one) for one in FOUR[1:]))
    )
    assert removed_by(view("a", FOUR), view("b", FOUR)) == {"step-1", "step-2"}
    assert removed_by(part, view("b", FOUR[1:])) == {"step-2"}
    assert removed_by(view("a", FOUR), view("b", FOUR[:3])) == {"step-1"}
    assert removed_by(view("a", FOUR), view("b", [])) == set()
    assert removed_by(part) == {"step-2"}


def test_the_only_answering_node_removes_what_is_older_than_its_complete_checkpoints() -> None:
    """A single answering node removes what is older than its own complete checkpoints, but nothing if the newest are
    incomplete there.
    """
    silent = NodeView("c", ASSUMED, None)
    plan = plan_retention(by_save(FOUR), [view("a", FOUR), silent], [policy(LAST_TWO)], in_doubt=True)
    assert removed(plan) == [("a", "step-2"), ("a", "step-1")]
    part = tuple(holding("a", one, NAMES[:1]) for one in FOUR[2:])
    halves = replace(view("a", FOUR), holdings=(*(holding("a", one) for one in FOUR[:2]), *part))
    assert plan_retention(by_save(FOUR), [halves, silent], [policy(LAST_TWO)], in_doubt=True).removals == ()


def test_an_incomplete_checkpoint_does_not_count() -> None:
    """An incomplete newer checkpoint does not count for `keep_last`. An incomplete older one is removed."""
    broken = replace(
        view("a", FOUR), holdings=tuple(holding("a", one, NAMES[: 1 + (one.sequence in (1, 3))]) for one in FOUR)
    )
    plan = plan_retention(by_save(FOUR), [broken], [policy(Retention(keep_last=1))])
    assert removed(plan) == [("a", "step-2"), ("a", "step-1")]
    assert plan_retention(by_save(FOUR), [broken], [policy(Retention(keep_last=3))]).removals == ()
    damaged = replace(broken, holdings=tuple(replace(h, damaged=NAMES[:1]) for h in broken.holdings or ()))
    assert plan_retention(by_save(FOUR), [damaged], [policy(Retention(keep_last=1))]).removals == ()


def test_a_copy_is_seen_intact_by_its_size_until_a_read_finds_damage() -> None:
    """An older version may go once each shard of the newer has one copy of the right size without known damage."""
    new = manifest(1)

    def is_whole(*holdings: Holding) -> bool:
        views = [NodeView(held.node_id, UP, (held,)) for held in holdings]
        return bool(find_whole_versions(by_save([new]), views, may_be_short=True))

    first, second = holding("a", new), holding("b", new)
    noted = replace(first, damaged=NAMES[:1])
    shorter = replace(second, sizes={**second.sizes, NAMES[0]: second.sizes[NAMES[0]] - 1})
    assert is_whole(first)
    assert is_whole(noted, second)
    assert not is_whole(noted)
    assert not is_whole(noted, shorter)


def test_the_newest_version_needs_all_possible_copies_to_replace_others() -> None:
    """The newest version must have all possible copies before it replaces older ones. Otherwise one fault could damage
    both.
    """
    older, newest = [replace(one, checkpoint_id="last") for one in FOUR[:2]]
    newest = replace(newest, shards={name.replace("_0.", "_1."): entry for name, entry in newest.shards.items()})
    versions = [older, newest]

    def holding(node: str, of: Manifest) -> Holding:
        return Holding(node, "last", of.save_id, of.sequence, True, dict.fromkeys(of.shards, 100))

    def whole(*held: Manifest, nodes: Sequence[str] = "ab", **options: bool) -> list[str]:
        first = NodeView("a", UP, tuple(holding("a", one) for one in versions))
        views = [first, *(NodeView(node, UP, tuple(holding(node, one) for one in held)) for node in nodes[1:])]
        found = find_whole_versions(by_save(versions), views, **options)
        return [version.save_id for version in found.get("last", ())]

    assert whole() == [older.save_id]
    assert whole(older) == [older.save_id]
    assert whole(newest) == [older.save_id, newest.save_id]
    assert whole(nodes="a") == [older.save_id, newest.save_id], "no other node can have a copy"
    assert whole(may_be_short=True) == [older.save_id, newest.save_id]


def test_a_node_that_cannot_have_a_copy_is_not_waited_for() -> None:
    """A leaving node, or one with another run's checkpoint of that name, is not required to have a copy."""
    older, newest = versions = [replace(one, checkpoint_id="last") for one in FOUR[:2]]
    first = NodeView("a", UP, tuple(holding("a", one) for one in versions))

    def may_give_way(other: NodeView) -> bool:
        return len(find_whole_versions(by_save([older, newest]), [first, other])["last"]) == 2

    rival = replace(holding("b", newest), save_id=save_id(90), lineage="b" * 16)
    assert may_give_way(NodeView("b", UP, (), is_leaving=True))
    assert may_give_way(NodeView("b", UP, (rival,)))
    assert not may_give_way(NodeView("b", UP, (replace(rival, checkpoint_id="first"),)))
    aside = replace(rival, is_replaced=True)
    assert may_give_way(NodeView("b", UP, (aside,))), "its files have the names of the copy"
    assert not may_give_way(NodeView("b", UP, (replace(aside, sizes={"__0_9.distcp": 1}),)))


def test_copies_on_nodes_that_do_not_answer_do_not_count() -> None:
    """A checkpoint that is complete only with silent nodes does not count for `keep_last`."""
    a = NodeView("a", UP, tuple(holding("a", one, NAMES[: 1 + (one.sequence < 4)]) for one in FOUR))
    for presence in (ASSUMED, GONE):
        plan = plan_retention(by_save(FOUR), [a, view("b", FOUR, presence)], [policy(Retention(keep_last=1))])
        assert removed(plan) == [("a", "step-2"), ("a", "step-1")]


def test_the_newest_with_all_its_copies_waits_for_the_copies_of_a_newer_one() -> None:
    """The newest checkpoint with all copies stays until a newer one has all its copies, as with ack="local"."""
    a = NodeView("a", UP, tuple(holding("a", one, NAMES[: 1 + (one.sequence < 4)]) for one in FOUR))
    b = NodeView("b", UP, tuple(holding("b", one, NAMES[one.sequence == 4 :]) for one in FOUR))
    plan = plan_retention(by_save(FOUR), [a, b], [policy(Retention(keep_last=1))])
    assert plan.retired == {save_id(1), save_id(2)}
    plan = plan_retention(by_save(FOUR), [view("a", FOUR), view("b", FOUR)], [policy(Retention(keep_last=1))])
    assert plan.retired == {save_id(1), save_id(2), save_id(3)}


def test_a_version_stays_as_long_as_the_one_that_it_has_replaced() -> None:
    """A version stays while the older one that it replaced stays. Otherwise a load of the id would return the older
    one.
    """
    versions = [manifest(1, checkpoint_id="step"), manifest(2, checkpoint_id="step"), manifest(3)]
    a, b = view("a", versions), view("b", versions[:1])
    plan = plan_retention(by_save(versions), [a, b], [policy(Retention(keep_last=1))])
    assert plan.retired == frozenset()
    plan = plan_retention(by_save(versions), [a, view("b", versions)], [policy(Retention(keep_last=1))])
    assert plan.retired == {save_id(1), save_id(2)}
    assert plan.of_node("a")[0].save_id == save_id(1), "the older version is removed first"


def test_a_checkpoint_stays_until_it_is_uploaded() -> None:
    """A checkpoint stays while any node reports a pending upload. One report of `uploaded` ends that, except against an
    order by hand.
    """
    one, two = save_id(1), save_id(2)
    waits = NodeReport(uploading=frozenset({one, two}))
    over = NodeReport(uploaded=frozenset({one}))
    ordered = NodeReport(uploading=frozenset({one}), ordered=frozenset({one}))
    for node_reports, expected in (
        ((waits, NodeReport()), set()),
        ((waits, over), {one}),
        ((waits, over, ordered), set()),
        ((NodeReport(), NodeReport()), {one, two}),
    ):
        views = [view(node, FOUR, node_report=said) for node, said in zip("abc", node_reports, strict=False)]
        plan = plan_retention(by_save(FOUR), views, [policy(LAST_TWO)])
        assert plan.retired == expected
        assert {verdict.save_id for verdict in plan.held_back} == {one, two} - expected
    assert pending([waits, over]) == {two}


def test_a_lost_manifest_is_repaired_before_a_removal() -> None:
    """A checkpoint whose manifest a node has lost is repaired before it is removed. Otherwise that node's files would
    stay for good.
    """
    views = [view("a", FOUR), view("b", FOUR[1:], unclaimed=(UnclaimedFiles("b", "step-1", is_ours=True),))]
    plan = plan_retention(by_save(FOUR), views, [policy(LAST_TWO)])
    assert plan.retired == {save_id(2)}
    restored = plan_repair(by_save(FOUR), views, going=plan.retired).restore
    assert [action.checkpoint_id for action in restored] == ["step-1"]


def test_unknown_manifests_and_renamed_directories_are_not_touched() -> None:
    """Renamed directories and saves without a read manifest are neither removed nor counted. A renamed one is repaired
    under its new name only.
    """
    views = [
        NodeView("a", UP, (holding("a", FOUR[0], renamed="best"), *(holding("a", one) for one in FOUR[1:]))),
        view("b", FOUR),
    ]
    known = by_save(FOUR)
    plan = plan_retention(known, views, [policy(LAST_TWO)])
    assert removed(plan) == [("a", "step-2"), ("b", "step-2"), ("b", "step-1")]
    after = [NodeView("a", UP, (holding("a", FOUR[0], renamed="best"),)), NodeView("b", UP, ())]
    kept = view("a", FOUR[2:]), view("b", FOUR[2:])
    views = [
        replace(one, holdings=(one.holdings or ()) + (two.holdings or ())) for one, two in zip(after, kept, strict=True)
    ]
    plan = plan_retention(known, views, [policy(LAST_TWO)])
    assert plan.removals == ()
    assert {action.checkpoint_id for action in plan_repair(known, views, going=plan.retired).actions} == {"best"}
    del known[save_id(4)]
    assert plan_retention(known, [view("a", FOUR)], [policy(LAST_TWO)]).retired == {save_id(1)}


def test_a_retired_checkpoint_is_not_copied_back() -> None:
    """A retired checkpoint that one node still has is removed there, and not copied to others."""
    views = [view("a", FOUR[2:]), view("b", FOUR)]
    plan = plan_retention(by_save(FOUR), views, [policy(LAST_TWO)])
    assert removed(plan) == [("b", "step-2"), ("b", "step-1")]
    assert plan_repair(by_save(FOUR), views).actions != ()
    assert plan_repair(by_save(FOUR), views, going=plan.retired).actions == ()


world = st.lists(st.tuples(st.sets(st.sampled_from(NAMES)), st.sets(st.sampled_from(NAMES))), min_size=1, max_size=6)


@given(world, st.integers(1, 3), st.none() | st.integers(2, 3), st.lists(st.booleans()))
def test_nodes_that_retire_one_after_the_other_end_alike(
    held: list[tuple[set[str], set[str]]], last: int, every: int | None, turns: list[bool]
) -> None:
    """In any order of turns, kept checkpoints stay on their nodes, and the last plan removes nothing."""
    manifests = by_save([manifest(number) for number in range(1, len(held) + 1)])
    stores = {
        node: {
            one.save_id: holding(node, one, sorted(shards[index]))
            for one, shards in zip(manifests.values(), held, strict=True)
            if shards[index]
        }
        for index, node in enumerate("ab")
    }
    retention = [policy(Retention(keep_last=last, keep_every=every))]

    def look() -> RetentionPlan:
        return plan_retention(manifests, [NodeView(n, UP, tuple(s.values())) for n, s in stores.items()], retention)

    first = look()
    for turn in [*turns, True, False, True, False]:
        for removal in look().of_node("ab"[turn]):
            del stores[removal.node_id][removal.save_id]
    assert look().removals == ()
    for store in stores.values():
        assert not first.retired & set(store)
    for verdict in first.verdicts:
        if verdict.is_kept:
            index = verdict.sequence - 1
            assert [verdict.save_id in stores[n] for n in "ab"] == [bool(held[index][0]), bool(held[index][1])]


# Policies ----------------------------------------------------------------------------------------------------------

policies = st.builds(policy, st.none() | st.builds(Retention, keep_last=st.integers(1, 3)), revision=st.integers(0, 3))


@given(policies, policies, policies)
def test_policies_merge_alike_in_any_order(one: Policy, two: Policy, three: Policy) -> None:
    """The later policy wins. Two different ones of one revision keep everything."""
    assert merge_policies(one, two) == merge_policies(two, one)
    assert merge_policies(merge_policies(one, two), three) == merge_policies(one, merge_policies(two, three))
    assert merge_policies(one, one) == one
    if one.revision == two.revision and one.retention != two.retention:
        assert merge_policies(one, two).retention is None


@given(policies)
def test_a_report_decodes_unchanged(one: Policy) -> None:
    """A report decodes from JSON unchanged. Fields that an older agent omits are empty."""
    said = NodeReport((one,), frozenset({save_id(1)}), frozenset({save_id(2)}), frozenset({save_id(1)}))
    assert NodeReport.from_json(json.loads(json.dumps(said.to_json()))) == said
    assert NodeReport.from_json({}) == NodeReport()


@pytest.mark.parametrize(
    "wrong",
    [
        {"scope": "../x"},
        {"scope": ".agent"},
        {"revision": -1},
        {"revision": 1 << 60},
        {"revision": "1"},
        {"retention": {"keep_last": 0, "keep_every": None}},
        {"retention": 3},
    ],
)
def test_an_invalid_policy_is_refused(wrong: dict[str, object]) -> None:
    """A peer's policy with an invalid scope, revision or retention is refused."""
    with pytest.raises((ValueError, TypeError, KeyError, ConfigInvalid)):
        Policy.from_json({**policy(LAST_TWO).to_json(), **wrong})
